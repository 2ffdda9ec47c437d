"""Shared exponents in a real training run, recorded for pictures: one layer's weights, activations and updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowp.errors import InvalidInput, unknown
from lowp.exponents import Flush, SharedExponents
from lowp.recipes import results
from lowp.recipes.recording.runs import Stop, Told
from lowp.recipes.training import Settings, Training, moved, threads_of

__all__ = ["record_series", "record_windows"]

CLASSES = ("weights", "activations", "updates")
_LOWEST, _HIGHEST = -48, 16  # the range of counted binary exponents; exponents beyond it are counted at the ends


def record_series(
    settings: Settings,
    steps: int,
    layer: str | None = None,
    *,
    stop: Stop = lambda: False,
    told: Told = lambda name, step: None,
) -> dict[str, Any]:
    """Train for some steps; return Γ, κ and the predicted maximum of every step, for one layer's three tensors.

    `layer` is a module's path, by default the first with a weight. Raises InvalidInput for a precision without shared
    exponents, and for a layer that does not exist.
    """
    training, exponents = _begun(settings)
    kept: list[tuple[Flush, dict[str, int]]] = []

    def watch(flush: Flush) -> None:
        kept.append((flush, {site: index for index, site in enumerate(flush.sites)}))

    exponents.watch(watch)
    _train(training, steps, stop, told)
    layer, sites = _sites(exponents, layer)
    series = {}
    for name, site in zip(CLASSES, sites, strict=True):
        rows = [(number, flush, at[site]) for number, (flush, at) in enumerate(kept) if site in at]
        rows = [(number, flush, index) for number, flush, index in rows if bool(flush.written[index])]
        series[name] = {
            "site": site,
            "step": [number for number, _, _ in rows],
            "mantissa": [int(flush.mantissa[index]) for _, flush, index in rows],
            "exponent": [int(flush.exponent[index]) for _, flush, index in rows],
            "predicted": [
                None if flush.predicted is None else float(flush.predicted[index]) for _, flush, index in rows
            ],
        }
    return {**_head("figure-autoflex", training, layer), "steps": len(kept), "series": series}


def record_windows(
    settings: Settings,
    steps: int,
    layer: str | None = None,
    *,
    stop: Stop = lambda: False,
    told: Told = lambda name, step: None,
) -> dict[str, Any]:
    """Train for some steps; return histograms of log2|x| of three tensors, from the first and last tenth of the steps.

    The values are counted before rounding, with the exponents under which they were written. Raises the errors of
    `record_series`.
    """
    training, exponents = _begun(settings)
    share = max(1, steps // 10)
    moments = {"first": range(share), "last": range(steps - share, steps)}
    histograms: dict[tuple[str, str], _Histogram] = {}
    step = 0

    def listen(site: str, x: Tensor, exponent: int) -> None:
        for moment, range_ in moments.items():
            if step in range_ and training.model.training:
                histograms.setdefault((moment, site), _Histogram()).add(x, exponent)

    end = exponents.listen(listen)

    def count() -> None:
        nonlocal step
        step += 1

    _train(training, steps, stop, told, count)
    end()
    layer, sites = _sites(exponents, layer)
    windows = {
        name: {
            "site": site,
            **{moment: histograms[moment, site].document() for moment in moments if (moment, site) in histograms},
        }
        for name, site in zip(CLASSES, sites, strict=True)
    }
    return {**_head("figure-flex-window", training, layer), "steps": step, "lowest": _LOWEST, "windows": windows}


class _Histogram:
    """Counts of elements by binary exponent floor(log2|x|), and the ranges of the exponents of the writes."""

    def __init__(self) -> None:
        self.counts = torch.zeros(_HIGHEST - _LOWEST, dtype=torch.int64)
        self.zeros = self.below_unit = self.below_maximum = self.elements = 0
        self.exponents: list[int] = []

    def add(self, x: Tensor, exponent: int) -> None:
        """Count a tensor that is written under an exponent."""
        magnitude = x.detach().double().abs().flatten().cpu()
        present = magnitude[magnitude > 0]
        binary = torch.frexp(present)[1] - 1
        self.counts += torch.bincount((binary - _LOWEST).clamp(0, len(self.counts) - 1), minlength=len(self.counts))
        self.elements += len(magnitude)
        self.zeros += len(magnitude) - len(present)
        if len(present):
            self.below_maximum += int((present < present.max() / 2**15).sum())
        self.below_unit += int((present < 2.0**exponent / 2).sum())
        self.exponents.append(exponent)

    def document(self) -> dict[str, Any]:
        """Return plain values. `below_maximum`: the share of nonzero elements that one exponent cannot hold with the
        largest, below max / 2^15; `below_unit`: of those that became zero."""
        present = max(1, self.elements - self.zeros)
        return {
            "counts": self.counts.tolist(),
            "elements": self.elements,
            "zeros": self.zeros,
            "below_maximum": self.below_maximum / present,
            "below_unit": self.below_unit / present,
            "exponents": [min(self.exponents), max(self.exponents)],
        }


# -- parts ------------------------------------------------------------------------------------------------------------
def _begun(settings: Settings) -> tuple[Training, SharedExponents]:
    training = Training(settings)
    exponents = training.precision.exponents
    if exponents is None:
        raise InvalidInput(
            f"{settings.precision} has no predicted shared exponents: use flex16+5 or a variant, such as "
            "flex16+5:frozen"
        )
    return training, exponents


def _train(training: Training, steps: int, stop: Stop, told: Told, after: Callable[[], None] = lambda: None) -> None:
    """Take `steps` steps, over as many epochs as needed; the recipe's schedule has the same length."""
    training.epochs = -(-steps // training.steps_per_epoch)
    training.model.train()
    done = 0
    with threads_of(training.recipe.threads):
        while done < steps and not stop():
            generator = torch.Generator().manual_seed(training.settings.seed * 1_000_003 + done)
            order = torch.randperm(len(training.data.training), generator=generator)
            for at in range(training.steps_per_epoch):
                if done >= steps or stop():
                    break
                training.epoch, training.step_of_epoch = divmod(done, training.steps_per_epoch)
                chosen = order[at * training.batch : (at + 1) * training.batch]
                training.step(moved(training.data.training.batch(chosen, generator), training.device))
                after()
                done += 1
                told(training.settings.recipe, done)


def _sites(exponents: SharedExponents, layer: str | None) -> tuple[str, tuple[str, str, str]]:
    """Return the layer, and the sites of its weight, its output and its weight's update."""
    known = exponents.sites()
    layers = {}
    for site in known:
        name = site.removeprefix("update of ").removesuffix(".weight")
        if f"update of {name}.weight" == site:
            found = next((one for one in known if one.startswith(f"output of {name} ")), None)
            if found is not None:
                layers[name] = (f"weight of {name}.weight", found, site)
    if layer is None and layers:
        layer = next(iter(layers))
    if layer is None or layer not in layers:
        raise InvalidInput(unknown("layer", layer, layers))
    return layer, layers[layer]


def _head(kind: str, training: Training, layer: str) -> dict[str, Any]:
    settings = training.settings
    return {
        **results.header(kind, results.command_line()),
        "recipe": settings.recipe,
        "data": training.data.description,
        "precision": settings.precision,
        "seed": settings.seed,
        "layer": layer,
    }
