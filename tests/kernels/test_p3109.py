"""The formats of IEEE P3109 in every implementation, against gfloat."""

from __future__ import annotations

import warnings

import gfloat
import gfloat.formats
import numpy as np
import pytest
import torch
from exact_casts import inputs
from gfloat.types import Domain, Signedness

from lowp.casts import Cast, Overflow, Rounding
from lowp.formats import FloatFormat, parse
from lowp.kernels import IMPLEMENTATIONS, available

MODES = {
    Rounding.NEAREST_EVEN: gfloat.RoundMode.TiesToEven,
    Rounding.NEAREST_AWAY: gfloat.RoundMode.TiesToAway,
    Rounding.TOWARD_ZERO: gfloat.RoundMode.TowardZero,
    Rounding.UP: gfloat.RoundMode.TowardPositive,
    Rounding.DOWN: gfloat.RoundMode.TowardNegative,
}


def formats(width: int) -> list[tuple[FloatFormat, gfloat.FormatInfo]]:
    found = []
    for sign, signedness in (("s", Signedness.Signed), ("u", Signedness.Unsigned)):
        for domain, kind in (("e", Domain.Extended), ("f", Domain.Finite)):
            for precision in range(1, width + (sign == "u")):
                format = parse(f"binary{width}p{precision}{sign}{domain}")
                assert isinstance(format, FloatFormat)
                found.append((format, gfloat.formats.format_info_p3109(width, precision, signedness, kind)))
    return found


@pytest.mark.parametrize("width", range(3, 9))
def test_every_code_midpoint_and_neighbour_is_rounded_as_gfloat_rounds_it(width: int) -> None:
    names = [name for name in available() if name != "native"]
    for format, info in formats(width):
        x = inputs(format, torch.float64, random=50)
        x = x[~x.isnan()]
        if not format.signed:  # gfloat does not say what becomes of negative numbers
            x = x[~torch.signbit(x)]
        for rounding, theirs in MODES.items():
            for saturates in (False, True):
                with warnings.catch_warnings(), np.errstate(all="ignore"):
                    warnings.simplefilter("ignore")
                    wanted = torch.from_numpy(gfloat.round_ndarray(info, x.numpy(), theirs, saturates))
                cast = Cast(format, rounding, Overflow.SATURATE if saturates else None)
                for name in names:
                    found = torch.empty_like(x)
                    IMPLEMENTATIONS[name].quantize(x, cast, 0, found)
                    same = (found == wanted) | (found.isnan() & wanted.isnan())
                    assert same.all(), (name, str(cast), x[~same][:3], found[~same][:3], wanted[~same][:3])
                    assert not (torch.signbit(found) & (found == 0)).any()
