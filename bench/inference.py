"""Time a linear layer in int8 and int4 beside fp32 and the int8 of torch, torchao and onnxruntime.

Run: `python bench/inference.py [--quick] [--avx2] [--json FILE]`. `--avx2` limits torch's fp32 and lowp to AVX2; the
int8 of torch and onnxruntime still uses the best available instructions.

All candidates of a row run in each round, in a new order, so that other load of the machine affects them equally; the
best round counts. With one thread its processor time is measured, so that preemption does not count. Libraries that are
not installed (torchao, onnxruntime with onnx) are omitted, and the table says so. Every int8 candidate quantises its
activations dynamically, lowp also with calibrated ranges. Four-bit weights are timed at batch 1, where the time depends
on the bytes of the weight.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gemm import hold_to_avx2
from torch import Tensor, nn

import lowp
from lowp.kernels.choose.choices import choices
from lowp.recipes import results

SIZES = (512, 1024, 2048)
FAR = 10  # times the fastest
Call = Callable[[Tensor], Any]


def torch_int8(layer: nn.Linear) -> Call:
    """Return torch's dynamic int8."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization: Any = importlib.import_module("torch.ao.quantization")
        return quantization.quantize_dynamic(nn.Sequential(layer), {nn.Linear}, dtype=torch.qint8)  # type: ignore[no-any-return]


def torchao_int8(layer: nn.Linear) -> Call:
    """Return torchao's int8 weights and dynamic int8 activations."""
    quantization: Any = importlib.import_module("torchao.quantization")
    model = nn.Sequential(layer)
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    return model


def onnxruntime_int8(layer: nn.Linear) -> Call:
    """Return onnxruntime's dynamic quantisation."""
    onnx: Any = importlib.import_module("onnx")
    runtime: Any = importlib.import_module("onnxruntime")
    quantization: Any = importlib.import_module("onnxruntime.quantization")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    weight = onnx.numpy_helper.from_array(layer.weight.detach().t().contiguous().numpy(), "weight")
    inputs = [helper.make_tensor_value_info("x", kind, ["m", layer.in_features])]
    outputs = [helper.make_tensor_value_info("y", kind, ["m", layer.out_features])]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "weight"], ["y"])], "g", inputs, outputs, [weight])
    with tempfile.TemporaryDirectory() as folder:
        plain, small = Path(folder) / "plain.onnx", Path(folder) / "small.onnx"
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), plain)
        quantization.quantize_dynamic(plain, small, weight_type=quantization.QuantType.QInt8, per_channel=True)
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = runtime.InferenceSession(small.read_bytes(), options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {"x": x.numpy()})


def contenders(layer: nn.Linear, x: Tensor) -> dict[str, Call | str]:
    """Return every implementation of the layer, or the text of the error if it is not available."""
    makers: dict[str, Callable[[], Call]] = {
        "fp32": lambda: layer,
        "lowp int8, dynamic": lambda: lowp.quantize_model(layer, "int8"),
        "lowp int8, calibrated": lambda: lowp.quantize_model(layer, "int8", [x]),
        "lowp int8, 8-bit activations": lambda: lowp.quantize_model(layer, "int8", [x], bits=8),
        "torch int8": lambda: torch_int8(layer),
        "torchao int8": lambda: torchao_int8(_copy(layer)),
        "onnxruntime int8": lambda: onnxruntime_int8(layer),
    }
    found: dict[str, Call | str] = {}
    for name, make in makers.items():
        try:
            found[name] = make()
            found[name](x)  # type: ignore[operator]
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return found


def _copy(layer: nn.Linear) -> nn.Linear:
    other = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    other.load_state_dict(layer.state_dict())
    return other


def best(calls: dict[str, Call], x: Tensor, rounds: int) -> dict[str, float]:
    """Return the best time of several rounds in seconds, in which all take turns; very slow ones run once."""
    times = dict.fromkeys(calls, math.inf)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    order, shuffled = list(calls), random.Random(0)
    for _ in range(rounds):
        shuffled.shuffle(order)  # a candidate finds the caches as its predecessor left them
        for name in order:
            if math.isfinite(times[name]) and times[name] > FAR * min(times.values()):
                continue
            begun = clock()
            calls[name](x)
            times[name] = min(times[name], clock() - begun)
    return times


def rows(rounds: int, sizes: tuple[int, ...], wide: int) -> Iterator[dict[str, Any]]:
    """Yield a row per size: seconds of every contender; then of packed weights of size `wide` at batch 1."""
    for size in sizes:
        layer, x = nn.Linear(size, size, bias=False), torch.randn(size, size)
        ways = contenders(layer, x)
        calls = {name: way for name, way in ways.items() if not isinstance(way, str)}
        absent = {name: way for name, way in ways.items() if isinstance(way, str)}
        seconds = best(calls, x, rounds * SIZES[-1] // size)  # short calls run more often
        yield {"layer": f"{size}x{size}", "batch": size, "seconds": seconds, "absent": absent}
    layer, x = nn.Linear(wide, wide, bias=False), torch.randn(1, wide)
    formats = ("int8", "int4", "mxfp4", "nvfp4", "ternary", "binary", "bf16")
    calls = {"fp32": layer, **{f"lowp {name}": lowp.quantize_model(layer, name) for name in formats}}
    yield {"layer": f"{wide}x{wide}", "batch": 1, "seconds": best(calls, x, 5 * rounds), "absent": {}}


def show(row: dict[str, Any], threads: int) -> None:
    """Print a row of the table, fastest first."""
    print(f"\n{row['layer']}, batch {row['batch']}, {threads} thread(s)")
    base = row["seconds"]["fp32"]
    for name, seconds in sorted(row["seconds"].items(), key=lambda item: item[1]):
        print(f"  {name:30} {1e3 * seconds:9.3f} ms   {base / seconds:5.2f}x fp32")
    for name, why in row["absent"].items():
        print(f"  {name:30} not here: {why}", flush=True)


def main() -> None:
    """Print a table, and optionally write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="only the smallest size")
    parser.add_argument("--avx2", action="store_true", help="limit torch's libraries and lowp to AVX2")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.avx2:
        hold_to_avx2()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    table = []
    with torch.no_grad():
        for row in rows(arguments.rounds, *((SIZES[:1], SIZES[0]) if arguments.quick else (SIZES, 2 * SIZES[-1]))):
            show(row, arguments.threads)
            table.append(row)
    if arguments.json is not None:
        processor = choices()["C++ library"].partition(",")[0]
        document = {**results.header("bench-inference", "bench/inference.py"), "kernels": processor}
        document |= {"threads": arguments.threads, "rows": table}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
