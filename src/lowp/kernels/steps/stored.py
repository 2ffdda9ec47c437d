"""Weights stored as their fp32 masters rounded by a cast: one call of the C++ library for all weights of a step.

The tensors of rounded values that the same in torch operations would make never exist. NaNs are left to the caller,
since their bits are those of the operations that write them.
"""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.kernels import cpu
from lowp.kernels.choose.dispatch import uses_library
from lowp.kernels.cpu.abi import TYPE_NUMBERS, parameters
from lowp.kernels.tracing import is_quiet

Weight = tuple[Tensor, Tensor]  # stored, and its fp32 master


def serves(weights: Sequence[Weight]) -> list[bool]:
    """Whether the functions below take each of these weights: real, contiguous ones on a CPU, of equal shape.

    Others are those of a device, views with strides, fake tensors, and two tensors that share memory.
    """
    if not (uses_library() and is_quiet()):
        return [False] * len(weights)
    return list(map(_fit, weights))


def _fit(pair: Weight) -> bool:
    stored, master = pair
    if not stored.numel() or master.dtype is not torch.float32 or stored.shape != master.shape:
        return False
    if (found := cpu.addresses(pair)) is None or not all(x.is_contiguous() and not x.is_inference() for x in pair):
        return False
    at, other = found
    apart = at + stored.nbytes <= other or other + master.nbytes <= at
    return apart and not (at % stored.element_size() or other % 4)


def are_rounded(weights: Sequence[Weight], cast: Cast) -> list[bool]:
    """Whether each stored weight has, bit for bit, the values of its master after the cast; False with a NaN.

    The stored ones are of one dtype, that holds the values of the cast, and the cast draws no random numbers.
    """
    return _run("lowp_are_rounded_list", weights, cast)


def store_rounded(weights: Sequence[Weight], cast: Cast) -> list[bool]:
    """Write the values of each master after the cast into its stored weight. False with a NaN: not all is written."""
    found = _run("lowp_store_rounded_list", weights, cast)
    torch.autograd.graph.increment_version([stored for stored, _ in weights])
    return found


def _run(name: str, weights: Sequence[Weight], cast: Cast) -> list[bool]:
    if not weights:
        return []
    given, found = [], array("q", (0,) * len(weights))
    for stored, master in weights:
        given += [master, stored, stored.numel()]
    numbers = given, len(weights), torch.get_num_threads(), found
    getattr(cpu.loaded(), name)(parameters(cast), TYPE_NUMBERS[weights[0][0].dtype], *numbers)
    return [one == 0 for one in found]
