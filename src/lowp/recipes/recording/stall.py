"""Records of weights that stop changing in 16 bits, compared with fp32 masters and with stochastic rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lowp import presets
from lowp.errors import InvalidInput, unknown
from lowp.precision import Precision
from lowp.recipes.recording.runs import NOBODY, Onlooker, are_weights, head, train
from lowp.recipes.sampling import Observer, Share, moments_of
from lowp.recipes.training import Settings, Training, load_data

# The label and the masters of each run; None for fp32.
VARIANTS = {
    "fp32": None,
    "{format} + fp32 masters": "fp32",
    "{format}, stochastic": "stochastic",
    "{format}, to nearest": "none",
}
_MOMENTS = 200
_RECORDED = 4096  # about the number of the layer's weights whose values are recorded; one of them is drawn


def record_stall(settings: Settings, layer: str | None = None, onlooker: Onlooker = NOBODY) -> dict[str, Any]:
    """Train in fp32 and with 16-bit weights in three ways; return shares of changed weights, one weight, and the loss.

    `settings.precision` is bf16-storage or fp16-storage; loss scaling is disabled. `moving`: at 200 steps, the share of
    the weights (the masters, if any) with a nonzero gradient that the step changed. `never`: the share of the weights
    changed by fp32 whose final value is the initial one. `ways`: the values after `way_steps` steps of one weight of
    the layer (by default the first), the one with the median change in fp32. Raises InvalidInput for other precisions
    and for a layer without weights.
    """
    preset = presets.parse(settings.precision)
    if preset.policy.parameters is None or preset.name == "flex16+5":
        raise InvalidInput(
            f"{settings.precision} does not store its parameters in a float format of few bits: use bf16-storage or "
            "fp16-storage"
        )
    format = str(preset.policy.parameters)
    data, runs = load_data(settings), []
    training: Training | None = None
    for label, masters in VARIANTS.items():
        name = label.format(format=format)
        precision = "fp32" if masters is None else replace(preset, loss_scale=presets.LossScale())
        training = Training(
            replace(settings, loss_scale=None), data, Precision(precision, masters=masters, seed=settings.seed)
        )
        observer = _WeightObserver(training, _layer(training.model, layer))
        if not train(training, observer, onlooker, name):
            break
        runs.append((name, observer, training))
    assert training is not None
    common = head("figure-stall", training)
    del common["failure"], common["metric"]["value"]  # each variant has its own
    return {
        **common,
        "format": format,
        "parameter": _layer(training.model, layer),
        **_weight([observer for _, observer, _ in runs]),
        "variants": [
            {
                "label": name,
                "step": observer.taken,
                "moving": observer.moving,
                "history": run.history,
                "failure": run.failure,
                "never": observer.never(runs[0][1]),
            }
            for name, observer, run in runs
        ],
    }


def _layer(model: nn.Module, layer: str | None) -> str:
    """Return the name of the layer's weight, by default that of the first layer; raise InvalidInput without one."""
    names = {name.removesuffix(".weight"): name for name, one in model.named_parameters() if are_weights(one)}
    key = next(iter(names)) if layer is None else layer
    if key not in names:
        raise InvalidInput(unknown("layer", layer, names))
    return names[key]


def _weight(observers: list[_WeightObserver]) -> dict[str, Any]:
    """Return the index of the weight with the median change in the first run (fp32), and its values in every run."""
    if not observers:
        return {"index": None, "ways": [], "way_steps": []}
    ways = [torch.stack(observer.ways) for observer in observers]
    distance = (ways[0][-1] - ways[0][0]).abs()
    distance = torch.where(distance > 0, distance, torch.nan)
    from_median = (distance - distance.nanmedian()).abs().nan_to_num(torch.inf)
    index = int(from_median.argmin())
    return {
        "index": observers[0].indices[index],
        "ways": [way[:, index].tolist() for way in ways],
        "way_steps": [0, *(step + 1 for step in observers[0].taken)],
    }


class _WeightObserver(Observer):
    """Counts the weights that change at 200 steps, and records the values of some weights of a layer."""

    def __init__(self, training: Training, parameter: str) -> None:
        super().__init__(training, set(moments_of(range(training.steps), _MOMENTS)))
        self._parameter = parameter
        self.taken: list[int] = []
        self.moving: list[float] = []
        self._first = self.weights()
        shape = self._first[parameter].shape
        self._recorded = torch.arange(shape.numel())[:: max(1, shape.numel() // _RECORDED)]
        self.ways = [self._first[parameter].flatten()[self._recorded]]
        self.indices = [[int(i) for i in torch.unravel_index(element, shape)] for element in self._recorded]

    def step(self, batch: Any) -> Tensor:
        """Take the step, and count the weights with a gradient that it has changed."""
        before, loss = self.weights(), super().step(batch)
        unmoved = self.unmoved(before, are_weights)
        self.taken.append(self.training.done)
        self.moving.append(1 - unmoved.value if unmoved.counted else 0.0)
        self.ways.append(self.weights()[self._parameter].flatten()[self._recorded])
        return loss

    def never(self, fp32: _WeightObserver) -> float:
        """Return the share of unchanged weights, at the end, among those that changed in fp32."""
        unchanged, own = Share(), self._changed()
        for name, changed in fp32._changed().items():
            unchanged.add(~own[name], changed)
        return unchanged.value

    def _changed(self) -> dict[str, Tensor]:
        """Return, by name, masks of the weights that differ from the initial ones."""
        return {name: one != self._first[name] for name, one in self.weights().items() if are_weights(one)}
