"""The frame of lowp's own optimizers: one cache-sized block of a parameter at a time, in fp32, and stored back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowp import casts, kernels
from lowp.casts import Cast
from lowp.errors import InvalidInput
from lowp.optim.model_state import Attachment, attach, require_optimizer_state
from lowp.optim.storage import Storage, seed_of

# 2**16 elements: a block's fp32 weight, gradient and two moments are 1 MiB, which stays in a core's L2 cache
BLOCK = 1 << 16
_STOCHASTIC_BF16 = "bf16:stochastic"  # nearest would stall: 0.001 of a second moment is below half a bf16 ulp


class BlockwiseOptimizer(torch.optim.Optimizer):
    """An optimizer whose parameters are stored in few bits and updated in fp32, block by block.

    A subclass gives `moments` (the names of its per-element state) and `update_block`, which updates fp32 tensors in
    place. The frame joins weight and remainder, converts gradients and moments, and stores all back: the update itself
    is the same fp32 arithmetic whatever the storage is, so that split masters equal fp32 masters bit for bit.

    With a loss scaler nothing waits for the device: `grad_scale` and `found_inf` are applied where the tensors are, and
    a step with a non-finite gradient leaves weights, moments and step counters as they were.
    """

    moments: tuple[str, ...] = ()
    allows_fp16_gradients = True

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        storage: str | Cast | None,
        kind: str,
        moment_storage: str | Cast,
        seed: int,
    ) -> None:
        self.storage = Storage.parse(storage, kind)
        self.moment_cast = casts.parse(moment_storage)
        if str(self.moment_cast) not in ("fp32", "bf16"):
            raise InvalidInput(f"moments are kept in fp32 or bf16, not {moment_storage}")
        self.seed = seed
        self._step_supports_amp_scaling = True
        super().__init__(params, defaults)

    def update_block(
        self, weight: Tensor, gradient: Tensor, moments: dict[str, Tensor], step: Tensor, group: dict[str, Any]
    ) -> None:
        """Update an fp32 block of a weight and its moments in place; `step` counts this step, from 1."""
        raise TypeError(f"{type(self).__name__} does not say how it updates a block")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters are converted to the storage format in place."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point():
                raise InvalidInput(f"a {parameter.dtype} parameter cannot be trained: leave it out of the optimizer")
            self.storage.adopt(parameter, self.state[parameter])

    # -- a step ---------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on the gradients at hand, in the storage format or in fp32; returns the closure's loss, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, (group, parameter) in enumerate(self._parameters()):
            if parameter.grad is not None:
                self._step_parameter(index, group, parameter)
        return loss

    def _parameters(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                yield group, parameter

    def _step_parameter(self, index: int, group: dict[str, Any], parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise InvalidInput(
                f"{type(self).__name__} takes no sparse gradients: use sparse=False in the embedding, or torch's "
                "SparseAdam or SGD inside lowp.MasterWeights"
            )
        state = self.state[parameter]
        if "step" not in state:
            self._start(parameter, state)
        before = state["step"]
        # flat views; a parameter that is not contiguous (channels_last) is copied into its logical order and back
        stored = parameter.detach().reshape(-1)
        gradient = gradient.reshape(-1)
        parts = {name: value.view(-1) for name, value in state.items() if name != "step"}
        for number, start in enumerate(range(0, stored.numel(), BLOCK)):
            block = slice(start, start + BLOCK)
            self._step_block(
                stored[block],
                gradient[block],
                {name: value[block] for name, value in parts.items()},
                before.clone(),
                group,
                seed_of(self.seed, before, index, number),
            )
        if stored.data_ptr() != parameter.data_ptr():
            parameter.detach().copy_(stored.view(parameter.shape))
        found_inf = getattr(self, "found_inf", None)
        state["step"] = before + (1 if found_inf is None else 1 - found_inf.reshape(()).to(before.device).clamp(max=1))

    def _step_block(
        self,
        stored: Tensor,
        gradient: Tensor,
        kept: dict[str, Tensor],
        step: Tensor,
        group: dict[str, Any],
        seed: int | Tensor,
    ) -> None:
        """One block: into fp32, `update_block`, back into storage, all unless a gradient somewhere was non-finite."""
        weight = self.storage.load(stored, kept)
        moments = {name: kept[name].to(torch.float32) for name in self.moments if name in kept}
        gradient = gradient.to(torch.float32)
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if grad_scale is not None:
            gradient = gradient * grad_scale.double().reciprocal().float()
        old = None if found_inf is None else (weight.clone(), {name: value.clone() for name, value in moments.items()})
        self.update_block(weight, gradient, moments, step, group)
        if old is not None and found_inf is not None:
            skip = found_inf.reshape(()) > 0
            weight.copy_(torch.where(skip, old[0], weight))
            for name, value in moments.items():
                value.copy_(torch.where(skip, old[1][name], value))
        self.storage.save(stored, kept, weight, seed)
        for slot, (name, value) in enumerate(moments.items(), 1):
            if kept[name].dtype != torch.float32:
                kept[name].copy_(kernels.quantize(value, _STOCHASTIC_BF16, seed=seed_of(0, seed, slot)))

    def _start(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        dtype = torch.float32 if str(self.moment_cast) == "fp32" else torch.bfloat16
        device = parameter.device if parameter.device.type != "cpu" else None
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        for name in self.moments:
            state[name] = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)

    # -- fp32 in and out ------------------------------------------------------------------------------------------
    def master(self, parameter: Tensor) -> Tensor:
        """The fp32 value behind a stored parameter."""
        return self.storage.load(parameter, self.state[parameter])

    def set_masters(self, values: Mapping[Tensor, Tensor]) -> None:
        """Set fp32 values by parameter, and write the parameters: rounded to nearest, never stochastically."""
        with torch.no_grad():
            for parameter, value in values.items():
                if any(parameter is mine for _, mine in self._parameters()):
                    value = value.detach().to(parameter.device, torch.float32, copy=True)
                    self.storage.save(parameter, self.state[parameter], value, None)

    def attach(self, model: nn.Module) -> Attachment:
        """Make `model.state_dict()` give the fp32 masters, and `model.load_state_dict()` set them."""
        mine = {parameter for _, parameter in self._parameters()}
        return attach(model, lambda parameter: self.master(parameter) if parameter in mine else None, self.set_masters)

    def memory(self) -> dict[str, int]:
        """Bytes held: stored ``parameters``, what is kept for ``masters``, the moments in ``state``."""
        entries = [(name, value) for state in self.state.values() for name, value in state.items() if value.dim() > 0]
        masters = sum(value.nbytes for name, value in entries if name in ("master", "remainder"))
        return {
            "parameters": sum(parameter.nbytes for _, parameter in self._parameters()),
            "masters": masters,
            "state": sum(value.nbytes for _, value in entries) - masters,
        }

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with ``master_weight`` (fp32) in the place of whatever the storage keeps."""
        state = super().state_dict()
        names = [parameter for _, parameter in self._parameters()]
        state["state"] = {
            index: {
                **{name: value for name, value in entry.items() if name not in ("master", "remainder")},
                **({} if self.storage.cast is None else {"master_weight": self.master(names[index]).clone()}),
            }
            for index, entry in state["state"].items()
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a dictionary of `state_dict` of any storage, or of the torch optimizer of the same name.

        Moments are put into the format that this optimizer keeps them in; a ``master_weight`` sets the parameter.
        Raises InvalidInput for what does not fit the parameters, before anything changes.
        """
        saved = self._checked(state_dict)
        present = [dict(self.state[parameter]) for _, parameter in self._parameters()]
        super().load_state_dict({**state_dict, "state": {}})
        for index, (_, parameter) in enumerate(self._parameters()):
            state = self.state[parameter]
            state.update({name: present[index][name] for name in ("master", "remainder") if name in present[index]})
            if index not in saved:
                continue
            entry = saved[index]
            present_moments = [name for name in self.moments if entry.get(name) is not None]
            if "step" in entry or present_moments:
                self._start(parameter, state)
                # torch's SGD counts no steps: momentum that is there says that there was one
                state["step"].copy_(torch.as_tensor(entry.get("step", 1)))
            for name in present_moments:
                state[name].copy_(entry[name])
            if "master_weight" in entry:
                self.set_masters({parameter: entry["master_weight"]})

    def _checked(self, state_dict: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """The per-parameter state in a saved dictionary, once every tensor in it is known to fit its parameter."""
        require_optimizer_state(state_dict)
        saved: dict[int, dict[str, Any]] = state_dict["state"]
        for index, (_, parameter) in enumerate(self._parameters()):
            entry = saved.get(index, {})
            if not isinstance(entry, Mapping):
                raise InvalidInput(f"the state of parameter {index} is a dictionary, not {type(entry).__name__}")
            for name in (*self.moments, "master_weight"):
                value = entry.get(name)
                if value is None:
                    continue
                if not isinstance(value, Tensor) or value.shape != parameter.shape:
                    given = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                    raise InvalidInput(
                        f"{name} of parameter {index} is a tensor of shape {tuple(parameter.shape)}, not {given}: the "
                        "state belongs to another model or another order of parameters"
                    )
            step = entry.get("step", 0)
            if isinstance(step, Tensor) and step.numel() == 1:
                continue
            if isinstance(step, bool) or not isinstance(step, (int, float)):
                raise InvalidInput(f"the step of parameter {index} is a number, not {type(step).__name__}")
        return saved
