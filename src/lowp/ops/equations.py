"""Products of two tensors as letters, as in einsum: matmul's shapes, einsum's spellings, tensordot."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lowp.ops.signature import Mismatch

_LETTERS = string.ascii_lowercase + string.ascii_uppercase


@dataclass(frozen=True)
class Equation:
    """The letters of two operands and of the result.

    `squeezes` are the dimensions of size 1 that are removed from each operand because the other operand broadcasts
    them.
    """

    terms: tuple[str, str, str]
    squeezes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    @classmethod
    def of_matmul(cls, first: tuple[int, ...], second: tuple[int, ...]) -> Equation:
        """Return the equation of torch.matmul for operands of these shapes, with broadcast batch dimensions.

        Raises Mismatch where torch refuses them: what is summed over is not broadcast.
        """
        if first[-1] != second[-min(len(second), 2)]:
            raise Mismatch
        batch = _LETTERS[: max(len(first), len(second), 2) - 2]
        m, k, n = tuple(_LETTERS[-3:])
        left = k if len(first) == 1 else batch[len(batch) - len(first) + 2 :] + m + k
        right = k if len(second) == 1 else batch[len(batch) - len(second) + 2 :] + k + n
        result = batch + (m if len(first) > 1 else "") + (n if len(second) > 1 else "")
        return cls((left, right, result))._broadcast(first, second)

    def _broadcast(self, first: Sequence[int], second: Sequence[int]) -> Equation:
        """Remove dimensions of size 1 that are larger in the other operand. Raises Mismatch for different sizes."""
        sizes = (dict(zip(self.terms[0], first, strict=True)), dict(zip(self.terms[1], second, strict=True)))
        terms, squeezes = list(self.terms), []
        for operand, other in ((0, 1), (1, 0)):
            repeated = [x for x in self.terms[operand] if sizes[operand][x] == 1 and sizes[other].get(x, 1) != 1]
            squeezes.append(tuple(self.terms[operand].index(letter) for letter in repeated))
            terms[operand] = "".join(letter for letter in self.terms[operand] if letter not in repeated)
        left, right = ({x: s for x, s in sizes[i].items() if x in terms[i]} for i in (0, 1))
        if any(right.get(letter, size) != size for letter, size in left.items()):
            raise Mismatch
        return Equation((terms[0], terms[1], terms[2]), (squeezes[0], squeezes[1]))

    @property
    def is_squeezed(self) -> bool:
        """Whether an operand is broadcast along a dimension of the other."""
        return any(self.squeezes)

    def squeezed(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Return the operands without their broadcast dimensions."""
        left, right = self.squeezes
        return (first.squeeze(left) if left else first), (second.squeeze(right) if right else second)


@dataclass(frozen=True)
class Chain:
    """The letters of an einsum of several operands."""

    terms: tuple[str, ...]
    result: str
    shapes: tuple[tuple[int, ...], ...]

    def pair(self, index: int) -> Equation:
        """Return the equation that contracts the product of the operands before `index` with operand `index`."""
        left, sizes = self._prefix(index)
        right = self.terms[index]
        target = self._target(left + right, index)
        first = [sizes[letter] for letter in left]
        return Equation((left, right, target))._broadcast(first, self.shapes[index])

    def _prefix(self, index: int) -> tuple[str, dict[str, int]]:
        """Return the letters of the product of operands 0 … index - 1, and the sizes of the letters so far."""
        left = self.terms[0]
        sizes = dict(zip(self.terms[0], self.shapes[0], strict=True))
        for step in range(1, index):
            left = self._target(left + self.terms[step], step)
            for letter, size in zip(self.terms[step], self.shapes[step], strict=True):
                sizes[letter] = max(sizes.get(letter, 1), size) if size else 0
        return left, sizes

    def _target(self, letters: str, index: int) -> str:
        """Return the letters still needed after operand `index`; for the last operand in the result's order."""
        if index == len(self.terms) - 1:
            return self.result
        wanted = self.result + "".join(self.terms[index + 1 :])
        return "".join(dict.fromkeys(letter for letter in letters if letter in wanted))


def parse_einsum(args: tuple[Any, ...]) -> tuple[Chain, list[Tensor]]:
    """Read torch.einsum's arguments: an equation, or operands each followed by a list of indices.

    Ellipses become letters; a repeated letter in one operand becomes its diagonal. Raises Mismatch for calls that torch
    refuses.
    """
    if args and isinstance(args[0], str):
        operands = list(args[1]) if len(args) == 2 and isinstance(args[1], (list, tuple)) else list(args[1:])
        text = args[0].replace(" ", "")
    else:
        text, operands = _from_lists(args)
    if not operands or not all(isinstance(operand, Tensor) for operand in operands):
        raise Mismatch
    left, arrow, result = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        raise Mismatch
    return _expanded(terms, result if arrow else None, operands)


def _from_lists(args: tuple[Any, ...]) -> tuple[str, list[Tensor]]:
    pairs, rest = args[: len(args) // 2 * 2], args[len(args) // 2 * 2 :]

    def term(indices: Any) -> str:
        if not isinstance(indices, (list, tuple)):
            raise Mismatch
        if any(index is not Ellipsis and not (isinstance(index, int) and 0 <= index < 52) for index in indices):
            raise Mismatch
        return "".join("..." if index is Ellipsis else _LETTERS[index] for index in indices)

    text = ",".join(term(indices) for indices in pairs[1::2])
    return (f"{text}->{term(rest[0])}" if rest else text), list(pairs[::2])


def _expanded(terms: list[str], result: str | None, operands: list[Tensor]) -> tuple[Chain, list[Tensor]]:
    """Replace ellipses and a missing result by letters, and repeated letters by diagonals."""
    used = set("".join(terms) + (result or ""))
    if not used <= set(_LETTERS + "."):
        raise Mismatch
    counts = [x.dim() - len(t.replace("...", "")) if "..." in t else 0 for t, x in zip(terms, operands, strict=True)]
    free = [letter for letter in _LETTERS if letter not in used]
    if min(counts) < 0 or max(counts) > len(free):
        raise Mismatch
    dots = "".join(free[: max(counts)])
    if result is None:  # torch: the ellipsis, then the letters that occur once, in alphabetical order
        letters = "".join(terms).replace(".", "")
        result = dots + "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    result = result.replace("...", dots)
    full = [t.replace("...", dots[len(dots) - count :]) for t, count in zip(terms, counts, strict=True)]
    if "." in "".join(full) + result or len(set(result)) != len(result) or not set(result) <= set("".join(full) + dots):
        raise Mismatch
    pairs = [_diagonal(term, operand) for term, operand in zip(full, operands, strict=True)]
    chain = Chain(tuple(term for term, _ in pairs), result, tuple(tuple(x.shape) for _, x in pairs))
    return chain, [operand for _, operand in pairs]


def _diagonal(term: str, operand: Tensor) -> tuple[str, Tensor]:
    if len(term) != operand.dim():
        raise Mismatch
    for letter in set(term):
        while term.count(letter) > 1:
            first = term.index(letter)
            second = term.index(letter, first + 1)
            if operand.shape[first] != operand.shape[second]:
                raise Mismatch
            operand = operand.diagonal(dim1=first, dim2=second)
            term = term[:first] + term[first + 1 : second] + term[second + 1 :] + letter
    return term, operand


def parse_tensordot(first: Tensor, second: Tensor, dims: Any) -> Equation:
    """Read torch.tensordot's `dims`: a number of dimensions, or a list of dimensions for each operand."""
    if isinstance(dims, Tensor):
        dims = dims.tolist()
    if isinstance(dims, int):
        left, right = list(range(first.dim() - dims, first.dim())), list(range(dims))
    elif isinstance(dims, (list, tuple)) and len(dims) == 2:
        left, right = ([one] if isinstance(one, int) else [int(d) for d in one] for one in dims)
    else:
        raise Mismatch
    if len(left) != len(right) or first.dim() + second.dim() > len(_LETTERS):
        raise Mismatch
    if any(not -x.dim() <= d < x.dim() for x, ds in ((first, left), (second, right)) for d in ds):
        raise Mismatch
    letters = _LETTERS[: first.dim()]
    others = list(_LETTERS[first.dim() : first.dim() + second.dim()])
    for a, b in zip(left, right, strict=True):
        others[b] = letters[a]
    summed = {letters[a] for a in left}
    result = "".join(letter for letter in (*letters, *others) if letter not in summed)
    return Equation((letters, "".join(others), result))._broadcast(first.shape, second.shape)
