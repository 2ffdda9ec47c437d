"""The tensor core's D = A B + C on matrices of up to 4 x 4, product by product, and as text.

Volta's white paper (NVIDIA 2017) and Markidis et al. 2018 (arXiv 1803.04014) state the operation: A and B in fp16, C
and D in fp16 or fp32. How it rounds was found by Fasi, Higham, Mikaitis and Pranesh 2021 (PeerJ Computer Science
7:e330) on V100: products are exact; the four products and the element of C are moved under the largest of them and cut
to 24 bits, with no guard bit; their sum is not normalised on the way; fp32 results are cut (toward zero), fp16 results
rounded to nearest even. Later cores keep more bits while aligning.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial, reduce

from lowp.casts import Cast, Rounding
from lowp.casts import parse as parse_cast
from lowp.errors import InvalidInput, check_name
from lowp.explain.arithmetic import exact_result
from lowp.explain.exact import AnyCast, Rounded, difference, round_exact
from lowp.explain.numbers import ZERO, Number, bits_text, decimal_text, floor_log2, line, parse_number, text_of
from lowp.explain.phrases import rule_words
from lowp.formats import FloatFormat, Format

SIZE = 4
ALIGNED_BITS = 23  # behind the point of the largest addend, on V100
ORDERS = {
    "tensor-core": "products exact; all five addends cut to 24 bits under the largest; one sum; rounded once "
    "(V100; Fasi et al. 2021)",
    "sequential": "products exact; added to C one after the other; rounded to nearest even after each (a loop of "
    "fused multiply-adds)",
}
EXAMPLE = (
    "1 2 3 4; 0.5 0.25 0.125 0.0625; 100 200 300 400; 1 -1 1 -1",
    "0.1 1 0 2; 0.2 1 0 2; 0.3 1 1 2; 0.4 1 0 2",
    "1024 0 0 2048; 0 1024 0 1; 0 0 3 2000; 2048 0.001 1 0",
)

Matrix = tuple[tuple[Number, ...], ...]


@dataclass(frozen=True)
class Addend:
    """One addend of an element of D: a product of two operands, or the element of C (`factors` empty).

    `kept` is the value that the adder uses; it differs from `exact` if low bits are cut while aligning.
    """

    factors: tuple[Number, ...]
    exact: Number
    kept: Number


@dataclass(frozen=True)
class Accumulated:
    """One element of D in one accumulator. `partial` are the sums after each product (sequential order only)."""

    accumulate: FloatFormat
    addends: tuple[Addend, ...]
    exact: Number
    aligned_sum: Number
    partial: tuple[Number, ...]
    rounded: Rounded

    @property
    def error(self) -> Fraction | None:
        """result - exact sum of the exact products and C; None if one is not finite."""
        return difference(self.rounded.result, self.exact)


@dataclass(frozen=True)
class MultiplyAdd:
    """D = A B + C: the operands as their format holds them, and D in the requested and in the other accumulator."""

    operands: Cast
    order: str
    a: Matrix
    b: Matrix
    c: Matrix
    d: tuple[tuple[Accumulated, ...], ...]
    other: tuple[tuple[Accumulated, ...], ...]

    @property
    def accumulate(self) -> FloatFormat:
        """The accumulator of `d`."""
        return self.d[0][0].accumulate

    @property
    def farthest(self) -> tuple[int, int]:
        """Row and column where the two accumulators differ most; the first element if they agree."""
        places = [(i, j) for i in range(len(self.d)) for j in range(len(self.d[0]))]
        return max(places, key=lambda place: (self.difference(*place) is None, self.difference(*place) or 0))

    def difference(self, row: int, column: int) -> Fraction | None:
        """Return |result in one accumulator - result in the other|; None if one is not finite."""
        apart = difference(self.d[row][column].rounded.result, self.other[row][column].rounded.result)
        return None if apart is None else abs(apart)


def fused_multiply_add(
    a: str | Matrix | None = None,
    b: str | Matrix | None = None,
    c: str | Matrix | None = None,
    *,
    operands: AnyCast = "fp16",
    accumulate: FloatFormat | str = "fp32",
    order: str = "tensor-core",
) -> MultiplyAdd:
    """Explain D = A B + C.

    Matrices are rows of numbers, ``"1 2; 3 4"``, of at most 4 x 4; without any an example is taken, without C zeros. A
    and B are rounded to `operands`, C to the accumulator. Raises ValueError for shapes that do not fit.
    """
    check_name("order", order, ORDERS)
    cast, accumulator = parse_cast(operands), parse_cast(accumulate).format
    for format in (cast.format, accumulator):
        if not isinstance(format, FloatFormat):
            raise InvalidInput(f"D = A B + C is explained in float formats (fp16, bf16, tf32, e4m3fn), not in {format}")
    assert isinstance(accumulator, FloatFormat)
    if a is None and b is None and c is None:
        a, b, c = EXAMPLE
    if a is None or b is None:
        raise InvalidInput("D = A B + C needs both --a and --b (rows such as '1 2; 3 4'), or neither for the example")
    first, second = (_rounded(parse_matrix(x, name), cast) for x, name in ((a, "A"), (b, "B")))
    rows, inner, columns = len(first), len(second), len(second[0])
    if len(first[0]) != inner:
        raise InvalidInput(
            f"A is {rows} x {len(first[0])} and B {inner} x {columns}: A needs as many columns as B rows"
        )
    third = parse_matrix(c, "C") if c is not None else ((ZERO,) * columns,) * rows
    if (len(third), len(third[0])) != (rows, columns):
        raise InvalidInput(f"C is {len(third)} x {len(third[0])}, and A B is {rows} x {columns}: they must agree")
    other = parse_cast("fp16" if accumulator.mantissa_bits > 10 else "fp32").format
    assert isinstance(other, FloatFormat)

    def product(format: FloatFormat) -> tuple[tuple[Accumulated, ...], ...]:
        added = _rounded(third, Cast(format))
        return tuple(
            tuple(
                _element(first[i], tuple(row[j] for row in second), added[i][j], cast.format, format, order)
                for j in range(columns)
            )
            for i in range(rows)
        )

    return MultiplyAdd(cast, order, first, second, third, product(accumulator), product(other))


def parse_matrix(given: str | Matrix, name: str = "the matrix") -> Matrix:
    """Return the rows of a text: rows end with a semicolon or a newline, numbers with blanks or commas."""
    if isinstance(given, str):
        lines = [line.replace(",", " ").split() for line in given.replace(";", "\n").splitlines()]
        given = tuple(tuple(parse_number(word) for word in line) for line in lines if line)
    lengths = {len(row) for row in given}
    if len(lengths) != 1 or not 1 <= len(given) <= SIZE or not 1 <= max(lengths) <= SIZE:
        shape = " + ".join(str(len(row)) for row in given) or "no"
        raise InvalidInput(
            f"{name} has rows of {shape} numbers: give 1 to {SIZE} rows of the same length, 1 to {SIZE} numbers, "
            "as in '1 2; 3 4'"
        )
    return given


def _rounded(matrix: Matrix, cast: Cast) -> Matrix:
    return tuple(tuple(round_exact(x, cast).result for x in row) for row in matrix)


def _element(
    row: tuple[Number, ...],
    column: tuple[Number, ...],
    c: Number,
    operand: Format,
    accumulator: FloatFormat,
    order: str,
) -> Accumulated:
    pairs = list(zip(row, column, strict=True))
    products = [exact_result("*", x, y) for x, y in pairs]
    exact = reduce(partial(exact_result, "+"), products, c)
    finite = all(x.is_finite for x in (c, *products))
    if order == "sequential" or not finite:
        return _sequential(pairs, products, c, exact, accumulator)
    assert isinstance(operand, FloatFormat)
    exponents = [_exponent(x, operand) + _exponent(y, operand) for x, y in pairs if x.magnitude and y.magnitude]
    exponents += [_exponent(c, accumulator)] if c.magnitude else []
    quantum = Fraction(2) ** (max(exponents, default=0) - ALIGNED_BITS)
    kept = [Number(int(x.magnitude / quantum) * quantum, x.negative) for x in (*products, c)]
    total = reduce(partial(exact_result, "+"), kept, ZERO)
    mode = Rounding.TOWARD_ZERO if accumulator.mantissa_bits >= ALIGNED_BITS else Rounding.NEAREST_EVEN
    addends = [Addend(factors, x, cut) for factors, x, cut in zip((*pairs, ()), (*products, c), kept, strict=True)]
    return Accumulated(accumulator, tuple(addends), exact, total, (), round_exact(total, Cast(accumulator, mode)))


def _sequential(
    pairs: list[tuple[Number, Number]], products: list[Number], c: Number, exact: Number, accumulator: FloatFormat
) -> Accumulated:
    rounded = round_exact(c, accumulator)
    partial = []
    for product in products:
        rounded = round_exact(exact_result("+", rounded.result, product), accumulator)
        partial.append(rounded.result)
    addends = [Addend((), c, c), *(Addend(pair, x, x) for pair, x in zip(pairs, products, strict=True))]
    return Accumulated(accumulator, tuple(addends), exact, rounded.given, tuple(partial), rounded)


def _exponent(number: Number, format: FloatFormat) -> int:
    """Return the exponent that the bits hold: subnormal numbers have that of the smallest normal one."""
    return max(floor_log2(number.magnitude), format.min_exponent)


# -- as text -----------------------------------------------------------------------------------------------------------
@text_of
def render_multiply_add(result: MultiplyAdd, element: tuple[int, int] | None = None) -> Iterator[str]:
    """Return all of D in both accumulators, and one element in full.

    `element` is (row, column) from 0; by default the element where the accumulators differ most.
    """
    other = result.other[0][0].accumulate
    yield f"D = A B + C, A and B in {result.operands}, C and D in {result.accumulate} (beside it {other})"
    yield line("order", ORDERS[result.order])
    for name, matrix in (("A", result.a), ("B", result.b), ("C", result.c)):
        yield from _matrix_lines(name, [[x.brief(7) for x in row] for row in matrix])
    for elements, format in ((result.d, result.accumulate), (result.other, other)):
        yield from _matrix_lines(f"D {format}", [[x.rounded.result.brief(7) for x in each] for each in elements])
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


def _matrix_lines(name: str, rows: list[list[str]]) -> Iterator[str]:
    width = max(len(cell) for row in rows for cell in row)
    for index, row in enumerate(rows):
        yield line(name if index == 0 else "", "  ".join(cell.rjust(width) for cell in row))


def _accumulated_lines(each: Accumulated, order: str) -> Iterator[str]:
    partial = iter(each.partial)
    for addend in each.addends:
        product = " * ".join(x.brief(7) for x in addend.factors)
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
