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


@dataclass(frozen=True)
class Confirmed:
    """A layer's weight or output: the predicted and the measured absolute change of the loss when it is cast."""

    module: str
    role: str
    predicted: float
    real: float

    def __str__(self) -> str:
        return f"{self.module or 'the model'} {self.role}: {self.predicted:.1e} predicted, {self.real:.1e} real"


def confirmed(training: Training, to: str, count: int = 3) -> list[Confirmed]:
    """Cast single weights and outputs to the format `to`, and return predicted and measured changes of the loss.

    They are the `count` weights and the `count` outputs of linear and convolutional layers with the largest predicted
    changes. All losses are those of one batch with the same random state. The model, its buffers, its gradients and the
    random state are restored.
    """
    model = training.model
    batch = training.data.training.batch(torch.arange(training.batch), torch.Generator().manual_seed(0))
    kinds = (nn.Linear, nn.modules.conv._ConvNd)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    with _restored(model):
        outputs: dict[str, Tensor] = {}
        with ExitStack() as stack:
            for name, layer in layers.items():
                stack.callback(layer.register_forward_hook(_save_output(outputs, name)).remove)
            loss = _loss(training, batch)
            loss.backward()  # type: ignore[no-untyped-call]
        predictions: list[tuple[float, str, str]] = []
        for name, layer in layers.items():
            pairs = {"weight": (layer.weight, layer.weight.grad)}
            if name in outputs:
                pairs["output"] = (outputs[name], outputs[name].grad)
            for role, (tensor, gradient) in pairs.items():
                if gradient is not None:
                    predicted = sensitivity(Updates.of(tensor, tensor, gradient), to)
                    predictions.append((predicted, name, role))
        predictions.sort(reverse=True)
        results: list[Confirmed] = []
        for role in ("weight", "output"):
            for predicted, name, _ in [prediction for prediction in predictions if prediction[2] == role][:count]:
                with torch.no_grad(), _cast(layers[name], role, to):
                    change = abs(float(_loss(training, batch)) - float(loss))
                results.append(Confirmed(name, role, predicted, change))
    return results


def _save_output(outputs: dict[str, Tensor], name: str) -> Callable[[nn.Module, Any, Any], None]:
    def save(module: nn.Module, args: Any, output: Any) -> None:
        # for a layer that runs several times, the first output is predicted, and all are cast
        if isinstance(output, Tensor) and output.requires_grad and name not in outputs:
            output.retain_grad()
            outputs[name] = output

    return save


def _loss(training: Training, batch: Any) -> Tensor:
    torch.manual_seed(0)
    with training.precision.autocast():
        loss: Tensor = training.recipe.loss(training.model, batch)
    return loss


@contextmanager
def _cast(layer: nn.Module, role: str, to: str) -> Iterator[None]:
    """Cast a layer's weight, or its outputs, to the format for a while."""
    if role == "output":
        handle = layer.register_forward_hook(lambda module, args, output: quantize(output, to))
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
def _restored(model: nn.Module) -> Iterator[None]:
    """Set gradients to None, and restore them, the buffers and torch's random state at the end."""
    rng_state = torch.get_rng_state()
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        torch.set_rng_state(rng_state)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
