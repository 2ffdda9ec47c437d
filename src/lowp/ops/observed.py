"""Ops that no rule casts, for observers: their inputs and results, and the gradients of both.

The function runs unchanged. Hooks see its gradients and do not change them.
"""

from typing import Any

from torch import Tensor, nn

from lowp.nested import tensors_of
from lowp.ops.call import Call
from lowp.ops.generic import changed, is_out_of_place, run_changed
from lowp.ops.observing import Watch, role_of
from lowp.ops.rows import Row


def observed(row: Row, call: Call) -> Any:
    """Run a function unchanged, and pass its tensors to the call's observers; for products also all gradients."""
    watch = call.watch
    assert watch is not None
    roles = _roles(row, tensors_of((call.args, call.kwargs)))
    for x, role in roles.values():
        watch(x, role, None)
    if not (row.is_contraction or row.op_class == "norm") or not is_out_of_place(call):
        return told(run_changed(call, lambda x: x), watch)
    aliases: dict[int, Tensor] = {}

    def alias(x: Tensor) -> Tensor:
        """Another name of x, whose gradient is that of this op alone; one that comes twice stays one object."""
        if not x.requires_grad or id(x) not in roles:
            return x
        if id(x) not in aliases:
            aliases[id(x)] = x.view_as(x)
            watch.gradient(aliases[id(x)], f"{roles[id(x)][1]} gradient")
        return aliases[id(x)]

    return told(run_changed(call, alias), watch)


def told(result: Any, watch: Watch) -> Any:
    """Return the result of an op, after passing it and later its gradient to observers."""

    def tell(y: Tensor) -> Tensor:
        watch(y, "output", None)
        watch.gradient(y)
        return y

    return changed(result, tell)


def _roles(row: Row, tensors: list[Tensor]) -> dict[int, tuple[Tensor, str]]:
    """Return the tensors that an op reads, each once, with their roles; biases and running statistics have none.

    Those of a contraction are in the order of its row. What follows there and in norms counts where it is a weight; in
    other ops, everything does.
    """
    named = row.operands.split() if row.is_contraction else ["input"]
    if len(tensors) > 1 and named == ["input", "weight"] and isinstance(tensors[0], nn.Parameter):
        named = ["weight", role_of(tensors[1])]
    counts_all = not row.is_contraction and row.op_class != "norm"
    found: dict[int, tuple[Tensor, str]] = {}
    for index, x in enumerate(tensors):
        role = named[index] if index < len(named) else role_of(x) if counts_all else _later(row, x, found)
        if role:
            found.setdefault(id(x), (x, role_of(x) if role == "input" else role))
    return {key: pair for key, pair in found.items() if pair[1] != "bias"}


def _later(row: Row, x: Tensor, found: dict[int, tuple[Tensor, str]]) -> str:
    """Return the role of a further tensor of a product or norm; in a norm the first parameter counts."""
    if not isinstance(x, nn.Parameter):
        return ""
    is_first = all(role != "weight" for _, role in found.values())
    return "weight" if (x.dim() > 1 if row.is_contraction else is_first) else "bias"
