"""One look at a step: numbers of its activations, gradients, weights and buffers, none of which is waited for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from lowp.compat import norms, real_tensors
from lowp.kernels.int16.late import LateNumber
from lowp.numerics.modes import numbers_of, tensors_in
from lowp.optim.model_state import owner_of

NUMBERS = 512  # of a parameter, at places that depend only on its shape
_SMALL = 2.0**-14  # the smallest normal number of fp16
_MOST_FLUSHED = 8  # outputs in fp16 whose gradients are counted
_MOST_CALLS = 2  # of one module

Named = Sequence[tuple[str, nn.Parameter]]


class Look:
    """The numbers of one step, by kind and name. `read` gives them once they have arrived on the host.

    Kinds: ``activation``, the largest magnitude of a module's results, in the order in which modules end; ``flushed``,
    the share of an fp16 result's gradient that is not zero and below 2^-14; ``gradient``, the norm of a parameter's;
    ``lost``, the share of the numbers with a gradient that did not move; ``update`` and ``weight``, root mean squares,
    the latter before the step; ``buffer``, a norm.
    """

    def __init__(self, step: int, of_flushed: bool) -> None:
        self.step, self.of_flushed = step, of_flushed
        self.half: list[str] = []  # modules that gave fp16
        self.missing: list[str] = []  # parameters without a gradient
        self.kept: set[str] = set()  # parameters whose optimizer keeps them in fp32 elsewhere
        self._known: dict[str, dict[str, float]] = {}
        self._calls: dict[str, int] = {}
        self._followed = 0  # results whose gradients are counted
        self._names: dict[torch.device, list[tuple[str, Sequence[str]]]] = {}
        self._values: dict[torch.device, list[Tensor]] = {}
        self._before: dict[str, Tensor] = {}
        self._late: list[tuple[LateNumber, list[tuple[str, Sequence[str]]]]] = []

    # -- while the step runs ------------------------------------------------------------------------------------------
    def add(self, kind: str, names: Sequence[str], values: Tensor) -> None:
        """Keep a vector of numbers, one by name."""
        values = values.detach().reshape(-1).float()
        self._names.setdefault(values.device, []).append((kind, names))
        self._values.setdefault(values.device, []).append(values)

    def note(self, kind: str, name: str, value: float | Tensor) -> None:
        """Keep one number."""
        if isinstance(value, Tensor):
            self.add(kind, [name], value)
        else:
            self._known.setdefault(kind, {})[name] = value

    def saw_output(self, path: str, module: nn.Module, output: Any) -> None:
        """Take the largest magnitude of what a module has given."""
        calls = self._calls[path] = self._calls.get(path, 0) + 1
        if calls > _MOST_CALLS:
            return
        for one in tensors_in(output):
            x = numbers_of(one.detach())
            if not x.is_floating_point() or not x.numel():
                continue
            with torch.no_grad():
                self.add("activation", [path], torch.linalg.vector_norm(x, math.inf))
            if x.dtype is torch.float16:
                self._saw_half(path, one)

    def _saw_half(self, path: str, output: Tensor) -> None:
        if self.of_flushed and output.requires_grad and self._followed < _MOST_FLUSHED:
            self._followed += 1
            output.register_hook(lambda gradient: self._count_flushed(path, gradient))  # type: ignore[no-untyped-call]
        self.half.append(path)

    def _count_flushed(self, path: str, gradient: Tensor) -> None:
        with torch.no_grad():
            size = numbers_of(gradient.detach()).abs()
            present = (size > 0).sum()
            self.add("flushed", [path], ((size < _SMALL).sum() - (size == 0).sum()) / present.clamp(min=1))

    def before_step(self, parameters: Named, scale: Tensor | None = None) -> None:
        """Read the gradients that an optimizer is about to use, and some numbers of the weights.

        `scale`: that of the gradients, which a fused optimizer removes itself.
        """
        named, gradients = [], []
        for name, one in parameters:
            if not one.is_floating_point():
                continue
            if one.grad is None:
                if one.requires_grad:
                    self.missing.append(name)
                continue
            if owner_of(one) is not None:
                self.kept.add(name)
            named.append((name, one))
            gradients.append(numbers_of(one.grad.detach()))
        for device, places in _by_device([one for _, one in named]).items():
            these = [named[place] for place in places]
            found = [gradients[place] for place in places]
            whole = norms([one if one.numel() else one.new_zeros(1) for one in found])
            self.add("gradient", [name for name, _ in these], whole if scale is None else whole / scale.to(device))
            weights = some([one for _, one in these])
            self._before[str(device)] = torch.stack((weights, some(found, [one for _, one in these])))

    def after_step(self, parameters: Named) -> None:
        """Compare the numbers of the weights with those before the step."""
        named = [(name, one) for name, one in parameters if one.is_floating_point() and one.grad is not None]
        for device, places in _by_device([one for _, one in named]).items():
            before = self._before.pop(str(device), None)
            if before is None or before.shape[1] != len(places):  # the script has removed its gradients meanwhile
                continue
            names, after = [named[place][0] for place in places], some([named[place][1] for place in places])
            old, gradient = before
            has = gradient != 0
            self.add("lost", names, (has & (after == old)).sum(1) / has.sum(1).clamp(min=1))
            self.add("update", names, (after - old).square().mean(1).sqrt())
            self.add("weight", names, old.square().mean(1).sqrt())

    def saw_buffers(self, buffers: Iterable[tuple[str, Tensor]]) -> None:
        """Read the buffers."""
        found = [(name, numbers_of(one.detach())) for name, one in buffers if one.is_floating_point() and one.numel()]
        for places in _by_device([one for _, one in found]).values():
            self.add("buffer", [found[place][0] for place in places], norms([found[place][1] for place in places]))

    def weights_of(self, kind: str, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        """Read the sums of some numbers of parameters, which change if these do."""
        for places in _by_device(parameters).values():
            self.add(kind, [names[place] for place in places], some([parameters[place] for place in places]).sum(1))

    # -- afterwards ---------------------------------------------------------------------------------------------------
    def send(self) -> None:
        """Begin to copy the numbers to the host; nothing is added any more."""
        for device, values in self._values.items():
            late = LateNumber()
            late.send(torch.cat(values))
            self._late.append((late, self._names[device]))
        self._values, self._names, self._before = {}, {}, {}

    def wait(self) -> None:
        """Wait until the numbers have arrived."""
        for late, _ in self._late:
            late.wait()

    def read(self) -> dict[str, dict[str, float]] | None:
        """Return the numbers by kind and name, the largest of several of one name; None while they are under way."""
        arrived = [(late.read(), names) for late, names in self._late]
        if any(numbers is None for numbers, _ in arrived):
            return None
        found = self._known
        for numbers, kinds in arrived:
            place = 0
            for kind, names in kinds:
                mine = found.setdefault(kind, {})
                for name in names:
                    value = numbers[place]
                    if name not in mine or not value <= mine[name]:  # NaN is the largest
                        mine[name] = value
                    place += 1
        return found


def _by_device(tensors: Sequence[Tensor]) -> dict[torch.device, list[int]]:
    """Return the places of tensors by device."""
    found: dict[torch.device, list[int]] = {}
    for place, one in enumerate(tensors):
        found.setdefault(one.device, []).append(place)
    return found


def some(tensors: Sequence[Tensor], like: Sequence[Tensor] | None = None) -> Tensor:
    """Return some numbers of each tensor, fp32 [tensors, 512]; those of a smaller one repeat, of an empty one are 0.

    A sparse gradient gives zeros: which numbers it is of, only its optimizer knows.
    """
    rows = []
    for one, other in zip(tensors, tensors if like is None else like, strict=True):
        x, count = numbers_of(one.detach()), numbers_of(other.detach()).numel()
        if not count or x.numel() != count:
            rows.append(torch.zeros(NUMBERS, device=x.device))
        else:
            rows.append(torch.take(x, _places(count, x.device)).float())
    return torch.stack(rows)


@lru_cache(maxsize=1024)
def _places(count: int, device: torch.device) -> Tensor:
    """Return indices spread over a tensor, made on its device; a step that shares no factor reaches every number."""
    stride = round(count * (math.sqrt(5) - 1) / 2) or 1
    while math.gcd(stride, count) != 1:
        stride += 1
    with torch.inference_mode(False), real_tensors():
        return torch.arange(NUMBERS, device=device).mul_(stride).remainder_(count)
