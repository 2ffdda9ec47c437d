"""A trained model of a recipe, read from a file or trained now, whose log-probabilities are compared in formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowp import portable
from lowp.errors import InvalidInput, LowpError
from lowp.inference import ServingMismatch, mismatch
from lowp.recipes import RECIPES, get
from lowp.recipes.recipe import Data, Recipe
from lowp.recipes.training import Settings, load_data, moved, read_extra

_BATCHES = 8
State = Mapping[str, Tensor]


def check(recipe: Recipe) -> None:
    """Raise InvalidInput for a recipe whose model predicts no classes."""
    if recipe.classes is None:
        able = [name for name in RECIPES if get(name).classes is not None]
        raise InvalidInput(
            f"{recipe.name} does not predict one class, whose log-probabilities --mismatch compares; recipes that do: "
            f"{', '.join(able)}"
        )


def settings_of(path: Path, recipe: str | None, size: str | None, state: State) -> Settings:
    """Return the settings of a file's model: those in a checkpoint of `lowp train`, given ones, or by its tensors.

    Raises InvalidInput if no recipe has tensors of these names and shapes.
    """
    if recipe is not None:
        return Settings(recipe, size=size).filled()
    try:
        extra = read_extra(path)
    except LowpError:
        extra = None
    if extra is not None and extra["settings"]["recipe"] in RECIPES:
        return replace(Settings(**extra["settings"]), precision="fp32", loss_scale=None)
    wanted = {name: tuple(tensor.shape) for name, tensor in state.items()}
    for name in RECIPES:
        found = get(name)
        for one in found.sizes if size is None else [size]:
            if one in found.sizes and _shapes(found, one) == wanted:
                return Settings(name, size=one).filled()
    raise InvalidInput(
        f"{path} has the {len(wanted)} tensors of no recipe, such as {next(iter(wanted), 'none')}: name the recipe by "
        "--recipe NAME, your own as module:NAME; in Python lowp.mismatch takes any model"
    )


def _shapes(recipe: Recipe, size: str) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        try:
            model = recipe.make_model(recipe.size(size))
        except (LowpError, ImportError, NotImplementedError, RuntimeError):  # it needs something that is not there
            return {}
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def read_model(path: Path, recipe: str | None, size: str | None) -> tuple[Settings, nn.Module]:
    """Return the settings and the model of a file of weights; raises InvalidInput where they do not fit."""
    state = portable.load(path, dtype=torch.float32)
    settings = settings_of(path, recipe, size, state)
    found = get(settings.recipe)
    check(found)
    model = found.make_model(found.size(settings.size))
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise InvalidInput(f"{path} does not fit {found.name}, size {settings.size}: {error}") from None
    return settings, model


def compared(
    settings: Settings, model: nn.Module, formats: list[str], training: str, data: Data | None = None
) -> tuple[ServingMismatch, Data]:
    """Compare on the first batches of the validation set; return the data, too."""
    recipe = get(settings.recipe)
    data = load_data(settings) if data is None else data
    device = torch.device(settings.device)
    indices = torch.split(torch.arange(len(data.validation)), settings.batch or 1)[:_BATCHES]
    batches = [moved(data.validation.batch(one), device) for one in indices]
    assert recipe.classes is not None
    forward = _result_of(recipe)
    return mismatch(model.to(device), batches, formats, training=training, forward=forward, dim=recipe.classes), data


def _result_of(recipe: Recipe) -> Callable[[nn.Module, Any], Any]:
    """Return a function that gives what a model returns when the recipe computes its loss."""

    def forward(model: nn.Module, batch: Any) -> Any:
        results: list[Any] = []
        handle = model.register_forward_hook(lambda module, given, result: results.append(result))
        try:
            recipe.loss(model, batch)
        finally:
            handle.remove()
        return results[-1] if results else None

    return forward
