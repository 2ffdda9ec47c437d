"""Formats of single numbers: frozen rows, from which every limit and code is derived."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import frexp, inf, isfinite, isinf, isnan, ldexp, nan
from typing import TYPE_CHECKING

from lowp.errors import InvalidInput, UnknownName, unknown
from lowp.formats import checks
from lowp.formats.text_enum import TextEnum

if TYPE_CHECKING:
    from lowp.formats.scaled import Format


class NamedFormats(dict[str, "Format"]):
    """The named formats, each by its name: ``lowp.FORMATS["fp16"].maximum``. `lowp.format` reads spelled ones, too."""


FORMATS = NamedFormats()  # the rows are in table.py


class Specials(TextEnum):
    """Which codes of a floating-point format are not numbers.

    ``ieee``: the top exponent holds infinity (mantissa zero) and NaN. ``fn``: no infinity; the code of all ones is NaN
    (OCP e4m3fn, e8m0). ``finite``: every code is a number (OCP MX element types). ``fnuz``: no infinity and no minus
    zero; its code is the one NaN, and the bias is one larger (IEEE P3109, finite). ``nuz``: as fnuz, and the largest
    code of each sign is an infinity (IEEE P3109, extended). Unsigned, the NaN of the last two is the largest code.
    """

    IEEE = "ieee"
    FN = "fn"
    FNUZ = "fnuz"
    FINITE = "finite"
    NUZ = "nuz"


MOST_EXPONENT_BITS, MOST_MANTISSA_BITS = 11, 52  # of fp64, in which every limit is computed


def usual_bias(exponent_bits: int, specials: Specials) -> int:
    """Return the bias for a number of exponent bits and the specials."""
    return (1 << (exponent_bits - 1)) - 1 + (specials in (Specials.FNUZ, Specials.NUZ))


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format: sign, exponent, mantissa, and what its special codes mean.

    The name does not take part in comparison: two rows with the same numbers are the same format. `bias_offset` is
    added to the bias that the exponent bits and the specials ask for. `subnormals=False` means that
    |x| < 2**min_exponent becomes a zero of the same sign BEFORE rounding, in every mode. With subnormals such numbers
    are rounded like all others; a format without mantissa bits then has zero and 2**min_exponent to round them to.
    """

    name: str = field(compare=False)
    exponent_bits: int
    mantissa_bits: int
    specials: Specials = Specials.IEEE
    bias_offset: int = 0
    subnormals: bool = True
    signed: bool = True

    def __post_init__(self) -> None:
        self._check_types()
        if not self.has_zero:  # every number below the smallest becomes the smallest
            object.__setattr__(self, "subnormals", False)
        if not 1 <= self.exponent_bits <= MOST_EXPONENT_BITS or not 0 <= self.mantissa_bits <= MOST_MANTISSA_BITS:
            raise InvalidInput(
                f"{self.name}: {self.exponent_bits} exponent and {self.mantissa_bits} mantissa bits are not possible: "
                f"give 1 to {MOST_EXPONENT_BITS} exponent bits and 0 to {MOST_MANTISSA_BITS} mantissa bits, for "
                "example e5m10"
            )
        if self.specials is Specials.IEEE and self.mantissa_bits == 0:
            raise InvalidInput(
                f"{self.name}: without a mantissa bit infinity and NaN would have the same code: "
                "add a mantissa bit (e5m1) or choose the special values (e5m0fn, e5m0nuz, e5m0finite)"
            )
        if self._largest_code < 1 << self.mantissa_bits and self.has_zero:
            raise InvalidInput(
                f"{self.name}: its special codes leave no normal number: give another exponent bit, or fewer specials "
                "(e1m6fnuz, e1m6finite)"
            )
        if self.max_exponent > 1023 or self.min_exponent - self.mantissa_bits < -1074:
            raise InvalidInput(
                f"{self.name}: its range 2**{self.min_exponent - self.mantissa_bits} .. 2**{self.max_exponent} lies "
                "outside that of fp64 (2**-1074 .. 2**1023): give a smaller bias_offset"
            )

    def _check_types(self) -> None:
        checks.text("the name of a format", self.name)
        for name in ("exponent_bits", "mantissa_bits", "bias_offset"):
            object.__setattr__(self, name, checks.whole_number(f"{self.name}: {name}", getattr(self, name)))
        for name in ("subnormals", "signed"):
            checks.flag(f"{self.name}: {name}", getattr(self, name))
        if self.specials not in list(Specials):
            raise UnknownName(f"{self.name}: " + unknown("specials", str(self.specials), list(map(str, Specials))))
        object.__setattr__(self, "specials", Specials(self.specials))

    # -- layout ---------------------------------------------------------------------------------------------------
    @property
    def bits(self) -> int:
        """Width of a code, in bits."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def bytes(self) -> float:
        """Bytes a number, packed."""
        return self.bits / 8

    @property
    def bias(self) -> int:
        """What is subtracted from the exponent field of a normal number."""
        return usual_bias(self.exponent_bits, self.specials) + self.bias_offset

    @property
    def precision(self) -> int:
        """Bits of the significand, the hidden one included."""
        return self.mantissa_bits + 1

    @property
    def has_zero(self) -> bool:
        """False for the scale format e8m0, whose code 0 is its smallest power of two."""
        return self.signed or self.mantissa_bits > 0 or self._unsigned_zero

    @property
    def has_infinity(self) -> bool:
        """Whether an infinity has a code."""
        return self.specials in (Specials.IEEE, Specials.NUZ)

    @property
    def has_nan(self) -> bool:
        """Whether a NaN has a code."""
        return self.specials is not Specials.FINITE

    @property
    def has_minus_zero(self) -> bool:
        """Whether -0 has a code of its own."""
        return self.signed and not self._unsigned_zero

    @property
    def infinity_code(self) -> int | None:
        """The code of +infinity, None where the format has none. Codes of NaN are larger, or that of minus zero."""
        if self.specials is Specials.IEEE:
            return self._all_ones - ((1 << self.mantissa_bits) - 1)
        return self._all_ones - (not self.signed) if self.specials is Specials.NUZ else None

    @property
    def nan_code(self) -> int | None:
        """The code of the positive quiet NaN, None where the format has none."""
        if self.specials is Specials.IEEE:
            return self._all_ones - ((1 << self.mantissa_bits) - 1) + (1 << (self.mantissa_bits - 1))
        if self.signed and self._unsigned_zero:
            return 1 << (self.bits - 1)
        return self._all_ones if self.has_nan else None

    @property
    def _unsigned_zero(self) -> bool:
        return self.specials in (Specials.FNUZ, Specials.NUZ)

    @property
    def _largest_code(self) -> int:
        """The code of the largest finite value."""
        if self.infinity_code is not None:
            return self.infinity_code - 1
        return self._all_ones - (self.nan_code == self._all_ones)

    # -- limits ---------------------------------------------------------------------------------------------------
    @property
    def max_exponent(self) -> int:
        """floor(log2(maximum))."""
        return (self._largest_code >> self.mantissa_bits) - self.bias

    @property
    def min_exponent(self) -> int:
        """log2 of the smallest normal number."""
        return int(self.has_zero) - self.bias

    @cached_property
    def maximum(self) -> float:
        """Largest finite value (exact: every format here lies inside fp64)."""
        hidden = 1 << self.mantissa_bits
        return ldexp(hidden | (self._largest_code & (hidden - 1)), self.max_exponent - self.mantissa_bits)

    @property
    def minimum(self) -> float:
        """Most negative finite value; for an unsigned format its smallest."""
        if self.signed:
            return -self.maximum
        return 0.0 if self.has_zero else self.smallest_normal

    @cached_property
    def smallest_normal(self) -> float:
        """2**min_exponent."""
        return ldexp(1.0, self.min_exponent)

    @property
    def smallest_subnormal(self) -> float | None:
        """Smallest positive number below the normals, or None where the format has none."""
        has_some = self.subnormals and self.mantissa_bits > 0
        return ldexp(1.0, self.min_exponent - self.mantissa_bits) if has_some else None

    @property
    def smallest(self) -> float:
        """Smallest positive number of any kind."""
        return self.smallest_subnormal or self.smallest_normal

    def ulp(self, value: float = 1.0) -> float:
        """Distance between neighbours at `value`: of the normal numbers with its exponent, or of the subnormals."""
        value = checks.real_number("the number that an ulp is asked at", value)
        if not isfinite(value):
            raise InvalidInput(f"an ulp is defined at finite numbers, not at {value}")
        exponent = frexp(value)[1] - 1 if value else self.min_exponent
        return ldexp(1.0, min(max(exponent, self.min_exponent), self.max_exponent) - self.mantissa_bits)

    @property
    def relative_error(self) -> float:
        """Largest relative error of rounding a normal number to nearest: half an ulp, 2**-(mantissa_bits + 1)."""
        return ldexp(1.0, -self.precision)

    @property
    def decimal_digits(self) -> float:
        """precision * log10(2): decimal digits that a significand carries."""
        return self.precision * 0.3010299956639812

    def fits(self, other: FloatFormat) -> bool:
        """Whether every finite value of this format is a value of `other`."""
        lowest = self.min_exponent - (self.mantissa_bits if self.subnormals else 0)
        if other.subnormals:
            fine_enough = self.min_exponent - self.mantissa_bits >= other.min_exponent - other.mantissa_bits
        else:
            fine_enough = lowest >= other.min_exponent
        return (
            fine_enough
            and self.mantissa_bits <= other.mantissa_bits
            and self.maximum <= other.maximum
            and self.signed <= other.signed
            and (other.has_zero or not self.has_zero)
        )

    # -- codes ----------------------------------------------------------------------------------------------------
    @property
    def codes(self) -> range:
        """All bit patterns."""
        return range(1 << self.bits)

    def fields(self, code: int) -> tuple[int, int, int]:
        """Sign, exponent field and mantissa field of a bit pattern."""
        if not 0 <= checks.whole_number(f"a code of {self}", code) < 1 << self.bits:
            raise InvalidInput(f"{code:#x} is not a code of {self}: codes are 0 to {(1 << self.bits) - 1:#x}")
        mantissa = code & ((1 << self.mantissa_bits) - 1)
        exponent = (code >> self.mantissa_bits) & ((1 << self.exponent_bits) - 1)
        return (code >> (self.bits - 1)) if self.signed else 0, exponent, mantissa

    def decode(self, code: int) -> float:
        """The value of a bit pattern. Exact; codes that a format without subnormals does not use read as zero."""
        sign, exponent, mantissa = self.fields(code)
        if code == self.nan_code and not self.has_minus_zero:
            return nan
        if self.infinity_code is not None and code & self._all_ones >= self.infinity_code:
            magnitude = inf if code & self._all_ones == self.infinity_code else nan
        elif self.specials is Specials.FN and code & self._all_ones == self._all_ones:
            magnitude = nan
        elif exponent == 0 and self.has_zero:
            magnitude = ldexp(mantissa, self.min_exponent - self.mantissa_bits) if self.subnormals else 0.0
        else:
            magnitude = ldexp(mantissa + (1 << self.mantissa_bits), exponent - self.bias - self.mantissa_bits)
        return -magnitude if sign else magnitude

    def encode(self, value: float) -> int:
        """The bit pattern of a value of this format; NaN gives the quiet NaN with a positive sign.

        Raises ValueError where `value` is not a value of the format (round it first: `lowp.quantize`).
        """
        value = checks.real_number(f"a number to encode in {self}", value)
        infinity, quiet_nan = self.infinity_code, self.nan_code
        if isnan(value):
            if quiet_nan is None:
                raise InvalidInput(f"{self} has no code for NaN")
            return quiet_nan
        negative = value < 0 or (value == 0 and str(value)[0] == "-" and self.has_minus_zero)
        sign = int(negative) << (self.bits - 1)
        if isinf(value) and infinity is not None and (self.signed or not negative):
            return sign | infinity
        if isfinite(value) and (self.signed or not negative):
            code = sign | self._magnitude_code(abs(value))
            if self.decode(code) == value:
                return code
        raise InvalidInput(f"{value!r} is not a number of {self}: round it first, for example with lowp.quantize")

    @property
    def _all_ones(self) -> int:
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1

    def _magnitude_code(self, magnitude: float) -> int:
        if magnitude == 0 or magnitude > self.maximum:
            return 0
        exponent = max(frexp(magnitude)[1] - 1, self.min_exponent)
        significand = int(ldexp(magnitude, self.mantissa_bits - exponent))
        if significand >> self.mantissa_bits == 0:
            return significand
        return ((exponent + self.bias) << self.mantissa_bits) | (significand - (1 << self.mantissa_bits))

    def values(self) -> Iterator[float]:
        """The value of every code, in the order of the codes."""
        return map(self.decode, self.codes)

    @property
    def spelling(self) -> str:
        """The format spelled out, such as ``e5m10`` or ``e8m7ftz``: what `parse` reads whatever the name is."""
        offset = f"b{self.bias}" if self.bias_offset else ""
        specials = "" if self.specials is Specials.IEEE else self.specials.value
        flush = "ftz" if not self.subnormals and self.has_zero else ""
        layout = ("" if self.signed else "u") + f"e{self.exponent_bits}m{self.mantissa_bits}{offset}"
        named = FORMATS.get(layout + specials + flush, self)
        return layout + (specials if named == self else "ieee") + flush  # e2m1 alone is the row without specials

    @property
    def p3109_name(self) -> str | None:
        """The name in drafts of IEEE P3109, such as ``binary8p3se``; None for a format that these do not have."""
        if not self._unsigned_zero or self.bias_offset or not self.subnormals:
            return None
        domain = "e" if self.has_infinity else "f"
        return f"binary{self.bits}p{self.precision}{'s' if self.signed else 'u'}{domain}"

    def __str__(self) -> str:
        if FORMATS.get(self.name) == self:
            return self.name
        if self.exponent_bits > 8 or self.bits > 19:  # fp32, fp64: what is so wide is known by name
            return next((name for name, row in FORMATS.items() if row == self), self.spelling)
        return self.spelling


@dataclass(frozen=True)
class IntFormat:
    """A two's complement integer of 1 to 32 bits, used under a scale; `symmetric` leaves the most negative code out.

    Two bits symmetric are the ternary values -1, 0, 1. One bit is the binary pair -1, +1, which has no zero.
    """

    name: str = field(compare=False)
    bits: int
    symmetric: bool = False

    def __post_init__(self) -> None:
        checks.text("the name of a format", self.name)
        object.__setattr__(self, "bits", checks.whole_number(f"{self.name}: bits", self.bits))
        checks.flag(f"{self.name}: symmetric", self.symmetric)
        if not 1 <= self.bits <= 32:
            raise InvalidInput(f"{self.name}: {self.bits} bits are not possible: give 1 to 32, for example i8")
        if self.bits == 1:
            object.__setattr__(self, "symmetric", True)

    @property
    def bytes(self) -> float:
        """Bytes a number, packed."""
        return self.bits / 8

    @property
    def has_zero(self) -> bool:
        """False for binary alone."""
        return self.bits > 1

    @property
    def maximum(self) -> int:
        """Largest value."""
        return (1 << (self.bits - 1)) - 1 if self.bits > 1 else 1

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest value, as of a float."""
        return self.maximum.bit_length() - 1

    @property
    def minimum(self) -> int:
        """Smallest value."""
        return -self.maximum if self.symmetric else -(1 << (self.bits - 1))

    @property
    def decimal_digits(self) -> float:
        """log10 of the number of steps from zero to the maximum."""
        return max(self.bits - 1, 1) * 0.3010299956639812

    @property
    def spelling(self) -> str:
        """The format spelled out, such as ``i8`` or ``i8s`` (symmetric)."""
        return f"i{self.bits}{'s' if self.symmetric and self.bits > 1 else ''}"

    def __str__(self) -> str:
        return self.name if FORMATS.get(self.name) == self else self.spelling
