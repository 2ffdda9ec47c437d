"""Ops whose results are written under shared exponents that are predicted: every tensor of a step lives in int16.

An op computes from values of the format and its result is written once, by the site of the call: contractions hand over
their exact sums, and every other function, fused chains included, what it computed in fp32. Gradients are tensors like
others: what an op makes of the gradient is written on its way to each of its inputs, and where several uses of a tensor
add up, the sum is written before the op that made the tensor sees it. A gradient that is in the format already (one
use; behind ReLU, a view or a pooling) stays as it is. What moves or selects elements writes nothing.

Source: Koester et al. 2017, arXiv 1711.02213, section 3.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from lowp.casts import Cast
from lowp.kernels.dispatch import has_integer_kernels
from lowp.kernels.mantissas import has_mantissas
from lowp.ops.call import Call
from lowp.ops.generic import changed, not_in_place, run_changed, tensors_of
from lowp.ops.int16.nodes import OUTPUT_GRADIENT, OUTPUT_ROLE, gradient_roles, read_by, rounded_by
from lowp.ops.int16.pooling import select
from lowp.ops.int16.saved import as_function, computed_and_rounded
from lowp.ops.observed import told
from lowp.ops.observing import role_of
from lowp.ops.table import Row

__all__ = ["SELECTING", "fused", "is_flexpoint", "run"]

# what selects elements: its result has the values, and so the exponent, of its input
SELECTING = frozenset(
    """
    relu max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_unpool1d
    max_unpool2d max_unpool3d fractional_max_pool2d fractional_max_pool3d amax amin
    max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool1d_with_indices
    adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices fractional_max_pool2d_with_indices
    fractional_max_pool3d_with_indices median nanmedian cummax cummin
    """.split()
)
# the contractions that write each of their products themselves, from the exact sum
_EXACT = ("linear", "matmul", "reversed_matmul", "added", "einsum", "vecdot", "chain", "tensordot", "outer", "inner")
_NORMS = ("norm:layer_norm", "norm:group_norm", "norm:batch_norm")
_EXACT_RUNNERS = frozenset(
    [f"contraction:{name}" for name in _EXACT] + [f"convolution:{name}" for name in ("convolution", "conv_transpose")]
)


def is_flexpoint(cast: Cast | None) -> bool:
    """Whether results of a cast are written under exponents that belong to places: int16 and not ``current``."""
    if cast is None or not has_mantissas(cast):
        return False
    return cast.scaling is not None and cast.scaling.kind != "current"


def run(row: Row, call: Call) -> Any:
    """Run an op, and write its results and its gradients by the call's site."""
    if row.name in SELECTING:
        return _select(call)
    runner = row.run(call.rule)
    if (row.product or row.runner) in _EXACT_RUNNERS or (row.runner in _NORMS and _has_integer_kernels(call)):
        return runner(call)
    return fused(row, call)


def _select(call: Call) -> Any:
    if call.watch is None:
        return select(call)
    for x in tensors_of((call.args, call.kwargs)):
        call.watch(x, role_of(x), None)
    return told(select(call), call.watch)


def _has_integer_kernels(call: Call) -> bool:
    return has_integer_kernels(*(x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)))


def fused(row: Row, call: Call) -> Any:
    """Run a function in fp32 on values of the format, and write what it returns once.

    Attention and recurrent networks round the operands of the products inside, which are summed in fp32.
    """
    site = call.site
    assert site is not None
    gradient_role = gradient_roles()

    def read(x: Tensor) -> Tensor:
        if call.watch is not None:
            call.watch(x, role_of(x), None)
        return read_by(x, site, gradient_role(x))

    def write(y: Tensor) -> Tensor:
        return rounded_by(y, site.part(), OUTPUT_ROLE, OUTPUT_GRADIENT)

    if not row.is_contraction:
        outside, target = not_in_place(call)
        if target is not None:
            return target.copy_(fused(row, outside))
        kept = as_function(call)
        if kept is not None:
            return computed_and_rounded(kept[0], call, kept[1])
        return run_changed(call, read, write)
    rule = replace(call.rule, output=None, accumulate=None)
    args, kwargs = changed(call.args, read), changed(call.kwargs, read)
    inner = Call(call.op, call.func, args, kwargs, rule, call.weight_cast, call.seed)  # unobserved: told of already
    return changed(row.run(rule)(inner), write)
