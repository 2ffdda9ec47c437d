"""Ops whose results are written under predicted shared exponents: every tensor of a step is in int16.

An op reads values of the format, and the call's writer writes its result once: contractions write their exact sums,
all other functions, including fused chains, their fp32 results. Gradients are written in the same way: the gradient of
each input is written when it leaves the op, and if a tensor has several uses, the sum of its gradients is written
before the op that produced the tensor reads it. A gradient that is already in the format (of a single use, or after
ReLU, a view or a pooling) stays unchanged. Ops that move or select elements write nothing.

Source: Koester et al. 2017, arXiv 1711.02213, section 3.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowp.kernels.choose.dispatch import answers_at_once
from lowp.ops.call import Call
from lowp.ops.generic import changed, not_in_place, run_changed
from lowp.ops.int16.nodes import OUTPUT_GRADIENT, OUTPUT_ROLE, gradient_roles, read_by, rounded_by
from lowp.ops.int16.saved import as_function, computed_and_rounded
from lowp.ops.observing import role_of
from lowp.ops.rows import Row, runner

# the first arguments of F.embedding and F.embedding_bag; the third is padding_idx of one and offsets of the other
_EMBEDDING = ("input", "weight", "", "max_norm", "norm_type")


# -- runners of a row and a call: `at_site` in the table's rows ------------------------------------------------------


def by_itself(row: Row, call: Call) -> Any:
    """Run a contraction that writes each of its products from the exact sum."""
    return runner(row.product or row.runner)(call)


def norm(row: Row, call: Call) -> Any:
    """Run a norm, which writes its own result and gradients if it computes with integers."""
    tensors = (x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor))
    return row.run(call.rule)(call) if all(map(answers_at_once, tensors)) else fused(row, call)


def again(row: Row, call: Call) -> Any:
    """Run a function whose inputs are kept as mantissas, from which backward computes it again; of dropout a mask."""
    if call.func is F.cross_entropy and (kept := as_function(call)) is not None:  # it never writes in place
        return computed_and_rounded(kept[0], call, kept[1])
    return fused(row, call, keeps=True)


def fused(row: Row, call: Call, keeps: bool = False) -> Any:
    """Run a function in fp32 on values of the format, and write its result once.

    `keeps`: its inputs are kept for backward where `as_function` finds that they can be. Attention and recurrent
    networks round the operands of their inner products, which are summed in fp32.
    """
    writer = call.writer
    assert writer is not None
    gradient_role = gradient_roles()

    def read(x: Tensor) -> Tensor:
        if call.watch is not None:
            call.watch(x, role_of(x), None)
        return read_by(x, writer, gradient_role(x))

    def write(y: Tensor) -> Tensor:
        return rounded_by(y, writer.part(), OUTPUT_ROLE, OUTPUT_GRADIENT)

    if not row.is_contraction:
        call = _renormalized(call)
        outside, target = not_in_place(call)
        if target is not None:
            return target.copy_(fused(row, outside, keeps))
        if keeps and (kept := as_function(call)) is not None:
            return computed_and_rounded(kept[0], call, kept[1])
        return run_changed(call, read, write)
    rule = replace(call.rule, output=None, accumulate=None)
    args, kwargs = changed(call.args, read), changed(call.kwargs, read)
    inner = Call(call.op, call.func, args, kwargs, rule, call.weight_cast, call.seed)  # observers know of the call
    return changed(row.run(rule)(inner), write)


def _renormalized(call: Call) -> Call:
    """Return a call of F.embedding or F.embedding_bag without `max_norm`, which is applied to the parameter first.

    torch applies it in place, which it refuses to what an op reads here. The next step writes the rows in the format.
    """
    given = dict(zip(_EMBEDDING, call.args, strict=False)) | call.kwargs
    if call.func not in (F.embedding, F.embedding_bag) or given.get("max_norm") is None:
        return call
    with torch.no_grad():
        rows, norm = given["input"].reshape(-1).contiguous(), given.get("norm_type", 2.0)
        torch.embedding_renorm_(given["weight"].detach(), rows, given["max_norm"], norm)
    place = _EMBEDDING.index("max_norm")
    args = tuple(None if index == place else one for index, one in enumerate(call.args))
    return call.given(args, {name: one for name, one in call.kwargs.items() if name != "max_norm"})
