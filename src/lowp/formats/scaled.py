"""Formats with a shared scale: the element, the scale, and the scope that shares it."""

from dataclasses import dataclass, field

from lowp.errors import InvalidInput, UnknownName, unknown
from lowp.formats import checks
from lowp.formats.types import FORMATS, FloatFormat, IntFormat

# scale exponents whose power of two is a normal fp64 number; the largest number of elements in a block
LOWEST_SCALE, HIGHEST_SCALE = -1022, 1023
LONGEST_BLOCK = 1 << 20


@dataclass(frozen=True)
class PowerOfTwo:
    """A scale 2**e with e in min_exponent .. max_exponent, both included."""

    min_exponent: int
    max_exponent: int

    def __post_init__(self) -> None:
        for name in ("min_exponent", "max_exponent"):
            object.__setattr__(self, name, checks.whole_number(f"the {name} of a scale", getattr(self, name)))
        if not LOWEST_SCALE <= self.min_exponent or not self.max_exponent <= HIGHEST_SCALE:
            raise InvalidInput(
                f"a scale of {self} exceeds fp64, in which scales are computed: give exponents from {LOWEST_SCALE} to "
                f"{HIGHEST_SCALE}"
            )
        if not self.min_exponent <= self.max_exponent:
            raise InvalidInput(f"a scale of {self} is empty: give the smaller exponent first")

    @property
    def bits(self) -> int:
        """Bits that hold the exponent."""
        return (self.max_exponent - self.min_exponent).bit_length()

    def __str__(self) -> str:
        return f"2^{self.min_exponent}..{self.max_exponent}"


@dataclass(frozen=True)
class Scope:
    """Which elements share a scale.

    ``tensor``: all. ``row``: those along the last dimension. ``channel``: those with the same first index.
    ``block``: `size` neighbours along the last dimension (the last block of a row may be shorter). ``tile``: those of
    `rows` neighbouring rows, too. A matrix and its transpose have the same numbers under square tiles.
    """

    kind: str
    size: int = 0
    rows: int = 0

    KINDS = ("tensor", "row", "channel", "block", "tile")

    def __post_init__(self) -> None:
        checks.text("the kind of a scope", self.kind)
        if self.kind not in self.KINDS:
            raise UnknownName(unknown("scope", self.kind, (*self.KINDS[:-2], "32", "16x16")))
        for name in ("size", "rows"):
            object.__setattr__(self, name, checks.whole_number(f"the {name} of scope {self.kind}", getattr(self, name)))
        if self.elements > LONGEST_BLOCK:
            raise InvalidInput(f"a block of {self.elements} elements is too long: give at most {LONGEST_BLOCK}, or row")
        if (self.kind in ("block", "tile")) != (self.size > 0):
            raise InvalidInput(
                f"scope {self.kind} of size {self.size}: a block needs a size of 1 or more, other scopes have none"
            )
        if (self.kind == "tile") != (self.rows > 0):
            raise InvalidInput(
                f"scope {self.kind} of {self.rows} rows: a tile needs 1 or more, as in 16x16, other scopes have none"
            )

    @property
    def elements(self) -> int:
        """How many numbers share a scale; 0 if that depends on the tensor."""
        return self.size * max(self.rows, 1)

    @property
    def is_square(self) -> bool:
        """Whether a matrix and its transpose have the same groups: square tiles."""
        return self.kind == "tile" and self.rows == self.size

    def __str__(self) -> str:
        return {"block": str(self.size), "tile": f"{self.rows}x{self.size}"}.get(self.kind, self.kind)


@dataclass(frozen=True)
class ScaledFormat:
    """Elements that share a scale: value = element * scale (* outer, one more scale for the whole tensor).

    `affine` adds an integer zero point to each scale: value = (element - zero_point) * scale.
    `other`: the elements of a group are of this format instead where that has the smaller squared error. The scale then
    has a minus sign, and as a number its magnitude times element.maximum / other.maximum, so that both reach as far
    (IF4, Cook et al. 2026, arXiv 2603.28765).
    """

    name: str = field(compare=False)
    element: FloatFormat | IntFormat
    scale: FloatFormat | PowerOfTwo
    scope: Scope
    outer: FloatFormat | None = None
    affine: bool = False
    other: IntFormat | None = None

    def __post_init__(self) -> None:
        checks.text("the name of a format", self.name)
        checks.instance(f"{self.name}: the element", self.element, FloatFormat, IntFormat)
        checks.instance(f"{self.name}: the scale", self.scale, FloatFormat, PowerOfTwo)
        checks.instance(f"{self.name}: the scope", self.scope, Scope)
        checks.instance(f"{self.name}: the outer scale", self.outer, FloatFormat, type(None))
        checks.flag(f"{self.name}: affine", self.affine)
        if self.affine and not isinstance(self.element, IntFormat):
            raise InvalidInput(f"{self.name}: a zero point needs an integer element, not {self.element}")
        if self.scope.kind == "tensor" and self.outer is not None:
            raise InvalidInput(f"{self.name}: an outer scale adds nothing to a scale that the whole tensor shares")
        checks.instance(f"{self.name}: the other element", self.other, IntFormat, type(None))
        if self.other is not None:
            self._check_other(self.other)

    def _check_other(self, other: IntFormat) -> None:
        element, scale = self.element, self.scale
        both = isinstance(element, FloatFormat) and element.signed and not element.has_nan and other.symmetric
        if not both or element.bits != other.bits or self.scope.kind != "block":
            raise InvalidInput(
                f"{self.name}: blocks choose between a signed float element without NaN and a symmetric integer of as "
                f"many bits, such as e2m1+i4s, not {element}+{other} by {self.scope}"
            )
        if not isinstance(scale, FloatFormat) or not scale.has_minus_zero or self.outer is None:
            raise InvalidInput(
                f"{self.name}: the sign of a scale says which element a block has: give a float scale with a sign, and "
                f"one more for the tensor, such as e4m3fn@fp32, not {scale}"
            )

    @property
    def has_powers_of_two(self) -> bool:
        """Whether every scale is a power of two."""
        return self.outer is None and (isinstance(self.scale, PowerOfTwo) or not self.scale.has_zero)

    @property
    def is_flex(self) -> bool:
        """Whether it is integers under one power of two for the tensor."""
        whole = isinstance(self.element, IntFormat) and isinstance(self.scale, PowerOfTwo)
        return whole and self.scope.kind == "tensor"

    @property
    def bits(self) -> int:
        """Bits an element; the shared scale is apart."""
        return self.element.bits

    @property
    def scale_bits(self) -> int:
        """Bits of one shared scale."""
        return self.scale.bits

    @property
    def bytes(self) -> float:
        """Bytes a number, packed, with its share of a block's scale (a scale a tensor or row costs next to nothing)."""
        share = self.scale_bits / self.scope.elements if self.scope.elements else 0.0
        return (self.bits + share) / 8

    @property
    def spelling(self) -> str:
        """The format spelled out, such as ``e4m3fn@e8m0/32``: what `parse` reads whatever the name is."""
        outer = f"@{self.outer}" if self.outer else ""
        element = f"{self.element}+{self.other}" if self.other else f"{self.element}"
        return f"{element}@{self.scale}{outer}/{self.scope}{'/affine' if self.affine else ''}"

    def __str__(self) -> str:
        return self.name if FORMATS.get(self.name) == self else self.spelling


Format = FloatFormat | IntFormat | ScaledFormat
