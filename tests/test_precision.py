"""A precision as one value: prepare, autocast, backward, step, resume."""

from __future__ import annotations

import copy
import gc
import random
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from torch import nn

import lowp
from lowp import precision as precisions
from lowp.errors import InvalidInput, Misuse
from lowp.presets import PRESETS
from lowp.region.rulebook import traced

TRAINABLE = [*PRESETS, "e4m3fn", "e5m7"]


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 10, generator=generator)
    return x, (x @ torch.randn(10, 3, generator=generator)).argmax(1)


def _net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))


def _steps(count: int, precision: lowp.Precision, model: nn.Module, optimizer: Any) -> list[float]:
    x, y = _data()
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        with precision.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        precision.backward(loss)
        precision.step(optimizer)
        losses.append(float(loss.detach()))
    return losses


def _train(precision: lowp.Precision, steps: int = 60, lr: float = 0.1) -> tuple[list[float], nn.Module, Any]:
    model: nn.Module = _net()
    model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))
    losses = _steps(steps, precision, model, optimizer)
    return losses, model, optimizer


@pytest.mark.parametrize("name", TRAINABLE)
def test_every_precision_learns(name: str) -> None:
    losses, model, _ = _train(lowp.Precision(name), steps=20)
    assert losses[-1] < 0.5 * losses[0]
    assert all(value.dtype == torch.float32 for value in model.state_dict().values() if value.is_floating_point())


def test_fp32_is_plain_torch_bit_for_bit() -> None:
    losses, model, _ = _train(lowp.Precision("fp32"))
    plain = _net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    x, y = _data()
    for expected in losses:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(plain(x), y)
        loss.backward()
        optimizer.step()
        assert float(loss.detach()) == expected
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("name", ["fp16-storage", "bf16-storage", "fp16-naive"])
def test_storage_presets_keep_parameters_and_gradients_in_sixteen_bits(name: str) -> None:
    _, model, optimizer = _train(lowp.Precision(name), steps=1)
    dtype = torch.float16 if "fp16" in name else torch.bfloat16
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert isinstance(optimizer, lowp.MasterWeights) == (name != "fp16-naive")


def test_an_overflow_is_skipped_counted_and_named() -> None:
    precision = lowp.Precision("fp16", loss_scale="dynamic(65536)")
    model, optimizer = precision.prepare(_net(), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = _data()
    before = copy.deepcopy(model.state_dict())
    with precision.autocast():
        loss = nn.functional.cross_entropy(model(x), y) * 1e30
    precision.backward(loss)
    precision.step(optimizer)
    assert not precision.stepped
    assert precision.skipped_steps == 1
    assert precision.scale == 32768.0
    assert precision.nonfinite is not None
    assert any(name in str(precision.nonfinite) for name, _ in model.named_parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())  # BatchNorm's too


def test_several_optimizers_step_and_the_scale_moves_once() -> None:
    precision = lowp.Precision("fp16", loss_scale="dynamic(8)")
    first, second = _net(0), _net(1)
    models = [precision.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1)) for net in (first, second)]
    x, y = _data()
    with precision.autocast():
        losses = [nn.functional.cross_entropy(net(x), y) for net, _ in models]
    for loss in losses:
        precision.backward(loss)
    precision.step(*[optimizer for _, optimizer in models])
    assert precision.steps == 1
    assert precision.scale == 8.0


def test_optimizers_may_step_one_by_one() -> None:
    found = []
    for one_by_one in (False, True):
        precision = lowp.Precision("fp16", loss_scale="dynamic(8)")
        models = [precision.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1)) for net in (_net(0), _net(1))]
        x, y = _data()
        torch.manual_seed(0)
        for factor in (1.0, float("inf"), 1.0):
            with precision.autocast():
                loss = sum(nn.functional.cross_entropy(net(x), y) for net, _ in models)
            precision.backward(loss * factor)
            if one_by_one:
                for _, optimizer in models:
                    precision.step_one(optimizer)
                precision.end_step()
            else:
                precision.step(*[optimizer for _, optimizer in models])
            for _, optimizer in models:
                optimizer.zero_grad()
        weights = [weight for net, _ in models for weight in net.state_dict().values()]
        found.append((precision.steps, precision.skipped_steps, precision.scale, [one.tolist() for one in weights]))
    assert found[0] == found[1]
    assert found[0][:3] == (3, 1, 4.0)
    with pytest.raises(Misuse, match=r"step_one\(\) needs precision\.backward\(loss\) since the last step"):
        precision.step_one(models[0][1])


def test_the_first_step_alone_tells_that_nothing_was_cast() -> None:
    traced.cache_clear()  # what other tests have compiled under the same policy
    precision, net = lowp.Precision("bf16"), _net()
    net, optimizer = precision.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    x, y = _data()
    precision.backward(nn.functional.cross_entropy(net(x), y))
    with pytest.warns(UserWarning, match=r"nothing ran in bf16 in the first step, because precision\.autocast\(\) was"):
        precision.step(optimizer)
    precision.backward(nn.functional.cross_entropy(net(x), y))
    precision.step(optimizer)


def test_ranks_are_compared_once_and_their_masters_in_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(precisions.distributed, "has_other_ranks", lambda: True)
    monkeypatch.setattr(precisions.distributed, "require_same_precision", lambda name, lines: told.append(name))
    monkeypatch.setattr(precisions, "agree_on_masters", told.append)
    precision, net = lowp.Precision("bf16-storage"), _net()
    net, optimizer = precision.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert told == ["bf16-storage"]
    _steps(3, precision, net, optimizer)
    assert told == ["bf16-storage", (optimizer,)]


def test_a_precision_prints_its_choices() -> None:
    precision = lowp.Precision("fp16", loss_scale="dynamic(8)")
    assert repr(precision) == "Precision('fp16', loss_scale='dynamic(8)', masters='none')"
    assert re.fullmatch(r"fp16: .* \(loss scale dynamic\(8\), masters none\)", str(precision))
    assert str(precision.report()) == str(precision.autocast().report())
    assert precision.faults == []


def test_clipping_sees_unscaled_gradients() -> None:
    norms = {}
    for name in ("fp32", "fp16", "fp16-storage"):
        precision = lowp.Precision(name)
        net = _net()
        net.eval()
        model, optimizer = precision.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        x, y = _data()
        with precision.autocast():
            loss = nn.functional.cross_entropy(model(x), y)
        precision.backward(loss)
        precision.unscale_(optimizer)
        norms[name] = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        precision.step(optimizer)
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=1e-2)
    assert norms["fp16-storage"] == pytest.approx(norms["fp32"], rel=1e-2)


def test_lowps_own_optimizer_keeps_its_masters() -> None:
    precision = lowp.Precision("bf16-storage")
    net = _net()
    model, optimizer = precision.prepare(net, lowp.optim.AdamW(net.parameters(), lr=1e-2))
    assert isinstance(optimizer, lowp.optim.AdamW)
    assert model.state_dict()["0.weight"].dtype == torch.float32


@pytest.mark.parametrize("name", ["fp16", "bf16-storage"])
def test_a_resumed_run_equals_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    def build() -> tuple[lowp.Precision, nn.Module, Any]:
        precision = lowp.Precision(name)
        net = _net()
        return (precision, *precision.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2)))

    whole = build()
    expected = _steps(8, *whole)
    half = build()
    got = _steps(4, *half)
    lowp.save(tmp_path / "a.pt", precision=half[0], model=half[1], optimizer=half[2])
    fresh = build()
    torch.manual_seed(99)
    lowp.load(tmp_path / "a.pt", precision=fresh[0], model=fresh[1], optimizer=fresh[2])
    assert got + _steps(4, *fresh) == expected
    assert fresh[0].steps == 8


_TRAINER = """
import sys, torch, lowp
from pathlib import Path
from torch import nn
torch.set_num_threads(1)
path, name = Path(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 3))
precision = lowp.Precision(name)
model, optimizer = precision.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
parts = dict(precision=precision, model=model, optimizer=optimizer, scheduler=scheduler)
losses = lowp.load(path, **parts)["losses"] if path.exists() else []
print("started", len(losses), flush=True)
while len(losses) < 24:
    x = torch.randn(32, 10)
    with precision.autocast():
        loss = nn.functional.cross_entropy(model(x), (x[:, :3]).argmax(1))
    optimizer.zero_grad()
    precision.backward(loss)
    precision.step(optimizer)
    scheduler.step()
    losses.append(float(loss.detach()))
    lowp.save(path, **parts, extra={"losses": losses})
print([value.hex() for value in losses])
"""


@pytest.mark.parametrize("name", ["fp16", "bf16-storage"])
def test_a_run_killed_again_and_again_has_the_same_loss_curve(name: str, tmp_path: Path) -> None:
    def run(path: Path, patience: float | None) -> tuple[str, int]:
        with forked.start("-c", _TRAINER, str(path), name) as trainer:
            started = int(trainer.stdout.readline().split()[1])
            try:
                trainer.wait(patience)
            except subprocess.TimeoutExpired:
                trainer.kill()  # SIGKILL: nothing in the process can react
            return trainer.stdout.read(), started

    expected, _ = run(tmp_path / "whole.pt", None)
    generator = random.Random(1)
    output, kills, progress = "", 0, []
    while not output:
        output, started = run(tmp_path / "killed.pt", generator.uniform(0.02, 0.12) if kills < 4 else None)
        kills += not output
        progress.append(started)
    assert kills >= 1
    assert progress == sorted(progress)
    assert output == expected


def test_misuse_is_named() -> None:
    with pytest.raises(InvalidInput, match="unknown precision 'fp61'; did you mean"):
        lowp.Precision("fp61")
    with pytest.raises(InvalidInput, match="leaves the parameters in fp32"):
        lowp.Precision("fp16", masters="fp32")
    with pytest.raises(InvalidInput, match="give a finite number above zero"):
        lowp.Precision("fp16", loss_scale=0)
    with pytest.raises(Misuse, match="needs the optimizers to step"):
        lowp.Precision("fp16").step()
    with pytest.raises(Misuse, match=r"a closure by its name: precision\.step\(optimizer, closure=closure\)"):
        lowp.Precision("bf16").step(torch.optim.LBFGS(_net().parameters()), lambda: None)  # type: ignore[arg-type]
    with pytest.raises(Misuse, match="a closure computes its loss without the loss scale"):
        lowp.Precision("fp16").step(torch.optim.SGD(_net().parameters(), lr=1), closure=lambda: None)
    with pytest.raises(TypeError, match="prepare takes a torch module"):
        lowp.Precision("fp16").prepare([torch.ones(1)])  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="trained in bf16 and this run is in fp16"):
        lowp.Precision("fp16").load_state_dict(lowp.Precision("bf16").state_dict())


@pytest.mark.parametrize("loss", [1.0, None, [torch.ones(())]])
@pytest.mark.parametrize("name", ["fp32", "fp16"])
def test_a_loss_that_is_not_a_tensor_is_refused(name: str, loss: Any) -> None:
    with pytest.raises(InvalidInput, match=rf"not {type(loss).__name__}: .* not loss\.item\(\)"):
        lowp.Precision(name).backward(loss)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float16, "fp16"), (torch.bfloat16, "bf16"), (torch.float32, "fp32"), (torch.float8_e4m3fn, "e4m3fn")],
)
def test_a_floating_dtype_of_torch_is_the_precision_of_its_name(dtype: torch.dtype, name: str) -> None:
    assert lowp.Precision(dtype).preset == lowp.Precision(name).preset


def test_another_dtype_of_torch_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"unknown precision 'torch\.int8'"):
        lowp.Precision(torch.int8)
    with pytest.raises(InvalidInput, match=r"unknown format 'torch\.int8'"):
        lowp.quantize(torch.ones(2), torch.int8)


def test_a_floating_dtype_of_torch_is_the_format_of_its_name_wherever_one_is_taken() -> None:
    x = torch.randn(8)
    assert lowp.format(torch.bfloat16) == lowp.format("bf16")
    assert torch.equal(lowp.quantize(x, torch.float16), x.half().float())
    assert torch.equal(
        torch.compile(lowp.quantize, backend="eager", fullgraph=True)(x, torch.float16), x.half().float()
    )
    assert torch.equal(lowp.encode(x, torch.float8_e5m2), lowp.encode(x, "e5m2"))
    assert lowp.Rule.of("linear", input=torch.float16) == lowp.Rule.of("linear", input="fp16")
    assert str(lowp.quantize_model(torch.nn.Linear(2, 2), torch.float16).weight.cast) == "fp16"


def test_a_low_precision_accumulator_can_be_asked_for() -> None:
    precision = lowp.Precision("fp16", accumulate="fp16/16")
    assert str(precision.policy.rules[0].accumulate) == "fp16/16"
    losses, _, _ = _train(precision, steps=20)
    assert losses[-1] < losses[0]


def test_the_state_alone_brings_back_counters_and_random_numbers() -> None:
    precision, weight = lowp.Precision("fp16"), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        with precision.autocast():
            loss = (weight * factor).sum()
        precision.backward(loss)
        precision.step(optimizer)
    state, drawn = precision.state_dict(), torch.rand(3)
    resumed = lowp.Precision("fp16")
    resumed.load_state_dict(state)
    assert torch.equal(torch.rand(3), drawn)
    assert (resumed.steps, resumed.skipped_steps, resumed.scale) == (2, 1, 2.0**15)


@pytest.mark.parametrize("name", ["flex16+5", "bf16-storage"])
def test_a_group_that_the_users_own_optimizer_is_given_later_trains_as_the_others(name: str) -> None:
    def losses(adds: Callable[[torch.optim.Optimizer, torch.optim.Optimizer], torch.optim.Optimizer]) -> list[float]:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(6, 4)
        inner = torch.optim.SGD(model[2].parameters(), lr=1e-3)
        precision = lowp.Precision(name)
        model, optimizer = precision.prepare(model, inner)
        found = []
        for step in range(40):
            if step == 1:
                adds(inner, optimizer).add_param_group({"params": list(model[0].parameters())})
            optimizer.zero_grad()
            with precision.autocast():
                loss = model(x).float().square().mean()
            precision.backward(loss)
            precision.step(optimizer)
            found.append(loss.item())
        return found

    assert losses(lambda inner, _: inner) == losses(lambda _, optimizer: optimizer)


def test_a_precision_that_is_gone_refuses_no_step_of_the_optimizer_it_left() -> None:
    model = _net()
    precision = lowp.Precision("fp16")
    model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    precision.backward(model(_data()[0]).sum())
    with pytest.raises(Misuse, match="would apply gradients"):
        optimizer.step()
    del precision
    gc.collect()
    optimizer.step()


@pytest.mark.parametrize("loss_scale", ["dynamic", "dynamic(1024)", 64.0])
@pytest.mark.parametrize("name", ["e3m2", "e2m1", "e4m3fn:saturate", "fp16:saturate", "e4m3fn", "mxfp6"])
def test_a_dynamic_loss_scale_over_gradients_that_are_clipped_warns_once(
    name: str, loss_scale: str | float, recwarn: pytest.WarningsRecorder
) -> None:
    precision = lowp.Precision(name, loss_scale=loss_scale)
    model, _ = precision.prepare(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        with precision.autocast():
            loss = model(torch.ones(3, 4)).square().mean()
        precision.backward(loss)
        precision.step(optimizer)
    said = [str(one.message) for one in recwarn if "clipped" in str(one.message)]
    assert {one.filename for one in recwarn if "clipped" in str(one.message)} <= {__file__}
    is_clipped = name in ("e3m2", "e2m1") or "saturate" in name
    assert len(said) == (is_clipped and loss_scale != 64.0)
    assert all(f"gradients in {name} are clipped at" in one and "constant loss scale" in one for one in said)
