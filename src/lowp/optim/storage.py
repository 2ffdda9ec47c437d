"""How a parameter stored in few bits keeps its fp32 value: a copy, a remainder, or nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lowp import casts, kernels
from lowp.casts import Cast
from lowp.errors import InvalidInput, brief, check_name
from lowp.formats import FloatFormat
from lowp.kernels.choose.dispatch import answers_at_once
from lowp.kernels.numbers import packing
from lowp.kernels.numbers.philox import signed
from lowp.kernels.steps import stored
from lowp.kernels.steps.stored import Weight
from lowp.optim.shards import holder_of, is_sharded, local, places_of, quantize_at, shard_like, sharing

# 2**16 elements: a block's fp32 weight, gradient and two moments are 1 MiB, which stays in a core's L2 cache
BLOCK = 1 << 16
MASTER_WEIGHT = "master_weight"  # the entry of a parameter's state that holds its fp32 value
STORAGE_STATE = (MASTER_WEIGHT, "remainder")  # the entries that belong to its storage
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# each step and tensor is rounded with its own seed: these odd constants spread the three counters over 64 bits
_SEED_OF_STEP, _SEED_OF_TENSOR, _SEED_OF_SLOT = 0x9E37_79B9_7F4A_7C15, 0xC2B2_AE3D_27D4_EB4F, 0x1656_67B1_9E37_79F9

Draw = tuple[int | Tensor | None, int | Tensor]  # the seed of a step, and the places of numbers: see `places_of`
UNDRAWN: Draw = (None, 0)


@dataclass(frozen=True)
class Storage:
    """The format in which parameters are stored, and the kind of data kept so that updates are not lost.

    This one keeps nothing, and rounds to nearest: ``none``. Others are subclasses: see `Storage.of`.
    """

    cast: Cast | None
    kind: str
    kept: ClassVar[tuple[str, torch.dtype] | None] = None  # the entry of a parameter's state, and its dtype
    has_kernels: ClassVar[bool] = True  # that step weights stored in this way
    _is_rounded: ClassVar[bool] = True  # what is stored is the rounded master

    def __post_init__(self) -> None:
        if self.cast is not None and not isinstance(self.cast.format, FloatFormat):
            raise InvalidInput(f"parameters cannot be stored in {self.cast}: give a float format, such as bf16")

    @staticmethod
    def of(cast: Cast | None, kind: str) -> Storage:
        """Return the storage of a kind; with None, parameters stay in fp32."""
        check_name("kind of master weights", kind, _KINDS)
        of_kind = _KINDS[kind]
        return (Untouched if cast is None and not issubclass(of_kind, InParts) else of_kind)(cast, kind)

    @staticmethod
    def parse(storage: str | Cast | None, kind: str) -> Storage:
        """Return a storage from the text of a cast and a kind; fp32 or None leaves parameters as they are."""
        cast = None if storage is None else casts.parse(storage)
        return Storage.of(None if cast is not None and str(cast) == "fp32" else cast, kind)

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of a stored parameter."""
        return torch.float32 if self.cast is None else DTYPES.get(str(self.cast.format), torch.float32)

    @property
    def step_cast(self) -> Cast | None:
        """The cast by which a step rounds masters that it does not keep in full; None for other kinds."""
        return self.cast

    @property
    def draws(self) -> bool:
        """Whether writing a step draws random numbers."""
        cast = self.step_cast or self.cast
        return cast is not None and cast.is_stochastic

    def refuse(self, parameters: Iterable[Tensor]) -> None:
        """Raise InvalidInput if one of these parameters would get another dtype while others hold it or its memory."""
        changed = [one for one in parameters if self.cast is not None and one.dtype is not self.dtype]
        sharded = next(filter(is_sharded, changed), None)
        if sharded is not None:
            raise InvalidInput(
                f"a sharded parameter (DTensor) of {sharded.dtype} cannot be stored in {self.cast}: convert the "
                "model before it is sharded, precision.prepare_model(model), then fully_shard(model), then make "
                "the optimizer and call precision.prepare_optimizer(optimizer)"
            )
        if changed and (kind := holder_of(changed)) is not None:
            raise InvalidInput(
                f"the parameters of a {kind} can no longer be converted to {self.cast}, because it holds "
                f"references to them: call precision.prepare_model(model) first, then {kind}(model), then "
                "precision.prepare_optimizer(optimizer)"
            )
        if (shared := sharing(changed)) is not None:
            raise InvalidInput(
                f"a parameter of shape {tuple(shared.shape)} shares memory with another one, which storing them in "
                f"{self.cast} would separate: use one nn.Parameter in both places, give the optimizer the parameters "
                "of the model instead of a flat one, or take a precision that leaves parameters in fp32, such as "
                "fp16 or bf16"
            )

    def adopt(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        """Store `parameter` in the format, in place, and put the data for its fp32 value into `state`.

        Call `refuse` for all parameters before.
        """
        given = local(parameter).detach()
        if parameter.dtype is not self.dtype:
            parameter.grad = None  # has the old dtype
            parameter.data = torch.empty_like(parameter, dtype=self.dtype)
        if self.kept is not None:
            name, dtype = self.kept
            # contiguous for every memory format of the parameter: optimizers walk it in logical order
            state[name] = shard_like(torch.empty(given.shape, dtype=dtype, device=given.device), parameter)
        self.set(parameter, state, given)

    def set(self, parameter: Tensor, state: Mapping[str, Tensor], value: Tensor) -> None:
        """Write a value into a parameter, or a rank's part of it, and what is kept of it, rounded to nearest.

        In blocks, where they stay: the allocator would keep the memory of whole tensors for others.
        """
        assert self.cast is not None
        here, given = local(parameter).detach(), value.detach().reshape(-1)
        is_flat = here.is_contiguous()
        flat = here.view(-1) if is_flat else torch.empty_like(given, dtype=self.dtype)
        kept = {name: local(one).view(-1) for name, one in state.items()}
        size, places = (max(flat.numel(), 1), places_of(parameter)) if self.cast.is_stochastic else (BLOCK, 0)
        for start in range(0, flat.numel(), size):
            piece = slice(start, start + size)
            block = given[piece].to(flat.device, torch.float32, copy=True)
            self.save(flat[piece], {name: one[piece] for name, one in kept.items()}, block, (None, places))
        if not is_flat:
            here.copy_(flat.view(here.shape))

    def load(self, parameter: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Return the fp32 value of a stored, unsharded parameter, for an update that `save` writes. May be no copy."""
        return parameter.detach().to(torch.float32, copy=True)

    def master(self, parameter: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Return the fp32 value of a stored, unsharded parameter, which others may have written; may be no copy."""
        return self.load(parameter, state)

    def follow_(self, weights: Sequence[tuple[Tensor, Mapping[str, Tensor]]]) -> None:
        """Bring what is kept up to date with what others have written into stored, unsharded parameters.

        Given are the parameters and what is kept of each; as one call where there is one.
        """

    def save(self, parameter: Tensor, state: dict[str, Tensor], master: Tensor, draw: Draw = UNDRAWN) -> None:
        """Write an fp32 `master` into the stored parameter and its state.

        `draw` is for stochastic rounding: a step's seed, and the places of the numbers among all that share it.
        """
        parameter.detach().copy_(self.rounded(master, draw))
        self._keep(state, master)

    def _keep(self, state: dict[str, Tensor], value: Tensor) -> None:
        """Put a value into what is kept of a parameter, if there is anything."""
        if self.kept is not None:
            name, _ = self.kept
            if name not in state:
                state[name] = value
            elif state[name].data_ptr() != value.data_ptr():
                state[name].copy_(value)

    def save_all(self, weights: Sequence[tuple[Tensor, dict[str, Tensor], Tensor, Draw]]) -> None:
        """Do `save` with each of these arguments; as one call where there is one."""
        pairs = [(parameter.detach(), master) for parameter, _, master, *_ in weights]
        for weight, is_written in zip(weights, self._at_once(pairs, stored.store_rounded), strict=True):
            if is_written:
                self._keep(weight[1], weight[2])
            else:
                self.save(*weight)

    def _at_once(self, pairs: list[Weight], run: Callable[[Sequence[Weight], Cast], list[bool]]) -> list[bool]:
        """Return the results of a function of `kernels.stored`; False for each weight that it does not take."""
        if self.cast is None or self.draws or not self._is_rounded:
            return [False] * len(pairs)
        taken = [
            fits and parameter.dtype is self.dtype
            for (parameter, _), fits in zip(pairs, stored.serves(pairs), strict=True)
        ]
        results = iter(run([pair for pair, is_taken in zip(pairs, taken, strict=True) if is_taken], self.cast))
        return [is_taken and next(results) for is_taken in taken]

    def rounded(self, master: Tensor, draw: Draw = UNDRAWN) -> Tensor:
        """Return `master` rounded to the format: stochastically if that is the kind and a seed is given."""
        seed, places = draw
        cast = self.cast if seed is None else self.step_cast or self.cast
        assert cast is not None
        if str(cast) in ("fp16", "bf16"):
            return master.to(self.dtype)
        # a cast that is itself stochastic also gets a new seed each step
        return quantize_at(master, cast, 0 if seed is None else seed, places)


class Stochastic(Storage):
    """Nothing is kept; an updated weight is rounded stochastically, identically on all ranks."""

    @property
    def step_cast(self) -> Cast | None:
        return None if self.cast is None else self.cast.with_rounding("stochastic")


class Copied(Storage):
    """A copy in full precision is kept."""

    kept = MASTER_WEIGHT, torch.float32
    has_kernels = False
    step_cast = None

    def load(self, parameter: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        return state[MASTER_WEIGHT]

    def master(self, parameter: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        return self._followed(parameter.detach(), state[MASTER_WEIGHT])

    def follow_(self, weights: Sequence[tuple[Tensor, Mapping[str, Tensor]]]) -> None:
        pairs = [(parameter.detach(), state[MASTER_WEIGHT]) for parameter, state in weights]
        for (parameter, master), is_fresh in zip(pairs, self._at_once(pairs, stored.are_rounded), strict=True):
            if not is_fresh and (followed := self._followed(parameter, master)) is not master:
                master.copy_(followed)

    def _followed(self, parameter: Tensor, master: Tensor) -> Tensor:
        """Return the master; in places that `save` has not written, the stored value in fp32.

        A script writes parameters itself where it clips or prunes them or sets them anew. Only a value to which the
        master cannot have been rounded shows this, so that a value that is exchanged and put back keeps its master.
        """
        assert self.cast is not None
        if self.draws:
            below, above = (kernels.quantize(master, self.cast.with_rounding(way)) for way in ("down", "up"))
            is_own = (below <= parameter) & (parameter <= above)
        else:
            rounded = self.rounded(master)
            if answers_at_once(parameter) and _have_same_bits(rounded, parameter):
                return master
            is_own = rounded == parameter
        return torch.where(is_own, master, parameter.to(torch.float32))


class InParts(Storage):
    """The master is a bf16 weight and a remainder of 16 bits."""

    kept = "remainder", torch.int16
    step_cast: ClassVar[Cast | None] = None
    _is_rounded = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cast is None or str(self.cast) != "bf16":
            raise InvalidInput(
                f"{self.kind} masters consist of bf16 and a remainder, so the storage must be bf16, "
                f"not {self.cast or 'fp32'}: give storage='bf16', or keep fp32 masters (masters='fp32')"
            )

    def load(self, parameter: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        return join(parameter.detach(), state["remainder"])

    def save(self, parameter: Tensor, state: dict[str, Tensor], master: Tensor, draw: Draw = UNDRAWN) -> None:
        seed, places = draw
        if self.step_cast is not None and seed is not None:
            master = quantize_at(master, self.step_cast, seed, places)
        half, remainder = split(master, 8 * self.kept[1].itemsize)
        parameter.detach().copy_(half)
        self._keep(state, remainder)


class InShortParts(InParts):
    """The master is a bf16 weight and 8 bits: one of 24 bits, rounded stochastically."""

    kept = "remainder", torch.int8
    # the 8 bits that are lost decide: no update is lost on average
    step_cast = casts.parse("e8m15:stochastic-8")


class Untouched(Storage):
    """Parameters stay in fp32."""

    step_cast = None

    def adopt(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        pass

    def set(self, parameter: Tensor, state: Mapping[str, Tensor], value: Tensor) -> None:
        here = local(parameter).detach()
        here.copy_(value.detach().view(here.shape))

    def load(self, parameter: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        return parameter.detach()

    def save(self, parameter: Tensor, state: dict[str, Tensor], master: Tensor, draw: Draw = UNDRAWN) -> None:
        if master.data_ptr() != parameter.data_ptr():
            parameter.detach().copy_(master)


_KINDS: dict[str, type[Storage]] = {
    "fp32": Copied,
    "split": InParts,
    "split-8": InShortParts,
    "stochastic": Stochastic,
    "none": Storage,
}


def _have_same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype and shape, on the CPU, have the same bits; may be False where they are spread.

    torch compares words of 64 bits four times as fast as the same memory in 16.
    """
    if not (one.is_contiguous() and other.is_contiguous()):
        return torch.equal(one, other)
    each = 8 // one.element_size()
    if one.storage_offset() % each or other.storage_offset() % each:
        return torch.equal(one, other)
    whole = one.numel() // each * each
    flat, others = one.view(-1), other.view(-1)
    is_same = torch.equal(flat[:whole].view(torch.int64), others[:whole].view(torch.int64))
    return is_same and torch.equal(flat[whole:], others[whole:])


def check_seed(seed: object, what: str = "") -> None:
    """Raise InvalidInput for a seed that is not a whole number of 64 bits."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise InvalidInput(f"{what}seed={brief(seed)}: give a whole number from 0 to 2**64 - 1, such as 0")


def seed_of(seed: int | Tensor, step: int | Tensor, tensor: int, slot: int = 0) -> int | Tensor:
    """Return the seed of one stochastic rounding: a function of run, step, tensor and slot, hence equal on all ranks.

    If an argument is a tensor, the seed is a 0-d int64 tensor on its device, and nothing waits for the device.
    """
    if isinstance(step, Tensor):
        step = step.to(torch.int64) if step.device.type != "cpu" else int(step)
    total = seed + step * signed(_SEED_OF_STEP) + signed(tensor * _SEED_OF_TENSOR + slot * _SEED_OF_SLOT)
    return total if isinstance(total, Tensor) else total % (1 << 64)


# -- masters of 32 and of 24 bits --------------------------------------------------------------------------------------
_QUIET_BIT = 1 << 6
_EXPONENT_ONES = 0x7F80_0000


def split(value: Tensor, bits: int = 16) -> tuple[Tensor, Tensor]:
    """Split fp32 `value` into its bf16 half and a remainder of 16 or 8 bits (int16, int8), of the same shape.

    `join` restores every number that is not NaN: bit for bit from 16 bits, rounded to 16 digits (a tie away from zero)
    from 8. A NaN becomes some NaN, and its half is NaN. Values above the largest bf16 by half an ulp or more have an
    infinite half, as rounding to bf16 gives.
    """
    if value.dtype != torch.float32:
        raise TypeError(f"split takes fp32, not {value.dtype}: convert with .float() first")
    if bits not in (8, 16):
        raise InvalidInput(f"split(bits={bits}): a remainder has 16 bits or 8")
    words = value.contiguous().view(torch.int32)
    kept = words if bits == 16 else (words + 0x80) >> 8
    upper = (kept + (1 << (bits - 1))).bitwise_right_shift_(bits)
    remainder = kept.to(packing.SIGNED[bits // 8])  # wrapped: kept - (upper << bits)
    if not _is_without_nan(value):
        is_nan = (words & 0x7FFF_FFFF) > _EXPONENT_ONES
        upper = torch.where(is_nan, (words >> 16) | _QUIET_BIT, upper)
        remainder = remainder.masked_fill(is_nan, 0)
    return upper.to(torch.int16).view(torch.bfloat16).view(value.shape), remainder.view(value.shape)


def join(half: Tensor, remainder: Tensor) -> Tensor:
    """Combine a bf16 half and an int16 or int8 remainder of the same shape to the fp32 numbers that `split` was given.

    Where the half was written since, the result rounds to the new half: the old remainder is at most half an ulp of it.
    `split` gives no negative remainder to a half of 0, whose bits less one are a NaN: there the result is that 0.
    """
    if half.dtype != torch.bfloat16 or remainder.dtype not in (torch.int16, torch.int8):
        raise TypeError(f"join takes a bf16 half and an int16 or int8 remainder, not {half.dtype}, {remainder.dtype}")
    upper = half.contiguous().view(torch.int16).to(torch.int32).mul_(1 << 16)
    joined = upper.add_(remainder, alpha=1 << (16 - 8 * remainder.element_size())).view(torch.float32)
    if _is_without_nan(joined):
        return joined
    return torch.where((half == 0) & (remainder < 0), half.to(torch.float32), joined)


def _is_without_nan(x: Tensor) -> bool:
    """Whether there is no NaN, where that is read at once: a sum of numbers with a NaN is NaN. May be False."""
    return answers_at_once(x) and math.isfinite(float(x.sum()))
