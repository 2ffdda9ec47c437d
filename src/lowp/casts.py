"""A cast: a format, a rounding, the result of overflow, and how scales are chosen. No torch.

`Cast` is a value: frozen, hashable, printable, and ``parse(str(cast)) == cast``.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from lowp import formats
from lowp.errors import InvalidInput, UnknownName, check_name, unknown
from lowp.formats import FloatFormat, Format, IntFormat, ScaledFormat, checks
from lowp.formats.checks import Dtype
from lowp.formats.text_enum import TextEnum
from lowp.hashing import hashed_once

if TYPE_CHECKING:
    from fractions import Fraction


class Rounding(TextEnum):
    """Which neighbour a number between two values of the format becomes.

    ``nearest-even``: the nearer; in a tie the one whose last bit is 0 (IEEE 754 roundTiesToEven).
    ``nearest-away``: the nearer; in a tie the larger magnitude (roundTiesToAway).
    ``toward-zero``: the smaller magnitude (truncation). ``up``, ``down``: toward +infinity, toward -infinity.
    ``stochastic``: the larger magnitude with a probability of the share of the way to it: unbiased. With N random bits
    the share is cut to N bits, which is biased toward zero (IEEE P3109 StochasticA).
    ``to-odd``: the one whose last bit is 1. What is rounded once more, to two bits fewer, is then rounded as if once
    (Boldo and Melquiond 2008, IEEE Transactions on Computers 57(4)). Beyond the largest finite value it is that value.
    ``stochastic-b``, ``stochastic-c``: stochastic with N random bits and the share rounded to N bits, half up or half
    to even (IEEE P3109 StochasticB, StochasticC). On average over all numbers neither is biased, over numbers of a few
    bits more than N the latter alone; one number's mean is off by at most half of 2**-N of the spacing.
    """

    NEAREST_EVEN = "nearest-even"
    NEAREST_AWAY = "nearest-away"
    TOWARD_ZERO = "toward-zero"
    UP = "up"
    DOWN = "down"
    STOCHASTIC = "stochastic"
    TO_ODD = "to-odd"
    STOCHASTIC_B = "stochastic-b"
    STOCHASTIC_C = "stochastic-c"

    @functools.cached_property
    def is_stochastic(self) -> bool:
        """Whether a random number decides."""
        return self in (Rounding.STOCHASTIC, Rounding.STOCHASTIC_B, Rounding.STOCHASTIC_C)


class Overflow(TextEnum):
    """What a number becomes that is rounded beyond the largest finite value.

    ``inf``: as IEEE 754, infinity, or the largest finite value where the rounding direction says so. ``nan``: NaN
    in the place of infinity, for formats that have none (OCP non-saturating e4m3fn). ``saturate``: the largest
    finite value of the same sign, for infinities too (OCP OFP8 1.0 saturating mode).
    """

    INFINITY = "inf"
    NAN = "nan"
    SATURATE = "saturate"


# bounds on the memory of a scaling state and on the shift of a scale
LONGEST_WINDOW, MOST_HEADROOM = 1 << 16, 64


@dataclass(frozen=True)
class ScalingSpec:
    """How a shared scale is chosen: a description; `lowp.scaling` makes the object with state from it.

    ``current``: from the tensor's own maximum. ``delayed``: from the largest of the last `window` maxima at its place
    in the training step; a window of 1 is the most recent alone.
    ``autoflex``: predicted from the last `window` maxima (Koester et al. 2017). ``static``: given once, `exponent`.
    ``frozen``: guessed at the first tensor and kept. ``reactive``: moved by one step at a time once too many elements
    have overflowed (Courbariaux et al. 2014, arXiv 1412.7024). The last two are what autoflex is compared with.
    `headroom` leaves that many bits free above the maximum. `words`: how many int16 words a gradient may take in
    training where one loses whole features (see `lowp.kernels.int16.low_words`); a single ``quantize`` writes one.
    `rule`: which power of two a current scale is, for a largest magnitude of s * 2**e, 1 <= s < 2, and a largest
    element of t * 2**f. ``floor``: 2**(e - f), which saturates above t (OCP MX 1.0, section 6.3). The others take twice
    that: ``rceil`` for s > t, so that nothing saturates (as Blackwell GPUs convert to e8m0); ``ceil`` for s > 1;
    ``even`` if s, rounded to the element's digits, is 2. ``4/6`` is for elements e2m1 under scales with a mantissa: a
    scale takes the largest magnitude of its group to 6, or to 4 if that gives a smaller sum of squared errors of
    nearest elements (Cook et al. 2025, arXiv 2512.02010). ``eden`` is for the same, of tensors that were rotated at
    random: elements are rounded to nearest, and the scale of a group is multiplied by <x, x> / <x, q> of its numbers x
    and their values q and rounded stochastically. After the rotation is undone the mean of many such casts is x, with
    half of the squared error of stochastic elements (MS-EDEN, Panferov et al. 2026, arXiv 2601.22813).
    """

    kind: str
    window: int = 16
    headroom: int = 0
    exponent: int | None = None
    words: int = 2
    rule: str = "floor"

    KINDS = ("current", "delayed", "autoflex", "static", "frozen", "reactive")
    RULES = ("floor", "rceil", "ceil", "even", "4/6", "eden")

    def __post_init__(self) -> None:
        checks.text("the kind of a scaling", self.kind)
        check_name("scaling", self.kind, self.KINDS)
        for name in ("window", "headroom", "exponent", "words"):
            if (value := getattr(self, name)) is not None or name != "exponent":
                object.__setattr__(self, name, checks.whole_number(f"scaling {self.kind}: its {name}", value))
        if self.window < 1:
            raise InvalidInput(f"scaling {self.kind}: a window of {self.window} maxima is not possible: give 1 or more")
        if self.window > LONGEST_WINDOW:
            raise InvalidInput(
                f"scaling {self.kind}: a window of {self.window} maxima is too long: give up to {LONGEST_WINDOW}"
            )
        if not 0 <= self.headroom <= MOST_HEADROOM:
            raise InvalidInput(
                f"scaling {self.kind}: {self.headroom} bits of headroom are not possible: give 0 to {MOST_HEADROOM}"
            )
        if self.words not in (1, 2):
            raise InvalidInput(f"scaling {self.kind}: {self.words} words are not possible: give 1 or 2")
        checks.text("the rule of a scaling", self.rule)
        check_name("rule of a scale", self.rule, self.RULES)
        if self.rule != "floor" and self.kind != "current":
            raise InvalidInput(f"scaling {self.kind}: the rule {self.rule} is for current scales: omit it")
        if (self.kind == "static") != (self.exponent is not None):
            raise InvalidInput(
                f"scaling {self.kind} with exponent {self.exponent}: only static takes an exponent, as in static(-8)"
            )

    def __str__(self) -> str:
        usual = {one.name: one.default for one in fields(self) if one.name not in ("kind", "exponent")}
        given = [f"{name}={getattr(self, name)}" for name, value in usual.items() if getattr(self, name) != value]
        if given == [f"rule={self.rule}"]:
            return self.rule
        if self.exponent is not None:
            given.insert(0, str(self.exponent))
        return self.kind + (f"({','.join(given)})" if given else "")


_SCALING = re.compile(r"([a-z]+)(?:\((.*)\))?", re.ASCII)
_STOCHASTIC_BITS = re.compile(r"(stochastic(?:-[abc])?)-(\d+)", re.ASCII)


@hashed_once
@dataclass(frozen=True)
class Cast:
    """A rounding to `format`: a frozen value that can be hashed, compared, printed, and read by `parse`.

    `format` and `rounding` may be given as text: ``Cast("e4m3fn", "stochastic", random_bits=8)``.
    `overflow=None` is the default of the format: infinity if it has one, else NaN, else saturation (integers and MX
    elements). `random_bits` limits stochastic rounding to that many random bits, 1 to 32 (None: 160, unbiased); the
    roundings stochastic-b and stochastic-c need it.
    `scaling` is for formats with a shared scale (default: ``current``).
    """

    format: Format
    rounding: Rounding = Rounding.NEAREST_EVEN
    overflow: Overflow | None = None
    scaling: ScalingSpec | None = None
    random_bits: int | None = None

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "format", formats.parse(self.format))
        if not isinstance(self.rounding, Rounding) and self.rounding not in list(Rounding):
            raise UnknownName(unknown("rounding", str(self.rounding), [str(mode) for mode in Rounding]))
        set_(self, "rounding", Rounding(self.rounding))
        possible = possible_overflows(self.format)
        if self.overflow is None:
            set_(self, "overflow", possible[0])
        elif self.overflow not in possible:
            raise InvalidInput(
                f"{self.format} cannot overflow to {self.overflow}; allowed: {', '.join(str(o) for o in possible)}"
            )
        set_(self, "overflow", Overflow(self.overflow))
        if isinstance(self.scaling, str):
            set_(self, "scaling", _word(self.scaling, self.scaling).get("scaling", self.scaling))
        checks.instance("the scaling of a cast", self.scaling, ScalingSpec, type(None))
        if isinstance(self.format, ScaledFormat):
            set_(self, "scaling", self.scaling or ScalingSpec("current"))
            _check_static(self.format, self.scaling.exponent if self.scaling else None)
            _check_rule(self.format, self.scaling.rule if self.scaling else "floor", self.rounding)
        elif self.scaling is not None:
            raise InvalidInput(f"{self.format} has no shared scale: omit the scaling {self.scaling}")
        self._check_random_bits()
        # Computed here: until Python 3.12 a cached property takes a lock, which torch.compile cannot trace.
        _ = self.element, self.is_stochastic, self.is_delayed, self.text

    def _check_random_bits(self) -> None:
        if self.random_bits is None:
            if self.rounding in (Rounding.STOCHASTIC_B, Rounding.STOCHASTIC_C):
                raise InvalidInput(
                    f"{self.rounding} needs a number of random bits, such as {self.rounding}-8 "
                    "(stochastic has no limit)"
                )
            return
        object.__setattr__(self, "random_bits", checks.whole_number("random_bits", self.random_bits))
        if not self.rounding.is_stochastic:
            raise InvalidInput(f"random_bits={self.random_bits} needs stochastic rounding, not {self.rounding}")
        if not 1 <= self.random_bits <= 32:
            raise InvalidInput(f"stochastic rounding takes 1 to 32 random bits, not {self.random_bits}")

    @functools.cached_property
    def element(self) -> FloatFormat | IntFormat:
        """The format of one element: the format itself, or that under a shared scale."""
        return self.format.element if isinstance(self.format, ScaledFormat) else self.format

    @property
    def element_cast(self) -> Cast:
        """This cast for one element whose scale has been divided out."""
        return _element_cast(self)

    @functools.cached_property
    def is_stochastic(self) -> bool:
        """Whether the result depends on a seed."""
        return self.rounding.is_stochastic or self.is_corrected

    @functools.cached_property
    def is_corrected(self) -> bool:
        """Whether scales are corrected after the elements are known, by the rule eden."""
        return self.scaling is not None and self.scaling.rule == "eden"

    @functools.cached_property
    def is_delayed(self) -> bool:
        """Whether its scale comes from the maxima of earlier steps."""
        return self.scaling is not None and self.scaling.kind == "delayed"

    @property
    def current(self) -> Cast:
        """The same cast, under the scale of the tensor's own maximum if this one's is delayed."""
        if self.scaling is None or not self.is_delayed:
            return self
        return replace(self, scaling=ScalingSpec("current", headroom=self.scaling.headroom))

    def with_rounding(self, rounding: Rounding | str, random_bits: int | None = None) -> Cast:
        """The same cast with another rounding."""
        return replace(self, rounding=Rounding(rounding), random_bits=random_bits)

    def __str__(self) -> str:
        return self.text

    @functools.cached_property
    def text(self) -> str:
        """The words that `parse` reads."""
        parts = [str(self.format)]
        if self.rounding is not Rounding.NEAREST_EVEN:
            parts.append(str(self.rounding) + (f"-{self.random_bits}" if self.random_bits else ""))
        if self.overflow is not possible_overflows(self.format)[0]:
            parts.append(str(self.overflow))
        if self.scaling is not None and self.scaling != ScalingSpec("current"):
            parts.append(str(self.scaling))
        return ":".join(parts)


@functools.lru_cache(maxsize=1024)
def _element_cast(cast: Cast) -> Cast:
    return Cast(cast.element, cast.rounding, cast.overflow, None, cast.random_bits)


def _check_static(format: ScaledFormat, exponent: int | None) -> None:
    lowest, highest = format.scale.min_exponent, format.scale.max_exponent
    if exponent is not None and not lowest <= exponent <= highest:
        near = min(max(exponent, lowest), highest)
        raise InvalidInput(
            f"{format} has scales from 2^{lowest} to 2^{highest}, so static({exponent}) is not possible: "
            f"the nearest is static({near})"
        )


def _check_rule(format: ScaledFormat, rule: str, rounding: Rounding) -> None:
    if rule == "floor":
        return
    if rule == "eden" and rounding is not Rounding.NEAREST_EVEN:
        raise InvalidInput(f"the rule eden rounds elements to nearest, and scales stochastically: omit {rounding}")
    if rule in ("4/6", "eden"):
        if format.element != formats.FORMATS["e2m1"] or format.has_powers_of_two or format.other is not None:
            raise InvalidInput(
                f"{format}: the rule {rule} is for elements e2m1 under scales with a mantissa, as of nvfp4: omit it"
            )
        return
    if not format.has_powers_of_two:
        raise InvalidInput(f"{format}: the rule {rule} is for scales that are powers of two, as of mxfp8: omit it")
    if isinstance(format.element, IntFormat) and format.scope.kind == "tensor":
        raise InvalidInput(
            f"{format}: integers under one exponent have that of floor by their definition (Das et al. 2018): "
            "give current(headroom=1) for one bit more, or a scale by row or block for the rule"
        )


def doubles(significand: Fraction, cast: Cast) -> bool:
    """Whether the rule of a cast takes twice the scale of ``floor`` for a largest number of this significand."""
    least, is_enough = _least_doubled(cast)
    return significand > least or (is_enough and significand == least)


def carry_of(cast: Cast, digits: int) -> int:
    """Return what is added to the bits of a group's largest number, of `digits` digits, before its exponent is read.

    The addition carries into the exponent of numbers of which `doubles` is true.
    """
    least, is_enough = _least_doubled(cast)
    return (2 << digits) - int(least * (1 << digits)) - (not is_enough)


def _least_doubled(cast: Cast) -> tuple[Fraction, bool]:
    """Return the significand, 1 to 2, above which the scale is doubled, and whether it is doubled there, too."""
    from fractions import Fraction  # a first use of lowp loads neither it nor decimal

    rule, element = "floor" if cast.scaling is None else cast.scaling.rule, cast.element
    largest = Fraction(element.maximum)
    digits = element.mantissa_bits if isinstance(element, FloatFormat) else element.max_exponent
    return {
        "floor": (Fraction(2), True),
        "ceil": (Fraction(1), False),
        "rceil": (largest / Fraction(2) ** element.max_exponent, False),
        "even": (2 - Fraction(1, 2 << digits), True),
    }[rule]


def possible_overflows(format: Format) -> tuple[Overflow, ...]:
    """Return the possible results of overflow in a format, the default first."""
    element = format.element if isinstance(format, ScaledFormat) else format
    if isinstance(format, ScaledFormat) or isinstance(element, IntFormat) or not element.has_nan:
        return (Overflow.SATURATE,)
    if element.has_infinity:
        return (Overflow.INFINITY, Overflow.SATURATE, Overflow.NAN)
    return (Overflow.NAN, Overflow.SATURATE)


# casts with a name of their own
NAMED = {"bf16-trunc": "bf16:toward-zero"}


def parse(text: str | Cast | Format | Dtype) -> Cast:
    """A cast from ``format[:rounding][:overflow][:scaling]``, such as ``e4m3fn:stochastic:saturate`` or ``bf16-trunc``.

    A floating dtype of torch is the format of its name. Roundings: nearest-even, nearest-away, toward-zero, up, down,
    to-odd, stochastic, and with N random bits stochastic-N, stochastic-b-N, stochastic-c-N. Overflow: inf, nan,
    saturate. Scaling: current, delayed(window=16), autoflex(headroom=1), static(-8), and a current scale's rule: floor,
    rceil, ceil, even, as in ``mxfp8:rceil``, and 4/6 and eden, as in ``nvfp4:4/6``. The words after the format may come
    in any order. Raises ValueError with the near names for anything else.
    """
    if isinstance(text, Cast):
        return text
    if isinstance(text, (FloatFormat, IntFormat, ScaledFormat)):
        return Cast(text)
    if not isinstance(text, str):
        if not checks.is_dtype(text):
            raise TypeError(f"a cast must be text (e4m3fn:stochastic), a Cast or a format, not {type(text).__name__}")
        text = str(text)
    head, *words = checks.spelling("cast", text).split(":")
    head, *named_words = NAMED.get(head, head).split(":")
    given: dict[str, object] = {}
    for word in (*named_words, *(word.strip() for word in words)):
        for key, value in _word(word, text).items():
            if key in given:
                raise InvalidInput(f"{text}: {key} is given twice")
            given[key] = value
    return Cast(formats.parse(head), **given)  # type: ignore[arg-type]


def _word(word: str, text: str) -> dict[str, object]:
    if word in {str(mode) for mode in Rounding}:
        return {"rounding": Rounding(word)}
    if match := _STOCHASTIC_BITS.fullmatch(word):
        return {"rounding": Rounding(match[1].removesuffix("-a")), "random_bits": int(match[2])}
    if word in {str(overflow) for overflow in Overflow}:
        return {"overflow": Overflow(word)}
    if (match := _SCALING.fullmatch(word)) and match[1] in ScalingSpec.KINDS:
        return {"scaling": _scaling(match[1], match[2], text)}
    if word in ScalingSpec.RULES:
        return {"scaling": ScalingSpec("current", rule=word)}
    words = [*(str(m) for m in Rounding), *(str(o) for o in Overflow), *ScalingSpec.KINDS, *ScalingSpec.RULES]
    raise InvalidInput(f"{text}: " + unknown("rounding, overflow or scaling", word, words))


def _scaling(kind: str, arguments: str | None, text: str) -> ScalingSpec:
    spec = ScalingSpec("current") if kind == "static" else ScalingSpec(kind)
    given: dict[str, int | str] = {}
    for argument in filter(None, (arguments or "").split(",")):
        name, _, value = argument.rpartition("=")
        name = name.strip() or "exponent"
        if name in given:
            raise InvalidInput(f"{text}: {name} is given twice")
        if name == "rule":
            given[name] = value.strip()
            continue
        try:
            given[name] = int(value)
        except ValueError:
            raise InvalidInput(
                f"{text}: {argument!r} is not a whole number: give one, as in delayed(window=8) or static(-8)"
            ) from None
    if bad := given.keys() - {"window", "headroom", "exponent", "words", "rule"}:
        raise InvalidInput(f"{text}: " + unknown("scaling argument", min(bad), ["window", "headroom", "words", "rule"]))
    return replace(spec, kind=kind, **given)  # type: ignore[arg-type]
