"""Products of matrices that `gpu.py` times beside torch's in fp16, and those that it checks against the definition."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowp.benchmarking.contenders import tf32_allowed
from lowp.casts import parse
from lowp.kernels.choose.dispatch import forced
from lowp.kernels.int16 import integer
from lowp.kernels.int16.mantissas import Mantissas, current_mantissas
from lowp.kernels.products.fp8_products import Fp8Matrix, encoded, multiplied, multiplies_fp8

FLEX, FP8 = parse("flex16+5"), parse("e4m3fn@fp32/tensor")
# rows, depth and columns: a square, and the layers of BERT-base's feed-forward network for 64 texts of 128 pieces
SHAPES = {"4096": (4096, 4096, 4096), "BERT, up": (8192, 768, 3072), "BERT, down": (8192, 3072, 768)}
TINY = {"64": (64, 64, 64), "rows": (32, 48, 16)}
_FP8 = "fp8"


# -- beside torch's own -----------------------------------------------------------------------------------------------
@dataclass
class Operands:
    """x [rows, depth] and w [columns, depth] in fp32, and what they become, made when it is first asked for."""

    x: Tensor
    w: Tensor
    made: dict[str, Any] = field(default_factory=dict)

    def pair(self, name: str, make: Callable[[Tensor], Any]) -> tuple[Any, Any]:
        """Return both operands as `make` gives them."""
        if name not in self.made:
            self.made[name] = make(self.x), make(self.w)
        found: tuple[Any, Any] = self.made[name]
        return found


def operands(device: torch.device, rows: int, depth: int, columns: int) -> Operands:
    """Return normal random operands."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(count, depth, generator=generator) for count in (rows, columns))
    return Operands(x.to(device), w.to(device))


def _torchs(dtype: torch.dtype) -> Callable[[Operands], Tensor]:
    def call(given: Operands) -> Tensor:
        x, w = given.pair(str(dtype), lambda one: one.to(dtype))
        return x @ w.t()

    return call


def _int16(one: Tensor) -> Mantissas:
    return current_mantissas(one, FLEX)


def _whole(dtype: torch.dtype | None, converts: bool) -> Callable[[Operands], Tensor]:
    """Return the product of int16: exact in a dtype, or, None, in chains; with the conversions to it, if asked."""

    def call(given: Operands) -> Tensor:
        x, w = (_int16(given.x), _int16(given.w)) if converts else given.pair("int16", _int16)
        return integer.matmul(x.payload, w.payload.t(), x.exponent + w.exponent, dtype)

    return call


def _eight_bits(converts: bool) -> Callable[[Operands], Tensor]:
    """Return torch's scaled product of fp8, with the conversions to it, if asked."""

    def make(one: Tensor) -> Fp8Matrix:
        return encoded(one, FP8)

    def call(given: Operands) -> Tensor:
        return multiplied(*((make(given.x), make(given.w)) if converts else given.pair(_FP8, make)))

    return call


BASE = "fp16, torch's"
PRODUCTS: dict[str, Callable[[Operands], Tensor]] = {
    BASE: _torchs(torch.float16),
    "bf16, torch's": _torchs(torch.bfloat16),
    "fp32, torch's": _torchs(torch.float32),
    "fp32, torch's, TF32 on": _torchs(torch.float32),
    "int16, exact": _whole(torch.float32, False),
    "int16, in chains": _whole(None, False),
    "int16, exact, and the conversions": _whole(torch.float32, True),
    _FP8: _eight_bits(False),
    "fp8 and the conversions": _eight_bits(True),
}


def products(device: torch.device, is_tiny: bool) -> dict[str, tuple[str, tuple[int, int, int]]]:
    """Return the name of the product and the shape of each item; fp8 where the device multiplies it, or on a CPU."""
    shapes = TINY if is_tiny else SHAPES
    return {
        f"{name}, {shape}": (name, size)
        for shape, size in shapes.items()
        for name in PRODUCTS
        if not name.startswith(_FP8) or _has_fp8(device)
    }


def tf32_of(device: torch.device, name: str) -> AbstractContextManager[None]:
    """Return a context with TF32 for the product that has it in its name, and without it for others."""
    return tf32_allowed(name.endswith("TF32 on")) if device.type == "cuda" else nullcontext()


def _has_fp8(device: torch.device) -> bool:
    return device.type == "cpu" or multiplies_fp8(torch.empty(0, device=device))


# -- against the definition -------------------------------------------------------------------------------------------
def product_checks(device: torch.device) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return checks of products: each takes fp32 numbers [rows, 256], of which it uses the first 16 bits as int16."""
    found: dict[str, Callable[[Tensor], Tensor]] = {
        "int16 product, exact": lambda y: integer.multiply(*_words(y), exponent=-20, dtype=torch.float32).values,
        "int16 product, as int16": lambda y: integer.multiply(*_words(y), exponent=-17).values,
        "int16 product, in chains": lambda y: integer.multiply(*_words(y), exponent=-20, dtype=None).values,
        "int16 product, exponent on the device": _there,
        "int16 of a tensor": _converted,
    }
    return {**found, "fp8 product": _fp8_of_integers} if _has_fp8(device) else found


def _words(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return int16 matrices [m, 1024] and [1024, 96] of all patterns, as they lie and as a transposed view."""
    words = (y.view(torch.int32) >> 16).to(torch.int16).reshape(-1, 1024)
    return words[:384], words[-96:].t()


def _there(y: Tensor) -> Tensor:
    left, right = _words(y)
    if forced() == "reference":  # sums in int64
        return integer.multiply(left, right, exponent=-20, dtype=torch.float32).values
    exponent = torch.full((), -20, dtype=torch.int32, device=y.device)
    return integer.matmul(left, right, exponent, torch.float32)


def _converted(y: Tensor) -> Tensor:
    """Return mantissas and exponent of numbers with all patterns of 16 bits, of which 2**-24 to 2**0 is kept."""
    mantissa, exponent = torch.frexp(torch.where(y.isfinite(), y, 0.0))
    numbers = torch.ldexp(mantissa, exponent % 24 - 24)
    found = current_mantissas(numbers, FLEX)
    return torch.cat((found.payload.reshape(-1).int(), found.exponent.reshape(1)))


def _fp8_of_integers(y: Tensor) -> Tensor:
    """Return a product of numbers -3 .. 3 and one 3.5 a matrix, of which every order of sums gives the same bits."""
    words = y.view(torch.int32).reshape(-1, 256)
    left, right = ((words[place::2][:64] >> 16) % 7 - 3.0 for place in (0, 1))
    left[0, 0] = right[0, 0] = 3.5
    if forced() == "reference":
        return (left.double() @ right.double().t()).float()
    return multiplied(encoded(left, FP8), encoded(right, FP8))
