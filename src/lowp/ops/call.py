"""A call of an op under a rule, and the one place where its tensors are rounded, forward and backward, by role."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.compat import remembered_by_identity
from lowp.errors import Unavailable
from lowp.exponents import SiteWriter, Spots
from lowp.kernels.mantissas import has_mantissas
from lowp.ops.casting import carried, carrier_dtype, draw_seed, result_dtype, rounded
from lowp.ops.observing import Watch, role_of
from lowp.policy import Accumulation, Rule

__all__ = ["Call", "Quick", "QuickCasts", "QuickRegion", "RoleCasts", "WeightCast", "cast_weight"]

WeightCast = Callable[[Tensor, Cast], Tensor]
# Runs the usual call of a function, given its arguments and the region that it runs in: eager, observed by nobody,
# transformed by nothing. Returns None, with nothing done, for a call that a runner has to look at.
Quick = Callable[[Callable[..., Any], "tuple[Any, ...]", "dict[str, Any]", "QuickRegion"], Any]


class QuickCasts(Protocol):
    """How a region casts the leaf parameters of a `Quick` call; both keep what they have cast."""

    def narrowed(self, weight: Tensor, to: Cast) -> Tensor:
        """Return a weight in the 16-bit dtype that is its cast, part of the graph where gradients are recorded."""

    def rounded(self, weight: Tensor, to: Cast, dtype: torch.dtype) -> Tensor:
        """Return the values of a weight's cast in a dtype that holds them, apart from the graph."""


class QuickRegion(Protocol):
    """What a `Quick` call asks of its region."""

    @property
    def weights(self) -> QuickCasts:
        """What casts leaf parameters."""

    @property
    def spots(self) -> Spots | None:
        """Where in the step its ops write; None in a region without sites."""

    def writer(self, op: str, rule: Rule) -> SiteWriter:
        """Return the writer of an op that runs now, in a region with sites: the spot counts as met."""


def cast_weight(weight: Tensor, to: Cast) -> Tensor:
    """Cast a weight as any other operand; a region puts its cache in this place."""
    return carried(weight, to)


@dataclass(frozen=True)
class RoleCasts:
    """How the tensors of one op are rounded, each by its role, and summed: for its forward and its backward.

    Roles are those of `lowp.ops.observing.Observation`: what a backward pass writes is rounded as the rule's `output`.
    `roles` are those of the two operands of a product. `watch` tells observers of every tensor; None without any.
    """

    rule: Rule
    accumulate: Accumulation | None = None
    seed: Callable[[], Tensor | int] = field(default=draw_seed, compare=False)
    watch: Watch | None = field(default=None, compare=False)
    roles: tuple[str, str] = ("input", "weight")

    def of(self, role: str) -> Cast | None:
        """Return the rule's cast of tensors in a role."""
        cast: Cast | None = getattr(self.rule, "output" if role.endswith("gradient") else role)
        return cast

    @property
    def sums_integers(self) -> bool:
        """Whether products are sums of integers.

        Raises Unavailable where the rule asks for that and its operands are not int16 under one exponent.
        """
        accumulate, rule = self.accumulate, self.rule
        if accumulate is None or accumulate.format not in ("int32", "exact"):
            return False
        if has_mantissas(rule.input) and has_mantissas(rule.weight):
            return True
        for role in ("input", "weight"):
            if not has_mantissas(self.of(role)):
                raise Unavailable(
                    f"accumulate={accumulate} sums int16 mantissas, and {role} is {getattr(rule, role) or 'fp32'}: "
                    "use dfp16 or flex16+5 for the operands, or accumulate in fp32, fp16/n or bf16/n"
                )
        return True

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype that gradients are written in."""
        return result_dtype(self.rule.output)

    def cast(self, x: Tensor, role: str, axis: int = -1, dtype: torch.dtype | None = None) -> Tensor:
        """Return x rounded by its role, in `dtype` (by default as results are carried); part of the autograd graph."""
        to = self.of(role)
        if self.watch is not None:
            self.watch(x, role, to)
        return x if to is None else rounded(x, to, self.seed, axis, dtype)

    def carry(self, x: Tensor, role: str, axis: int = -1) -> Tensor:
        """Return x rounded by its role, in the dtype that carries an operand of a contraction; part of the graph."""
        to = self.of(role)
        if self.watch is not None:
            self.watch(x, role, to)
        return x if to is None else rounded(x, to, self.seed, axis, carrier_dtype(to))

    def read(self, x: Tensor) -> Tensor:
        """Return what an op that is no product reads, rounded by the rule's `input`."""
        if self.watch is not None:
            self.watch(x, role_of(x), self.rule.input)
        return rounded(x, self.rule.input, self.seed)

    def before_writer(self) -> RoleCasts:
        """Return the casts of what a writer will write, which it rounds itself, and tells observers of."""
        return replace(self, rule=replace(self.rule, output=None), watch=None)

    def tell(self, x: Tensor, role: str) -> None:
        """Tell observers of a tensor that is cast by its role in another way."""
        if self.watch is not None:
            self.watch(x, role, self.of(role))


@remembered_by_identity
def _planned(rule: Rule) -> RoleCasts:
    """Return how the tensors of an op under a rule are rounded where nobody observes, made once."""
    return RoleCasts(rule, rule.accumulate)


@dataclass
class Call:
    """One call of an op that a rule speaks of, as the region hands it to the op's runner.

    `weight_cast` casts leaf parameters, which a region caches; `seed` gives a fresh seed for each stochastic cast.
    `writer` writes the results where the rule's output has a predicted exponent; see `lowp.ops.int16.flexpoint`.
    `watch` tells observers; `roles` are those of a product's operands where the op that makes it knows them.
    """

    __slots__ = ("args", "func", "kwargs", "op", "roles", "rule", "seed", "watch", "weight_cast", "writer")
    op: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rule: Rule
    weight_cast: WeightCast
    seed: Callable[[], Tensor | int]
    writer: SiteWriter | None
    watch: Watch | None
    roles: tuple[str, str] | None

    def __init__(
        self,
        op: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rule: Rule,
        weight_cast: WeightCast = cast_weight,
        seed: Callable[[], Tensor | int] = draw_seed,
        writer: SiteWriter | None = None,
        watch: Watch | None = None,
        roles: tuple[str, str] | None = None,
    ) -> None:
        self.op, self.func, self.args, self.kwargs, self.rule = op, func, args, kwargs, rule
        self.weight_cast, self.seed, self.writer, self.watch, self.roles = weight_cast, seed, writer, watch, roles

    @property
    def casts(self) -> RoleCasts:
        """How this call's tensors are rounded; holds none of them."""
        if self.watch is None and self.roles is None and self.seed is draw_seed and not torch.compiler.is_compiling():
            return _planned(self.rule)
        return RoleCasts(self.rule, self.rule.accumulate, self.seed, self.watch, self.roles or ("input", "weight"))

    def cast(self, x: Tensor, role: str) -> Tensor:
        """Return x rounded by its role; see `RoleCasts.cast`."""
        return self.casts.cast(x, role)

    def weight_casts(self, weights: Sequence[Tensor], to: Cast) -> list[Tensor]:
        """Return several weights cast as `weight_cast` does; a region casts them together."""
        together = getattr(self.weight_cast, "together", None)
        if together is None:
            return [self.weight_cast(weight, to) for weight in weights]
        casts: list[Tensor] = together(weights, to)
        return casts

    def inner(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        op: str | None = None,
        rule: Rule | None = None,
        roles: tuple[str, str] | None = None,
    ) -> Call:
        """Return the call of another function in the place of this one, under its rule or another; it has no writer."""
        rule = self.rule if rule is None else rule
        op = str(getattr(func, "__name__", self.op)) if op is None else op
        return Call(op, func, args, kwargs or {}, rule, self.weight_cast, self.seed, None, self.watch, roles)

    def with_roles(self, first: str, second: str) -> Call:
        """Return the same call, whose operands have these roles."""
        call = self.given(self.args, self.kwargs)
        call.roles = first, second
        return call

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return the same call with other arguments."""
        return Call(
            self.op,
            self.func,
            args,
            kwargs,
            self.rule,
            self.weight_cast,
            self.seed,
            self.writer,
            self.watch,
            self.roles,
        )
