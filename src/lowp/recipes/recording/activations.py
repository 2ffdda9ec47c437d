"""Records of the gradients of activations and weights in a training run, and of the effect of loss scaling in fp16."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lowp.errors import InvalidInput
from lowp.formats import FORMATS, FloatFormat
from lowp.presets import LossScale
from lowp.recipes.recording.runs import NOBODY, Fp16Counts, Histogram, Watch, head, moments_of, train, weights_of
from lowp.recipes.sampling import Observer, Reference
from lowp.recipes.training import Settings, Training

_STEPS_OF_A_RUN = 16


def record_activation_gradients(settings: Settings, watch: Watch = NOBODY) -> dict[str, Any]:
    """Train; return histograms of the gradients of activations and of weights, and the medians of both by layer.

    They are sampled at 16 steps of the run, each in an fp32 backward pass of the unscaled loss on the run's weights and
    batch. Activations are the outputs of all modules without submodules.
    """
    training = Training(settings)
    observer = _ActivationObserver(training)
    train(training, observer, watch)
    return {
        **head("figure-activation-gradients", training),
        "steps_sampled": observer.steps,
        "activations": observer.activations.document(),
        "weights": observer.weights.document(),
        "layers": list(observer.layers()),
    }


def record_loss_scaling(settings: Settings, watch: Watch = NOBODY) -> dict[str, Any]:
    """Train with a loss scale; return histograms of the gradients of activations without it and with it.

    Both are sampled in an fp32 backward pass at 16 steps of the run; the second are multiplied by the run's loss scale.
    `scales`: the steps at which the scale changed, and the scales. `room`: the number of times that the last scale can
    be doubled before the largest gradient of an activation or a parameter at these steps overflows fp16.

    Raises InvalidInput without a loss scale.
    """
    scale = LossScale.parse("none" if settings.loss_scale is None else settings.loss_scale)
    if scale.kind == "none":
        raise InvalidInput(f"--scale {settings.loss_scale} has no effect: give a number such as 256, or dynamic")
    training = Training(settings)
    observer = _ActivationObserver(training, scaled=True)
    train(training, observer, watch)
    before, after = observer.activations.document(), observer.scaled.document()
    format = FORMATS["fp16"]
    assert isinstance(format, FloatFormat)
    largest = max(before["histogram"]["largest"], observer.largest)
    last = training.precision.scale
    return {
        **head("figure-loss-scaling", training),
        "scale": str(scale),
        "scales": observer.scales,
        "last_scale": last,
        "skipped_steps": training.precision.skipped_steps,
        "room": math.floor(math.log2(format.maximum / (last * largest))) if largest else None,
        "steps_sampled": observer.steps,
        "before": before,
        "after": after,
    }


class GradientHooks:
    """Hooks that call listen(name, gradient) for every output of every module without submodules.

    A module that is called twice in a forward pass is reported twice. An output that is changed in place afterwards (by
    ReLU) is reported with the gradient before the change.
    """

    def __init__(self, model: nn.Module, listen: Callable[[str, Tensor], None]) -> None:
        self._listen = listen
        for name, module in model.named_modules():
            if not any(True for _ in module.children()):
                module.register_forward_hook(partial(self._after, name))

    def _after(self, name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._listen, name))  # type: ignore[no-untyped-call]


class _ActivationObserver(Observer):
    """Counts the gradients of activations, unscaled and scaled, and of weights at some steps."""

    def __init__(self, training: Training, scaled: bool = False) -> None:
        self._training = training
        self._counts_scaled = scaled
        self._reference = Reference(training.recipe, training.size, training.device)
        GradientHooks(self._reference.model, self._add)
        steps = range(training.epochs * training.steps_per_epoch)
        self.steps = moments_of(steps, _STEPS_OF_A_RUN)
        self.scales: list[tuple[int, float]] = []  # (step, scale) at each change
        self._scale = 1.0  # at the sampled step
        self.largest = 0.0  # the largest gradient of a parameter
        self.activations, self.scaled, self.weights = Fp16Counts(), Fp16Counts(), Fp16Counts()
        self._of_layer: dict[str, tuple[Histogram, Histogram]] = {
            name: (Histogram(), Histogram()) for name in _layers(self._reference.model)
        }

    def wants(self, progress: float) -> bool:
        """Return whether to sample the step, 16 in all; record the loss scale before every step."""
        step = self._training.done
        precision = self._training.precision
        if step == 1 and precision.skipped_steps == 0:
            self.scales = [(0, precision.scale)]  # it was set in the first backward pass
        elif not self.scales or precision.scale != self.scales[-1][1]:
            self.scales.append((step, precision.scale))
        return step in self.steps

    def before_forward(self) -> None:
        """Save the random states for the reference."""
        self._reference.remember()

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        """Run the reference's backward pass, whose hooks count gradients of activations; count those of its weights."""
        self._scale = self._training.precision.scale
        self._reference.backward(model.state_dict(), batch)
        named = self._reference.model.named_parameters()
        gradients = {name: parameter.grad for name, parameter in named if parameter.grad is not None}
        self.largest = max([self.largest, *(float(gradient.abs().max()) for gradient in gradients.values())])
        for name, gradient in weights_of(gradients).items():
            self.weights.add(gradient)
            layer = name.rpartition(".")[0]
            if layer in self._of_layer:
                self._of_layer[layer][1].add(gradient)

    def _add(self, name: str, gradient: Tensor) -> None:
        self.activations.add(gradient)
        if name in self._of_layer:
            self._of_layer[name][0].add(gradient)
        if self._counts_scaled:
            self.scaled.add(gradient * self._scale)

    def layers(self) -> Iterator[dict[str, Any]]:
        """Yield log2 of the median gradients of the outputs and the weights of each layer, in the model's order."""
        for name, (activations, weights) in self._of_layer.items():
            if activations.present and weights.present:
                yield {"name": name, "activations": activations.median(), "weights": weights.median()}


def _layers(model: nn.Module) -> list[str]:
    """Return the names of the modules without submodules that have a matrix or a kernel."""
    return [
        name
        for name, module in model.named_modules()
        if not any(True for _ in module.children()) and weights_of(module.named_parameters(recurse=False))
    ]
