"""The change of the loss if one layer is rounded: the prediction compared with the cast."""

from __future__ import annotations

import torch

from lowp.recipes.profiling import confirmed
from lowp.recipes.training import Settings, Training


def test_the_loss_moves_as_far_as_predicted_where_one_layer_is_cast_and_nothing_else_changes() -> None:
    training = Training(Settings("digits"))
    before = [one.detach().clone() for one in training.model.parameters()]
    found = confirmed(training, "bf16")
    assert {one.role for one in found} == {"weight", "output"} and len(found) == 4
    for one in found:  # a prediction is a deviation: what is drawn from it is seldom beyond four of it
        assert 0 < one.real < 4 * one.predicted, one
    assert all(torch.equal(one, other) for one, other in zip(before, training.model.parameters(), strict=True))
    assert all(one.grad is None for one in training.model.parameters())
