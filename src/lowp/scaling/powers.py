"""Powers of two on devices that may lack fp64, frexp and ldexp, such as Apple's GPUs; and sums in one order."""

import torch
from torch import Tensor

# powers of two up to it, and their inverses, are normal fp32 numbers; three factors reach every result
LARGEST_NORMAL = 126


def times(x: Tensor, exponent: Tensor) -> Tensor:
    """Return x, fp32 or fp64, times 2**exponent, for any integers, of any shape that broadcasts.

    Rounded once, except for results below 2**-126 in fp32: a device may flush these to zero, and a subnormal
    intermediate value is rounded twice.
    """
    if x.dtype is torch.float64:
        return torch.ldexp(x, exponent)
    half = exponent.clamp(-2 * LARGEST_NORMAL, 2 * LARGEST_NORMAL) >> 1
    other = (exponent - half).clamp(-LARGEST_NORMAL, LARGEST_NORMAL + 1)
    beyond = (exponent - half - other).clamp(-LARGEST_NORMAL, LARGEST_NORMAL + 1)  # 0 from -252 to 253
    return x * fp32_power(half) * fp32_power(other) * fp32_power(beyond)


def fp32_power(exponent: Tensor) -> Tensor:
    """Return 2**exponent in fp32, for exponents from -126 to 127."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def floor_log2(x: Tensor) -> Tensor:
    """Return floor(log2 x) as int32 for positive normal fp32 or fp64 numbers; a negative number for 0."""
    if x.dtype is torch.float64:
        return torch.frexp(x)[1].to(torch.int32) - 1
    return (x.view(torch.int32) >> 23) - 127


def sum_by_halves(rows: Tensor) -> Tensor:
    """Return the sums of rows [..., m] by halves: the same bits on every device and by the C++ library.

    The second half of a row, filled up with zeros to a power of two, is added to the first until one number is left.
    """
    size = 1 << max(rows.shape[-1] - 1, 0).bit_length()
    if size > rows.shape[-1]:
        rows = torch.nn.functional.pad(rows, (0, size - rows.shape[-1]))
    while size > 1:
        size //= 2
        rows = rows[..., :size] + rows[..., size:]
    return rows[..., 0]
