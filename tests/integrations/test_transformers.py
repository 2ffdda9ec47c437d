"""The Trainer of transformers in a precision of lowp: small BERT and GPT models, their checkpoints and logs."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import lowp
from lowp import recipes
from lowp.recipes.recipe import Size

ARE_THERE = all(map(importlib.util.find_spec, ("transformers", "accelerate")))
pytestmark = pytest.mark.skipif(not ARE_THERE, reason="pip install 'lowp[integrations]'")
PRECISIONS = ["fp32", "fp16", "bf16", "fp8", "bf16-storage", "fp16-storage", "dfp16", "flex16+5"]
SAMPLE = [("bert", "fp16"), ("gpt", "flex16+5"), ("gpt", "bf16-storage")]
# the recipes' own networks and data
SIZES = {
    "bert": Size(1, 4, 1e-3, 0, {"layers": 1, "width": 16, "heads": 2, "length": 24, "drawn": 50}),
    "gpt": Size(1, 4, 1e-3, 0, {"layers": 1, "heads": 2, "width": 32, "length": 16, "dropout": 0.1, "bytes": 4000}),
}


@pytest.fixture(autouse=True)
def accelerate_begins_anew() -> Iterator[None]:
    """Drop the state that all Trainers of a process share."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def network(kind: str) -> Any:
    from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, set_seed

    set_seed(0)
    if kind == "gpt":
        return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=64, num_labels=2, **sizes))


def texts(kind: str) -> list[dict[str, Any]]:
    pieces = torch.randint(1, 60, (48, 12), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": one, "labels": one if kind == "gpt" else int(one[0] > 30)} for one in pieces]


def trainer(kind: str, folder: Path, steps: int = 4, cls: Any = None, model: Any = None, **options: Any) -> Any:
    """Return a Trainer as tutorials make it; `options` are those of TrainingArguments and of the Trainer."""
    from transformers import TrainingArguments

    from lowp.integrations.transformers import LowpTrainer

    own = {name: options.pop(name) for name in ("precision", "callbacks") if name in options}
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        save_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        remove_unused_columns=False,
        disable_tqdm=True,
        **options,
    )
    data = model.data(32) if isinstance(model, OfRecipe) else texts(kind)
    return (cls or LowpTrainer)(model or network(kind), arguments, train_dataset=data, eval_dataset=data[:8], **own)


class OfRecipe(nn.Module):
    """A recipe's network as the Trainer takes one: called with the columns of a batch, it returns its loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recipe = recipes.get(kind)
        self.network = self.recipe.make_model(SIZES[kind])

    def forward(self, return_loss: bool = True, **batch: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the recipe's loss; `return_loss` tells the Trainer that a batch needs no column of labels."""
        return {"loss": self.recipe.loss(self.network, batch if "pieces" in batch else tuple(batch.values()))}

    def data(self, count: int) -> list[dict[str, torch.Tensor]]:
        """Return the first of the recipe's examples, with a column for each of their tensors."""
        batch = self.recipe.load(SIZES[self.recipe.name], None).training.batch(torch.arange(count))
        columns = batch if isinstance(batch, dict) else dict(zip(("text", "following"), batch, strict=True))
        return [{name: column[place] for name, column in columns.items()} for place in range(count)]


def numbers(one: Any) -> list[torch.Tensor]:
    return list(one.model.state_dict().values())


def resumes(kind: str, name: str, folder: Path, make: Callable[[str], Any] = network, bound: float = 4.2) -> None:
    whole, later = folder / "whole", folder / "later"
    first = trainer(kind, whole, model=make(kind), precision=name)
    first.train()
    assert first.lowp.steps == 4 and first.evaluate()["eval_loss"] < bound
    shutil.copytree(whole / "checkpoint-2", later / "checkpoint-2")
    second = trainer(kind, later, model=make(kind), precision=name)
    second.train(resume_from_checkpoint=True)
    losses = [[row.get("loss") for row in one.state.log_history] for one in (first, second)]
    assert losses[0][:4] == losses[1][:4] and second.lowp.scale == first.lowp.scale
    assert all(map(torch.equal, numbers(first), numbers(second)))


@pytest.mark.parametrize(("kind", "name"), SAMPLE)
def test_a_run_resumes_with_the_same_bits(kind: str, name: str, tmp_path: Path) -> None:
    resumes(kind, name, tmp_path)


@pytest.mark.parametrize("name", ["fp16", "flex16+5"])
@pytest.mark.parametrize("kind", ["bert", "gpt"])
def test_the_recipes_bert_and_gpt_are_trained_and_resume_with_the_same_bits(
    kind: str, name: str, tmp_path: Path
) -> None:
    resumes(kind, name, tmp_path, OfRecipe, {"bert": 2 * math.log(24), "gpt": math.log(256)}[kind])  # as by chance


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "gpt"])
@pytest.mark.parametrize("name", PRECISIONS)
def test_a_run_in_any_precision_resumes_with_the_same_bits(kind: str, name: str, tmp_path: Path) -> None:
    resumes(kind, name, tmp_path)


def test_fp32_is_the_trainer_itself(tmp_path: Path) -> None:
    from transformers import Trainer

    found = []
    for how in ({"cls": Trainer}, {"precision": "fp32"}):
        one = trainer("bert", tmp_path, 2, **how)
        one.train()
        found.append(numbers(one))
    assert all(map(torch.equal, *found))


def test_logs_have_the_loss_scale_the_skipped_steps_and_what_the_monitor_sees(tmp_path: Path) -> None:
    from lowp.integrations.transformers import LowpCallback

    watch = LowpCallback(max_overhead=None)
    used = lowp.Precision("fp16", loss_scale=f"dynamic({2.0**40})")
    trainer("bert", tmp_path, 2, precision=used, callbacks=[watch]).train()
    one = trainer("bert", tmp_path, 2, precision=used, callbacks=[watch])
    one.train()
    rows = [row for row in one.state.log_history if "loss" in row]
    assert [row["skipped_steps"] for row in rows] == [3, 4] and rows[0]["loss_scale"] == 2.0**37
    assert watch.monitor is not None and watch.monitor.step == 2
    assert rows[-1]["lowp/skipped"] and "lowp/bert.encoder.layer.0/activation" in rows[-1]
    assert rows[0]["lowp/loss"] == pytest.approx(rows[0]["loss"] / 2, rel=0.1)  # of the last of two batches


def test_what_the_monitor_sees_is_beside_the_losses_of_a_trainer_without_lowp(tmp_path: Path) -> None:
    from transformers import Trainer

    from lowp.integrations.transformers import LowpCallback

    backward = torch.autograd.backward
    watch = LowpCallback(max_overhead=None)
    one = trainer("bert", tmp_path, 2, cls=Trainer, callbacks=[watch])
    one.train()
    assert torch.autograd.backward is backward  # of which the monitor does not hear after the end
    first, second, whole = one.state.log_history
    assert first["lowp/loss"] != second["lowp/loss"] and "train_runtime" in whole and "lowp/loss" not in whole
    watch.numbers = {"lowp/loss": 1.0}  # of a step after the latest row
    one.evaluate()
    assert "eval_loss" in one.state.log_history[-1] and "lowp/loss" not in one.state.log_history[-1]


def test_a_trainer_of_one_s_own_trains_in_a_precision(tmp_path: Path) -> None:
    from transformers import Trainer

    from lowp.integrations.transformers import LowpMixin

    class Weighted(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
            found = model(**inputs)
            assert found.logits.dtype == torch.float32
            return (2 * found.loss, found) if return_outputs else 2 * found.loss

    class Mine(LowpMixin, Weighted):
        """Both."""

    one = trainer("bert", tmp_path, 2, cls=Mine, precision="bf16")
    one.train()
    assert one.lowp.report().ops and one.lowp.steps == 2


@pytest.mark.parametrize("asked", ["fp16", "bf16", "fp16_full_eval", "bf16_full_eval"])
def test_a_precision_of_the_arguments_is_refused_beside_lowp_s(asked: str, tmp_path: Path) -> None:
    expected = rf"TrainingArguments\({asked}=True\) comes beside the lowp precision fp8: omit it, and give precision="
    with pytest.raises(lowp.InvalidInput, match=expected + f"'{asked[:4]}' to the trainer"):
        trainer("bert", tmp_path, precision="fp8", **{asked: True})


def test_a_saved_model_is_fp32_and_opens_without_lowp(tmp_path: Path) -> None:
    from transformers import BertForSequenceClassification

    one = trainer("bert", tmp_path, 2, precision="bf16-storage")
    one.train()
    again = BertForSequenceClassification.from_pretrained(tmp_path / "checkpoint-2", dtype=torch.float32)
    assert all(map(torch.equal, numbers(one), again.state_dict().values()))
    assert not all(torch.equal(number, number.bfloat16().float()) for number in numbers(one))  # the masters


def test_a_precision_of_accelerate_s_environment_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(lowp.InvalidInput, match="and unset ACCELERATE_MIXED_PRECISION, which may be left of them"):
        trainer("bert", tmp_path)


def test_what_cannot_be_trained_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(lowp.UnknownName, match="unknown precision 'fp17'; did you mean fp16"):
        trainer("bert", tmp_path, precision="fp17")
    half = network("bert").bfloat16()
    with pytest.raises(lowp.InvalidInput, match=r"is torch\.bfloat16, and fp16 trains parameters as they are"):
        trainer("bert", tmp_path, model=half, precision="fp16").train()


def test_a_checkpoint_of_another_precision_is_refused_in_words(tmp_path: Path) -> None:
    trainer("bert", tmp_path, 2, precision="fp16").train()
    with pytest.raises(lowp.InvalidInput, match="the checkpoint was trained in fp16 and this run is in bf16"):
        trainer("bert", tmp_path, precision="bf16").train(resume_from_checkpoint=True)


def test_who_reports_the_logs_gets_what_the_monitor_sees_beside_each_loss_alone(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    from lowp.integrations.transformers import LowpCallback

    class Reporter(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
            reported.append(set(logs))

    reported: list[set[str]] = []
    watch = LowpCallback(max_overhead=None)
    one = trainer("bert", tmp_path, 2, precision="fp16", callbacks=[Reporter(), watch])
    one.train()
    watch.numbers = {"lowp/loss": 1.0}
    one.evaluate()
    ours = {"loss_scale", "skipped_steps"}
    assert [ours <= row for row in reported] == ["loss" in row for row in reported] == [True, True, False, False]
    assert [bool({"lowp/loss", "lowp/alarms"} <= row) for row in reported] == [True, True, False, False]
    assert not any({"loss_scale", "lowp/loss"} & row for row in reported[2:])


class _Sink:
    """Takes numbers."""

    def log(self, numbers: dict[str, float], step: int) -> None:
        """Take numbers of a step."""


@pytest.mark.parametrize("sinks", ["none", "one", "list", "tuple"])
def test_a_callback_watches_with_the_scale_that_there_is_and_the_sinks_that_are_given(
    sinks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lowp.integrations.transformers import LowpCallback

    made: list[Any] = []
    monkeypatch.setattr(lowp, "Monitor", lambda *given, **options: made.append((given, options)) or closing)
    closed: list[int] = []
    closing = SimpleNamespace(close=lambda: closed.append(1))
    first, second = _Sink(), _Sink()
    options: dict[str, dict[str, Any]] = {"none": {}, "one": {"sinks": first}}
    options |= {"list": {"sinks": [first, second]}, "tuple": {"sinks": (first, second)}}
    watch = LowpCallback(patience=3, **options[sinks])
    watch.on_train_end(None, None, None)
    inner, scaler, precision = object(), SimpleNamespace(), object()
    ours = SimpleNamespace(turns=SimpleNamespace(precision=precision))
    for optimizer, scale in (
        (inner, {"scaler": None}),
        (SimpleNamespace(optimizer=inner, scaler=scaler), {"scaler": scaler}),
        (SimpleNamespace(optimizer=inner, scaler=ours), {"precision": precision}),
    ):
        watch.on_train_begin(None, None, None, optimizer=optimizer, model="model")
        own = {"none": [], "one": [first]}.get(sinks, [first, second])
        assert made.pop() == (("model", inner), {**scale, "patience": 3, "sinks": [*own, watch]})
        assert watch.monitor is closing
    watch.on_train_end(None, None, None)
    assert closed == [1]
    state = SimpleNamespace(log_history=[{"loss": 1.0}])
    watch.log({"a": 2.0}, 5)
    for logs in (None, {"eval_loss": 1.0}):
        watch.on_log(None, state, None, logs)
    assert state.log_history == [{"loss": 1.0}] and watch.numbers == {"a": 2.0}
    watch.on_log(None, state, None, {"loss": 1.0})
    assert state.log_history == [{"loss": 1.0, "a": 2.0}] and watch.numbers == {}


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_a_row_of_the_log_has_the_scale_beside_a_loss_alone(name: str) -> None:
    from lowp.integrations.transformers import LowpCallback, LowpMixin

    class Logs:
        def __init__(self, *given: Any, **named: Any) -> None:
            self.given, self.named, self.rows = given, named, list[Any]()
            self.callback_handler = SimpleNamespace(callbacks=[watch, object(), other])

        def log(self, logs: dict[str, float], *given: Any, **named: Any) -> None:
            self.rows.append((logs, given, named))

    watch, other = LowpCallback(), LowpCallback()
    watch.numbers, other.numbers = {"a": 1.0}, {"a": 2.0}
    used = lowp.Precision(name, **({"loss_scale": 8} if name == "fp16" else {}))
    one: Any = type("One", (LowpMixin, Logs), {})(1, precision=used, b=2)
    assert one.lowp is used and (one.given, one.named) == ((1,), {"b": 2})
    one.log({"loss": 1.0}, 3, start=4)
    one.log({"eval_loss": 1.0})
    scale = {"loss_scale": 8.0, "skipped_steps": 0} if name == "fp16" else {}
    assert one.rows == [({"loss": 1.0, **scale, "a": 2.0}, (3,), {"start": 4}), ({"eval_loss": 1.0}, (), {})]
    assert type("Two", (LowpMixin, Logs), {})().lowp.preset.name == "bf16"


def test_a_trainer_whose_arguments_ask_for_nothing_lends_its_accelerator_the_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lowp.integrations import transformers as integration

    class Base:
        args = SimpleNamespace()  # of a version without these options

        def create_accelerator_and_postprocess(self) -> None:
            self.accelerator = "accelerator"

    lent: list[Any] = []
    monkeypatch.setattr(integration, "lend", lambda *given: lent.append(given))
    one: Any = type("One", (integration.LowpMixin, Base), {})(precision="fp8")
    one.create_accelerator_and_postprocess()
    assert lent == [("accelerator", one.lowp)]
    one.args = SimpleNamespace(fp16=False, bf16=True, bf16_full_eval=True)
    with pytest.raises(lowp.InvalidInput, match=r"TrainingArguments\(bf16=True, bf16_full_eval=True\) comes beside"):
        one.create_accelerator_and_postprocess()
