"""Weights rounded by their inputs' second moments: nearer results, by numbers of the format."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowp
from lowp.errors import InvalidInput, UnknownName
from lowp.inference.convolutions import ServedConvolution, matrix_of
from lowp.inference.rounding import SecondMoments, gptq


def _inputs(rows: int) -> Tensor:
    """Columns that go together, as the inputs of a layer do."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 8, generator=generator) @ torch.randn(8, 64, generator=generator) + 0.1 * torch.randn(
        rows, 64, generator=generator
    )


def _error(served: nn.Module, model: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        return float((served(x) - model(x)).norm() / model(x).norm())


@pytest.mark.parametrize(
    "format", ["int4", "nvfp4", "mxfp4", "mxfp8", "mxfp6", "e4m3fn", "e4m3fn@fp32/row", "ternary", "i3s@fp32/32"]
)
def test_results_on_other_data_are_nearer_than_with_nearest_weights(format: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 32)), _inputs(600)
    data = [x[:300]]
    nearest, ours = (lowp.quantize_model(model, format, data, rounding=one) for one in ("nearest", "gptq"))
    assert _error(ours, model, x[300:]) < 0.6 * _error(nearest, model, x[300:])
    values, before = ours[0].weight.values(), nearest[0].weight.values()
    assert set(ours.state_dict()) == set(nearest.state_dict())
    assert not torch.equal(values, before) and values.abs().max() <= 1.5 * before.abs().max()


def test_each_number_is_one_of_the_format_under_scales_of_least_error_or_of_a_rule_that_the_format_names() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(7, 64), _inputs(200).double()
    for format in ("int4", "mxfp8", "mxfp8:rceil"):
        found = gptq(weight, lowp.casts.parse(format), x.t() @ x)
        assert isinstance(found, lowp.Quantized)
        values = lowp.dequantize(found)
        units = found.scale if format == "int4" else torch.exp2(found.scale.double() - 127)
        assert torch.equal(lowp.quantize(values, format, scale=units), values)
        assert not torch.equal(values, lowp.quantize(weight, format))
        assert torch.equal(found.scale, lowp.encode(weight, format).scale) == (format == "mxfp8:rceil")


def test_inputs_that_tell_columns_apart_leave_the_nearest_numbers_under_scales_of_less_error() -> None:
    weight = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    for format in ("int4", "e4m3fn", "nvfp4"):
        found = gptq(weight, lowp.casts.parse(format), torch.eye(40, dtype=torch.float64))
        nearest = lowp.quantize(weight, format)
        if not isinstance(found, lowp.Quantized):
            assert torch.equal(found, nearest)
            continue
        values = lowp.dequantize(found)
        assert (values - weight).norm() < 0.99 * (nearest - weight).norm()
        if found.outer is None:
            torch.testing.assert_close(values, lowp.quantize(weight, format, scale=found.scale))


def test_the_error_of_a_column_is_made_up_for_by_one_that_carries_the_same_number() -> None:
    weight = torch.tensor([[0.4, 0.3]])
    moments = torch.ones(2, 2, dtype=torch.float64)  # both columns are always the same
    found = gptq(weight, lowp.casts.parse("i4s@2^0..0/row"), moments)
    assert isinstance(found, lowp.Quantized)
    assert float(lowp.dequantize(found).sum()) == 1.0  # 0.7 rounded, where each alone is rounded to 0


@pytest.mark.parametrize("padding", [{"padding": 1}, {"padding": 1, "padding_mode": "circular"}])
def test_the_rows_of_a_convolution_are_what_its_weight_is_multiplied_with(padding: dict[str, Any]) -> None:
    layer, x = nn.Conv2d(3, 5, (3, 2), stride=2, **padding), torch.randn(2, 3, 9, 8)
    made = lowp.quantize_model(layer, "fp32")
    assert isinstance(made, ServedConvolution)
    rows, wanted = made.geometry.rows_of(x), layer(x)
    found = rows @ matrix_of(layer).t() + layer.bias
    torch.testing.assert_close(found, wanted.permute(0, 2, 3, 1).reshape(-1, 5))


def test_convolutions_and_attention_are_rounded_so_too() -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv1d(4, 16, 5), torch.randn(20, 4, 40).cumsum(-1)
    nearest, ours = (lowp.quantize_model(layer, "int4", [x[:10]], rounding=one) for one in ("nearest", "gptq"))
    assert _error(ours, layer, x[10:]) < 0.7 * _error(nearest, layer, x[10:])
    attention, words = nn.MultiheadAttention(64, 4, batch_first=True).eval(), _inputs(60).reshape(6, 10, 64)
    served = [
        lowp.quantize_model(attention, "int4", [(words[:3],) * 3], rounding=one)(words, words, words)[0]
        for one in ("nearest", "gptq")
    ]
    wanted = attention(words, words, words)[0]
    far, near = (float((one - wanted)[3:].detach().norm()) for one in served)
    assert near < 0.7 * far


class _Reader(nn.Module):
    """Rows of a table, and a few sums of them; `form` is how the results are given."""

    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        self.table, self.form = nn.Embedding(50, 64), form
        self.register_buffer("sums", _inputs(600)[:6])

    def forward(self, indices: Tensor) -> Any:
        found = self.table(indices) @ self.get_buffer("sums").t()
        return {"tensor": found, "dict": {"logits": (found, 1)}, "none": found.argmax(-1)}[self.form]


@pytest.mark.parametrize("form", ["tensor", "dict"])
def test_an_embedding_is_rounded_so_that_the_results_of_the_model_change_least(form: str) -> None:
    torch.manual_seed(0)
    model, x = _Reader(form), torch.arange(50)
    nearest, ours = (lowp.quantize_model(model, "int4", [x[:20]], rounding=one) for one in ("nearest", "gptq"))
    for one in (model, nearest, ours):
        one.form = "tensor"
    assert _error(ours, model, x) < 0.3 * _error(nearest, model, x)
    assert not any(parameter.requires_grad for parameter in ours.parameters())


def test_inference_mode_around_the_call_changes_nothing() -> None:
    torch.manual_seed(0)
    model, x = _Reader(), [torch.arange(20)]
    wanted = lowp.quantize_model(model, "int4", x, rounding="gptq")
    with torch.inference_mode():
        found = lowp.quantize_model(model, "int4", x, rounding="gptq")
    assert torch.equal(found.table.weight.values(), wanted.table.weight.values())


def test_an_embedding_to_which_no_gradient_leads_is_rounded_to_nearest() -> None:
    model, x = _Reader("none"), torch.arange(50)
    nearest, ours = (lowp.quantize_model(model, "int4", [x], rounding=one) for one in ("nearest", "gptq"))
    assert torch.equal(ours.table.weight.values(), nearest.table.weight.values())


def test_a_rounding_that_cannot_be_is_refused_in_words() -> None:
    layer, x = nn.Linear(8, 4), [torch.randn(4, 8)]
    with pytest.raises(UnknownName, match=r"unknown rounding 'gpqt'.*gptq"):
        lowp.quantize_model(layer, "int4", x, rounding="gpqt")
    with pytest.raises(InvalidInput, match="reads the layers' inputs: give quantize_model calibration_data"):
        lowp.quantize_model(layer, "int4", rounding="gptq")
    for format in ("binary", "int8-affine", "if4"):
        with pytest.raises(InvalidInput, match=f"does not know {format}: give a format without zero points, of 2 bits"):
            lowp.quantize_model(layer, format, x, rounding="gptq")


def test_columns_are_rounded_one_after_the_other_as_by_the_definition_of_the_optimal_brain_surgeon() -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(6, 150, generator=generator)
    x = torch.randn(400, 150, generator=generator, dtype=torch.float64) * torch.linspace(0.1, 2, 150) ** 2
    x[:, 1:] += x[:, :-1]
    x[:, [3, 140]] = 0.0  # columns that no input reaches
    moments = x.t() @ x
    filled = moments + torch.diag((moments.diagonal() == 0).double())
    inverse = torch.linalg.inv(filled + 0.01 * filled.diagonal().mean() * torch.eye(150))
    left, found = weight.double(), torch.empty(6, 150, dtype=torch.float64)
    for i in sorted(range(150), key=lambda column: -float(moments[column, column])):
        found[:, i] = lowp.quantize(left[:, i], "e4m3fn")
        left = left - (left[:, i] - found[:, i])[:, None] / inverse[i, i] * inverse[i]
        inverse = inverse - inverse[:, i, None] * inverse[i] / inverse[i, i]
        inverse[i, i] = 1.0
    assert torch.equal(gptq(weight, lowp.casts.parse("e4m3fn"), moments), found.float())


def test_the_second_moments_of_layers_are_those_of_what_their_weights_multiply() -> None:
    torch.manual_seed(0)
    moments, x = SecondMoments(), torch.randn(2, 3, 4)
    assert torch.equal(moments.rounded(x[0], lowp.casts.parse("int4")), x[0])  # type: ignore[arg-type]
    moments.add(nn.Linear(4, 2), x)
    moments.add(nn.Linear(4, 2), x)
    rows = x.reshape(6, 4)
    torch.testing.assert_close(moments._sum, 2 * (rows.t() @ rows).double())
    convolution = nn.Conv1d(3, 2, 2)
    one, batch = SecondMoments(), SecondMoments()
    one.add(convolution, x[0])
    batch.add(convolution, x[:1])
    assert one._sum is not None and batch._sum is not None
    assert torch.equal(one._sum, batch._sum) and one._sum.shape == (6, 6)
    grouped = SecondMoments()
    grouped.add(nn.Conv1d(4, 4, 2, groups=2), torch.randn(1, 4, 5))
    assert grouped._sum is None
