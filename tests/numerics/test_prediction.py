"""Predictions against real casts of the same tensors: shares to 1e-4, the signal-to-noise ratio to a fifth of a dB."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import lowp
from lowp.errors import InvalidInput
from lowp.formats import FloatFormat
from lowp.loss_scale import LossScale
from lowp.numerics.prediction import Window, effect, lost_updates, scale_window, sensitivity
from lowp.numerics.spectrum import Spectrum, Updates

FLUSHING = FloatFormat("e4m3-without-subnormals", 4, 3, subnormals=False)
FORMATS = ["fp16", "bf16", "bf16-tpu", "e5m2", "e4m3fn", "e4m3fnuz", "tf32", "e5m7", "e6m9", "e3m4"]


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(3, 200_000, generator=generator)
    return {
        "activations": normal[0].relu() * 3,
        "weights": (torch.rand(200_000, generator=generator) - 0.5) * 0.2,
        "gradients": normal[1] * 2.0**-18 * torch.exp(2 * normal[2]),
    }


def float_format(name: str | FloatFormat) -> FloatFormat:
    found = lowp.format(name)
    assert isinstance(found, FloatFormat)
    return found


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scale", [1.0, 256.0, 3.0])
def test_flushed_subnormal_and_overflown_shares_are_those_of_a_cast(name: str, scale: float) -> None:
    format = float_format(name)
    for what, x in tensors().items():
        scaled = x * scale
        cast, present = lowp.quantize(scaled, name), scaled != 0
        found, count = effect(Spectrum.of(x), name, scale), int(present.sum())
        flushed = int(((cast == 0) & present).sum()) / count
        overflow = int((~torch.isfinite(cast)).sum()) / count
        small = int(((scaled.abs() < format.smallest_normal) & present & (cast != 0)).sum()) / count
        # a power of two moves whole bins; another scale cuts them, and numbers are taken to lie evenly in a bin
        close = 1e-4 if scale != 3.0 else 1e-3
        assert found.flushed == pytest.approx(flushed, abs=close), what
        assert found.overflow == pytest.approx(overflow, abs=close), what
        if format.subnormals:
            assert found.subnormal == pytest.approx(small, abs=close), what


@pytest.mark.parametrize("name", ["fp16", "bf16", "tf32", "e4m3fn", "int8", "dfp16", "flex16+5"])
def test_the_signal_to_noise_ratio_is_that_of_a_cast(name: str) -> None:
    for what in ("activations", "weights"):
        x = tensors()[what]
        if name == "int8":
            x = x[None]  # one row, so that its scale is the tensor's
        error = lowp.quantize(x, name).double() - x.double()
        real = 10 * math.log10(float((x.double() ** 2).sum() / (error**2).sum()))
        assert effect(Spectrum.of(x), name).signal_to_noise == pytest.approx(real, abs=0.25), what


@pytest.mark.parametrize("name", ["fp16", "e5m2", "e4m3fn", "e4m3fnuz", "e5m7", "e6m9", "e3m4", "e5m5", "e2m1"])
def test_numbers_halfway_to_the_smallest_one_go_to_zero(name: str) -> None:
    format = float_format(name)
    x = torch.ldexp(torch.ones(8), torch.tensor(format.min_exponent - format.precision) - torch.arange(-3, 5))
    cast = lowp.quantize(x, name)
    assert effect(Spectrum.of(x), name).flushed == float((cast == 0).float().mean())
    assert effect(Spectrum.of(x * 4), name, 0.25).flushed == float((cast == 0).float().mean())


def test_a_scale_may_move_the_bounds_of_a_format_beyond_those_of_fp32() -> None:
    seen = Spectrum.of(torch.tensor([2.0**127, 1.0, 2.0**-126]))
    assert effect(seen, "bf16", 0.5).overflow == 0 and effect(seen, "bf16", 4.0).overflow == pytest.approx(1 / 3)
    assert effect(seen, "fp16", 2.0**-180).flushed == 1 and effect(seen, "fp16", 2.0**160).flushed == 0
    assert effect(seen, "fp16", 2.0**-154).flushed == 1 and effect(seen, "fp16", 2.0**101).flushed == 1 / 3


def test_numbers_that_a_format_holds_lose_nothing() -> None:
    assert effect(Spectrum.of(torch.randint(0, 17, (1000,)) / 16), "bf16").signal_to_noise == math.inf


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("bf16", [1 + 2.0**-8]),  # halfway
        ("bf16", [1 + 2.0**-9]),
        ("bf16", [1 + 2.0**-10, 1 + 3 * 2.0**-10]),
        ("bf16", [1.0, 1.0, 1.0, 1 + 2.0**-8]),
        ("bf16", [0.0, 1.5, 1 + 2.0**-8]),
        ("e4m3fn", [3 * 2.0**-10]),  # halfway between subnormal numbers
        ("e4m3fn", [2.0**-9, 2.0**-9, 3 * 2.0**-10]),
    ],
)
def test_the_noise_of_numbers_of_few_bits_is_that_of_a_cast(name: str, numbers: list[float]) -> None:
    x = torch.tensor(numbers)
    error = (lowp.quantize(x, name) - x).double()
    real = 10 * math.log10(float(x.double().square().sum() / error.square().sum()))
    assert effect(Spectrum.of(x), name).signal_to_noise == pytest.approx(real, abs=1e-9)


def test_the_noise_of_numbers_that_are_all_flushed_is_what_they_are() -> None:
    x = (1 + torch.rand(200_000, generator=torch.Generator().manual_seed(0))) * 2.0**-30
    assert effect(Spectrum.of(x), "fp16").signal_to_noise == pytest.approx(0, abs=1e-3)


def test_one_number_beyond_the_largest_is_enough_to_overflow() -> None:
    seen = Spectrum.of(torch.cat((torch.ones(10**6), torch.tensor([65520.0]))))
    assert effect(seen, "fp16").overflows and not effect(seen, "bf16").overflows
    assert not effect(Spectrum.of(torch.tensor([65519.0])), "fp16").overflows


def test_scales_of_blocks_give_a_bound() -> None:
    assert effect(Spectrum.of(torch.randn(64)), "mxfp8").is_bound
    assert not effect(Spectrum.of(torch.randn(64)), "dfp16").is_bound
    assert not effect(Spectrum.of(torch.randn(64)), "fp16").is_bound


def test_only_float_formats_have_subnormal_numbers() -> None:
    assert effect(Spectrum.of(torch.tensor([1.0, 0.01])), "int8").subnormal == 0


@pytest.mark.parametrize("name", ["fp64", "e11m10"])
def test_a_format_that_reaches_beyond_fp32_keeps_every_number(name: str) -> None:
    found = effect(Spectrum.of(torch.tensor([3e38, 1.5, 2.0**-149])), name)
    assert found.flushed < 1e-99 and found.subnormal < 1e-99 and found.overflow == 0


@pytest.mark.parametrize("name", ["bf16", "tf32", "e8m3", "bf16-tpu"])
def test_of_the_smallest_numbers_of_fp32_those_are_flushed_that_a_cast_flushes(name: str) -> None:
    x = (torch.arange(4096) + 0.5) * 2.0**-138
    assert x[-1] < 2.0**-126
    assert effect(Spectrum.of(x), name).flushed == float((lowp.quantize(x, name) == 0).float().mean())


def test_numbers_without_energy_which_only_a_damaged_record_has_are_all_noise() -> None:
    seen = replace(Spectrum.of(torch.tensor([1 + 2.0**-8])), sum_squares=0.0)
    assert effect(seen, "bf16").signal_to_noise == -math.inf


@pytest.mark.parametrize("name", ["fp16", "bf16", "tf32", "e8m3", "bf16-tpu"])
@pytest.mark.parametrize("rate", [1e-5, 1e-4, 1e-3])
def test_lost_updates_are_those_of_a_weight_in_the_format(name: str, rate: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.rand(300_000, generator=generator) - 0.5) * 0.2
    weight[:20_000] = 1.0  # as of a normalisation
    update = torch.randn(300_000, generator=generator) * rate
    stored = lowp.quantize(weight, name)
    real = float((lowp.quantize(stored + update, name) == stored)[update != 0].float().mean())
    found = lost_updates(Updates.of(weight, update, None), Spectrum.of(weight), name)
    assert found == pytest.approx(real, abs=1e-4)


def test_below_a_power_of_two_updates_need_to_be_half_as_large() -> None:
    weight = torch.tensor([1.0])
    grows, shrinks = (Updates.of(weight, torch.tensor([size]), None) for size in (0.003, -0.003))
    assert lost_updates(grows, Spectrum.of(weight), "bf16") == 1.0
    assert lost_updates(shrinks, Spectrum.of(weight), "bf16") == 0.0


def test_the_window_of_loss_scales_ends_where_a_cast_overflows() -> None:
    x = tensors()["gradients"]
    window = scale_window(Spectrum.of(x), "fp16")
    assert torch.isfinite(lowp.quantize(x * 2.0**window.highest, "fp16")).all()
    assert not torch.isfinite(lowp.quantize(x * 2.0 ** (window.highest + 1), "fp16")).all()
    flushed = [
        (lowp.quantize(x * 2.0**power, "fp16") == 0).float().mean() for power in (window.lowest, window.lowest - 1)
    ]
    assert flushed[0] < 1e-3 <= flushed[1]
    assert window.recommended == max(window.lowest, window.highest - 3)


def test_windows_meet_and_may_be_empty() -> None:
    assert Window(2, 9).meet(Window(4, 20)) == Window(4, 9)
    assert Window(2, 9).meet(Window(11, 20)).is_empty


@pytest.mark.parametrize(
    "name", ["e5m2", "bf16", "e5m5", "e2m1", "e4m3fn@fp32/tensor", "i8s@fp32/tensor", "dfp16", "flex16+5"]
)
def test_sensitivity_is_the_first_order_of_what_rounding_does_to_the_loss(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, gradient = torch.randn(2, 50_000, generator=generator)
    error = lowp.quantize(weight, name) - weight
    signs = torch.randn(30, len(weight), generator=generator).sign()  # gradients of other batches, as large
    real = float((signs * (error * gradient)).sum(1).square().mean().sqrt())
    seen, spectrum = Updates.of(weight, weight, gradient), Spectrum.of(weight)
    found = sensitivity(seen, name, spectrum)
    assert found == pytest.approx(real, rel=0.35)
    assert sensitivity(seen + seen, name, spectrum + spectrum) == pytest.approx(found), "of two steps the mean"


def test_weights_that_a_format_flushes_or_cannot_hold_move_the_loss_by_themselves() -> None:
    weight, gradient = torch.full((2, 64), 2.0**-12)
    flushed = sensitivity(Updates.of(weight, weight, gradient), "e4m3fn")
    assert flushed == pytest.approx(8 * 2.0**-24 * math.sqrt(7 / 3))
    assert sensitivity(Updates.of(weight * 2.0**22, weight, gradient), "e4m3fn") == math.inf
    assert sensitivity(Updates.of(weight * 0, weight, gradient), "e4m3fn") < 1e-20


@pytest.mark.parametrize(("name", "top"), [("int8", 127), ("i4s@fp32/tensor", 7), ("i5s@fp32/tensor", 15)])
def test_integers_are_as_far_apart_in_their_highest_octave_as_elsewhere(name: str, top: int) -> None:
    halfway = 1.5 * 2.0 ** -(top.bit_length() + 1)  # of its octave some are flushed
    for weight in (torch.ones(1024), *(torch.cat([torch.ones(1), torch.full((1023,), x)]) for x in (0.4, halfway))):
        seen = Updates.of(weight, weight, torch.full_like(weight, 3.0))
        expected = 3 * math.sqrt(1024 / 12) / top
        assert sensitivity(seen, name, Spectrum.of(weight)) == pytest.approx(expected, rel=1e-6)


def test_what_has_no_prediction_is_said() -> None:
    seen = Spectrum.of(torch.ones(3))
    with pytest.raises(InvalidInput, match="float formats"):
        lost_updates(Updates.of(torch.ones(3), torch.ones(3), None), seen, "int8")
    with pytest.raises(InvalidInput, match="follows the largest number"):
        sensitivity(Updates.of(torch.ones(3), torch.ones(3), None), "int8")
    with pytest.raises(InvalidInput, match="its own"):
        scale_window(seen, "dfp16")
    with pytest.raises(InvalidInput, match="did you mean bf16"):
        effect(seen, "bf61")


def test_a_recommended_scale_is_one_that_a_loss_can_have() -> None:
    for window in (Window(60, 90), Window(-126, 127), Window(-126, -120)):
        scale = LossScale.parse(f"dynamic({2.0**window.recommended!r})")
        assert scale.floor <= scale.initial <= scale.ceiling


# -- octave by octave -------------------------------------------------------------------------------------------------
EVENLY = 1 + (2 * torch.arange(1024) + 1) / 2048  # over an octave, each of 12 bits


@pytest.mark.parametrize("name", ["fp16", "bf16", "e5m2", "e4m3fn", "e4m3fnuz", "e5m7", "e3m4", "bf16-tpu", "e2m1"])
def test_of_numbers_spread_evenly_over_an_octave_the_effect_is_exactly_that_of_a_cast(name: str) -> None:
    format = float_format(name)
    lowest = range(format.min_exponent - format.precision - 2, format.min_exponent + 2)
    for exponent in (*lowest, *range(format.max_exponent - 1, format.max_exponent + 2)):
        for power in (0, 2):
            if exponent < -126 or exponent + power > 127:
                continue
            x = EVENLY * 2.0**exponent
            cast = lowp.quantize(x, name)
            finite = torch.isfinite(cast)
            error = (torch.where(finite, cast, format.maximum).double() - x).square().sum()
            found = effect(Spectrum.of(x * 2.0**power), name, 2.0**-power)
            assert found.flushed == pytest.approx(float((cast == 0).float().mean()), abs=1e-9)
            is_small = (x < format.smallest_normal) & (cast != 0)
            assert found.subnormal == pytest.approx(float(is_small.float().mean()), abs=1e-9)
            if name != "e2m1":  # whose casts saturate
                assert found.overflow == pytest.approx(float((~finite).float().mean()), abs=1e-9)
            close = 1e-6 if exponent < format.max_exponent else 0.13
            ratio = 10 * math.log10(float(x.double().square().sum() / error)) if error else math.inf
            assert found.signal_to_noise == pytest.approx(ratio, abs=close), (exponent, power)
            assert (found.largest, found.maximum) == (float(x.max()), format.maximum)


@pytest.mark.parametrize("name", ["fp16", "bf16", "e5m2", "e4m3fn", "bf16-tpu"])
def test_the_updates_that_are_lost_in_an_octave_are_those_of_a_cast(name: str) -> None:
    format = float_format(name)
    lowest = max(format.min_exponent, -55)
    for exponent in (lowest - 1, lowest, lowest + 1, 0) if lowest == format.min_exponent else (-8, 0):
        weight = EVENLY * 2.0**exponent
        stored = lowp.quantize(weight, name)
        for power in range(exponent - format.precision - 4, exponent - format.precision + 4):
            for sign in (1.0, -1.0):
                update = torch.full_like(weight, sign * 1.5 * 2.0**power)
                real = float((lowp.quantize(stored + update, name) == stored).float().mean())
                found = lost_updates(Updates.of(weight, update, None), Spectrum.of(weight), name)
                assert found == pytest.approx(real, abs=6e-4), (exponent, power, sign)  # one of 1024 is at an edge


def test_of_weights_that_are_flushed_only_updates_beyond_the_smallest_number_are_kept() -> None:
    lowest = FLUSHING.min_exponent
    for exponent in (lowest - 1, lowest):
        weight = EVENLY * 2.0**exponent
        stored = lowp.quantize(weight, FLUSHING)
        for power in range(lowest - 8, lowest + 2):
            update = torch.full_like(weight, 1.5 * 2.0**power)
            real = float((lowp.quantize(stored + update, FLUSHING) == stored).float().mean())
            found = lost_updates(Updates.of(weight, update, None), Spectrum.of(weight), FLUSHING)
            assert found == pytest.approx(real, abs=6e-4), (exponent, power)


@pytest.mark.parametrize("name", ["fp16", "e5m2", "e4m3fn"])
def test_the_updates_that_a_power_of_two_loses_are_those_of_a_cast(name: str) -> None:
    format = float_format(name)
    for exponent in range(format.min_exponent - 1, format.min_exponent + 3):
        weight = torch.full((2,), 2.0**exponent)
        for power in range(exponent - format.precision - 4, exponent - format.precision + 4):
            update = torch.tensor([1.5, -1.5]) * 2.0**power
            stored = lowp.quantize(weight, name)
            kept = (lowp.quantize(stored + update, name) == stored).float().mean()
            assert lost_updates(Updates.of(weight, update, None), Spectrum.of(weight), name) == kept, (exponent, power)


@pytest.mark.parametrize("name", ["e5m2", "e4m3fn", "e3m4", "e5m5", FLUSHING])
def test_the_sensitivity_of_an_octave_is_that_of_its_spacing_or_of_what_is_flushed(name: str | FloatFormat) -> None:
    format = float_format(name)
    for exponent in range(format.min_exponent - format.precision - 3, format.max_exponent + 2):
        weight = EVENLY * 2.0**exponent
        square = 7 / 3 * 4.0**exponent
        if exponent >= format.min_exponent or (format.subnormals and weight.max() > format.smallest / 2):
            square = min(4.0 ** (max(exponent, format.min_exponent) - format.mantissa_bits) / 12, square)
        expected = math.inf if exponent > format.max_exponent else 3 * math.sqrt(1024 * square)
        updates = Updates.of(weight, weight, torch.full_like(weight, 3.0))
        assert sensitivity(updates, name) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "largest", "scaled"),
    [
        ("int8", 3.0, 127.0),
        ("e4m3fn@fp32/tensor", 3.0, 448.0),
        ("mxfp8", 3.0, 384.0),
        ("mxfp4", 3.0, 6.0),
        ("mxfp4", 4.0, 4.0),
        ("flex16+5", 3.0, 3.0 * 2**13),
        ("flex16+5", 32767.0, 32767.0),
        ("flex16+5", 2.0**17, 2.0**17),
        ("flex16+5", 2.0**-20, 2.0**11),
    ],
)
def test_the_shared_scale_brings_the_largest_number_where_a_format_has_it(
    name: str, largest: float, scaled: float
) -> None:
    assert effect(Spectrum.of(torch.tensor([largest, -largest / 4])), name).largest == pytest.approx(scaled, rel=1e-12)
    assert effect(Spectrum.of(torch.tensor([largest])), name, 0.25 if name == "int8" else 1.0).largest == pytest.approx(
        scaled, rel=1e-12
    )


def test_zeros_have_no_effect() -> None:
    found = effect(Spectrum.of(torch.zeros(3)), "fp16")
    assert (found.flushed, found.subnormal, found.overflow, found.largest, found.maximum) == (0, 0, 0, 0, 65504)
    assert found.signal_to_noise == math.inf and found.error == 0 and not found.is_bound
    assert effect(Spectrum.of(torch.tensor([1 + 2.0**-8])), "bf16").error == pytest.approx(
        (2.0**-8 / (1 + 2.0**-8)) ** 2
    )


@pytest.mark.parametrize(
    ("window", "recommended"),
    [((2, 9), 6), ((8, 9), 8), ((5, 5), 5), ((60, 90), 40), ((-126, 127), 40), ((-126, -120), -100), ((-99, -96), -99)],
)
def test_a_recommended_scale_leaves_three_powers_of_two(window: tuple[int, int], recommended: int) -> None:
    assert Window(*window).recommended == recommended and not Window(*window).is_empty
    assert Window(*window).is_unknown is (window == (-126, 127))


def test_a_window_is_that_of_the_largest_number_and_of_a_thousandth_flushed() -> None:
    for largest, highest in ((65504.0, 0), (65505.0, -1), (32752.0, 1), (2.0**-20, 35)):
        assert scale_window(Spectrum.of(torch.tensor([largest])), "fp16").highest == highest
    many = torch.ones(1000)
    many[0] = 2.0**-24
    for x, lowest in ((many, 0), (torch.cat((many, many[1:])), -24)):
        assert scale_window(Spectrum.of(x), "fp16").lowest == lowest
    assert scale_window(Spectrum.of(many), "fp16", flushed=0.0011).lowest == -24
    assert scale_window(Spectrum.of(torch.zeros(4)), "fp16") == Window(-126, 127)
    assert scale_window(Spectrum.of(torch.tensor([2.0**127])), "fp16") == Window(-126, -112)
    assert scale_window(Spectrum.of(torch.tensor([1.1 * 2.0**-130])), "e2m1").lowest == 127  # the last that is tried
