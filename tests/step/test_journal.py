"""A skipped step restores the running statistics of batch normalisation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowp.precision import Precision
from lowp.step.guard import BatchNormJournal

YES, NO = torch.tensor(True), torch.tensor(False)
LAYERS = (nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.InstanceNorm1d(4, track_running_stats=True))


def statistics(model: nn.Module) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def overflowing(model: nn.Module) -> None:
    """Change the statistics like a forward pass with an infinity."""
    for buffer in model.buffers():
        buffer.add_(1) if buffer.dtype == torch.int64 else buffer.fill_(torch.nan)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_a_skipped_step_leaves_the_running_statistics_as_they_were(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.BatchNorm1d(4, dtype=torch.float64))
    journal = BatchNormJournal(model)
    before = statistics(model)
    overflowing(model)
    journal.settle(NO)
    assert len(journal) == 2
    assert len(before) == 6 and same(statistics(model), before)


def test_a_step_that_stepped_keeps_its_statistics_and_the_next_one_starts_from_them() -> None:
    model = nn.BatchNorm1d(4)
    journal = BatchNormJournal(model)
    model(torch.randn(8, 4))
    stepped = statistics(model)
    journal.settle(YES)
    assert same(statistics(model), stepped) and model.num_batches_tracked == 1
    model(torch.randn(8, 4) * torch.inf)
    journal.settle(NO)
    assert same(statistics(model), stepped)


def test_all_micro_batches_of_a_skipped_step_are_taken_back() -> None:
    model = nn.BatchNorm1d(4)
    journal = BatchNormJournal(model)
    before = statistics(model)
    for _ in range(3):
        model(torch.randn(8, 4))
    journal.settle(NO)
    assert same(statistics(model), before)


def test_loaded_statistics_are_not_taken_back() -> None:
    model, other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    other(torch.randn(8, 4))
    journal = BatchNormJournal(model)
    model.load_state_dict(other.state_dict())
    overflowing(model)
    journal.settle(NO)
    assert same(statistics(model), statistics(other))


def test_replaced_buffers_are_left_alone() -> None:
    model = nn.BatchNorm1d(4)
    journal = BatchNormJournal(model)
    model.running_mean = torch.ones(4)
    journal.settle(NO)
    assert model.running_mean.tolist() == [1.0] * 4


def test_a_model_without_statistics_is_left_alone() -> None:
    journal = BatchNormJournal(nn.Linear(2, 2))
    journal.settle(NO)
    assert len(journal) == 0


@pytest.mark.parametrize("stepped", [YES, NO], ids=["stepped", "skipped"])
@pytest.mark.parametrize("training", [True, False])
def test_a_graph_that_awaits_its_backward_is_not_disturbed(stepped: torch.Tensor, training: bool) -> None:
    model, x = nn.BatchNorm1d(4).train(training), torch.randn(8, 4, requires_grad=True)
    journal = BatchNormJournal(model)
    y = model(x)
    (expected,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    journal.settle(stepped)
    (found,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["fp16", "bf16", "e5m7", "e4m3fn", "e5m2", "flex16+5", "dfp16"])
def test_a_gan_whose_networks_have_batch_norms_trains(name: str) -> None:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    discriminator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.LeakyReLU(), nn.Linear(8, 1))
    precision, criterion = Precision(name), nn.BCEWithLogitsLoss()
    pairs = [precision.prepare(one, torch.optim.Adam(one.parameters())) for one in (generator, discriminator)]
    (generator, first), (discriminator, second) = pairs
    for _ in range(2):
        with precision.autocast():
            fake = generator(torch.randn(8, 4))
            real_loss = criterion(discriminator(torch.randn(8, 4)), torch.ones(8, 1))
            fake_loss = criterion(discriminator(fake.detach()), torch.zeros(8, 1))
        second.zero_grad()
        precision.backward(real_loss + fake_loss)
        precision.step(second)
        first.zero_grad()
        with precision.autocast():
            loss = criterion(discriminator(fake), torch.ones(8, 1))
        precision.backward(loss)
        precision.step(first)
        assert loss.isfinite()
