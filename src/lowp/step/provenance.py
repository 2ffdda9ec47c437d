"""Records where the first non-finite gradient was: on the device without waiting, and read only on request."""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lowp.errors import LowpError
from lowp.optim.model_state import given_names
from lowp.step.gradients import parameters_of


class NonFiniteGradients(LowpError, FloatingPointError):
    """Gradients remain infinite or NaN with the loss scale at its floor; the text names the first of them."""


@dataclass(frozen=True)
class NonFinite:
    """The first non-finite gradient of a skipped step, in the order of backward, and its circumstances.

    `kind` is "inf", "nan", or "inf or nan" if only another rank found one. `maximum` is the largest finite gradient of
    that step, unscaled: over all values if the skip was decided on the host right after unscaling, else over the
    parameters whose gradients were finite throughout; None if there were none. `others` are the other parameters with
    non-finite gradients, in the same order. An empty name means that only another rank found one. `loss_finite` is None
    if no loss went through `scale`.
    """

    name: str
    kind: str
    step: int
    scale: float
    maximum: float | None
    others: tuple[str, ...] = ()
    loss_finite: bool | None = None

    def __str__(self) -> str:
        where = f"{self.kind} first in the gradient of {self.name}" if self.name else "inf or nan on another rank"
        more = f", and in {len(self.others)} more (next: {self.others[0]})" if self.others else ""
        loss = "; the loss itself was not finite" if self.loss_finite is False else ""
        if self.maximum is None:
            largest = "no gradient was finite"
        else:
            largest = f"largest finite gradient {self.maximum:,.6g} ({self.maximum * self.scale:,.6g} scaled)"
        return f"{where}{more}, step {self.step}, {largest}, loss scale {self.scale:,.6g}{loss}"


class Names:
    """The names of parameters and the order in which backward reaches them, as far as they are known.

    `watch(model)` gives names, and one backward gives the order. Until then the order is the reverse of the
    optimizer's, and names come from the optimizer's groups if they have names. Modules are held weakly and asked for
    their parameters each time: torch.utils.swap_tensors refuses parameters that have weak references.
    """

    def __init__(self) -> None:
        # by number: a module, its name for a parameter, and the parameter's path in the model
        self._places: dict[int, tuple[weakref.ref[nn.Module], str, str]] = {}
        self._count = 0
        self._order: dict[int, int] = {}  # the turn of each of these numbers in a backward pass
        self._handles: list[RemovableHandle] = []

    def watch(self, model: nn.Module) -> None:
        """Record the names of a model's parameters and, during the next backward, their order."""
        for place in [place for place, (reference, _, _) in self._places.items() if reference() is None]:
            del self._places[place]
        seen: set[torch.Tensor] = set()
        for path, module in model.named_modules():
            prefix = ".".join(part for part in path.split(".") if part not in ("", "module", "_orig_mod"))
            for name, parameter in module.named_parameters(recurse=False):
                if parameter in seen:
                    continue
                seen.add(parameter)
                if parameter.requires_grad and parameter.is_leaf:
                    register: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
                    self._handles.append(register(partial(self._reached, self._count)))
                self._places[self._count] = weakref.ref(module), name, f"{prefix}.{name}" if prefix else name
                self._count += 1

    def _parameters(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the number and the parameter of every name that still has one."""
        for place, (reference, name, _) in self._places.items():
            module = reference()
            own = {} if module is None else module._parameters  # of a scripted module without `get`
            if (parameter := own[name] if name in own else None) is not None:
                yield place, parameter

    def learned(self) -> None:
        """Stop recording the order if a backward has run."""
        if self._handles and self._order:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter belongs to a watched model."""
        return any(parameter is one for _, one in self._parameters())

    def of(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return the name of each parameter of an optimizer, or its position and shape if it has none."""
        names, given = [], given_names(optimizer)
        watched = {parameter: self._places[place][2] for place, parameter in self._parameters()}
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                fallback = f"param_groups[{number}]['params'][{place}], shape {tuple(parameter.shape)}"
                names.append(watched.get(parameter) or given.get(parameter, fallback))
        return names

    def backward_order(self, optimizer: torch.optim.Optimizer) -> list[int]:
        """Return the positions of an optimizer's parameters, in the order in which their gradients become ready.

        A module's own follow each other in their own order: which of them is ready first differs between kernels.
        """
        parameters, names = parameters_of(optimizer), self.of(optimizer)
        known = {parameter: self._order[place] for place, parameter in self._parameters() if place in self._order}
        unknown = len(self._order)
        order = sorted(range(len(parameters)), key=lambda place: (known.get(parameters[place], unknown), -place))
        modules: dict[str, list[int]] = {}
        for place in order:
            modules.setdefault(names[place].rpartition(".")[0] or names[place], []).append(place)
        return [place for own in modules.values() for place in sorted(own)]

    def _reached(self, place: int, parameter: torch.Tensor) -> None:
        self._order.setdefault(place, len(self._order))


class Latch:
    """Numbers of the latest skipped step, one for each site; decided on the device, and read only on request."""

    def __init__(self) -> None:
        self._sites: list[Any] = []
        self._kept: torch.Tensor | None = None

    def keep(self, sites: list[Any], values: torch.Tensor, skip: torch.Tensor) -> None:
        """Keep `values`, one for each of `sites`, if the step is skipped, else those before.

        In place, unless sites are new: a captured graph goes on from what it has left.
        """
        if sites != self._sites[: len(sites)]:
            known, nothing = set(self._sites), values.new_zeros(())
            self._sites += [site for site in sites if site not in known]
            found = dict(zip(sites, values.unbind(), strict=True))
            values = torch.stack([found.get(site, nothing) for site in self._sites])
        values = _extended(values, len(self._sites))
        before = torch.zeros_like(values) if self._kept is None else _extended(self._kept.to(values), len(values))
        self._kept = before.copy_(torch.where(skip, values, before))

    def read(self) -> list[tuple[Any, float]]:
        """Return the sites with their numbers. Waits for the device."""
        return [] if self._kept is None else list(zip(self._sites, self._kept.tolist(), strict=True))


def _extended(values: torch.Tensor, count: int) -> torch.Tensor:
    return values if len(values) == count else torch.cat((values, values.new_zeros(count - len(values))))


@dataclass
class _Record:
    """The latest skipped step of one optimizer."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    numbers: Latch  # the step, the scale (0: none skipped yet), whether the loss was finite (-1: unknown), the sizes
    maximum: tuple[int, float] | None = None  # a step and its largest finite magnitude, if the host measured it


class Provenance:
    """The last skipped step of each optimizer."""

    def __init__(self) -> None:
        self.names = Names()
        self._records: dict[int, _Record] = {}

    def latch(
        self, optimizer: torch.optim.Optimizer, sizes: torch.Tensor, found: torch.Tensor, about: torch.Tensor
    ) -> None:
        """Record this step if `found` is set, else keep the previous record; decided on the device.

        `sizes`: the largest magnitude of each gradient, unscaled, 0 if there is none. `about`: the number of the step,
        the scale, and whether the losses were finite.
        """
        record = self._records.get(id(optimizer))
        if record is None or record.optimizer() is not optimizer:
            record = self._records[id(optimizer)] = _Record(weakref.ref(optimizer), Latch())
        numbers = torch.cat((about, sizes.to(about)))
        record.numbers.keep(list(range(len(numbers))), numbers, (found > 0).reshape(()))

    def sharpen(self, optimizer: torch.optim.Optimizer, step: int, maximum: float) -> None:
        """Add the exact largest finite magnitude of a step that the host knows to be skipped."""
        record = self._records.get(id(optimizer))
        if record is not None:
            record.maximum = (step, maximum)

    def last(self) -> NonFinite | None:
        """Return the latest known skipped step, or None. Waits for the device."""
        found = [found for record in self._records.values() if (found := self._read(record)) is not None]
        return max(found, key=lambda each: each.step, default=None)

    def _read(self, record: _Record) -> NonFinite | None:
        optimizer = record.optimizer()
        step, scale, loss, *sizes = (number for _, number in record.numbers.read())
        if optimizer is None or not scale:
            return None
        names = self.names.of(optimizer)
        order = [place for place in self.names.backward_order(optimizer) if place < len(sizes)]
        bad = [place for place in order if not math.isfinite(sizes[place])]
        maximum = max((size for size in sizes if 0 < size < math.inf), default=None)
        if record.maximum is not None and record.maximum[0] == step:
            maximum = record.maximum[1]
        return NonFinite(
            name=names[bad[0]] if bad else "",
            kind="inf or nan" if not bad else "nan" if math.isnan(sizes[bad[0]]) else "inf",
            step=int(step),
            scale=scale,
            maximum=maximum,
            others=tuple(names[place] for place in bad[1:]),
            loss_finite=None if loss < 0 else bool(loss),
        )


def all_finite(losses: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return 1 if all losses are finite, 0 if one is not, -1 if there are none; in the dtype and device of `like`."""
    if not losses:
        return torch.full_like(like, -1.0)
    found = [loss.detach().abs() < math.inf for loss in losses]
    flags = [(one.all() if one.dim() else one).to(like, non_blocking=True) for one in found]
    return flags[0] if len(flags) == 1 else torch.stack(flags).amin()
