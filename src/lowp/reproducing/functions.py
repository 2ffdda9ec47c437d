"""Sums and functions of numbers with one definition: the same bits on every processor.

torch's exp, log, tanh, erf and even sqrt are those of a library that it chooses by the processor, and its kernels fuse
multiplications with additions where the processor can. What follows is made of single multiplications, additions and
divisions, each of them an operation of torch and rounded by IEEE 754, in fp64; of rsqrt, which torch computes by the
processor's exact square root and division; and of sums by `fp32_products`. Functions are accurate to four units in the
last place of fp64, erf to twelve, and so are rounded to fp32 as the exact ones but for one number in a hundred million
or fewer.
"""

import math
from collections.abc import Callable, Sequence
from functools import wraps

import torch
from torch import Tensor

from lowp.kernels.products import fp32_products

_LN2_HIGH, _LN2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10  # fdlibm's e_log.c: 32 bits, and the rest
_QUARTERS = (1.57079632673412561417, 6.07710050630396597660e-11, 2.02226624879595063154e-21)  # of pi / 2, as there
_Function = Callable[[Tensor], Tensor]


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Return the sum of coefficients[k] x^k by Horner's rule."""
    total = torch.full_like(x, coefficients[-1])
    for one in reversed(coefficients[:-1]):
        total = total * x + one
    return total


def in_fp64(function: _Function) -> _Function:
    """Decorate a function of fp64: numbers of fewer bits are widened, and the result is rounded to their dtype."""

    @wraps(function)
    def outer(x: Tensor) -> Tensor:
        dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
        found = function(x.double())
        return found if dtype is torch.float64 else found.float().to(dtype)

    return outer


def _times_power(x: Tensor, n: Tensor) -> Tensor:
    """Return x 2^n for whole numbers n of up to 2000."""
    half = (n / 2).floor()
    for one in (half, n - half):
        x = x * ((one.long() + 1023) << 52).view(torch.float64)
    return x


_EXPONENTIAL = [1 / math.factorial(k + 1) for k in range(14)]


def _reduced(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return n and exp(r) - 1 with x = n ln 2 + r, |r| <= ln 2 / 2."""
    x = x.clamp(-800, 800)  # beyond, fp64 has 0 and infinity
    n = (x * (1 / math.log(2))).round()
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    return n, r * _polynomial(r, _EXPONENTIAL)


@in_fp64
def exp(x: Tensor) -> Tensor:
    """The exponential."""
    n, rest = _reduced(x)
    return _times_power(rest + 1, n)


@in_fp64
def expm1(x: Tensor) -> Tensor:
    """The exponential less 1."""
    n, rest = _reduced(x)
    found = _times_power(rest, n) + (_times_power(torch.ones_like(x), n) - 1)
    found = found.where(n < 1000, _times_power(rest + 1, n))  # where 2^n may be infinite, and 1 is nothing beside it
    return found.where(~x.isnan() & (x != 0), x)


@in_fp64
def log(x: Tensor) -> Tensor:
    """The natural logarithm, of 2^e m by the series of artanh((m - 1) / (m + 1))."""
    m, e = torch.frexp(x)
    is_small = m < math.sqrt(0.5)
    m, e = torch.where(is_small, m * 2, m), e.double() - is_small.double()
    s = (m - 1) / (m + 1)
    series = s * _polynomial(s * s, [2 / (2 * k + 1) for k in range(12)])
    found = (series + e * _LN2_LOW) + e * _LN2_HIGH
    found = found.where(x > 0, torch.where(x == 0, -torch.inf, torch.nan))
    return found.where(x != torch.inf, torch.inf)


@in_fp64
def log1p(x: Tensor) -> Tensor:
    """The logarithm of 1 + x (Higham 2002, problem 1.5)."""
    whole = x + 1
    moved = whole - 1
    found = log(whole) * (x / moved)
    return found.where(moved != 0, x).where(whole != torch.inf, torch.inf)


@in_fp64
def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    found = expm1(x.abs() * -2)
    return torch.copysign(found / (found + 2), x)


@in_fp64
def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return (exp(-x) + 1).reciprocal()


@in_fp64
def erf(x: Tensor) -> Tensor:
    """The error function by exp(-x^2) times a series of positive terms (Abramowitz and Stegun 7.1.6)."""
    near = x.clamp(-6, 6)
    square = near * near
    series = torch.ones_like(x)
    for k in range(120, 0, -1):
        series = series * (square * (2 / (2 * k + 1))) + 1
    found = near * series * exp(-square) * (2 / math.sqrt(math.pi))
    return found.where(~(x.abs() > 6), x.sign())  # to the last bit, so that gelu ends at 0


@in_fp64
def sqrt(x: Tensor) -> Tensor:
    """The square root."""
    return x.rsqrt().reciprocal()


def _turned(x: Tensor, quarters: int) -> Tensor:
    """Return the sine of x + quarters pi / 2, for |x| of up to a million."""
    n = (x * (2 / math.pi)).round()
    r = x
    for part in _QUARTERS:
        r = r - n * part
    square = r * r
    sine = r * _polynomial(square, [(-1) ** k / math.factorial(2 * k + 1) for k in range(10)])
    cosine = _polynomial(square, [(-1) ** k / math.factorial(2 * k) for k in range(10)])
    n = n.remainder(4) + quarters
    found = torch.where(n.remainder(2) == 0, sine, cosine)
    return torch.where(n.remainder(4) >= 2, -found, found)


@in_fp64
def sin(x: Tensor) -> Tensor:
    """The sine."""
    return _turned(x, 0).where(x != 0, x)


@in_fp64
def cos(x: Tensor) -> Tensor:
    """The cosine."""
    return _turned(x, 1)


def power(x: Tensor | float, y: Tensor | float) -> Tensor:
    """Return x^y; by multiplications for whole powers of up to 4, for others by `exp` and `log`."""
    if isinstance(y, (int, float)) and isinstance(x, Tensor):
        if y in (-0.5, 0.5, -1):
            return {-0.5: x.rsqrt, 0.5: lambda: sqrt(x), -1: x.reciprocal}[y]()
        if y in (0, 1, 2, 3, 4):
            found = torch.ones_like(x)
            for _ in range(int(y)):
                found = found * x
            return found
    dtype = torch.result_type(x, y)
    base, exponent = (torch.as_tensor(one, dtype=torch.float64) for one in (x, y))
    found = exp(exponent * log(base.abs()))
    is_odd = exponent.remainder(2) == 1
    found = torch.where((base < 0) & is_odd, -found, found)
    found = found.where((base >= 0) | (base == -torch.inf) | (exponent == exponent.floor()), torch.nan)
    found = found.where((exponent != 0) & (base != 1), 1.0)
    return found if dtype is torch.float64 else found.float().to(dtype)


def total(x: Tensor, dims: Sequence[int] | int | None = None, keepdim: bool = False) -> Tensor:
    """Return the sum along dimensions, all if none are given: in fp32 of up to 32 bits, in fp64 one after another."""
    listed = [dims] if isinstance(dims, int) else list(dims or range(x.dim()))
    summed = [dim % max(x.dim(), 1) for dim in listed]
    kept = [dim for dim in range(x.dim()) if dim not in summed]
    shape = [1 if dim in summed else size for dim, size in enumerate(x.shape) if keepdim or dim in kept]
    rows = math.prod(x.shape[dim] for dim in summed) if x.dim() else 1
    order = (*summed, *kept) if x.dim() else ()
    matrix = x.detach().permute(order).reshape(rows, math.prod(x.shape[dim] for dim in kept))
    if not x.is_floating_point() or not matrix.numel():
        return matrix.sum(0).reshape(shape)  # whole numbers: exact
    if x.dtype is torch.float64:
        return matrix.cumsum(0)[-1].reshape(shape)
    return fp32_products.sum_of_rows(matrix).reshape(shape)


def mean(x: Tensor, dims: Sequence[int] | int | None = None, keepdim: bool = False) -> Tensor:
    """Return the mean along dimensions in fp32, or fp64."""
    found = total(x, dims, keepdim)
    return found / (x.numel() // found.numel() if found.numel() else math.nan)


def wide(x: Tensor) -> Tensor:
    """Return x in fp32, or in fp64 as it is."""
    return x if x.dtype is torch.float64 else x.float()


def moments(x: Tensor, dim: Sequence[int] | int | None, correction: float, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Return variance and mean in fp32 or fp64."""
    middle = mean(x, dim, True)
    squares = (wide(x) - middle).square()
    variance = total(squares, dim, keepdim)
    count = x.numel() // max(middle.numel(), 1) - correction
    return variance / max(count, 0), middle.reshape(variance.shape)


def multiplied(left: Tensor, right: Tensor) -> Tensor:
    """Return left [..., m, k] times right [..., k, n] in the wider dtype of fp32 and theirs."""
    if left.dtype is not torch.float64:
        return fp32_products.multiply(left.detach(), right.detach())
    found = left.new_zeros(*left.shape[:-1], right.shape[-1])
    for k in range(left.shape[-1]):
        found = found + left[..., k, None] * right[..., None, k, :]
    return found


def normal(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return normal numbers in the shape and dtype of a tensor, by Box and Muller's transform of uniform ones."""
    half = (like.numel() + 1) // 2
    radius, angle = torch.rand(2, half, dtype=torch.float64, generator=generator)
    radius = sqrt(log(1 - radius) * -2)
    both = torch.cat([radius * cos(angle * (2 * math.pi)), radius * sin(angle * (2 * math.pi))])
    return both[: like.numel()].reshape(like.shape).float().to(like.dtype)
