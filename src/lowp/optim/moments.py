"""The formats in which optimizers keep their moments: fp32, bf16, or codes of blocks under a scale."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import torch
from torch import Tensor

from lowp import casts, kernels
from lowp.casts import Cast
from lowp.errors import InvalidInput, unknown
from lowp.formats import ScaledFormat
from lowp.kernels.numbers import packing
from lowp.optim.shards import local, quantize_at, shard_like
from lowp.optim.storage import BLOCK, DTYPES
from lowp.quantized import Quantized

SCALES = "_scales"  # ends the name of what is kept beside the codes of a moment
# State keys under which optimizers keep a mean or sum of squares: Adam and its kin, RMSprop, Adadelta, Adagrad.
SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum"})
# Rounded to nearest they would stall: 0.001 of a second moment is below half a unit of each.
_SHORT = {"bf16": "bf16:stochastic", "int8": "mxint8:stochastic", "fp8": "mxfp8:stochastic"}


@dataclass(frozen=True)
class Moments:
    """The format in which an optimizer keeps its moments: fp32, bf16, or any format whose blocks share a scale.

    Blocks count along the whole tensor. Of a mean of squares it is the root that a block keeps, which spans half as
    many binary places; a root above zero becomes the smallest number of the block, never zero, by which a step would be
    divided. NaN is kept as 0, infinities as the largest number.
    """

    cast: Cast

    @classmethod
    def parse(cls, moments: str | Cast) -> Moments:
        """Read a cast, or one of the short names bf16, int8 and fp8, which round stochastically."""
        found = cls(casts.parse(_SHORT.get(moments, moments) if isinstance(moments, str) else moments))
        format = found.cast.format
        if isinstance(format, ScaledFormat):
            size = format.scope.size
            is_blocks = format.scope.kind == "block" and size & (size - 1) == 0 and 4 <= format.bits <= 16
            scaling = found.cast.scaling
            is_one = format.outer is None and not format.affine and scaling is not None and scaling.kind == "current"
            if is_blocks and is_one and size <= BLOCK and getattr(format.element, "signed", True):
                return found
        elif str(format) in ("fp32", "bf16"):
            return found
        raise InvalidInput(
            f"moments={moments}: give fp32, bf16, int8, fp8, or a format whose blocks of a power of two share one "
            "scale, such as mxfp4:stochastic"
        )

    @property
    def format(self) -> ScaledFormat | None:
        """The format of codes under scales; None for bf16 and fp32."""
        return self.cast.format if isinstance(self.cast.format, ScaledFormat) else None

    def start(self, parameter: Tensor, name: str) -> dict[str, Tensor]:
        """Return a moment of zeros, as it is kept of a parameter's part on this rank."""
        if self.format is None:
            dtype, layout = DTYPES[str(self.cast.format)], torch.contiguous_format
            return {name: torch.zeros_like(parameter, dtype=dtype, memory_format=layout, requires_grad=False)}
        here, size = local(parameter), self.format.scope.size
        block = kernels.encode(torch.zeros(size, device=here.device), self.cast, packed=True)
        fills = packing.fills_bytes(self.format.element)
        shape = here.shape if fills else torch.Size((-(-here.numel() * self.format.bits // 8),))
        codes = torch.zeros(shape, dtype=block.payload.dtype, device=here.device)
        return {name: codes, name + SCALES: block.scale.repeat(-(-here.numel() // size))}

    def load(self, state: Mapping[str, Tensor], name: str, piece: slice) -> Tensor:
        """Return a piece of a moment in fp32; the memory itself if that is what is kept."""
        kept = state[name].view(-1)
        if self.format is None:
            return kept[piece].to(torch.float32)
        codes, scales = self._places(state, name, piece)
        length = None if packing.fills_bytes(self.format.element) else piece.stop - piece.start
        values: Tensor = kernels.dequantize(Quantized(codes, scales, self.cast, length=length))
        return values.square_() if name in SQUARES else values

    def save(
        self,
        state: Mapping[str, Tensor],
        name: str,
        piece: slice,
        value: Tensor,
        draw: tuple[int | Tensor, int | Tensor],
        skip: Tensor | None = None,
    ) -> None:
        """Write a piece of a moment, which may change `value`; nothing where `skip` is set.

        `draw`: the seed, and the places of the numbers among those that share it, a range for blocks.
        """
        kept, (seed, places) = state[name].view(-1), draw
        if self.format is None:
            if kept.dtype is not torch.float32:
                kept[piece] = quantize_at(value.nan_to_num_(), self.cast, seed, places).to(kept.dtype)
            elif kept.data_ptr() + 4 * piece.start != value.data_ptr():
                kept[piece] = value
            return
        value.nan_to_num_()
        if name in SQUARES:
            value = value.double().sqrt_().float()  # rounded to nearest, unlike torch's fp32 root on a CPU
        assert isinstance(places, int)
        coded = kernels.encode(value, self.cast, seed=seed, offset=places)
        codes = coded.payload.view(packing.SIGNED[coded.payload.element_size()])
        if name in SQUARES:
            codes = codes.masked_fill((codes == 0) & (value > 0), 1)
        codes = packing.pack(codes, self.format.element)
        for place, written in zip(self._places(state, name, piece), (codes, coded.scale), strict=True):
            place.copy_(written if skip is None else torch.where(skip, place, written.view(place.dtype)))

    def _places(self, state: Mapping[str, Tensor], name: str, piece: slice) -> tuple[Tensor, Tensor]:
        """Return where the codes and the scales of a piece are, which begins with a block."""
        assert self.format is not None
        kept, size = state[name].view(-1), self.format.scope.size
        if not packing.fills_bytes(self.format.element):
            bits = self.format.bits
            codes = kept[piece.start * bits // 8 : -(-piece.stop * bits // 8)]
        else:
            codes = kept[piece]
        return codes, state[name + SCALES][piece.start // size : -(-piece.stop // size)]

    def whole(self, parameter: Tensor, state: Mapping[str, Tensor], name: str) -> Tensor:
        """Return a moment of a parameter as its optimizer's torch namesake keeps it; bf16 stays bf16."""
        if self.format is None:
            return state[name]
        here = local(parameter)
        return shard_like(self.load(state, name, slice(0, here.numel())).view(here.shape), parameter)


# -- the arguments of an optimizer -------------------------------------------------------------------------------------
class FormatOptions(TypedDict, total=False):
    """Arguments that all of lowp's optimizers take, by keyword, as `AdamW` documents them."""

    storage: str | Cast | None
    split: bool
    masters: str | None
    moments: str | Cast
    seed: int


_ONE_WAY = (
    "there is one implementation here, block by block, with the same results and without waiting for the device: "
    "leave it out"
)
_INSTEAD = {
    "fused": _ONE_WAY,
    "foreach": _ONE_WAY,
    "capturable": "counters and moments are on the device already: leave it out",
    "differentiable": "the update writes stored weights in place: use torch's optimizer on fp32 parameters",
    "amsgrad": (
        "the largest second moment is not kept here: wrap torch's optimizer, "
        "lowp.MasterWeights(torch.optim.AdamW(params, amsgrad=True))"
    ),
}


def admitted(optimizer: type, options: Mapping[str, Any]) -> FormatOptions:
    """Return the options that are lowp's. Raises InvalidInput for others of torch's, TypeError for unknown ones.

    An argument of torch's that is None or False is accepted, since it requests nothing.
    """
    kind, own = f"lowp.optim.{optimizer.__name__}", FormatOptions.__annotations__
    for name, value in options.items():
        if name not in own and name not in _INSTEAD:
            others = [one for one in inspect.signature(optimizer).parameters if one not in ("params", "options")]
            raise TypeError(unknown(f"argument of {kind}", name, [*others, *own]))
        if name not in own and value:
            raise InvalidInput(f"{kind} does not take {name}={value}: {_INSTEAD[name]}")
    return cast(FormatOptions, {name: value for name, value in options.items() if name in own})
