"""The silicon cost of arithmetic in a format: a published table, and estimates between its rows. Loads no torch.

Source: M. Horowitz, "Computing's energy problem (and what we can do about it)", ISSCC 2014, figures for a 45 nm process
at 0.9 V; W. Dally's talks use the same figures. They are rough and old; ratios between formats remain useful longer.

Between the rows a multiplier's energy and area are interpolated linearly in the SQUARE of the significand's bits (the
hidden bit counts), because a multiplier is an array of that many full adders; floating-point adders likewise; integer
adders linearly in the width. Every number tells whether it is from the table or such an estimate.
"""

from dataclasses import dataclass

from lowp.formats import FloatFormat, Format, IntFormat, ScaledFormat

SOURCE = "Horowitz, ISSCC 2014 (45 nm)"
FP32_SIGNIFICAND = 24

# (kind of number, operation) -> {bits of the significand: (energy in pJ, area in square micrometres)}
TABLE: dict[tuple[str, str], dict[int, tuple[float, float]]] = {
    ("integer", "add"): {8: (0.03, 36.0), 32: (0.1, 137.0)},
    ("integer", "multiply"): {8: (0.2, 282.0), 32: (3.1, 3495.0)},
    ("float", "add"): {11: (0.4, 1360.0), 24: (0.9, 4184.0)},
    ("float", "multiply"): {11: (1.1, 1640.0), 24: (3.7, 7700.0)},
}
# the source gives only the area of this row
INT16_ADD_AREA = 67.0
# energy in pJ of reading 32 bits
READ_ENERGY = {"SRAM of 8 KB": 5.0, "DRAM": 640.0}


@dataclass(frozen=True)
class Estimate:
    """A number, its unit ("pJ" or "um2"), and how it was found: "table", "interpolated" or "extrapolated"."""

    value: float
    unit: str
    how: str

    def __str__(self) -> str:
        return f"{'' if self.how == 'table' else '~'}{self.value:.3g} {self.unit}"


@dataclass(frozen=True)
class Cost:
    """The cost of a format's arithmetic; for a format with a shared scale that of its elements.

    `relative_multiplier_area` is the square of the significand's bits divided by fp32's 24 squared.
    """

    significand_bits: int
    multiply_energy: Estimate
    add_energy: Estimate
    multiply_area: Estimate
    add_area: Estimate
    read_energy: dict[str, Estimate]

    @property
    def relative_multiplier_area(self) -> float:
        """Area of a multiplier by the square rule, fp32's = 1."""
        return self.significand_bits**2 / FP32_SIGNIFICAND**2


def cost(format: Format) -> Cost:
    """Return the cost of a multiplication, an addition and a read of one number in a format."""
    element = format.element if isinstance(format, ScaledFormat) else format
    kind = "integer" if isinstance(element, IntFormat) else "float"
    significand = element.precision if isinstance(element, FloatFormat) else element.bits
    reading = {
        name: Estimate(energy * format.bytes / 4, "pJ", "table" if format.bytes == 4 else "interpolated")
        for name, energy in READ_ENERGY.items()
    }
    add_area = _estimate(kind, "add", significand, 1)
    if kind == "integer" and significand == 16:
        add_area = Estimate(INT16_ADD_AREA, "um2", "table")
    return Cost(
        significand,
        _estimate(kind, "multiply", significand, 0),
        _estimate(kind, "add", significand, 0),
        _estimate(kind, "multiply", significand, 1),
        add_area,
        reading,
    )


def _estimate(kind: str, operation: str, significand: int, column: int) -> Estimate:
    rows = TABLE[kind, operation]
    unit = ("pJ", "um2")[column]
    if significand in rows:
        return Estimate(rows[significand][column], unit, "table")
    power = 1 if (kind, operation) == ("integer", "add") else 2
    (low, first), (high, last) = ((bits**power, row[column]) for bits, row in rows.items())
    value = first + (last - first) * (significand**power - low) / (high - low)
    return Estimate(value, unit, "interpolated" if min(rows) < significand < max(rows) else "extrapolated")
