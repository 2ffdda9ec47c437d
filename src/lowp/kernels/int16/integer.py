"""Matrix products and convolutions of int16 mantissas: exact, or chained as DFP-16 defines it.

A tensor of mantissas with a shared exponent stands for mantissa * 2^exponent; the sum of products of two such tensors
is an integer times 2^(exponent of a + exponent of b). Two ways to write that sum:

* exact: the integer is exact whatever the operands (all -32768 included) and is rounded once, to nearest even, where it
  is written as int16 mantissas, fp32 or fp64; int64 is not rounded at all. (Flexpoint: Köster et al. 2017,
  arXiv 1711.02213.)
* chained: the depth is cut into blocks of 256 elements; the exact sum of each block is rounded to fp32 and the blocks
  are added in fp32 in order, beginning with 0; the result is multiplied by 2^exponent and rounded once. This is the
  fp32 accumulation of DFP-16 (Das et al. 2018, arXiv 1802.00930) with its longest chain; the addition here is
  that the sum of a block is exact for ALL operands. A block runs as one int32 chain where the Cauchy-Schwarz inequality
  on its norms proves that int32 cannot overflow, as several shorter chains where it proves those, and otherwise modulo
  2^32 beside a sum of the seven leading bits, which tells the multiple of 2^32. So the bits depend
  neither on the proof, nor on the threads, nor on the processor.

On the CPU the C++ library does this for AVX2, AVX-512 VNNI, NEON and in plain C++; `integer_reference` is the
definition in torch, serves where the library was not built, and gives the same bits. On CUDA devices of compute
capability 8.0 and above Triton's kernel does it on int8 tensor cores, a convolution as the matrix product of its
windows; below 8.0, for which Triton does not compile such products, the definition does, in fp64. What was seen is read
by the host: a call waits for the device. All of it is forward only: autograd sees nothing.
"""

import math

import torch
from torch import Tensor

from lowp.compat import widest_float
from lowp.errors import InvalidInput, Unavailable, unknown
from lowp.kernels import cpu, triton
from lowp.kernels.choose.dispatch import answers_at_once, capability, forced
from lowp.kernels.int16 import integer_reference, integer_run
from lowp.kernels.int16.integer_reference import PRODUCTS, ConvolutionShape
from lowp.kernels.int16.integer_run import KINDS, Bias, Multiplied, Output, told
from lowp.kernels.int16.mantissas import power, readable, times

KERNELS = ("avx512", "avx2", "neon", "portable", "reference")
LARGEST_DEPTH = 1 << 32  # |sum| <= depth * 2^30 must fit int64
LARGEST_EXPONENT = 900  # so that no intermediate of fp64 under- or overflows
_DEVICES = ("cpu", "cuda")
_ANYWHERE = ("reference", "triton")  # the kernels that are no C++
_FIRST_CAPABILITY = (8, 0)  # Ampere: for Turing's int8 products Triton makes no code
# the kernel that is meant by what `lowp.kernels.use` asks for
_WAYS = {"reference": "reference", "bitwise": "reference", "triton": "triton"}


def multiply(
    a: Tensor,
    b: Tensor,
    *,
    exponent: int | Tensor = 0,
    dtype: torch.dtype | None = torch.int16,
    symmetric: bool = False,
    bias: Bias | None = None,
    kernel: str | None = None,
) -> Multiplied:
    """Return a @ b of int16 matrices times 2^exponent: exact, rounded once to nearest even, or chained in fp32.

    `a` is [..., m, k], `b` is [..., k, n], with the same leading dimensions; the result is [..., m, n]. Views are read
    as they lie: a transposed view costs no copy. `dtype`: int16 (mantissas, saturated at -32768 or, `symmetric`,
    -32767, and at 32767; for operands of exponents Ea, Eb and a result of exponent E, `exponent` is Ea + Eb - E),
    float32, float64, int64 (the integer sums; `exponent` must be 0), or None for chains of 256 in fp32. `exponent` is
    an integer or a 0-d integer tensor, -900 to 900. `kernel` forces one of avx512, avx2, neon, portable, reference,
    triton (on a CPU in its interpreter) (default: reference inside `lowp.kernels.use` of reference or bitwise, triton
    inside its own; on CUDA by its compute capability; else what `cpu.select` or LOWP_CPU_ISA say, or the best of this
    machine). A depth of 0 gives zeros. With a `bias`, of int16 and chains alone, `largest_sum` is that of sum and bias,
    rounded up.

    Raises InvalidInput for other dtypes, devices, shapes or a depth above 2^32 (NotFinite for such a bias), Unavailable
    for a kernel that this machine lacks.
    """
    _check_matrices(a, b)
    added = _checked(bias, b.shape[-1], dtype)
    return integer_run.matmul(a, b, _output(a, exponent, dtype, symmetric, kernel, added))


def convolve(
    product: str,
    a: Tensor,
    b: Tensor,
    shape: ConvolutionShape,
    *,
    exponent: int | Tensor = 0,
    dtype: torch.dtype | None = torch.int16,
    symmetric: bool = False,
    bias: Bias | None = None,
    kernel: str | None = None,
) -> Multiplied:
    """Return one of the three products of a convolution of int16 tensors, written as `multiply` does.

    `product` and the operands: "forward" takes input [n, c, *size] and weight [o, c / groups, *kernel] and gives
    [n, o, *out]; "input_gradient" takes the output's gradient and the weight; "weight_gradient" the input and the
    output's gradient. `shape` is `ConvolutionShape.of(...)`, 1 to 3 spatial dimensions.

    The depth of chains, which is cut every 256 elements, runs over: (tap, channel) for the forward product, (tap, out
    channel) for the input gradient, taken apart for each residue of the pixel modulo the stride and over the taps that
    reach it, and (image, pixel) for the weight gradient; the last index is fastest. Channels of a group, and in the
    last case the pixels of an image, are padded with a zero to an even number.
    """
    _check_convolution(product, a, b, shape)
    added = _checked(bias, shape.of_operand(PRODUCTS[product][2])[1], dtype)
    return integer_run.convolution(product, a, b, shape, _output(a, exponent, dtype, symmetric, kernel, added))


# -- products of which nothing is read --------------------------------------------------------------------------------
def matmul(
    left: Tensor, right: Tensor, exponent: Tensor, dtype: torch.dtype | None, bias: Bias | None = None
) -> Tensor:
    """Return [..., m, k] @ [..., k, n] of int16 times 2**exponent: exact in a dtype, or, None, fp32 in chains of 256.

    The leading dimensions are the same. An exact sum is rounded once to fp32 or fp64; of a device in int64 it is not
    scaled. A bias is that of a chained sum on a CPU. Nothing is read of a device.
    """
    if answers_at_once(left):
        return multiply(left, right, exponent=exponent, dtype=dtype, bias=bias).values
    with told(2 * math.prod(left.shape) * right.shape[-1]):
        if chosen_kernel(left) == "triton":
            return integer_run.by_triton(left, right, power(exponent), dtype or torch.float32, dtype is None)[0]
        return _scaled(integer_reference.matmul(left, right, dtype is None), exponent, dtype)


def convolution(
    product: str,
    operands: tuple[Tensor, Tensor],
    shape: ConvolutionShape,
    exponent: Tensor,
    dtype: torch.dtype | None,
    bias: Bias | None = None,
) -> Tensor:
    """Return one of the three products of a convolution, `PRODUCTS`, written as `matmul` writes."""
    if answers_at_once(operands[0]):
        return convolve(product, *operands, shape, exponent=exponent, dtype=dtype, bias=bias).values
    with told(shape.operations):
        kernel = integer_run.sums_by_triton if chosen_kernel(operands[0]) == "triton" else integer_reference.matmul
        sums = integer_reference.convolution(product, *operands, shape, dtype is None, kernel)
        return _scaled(sums, exponent, dtype)


def _scaled(sums: Tensor, exponent: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None:
        return times(sums, exponent)
    if dtype is torch.int64:
        return sums
    if dtype is torch.float32 and widest_float(sums.device) is torch.float32:
        return times(sums.to(torch.float32), exponent)
    return integer_reference.times(sums, power(exponent), dtype)


# -- arguments --------------------------------------------------------------------------------------------------------
def _checked(bias: Bias | None, count: int, dtype: torch.dtype | None) -> Bias | None:
    """Return a bias of `count` numbers as the kernels read it; `dtype` is None of a chained product."""
    if bias is None:
        return None
    if dtype not in (None, torch.int16):
        raise InvalidInput(f"a bias is added to a chained product or to one of int16, not to {dtype}")
    if tuple(bias.numbers.shape) != (count,):
        raise InvalidInput(f"a bias of shape {tuple(bias.numbers.shape)}; this product takes {count} numbers")
    return Bias(readable(bias.numbers.float()), bias.exponent)


def _output(
    like: Tensor,
    exponent: int | Tensor,
    dtype: torch.dtype | None,
    symmetric: bool,
    kernel: str | None,
    bias: Bias | None = None,
) -> Output:
    power = int(exponent)
    if abs(power) > LARGEST_EXPONENT:
        raise InvalidInput(f"exponent {power}; allowed: -{LARGEST_EXPONENT} to {LARGEST_EXPONENT}")
    if dtype is not None and dtype not in KINDS:
        raise InvalidInput(f"an exact product cannot be {dtype}; allowed: {', '.join(map(str, KINDS))}")
    if dtype is torch.int64 and power:
        raise InvalidInput(
            f"int64 holds the sums as they are, so exponent must be 0, not {power}; use float64 to scale"
        )
    lowest = -32767 if symmetric else -32768
    return Output(
        torch.float32 if dtype is None else dtype, dtype is None, power, lowest, chosen_kernel(like, kernel), bias
    )


def chosen_kernel(like: Tensor, kernel: str | None = None) -> str:
    """Return the kernel for a tensor's device, or the requested one; '' is the library's best.

    Raises InvalidInput for an unknown name, Unavailable for a kernel that is not present.
    """
    way = forced()
    if way is None and not kernel and like.is_cpu:
        return cpu.asked()
    if way == "native" and not kernel:
        raise Unavailable("native has no integer products; cpu, bitwise and reference have them")
    chosen = kernel or _WAYS.get(way or "") or (cpu.asked() if like.is_cpu else _on_device(like.device))
    if chosen and chosen not in (*KERNELS, "triton"):
        raise InvalidInput(unknown("integer kernel", chosen, KERNELS))
    if not like.is_cpu and (chosen not in _ANYWHERE or way == "cpu"):
        raise Unavailable(f"{way or chosen} has no integer products on {like.device}; triton and reference have them")
    return chosen


def _on_device(device: torch.device) -> str:
    """Return the kernel for a device other than a CPU, by its compute capability."""
    return "triton" if triton.is_installed() and capability(device) >= _FIRST_CAPABILITY else "reference"


def _check_operands(a: Tensor, b: Tensor) -> None:
    for name, operand in (("a", a), ("b", b)):
        if operand.dtype is not torch.int16 or operand.device.type not in _DEVICES:
            raise InvalidInput(
                f"{name} is {operand.dtype} on {operand.device}; the integer kernels take torch.int16 on cpu or cuda"
            )
    if a.device != b.device:
        raise InvalidInput(f"a is on {a.device} and b on {b.device}: move one to the other's device")


def _check_depth(depth: int) -> None:
    if depth > LARGEST_DEPTH:
        raise InvalidInput(f"a depth of {depth} could overflow int64; allowed: up to {LARGEST_DEPTH}; sum in parts")


def _check_convolution(product: str, a: Tensor, b: Tensor, shape: ConvolutionShape) -> None:
    if product not in PRODUCTS:
        raise InvalidInput(unknown("product of a convolution", product, tuple(PRODUCTS)))
    _check_operands(a, b)
    for name, operand in zip(PRODUCTS[product], (a, b), strict=False):
        expected = shape.of_operand(name)
        if operand.shape != expected:
            raise InvalidInput(f"the {name} has shape {tuple(operand.shape)}; this convolution takes {expected}")
    _check_depth(shape.depth(product))


def _check_matrices(a: Tensor, b: Tensor) -> None:
    if not (a.dtype is b.dtype is torch.int16 and a.is_cpu and b.is_cpu):
        _check_operands(a, b)
    if a.dim() < 2 or b.dim() < 2:
        raise InvalidInput(f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}; a matrix has two dimensions or more")
    (*batch, _, depth), (*other_batch, other, _) = a.shape, b.shape
    if depth != other:
        raise InvalidInput(f"the depths differ: {depth} in a {tuple(a.shape)}, {other} in b {tuple(b.shape)}")
    _check_depth(depth)
    if batch != other_batch:
        raise InvalidInput(f"the leading dimensions {tuple(batch)} of a and {tuple(other_batch)} of b differ")
