"""Steps without a loss scale: skipped if what they read, or a shared exponent met, is infinite or NaN."""

import cmath
import math
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress, groupby
from operator import attrgetter
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor

from lowp import distributed
from lowp.exponents import SharedExponents, is_result
from lowp.kernels.choose import hardware
from lowp.kernels.steps.spectra import largest_of
from lowp.ops.shields import DisableTorchFunction
from lowp.optim.exponents import FlexWeights
from lowp.optim.shards import local
from lowp.optim.skipping import starts_momentum
from lowp.step import gradients as grads
from lowp.step.guard import StepGuard
from lowp.step.provenance import Latch, Names, NonFiniteGradients

Optimizers = Sequence[torch.optim.Optimizer]
_PATIENCE = 20  # consecutive skipped steps before training stops
_INTERVAL = 16  # steps after which all of an optimizer's state is read again; in between, what was written since
_GRADIENT = "gradient"
_GIVE_UP = "look at the inputs, the learning rate and the loss, or add a rule that keeps that op in fp32"

_Faults = Mapping[str, bool | Tensor]  # of shared exponents, see `SharedExponents.faults`
_Value = tuple[torch.optim.Optimizer, str, int, Tensor]  # as a `_Read`, and the tensor
_Versions = tuple[list[int], list[int]]  # of tensors of state: their ids, and how often each was written
_NOTHING: _Versions = [], []
_version_of = attrgetter("_version")


class _Read(NamedTuple):
    """A tensor that a step reads: a gradient by the place of its parameter in the optimizer, or state by its key."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    key: str
    place: int  # of state: that of its entry


class UnscaledSteps:
    """Decides whether a step without a loss scale counts, and tells of steps that do not; its guard acts on it.

    What a step is about to read is looked at once, and nothing waits for a device: the gradients, unless shared
    exponents have seen them, and the optimizer's state. A finite step leaves finite state, so state is read when
    something else has written it (a checkpoint, the script), and every few steps in any case: writes through NumPy or
    `.data` leave no trace. With `is_plain` nothing is looked at and no step is skipped.
    """

    def __init__(self, name: str, exponents: SharedExponents | None, is_plain: bool) -> None:
        self.name, self.exponents, self.is_plain = name, exponents, is_plain
        self.guard = StepGuard(_PATIENCE)
        self.names = Names()
        self._why = f"{name} has no loss scale" if exponents is None else "int16 has neither"
        self._faults: list[str] = []  # of the latest step that the host skipped
        self._there = Latch()  # of the latest step that a device skipped
        self._in_a_row: Tensor | None = None  # steps that the device skipped
        self._written = _NOTHING  # of the state after the latest step
        self._steps = 0
        self._bad_loss: Tensor | bool | None = None  # whether a loss since the last step was not finite

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("name", "exponents", "is_plain")}  # a copy has other models

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def faults(self) -> list[str]:
        """The sites for which the latest step was skipped. Waits for a device that has skipped by itself."""
        return self._named([site for site, is_bad in self._there.read() if is_bad]) or list(self._faults)

    def saw(self, loss: Tensor) -> None:
        """Check a loss before its backward; nothing waits for a device."""
        if torch.compiler.is_compiling() or self.exponents is not None:  # shared exponents skip a step for infinities
            return
        with DisableTorchFunction():  # a function mode of the user's is not called for these ops
            if type(loss) is Tensor and hardware.is_on_host(loss) and loss.numel() == 1:  # faster than torch's kernels
                bad: Tensor | bool = not cmath.isfinite(loss.item())
            else:
                bad = grads.not_finite(loss.detach().abs())
                bad = bad.any() if bad.dim() else bad
            self._bad_loss = bad if self._bad_loss is None else self._bad_loss | bad

    # -- before a step --------------------------------------------------------------------------------------------
    def skips(self, optimizers: Optimizers, number: int) -> bool | Tensor:
        """Return whether to skip step `number`, on any rank; a skip that the host knows is reported and settled.

        It is a 0-d tensor that nobody has to read if a device can skip by itself: not under shared exponents with
        several ranks, and not for an optimizer whose step cannot be undone. Gradients of parameters that are stored
        under shared exponents are written as the step reads them. Raises NonFiniteGradients after `patience` skipped
        steps in a row.
        """
        if self.exponents is None and not distributed.has_other_ranks() and self._is_finite_at_a_glance(optimizers):
            return False
        return self._skips_what_it_finds(optimizers, number)

    def _is_finite_at_a_glance(self, optimizers: Optimizers) -> bool:
        """Whether one pass over plain gradients finds all finite, and state is as the latest step has left it."""
        if self.is_plain:
            return True
        values = grads.plain_on_host(optimizers) if _versions(optimizers) == self._written else []
        return bool(values) and math.isfinite(largest_of(values))

    @torch.no_grad()
    def _skips_what_it_finds(self, optimizers: Optimizers, number: int) -> bool | Tensor:
        for one in optimizers:
            if isinstance(one, FlexWeights):
                one.write_gradients()
        sites, flags = self._looked_at(optimizers)
        is_bad = False if self.is_plain else _on_any_rank(flags, optimizers)
        written = {} if self.exponents is None else self.exponents.faults()
        may_skip = isinstance(is_bad, Tensor) if self.exponents is None else bool(written)
        there = self._flags_there(optimizers, written) if may_skip else None
        if there is not None and (isinstance(is_bad, Tensor) or (there and not is_bad)):
            return self._left_to_device(there, sites, flags, is_bad)
        faults = _faulty(written) if written else []
        if is_bad:
            faults += self._named(list(compress(sites, flags if isinstance(flags, list) else flags.tolist())))
        is_skipped = bool(is_bad) or bool(faults)
        if self.exponents is not None:
            is_skipped = self.exponents.any_rank(is_skipped)
        if is_skipped:
            self._skip(faults, number)
        return is_skipped

    def _left_to_device(
        self, there: dict[str, Tensor], sites: Sequence[_Read], flags: list[bool] | Tensor, is_bad: bool | Tensor
    ) -> Tensor:
        """Return whether a device skips the step: for its own flags of shared exponents, or of what was looked at."""
        own = ([*sites], [flags]) if isinstance(flags, Tensor) else ([], [])
        if not there:
            return self._skip_there([*sites], own[1][0], cast(Tensor, is_bad))
        found = torch.cat([flag.reshape(-1) for flag in (*there.values(), *own[1])])
        return self._skip_there([*there, *own[0]], found, found.any() | is_bad)

    def _looked_at(self, optimizers: Optimizers) -> tuple[Sequence[_Read], list[bool] | Tensor]:
        """Return what the step reads and is looked at, and for each of these whether it is not finite."""
        reads = [] if self.is_plain else [*self._gradients(optimizers), *self._state(optimizers)]
        if not reads:
            return (), []
        flags = _nonfinite([value for *_, value in reads])
        if isinstance(flags, list) and not any(flags):
            return (), []
        return [_Read(weakref.ref(optimizer), key, place) for optimizer, key, place, _ in reads], flags

    def _named(self, sites: Sequence[str | _Read]) -> list[str]:
        """Return the words for sites: for gradients in the order of backward."""
        found = []
        for optimizer, some in groupby(sites, lambda site: site.optimizer() if _is_gradient(site) else None):
            own = list(some)
            if optimizer is not None:
                turns = {place: turn for turn, place in enumerate(self.names.backward_order(optimizer))}
                own.sort(key=lambda site: turns.get(cast(_Read, site).place, len(turns)))
            found += [_name(site, self.names) for site in own]
        return found

    def _skip_there(self, sites: list[str | _Read], found: Tensor, skip: Tensor) -> Tensor:
        """Return whether a device skips the step; it keeps the flags of these sites."""
        self._there.keep(sites, found, skip)
        if self._in_a_row is None:
            self._in_a_row = torch.zeros_like(skip, dtype=torch.int64)
        self._in_a_row.add_(1).mul_(skip)  # in place: a captured graph continues to count
        return skip

    def _skip(self, faults: list[str], number: int) -> None:
        """Settle and report a step that the host skips."""
        self._faults, self._there, self._bad_loss = faults, Latch(), None
        self.guard.settle(False)
        if self.exponents is not None:
            self.exponents.flush()
        where = f"first in the {faults[0]}" if faults else "on another rank"
        text = f"an infinity or a NaN, {where}: {self._why}, and step {number} was skipped"
        self.guard.count(True)
        if self.guard.too_many():
            raise NonFiniteGradients(f"{text}, as were the {_PATIENCE - 1} steps before it: {_GIVE_UP}")
        warnings.warn(text, UserWarning, stacklevel=7)

    def _flags_there(self, optimizers: Optimizers, written: _Faults) -> dict[str, Tensor] | None:
        """Return the flags of a device by site, of shared exponents; None if the host has to know."""
        if self.exponents is None:
            return None if any(map(starts_momentum, optimizers)) else {}
        if distributed.has_other_ranks():
            return None
        flags = {site: one for site, one in written.items() if isinstance(one, Tensor) and not is_result(site)}
        can_skip = bool(flags) and all(isinstance(one, FlexWeights) and one.skips_there() for one in optimizers)
        return flags if can_skip else None

    def _gradients(self, optimizers: Optimizers) -> Iterator[_Value]:
        for optimizer in optimizers if self.exponents is None else ():
            for values, place in grads.collect(optimizer, True):
                yield optimizer, _GRADIENT, place, values

    def _state(self, optimizers: Optimizers) -> Iterator[_Value]:
        """Yield what the optimizers keep, unless it is known to be as the latest step has left it."""
        if _versions(optimizers) == self._written:
            return
        written = dict(zip(*self._written, strict=True))
        for optimizer, key, place, value in _kept(optimizers):
            if written.get(id(value)) != _version(value):
                yield optimizer, key, place, local(value)

    # -- after a step ---------------------------------------------------------------------------------------------
    def end(self, number: int, optimizers: Optimizers, skip: Tensor | bool) -> None:
        """Settle step `number`, which was taken unless a device has set `skip`.

        Warns once when it is known that the run is no longer finite.
        """
        stepped = ~skip if isinstance(skip, Tensor) else True
        self.guard.settle(stepped)
        bad, self._bad_loss = self._bad_loss, None
        self.names.learned()
        self._steps += 1
        is_due = self.is_plain or self._steps % _INTERVAL == 0
        self._written = _NOTHING if is_due else _versions(optimizers)
        if self.exponents is None:
            self.guard.count(False)
        else:
            self._look_beyond(self.exponents, number)
        if isinstance(skip, Tensor):
            self._tell_of_skips(number)
            bad = None if bad is None else stepped & bad
        if bad is None and self.is_plain:
            bad = _smallest_gradient_is_bad(optimizers)
        if bad is not None and self.guard.turned_bad(bad):
            warnings.warn(f"step {number}: {self._of_loss()}", UserWarning, stacklevel=4)

    def _tell_of_skips(self, number: int) -> None:
        """Warn of steps that a device has skipped, when that is known; raise after too many in a row."""
        if self.guard.too_many(self._in_a_row):
            sites = self.faults
            raise NonFiniteGradients(
                f"an infinity or a NaN, first in the {sites[0] if sites else 'step'}: {self._why}, and "
                f"{_PATIENCE} steps in a row were skipped up to step {number}: {_GIVE_UP}"
            )
        if count := self.guard.newly_skipped():
            warnings.warn(
                f"an infinity or a NaN was met: {self._why}, and {count} of the steps up to "
                f"{number} were skipped; Precision.faults tells where",
                UserWarning,
                stacklevel=5,
            )

    def _of_loss(self) -> str:
        """Return what is said of a step that was taken though the loss, or a gradient that is not looked at, is bad."""
        advice = "Resume an earlier checkpoint with a smaller learning rate, or look at the inputs"
        if not self.is_plain:
            return f"the loss is infinite or NaN, and no gradient is, so that the step was taken. {advice}"
        return (
            f"the loss or a gradient is infinite or NaN, and {self.name} has no loss scale that skips such steps: the "
            f"weights may no longer be finite. {advice}, or skip such steps: Precision({self.name!r}, "
            "loss_scale='dynamic'), or --loss-scale dynamic in lowp run"
        )

    def _look_beyond(self, exponents: SharedExponents, number: int) -> None:
        """Flush; warn once about numbers too large for the format; raise if weights stay too large."""
        sites, most = exponents.flush()
        self.guard.count(bool(sites) and any(site.startswith(("weight of", "update of")) for site in sites))
        if not sites:
            if most and not exponents.run.has_told_most:
                exponents.run.has_told_most = True
                warnings.warn(
                    f"step {number}: most numbers were cut off in the {most[0]}, as they are much larger than what "
                    "this place has seen in earlier steps. Its next exponent holds them. If two kinds of data take "
                    "turns there, such as two losses, compute them in modules of their own",
                    UserWarning,
                    stacklevel=5,
                )
            return
        text = f"step {number}: numbers beyond the largest of {self.name} are cut off, first in the {sites[0]}"
        advice = "look at the learning rate and at the scale of inputs and loss"
        if self.guard.too_many():
            raise NonFiniteGradients(f"{text}, and weights for {_PATIENCE} steps in a row: {advice}")
        if not exponents.run.has_told_beyond:
            exponents.run.has_told_beyond = True
            warnings.warn(f"{text}. If this continues, {advice}", UserWarning, stacklevel=5)


def _faulty(written: _Faults) -> list[str]:
    """Return the sites where a non-finite value was written in this step. Waits for an accelerator, once.

    None if only results, and no gradient, are not finite: a program may mask with infinities, or not use an overflowed
    result.
    """
    found, there = dict(written), [site for site, flag in written.items() if isinstance(flag, Tensor)]
    if there:
        found |= zip(there, torch.stack([*map(written.get, there)]).tolist(), strict=True)  # type: ignore[list-item]
    bad = [site for site, is_bad in found.items() if is_bad]
    return bad if not all(map(is_result, bad)) else []


def _nonfinite(values: Sequence[Tensor]) -> list[bool] | Tensor:
    """Return for each tensor whether a number in it is infinite or NaN: of a device a bool tensor, which is not read.

    On a CPU numbers are finite if their sum is; a sum that overflows says nothing.
    """
    if all(map(hardware.is_on_host, values)):
        return [not math.isfinite(one.sum().item()) and not bool(torch.isfinite(one).all()) for one in values]
    device = next(one.device for one in values if not hardware.is_on_host(one))
    kinds = grads.by_kind(grads.Gradient(one, place) for place, one in enumerate(values))
    return grads.not_finite(grads.largest(kinds, len(values), device))


def _on_any_rank(flags: list[bool] | Tensor, optimizers: Optimizers) -> bool | Tensor:
    """Return whether a flag is set on any rank that shares the optimizers' tensors."""
    is_bad = any(flags) if isinstance(flags, list) else flags.any()
    if not distributed.has_other_ranks():
        return is_bad
    parameters = [parameter for one in optimizers for parameter in grads.parameters_of(one)]
    groups = distributed.mesh_groups(one.grad for one in parameters if one.grad is not None)
    if not groups:
        return is_bad
    agreed = is_bad.float() if isinstance(is_bad, Tensor) else torch.full((), float(is_bad), device="cpu")
    for group in groups:
        distributed.agree_on_maximum_(agreed, group)
    return agreed > 0 if isinstance(is_bad, Tensor) else bool(agreed)


def _kept(optimizers: Optimizers) -> Iterator[_Value]:
    """Yield the tensors of numbers that optimizers keep."""
    for optimizer in optimizers:
        for place, entry in enumerate(getattr(optimizer, "inner", optimizer).state.values()):
            for key, value in entry.items():
                if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
                    yield optimizer, key, place, value


def _versions(optimizers: Optimizers) -> _Versions:
    """Return the ids and versions of the tensors of `_kept`. Each step asks twice, so that the tensors are known."""
    identities: list[int] = []
    versions: list[int] = []
    for optimizer in optimizers:
        entries = getattr(optimizer, "inner", optimizer).state.values()
        everything = [value for entry in entries for value in entry.values()]
        ids, known = list(map(id, everything)), _numbers_of.get(optimizer)
        if known is None or known[0] != ids:
            numbers = [one for one in everything if isinstance(one, Tensor) and one.dim() and one.is_floating_point()]
            known = _numbers_of[optimizer] = ids, numbers
        identities += map(id, known[1])
        try:
            versions += map(_version_of, known[1])
        except RuntimeError:
            versions = [*versions[: len(identities) - len(known[1])], *map(_version, known[1])]
    return identities, versions


# What optimizers keep: the ids of all of it, and the tensors of numbers.
_numbers_of: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[list[int], list[Tensor]]] = (
    weakref.WeakKeyDictionary()
)


def _version(value: Tensor) -> int:
    try:
        return value._version
    except RuntimeError:  # a tensor of inference mode counts no writes
        return -1


def _is_gradient(site: str | _Read) -> TypeGuard[_Read]:
    return not isinstance(site, str) and site.key == _GRADIENT


def _name(site: str | _Read, names: Names) -> str:
    """Return the words for a site: of shared exponents, or of what a step has read."""
    if isinstance(site, str):
        return site
    name, optimizer = "a parameter", site.optimizer()
    if optimizer is not None:
        known = names.of(optimizer)
        place = site.place
        if not _is_gradient(site):  # the entries of a wrapper's state are in the order of the inner optimizer's
            owner = list(optimizer.state)[place : place + 1]
            place = next((at for at, one in enumerate(grads.parameters_of(optimizer)) if owner and one is owner[0]), -1)
        name = known[place] if 0 <= place < len(known) else name
    return f"{site.key} of {name}"


def _smallest_gradient_is_bad(optimizers: Optimizers) -> Tensor | None:
    """Whether the smallest gradient is not finite; used if no loss was seen, since NaN spreads through backward."""
    present = [
        local(parameter.grad)
        for optimizer in optimizers
        for parameter in grads.parameters_of(optimizer)
        if parameter.grad is not None and not parameter.grad.is_sparse
    ]
    return ~torch.isfinite(min(present, key=torch.Tensor.numel)).all() if present else None
