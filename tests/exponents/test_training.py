"""Training in flex16+5 through Precision: every tensor in int16, faults reported, runs resumed to the bit."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowp import checkpoint
from lowp.casts import parse
from lowp.errors import InvalidInput, Misuse
from lowp.exponents import SharedExponents, learning
from lowp.kernels.int16.mantissas import NOT_FINITE, own_exponent, to_mantissas, values
from lowp.ops.observing import observe
from lowp.optim import FlexWeights
from lowp.optim.moments import SQUARES
from lowp.precision import Precision
from lowp.region import autocast
from lowp.step import NonFiniteGradients

FLEX = parse("flex16+5")


def is_flex(x: Tensor) -> bool:
    exponent = own_exponent(x, FLEX)
    assert exponent != NOT_FINITE
    return torch.equal(values(to_mantissas(x, FLEX, exponent).payload, exponent), x.detach())


class Run:
    """A small network with BatchNorm that learns to separate two halves of the plane."""

    def __init__(self, precision: str = "flex16+5", optimizer: str = "SGD") -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
        inner: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if optimizer != "SGD":
            inner = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01)
        self.precision = Precision(precision)
        self.model, self.optimizer = self.precision.prepare(model, inner)
        self.generator = torch.Generator().manual_seed(1)

    def step(self, spoil: float = 1.0) -> float:
        x = torch.randn(32, 2, generator=self.generator)
        labels = (x.sum(1) > 0).long()
        x = x * spoil
        self.optimizer.zero_grad()
        with self.precision.autocast():
            loss = F.cross_entropy(self.model(x), labels)
        self.precision.backward(loss)
        self.precision.step(self.optimizer)
        return float(loss.detach())

    def tensors(self) -> dict[str, Tensor]:
        state = {f"state {i}.{j}": v for i, s in enumerate(self.optimizer.state.values()) for j, v in s.items()}
        found = {**self.model.state_dict(), **state}
        return {name: value.detach().clone() for name, value in found.items() if value.is_floating_point()}


@pytest.mark.parametrize(("optimizer", "steps"), [("SGD", 60), ("RMSprop", 20), ("Adam", 20)])
def test_weights_gradients_updates_and_optimizer_state_are_all_in_the_format(optimizer: str, steps: int) -> None:
    run = Run(optimizer=optimizer)
    assert isinstance(run.optimizer, FlexWeights)
    outputs: list[Tensor] = []
    handles = [module.register_forward_hook(lambda *seen: outputs.append(seen[2])) for module in run.model]
    losses = [run.step() for _ in range(steps)]
    assert losses[-1] < (0.3 if steps == 60 else 0.9) * losses[0]
    for name, value in run.tensors().items():
        written = value.sqrt() if name.split(".")[-1] in SQUARES else value
        assert value.dim() == 0 or is_flex(written), name
    assert all(is_flex(y) for y in outputs)
    assert all(is_flex(parameter.grad) for parameter in run.model.parameters() if parameter.grad is not None)
    for handle in handles:
        handle.remove()
    exponents = run.precision.exponents
    assert exponents is not None
    kept = {"SGD": "momentum_buffer", "RMSprop": "square_avg", "Adam": "exp_avg_sq"}[optimizer]
    assert {"weight of 0.weight", "update of 0.weight", f"{kept} of 0.weight"} <= set(exponents.sites())
    assert exponents.summary()["all"].nonfinite == 0


def test_adam_makes_small_steps_for_gradients_far_below_the_largest() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    model = torch.nn.Module()
    model.weight = weight
    precision = Precision("flex16+5")
    _, optimizer = precision.prepare(model, torch.optim.Adam([weight], lr=0.01))
    for _ in range(20):
        weight.grad = torch.tensor([1.0, 2.0**-9, 2.0**-14, 0.0])  # their squares lie 28 binary places apart
        precision.step(optimizer)
    second = optimizer.state[weight]["exp_avg_sq"]
    assert (second[:3] > 0).all() and second[3] == 0
    # Adam's step is the rate for every gradient that stays what it is; near the unit it may be a part of it, never more
    moved = -weight.detach()
    assert torch.allclose(moved[[0, 1, 3]], torch.tensor([0.2, 0.2, 0.0]), atol=0.01)
    assert 0.05 < moved[2] < 0.21


def test_it_learns_as_fp32_does_with_the_same_hyper_parameters() -> None:
    flex, plain = Run(), Run("fp32")
    losses = [(flex.step(), plain.step()) for _ in range(80)]
    assert abs(sum(a for a, _ in losses[-10:]) - sum(b for _, b in losses[-10:])) < 0.05
    exponents = flex.precision.exponents
    assert exponents is not None
    summary = exponents.summary()["all"]
    assert summary.saturated < summary.writes / 100 and 0.5 < summary.headroom_bits < 4


def test_a_model_without_values_is_refused_with_what_to_do() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
    precision = Precision("flex16+5")
    with pytest.raises(InvalidInput, match=r"meta device has no values to write in flex16\+5.*to_empty"):
        precision.prepare_model(model)
    model = model.to_empty(device="cpu")
    model[0].reset_parameters()
    precision.prepare_model(model)
    assert is_flex(model[0].weight)


def test_the_default_dtype_changes_nothing() -> None:
    wanted, run = Run(), Run()
    torch.set_default_dtype(torch.float64)
    try:
        for _ in range(3):
            x = torch.randn(32, 2, dtype=torch.float32, generator=run.generator)
            run.optimizer.zero_grad()
            with run.precision.autocast():
                loss = F.cross_entropy(run.model(x), (x.sum(1) > 0).long())
            run.precision.backward(loss)
            run.precision.step(run.optimizer)
    finally:
        torch.set_default_dtype(torch.float32)
    for _ in range(3):
        wanted.step()
    assert all(map(torch.equal, run.model.state_dict().values(), wanted.model.state_dict().values()))


@pytest.mark.parametrize("is_there", [False, True])
def test_a_step_is_taken_if_nothing_but_results_is_infinite(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_there:
        monkeypatch.setattr(learning, "answers_at_once", lambda device: False)
    run, x = Run(), torch.full((4, 2), math.inf)
    with run.precision.autocast():
        assert not F.linear(x, run.model[0].weight.detach()).isfinite().any()  # used by nothing
    run.step()
    assert run.precision.stepped
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a device they come later
        run.step(spoil=math.inf)
    assert not run.precision.stepped


def test_the_last_update_is_exactly_what_the_weights_moved_by() -> None:
    run = Run()
    for _ in range(5):
        run.step()
    seen: dict[str, Tensor] = {}
    end = observe(lambda one: seen.update({f"{one.role} of {one.path}": one.tensor.clone()}))
    before = run.model[0].weight.detach().clone()
    run.step()
    end()
    exact = seen["weight of 0.weight"]  # old + written update, in fp64, before its one rounding
    assert exact.dtype is torch.float64 and is_flex((exact - before.double()).float())


def test_a_run_that_is_resumed_in_the_middle_goes_on_to_the_bit(tmp_path: Path) -> None:
    whole, first = Run(), Run()
    for _ in range(22):  # beyond the 16 maxima of a history
        whole.step()
    for _ in range(9):
        first.step()
    path = tmp_path / "run.pt"
    checkpoint.save(path, model=first.model, optimizer=first.optimizer, precision=first.precision)
    second = Run()
    second.step()  # something to be replaced
    checkpoint.load(path, model=second.model, optimizer=second.optimizer, precision=second.precision)
    second.generator.set_state(first.generator.get_state())
    for _ in range(13):
        second.step()
    for name, value in whole.tensors().items():
        assert torch.equal(value, second.tensors()[name]), name
    assert whole.precision.exponents is not None and second.precision.exponents is not None
    assert whole.precision.exponents.summary() == second.precision.exponents.summary()


def test_a_step_with_an_infinity_is_skipped_told_and_harmless() -> None:
    run = Run()
    for _ in range(5):
        run.step()
    before = run.tensors()
    with pytest.warns(UserWarning, match="first in the output of 0 linear: int16 has neither, and step 6 was skipped"):
        run.step(spoil=torch.inf)
    assert not run.precision.stepped and run.precision.skipped_steps == 1
    assert run.precision.faults[0] == "output of 0 linear"
    for name, value in run.tensors().items():  # the running statistics too
        assert torch.equal(value, before[name]), name
    assert run.step() < 2 and run.precision.stepped


def test_training_is_given_up_when_no_step_is_finite() -> None:
    run = Run()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(NonFiniteGradients, match="as were the 19 steps before it: look at the inputs"):
            for _ in range(30):
                run.step(spoil=torch.nan)
    assert run.precision.skipped_steps == 20


def test_evaluation_in_between_changes_nothing() -> None:
    plain, evaluated = Run(), Run()
    for _ in range(10):
        plain.step()
        evaluated.step()
        evaluated.model.eval()
        with torch.no_grad(), evaluated.precision.autocast():
            evaluated.model(torch.full((3, 2), torch.nan))
        evaluated.model.train()
    for name, value in plain.tensors().items():
        assert torch.equal(value, evaluated.tensors()[name]), name


def test_a_64_fold_jump_of_the_weights_is_not_cut_off_and_what_follows_is_counted() -> None:
    run = Run()
    for _ in range(20):
        run.step()
    exponents = run.precision.exponents
    assert exponents is not None
    before = exponents.summary()
    with torch.no_grad():
        run.model[3].weight.mul_(64)
    largest = float(run.model[3].weight.detach().abs().max())
    with pytest.warns(UserWarning, match="step 21: most numbers were cut off in the output of 3 linear"):
        run.step()  # told once
    assert float(run.model[3].weight.detach().abs().max()) > 0.9 * largest
    for _ in range(10):
        run.step()
    after = exponents.summary()
    assert after["activations"].saturated > before["activations"].saturated  # told, not silent
    losses = [run.step() for _ in range(90)]
    assert max(losses[-10:]) < max(losses) / 5
    assert exponents.summary()["activations"].saturated <= after["activations"].saturated + 4


def test_larger_weights_that_are_loaded_keep_their_values() -> None:
    run = Run()
    run.step()
    state = {name: value * 100 for name, value in run.model.state_dict().items()}
    run.model.load_state_dict(state)
    loaded = run.model[0].weight.detach()
    assert torch.allclose(loaded, state["0.weight"], rtol=0, atol=float(loaded.abs().max()) / 2**13) and is_flex(loaded)


def test_several_optimizers_and_models_share_one_precision() -> None:
    precision = Precision("flex16+5")
    torch.manual_seed(0)
    pairs = []
    for _ in range(2):
        model = nn.Linear(3, 1)
        pairs.append(precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01)))
    for model, _ in pairs:
        with precision.autocast():
            loss = model(torch.ones(2, 3)).square().mean()
        precision.backward(loss)
    precision.step(*(optimizer for _, optimizer in pairs))
    assert precision.exponents is not None
    assert {"weight of weight", "weight of model 2: weight"} <= set(precision.exponents.sites())


def test_what_cannot_be_is_refused_in_words() -> None:
    run = Run()
    with pytest.raises(Misuse, match="train optimizers that need one \\(LBFGS\\) with fp32 parameters"):
        run.optimizer.step(lambda: 0.0)
    with pytest.raises(InvalidInput, match="weights and updates have their own exponents and no masters"):
        Precision("flex16+5", masters="fp32")
    half = nn.Linear(2, 2).half()
    with pytest.raises(InvalidInput, match=r"a torch\.float16 parameter cannot be stored in flex16\+5:autoflex"):
        FlexWeights(torch.optim.SGD(half.parameters(), lr=1.0), parse("flex16+5:autoflex"), SharedExponents())
    with pytest.raises(InvalidInput, match="was trained in flex16\\+5 and this run is in flex16\\+5:frozen"):
        Precision("flex16+5:frozen").load_state_dict(run.precision.state_dict())


def test_a_model_without_an_optimizer_is_stored_in_the_format_too() -> None:
    model = nn.Linear(5, 5)
    Precision("flex16+5").prepare(model)
    assert is_flex(model.weight)


@pytest.mark.parametrize("loser", ["flex16+5:frozen", "flex16+5:static(-8)", "flex16+5:reactive"])
@pytest.mark.filterwarnings("ignore:step .* most numbers were cut off:UserWarning")
def test_the_losers_write_every_tensor_too_and_do_not_predict(loser: str) -> None:
    run = Run(loser)
    for _ in range(30):
        run.step()
    assert run.precision.exponents is not None
    summary = run.precision.exponents.summary()["all"]
    assert summary.moved == 0 and summary.writes > 500
    assert (summary.saturated > 20) == (loser != "flex16+5:static(-8)")


def test_a_sparse_gradient_is_refused_with_advice_and_nothing_changes() -> None:
    model = nn.Embedding(8, 4, sparse=True)
    precision = Precision("flex16+5")
    model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()
    rows = model(torch.tensor([1, 2]))  # within the region the backward pass refuses it
    with precision.autocast():
        loss = rows.sum()
    precision.backward(loss)
    with pytest.raises(InvalidInput, match=r"the gradient of weight is sparse.*sparse=False, or train in dfp16"):
        precision.step(optimizer)
    assert torch.equal(model.weight, before)


def test_a_region_without_a_precision_tells_once_of_numbers_beyond_the_largest() -> None:
    model, x = nn.Linear(4, 4), torch.full((2, 4), 1e6)
    optimizer, region = torch.optim.SGD(model.parameters(), lr=0.0), autocast("flex16+5")

    def step() -> None:
        with region:
            loss = model(x).sum()
        loss.backward()
        optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
        with pytest.raises(UserWarning, match=r"numbers beyond the largest of flex16\+5 are cut off, first"):
            step()
        for _ in range(3):
            step()
