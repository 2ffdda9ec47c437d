"""An Accelerator in a precision of lowp: an unmodified loop trains as lowp's own, and resumes with the same bits."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lowp
from lowp.integrations.turns import Turns

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("accelerate"), reason="pip install accelerate")
PRECISIONS = ["fp32", "fp16", "bf16", "fp8", "e5m7", "bf16-storage", "fp16-storage", "dfp16", "flex16+5"]
Run = tuple[Any, nn.Module, list[float]]


@pytest.fixture(autouse=True)
def accelerate_begins_anew() -> Iterator[None]:
    """Drop the state that all Accelerators of a process share."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def data() -> TensorDataset:
    x = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].argmax(1))


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.LayerNorm(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(accelerator: Any, resume: Path | None = None, save: Path | None = None, epochs: int = 2) -> Run:
    """Train as a script for Accelerate does: gradients of two batches, clipped, and a schedule."""
    model, optimizer = parts()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    model, optimizer, schedule, loader = accelerator.prepare(
        model, optimizer, schedule, DataLoader(data(), batch_size=8)
    )
    if resume is not None:
        accelerator.load_state(str(resume))
    losses = []
    for epoch in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        if epoch == 0 and save is not None:
            accelerator.save_state(str(save))
    return accelerator, accelerator.unwrap_model(model), losses


def accelerator(precision: Any, **options: Any) -> Any:
    from lowp.integrations.accelerate import LowpAccelerator

    return LowpAccelerator(precision, cpu=True, gradient_accumulation_steps=2, **options)


def by_hand(name: str) -> list[float]:
    """Train as `train` does, with the lines of lowp's own."""
    model, optimizer = parts()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    precision = lowp.Precision(name)
    model, optimizer = precision.prepare(model, optimizer)
    losses: list[float] = []
    loader = DataLoader(data(), batch_size=8)
    for number, (x, y) in enumerate(itertools.chain(loader, loader)):
        with precision.autocast():
            output = model(x)
        loss = nn.functional.cross_entropy(output.float(), y)
        precision.backward(loss / 2)
        if number % 2:
            precision.unscale_(optimizer) if precision.scale != 1 else None
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            precision.step(optimizer)
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_loop_for_accelerate_trains_as_lowp_s_own_and_resumes_with_the_same_bits(name: str, tmp_path: Path) -> None:
    used, model, losses = train(accelerator(name), save=tmp_path / "state")
    assert losses == by_hand(name)
    assert used.lowp.steps == 8 and used.lowp.skipped_steps == 0
    again, resumed, later = train(accelerator(name), resume=tmp_path / "state", epochs=1)
    assert later == losses[8:] and same(model, resumed) and again.lowp.scale == used.lowp.scale


def test_fp32_is_accelerate_itself() -> None:
    from accelerate import Accelerator

    _, model, losses = train(Accelerator(cpu=True, gradient_accumulation_steps=2))
    _, other, others = train(accelerator("fp32"))
    assert losses == others and same(model, other)


def test_a_step_that_overflows_is_skipped_and_its_schedule_waits() -> None:
    used = accelerator(lowp.Precision("fp16", loss_scale="dynamic(1024)"))
    model, optimizer = parts()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, schedule = used.prepare(model, optimizer, schedule)
    before = [one.detach().clone() for one in model.parameters()]
    used.backward(model(torch.ones(2, 10)).sum() * 1e30)
    used.clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    assert used.optimizer_step_was_skipped and used.lowp.scale == 512 and used.lowp.skipped_steps == 1
    assert used.scaler.get_scale() == 512  # as of torch's, which Accelerate has there
    assert all(map(torch.equal, before, model.parameters())) and schedule.get_last_lr() == [1e-2]


def test_optimizers_that_share_a_loss_step_by_the_same_scale() -> None:
    used = accelerator(lowp.Precision("fp16", loss_scale="dynamic(1024)"))
    model, _ = parts()
    halves = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[4])]  # type: ignore[index]
    model, *halves = used.prepare(model, *halves)
    for factor in (1.0, 1e30, 1.0):
        used.backward(model(torch.ones(2, 10)).sum() * factor)
        for optimizer in halves:
            optimizer.step()
            optimizer.zero_grad()
    assert used.lowp.steps == 3 and used.lowp.skipped_steps == 1 and used.lowp.scale == 512
    used.backward(model(torch.ones(2, 10)).sum())
    halves[0].step()  # alone, so that the scale waits for the other one, or for the next loss
    assert used.lowp.steps == 3
    used.backward(model(torch.ones(2, 10)).sum())
    assert used.lowp.steps == 4


def test_a_prepared_model_returns_fp32_its_copies_are_their_own_and_it_can_be_unwrapped() -> None:
    from accelerate.utils import AutocastKwargs

    used = accelerator("bf16")
    model, _ = parts()
    own = model.forward
    prepared = used.prepare_model(model)
    x = torch.ones(2, 10)
    assert prepared(x).dtype == torch.float32
    with used.autocast():
        assert nn.functional.linear(x, x).dtype == torch.bfloat16
        with used.autocast(AutocastKwargs(enabled=False)):
            assert nn.functional.linear(x, x).dtype == torch.float32
    average = copy.deepcopy(prepared).eval()
    prepared.eval()
    with torch.no_grad():
        before = prepared(x)
        model[4].bias.add_(1.0)  # type: ignore[index, union-attr, operator]
    assert torch.equal(average(x), before) and not torch.equal(prepared(x), before)
    assert used.unwrap_model(prepared, keep_fp32_wrapper=False).forward == own


@pytest.mark.parametrize("on_each_node", [False, True])
@pytest.mark.parametrize("local", [False, True])
def test_one_process_of_all_or_of_each_node_writes_the_state_of_the_precision(
    local: bool, on_each_node: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.utils import ProjectConfiguration

    used = accelerator("fp16", project_config=ProjectConfiguration(save_on_each_node=on_each_node))
    used.prepare(*parts())
    monkeypatch.setattr(type(used), "is_main_process", False)  # as on the second node
    monkeypatch.setattr(type(used), "is_local_main_process", local)
    used.save_state(str(tmp_path))
    assert (tmp_path / "scaler.pt").exists() == (local and on_each_node) and used.scaler is not None


@pytest.mark.parametrize("call", ["save_state", "load_state"])
def test_steps_that_only_fill_the_state_of_an_optimizer_are_not_counted(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import Accelerator

    used = accelerator("fp16")
    model, optimizer = used.prepare(*parts())

    def on_zeros(self: Any, folder: str) -> None:  # as Accelerate does it under FSDP2
        for one in model.parameters():
            one.grad = torch.zeros_like(one)
        optimizer.step()

    monkeypatch.setattr(Accelerator, call, on_zeros)
    getattr(used, call)("folder")
    assert len(optimizer.state) == len(list(model.parameters())) and used.lowp.steps == 0
    used.backward(model(torch.ones(2, 10)).sum())
    optimizer.step()
    assert used.lowp.steps == 1


def test_precisions_beside_accelerate_s_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(lowp.InvalidInput, match=r"mixed_precision='bf16' comes beside the lowp precision: omit it in"):
        accelerator("fp16", mixed_precision="bf16")


def test_weights_in_16_bits_are_refused_before_a_step() -> None:
    model, _ = parts()
    with pytest.raises(lowp.InvalidInput, match=r"0\.weight is torch.bfloat16, and fp16 trains parameters as they are"):
        accelerator("fp16").prepare(model.bfloat16())


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(lowp.UnknownName, match="unknown precision 'fp17'; did you mean fp16"):
        accelerator("fp17")


def test_a_precision_can_be_registered_beside_an_accelerator_of_accelerate_s_own(tmp_path: Path) -> None:
    from accelerate import Accelerator

    plain, precision = Accelerator(cpu=True), lowp.Precision("fp16", loss_scale="dynamic(1024)")
    model, optimizer = precision.prepare(*parts())
    model, optimizer = plain.prepare(model, optimizer)
    plain.register_for_checkpointing(precision)
    scales = []
    for number in range(2):
        with precision.autocast():
            loss = model(torch.ones(2, 10)).sum() * 1e30
        precision.backward(loss)
        precision.step(optimizer.optimizer)
        scales.append(precision.scale)
        plain.save_state(str(tmp_path / f"{number}"))
    assert scales == [512, 256]
    plain.load_state(str(tmp_path / "0"))
    assert precision.scale == 512 and precision.skipped_steps == 1


@pytest.mark.parametrize("has_scale", [True, False])
def test_optimizers_that_step_one_at_a_time_share_the_end_of_a_step(has_scale: bool) -> None:
    done: list[tuple[str, Any]] = []

    def noted(name: str) -> Any:
        return lambda *given, **options: done.append((name, given[0] if given else None)) or name

    calls = ("backward", "unscale_", "step", "step_one", "end_step")
    scaler = SimpleNamespace(is_enabled=lambda: has_scale)
    turns = Turns(cast(lowp.Precision, SimpleNamespace(scaler=scaler, **{name: noted(name) for name in calls})))

    def after(call: Any, *given: Any, **options: Any) -> list[tuple[str, Any]]:
        done.clear()
        call(*given, **options)
        return [*done]

    first, second = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    both, ended = [first, second], [("end_step", None)]
    assert after(turns.backward, 1.0) == [("backward", 1.0)]
    unscaled = [after(turns.unscale_, one) for one in (first, first, second)]
    assert unscaled == ([[("unscale_", first)], [], [("unscale_", second)]] if has_scale else [[], [], []])
    assert after(turns.step, first, [first]) == [("step", first)]
    assert after(turns.step, first, both, closure=lambda: 1.0) == [("step", first)]
    if has_scale:  # the step of the first was its last
        assert [after(turns.unscale_, one) for one in both] == [[("unscale_", first)], []]
    else:
        assert after(turns.step, first, both) == [("step", first)] and after(turns.end) == []
        return
    assert after(turns.step, first, both) == [("step_one", first)]
    assert after(turns.step, second, both) == [("step_one", second), *ended]
    assert after(turns.step, second, both) == [("step_one", second)]
    assert after(turns.step, second, both) == [*ended, ("step_one", second)]
    assert after(turns.backward, 2.0) == [*ended, ("backward", 2.0)]
    assert after(turns.backward, 3.0) == [("backward", 3.0)] and after(turns.end) == []


def test_an_accelerator_that_exists_is_lent_a_precision_if_it_can_train_in_it() -> None:
    from accelerate import DistributedType

    from lowp.integrations.accelerate import LowpAccelerator, lend

    class Existing:
        mixed_precision = "no"

        def __init__(self, kind: DistributedType, **given: bool) -> None:
            self.distributed_type = kind
            self.__dict__.update(given)

    precision = lowp.Precision("bf16-storage")
    for one in (Existing(DistributedType.NO), Existing(DistributedType.FSDP, is_fsdp2=False)):
        assert lend(cast(Any, one), precision) is precision and type(one) is LowpAccelerator
        assert cast(Any, one).lowp is precision and cast(Any, one).scaler.turns.precision is precision
    second = Existing(DistributedType.FSDP, is_fsdp2=True)
    assert lend(cast(Any, second), "bf16").preset.name == "bf16" and type(second) is LowpAccelerator
    with pytest.raises(lowp.InvalidInput, match="bf16-storage stores parameters in bf16, and Accelerate makes the opt"):
        lend(cast(Any, Existing(DistributedType.FSDP, is_fsdp2=True)), precision)
    for kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        with pytest.raises(lowp.InvalidInput, match=f"{kind.value} scales the loss and steps by itself: use DDP or"):
            lend(cast(Any, Existing(kind)), "bf16")


def test_gradients_of_one_optimizer_of_several_or_of_all_are_unscaled_once_a_step() -> None:
    used = accelerator(lowp.Precision("fp16", loss_scale=1024))
    model, _ = parts()
    layers: list[Any] = [model[0], model[4]]  # type: ignore[index]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in layers]
    model, *halves = used.prepare(model, *optimizers)

    def sizes(*given: Any) -> list[bool]:
        """Return of which optimizers the gradients are as they are without the scale."""
        for one in halves:
            one.zero_grad()
        used.backward(model.eval()(torch.ones(2, 10)).sum())
        before = [layer.bias.grad.clone() for layer in layers]
        for _ in range(2):
            used.unscale_gradients(*given)
        found = [torch.equal(layer.bias.grad, one / 1024) for layer, one in zip(layers, before, strict=True)]
        for one in halves:
            one.step()
        return found

    assert sizes() == sizes(halves) == sizes(tuple(halves)) == sizes(None) == [True, True]
    assert sizes(halves[0]) == [True, False] and sizes([halves[1]]) == [False, True]
    assert used.lowp.steps == 6 and used.lowp.skipped_steps == 0


def test_what_is_prepared_is_prepared_once() -> None:
    from types import MethodType

    used, x = accelerator("bf16"), torch.ones(2, 10)
    model, optimizer = parts()
    prepared, own = used.prepare(model, optimizer)
    forward = model.forward
    assert used.prepare_model(prepared) is prepared and used.prepare(prepared) is prepared and model.forward is forward
    assert used.prepare_optimizer(own) is own or used.prepare_optimizer(own).optimizer is not None
    assert isinstance(forward, MethodType) and prepared(x).dtype is torch.float32
    plain = nn.Linear(10, 3)
    plain.forward = lambda x: nn.functional.linear(x, plain.weight)  # type: ignore[method-assign]
    used.prepare_model(plain)
    assert not isinstance(plain.forward, MethodType) and plain(x).dtype is torch.float32
    assert not torch.equal(plain(x), nn.functional.linear(x, plain.weight))  # rounded
    other = nn.Linear(10, 3)
    other._is_accelerate_prepared = True  # type: ignore[assignment]
    used._serve(other)
    assert "_original_forward" not in vars(other) and "forward" not in vars(other)


def test_the_region_of_an_accelerator_is_that_of_its_precision_unless_it_is_switched_off() -> None:
    from accelerate.utils import AutocastKwargs

    used, x = accelerator("bf16"), torch.ones(2, 2)
    for handler, dtype in (
        (None, torch.bfloat16),
        (AutocastKwargs(), torch.bfloat16),
        (AutocastKwargs(enabled=False), x.dtype),
    ):
        with used.autocast(handler):
            assert (x @ x).dtype is dtype


def test_what_accelerate_asks_of_a_scaler_is_answered_by_the_precision_s() -> None:
    used = accelerator(lowp.Precision("fp16", loss_scale=1024))
    scaler = used.scaler
    assert scaler.get_scale() == 1024 and scaler.is_enabled() and scaler.update() is None
    for name in ("__gone__", "turns"):
        with pytest.raises(AttributeError, match=name):
            type(scaler).__getattr__(scaler, name)
    with pytest.raises(AttributeError):
        _ = scaler.gone
    again = copy.copy(scaler)
    assert again.turns is scaler.turns and again._counts
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    halves = [torch.optim.SGD([one], lr=0.1) for one in weights]
    used.backward(weights[0] + weights[1])
    scaler.turns.step(halves[0], halves)  # the scale waits for the other
    assert used.lowp.steps == 0 and scaler.state_dict()["steps"] == used.lowp.steps == 1
    with scaler.uncounted():
        assert not scaler._counts
    assert scaler._counts


@pytest.mark.filterwarnings("ignore:nothing ran in fp16 in the first step")
def test_a_precision_for_optimizers_without_masters_has_parameters_in_fp32() -> None:
    from lowp.integrations.others import Other, made

    own, taken, weight = lowp.Precision("fp16"), list[int](), nn.Parameter(torch.ones(2))
    assert made(own, "Keras") is own and made("bf16", "Keras").preset.name == "bf16"
    for given in ("bf16-storage", lowp.Precision("flex16+5")):
        with pytest.raises(
            lowp.InvalidInput, match=r"stores parameters in .*, and optimizers of Keras know neither mast"
        ):
            made(given, "Keras")
    other = Other([weight], lambda: taken.append(1) or "result")
    own.backward(weight.sum())
    assert other.step() == "result" and own.step(other) == "result" and taken == [1, 1]
    own.backward(weight.sum() * torch.inf)
    own.step(other)
    assert taken == [1, 1] and own.skipped_steps == 1
