"""A linear layer of int16 mantissas as one call of the C++ library, and its gradients as another one.

They compute what `mantissas.current_mantissas`, `integer.matmul_chained` and `mantissas.sums` do, bit for bit, for
layers so small that the calls take longer than the arithmetic. Nothing is kept beside a tensor, and nothing is read of
what was: each call converts what lies in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.kernels import cpu
from lowp.kernels.choose.dispatch import chosen
from lowp.kernels.int16.cpu_int16 import is_direct, own_exponent
from lowp.kernels.int16.integer_run import check_status, is_observed
from lowp.kernels.int16.low_words import FEATURES
from lowp.kernels.int16.mantissas import Mantissas, has_mantissas, readable
from lowp.kernels.tracing import is_quiet, is_wrapped

__all__ = ["Sizes", "gradients", "linear", "parts", "serves", "without_gradients"]

MOST = 1 << 15  # elements of an operand: larger ones share what is kept of them, which is memory
_MOST_SHAPES = 256
_NOT_FINITE = 4  # kUnfit in cpu/linear.cpp


class Sizes(NamedTuple):
    """The sizes of y[m, n] = x[m, k] w[n, k]^T."""

    m: int
    n: int
    k: int


def serves(to: Cast) -> bool:
    """Whether a cast rounds operands as this does: to int16 under the exponent of their own maximum, to nearest."""
    return has_mantissas(to) and not to.is_stochastic and (to.scaling is None or to.scaling.exponent is None)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, casts: tuple[Cast, Cast], keeps: bool
) -> tuple[Tensor, Tensor | None] | None:
    """Return x[m, k] @ weight[n, k].t() + bias[n] in fp32, and if `keeps` what `gradients` reads; no graph is recorded.

    None where it is left to others: large tensors, infinities, other dtypes and layouts, an instruction set of products
    that is not the library's.
    """
    m, k = x.shape
    n = weight.shape[0]
    if x.numel() > MOST or weight.numel() > MOST or m * n > MOST or n >= FEATURES or is_observed():
        return None
    if not (is_direct(x, weight) if bias is None else is_direct(x, weight, bias)):
        return None
    (to_x, *of_x), (to_weight, *of_weight) = own_exponent(casts[0]), own_exponent(casts[1])
    y = torch.empty(m, n, dtype=torch.float32, device="cpu")
    kept = torch.empty((m + n) * k + 2, dtype=torch.int16, device="cpu") if keeps else None
    given, kernel = array("q", (m, n, k, *of_x, *of_weight)), cpu.asked()
    status = cpu.loaded().lowp_linear_int16(
        kernel.encode() or None,
        to_x,
        to_weight,
        x,
        weight,
        bias,
        given,
        kept,
        torch.get_num_threads(),
        y,
    )
    if status == _NOT_FINITE:
        return None
    check_status(status, kernel)
    return y, kept


def without_gradients(casts: tuple[Cast, Cast]) -> Callable[[Any, Any, Any], Tensor | None]:
    """Return the function of what `linear` computes of x, weight and bias where nothing is kept, planned by shapes.

    Outside torch.func and forward-mode autograd. It returns None where `linear` does, and for other than matrices.
    """
    (to_x, *of_x), (to_weight, *of_weight) = own_exponent(casts[0]), own_exponent(casts[1])
    plans: dict[tuple[torch.Size, torch.Size], array[int] | None] = {}

    def plan(x: torch.Size, weight: torch.Size) -> array[int] | None:
        if len(plans) >= _MOST_SHAPES:
            plans.clear()
        found = None
        if len(x) == len(weight) == 2 and x[1] == weight[1] and weight[0] < FEATURES:
            (m, k), n = x, weight[0]
            if 0 < m * k <= MOST and 0 < n * k <= MOST and m * n <= MOST:
                found = array("q", (m, n, k, *of_x, *of_weight))
        plans[x, weight] = found
        return found

    def run(x: Any, weight: Any, bias: Any) -> Tensor | None:
        if chosen() not in ("cpu", None) or is_observed() or not _are_plain(x, weight, bias):
            return None
        shapes = x.shape, weight.shape
        given = plans[shapes] if shapes in plans else plan(*shapes)
        if given is None or (own := cpu.library()) is None or not (_is_readable(x) and _is_readable(weight)):
            return None
        m, n, *_ = given
        if bias is not None and not (_is_readable(bias) and bias.is_contiguous() and bias.shape == (n,)):
            return None
        y, kernel = torch.empty(m, n, dtype=torch.float32, device="cpu"), cpu.asked()
        status = own.lowp_linear_int16(
            kernel.encode() or None,
            to_x,
            to_weight,
            x,
            weight,
            bias,
            given,
            None,
            torch.get_num_threads(),
            y,
        )
        if status == _NOT_FINITE:
            return None
        check_status(status, kernel)
        return y

    return run


def _is_readable(x: Tensor) -> bool:
    """Whether a plain tensor has memory on the CPU that holds its numbers as they are."""
    if not x.is_cpu or x.layout is not torch.strided or x.is_neg() or is_wrapped(x):
        return False
    address = x.data_ptr()
    return address != 0 and address % 4 == 0


def gradients(
    gradient: Tensor, kept: Tensor, sizes: Sizes, cast: Cast, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
    """Return the gradients of x, weight and bias that are needed, in fp32, from that of the result [m, n].

    A gradient that lies otherwise, such as that of a sum, is laid out first. None where it is not finite, and in fp64.
    """
    if is_observed():
        return None
    if not is_direct(gradient) and not is_direct(gradient := readable(gradient)):
        return None
    m, n, k = sizes
    kept = kept.contiguous()  # hooks on saved tensors may have laid it out otherwise
    to, *own = own_exponent(cast)
    found = [
        torch.empty(shape, dtype=torch.float32, device="cpu") if needed else None
        for shape, needed in zip(((m, k), (n, k), (n,)), needs, strict=True)
    ]
    given, kernel = array("q", (m, n, k, *own)), cpu.asked()
    status = cpu.loaded().lowp_linear_int16_gradients(
        kernel.encode() or None,
        to,
        gradient,
        kept,
        given,
        torch.get_num_threads(),
        *found,
    )
    if status == _NOT_FINITE:
        return None
    check_status(status, kernel)
    return found[0], found[1], found[2]


def parts(kept: Tensor, sizes: Sizes) -> tuple[Mantissas, Mantissas]:
    """Return the mantissas of x and of weight that `linear` has kept."""
    m, n, k = sizes
    first, second = kept[: m * k].view(m, k), kept[m * k : -2].view(n, k)
    of_x, of_weight = kept[-2:].tolist()
    return Mantissas(first, of_x), Mantissas(second, of_weight)


def _are_plain(x: Any, weight: Any, bias: Any) -> bool:
    """Whether these are plain fp32 tensors, two of them contiguous on the CPU, and no dispatch mode or trace sees them.

    Outside torch.func and forward-mode autograd, which callers exclude. A bias of another layout or device is left to
    the product, which takes or refuses it.
    """
    if type(x) not in cpu.PLAIN or type(weight) not in cpu.PLAIN or (bias is not None and type(bias) not in cpu.PLAIN):
        return False
    fp32, strided = torch.float32, torch.strided
    if x.dtype is not fp32 or weight.dtype is not fp32 or (bias is not None and bias.dtype is not fp32):
        return False
    if not x.is_cpu or not weight.is_cpu or x.layout is not strided or weight.layout is not strided:
        return False
    if x.is_nested or weight.is_nested:
        return False
    return x.is_contiguous() and weight.is_contiguous() and is_quiet()
