"""Programs of the C++ library, and what else products of few bits are made of: codes, sums of blocks, fp8's own."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lowp import kernels
from lowp.casts import parse
from lowp.errors import Unavailable
from lowp.kernels import cpu
from lowp.kernels.cpu.abi import step_blocks
from lowp.kernels.products import fp8_products, programs
from lowp.kernels.products.contraction import contract, sum_of_rows
from lowp.kernels.products.programs import (
    NOWHERE,
    BytesStep,
    CastStep,
    CodesStep,
    Memory,
    ProductStep,
    Program,
    own,
    rounds,
    strides_of,
)
from lowp.ops.trilinear import OUTPUT, Linear
from lowp.policy import Accumulation


@pytest.mark.parametrize("level", ["portable", "avx2", "avx512"])
@pytest.mark.parametrize("turned", [False, True])
def test_codes_of_a_program_are_those_of_format_int8(turned: bool, level: str) -> None:
    if cpu.library() is None or level not in cpu.available():
        pytest.skip("the C++ library was not built, or the processor has no such instructions")
    torch.manual_seed(0)
    x = torch.randn(9, 77) * torch.tensor([[1.0, 1e-38, 1e-42, 1e30, 0, 1, 1, 1, 1]]).t()
    x[5] = torch.arange(77) - 38.5  # quotients in the middle, and next to it
    x[5, 0], x[6], x[6, 0] = 127, (torch.arange(77) - 38.5).nextafter(torch.tensor(0.0)), -127
    x[7], x[8] = -x[7].abs(), x[8].nextafter(torch.tensor(9.0))
    wanted = kernels.encode(x, "int8")
    given = x.t().contiguous() if turned else x
    source = Memory(0, (9, 77), (1, 9) if turned else (77, 1), torch.float32)
    program = Program([CodesStep(source, NOWHERE, 1, 2, parse("int8"))])
    codes, scales = torch.empty(9, 77, dtype=torch.int8), torch.empty(9)
    asked = cpu.asked()
    try:
        cpu.select(level)
        assert program([given, codes, scales])
    finally:
        cpu.select(asked or None)
    assert torch.equal(scales, wanted.scale) and torch.equal(codes, wanted.payload)
    given[3, 5] = torch.nan
    assert not program([given, codes, scales])


@pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
def test_a_program_of_codes_gives_the_exact_sums_times_their_scales_and_ends() -> None:
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.randint(-128, 128, shape, generator=draw).to(torch.int8) for shape in ((5, 40), (7, 40)))
    bias, of_left, of_right, result = torch.randn(7), torch.rand(5), torch.rand(7), torch.empty(5, 7)
    lies = Memory(0, (5, 40), (40, 1), torch.int8), Memory(1, (7, 40), (40, 1), torch.int8)
    program = Program([BytesStep(*lies, 2, 3, 4, 5)])
    assert program([left, right, bias, result, of_left, of_right]) is True
    sums = (left.long() @ right.long().t()).float()
    assert torch.equal(result, sums * of_right * of_left[:, None] + bias)
    for shape in ((7, 39), (7, 1 << 20)):
        about = Memory(1, shape, (shape[1], 1), torch.int8)
        with pytest.raises(ValueError, match="no product of codes"):
            Program([BytesStep(lies[0] if shape[1] < 40 else about, about, 2, 3, 4, 5)])


@pytest.mark.parametrize(
    ("accumulate", "expected"), [("fp16/1", 2048.0), ("fp16/16", 4096.0), ("bf16/1", 256.0), ("bf16/32", 4096.0)]
)
def test_a_sum_of_ones_stops_where_a_short_accumulator_holds_no_more(accumulate: str, expected: float) -> None:
    """Wang et al. 2018, arXiv 1812.08011, section 2.3: swamping, and chunks that cure it."""
    x, weight = torch.ones(2, 4096), torch.ones(3, 4096)
    form = Linear((2, 4096), (3, 4096))
    found = contract(form, OUTPUT, (x, weight), Accumulation.parse(accumulate))
    assert torch.equal(found, torch.full((2, 3), expected))
    bias = torch.tensor([0.5, 1.0, -1.0])
    found = contract(form, OUTPUT, (x, weight), Accumulation.parse(accumulate), bias=bias, finish=lambda sum: -sum)
    assert torch.equal(found, -(expected + bias).expand(2, 3))


def test_integer_accumulators_take_integers_alone() -> None:
    x = torch.ones(2, 4)
    with pytest.raises(
        Unavailable, match="accumulate=int32 needs integer elements under a shared scale, such as dfp16"
    ):
        contract(Linear((2, 4), (2, 4)), OUTPUT, (x, x), Accumulation.parse("int32"))


@pytest.mark.parametrize("way", kernels.available())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_summed_in_fp32(way: str, dtype: torch.dtype) -> None:
    x = torch.randint(-100, 100, (3000, 7), generator=torch.Generator().manual_seed(0)).to(dtype)
    with kernels.use(way):
        found = sum_of_rows(x)
    assert found.dtype is torch.float32 and torch.equal(found, x.double().sum(0).float())


@pytest.mark.parametrize("element", ["e4m3fn", "e5m2"])
def test_fp8_numbers_and_their_scale_are_the_values_of_the_cast(element: str) -> None:
    x, cast = torch.randn(5, 33, generator=torch.Generator().manual_seed(0)) * 7, parse(f"{element}@fp32/tensor")
    found = fp8_products.encoded(x, cast)
    assert found.numbers.dtype is fp8_products._DTYPES[element]
    assert torch.equal(found.values, kernels.quantize(x, cast))
    filled = fp8_products._filled(found.numbers)
    assert filled.shape == (16, 48) and torch.equal(filled[:5, :33].float(), found.numbers.float())
    assert not filled.float()[5:].any() and not filled.float()[:, 33:].any()
    whole = found.numbers.new_zeros(16, 32)
    assert fp8_products._filled(whole).data_ptr() == whole.data_ptr()
    x[1, 2], x[3, 4] = torch.inf, torch.nan
    assert fp8_products.encoded(x, cast).values.isnan().nonzero().tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("spelled", "fits"),
    [
        ("e4m3fn@fp32/tensor", True),
        ("e5m2@fp32/tensor", True),
        ("e4m3fn@fp32/row", False),
        ("e4m3fn@e8m0/tensor", False),
        ("e3m4@fp32/tensor", False),
        ("e4m3fn@fp32/tensor:stochastic", False),
        ("e4m3fn@fp32/tensor:delayed", False),
        ("e4m3fn", False),
        ("nvfp4", False),
    ],
)
def test_chips_with_fp8_multiply_its_two_formats_under_a_tensors_own_scale(spelled: str, fits: bool) -> None:
    assert fp8_products.is_eight_bits(parse(spelled)) is fits and not fp8_products.is_eight_bits(None)
    assert not fp8_products.multiplies_fp8(torch.ones(2))


@pytest.mark.parametrize(
    ("spelled", "is_step"),
    [
        ("e4m3fn", True),
        ("fp32", True),
        ("e8m23:stochastic", True),
        ("e8m24", False),  # which no fp32 number needs
        ("fp64", False),
        ("i8s", True),
        ("mxfp8", True),
        ("e4m3fn@fp32/tensor:delayed", True),
        ("dfp16", False),  # whose mantissas are kept
    ],
)
def test_a_program_has_a_step_for_a_cast_to_32_bits_or_with_scales_that_it_finds(spelled: str, is_step: bool) -> None:
    assert rounds(parse(spelled)) is is_step


PRODUCTS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((5, 7), (7, 3)), ((1, 7), (7, 1)), ((3, 5, 7), (3, 7, 2))]
PRODUCTS += [((2, 3, 5, 7), (2, 3, 7, 2)), ((1, 3, 1, 2, 4, 6), (1, 3, 1, 2, 6, 5)), ((1, 1, 4, 6), (1, 1, 6, 5))]


@pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
@pytest.mark.parametrize(("left", "right"), PRODUCTS)
def test_a_program_multiplies_matrices_of_at_most_two_leading_dimensions_as_they_lie(
    left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randint(-8, 9, shape, generator=draw).float() for shape in (left, right)]
    bias = torch.randint(-8, 9, right[-1:], generator=draw).float()
    for turned in range(4):
        operands = [
            one.mT.contiguous().mT if turned >> place & 1 else one.contiguous() for place, one in enumerate(whole)
        ]
        lies = [Memory(place, tuple(one.shape), one.stride(), one.dtype) for place, one in enumerate(operands)]
        result = torch.empty(*left[:-1], right[-1])
        assert Program([ProductStep(*lies, 2, 3, torch.float32)])([*operands, bias, result])
        assert torch.equal(result, operands[0] @ operands[1] + bias)
        narrow = torch.empty(result.shape, dtype=torch.bfloat16)
        assert Program([ProductStep(*lies, NOWHERE, 2, torch.bfloat16)])([*operands, narrow])
        assert torch.equal(narrow, (operands[0] @ operands[1]).bfloat16())


@pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
@pytest.mark.parametrize(
    ("left", "right"),
    [((5, 7), (8, 3)), ((3, 5, 7), (2, 7, 2)), ((3, 5, 7), (7, 2)), ((2, 3, 4, 5, 7), (2, 3, 4, 7, 2))],
)
def test_a_program_takes_no_other_products(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    lies = [Memory(place, one, programs.strides_of(one), torch.float32) for place, one in enumerate((left, right))]
    with pytest.raises(ValueError, match="^" + re.escape(f"no product of {left} and {right}") + "$"):
        Program([ProductStep(*lies, NOWHERE, 2, torch.float32)])


def test_strides_and_what_is_read_as_it_lies_are_those_of_torch() -> None:
    for shape in ((), (3,), (0,), (2, 3), (2, 0, 3), (4, 1, 1, 5)):
        assert programs.strides_of(shape) == torch.empty(shape).stride()
    x = torch.empty(4, 6, 8)
    for one, is_reached in (
        *(
            (x, True),
            (x.mT, True),
            (x[:, ::2], True),
            (x[..., ::2], False),
            (x[:, :, :1], True),
            (x.permute(1, 2, 0), True),
        ),
        *((x[:, :1, ::2], True), (x.permute(2, 0, 1), False), (x[0, :, 0].expand(5, 6), False)),
    ):
        assert programs.is_reached(tuple(one.shape), one.stride()) is is_reached
    cases = {("mxfp8", 0): True, ("mxfp8", -1): True, ("e4m3fn@fp32/8x4", 0): False, ("e4m3fn@fp32/8x4", -1): True}
    for (spelled, axis), is_followed in {**cases, ("fp16", 0): True, ("i8s@fp32/channel", 1): False}.items():
        assert programs.follows((16, 12, 32) if axis == 1 else (16, 12), parse(spelled), axis) is is_followed


@pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
def test_programs_read_ordinary_tensors_where_the_library_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 3)
    assert programs.serves(x, None, x.half()) == programs.is_here() == cpu.has_multiply_add()
    assert not programs.serves(x, x.double())
    for way in ("reference", "bitwise"):
        with kernels.use(way):
            assert not programs.serves(x)
    with kernels.use("cpu"):
        assert programs.serves(x) == programs.is_here()
    with FakeTensorMode():
        assert not programs.serves(x)
    monkeypatch.setattr(programs, "is_here", lambda: False)
    assert not programs.serves(x)


def described(step: programs.Step) -> Any:
    """The block of a step, described."""
    (block,) = step_blocks(1)
    block.places[:], _ = step.describe(block)
    return block


def test_a_product_is_described_with_what_is_apart_in_its_last_two_leading_dimensions() -> None:
    def product(*leading: int) -> Any:
        left, right = (*leading, 4, 6), (*leading, 6, 5)
        about = [Memory(at, one, strides_of(one), torch.float32) for at, one in enumerate((left, right))]
        return described(ProductStep(*about, NOWHERE, 2, torch.float32)).product

    for leading, batch, of_left in (((), [1, 1], [0, 0]), ((3,), [1, 3], [0, 24]), ((2, 1, 3), [2, 3], [72, 24])):
        plan = product(*leading)
        assert (plan.rows, plan.columns, plan.depth, plan.out_line) == (4, 5, 6, 5)
        assert list(plan.batch) == batch and list(plan.left.batch) == of_left
        assert list(plan.right.batch) == [one * 30 // 24 for one in of_left]
        assert list(plan.out_batch) == [one * 20 // 24 for one in of_left]
        assert (plan.left.line, plan.left.step, plan.right.line, plan.right.step) == (6, 1, 1, 5)


def test_codes_are_multiplied_to_the_depth_at_which_their_sum_is_exact() -> None:
    def of(depth: int) -> BytesStep:
        shape = Memory(0, (1, depth), (depth, 1), torch.int8)
        return BytesStep(shape, shape, NOWHERE, 3, 4)

    assert described(of(programs.MOST_DEPTH)).bytes.depth == programs.MOST_DEPTH
    with pytest.raises(ValueError, match="no product of codes"):
        described(of(programs.MOST_DEPTH + 1))


@pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
def test_a_programs_own_memory_begins_at_lines_and_is_no_longer_than_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    inner = programs.steps_block

    def counted(blocks: Any, size: int) -> Any:
        sizes.append(size)
        return inner(blocks, size)

    monkeypatch.setattr(programs, "steps_block", counted)
    about = Memory(0, (4, 4), (4, 1), torch.float32)
    casts = [CastStep(about, own(at), parse("e4m3fn"), torch.float32) for at in range(3)]
    Program(casts, [1, 64, 65])
    Program([CastStep(about, 1, parse("e4m3fn"), torch.float32)])
    assert sizes == [256, 0] and [own(own(at)) for at in range(3)] == [0, 1, 2]
    assert len({own(at) for at in range(3)}) == 3 and all(own(at) < NOWHERE for at in range(3))


@pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
def test_seeds_are_three_a_step_and_go_to_the_stochastic_casts() -> None:
    x = torch.randn(8, 16)
    about, stochastic = Memory(0, (8, 16), (16, 1), torch.float32), parse("e4m3fn:stochastic")
    casts = stochastic, parse("e5m2"), stochastic
    program = Program([CastStep(about, at + 1, cast, torch.float32) for at, cast in enumerate(casts)])
    found = [torch.empty_like(x) for _ in casts]
    assert program([x, *found], [11, 0, 0, 12, 0, 0, 13, 0, 0])
    for one, cast, seed in zip(found, casts, (11, 12, 13), strict=True):
        assert torch.equal(one, kernels.quantize(x, cast, seed=seed))
    torch.manual_seed(5)
    assert program([x, *found])
    torch.manual_seed(5)
    first, second = torch.randint(2**62, (2,)).tolist()
    for one, cast, seed in zip(found, casts, (first, 0, second), strict=True):
        assert torch.equal(one, kernels.quantize(x, cast, seed=seed))


@pytest.mark.parametrize("bias", [None, torch.arange(5.0)])
@pytest.mark.parametrize("element", ["e4m3fn", "e5m2"])
def test_fp8_matrices_are_filled_up_for_torchs_product_and_cut_to_their_size(
    element: str, bias: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cast = parse(f"{element}@fp32/tensor")
    given: dict[str, Any] = {}

    def scaled_mm(rows: Tensor, columns: Tensor, *, scale_a: Tensor, scale_b: Tensor, **named: Any) -> Tensor:
        given.update(named, shapes=(rows.shape, columns.shape), strides=(rows.stride(), columns.stride()))
        return (rows.float() @ columns.float()) * (scale_a * scale_b)

    monkeypatch.setattr(fp8_products, "_scaled_mm", scaled_mm)
    for depth, filled in ((20, 32), (32, 32)):
        left, right = (fp8_products.encoded(torch.randn(n, depth), cast) for n in (3, 5))
        found = fp8_products.multiplied(left, right, bias)
        wanted = (left.numbers.float() @ right.numbers.float().t()) * (left.scale * right.scale)
        assert torch.equal(found, wanted if bias is None else wanted + bias)
        assert given["shapes"] == ((16, filled), (filled, 16)) and given["strides"] == ((filled, 1), (1, filled))
        assert given["out_dtype"] is torch.float32 and given["use_fast_accum"] is False
    whole = fp8_products.encoded(torch.randn(16, 32), cast)
    assert fp8_products._filled(whole.numbers).data_ptr() == whole.numbers.data_ptr()


@pytest.mark.parametrize("element", ["e4m3fn", "e5m2"])
def test_fp8_matrices_of_a_device_are_made_by_its_own_kernel(element: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cast = parse(f"{element}@fp32/tensor")
    x = torch.randn(12, 8).t()
    x[2, 3] = torch.inf
    wanted = fp8_products.encoded(x, cast)
    assert wanted.numbers[2, 3].float().isnan() and wanted.numbers.float().isnan().sum() == 1
    kernel = fp8_products.triton
    asked: list[tuple[Any, ...]] = []

    def encode_groups(x: Tensor, *given: Any, **named: Any) -> tuple[Tensor, Tensor] | None:
        asked.append((x.is_contiguous(), *given, named))
        return None if len(asked) > 1 else (wanted.numbers.view(torch.uint8), wanted.scale)

    monkeypatch.setattr(kernel, "encode_groups", encode_groups)
    monkeypatch.setattr(fp8_products, "implementation", lambda device, function: kernel)
    found = fp8_products.encoded(x, cast)
    assert asked == [(True, cast, 0, False, {"spoils": True})]
    assert torch.equal(found.numbers.float().nan_to_num(), wanted.numbers.float().nan_to_num())
    assert found.numbers.dtype is wanted.numbers.dtype and torch.equal(found.scale, wanted.scale)
    monkeypatch.setattr(
        fp8_products,
        "encode_scaled",
        lambda module, x, to, *given: (wanted.numbers.view(torch.uint8), wanted.scale, given),
    )
    found = fp8_products.encoded(x, cast)  # where the kernel does not take it
    assert len(asked) == 2 and torch.equal(found.numbers.float().nan_to_num(), wanted.numbers.float().nan_to_num())


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_chips_have_fp8_from_ada_on(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_products, "capability", lambda device: capability)
    x = SimpleNamespace(is_cuda=True, device=torch.device("cuda"))
    assert fp8_products.multiplies_fp8(x) is (capability >= (8, 9))  # type: ignore[arg-type]
    with kernels.use("bitwise"):
        assert fp8_products.multiplies_fp8(x) is False  # type: ignore[arg-type]
    x.is_cuda = False
    assert fp8_products.multiplies_fp8(x) is False  # type: ignore[arg-type]


@pytest.mark.parametrize("element", ["i8", "e4m3fn"])
@pytest.mark.parametrize("kernel", sorted({"cpu", "bitwise", "reference"} & set(kernels.available())))
def test_zeros_under_a_power_of_two_have_the_exponent_0(element: str, kernel: str) -> None:
    with kernels.use(kernel):
        for scope in ("tensor", "row"):
            found = kernels.encode(torch.zeros(2, 4), f"{element}@e8m0/{scope}")
            assert torch.equal(kernels.dequantize(found), torch.zeros(2, 4)) and not found.payload.any()
            with kernels.use("reference"):
                wanted = kernels.encode(torch.zeros(2, 4), f"{element}@e8m0/{scope}")
            assert torch.equal(found.scale, wanted.scale)
        flex = kernels.encode(torch.zeros(2, 4), "flex16+5")
        assert flex.scale.item() == 0
