"""The scaling that a cast with shared exponents describes, and the same cast without one."""

from __future__ import annotations

from lowp.casts import Cast
from lowp.errors import InvalidInput
from lowp.formats import PowerOfTwo, ScaledFormat
from lowp.kernels.int16.mantissas import has_mantissas
from lowp.scaling import Autoflex, Reactive


def scaling_of(cast: Cast) -> Autoflex | Reactive:
    """Return the scaling that a cast describes. Raises InvalidInput if shared exponents of int16 do not support it."""
    spec, format = cast.scaling, cast.format
    if not has_mantissas(cast) or spec is None or spec.kind in ("current", "delayed"):
        raise InvalidInput(
            f"{cast}: shared exponents need int16 with one power of two and the scaling autoflex, "
            "frozen, reactive or static(E), as in flex16+5:autoflex"
        )
    assert isinstance(format, ScaledFormat) and isinstance(format.scale, PowerOfTwo)
    low, high = format.scale.min_exponent, format.scale.max_exponent
    if spec.exponent is not None:
        low = high = spec.exponent
    moves = spec.kind in ("autoflex", "reactive")
    guess = Autoflex(16, spec.window, headroom=spec.headroom, start_headroom=spec.headroom, adapt=moves)
    guess = Autoflex(**{**guess.__dict__, "min_exponent": low, "max_exponent": high})
    return Reactive(guess=guess) if spec.kind == "reactive" else guess


def is_flexpoint(cast: Cast | None) -> bool:
    """Whether results of a cast are written under the exponents of sites: int16 and not ``current``."""
    if cast is None or not has_mantissas(cast):
        return False
    return cast.scaling is not None and cast.scaling.kind != "current"


def current(cast: Cast) -> Cast:
    """Return the same format under the exponent of the tensor's own maximum."""
    return Cast(cast.format, cast.rounding, cast.overflow)
