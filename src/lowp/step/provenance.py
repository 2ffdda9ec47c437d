"""Records where the first non-finite gradient was: on the device without waiting, and read only on request."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

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
            parameter = None if module is None else dict(module.named_parameters(recurse=False)).get(name)
            if parameter is not None:
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
        """Return the positions of an optimizer's parameters, in the order in which their gradients become ready."""
        parameters = parameters_of(optimizer)
        known = {parameter: self._order[place] for place, parameter in self._parameters() if place in self._order}
        unknown = len(self._order)
        return sorted(range(len(parameters)), key=lambda place: (known.get(parameters[place], unknown), -place))

    def _reached(self, place: int, parameter: torch.Tensor) -> None:
        self._order.setdefault(place, len(self._order))


@dataclass
class _Record:
    """The record of the last skipped step of one optimizer, on the device or on the host."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    sizes: torch.Tensor  # [parameters]: largest magnitude of each gradient, unscaled; 0 if there is none
    about: torch.Tensor  # [3]: step (-1: none skipped yet), scale, whether the loss was finite (-1: unknown)
    maximum: tuple[int, float] | None = None  # a step and its largest finite magnitude, if the host measured it


class Provenance:
    """The last skipped step of each optimizer."""

    def __init__(self) -> None:
        self.names = Names()
        self._records: dict[int, _Record] = {}

    def latch(
        self, optimizer: torch.optim.Optimizer, sizes: torch.Tensor, found: torch.Tensor, about: torch.Tensor
    ) -> None:
        """Record this step if `found` is set, else keep the previous record; decided on the device."""
        before = self._records.get(id(optimizer))
        if before is None or before.optimizer() is not optimizer or before.sizes.shape != sizes.shape:
            before = _Record(weakref.ref(optimizer), torch.zeros_like(sizes), torch.full_like(about, -1.0))
        bad = (found > 0).reshape(())
        self._records[id(optimizer)] = _Record(
            before.optimizer,
            torch.where(bad, sizes, before.sizes.to(sizes)),
            torch.where(bad, about, before.about.to(about)),
            before.maximum,
        )

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
        step, scale, loss = record.about.tolist()
        if optimizer is None or step < 0:
            return None
        sizes = record.sizes.tolist()
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
    return torch.stack([torch.isfinite(loss).all().to(like, non_blocking=True) for loss in losses]).amin()
