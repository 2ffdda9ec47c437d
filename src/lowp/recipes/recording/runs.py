"""Common parts of the recorders: training with an observer, sampled steps, the header of a document, histograms."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lowp import kernels
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


def weights_of(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the matrices and kernels among named parameters: those with two dimensions or more."""
    named = tensors.items() if isinstance(tensors, Mapping) else tensors
    return {name: tensor for name, tensor in named if tensor.dim() >= 2}


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
_SMALLEST, _SMALLEST_NORMAL = -24, -14  # fp16's, as powers of two


class Histogram:
    """Counts of elements by binary exponent floor(log2 |x|), over all added tensors: a spectrum, as in profiles."""

    def __init__(self) -> None:
        self._total = Spectrum()

    def add(self, x: Tensor) -> None:
        """Count a tensor of any floating-point dtype."""
        self._total += Spectrum.of(x.detach())

    @property
    def present(self) -> int:
        """The number of finite nonzero elements."""
        return self._total.nonzero

    def below(self, exponent: int) -> float:
        """Return the share of the finite nonzero elements below 2**exponent; 0 without such elements."""
        return self._total.below(exponent) / max(1, self.present)

    def median(self) -> float | None:
        """Return log2 of the median magnitude of nonzero elements, interpolated in its bin; None without any."""
        remaining = self.present / 2
        for index, count in enumerate(map(int, self._total.octaves)):
            if count and count >= remaining:
                return index - BIAS + remaining / count
            remaining -= count
        return None

    def document(self) -> dict[str, Any]:
        """Return plain values: `counts` by exponent from `lowest` on, and the numbers of zeros and nonfinite elements.

        The bin -127 has all elements below 2**-126. `largest`: the largest magnitude. `median`: see the method.
        """
        total = self._total
        return {
            "lowest": total.lowest or 0,
            "counts": np.trim_zeros(total.octaves).tolist(),
            "elements": total.count,
            "zeros": total.zeros,
            "nonfinite": total.nonfinite,
            "largest": total.maximum,
            "median": self.median(),
        }


class Fp16Counts:
    """Counts of the effects of rounding numbers to fp16, to nearest even."""

    def __init__(self) -> None:
        self.histogram = Histogram()
        self._zero = self._infinite = 0

    def add(self, x: Tensor) -> None:
        """Count a tensor; elements that are infinite or NaN before rounding are counted only by the histogram."""
        x = x.detach()
        self.histogram.add(x)
        stored = x.half()
        self._zero += int(((stored == 0) & (x != 0)).sum())
        self._infinite += int((stored.isinf() & x.isfinite()).sum())

    def document(self) -> dict[str, Any]:
        """Return the histogram, and shares of nonzero elements: below 2^-24; zero, subnormal or infinite in fp16."""
        present = max(1, self.histogram.present)
        below = self.histogram.below(_SMALLEST)
        return {
            "histogram": self.histogram.document(),
            "below": below,
            "zero": self._zero / present,
            "subnormal": self.histogram.below(_SMALLEST_NORMAL) - below,
            "infinite": self._infinite / present,
        }


class LostUpdates:
    """Counts updates that do not change a weight stored in a format."""

    def __init__(self, format: str) -> None:
        self.format = format
        self._lost = self._nonzero = 0

    def add(self, weight: Tensor, update: Tensor) -> None:
        """Count the nonzero fp64 updates of fp64 weights."""
        stored = kernels.quantize(weight, self.format)
        unchanged = kernels.quantize(stored + update, self.format) == stored
        nonzero = update != 0
        self._lost += int((unchanged & nonzero).sum())
        self._nonzero += int(nonzero.sum())

    @property
    def share(self) -> float:
        """The share of lost updates among the nonzero ones; 0 without any."""
        return self._lost / max(1, self._nonzero)


def ratios(weight: Tensor, update: Tensor) -> Tensor:
    """Return |update| / |weight| of the nonzero weights, for fp64 tensors."""
    nonzero = weight != 0
    return update[nonzero].abs() / weight[nonzero].abs()
