"""The exponent that a first write gets, looked up: algorithm 1 without its ten tries, for where each is many launches.

The guess depends on the maximum alone, and changes only where a maximum passes a mantissa that the algorithm asks
about, under one of the exponents that it may try: (2**k - 1/2) * 2**e, from which on a number rounds to 2**k, and
(2**15 - 3/2) * 2**e, above which it is saturated. So it is computed once for each of these bounds and for a number
between each two of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowp.compat import widest_float
from lowp.scaling import Autoflex, Reactive
from lowp.scaling.powers import fp32_power, times


class FirstExponents:
    """What `scaling.start` gives an entry of which nothing was seen, for every maximum of a first write.

    `exponents` has one for maxima below the first of the `bounds`, one at it, one behind it, and so on.
    """

    def __init__(self, scaling: Autoflex | Reactive, device: torch.device) -> None:
        guess = scaling.guess if isinstance(scaling, Reactive) else scaling
        dtype = widest_float(device)
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
