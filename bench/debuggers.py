"""Compare the reports of other tools and of lowp.profile on two faults in a small network.

  python bench/debuggers.py [--out bench/results/debuggers.json]

The faults: `overflow`, a linear layer `hot` under torch.autocast to fp16 with results beyond 65504; and `log`, a module
`gate` that takes the logarithm of zeros. Each tool runs in its own process according to its manual; tools that are not
installed or cannot be imported are listed with the reason. The question for each tool: does its report name the module,
the operation, and the source line of the first infinity or NaN? For tools that write statistics without a verdict this
script searches the first entry that is not finite, and the answer says so.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import json
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

FAULTS = {  # the module and the operation that an answer should name
    "overflow": (r"\bhot\b", r"\b(linear|matmul|addmm)\b"),
    "log": (r"\bgate\b", r"\blog\b"),
}
LONGEST = 400  # characters of an answer that are kept


def network(fault: str) -> Any:
    """Return the network with one of the faults."""
    import torch
    from torch import nn

    class Gate(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(x.relu()) if fault == "log" else x.relu()

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.hot, self.gate, self.head = nn.Linear(8, 8), nn.Linear(8, 8), Gate(), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.head(self.gate(self.hot(self.first(x))))
            return found

    torch.manual_seed(0)
    model = Network()
    if fault == "overflow":
        with torch.no_grad():
            model.hot.weight.mul_(1e5)
    return model


def step(model: Any, fault: str) -> None:
    """Run forward, loss and backward, as in a script."""
    import torch

    torch.manual_seed(1)
    x, y = torch.randn(5, 8), torch.randint(3, (5,))
    with torch.autocast("cpu", torch.float16, enabled=fault == "overflow"):
        output = model(x)
    torch.nn.functional.cross_entropy(output.float(), y).backward()


# -- the tools: each returns its report, and whether that was its own verdict -----------------------------------------
def with_lowp(fault: str) -> tuple[str, bool]:
    import torch

    import lowp

    model = network(fault)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with contextlib.redirect_stderr(io.StringIO()) as told, lowp.profile(model, optimizer):
        step(model, fault)
        optimizer.step()
    return told.getvalue(), True


def with_anomaly(fault: str) -> tuple[str, bool]:
    import torch

    with torch.autograd.detect_anomaly(check_nan=True):
        try:
            step(network(fault), fault)
        except RuntimeError as error:
            return str(error), True
    return "nothing", True


def with_debug_mode(fault: str) -> tuple[str, bool]:
    import torch
    from torch.utils._debug_mode import DebugMode

    model = network(fault)
    with (
        DebugMode(record_torchfunction=True, record_stack_trace=True) as mode,
        DebugMode.log_tensor_hashes(hash_fn=lambda x: int(bool(torch.isfinite(x).all()))),
    ):
        step(model, fault)
    lines = mode.debug_string().splitlines()
    bad = [line.strip() for line in lines if "'hash': 0}" in line]
    return f"{len(lines)} operations, of which the first with a hash of ours that says not finite: {bad[:1]}", False


def with_transformers(fault: str) -> tuple[str, bool]:
    from transformers.debug_utils import DebugUnderflowOverflow

    model = network(fault)
    debugger = DebugUnderflowOverflow(model)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        try:
            step(model, fault)
        except ValueError:
            frames = told.getvalue()
            return "... " + frames[frames.rindex("abs max") :][-LONGEST:] if "abs max" in frames else frames, True
    return f"nothing ({type(debugger).__name__})", True


def with_torchinstruments(fault: str) -> tuple[str, bool]:
    from torchinstruments import inject_observer, remove_observer

    model = network(fault)
    with tempfile.TemporaryDirectory() as folder:
        inject_observer(model, output_dir=folder)
        try:
            step(model, fault)
        finally:
            remove_observer(model)
        import polars

        history = polars.read_parquet(Path(folder) / "history.parquet")
    bad = [
        row["layer"] for row in history.iter_rows(named=True) if row["metric"] == "nonfinite_fraction" and row["value"]
    ]
    return f"layers with numbers that are not finite: {list(dict.fromkeys(bad))}", False


def with_torchao(fault: str) -> tuple[str, bool]:
    import torch
    from torchao.quantization.pt2e import extract_results_from_loggers, prepare_for_propagation_comparison

    model = network(fault).eval()
    exported = torch.export.export(model, (torch.randn(5, 8),))
    from torchao.quantization.pt2e import generate_numeric_debug_handle

    generate_numeric_debug_handle(exported)
    watched = prepare_for_propagation_comparison(exported.module())
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.float16, enabled=fault == "overflow"):
        watched(torch.randn(5, 8))
    found = extract_results_from_loggers(watched)
    bad = [
        f"{node} of {list(stack.values())[-1][0]}"
        for node, stack, tensors in found.values()
        if not all(torch.isfinite(one).all() for one in tensors if isinstance(one, torch.Tensor))
    ]
    return f"{len(found)} nodes kept, of which not finite: {bad[:2]}", False


def with_msprobe(fault: str) -> tuple[str, bool]:
    from msprobe.pytorch import PrecisionDebugger

    with tempfile.TemporaryDirectory() as folder:
        config = {"task": "statistics", "dump_path": f"{folder}/dump", "rank": [], "step": [], "level": "mix"}
        config["statistics"] = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        debugger = PrecisionDebugger(config_path=f"{folder}/config.json")
        model = network(fault)
        debugger.start(model=model)
        step(model, fault)
        debugger.stop()
        debugger.step()
        (dump,) = Path(folder).rglob("dump.json")
        data = json.loads(dump.read_text())["data"]
    bad = [name for name, entry in data.items() if _not_finite(entry.get("output", []))]
    return f"{len(data)} entries, of which the first with outputs that are not finite: {bad[:2]}", False


def _not_finite(entry: Any) -> bool:
    return any(word in json.dumps(entry) for word in ("NaN", "Infinity", '"nan"', '"inf"'))


def with_paddle(fault: str) -> tuple[str, bool]:
    import paddle
    from paddle.amp import debugging

    class Gate(paddle.nn.Layer):
        def forward(self, x: Any) -> Any:
            x = paddle.nn.functional.relu(x)
            return paddle.log(x) if fault == "log" else x

    paddle.seed(0)
    layers = [paddle.nn.Linear(8, 8), paddle.nn.Linear(8, 8), Gate(), paddle.nn.Linear(8, 3)]
    model = paddle.nn.Sequential(*zip(("first", "hot", "gate", "head"), layers, strict=True))
    if fault == "overflow":  # in fp32: its CPU backend has no fp16 product
        layers[1].weight.set_value(layers[1].weight * 1e38)
    mode = debugging.DebugMode.CHECK_NAN_INF_AND_ABORT
    debugging.enable_tensor_checker(debugging.TensorCheckerConfig(enable=True, debug_mode=mode))
    try:
        loss = paddle.nn.functional.cross_entropy(model(paddle.randn([5, 8]) * 10), paddle.randint(0, 3, [5]))
        loss.backward()
    except Exception as error:
        return str(error).strip()[-LONGEST:], True
    return "nothing", True


def with_transformer_engine(fault: str) -> tuple[str, bool]:
    import transformer_engine.pytorch  # noqa: F401

    return "its debug features watch its own layers, on a GPU", False


TOOLS: dict[str, tuple[str, Callable[[str], tuple[str, bool]]]] = {
    "lowp.profile": ("lowp", with_lowp),
    "torch.autograd.detect_anomaly": ("torch", with_anomaly),
    "torch DebugMode": ("torch", with_debug_mode),
    "transformers DebugUnderflowOverflow": ("transformers", with_transformers),
    "TorchInstruments": ("torchinstruments", with_torchinstruments),
    "torchao numeric debugger": ("torchao", with_torchao),
    "msprobe PrecisionDebugger": ("mindstudio-probe", with_msprobe),
    "paddle.amp.debugging": ("paddlepaddle", with_paddle),
    "transformer_engine debug features": ("transformer_engine", with_transformer_engine),
}


def run_here(tool: str, fault: str) -> dict[str, Any]:
    """Run one tool on one fault in this process."""
    told, judges = TOOLS[tool][1](fault)
    module, op = FAULTS[fault]
    names = {
        "module": bool(re.search(module, told)),
        "operation": bool(re.search(op, told, re.IGNORECASE)),
        "line": "debuggers.py:" in told or 'debuggers.py", line' in told,
    }
    return {"said": told.strip()[:LONGEST], "judges": judges, "names": names}


def run_apart(tool: str, fault: str) -> dict[str, Any]:
    """Run one tool on one fault in its own process."""
    command = [sys.executable, __file__, "--tool", tool, "--fault", fault]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    for line in reversed(found.stdout.splitlines()):
        if line.startswith("{"):
            result: dict[str, Any] = json.loads(line)
            return result
    reason = [line for line in found.stderr.splitlines() if line.strip()] or ["it ended without output"]
    return {"could_not_run": reason[-1][:LONGEST]}


def version_of(package: str) -> str:
    """Return the version of a package, or that it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        if package == "lowp":
            import lowp

            return lowp.__version__
        return "not installed"


def main() -> None:
    """Run every tool on every fault, print a line for each, and write the reports."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tool", choices=TOOLS, help=argparse.SUPPRESS)
    parser.add_argument("--fault", choices=FAULTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tool:
        print(json.dumps(run_here(arguments.tool, arguments.fault)))
        return
    results = {}
    for tool, (package, _) in TOOLS.items():
        version = version_of(package)
        missing = {"could_not_run": "not installed"}
        results[tool] = {"package": package, "version": version}
        for fault in FAULTS:
            found = missing if version == "not installed" else run_apart(tool, fault)
            results[tool][fault] = found
            print(f"{tool} {version}, {fault}: {found.get('names', '')} {found.get('said', found)}", flush=True)
    if arguments.out:
        machine = f"{platform.machine()}, CPU only, Python {platform.python_version()}"
        arguments.out.write_text(json.dumps({"machine": machine, "tools": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
