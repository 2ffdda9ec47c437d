"""Observers of a training step: they get every tensor that an op reads or writes, with its role, before its cast.

All casts of a step go through `lowp.ops.call.RoleCasts.cast`, which reports them here. Without observers a call has no
`Watch`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowp.casts import Cast
from lowp.hooks import listed
from lowp.ops.shields import shield


@dataclass(frozen=True, eq=False)
class Observation:
    """One tensor that an op of a training step reads or writes: module path, op, role, phase and cast.

    `phase` is ``forward``, ``backward`` or ``step``. Roles of the forward pass: ``input``, ``weight`` (a parameter in
    any position) and ``output``. Of the backward pass: ``grad``, the gradient of the output, and the results of a
    product or norm, ``input gradient``, ``weight gradient``, ``bias gradient``. Of an optimizer's step: ``weight
    gradient``, ``update``, ``weight`` and ``optimizer state``, where `path` is the name of the parameter.

    `tensor` is the tensor before the cast, detached from the graph; for a native product of a device, which rounds its
    own result, the rounded one. `cast` is None if nothing is rounded.
    """

    path: str
    op: str
    op_class: str
    role: str
    phase: str
    tensor: Tensor
    cast: Cast | None


Observer = Callable[[Observation], object]

everywhere: list[Observer] = []  # observers of all regions and of all steps of lowp's optimizers


def observe(callback: Observer) -> Callable[[], None]:
    """Call `callback` with an Observation of every tensor in every region, and in the steps of lowp's optimizers.

    Takes effect at the next entry of a region. Returns a function that ends it. Observing changes no bit of the
    training, and costs nothing after it has ended.
    """
    return listed(everywhere, callback)


def role_of(x: Tensor) -> str:
    """Return the role of an op's input: a parameter is a weight in any position."""
    return "weight" if isinstance(x, nn.Parameter) else "input"


class Watch(NamedTuple):
    """One observed op of a region: its observers and its module path."""

    observers: Sequence[Sequence[Observer]]
    path: str
    op: str
    op_class: str

    def __call__(self, x: Tensor, role: str, cast: Cast | None, phase: str = "") -> None:
        """Pass a tensor to the observers if it is dense and floating-point."""
        if not x.is_floating_point() or x.layout is not torch.strided or x.is_nested:
            return
        phase = phase or ("backward" if role == "grad" or role.endswith("gradient") else "forward")
        with shield(), torch.no_grad():
            seen = Observation(self.path, self.op, self.op_class, role, phase, x.detach(), cast)
            for callbacks in self.observers:
                for callback in tuple(callbacks):
                    callback(seen)

    def at_site(self, x: Tensor, role: str, cast: Cast) -> None:
        """Pass on a tensor written at a site of shared exponents; the number at the end of its role is removed."""
        self(x, "grad" if role == "output gradient" else role.rstrip(" 0123456789"), cast)

    def gradient(self, y: Any, role: str = "grad", cast: Cast | None = None) -> None:
        """Pass on the gradient that a tensor of a graph will get."""
        if isinstance(y, Tensor) and y.requires_grad and y.grad_fn is not None:
            y.register_hook(lambda gradient: self(gradient, role, cast))  # type: ignore[no-untyped-call]


def step(name: str) -> Watch | None:
    """Return the watch of an optimizer's step of one parameter; None without observers."""
    return Watch((everywhere,), name, "step", "step") if everywhere else None
