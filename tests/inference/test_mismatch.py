"""`lowp.mismatch`: how far log-probabilities in serving are from those in training, and by which layers."""

from __future__ import annotations

import copy
import json
import math
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lowp
from lowp.errors import InvalidInput, UnknownName
from lowp.inference.mismatch import LayerMismatch, ServedFormat, _is_packed, _Sums, served_format


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 8))


@pytest.fixture
def data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [3 * torch.randn(24, 16, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("format", ["int8", "nvfp4", "mxfp4", "int4"])
def test_numbers_are_those_of_their_definitions(format: str, model: nn.Module, data: list[Tensor]) -> None:
    (row,) = lowp.mismatch(model, data, [format], layers=0).rows
    served = lowp.quantize_model(model, format, data)
    x = torch.cat(data)
    with torch.no_grad():
        ours, theirs = (F.log_softmax(one(x).double(), 1) for one in (model, served))
    share, apart = ours.exp(), (ours - theirs).abs()
    likely = share >= 0.01 * share.max(1, keepdim=True).values
    kl = F.kl_div(theirs, ours, reduction="none", log_target=True).sum(1)
    assert row.tokens == 48 and row.layers == ()
    assert row.mean == pytest.approx(float((share * apart).sum(1).mean()))
    assert row.largest == pytest.approx(float(apart[likely].max()))
    assert (row.kl, row.largest_kl) == pytest.approx((float(kl.mean()), float(kl.max())), rel=1e-6)
    assert row.changed == float((ours.argmax(1) != theirs.argmax(1)).double().mean())


def test_fewer_bits_are_further_away_and_training_s_own_numerics_are_not(model: nn.Module, data: list[Tensor]) -> None:
    found = lowp.mismatch(model, data, ["fp16", "bf16", "e4m3fn", "e2m1"], layers=0)
    kls = [row.kl for row in found.rows]
    assert kls == sorted(kls) and kls[0] > 0
    (same,) = lowp.mismatch(model, data, ["bf16"], training="bf16").rows
    assert (same.mean, same.largest, same.kl, same.changed, same.layers) == (0, 0, 0, 0, ())


@pytest.mark.parametrize("format", ["bf16", "int8"])
def test_the_layer_that_causes_it_is_named(format: str, model: Any, data: list[Tensor]) -> None:
    with torch.no_grad():
        if format == "bf16":
            model[3].bias.add_(100.0)  # changes no probability, but the spacing of the scores is a half
        else:
            model[1].bias[0], model[1].weight[0] = -1.0, 0.0  # nothing passes the first channel
            model[3].weight[:, 0] = 50.0  # but its weights take all the range of each row
    (row,) = lowp.mismatch(model, data, [format]).rows
    assert row.layers[0].layer == "3" and row.layers[0].kl > 2 * row.layers[1].kl
    assert [one.kl for one in row.layers] == sorted((one.kl for one in row.layers), reverse=True)


def test_the_model_is_left_as_it_was(model: nn.Module, data: list[Tensor]) -> None:
    model.train()
    model[1].eval()  # type: ignore[index]
    before = {name: one.clone() for name, one in model.state_dict().items()}
    parts = list(model)  # type: ignore[arg-type]
    lowp.mismatch(model, data, ["bf16", "int8"])
    assert [one.training for one in parts] == [True, False, True, True] and list(model) == parts  # type: ignore[arg-type]
    assert not any("forward" in one.__dict__ for one in model.modules())
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_results_of_other_shapes_and_kinds_are_understood(data: list[Tensor]) -> None:
    torch.manual_seed(0)
    pixels = nn.Conv2d(1, 5, 3)
    images = [torch.randn(2, 1, 6, 6)]
    (row,) = lowp.mismatch(pixels, images, ["bf16"], dim=1, layers=0).rows
    assert row.tokens == 2 * 4 * 4
    inner = nn.Linear(16, 4)
    kinds = (
        lambda scores: (scores, None),
        lambda scores: {"logits": scores},
        lambda scores: SimpleNamespace(logits=scores),
    )
    for kind in kinds:
        found = lowp.mismatch(inner, data, ["bf16"], forward=lambda model, batch, kind=kind: kind(model(batch)))
        assert found.rows[0].tokens == 48 and found.rows[0].mean > 0


def test_batches_of_arguments_by_place_and_by_name_are_those_of_one_argument(
    model: nn.Module, data: list[Tensor]
) -> None:
    expected = lowp.mismatch(model, data, ["int8"], layers=0).rows
    assert lowp.mismatch(model, [(one,) for one in data], ["int8"], layers=0).rows == expected
    assert lowp.mismatch(model, [{"input": one} for one in data], ["int8"], layers=0).rows == expected


class Tied(nn.Module):
    """A language model whose scores are products with its table of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(12, 16), nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.inner(self.table(tokens)), self.table.weight)


def test_an_embedding_whose_weight_the_model_reads_stays_as_it_was() -> None:
    torch.manual_seed(0)
    (row,) = lowp.mismatch(Tied(), [torch.arange(12).reshape(2, 6)], ["int8"]).rows
    assert (
        row.kept["table"].startswith("the model's own code reads its weight")
        and row.kl > 0
        and row.tokens == 12
        and row.layers[0].layer == "inner"
    )


def test_what_overflows_is_infinitely_far_away(model: Any, data: list[Tensor]) -> None:
    with torch.no_grad():
        model[3].weight.mul_(1e5)
    (row,) = lowp.mismatch(model, data, ["fp16"], layers=0).rows
    assert row.largest == math.inf and row.kl == math.inf
    assert "inf" in str(row)


def test_a_result_is_plain_data_with_numbers(model: nn.Module, data: list[Tensor]) -> None:
    found = lowp.mismatch(model, data, "bf16")
    document = json.loads(json.dumps(found.document()))
    assert document["training"] == "fp32" and document["rows"][0]["mean"] == found.rows[0].mean
    assert document["rows"][0]["layers"][0] == {
        "layer": found.rows[0].layers[0].layer,
        "kl": found.rows[0].layers[0].kl,
    }
    assert str(found).startswith("bf16: |Δ log p| ")


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"data": []}, InvalidInput, r"data has no batch: give a list of batches, such as \[x\]"),
        ({"data": torch.ones(2, 16)}, InvalidInput, "data has no batch"),
        ({"formats": ["fp17"]}, UnknownName, "unknown precision 'fp17'"),
        (
            {"dim": 0, "data": [torch.ones(1, 16)]},
            InvalidInput,
            r"a tensor \(1, 8\), which has no scores of two classes",
        ),
        ({"forward": lambda model, batch: None}, InvalidInput, "the model gives NoneType, which has no scores"),
    ],
)
def test_what_cannot_be_compared_is_named(given: Any, kind: type[Exception], text: str, model: Any, data: Any) -> None:
    with pytest.raises(kind, match=text):
        lowp.mismatch(model, **{"data": data, "formats": ["bf16"], **given})


def test_a_row_says_how_far_away_a_format_is_and_by_which_layer() -> None:
    row = ServedFormat(
        "int8", 1234, 0.5, 0.25, 0.125, 0.75, 0.0625, (LayerMismatch("a", 0.1), LayerMismatch("b", 0.05))
    )
    said = "int8: |Δ log p| 0.25 on average and 0.5 at most, KL 0.12, 6.25% of 1,234 argmax changed"
    assert str(row) == f"{said}; most by a (0.1)"
    assert str(replace(row, layers=())) == said
    assert str(replace(row, failure="ZeroDivisionError: no")) == "int8: ZeroDivisionError: no"


def test_as_many_layers_are_named_as_are_asked_for_and_none_that_is_served_as_it_is(model: Any, data: Any) -> None:
    for format in ("int8", "bf16"):
        every = lowp.mismatch(model, data, [format], layers=9).rows[0].layers
        assert sorted(one.layer for one in every) == ["0", "3"] if format == "int8" else ["0", "1", "3"]
        (first,) = lowp.mismatch(model, data, [format], layers=1).rows[0].layers
        assert first == every[0]
        for one in every:  # each alone on the first batch
            with torch.no_grad():
                ours = F.log_softmax(model(data[0]).double(), 1)
                alone = copy.deepcopy(model)
                if format == "int8":
                    alone[int(one.layer)] = lowp.quantize_model(model, "int8", data)[int(one.layer)]
                    theirs = F.log_softmax(alone(data[0]).double(), 1)
                    kl = F.kl_div(theirs, ours, reduction="none", log_target=True).sum(1).clamp(min=0).mean()
                    assert one.kl == pytest.approx(float(kl), rel=1e-6)


def test_sums_over_tokens_are_those_of_their_definitions() -> None:
    ours = torch.tensor([[0.5, 0.4949, 0.0051, 0.0], [0.5, 0.4951, 0.0049, 0.0], [0.25, 0.25, 0.25, 0.25]]).double()
    theirs = torch.tensor([[0.2, 0.7, 0.1, 0.0], [0.4, 0.3, 0.3, 0.0], [0.25, 0.25, 0.25, 0.25]]).double()
    apart = (ours / theirs).log().abs().nan_to_num()
    kl = (ours * (ours / theirs).log()).nan_to_num().sum(1)
    sums = _Sums()
    sums.add(ours[:2].log(), theirs[:2].log())
    sums.add(ours[2:].log(), theirs[2:].log())
    row = sums.row("int8")
    assert (row.format, row.tokens, row.changed) == ("int8", 3, 1 / 3)
    assert row.mean == pytest.approx(float((ours * apart).sum()) / 3)
    assert row.kl == pytest.approx(float(kl.sum()) / 3) and row.largest_kl == pytest.approx(float(kl.max()))
    assert row.largest == pytest.approx(math.log(0.1 / 0.0051)), "0.0049 is less than a hundredth of 0.5"
    sums.add(ours[2:].log(), torch.full((1, 4), math.nan))
    assert sums.row("").largest == sums.row("").kl == math.inf
    one = _Sums()
    one.add(torch.tensor([[0.0, -math.inf]]), torch.tensor([[0.0, -math.inf]]))
    assert (one.row("").largest, one.row("").kl, one.row("").mean) == (0, 0, 0)


def test_formats_of_up_to_four_bits_and_integers_are_packed() -> None:
    packed = {"int8": True, "i16@fp32/row": True, "e2m1": True, "nvfp4": True, "e3m1": False, "mxfp6": False}
    assert {format: _is_packed(format) for format in packed} == packed
    assert not _is_packed("fp16-storage") and served_format("bf16") == "bf16"


def test_the_first_eight_batches_calibrate(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    def quantized(model: nn.Module, format: str, data: Any = None, **given: Any) -> nn.Module:
        taken.append(None if data is None else len(data))
        return lowp.quantize_model(model, format, data, **given)

    taken: list[int | None] = []
    monkeypatch.setattr(sys.modules["lowp.inference.mismatch"], "quantize_model", quantized)
    data = [torch.full((2, 16), float(place + 1)) for place in range(10)]
    assert lowp.mismatch(model, data, ["int8"], layers=0).rows[0].tokens == 20
    assert taken == [None, 8]


@pytest.mark.parametrize(
    ("scores", "told"),
    [
        (torch.tensor(1.0), r"a tensor \(\), which"),
        (torch.ones(3, 1), r"a tensor \(3, 1\), which"),
        (torch.ones(3, 4).long(), r"a tensor \(3, 4\), which"),
        ((), "tuple, which"),
        ({"scores": torch.ones(3, 4)}, "dict, which"),
        ([torch.ones(3, 2)], ""),
        (SimpleNamespace(logits=torch.ones(3, 2)), ""),
    ],
)
def test_scores_are_those_of_two_classes_or_more(scores: Any, told: str, model: Any, data: Any) -> None:
    def mismatched() -> int:
        return lowp.mismatch(model, data[:1], ["bf16"], forward=lambda *_: scores, layers=0).rows[0].tokens

    if told:
        with pytest.raises(InvalidInput, match=f"the model gives {told}"):
            mismatched()
    else:
        assert mismatched() == 3
