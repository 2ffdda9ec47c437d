"""Unmodified scripts, each in its own process, compared with their output without lowp.

Most processes start with torch imported (see forked.py); those that test how lowp is loaded are new interpreters.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import forked
import pytest
import torch

from lowp import casts, formats, presets
from lowp.launch.backward import largest_grad_scale

SCRIPTS = Path(__file__).parent / "scripts"
EAGER = ("cnn", "gan", "transformer", "reinforce", "vae", "siamese")
WITH_CHILDREN = ("ddp.py", "compiled.py")
PRECISIONS = ("fp16", "bf16", "dfp16", "flex16+5")
RUNNABLE = [name for name, preset in presets.PRESETS.items() if preset.masters.kind == "none" and name != "fp16-naive"]


def clean_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LOWP_")}
    paths = os.pathsep.join([forked.SOURCES, *filter(None, [kept.get("PYTHONPATH")])])
    return {**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def python(*arguments: str, cwd: Path, given: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run this Python with arguments and a clean environment."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**clean_environment(), **environment},
        input=given,
        capture_output=True,
        text=True,
        timeout=600,
    )


def numbers(text: str) -> list[float]:
    """Return the numbers in the last line of a script's output."""
    return [float(one) for one in re.findall(r"-?\d+\.\d+(?:e-?\d+)?", text.strip().splitlines()[-1])]


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return the output of a script without lowp."""

    @cache
    def run(name: str) -> str:
        run = python if name in WITH_CHILDREN else forked.run
        found = run(str(SCRIPTS / name), cwd=tmp_path_factory.mktemp("plain"))
        assert found.returncode == 0, found.stderr
        return found.stdout

    return run


_RUN = ("-m", "lowp", "run", "--precision")


def run_in(precision: str, name: str, cwd: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a script under lowp."""
    run = python if name in WITH_CHILDREN else forked.run
    return run(*_RUN, precision, *options, str(SCRIPTS / name), cwd=cwd)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("cnn.py", "fp16"),
        ("transformer.py", "dfp16"),
        pytest.param("language_model.py", "bf16", marks=pytest.mark.slow),
        pytest.param("compiled.py", "bf16", marks=pytest.mark.slow),
        pytest.param("ddp.py", "fp16", marks=pytest.mark.slow),
        *(pytest.param(f"{name}.py", precision, marks=pytest.mark.slow) for name in EAGER for precision in PRECISIONS),
    ],
)
def test_a_script_trains_as_in_fp32_and_prints_unscaled_numbers(
    name: str, precision: str, plain: Callable[[str], str], tmp_path: Path
) -> None:
    # ranks begin with one scale, so that none of them looks for its own
    options = ("--loss-scale", "dynamic(1024)") if (name, precision) == ("ddp.py", "fp16") else ()
    ran = run_in(precision, name, tmp_path, *options)
    assert ran.returncode == 0, ran.stderr
    expected = numbers(plain(name))
    # a few steps, in the first of which flex16+5 finds its exponents
    assert numbers(ran.stdout) == pytest.approx(expected, rel=0.25 if precision == "flex16+5" else 0.15, abs=0.03)
    assert ran.stdout != plain(name)  # it did compute in the precision
    said = [line for line in ran.stderr.splitlines() if line.startswith("lowp")]
    assert len(said) == 1, ran.stderr
    assert re.match(rf"lowp run: {re.escape(precision)}, \d+ optimizer steps, \d+ skipped, ", said[0])


def test_an_fp32_run_is_the_script_bit_for_bit(plain: Callable[[str], str], tmp_path: Path) -> None:
    ran = run_in("fp32", "cnn.py", tmp_path, "--report", "report.json")
    assert ran.stdout == plain("cnn.py")
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["summary"]["steps"], report["summary"]["skipped"]) == (16, 0)


def test_what_a_script_saves_is_fp32_and_opens_in_plain_torch(tmp_path: Path) -> None:
    assert run_in("fp16", "cnn.py", tmp_path).returncode == 0
    saved = torch.load(tmp_path / "cnn.pt", weights_only=True)
    assert {value.dtype for value in saved.values()} == {torch.float32, torch.int64}


@pytest.mark.parametrize(
    "precision", [pytest.param(one, marks=[pytest.mark.slow] * (one not in ("fp16", "flex16+5"))) for one in RUNNABLE]
)
def test_files_of_every_kind_open_without_lowp(precision: str, tmp_path: Path) -> None:
    wrote = run_in(precision, "files.py", tmp_path)
    assert wrote.returncode == 0, wrote.stderr
    for file in tmp_path.iterdir():
        assert b"lowp." not in file.read_bytes() or file.suffix == ".ts"  # whose comments name frames of the stack
    opened = forked.run(str(SCRIPTS / "files.py"), "open", cwd=tmp_path)
    assert opened.stdout == "opened 7\n", opened.stderr


@pytest.mark.parametrize("precision", ["fp16", "flex16+5"])
def test_updates_without_an_optimizer_are_plain_python_where_a_step_would_have_to_be_skipped(
    precision: str, plain: Callable[[str], str], tmp_path: Path
) -> None:
    ran = run_in(precision, "language_model.py", tmp_path)
    assert ran.stdout == plain("language_model.py")
    assert "lowp run: model Model runs in fp32: its parameters are in no optimizer of torch.optim, fastai" in ran.stderr
    assert "were rounded" not in ran.stderr
    refused = run_in(precision, "language_model.py", tmp_path, "--strict")
    assert refused.returncode == 2 and refused.stdout == ""


@pytest.mark.parametrize("precision", ["fp16", "fp8", "flex16+5"])
def test_losses_metrics_and_what_is_recorded_of_a_model_are_plain_torch(
    precision: str, plain: Callable[[str], str], tmp_path: Path
) -> None:
    ran = run_in(precision, "around.py", tmp_path)  # it asserts that they are
    assert ran.returncode == 0, ran.stderr
    assert numbers(ran.stdout) == pytest.approx(numbers(plain("around.py")), rel=0.05)
    late = [numbers(line)[0] for line in ran.stdout.splitlines() if line.startswith("late")]
    assert late[0] > 0  # a module that makes its parameters in its first call runs in the precision from then on


@pytest.mark.parametrize("precision", ["fp16", "dfp16"])
def test_a_script_that_trains_tensors_without_a_model_is_told_that_it_runs_in_fp32(
    precision: str, plain: Callable[[str], str], tmp_path: Path
) -> None:
    ran = run_in(precision, "tensors.py", tmp_path)
    assert ran.stdout == plain("tensors.py")
    assert "lowp run: what the script trains runs in fp32: it calls no module with parameters" in ran.stderr
    refused = run_in(precision, "tensors.py", tmp_path, "--strict")
    assert refused.returncode == 2 and refused.stdout == ""
    command = ("-m", "lowp", "run", "--precision", precision, str(SCRIPTS / "tensors.py"), "with a model")
    assert "what the script trains" not in forked.run(*command, cwd=tmp_path).stderr


def test_the_scale_moves_once_for_all_optimizers_of_a_pass(plain: Callable[[str], str], tmp_path: Path) -> None:
    options = ("--loss-scale", "dynamic(4194304)", "--report", "report.json")
    ran = run_in("fp16", "many_optimizers.py", tmp_path, *options)
    assert numbers(ran.stdout) == pytest.approx(numbers(plain("many_optimizers.py")), rel=0.1)
    summary = json.loads((tmp_path / "report.json").read_text())["summary"]
    steps, scales = zip(*summary["scales"], strict=True)
    assert summary["steps"] == 48 and summary["skipped"] == len(scales) - 1 >= 1
    assert scales == tuple(scales[0] / 2**skips for skips in range(len(scales)))
    assert all(step % 4 == 0 for step in steps)  # after the last of four optimizers
    assert summary["notes"] == []  # the model ran in fp32 only until it had optimizers


@pytest.mark.parametrize(
    ("precision", "options"),
    [("fp32", ()), ("fp16", ("--loss-scale", "dynamic(1073741824)")), ("bf16", ()), ("flex16+5", ())],
)
def test_optimizers_of_fastai_and_keras_step_as_those_of_torch(
    precision: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    ran = {
        kind: forked.run(
            *_RUN, precision, *options, "--report", f"{kind}.json", str(SCRIPTS / "others.py"), kind, cwd=tmp_path
        )
        for kind in ("torch", "fastai", "keras")
    }
    told = {re.sub(r", [\d.]+ s$", "", one.stderr.splitlines()[0]) for one in ran.values()}
    assert len(told) == len({one.stdout for one in ran.values()}) == 1, ran
    assert ("6 optimizer steps, 0 skipped" in told.pop()) == (precision != "fp16")
    calls = [json.loads((tmp_path / f"{kind}.json").read_text())["summary"]["calls"] for kind in ran]
    assert calls == [1 if precision == "fp32" else 6] * 3
    notes = [one.stderr.splitlines()[1:] for one in ran.values()]
    fp32 = [
        f"lowp run: the state of {name} stays in fp32: it is not torch.optim's"
        for name in ("Optimizer", "BaseOptimizer")
    ]
    assert notes == ([[], [fp32[0]], [fp32[1]]] if precision == "flex16+5" else [[], [], []])


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_copies_of_a_model_and_its_optimizer_train_as_the_original(
    precision: str, plain: Callable[[str], str], tmp_path: Path
) -> None:
    ran = run_in(precision, "copies.py", tmp_path)  # it asserts that its copies have the same bits
    assert ran.returncode == 0 and "runs in fp32" not in ran.stderr, ran.stderr
    assert numbers(ran.stdout) == pytest.approx(numbers(plain("copies.py")), rel=1e-2)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "e4m3fn"])
def test_models_that_a_script_converts_are_looked_at_again(
    precision: str, plain: Callable[[str], str], tmp_path: Path
) -> None:
    ran, expected = run_in(precision, "converted.py", tmp_path), plain("converted.py")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[:-1] == expected.splitlines()[:-1]
    assert (ran.stdout.splitlines()[-1], expected.splitlines()[-1]) == ("rounded: True", "rounded: False")


def test_a_run_tells_how_many_tensors_saturated_under_shared_exponents(tmp_path: Path) -> None:
    (tmp_path / "growing.py").write_text(
        "import torch\nmodel = torch.nn.Linear(4, 4)\noptimizer = torch.optim.SGD(model.parameters(), lr=1e-9)\n"
        "for step in range(3):\n    model(torch.ones(2, 4) * 1000.0**step).sum().backward()\n    optimizer.step()\n"
    )
    ran = forked.run("-m", "lowp", "run", "--precision", "flex16+5", "--report", "run.json", "growing.py", cwd=tmp_path)
    told = re.search(r"3 optimizer steps, 0 skipped, (\d+) of (\d+) tensors saturated, ", ran.stderr)
    assert told, ran.stderr
    summary = json.loads((tmp_path / "run.json").read_text())["summary"]
    assert [summary["saturated"], summary["writes"]] == [int(one) for one in told.groups()]
    assert 2 <= summary["saturated"] < summary["writes"]


@pytest.mark.parametrize("precision", ["fp16", "bf16", "flex16+5"])
def test_parameters_that_a_script_exchanges_are_unscaled_and_stepped_as_before(
    precision: str, plain: Callable[[str], str], tmp_path: Path
) -> None:
    ran, expected = run_in(precision, "exchanged.py", tmp_path), plain("exchanged.py")
    assert ran.returncode == 0, ran.stderr
    lines, expected_lines = ran.stdout.splitlines(), expected.splitlines()
    assert [re.sub(r"[\d.]+", "", one) for one in lines] == [re.sub(r"[\d.]+", "", one) for one in expected_lines]
    for line, other in zip(lines, expected_lines, strict=True):
        assert numbers(f"{line} ") == pytest.approx(numbers(f"{other} "), rel=0.05, abs=1e-3)
    assert "runs in fp32" not in ran.stderr


@pytest.mark.parametrize("precision", ["fp16", "bf16", "e4m3fn"])
def test_torch_func_within_a_step_that_has_not_ended(
    precision: str, plain: Callable[[str], str], tmp_path: Path
) -> None:
    ran = run_in(precision, "per_sample.py", tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert numbers(ran.stdout) == pytest.approx(numbers(plain("per_sample.py")), rel=0.05)


@pytest.mark.parametrize("precision", ["fp16", "e4m3fn", "e2m1"])
def test_gradients_near_1_fit_the_format_in_autograd_grad_and_torch_func(
    precision: str, plain: Callable[[str], str], tmp_path: Path
) -> None:
    ran = run_in(precision, "seeds.py", tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == plain("seeds.py")
    assert ("lowp run: gradients in e2m1 are clipped at 6 and never overflow" in ran.stderr) == (precision == "e2m1")


@pytest.mark.parametrize("options", [("fp32", "--loss-scale", "1024"), ("bf16",), ("flex16+5",)], ids=" ".join)
def test_torch_autograd_takes_iterables_and_edges_of_the_graph(
    options: tuple[str, ...], plain: Callable[[str], str], tmp_path: Path
) -> None:
    ran = run_in(options[0], "places.py", tmp_path, *options[1:])
    assert ran.returncode == 0, ran.stderr
    found, expected = ([numbers(line) for line in said.splitlines()] for said in (ran.stdout, plain("places.py")))
    assert len(found) == 12
    for norms, wanted in zip(found, expected, strict=True):
        assert norms == pytest.approx(wanted, rel=0 if options[0] == "fp32" else 0.02)


def test_gradients_that_a_script_asks_for_are_not_cut_off_at_the_exponents_of_its_training(
    plain: Callable[[str], str], tmp_path: Path
) -> None:
    ran = run_in("flex16+5", "jacobian.py", tmp_path)
    assert ran.returncode == 0, ran.stderr
    found, expected = ([numbers(line)[0] for line in said.splitlines()] for said in (ran.stdout, plain("jacobian.py")))
    assert len(found) == 9 and found == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("name", formats.FORMATS)
def test_the_scale_of_autograd_grad_leaves_room_in_every_format_of_gradients(name: str) -> None:
    scale = largest_grad_scale(presets.parse(name).policy)
    cast = casts.parse(name)
    if not isinstance(cast.format, formats.FloatFormat):
        assert scale == 1024
    else:
        fits = [power for power in range(11) if 2.0**power * 64 / 2 <= cast.format.maximum]
        assert scale == 2.0 ** max(fits, default=0)


@pytest.mark.parametrize(
    ("name", "scale"), [("fp16", 1024), ("e4m3fn", 8), ("e4m3fnuz", 4), ("e3m4", 1), ("fp8", 1024)]
)
def test_the_scale_of_autograd_grad_follows_the_maximum_of_the_format(name: str, scale: float) -> None:
    assert largest_grad_scale(presets.parse(name).policy) == scale


@pytest.mark.parametrize("precision", ["fp16", "flex16+5"])
def test_checkpointed_layers_are_computed_again_as_they_were(
    precision: str, plain: Callable[[str], str], tmp_path: Path
) -> None:
    ran = run_in(precision, "checkpointed.py", tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert numbers(ran.stdout) == pytest.approx(numbers(plain("checkpointed.py")), rel=1e-3)


@pytest.mark.parametrize(
    ("precision", "sentence"),
    [
        ("int8", "module Averaged runs in fp32: int8 rounds strided tensors, not one of layout torch.sparse_coo"),
        ("fp16", "module Loss runs in fp32: binary_cross_entropy inside a low-precision region is unsafe"),
    ],
)
def test_a_module_whose_code_the_precision_refuses_runs_in_fp32_and_is_named(
    precision: str, sentence: str, plain: Callable[[str], str], tmp_path: Path
) -> None:
    ran = run_in(precision, "refused.py", tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert [line for line in ran.stderr.splitlines() if "runs in fp32" in line] == [f"lowp run: {sentence}"]
    assert numbers(ran.stdout) == pytest.approx(numbers(plain("refused.py")), rel=0.05)


def test_threads_that_train_at_once_do_not_take_each_others_scale(plain: Callable[[str], str], tmp_path: Path) -> None:
    ran = run_in("fp16", "threads.py", tmp_path)
    assert ran.returncode == 0 and "Traceback" not in ran.stderr, ran.stderr
    assert numbers(ran.stdout) == pytest.approx(numbers(plain("threads.py")), rel=0.01)


def test_a_closure_optimizer_runs_in_fp32_and_says_so(plain: Callable[[str], str], tmp_path: Path) -> None:
    ran = run_in("bf16", "lbfgs.py", tmp_path)
    assert ran.stdout == plain("lbfgs.py")
    assert "lowp run: what LBFGS computes by its closure runs in fp32" in ran.stderr
    assert "it calls no module with parameters" not in ran.stderr
    command = ("-m", "lowp", "run", "--strict", str(SCRIPTS / "lbfgs.py"), "once")
    assert forked.run(*command, cwd=tmp_path).stderr.startswith("lowp run: bf16, 3 optimizer steps, 0 skipped, ")


def test_a_script_with_a_scaler_of_its_own_is_left_alone_unless_overridden(
    plain: Callable[[str], str], tmp_path: Path
) -> None:
    ran = run_in("fp16", "own_scaler.py", tmp_path)
    assert ran.stdout == plain("own_scaler.py")
    assert "lowp run: disabled, the script has a GradScaler of its own (--override replaces it)" in ran.stderr
    over = run_in("bf16", "own_scaler.py", tmp_path, "--override")
    assert "torch.float32 False" in over.stdout and "lowp run: bf16, 4 optimizer steps" in over.stderr


STARTED = """
import runpy, sys
runpy.run_path(sys.argv[1], run_name="__main__")
print("started in lowp:", "lowp.launch.session" in sys.modules, file=sys.stderr)
"""
LAUNCHER = f"""
import os, runpy, subprocess, sys
other = subprocess.Popen([sys.executable, "-c", {STARTED!r}, sys.argv[1]], env={{**os.environ, "RANK": "1"}})
os.environ["RANK"] = "0"
runpy.run_path(sys.argv[1], run_name="__main__")
sys.exit(other.wait())
"""


def test_the_environment_alone_reaches_processes_that_a_launcher_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    with socket.create_server(("127.0.0.1", 0)) as free:
        world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    # one rank is a new interpreter, which nothing but its environment tells of lowp
    command = ("-m", "lowp", "run", "--precision", "bf16", "launcher.py", str(SCRIPTS / "ddp.py"))
    ran = forked.run(*command, cwd=tmp_path, environment=clean_environment())
    ranks = [forked.start(str(SCRIPTS / "ddp.py"), environment={**os.environ, "RANK": str(rank)}) for rank in range(2)]
    with ranks[0], ranks[1]:
        plain = ranks[0].stdout.read()
    assert numbers(ran.stdout) == pytest.approx(numbers(plain), rel=0.05), ran.stderr
    assert ran.stdout != plain
    assert "lowp run: bf16, 5 optimizer steps, 0 skipped" in ran.stderr  # as the first rank says
    assert "started in lowp: True" in ran.stderr


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port")


@pytest.mark.slow
@pytest.mark.parametrize(("port", "factor"), [("29572", "1e-7"), ("29573", "1e2")])
def test_gradients_of_fsdp2_are_scaled_by_a_scale_at_which_the_first_of_them_fit(
    port: str, factor: str, tmp_path: Path
) -> None:
    script = (*TORCHRUN, port, str(SCRIPTS / "fsdp2.py"), factor)
    plain = python(*script, cwd=tmp_path)
    ran = python("-m", "lowp", "run", "--precision", "fp16", *script, cwd=tmp_path)
    assert numbers(ran.stdout) == pytest.approx(numbers(plain.stdout), rel=0.01), ran.stderr
    assert "lowp run: fp16, 20 optimizer steps, 0 skipped" in ran.stderr
    assert "runs in fp32" not in ran.stderr


HOOKS = """
import sys

import torch
from torch import nn

FACTOR = float(sys.argv[1])

torch.manual_seed(0)
first, second = nn.Linear(16, 32), nn.Linear(32, 4)
seen = []


class Model(nn.Module):
    def forward(self, x):
        h = first(x)
        h.retain_grad()
        self.h = h
        h.register_hook(lambda gradient: seen.append(gradient.abs().max().item()) or gradient)
        return second(h)


model = Model()
model.first, model.second = first, second
second.register_full_backward_hook(lambda module, inputs, outputs: inputs)
second.register_full_backward_pre_hook(lambda module, outputs: outputs)
older = []
first.register_backward_hook(lambda module, inputs, outputs: older.append(outputs[0].abs().max().item()))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
x = torch.randn(64, 16)
loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long()) * FACTOR
loss.backward(retain_graph=True)
loss.backward()  # all gradients but those that hooks see are the sum of both passes
of = (*seen[1:], *older[1:], *(one.grad.abs().max() for one in (model.h, first.weight, second.bias)))
print(*(f"{100 * number / FACTOR:.5f}" for number in of))
optimizer.step()
"""


@pytest.mark.parametrize("factor", ["1", "1e-7"])
def test_hooks_on_tensors_in_16_bits_see_and_give_unscaled_gradients(factor: str, tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text(HOOKS)
    plain = forked.run("hooks.py", factor, cwd=tmp_path)
    ran = forked.run("-m", "lowp", "run", "--precision", "fp16", "hooks.py", factor, cwd=tmp_path)
    expected, found = numbers(plain.stdout), numbers(ran.stdout)
    assert all(number > 0 for number in expected)
    if factor != "1":  # what a tensor retains has its dtype, fp16, in which so small a number is 0
        expected[2] = 0.0
    assert found == pytest.approx(expected, rel=0.01), ran.stderr


@pytest.mark.parametrize("options", [("fp32", "--loss-scale", "1024"), ("fp16",), ("bf16",)], ids=" ".join)
def test_what_a_hook_computes_is_the_scripts(
    options: tuple[str, ...], plain: Callable[[str], str], tmp_path: Path
) -> None:
    ran = run_in(options[0], "gradcache.py", tmp_path, *options[1:])  # it asserts that modules give the same as before
    assert ran.returncode == 0, ran.stderr
    found, expected = ([numbers(line) for line in said.splitlines()] for said in (ran.stdout, plain("gradcache.py")))
    assert len(found) == 21
    for shown, wanted in zip(found, expected, strict=True):
        assert shown == pytest.approx(wanted, rel=0 if options[0] == "fp32" else 0.02)


LEAVES = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
leaf = torch.ones(3, requires_grad=True)
for one in (model.weight, leaf):
    one.register_hook(lambda gradient: print(*(f"{number:.3f}" for number in gradient.flatten())))
    one.register_hook(lambda gradient: gradient.clamp(max=2.0))
    one.register_hook(lambda gradient: gradient + 1.0)
(model(torch.ones(8, 4)).sum() + 5.0 * leaf.sum()).backward()
print(*(f"{number:.3f}" for one in (model.weight, leaf) for number in one.grad.flatten()))
"""


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_hooks_on_leaves_see_and_give_unscaled_gradients(precision: str, tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    plain = forked.run("leaves.py", cwd=tmp_path)
    assert numbers(plain.stdout) == [3.0] * 7
    assert forked.run("-m", "lowp", "run", "--precision", precision, "leaves.py", cwd=tmp_path).stdout == plain.stdout


@pytest.mark.slow
def test_so_does_torchs_own(plain: Callable[[str], str], tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29571")
    ran = python("-m", "lowp", "run", "--precision", "bf16", *launcher, str(SCRIPTS / "ddp.py"), cwd=tmp_path)
    assert numbers(ran.stdout) == pytest.approx(numbers(plain("ddp.py")), rel=0.05), ran.stderr
    assert "lowp run: bf16, 5 optimizer steps, 0 skipped" in ran.stderr


def run_text(text: str, precision: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text)
    return forked.run("-m", "lowp", "run", "--precision", precision, "script.py", cwd=folder)


PASSES = """
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for factors in ((1.0, 1.0), (1e6, 1.0), (1.0, 1e6), (1.0, 1.0)):
    before = model.weight.detach().clone()
    optimizer.zero_grad()
    for factor in factors:
        (model(torch.ones(2, 4)).sum() * factor).backward()
    optimizer.step()
    print(torch.equal(model.weight, before), model.weight.isfinite().all().item())
"""


@pytest.mark.parametrize("between", ["", "for one in model.parameters(): one.grad.nan_to_num_(0.0, 1.0, -1.0)"])
def test_a_step_is_skipped_if_any_of_its_passes_overflowed(between: str, tmp_path: Path) -> None:
    """Even if the script takes infinities out of its gradients, which has nothing to do in fp32."""
    ran = run_text(PASSES.replace("    optimizer.step()", f"    {between}\n    optimizer.step()"), "fp16", tmp_path)
    assert ran.stdout.splitlines() == ["False True", "True True", "True True", "False True"], ran.stderr
    assert "lowp run: fp16, 4 optimizer steps, 2 skipped, loss scale " in ran.stderr


def test_a_schedule_after_a_first_step_that_is_skipped_warns_of_nothing(tmp_path: Path) -> None:
    schedule = "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 9)\nfor factors in ("
    text = PASSES.replace("for factors in ((1.0, 1.0), ", schedule) + "    schedule.step()\n"
    ran = run_text(text, "fp16", tmp_path)
    assert ran.stdout.splitlines() == ["True True", "True True", "False True"] and "lr_scheduler" not in ran.stderr


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_model_that_is_not_in_fp32_is_left_alone_and_that_alone_is_told(dtype: str, tmp_path: Path) -> None:
    text = f"import torch\ntorch.set_default_dtype(torch.{dtype})\n{PASSES}"
    ran = run_text(text, "fp16", tmp_path)
    assert [line.split()[1] for line in ran.stdout.splitlines()] == ["True"] * 4, ran.stderr
    run, *notes = ran.stderr.splitlines()
    assert run.startswith("lowp run: fp16, 4 optimizer steps, 0 skipped")
    own = f"the parameters of Linear are {dtype} by the script's own choice"
    assert notes == [f"lowp run: {own}: it is not changed"]


SHARDED = """
import torch
from torch.distributed import HashStore, destroy_process_group, init_device_mesh, init_process_group
from torch.distributed.fsdp import fully_shard

init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(3):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f}")
destroy_process_group()
"""


def test_shards_of_one_rank_are_the_parameters_that_an_optimizer_steps(tmp_path: Path) -> None:
    ran = run_text(SHARDED, "fp16", tmp_path)
    plain = forked.run("script.py", cwd=tmp_path)
    assert numbers(ran.stdout.replace("\n", " ")) == pytest.approx(numbers(plain.stdout.replace("\n", " ")), rel=0.02)
    assert ran.stdout != plain.stdout
    (told,) = ran.stderr.splitlines()
    assert told.startswith("lowp run: fp16, 3 optimizer steps, 0 skipped, loss scale ")


MODULE_HOOKS = """
import torch

class Two(torch.nn.Module):
    def forward(self, one, other):
        return 2.0 * one, 3.0 * other

torch.manual_seed(0)
model, two = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)), Two()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model[0].register_full_backward_pre_hook(lambda module, given: tuple(2.0 * one for one in given))
model[1].register_full_backward_hook(lambda module, gone, given: (gone[0] + 1.0,))
model[2].register_full_backward_pre_hook(lambda module, given: (0.5 * given[0],))
two.register_full_backward_hook(lambda module, gone, given: (7.0 * gone[0], None))
for _ in range(2):
    optimizer.zero_grad()
    leaf = torch.ones(2, 1, requires_grad=True)
    sum(one.sum() for one in two(model(torch.ones(2, 4)), leaf)).backward()
    optimizer.step()
    print(*(f"{one.grad.norm().item():.6f}" for one in model.parameters()), leaf.grad)
"""


@pytest.mark.parametrize("options", [("fp32", "--loss-scale", "1024"), ("fp16",)], ids=" ".join)
def test_what_hooks_of_modules_give_takes_the_place_of_unscaled_gradients(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(MODULE_HOOKS)
    ran = forked.run("-m", "lowp", "run", "--precision", *options, "script.py", cwd=tmp_path)
    lines = forked.run("script.py", cwd=tmp_path).stdout.splitlines()
    assert len(lines) == 2 and all(line.endswith(" None") for line in lines)
    for line, wanted in zip(ran.stdout.splitlines(), lines, strict=True):
        assert numbers(line) == pytest.approx(numbers(wanted), rel=0 if options[0] == "fp32" else 0.01), ran.stderr
        assert line.endswith(" None")
