"""Records of shared exponents in a training run: one layer's weights, activations and updates."""

from itertools import count
from typing import Any

from lowp.errors import InvalidInput, unknown
from lowp.exponents import Flush, SharedExponents
from lowp.numerics.spectrum import Spectrum
from lowp.ops.observing import Observation, observe
from lowp.recipes.recording.runs import NOBODY, Onlooker, histogram, short_head
from lowp.recipes.training import Settings, Training, threads_of

CLASSES = ("weights", "activations", "updates")


def record_autoflex(
    settings: Settings, steps: int, layer: str | None = None, onlooker: Onlooker = NOBODY
) -> dict[str, Any]:
    """Train for some steps; return Γ, κ and the predicted maximum of every step, for one layer's three tensors.

    `layer` is a module's path, by default the first with a weight. Raises InvalidInput for a precision without shared
    exponents, and for a layer that does not exist.
    """
    training, exponents = _start(settings)
    rows: dict[str, list[tuple[Any, ...]]] = {}
    flushed = count()

    def keep(flush: Flush) -> None:
        step = next(flushed)
        predicted = [None] * len(flush.sites) if flush.predicted is None else flush.predicted.tolist()
        numbers = (flush.written.tolist(), flush.mantissa.tolist(), flush.exponent.tolist(), predicted)
        for site, is_written, *row in zip(flush.sites, *numbers, strict=True):
            if is_written:
                rows.setdefault(site, []).append((step, *row))

    exponents.watch(keep)
    _train(training, steps, onlooker)
    layer, sites = _sites(exponents, layer)
    names = ("step", "mantissa", "exponent", "predicted")
    series = {
        name: {"site": site, **{one: [row[place] for row in rows.get(site, ())] for place, one in enumerate(names)}}
        for name, site in zip(CLASSES, sites, strict=True)
    }
    return {**short_head("figure-autoflex", training), "layer": layer, "steps": next(flushed), "series": series}


def record_flex_window(
    settings: Settings, steps: int, layer: str | None = None, onlooker: Onlooker = NOBODY
) -> dict[str, Any]:
    """Train for some steps; return histograms of log2|x| of three tensors, from the first and last tenth of the steps.

    The values are counted before rounding, with the exponents under which they were written: the record of a profile
    has what a step changed, not the updates and weights that were rounded for it. Raises the errors of
    `record_autoflex`.
    """
    training, exponents = _start(settings)
    tenth = max(1, steps // 10)
    moments = {"first": range(tenth), "last": range(steps - tenth, steps)}
    written: dict[tuple[str, str], _Written] = {}
    waiting: dict[str, Spectrum] = {}  # of this step, for the exponents under which they were written

    def see(seen: Observation) -> None:
        is_forward = seen.phase == "forward"
        wanted = seen.role in (("output",) if is_forward else ("update", "weight"))
        if wanted and training.model.training and any(training.done in when for when in moments.values()):
            site = f"{seen.role} of {seen.path}" + (f" {seen.op}" if is_forward else "")
            if site not in waiting:
                waiting[site] = Spectrum.of(seen.tensor)

    def keep(flush: Flush) -> None:
        for site, exponent in zip(flush.sites, flush.exponent.tolist(), strict=True):
            for moment in (moment for moment, when in moments.items() if site in waiting and training.done in when):
                written.setdefault((moment, site), _Written()).add(waiting[site], exponent)
        waiting.clear()

    ends = observe(see), exponents.watch(keep)
    taken = _train(training, steps, onlooker)
    for end in ends:
        end()
    layer, sites = _sites(exponents, layer)
    windows = {
        name: {
            "site": site,
            **{moment: written[moment, site].document() for moment in moments if (moment, site) in written},
        }
        for name, site in zip(CLASSES, sites, strict=True)
    }
    return {**short_head("figure-flex-window", training), "layer": layer, "steps": taken, "windows": windows}


class _Written:
    """The spectrum of what was written at a site, and the shared exponents under which it was."""

    def __init__(self) -> None:
        self.total = Spectrum()
        self.below_unit = self.below_maximum = 0
        self.exponents: list[int] = []

    def add(self, seen: Spectrum, exponent: int) -> None:
        """Count a tensor that is written under an exponent."""
        self.total += seen
        self.below_unit += seen.below(exponent - 1)
        self.below_maximum += seen.nonzero - seen.from_size(seen.maximum / 2**15).nonzero
        self.exponents.append(exponent)

    def document(self) -> dict[str, Any]:
        """Return plain values.

        `below_maximum`: the share of nonzero elements below max / 2^15, which int16 cannot represent under an exponent
        that represents the largest element. `below_unit`: the share of nonzero elements that are rounded to zero.
        """
        present = max(1, self.total.nonzero)
        return {
            **histogram(self.total),
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
