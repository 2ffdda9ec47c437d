"""Records of the gradients of weights and activations, of updates, and of what they lose in 16 bits."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from lowp.errors import InvalidInput
from lowp.formats import FORMATS, FloatFormat
from lowp.numerics.spectrum import Spectrum
from lowp.presets import LossScale
from lowp.recipes.recording import runs
from lowp.recipes.recording.runs import NOBODY, Fp16Counts, Onlooker, are_weights, head, train
from lowp.recipes.sampling import Comparing, Share, is_lost
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
        "weights": sum(weight.numel() for weight in training.model.parameters() if are_weights(weight)),
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


def _below_limits(ratios: Spectrum) -> dict[str, float]:
    return {format: runs.below(ratios, limit) for format, limit in LIMITS.items()}


class _Moment:
    """Counts of the sampled steps of one epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.steps: list[int] = []
        self.rates: list[float] = []
        self.gradients, self.ratios = Spectrum(), Spectrum()
        self.lost = {format: Share() for format in LIMITS}

    def document(self) -> dict[str, Any]:
        """Return plain values; epochs are counted from 1."""
        return {
            "epoch": self.epoch + 1,
            "steps_sampled": self.steps,
            "learning_rates": [min(self.rates), max(self.rates)] if self.rates else None,
            "gradients": runs.histogram(self.gradients),
            "ratios": runs.histogram(self.ratios),
            "below": _below_limits(self.ratios),
            "lost": {format: share.value for format, share in self.lost.items()},
        }


class _UpdateObserver(Comparing):
    """Counts weight gradients and fp64 updates at eight steps of each given epoch."""

    def __init__(self, training: Training, moments: dict[str, int]) -> None:
        sampled, length = runs.moments_of(range(training.steps_per_epoch), _STEPS_OF_AN_EPOCH), training.steps_per_epoch
        super().__init__(training, [epoch * length + step for epoch in moments.values() for step in sampled])
        self.moments = {moment: _Moment(epoch) for moment, epoch in moments.items()}

    def before_step(self, batch: Any) -> None:
        """Count the gradients and the fp64 updates."""
        moment = next(one for one in self.moments.values() if one.epoch == self.training.epoch)
        moment.steps.append(self.training.done)
        moment.rates.append(self.training.optimizer.param_groups[0]["lr"])
        for name, weight, update in self.updates():
            gradient = self.training.model.get_parameter(name).grad
            if gradient is not None and are_weights(weight):
                moment.gradients += Spectrum.of(gradient)
                moment.ratios += runs.ratios(weight, update)
                for format, share in moment.lost.items():
                    share.add(is_lost(weight, update, format), update != 0)


class _NaiveObserver(Comparing):
    """Counts gradients and updates of a naive 16-bit run, compared with fp32 and fp64, at 24 steps."""

    def __init__(self, training: Training) -> None:
        super().__init__(training, runs.moments_of(range(training.steps), _STEPS_OF_A_RUN))
        self._updates: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}
        self._gradients_seen, self._updates_seen, self._ratios = Fp16Counts(), Fp16Counts(), Spectrum()
        self._flushed, self._unmoved = Share(), Share()

    def before_step(self, batch: Any) -> None:
        """Compare the gradients with those in fp32, and count the updates computed from them in fp64."""
        for _, exact, own in self.gradients(batch):
            if are_weights(exact):
                self._gradients_seen.add(exact)
                self._flushed.add(own == 0, exact != 0)
        self._before = self.weights()
        self._updates = {}
        for name, weight, update in self.updates():
            if are_weights(weight):
                self._updates[name] = update
                self._updates_seen.add(update)
                self._ratios += runs.ratios(weight, update)

    def after_step(self) -> None:
        """Count the weights with a nonzero update that did not change."""
        weights = self.training.model.state_dict()
        for name, update in self._updates.items():
            self._unmoved.add(weights[name] == self._before[name], update != 0)

    def document(self) -> dict[str, Any]:
        """Return plain values; shares are those of the nonzero elements of the histograms."""
        return {
            "steps_sampled": self.steps,
            "gradients": self._gradients_seen.document(),
            "flushed": self._flushed.value,
            "updates": self._updates_seen.document(),
            "ratios": runs.histogram(self._ratios),
            "below": _below_limits(self._ratios),
            "unmoved": self._unmoved.value,
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
        "weights": observer.weights_seen.document(),
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


def hear_gradients(model: nn.Module, listen: Callable[[str, Tensor], None]) -> None:
    """Register hooks that call listen(name, gradient) for every output of every module without submodules.

    A module that is called twice in a forward pass is reported twice. An output that is changed in place afterwards (by
    ReLU) is reported with the gradient before the change.
    """

    def after(name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(listen, name))  # type: ignore[no-untyped-call]

    for name, module in _leaves(model):
        module.register_forward_hook(partial(after, name))


def _leaves(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if not any(True for _ in module.children())]


class _ActivationObserver(Comparing):
    """Counts the gradients of activations, unscaled and scaled, and of weights at some steps."""

    def __init__(self, training: Training, scaled: bool = False) -> None:
        super().__init__(training, runs.moments_of(range(training.steps), _STEPS_OF_ACTIVATIONS))
        self._counts_scaled = scaled
        hear_gradients(self.reference, self._add)
        self.scales: list[tuple[int, float]] = []  # (step, scale) at each change
        self._scale = 1.0  # at the sampled step
        self.largest = 0.0  # the largest gradient of a parameter
        self.activations, self.scaled, self.weights_seen = Fp16Counts(), Fp16Counts(), Fp16Counts()
        # of each module without submodules that has a matrix or a kernel: gradients of its outputs, and of its weights
        layers = [name for name, one in _leaves(self.reference) if any(map(are_weights, one.parameters(recurse=False)))]
        self._of_layer = {name: [Spectrum(), Spectrum()] for name in layers}

    def wants(self, progress: float) -> bool:
        """Return whether to sample the step, 16 in all; record the loss scale before every step."""
        step, precision = self.training.done, self.training.precision
        if step == 1 and precision.skipped_steps == 0:
            self.scales = [(0, precision.scale)]  # it was set in the first backward pass
        elif not self.scales or precision.scale != self.scales[-1][1]:
            self.scales.append((step, precision.scale))
        return super().wants(progress)

    def before_step(self, batch: Any) -> None:
        """Run the backward pass in fp32, whose hooks count gradients of activations; count those of its weights."""
        self._scale = self.training.precision.scale
        for name, gradient, _ in self.gradients(batch):
            self.largest = max(self.largest, float(gradient.abs().max()))
            if are_weights(gradient):
                self._add_to_layer(name.rpartition(".")[0], 1, self.weights_seen.add(gradient))

    def _add(self, name: str, gradient: Tensor) -> None:
        self._add_to_layer(name, 0, self.activations.add(gradient))
        if self._counts_scaled:
            self.scaled.add(gradient * self._scale)

    def _add_to_layer(self, name: str, place: int, seen: Spectrum) -> None:
        if name in self._of_layer:
            self._of_layer[name][place] += seen

    def layers(self) -> Iterator[dict[str, Any]]:
        """Yield log2 of the median gradients of the outputs and the weights of each layer, in the model's order."""
        for name, (activations, weights) in self._of_layer.items():
            if activations.nonzero and weights.nonzero:
                yield {"name": name, "activations": runs.median(activations), "weights": runs.median(weights)}
