"""One look at a step: numbers of its activations, gradients, weights and buffers, none of which is waited for."""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowp.compat import norms
from lowp.kernels.int16.late import LateNumber
from lowp.kernels.steps.spectra import SOME, peak_of, some_of
from lowp.nested import tensors_of
from lowp.numerics.models import Models
from lowp.numerics.modes import numbers_of
from lowp.optim.model_state import owner_of

_SMALL = 2.0**-14  # the smallest normal number of fp16
_MOST_FLUSHED = 8  # outputs in fp16 whose gradients are counted
_MOST_CALLS = 2  # of one module

Named = Sequence[tuple[str, nn.Parameter]]


class _Before(NamedTuple):
    """Some numbers of parameters and of their gradients before the step: fp32 [parameters, 256]."""

    names: list[str]
    parameters: list[nn.Parameter]
    weights: Tensor
    gradients: Tensor


class Look:
    """The numbers of one step, by kind and name. `read` gives them once they have arrived on the host.

    Kinds: ``activation``, the largest magnitude of a module's results, in the order in which modules end; ``flushed``,
    the share of an fp16 result's gradient that is not zero and below 2^-14; ``gradient``, the norm of a parameter's;
    ``lost``, the share of the numbers with a gradient that did not move; ``update`` and ``weight``, root mean squares,
    the latter before the step; ``buffer``, a norm. Norms are of all numbers. The largest of a result is that of 4096 of
    its numbers, shares and root mean squares are of 256: that is enough for what is warned of, and takes as long for
    any size.
    """

    def __init__(self, step: int, of_flushed: bool) -> None:
        self.step, self.of_flushed = step, of_flushed
        self.half: list[str] = []  # modules that gave fp16
        self.missing: list[str] = []  # parameters without a gradient
        self._known: dict[str, dict[str, float]] = {"activation": {}}
        self._calls: dict[str, int] = {}
        self._followed = 0  # results whose gradients are counted
        self._names: dict[torch.device, list[tuple[str, Sequence[str]]]] = {}
        self._values: dict[torch.device, list[Tensor]] = {}
        self._before: list[_Before] = []
        self._stepped: dict[str, nn.Parameter] = {}
        self._late: list[tuple[LateNumber, list[tuple[str, Sequence[str]]]]] = []

    # -- while the step runs ------------------------------------------------------------------------------------------
    def add(self, kind: str, names: Sequence[str], values: Tensor) -> None:
        """Keep a vector of numbers, one by name."""
        values = values.detach().reshape(-1).float()
        self._names.setdefault(values.device, []).append((kind, names))
        self._values.setdefault(values.device, []).append(values)

    def note(self, kind: str, name: str, value: float | Tensor) -> None:
        """Keep one number, the largest of several of one name."""
        if isinstance(value, Tensor):
            self.add(kind, [name], value)
        else:
            _keep_largest(self._known.setdefault(kind, {}), name, value)

    def saw_output(self, path: str, output: Any) -> None:
        """Take the largest magnitude of what a module has given."""
        calls = self._calls[path] = self._calls.get(path, 0) + 1
        if calls > _MOST_CALLS:
            return
        for one in tensors_of(output):
            x = numbers_of(one.detach())
            if x.is_floating_point() and x.numel():
                self.note("activation", path, peak_of(x))
                if x.dtype is torch.float16:
                    self._saw_half(path, one)

    def _saw_half(self, path: str, output: Tensor) -> None:
        if self.of_flushed and output.requires_grad and self._followed < _MOST_FLUSHED:
            self._followed += 1
            output.register_hook(lambda gradient: self._count_flushed(path, gradient))  # type: ignore[no-untyped-call]
        self.half.append(path)

    def _count_flushed(self, path: str, gradient: Tensor) -> None:
        with torch.no_grad():
            size = some_of([numbers_of(gradient.detach())]).abs_()
            present = (size > 0).sum()
            self.add("flushed", [path], ((size < _SMALL).sum() - (size == 0).sum()) / present.clamp(min=1))

    @torch.no_grad()
    def before_step(self, parameters: Named, scale: Tensor | None = None) -> None:
        """Read the gradients that an optimizer is about to use, and some numbers of the weights.

        `scale`: that of the gradients, which a fused optimizer removes itself.
        """
        stepped, gradients = {}, []
        for name, one in parameters:
            if not one.is_floating_point():
                continue
            if (gradient := one.grad) is not None:
                stepped[name] = one
                gradients.append((name, numbers_of(gradient)))
            elif one.requires_grad:
                self.missing.append(name)
        self._stepped.update(stepped)
        self._before.clear()
        for some in by_device(gradients):
            names, found = [name for name, _ in some], [one for _, one in some]
            whole = norms([one if one.numel() else one.new_zeros(1) for one in found])
            self.add("gradient", names, whole if scale is None else whole / scale.to(whole.device))
            weights = [stepped[name] for name in names]
            inner = [numbers_of(one) for one in weights]
            # of a sparse gradient only its optimizer knows which numbers it is of
            found = [x if x.numel() == of.numel() else x.new_empty(0) for x, of in zip(found, inner, strict=True)]
            self._before.append(_Before(names, weights, some_of(inner), some_of(found)))

    @torch.no_grad()
    def after_step(self) -> None:
        """Compare the numbers of the weights with those before the step."""
        for names, weights, old, gradient in self._before:
            new, has = some_of([numbers_of(one) for one in weights]), gradient != 0
            self.add("lost", names, (has & (new == old)).sum(1) / has.sum(1).clamp_(min=1))
            self.add("update", names, torch.linalg.vector_norm(new - old, dim=1).mul_(SOME**-0.5))
            self.add("weight", names, torch.linalg.vector_norm(old, dim=1).mul_(SOME**-0.5))
        self._before.clear()

    @torch.no_grad()
    def saw_buffers(self, buffers: Iterable[tuple[str, Tensor]]) -> None:
        """Read the buffers."""
        found = [(name, numbers_of(one)) for name, one in buffers if one.is_floating_point() and one.numel()]
        for some in by_device(found):
            self.add("buffer", [name for name, _ in some], norms([one for _, one in some]))

    def weights_of(self, parameters: Named) -> None:
        """Read as ``sum`` the sums of some numbers of parameters, which change if these do."""
        for some in by_device([(name, numbers_of(one.detach())) for name, one in parameters]):
            self.add("sum", [name for name, _ in some], some_of([one for _, one in some]).sum(1))

    def is_kept(self, name: str) -> bool:
        """Whether the optimizer of a parameter that was looked at keeps it in fp32 elsewhere."""
        return name in self._stepped and owner_of(self._stepped[name]) is not None

    # -- afterwards ---------------------------------------------------------------------------------------------------
    def send(self) -> None:
        """Begin to copy the numbers to the host; nothing is added any more."""
        for device, values in self._values.items():
            late = LateNumber()
            late.send(torch.cat(values))
            self._late.append((late, self._names[device]))
        self._values, self._names, self._before = {}, {}, []

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
                values = numbers[place : place + len(names)]
                for name, value in zip(names, values, strict=True):
                    _keep_largest(mine, name, value)
                place += len(names)
        return found


def _keep_largest(known: dict[str, float], name: str, value: float) -> None:
    if name not in known or not value <= known[name]:  # NaN is the largest
        known[name] = value


def by_device(named: Sequence[tuple[str, Tensor]]) -> Iterable[list[tuple[str, Tensor]]]:
    """Return tensors with their names, in a list for each device."""
    found: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for pair in named:
        found.setdefault(pair[1].device, []).append(pair)
    return found.values()


class Probe:
    """A parameter that tells of the gradients between the backward passes of a step."""

    def __init__(self, models: Models) -> None:
        self._models, self._found = models, list[tuple[str, nn.Parameter]]()
        self.had_gradient = False  # after the latest pass

    def forget(self) -> None:
        """Take another parameter from now on."""
        self._found.clear()

    def passed(self) -> None:
        """Note whether there is a gradient after a pass."""
        self.had_gradient = self._gradient() is not None

    @property
    def is_cleared(self) -> bool:
        """Whether the gradient of the latest pass is gone."""
        return self.had_gradient and bool(self._found) and self._found[0][1].grad is None

    def tell(self, look: Look | None, kind: str) -> None:
        """Tell a look of the gradient: whether they add up, and whether the script divides them before the step."""
        gradient = self._gradient()
        if look is not None and gradient is not None:
            look.add(kind, [self._found[0][0]], norms([numbers_of(gradient.detach())]))

    def _gradient(self) -> Tensor | None:
        if not self._found:
            self._found += islice((one for one in self._models.named_parameters() if one[1].grad is not None), 1)
        return self._found[0][1].grad if self._found else None
