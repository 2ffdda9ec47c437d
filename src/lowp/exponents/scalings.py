"""The scaling that a cast with shared exponents describes, the same cast without one, and exponents of first writes."""

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.compat import widest_float
from lowp.errors import InvalidInput
from lowp.formats import PowerOfTwo, ScaledFormat
from lowp.kernels.int16.mantissas import has_mantissas
from lowp.scaling import Autoflex, Reactive
from lowp.scaling.powers import fp32_power, times


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
    room, moves = spec.headroom, spec.kind in ("autoflex", "reactive")
    guess = Autoflex(
        16, spec.window, min_exponent=low, max_exponent=high, headroom=room, start_headroom=room, adapt=moves
    )
    return Reactive(guess=guess) if spec.kind == "reactive" else guess


def is_flexpoint(cast: Cast | None) -> bool:
    """Whether results of a cast are written under the exponents of sites: int16 and not ``current``."""
    if cast is None or not has_mantissas(cast):
        return False
    return cast.scaling is not None and cast.scaling.kind != "current"


class FirstExponents:
    """What `scaling.start` gives an entry of which nothing was seen, for every maximum of a first write, looked up.

    That is algorithm 1 without its ten tries, for where each is many launches.

    The guess depends on the maximum alone, and changes only where a maximum passes a mantissa that the algorithm asks
    about, under one of the exponents that it may try: (2**k - 1/2) * 2**e, from which on a number rounds to 2**k, and
    (2**15 - 3/2) * 2**e, above which it is saturated. So it is computed once for each of these bounds and for a number
    between each two of them.

    `exponents` has one for maxima below the first of the `bounds`, one at it, one behind it, and so on.
    """

    def __init__(self, scaling: Autoflex | Reactive, device: torch.device) -> None:
        guess, dtype = scaling.guess, widest_float(device)
        powers = fp32_power(torch.arange(guess.bits, device=device)) - 0.5
        mantissas = torch.cat((powers, torch.full((1,), guess.limit - 0.5, device=device))).to(dtype)
        tried = torch.arange(guess.min_exponent, guess.max_exponent + 1, device=device)
        bounds = times(mantissas[:, None].repeat(1, len(tried)), tried).flatten().sort().values
        behind = torch.cat(((bounds[:-1] + bounds[1:]) / 2, bounds[-1:] * 2))
        # below the first bound, at it, between it and the second, and so on; all made there, and nothing sent
        maxima = torch.cat((bounds[:1] / 2, torch.stack((bounds, behind), 1).flatten()))
        self.bounds, self.exponents = bounds, guess.start(guess.init(device, len(maxima)), maxima).exponent
        self.of_zeros = min(max(0, guess.min_exponent), guess.max_exponent)

    def __call__(self, maximum: Tensor) -> tuple[Tensor, Tensor]:
        """Return the exponents of first writes of finite maxima, int32 and of their shape, and whether they are starts.

        Zeros are none: see `Autoflex.start`.
        """
        value = maximum.to(self.bounds.dtype)
        each = value[..., None]
        # Apple's GPUs lack searchsorted and take; [place] reads a place without dimensions on the host
        place = (self.bounds < each).sum(-1) + (self.bounds <= each).sum(-1)
        found = self.exponents.index_select(0, place.flatten()).view(place.shape)
        return torch.where(value > 0, found, self.of_zeros), value > 0
