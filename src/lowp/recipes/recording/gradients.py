"""Records of the gradients of weights and activations, of updates, and of what they lose in 16 bits."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lowp.errors import InvalidInput
from lowp.formats import FORMATS, FloatFormat
from lowp.presets import LossScale
from lowp.recipes.recording.runs import (
    NOBODY,
    Fp16Counts,
    Histogram,
    LostUpdates,
    Onlooker,
    head,
    moments_of,
    ratios,
    train,
    weights_of,
)
from lowp.recipes.sampling import ExactUpdates, Observer, Reference
from lowp.recipes.training import Settings, Training

# An update smaller than 2**limit times its weight can be lost in rounding to nearest: with p bits of significand, half
# an ulp is 2**-p times the weight's power of two, hence between 2**-(p + 1) and 2**-p times the weight.
LIMITS = {"bf16": -8, "fp16": -11}
_STEPS_OF_AN_EPOCH = 8
_STEPS_OF_A_RUN = 24


def record_updates(settings: Settings, onlooker: Onlooker = NOBODY) -> dict[str, Any]:
    """Train; return histograms of weight gradients and of |update| / |weight| in the first, middle and last epoch.

    They are those of matrices and kernels at eight steps of each epoch. Updates are computed by the recipe's optimizer
    in fp64. `below`: the share of ratios below the limit of each format. `lost`: the share of updates that do not
    change a weight stored in the format.
    """
    training = Training(settings)
    epochs = {"first": 0, "last": training.epochs - 1, "middle": training.epochs // 2}
    moment_of = {epoch: moment for moment, epoch in reversed(epochs.items())}  # fewer than three for a short run
    moments = {moment_of[epoch]: epoch for epoch in sorted(moment_of)}
    observer = _UpdateObserver(training, moments)
    train(training, observer, onlooker)
    return {
        **head("figure-updates", training),
        "limits": LIMITS,
        "weights": sum(weight.numel() for weight in weights_of(training.model.named_parameters()).values()),
        "moments": {moment: observer.moments[moment].document() for moment in moments},
    }


def record_gradients(settings: Settings, onlooker: Onlooker = NOBODY) -> dict[str, Any]:
    """Train in a naive precision and in fp32; return histograms of gradients, updates and update:weight ratios.

    They are sampled at 24 steps of the run. Gradients are those of an fp32 backward pass on the same weights and batch;
    `flushed`: the share of them that is zero in the run. Updates are computed in fp64 from the run's own gradients;
    `unmoved`: the share of them whose weight did not change in the run's step. `fp32`: the final metric of fp32.
    """
    training, baseline = Training(settings), Training(replace(settings, precision="fp32", loss_scale=None))
    observer = _NaiveObserver(training)
    train(training, observer, onlooker)
    train(baseline, None, onlooker)
    last = baseline.history[-1] if baseline.history else {}
    numbers = {"limits": LIMITS, "fp32": last.get(training.recipe.metric.name), **observer.document()}
    return {**head("figure-gradients", training), **numbers}


class _Moment:
    """Counts of the sampled steps of one epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.steps: list[int] = []
        self.rates: list[float] = []
        self.gradients, self.ratios = Histogram(), Histogram()
        self.lost = [LostUpdates(format) for format in LIMITS]

    def document(self) -> dict[str, Any]:
        """Return plain values; epochs are counted from 1."""
        return {
            "epoch": self.epoch + 1,
            "steps_sampled": self.steps,
            "learning_rates": [min(self.rates), max(self.rates)] if self.rates else None,
            "gradients": self.gradients.document(),
            "ratios": self.ratios.document(),
            "below": {format: self.ratios.below(limit) for format, limit in LIMITS.items()},
            "lost": {updates.format: updates.share for updates in self.lost},
        }


class _Comparing(Observer):
    """Observes `steps` of a training; can compare them with an fp32 backward pass, and with updates in fp64."""

    def __init__(self, training: Training, steps: Collection[int]) -> None:
        self._training, self.steps = training, steps
        self._reference = Reference(training.recipe, training.size, training.device)
        self._exact = ExactUpdates(training.recipe, training.size, training.device)

    def wants(self, progress: float) -> bool:
        """Return whether to observe the step."""
        return self._training.done in self.steps

    def before_forward(self) -> None:
        """Save the random states for the reference."""
        self._reference.remember()


class _UpdateObserver(_Comparing):
    """Counts weight gradients and fp64 updates at eight steps of each given epoch."""

    def __init__(self, training: Training, moments: dict[str, int]) -> None:
        sampled, length = moments_of(range(training.steps_per_epoch), _STEPS_OF_AN_EPOCH), training.steps_per_epoch
        super().__init__(training, [epoch * length + step for epoch in moments.values() for step in sampled])
        self.moments = {moment: _Moment(epoch) for moment, epoch in moments.items()}

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        """Count the gradients and the fp64 updates."""
        weights, parameters = model.state_dict(), dict(model.named_parameters())
        updates = weights_of(self._exact.of(weights, parameters, optimizer))
        step = self._training.done
        for moment in self.moments.values():
            if moment.epoch != self._training.epoch:
                continue
            moment.steps.append(step)
            moment.rates.append(optimizer.param_groups[0]["lr"])
            for name, update in updates.items():
                gradient, weight = parameters[name].grad, weights[name].double()
                if gradient is not None:
                    moment.gradients.add(gradient)
                    moment.ratios.add(ratios(weight, update))
                    for lost in moment.lost:
                        lost.add(weight, update)


class _NaiveObserver(_Comparing):
    """Counts gradients and updates of a naive 16-bit run, compared with fp32 and fp64, at 24 steps."""

    def __init__(self, training: Training) -> None:
        super().__init__(training, moments_of(range(training.steps), _STEPS_OF_A_RUN))
        self._updates: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}
        self.gradients, self.updates, self.ratios = Fp16Counts(), Fp16Counts(), Histogram()
        self._flushed = self._unmoved = self._nonzero = 0

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        """Compare the gradients with those of the reference, and count the updates computed from them in fp64."""
        weights, parameters = model.state_dict(), dict(model.named_parameters())
        self._reference.backward(weights, batch)
        for name, parameter in weights_of(self._reference.model.named_parameters()).items():
            reference, gradient = parameter.grad, parameters[name].grad
            if reference is not None:
                self.gradients.add(reference)
                self._flushed += int(((reference != 0) & (True if gradient is None else gradient == 0)).sum())
        self._updates = weights_of(self._exact.of(weights, parameters, optimizer))
        self._before = {name: weights[name].detach().clone() for name in self._updates}
        for name, update in self._updates.items():
            self.updates.add(update)
            self.ratios.add(ratios(weights[name].double(), update))

    def after_step(self, model: nn.Module) -> None:
        """Count the weights with a nonzero update that did not change."""
        weights = model.state_dict()
        for name, update in self._updates.items():
            nonzero = update != 0
            self._nonzero += int(nonzero.sum())
            self._unmoved += int((nonzero & (weights[name] == self._before[name])).sum())

    def document(self) -> dict[str, Any]:
        """Return plain values; shares are those of the nonzero elements of the histograms."""
        return {
            "steps_sampled": self.steps,
            "gradients": self.gradients.document(),
            "flushed": self._flushed / max(1, self.gradients.histogram.present),
            "updates": self.updates.document(),
            "ratios": self.ratios.document(),
            "below": {format: self.ratios.below(limit) for format, limit in LIMITS.items()},
            "unmoved": self._unmoved / max(1, self._nonzero),
        }


# -- gradients of activations ------------------------------------------------------------------------------------------
_STEPS_OF_ACTIVATIONS = 16


def record_activation_gradients(settings: Settings, onlooker: Onlooker = NOBODY) -> dict[str, Any]:
    """Train; return histograms of the gradients of activations and of weights, and the medians of both by layer.

    They are sampled at 16 steps of the run, each in an fp32 backward pass of the unscaled loss on the run's weights and
    batch. Activations are the outputs of all modules without submodules.
    """
    training = Training(settings)
    observer = _ActivationObserver(training)
    train(training, observer, onlooker)
    return {
        **head("figure-activation-gradients", training),
        "steps_sampled": observer.steps,
        "activations": observer.activations.document(),
        "weights": observer.weights.document(),
        "layers": list(observer.layers()),
    }


def record_loss_scaling(settings: Settings, onlooker: Onlooker = NOBODY) -> dict[str, Any]:
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
    train(training, observer, onlooker)
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


class _ActivationObserver(_Comparing):
    """Counts the gradients of activations, unscaled and scaled, and of weights at some steps."""

    def __init__(self, training: Training, scaled: bool = False) -> None:
        super().__init__(training, moments_of(range(training.steps), _STEPS_OF_ACTIVATIONS))
        self._counts_scaled = scaled
        GradientHooks(self._reference.model, self._add)
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
