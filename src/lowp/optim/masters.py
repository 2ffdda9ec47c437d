"""Master weights around any torch optimizer: the model holds few bits, the optimizer sees fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lowp.casts import Cast
from lowp.errors import InvalidInput
from lowp.optim.model_state import Attachment, attach, require_optimizer_state
from lowp.optim.storage import Storage, seed_of

_VERSION = 1


class MasterWeights(torch.optim.Optimizer):
    """Stores an optimizer's parameters in few bits and lets the optimizer update fp32 master weights.

    `storage` is the format (``bf16``, ``fp16``, or any float format, which is carried in fp32); `kind` what is kept:
    ``fp32`` (a copy), ``split`` (bf16 and a 16-bit remainder, 4 bytes in all), ``stochastic`` (nothing, the update is
    rounded stochastically from `seed` and the step, alike on all ranks) or ``none`` (rounded to nearest: updates below
    half an ulp are lost). The parameters are converted in place when the wrapper is made.

    The wrapper is an optimizer: its `param_groups` are the inner optimizer's, hold the model's parameters, and are what
    schedulers, clipping and loss scalers work on. Gradients may come in the storage format or in fp32. `attach(model)`
    makes `model.state_dict()` give and take fp32. Closures work; sparse gradients go where the inner optimizer takes
    them.

    Source: Micikevicius et al. 2018, arXiv 1710.03740, section 3.1.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        storage: str | Cast | None = "bf16",
        *,
        kind: str = "fp32",
        seed: int = 0,
    ) -> None:
        if isinstance(optimizer, MasterWeights):
            raise InvalidInput("the optimizer has master weights already: wrap the optimizer that is inside it")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"MasterWeights wraps a torch optimizer, not {type(optimizer).__name__}")
        self.inner = optimizer
        self.storage = Storage.parse(storage, kind)
        self.seed = seed
        self.steps = 0
        self._kept: dict[Tensor, dict[str, Tensor]] = {}
        self._masters: dict[Tensor, nn.Parameter] = {}
        # groups, state and defaults ARE the inner optimizer's, so only the hooks of the base class are set up
        super().__setstate__({"defaults": optimizer.defaults})
        self._adopt()

    # -- an optimizer's face --------------------------------------------------------------------------------------
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's groups, with the model's parameters."""
        return self.inner.param_groups

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The inner optimizer's state, by model parameter."""
        stored: dict[Tensor, Tensor] = {master: parameter for parameter, master in self._masters.items()}
        return {stored.get(key, key): value for key, value in self.inner.state.items()}

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return bool(getattr(self.inner, "_step_supports_amp_scaling", False))

    @property
    def allows_fp16_gradients(self) -> bool:
        """True: a loss scaler may hand over gradients in 16 bits, or put fp32 ones in their place."""
        return True

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add a group; its parameters are converted to the storage format."""
        self.inner.add_param_group(group)
        self._adopt()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop (or zero) the gradients of the model's parameters."""
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the masters from the parameters' gradients and write them back, rounded to the storage format."""
        amp = {name: getattr(self, name) for name in ("grad_scale", "found_inf") if hasattr(self, name)}
        with self._on_masters():
            for name, value in amp.items():
                setattr(self.inner, name, value)
            self._hand_over_gradients()
            try:
                result = self.inner.step() if closure is None else self.inner.step(self._around(closure))
            finally:
                for name in amp:
                    delattr(self.inner, name)
            self.steps += 1
            self._write_back()
        return result

    # -- masters --------------------------------------------------------------------------------------------------
    def master(self, parameter: Tensor) -> Tensor:
        """The fp32 value behind a stored parameter."""
        if parameter not in self._kept:
            raise InvalidInput(f"a tensor of shape {tuple(parameter.shape)} is no parameter of this optimizer")
        return self.storage.load(parameter, self._kept[parameter])

    def set_masters(self, values: Mapping[Tensor, Tensor]) -> None:
        """Set fp32 values by parameter, and write the parameters: rounded to nearest, never stochastically."""
        with torch.no_grad():
            for parameter, value in values.items():
                if parameter in self._kept:
                    value = value.detach().to(parameter.device, torch.float32, copy=True)
                    self.storage.save(parameter, self._kept[parameter], value, None)

    def attach(self, model: nn.Module) -> Attachment:
        """Make `model.state_dict()` give fp32 masters, and `model.load_state_dict()` set them."""

        def master_of(parameter: Tensor) -> Tensor | None:
            return self.master(parameter) if parameter in self._kept else None

        return attach(model, master_of, self.set_masters)

    def memory(self) -> dict[str, int]:
        """Bytes held: stored ``parameters``, what is kept for ``masters``, the inner optimizer's ``state``."""
        state = [value for entry in self.inner.state.values() for value in entry.values() if isinstance(value, Tensor)]
        kept = [value for entry in self._kept.values() for value in entry.values()]
        return {
            "parameters": sum(parameter.nbytes for parameter in self._kept),
            "masters": sum(value.nbytes for value in kept),
            "state": sum(value.nbytes for value in state if value.dim() > 0),
        }

    def _adopt(self) -> None:
        for group in self.inner.param_groups:
            for parameter in group["params"]:
                if parameter not in self._kept:
                    if not parameter.is_floating_point() or parameter.is_sparse:
                        raise InvalidInput(f"a {parameter.dtype} parameter cannot have fp32 masters: leave it out")
                    self._kept[parameter] = {}
                    self.storage.adopt(parameter, self._kept[parameter])
                    master = self._masters[parameter] = nn.Parameter(torch.empty(0, device=parameter.device))
                    if parameter in self.inner.state:  # it has stepped, or fills its state when made (Adagrad)
                        self.inner.state[master] = self.inner.state.pop(parameter)

    @contextmanager
    def _on_masters(self) -> Iterator[None]:
        """The inner optimizer's groups hold the masters, filled with their fp32 values, and afterwards nothing."""
        for parameter, master in self._masters.items():
            master.data = self.storage.load(parameter, self._kept[parameter])
        try:
            self._put_into_groups(self._masters)
            yield
        finally:
            self._put_into_groups({master: parameter for parameter, master in self._masters.items()})
            for master in self._masters.values():
                master.grad = None
                master.data = torch.empty(0, device=master.device)

    def _put_into_groups(self, substitutes: Mapping[Any, Tensor]) -> None:
        for group in self.inner.param_groups:
            # in place: some optimizers (LBFGS) hold on to the list itself
            group["params"][:] = [substitutes.get(one, one) for one in group["params"]]

    def _hand_over_gradients(self) -> None:
        for parameter, master in self._masters.items():
            if parameter.grad is None:
                master.grad = None
            else:
                master.grad = parameter.grad.detach().to(torch.float32)

    def _write_back(self) -> None:
        with torch.no_grad():
            for index, (parameter, master) in enumerate(self._masters.items()):
                seed = seed_of(self.seed, self.steps, index)
                self.storage.save(parameter, self._kept[parameter], master.data, seed)

    def _around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure as an inner optimizer calls it: on parameters that follow the masters, giving fp32 gradients."""

        def evaluate() -> Any:
            with torch.no_grad():
                for parameter, master in self._masters.items():
                    self.storage.save(parameter, self._kept[parameter], master.data.clone(), None)
            self._put_into_groups({master: parameter for parameter, master in self._masters.items()})
            try:
                result = closure()
            finally:
                self._put_into_groups(self._masters)
            self._hand_over_gradients()
            return result

        return evaluate

    # -- checkpoints ----------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's dictionary and, beside it, the fp32 masters in the order of the parameters."""
        with self._on_masters():
            state = dict(self.inner.state_dict())
            masters = [self._masters[parameter].data.detach().clone() for parameter in self._masters]
        state["master_weights"] = {
            "version": _VERSION,
            "storage": str(self.storage.cast or "fp32"),
            "kind": self.storage.kind,
            "steps": self.steps,
            "seed": self.seed,
            "masters": masters,
        }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a dictionary of `state_dict`, of any storage and kind, or the inner optimizer's own.

        Without masters in it the present ones stay. Raises InvalidInput for another model's, before anything changes.
        """
        require_optimizer_state(state)
        state = dict(state)
        saved = state.pop("master_weights", None)
        if saved is not None:
            self._check(saved)
        with self._on_masters():
            self.inner.load_state_dict(state)
        if saved is not None:
            self.steps, self.seed = int(saved["steps"]), int(saved["seed"])
            self.set_masters(dict(zip(self._masters, saved["masters"], strict=True)))

    def _check(self, saved: dict[str, Any]) -> None:
        if not isinstance(saved, Mapping) or saved.get("version") != _VERSION:
            version = saved.get("version") if isinstance(saved, Mapping) else saved
            raise InvalidInput(f"master weights of version {version}: this lowp reads version {_VERSION}")
        masters, counters = saved.get("masters"), [saved.get(name) for name in ("steps", "seed")]
        whole = isinstance(masters, (list, tuple)) and all(isinstance(value, Tensor) for value in masters)
        if not whole or not all(type(value) is int for value in counters):
            raise InvalidInput(
                "master weights are saved as masters (a list of tensors), steps and seed (whole numbers); these are not"
            )
        shapes = [tuple(value.shape) for value in saved["masters"]]
        present = [tuple(parameter.shape) for parameter in self._masters]
        if shapes != present:
            raise InvalidInput(
                f"the checkpoint has {len(shapes)} master weights and the optimizer {len(present)}, or their shapes "
                "differ: it belongs to another model or another order of parameters"
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __repr__(self) -> str:
        return f"MasterWeights(storage={self.storage.cast or 'fp32'}, kind={self.storage.kind}, {self.inner!r})"
