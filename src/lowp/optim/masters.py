"""Optimizers around other ones: the model stores few bits, and the optimizer inside sees fp32."""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lowp.casts import Cast
from lowp.compat import skipped_by_compilers
from lowp.errors import InvalidInput
from lowp.ops.observing import Watch
from lowp.optim.model_state import MasterKeeper, ParameterNames, own
from lowp.optim.shards import is_sharded, is_zero, local, local_parts, places_of
from lowp.optim.skipping import begin_momentum, flagged
from lowp.optim.state_dicts import COUNTERS, OF_MASTERS, Checkpointed, entries_by_parameter, parameters_of
from lowp.optim.storage import MASTER_WEIGHT, Storage, check_seed, seed_of


class Wrapper(MasterKeeper, Checkpointed):
    """An optimizer whose parameter groups, defaults and state are those of `inner`, with parameters in a `storage`.

    A subclass implements `step`. Raises TypeError for anything other than a torch optimizer.
    """

    inner: torch.optim.Optimizer

    def __init__(self, optimizer: torch.optim.Optimizer, storage: Storage) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"{type(self).__name__} wraps a torch optimizer, not {type(optimizer).__name__}")
        self.inner, self.storage = optimizer, storage
        self._master_state: dict[Tensor, dict[str, Tensor]] = {}  # what is kept of each parameter
        # groups, state and defaults ARE the inner optimizer's, so only the hooks of the base class are set up
        torch.optim.Optimizer.__setstate__(self, {"defaults": optimizer.defaults})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's groups, with the model's parameters."""
        return self.inner.param_groups

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The inner optimizer's state."""
        return self.inner.state

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add a group; its parameters are converted to the storage format."""
        self.inner.add_param_group(group)
        self._adopt()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop (or zero) the gradients of the model's parameters."""
        self.inner.zero_grad(set_to_none)

    def holds(self, parameter: Tensor) -> bool:
        """Whether a tensor is a parameter of this optimizer."""
        return parameter in self._master_state

    def _kept(self, parameter: Tensor) -> dict[str, Tensor]:
        return self._master_state[parameter]

    @abstractmethod
    def _adopt(self) -> None:
        """Convert the parameters that have not been converted."""

    def __getstate__(self) -> dict[str, Any]:
        hooks = [name for name in self.__dict__ if name.startswith("_optimizer_")]  # not copied, as in torch
        return {name: value for name, value in self.__dict__.items() if name not in hooks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        own(self, self._master_state)


class MasterWeights(Wrapper):
    """Stores an optimizer's parameters in few bits and lets the optimizer update fp32 master weights.

    `storage` is the format: ``bf16``, ``fp16``, or any float format, which is carried in fp32. `kind` is the kind of
    master weights: ``fp32`` (a copy), ``split`` (bf16 and a 16-bit remainder, 4 bytes in all), ``stochastic`` (none;
    the update is rounded stochastically from `seed` and the step, identically on all ranks) or ``none`` (rounded to
    nearest, so that updates below half an ulp are lost). The parameters are converted in place by the constructor, but
    complex ones, which no format stores: the optimizer steps these as they are.

    The wrapper is an optimizer. Its `param_groups` are those of the inner optimizer and hold the model's parameters, so
    that schedulers, clipping and loss scalers work on them. Gradients may be in the storage format or in fp32.
    `attach(model)` makes `model.state_dict()` return, and `load_state_dict` take, fp32. Closures are supported, and
    sparse gradients if the inner optimizer supports them.

    Source: Micikevicius et al. 2018, arXiv 1710.03740, section 3.1.
    """

    allows_fp16_gradients = True  # which a loss scaler may pass, or replace by fp32 ones

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        storage: str | Cast | None = "bf16",
        *,
        kind: str = "fp32",
        seed: int = 0,
    ) -> None:
        if isinstance(optimizer, MasterWeights):
            raise InvalidInput("the optimizer already has master weights: wrap its inner optimizer instead")
        if is_zero(optimizer):
            raise InvalidInput(
                "a ZeroRedundancyOptimizer cannot be wrapped, because each rank steps only its own share: "
                "convert the model first, precision.prepare_model(model), and give "
                "ZeroRedundancyOptimizer(model.parameters(), optimizer_class=lowp.optim.AdamW), which keeps masters "
                "for its share"
            )
        check_seed(seed)
        super().__init__(optimizer, Storage.parse(storage, kind))
        self.seed = seed
        self.steps = 0
        self._steps_there: dict[torch.device, Tensor] = {}
        self.names = ParameterNames()
        self._masters: dict[Tensor, nn.Parameter] = {}
        self._adopt()

    # -- an optimizer's face --------------------------------------------------------------------------------------
    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The inner optimizer's state, by model parameter, with what is kept beside the parameter for its master."""
        stored: dict[Tensor, Tensor] = {master: parameter for parameter, master in self._masters.items()}
        found: defaultdict[Tensor, Any] = defaultdict(dict)
        for key, value in self.inner.state.items():
            parameter = stored.get(key, key)
            found[parameter] = {**value, **self._master_state.get(parameter, {}), **self._counters()}
        return found

    def _steps_on(self, device: torch.device) -> int | Tensor:
        """Return the number of steps: on an accelerator an int64 tensor, which a captured graph can increment.

        The first step that draws random numbers creates the tensor; it must come before a graph is captured.
        """
        if device.type == "cpu":
            return self.steps
        if device not in self._steps_there:
            self._steps_there[device] = torch.full((), self.steps, dtype=torch.int64, device=device)
        return self._steps_there[device]

    def _counters(self) -> dict[str, int]:
        return dict(zip(COUNTERS, (self.steps, self.seed), strict=True))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return bool(getattr(self.inner, "_step_supports_amp_scaling", False))

    @skipped_by_compilers
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the masters from the parameters' gradients and write them back, rounded to the storage format."""
        if not self._masters.keys() >= set(self._storable()):  # a group was added to the inner optimizer itself
            self._adopt()
        with torch.no_grad():  # take over what the script has written into the parameters since the last step
            self.storage.follow_([(local(one), local_parts(state)) for one, state in self._master_state.items()])
        told = {} if self.storage.cast is None else self.names.watches(self._masters, self)
        amp = {name: getattr(self, name) for name in ("grad_scale", "found_inf") if hasattr(self, name)}
        with self._on_masters():
            self._hand_over_gradients()
            if amp:
                begin_momentum(self.inner)
            with flagged(self.inner, **amp):
                result = self.inner.step() if closure is None else self.inner.step(self._around(closure))
            self.steps += 1
            for there in self._steps_there.values():
                there.add_(1)
            self._write_back(told)
        return result

    # -- masters --------------------------------------------------------------------------------------------------
    def _storable(self) -> list[Tensor]:
        """Return the parameters that have masters: all but complex ones."""
        return [one for one in parameters_of(self) if not one.is_complex()]

    def _adopt(self) -> None:
        new = [one for one in self._storable() if one not in self._master_state]
        self.storage.refuse(new)
        for parameter in new:
            self._adopt_one(parameter)
        own(self, self._master_state)

    def _adopt_one(self, parameter: Tensor) -> None:
        if not parameter.is_floating_point() or parameter.is_sparse:
            kind = "sparse" if parameter.is_sparse else parameter.dtype
            raise InvalidInput(f"a {kind} parameter cannot have fp32 masters: omit it")
        if is_sharded(parameter) and self.storage.kind != "fp32":
            raise InvalidInput(
                f"a sharded parameter (DTensor) cannot have masters of kind {self.storage.kind}: give kind='fp32', or "
                "use lowp.optim.AdamW or SGD, which keep every kind on shards"
            )
        state: dict[str, Tensor] = {}
        self.storage.adopt(parameter, state)
        if is_sharded(parameter):  # torch cannot replace the data of a DTensor: this one is kept
            master = nn.Parameter(state.get(MASTER_WEIGHT, parameter.detach()))
            state |= {MASTER_WEIGHT: master} if state else {}
        else:
            master = nn.Parameter(torch.empty(0, dtype=torch.float32, device=parameter.device))
        self._master_state[parameter], self._masters[parameter] = state, master
        if parameter in self.inner.state:  # has stepped, or fills its state when constructed (Adagrad)
            self.inner.state[master] = self.inner.state.pop(parameter)

    @contextmanager
    def _on_masters(self) -> Iterator[None]:
        """Put masters with their fp32 values into the inner optimizer's groups; empty them on exit."""
        whole = [(parameter, master) for parameter, master in self._masters.items() if not is_sharded(master)]
        for parameter, master in whole:
            master.data = self.storage.load(parameter, self._master_state[parameter])
        try:
            self._put_into_groups(self._masters)
            yield
        finally:
            self._put_into_groups({master: parameter for parameter, master in self._masters.items()})
            for master in self._masters.values():
                master.grad = None
            for _, master in whole:
                master.data = torch.empty(0, dtype=torch.float32, device=master.device)

    def _put_into_groups(self, substitutes: Mapping[Any, Tensor]) -> None:
        for group in self.inner.param_groups:
            # in place: some optimizers (LBFGS) keep a reference to the list
            group["params"][:] = [substitutes.get(one, one) for one in group["params"]]

    def _hand_over_gradients(self) -> None:
        for parameter, master in self._masters.items():
            if parameter.grad is None:
                master.grad = None
            else:
                master.grad = parameter.grad.detach().to(torch.float32)

    def _write_back(self, told: Mapping[Tensor, Watch]) -> None:
        with torch.no_grad():
            weights, draws = [], self.storage.draws
            for index, (parameter, master) in enumerate(self._masters.items()):
                seed = seed_of(self.seed, self._steps_on(parameter.device), index) if draws else None
                here = local(master.detach())
                if parameter in told:
                    told[parameter](here, "weight", self.storage.cast, "step")
                places = places_of(parameter) if draws else 0
                weights.append((local(parameter), local_parts(self._master_state[parameter]), here, (seed, places)))
            self.storage.save_all(weights)

    def _around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure for the inner optimizer: it writes the parameters from the masters first."""

        def evaluate() -> Any:
            with torch.no_grad():
                for parameter, master in self._masters.items():
                    state = local_parts(self._master_state[parameter])
                    self.storage.save(local(parameter), state, local(master.detach()).clone())
            self._put_into_groups({master: parameter for parameter, master in self._masters.items()})
            try:
                result = closure()
            finally:
                self._put_into_groups(self._masters)
            self._hand_over_gradients()
            return result

        return evaluate

    # -- checkpoints and copies -----------------------------------------------------------------------------------
    def _packed(self) -> dict[str, Any]:
        self.steps = max(self.steps, *(int(there) for there in self._steps_there.values()), 0)  # counts graph replays
        with self._on_masters():
            packed = dict(self.inner.state_dict())
        masters = [self.master(parameter).detach().clone() for parameter in self._master_state]
        order = {id(parameter): number for number, parameter in enumerate(parameters_of(self))}
        numbered = {order[id(one)]: master for one, master in zip(self._master_state, masters, strict=True)}
        kept = {
            number: {**packed["state"].get(number, {}), MASTER_WEIGHT: master, **self._counters()}
            for number, master in numbered.items()
        }
        packed["state"] = dict(sorted({**packed["state"], **kept}.items()))
        return packed

    def _load(self, state_dict: dict[str, Any]) -> None:
        saved = entries_by_parameter(self, state_dict)
        counters = [[entry[name] for name in COUNTERS] for entry in saved.values() if entry.keys() >= set(COUNTERS)]
        plain = {
            key: {name: value for name, value in entry.items() if name not in (*OF_MASTERS, "remainder")}
            for key, entry in state_dict["state"].items()
        }
        with self._on_masters():
            self.inner.load_state_dict({**state_dict, "state": {key: entry for key, entry in plain.items() if entry}})
        if counters:
            self.steps, self.seed = counters[0]
            for there in self._steps_there.values():
                there.fill_(self.steps)
        masters = {parameter: entry.get(MASTER_WEIGHT) for parameter, entry in saved.items()}
        self.set_masters({parameter: value for parameter, value in masters.items() if value is not None})

    def __repr__(self) -> str:
        return f"MasterWeights(storage={self.storage.cast or 'fp32'}, kind={self.storage.kind}, {self.inner!r})"
