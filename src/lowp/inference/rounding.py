"""Weights rounded so that a layer's results on the calibration data change least, and not each weight to its nearest.

Frantar et al. 2022, GPTQ, arXiv 2210.17323, section 3: the columns of a weight are rounded one after the other, and the
error of each is made up for by those that are not rounded yet, by the inverse of the inputs' second moments
H = X^T X. Here the scales are those of the weight as it was, so that columns may be taken in the order of their
inputs' moments, the largest first.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from lowp import kernels
from lowp.casts import Cast, Overflow
from lowp.errors import InvalidInput, UnknownName, unknown
from lowp.formats import ScaledFormat
from lowp.inference.convolutions import Geometry
from lowp.kernels.numbers import scaled
from lowp.quantized import Quantized

ROUNDINGS = ("nearest", "gptq")
_DAMPING = 0.01  # of the mean second moment, added to each
_BLOCK = 128  # columns whose errors reach the others together


def check_rounding(rounding: str, cast: Cast, has_data: bool) -> None:
    """Raise UnknownName or InvalidInput for what cannot be done."""
    if rounding not in ROUNDINGS:
        raise UnknownName(unknown("rounding", rounding, ROUNDINGS))
    if rounding == "nearest":
        return
    if not has_data:
        raise InvalidInput("rounding gptq reads the layers' inputs: give quantize_model calibration_data")
    format = cast.format
    if cast.element.bits == 1 or (isinstance(format, ScaledFormat) and format.affine):
        raise InvalidInput(f"rounding gptq does not know {cast}: give a format without zero points, of 2 bits or more")


class SecondMoments:
    """The second moments of what a layer multiplies with the columns of its weight."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def add(self, layer: nn.Module, x: Tensor) -> None:
        """Look at an input of a layer; those of convolutions in groups are not kept."""
        if isinstance(layer, (nn.Conv1d, nn.Conv2d)):
            geometry = Geometry.of(layer)
            if geometry.groups > 1:
                return
            rows = geometry.rows_of(x if x.ndim == len(layer.kernel_size) + 2 else x[None])
        elif isinstance(layer, nn.Linear):
            rows = x.detach().reshape(-1, layer.in_features).float()
        else:
            return
        found = (rows.t() @ rows).double()
        self._sum = found if self._sum is None else self._sum + found

    def rounded(self, weight: Tensor, cast: Cast) -> Tensor | Quantized:
        """The weight [n, k] in a format, as codes or as values that it represents."""
        return weight if self._sum is None else gptq(weight, cast, self._sum)


def gptq(weight: Tensor, cast: Cast, moments: Tensor) -> Tensor | Quantized:
    """Round a weight [n, k] by the second moments [k, k] of its inputs; see the text of this module."""
    weight = weight.detach().double()
    if not isinstance(cast.format, ScaledFormat):
        return _elements(weight, torch.ones_like(weight), cast, moments).float()
    found: Quantized = kernels.encode(weight.float(), cast)
    format = scaled.scaled_format(cast)
    scales = scaled.read_scales(found.scale, format) * (1.0 if found.outer is None else found.outer.double())
    spread = scaled.spread(scales, weight.shape, format.scope).expand(weight.shape)
    elements = _elements(weight, spread, cast.element_cast, moments)
    return replace(found, payload=kernels.encode(elements, Cast(format.element)))


def _elements(weight: Tensor, scales: Tensor, cast: Cast, moments: Tensor) -> Tensor:
    """Return the elements [n, k] in fp64, of which `scales` are the units."""
    cast = replace(cast, overflow=Overflow.SATURATE) if cast.overflow is None else cast
    diagonal = moments.diagonal()
    order = diagonal.argsort(descending=True, stable=True)
    spreading = _spreading((moments + torch.diag((diagonal == 0).double()))[order][:, order])
    left, scales = weight[:, order].clone(), scales[:, order]
    found = torch.empty_like(left)
    for begin in range(0, left.shape[1], _BLOCK):
        block = slice(begin, begin + _BLOCK)
        some, factors = left[:, block], spreading[block, block]
        errors = torch.empty_like(some)
        for i in range(some.shape[1]):
            unit = scales[:, begin + i]
            element = kernels.quantize(some[:, i] / unit, cast)
            found[:, begin + i] = element
            errors[:, i] = (some[:, i] - element * unit) / factors[i, i]
            some[:, i + 1 :] -= errors[:, i, None] * factors[i, i + 1 :]
        left[:, begin + _BLOCK :] -= errors @ spreading[block, begin + _BLOCK :]
    return found[:, order.argsort()]


def _spreading(moments: Tensor) -> Tensor:
    """The upper factor of the inverse of damped moments: row i tells how columns make up for the error of column i."""
    damping = _DAMPING * moments.diagonal().mean()
    damped = moments + damping * torch.eye(len(moments), dtype=moments.dtype, device=moments.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor
