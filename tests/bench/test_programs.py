"""Every program of bench/ runs to its end in its smallest form."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path

import forked
import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
SMALLEST = {  # by program, the options of its smallest form, and what it then prints
    "call": ("--rounds 1 --calls 5", "digits, flex16"),
    "convert": ("--gibibytes 0.001 --tensor 1 --shards 1 --formats bf16", "bf16 +peak"),
    "debuggers": ("--tool lowp.profile --fault log", '"operation": true'),
    "exactness": ("--keep", "lowp: 0 wrong"),
    "exchange": ("--model", "MODEL"),
    "flex": ("--width 16 --batch 4 --layers 1 --rounds 2", "flex16.5 .* of fp32"),
    "gemm": ("--quick", "chained weight gradient"),
    "gpu_static": ("--chips A100 --kernels ^quantize.fp16", "element-wise +A100 +1 of 1"),
    "inference": ("--quick --rounds 1", "lowp nvfp4 .*x fp32"),
    "int16_memory": ("--only 'chained matrix'", "chained matrix product +4"),
    "kernels": ("--quick --elements 1000 --threads 1", "lowp statistics .* of copy_"),
    "memory": ("--network mlp --way fp32", '"saved"'),
    "monitoring": ("quiet --recipes digits --precisions fp32 --seconds 0.1", "0 alarms in 1 trainings"),
    "optimizers": ("--loss 1 --recipe gpt", "gpt +torch.optim.AdamW"),
    "profiling": ("digits --steps 5 --pairs 1", '"outside %"'),
    "record": ("--list", "kernels.py .*kernels.json"),
    "scale_rules": ("", "mxfp4 +even +float32"),
    "scripts": ("--rounds 1 --steps 2 --batch 2", "ratio of the medians"),
    "serving": ("--quick", "lowp int4 .*tokens/s"),
    "step": ("--rounds 1 --torch-rounds 1 --formats bf16", "transformer +bf16"),
}
NEEDS = {"convert": "safetensors", "scale_rules": "torchao", "gpu_static": "triton"}


def test_every_program_has_a_smallest_form() -> None:
    programs = {one.stem for one in BENCH.glob("*.py") if '__name__ == "__main__"' in one.read_text()}
    elsewhere = {
        "gpu": "test_gpu.py",
        "tables": "../test_docs.py",
        "figures": "../test_docs.py",
        "runs": "test_runs.py",
    }
    assert programs - set(elsewhere) == set(SMALLEST)
    assert all((Path(__file__).parent / test).exists() for test in elsewhere.values())


@pytest.mark.parametrize("name", SMALLEST)
def test_a_program_runs_to_its_end_in_its_smallest_form(name: str, tmp_path: Path) -> None:
    if (needed := NEEDS.get(name)) and importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}")
    options, printed = SMALLEST[name]
    done = forked.run(str(BENCH / f"{name}.py"), *shlex.split(options), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(printed, done.stdout), done.stdout


def test_gradients_in_few_bits_are_compared_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    import exchange  # type: ignore[import-not-found]

    forked.ranks(exchange.work, (2, str(tmp_path), 4, ("digits",)), 2)
    found = json.loads((tmp_path / "2.json").read_text())["digits"]
    shares = {"fp32": 1.0, "bf16": 0.5, "mxfp8": 0.26, "int8:stochastic": 0.26}
    assert {way: found[way]["share"] for way in shares} == pytest.approx(shares, abs=0.01)
    assert all(row["loss"] == pytest.approx(found["fp32"]["loss"], rel=0.01) for row in found.values())
    assert found["mxfp8"]["loss"] != found["mxfp8, fed back"]["loss"]


def test_an_extra_installs_what_inference_is_measured_beside(repository: Path) -> None:
    imported = re.findall(r'import_module\("(\w+)', (BENCH / "inference.py").read_text())
    extra = re.search(r"^bench = \[(.*)\]$", (repository / "pyproject.toml").read_text(), re.MULTILINE)
    assert extra is not None
    assert set(imported) - {"torch"} == {re.match(r"\w+", one)[0] for one in re.findall('"(.*?)"', extra[1])}
