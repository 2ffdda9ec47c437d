"""The base of lowp's own optimizers: update a parameter in fp32, one cache-sized block at a time, and store it back."""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lowp.compat import private, skipped_by_compilers
from lowp.errors import InvalidInput
from lowp.kernels.choose import dispatch
from lowp.kernels.steps import rules, updates
from lowp.ops.observing import everywhere
from lowp.optim.model_state import DtypeAdvice, MasterKeeper, ParameterNames, own
from lowp.optim.moments import SCALES, SQUARES, FormatOptions, Moments, admitted
from lowp.optim.releasing import Released, refuse_released
from lowp.optim.shards import local, places_of, refuse_to_convert, shard_of
from lowp.optim.state_dicts import Checkpointed, entries_by_parameter, packed_groups, parameters_of
from lowp.optim.storage import BLOCK, MASTER_WEIGHT, STORAGE_STATE, Storage, check_seed, seed_of
from lowp.scaling.loss_scale import inverse_of

_foreach_add_ = cast(Callable[[list[Tensor], Any], None], private("torch._foreach_add_"))
_COPIED = ("storage", "kept", "names", "seed", "_is_told")  # attributes that a copy keeps
_Member = tuple[int, tuple[dict[str, Any], nn.Parameter]]  # a parameter, its group, and its place among all


class BlockUpdate(NamedTuple):
    """What an update reads and writes in place, in fp32: a block of a parameter, or all of it in its shape."""

    weight: Tensor
    gradient: Tensor
    moments: dict[str, Tensor]
    step: Tensor  # the number of earlier steps
    parameter: Tensor


class BlockwiseOptimizer(MasterKeeper, Checkpointed):
    """An optimizer whose parameters are stored in few bits and updated in fp32, block by block.

    A subclass is the rule: `moments` (the names of its per-element state), `rule`, if a kernel has it, and
    `update_block`, torch's own arithmetic. `storage` keeps weights and masters, `kept` the moments: this class reads
    both, updates and writes both, in one kernel where the device has one. The update is the same fp32 arithmetic for
    every storage, so that split masters equal fp32 masters bit for bit.

    With a loss scaler nothing waits for a device: `grad_scale` and `found_inf` are applied on the device of the
    tensors, and a step with a non-finite gradient leaves weights, moments and step counters unchanged.
    """

    moments: tuple[str, ...] = ()
    rule: type[rules.StepRule] | None = None
    in_blocks = True  # False: a parameter is updated as a whole
    allows_fp16_gradients = True
    released: Released | None = None

    def __init__(self, params: Any, defaults: dict[str, Any], options: FormatOptions) -> None:
        given = admitted(type(self), options)
        self._is_told = any(name in given for name in ("storage", "split", "masters"))
        storage, is_split = given.get("storage", "bf16"), given.get("split", True)
        masters = "split" if is_split and storage is not None else "fp32"
        self.storage = Storage.parse(storage, given.get("masters") or masters)
        self.kept = Moments.parse(given.get("moments", "fp32"))
        self.seed = given.get("seed", 0)
        check_seed(self.seed)
        self.names = ParameterNames()
        self._advice: list[DtypeAdvice] = []
        self._step_supports_amp_scaling = True
        super().__init__(params, defaults)

    def update_block(self, piece: BlockUpdate, group: dict[str, Any]) -> None:
        """Update a piece in place, in torch's operations; by default as the kernels round, which the rule defines."""
        assert self.rule is not None
        self.rule.of(group).step(piece.weight, piece.gradient, list(piece.moments.values()), piece.step)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its parameters are converted to the storage format in place."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point():
                raise InvalidInput(f"a {parameter.dtype} parameter cannot be trained: omit it from the optimizer")
            if parameter.dtype is not self.storage.dtype and self.storage.cast is not None:
                refuse_to_convert(str(self.storage.cast))
        self.storage.refuse(self.param_groups[-1]["params"])
        if not self._is_told:
            stored = [one for one in self.param_groups[-1]["params"] if one.dtype is torch.float32]
            self._advice += DtypeAdvice.give(stored)
        for parameter in self.param_groups[-1]["params"]:
            self.storage.adopt(parameter, self.state[parameter])
        own(self, self.param_groups[-1]["params"])

    # -- a step ---------------------------------------------------------------------------------------------------
    @torch.no_grad()
    @skipped_by_compilers
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on the gradients at hand, in the storage format or in fp32; returns the closure's loss, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        while self._advice:  # a first pass has succeeded, also of what stands in a module that was not called
            self._advice.pop()()
        if self.released is not None:
            if hasattr(self, "grad_scale") or hasattr(self, "found_inf"):
                refuse_released(self)
            self.released.end()
            self.released.warn_of_clipping()
        self._step_all(list(enumerate(self._parameters())))
        return loss

    def _step_all(self, members: list[_Member]) -> None:
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and dispatch.answers_at_once(found_inf) and float(found_inf) > 0:
            return
        together = self._step_together(members)
        for index, (group, parameter) in members:
            if parameter.grad is not None and id(parameter) not in together:
                self._step_parameter(index, group, parameter)

    def release_gradients(self, max_norm: float = math.inf) -> Released:
        """Step every parameter inside backward, as soon as its gradient is there, and free the gradient at once.

        `step` then finds nothing to do, and schedulers go on as before. One backward is one step: gradients cannot be
        accumulated, nor clipped by a norm over all of them, nor scaled by a loss scale, all of which need every
        gradient before the first update; Misuse is raised for a loss scale, and a warning given where clip_grad_norm_
        would find nothing to clip: `max_norm` limits the norm of each gradient by itself. After fully_shard, whose
        hooks come first. Raises InvalidInput for parameters of DistributedDataParallel, which averages gradients later,
        and Misuse in a second backward pass before `step` or `zero_grad`. The result's `remove` ends it.

        Source: Lv et al. 2023, arXiv 2306.09782, section 3.1.
        """
        if self.released is not None:
            return self.released
        places = {id(member[1]): (index, member) for index, member in enumerate(self._parameters())}
        self.released = Released(self, lambda parameter: self._step_all([places[id(parameter)]]), max_norm)
        for group, parameter in self._parameters():  # made between gradients, they would leave holes in the memory
            if parameter.requires_grad:
                self._started(group, parameter)
        return self.released

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop (or zero) the gradients."""
        super().zero_grad(set_to_none)
        if self.released is not None:
            self.released.end()

    def _step_together(self, members: Sequence[_Member]) -> set[int]:
        """Step the parameters that one kernel can step at once, if the device has it; return their ids."""
        alike: defaultdict[tuple[int, torch.device, torch.dtype], list[_Member]] = defaultdict(list)
        for member in members:
            _, (group, parameter) = member
            if parameter.grad is not None and self._has_kernel(group, parameter, parameter.grad):
                alike[id(group), parameter.device, parameter.grad.dtype].append(member)
        scale, skip = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for (_, device, _), found in alike.items():
            assert self.rule is not None
            columns, rule = self._columns(found), self.rule.of(found[0][1][0])
            kept = updates.Kept(self.storage.step_cast, self.kept.cast, [name in SQUARES for name in self.moments])
            if updates.has_kernels(device):
                updates.step(columns, rule, kept, scale, skip)
            else:
                updates.step_on_cpu(columns, rule, kept, scale, BLOCK)
            self._count_steps(list(columns.steps))
        return {id(parameter) for found in alike.values() for _, (_, parameter) in found}

    def _has_kernel(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> bool:
        """Whether a kernel steps a parameter: contiguous, not empty, with a gradient of one part, and no observers."""
        here, there = local(parameter), local(gradient)
        if everywhere or self.rule is None or not self.storage.has_kernels or here.dtype is not self.storage.dtype:
            return False
        if gradient.is_sparse or there.dtype not in updates.GRADIENTS or not here.numel():
            return False
        state = self._started(group, parameter)
        if not all(
            one.is_contiguous() for one in (here, there, *(local(state[name]) for name in self.moments_of(group)))
        ):
            return False
        places = self._places(parameter)
        if updates.has_kernels(parameter.device):
            return updates.fits_triton(self.storage.step_cast, self.kept.cast, places)
        is_own = isinstance(places, int) and self._rounds_as_kernels(parameter.device)
        return is_own and updates.fits_library((here, there), self.kept.cast)

    def _rounds_as_kernels(self, device: torch.device) -> bool:
        """Whether an update has the bits of the kernels, and not those of torch's optimizer of the same name.

        With fp32 moments, a rule that torch has is on a CPU torch's bit for bit.
        """
        is_own = self.rule is rules.LionStep or str(self.kept.cast) != "fp32"
        return self.rule is not None and (is_own or updates.has_kernels(device))

    def _columns(self, members: Sequence[_Member]) -> updates.Columns:
        """Return the kernel's arguments: weights, remainders, gradients, moments and steps."""
        parameters = [parameter for _, (_, parameter) in members]
        states = [self.state[parameter] for parameter in parameters]
        moments = self.moments_of(members[0][1][0])
        draws = self.storage.draws or self.kept.cast.is_stochastic
        counts = updates.has_kernels(parameters[0].device)  # there, without waiting for the device
        numbered = zip((index for index, _ in members), states, strict=True)
        return updates.Columns(
            [local(parameter).detach() for parameter in parameters],
            [local(one["remainder"]) for one in states] if "remainder" in states[0] else None,
            [local(parameter.grad).detach() for parameter in parameters if parameter.grad is not None],
            [[local(one[name]) for one in states] for name in moments],
            [one["step"] for one in states],
            [[one[name + SCALES] for one in states] for name in moments if name + SCALES in states[0]],
            [int(seed_of(self.seed, 0 if counts else one["step"], index)) if draws else 0 for index, one in numbered],
            [int(self._places(one)) for one in parameters],
        )

    def _places(self, parameter: Tensor) -> int | Tensor:
        """Return the `places_of` a rank's numbers if any are drawn; 0 where its blocks are not those of the whole."""
        places = places_of(parameter) if self.storage.draws or self.kept.cast.is_stochastic else 0
        size = 1 if self.kept.format is None else self.kept.format.scope.size
        return places if size == 1 or (isinstance(places, int) and places % size == 0) else 0

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
        state = self._started(group, parameter)
        before = state["step"]
        watch = self.names.watches([parameter], self).get(parameter) if self.storage.cast is not None else None
        # Flat views of the local tensors. Non-contiguous tensors (channels_last) are copied into logical order and
        # back.
        here = local(parameter).detach()
        stored = here.reshape(-1)
        parts = {name: local(value).view(-1) for name, value in state.items() if name != "step"}
        gradient = local(gradient).reshape(-1)
        seen = None if watch is None else torch.empty_like(stored, dtype=torch.float32)
        places, count = self._places(parameter), stored.numel()
        for number, within, block in _blocks(places, count) if self.in_blocks else [(0, places, slice(0, count))]:
            draw = seed_of(self.seed, before, index, number), within
            self._step_block(parameter, group, (stored, gradient, parts), (block, *draw), seen)
        if watch is not None and seen is not None:
            watch(seen.view(here.shape), "weight", self.storage.cast, "step")
        if stored.data_ptr() != here.data_ptr():
            here.copy_(stored.view(here.shape))
        self._count_steps([before])

    def _step_block(
        self,
        parameter: Tensor,
        group: dict[str, Any],
        whole: tuple[Tensor, Tensor, dict[str, Tensor]],
        place: tuple[slice, int | Tensor, int | Tensor],
        seen: Tensor | None,
    ) -> None:
        """Step one block: load it as fp32, `update_block`, store it. Nothing changes if any gradient was non-finite.

        `whole` is the parameter's stored weight, gradient and state, flat; `place` the block, the seed of stochastic
        rounding, and the places of the block's numbers among those that share it. `seen` receives the fp32 weights
        before they are stored, for observers.
        """
        (stored, gradient, parts), (block, seed, places) = whole, place
        stored, gradient = stored[block], gradient[block].to(torch.float32)
        state = {name: value[block] for name, value in parts.items() if name in STORAGE_STATE}
        self.storage.follow_([(stored, state)])
        weight = self.storage.load(stored, state)
        moments = {name: self.kept.load(parts, name, block) for name in self.moments_of(group)}
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if grad_scale is not None:
            gradient = gradient * inverse_of(grad_scale)
        old = None if found_inf is None else (weight.clone(), {name: value.clone() for name, value in moments.items()})
        piece = BlockUpdate(weight, gradient, moments, self.state[parameter]["step"].clone(), parameter)
        if self._rounds_as_kernels(weight.device):
            BlockwiseOptimizer.update_block(self, piece, group)
        else:
            self.update_block(piece, group)
        skip = None
        if old is not None and found_inf is not None:
            skip = found_inf.reshape(()) > 0
            weight.copy_(torch.where(skip, old[0], weight))
            moments = {name: torch.where(skip, old[1][name], value) for name, value in moments.items()}
        if seen is not None:
            seen[block] = weight
        self.storage.save(stored, state, weight, (seed, places))
        for slot, (name, value) in enumerate(moments.items(), 1):
            self.kept.save(parts, name, block, value, (seed_of(0, seed, slot), places), skip)

    def moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the moments that parameters of a group have."""
        return self.moments

    def _started(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter, with the step counter and the moments, which the first step creates."""
        state: dict[str, Tensor] = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for name in self.moments_of(group):
            if name not in state:
                state.update(self.kept.start(parameter, name))
        return state

    # -- fp32 in and out ------------------------------------------------------------------------------------------
    def holds(self, parameter: Tensor) -> bool:
        """Whether a tensor is a parameter of this optimizer."""
        return parameter in self.state or any(parameter is one for one in parameters_of(self))

    def _kept(self, parameter: Tensor) -> dict[str, Tensor]:
        return {name: value for name, value in self.state[parameter].items() if name in STORAGE_STATE}

    # -- checkpoints and copies -----------------------------------------------------------------------------------
    def _packed(self) -> dict[str, Any]:
        # before the first step the moments are made, so that what loads into the dictionary finds its places
        entries = {}
        for index, (group, parameter) in enumerate(self._parameters()):
            state = self._started(group, parameter)
            entry = {"step": state["step"]}
            entry.update({name: self.kept.whole(parameter, state, name) for name in self.moments if name in state})
            if self.storage.cast is not None:
                entry[MASTER_WEIGHT] = self.master(parameter).clone()
            entries[index] = entry
        return {"state": entries, "param_groups": packed_groups(self)}

    @torch.no_grad()
    def _load(self, state_dict: dict[str, Any]) -> None:
        saved = entries_by_parameter(self, state_dict, self.moments)
        for index, entry in enumerate(saved.values()):
            if "step" not in entry and any(name in entry for name in STORAGE_STATE):
                raise InvalidInput(
                    f"the state of parameter {index} has masters but no step, as torch.distributed.checkpoint leaves "
                    "it if the optimizer had no state: call optimizer.state_dict() before loading"
                )
        for group, given in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: copy.deepcopy(value) for name, value in given.items() if name != "params"})
        for group, parameter in self._parameters():
            state, entry = self.state[parameter], saved[parameter]
            for name in [name for name in state if name not in STORAGE_STATE]:
                del state[name]
            moments = [name for name in self.moments_of(group) if entry.get(name) is not None]
            if "step" in entry or moments:
                self._started(group, parameter)
                # torch's SGD counts no steps: a saved momentum means that there was at least one
                state["step"].copy_(torch.as_tensor(entry.get("step", 1), device="cpu"))
            for name in moments:
                value = local(shard_of(entry[name].to(parameter.device), parameter)).reshape(-1)
                parts = {key: local(kept).view(-1) for key, kept in state.items() if key.startswith(name)}
                self.kept.save(parts, name, slice(0, value.numel()), value.to(torch.float32, copy=True), (0, 0))
            if entry.get(MASTER_WEIGHT) is not None:
                self.set_masters({parameter: entry[MASTER_WEIGHT]})

    def __getstate__(self) -> dict[str, Any]:
        own = {name: self.__dict__[name] for name in _COPIED if name in self.__dict__}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._advice, self._step_supports_amp_scaling = [], True
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
