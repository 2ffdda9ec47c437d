"""The rule eden: nearest elements under block scales that are corrected and rounded stochastically, without bias."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowp
from lowp import kernels
from lowp.casts import Cast, parse
from lowp.errors import InvalidInput
from lowp.explain.conversion import convert
from lowp.kernels.casts import cpu_groups
from lowp.kernels.numbers import hadamard
from lowp.policy import Policy, Rule
from lowp.presets import PRESETS

CASTS = ["nvfp4:eden", "e2m1@e4m3fn/20:eden", "e2m1@fp32/32:eden", "e2m1@e4m3fn@fp32/16x16:eden", "e2m1@fp32/row:eden"]


def heavy(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()


def drawn(x: Tensor, cast: str, seed: int, size: int) -> Tensor:
    """Return x rotated by random signs and a Hadamard matrix, cast, and rotated back."""
    signs = hadamard.signs(size, 1000 + seed, x.device)
    found = kernels.quantize(hadamard.rotate(x, signs), cast, seed=seed)
    return hadamard.rotate(found, torch.ones(size)) * signs.repeat(x.shape[-1] // size)


@pytest.mark.parametrize("text", CASTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_implementations_give_the_same_bits_and_codes(text: str, dtype: torch.dtype) -> None:
    x = (heavy(40, 80) * torch.logspace(-4, 3, 80)).to(dtype)
    x[3, :20] = 0.0
    if "fp32/" not in text:  # whose groups have no scale of NaN
        x[5, 3], x[6, 40] = math.inf, math.nan
    with kernels.use("reference"):
        wanted = kernels.quantize(x, text, seed=5)
    for name in ("cpu", "bitwise"):
        with kernels.use(name):
            found, codes = kernels.quantize(x, text, seed=5), kernels.encode(x, text, seed=5, packed=True)
        for one in (found, kernels.dequantize(codes)):
            assert torch.equal(one.nan_to_num(), wanted.nan_to_num()) and torch.equal(one.isnan(), wanted.isnan())
    assert torch.equal(kernels.quantize(x, text, seed=5, out=x.clone()).nan_to_num(), wanted.nan_to_num())


@pytest.mark.parametrize("text", ["nvfp4:eden", "e2m1@e4m3fn/20:eden"])
def test_columns_are_cast_as_the_rows_of_the_transpose(text: str) -> None:
    x, out = heavy(100, 300), torch.empty(100, 300)
    assert cpu_groups.quantize_finite(x, parse(text), 7, out, 0)
    assert torch.equal(out, kernels.quantize(x.t().contiguous(), text, seed=7).t())


PIECES = [("20", (12, 50), 5), ("20", (4, 3, 50), 2), ("row", (12, 50), 5), ("row", (4, 3, 50), 2), ("20", (150,), 100)]
PIECES += [("channel", (4, 3, 50), 2), ("channel", (12, 50), 5), ("16x16", (64, 80), 32), ("16x16", (4, 32, 80), 1)]


@pytest.mark.parametrize("implementation", ["cpu", "bitwise", "reference"])
@pytest.mark.parametrize(("scope", "shape", "cut"), PIECES, ids=str)
def test_pieces_along_the_first_dimension_have_the_bits_of_the_whole(
    scope: str, shape: tuple[int, ...], cut: int, implementation: str
) -> None:
    if implementation not in kernels.available():
        pytest.skip("the C++ library was not built")
    x, to = heavy(*shape), f"e2m1@e4m3fn/{scope}:eden"
    with kernels.use(implementation):
        whole = kernels.quantize(x, to, seed=3)
        for piece, offset in ((x[cut:], x[:cut].numel()), (x[:cut], 0), (x[cut:cut], x[:cut].numel())):
            found = kernels.quantize(piece, to, seed=3, offset=offset)
            assert torch.equal(found, whole[cut:][: len(piece)] if offset else whole[:cut])


@pytest.mark.parametrize("implementation", ["cpu", "bitwise", "reference"])
def test_numbers_that_are_not_finite_correct_no_scale(implementation: str) -> None:
    if implementation not in kernels.available():
        pytest.skip("the C++ library was not built")
    x = heavy(3, 16)
    bad, zeros = x.clone(), x.clone()
    bad[1, 3], bad[2, 5], zeros[1, 3], zeros[2, 5] = math.nan, -math.inf, 0.0, 0.0
    with kernels.use(implementation):
        found, wanted = (kernels.quantize(one, "e2m1@fp32/16:eden", seed=1) for one in (bad, zeros))
    finite = bad.isfinite()
    assert torch.equal(found[finite], wanted[finite]) and found[1, 3].isnan()
    assert found[2, 5] == -found[2].abs().amax()


def test_a_block_keeps_its_projection_on_its_numbers() -> None:
    x = heavy(64, 16)
    found = kernels.quantize(x, "e2m1@fp32/16:eden", seed=1)
    torch.testing.assert_close((x * found).sum(1), (x * x).sum(1), rtol=1e-6, atol=0.0)
    nearest = kernels.quantize(x, "e2m1@fp32/16")
    assert not torch.allclose((x * nearest).sum(1), (x * x).sum(1), rtol=1e-3)


def test_scales_are_drawn_and_their_mean_is_the_corrected_scale() -> None:
    x = heavy(1, 16)
    draws = torch.stack([kernels.quantize(x, "nvfp4:eden", seed=seed) for seed in range(400)])
    assert 1 < len(draws[:, 0].unique(dim=0)) <= 2
    torch.testing.assert_close(draws.mean(0), kernels.quantize(x, "e2m1@fp32/16:eden"), rtol=0.01, atol=0.0)


def test_the_mean_of_many_rotated_casts_is_the_tensor_with_half_the_error_of_stochastic_rounding() -> None:
    x, count = torch.randn(8, 128, generator=torch.Generator().manual_seed(1)), 400
    energy = x.square().mean()

    def measured(cast: str) -> tuple[float, float, float]:
        draws = torch.stack([drawn(x, cast, seed, 128) for seed in range(count)])
        error, of_mean = (draws - x).square().mean(), (draws.mean(0) - x).square().mean()
        return float(error / energy), float(of_mean / energy), float((draws.mean(0) * x).sum() / (x * x).sum() - 1)

    error, of_mean, along = measured("nvfp4:eden")
    assert of_mean < 1.3 * error / count and abs(along) < 1e-3
    stochastic, *_ = measured("nvfp4:stochastic")
    assert error < 0.5 * stochastic
    _, of_nearest, along_nearest = measured("nvfp4")
    assert of_nearest > 1.5 * of_mean and abs(along_nearest) > 3e-3  # nearest elements alone are biased


def test_gradients_of_quartet2_have_the_mean_of_gradients_in_fp32() -> None:
    x, coming, given = torch.randn(3, 64, 64, generator=torch.Generator().manual_seed(1))
    x, weight = x.requires_grad_(), nn.Parameter(given)
    rule = next(rule for rule in PRESETS["quartet2"].policy.rules if "linear" in rule.ops)
    region = lowp.autocast(Policy((Rule(**{**vars(rule), "output": None}),)))
    exact = coming @ weight.detach(), coming.t() @ x.detach()
    torch.manual_seed(0)
    found: list[tuple[Tensor, ...]] = []
    for _ in range(200):
        with region:
            y = F.linear(x, weight)
        found.append(torch.autograd.grad(y, (x, weight), coming))
    for one, wanted in zip(zip(*found, strict=True), exact, strict=True):
        draws = torch.stack(one)
        error, of_mean = ((each - wanted).square().mean() for each in (draws, draws.mean(0)))
        assert of_mean < 1.5 * error / len(found) and error < 0.03 * wanted.square().mean()


def test_it_is_for_e2m1_under_scales_with_a_mantissa_and_rounds_to_nearest() -> None:
    with pytest.raises(InvalidInput, match="mxfp4: the rule eden is for elements e2m1 under scales with a mantissa"):
        Cast("mxfp4", scaling="eden")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"the rule eden rounds elements to nearest, .*: omit stochastic"):
        parse("nvfp4:eden:stochastic")
    cast = parse("nvfp4:eden")
    assert cast.is_stochastic and not cast.element_cast.is_stochastic and str(cast) == "nvfp4:eden"


def test_one_number_is_shown_under_a_given_scale_alone() -> None:
    with pytest.raises(InvalidInput, match="nvfp4:eden corrects the scale of a block at random by all its numbers"):
        convert("0.1", "nvfp4:eden")
