"""Export of a served model: int8 layers as QuantizeLinear and DequantizeLinear, which onnxruntime computes in bytes.

Linear layers in formats that ONNX has (INT4, FLOAT4E2M1, FLOAT8E4M3FN, FLOAT8E5M2) keep their codes, and
DequantizeLinear gives the numbers that the served layer multiplies, bit for bit.
"""

import copy
import functools
import importlib
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowp import files
from lowp.errors import InvalidInput, Unavailable
from lowp.formats import FORMATS
from lowp.inference.attention import ServedAttention, attended
from lowp.inference.calibration import check_bits
from lowp.inference.convolutions import ServedConvolution
from lowp.inference.modules import Int8, Nibble, Served, ServedEmbedding, ServedLinear, Stored
from lowp.inference.quantizing import put
from lowp.kernels.packed import few_bits, few_rows

OPSET = 18


def export_onnx(
    model: nn.Module, arguments: tuple[Any, ...], path: str | Path, dynamic_batch: bool = True, **options: Any
) -> None:
    """Write a model that `quantize_model` made in int8, with calibration data, as an ONNX file.

    `arguments` are example inputs; with `dynamic_batch` the first dimension of each may be any size. Weights are int8
    with a scale an output channel, activations unsigned bytes of 7 bits, in pairs of opset 18's QuantizeLinear and
    DequantizeLinear: onnxruntime gives the same results up to the rounding of fp32. With 7 bits its byte
    products do not saturate, as they may with 8 bits on processors without VNNI. Linear layers in int4 and other
    integers of up to 4 bits, in e2m1 (mxfp4, nvfp4) and in floats of 8 bits (e4m3fn, mxfp8) are codes with fp32 scales
    of their blocks; onnxruntime's CPU has no FLOAT4E2M1 yet. Other layers are exported in fp32. `options` go to
    `torch.onnx.export`.

    Raises InvalidInput for layers without a calibrated range; Unavailable if onnx or onnxscript is missing.
    """
    for name in ("onnx", "onnxscript"):
        try:
            importlib.import_module(name)
        except ImportError:
            raise Unavailable(f"export to ONNX needs {name}: pip install onnx onnxscript") from None
    target = files.check_target(Path(path))
    exported = _exportable(model)
    coded = {name: _coded(one) for name, one in model.named_modules() if isinstance(one, ServedLinear)}
    if dynamic_batch and "dynamic_shapes" not in options:
        options["dynamic_shapes"] = tuple({0: torch.export.Dim.DYNAMIC} for _ in arguments)
    with warnings.catch_warnings(), torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")  # of torch's exporter, about itself
        whole = Path(folder) / "model.onnx"
        program = torch.onnx.export(
            exported, arguments, dynamo=True, opset_version=OPSET, verbose=False, optimize=False, **options
        )
        assert program is not None
        program.save(str(whole), external_data=False)
        written = whole.read_bytes()
        if found := {name: one for name, one in coded.items() if one is not None}:
            written = _with_codes(written, found)
        with files.replacing(target) as file:
            file.write(written)


class _Coded(NamedTuple):
    """A weight [n, k] as codes of a type of ONNX, and its scales [n, groups] in fp32."""

    onnx_type: str
    codes: Tensor  # uint8, one a byte
    scales: Tensor
    group: int


_TYPES = {"e4m3fn": "FLOAT8E4M3FN", "e5m2": "FLOAT8E5M2"}
_SINCE = {"FLOAT4E2M1": 23}  # versions of the operators; of other types, which have blocks:
_BLOCKS_SINCE = 21


def _coded(module: ServedLinear) -> _Coded | None:
    """The weight of a layer in a type of ONNX; None for another format."""
    weight = module.weight
    if isinstance(weight, Nibble):
        held = weight.codes()
        whole = few_bits.levels_of(FORMATS["e2m1"])  # type: ignore[arg-type]
        assert whole is not None
        levels, codes = held.levels.tolist(), few_bits.codes_of(held)
        scales = few_bits.scales_of(held)[:, : -(-held.k // held.group)]  # the depth of panels is filled up
        if levels == whole[0]:
            return _Coded("FLOAT4E2M1", codes, scales / whole[1], held.group)
        if all(code - (code >> 3 << 4) == level for code, level in enumerate(levels)):
            return _Coded("INT4", codes, scales, held.group)
        return None
    rows = weight.rows() if isinstance(weight, Stored) else None
    if rows is None or rows.element is None or rows.element.name not in _TYPES:
        return None
    return _Coded(
        _TYPES[rows.element.name], rows.memory.view(torch.uint8), few_rows.scales_of(rows).float(), rows.group
    )


def _with_codes(written: bytes, coded: Mapping[str, _Coded]) -> bytes:
    """The file with codes and DequantizeLinear in the place of fp32 weights."""
    onnx: Any = importlib.import_module("onnx")
    converter: Any = importlib.import_module("onnx.version_converter")
    version = max(_SINCE.get(one.onnx_type, _BLOCKS_SINCE) for one in coded.values())
    model = converter.convert_version(onnx.load_from_string(written), version)
    model.ir_version = max(model.ir_version, 11 if version > _BLOCKS_SINCE else 10)
    graph, tensor = model.graph, onnx.helper.make_tensor
    weights = {one.name: one for one in graph.initializer}
    for name, one in coded.items():
        whole = f"{name}.weight" if name else "weight"
        graph.initializer.remove(weights[whole])
        codes = one.codes.flatten()
        if one.onnx_type in ("INT4", "FLOAT4E2M1"):
            codes = F.pad(codes, (0, codes.numel() % 2))
            codes = codes[::2] | codes[1::2] << 4
        kind, shape = getattr(onnx.TensorProto, one.onnx_type), tuple(one.codes.shape)
        scales = (one.scales if one.group else one.scales[:, 0]).contiguous().numpy()
        attributes = {"axis": 1, "block_size": one.group} if one.group else {"axis": 0}
        given = [f"{whole}.codes", f"{whole}.scales"]
        held = (kind, shape, codes.numpy()), (onnx.TensorProto.FLOAT, scales.shape, scales)
        for at, (kind, shape, numbers) in zip(given, held, strict=True):
            graph.initializer.append(tensor(at, kind, shape, numbers.tobytes(), raw=True))
        graph.node.insert(0, onnx.helper.make_node("DequantizeLinear", given, [whole], **attributes))
    onnx.checker.check_model(model)
    return model.SerializeToString()  # type: ignore[no-any-return]


def _exportable(model: nn.Module) -> nn.Module:
    """A copy whose served layers are operations of ONNX."""
    copied = copy.deepcopy(model).eval()
    found = False
    for name, module in list(copied.named_modules()):
        if isinstance(module, ServedAttention):
            module.__class__ = _Attention
        if not isinstance(module, Served):
            continue
        found = True
        copied = put(copied, name, _layer(name, module))
    if not found:
        raise InvalidInput("the model has no quantized layer: export the result of lowp.quantize_model")
    return copied


class _Attention(ServedAttention):
    """Attention whose products of bytes are operations of ONNX."""

    def attended(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return attended(
            query, key, value, mask, False, None, functools.partial(_product_of_bytes, check_bits(self.bits))
        )


def _product_of_bytes(highest: int, left: Tensor, right: Tensor) -> Tensor:
    """What `attention.by_kernels` returns: the same integers, whose sums fp64 holds exactly."""
    low, high = (
        one.double() for one in (left.amin((-2, -1), True).clamp(max=0), left.amax((-2, -1), True).clamp(min=0))
    )
    scale = _not_zero(((high - low) / highest).float())
    zero = (-low / scale.double()).round()
    numbers = (left / scale).round().double().clamp(-zero, highest - zero)
    scales = _not_zero((right.abs().amax(-1, True).double() / 127).float())
    codes = (right.double() / scales.double()).round().clamp(-127, 127)
    return (numbers @ codes.transpose(-1, -2)).float() * (scale * scales.transpose(-1, -2))


def _not_zero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _layer(name: str, module: Served) -> nn.Module:
    weight = module.weight
    if isinstance(module, ServedEmbedding):
        return _Embedding(module)
    assert isinstance(module, (ServedLinear, ServedConvolution))
    if not isinstance(weight, Int8):
        return _Layer(module, "weight", weight.values())
    if weight.dynamic:
        raise InvalidInput(
            f"layer {name or 'the model'} has no range for its input, which QuantizeLinear needs: give "
            "quantize_model calibration_data that reaches it"
        )
    return _QuantizedLayer(module, weight)


class _Layer(nn.Module):
    """A layer of another format than int8: the values of its weight, in fp32, in a buffer of this name."""

    def __init__(self, module: ServedLinear | ServedConvolution, name: str, values: Tensor) -> None:
        super().__init__()
        self.convolution = None
        if isinstance(module, ServedConvolution):
            self.convolution, values = copy.copy(module), module.dense(values)
            self.convolution._modules, self.convolution._buffers = {}, {}  # its geometry alone
        self.register_buffer(name, values.contiguous())
        self.register_buffer("bias", module._bias())

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is multiplied: an input, and the weight."""
        return x, self.get_buffer("weight")

    def forward(self, x: Tensor) -> Tensor:
        convolution, bias = self.convolution, self._buffers["bias"]
        if convolution is None:
            return F.linear(*self.operands(x), bias)
        result = convolution.geometry.convolved(*self.operands(convolution.geometry.image(x)), bias)
        return result[:, :, 0] if convolution.dimensions == 1 else result


class _QuantizedLayer(_Layer):
    """An int8 layer as QuantizeLinear and DequantizeLinear around a product of fp32."""

    def __init__(self, module: ServedLinear | ServedConvolution, weight: Int8) -> None:
        super().__init__(module, "codes", weight.codes())
        self.register_buffer("scales", weight.get_buffer("scales")[: weight.n].clone())
        self.register_buffer("zeros", torch.zeros(weight.n, dtype=torch.int8, device="cpu"))
        over = weight.range()
        assert not isinstance(over, int)  # `_layer` refuses dynamic ranges
        scale, zero, highest = over
        self.register_buffer("input_scale", torch.tensor(scale, dtype=torch.float32, device="cpu"))
        self.register_buffer("input_zero", torch.tensor(zero, dtype=torch.uint8, device="cpu"))
        # what the bytes hold, less a quarter of a step: QuantizeLinear itself goes to 255
        self.low, self.high = -(zero + 0.25) * scale, (highest - zero + 0.25) * scale

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return both as DequantizeLinear gives them."""
        symbolic: Any = torch.onnx.ops.symbolic
        bounded = x.clamp(self.low, self.high)
        given = (self.get_buffer("input_scale"), self.get_buffer("input_zero"))
        quantized = symbolic("QuantizeLinear", (bounded, *given), dtype=torch.uint8, shape=x.shape, version=OPSET)
        values = symbolic("DequantizeLinear", (quantized, *given), dtype=torch.float32, shape=x.shape, version=OPSET)
        codes, scales, zeros = (self.get_buffer(name) for name in ("codes", "scales", "zeros"))
        of_weight, shape = (codes, scales, zeros), codes.shape
        weight = symbolic("DequantizeLinear", of_weight, {"axis": 0}, dtype=torch.float32, shape=shape, version=OPSET)
        return values, weight


class _Embedding(nn.Module):
    """Rows of int8 and their scales, or of fp32."""

    def __init__(self, module: ServedEmbedding) -> None:
        super().__init__()
        weight = module.weight
        if isinstance(weight, Int8):
            codes, scales = weight.codes(), weight.get_buffer("scales")[: weight.n].clone()
        else:
            codes, scales = weight.values(), torch.ones(weight.n, dtype=torch.float32, device="cpu")
        self.register_buffer("codes", codes.contiguous())
        self.register_buffer("scales", scales)

    def forward(self, indices: Tensor) -> Tensor:
        """The rows asked for, in fp32."""
        return self.get_buffer("codes")[indices].float() * self.get_buffer("scales")[indices][..., None]
