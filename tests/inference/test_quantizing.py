"""Served models: their distance from the trained ones, their size, and errors."""

from __future__ import annotations

import copy
import importlib
import math
import os
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowp
from lowp import kernels
from lowp.cost import cost
from lowp.errors import InvalidInput, UnknownName
from lowp.formats import FORMATS
from lowp.inference import attention, footprint, unquantized
from lowp.inference.calibration import ActivationRange, check_bits
from lowp.inference.convolutions import ServedConvolution
from lowp.inference.modules import Int8, ServedLinear, Weight
from lowp.kernels.packed import byte_products, byte_rows, few_rows
from lowp.kernels.packed.byte_rows import range_of
from lowp.recipes.data.digits import TRAINING, read_digits

# relative error of the output, of a network with random weights: about the error of the format
NEAR = {"int8": 0.03, "int4": 0.2, "mxfp4": 0.3, "nvfp4": 0.2, "e2m1": 1, "ternary": 1, "binary": 1, "fp16": 1e-3}
NEAR |= {"bf16": 1e-2, "e4m3fn": 0.1, "mxfp8": 0.1, "e5m7": 1e-2, "int8-affine": 0.03, "flex16+5": 1e-3, "fp32": 1e-6}


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    convolutions = (
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 8, (1, 3), dilation=2),
        nn.ReLU(),
    )
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(8 * 8 * 4, 33), nn.ReLU(), nn.Linear(33, 10)).eval()


def _images() -> Tensor:
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).detach().norm() / wanted.detach().norm())


def _rounded(weight: Weight, x: Tensor) -> Tensor:
    """Activations as the product sees them: quantised and back."""
    if not isinstance(weight, Int8):
        return x
    over = weight.range()
    scale, zero, highest = byte_rows.own_range(x.reshape(1, -1), over) if isinstance(over, int) else over
    return (x / scale).round().clamp(-zero, highest - zero) * scale


@pytest.mark.parametrize("format", NEAR)
def test_every_format_serves_near_the_trained_model(format: str) -> None:
    model, x = _network(), _images()
    served = lowp.quantize_model(model, format)
    assert unquantized(served) == {}
    assert _error(served(x), model(x)) <= NEAR[format]
    with kernels.use("reference"):
        assert _error(served(x), model(x)) <= NEAR[format]


@pytest.mark.parametrize("format", NEAR)
@pytest.mark.parametrize("calibration", [None, "percentile"])
def test_the_default_dtype_changes_nothing(format: str, calibration: str | None) -> None:
    def answers() -> list[Tensor]:
        data = None if calibration is None else [x]
        served = lowp.quantize_model(model, format, data, calibration=calibration or "maximum")
        attending = lowp.quantize_model(layer, format)
        return [served(x), served(x[:1]), attending(words, words, words)[0]]

    model, x = _network(), _images()
    layer = nn.MultiheadAttention(32, 2, batch_first=True).eval()
    words = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(2))
    wanted = answers()
    torch.set_default_dtype(torch.float64)
    try:
        found = answers()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("calibration", [None, "maximum", "percentile", "error"])
@pytest.mark.parametrize("bits", [7, 8])
def test_int8_is_the_same_in_bytes_in_torch_and_by_definition(calibration: str | None, bits: int) -> None:
    model, x = _network(), _images()
    data = None if calibration is None else [x, x * 0.5]
    served = lowp.quantize_model(model, "int8", data, calibration=calibration or "maximum", bits=bits)
    found = served(x)
    with kernels.use("reference"):
        assert torch.equal(served(x), found)
    layer = served[5]
    assert isinstance(layer, ServedLinear)
    rows = torch.randn(5, 8 * 8 * 4)
    wanted = nn.functional.linear(_rounded(layer.weight, rows), layer.weight.values(), layer._bias())
    torch.testing.assert_close(layer(rows), wanted, rtol=1e-5, atol=1e-5)
    assert _error(found, model(x)) < 0.05


def test_weights_take_a_quarter_of_the_bytes() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.Embedding(512, 512))
    served = lowp.quantize_model(model, "int8")
    size = sum(one.numel() * one.element_size() for one in served.buffers())
    assert size / sum(one.numel() * 4 for one in model.parameters()) < 0.27
    assert not list(served.parameters())
    for format, most in (("int4", 0.17), ("e2m1", 0.15), ("ternary", 0.068), ("binary", 0.036)):
        size = sum(one.numel() * one.element_size() for one in lowp.quantize_model(model, format).buffers())
        assert size / sum(one.numel() * 4 for one in model.parameters()) < most


def test_elements_without_a_scale_are_those_of_the_format_in_rows_of_any_length() -> None:
    for length in (1, 64, 65, 130):
        layer, x = nn.Linear(length, 8, bias=False), torch.randn(3, length)
        with torch.no_grad():
            layer.weight.mul_(length**0.5)
        expected = nn.functional.linear(x, lowp.quantize(layer.weight.detach(), "e2m1"))
        torch.testing.assert_close(lowp.quantize_model(layer, "e2m1")(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("format", "bits"), [("mxfp4", 4.25), ("nvfp4", 4.5), ("if4", 4.5), ("mxfp8", 8.25), ("int4", 5)]
)
def test_scales_of_a_byte_stay_bytes(format: str, bits: float) -> None:
    served = lowp.quantize_model(nn.Linear(512, 256, bias=False), format)
    assert sum(one.nbytes for one in served.buffers()) * 8 == pytest.approx(bits * 512 * 256, abs=8 * 64)


def test_states_with_scales_in_fp32_as_they_were_written_before_load() -> None:
    model, x = nn.Linear(64, 48), torch.randn(2, 64)
    served, other = (lowp.quantize_model(one, "mxfp4") for one in (model, nn.Linear(64, 48)))
    state = served.state_dict()
    state["weight.scales"] = torch.exp2(state["weight.scales"].float() - 127) * state.pop("weight.factor")
    other.load_state_dict(state)
    assert torch.equal(other(x), served(x)) and other.state_dict()["weight.scales"].dtype is torch.float32


@pytest.mark.parametrize("format", ["int4", "nvfp4", "mxfp8", "bf16", "e5m7", "ternary"])
def test_convolutions_decode_some_channels_at_a_time(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv2d(4, 150, 3, padding=1), torch.randn(2, 4, 6, 5)
    served = lowp.quantize_model(layer, format)
    assert isinstance(served, ServedConvolution)
    wanted, sizes = served(x), []
    whole = ServedConvolution.dense

    def dense(self: ServedConvolution, matrix: Tensor | None = None) -> Tensor:
        found = whole(self, matrix)
        sizes.append(len(found))
        return found

    monkeypatch.setattr(ServedConvolution, "dense", dense)
    monkeypatch.setattr(few_rows, "PANEL", 64 * 36)
    torch.testing.assert_close(served(x), wanted, rtol=1e-5, atol=1e-5)
    assert sizes == [64, 64, 22]


def test_ternary_weights_are_nearer_than_binary_ones() -> None:
    model, x = _network(), _images()
    ternary, binary = (_error(lowp.quantize_model(model, one)(x), model(x)) for one in ("ternary", "binary"))
    assert ternary < 0.85 * binary


def test_the_model_that_was_given_is_left_as_it_was() -> None:
    model = _network().train()
    before = copy.deepcopy(model.state_dict())
    lowp.quantize_model(model, "int8", [_images()])
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_packed_state_is_saved_and_loaded() -> None:
    model, x = _network(), _images()
    served, other = (lowp.quantize_model(model, "int8", [data]) for data in (x, x * 2))
    assert not torch.equal(other(x), served(x))
    other.load_state_dict(served.state_dict())
    assert torch.equal(other(x), served(x))


@pytest.mark.skipif("ONEDNN_MAX_CPU_ISA" in os.environ, reason="oneDNN held to less than VNNI sums bytes wrongly")
def test_weights_that_were_packed_for_another_processor_load(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(40, 33), nn.Embedding(20, 12)), torch.randn(3, 40)
    here = lowp.quantize_model(model, "int8", [x], forward=lambda one, batch: one[0](batch))
    monkeypatch.setattr(byte_products, "multiplies_bytes", lambda: here[0].weight.memory.ndim == 4)
    there = lowp.quantize_model(model, "int8", [x * 2], forward=lambda one, batch: one[0](batch))
    assert there[0].weight.memory.ndim != here[0].weight.memory.ndim
    there.load_state_dict(here.state_dict())
    assert torch.equal(there[0](x), here[0](x))
    assert torch.equal(there[1](torch.arange(20)), here[1](torch.arange(20)))


def test_embeddings_give_the_rows_of_their_format() -> None:
    model, indices = nn.Embedding(50, 13), torch.randint(0, 50, (3, 4))
    for format in ("int8", "int4", "bf16", "mxfp8", "mxfp4", "e4m3fn@e8m0/16x16", "int8-affine"):
        found = lowp.quantize_model(model, format)(indices)
        assert torch.equal(found, lowp.quantize(model.weight.detach(), format)[indices])


def test_attention_multiplies_bytes() -> None:
    query, key, value = (torch.randn(2, 3, 7, 16) for _ in range(3))
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    wanted = nn.functional.scaled_dot_product_attention(query, key, value, mask)
    assert _error(attention(query, key, value, mask), wanted) < 0.04
    assert torch.equal(attention(query, key, value, is_causal=True), attention(query, key, value, mask))


@pytest.mark.parametrize("kind", ["normal", "positive", "negative", "zero", "tiny", "full", "infinite", "no number"])
@pytest.mark.parametrize("shape", [(2, 4, 16, 32), (3, 17, 40), (1, 2, 5, 999), (2, 3, 1, 8)], ids=str)
@pytest.mark.parametrize("highest", [127, 255])
def test_small_matrices_are_multiplied_together_with_the_bits_of_each_alone(
    highest: int, shape: tuple[int, ...], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(shape), torch.randn(*shape[:-2], 11, shape[-1])
    left = {"positive": left.abs(), "negative": -left.abs(), "zero": left * 0, "tiny": left * 1e-42}.get(kind, left)
    if kind == "full":  # the largest sums of bytes, which fp32 alone does not hold
        left, right = left.sign().abs(), right.sign().abs()
    left.view(-1)[3] = {"infinite": math.inf, "no number": math.nan}.get(kind, 0.5 * float(left.view(-1)[3]))
    module, found = importlib.import_module("lowp.inference.attention"), []  # the package's name is the function
    for large in (0, 1 << 60):
        monkeypatch.setattr(module, "_LARGE", large)
        found.append(module.by_kernels(highest, left, right))
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (2, 1, 1, 0, 4)])
def test_attention_in_bytes_of_no_elements_has_the_shape_of_torchs(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    assert torch.equal(attention(x, x, x), nn.functional.scaled_dot_product_attention(x, x, x))


def test_multihead_attention_is_served_with_its_masks() -> None:
    model, x = nn.MultiheadAttention(32, 4, batch_first=True).eval(), torch.randn(2, 7, 32)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 5:] = True
    causal = torch.ones(7, 7, dtype=torch.bool).triu(1)
    of_heads = torch.rand(8, 7, 7) < 0.3  # of each example and head another one
    of_heads[:, :, 0] = False
    masks: list[dict[str, Any]] = [{}, {"key_padding_mask": padding}, {"attn_mask": causal}, {"attn_mask": of_heads}]
    masks.append({"key_padding_mask": padding, "attn_mask": of_heads})
    served = lowp.quantize_model(model, "int8", [dict(query=x, key=x, value=x, **given) for given in masks])
    assert isinstance(model.out_proj, nn.Linear)  # the model itself was not opened
    for given in masks:
        assert _error(served(x, x, x, **given)[0], model(x, x, x, **given)[0]) < 0.06
    one, its = x[1], padding[1]
    assert _error(served(one, one, one, its)[0], model(one, one, one, its)[0]) < 0.06
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    assert _error(lowp.quantize_model(layer, "int8")(x), layer(x)) < 0.03


def test_a_static_range_is_kept_and_a_dynamic_one_follows() -> None:
    model, x = nn.Linear(16, 8), torch.randn(64, 16)
    static, dynamic = lowp.quantize_model(model, "int8", [x]), lowp.quantize_model(model, "int8")
    assert isinstance(static.weight, Int8) and not static.weight.dynamic
    assert _error(static(x * 100), model(x * 100)) > 0.5
    assert _error(dynamic(x * 100), model(x * 100)) < 0.02


def test_a_percentile_and_the_least_error_leave_outliers_outside() -> None:
    x = torch.randn(2000, 16)
    x[0, 0] = 1e4
    model = nn.Linear(16, 8)
    errors = {
        name: _error(lowp.quantize_model(model, "int8", [x], calibration=name)(x[1:]), model(x[1:]))
        for name in ("maximum", "percentile")
    }
    assert errors["percentile"] < errors["maximum"] / 5


def test_what_cannot_be_served_is_kept_and_told() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(4, 4, 3), nn.Conv2d(4, 4, 1), nn.Linear(4, 4).double(), nn.BatchNorm2d(4))
    reasons = {"0": "ConvTranspose2d has no packed form", "1": "asked for (keep)"}
    reasons["2"] = "its parameters are neither fp32, fp16 nor bf16"
    assert unquantized(lowp.quantize_model(model, "int8", keep=["1"])) == reasons


CONVOLUTIONS = {
    "depthwise": (nn.Conv2d(8, 8, 3, padding=1, groups=8), (8, 9, 7)),
    "two groups of 16": (nn.Conv2d(6, 32, (3, 2), stride=2, groups=2), (6, 9, 7)),
    "same, even kernel": (nn.Conv2d(4, 5, 4, padding="same"), (4, 9, 7)),
    "circular": (nn.Conv2d(4, 5, 3, padding=(1, 2), padding_mode="circular"), (4, 9, 7)),
    "of one dimension": (nn.Conv1d(4, 6, 5, stride=2, padding=3, dilation=2), (4, 21)),
    "of one dimension, in groups, reflected": (
        nn.Conv1d(4, 6, 5, padding=2, groups=2, padding_mode="reflect"),
        (4, 21),
    ),
    "of one dimension, same": (nn.Conv1d(3, 16, 2, padding="same"), (3, 21)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_every_convolution_is_served_with_the_same_numbers_eager_and_by_definition(kind: str) -> None:
    model, shape = CONVOLUTIONS[kind]
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    for format in ("int8", "int4", "bf16"):
        served = lowp.quantize_model(model, format, [x])
        found = served(x)
        assert _error(found, model(x)) < NEAR[format]
        torch.testing.assert_close(served(x[0]), found[0], rtol=0 if format == "int8" else 1e-5, atol=1e-6)
        layer = cast(ServedConvolution, served)
        wanted = layer.geometry.convolved(_rounded(layer.weight, layer.geometry.image(x)), layer.dense(), layer._bias())
        torch.testing.assert_close(found, wanted.reshape(found.shape), rtol=1e-5, atol=1e-5)
        with kernels.use("reference"):
            torch.testing.assert_close(served(x), found, rtol=0 if format == "int8" else 1e-5, atol=1e-6)


def test_a_not_a_number_stays_one_in_a_dynamic_range() -> None:
    served = lowp.quantize_model(nn.Linear(8, 4), "int8")
    assert bool(served(torch.full((2, 8), torch.nan)).isnan().all())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"format": "int8", "calibration": "median"}, "unknown calibration 'median'"),
        ({"format": "int8", "bits": 6}, "7 or 8 bits, not 6"),
        ({"format": "e8m0"}, "no negative numbers"),
        ({"format": "int8", "calibration_data": []}, "has no batch"),
        ({"format": "int8", "keep": ["head"]}, "no module is named head"),
        ({"format": "int8", "calibration_data": [torch.full((1, 8), torch.inf)]}, "NaN or infinite activations"),
        ({"format": "int8:delayed"}, "a delayed scale depends on earlier tensors"),
        ({"format": "int9"}, "unknown format"),
        ({"format": "fp8"}, "fp8 is a width, which several formats have: give one of e4m3fn"),
        ({"calibration_data": torch.ones(4, 8)}, r"is one batch, a Tensor: give a list of batches, such as \[x\]"),
        ({"calibration_data": {"input": torch.ones(4, 8)}}, "is one batch, a dict: give a list of batches"),
    ],
)
def test_what_cannot_be_is_refused_in_words(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((InvalidInput, UnknownName), match=words):
        lowp.quantize_model(nn.Linear(8, 4), **arguments)


def test_what_is_no_model_is_refused_in_words() -> None:
    with pytest.raises(InvalidInput, match="a model is quantized, not str: load a checkpoint into it first"):
        lowp.quantize_model("digits.pt", "int8")  # type: ignore[arg-type]


def test_the_footprint_counts_bytes_products_and_energy() -> None:
    model, x = nn.Linear(64, 32), torch.randn(4, 64)
    plain, small = footprint(model, x), footprint(lowp.quantize_model(model, "int8"), x)
    assert plain.multiply_adds == small.multiply_adds == 4 * 64 * 32
    assert plain.bytes == 4 * (64 * 32 + 32)
    assert plain.energy == pytest.approx(4 * 64 * 32 * (3.7 + 0.9) + plain.bytes / 4 * 640)
    assert small.energy < plain.energy / 3


# -- accuracy on real data --------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def digits() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A trained perceptron, its training images, and the validation images and labels."""
    pytest.importorskip("sklearn")
    images, labels = read_digits()
    images = images / 16
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(120):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[:TRAINING]), labels[:TRAINING]).backward()
        optimizer.step()
    return model, images[:TRAINING], images[TRAINING:], labels[TRAINING:]


@pytest.mark.parametrize("calibrated", [False, True])
def test_int8_is_within_half_a_point_on_digits(
    digits: tuple[nn.Module, Tensor, Tensor, Tensor], calibrated: bool
) -> None:
    model, training, images, labels = digits
    served = lowp.quantize_model(model, "int8", [training] if calibrated else None)
    accuracy, before = ((one(images).argmax(1) == labels).float().mean() for one in (served, model))
    assert before > 0.9
    assert accuracy >= before - 0.005


class Tied(nn.Module):
    """An embedding whose weight the model's code multiplies by, and one that a layer shares."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.shared, self.head = nn.Embedding(16, 8), nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.embed(x), self.embed.weight) + self.head(self.shared(x))


@pytest.mark.parametrize("format", ["int8", "int4", "e4m3fn"])
def test_a_weight_that_the_models_own_code_reads_is_kept(format: str) -> None:
    model, x = Tied().eval(), torch.arange(16)
    served = lowp.quantize_model(model, format, [x])
    assert dict(unquantized(served)) == {"embed": "the model's own code reads its weight, as of tied embeddings"}
    assert isinstance(served(x), Tensor) and type(served.head) is not nn.Linear


@pytest.mark.parametrize("format", ["int8", "int4", "e4m3fn", "binary", "int8-affine"])
def test_without_data_a_weight_that_the_models_own_code_reads_gives_its_values(format: str) -> None:
    class Own(Tied):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.embed.weight
            assert weight.shape == (16, 8)
            return super().forward(x) + self.embed(x) @ weight.t() + torch.matmul(self.embed(x), weight.T)

    model, x = Own().eval(), torch.arange(16)
    served = lowp.quantize_model(model, format)
    table = served.embed.weight.values()
    wanted = 2 * F.linear(served.embed(x), table) + served.embed.weight.product(served.embed(x), None)
    torch.testing.assert_close(served(x), wanted + served.head(served.shared(x)))
    with pytest.raises(AttributeError, match="no attribute 'gewicht'"):
        _ = served.embed.weight.gewicht


# -- ranges -----------------------------------------------------------------------------------------------------------
def test_a_range_is_that_of_the_extremes_of_most_or_of_the_least_error() -> None:
    def of(method: str, *batches: Tensor) -> Any:
        found = ActivationRange(method)
        assert not found.anything
        for one in batches:
            found.add(one)
        assert found.anything
        return found.range(127)

    ramp = torch.arange(-1000.0, 3001.0)  # 4001 numbers
    first, second = ramp[:1500].reshape(3, 500), ramp[1500:]
    assert of("maximum", first, second, torch.zeros(0)) == range_of(-1000, 3000, 127)
    low, high = 0.2, 3999.8  # the places of 0.005 % and 99.995 % among them
    assert of("percentile", first, second) == pytest.approx(range_of(low - 1000, high - 1000, 127), rel=1e-6)
    # an outlier that costs little is cut off, as long as what is cut off is less than what the steps lose
    many = torch.cat([torch.linspace(0, 1, 20_000), torch.tensor([4.0])])
    tried = [range_of(0, 4 * place / 64, 127) for place in range(1, 65)]
    errors = []
    for one in tried:
        exact = many.double()
        bytes_ = (exact / one.scale).round().clamp(-one.zero, 127 - one.zero)
        errors.append(float((bytes_ * one.scale - exact).square().sum()))
    assert of("error", many) == tried[errors.index(min(errors))] != range_of(0, 4, 127)


def test_of_many_numbers_every_second_is_kept_as_often_as_there_are_too_many() -> None:
    found = ActivationRange("percentile")
    found.add(torch.arange(2.0**16))
    assert [len(one) for one in found._sample] == [2**16]
    found.add(torch.tensor([-5.0]))
    assert torch.equal(torch.cat(found._sample), torch.cat([torch.arange(0.0, 2.0**16, 2), torch.tensor([-5.0])]))
    found.add(torch.arange(7.0))
    assert found._sample[-1].tolist() == [0, 2, 4, 6]
    with pytest.raises(InvalidInput, match="calibration found NaN or infinite activations"):
        found.add(torch.tensor([1.0, torch.nan]))
    for infinity in (torch.inf, -torch.inf):
        with pytest.raises(InvalidInput, match="calibration found NaN or infinite activations"):
            found.add(torch.tensor([1.0, infinity]))
    assert [check_bits(bits) for bits in (7, 8)] == [127, 255]
    with pytest.raises(InvalidInput, match="activations must have 7 or 8 bits, not 9"):
        check_bits(9)


def _set(parameter: Any, value: float) -> None:
    with torch.no_grad():
        parameter[0, 0] = value


def test_layers_whose_weights_cannot_be_packed_are_kept_with_the_reason() -> None:
    layers = {
        "infinite": nn.Linear(4, 4),
        "normed": nn.Embedding(4, 4, max_norm=1.0),
        "wide": nn.MultiheadAttention(8, 2, kdim=4),
        "biased": nn.MultiheadAttention(8, 2, add_bias_kv=True),
        "zero": nn.MultiheadAttention(8, 2, add_zero_attn=True),
        "plain": nn.MultiheadAttention(8, 2, bias=False),
        "narrow": nn.Linear(4, 4).bfloat16(),
        "table": nn.Embedding(4, 4),
    }
    _set(layers["infinite"].weight, math.inf)
    added = "keys and values of other widths, or added to"
    assert unquantized(lowp.quantize_model(nn.ModuleDict(layers), "int4")) == {
        "infinite": "its parameters are not finite",
        "normed": "max_norm writes its weight in the forward pass",
        **dict.fromkeys(("wide", "biased", "zero"), added),
    }
    with pytest.raises(InvalidInput, match="the scope of weights must be row, not channel"):
        lowp.quantize_model(nn.Linear(4, 4), "i8s@fp32/channel")
    with pytest.raises(InvalidInput, match="no layer was called during calibration"):
        lowp.quantize_model(nn.Sequential(nn.Linear(4, 4)), "int8", [torch.ones(1, 4)], forward=lambda *_: None)


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_served_attention_takes_masks_as_torch_does(batch_first: bool) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 2, batch_first=batch_first).eval()
    served = lowp.quantize_model(attention, "fp32")
    query, keys = torch.randn(3, 5, 16), torch.randn(3, 7, 16)
    if not batch_first:
        query, keys = query.transpose(0, 1), keys.transpose(0, 1)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 4:] = True
    masks: tuple[dict[str, Any], ...] = (
        {},
        {"key_padding_mask": padding},
        {"attn_mask": torch.randn(5, 7)},
        {"attn_mask": torch.randn(6, 5, 7), "key_padding_mask": torch.zeros(3, 7).masked_fill(padding, -2.0)},
        {"attn_mask": torch.rand(5, 7) < 0.3},
    )
    for mask in masks:
        found, weights = served(query, keys, keys, **mask)
        assert weights is None
        torch.testing.assert_close(found, attention(query, keys, keys, need_weights=False, **mask)[0])
    alone = query[0] if batch_first else query[:, 0]
    torch.testing.assert_close(served(alone, alone, alone)[0], attention(alone, alone, alone)[0])


def test_a_range_is_that_of_the_extremes_of_the_middle_or_of_the_least_error(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [torch.randn(3000), torch.empty(0), torch.randn(5, 100) * 2]
    x = torch.cat([one.flatten() for one in parts])
    found = {}
    for method in ("maximum", "percentile", "error"):
        seen = ActivationRange(method)
        assert not seen.anything
        for one in parts:
            seen.add(one)
        found[method] = seen.range(127)
        assert seen.anything
    assert found["maximum"] == range_of(float(x.min()), float(x.max()), 127)
    low, high = (float(torch.quantile(x, share)) for share in (0.00005, 0.99995))
    assert found["percentile"] == pytest.approx(range_of(low, high, 127))
    tried = [range_of(float(x.min()) * share / 64, float(x.max()) * share / 64, 127) for share in range(1, 65)]
    errors = [float((lowered(x, one) - x).square().sum()) for one in tried]
    assert float((lowered(x, found["error"]) - x).square().sum()) == pytest.approx(min(errors))
    monkeypatch.setattr("lowp.inference.calibration._KEPT", 8)
    seen = ActivationRange("percentile")
    for begin in (0.0, 100.0):
        seen.add(begin + torch.arange(9.0))
    assert torch.cat(seen._sample).tolist() == [0.0, 4.0, 8.0, 102.0, 106.0]
    for number in (math.inf, math.nan):
        with pytest.raises(InvalidInput, match="NaN or infinite activations"):
            seen.add(torch.tensor([1.0, number]))


def lowered(x: Tensor, over: Any) -> Tensor:
    return (x / over.scale).round().clamp(-over.zero, over.highest - over.zero) * over.scale


@pytest.mark.parametrize(
    "format",
    ["int8", "int4", "mxfp4", "nvfp4", "if4", "ternary", "binary", "e4m3fn", "mxfp8", "bf16", "int8-affine", "e5m7"],
)
def test_some_rows_of_a_weight_are_those_of_the_whole(format: str) -> None:
    weight = lowp.quantize_model(nn.Embedding(200, 40), format).weight
    whole = weight.values()
    assert whole.shape == (200, 40) and (weight.n, weight.k) == (200, 40)
    for first, count in ((0, 64), (64, 130), (192, 8)):
        assert torch.equal(weight.values_of(first, count), whole[first : first + count])
    indices = torch.tensor([[0, 199, 7], [64, 63, 128]])
    assert torch.equal(weight.rows_at(indices), whole[indices])
    linear = lowp.quantize_model(nn.Linear(40, 32), format)
    assert linear.extra_repr() == "40, 32"
    assert linear.empty(torch.ones(2, 3, 40, device="meta")).shape == (2, 3, 32)


@pytest.mark.parametrize(
    ("format", "each"),
    [
        (None, 3.7 + 0.9),
        ("int8", 0.2 + 0.1),
        ("int4", 3.7 + 0.9),
        ("bf16", 3.7 + 0.9),
        ("ternary", 0.0),
        ("binary", 0.0),
    ],
)
def test_energy_is_that_of_each_product_and_of_each_byte_that_is_read(format: str | None, each: float) -> None:
    model: nn.Module = nn.Sequential(nn.Linear(8, 4), nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 6, 2), nn.Embedding(3, 3))
    model[3].forward = lambda x: x  # type: ignore[index, method-assign]
    served = model if format is None else lowp.quantize_model(model, format, keep=["3"])
    found = footprint(served, torch.ones(5, 8))
    size = sum(one.nbytes for one in (*served.parameters(), *served.buffers()))
    count = 5 * 4 * 8 + 5 * 6 * 1 * 4
    assert (found.bytes, found.multiply_adds) == (size, count)
    if format in ("ternary", "binary"):
        each = cost(FORMATS[format]).multiply_energy.value + 0.1
    assert found.energy == pytest.approx(size / 4 * 640 + count * each)
    assert footprint(served, forward=lambda model: model(torch.ones(5, 8))) == found
    assert footprint(served, input=torch.ones(5, 8)) == found
