"""The change of the loss if one layer is rounded: a first-order prediction, and a measurement with the cast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowp.kernels import quantize
from lowp.numerics.prediction import sensitivity
from lowp.numerics.updates import Updates
from lowp.recipes.training import Training

__all__ = ["Confirmed", "confirmed"]


@dataclass(frozen=True)
class Confirmed:
    """One tensor of a layer: the deviation of the loss that is predicted, and its change when the tensor was cast."""

    module: str
    role: str
    predicted: float
    real: float

    def __str__(self) -> str:
        return f"{self.module or 'the model'} {self.role}: {self.predicted:.1e} predicted, {self.real:.1e} real"


def confirmed(training: Training, to: str, count: int = 3) -> list[Confirmed]:
    """The weights and outputs of linear and convolutional layers to which the loss is most sensitive, each cast alone.

    All on one batch, from the same random state; the model, its buffers and its gradients are left as they were.
    """
    model = training.model
    batch = training.data.training.batch(torch.arange(training.batch), torch.Generator().manual_seed(0))
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    layers = {name: one for name, one in model.named_modules() if isinstance(one, kinds)}
    with _as_it_was(model):
        outputs: dict[str, Tensor] = {}
        with ExitStack() as stack:
            for name, layer in layers.items():
                stack.callback(layer.register_forward_hook(_keeper(outputs, name)).remove)
            loss = _loss(training, batch)
            loss.backward()  # type: ignore[no-untyped-call]
        found: list[tuple[float, str, str]] = []
        for name, layer in layers.items():
            pairs = {"weight": (layer.weight, layer.weight.grad)}
            if name in outputs:
                pairs["output"] = (outputs[name], outputs[name].grad)
            for role, (tensor, gradient) in pairs.items():
                if gradient is not None:
                    predicted = sensitivity(Updates.of(tensor, tensor, gradient), to)
                    found.append((predicted, name, role))
        found.sort(reverse=True)
        kept: list[Confirmed] = []
        for role in ("weight", "output"):
            for predicted, name, _ in [one for one in found if one[2] == role][:count]:
                with torch.no_grad(), _cast(layers[name], role, to):
                    moved = abs(float(_loss(training, batch)) - float(loss))
                kept.append(Confirmed(name, role, predicted, moved))
    return kept


def _keeper(outputs: dict[str, Tensor], name: str) -> Callable[[nn.Module, Any, Any], None]:
    def keep(module: nn.Module, given: Any, output: Any) -> None:
        # of a layer that runs several times the first output is judged, and all are cast
        if isinstance(output, Tensor) and output.requires_grad and name not in outputs:
            output.retain_grad()
            outputs[name] = output

    return keep


def _loss(training: Training, batch: Any) -> Tensor:
    torch.manual_seed(0)
    with training.precision.autocast():
        loss: Tensor = training.recipe.loss(training.model, batch)
    return loss


@contextmanager
def _cast(layer: nn.Module, role: str, to: str) -> Iterator[None]:
    """Let one layer compute with its weight, or write its output, in the format."""
    if role == "output":
        handle = layer.register_forward_hook(lambda module, given, output: quantize(output, to))
        try:
            yield
        finally:
            handle.remove()
        return
    weight = layer.get_parameter("weight")
    before = weight.detach().clone()
    weight.copy_(quantize(weight, to))
    try:
        yield
    finally:
        weight.copy_(before)


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    random = torch.get_rng_state()
    buffers = [(one, one.clone()) for one in model.buffers()]
    gradients = [(one, one.grad) for one in model.parameters()]
    model.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        torch.set_rng_state(random)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
