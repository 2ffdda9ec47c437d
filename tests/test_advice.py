"""The advice in error messages works: each remedy is tried in the case for which the message recommends it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lowp
from lowp import casts
from lowp.errors import InvalidInput, Misuse
from lowp.policy import Policy, Rule
from lowp.presets import PRESETS


def net(last: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1)]
    return nn.Sequential(*layers, *([] if last is None else [last]))


def trained(precision: lowp.Precision, model: nn.Module, loss_of: object, steps: int = 60) -> list[float]:
    """Return the losses of a few steps on one batch; `loss_of(model, x, y)` runs in the region."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 20, generator=generator)
    y = (x[:, :1] * x[:, 1:2] > 0).float()
    model, optimizer = precision.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with precision.autocast():
            loss = loss_of(model, x, y)  # type: ignore[operator]
        precision.backward(loss)
        precision.step(optimizer)
        losses.append(float(loss.detach()))
    return losses


# -- binary_cross_entropy ---------------------------------------------------------------------------------------------
def saturating(last: nn.Module | None = None) -> nn.Module:
    """Return a network whose logits are so large that sigmoids round to 1 in fp16."""
    model = net(last)
    with torch.no_grad():
        model[2].weight.mul_(60)  # type: ignore[index,union-attr,operator]
    return model


def of_probabilities(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy(model(x), y)


def of_logits(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(x), y)


def outside(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    logits = model(x)
    with lowp.autocast("fp32"):
        return nn.functional.binary_cross_entropy(torch.sigmoid(logits.float()), y)


def with_rule(*ops: str) -> lowp.Precision:
    return lowp.Precision(PRESETS["fp16"].policy.before(Rule.of(*ops, input="fp32")))


def test_each_cure_for_binary_cross_entropy_trains() -> None:
    with pytest.raises(Misuse, match=r"Rule.of\('sigmoid', 'binary_cross_entropy', input='fp32'\)"):
        trained(lowp.Precision("fp16"), saturating(nn.Sigmoid()), of_probabilities)
    found = {
        "logits": trained(lowp.Precision("fp16"), saturating(), of_logits),
        "a rule for both": trained(
            with_rule("sigmoid", "binary_cross_entropy"), saturating(nn.Sigmoid()), of_probabilities
        ),
        "outside": trained(lowp.Precision("fp16"), saturating(), outside),
    }
    for cure, losses in found.items():
        assert losses[-1] < 0.1 * losses[0], cure


def test_a_rule_for_the_loss_alone_does_not_train() -> None:
    """Therefore it is not recommended."""
    with pytest.raises(lowp.step.NonFiniteGradients):
        trained(with_rule("binary_cross_entropy"), saturating(nn.Sigmoid()), of_probabilities)


# -- parameters in few bits, and masters ------------------------------------------------------------------------------
def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x).float() - y).square().mean()


def test_masters_around_an_optimizer_of_fp16_parameters() -> None:
    model = net().half()
    scaler = lowp.GradScaler("cpu")
    x = torch.randn(8, 20).half()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(x).float().square().mean()).backward()
    with pytest.raises(InvalidInput, match=r"lowp.MasterWeights\(optimizer, storage='fp16'\)"):
        scaler.unscale_(plain)
    optimizer = lowp.MasterWeights(plain, storage="fp16")
    scaler = lowp.GradScaler("cpu")
    optimizer.zero_grad()
    scaler.scale(model(x).float().square().mean()).backward()
    scaler.step(optimizer)
    assert scaler.stepped


@pytest.mark.parametrize("name", ["fp16", "bf16", "dfp16", "e5m7"])
@pytest.mark.parametrize("masters", ["split", "fp32", "stochastic"])
def test_the_preset_that_is_named_for_masters_takes_them(name: str, masters: str) -> None:
    with pytest.raises(InvalidInput, match=r"use .*, or a policy with parameters=") as caught:
        lowp.Precision(name, masters=masters)
    for named in str(caught.value).partition(": use ")[2].partition(", or a policy")[0].split(" or "):
        assert trained(lowp.Precision(named, masters=masters), net(), squares, steps=2)
    stored = Policy((Rule.of("contraction", input="bf16", weight="bf16"),), parameters=casts.parse("bf16"))
    assert trained(lowp.Precision(stored, masters=masters), net(), squares, steps=2)


def test_split_masters_of_fp16_name_what_takes_them() -> None:
    with pytest.raises(InvalidInput, match="stores parameters in fp16: use bf16-storage, or masters='fp32'"):
        lowp.Precision("fp16-storage", masters="split")
    assert trained(lowp.Precision("fp16-storage", masters="fp32"), net(), squares, steps=2)


# -- closures ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("precision", [("fp16", "none"), ("bf16", None), ("fp8", None)])
def test_a_closure_without_a_loss_scale(precision: tuple[str, str | None]) -> None:
    model = net()
    chosen = lowp.Precision(precision[0], loss_scale=precision[1])
    model, optimizer = chosen.prepare(model, torch.optim.LBFGS(model.parameters(), lr=0.1))
    x = torch.randn(16, 20)
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        with chosen.autocast():
            loss = model(x).float().square().mean()
        chosen.backward(loss)
        losses.append(float(loss.detach()))
        return loss

    chosen.step(optimizer, closure=closure)
    assert losses[-1] < losses[0]


# -- shared exponents -------------------------------------------------------------------------------------------------
def test_an_op_kept_in_fp32_by_a_rule_under_shared_exponents() -> None:
    """A user's policy with predicted parameters needs no advice about masters."""
    rule = Rule.of("relu", input="fp32", output="fp32")
    precision = lowp.Precision(PRESETS["flex16+5"].policy.before(rule))
    losses = trained(precision, net(), squares, steps=20)
    assert losses[-1] < losses[0]


def test_predicted_parameters_with_the_rule_that_is_asked_for() -> None:
    cast = casts.parse("flex16+5:autoflex")
    with pytest.raises(InvalidInput, match=r"Rule.of\(output='flex16\+5:autoflex'\)"):
        lowp.Precision(Policy((), parameters=cast)).prepare(net())
    precision = lowp.Precision(Policy((Rule.of(output="flex16+5:autoflex"),), parameters=cast))
    assert trained(precision, net(), squares, steps=2)
