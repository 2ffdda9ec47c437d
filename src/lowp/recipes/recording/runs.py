"""Common parts of the recorders: training with an observer, sampled steps, the header of a document, histograms."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lowp.numerics.spectrum import Spectrum
from lowp.recipes import results
from lowp.recipes.sampling import Observer
from lowp.recipes.training import Training, threads_of


class Onlooker(NamedTuple):
    """Who waits for a recorder: asked before each step whether to stop, and told a name, and how much of it is done."""

    stop: Callable[[], bool] = lambda: False
    on_progress: Callable[[str, float], None] = lambda name, done: None


NOBODY = Onlooker()


def train(training: Training, observer: Observer | None, onlooker: Onlooker, name: str | None = None) -> bool:
    """Train to the end with the recipe's schedule and number of threads; return False if it was stopped before."""
    title = name or f"{training.recipe.name} in {training.precision.preset.name}"
    with threads_of(training.recipe.threads):
        return training.run(lambda training: onlooker.on_progress(title, training.epoch), onlooker.stop, observer)


def moments_of(steps: range, count: int) -> list[int]:
    """Return at most `count` of the steps, at the centres of parts of equal length."""
    count = min(count, len(steps))
    return [steps[int((index + 0.5) * len(steps) / count)] for index in range(count)]


def are_weights(tensor: Tensor) -> bool:
    """Whether a parameter is a matrix or a kernel: one with two dimensions or more."""
    return tensor.dim() >= 2


def short_head(kind: str, training: Training) -> dict[str, Any]:
    """Return the header of a document of a run: settings and data."""
    return {
        **results.header(kind, results.command_line()),
        "recipe": training.settings.recipe,
        "data": training.data.description,
        "precision": training.settings.precision,
        "seed": training.settings.seed,
    }


def head(kind: str, training: Training) -> dict[str, Any]:
    """Return the same with the length of a whole run, and the final metric."""
    metric, last = training.recipe.metric, training.history[-1] if training.history else {}
    return {
        **short_head(kind, training),
        "epochs": training.epochs,
        "steps": training.steps,
        "metric": {"name": metric.name, "is_share": metric.share, "value": last.get(metric.name)},
        "failure": training.failure,
    }


# -- histograms --------------------------------------------------------------------------------------------------------
BIAS = 127  # octave e + 127 of a spectrum counts floor(log2 |x|) = e
# of fp16: the smallest numbers as powers of two, half of the first of which is zero, and the least that is infinite
_SMALLEST, _SMALLEST_NORMAL, _OVERFLOWS = -24, -14, 65520.0


def below(total: Spectrum, exponent: int) -> float:
    """Return the share of the finite nonzero elements below 2**exponent; 0 without such elements."""
    return total.below(exponent) / max(1, total.nonzero)


def median(total: Spectrum) -> float | None:
    """Return log2 of the median magnitude of nonzero elements, interpolated in its bin; None without any."""
    remaining = total.nonzero / 2
    for index, count in enumerate(map(int, total.octaves)):
        if count and count >= remaining:
            return index - BIAS + remaining / count
        remaining -= count
    return None


def histogram(total: Spectrum) -> dict[str, Any]:
    """Return `counts` by exponent floor(log2 |x|) from `lowest` on, and the numbers of zeros and nonfinite elements.

    The bin -127 has all elements below 2**-126. `largest`: the largest magnitude. `median`: see the function.
    """
    return {
        "lowest": total.lowest or 0,
        "counts": np.trim_zeros(total.octaves).tolist(),
        "elements": total.count,
        "zeros": total.zeros,
        "nonfinite": total.nonfinite,
        "largest": total.maximum,
        "median": median(total),
    }


class Fp16Counts:
    """The spectrum of numbers, and what becomes of them where they are rounded to fp16, to nearest even."""

    def __init__(self) -> None:
        self.total, self._infinite = Spectrum(), 0

    def add(self, x: Tensor) -> Spectrum:
        """Count a tensor and return its spectrum, in which alone numbers are that are infinite before rounding."""
        seen = Spectrum.of(x.detach())
        self.total += seen
        if seen.maximum >= _OVERFLOWS:
            self._infinite += int((x.isfinite() & (x.abs() >= _OVERFLOWS)).sum())
        return seen

    def document(self) -> dict[str, Any]:
        """Return the histogram, and shares of nonzero elements: below 2^-24; zero, subnormal or infinite in fp16."""
        present, too_small = max(1, self.total.nonzero), below(self.total, _SMALLEST)
        zero = self.total.below(_SMALLEST - 1) + int(self.total.powers[_SMALLEST - 1 + BIAS])
        return {
            "histogram": histogram(self.total),
            "below": too_small,
            "zero": zero / present,
            "subnormal": below(self.total, _SMALLEST_NORMAL) - too_small,
            "infinite": self._infinite / present,
        }


def ratios(weight: Tensor, update: Tensor) -> Spectrum:
    """Return the spectrum of |update| / |weight| of the nonzero weights, for fp64 tensors."""
    nonzero = weight != 0
    return Spectrum.of(update[nonzero].abs() / weight[nonzero].abs())
