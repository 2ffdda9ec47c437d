"""`contract`: the function that chooses the implementation of a product.

A product is given by its form (the torch calls and the matrices it consists of), its two operands as rounded values in
their carriers or as integers under an exponent, its accumulation, and the cast of its result. The implementations:

* integers: the int16 kernels, in C++ or by their definition in torch; exact, or in chains like DFP-16's sums;
* blocks: a running sum that is rounded to fp16 or bf16 after every block of products;
* native: the device's own 16-bit product (`hardware`), which sums in fp32 and rounds once, including the bias: on GPUs,
  and for bf16 on CPUs with bf16 products;
* fp32: an fp32 product of the rounded values (each product of significands of up to 12 bits is exact), rounded once;
* reference: the same in fp64, the definition of the sum;
* packed: weights in bytes, codes of few bits, signs or 16 bits, with matching activations (`contract_packed`).

Fused attention is a form with three operands and the mask as `bias`: native on GPUs, fp32 or reference. On CPUs torch's
fused attention in bf16 also rounds the probabilities, and takes twice the time of its fp32 attention.

`lowp.kernels.use`, or LOWP_USE in the environment, forces an implementation everywhere: ``native`` uses torch's own
product on every CPU and ``reference`` the definitions; ``bitwise`` and ``cpu`` use fp32 products of 16-bit operands on
all devices, the former with torch's operations only, the latter with the C++ library's integers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from lowp.casts import Cast
from lowp.errors import Unavailable
from lowp.formats import FORMATS
from lowp.kernels import byte_products, few_bits, few_rows, large
from lowp.kernels.byte_products import MOST_DEPTH, Panels
from lowp.kernels.byte_rows import Activations, ByteRows, Bytes
from lowp.kernels.dispatch import chosen, forced
from lowp.kernels.few_bits import PackedCodes, Signs
from lowp.kernels.hardware import multiplies
from lowp.kernels.mantissas import Mantissas
from lowp.kernels.scratch import Scratch, is_large
from lowp.policy import Accumulation

__all__ = [
    "ProductForm",
    "contract",
    "contract_packed",
    "gradients_of_matrices",
    "gradients_sixteen_bits",
    "has_launches",
    "is_native",
    "is_torchs_own",
    "linear_sixteen_bits",
    "multiplies_int8",
    "ready_operand",
    "sixteen_bits_run_in",
    "sums_in_fp32",
    "torchs_own_device",
]

# Casts to the dtypes that devices multiply; created here, since torch.compile does not trace the construction of a cast
_TO_NEAREST = {torch.float16: Cast(FORMATS["fp16"]), torch.bfloat16: Cast(FORMATS["bf16"])}
NARROW = {torch.float16: Tensor.half, torch.bfloat16: Tensor.bfloat16}  # equals `Tensor.to`, with less overhead
_BLOCK_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class ProductForm(Protocol):
    """The description of a contraction's products; `slot` selects which of its three tensors is computed."""

    def product(self, slot: int, left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product in the dtype of its operands, by torch's own functions."""

    def matrices(self, slot: int, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """Return the operands as matrices, and a function that reshapes their product."""

    def integer_product(
        self, slot: int, left: Mantissas, right: Mantissas, exact: bool, dtype: torch.dtype, bias: Tensor | None
    ) -> Tensor:
        """Return the product of mantissas, summed exactly or in chains, with its bias added."""

    def with_bias(self, result: Tensor, bias: Tensor) -> Tensor:
        """Return the output with its bias added."""


class FusedForm(Protocol):
    """A product of several operands in one torch function, such as attention."""

    def product(self, slot: int, *operands: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product in the dtype of its operands."""


@overload
def contract(
    form: ProductForm,
    slot: int,
    operands: tuple[Tensor, Tensor] | tuple[Mantissas, Mantissas],
    accumulate: Accumulation | None = None,
    output: Cast | None = None,
    bias: Tensor | None = None,
    finish: Callable[[Tensor], Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor: ...
@overload
def contract(
    form: FusedForm,
    slot: int,
    operands: tuple[Tensor, ...],
    accumulate: None = None,
    output: Cast | None = None,
    bias: Tensor | None = None,
    finish: Callable[[Tensor], Tensor] | None = None,
) -> Tensor: ...
def contract(
    form: Any,
    slot: int,
    operands: tuple[Any, ...],
    accumulate: Accumulation | None = None,
    output: Cast | None = None,
    bias: Tensor | None = None,
    finish: Callable[[Tensor], Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the product for a slot of a form, summed as given by `accumulate`.

    `finish` casts the sum to `output`, unless a native product of that format has rounded it. `dtype`: of sums of
    integers. Raises Unavailable if the implementation forced by `lowp.kernels.use` does not exist.
    """
    result: Tensor
    if isinstance(operands[0], Mantissas):
        exact = accumulate is not None and accumulate.format == "exact"
        result = form.integer_product(slot, *operands, exact, dtype, bias)
    elif accumulate is not None and accumulate.format != "fp32":
        left, right = operands
        result = _in_blocks(form, slot, left.float(), right.float(), accumulate)
        result = result if bias is None else form.with_bias(result, bias.float())
    elif is_native(output, *operands):
        return _in_dtype(form, slot, operands, bias, operands[0].dtype)
    elif operands[0].dtype is torch.float64:
        result = _in_dtype(form, slot, operands, bias, torch.float64)
    elif forced() == "reference":
        result = _in_dtype(form, slot, operands, bias, torch.float64).float()
    elif torch.compiler.is_compiling():
        result = _in_dtype(form, slot, operands, bias, torch.float32)
    else:
        bias = bias.float() if bias is not None and bias.is_floating_point() else bias
        with Scratch() as scratch:
            result = form.product(slot, *[scratch.wide(one) for one in operands], bias=bias)
    return result if finish is None else finish(result)


def linear_sixteen_bits(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the result of `contract` for a linear layer in fp16 or bf16: summed in fp32, rounded to its dtype.

    `dtype` is the result of `sixteen_bits_run_in`. For callers that know the rule, with the least overhead.
    """
    if dtype is torch.float32 and is_large(x, weight):
        return large.linear(x, weight, bias)
    narrow = NARROW[x.dtype]
    if dtype is torch.float32:
        return narrow(F.linear(x.float(), weight.float(), None if bias is None else bias.float()))
    result = F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return narrow(result.float()) if dtype is torch.float64 else result


def gradients_sixteen_bits(
    form: Any, operands: tuple[Tensor | None, Tensor | None], gradient: Tensor, wants_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of both operands of such a product, and the bias gradient in fp32.

    The gradient of one operand is a product with the other one; it is None if the other one is None.
    """
    own = gradient.dtype
    dtype, are_matrices = sixteen_bits_run_in(gradient, own), len(form.first) > 1 < len(form.second)
    if dtype is torch.float32 and are_matrices and is_large(gradient, *operands):
        return large.linear_gradients((form.first, form.second), operands, gradient, wants_bias)
    wide, (first, second) = gradient.float(), operands
    of_bias = form.bias_gradient(wide) if wants_bias else None
    if dtype is torch.float32:
        narrow = NARROW[own]
        of_first = None if second is None else narrow(form.product(0, second.float(), wide))
        of_second = None if first is None else narrow(form.product(1, first.float(), wide))
        return of_first, of_second, of_bias
    incoming = gradient.to(dtype)
    of_first = None if second is None else form.product(0, second.to(dtype), incoming)
    of_second = None if first is None else form.product(1, first.to(dtype), incoming)
    if dtype is torch.float64:
        of_first, of_second = (None if one is None else one.float().to(own) for one in (of_first, of_second))
    return of_first, of_second, of_bias


def gradients_of_matrices(
    shapes: tuple[torch.Size, torch.Size],
    operands: tuple[Tensor | None, Tensor | None],
    gradient: Tensor,
    wants_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None] | None:
    """Return what `gradients_sixteen_bits` does of small matrices x[m, k] and w[n, k] in fp32 products; else None.

    Without a form: the calls of a small product take longer than its arithmetic.
    """
    own, (x, weight) = gradient.dtype, operands
    if len(shapes[0]) != 2 or len(shapes[1]) != 2 or sixteen_bits_run_in(gradient, own) is not torch.float32:
        return None
    if is_large(gradient, x, weight):
        return None
    wide, narrow = gradient.float(), NARROW[own]
    of_x = None if weight is None else narrow(wide.mm(weight.float()))
    of_weight = None if x is None else narrow(wide.t().mm(x.float()))
    return of_x, of_weight, wide.sum(0) if wants_bias else None


def sixteen_bits_run_in(x: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which products of operands in a 16-bit dtype are computed on the device of x."""
    way = forced()
    if way is None:
        return dtype if multiplies("cpu" if x.is_cpu else x.device.type, dtype) else torch.float32
    return dtype if way == "native" else torch.float64 if way == "reference" else torch.float32


def sums_in_fp32(dtype: torch.dtype) -> bool:
    """Whether products of a 16-bit dtype are computed in fp32 on a CPU, for code that no compiler traces."""
    way = chosen()
    if way is None:
        return dtype is torch.float16 or not multiplies("cpu", dtype)
    return way != "native" and way != "reference"


Packed = (
    tuple[Bytes | Activations | ByteRows, Panels]
    | tuple[Tensor | Bytes, PackedCodes]
    | tuple[Signs, Signs]
    | tuple[Tensor, Tensor]
)


def contract_packed(operands: Packed, bias: Tensor | None = None) -> Tensor:
    """Return rows times packed weights, plus bias, in fp32 [rows, n].

    The weights are bytes, codes of few bits, signs, or a tensor in fp16 or bf16 for rows of fp32.
    """
    left, right = operands
    if isinstance(right, Panels):
        assert isinstance(left, (Bytes, Activations, ByteRows))
        return byte_products.multiply(left, right, bias)
    if isinstance(right, Signs):
        assert isinstance(left, Signs)
        return few_bits.multiply_signs(left, right, bias)
    assert isinstance(left, (Tensor, Bytes))
    if isinstance(right, Tensor):
        assert isinstance(left, Tensor)
        return few_rows.multiply(left, right, bias)
    return few_bits.multiply_codes(left, right, bias)


def _in_dtype(form: Any, slot: int, operands: tuple[Tensor, ...], bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return a product by torch's own functions in a dtype; a boolean mask keeps its dtype."""
    if bias is not None and bias.is_floating_point():
        bias = bias.to(dtype)
    result: Tensor = form.product(slot, *[one.to(dtype) for one in operands], bias=bias)
    return result


def is_native(output: Cast | None, *operands: Tensor) -> bool:
    """Whether the device's own 16-bit product is used: the operands and the result have one dtype that it multiplies.

    Such a product sums in fp32 and rounds once, including the bias. Other 16-bit products of a CPU must be forced.
    """
    dtype = operands[0].dtype
    if output is None or dtype not in _TO_NEAREST:
        return False
    if torchs_own_device(operands[0], dtype, is_fused=len(operands) > 2) is None:
        return False
    return all(one.dtype is dtype for one in operands) and output == _TO_NEAREST[dtype]


def is_torchs_own(x: Tensor, is_exact: bool = False) -> bool:
    """Whether torch's 16-bit kernel of an op that is not a product is used on the device of x: on a GPU, or if forced.

    With `is_exact`, which means that the kernel computes in fp32 on a CPU, also on every CPU.
    """
    if is_exact and x.is_cpu and forced() is None:
        return x.dtype in _TO_NEAREST
    return torchs_own_device(x, x.dtype, is_fused=not is_exact) is not None


def torchs_own_device(x: Tensor, dtype: torch.dtype, is_fused: bool = False) -> str | None:
    """Return the device type of x if torch's own products of a 16-bit dtype are used on it; otherwise None.

    `is_fused`: the op is not a single product; on a CPU torch's kernel must then be forced.
    """
    way, device = forced(), "cpu" if x.is_cpu else x.device.type
    if way is not None:
        return device if way == "native" else None
    return device if multiplies(device, dtype) and not (is_fused and device == "cpu") else None


def has_launches(x: Tensor) -> bool:
    """Whether one call for several tensors is faster than one call each on the device of x: on a GPU, or if forced."""
    return not x.is_cpu or forced() == "native"


LEAST_ROWS = 256  # for a product of bytes whose weight must be packed first


def multiplies_int8(x: Tensor, weight: Tensor) -> bool:
    """Whether the product of fp32 [..., k] and [n, k] in format int8 is computed on bytes: with many rows, on a CPU."""
    if not (x.is_cpu and weight.is_cpu) or forced() not in (None, "cpu") or weight.shape[1] > MOST_DEPTH:
        return False
    return x.numel() >= LEAST_ROWS * x.shape[-1] > 0 and weight.shape[0] > 0


def ready_operand(value: Tensor, scratch: Scratch | None = None) -> Tensor:
    """Return an operand of several products in the dtype they compute in: fp32 for products in fp32.

    The fp32 copy may be in `scratch`, if given.
    """
    if torchs_own_device(value, value.dtype) is not None:
        return value
    return value.float() if scratch is None else scratch.wide(value)


def _in_blocks(form: ProductForm, slot: int, left: Tensor, right: Tensor, accumulation: Accumulation) -> Tensor:
    """Return a product in fp32 whose running sum was rounded to fp16 or bf16.

    The contracted dimension is split in order into blocks of n products; each block is summed in fp32, then
    sum = round(sum + block), nearest-even. If several dimensions are contracted, the last one is innermost. This is the
    definition, in torch's ops; it emulates such a unit and is not optimised.
    """
    if accumulation.format not in _BLOCK_DTYPES:
        raise Unavailable(
            f"accumulate={accumulation} needs integer elements under a shared scale, such as dfp16; "
            "these operands are floating-point: take fp32, fp16/n or bf16/n"
        )
    rows, columns, finish = form.matrices(slot, left, right)
    dtype = _BLOCK_DTYPES[accumulation.format]
    running = rows.new_zeros(*rows.shape[:-1], columns.shape[-1])
    for start in range(0, rows.shape[-1], accumulation.block):
        stop = start + accumulation.block
        block = rows[..., start:stop] @ columns[..., start:stop, :]
        running = (running + block).to(dtype).float()
    return finish(running)
