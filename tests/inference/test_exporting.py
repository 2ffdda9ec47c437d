"""ONNX files of served models: onnxruntime gives the same results, and unsupported models are refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowp
from lowp.errors import InvalidInput
from lowp.inference import export_onnx

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's exporter warns of itself


class Network(nn.Module):
    """An embedding, a convolution and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.convolution = nn.Conv2d(1, 8, 3, padding=1, stride=2)
        self.head = nn.Linear(8 * 4 * 8, 10)

    def forward(self, indices: Tensor) -> Tensor:
        """Of indices [N, 8]."""
        return self.head(self.convolution(self.embedding(indices)[:, None]).relu().flatten(1))  # type: ignore[no-any-return]


def test_onnxruntime_gives_the_answers_of_the_int8_model_at_any_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    indices = torch.randint(0, 20, (16, 8))
    served = lowp.quantize_model(Network().eval(), "int8", [indices])
    export_onnx(served, (indices,), tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for size in (16, 3):
        found = session.run(None, {session.get_inputs()[0].name: indices[:size].numpy()})[0]
        torch.testing.assert_close(torch.from_numpy(found), served(indices[:size]), rtol=1e-4, atol=1e-4)
    written = onnx.load(tmp_path / "model.onnx")
    graph = written.graph
    kinds = Counter(node.op_type for node in graph.node)
    assert (kinds["QuantizeLinear"], kinds["DequantizeLinear"]) == (2, 4)
    assert [one.version for one in written.opset_import if not one.domain] == [18]  # which runtimes of 2023 know
    int8 = {one.name for one in graph.initializer if one.data_type == onnx.TensorProto.INT8}
    assert {"embedding.codes", "convolution.codes", "head.codes"} <= int8


@pytest.mark.parametrize(
    ("options", "shapes"),
    [
        ({}, ({0: torch.export.Dim.DYNAMIC},)),
        ({"dynamic_batch": False}, None),
        ({"dynamic_shapes": ({1: torch.export.Dim.DYNAMIC},)}, ({1: torch.export.Dim.DYNAMIC},)),
    ],
    ids=["any batch", "one batch", "own shapes"],
)
def test_torch_is_asked_for_any_batch_unless_the_caller_says_otherwise(
    options: dict[str, Any], shapes: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, asked = torch.ones(2, 4), dict[str, Any]()
    served = lowp.quantize_model(nn.Linear(4, 4).eval(), "int8", [x])
    monkeypatch.setattr(torch.onnx, "export", lambda *given, **named: asked.update(named))
    with pytest.raises(AssertionError):  # nothing was exported
        export_onnx(served, (x,), tmp_path / "model.onnx", **options)
    assert asked.get("dynamic_shapes") == shapes


class Block(nn.Module):
    """Convolutions of one dimension and in groups, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = nn.Conv1d(4, 16, 3, padding="same", padding_mode="circular")
        self.grouped = nn.Conv2d(16, 32, (1, 3), padding=(0, 1), groups=2)
        self.depthwise = nn.Conv2d(32, 32, (1, 3), padding=(0, 1), groups=32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Of x [N, 4, 12]."""
        x = self.depthwise(self.grouped(self.lines(x)[:, :, None])).squeeze(2).transpose(1, 2)
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


def test_onnxruntime_and_torch_export_give_the_answers_of_groups_lines_and_attention(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Block().eval(), torch.randn(8, 4, 12)
    served = lowp.quantize_model(model, "int8", [x])
    assert lowp.inference.unquantized(served) == {}
    wanted = served(x)
    export_onnx(served, (x,), tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
    exported = torch.export.export(served, (x,)).module()(x)
    assert torch.equal(exported, wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


class Transformer(nn.Module):
    """Two layers, with padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """Of x [N, T, 32]."""
        return self.layers(x, src_key_padding_mask=padding)  # type: ignore[no-any-return]


@pytest.mark.parametrize("bits", [7, 8])
def test_onnxruntime_quantises_the_products_of_attention_as_the_served_transformer_does(
    tmp_path: Path, bits: int
) -> None:
    torch.manual_seed(0)
    x, padding = torch.randn(4, 6, 32), torch.arange(6) >= torch.tensor([6, 4, 5, 6])[:, None]
    model = Transformer().eval()
    served = lowp.quantize_model(model, "int8", [(x, padding)], bits=bits)
    wanted, trained = served(x, padding), model(x, padding).detach()
    export_onnx(served, (x, padding), tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    found = torch.from_numpy(session.run(None, dict(zip(names, (x.numpy(), padding.numpy()), strict=True)))[0])
    assert (found - wanted).norm() < 1e-3 * (wanted - trained).norm()


# by format the type of its codes; onnxruntime's CPU reads none of FLOAT4E2M1
READ = {"int4": "INT4", "i3s@fp32/32": "INT4", "mxfp8": "FLOAT8E4M3FN", "mxfp8-e5m2": "FLOAT8E5M2"}
READ |= {"e4m3fn": "FLOAT8E4M3FN", "e4m3fn@fp32/row": "FLOAT8E4M3FN", "e4m3fn@e8m0/16x16": "FLOAT8E4M3FN"}
UNREAD = {"nvfp4": "FLOAT4E2M1", "mxfp4": "FLOAT4E2M1", "e2m1": "FLOAT4E2M1"}


class Formats(nn.Module):
    """A layer in each of some formats, side by side."""

    def __init__(self, formats: dict[str, str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(lowp.quantize_model(nn.Linear(81, 33, bias=False), one) for one in formats)

    def forward(self, x: Tensor) -> Tensor:
        """Their results, one after the other."""
        return torch.cat([layer(x) for layer in self.layers], 1)


@pytest.mark.parametrize("formats", [READ, UNREAD], ids=["read by onnxruntime", "FLOAT4E2M1"])
def test_weights_of_a_type_that_onnx_has_keep_their_codes_and_have_the_same_bits(
    tmp_path: Path, formats: dict[str, str]
) -> None:
    from onnx.reference import ReferenceEvaluator

    torch.manual_seed(0)
    model, unit = Formats(formats), torch.eye(81)  # whose product is the weight
    export_onnx(model, (unit,), tmp_path / "model.onnx")
    written = onnx.load(tmp_path / "model.onnx")
    types = {one.name: one.data_type for one in written.graph.initializer}
    wanted = {f"layers.{i}.weight.codes": getattr(onnx.TensorProto, one) for i, one in enumerate(formats.values())}
    assert wanted.items() <= types.items() and not any(name.endswith(".weight") for name in types)
    given = {written.graph.input[0].name: unit.numpy()}
    found = [ReferenceEvaluator(written).run(None, given)[0]]
    if formats is READ:
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
        found.append(session.run(None, given)[0])
    values = torch.cat([layer.weight.values() for layer in model.layers]).t()  # type: ignore[operator, union-attr]
    assert all(torch.equal(torch.from_numpy(one), values) for one in found)


def test_layers_of_other_formats_are_exported_in_fp32(tmp_path: Path) -> None:
    x = torch.randn(4, 32)
    served = lowp.quantize_model(nn.Sequential(nn.Linear(32, 8)), "mxfp6")
    export_onnx(served, (x,), tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), served(x), rtol=1e-4, atol=1e-4)


def test_what_cannot_be_exported_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    path, x = tmp_path / "model.onnx", torch.randn(2, 4)
    with pytest.raises(InvalidInput, match=r"layer 0 has no range for its input.*calibration_data"):
        export_onnx(lowp.quantize_model(nn.Sequential(nn.Linear(4, 4)), "int8"), (x,), path)
    with pytest.raises(InvalidInput, match="has no quantized layer"):
        export_onnx(nn.Linear(4, 4), (x,), path)
    with pytest.raises(InvalidInput, match="there is no folder"):
        export_onnx(nn.Linear(4, 4), (x,), tmp_path / "none" / "model.onnx")
    assert not path.exists()
