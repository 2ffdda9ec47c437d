"""The curves are those of trainings, which always include fp32."""

from __future__ import annotations

from lowp.recipes.recording.curves import record_curves
from lowp.recipes.recording.runs import Onlooker
from lowp.recipes.training import Settings, Training


def test_a_curve_is_the_history_of_a_training_with_that_seed() -> None:
    settings = Settings("digits", epochs=2, batch=300).filled()
    names: set[str] = set()
    document = record_curves(settings, ["bf16"], 2, Onlooker(on_progress=lambda name, epoch: names.add(name)))
    assert [row["label"] for row in document["variants"]] == ["fp32", "bf16"]
    assert names == {f"{label}, seed {seed}" for label in ("fp32", "bf16") for seed in (0, 1)}
    training = Training(Settings("digits", "bf16", seed=1, epochs=2, batch=300))
    training.run()
    run = document["variants"][1]["runs"][1]
    for name in ("accuracy", "top5", "loss"):
        assert [one[name] for one in run["history"]] == [one[name] for one in training.history]
    assert document["complete"] and document["kind"] == "comparison"
    assert all(one["top5"] >= one["accuracy"] for one in run["history"])
