"""Sites distinguish the passes of a step, are shared by micro-batches, and repeat in a checkpoint's recomputation."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowp.exponents import SharedExponents
from lowp.exponents.sites import LAST_PASS, Passes, features_axis
from lowp.precision import Precision


def flex(model: nn.Module) -> tuple[Precision, nn.Module, torch.optim.Optimizer, SharedExponents]:
    precision = Precision("flex16+5")
    model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    assert precision.exponents is not None
    return precision, model, optimizer, precision.exponents


def sites(exponents: SharedExponents, role: str = "output") -> list[str]:
    return [site for site in exponents.sites() if site.startswith(f"{role} of ")]


@pytest.mark.parametrize("together", [True, False])
def test_a_second_pass_on_larger_numbers_is_not_cut_off_by_the_first(together: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    real, fake = torch.randn(16, 4), 1000 * torch.randn(16, 4)
    precision, model, _, exponents = flex(model)
    with torch.no_grad():
        expected = model(fake)
    if together:
        with precision.autocast():
            model(real)
            found = model(fake)
    else:
        with precision.autocast():
            precision.backward(model(real).sum())
        with precision.autocast():
            found = model(fake)
    assert torch.allclose(found, expected, rtol=1e-2, atol=float(expected.abs().max()) / 1000)
    second = "#2" if together else "pass 2"
    assert any(second in site for site in sites(exponents))


def test_the_generators_pass_through_a_discriminator_has_places_of_its_own() -> None:
    torch.manual_seed(0)
    precision, discriminator, optimizer, exponents = flex(nn.Linear(3, 1))
    generator = nn.Linear(2, 3)
    generator, generator_optimizer = precision.prepare(generator, torch.optim.SGD(generator.parameters(), lr=0.01))
    for _ in range(3):
        with precision.autocast():
            fake = generator(torch.randn(4, 2))
            loss = discriminator(torch.ones(4, 3)).mean() + discriminator(fake.detach()).mean()
        precision.backward(loss)
        precision.step(optimizer)
        with precision.autocast():
            loss = -discriminator(fake).mean()
        precision.backward(loss)
        precision.step(generator_optimizer)
    linear = [site.removeprefix("output of ") for site in sites(exponents) if "linear" in site]
    passes = ["model 2: linear", "model 2: linear #2", "model 2: linear, differentiable input"]
    assert linear == ["linear", *passes]


class Given(nn.Module):
    """A layer that is called with more than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor, *more: object) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("flows", [False, True])
@pytest.mark.parametrize("given", [lambda y: y, lambda y: [1, ("a", y)], lambda y: {"a": None, "b": {"c": y}}])
def test_a_gradient_flows_on_to_any_tensor_among_the_arguments_and_to_nothing_else(
    given: Callable[[Tensor], object], flows: bool
) -> None:
    precision, model, _, exponents = flex(Given())
    with precision.autocast():
        model(torch.ones(2, 3), 2.0, given(torch.ones(2, requires_grad=flows)))
    assert [site.endswith(", differentiable input") for site in sites(exponents)] == [flows]


@pytest.mark.parametrize("loss", ["function", "module", "within a module"])
def test_the_first_loss_of_a_discriminator_is_not_cut_off_at_the_place_of_the_generators(loss: str) -> None:
    torch.manual_seed(0)
    precision, discriminator, optimizer, exponents = flex(nn.Linear(2, 1))
    with torch.no_grad():
        discriminator.bias.fill_(1.5)
    generator = nn.Linear(4, 2)
    generator, generator_optimizer = precision.prepare(generator, torch.optim.SGD(generator.parameters(), lr=0.01))
    criterion = nn.BCEWithLogitsLoss() if loss == "module" else F.binary_cross_entropy_with_logits

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.discriminator = discriminator

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            found: Tensor = criterion(self.discriminator(x.detach() if target[0] == 0 else x), target)
            return found

    both = Both()
    for step in range(3):
        for target, one in ((torch.ones(8, 1), generator_optimizer), (torch.zeros(8, 1), optimizer)):
            with precision.autocast():
                fake = generator(torch.randn(8, 4))
                x = fake if target[0] else fake.detach()
                found = both(fake, target) if loss == "within a module" else criterion(discriminator(x), target)
            with torch.no_grad():
                wide = F.binary_cross_entropy_with_logits(discriminator(x), target)
            assert found.item() == pytest.approx(wide.item(), rel=2**-8), (step, target[0])
            precision.backward(found)
            precision.step(one)
            discriminator.zero_grad()
            generator.zero_grad()
    losses = [site for site in sites(exponents) if "entropy" in site]
    assert any("differentiable input" in site for site in losses) and len(losses) == (1 if "within" in loss else 2)


def test_micro_batches_share_the_places_of_the_fourth_pass_and_every_step_those_of_the_one_before() -> None:
    precision, model, optimizer, exponents = flex(nn.Linear(3, 1))
    for _ in range(3):
        for _ in range(10):
            with precision.autocast():
                loss = model(torch.randn(5, 3)).square().mean()
            precision.backward(loss)
        precision.step(optimizer)
    linear = [site for site in sites(exponents) if "linear" in site]
    assert linear == ["output of linear", *(f"output of linear, pass {one}" for one in range(2, LAST_PASS + 1))]


def test_each_step_of_any_optimizer_is_one_step() -> None:
    passes, optimizer = Passes(), torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    assert [passes.begin("a"), passes.begin("a")] == [1, 2]
    for step in range(1, 3):
        optimizer.step()
        assert (passes.step, passes.begin("a")) == (step, 1)


def test_an_entry_that_stays_open_for_many_steps_meets_the_same_places_in_each() -> None:
    precision, model, optimizer, exponents = flex(nn.Linear(3, 1))
    seen = []
    with precision.autocast():
        for _ in range(4):
            loss = model(torch.randn(5, 3)).square().mean()
            precision.backward(loss)
            precision.step(optimizer)
            seen.append(sites(exponents))
    assert seen[-1] == seen[0]


def test_an_evaluation_begins_no_pass() -> None:
    precision, model, optimizer, exponents = flex(nn.Linear(3, 1))
    for _ in range(2):
        for enabled in (False, True, False):
            with precision.autocast(), torch.set_grad_enabled(enabled):
                loss = model(torch.randn(5, 3)).sum()
        with precision.autocast():
            loss = model(torch.randn(5, 3)).sum()
        precision.backward(loss)
        precision.step(optimizer)
    assert {site for site in sites(exponents) if "linear" in site} == {
        "output of linear",
        "output of linear, pass 2",
    }


def test_models_keep_apart_when_one_made_before_them_is_gone() -> None:
    passes = Passes()
    first, second, third = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)
    assert [passes.root(one) for one in (first, second, third)] == ["", "model 2: ", "model 3: "]
    del second
    assert passes.root(nn.Linear(1, 1)) == "model 2: " and passes.root(third) == "model 3: "


def test_no_other_model_gets_the_sites_of_a_trained_one_that_is_gone() -> None:
    passes = Passes()
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    passes.keep_sites_of(first)
    assert [passes.root(one) for one in (first, second)] == ["", "model 2: "]
    passes.keep_sites_of(second)  # after its first run, as under lowp run
    passes = pickle.loads(pickle.dumps(passes))
    del first, second
    found = []
    for _ in range(2):  # not trained
        module = nn.Softmax(dim=1)
        found.append(passes.root(module))
        del module
    assert found == ["model 3: ", "model 3: "]


def test_the_counts_of_an_earlier_lowp_go_on_where_they_were() -> None:
    passes, first, second = Passes(), nn.Linear(1, 1), nn.Linear(1, 1)
    assert [passes.root(one) for one in (first, second)] == ["", "model 2: "] and passes.begin("") == 1
    assert passes.apart
    known = {name: value for name, value in passes.__getstate__().items() if name in ("step", "_begun", "_roots")}
    passes.__setstate__(known)
    assert passes.apart and passes.root(second) == "model 2: " and passes.begin("") == 2
    del first, known
    assert passes.root(nn.Linear(1, 1)) == ""  # nothing is kept


def test_a_second_model_does_not_begin_with_the_exponents_of_one_that_is_gone() -> None:
    torch.manual_seed(0)
    precision, _, _, exponents = flex(nn.Linear(3, 1))
    results = []
    for size in (1.0, 100.0):
        model = nn.Linear(3, 1)
        model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9))
        x = size * torch.ones(2, 3)
        with precision.autocast():
            found = model(x)
        results.append((found.detach(), F.linear(x, model.weight.detach(), model.bias.detach())))
        precision.backward(found.mean())
        precision.step(optimizer)
        del model, optimizer, found
    assert {"output of linear", "output of model 2: linear"} <= set(sites(exponents))
    for found, expected in results:
        assert torch.allclose(found, expected, rtol=2e-3)


class Twice(nn.Module):
    """Two blocks, each through `run`."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.run = run
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def block(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.first(x)), 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.run(self.block, self.run(self.block, x)))


def trained(run: Callable[..., Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    precision, model, optimizer, exponents = flex(Twice(run))
    for step in range(6):
        optimizer.zero_grad()
        for part in range(2):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + part)) * (1 + step)
            with precision.autocast():
                loss = model(x.requires_grad_()).square().mean()
            precision.backward(loss)
        precision.step(optimizer)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return {**state, **{site: torch.tensor(exponents.exponent(site)) for site in sorted(exponents.sites())}}


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_writes_again_what_it_wrote_and_teaches_nothing_twice(reentrant: bool) -> None:
    plain = trained(lambda block, x: block(x))
    again = trained(lambda block, x: checkpoint(block, x, use_reentrant=reentrant))
    assert plain.keys() == again.keys()
    for name, value in plain.items():
        assert torch.equal(value, again[name]), name


@pytest.mark.parametrize(
    ("site", "shape", "axis"),
    [
        ("gradient of weight", (1024, 2), 0),
        ("gradient of bias", (1024,), 0),
        ("gradient of bias", (1023,), None),
        ("gradient of weight", (2, 1024), None),
        ("exp_avg of weight", (1024, 1), 0),
        ("exp_avg of scale", (), None),
        ("output gradient of linear", (2, 3, 1024), 2),
        ("output gradient of linear", (2, 1024, 3), 1),
        ("output gradient of linear", (1024, 2), None),
        ("output gradient of linear", (2, 1024), 1),
        ("output gradient of sum", (1024,), None),
        ("output of linear", (2, 1024), None),
    ],
)
def test_features_are_the_first_axis_of_parameters_and_the_longest_but_the_first_of_gradients(
    site: str, shape: tuple[int, ...], axis: int | None
) -> None:
    assert features_axis(site, torch.ones(shape)) == axis
