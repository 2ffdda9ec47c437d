"""The hooks and the layout of `state_dict` and `load_state_dict` that lowp's optimizers share with torch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lowp.errors import InvalidInput, brief

Optimizer = torch.optim.Optimizer
MASTER_WEIGHT = "master_weight"  # the entry of a parameter's state that holds its fp32 value


def with_saving_hooks(optimizer: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `make`, after the hooks registered for `state_dict` have seen and changed it."""
    for before in optimizer._optimizer_state_dict_pre_hooks.values():
        before(optimizer)
    state = make()
    for after in optimizer._optimizer_state_dict_post_hooks.values():
        changed = after(optimizer, state)
        state = state if changed is None else changed
    return state


def with_loading_hooks(optimizer: Any, state: Any, load: Callable[[dict[str, Any]], None]) -> None:
    """Call `load` with a state dictionary as changed by the hooks registered for `load_state_dict`.

    Raises InvalidInput if it is not an optimizer's state.
    """
    require_optimizer_state(state)
    state = dict(state)
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = before(optimizer, state)
        state = state if changed is None else changed
    load(state)
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)


def require_optimizer_state(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise InvalidInput(f"an optimizer's state must be a dictionary from state_dict(), not {type(state).__name__}")
    missing = [name for name in ("state", "param_groups") if name not in state]
    if missing:
        raise InvalidInput(f"an optimizer's state must have state and param_groups; missing: {', '.join(missing)}")
    if not isinstance(state["state"], Mapping):
        raise InvalidInput(
            f"the entry 'state' of an optimizer's state must be a dictionary, not {brief(state['state'])}"
        )


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def packed_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the groups as torch saves them, with parameters as numbers."""
    numbers: dict[int, int] = {}
    for parameter in parameters_of(optimizer):
        numbers.setdefault(id(parameter), len(numbers))
    return [{**group, "params": [numbers[id(one)] for one in group["params"]]} for group in optimizer.param_groups]


def entries_by_parameter(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[Tensor, Mapping[str, Any]]:
    """Return the saved entry of each parameter. Keys are numbers, or names as from torch.distributed.checkpoint.

    Raises InvalidInput if the groups or the `MASTER_WEIGHT` entries belong to another model.
    """
    saved = [list(group["params"]) for group in state["param_groups"]]
    lengths = [len(group["params"]) for group in optimizer.param_groups]
    if [len(group) for group in saved] != lengths:
        raise InvalidInput(
            f"the saved optimizer has groups of {[len(group) for group in saved]} parameters and this one of {lengths}:"
            " it belongs to another model or a different order of parameters"
        )
    found: dict[Tensor, Mapping[str, Any]] = {}
    for key, parameter in zip(chain.from_iterable(saved), parameters_of(optimizer), strict=True):
        entry = state["state"].get(key, {})
        if not isinstance(entry, Mapping):
            raise InvalidInput(f"the state of parameter {key} must be a dictionary, not {type(entry).__name__}")
        check_shape(entry.get(MASTER_WEIGHT), parameter, f"{MASTER_WEIGHT} of parameter {key}")
        found[parameter] = entry
    return found


def check_shape(value: Any, parameter: Tensor, what: str) -> None:
    """Raise InvalidInput unless a saved value is missing or a tensor of the parameter's shape."""
    if value is None or (isinstance(value, Tensor) and value.shape == parameter.shape):
        return
    given = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise InvalidInput(
        f"{what} must be a tensor of shape {tuple(parameter.shape)}, not {given}: the state belongs to "
        "another model or a different order of parameters"
    )
