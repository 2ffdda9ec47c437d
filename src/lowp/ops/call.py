"""A call of an op under a rule, and the one place where its tensors are rounded, forward and backward, by role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from lowp.casts import Cast, parse
from lowp.compat import constant_when_compiled, remembered_by_identity
from lowp.errors import Unavailable
from lowp.exponents import SiteScales, SiteWriter, Spots
from lowp.kernels.int16.mantissas import has_mantissas
from lowp.kernels.numbers.philox import draw_seed
from lowp.ops.casting import carried, carrier_dtype, passed_on, result_dtype, rounded, seed_of
from lowp.ops.observing import Watch, role_of
from lowp.policy import Accumulation, Operands, Rule

WeightCast = Callable[[Tensor, Cast], Tensor]
# Runs a common call of a function, given its arguments and its region: eager, without observers or transforms. Returns
# None, with nothing done, for a call that a runner must handle.
Quick = Callable[[Callable[..., Any], "tuple[Any, ...]", "dict[str, Any]", "QuickRegion"], Any]


class KeptCasts(Protocol):
    """The casts of plain leaf parameters that a region keeps."""

    def look(self, weight: Tensor, to: Cast) -> tuple[Tensor | None, Any]:
        """Return the values of a cast that may be used again, detached from the graph, and the weight's sign."""

    def keep(self, weight: Tensor, to: Cast, sign: Any, value: Tensor) -> Tensor:
        """Keep and return the values of a cast of a weight that has this sign."""


class QuickRegion(Protocol):
    """The parts of a region that a `Quick` call uses."""

    @property
    def weights(self) -> KeptCasts:
        """The casts of leaf parameters."""

    @property
    def spots(self) -> Spots | None:
        """The spots at which the region's ops write; None in a region without sites."""

    def writer(self, op: str, rule: Rule) -> SiteWriter:
        """Return the writer of the op that runs, in a region with sites. The spot is counted."""


@dataclass(frozen=True)
class RoleCasts:
    """How the tensors of one op are rounded, by role, and summed, in forward and backward.

    Roles are those of `lowp.ops.observing.Observation`: tensors that a backward pass writes are rounded by the rule's
    `output`. `roles` are the roles of a product's two operands. `watch` passes every tensor to observers; None without
    any. `scales` has the scales from earlier steps of operands whose casts are delayed.
    """

    rule: Rule
    accumulate: Accumulation | None = None
    seed: Callable[[], Tensor | int] = field(default=draw_seed, compare=False)
    watch: Watch | None = field(default=None, compare=False)
    roles: tuple[str, str] = ("input", "weight")
    scales: SiteScales | None = field(default=None, compare=False)

    def of(self, role: str) -> Cast | None:
        """Return the rule's cast for a role."""
        cast: Cast | None = getattr(self.rule, "output" if role.endswith("gradient") else role)
        return cast

    def of_product(self, target: int) -> Operands:
        """Return the casts of the product of the backward pass that makes the gradient of an operand, 0 or 1."""
        rule = self.rule
        own = rule.weight_gradient if self.roles[target] == "weight" else rule.input_gradient
        return _AS_FORWARD if own is None else own

    @property
    def current(self) -> RoleCasts:
        """The same under scales of the present step alone."""
        return self if self.scales is None else replace(self, rule=self.rule.current, scales=None)

    def operand(
        self, x: Tensor, to: Cast | None, role: str, axis: int = -1, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return x rounded by a cast, part of the autograd graph; `role` names it among the operands of the op."""
        if to is None or not to.is_delayed or self.scales is None:
            return x if to is None else rounded(x, to, self.seed, axis, dtype)
        return passed_on(x, self.scales.rounded(x, to, role, seed_of(x, to, self.seed)))

    @property
    def once(self) -> RoleCasts:
        """The same for products whose operands are rounded once, by the rule's own casts."""
        return replace(self, rule=rounding_once(self.rule)) if self.rule.has_products else self

    @property
    def sums_integers(self) -> bool:
        """Whether products are sums of integers.

        Raises Unavailable if the rule requests that but its operands are not int16 under one exponent.
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
        """The dtype in which gradients are written."""
        return result_dtype(self.rule.output)

    def cast(self, x: Tensor, role: str, axis: int = -1, dtype: torch.dtype | None = None) -> Tensor:
        """Return x rounded by its role, in `dtype` (by default the dtype of results); part of the autograd graph."""
        to = self.of(role)
        if self.watch is not None:
            self.watch(x, role, to)
        return x if to is None else rounded(x, to, self.seed, axis, dtype)

    def carry(self, x: Tensor, role: str, axis: int = -1) -> Tensor:
        """Return x rounded by its role, in the dtype of a contraction's operand; part of the autograd graph."""
        to = self.of(role)
        return self.cast(x, role, axis, None if to is None else carrier_dtype(to))

    def read(self, x: Tensor) -> Tensor:
        """Return an input of an op that is not a product, rounded by the rule's `input`."""
        if self.watch is not None:
            self.watch(x, role_of(x), self.rule.input)
        return rounded(x, self.rule.input, self.seed)

    def before_writer(self) -> RoleCasts:
        """Return the casts for tensors that a writer will write: the writer rounds them and informs observers."""
        return replace(self, rule=replace(self.rule, output=None), watch=None)

    def tell(self, x: Tensor, role: str) -> None:
        """Pass a tensor to observers that is cast in another way."""
        if self.watch is not None:
            self.watch(x, role, self.of(role))

    def tell_as(self, x: Tensor, role: str, to: Cast | None) -> None:
        """Pass to observers an operand of the backward pass, before a cast."""
        if self.watch is not None:
            self.watch(x, role, to, "backward")


_AS_FORWARD = Operands()


@constant_when_compiled
@remembered_by_identity
def rounding_once(rule: Rule) -> Rule:
    """Return a rule without the casts of single products."""
    return replace(rule, input_gradient=None, weight_gradient=None)


@remembered_by_identity
def _planned(rule: Rule) -> RoleCasts:
    """Return the casts of an op under a rule without observers; cached."""
    return RoleCasts(rule, accumulation(rule))


@constant_when_compiled
@remembered_by_identity
def sums_bytes(rule: Rule) -> bool:
    """Whether a rule sums products of int8 under a scale per row in int32, forward and backward."""
    casts = rule.input, rule.weight, rule.grad
    is_int32 = rule.accumulate is not None and rule.accumulate.format == "int32" and rule.output is None
    return is_int32 and all(one is not None and replace(one, rounding=_INT8.rounding) == _INT8 for one in casts)


def accumulation(rule: Rule) -> Accumulation | None:
    """Return how a rule's products of values are summed: of int8 in fp32, where bytes are not multiplied."""
    return None if sums_bytes(rule) else rule.accumulate


_INT8 = parse("int8")


@dataclass(slots=True)
class Call:
    """One call of an op that a rule matches, as the region passes it to the op's runner.

    `weight_cast` casts leaf parameters, which a region caches; `seed` gives a new seed for each stochastic cast.
    `writer` writes the results if the rule's output has a predicted exponent; see `lowp.ops.int16.flexpoint`. `watch`
    passes tensors to observers; `roles` are those of a product's operands if the op that makes the call knows them;
    `scales` are those from earlier steps, of a rule whose casts are delayed.
    """

    op: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rule: Rule
    weight_cast: WeightCast = carried  # as any other operand; a region has its cache
    seed: Callable[[], Tensor | int] = draw_seed
    writer: SiteWriter | None = None
    watch: Watch | None = None
    roles: tuple[str, str] | None = None
    scales: SiteScales | None = None

    @property
    def casts(self) -> RoleCasts:
        """How this call's tensors are rounded; holds no tensors."""
        if self.watch is None and self.roles is None and self.seed is draw_seed and not torch.compiler.is_compiling():
            return _planned(self.rule) if self.scales is None else replace(_planned(self.rule), scales=self.scales)
        roles = self.roles or ("input", "weight")
        return RoleCasts(self.rule, accumulation(self.rule), self.seed, self.watch, roles, self.scales)

    def inner(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        op: str | None = None,
        rule: Rule | None = None,
        roles: tuple[str, str] | None = None,
    ) -> Call:
        """Return the call of another function in place of this one, under its rule or another; without a writer."""
        rule = self.rule if rule is None else rule
        op = str(getattr(func, "__name__", self.op)) if op is None else op
        given = op, func, args, kwargs or {}, rule, self.weight_cast, self.seed
        return Call(*given, None, self.watch, roles, self.scales)

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return the same call with other arguments."""
        return replace(self, args=args, kwargs=kwargs)
