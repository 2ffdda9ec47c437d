"""`contract`: the function that chooses the implementation of a product.

A product is given by its form (the torch calls and the matrices it consists of), its two operands as rounded values in
their carriers or as integers under an exponent, its accumulation, and the cast of its result. The implementations:

* integers: the int16 kernels, in C++ or by their definition in torch; exact, or in chains like DFP-16's sums;
* blocks: a running sum that is rounded to fp16 or bf16 after every block of products;
* native: the device's own 16-bit product (`hardware`), which sums in fp32 and rounds once, including the bias: on GPUs,
  and for bf16 on CPUs with bf16 products;
* fp32: an fp32 product of the rounded values (each product of significands of up to 12 bits is exact), rounded once. On
  a CPU the C++ library computes those that are matrices, in one order of their sums (`fp32_products`): the same bits on
  every processor. torch computes convolutions, and all of them where the library is missing or nothing but torch may;
* reference: the same in fp64, the definition of the sum;
* packed: weights in bytes, codes of few bits, signs or 16 bits, with matching activations (`contract_packed`).

Fused attention is a form with three operands and the mask as `bias`: native on GPUs, fp32 or reference. On CPUs torch's
fused attention in bf16 also rounds the probabilities, and takes twice the time of its fp32 attention.

`lowp.kernels.use`, or LOWP_USE in the environment, forces an implementation everywhere: ``native`` uses torch's own
product on every CPU and ``reference`` the definitions; ``bitwise`` and ``cpu`` use fp32 products of 16-bit operands on
all devices, the former with torch's operations only, the latter with the C++ library's integers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.errors import Unavailable
from lowp.formats import FORMATS
from lowp.kernels.choose.dispatch import forced
from lowp.kernels.choose.hardware import multiplies
from lowp.kernels.int16.mantissas import Mantissas
from lowp.kernels.packed import byte_products, few_bits, few_rows
from lowp.kernels.packed.byte_products import Panels
from lowp.kernels.packed.byte_rows import Activations, Bytes
from lowp.kernels.packed.few_bits import PackedCodes, Signs
from lowp.kernels.packed.few_rows import StoredRows
from lowp.kernels.products import fp32_products
from lowp.kernels.products.scratch import Scratch
from lowp.kernels.tracing import functorch_is_active, is_jit_tracing
from lowp.policy import Accumulation

# Casts to the dtypes that devices multiply; created here, since torch.compile does not trace the construction of a cast
_TO_NEAREST = {torch.float16: Cast(FORMATS["fp16"]), torch.bfloat16: Cast(FORMATS["bf16"])}
_BLOCK_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


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
    """Return the product for a slot of a form, `lowp.ops.trilinear.Form`, summed as given by `accumulate`.

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
    elif is_native(output, *operands) and not _is_small(form, operands[0]):
        return _in_dtype(form, slot, operands, bias, operands[0].dtype)
    elif operands[0].dtype is torch.float64:
        result = _in_dtype(form, slot, operands, bias, torch.float64)
    elif forced() == "reference":
        result = _in_dtype(form, slot, operands, bias, torch.float64).float()
    elif (found := _by_library(form, slot, operands, bias)) is not None:
        result = found
    elif torch.compiler.is_compiling():
        result = _in_dtype(form, slot, operands, bias, torch.float32)
    else:
        bias = bias.float() if bias is not None and bias.is_floating_point() else bias
        with Scratch() as scratch:
            result = form.product(slot, *[scratch.wide(one) for one in operands], bias=bias)
    return result if finish is None else finish(result)


def _by_library(form: Any, slot: int, operands: tuple[Tensor, ...], bias: Tensor | None) -> Tensor | None:
    """Return a product of matrices that the library sums in fp32; None for what is left to torch."""
    given = operands if bias is None else (*operands, bias)
    if not getattr(form, "are_matrices", False) or not _serves(*given):
        return None
    columns = None if bias is None else form.numbers_a_column(bias)
    left, right, finish = form.matrices(slot, *operands)
    multiply = fp32_products.multiply_traced if torch.compiler.is_compiling() else fp32_products.multiply
    added = None if columns is None else columns.detach().float().contiguous()
    result: Tensor = finish(multiply(left, right, added))
    return form.with_bias(result, bias.float()) if bias is not None and columns is None else result


def _serves(*tensors: Tensor) -> bool:
    """Whether the library multiplies these, also where torch.compile traces."""
    if not torch.compiler.is_compiling():
        return fp32_products.serves(*tensors)
    return fp32_products.serves_compiled() and all(x.is_cpu and x.element_size() <= 4 for x in tensors)


def sum_of_rows(x: Tensor) -> Tensor:
    """Return the sum of x[m, n] along m in fp32, by the library in the order of a product with ones."""
    if not _serves(x):
        return x.float().sum(0)
    if torch.compiler.is_compiling():
        result: Tensor = fp32_products.multiply_traced(x.new_ones(1, x.shape[0]), x, None)
        return result[0]
    return fp32_products.sum_of_rows(x)


Packed = (
    tuple[Bytes | Activations, Panels]
    | tuple[Tensor | Bytes, PackedCodes]
    | tuple[Signs, Signs]
    | tuple[Tensor, Tensor | StoredRows]
)


def contract_packed(operands: Packed, bias: Tensor | None = None) -> Tensor:
    """Return rows times packed weights, plus bias, in fp32 [rows, n].

    The weights are bytes, codes of few bits, signs, or as they are stored (fp16, bf16, floats of 8 and 6 bits) for rows
    of fp32.
    """
    left, right = operands
    if isinstance(right, Panels):
        assert isinstance(left, (Bytes, Activations))
        return byte_products.multiply(left, right, bias)
    if isinstance(right, Signs):
        assert isinstance(left, Signs)
        return few_bits.multiply_signs(left, right, bias)
    assert isinstance(left, (Tensor, Bytes))
    if isinstance(right, (Tensor, StoredRows)):
        assert isinstance(left, Tensor)
        return few_rows.multiply(left, right, bias, linear_of=_of_rows)
    return few_bits.multiply_codes(left, right, bias, linear_of=_of_rows)


def _of_rows(x: Tensor) -> few_rows.LinearProduct:
    """Return what multiplies many rows by weights in fp32 or 16 bits: the library, which reads both, or torch."""
    is_served = x.numel() > 0 and fp32_products.serves(x.detach())
    return _linear if is_served else few_rows.by_torch


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = None if bias is None else bias.detach().float().contiguous().resolve_neg()
    return fp32_products.multiply(x.detach(), weight.detach().t(), bias)


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
    if output is None or output != _TO_NEAREST.get(dtype) or any(one.dtype is not dtype for one in operands):
        return False
    return torchs_own_device(operands[0], dtype, is_fused=len(operands) > 2) is not None


def _is_small(form: Any, x: Tensor) -> bool:
    """Whether a product is left to the library, which takes less time, on a device that multiplies 16 bits itself."""
    if not x.is_cpu or forced() is not None or functorch_is_active() or is_jit_tracing():
        return False  # what torch transforms or records, for other shapes, too, is torch's
    return bool(getattr(form, "is_small", False))


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


def ready_operand(value: Tensor, scratch: Scratch | None = None) -> Tensor:
    """Return an operand of several products in the dtype they compute in: fp32 for products in fp32.

    The fp32 copy may be in `scratch`, if given.
    """
    if torchs_own_device(value, value.dtype) is not None:
        return value
    return value.float() if scratch is None else scratch.wide(value)


def _in_blocks(form: Any, slot: int, left: Tensor, right: Tensor, accumulation: Accumulation) -> Tensor:
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
    result: Tensor = finish(running)
    return result
