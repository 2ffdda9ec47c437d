"""The training loop: it learns, starts equally in every precision, and resumes to the same bits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import lowp
from lowp.checkpoint import InvalidCheckpoint
from lowp.errors import InvalidInput, Unavailable
from lowp.recipes import get, runs
from lowp.recipes.training import Settings, Training, load_data, moved, read_extra

DATA = load_data(Settings("digits"))
PRECISIONS = ("fp32", "fp16", "bf16-storage", "fp16-naive", "e4m3fn")


def begin(precision: str = "fp16", **changes: Any) -> Training:
    return Training(Settings("digits", precision, **{"epochs": 2, "batch": 128, **changes}), DATA)


class StopAfter:
    """Requests a stop before the step with this number, once."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self) -> bool:
        self.left -= 1
        return self.left == -1


def without_seconds(history: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: repr(value) for name, value in record.items() if name != "seconds"} for record in history]  # type: ignore[misc]


def same_bits(one: Training, other: Training) -> bool:
    mine, theirs = one.model.state_dict(), other.model.state_dict()
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_digits_are_learned(precision: str) -> None:
    training = begin(precision, epochs=3, batch=32)
    assert training.run()
    assert [record["epoch"] for record in training.history] == [0, 1, 2, 3]
    assert training.history[0]["accuracy"] < 0.3
    assert training.history[-1]["accuracy"] > 0.9
    assert training.history[-1]["loss"] < training.history[1]["loss"] < training.history[0]["loss"]


def test_a_size_may_have_a_schedule_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = get("digits")
    halved = replace(digits.size(), schedule=lambda optimizer, progress: _set_rate(optimizer, 0.5 - progress))
    changed = replace(digits, sizes={**digits.sizes, "cpu": halved})
    monkeypatch.setattr("lowp.recipes.training.get", lambda name: changed)
    training = begin("fp32", epochs=1)
    training.run()
    last_progress = 1 - 1 / training.steps_per_epoch
    assert training.optimizer.param_groups[0]["lr"] == pytest.approx(0.5 - last_progress)


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def test_fp32_is_plain_torch_to_the_bit() -> None:
    training = begin("fp32", seed=5)
    training.run()
    torch.manual_seed(5)
    recipe = training.recipe
    model = recipe.make_model(recipe.size())
    optimizer = recipe.make_optimizer(model, 0.1)
    for epoch in range(2):
        generator = torch.Generator().manual_seed((5 * 1_000_003 + epoch) * 1_000_003)
        order = torch.randperm(1257, generator=generator)
        for step in range(9):
            optimizer.param_groups[0]["lr"] = 0.1 * (1 - (epoch * 9 + step) / 18)
            optimizer.zero_grad()
            recipe.loss(model, DATA.training.batch(order[step * 128 : (step + 1) * 128])).backward()
            optimizer.step()
    trained = training.model.state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_seed_gives_the_same_initial_weights_in_every_precision(precision: str) -> None:
    plain, other = begin("fp32", seed=3).model.state_dict(), begin(precision, seed=3).model.state_dict()
    for name, value in plain.items():
        stored = value.half().float() if precision == "fp16-naive" else value
        assert torch.equal(other[name], stored)
    assert not torch.equal(plain["0.weight"], begin("fp32", seed=4).model.state_dict()["0.weight"])


def test_one_seed_gives_the_same_batches_in_every_precision() -> None:
    class Recorded:
        def __init__(self) -> None:
            self.asked: list[list[int]] = []

        def __len__(self) -> int:
            return len(DATA.training)

        def batch(self, indices: torch.Tensor, generator: torch.Generator | None = None) -> Any:
            self.asked.append(indices.tolist())
            return DATA.training.batch(indices)

    orders = []
    for precision in ("fp32", "fp16", "bf16-tpu"):
        recorded = Recorded()
        data = lowp.recipes.recipe.Data(recorded, DATA.validation, "")  # type: ignore[attr-defined]
        Training(Settings("digits", precision, epochs=2, batch=256), data).run()
        orders.append(recorded.asked)
    assert orders[0] == orders[1] == orders[2]
    assert orders[0][0] != orders[0][4]  # the second epoch has an order of its own


@cache
def run_whole(precision: str) -> Training:
    training = begin(precision)
    assert training.run()
    return training


# before the first step, within an epoch, between two, and within another
STOPS = [("fp16", steps) for steps in (0, 4, 9, 13)] + [(one, 13) for one in PRECISIONS if one != "fp16"]


@pytest.mark.parametrize(("precision", "steps"), STOPS)
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(precision: str, steps: int, tmp_path: Path) -> None:
    whole, part = run_whole(precision), begin(precision)
    assert not part.run(stop=StopAfter(steps))
    part.save(tmp_path / "run.pt")
    torch.manual_seed(99)
    rest = Training.resume(tmp_path / "run.pt")
    assert rest.run()
    assert same_bits(whole, rest)
    assert without_seconds(whole.history) == without_seconds(rest.history)
    assert whole.precision.steps == rest.precision.steps == 18


def test_a_run_that_was_stopped_in_memory_goes_on_too() -> None:
    whole, part = run_whole("fp16"), begin()
    assert not part.run(stop=StopAfter(5))
    assert part.run()
    assert same_bits(whole, part)


def test_a_checkpoint_opens_with_plain_torch(tmp_path: Path) -> None:
    training = begin("fp16-storage", epochs=1)
    training.run()
    training.save(tmp_path / "run.pt")
    model = torch.load(tmp_path / "run.pt", weights_only=True)["model"]
    assert model["0.weight"].dtype == torch.float32 and model["0.weight"].shape == (128, 64)


def test_a_checkpoint_of_other_settings_is_not_gone_on_with(tmp_path: Path) -> None:
    begin("fp16").save(tmp_path / "run.pt")
    with pytest.raises(InvalidInput, match="was trained with precision fp16, but precision bf16 was given: omit it"):
        Training.resume(tmp_path / "run.pt", {"precision": "bf16"})
    assert Training.resume(tmp_path / "run.pt", {"precision": "fp16", "seed": None}).settings.seed == 0


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    lowp.checkpoint.save(tmp_path / "other.pt", model=torch.nn.Linear(1, 1))  # type: ignore[attr-defined]
    with pytest.raises(InvalidCheckpoint, match="not of `lowp train`"):
        Training.resume(tmp_path / "other.pt")


def test_weights_that_are_no_numbers_end_a_run() -> None:
    training = begin("fp32", epochs=5, learning_rate=1e30)
    assert training.run()
    assert training.failure == f"its weights were no numbers after epoch {training.epoch}"
    assert training.epoch < 5 and training.finished


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"epochs": 0}, InvalidInput, "epochs 0: give 1 or more"),
        ({"batch": -1}, InvalidInput, "batch -1: give 1 or more"),
        ({"learning_rate": float("nan")}, InvalidInput, "learning rate nan: give a finite number above zero"),
        ({"seed": -1}, InvalidInput, "seed -1: give 0 to"),
        ({"loss_scale": "0"}, InvalidInput, "loss scale '0': give a finite number above zero"),
        ({"precision": "fp61"}, InvalidInput, "unknown precision 'fp61'; did you mean"),
        ({"device": "gpu"}, InvalidInput, "device 'gpu' is not a device of torch"),
        ({"device": "cuda:99"}, Unavailable, "device cuda:99: this machine has"),
    ],
)
def test_settings_that_cannot_be_run_are_named(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Settings(**{"recipe": "digits", **changes}).filled()


def test_a_batch_moves_with_all_its_parts() -> None:
    batch = {"boxes": [torch.zeros(1), (torch.ones(2), "name")]}
    moved_batch = moved(batch, torch.device("meta"))
    assert moved_batch["boxes"][0].device.type == "meta" and moved_batch["boxes"][1][1] == "name"


def test_no_module_is_imported_because_a_checkpoint_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowp.recipes import training

    path = tmp_path / "run.pt"
    Training(Settings("digits", epochs=1)).save(path)
    content = torch.load(path, weights_only=True)
    content["extra"]["settings"]["recipe"] = "strange_module:RECIPE"
    torch.save(content, path)
    monkeypatch.setattr(training, "get", lambda name: pytest.fail(f"{name} was looked up"))
    for given in ({}, {"recipe": "digits"}):
        with pytest.raises(
            InvalidInput, match=r"'strange_module:RECIPE', which is not one of lowp's; a module is not import"
        ):
            Training.resume(path, given)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("settings", {"recipe": "digits"}, "its settings are not those of a training"),
        ("epoch", -1, "its epoch is -1"),
        ("step_of_epoch", 1.5, "its step_of_epoch is 1.5"),
        ("loss_sum", "much", "its loss_sum is 'much'"),
        ("failure", 3, "its failure is 3"),
        ("history", [{"loss": "low"}], "its history is no list of numbers by name"),
        ("history", [{"loss": 1.0}] * 5, "its history has 5 entries after 0 epochs"),
    ],
)
def test_an_edited_training_is_named(tmp_path: Path, name: str, value: object, text: str) -> None:
    path = tmp_path / "run.pt"
    Training(Settings("digits", epochs=1)).save(path)
    content = torch.load(path, weights_only=True)
    content["extra"][name] = value
    torch.save(content, path)
    with pytest.raises(InvalidCheckpoint, match=f"is a checkpoint of `lowp train` that has been edited: {text}"):
        Training.resume(path)


@pytest.mark.parametrize(("name", "value"), [("precision", 3), ("seed", "0"), ("learning_rate", "fast"), ("data", 1)])
def test_an_edited_setting_is_named(tmp_path: Path, name: str, value: object) -> None:
    path = tmp_path / "run.pt"
    Training(Settings("digits", epochs=1)).save(path)
    content = torch.load(path, weights_only=True)
    content["extra"]["settings"][name] = value
    torch.save(content, path)
    with pytest.raises(InvalidCheckpoint, match=f"that has been edited: its setting {name} is {value!r}"):
        Training.resume(path)


# -- interruptions ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("precision", ["fp16", "flex16+5"])
@pytest.mark.parametrize("asked", [0, 2, 6, 14, 16], ids=lambda asked: f"at question {asked}")
def test_a_run_is_kept_wherever_it_is_stopped(
    precision: str, asked: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five questions in the evaluation before training, nine steps, five in the evaluation after the first epoch."""
    monkeypatch.setattr(runs, "_LONG", 0.0)  # every evaluation is long enough to be stopped
    whole, part = begin(precision), begin(precision)
    assert whole.run()
    keeper = runs.RunKeeper(tmp_path / "run.pt")
    assert not part.run(stop=StopAfter(asked), keeper=keeper)
    steps = min(max(asked - 5, 0), 9)
    assert keeper.at == f"step {steps} of epoch 1" and len(part.history) == (asked >= 5)
    rest = Training.resume(tmp_path / "run.pt")
    assert rest.step_of_epoch == steps and rest.run()
    assert same_bits(rest, whole)
    assert without_seconds(rest.history) == without_seconds(whole.history)


def test_a_long_epoch_is_kept_between_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_SECONDS", 0.0)
    kept: list[int] = []
    keeper = runs.RunKeeper(tmp_path / "run.pt")
    begin(epochs=1).run(
        keeper=keeper, on_step=lambda training, loss: kept.append(read_extra(keeper.path)["step_of_epoch"])
    )
    assert kept == list(range(9))


def test_the_order_of_an_epoch_and_each_augmentation_are_drawn_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, seen, randperm = list[int](), list[torch.Tensor](), torch.randperm

    class Noted:
        def __init__(self, examples: Any) -> None:
            self.examples = examples

        def __len__(self) -> int:
            return len(self.examples)

        def batch(self, indices: torch.Tensor, generator: torch.Generator) -> Any:
            seen.append(indices)
            seeds.append(generator.initial_seed())
            return self.examples.batch(indices, generator)

    def noted(count: int, generator: torch.Generator) -> torch.Tensor:
        seeds.append(generator.initial_seed())
        return randperm(count, generator=generator)

    examples = DATA.training
    data = lowp.recipes.recipe.Data(Noted(examples), DATA.validation, "")  # type: ignore[attr-defined]
    training = Training(Settings("digits", seed=3, batch=500), data)
    monkeypatch.setattr(torch, "randperm", noted)
    assert training.steps_per_epoch == 2 and len(training.take(lambda taken: taken >= 3)) == 3
    base = 3 * 1_000_003
    assert seeds == [(base + epoch) * 1_000_003 + use for epoch, use in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1))]
    order = randperm(len(examples), generator=torch.Generator().manual_seed(base * 1_000_003))
    assert torch.equal(torch.cat(seen[:2]), order[:1000])
