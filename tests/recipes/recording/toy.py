"""A network so small that its gradients are known: one example, two layers, plain SGD."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lowp.recipes.recipe import Data, Metric, Recipe, Size, TensorExamples, constant

X = torch.tensor([[1.0, -2.0, 0.5, 2.0**-12, 0.0]])
SLOPES = torch.tensor([1.0, 2.0**-14, -(2.0**-23)])  # of the loss by each output
RATE = 0.25


def make_model(size: Size) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def initial() -> nn.Sequential:
    """Return the model of seed 0."""
    torch.manual_seed(0)
    model = make_model(Size(1, 1, RATE, 0))
    assert isinstance(model, nn.Sequential)
    return model


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it the only recipe."""
    data = Data(TensorExamples(X), TensorExamples(X), "one example")
    recipe = Recipe(
        name="toy",
        summary="",
        source="",
        data="",
        sizes={"cpu": Size(1, 1, RATE, 39)},
        metric=Metric("loss", higher_is_better=False, share=False),
        load=lambda size, path: data,
        make_model=make_model,
        loss=lambda model, batch: (model(batch[0]).float() * SLOPES).sum(),
        evaluate=lambda model, batches: {"loss": 0.5},
        make_optimizer=lambda model, rate: torch.optim.SGD(model.parameters(), lr=rate),
        schedule=constant,
    )
    monkeypatch.setattr("lowp.recipes.training.get", lambda name: recipe)


def gradients(model: nn.Sequential) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradients of the outputs of the three modules and of the two weights, by the chain rule."""
    with torch.no_grad():
        first, last = model[0].weight, model[2].weight
        before = X @ first.T + model[0].bias
        hidden = before.clamp(min=0)
        outputs = {"2": SLOPES[None, :], "1": SLOPES[None, :] @ last}
        outputs["0"] = outputs["1"] * (before > 0)
        weights = {"0.weight": outputs["0"].T @ X, "2.weight": outputs["2"].T @ hidden}
    return outputs, weights


def step(model: nn.Sequential) -> None:
    """Take a step of SGD with these gradients; those of the biases equal the outputs' gradients."""
    outputs, weights = gradients(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            layer = name.partition(".")[0]
            parameter -= RATE * (weights[name] if name in weights else outputs[layer][0])


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def share(some: Tensor, among: Tensor) -> float:
    return int((some & among).sum()) / int(among.sum())
