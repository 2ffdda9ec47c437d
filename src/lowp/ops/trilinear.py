"""The shapes of contractions: which three fp32 products a linear layer, an einsum or a convolution consists of.

A form is data about one call. `product(slot, left, right, bias)` computes the product that fills a slot from the
operands of the other two, in the order FIRST, SECOND, OUTPUT, in the dtype it is given, by the same torch calls that
plain fp32 training makes.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lowp.kernels.choose.dispatch import answers_at_once
from lowp.kernels.int16 import integer
from lowp.kernels.int16.integer_reference import ConvolutionShape
from lowp.kernels.int16.integer_run import Bias, Multiplied, NotFinite
from lowp.kernels.int16.mantissas import Mantissas
from lowp.kernels.products import sum_of_rows

FIRST, SECOND, OUTPUT = 0, 1, 2
# the two slots whose operands make the product of a slot, in order
OTHERS = {FIRST: (SECOND, OUTPUT), SECOND: (FIRST, OUTPUT), OUTPUT: (FIRST, SECOND)}
FEW = 1 << 13, 1 << 16  # numbers of a small layer's operand and of its weight, at most
Pair = tuple[int, int]
Finish = Callable[[Tensor], Tensor]


class Form(ABC):
    """A trilinear form: which products a contraction and its gradients are."""

    first: tuple[int, ...]  # the shapes of both operands
    second: tuple[int, ...]
    are_matrices: ClassVar[bool] = True  # whether kernels multiply the `matrices` of a product in fp32
    is_small = False  # whether lowp multiplies 16 bits on a CPU that does it itself

    @property
    @abstractmethod
    def contracted(self) -> dict[int, Pair]:
        """The dimension along which each of the two operands of a slot's product is summed."""

    @abstractmethod
    def product(self, slot: int, left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product of the other two slots' operands."""

    def rotated(self, slot: int, size: int) -> Pair | None:
        """Return the dimension of each operand along which blocks of both may be rotated alike; None where none is."""
        return self.contracted[slot]

    def gradients(self, x: Tensor, weight: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Return the products for FIRST and SECOND, of which torch may compute both in less time than each alone.

        `first`, `second`: the gradient as each of them reads it.
        """
        return self.product(FIRST, weight, first), self.product(SECOND, x, second)

    @abstractmethod
    def matrices(self, slot: int, left: Tensor, right: Tensor, batches: int = 1) -> tuple[Tensor, Tensor, Finish]:
        """Return the same product as matrices (..., m, k) and (..., k, n), and the function that shapes the result.

        At most `batches` leading dimensions are left apart; more of them become one.
        """

    def integer_product(
        self, slot: int, left: Mantissas, right: Mantissas, exact: bool, dtype: torch.dtype, bias: Tensor | None
    ) -> Tensor:
        """Return the same product of int16 mantissas, summed exactly and rounded once to `dtype`, or in int32 chains.

        Chains are flushed to fp32 and returned in it. The output's bias is added to what was rounded, in its dtype.
        """
        apart = exact or not answers_at_once(left.payload)
        columns = None if apart or bias is None else self.numbers_a_column(bias)
        if bias is None or columns is not None:
            return self._integer_product(slot, left, right, exact, dtype, columns)
        result = self._integer_product(slot, left, right, exact, dtype, None)
        return self.with_bias(result, bias.to(result.dtype))

    def _integer_product(
        self, slot: int, left: Mantissas, right: Mantissas, exact: bool, dtype: torch.dtype, bias: Tensor | None
    ) -> Tensor:
        rows, columns, finish = self.matrices(slot, left.payload, right.payload)
        if rows.dtype is not torch.int16 or columns.dtype is not torch.int16:  # summed along a letter of its own
            wide = (one.values for one in (left, right))
            return self.product(slot, *(one.to(dtype) for one in wide))
        added, to = None if bias is None else Bias(bias), dtype if exact else None
        return finish(integer.matmul(rows, columns, left.exponent + right.exponent, to, added))

    def mantissas(
        self, slot: int, left: Mantissas, right: Mantissas, exponent: Tensor, symmetric: bool, bias: Tensor | None
    ) -> Multiplied | None:
        """Return the same product as int16 under an exponent: the exact sum, and bias, rounded once.

        None where the sum is needed itself: of other products, and for a bias that is not finite or that is no number
        a column.
        """
        numbers = None if bias is None else self.numbers_a_column(bias)
        if not self.is_integer_sum(slot) or (bias is not None and numbers is None):
            return None
        shift = left.exponent + right.exponent - exponent
        added = None if numbers is None else Bias(numbers, -int(exponent))
        try:
            return self._exact_sum(slot, left.payload, right.payload, exponent=shift, symmetric=symmetric, bias=added)
        except NotFinite:
            return None

    def is_integer_sum(self, slot: int) -> bool:
        """Whether the product of a slot is a sum of products of the operands' integers, and nothing else."""
        return True

    @property
    def plain_shape(self) -> ConvolutionShape | None:
        """The shape of a convolution of the kernels that this is, with the same operands; None of other products."""
        return None

    def _exact_sum(self, slot: int, left: Tensor, right: Tensor, **options: Any) -> Multiplied | None:
        """Return the exact sum of int16 products, with the options of `integer.multiply`; None where it is none."""
        rows, columns, finish = self.matrices(slot, left, right)
        if rows.dtype is not torch.int16 or columns.dtype is not torch.int16:
            return None
        found = integer.multiply(rows, columns, **options)
        return found if finish is _as_it_is else found._replace(values=finish(found.values))

    def fits(self, bias: Tensor | None) -> bool:
        """Whether kernels, or torch's product of the output, can add a bias."""
        return bias is None or self.numbers_a_column(bias) is not None

    def numbers_a_column(self, bias: Tensor | None) -> Tensor | None:
        """Return a bias that kernels can add, one number per column of the output's matrix or channel; else None."""
        return None

    def with_bias(self, result: Tensor, bias: Tensor) -> Tensor:
        """Return the output with its bias added."""
        return result + self.spread(bias)

    def spread(self, bias: Tensor) -> Tensor:
        """Return the bias as it broadcasts over the output."""
        return bias

    @abstractmethod
    def bias_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the bias."""

    def bias_axis(self) -> int | None:
        """Return the axis of the output along which the bias varies; None unless it is a vector along one axis."""
        return None


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _multiplied(left: Tensor, right: Tensor) -> Tensor:
    """Return torch.matmul of two tensors, a matrix and many others as one product.

    Where no gradient is recorded, as in a Function, torch copies the matrix for each of the others unless they are
    contiguous: in bf16 on a CPU that takes hundreds of times as long.
    """
    if right.dim() == 2 < left.dim():
        left = left.contiguous()
    elif left.dim() == 2 < right.dim():
        return torch.matmul(right.mT.contiguous(), left.t()).mT.contiguous()
    return torch.matmul(left, right)


def _summed(x: Tensor, dims: list[int]) -> Tensor:
    """Return the sums along some dimensions; of 16-bit numbers in fp32."""
    return x.sum(dims, dtype=torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else None)


def is_small(numbers: int, of_weight: int) -> bool:
    """Whether a linear layer of so many numbers takes less time than torch's 16-bit kernels on a CPU need to begin.

    Where these are not forced it is a product in fp32 of the rounded operands, rounded once.
    """
    return numbers <= FEW[0] and of_weight <= FEW[1]


def has_numbers(bias: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a bias is a vector of that shape with values that fp32 holds."""
    return len(shape) == 1 and tuple(bias.shape) == shape and bias.dtype is not torch.float64


@dataclass(frozen=True)
class Linear(Form):
    """y[..., m] = x[..., k] w[m, k] + bias[m]; a one-dimensional w gives y[...]."""

    first: tuple[int, ...]
    second: tuple[int, ...]

    contracted: ClassVar[dict[int, Pair]] = {FIRST: (0, -1), SECOND: (0, 0), OUTPUT: (-1, -1)}

    @property
    def is_small(self) -> bool:  # type: ignore[override]
        return is_small(math.prod(self.first), math.prod(self.second))

    def product(self, slot: int, left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
        if slot == OUTPUT:
            return F.linear(left if left.dim() < 3 else left.contiguous(), right, bias)  # see `_multiplied`
        if len(self.first) == len(self.second) == 2:  # already matrices: the reshape costs time in small calls
            return right @ left if slot == FIRST else right.t() @ left
        weight, gradient = self._matrix(slot, left, right)
        if slot == FIRST:
            return (gradient @ weight).reshape(self.first)
        return (gradient.t() @ weight).reshape(self.second)

    def rotated(self, slot: int, size: int) -> Pair | None:
        return self.contracted[slot] if len(self.second) == 2 else None

    def _matrix(self, slot: int, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return the operand that is not the gradient, and the gradient, as matrices."""
        outputs = self.second[0] if len(self.second) == 2 else 1
        rows, inputs = math.prod(self.first[:-1]), self.second[-1]
        return left.reshape(rows if slot == SECOND else outputs, inputs), right.reshape(rows, outputs)

    def matrices(self, slot: int, left: Tensor, right: Tensor, batches: int = 1) -> tuple[Tensor, Tensor, Finish]:
        are_matrices = len(self.first) == len(self.second) == 2
        if slot == OUTPUT:
            if are_matrices:
                return left, right.t(), _as_it_is
            rows = left.reshape(math.prod(self.first[:-1]), self.first[-1])
            shape = (*self.first[:-1], *self.second[:-1])
            columns = right.reshape(math.prod(self.second[:-1]), self.first[-1]).t()
            return rows, columns, lambda y: y.reshape(shape)
        weight, gradient = (left, right) if are_matrices else self._matrix(slot, left, right)
        shape = self.first if slot == FIRST else self.second
        rows = gradient if slot == FIRST else gradient.t()
        return rows, weight, _as_it_is if are_matrices else lambda y: y.reshape(shape)

    def numbers_a_column(self, bias: Tensor | None) -> Tensor | None:
        return bias if bias is not None and has_numbers(bias, self.second[:-1]) else None

    def bias_axis(self) -> int | None:
        return -1 if len(self.second) == 2 and len(self.first) > 1 else None

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        if len(self.second) != 2:
            return gradient.float().sum_to_size(())
        if len(self.first) != 2:
            gradient = gradient.reshape(math.prod(self.first[:-1]), self.second[0])
        return sum_of_rows(gradient)


def _summed_alone(tensors: list[Tensor], terms: list[str], target: str) -> tuple[list[Tensor], list[str]]:
    """Return two operands, and their letters, summed along the letters of one alone that the result lacks."""
    for index, term in enumerate(terms):
        alone = [letter for letter in term if letter not in target and letter not in terms[1 - index]]
        if alone:
            tensors[index] = _summed(tensors[index], [term.index(letter) for letter in alone])
            terms[index] = "".join(letter for letter in term if letter not in alone)
    return tensors, terms


def _common(letters: str, *terms: str, without: str = "") -> str:
    """Return the letters that all terms have, in order, but for some."""
    return "".join(one for one in letters if all(one in term for term in terms) and one not in without)


_BY_ROWS = {("mk", "kn", "mn"), ("bmk", "bkn", "mn"), ("bmk", "bkn", "bmn")}  # with rows of columns in the result


@dataclass(frozen=True)
class Einsum(Form):
    """A product of two tensors given by letters; `call` is the torch function of the output, if it is another one.

    No letter occurs twice in an operand. `scale` multiplies the product, `bias_scale` the bias (addmm's alpha, beta).
    """

    terms: tuple[str, str, str]
    first: tuple[int, ...]
    second: tuple[int, ...]
    call: Callable[..., Tensor] | None = None
    scale: float = 1
    bias_scale: float = 1
    bias: tuple[int, ...] | None = None

    @property
    def contracted(self) -> dict[int, Pair]:
        return {slot: self._axes(slot) for slot in (FIRST, SECOND, OUTPUT)}

    def rotated(self, slot: int, size: int) -> Pair | None:
        return self._axes(slot) if self._summed(slot) else None

    def _summed(self, slot: int) -> str:
        """Return the letters that both operands of a product have, and that it sums, in order."""
        left, right = (term for index, term in enumerate(self.terms) if index != slot)
        return _common(left, right, without=self.terms[slot])

    def _axes(self, slot: int) -> Pair:
        left, right = (term for index, term in enumerate(self.terms) if index != slot)
        summed = self._summed(slot)
        if not summed:
            return -1, -1
        left_axis, right_axis = left.index(summed[-1]), right.index(summed[-1])
        return (-1 if left_axis == len(left) - 1 else left_axis, -1 if right_axis == len(right) - 1 else right_axis)

    def product(self, slot: int, left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
        if slot != OUTPUT:
            result = self._gradient(slot, left, right)
            return result if self.scale == 1 else result * self.scale
        if self.call is None or (bias is None) != (self.bias is None):  # double backward has the product without bias
            result = torch.einsum("{},{}->{}".format(*self.terms), left, right)
            result = result if self.scale == 1 else result * self.scale
            return result if bias is None else self.with_bias(result, bias)
        if bias is None:
            return _multiplied(left, right) if self.call is torch.matmul else self.call(left, right)
        return self.call(bias, left, right, beta=self.bias_scale, alpha=self.scale)

    def _gradient(self, slot: int, left: Tensor, right: Tensor) -> Tensor:
        """Return a gradient; along letters that neither operand has (they were summed) it is constant."""
        terms = (self.terms[SECOND] if slot == FIRST else self.terms[FIRST], self.terms[OUTPUT])
        if slot == FIRST:  # of the gradient first are the letters that come first: in this order torch writes them
            terms, left, right = terms[::-1], right, left
        return self._expanded(slot, torch.einsum(f"{terms[0]},{terms[1]}->{self._reachable(slot)}", left, right))

    def _reachable(self, slot: int) -> str:
        others = "".join(term for index, term in enumerate(self.terms) if index != slot)
        return "".join(letter for letter in self.terms[slot] if letter in others)

    def _expanded(self, slot: int, result: Tensor) -> Tensor:
        if slot == OUTPUT:
            return result
        reachable = self._reachable(slot)
        for axis, letter in enumerate(self.terms[slot]):
            if letter not in reachable:
                result = result.unsqueeze(axis)
        return result.expand(self.first if slot == FIRST else self.second)

    def matrices(self, slot: int, left: Tensor, right: Tensor, batches: int = 1) -> tuple[Tensor, Tensor, Finish]:
        terms = [term for index, term in enumerate(self.terms) if index != slot]
        target = self._reachable(slot)
        (left, right), terms = _summed_alone([left, right], terms, target)
        batch = _common(target, terms[0], terms[1])
        rows, columns = (_common(target, term, without=batch) for term in terms)
        if rows and columns and batch + columns + rows == target:  # then the product is the result as it lies
            rows, columns, terms, left, right = columns, rows, terms[::-1], right, left
        summed = _common(terms[0], terms[1], without=target)
        sizes = {**dict(zip(terms[0], left.shape, strict=True)), **dict(zip(terms[1], right.shape, strict=True))}

        def flat(x: Tensor, term: str, *groups: str) -> Tensor:
            x = x.permute([term.index(letter) for group in groups for letter in group])
            return x.reshape([math.prod([sizes[letter] for letter in group]) for group in groups])

        def finish(y: Tensor) -> Tensor:
            order = batch + rows + columns
            y = y.reshape([sizes[letter] for letter in order]).permute([order.index(letter) for letter in target])
            return self._expanded(slot, y if self.scale == 1 else y * self.scale)

        apart = tuple(batch) if 1 < len(batch) <= batches else (batch,)
        return flat(left, terms[0], *apart, rows, summed), flat(right, terms[1], *apart, summed, columns), finish

    def is_integer_sum(self, slot: int) -> bool:
        return self.scale == 1 and self._reachable(slot) == self.terms[slot]

    def numbers_a_column(self, bias: Tensor | None) -> Tensor | None:
        is_vector = bias is not None and self.bias_axis() is not None and has_numbers(bias, self.second[-1:])
        return bias if is_vector else None

    def bias_axis(self) -> int | None:
        is_vector = self.scale == self.bias_scale == 1 and self.bias == self.second[-1:]
        return -1 if is_vector and self.terms in _BY_ROWS else None

    def spread(self, bias: Tensor) -> Tensor:
        return bias * self.bias_scale

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        if self.bias_axis() is not None:
            return sum_of_rows(gradient.reshape(-1, gradient.shape[-1]))
        gradient = gradient.float()
        return (gradient if self.bias_scale == 1 else gradient * self.bias_scale).sum_to_size(self.bias or ())
