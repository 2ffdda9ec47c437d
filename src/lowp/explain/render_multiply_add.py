"""D = A B + C as text."""

from __future__ import annotations

from collections.abc import Iterator

from lowp.errors import InvalidInput
from lowp.explain.multiply_add import ORDERS, Accumulated, MultiplyAdd
from lowp.explain.numbers import Number
from lowp.explain.phrases import rule_words
from lowp.explain.text import bits_text, brief, decimal_text, line


def render_multiply_add(result: MultiplyAdd, element: tuple[int, int] | None = None) -> str:
    """Return all of D in both accumulators, and one element in full.

    `element` is (row, column) from 0; by default the element where the accumulators differ most.
    """
    return "\n".join(_multiply_add_lines(result, element))


def _multiply_add_lines(result: MultiplyAdd, element: tuple[int, int] | None) -> Iterator[str]:
    other = result.other[0][0].accumulate
    yield f"D = A B + C, A and B in {result.operands}, C and D in {result.accumulate} (beside it {other})"
    yield line("order", ORDERS[result.order])
    for name, matrix in (("A", result.a), ("B", result.b), ("C", result.c)):
        yield from _matrix_lines(name, [[_short(x) for x in row] for row in matrix])
    for elements, format in ((result.d, result.accumulate), (result.other, other)):
        yield from _matrix_lines(f"D {format}", [[_short(x.rounded.result) for x in each] for each in elements])
    row, column = element or result.farthest
    if row >= len(result.d) or column >= len(result.d[0]):
        raise InvalidInput(f"D is {len(result.d)} x {len(result.d[0])}: it has no element {row + 1},{column + 1}")
    yield ""
    yield f"D[{row + 1},{column + 1}] step by step"
    for each in (result.d[row][column], result.other[row][column]):
        yield f"  {each.accumulate} accumulator"
        yield from _accumulated_lines(each, result.order)
    difference = result.difference(row, column)
    if difference is None:
        yield line("differ", "one of the two is not finite")
    else:
        words = f"the accumulators differ by {decimal_text(difference)} here"
        yield line("differ", words if difference else "not here")


def _short(number: Number) -> str:
    return str(number) if number.special else brief(number.value, 7)


def _matrix_lines(name: str, rows: list[list[str]]) -> Iterator[str]:
    width = max(len(cell) for row in rows for cell in row)
    for index, row in enumerate(rows):
        yield line(name if index == 0 else "", "  ".join(cell.rjust(width) for cell in row))


def _accumulated_lines(each: Accumulated, order: str) -> Iterator[str]:
    partial = iter(each.partial)
    for addend in each.addends:
        product = " * ".join(str(_short(x)) for x in addend.factors)
        yield line("  product" if product else "  C", f"{product} = {addend.exact}" if product else str(addend.exact))
        if addend.kept != addend.exact:
            yield line("", f"cut while aligning to {addend.kept}")
        if addend.factors and (after := next(partial, None)) is not None:
            yield line("", f"sum rounded to {after}")
    if each.rounded.given != each.exact or order == "tensor-core":
        yield line("  sum", str(each.rounded.given))
    yield line("  rule", f"{each.rounded.cast.rounding}: {rule_words(each.rounded)}")
    yield line("  result", f"{bits_text(each.rounded.code, each.accumulate)} = {each.rounded.result}")
    error = each.error
    if error is None:
        words = "none that is a number"
    else:
        words = f"exact {decimal_text(each.exact.value)}, so {decimal_text(error)}" if error else "none: exact"
    yield line("  error", words)
