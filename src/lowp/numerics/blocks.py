"""How numbers lie below the largest of their block: what formats whose blocks share a scale do to a tensor.

A few hundred blocks of a tensor are read along each dimension that a product of its op sums. Of a block whose largest
magnitude is m the ratios |x| / m say what a cast flushes and rounds, by their number and by their energy; the
significand of m which scale a power of two is; and m beside the largest of the tensor whether a scale of few bits
holds it. Mergeable, and plain numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, reduce
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lowp.errors import InvalidInput
from lowp.formats import Format, ScaledFormat
from lowp.kernels.steps.spectra import even_places

SIZES = (16, 32)
TURNED = (16, 32)  # numbers that a rotation mixes: those of the presets
_TILE = "16x16"
_LONGEST, _MOST, _TILES = max(SIZES), 256, 64  # blocks that are read, and tiles
_POINTS = 8  # of a bin, over which an effect is averaged
_PARTS, _FINE = 8, 8  # bins of an octave, of the octaves next to the largest
_OCTAVES = 32
RATIOS = 1 + _PARTS * _FINE + _OCTAVES  # the first bin: 1 itself; the last: whatever is smaller
SIGNIFICANDS, BELOW = 16, 32  # bins of the significand of m; octaves of m below the largest of the tensor
_LENGTH = RATIOS + SIGNIFICANDS + BELOW
_UNIT = 1e6  # parts of the energy of a tensor
# by eighths of an octave below 1 the bin of a ratio; whatever is smaller is in the last, and zeros are behind it
_STEPS = np.arange(_PARTS * (_FINE + _OCTAVES) + 1)
_BIN_OF = np.where(_STEPS <= _PARTS * _FINE, _STEPS, _PARTS * _FINE + (_STEPS - _PARTS * _FINE + _PARTS - 1) // _PARTS)
_BIN_OF = np.append(_BIN_OF, [RATIOS - 1] * (127 * _PARTS - len(_BIN_OF)) + [RATIOS])
_PAIR = np.array([[1.0, 1.0], [1.0, -1.0]], np.float32)
_TURN = {size: reduce(np.kron, [_PAIR] * int(math.log2(size))) / math.sqrt(size) for size in TURNED}
# of each block other ones, as each call draws its own
_SIGNS = np.where(np.random.default_rng(0).random(_MOST * _LONGEST) < 0.5, np.float32(-1), np.float32(1))

# the dimension that each product sums of the operands that it reads: of a linear layer's matrices of rows; of a
# convolution's batch, channels and places
_SUMMED: dict[str, dict[str, dict[str, int]]] = {
    "linear": {
        "forward": {"input": 1, "weight": 1},
        "input_gradient": {"grad": 1, "weight": 0},
        "weight_gradient": {"grad": 0, "input": 0},
    },
    "conv": {
        "forward": {"input": 1, "weight": 1},
        "input_gradient": {"grad": 1, "weight": 0},
        "weight_gradient": {"grad": -1, "input": -1},
    },
    "conv_transpose": {
        "forward": {"input": 1, "weight": 0},
        "input_gradient": {"grad": 1, "weight": 1},
        "weight_gradient": {"grad": -1, "input": -1},
    },
}


class BlockLayout(NamedTuple):
    """How blocks lie in a tensor: the dimension that they follow, their size or tiles, and how many are rotated."""

    axis: int
    scope: str
    turned: int = 0

    def __str__(self) -> str:
        return f"{self.axis}/{self.scope}" + (f" hadamard={self.turned}" if self.turned else "")

    @classmethod
    def parse(cls, text: str) -> BlockLayout:
        """The layout that `str` printed."""
        place, _, rest = text.partition("/")
        scope, _, turned = rest.partition(" hadamard=")
        return cls(int(place), scope, int(turned or 0))


def products_of(op: str) -> dict[str, dict[str, int]]:
    """By product of an op, and by role of what it reads, the dimension that is summed; empty for other ops."""
    return _SUMMED.get(op.rstrip("0123456789d"), {})


def layout_of(op: str, product: str, role: str, format: Format, hadamard: int) -> BlockLayout | None:
    """The layout in which a product reads an operand of a format; None where no blocks are counted for it."""
    axis = products_of(op).get(product, {}).get(role)
    if (
        not isinstance(format, ScaledFormat)
        or not format.scope.elements
        or axis is None
        or hadamard not in (0, *TURNED)
    ):
        return None
    scope = str(format.scope)
    return BlockLayout(0 if scope == _TILE else axis, scope, hadamard)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of one layout. ``a + b`` is those of both.

    `counts`: int64 [2, 145], of nonzero numbers, and of millionths of the energy of each tensor. In a row 97 bins of
    ratios (1; eight in each octave down to 2^-8; one in each to 2^-40), 16 of the significand of the largest of
    the block, and 32 of its octaves below the largest of the tensor.
    """

    counts: NDArray[np.int64]

    def __add__(self, other: Blocks) -> Blocks:
        return Blocks(self.counts + other.counts)

    @property
    def ratios(self) -> NDArray[np.float64]:
        """Shares by ratio: fp64 [2, 97]."""
        return _shares(self.counts[:, :RATIOS])

    @property
    def significands(self) -> NDArray[np.float64]:
        """Shares by significand of the largest: fp64 [2, 16]."""
        return _shares(self.counts[:, RATIOS : RATIOS + SIGNIFICANDS])

    @property
    def below(self) -> NDArray[np.float64]:
        """Shares by octave of the largest below that of the tensor: fp64 [2, 32]."""
        return _shares(self.counts[:, RATIOS + SIGNIFICANDS :])

    def document(self) -> list[int]:
        """Plain data: both rows, with -n for n zeros."""
        found: list[int] = []
        for present, run in groupby(self.counts.flatten().tolist(), bool):
            numbers = list(run)
            found += numbers if present else [-len(numbers)]
        return found

    @classmethod
    def read(cls, document: Any) -> Blocks:
        """The blocks that `document` wrote; raises InvalidInput for anything else."""
        length = sum(1 if one > 0 else -int(one) for one in document)
        if length != 2 * _LENGTH:
            raise InvalidInput(f"it contains invalid blocks: {length} counts, but there must be {2 * _LENGTH}")
        numbers = [number for one in document for number in ([int(one)] if one > 0 else [0] * -int(one))]
        return cls(np.array(numbers, np.int64).reshape(2, _LENGTH))


@cache
def midpoints() -> NDArray[np.float64]:
    """Numbers spread over each bin of ratios: fp64 [97, 8]."""
    fine = -np.arange(1, _PARTS * _FINE + 1)
    lower = np.exp2(fine // _PARTS) * (1 + fine % _PARTS / _PARTS)
    lower = np.concatenate((lower, np.exp2(-_FINE - 1.0 - np.arange(_OCTAVES))))
    width = np.exp2(np.floor(np.log2(lower)))
    width[: len(fine)] /= _PARTS
    spread = lower[:, None] + width[:, None] * (np.arange(_POINTS) + 0.5) / _POINTS
    return np.concatenate((np.ones((1, _POINTS)), spread))


def _shares(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return shares


def blocks_of(x: Tensor, role: str, op: str, largest: float) -> dict[BlockLayout, Blocks]:
    """Count some blocks of an operand in every layout that a product of its op reads; `largest` is that of the tensor.

    Of a weight the op need not be known. Empty for ops whose products are not known, and without nonzero numbers.
    """
    if role == "weight":
        op = "linear" if x.ndim == 2 else "conv"
    axes = {product: of[role] for product, of in products_of(op).items() if role in of}
    if not axes or x.ndim < 2 or not largest:
        return {}
    is_linear = op == "linear"
    if is_linear:
        x = x.reshape(-1, x.shape[-1])
    elif role != "weight":
        dims = int(op[-2])
        x = x.unsqueeze(0) if x.ndim == dims + 1 else x.flatten(0, -dims - 2)  # one image; or more than one batch
    found: dict[BlockLayout, Blocks] = {}
    backward = {of for product, of in axes.items() if product != "forward" and is_linear}
    for axis in dict.fromkeys(axes.values()):
        blocks = _some(x.movedim(axis, -1), _LONGEST, 1, _MOST)
        for turned in (0, *TURNED) if axis in backward else (0,):
            found.update(_of_sizes(axis, turned, _turned(blocks, turned) if turned else blocks, largest))
    if role == "weight" and is_linear:
        tiles = _some(x, 16, 16, _TILES)
        found.update(_counted_as({BlockLayout(0, _TILE): tiles.shape[1]}, tiles, largest))
    return found


def _of_sizes(axis: int, turned: int, blocks: NDArray[np.float32], largest: float) -> dict[BlockLayout, Blocks]:
    """Count the longest blocks as blocks of every size."""
    layouts = {BlockLayout(axis, str(size), turned): min(size, blocks.shape[1]) for size in SIZES}
    return _counted_as(layouts, blocks, largest)


def _some(x: Tensor, size: int, rows: int, most: int) -> NDArray[np.float32]:
    """Some blocks, fp32 [n, size * rows]: neighbours along the last dimension, of so many rows; whole ones, or all."""
    size, rows = min(size, x.shape[-1]), min(rows, x.shape[-2])
    blocks = x.unfold(-1, size, size).unfold(-3, rows, rows)
    shape = blocks.shape[: x.ndim]
    count = math.prod(shape)
    if count > most:
        blocks = blocks[np.unravel_index(even_places(count, most), shape)]
    found: NDArray[np.float32] = blocks.reshape(-1, size * rows).float().cpu().numpy()
    return found


def _turned(blocks: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """The blocks rotated, by signs that no other has; what is left at the end of short ones stays."""
    whole = blocks.shape[1] - blocks.shape[1] % size
    numbers = blocks[:, :whole].flatten()
    turned = (numbers * _SIGNS[: len(numbers)]).reshape(-1, size) @ _TURN[size]
    return np.concatenate((turned.reshape(len(blocks), whole), blocks[:, whole:]), axis=1)


def _counted_as(
    layouts: dict[BlockLayout, int], numbers: NDArray[np.float32], largest: float
) -> dict[BlockLayout, Blocks]:
    """Count numbers in blocks of each size; what is left at the end of a row is no block."""
    numbers = np.abs(numbers)
    energy = np.square(numbers.astype(np.float64))
    energy *= _UNIT / max(energy.sum(), 1e-300)
    found = {}
    for layout, size in layouts.items():
        whole = slice(numbers.shape[1] // size * size)
        found[layout] = _counted(numbers[:, whole].reshape(-1, size), energy[:, whole], largest)
    return found


def _counted(numbers: NDArray[np.float32], energy: NDArray[np.float64], largest: float) -> Blocks:
    """Count blocks of magnitudes [n, size]; `energy`: what share of the whole each has, in units of `_UNIT`."""
    tops = numbers.max(1)
    # 0 in blocks of zeros, which count nothing; by a division by 0 processors make NaNs of different signs
    ratio = np.divide(numbers, tops[:, None], out=np.zeros_like(numbers), where=tops[:, None] > 0)
    # eight bins of an octave are the exponent and three bits of the significand, counted down from 1
    bins = _BIN_OF[(127 << 3) - (ratio.view(np.int32) >> 20)].flatten()
    fraction, exponent = np.frexp(tops)
    heads = ((np.maximum(fraction, 0.5) * 2 - 1) * SIGNIFICANDS).astype(int)
    below = np.clip(math.frexp(largest)[1] - exponent, 0, BELOW - 1)
    present, energies = (numbers > 0).sum(1), energy.reshape(numbers.shape).sum(1)
    counts = np.empty((2, _LENGTH))
    for row, each, whole in ((0, None, present), (1, energy.flatten(), energies)):
        counts[row, :RATIOS] = np.bincount(bins, each, RATIOS)[:RATIOS]
        counts[row, RATIOS : RATIOS + SIGNIFICANDS] = np.bincount(heads, whole, SIGNIFICANDS)
        counts[row, RATIOS + SIGNIFICANDS :] = np.bincount(below, whole, BELOW)
    return Blocks(np.round(counts).astype(np.int64))
