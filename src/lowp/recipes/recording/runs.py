"""Common parts of the recorders: training with an observer, sampled steps, the header of a document, histograms."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lowp.numerics.prediction import effect
from lowp.numerics.spectrum import Spectrum
from lowp.recipes import results
from lowp.recipes.sampling import Observer
from lowp.recipes.training import Training, threads_of


class Onlooker(NamedTuple):
    """Who waits for a recorder: asked before each step whether to stop, and told a name, and how much of it is done."""

    stop: Callable[[], bool] = lambda: False
    on_progress: Callable[[str, float], None] = lambda name, done: None


NOBODY = Onlooker()


def train(
    training: Training,
    observer: Observer | None,
    onlooker: Onlooker,
    name: str | None = None,
    on_step: Callable[[Training, Tensor], None] = lambda training, loss: None,
) -> bool:
    """Train to the end with the recipe's schedule and number of threads; return False if it was stopped before."""
    title = name or f"{training.recipe.name} in {training.precision.preset.name}"
    with threads_of(training.recipe.threads):
        return training.run(
            lambda training: onlooker.on_progress(title, training.epoch), onlooker.stop, observer, on_step=on_step
        )


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
_SMALLEST = -24  # of fp16, as a power of two


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


def in_fp16(total: Spectrum) -> dict[str, Any]:
    """Return the histogram, and shares of nonzero elements: below 2^-24; zero, subnormal or infinite in fp16."""
    found, too_small = effect(total, "fp16"), below(total, _SMALLEST)
    return {
        "histogram": histogram(total),
        "below": too_small,
        "zero": found.flushed,
        "subnormal": found.flushed + found.subnormal - too_small,
        "infinite": found.overflow,
    }
