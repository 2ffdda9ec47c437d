"""`python bench/gpu.py` on a CPU and at small size: what a GPU would run first must not fail on a slip of the pen."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

RECIPES = ("rossmann", "unet", "bert")
ROWS = ["fp32", "torch.amp fp16", "lowp fp16", "torch.amp bf16", "lowp bf16", "lowp fp8", "lowp flex16+5"]
FEW = ["fp32", "torch.amp fp16", "torch.amp bf16", "lowp bf16"]


@pytest.fixture
def parts(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(repository / "bench")
    import gpu_parts  # type: ignore[import-not-found]

    return gpu_parts  # type: ignore[no-any-return]


@pytest.fixture
def gpu(repository: Path, parts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the script as a module of its own, whose children are calls; the folder of tests for GPUs has its name."""
    specification = importlib.util.spec_from_file_location("bench_gpu", repository / "bench" / "gpu.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script puts its folder there
    monkeypatch.setitem(sys.modules, "bench_gpu", module)  # where its dataclass looks for itself
    specification.loader.exec_module(module)

    def inline(command: list[str], folder: Path, ends: float, found: Callable[..., None]) -> str | None:
        given = ["--report", str(folder / "report"), "--left", str(ends - module.STARTED), "--done", "[]"]
        module.main([*command[len(module.COMMAND) :], *given])
        for line in map(json.loads, (folder / "report").read_text().splitlines()):
            if "item" in line:
                found(line["item"], line["result"])
        return None

    monkeypatch.setattr(module, "supervise", inline)
    return module


def _ran(gpu: ModuleType, path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    code = gpu.main(["--device", "cpu", "--size", "tiny", "--out", str(path), *options])
    return code, json.loads(path.read_text())


def test_the_kernels_are_checked_and_timed(gpu: ModuleType, tmp_path: Path) -> None:
    code, document = _ran(gpu, tmp_path / "gpu.json", "--parts", "build,kernels,bandwidth")
    kernels, timed = document["parts"]["kernels"], document["parts"]["bandwidth"]
    assert code == 0 and not document["failures"] and document["is_gpu"] is False
    assert kernels["checked"] > 20 and not kernels["wrong"] and not kernels["errors"]
    assert document["goals"][0] == {
        "goal": "numbers of casts and products that differ from the definition's",
        **{"at_most": 0, "found": 0, "met": True},
    }
    assert timed["kernels"].keys() > {"fp16", "statistics", "mxfp8", "AdamW, split"} and not timed["errors"]
    for one in timed["kernels"].values():
        assert one["of_copy"] == pytest.approx(one["bytes"] / 8 * one["copy_seconds"] / one["seconds"])
    assert document["parts"]["build"]["first_call_seconds"].keys() == timed["kernels"].keys()
    assert "cpu" in document["machine"] and "machine" not in document["parts"]["build"]


def test_products_are_timed_beside_torchs_in_fp16(gpu: ModuleType, tmp_path: Path) -> None:
    code, document = _ran(gpu, tmp_path / "gpu.json", "--parts", "products")
    timed = document["parts"]["products"]["products"]
    assert code == 0 and not document["failures"] and len(timed) == 18
    for name, one in timed.items():
        rows, depth, columns = one["shape"]
        assert one["multiplications_per_second"] == pytest.approx(rows * depth * columns / one["seconds"])
        assert one["of_fp16"] == pytest.approx(one["seconds"] / one["fp16_seconds"]), name


def test_the_products_timed_are_products_of_their_operands(parts: ModuleType) -> None:
    import gpu_products  # type: ignore[import-not-found]

    held = gpu_products.operands(torch.device("cpu"), 32, 48, 16)
    expected, sizes = held.x @ held.w.t(), held.x.abs() @ held.w.abs().t()
    for name, call in gpu_products.PRODUCTS.items():
        unit = 2.0**-4 if name.startswith("fp8") else 2.0**-8  # to which an operand, or bf16's result, is rounded
        assert bool(((call(held).float() - expected).abs() <= 3 * unit * sizes).all()), name


def test_fp8_is_asked_of_devices_that_multiply_it(parts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_products

    cuda = torch.device("cuda")
    for has in (True, False):
        monkeypatch.setattr(gpu_products, "_has_fp8", lambda device, has=has: has)
        names = [name for name, _ in gpu_products.products(cuda, False).values()]
        checked = gpu_products.product_checks(cuda)
        assert ("fp8" in names) is has and ("fp8 product" in checked) is has and "int16, exact" in names


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton's interpreter")
@pytest.mark.parametrize(
    "name", ["check of gradients", "int16 product, exact", "int16 of a tensor", "predicted exponents"]
)
def test_what_is_checked_on_a_device_is_its_kernel(
    name: str, parts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lowp import kernels
    from lowp.kernels.triton import launch

    run = parts.Run(torch.device("cpu"), "tiny", 0.02, time.monotonic() + 60, tmp_path)
    launched, real = [], launch.interpret
    monkeypatch.setattr(launch, "interpret", lambda *given: launched.append(given) or real(*given))
    with kernels.use("triton"):
        assert parts.PARTS["kernels"].measure(run, name, 1)["wrong"] == 0
    assert launched


@pytest.mark.parametrize(
    "name",
    ["check of gradients", "fp8 product", "int16 product, in chains", "int16 of a tensor", "predicted exponents"],
)
def test_a_number_that_is_wrong_is_counted(
    name: str, parts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = parts._checks

    def wrong(run: Any) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
        check, turned = real(run)[name], []

        def first_wrong(y: torch.Tensor) -> torch.Tensor:
            found = check(y).clone()
            found.view(-1)[1] += 0 if turned else 1
            turned.append(True)
            return found

        return {name: first_wrong}

    monkeypatch.setattr(parts, "_checks", wrong)
    run = parts.Run(torch.device("cpu"), "tiny", 0.02, time.monotonic() + 60, tmp_path)
    assert parts.PARTS["kernels"].measure(run, name, 1)["wrong"] == 1


def test_steps_of_a_recipe_take_turns(gpu: ModuleType, parts: ModuleType, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(parts, "RECIPES", {"rossmann": parts.RECIPES["rossmann"]})
    monkeypatch.setattr(parts, "TAKING_TURNS", ("bf16", "int8"))
    code, document = _ran(gpu, tmp_path / "gpu.json", "--parts", "turns")
    found = document["parts"]["turns"]["recipes"]["rossmann"]
    assert code == 0 and not found["failed"] and list(found["rows"])[-2:] == ["lowp bf16", "lowp int8"]
    for row in found["rows"].values():
        assert row["whole"] > 0 and all(row[name] > 0 for name in ("forward", "backward", "step"))


# batches of two, of which a norm makes numbers much larger than those of the step before
@pytest.mark.filterwarnings("ignore:.*most numbers were cut off:UserWarning")
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_trained_in_every_precision(
    name: str, gpu: ModuleType, parts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name != "rossmann":
        monkeypatch.setattr(parts, "PRECISIONS", ("bf16",))
    real = parts.peaks_of  # a profile of each row would take seconds
    monkeypatch.setattr(
        parts, "peaks_of", lambda one, *rest: real(one, *rest) if one.label == "lowp fp16" else (1000, 2000)
    )
    code, document = _ran(gpu, tmp_path / "gpu.json", "--seconds", "0.03", "--parts", name)
    part = document["parts"][name]
    assert code == 0 and list(part["variants"]) == (ROWS if name == "rossmann" else FEW) and part["batch"] == 2
    for row in part["variants"].values():
        assert row["failure"] is None and row["step"]["median"] > 0 and row["allocated"]
        assert row["step"]["relative"] == row["step"]["median"] / part["variants"]["fp32"]["step"]["median"]
        if not row["step"]["only_one"]:  # on a machine at work
            assert row["wall"]["steps_per_epoch"] == parts.gpu_recipes.EXAMPLES[name] // 2
    goals = {row["goal"] for row in document["goals"]}
    assert f"{name} bf16: seconds a step, of torch.amp's" in goals and len(goals) == (6 if name == "rossmann" else 3)


def test_the_recipes_have_the_parameters_that_they_say(parts: ModuleType) -> None:
    for spelled in parts.RECIPES.values():
        recipe = parts.get(spelled)
        for size in recipe.sizes.values():
            with torch.device("meta"):
                model = recipe.make_model(size)
            assert sum(one.numel() for one in model.parameters()) == size.parameters
        assert recipe.size("full").batch == parts.get(recipe.name).size("full").batch


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_an_epoch_has_the_examples_of_the_recipe(name: str, parts: ModuleType) -> None:
    recipe = parts.get(name)
    assert len(recipe.load(recipe.size("full"), None).training) == parts.gpu_recipes.EXAMPLES[name]


class CompilationFailed(Exception):
    """As Triton's errors, of no kind that Python or torch has."""


@pytest.mark.parametrize("where", ["time_steps", "peaks_of"])
def test_a_row_that_ends_in_any_error_leaves_the_others(
    where: str, gpu: ModuleType, parts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(parts, where)

    def failing(first: Any, *rest: Any, **options: Any) -> Any:
        contender = first if where == "peaks_of" else first[0]
        assert isinstance(first, list) is (where != "peaks_of") and (where == "peaks_of" or len(first) == 1)
        if contender.label == "torch.amp bf16":
            raise CompilationFailed("no code for this device")
        return (10, 20) if where == "peaks_of" else real(first, *rest, **options)

    monkeypatch.setattr(parts, "PRECISIONS", ("bf16",))
    monkeypatch.setattr(parts, "peaks_of", lambda *given: (10, 20))
    monkeypatch.setattr(parts, where, failing)
    code, document = _ran(gpu, tmp_path / "gpu.json", "--seconds", "0.01", "--parts", "rossmann")
    variants = document["parts"]["rossmann"]["variants"]
    assert code == 1 and list(variants) == FEW and document["failures"].keys() == {"rossmann, torch.amp bf16"}
    failed = variants["torch.amp bf16"]
    assert failed["failure"].endswith("CompilationFailed: no code for this device") and failed["allocated"] is None
    assert (failed["step"]["median"] is None) is (where == "time_steps")  # what was found is kept
    assert variants["lowp bf16"]["allocated"] == 10 and variants["fp32"]["step"]["relative"] == 1
    assert {row["met"] for row in document["goals"] if "bf16: allocated" in row["goal"]} == {None}


def test_a_row_that_has_no_time_says_so(gpu: ModuleType, parts: ModuleType, tmp_path: Path) -> None:
    run = parts.Run(torch.device("cpu"), "tiny", 0.02, time.monotonic() - 1, tmp_path)
    row = parts.PARTS["rossmann"].measure(run, "lowp bf16", 3)
    assert row["failure"] == "no time was left for a step" and row["allocated"] is None


def test_data_are_made_once_for_all_processes_of_a_part(parts: ModuleType, tmp_path: Path) -> None:
    runs = [parts.Run(torch.device("cpu"), "tiny", 0.02, time.monotonic() + 60, tmp_path) for _ in range(2)]
    first = parts._data(runs[0], "rossmann")
    (tmp_path / "rossmann.pickle").touch()
    again = parts._data(runs[1], "rossmann")
    assert again is not first and parts._data(runs[0], "rossmann") is first
    for one, other in zip(first.training.tensors, again.training.tensors, strict=True):
        assert torch.equal(one, other)


def test_the_goals_are_those_of_torch_amp_and_more_for_bert(gpu: ModuleType) -> None:
    def row(seconds: float, size: int) -> dict[str, Any]:
        return {"step": {"median": seconds}, "allocated": size, "reserved": None}

    found: dict[str, Any] = {
        name: {"variants": {"torch.amp fp16": row(1.0, 100), "lowp fp16": row(0.95, 90)}} for name in ("unet", "bert")
    }
    found["kernels"] = {"checked": 3, "wrong": {"quantize e5m2": 2}, "errors": {}}
    goals = {each["goal"]: each for each in gpu.goals(found)}
    met = {goal: each["met"] for goal, each in goals.items()}
    assert met["numbers of casts and products that differ from the definition's"] is False
    assert met["unet fp16: seconds a step, of torch.amp's"] and met["unet fp16: allocated, of torch.amp's"]
    assert met["bert fp16: seconds a step, of torch.amp's"] is False  # 1.05 times as fast, and 1.10 is asked for
    assert met["bert fp16: allocated, of torch.amp's"] is False and met["bert fp16: reserved, of torch.amp's"] is None
    words = [gpu.in_words(each) for each in goals.values()]
    assert words[0] == "NOT MET      numbers of casts and products that differ from the definition's: 2, at most 0"
    assert "met          unet fp16: seconds a step, of torch.amp's: 0.95, at most 1" in words
    assert "not measured bert fp16: reserved, of torch.amp's, at most 0.85" in words


@pytest.mark.parametrize(
    ("part", "met"),
    [
        ({"checked": 0, "wrong": {}, "errors": {}}, None),
        ({"checked": 9, "wrong": {}, "errors": {"encode e5m2": "no code"}}, False),
        ({"checked": 9, "wrong": {}, "errors": {}}, True),
    ],
)
def test_casts_that_could_not_be_checked_are_no_goal_that_is_met(
    part: dict[str, Any], met: bool | None, gpu: ModuleType
) -> None:
    assert gpu.goals({"kernels": part})[0]["met"] is met


def test_a_kernel_that_does_not_run_is_told_and_the_others_are_timed(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lowp

    def fails(*given: Any) -> Any:
        raise CompilationFailed("no code for this device")

    monkeypatch.setattr(lowp, "statistics", fails)
    code, document = _ran(gpu, tmp_path / "gpu.json", "--parts", "build,kernels,bandwidth")
    assert code == 1 and document["failures"].keys() == {
        *("build, statistics", "kernels, statistics", "bandwidth, statistics")
    }
    for name in ("build", "kernels", "bandwidth"):
        assert document["parts"][name]["errors"] == {"statistics": "CompilationFailed: no code for this device"}
    assert document["parts"]["kernels"]["checked"] > 20 and document["goals"][0]["met"] is False
    assert "mxfp8" in document["parts"]["bandwidth"]["kernels"]


def test_what_is_timed_on_cuda_finds_the_device_at_work(parts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_kernels  # type: ignore[import-not-found]

    queue: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            queue.append("event")

        def synchronize(self) -> None:
            queue.append("wait")

        def elapsed_time(self, end: Event) -> float:
            return 2.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    found = gpu_kernels.seconds_of(torch.device("cuda"), lambda: queue.append("call"), lambda: queue.append("busy"))
    assert found == 0.002 and queue == ["busy"] * gpu_kernels._AHEAD + ["event", "call", "event", "wait"]


def test_without_a_device_the_call_ends_at_once_and_says_what_can_be_done(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert gpu.main(["--out", str(tmp_path / "gpu.json")]) == 1
    document = json.loads((tmp_path / "gpu.json").read_text())
    (failure,) = document["failures"].values()
    assert "torch sees no CUDA device here: --device cpu --size tiny" in failure
    assert list(document["parts"]) == ["build"] and "torch sees no CUDA device" in capsys.readouterr().out

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "--device cpu --size tiny" in capsys.readouterr().err


def test_what_every_process_may_end_with_is_told(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gpu.json"

    def cut_off(command: list[str], folder: Path, ends: float, found: Callable[..., None]) -> str | None:
        given = dict(zip(command[2::2], command[3::2], strict=True))
        assert given["--device"] == "cpu" and ends <= time.monotonic() + 60 * 8.5
        if "bert" in command:
            raise KeyboardInterrupt
        if "unet" in command:
            return "the process ended with code 1; it printed: ImportError"
        found("statistics", {"failure": None, "wrong": 0, "numbers": 4})
        assert json.loads(path.read_text())["parts"]["kernels"]["checked"] == 1  # written at once
        return None

    monkeypatch.setattr(gpu, "supervise", cut_off)
    with pytest.raises(KeyboardInterrupt):
        _ran(gpu, path, "--parts", "kernels,unet,bert")
    document = json.loads(path.read_text())
    assert document["failures"] == {"unet": "the process ended with code 1; it printed: ImportError"}
    assert list(document["parts"]) == ["kernels"] and document["goals"][0]["met"] is True
    assert "unet: 0.0 s the process ended with code 1" in capsys.readouterr().out


def test_no_part_begins_when_the_time_is_up(gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_children  # type: ignore[import-not-found]

    monkeypatch.setattr(gpu, "supervise", gpu_children.supervise)
    code, document = _ran(gpu, tmp_path / "gpu.json", "--minutes", "0")
    assert code == 1 and set(document["failures"].values()) == {"no time was left"}
    assert document["failures"].keys() == gpu.PARTS.keys()


@pytest.mark.slow
def test_all_of_it_runs_in_processes_of_its_own(repository: Path, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    command = [sys.executable, str(repository / "bench" / "gpu.py"), "--device", "cpu", "--size", "tiny"]
    done = subprocess.run([*command, "--out", str(path)], capture_output=True, text=True)
    document = json.loads(path.read_text())
    assert not document["failures"] and done.returncode == 0, done.stdout + done.stderr
    assert list(document["parts"]) == ["build", "kernels", "bandwidth", "products", "turns", *RECIPES]
    assert all(list(document["parts"][name]["variants"]) == ROWS for name in RECIPES)
