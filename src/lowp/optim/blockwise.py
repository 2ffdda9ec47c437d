"""The base of lowp's own optimizers: update a parameter in fp32, one cache-sized block at a time, and store it back."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lowp import casts
from lowp.casts import Cast
from lowp.compat import private, uncompiled
from lowp.errors import InvalidInput
from lowp.kernels.steps import updates
from lowp.ops.observing import everywhere
from lowp.optim.model_state import MasterKeeper, ParameterNames, own
from lowp.optim.shards import is_sharded, local, places_of, quantize_at, refuse_to_convert, shard_of
from lowp.optim.state_dicts import (
    check_shape,
    entries_by_parameter,
    packed_groups,
    parameters_of,
    with_loading_hooks,
    with_saving_hooks,
)
from lowp.optim.storage import MASTER_WEIGHT, STORAGE_STATE, Storage, check_seed, seed_of
from lowp.scaling.loss_scale import inverse_of

_foreach_add_ = cast(Callable[[list[Tensor], Any], None], private("torch._foreach_add_"))
# 2**16 elements: a block's fp32 weight, gradient and two moments are 1 MiB, which stays in a core's L2 cache
BLOCK = 1 << 16
_COPIED = ("storage", "moment_cast", "moments", "names", "seed")  # attributes that a copy keeps
_STOCHASTIC_BF16 = "bf16:stochastic"  # to nearest would stall: 0.001 of a second moment is below half a bf16 ulp


class StateFormats(NamedTuple):
    """How an optimizer stores weights and moments: the arguments as the user gave them, unchecked."""

    storage: str | Cast | None
    split: bool
    masters: str
    moments: str | Cast
    seed: int


class BlockwiseOptimizer(MasterKeeper, torch.optim.Optimizer):
    """An optimizer whose parameters are stored in few bits and updated in fp32, block by block.

    A subclass provides `moments` (the names of its per-element state) and `update_block`, which updates fp32 tensors in
    place. This class joins weight and remainder, converts gradients and moments, and stores everything back. The update
    is the same fp32 arithmetic for every storage, so that split masters equal fp32 masters bit for bit.

    With a loss scaler nothing waits for the device: `grad_scale` and `found_inf` are applied on the device of the
    tensors, and a step with a non-finite gradient leaves weights, moments and step counters unchanged.
    """

    moments: tuple[str, ...] = ()
    allows_fp16_gradients = True

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        formats: StateFormats,
    ) -> None:
        kind = "split" if formats.split and formats.storage is not None else formats.masters
        self.storage = Storage.parse(formats.storage, kind)
        self.moment_cast = casts.parse(formats.moments)
        if str(self.moment_cast) not in ("fp32", "bf16"):
            raise InvalidInput(f"moments={formats.moments}: give fp32 or bf16")
        check_seed(formats.seed)
        self.seed = formats.seed
        self.names = ParameterNames()
        self._step_supports_amp_scaling = True
        super().__init__(params, defaults)

    def update_block(
        self, weight: Tensor, gradient: Tensor, moments: dict[str, Tensor], step: Tensor, group: dict[str, Any]
    ) -> None:
        """Update an fp32 block of a weight and its moments in place. `step` counts the steps before this one."""
        raise TypeError(f"{type(self).__name__} does not define update_block")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters are converted to the storage format in place."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point():
                raise InvalidInput(f"a {parameter.dtype} parameter cannot be trained: omit it from the optimizer")
            if parameter.dtype is not self.storage.dtype and self.storage.cast is not None:
                refuse_to_convert(str(self.storage.cast))
        self.storage.refuse(self.param_groups[-1]["params"])
        for parameter in self.param_groups[-1]["params"]:
            self.storage.adopt(parameter, self.state[parameter])
        own(self, self.param_groups[-1]["params"])

    # -- a step ---------------------------------------------------------------------------------------------------
    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on the gradients at hand, in the storage format or in fp32; returns the closure's loss, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        together = self._step_together()
        for index, (group, parameter) in enumerate(self._parameters()):
            if parameter.grad is not None and id(parameter) not in together:
                self._step_parameter(index, group, parameter)
        return loss

    def update_together(self, columns: updates.Columns, group: dict[str, Any]) -> None:
        """Update the stored tensors of many parameters of one group with one kernel, like `update_block`."""
        raise TypeError(f"{type(self).__name__} does not define update_together")

    def _step_together(self) -> set[int]:
        """Step the parameters that one kernel can step at once, if the device has it; return their ids."""
        stepped: set[int] = set()
        for group in self.param_groups:
            for members in self._by_kernel(group["params"]):
                self.update_together(self._columns(members), group)
                self._count_steps([self.state[parameter]["step"] for parameter in members])
                stepped.update(map(id, members))
        return stepped

    def _by_kernel(self, parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Yield the parameters of a group that are stepped together, by device and gradient dtype.

        These are parameters in split storage or plain fp32, contiguous and unsharded, with fp32 moments, if there are
        no observers.
        """
        if (self.storage.cast is not None and self.storage.kind != "split") or everywhere:
            return
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            gradient, state = parameter.grad, self.state[parameter]
            if gradient is None or not updates.has_kernels(parameter.device) or not self._is_plain(parameter, gradient):
                continue
            if "step" not in state:
                self._start(parameter, state)
            found = [state[name] for name in self.moments if name in state]
            has_all = len(found) == len(self.moments)
            if has_all and all(one.dtype is torch.float32 and one.is_contiguous() for one in found):
                groups[parameter.device, gradient.dtype].append(parameter)
        yield from groups.values()

    def _is_plain(self, parameter: Tensor, gradient: Tensor) -> bool:
        if is_sharded(parameter) or gradient.is_sparse or gradient.dtype not in updates.GRADIENTS:
            return False
        dtype = torch.float32 if self.storage.cast is None else torch.bfloat16
        is_contiguous = parameter.is_contiguous() and gradient.is_contiguous()
        return is_contiguous and parameter.dtype is dtype and parameter.numel() > 0

    def _columns(self, parameters: Sequence[Tensor]) -> updates.Columns:
        """Return the kernel's arguments: weights, remainders, gradients, moments and steps."""
        states = [self.state[parameter] for parameter in parameters]
        return updates.Columns(
            [parameter.detach() for parameter in parameters],
            [one["remainder"] for one in states] if "remainder" in states[0] else None,
            [parameter.grad.detach() for parameter in parameters if parameter.grad is not None],
            [[one[name] for one in states] for name in self.moments],
            [one["step"] for one in states],
        )

    def _count_steps(self, steps: list[Tensor]) -> None:
        """Increment step counters on one device, in place and in one launch, unless a gradient was not finite."""
        found_inf = getattr(self, "found_inf", None)
        skipped = None if found_inf is None else found_inf.reshape(()).to(steps[0].device).clamp(max=1)
        one = 1 if skipped is None else 1 - skipped
        if len(steps) == 1:  # torch may read a tensor that it adds to a list
            steps[0].add_(one)
        else:
            _foreach_add_(steps, one)

    def _parameters(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                yield group, parameter

    def _step_parameter(self, index: int, group: dict[str, Any], parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise InvalidInput(
                f"{type(self).__name__} does not support sparse gradients: use sparse=False in the embedding, "
                "or torch's SparseAdam or SGD inside lowp.MasterWeights"
            )
        state = self.state[parameter]
        if "step" not in state:
            self._start(parameter, state)
        before = state["step"]
        watch = self.names.watches([parameter], self).get(parameter) if self.storage.cast is not None else None
        # Flat views of the local tensors. Non-contiguous tensors (channels_last) are copied into logical order and
        # back.
        here = local(parameter).detach()
        stored = here.reshape(-1)
        gradient = local(gradient).reshape(-1)
        parts = {name: local(value).view(-1) for name, value in state.items() if name != "step"}
        seen = None if watch is None else torch.empty_like(stored, dtype=torch.float32)
        draws = self.storage.draws or str(self.moment_cast) != "fp32"
        for number, places, block in _blocks(places_of(parameter) if draws else 0, stored.numel()):
            self._step_block(
                stored[block],
                gradient[block],
                {name: value[block] for name, value in parts.items()},
                before.clone(),
                group,
                (seed_of(self.seed, before, index, number), places),
                None if seen is None else seen[block],
            )
        if watch is not None and seen is not None:
            watch(seen.view(here.shape), "weight", self.storage.cast, "step")
        if stored.data_ptr() != here.data_ptr():
            here.copy_(stored.view(here.shape))
        self._count_steps([before])

    def _step_block(
        self,
        stored: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        step: Tensor,
        group: dict[str, Any],
        draw: tuple[int | Tensor, int | Tensor],
        seen: Tensor | None,
    ) -> None:
        """Step one block: load it as fp32, `update_block`, store it. Nothing changes if any gradient was non-finite.

        `draw` is the seed of stochastic rounding, and the places of the numbers among those that share it.
        `seen` receives the fp32 weights before they are stored, for observers.
        """
        self.storage.follow_([(stored, state)])
        weight = self.storage.load(stored, state)
        moments = {name: state[name].to(torch.float32) for name in self.moments if name in state}
        gradient = gradient.to(torch.float32)
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if grad_scale is not None:
            gradient = gradient * inverse_of(grad_scale)
        old = None if found_inf is None else (weight.clone(), {name: value.clone() for name, value in moments.items()})
        self.update_block(weight, gradient, moments, step, group)
        if old is not None and found_inf is not None:
            skip = found_inf.reshape(()) > 0
            weight.copy_(torch.where(skip, old[0], weight))
            for name, value in moments.items():
                value.copy_(torch.where(skip, old[1][name], value))
        if seen is not None:
            seen.copy_(weight)
        self.storage.save(stored, state, weight, *draw)
        for slot, (name, value) in enumerate(moments.items(), 1):
            if state[name].dtype != torch.float32:
                state[name].copy_(quantize_at(value, _STOCHASTIC_BF16, seed_of(0, draw[0], slot), draw[1]))

    def _start(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        """Create the step counter and the moments for the first step."""
        dtype = torch.float32 if str(self.moment_cast) == "fp32" else torch.bfloat16
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for name in self.moments:
            layout = torch.contiguous_format
            state[name] = torch.zeros_like(parameter, dtype=dtype, memory_format=layout, requires_grad=False)

    # -- fp32 in and out ------------------------------------------------------------------------------------------
    def holds(self, parameter: Tensor) -> bool:
        """Whether a tensor is a parameter of this optimizer."""
        return parameter in self.state or any(parameter is one for one in parameters_of(self))

    def _kept(self, parameter: Tensor) -> dict[str, Tensor]:
        return {name: value for name, value in self.state[parameter].items() if name in STORAGE_STATE}

    # -- checkpoints and copies -----------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """As torch's, with ``master_weight`` (fp32) in the place of whatever the storage keeps.

        Before the first step the moments are made, zeros and a step of 0, so that what loads into it finds its places.
        """
        return with_saving_hooks(self, self._packed)

    def _packed(self) -> dict[str, Any]:
        entries = {}
        for index, parameter in enumerate(parameters_of(self)):
            state = self.state[parameter]
            if "step" not in state:
                self._start(parameter, state)
            entry = {name: value for name, value in state.items() if name not in STORAGE_STATE}
            if self.storage.cast is not None:
                entry[MASTER_WEIGHT] = self.master(parameter).clone()
            entries[index] = entry
        return {"state": entries, "param_groups": packed_groups(self)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a dictionary of `state_dict` of any storage, or of the torch optimizer of the same name.

        Moments are put into the format that this optimizer keeps them in; a ``master_weight`` sets the parameter.
        Raises InvalidInput for what does not fit the parameters, before anything changes.
        """
        with_loading_hooks(self, state_dict, self._load)

    @torch.no_grad()
    def _load(self, state_dict: dict[str, Any]) -> None:
        saved = self._checked(state_dict)
        for group, given in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: copy.deepcopy(value) for name, value in given.items() if name != "params"})
        for parameter, entry in saved.items():
            state = self.state[parameter]
            for name in [name for name in state if name not in STORAGE_STATE]:
                del state[name]
            moments = [name for name in self.moments if entry.get(name) is not None]
            if "step" in entry or moments:
                self._start(parameter, state)
                # torch's SGD counts no steps: a saved momentum means that there was at least one
                state["step"].copy_(torch.as_tensor(entry.get("step", 1), device="cpu"))
            for name in moments:
                local(state[name]).copy_(local(shard_of(entry[name], parameter)))
            if entry.get(MASTER_WEIGHT) is not None:
                self.set_masters({parameter: entry[MASTER_WEIGHT]})

    def _checked(self, state_dict: dict[str, Any]) -> dict[Tensor, Mapping[str, Any]]:
        """Return the saved state by parameter, after checking that every tensor fits its parameter."""
        saved = entries_by_parameter(self, state_dict)
        for index, (parameter, entry) in enumerate(saved.items()):
            if "step" not in entry and any(name in entry for name in STORAGE_STATE):
                raise InvalidInput(
                    f"the state of parameter {index} has masters but no step, as torch.distributed.checkpoint leaves "
                    "it if the optimizer had no state: call optimizer.state_dict() before loading"
                )
            for name in self.moments:
                check_shape(entry.get(name), parameter, f"{name} of parameter {index}")
            step = entry.get("step", 0)
            if isinstance(step, Tensor) and step.numel() == 1:
                continue
            if isinstance(step, bool) or not isinstance(step, (int, float)):
                raise InvalidInput(f"the step of parameter {index} must be a number, not {type(step).__name__}")
        return saved

    def __getstate__(self) -> dict[str, Any]:
        own = {name: self.__dict__[name] for name in _COPIED if name in self.__dict__}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._step_supports_amp_scaling = True
        own(self, parameters_of(self))


def _blocks(places: int | Tensor, count: int) -> Iterator[tuple[int, int | Tensor, slice]]:
    """Yield the blocks of a rank's part, which are those of the whole tensor or pieces of them.

    A part has `count` numbers at these places, as `places_of` has them. Yields the number of the block in the whole,
    the places of the piece within it, and the piece's place in the part.
    """
    at = 0
    while at < count:
        if isinstance(places, int):
            number, within = divmod(places + at, BLOCK)
            end = min(at + BLOCK - within, count)
            yield number, within, slice(at, end)
        else:
            number = int(places[at]) // BLOCK
            end = int(torch.searchsorted(places, (number + 1) * BLOCK))
            yield number, places[at:end] - number * BLOCK, slice(at, end)
        at = end
