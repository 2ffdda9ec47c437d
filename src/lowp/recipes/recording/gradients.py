"""Records of the gradients of weights and activations, of updates, and of what they lose in 16 bits.

All numbers are those of the record of `lowp.profile`: of the step that fp32 takes from where the run stands.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from lowp.errors import InvalidInput
from lowp.numerics.advice import lost_share
from lowp.numerics.part import Part
from lowp.numerics.prediction import effect
from lowp.numerics.spectrum import PARTS, Spectrum, Updates
from lowp.presets import LossScale
from lowp.recipes.recording import runs
from lowp.recipes.recording.runs import NOBODY, Onlooker, are_weights, head, train
from lowp.recipes.sampling import Fp32Steps, Sampler, moments_of
from lowp.recipes.training import Settings, Training

# An update smaller than 2**limit times its weight can be lost in rounding to nearest: with p bits of significand, half
# an ulp is 2**-p times the weight's power of two.
LIMITS = {"bf16": -8, "fp16": -11}
_STEPS_OF_AN_EPOCH = 8
_STEPS_OF_A_RUN = 24
_STEPS_OF_ACTIVATIONS = 16


def record_updates(settings: Settings, onlooker: Onlooker = NOBODY) -> dict[str, Any]:
    """Train; return histograms of weight gradients and of |update| / |weight| in the first, middle and last epoch.

    They are those of matrices and kernels at eight steps of each epoch. Both sizes of a ratio are rounded down to
    powers of two, as a rounding sees them. `below`: the share of ratios below the limit of each format. `lost`: the
    share of updates that do not change a weight stored in the format.
    """
    training = Training(settings)
    epochs = {"first": 0, "last": training.epochs - 1, "middle": training.epochs // 2}
    moment_of = {epoch: moment for moment, epoch in reversed(epochs.items())}  # fewer than three for a short run
    observer = _Epochs(training, sorted(moment_of))
    train(training, observer, onlooker)
    return {
        **head("figure-updates", training),
        "limits": LIMITS,
        "weights": sum(weight.numel() for weight in training.model.parameters() if are_weights(weight)),
        "moments": {moment_of[epoch]: observer.document(epoch) for epoch in sorted(moment_of)},
    }


def record_gradients(settings: Settings, onlooker: Onlooker = NOBODY) -> dict[str, Any]:
    """Train in a naive precision and in fp32; return histograms of gradients, updates and update:weight ratios.

    They are those of the matrices and kernels at 24 steps of the run, which fp32 takes first. `flushed`: the share of
    these gradients that is zero in the run; `unmoved`: of the weights with a gradient, the share that the run's step
    did not change. `fp32`: the final metric of fp32.
    """
    training, baseline = Training(settings), Training(replace(settings, precision="fp32", loss_scale=None))
    observer = Sampler(training, _STEPS_OF_A_RUN, are_weights)
    train(training, observer, onlooker)
    train(baseline, None, onlooker)
    last, shares = baseline.history[-1] if baseline.history else {}, observer.shares()
    names, part = _weights_of(observer.model), observer.part
    return {
        **head("figure-gradients", training),
        "limits": LIMITS,
        "fp32": last.get(training.recipe.metric.name),
        "steps_sampled": observer.steps,
        "gradients": runs.in_fp16(_total(part, "weight_grad", names)),
        "flushed": shares["flushed_gradients"] or 0.0,
        "updates": runs.in_fp16(_total(part, "update", names)),
        **_ratios(part, names),
        "unmoved": shares["lost_updates"] or 0.0,
    }


def record_activation_gradients(settings: Settings, onlooker: Onlooker = NOBODY) -> dict[str, Any]:
    """Train; return histograms of the gradients of activations and of weights, and the medians of both by layer.

    They are those of the unscaled loss at 16 steps of the run, which fp32 takes first. Activations are the outputs of
    all ops but those that compute in fp32 in 16 bits, too, such as sums and losses.
    """
    training = Training(settings)
    observer = Fp32Steps(training, moments_of(range(training.steps), _STEPS_OF_ACTIVATIONS))
    train(training, observer, onlooker)
    return {
        **head("figure-activation-gradients", training),
        "steps_sampled": observer.steps,
        "activations": runs.in_fp16(_activations(observer.part)),
        "weights": runs.in_fp16(_total(observer.part, "weight_grad", _weights_of(observer.model))),
        "layers": list(_layers(observer.model, observer.part)),
    }


def record_loss_scaling(settings: Settings, onlooker: Onlooker = NOBODY) -> dict[str, Any]:
    """Train with a loss scale; return histograms of the gradients of activations without it and with it.

    Both are of 16 steps of the run, which fp32 takes first; the second are multiplied by the run's loss scale.
    `scales`: the steps at which the scale changed, and the scales. `room`: the number of times that the last scale can
    be doubled before the largest gradient of an activation or a parameter at these steps overflows fp16.

    Raises InvalidInput without a loss scale.
    """
    scale = LossScale.parse("none" if settings.loss_scale is None else settings.loss_scale)
    if scale.kind == "none":
        raise InvalidInput(f"--scale {settings.loss_scale} has no effect: give a number such as 256, or dynamic")
    training = Training(settings)
    observer = _ScaledSteps(training, moments_of(range(training.steps), _STEPS_OF_ACTIVATIONS))
    train(training, observer, onlooker, on_step=observer.note_scale)
    before = _activations(observer.part)
    parameters = _total(observer.part, "weight_grad", dict(observer.model.named_parameters()))
    last, scaled = training.precision.scale, max(before.maximum, parameters.maximum) * training.precision.scale
    return {
        **head("figure-loss-scaling", training),
        "scale": str(scale),
        "scales": observer.scales,
        "last_scale": last,
        "skipped_steps": training.precision.skipped_steps,
        "room": math.floor(math.log2(effect(before, "fp16").maximum / scaled)) if scaled else None,
        "steps_sampled": observer.steps,
        "before": runs.in_fp16(before),
        "after": runs.in_fp16(observer.scaled()),
    }


# -- what they read of a record ----------------------------------------------------------------------------------------
def _weights_of(model: nn.Module) -> list[str]:
    return [name for name, one in model.named_parameters() if are_weights(one)]


def _total(part: Part, role: str, names: Collection[str]) -> Spectrum:
    """Return the spectrum of what some parameters have in a role."""
    return sum((seen for key, seen in part.tensors.items() if key.role == role and key.path in names), Spectrum())


def _activations(part: Part, layer: str | None = None) -> Spectrum:
    """Return the spectrum of the gradients of activations of the model, or of a layer."""
    gradients = (
        (key, seen) for key, seen in part.tensors.items() if key.role == "grad" and layer in (None, key.module)
    )
    return sum((seen for key, seen in gradients if part.ops[key.module, key.op].op_class != "wide"), Spectrum())


def _ratios(part: Part, names: list[str]) -> dict[str, Any]:
    """Return the histogram of |update| / |weight| of the weights that are not zero, and the shares below the limits."""
    joint = sum((part.updates[name] for name in names if name in part.updates), Updates()).joint
    found = Updates(np.concatenate((0 * joint[:1], joint[1:]))).ratios()  # the first row has the zeros
    bins = Spectrum().bins
    for ratio, count in found.items():
        bins[PARTS * (runs.BIAS - ratio)] += count
    largest = max((2.0**-ratio for ratio in found), default=0.0)
    total = Spectrum(bins, count=int(bins.sum()), maximum=largest)
    below = {format: runs.below(total, limit) for format, limit in LIMITS.items()}
    return {"ratios": runs.histogram(total), "below": below}


def _layers(model: nn.Module, part: Part) -> Iterator[dict[str, Any]]:
    """Yield log2 of the median gradients of the outputs and the weights of each layer, in the model's order."""
    for layer, module in model.named_modules():
        own = [f"{layer}.{name}".removeprefix(".") for name in _weights_of(module) if "." not in name]
        activations, weights = _activations(part, layer), _total(part, "weight_grad", own)
        if activations.nonzero and weights.nonzero:
            yield {"name": layer, "activations": runs.median(activations), "weights": runs.median(weights)}


class _Epochs(Fp32Steps):
    """Takes eight steps of each given epoch in fp32 first."""

    def __init__(self, training: Training, epochs: Collection[int]) -> None:
        length = training.steps_per_epoch
        sampled = moments_of(range(length), _STEPS_OF_AN_EPOCH)
        super().__init__(training, [epoch * length + step for epoch in epochs for step in sampled])
        self._parts = {epoch: Part() for epoch in epochs}
        self._taken: list[tuple[int, float]] = []  # steps and their learning rates

    def keep(self, part: Part) -> None:
        """Add what was seen in this epoch."""
        self._parts[self.training.epoch].add(part)

    def step(self, batch: Any) -> Tensor:
        """Take the step and keep its learning rate."""
        loss = super().step(batch)
        self._taken.append((self.training.done, self.training.optimizer.param_groups[0]["lr"]))
        return loss

    def document(self, epoch: int) -> dict[str, Any]:
        """Return plain values of an epoch; they count epochs from 1."""
        part, names = self._parts[epoch], _weights_of(self.model)
        taken = [one for one in self._taken if one[0] // self.training.steps_per_epoch == epoch]
        rates = [rate for _, rate in taken]
        return {
            "epoch": epoch + 1,
            "steps_sampled": [step for step, _ in taken],
            "learning_rates": [min(rates), max(rates)] if rates else None,
            "gradients": runs.histogram(_total(part, "weight_grad", names)),
            **_ratios(part, names),
            "lost": {format: lost_share(part, format, filter(part.updates.get, names)) for format in LIMITS},
        }


class _ScaledSteps(Fp32Steps):
    """Takes steps in fp32 first, and knows the loss scale that the run had in each."""

    def __init__(self, training: Training, steps: Collection[int]) -> None:
        super().__init__(training, steps)
        self.scales = [(0, training.precision.scale)]  # by step, at each change
        self._gradients: dict[int, Spectrum] = {}  # of activations, by step

    def keep(self, part: Part) -> None:
        """Keep the gradients of activations by step, too."""
        super().keep(part)
        self._gradients[self.training.done] = _activations(part)

    def note_scale(self, training: Training, loss: Tensor) -> None:
        """Note a change of the loss scale after a step."""
        scale = training.precision.scale
        if training.done == 1 and training.precision.skipped_steps == 0:
            self.scales = [(0, scale)]  # it was set in the first backward pass
        elif scale != self.scales[-1][1]:
            self.scales.append((training.done, scale))

    def scaled(self) -> Spectrum:
        """Return the gradients of activations times the scale of their steps."""
        scales = {step: [scale for first, scale in self.scales if first <= step][-1] for step in self._gradients}
        return sum((seen.scaled(scales[step]) for step, seen in self._gradients.items()), Spectrum())
