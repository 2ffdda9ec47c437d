"""Triton's kernels, run by its interpreter on the CPU, give the bits of the definition."""

from __future__ import annotations

from collections.abc import Iterator

import forked
import pytest
import torch
from exact_casts import FORMATS_TRIED, bits, casts, inputs
from torch import Tensor

from lowp import kernels
from lowp.casts import Cast, Overflow, Rounding, parse
from lowp.errors import Unavailable
from lowp.formats import FloatFormat, IntFormat
from lowp.kernels import triton
from lowp.kernels.casts import checks
from lowp.kernels.numbers import bitwise, philox
from lowp.kernels.numbers.packing import as_integers, code_dtype

SEED = 0x1234_5678_9ABC_DEF0
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

pytest.importorskip("triton", reason="triton is not installed")


def forced(x: Tensor, cast: Cast | str, **named: object) -> Tensor:
    with kernels.use("triton"):
        found: Tensor = kernels.quantize(x, cast, **named)
    return found


def some_cases() -> Iterator[tuple[FloatFormat | IntFormat, Cast, torch.dtype]]:
    """Three casts of every format: the interpreter takes a tenth of a second for each. The slow test has them all."""
    for place, format in enumerate(FORMATS_TRIED):
        every = list(casts(format))
        for turn in range(3):
            cast, dtype = every[(place * 7 + turn * (len(every) // 3 + 1)) % len(every)], DTYPES[(place + turn) % 4]
            yield format, cast, dtype if checks.holds(cast, dtype) else torch.float64


def check_values(format: FloatFormat | IntFormat, cast: Cast, dtype: torch.dtype) -> None:
    x = inputs(format, dtype)
    wanted = torch.empty_like(x)
    bitwise.quantize(x, cast, SEED, wanted)  # which another test holds to the definition
    found = forced(x, cast, seed=SEED)
    same = bits(found) == bits(wanted)
    assert same.all(), (str(cast), dtype, x[~same][:4], found[~same][:4], wanted[~same][:4])


def test_the_sample_has_every_rounding_overflow_and_dtype() -> None:
    cases = list(some_cases())
    assert {cast.rounding for _, cast, _ in cases} == set(Rounding)
    assert {cast.overflow for _, cast, _ in cases} == set(Overflow)
    assert {dtype for _, _, dtype in cases} == set(DTYPES)


@pytest.mark.parametrize(("format", "cast", "dtype"), list(some_cases()), ids=str)
def test_values_are_those_of_the_definition(format: FloatFormat | IntFormat, cast: Cast, dtype: torch.dtype) -> None:
    check_values(format, cast, dtype)


ROUNDINGS = ["nearest-away", "toward-zero", "up", "down", "to-odd", "stochastic", "stochastic-8", "stochastic-b-8"]


@pytest.mark.parametrize("rounding", [*ROUNDINGS, "stochastic-c-8", "stochastic-32", "stochastic-c-32"])
@pytest.mark.parametrize("name", ["e8m22", "e8m23", "e11m51", "e5m9"])
def test_of_few_cut_bits_or_none_every_rounding_is_that_of_the_definition(name: str, rounding: str) -> None:
    dtype = {"e11m51": torch.float64, "e5m9": torch.float16}.get(name, torch.float32)
    cast = parse(f"{name}:{rounding}")
    check_values(cast.element, cast, dtype if checks.holds(cast, dtype) else torch.float64)


NEAR_THE_ENDS = {  # of fp32: quanta below its normal numbers, anchors above its largest power of two, no bit to cut
    "e4m3b126fnuz": ("nearest-even", "toward-zero", "up", "down:saturate", "stochastic", "stochastic-b-8"),
    "e5m10b121": ("up:nan", "down", "toward-zero:saturate", "stochastic", "stochastic-20", "stochastic-c-4"),
    "e4m3b-107": ("nearest-even", "nearest-away", "up", "stochastic", "stochastic-8"),
    "e6m23": ("nearest-even", "nearest-away", "down", "stochastic", "stochastic-32"),
    "ue4m0finite": ("nearest-even", "nearest-away", "up", "to-odd"),
    "e10m10b1022": ("nearest-even", "up", "stochastic-c-8"),  # of fp64
}


@pytest.mark.parametrize("name", NEAR_THE_ENDS)
def test_formats_near_the_ends_of_fp32_are_rounded_by_the_definition(name: str) -> None:
    for way in NEAR_THE_ENDS[name]:
        cast, dtype = parse(f"{name}:{way}"), torch.float64 if name == "e10m10b1022" else torch.float32
        check_values(cast.element, cast, dtype)
        x = inputs(cast.element, dtype, at_most=60)
        wanted, found = (torch.empty(x.shape, dtype=code_dtype(cast.element)) for _ in range(2))
        assert triton.encode(x, cast, SEED, found) == bitwise.encode(x, cast, SEED, wanted)
        assert torch.equal(as_integers(found), as_integers(wanted)), cast


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS_TRIED, ids=str)
def test_values_are_those_of_the_definition_in_every_cast(format: FloatFormat | IntFormat) -> None:
    for cast in casts(format):
        for dtype in DTYPES:
            if checks.holds(cast, dtype):
                check_values(format, cast, dtype)


def test_pieces_at_any_offset_draw_the_bits_of_the_whole() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    wanted = kernels.quantize(x, "e4m3fn:stochastic", seed=SEED)
    for first, last in ((5, 22), (32, 100)):
        found = forced(x[first:last], "e4m3fn:stochastic", seed=torch.tensor(SEED), offset=first)
        assert torch.equal(found, wanted[first:last])


def test_several_programs_and_the_numbers_behind_the_last_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowp.kernels.triton import launch

    monkeypatch.setattr(launch, "INTERPRETED_BLOCK", 32)
    x = torch.randn(2 * 32 + 19, generator=torch.Generator().manual_seed(0))
    for cast in ("e5m7", "e5m7:stochastic"):
        wanted, codes = kernels.quantize(x, cast, seed=3), kernels.encode(x, cast, seed=3)
        assert torch.equal(forced(x, cast, seed=3), wanted)
        with kernels.use("triton"):
            assert torch.equal(kernels.encode(x, cast, seed=3), codes)
            assert torch.equal(kernels.decode(codes, "e5m7"), wanted)


def test_the_layout_and_an_out_in_place_change_nothing() -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    wanted = kernels.quantize(x, "e4m3fn:stochastic", seed=1)
    assert torch.equal(forced(x.t().contiguous().t(), "e4m3fn:stochastic", seed=1), wanted)
    assert forced(x, "e4m3fn:stochastic", seed=1, out=x) is x
    assert torch.equal(x, wanted)
    assert forced(torch.empty(0), "fp16").shape == (0,)


def test_a_seed_on_the_device_gives_the_bits_of_the_number() -> None:
    x = torch.rand(64)
    for seed in (-1, 1 << 63, 0):
        wanted = kernels.quantize(x, "bf16:stochastic", seed=seed)
        assert torch.equal(forced(x, "bf16:stochastic", seed=seed), wanted)


def test_the_last_bits_of_an_unlikely_draw_decide() -> None:
    # The word of element 1 under seed 0 is 0xe169c58d; a fraction that begins with it needs the words behind.
    word = torch.tensor([0, 0xE169C58D]).double() * 2.0**-32
    for less in (0.0, 2.0**-50):
        x = word + torch.tensor([0.0, 2.0**-33 - less], dtype=torch.float64)
        assert torch.equal(forced(x, "i8:stochastic"), kernels.quantize(x, "i8:stochastic"))


@pytest.mark.parametrize("place", [2, 127, 129, 300])
@pytest.mark.parametrize("name", ["i8:stochastic", "e5m2:stochastic"])
def test_the_last_bits_decide_at_every_place_of_a_long_block(place: int, name: str) -> None:
    x = torch.zeros(320, dtype=torch.float64)
    word = int(philox.words(x, 7)[place])
    cast = parse(name)
    for less in (0.0, 2.0**-50):
        x[place] = (1 + word * 2.0**-32 * 0.25 if name.startswith("e5m2") else word * 2.0**-32) + 2.0**-36 - less
        for offset in (0, 3):
            wanted = kernels.quantize(x, cast, seed=7, offset=offset), kernels.encode(x, cast, seed=7, offset=offset)
            with kernels.use("triton"):
                codes = kernels.encode(x, cast, seed=7, offset=offset)
            assert torch.equal(forced(x, cast, seed=7, offset=offset), wanted[0])
            assert torch.equal(codes.view(torch.uint8), wanted[1].view(torch.uint8))


@pytest.mark.parametrize("name", ["i1:stochastic", "i1:stochastic-8", "i1:stochastic-b-4", "i1:stochastic-32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_bit_is_drawn_with_all_digits_of_the_number(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(400, generator=generator, dtype=torch.float64) * 2 - 1
    word = philox.words(x, 7).double() * 2.0**-31 - 1  # a number is 1 where a uniform one is below (1 + x) / 2
    x[::4], x[1::8] = word[::4], word[1::8].nextafter(torch.tensor(2.0, dtype=torch.float64))
    x[2::16], x[10::16] = -5e-324, 2.0**-170
    x[3::40], x[11::40], x[19::40] = -(2.0**-33), 2.0**-64, -0.0
    x = x.to(dtype)
    with kernels.use("bitwise"):
        wanted = kernels.quantize(x, name, seed=7)
    assert torch.equal(forced(x, name, seed=7), wanted)


def test_a_sum_that_is_rounded_leaves_the_draw_to_all_bits() -> None:
    # The same word: e4m3fn cuts 20 bits, to which 2**-6 rounds a fraction of its quantum before they are compared.
    fractions = (0xE169C4, 0xE169C5, 0xE169C6, 0xE169C8, 0xE169CF, 0xE169D0)
    found = []
    for fraction in fractions:
        x = torch.tensor([0.0, fraction * 2.0**-33])
        found.append(forced(x, "e4m3fn:stochastic")[1].item() > 0)
        assert torch.equal(forced(x, "e4m3fn:stochastic"), kernels.quantize(x, "e4m3fn:stochastic"))
    assert found == [False, False, True, True, True, True]


@pytest.mark.parametrize("name", ["e4m3fn:stochastic", "e2m1:stochastic", "e5m2:stochastic-8", "e4m3:stochastic-b-4"])
def test_blocks_of_which_few_bits_decide(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowp.kernels.triton import launch

    monkeypatch.setattr(launch, "INTERPRETED_BLOCK", 1 << 12)
    generator, count = torch.Generator().manual_seed(0), 1 << 14
    x = torch.randn(count, generator=generator) * 2.0 ** torch.randint(-40, 16, (count,), generator=generator)
    x[::5] = (x[::5].view(torch.int32) & -0x10000).view(torch.float32)
    with kernels.use("bitwise"):
        wanted, codes = kernels.quantize(x, name, seed=SEED), kernels.encode(x, name, seed=SEED)
    assert torch.equal(bits(forced(x, name, seed=SEED)), bits(wanted))
    with kernels.use("triton"):
        assert torch.equal(kernels.encode(x, name, seed=SEED).view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize("name", ["e4m3fn:stochastic", "e2m1:stochastic", "e5m2:stochastic-8", "e5m2:stochastic:nan"])
def test_nans_of_all_bits_with_noise_stay_nans(name: str) -> None:
    x = torch.full((512,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # which GPUs make of products with NaN
    x[::2] = -x[::2]
    x[::3] = 3.4e38
    wanted = torch.empty_like(x)
    bitwise.quantize(x, parse(name), SEED, wanted)
    assert torch.equal(bits(forced(x, name, seed=SEED)), bits(wanted))


def test_a_gpu_is_given_these_kernels_and_a_cpu_is_not() -> None:
    assert "triton" in kernels.available("cuda") and "cpu" not in kernels.available("cuda")
    assert "triton" not in kernels.available()
    from lowp.kernels.choose import dispatch

    assert dispatch.implementation(torch.device("cuda")).__name__ == "lowp.kernels.triton"
    with kernels.use("triton"), pytest.raises(Unavailable, match="take tensors on cuda or cpu, not on xpu"):
        dispatch.implementation(torch.device("xpu"))


def test_what_kernels_read_of_a_plan_are_fields() -> None:
    """Triton from 3.9 on passes the fields of a named tuple alone, without the properties of its class."""
    from lowp.kernels.triton import mantissas, plans, scaled, steps

    for module in (plans, scaled, mantissas, steps):
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, tuple) and kind.__module__ == module.__name__:
                assert not [name for name, one in vars(kind).items() if isinstance(one, property)], kind


def test_triton_s_own_interpreter_of_a_whole_process_changes_nothing() -> None:
    code = """
import torch
from lowp import kernels
x = torch.linspace(-3, 3, 64)
for cast in ("e4m3fn", "nvfp4"):  # its kernel calls functions of other modules
    with kernels.use("triton"):
        found = kernels.quantize(x, cast)
    print(torch.equal(found, kernels.quantize(x, cast)))
"""
    ended = forked.run("-c", code, environment={"TRITON_INTERPRET": "1"})
    assert (ended.stdout, ended.stderr) == ("True\nTrue\n", "")
