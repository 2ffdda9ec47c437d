"""Weights that stop changing in 16 bits, compared with fp32 masters and stochastic rounding: one run of each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lowp import presets
from lowp.errors import InvalidInput, unknown
from lowp.precision import Precision
from lowp.recipes.recording.runs import Stop, Told, head, moments_of, train, weights_of
from lowp.recipes.training import Settings, Training, load_data

__all__ = ["record_stall"]

# One row per line of the picture: its label, and the masters; None for fp32.
VARIANTS = {
    "fp32": None,
    "{format} + fp32 masters": "fp32",
    "{format}, stochastic": "stochastic",
    "{format}, to nearest": "none",
}
_MOMENTS = 200
_WATCHED = 4096  # number of the layer's weights whose values are recorded; one of them is drawn


def record_stall(
    settings: Settings, layer: str | None = None, *, stop: Stop = lambda: False, told: Told = lambda name, epoch: None
) -> dict[str, Any]:
    """Train in fp32 and with 16-bit weights in three ways; return the weights that change, one weight, and the loss.

    `settings.precision` is bf16-storage or fp16-storage, without loss scaling. `moving`: at 200 steps, the share of the
    weights with a gradient that the step changed (of the masters, if any). `never`: of the weights that fp32 changes,
    the share that ends at its initial value. `ways`: the values after `way_steps` steps of one weight of the layer (by
    default the first), the one that moves by the median distance in fp32. Raises InvalidInput for other precisions and
    for a layer without weights.
    """
    preset = presets.parse(settings.precision)
    if preset.policy.parameters is None or preset.name == "flex16+5":
        raise InvalidInput(
            f"{settings.precision} does not store its parameters in a float format of few bits: use bf16-storage or "
            "fp16-storage"
        )
    format = str(preset.policy.parameters)
    data, watched = load_data(settings), []
    training: Training | None = None
    for label, masters in VARIANTS.items():
        name = label.format(format=format)
        precision = "fp32" if masters is None else replace(preset, loss_scale=presets.LossScale())
        chosen = Precision(precision, masters=masters, seed=settings.seed)
        training = Training(replace(settings, loss_scale=None), data, chosen)
        observer = _Moving(training, _layer(training.model, layer))
        if not train(training, observer, stop, told, name):
            break
        watched.append((name, observer, training))
    assert training is not None
    common = head("figure-stall", training)
    del common["failure"], common["metric"]["value"]  # each variant has its own
    return {
        **common,
        "format": format,
        "parameter": _layer(training.model, layer),
        **_weight([observer for _, observer, _ in watched]),
        "variants": [
            {
                "label": name,
                "step": observer.steps,
                "moving": observer.moving,
                "history": one.history,
                "failure": one.failure,
                "never": observer.never(watched[0][1]),
            }
            for name, observer, one in watched
        ],
    }


def _layer(model: nn.Module, layer: str | None) -> str:
    """Return the name of the layer's weight."""
    named = {name.removesuffix(".weight"): name for name in weights_of(model.named_parameters())}
    chosen = next(iter(named)) if layer is None else layer
    if chosen not in named:
        raise InvalidInput(unknown("layer", layer, named))
    return named[chosen]


def _weight(watched: list[_Moving]) -> dict[str, Any]:
    """Return the index of the weight with the median movement in the first run (fp32), and its values in every run."""
    if not watched:
        return {"index": None, "ways": [], "way_steps": []}
    ways = [torch.stack(observer.ways) for observer in watched]
    distance = (ways[0][-1] - ways[0][0]).abs()
    distance = torch.where(distance > 0, distance, torch.nan)
    median = (distance - distance.nanmedian()).abs().nan_to_num(torch.inf)
    chosen = int(median.argmin())
    return {
        "index": watched[0].indices[chosen],
        "ways": [way[:, chosen].tolist() for way in ways],
        "way_steps": [0, *(step + 1 for step in watched[0].steps)],
    }


class _Moving:
    """Counts the weights that change at 200 steps, and records the values of some weights of a layer."""

    def __init__(self, training: Training, parameter: str) -> None:
        self._training = training
        self._parameter = parameter
        self._at = set(moments_of(range(training.epochs * training.steps_per_epoch), _MOMENTS))
        self._before: dict[str, Tensor] = {}
        self.steps: list[int] = []
        self.moving: list[float] = []
        weights = self._weights(training.model)
        self._first = {name: weight.detach().clone() for name, weight in weights.items()}
        shape = weights[parameter].shape
        self._watched = torch.arange(shape.numel())[:: max(1, shape.numel() // _WATCHED)]
        self.ways = [self._first[parameter].flatten()[self._watched]]
        self.indices = [[int(i) for i in torch.unravel_index(element, shape)] for element in self._watched]

    def wants(self, progress: float) -> bool:
        """Return whether to sample the step: 200 steps of the run."""
        return self._step() in self._at

    def before_forward(self) -> None:
        """Copy the weights for comparison."""
        self._before = {name: weight.detach().clone() for name, weight in self._weights(self._training.model).items()}

    def before_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
        """Do nothing: gradients are read after the step."""

    def after_step(self, model: nn.Module) -> None:
        """Count the weights with a gradient that have changed."""
        weights, moved, asked = self._weights(model), 0, 0
        for name, parameter in model.named_parameters():
            if name in weights and parameter.grad is not None:
                wanting = parameter.grad != 0
                asked += int(wanting.sum())
                moved += int((wanting & (weights[name] != self._before[name])).sum())
        self.steps.append(self._step())
        self.moving.append(moved / max(1, asked))
        self.ways.append(weights[self._parameter].detach().flatten()[self._watched].clone())

    def never(self, fp32: _Moving) -> float:
        """Return the share of the weights changed by fp32 at the end that are unchanged here."""
        moved, here = fp32._changed(), self._changed()
        stayed = sum(int((moved[name] & ~here[name]).sum()) for name in moved)
        return stayed / max(1, sum(int(one.sum()) for one in moved.values()))

    def _changed(self) -> dict[str, Tensor]:
        return {name: one != self._first[name] for name, one in self._weights(self._training.model).items()}

    def _step(self) -> int:
        step: int = self._training.epoch * self._training.steps_per_epoch + self._training.step_of_epoch
        return step

    def _weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the trained values in fp32: the masters, if any."""
        return weights_of(model.state_dict())
