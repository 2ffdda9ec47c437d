"""Runners of the convolutions, of one to three dimensions, plain and transposed, and conv_tbc.

The input has the role `input`, the kernel `weight`. All three products are torch's own fp32 convolutions, forward and
backward, on the rounded operands.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lowp.compat import remembered
from lowp.kernels.int16 import integer
from lowp.kernels.int16.integer_reference import ConvolutionShape
from lowp.kernels.int16.integer_run import Bias, Multiplied
from lowp.kernels.int16.mantissas import Mantissas
from lowp.kernels.tracing import is_jit_tracing
from lowp.ops.call import Call, Quick, QuickRegion
from lowp.ops.contraction import multiply, runner
from lowp.ops.direct import Direct, direct
from lowp.ops.int16 import layer
from lowp.ops.signature import Empty, Mismatch, bound, check, require
from lowp.ops.trilinear import FIRST, OUTPUT, SECOND, Einsum, Finish, Form, Pair, has_numbers
from lowp.policy import Rule

Sizes = tuple[int, ...]
_PRODUCTS = {OUTPUT: "forward", FIRST: "input_gradient", SECOND: "weight_gradient"}
_PLAIN, _WITH_TRANSPOSE = (tuple(f"conv{kind}{dims}d" for dims in (1, 2, 3)) for kind in ("", "_transpose"))
_TRANSPOSED = {OUTPUT: "input_gradient", FIRST: "forward", SECOND: "weight_gradient"}


@dataclass(frozen=True)
class Convolution(Form):
    """y[n, o, ...] of x[n, c, ...] and w[o, c / groups, ...], or w[c, o / groups, ...] if transposed."""

    first: Sizes
    second: Sizes
    stride: Sizes
    padding: Sizes
    dilation: Sizes
    transposed: bool
    output_padding: Sizes
    groups: int
    are_matrices: ClassVar[bool] = False

    @property
    def contracted(self) -> dict[int, Pair]:
        into, out_of = (0, 1) if self.transposed else (1, 0)
        return {OUTPUT: (1, into), FIRST: (out_of, 1), SECOND: (-1, -1)}

    def rotated(self, slot: int, size: int) -> Pair | None:
        if slot == SECOND:  # operands meet at places that are shifted against each other
            return None
        summed = (self.channels if slot == FIRST else self.first[1]) // self.groups
        return self.contracted[slot] if self.groups == 1 or summed % size == 0 else None

    @property
    def channels(self) -> int:
        """The number of channels of the result."""
        return self.second[1] * self.groups if self.transposed else self.second[0]

    @property
    def is_possible(self) -> bool:
        """Whether the convolution is valid; for an invalid one torch raises its own error."""
        if min(*self.stride, *self.dilation) < 1 or min(self.padding) < 0:
            return False
        if self.transposed:
            return self.first[1] == self.second[0] and min(self._transposed_output(self.first)[2:]) >= 1
        reach = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.second[2:], strict=True)]
        fits = all(x + 2 * p >= r for x, p, r in zip(self.first[2:], self.padding, reach, strict=True))
        grouped = self.first[1] == self.second[1] * self.groups and self.second[0] % self.groups == 0
        return fits and grouped and min(self.second[2:]) >= 1

    def product(self, slot: int, left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
        if slot == OUTPUT:
            return torch.convolution(left, right, bias, *self._settings)
        if slot == FIRST:  # only the shape of the requested operand is read
            x, weight = right.new_empty(self.first), left
        else:
            x, weight = left, right.new_empty(self.second)
        wanted = [slot == FIRST, slot == SECOND, False]
        result = torch.ops.aten.convolution_backward(right, x, weight, None, *self._settings, wanted)
        gradient: Tensor = result[slot]
        return gradient

    def gradients(self, x: Tensor, weight: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        run, both = torch.ops.aten.convolution_backward, first is second
        found = run(first, x, weight, None, *self._settings, [True, both, False])
        if both:
            return found[0], found[1]
        return found[0], run(second, x, weight, None, *self._settings, [False, True, False])[1]

    @property
    def _settings(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups

    def _integer_product(
        self, slot: int, left: Mantissas, right: Mantissas, exact: bool, dtype: torch.dtype, bias: Tensor | None
    ) -> Tensor:
        operands = self._plain_operands(slot, left.payload, right.payload)
        if operands is None:
            return super()._integer_product(slot, left, right, exact, dtype, None)
        product, *both, shape = operands
        added, to = None if bias is None else Bias(bias), dtype if exact else None
        return integer.convolution(product, (both[0], both[1]), shape, left.exponent + right.exponent, to, added)

    def _exact_sum(self, slot: int, left: Tensor, right: Tensor, **options: Any) -> Multiplied | None:
        operands = self._plain_operands(slot, left, right)
        if operands is None:
            return super()._exact_sum(slot, left, right, **options)
        return integer.convolve(*operands, **options)

    def numbers_a_column(self, bias: Tensor | None) -> Tensor | None:
        return bias if self._is_plain and self.fits(bias) else None

    def fits(self, bias: Tensor | None) -> bool:
        return bias is None or has_numbers(bias, (self.channels,))

    @property
    def _is_plain(self) -> bool:
        """Whether the kernels' own convolution can compute it, without windows made by torch."""
        return not self.transposed or self._shape.output == self.first

    @cached_property
    def plain_shape(self) -> ConvolutionShape | None:
        return None if self.transposed else self._shape

    @cached_property
    def _shape(self) -> ConvolutionShape:
        """The plain convolution: of a transposed one the one with output and input exchanged."""
        whole = self._transposed_output(self.first) if self.transposed else self.first
        return ConvolutionShape.of(whole, self.second, self.stride, self.padding, self.dilation, self.groups)

    def _plain_operands(
        self, slot: int, left: Tensor, right: Tensor
    ) -> tuple[str, Tensor, Tensor, ConvolutionShape] | None:
        """Return the product of a plain convolution that this is, and its operands in the kernels' order.

        The transposed convolution is the plain one with output and input exchanged. None if `output_padding` makes its
        output so large that the plain one would have another input.
        """
        shape = self._shape
        if not self.transposed:
            return (_PRODUCTS[slot], *((right, left) if slot == FIRST else (left, right)), shape)
        if shape.output != self.first:
            return None
        return (_TRANSPOSED[slot], *((left, right) if slot == OUTPUT else (right, left)), shape)

    def spread(self, bias: Tensor) -> Tensor:
        return bias.reshape(-1, *(1 for _ in self.stride))

    def bias_axis(self) -> int | None:
        return 1

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        return gradient.sum([dim for dim in range(gradient.dim()) if dim != 1])

    def matrices(self, slot: int, left: Tensor, right: Tensor, batches: int = 1) -> tuple[Tensor, Tensor, Finish]:
        if self.transposed:  # the transposed convolution is the plain one with output and input exchanged
            if slot == OUTPUT:
                shape = self._transposed_output(left.shape)
                return self._plain(FIRST, shape, right, left)
            return self._plain(OUTPUT if slot == FIRST else SECOND, tuple(right.shape), right, left)
        return self._plain(slot, self.first, left, right)

    def _transposed_output(self, shape: Sequence[int]) -> Sizes:
        spatial = (
            (size - 1) * s - 2 * p + d * (k - 1) + extra + 1
            for size, s, p, d, k, extra in zip(
                shape[2:], self.stride, self.padding, self.dilation, self.second[2:], self.output_padding, strict=True
            )
        )
        return (shape[0], self.second[1] * self.groups, *spatial)

    def _plain(self, slot: int, shape: Sizes, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Finish]:
        """Return a product of a plain convolution with an input of this shape as matrices, by windows over the input.

        The input's gradient is summed over windows of the stretched output gradient: zeros between its elements count
        as products.
        """
        dims = len(self.stride)
        places, kernel = "hij"[:dims], "xyz"[:dims]
        if slot == FIRST:
            window = self._windows(self._stretched(right, shape), (1,) * dims, (0,) * dims)
            weight = self._grouped(left.flip(list(range(2, 2 + dims))), 0)
            terms = (f"ngo{places}{kernel}", f"goc{kernel}", f"ngc{places}")
            return self._as_einsum(terms, self._grouped(window, 1), weight, shape)
        window = self._windows(left, self.stride, self.padding)
        if self.transposed:  # with an output_padding of a stride or more there are windows that no input has
            for dim, size in enumerate(self.first[2:], start=2):
                window = window.narrow(dim, 0, size)
        window = self._grouped(window, 1)
        if slot == OUTPUT:
            terms = (f"ngc{places}{kernel}", f"goc{kernel}", f"ngo{places}")
            spatial = window.shape[3 : 3 + dims]
            return self._as_einsum(terms, window, self._grouped(right, 0), (shape[0], self.second[0], *spatial))
        terms = (f"ngc{places}{kernel}", f"ngo{places}", f"goc{kernel}")
        return self._as_einsum(terms, window, self._grouped(right, 1), self.second)

    @staticmethod
    def _as_einsum(
        terms: tuple[str, str, str], left: Tensor, right: Tensor, shape: Sizes
    ) -> tuple[Tensor, Tensor, Finish]:
        rows, columns, finish = Einsum(terms, tuple(left.shape), tuple(right.shape)).matrices(OUTPUT, left, right)
        return rows, columns, lambda y: finish(y).reshape(shape)

    def _grouped(self, x: Tensor, dim: int) -> Tensor:
        return x.reshape(*x.shape[:dim], self.groups, x.shape[dim] // self.groups, *x.shape[dim + 1 :])

    def _windows(self, x: Tensor, stride: Sizes, padding: Sizes) -> Tensor:
        """Return x[n, c, places..., kernel...]: the elements that each output place reads."""
        x = F.pad(x, [p for p in reversed(padding) for _ in range(2)])
        for axis, (size, step, hop) in enumerate(zip(self.second[2:], stride, self.dilation, strict=True), start=2):
            x = x.unfold(axis, hop * (size - 1) + 1, step)[..., ::hop]
        return x

    def _stretched(self, gradient: Tensor, shape: Sizes) -> Tensor:
        """Return the output gradient with stride - 1 zeros between its elements, padded to yield the input's shape."""
        pads: list[int] = []
        for axis, stride in enumerate(self.stride):
            size = gradient.shape[2 + axis]
            stretched = gradient.new_zeros(*gradient.shape[: 2 + axis], size, stride, *gradient.shape[3 + axis :])
            stretched.select(3 + axis, 0).copy_(gradient)
            gradient = stretched.flatten(2 + axis, 3 + axis).narrow(2 + axis, 0, (size - 1) * stride + 1)
            reach = self.dilation[axis] * (self.second[2 + axis] - 1)
            before = reach - self.padding[axis]
            pads = [before, shape[2 + axis] + reach - before - gradient.shape[2 + axis], *pads]
        return F.pad(gradient, pads)


@runner
def convolution(call: Call) -> Tensor:
    """conv1d, conv2d, conv3d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1), and convolution."""
    if call.op in ("convolution", "_convolution"):
        return _general(call)
    x, weight, bias, stride, padding, dilation, groups = bound(
        call, "input", "weight", bias=None, stride=1, padding=0, dilation=1, groups=1
    )
    dims = _dims(call)
    stride, dilation = _sizes(stride, dims), _sizes(dilation, dims)
    check(x, weight, bias)
    require(weight.dim() == dims + 2)
    if isinstance(padding, str):
        x, padding = _same(x, weight, padding, stride, dilation)
    padding = _sizes(padding, dims)
    return _convolve(call, x, weight, bias, (stride, padding, dilation, False, (0,) * dims, groups))


@runner
def conv_transpose(call: Call) -> Tensor:
    """conv_transpose1d to 3d(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1)."""
    x, weight, bias, stride, padding, output_padding, groups, dilation = bound(
        call, "input", "weight", bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1
    )
    dims = _dims(call)
    check(x, weight, bias)
    require(weight.dim() == dims + 2)
    stride, padding, dilation = (_sizes(one, dims) for one in (stride, padding, dilation))
    return _convolve(call, x, weight, bias, (stride, padding, dilation, True, _sizes(output_padding, dims), groups))


@runner
def conv_tbc(call: Call) -> Tensor:
    """torch.conv_tbc(input[time, batch, c], weight[kernel, c, o], bias[o], pad=0)."""
    x, weight, bias, pad = bound(call, "input", "weight", "bias", pad=0)
    check(x, weight, bias)
    require(x.dim() == 3 and weight.dim() == 3)
    settings = ((1,), (pad,), (1,), False, (0,), 1)
    return _convolve(call, x.permute(1, 2, 0), weight.permute(2, 1, 0), bias, settings).permute(2, 0, 1)


def quick(rule: Rule) -> Quick | None:
    """Return what runs conv1d to 3d and conv_transpose1d to 3d from their arguments; None for rules that have none."""
    if (integers := layer.quick(rule, _form_of)) is not None:
        return integers
    how = direct(rule)
    return None if how is None else partial(_straight, how)


def _straight(
    how: Direct, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: QuickRegion
) -> Tensor | None:
    """Run a convolution as layers call it, with all arguments in order."""
    key = function.__name__, *args[3:]
    if kwargs or len(key) != (5 if key[0] in _PLAIN else 6) or list in map(type, key):
        return None
    x, weight, bias = args[:3]
    return how.contract(key, partial(_known_form, key), x, weight, bias, region.weights)


def _known_form(key: tuple[Any, ...], first: Sizes, second: Sizes) -> Convolution | None:
    """Return the convolution of a function's name and its arguments after the bias; None for those left to a runner."""
    if key[0] in _PLAIN:
        stride, padding, dilation, groups = key[1:]
        is_transposed, output_padding = False, (0,) * (len(first) - 2)
    else:
        stride, padding, output_padding, groups, dilation = key[1:]
        is_transposed = True
    sizes = stride, padding, dilation, output_padding
    if len(first) != len(second) or any(type(one) is not tuple or len(one) != len(first) - 2 for one in sizes):
        return None
    if 0 in first + second or type(groups) is not int or groups < 1:
        return None
    form, is_possible = _form((first, second, stride, padding, dilation, is_transposed, output_padding, groups))
    return form if is_possible else None


def _form_of(op: str, first: Sizes, second: Sizes, bias: Sizes | None, more: tuple[Any, ...]) -> Convolution | None:
    """Return the convolution of a call with all its arguments in order, as layers make it; None for any other call."""
    if len(more) != (4 if op in _PLAIN else 5):
        return None
    form = _known_form((op, *more), tuple(first), tuple(second))
    return form if form is not None and bias in (None, (form.channels,)) else None


def _general(call: Call) -> Tensor:
    """torch.convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "transposed", "output_padding", "groups")
    # _convolution's flags for cuDNN do not change the result
    flags = dict.fromkeys(("benchmark", "deterministic", "cudnn_enabled", "allow_tf32"))
    values = bound(call, *names, **(flags if call.op == "_convolution" else {}))
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = values[:9]
    check(x, weight, bias)
    dims = weight.dim() - 2
    sizes = [_sizes(one, dims) for one in (stride, padding, dilation, output_padding)]
    return _convolve(call, x, weight, bias, (*sizes[:3], bool(transposed), sizes[3], groups))


def _convolve(
    call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, settings: tuple[Sizes, Sizes, Sizes, bool, Sizes, int]
) -> Tensor:
    if not (x.numel() and weight.numel()):
        raise Empty
    require(x.dim() in (weight.dim() - 1, weight.dim()) and settings[-1] >= 1)
    single = x.dim() == weight.dim() - 1
    x = x.unsqueeze(0) if single else x
    key = tuple(x.shape), tuple(weight.shape), *settings
    is_traced = torch.compiler.is_compiling() or is_jit_tracing()
    form, is_possible = _new_form(key) if is_traced else _form(key)
    require(is_possible and (bias is None or tuple(bias.shape) == (form.channels,)))
    result = multiply(form, call, x, weight, bias)
    return result.squeeze(0) if single else result


def _new_form(key: tuple[Any, ...]) -> tuple[Convolution, bool]:
    """Return a convolution of these fields, and whether it is possible."""
    form = Convolution(*key)
    return form, form.is_possible


_form = remembered(_new_form)


def _same(x: Tensor, weight: Tensor, padding: str, stride: Sizes, dilation: Sizes) -> tuple[Tensor, Any]:
    """Return the input and the padding for the word `same` or `valid`; an odd `same` pads the end by one more."""
    if padding == "valid":
        return x, 0
    require(padding == "same" and math.prod(stride) == 1)
    totals = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    if any(total % 2 for total in totals):
        x = F.pad(x, [amount for total in reversed(totals) for amount in (0, total % 2)])
    return x, tuple(total // 2 for total in totals)


def _dims(call: Call) -> int:
    """Return the number of dimensions in the function's name."""
    return int(call.op[call.op.rindex("d") - 1])


def _sizes(value: Any, dims: int) -> Sizes:
    """Return one size per dimension, from one number or one number each."""
    if isinstance(value, int):
        return (value,) * dims
    if not isinstance(value, (list, tuple)) or len(value) not in (1, dims):
        raise Mismatch
    return tuple(value) * (dims // len(value))
