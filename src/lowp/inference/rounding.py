"""Weights rounded so that a layer's results on the calibration data change least, and not each weight to its nearest.

Frantar et al. 2022, GPTQ, arXiv 2210.17323, section 3: the columns of a weight are rounded one after the other, and the
error of each is made up for by those that are not rounded yet, by the inverse of the inputs' second moments
H = X^T X. Here the scales are chosen before, so that columns may be taken in the order of their inputs' moments, the
largest first. A scale is that of nearest times the factor with the least error, each column's weighted by 1 / [H^-1].

An embedding multiplies nothing. Its H is that of the gradients which random sums of the model's results have in its
rows: they tell what a change of a row does to the results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowp import kernels
from lowp.casts import Cast, Overflow, parse
from lowp.errors import InvalidInput, check_name
from lowp.formats import FloatFormat, ScaledFormat
from lowp.inference.convolutions import Geometry
from lowp.kernels.numbers import groups, scaled
from lowp.nested import tensors_of
from lowp.quantized import Quantized

ROUNDINGS = ("nearest", "gptq")
_DAMPING = 0.01  # of the mean second moment, added to each
_BLOCK = 128  # columns whose errors reach the others together
_FACTORS = tuple(2 ** (step / 16) for step in (0, *range(-12, 5), -16, 16))  # of a scale; 1 first, which ties keep


def check_rounding(rounding: str, cast: Cast, has_data: bool) -> None:
    """Raise UnknownName or InvalidInput for what cannot be done."""
    check_name("rounding", rounding, ROUNDINGS)
    if rounding == "nearest":
        return
    if not has_data:
        raise InvalidInput("rounding gptq reads the layers' inputs: give quantize_model calibration_data")
    format = cast.format
    if cast.element.bits == 1 or (isinstance(format, ScaledFormat) and (format.affine or format.other)):
        raise InvalidInput(
            f"rounding gptq does not know {cast}: give a format without zero points, of 2 bits or more and one element"
        )


class SecondMoments:
    """The second moments of what a layer multiplies with the columns of its weight."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def add(self, layer: nn.Module, x: Tensor) -> None:
        """Look at an input of a layer; those of convolutions in groups are not kept."""
        if isinstance(layer, (nn.Conv1d, nn.Conv2d)):
            geometry = Geometry.of(layer)
            if geometry.groups == 1:
                self.add_rows(geometry.rows_of(x if x.ndim == len(layer.kernel_size) + 2 else x[None]))
        elif isinstance(layer, nn.Linear):
            self.add_rows(x.detach().reshape(-1, layer.in_features).float())

    def add_rows(self, rows: Tensor) -> None:
        """Look at fp32 rows [m, k]."""
        found = (rows.t() @ rows).double()
        self._sum = found if self._sum is None else self._sum + found

    def rounded(self, weight: Tensor, cast: Cast) -> Tensor | Quantized:
        """The weight [n, k] in a format, as codes or as values that it represents."""
        return weight if self._sum is None else gptq(weight, cast, self._sum)


class Sensitivity:
    """The gradients that random sums of a model's results have in what its embeddings return."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._returned: list[tuple[str, Tensor]] = []

    def after(self, name: str, module: nn.Module, given: Any, result: Tensor) -> Tensor:
        """Keep what an embedding of this name returns: a forward hook."""
        leaf = result.detach().requires_grad_()
        self._returned.append((name, leaf))
        return leaf

    def add(self, result: Any, moments: dict[str, SecondMoments]) -> None:
        """Look at the results of a batch, of which those are left out that no gradient leads to."""
        returned, self._returned = self._returned, []
        found = [one for one in tensors_of(result) if one.is_floating_point() and one.requires_grad]
        if not returned or not found:
            return
        signs = (torch.randint(0, 2, one.shape, generator=self._generator).to(one) * 2 - 1 for one in found)
        total = torch.stack([(one * sign).sum() for one, sign in zip(found, signs, strict=True)]).sum()
        gradients = torch.autograd.grad(total, [leaf for _, leaf in returned], allow_unused=True)
        for (name, _), gradient in zip(returned, gradients, strict=True):
            if gradient is not None:
                moments.setdefault(name, SecondMoments()).add_rows(gradient.flatten(0, -2).float())


def gptq(weight: Tensor, cast: Cast, moments: Tensor) -> Tensor | Quantized:
    """Round a weight [n, k] by the second moments [k, k] of its inputs; see the text of this module."""
    weight, columns = weight.detach().double(), _Columns.of(moments)
    if not isinstance(cast.format, ScaledFormat):
        return columns.elements(weight, torch.ones_like(weight), cast).float()
    found: Quantized = kernels.encode(weight.float(), cast)
    format = scaled.scaled_format(cast)
    scale, outer = scaled.read_scales(found.scale, format), 1.0 if found.outer is None else found.outer.double()
    if cast.scaling == parse(format).scaling and isinstance(format.scale, FloatFormat) and not scaled.is_mean(format):
        scale = _scale_of_least_error(weight, cast, (scale, outer), columns.worth)
    spread = groups.spread(scale * outer, weight.shape, format.scope).expand(weight.shape)
    elements = columns.elements(weight, spread, cast.element_cast)
    codes = kernels.encode(elements, Cast(format.element))
    return replace(found, payload=codes, scale=scaled.stored_scales(scale, format))


def _scale_of_least_error(weight: Tensor, cast: Cast, of_nearest: tuple[Tensor, Any], worth: Tensor) -> Tensor:
    """Return the scales in fp64, each the one of which nearest elements have the least error."""
    format, (scale, outer) = scaled.scaled_format(cast), of_nearest
    assert isinstance(format.scale, FloatFormat)
    to, element = Cast(format.scale, overflow=Overflow.SATURATE), _saturating(cast.element_cast)
    least, best = torch.full_like(scale, torch.inf), scale
    for factor in _FACTORS:
        tried = kernels.quantize(scale * factor, to).clamp(min=format.scale.smallest_normal)
        unit = groups.spread(tried * outer, weight.shape, format.scope)
        errors = (kernels.quantize(weight / unit, element) * unit - weight).square() * worth
        error = groups.fold(errors, format.scope).sum(-1)
        best, least = torch.where(error < least, tried, best), torch.minimum(error, least)
    return best


def _saturating(cast: Cast) -> Cast:
    return replace(cast, overflow=Overflow.SATURATE) if cast.overflow is None else cast


@dataclass(frozen=True)
class _Columns:
    """How the columns of a weight make up for each other's errors.

    `order`: the first is rounded first. `factor` is upper triangular, in that order: row i tells how the columns after
    column i make up for its error. `worth`: what the error of a column costs when they do, in the weight's order.
    """

    order: Tensor
    factor: Tensor
    worth: Tensor

    @staticmethod
    def of(moments: Tensor) -> _Columns:
        """By second moments [k, k], damped; of all columns alike where there is nothing."""
        diagonal = moments.diagonal()
        order = diagonal.argsort(descending=True, stable=True)
        filled = (moments + torch.diag((diagonal == 0).double()))[order][:, order]
        damped = filled + _DAMPING * filled.diagonal().mean() * torch.eye(
            len(moments), dtype=moments.dtype, device=moments.device
        )
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
        return _Columns(order, factor, 1 / inverse.diagonal()[order.argsort()])

    def elements(self, weight: Tensor, scales: Tensor, cast: Cast) -> Tensor:
        """Return the elements [n, k] of a weight in fp64, of which `scales` are the units."""
        cast = _saturating(cast)
        left, scales = weight[:, self.order].clone(), scales[:, self.order]
        found = torch.empty_like(left)
        for begin in range(0, left.shape[1], _BLOCK):
            block = slice(begin, begin + _BLOCK)
            some, factors = left[:, block], self.factor[block, block]
            errors = torch.empty_like(some)
            for i in range(some.shape[1]):
                unit = scales[:, begin + i]
                element = kernels.quantize(some[:, i] / unit, cast)
                found[:, begin + i] = element
                errors[:, i] = (some[:, i] - element * unit) / factors[i, i]
                some[:, i + 1 :] -= errors[:, i, None] * factors[i, i + 1 :]
            left[:, begin + _BLOCK :] -= errors @ self.factor[block, begin + _BLOCK :]
        return found[:, self.order.argsort()]
