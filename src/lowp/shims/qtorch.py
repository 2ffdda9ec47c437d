"""`qtorch.quant` on exact kernels: the functions, defaults and number classes of QPyTorch 0.3.0.

Zhang et al. 2019, "QPyTorch: A Low-Precision Arithmetic Simulation Framework", arXiv 1910.04540. What differs, because
the original is wrong there (each input below was run, in fp32):

* nearest rounds ties to even, as QPyTorch documents; it rounds float ties away from zero (1.0625 in exp 4, man 3 gives
  1.125, not 1) and block ties up (2.5 of a block with maximum 64, wl 8, gives 3, not 2). `rounding="nearest-away"` and
  every other rounding of lowp can be asked for, too.
* nothing is rounded twice: fixed point 0.50000006 at fl 0 gives 1 (there 0, by way of 0.5 + 0.5 in fp32).
* NaN stays NaN (there 480 in exp 4, man 3; the payload 0x7fffffff becomes -0 in exp 8, man 7, and 0x7f800001 infinity).
* -0 stays -0 in floating point (there +0). Fixed and block numbers are two's complement, and have no -0.
* stochastic rounding is unbiased below the smallest normal number, too, where QPyTorch first adds a normal number in
  fp32 (2**-31 in exp 4, man 3 is never rounded up there); it depends on the seed and the logical index alone, and
  `torch.manual_seed` repeats it (QPyTorch draws float and block numbers from the machine's entropy).
* gradients pass straight through `float_quantize` and its two relatives, as through `quantizer`; there the result of
  the bare functions is cut off the graph.
* fp64, fp32, fp16 and bf16 tensors are taken, each rounded once; there fp32 alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import ldexp
from typing import ClassVar

import torch
from torch import Tensor, nn

from lowp import kernels
from lowp.casts import Cast, Rounding
from lowp.errors import InvalidInput, check_name
from lowp.formats import FloatFormat, Specials
from lowp.kernels.numbers.floats import narrow, widen
from lowp.shims.straight_through import drawn_seed, straight_through, whole_number

ROUNDINGS = {"nearest": "nearest-even", **{str(mode): str(mode) for mode in Rounding}}
Seed = int | Tensor | None


# -- numbers ----------------------------------------------------------------------------------------------------------
class Number(ABC):
    """What `quantizer` takes: FloatingPoint, FixedPoint or BlockFloatingPoint."""

    _shown: ClassVar[dict[str, str]] = {}  # words of QPyTorch, and fields

    def __repr__(self) -> str:
        fields = ", ".join(f"{word}={getattr(self, name)}" for word, name in self._shown.items())
        return f"{type(self).__name__} ({fields})"

    @abstractmethod
    def rounded(self, x: Tensor, rounding: str, seed: Seed = None) -> Tensor:
        """Return x rounded to the number; the gradient passes straight through."""


@dataclass(frozen=True, repr=False)
class FloatingPoint(Number):
    """`exp` exponent bits (1 to 8) and `man` mantissa bits (1 to 23); bias 2**(exp - 1) - 1, subnormals.

    Up to 7 exponent bits no code is kept for infinity and NaN: numbers reach (2 - 2**-man) * 2**(2**(exp - 1)) and
    saturate there. With 8 the range is that of fp32, whose infinity it has.
    """

    exp: int
    man: int
    _shown: ClassVar = {"exponent": "exp", "mantissa": "man"}

    def __post_init__(self) -> None:
        whole_number("exp", self.exp, 1, 8)
        whole_number("man", self.man, 1, 23)

    @property
    def format(self) -> FloatFormat:
        """The format in lowp's terms. Raises InvalidInput for one exponent bit, which makes evenly spaced numbers."""
        if self.exp == 1:
            raise InvalidInput(
                f"{self} is evenly spaced and not a FloatFormat: use FixedPoint({self.man + 2}, {self.man - 1})"
            )
        specials = Specials.IEEE if self.exp == 8 else Specials.FINITE
        return FloatFormat(f"e{self.exp}m{self.man}", self.exp, self.man, specials)

    def rounded(self, x: Tensor, rounding: str, seed: Seed = None) -> Tensor:
        mode = _rounding(rounding)
        if self.exp == 1:
            return straight_through(x, partial(self._evenly_spaced, mode=mode, seed=seed))
        seed = _seed(mode, seed)
        specials = "" if self.exp == 8 else "finite"
        result: Tensor = kernels.quantize(x, f"e{self.exp}m{self.man}{specials}:{mode}", seed=seed)
        return result

    def _evenly_spaced(self, x: Tensor, mode: str, seed: Seed) -> Tensor:
        """Round to multiples of 2**(1 - man) in sign and magnitude: what one exponent bit leaves."""
        limit = 4.0 - ldexp(1.0, 1 - self.man)
        wide = _multiple(widen(x), self.man - 1, mode, seed).clamp(-limit, limit)
        return _narrow(torch.copysign(wide, x), x.dtype, str(self))


@dataclass(frozen=True, repr=False)
class FixedPoint(Number):
    """Multiples of 2**-fl in `wl` bits of two's complement: -2**(wl - fl - 1) to 2**(wl - fl - 1) - 2**-fl.

    `clamp` False leaves the range open; `symmetric` leaves the smallest number out (Gupta et al. 2015, arXiv
    1502.02551).
    """

    wl: int
    fl: int
    clamp: bool = True
    symmetric: bool = False
    _shown: ClassVar = {"wl": "wl", "fl": "fl"}

    def __post_init__(self) -> None:
        whole_number("wl", self.wl, 1, 64)
        whole_number("fl", self.fl, 1, 1000)
        for name in ("clamp", "symmetric"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInput(f"{name} is True or False, not {getattr(self, name)!r}")

    def rounded(self, x: Tensor, rounding: str, seed: Seed = None) -> Tensor:
        return fixed_point_quantize(x, self.wl, self.fl, self.clamp, self.symmetric, rounding, seed=seed)


@dataclass(frozen=True, repr=False)
class BlockFloatingPoint(Number):
    """`wl`-bit integers, symmetric, under one power of two a block: that of the block's largest magnitude.

    `dim` -1 makes the whole tensor one block; otherwise each index of dimension `dim` is a block.
    """

    wl: int
    dim: int = -1
    _shown: ClassVar = {"wl": "wl", "dim": "dim"}

    def __post_init__(self) -> None:
        whole_number("wl", self.wl, 2, 32)
        whole_number("dim", self.dim, -1, 63)

    def rounded(self, x: Tensor, rounding: str, seed: Seed = None) -> Tensor:
        mode = _rounding(rounding)
        if self.dim >= x.dim():
            raise InvalidInput(
                f"dim {self.dim} is not a dimension of a tensor {tuple(x.shape)}: give -1 to {x.dim() - 1}"
            )
        scope = "tensor" if self.dim == -1 else "channel"
        cast, seed = f"i{self.wl}s@2^-1022..1023/{scope}:{mode}", _seed(mode, seed)
        if self.dim <= 0:
            result: Tensor = kernels.quantize(x, cast, seed=seed)
            return result
        result = kernels.quantize(x.movedim(self.dim, 0).contiguous(), cast, seed=seed)
        return result.movedim(0, self.dim).contiguous()


# -- functions --------------------------------------------------------------------------------------------------------
def float_quantize(x: Tensor, exp: int, man: int, rounding: str = "stochastic", *, seed: Seed = None) -> Tensor:
    """Return x rounded to a floating-point number of `exp` exponent and `man` mantissa bits; see `FloatingPoint`.

    NaN stays NaN, -0 stays -0; infinity saturates up to 7 exponent bits. Gradients pass straight through.
    Raises ValueError for a number that is not possible or a dtype that cannot hold it.
    """
    return FloatingPoint(exp, man).rounded(_tensor(x), rounding, seed)


def fixed_point_quantize(
    x: Tensor,
    wl: int,
    fl: int,
    clamp: bool = True,
    symmetric: bool = False,
    rounding: str = "stochastic",
    *,
    seed: Seed = None,
) -> Tensor:
    """Return x rounded to a fixed-point number of `wl` bits, `fl` of them behind the point; see `FixedPoint`.

    `fl` may be zero or negative here. NaN stays NaN, an infinity is clamped (or stays), zeros are +0. Gradients pass
    straight through, also where x is clamped.
    """
    whole_number("wl", wl, 1, 64)
    whole_number("fl", fl, -900, 1000)
    mode, x = _rounding(rounding), _tensor(x)
    if clamp and 2 <= wl <= 32:
        cast = f"i{wl}{'s' if symmetric else ''}@2^{-fl}..{-fl}/tensor:{mode}:static({-fl})"
        result: Tensor = kernels.quantize(x, cast, seed=_seed(mode, seed))
        return result
    return straight_through(x, lambda values: _fixed_point(values, wl, fl, clamp, symmetric, mode, seed)[0])


def block_quantize(x: Tensor, wl: int, dim: int = -1, rounding: str = "stochastic", *, seed: Seed = None) -> Tensor:
    """Return x rounded to block floating point of `wl` bits; see `BlockFloatingPoint`.

    The exponent comes from the finite numbers of the block; NaN stays NaN, an infinity saturates (in QPyTorch either
    turns the block to NaN). Gradients pass straight through.
    """
    return BlockFloatingPoint(wl, dim).rounded(_tensor(x), rounding, seed)


def quantizer(
    forward_number: Number | None = None,
    backward_number: Number | None = None,
    forward_rounding: str = "stochastic",
    backward_rounding: str = "stochastic",
    clamping_grad_zero: bool = False,
    backward_hooks: Iterable[Callable[[Tensor], Tensor]] = (),
) -> Callable[[Tensor], Tensor]:
    """Return a function that rounds a tensor to one number and its gradient to another; None rounds nothing.

    `clamping_grad_zero` sets the gradient to zero where a fixed-point number was clamped. `backward_hooks` are applied
    to the gradient before it is rounded. (QPyTorch calls them, and zeroes gradients, only where `clamping_grad_zero`
    and a `backward_number` are given both.)
    """
    for number in (forward_number, backward_number):
        if number is not None and not isinstance(number, Number):
            raise InvalidInput(
                f"a number must be FloatingPoint, FixedPoint, BlockFloatingPoint or None, not {type(number).__name__}"
            )
    _rounding(forward_rounding), _rounding(backward_rounding)
    if clamping_grad_zero and not (
        forward_number is None or (isinstance(forward_number, FixedPoint) and forward_number.clamp)
    ):
        raise InvalidInput(
            f"clamping_grad_zero needs a FixedPoint that clamps as forward_number, not {forward_number}: "
            "only then the clamped values are known"
        )
    hooks = tuple(backward_hooks)

    def quantize(x: Tensor) -> Tensor:
        clamped: list[Tensor] = []

        def forward(values: Tensor) -> Tensor:
            if forward_number is None:
                return values.clone()
            if not clamping_grad_zero:
                return forward_number.rounded(values, forward_rounding)
            assert isinstance(forward_number, FixedPoint)
            number = forward_number
            rounded, outside = _fixed_point(
                values, number.wl, number.fl, True, number.symmetric, _rounding(forward_rounding), None
            )
            clamped.append(outside)
            return rounded

        def backward(gradient: Tensor) -> Tensor:
            for hook in hooks:
                gradient = hook(gradient)
            if backward_number is not None:
                gradient = backward_number.rounded(gradient, backward_rounding)
            return gradient.masked_fill(clamped[0], 0) if clamped else gradient

        return straight_through(x, forward, backward)

    return quantize


class Quantizer(nn.Module):
    """`quantizer` as a module."""

    def __init__(
        self,
        forward_number: Number | None = None,
        backward_number: Number | None = None,
        forward_rounding: str = "stochastic",
        backward_rounding: str = "stochastic",
    ) -> None:
        super().__init__()
        self.quantize = quantizer(forward_number, backward_number, forward_rounding, backward_rounding)

    def forward(self, x: Tensor) -> Tensor:
        """Return x rounded."""
        return self.quantize(x)


# -- in lowp's terms --------------------------------------------------------------------------------------------------
def _rounding(name: str) -> str:
    check_name("rounding", name, ROUNDINGS)
    return ROUNDINGS[name]


def _seed(mode: str, seed: Seed) -> int | Tensor:
    return drawn_seed(seed) if mode == "stochastic" else 0


def _tensor(x: object) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a floating-point tensor, not {type(x).__name__}")
    return x


def _multiple(x: Tensor, fraction_bits: int, mode: str, seed: Seed) -> Tensor:
    """Return the fp64 numbers `x` rounded to multiples of 2**-fraction_bits.

    The subnormal numbers of a format are evenly spaced: here those of 52 mantissa bits, up to 2**(52 - fraction_bits),
    from where on every fp64 number is such a multiple.
    """
    spaced = FloatFormat("spaced", 2, 52, Specials.FINITE, fraction_bits - 52)
    rounded: Tensor = kernels.quantize(x, Cast(spaced, Rounding(mode)), seed=_seed(mode, seed))
    return torch.where(x.abs() >= spaced.smallest_normal, x, rounded)


def _fixed_point(
    x: Tensor, wl: int, fl: int, clamp: bool, symmetric: bool, mode: str, seed: Seed
) -> tuple[Tensor, Tensor]:
    """Return the rounded numbers, and which of them lie outside the range."""
    wide = _multiple(widen(x.contiguous()), fl, mode, seed) + 0.0  # two's complement has no -0
    highest = ldexp(1.0, wl - fl - 1) - ldexp(1.0, -fl)
    lowest = 0.0 - highest if symmetric else -ldexp(1.0, wl - fl - 1)
    outside = (wide > highest) | (wide < lowest)
    return _narrow(wide.clamp(lowest, highest) if clamp else wide, x.dtype, f"FixedPoint (wl={wl}, fl={fl})"), outside


def _narrow(wide: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return fp64 results in `dtype`: in fp32 rounded to nearest even where they are longer; 16 bits must hold them."""
    if dtype == torch.float64:
        return narrow(wide, dtype)
    carrier = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    rounded: Tensor = kernels.quantize(wide, carrier)
    if dtype != torch.float32 and not torch.equal(rounded.nan_to_num(), wide.nan_to_num()):
        raise InvalidInput(f"{name}: {dtype} cannot hold every result exactly: convert to float32 first")
    return narrow(rounded, dtype)
