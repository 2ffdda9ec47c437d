"""Records of shared exponents in a training run: one layer's weights, activations and updates."""

from typing import Any

from torch import Tensor

from lowp.errors import InvalidInput, unknown
from lowp.exponents import Flush, SharedExponents
from lowp.numerics.spectrum import Spectrum
from lowp.ops.observing import Observation, observe
from lowp.recipes.recording.runs import BIAS, NOBODY, Onlooker, short_head
from lowp.recipes.training import Settings, Training, threads_of

CLASSES = ("weights", "activations", "updates")
_LOWEST, _HIGHEST = -48, 16  # the range of counted binary exponents; others are counted in the first or the last bin


def record_autoflex(
    settings: Settings, steps: int, layer: str | None = None, onlooker: Onlooker = NOBODY
) -> dict[str, Any]:
    """Train for some steps; return Γ, κ and the predicted maximum of every step, for one layer's three tensors.

    `layer` is a module's path, by default the first with a weight. Raises InvalidInput for a precision without shared
    exponents, and for a layer that does not exist.
    """
    training, exponents = _start(settings)
    flushes: list[tuple[Flush, dict[str, int]]] = []

    def keep(flush: Flush) -> None:
        flushes.append((flush, {site: index for index, site in enumerate(flush.sites)}))

    exponents.watch(keep)
    _train(training, steps, onlooker)
    layer, sites = _sites(exponents, layer)
    series = {}
    for name, site in zip(CLASSES, sites, strict=True):
        rows = [
            (step, flush, index)
            for step, (flush, indices) in enumerate(flushes)
            if (index := indices.get(site)) is not None and bool(flush.written[index])
        ]
        series[name] = {
            "site": site,
            "step": [step for step, _, _ in rows],
            "mantissa": [int(flush.mantissa[index]) for _, flush, index in rows],
            "exponent": [int(flush.exponent[index]) for _, flush, index in rows],
            "predicted": [
                None if flush.predicted is None else float(flush.predicted[index]) for _, flush, index in rows
            ],
        }
    return {**short_head("figure-autoflex", training), "layer": layer, "steps": len(flushes), "series": series}


def record_flex_window(
    settings: Settings, steps: int, layer: str | None = None, onlooker: Onlooker = NOBODY
) -> dict[str, Any]:
    """Train for some steps; return histograms of log2|x| of three tensors, from the first and last tenth of the steps.

    The values are counted before rounding, with the exponents under which they were written. Raises the errors of
    `record_autoflex`.
    """
    training, exponents = _start(settings)
    tenth = max(1, steps // 10)
    moments = {"first": range(tenth), "last": range(steps - tenth, steps)}
    histograms: dict[tuple[str, str], _Histogram] = {}
    waiting: dict[str, tuple[Spectrum, int]] = {}  # of this step, for the exponents under which they were written

    def sampled() -> list[str]:
        return [moment for moment, when in moments.items() if training.done in when and training.model.training]

    def see(seen: Observation) -> None:
        is_forward = seen.phase == "forward"
        if seen.role in (("output",) if is_forward else ("update", "weight")) and sampled():
            site = f"{seen.role} of {seen.path}" + (f" {seen.op}" if is_forward else "")
            if site not in waiting:
                waiting[site] = _counted(seen.tensor)

    def keep(flush: Flush) -> None:
        for site, exponent in zip(flush.sites, flush.exponent.tolist(), strict=True):
            for moment in sampled() if site in waiting else ():
                histograms.setdefault((moment, site), _Histogram()).add(*waiting[site], exponent)
        waiting.clear()

    ends = observe(see), exponents.watch(keep)
    taken = _train(training, steps, onlooker)
    for end in ends:
        end()
    layer, sites = _sites(exponents, layer)
    windows = {
        name: {
            "site": site,
            **{moment: histograms[moment, site].document() for moment in moments if (moment, site) in histograms},
        }
        for name, site in zip(CLASSES, sites, strict=True)
    }
    head = short_head("figure-flex-window", training)
    return {**head, "layer": layer, "steps": taken, "lowest": _LOWEST, "windows": windows}


def _counted(x: Tensor) -> tuple[Spectrum, int]:
    """Return the spectrum of a tensor, and how many nonzero numbers are below max / 2^15."""
    seen, magnitude = Spectrum.of(x), x.abs()
    return seen, int(((magnitude > 0) & (magnitude < seen.maximum / 2**15)).sum())


class _Histogram:
    """Counts of elements by binary exponent floor(log2|x|), and the shared exponents under which they are written."""

    def __init__(self) -> None:
        self.total = Spectrum()
        self.below_unit = self.below_maximum = 0
        self.exponents: list[int] = []

    def add(self, seen: Spectrum, below_maximum: int, exponent: int) -> None:
        """Count a tensor that is written under an exponent."""
        self.total += seen
        self.below_unit += seen.below(exponent - 1)
        self.below_maximum += below_maximum
        self.exponents.append(exponent)

    def document(self) -> dict[str, Any]:
        """Return plain values.

        `below_maximum`: the share of nonzero elements below max / 2^15, which int16 cannot represent under an exponent
        that represents the largest element. `below_unit`: the share of nonzero elements that are rounded to zero.
        """
        total, present = self.total, max(1, self.total.nonzero)
        octaves, low, high = total.octaves, _LOWEST + BIAS, _HIGHEST + BIAS
        counts = octaves[low:high].copy()
        counts[0] += octaves[:low].sum()
        counts[-1] += octaves[high:].sum()
        return {
            "counts": counts.tolist(),
            "elements": total.count,
            "zeros": total.zeros,
            "below_maximum": self.below_maximum / present,
            "below_unit": self.below_unit / present,
            "exponents": [min(self.exponents), max(self.exponents)],
        }


# -- parts ------------------------------------------------------------------------------------------------------------
def _start(settings: Settings) -> tuple[Training, SharedExponents]:
    """Return a new run and its shared exponents; raise InvalidInput for a precision without them."""
    training = Training(settings)
    exponents = training.precision.exponents
    if exponents is None:
        raise InvalidInput(
            f"{settings.precision} has no predicted shared exponents: use flex16+5 or a variant, such as "
            "flex16+5:frozen"
        )
    return training, exponents


def _train(training: Training, steps: int, onlooker: Onlooker) -> int:
    """Take `steps` steps, over as many epochs as needed, to which the recipe's schedule is scaled; return how many."""
    training.epochs = -(-steps // training.steps_per_epoch)

    def is_enough(taken: int) -> bool:
        if taken:
            onlooker.on_progress(training.settings.recipe, taken)
        return taken >= steps or onlooker.stop()

    with threads_of(training.recipe.threads):
        return len(training.take(is_enough))


def _sites(exponents: SharedExponents, layer: str | None) -> tuple[str, tuple[str, str, str]]:
    """Return the layer, and the sites of its weight, its output and its weight's update.

    Without a name it is the first layer. Raises InvalidInput for an unknown layer.
    """
    sites = exponents.sites()
    layers = {}
    for site in sites:
        name = site.removeprefix("update of ").removesuffix(".weight")
        if f"update of {name}.weight" == site:
            output = next((other for other in sites if other.startswith(f"output of {name} ")), None)
            if output is not None:
                layers[name] = (f"weight of {name}.weight", output, site)
    if layer is None and layers:
        layer = next(iter(layers))
    if layer is None or layer not in layers:
        raise InvalidInput(unknown("layer", layer, layers))
    return layer, layers[layer]
