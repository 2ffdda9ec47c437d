"""`state_dict` and `load_state_dict` of lowp's optimizers, in torch's layout, and what a saved state must have."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from lowp.errors import InvalidInput, brief
from lowp.optim.storage import MASTER_WEIGHT

Optimizer = torch.optim.Optimizer
# counters of stochastic rounding, kept in each parameter's state so that torch.distributed.checkpoint finds them
COUNTERS = ("master_steps", "master_seed")
OF_MASTERS = {MASTER_WEIGHT, *COUNTERS}  # present before any step


class Checkpointed(torch.optim.Optimizer):
    """An optimizer that packs and loads its own state, between the hooks that are registered with torch."""

    @abstractmethod
    def _packed(self) -> dict[str, Any]:
        """Return the state as a dictionary."""

    @abstractmethod
    def _load(self, state_dict: dict[str, Any]) -> None:
        """Load such a dictionary. Raises InvalidInput, with nothing changed, for that of another model."""

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with ``master_weight`` (fp32) in the place of whatever is kept of a parameter in few bits.

        The weights themselves are in the model's, shared exponents in the precision's.
        """
        hooks: Any = self
        for before in hooks._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = self._packed()
        for after in hooks._optimizer_state_dict_post_hooks.values():
            changed = after(self, state)
            state = state if changed is None else changed
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a dictionary of `state_dict`, of any storage, or of the torch optimizer of this name or inside.

        A ``master_weight`` sets the parameter, and moments are put into the format in which this optimizer keeps them.
        Raises InvalidInput for what does not fit the parameters, before anything changes.
        """
        require_optimizer_state(state_dict)
        state, hooks = dict(state_dict), cast(Any, self)
        for before in hooks._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state)
            state = state if changed is None else changed
        self._load(state)
        for after in hooks._optimizer_load_state_dict_post_hooks.values():
            after(self)


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


def entries_by_parameter(
    optimizer: Optimizer, state: Mapping[str, Any], moments: Sequence[str] = ()
) -> dict[Tensor, Mapping[str, Any]]:
    """Return the saved entry of each parameter. Keys are numbers, or names as from torch.distributed.checkpoint.

    Raises InvalidInput if the groups, the `MASTER_WEIGHT` entries or these moments belong to another model.
    """
    found: dict[Tensor, Mapping[str, Any]] = {}
    for key, parameter in _parameters_by_key(optimizer, state["param_groups"]).items():
        found[parameter] = entry = _checked_entry(state["state"].get(key, {}), key)
        for name in (MASTER_WEIGHT, *moments):
            if entry.get(name) is not None:
                _check_moment(name, entry[name], parameter, key)
        if moments and "step" in entry:
            _check_moment("step", entry["step"], parameter, key)
    return found


def _parameters_by_key(optimizer: Optimizer, groups: Any) -> dict[Any, Tensor]:
    """Return the parameters by the keys of a saved state's groups. Raises InvalidInput for those of another model."""
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, Mapping) for group in groups):
        raise InvalidInput("the entry 'param_groups' of an optimizer's state must be a list of dictionaries")
    listed = [group.get("params") for group in groups]
    if not all(isinstance(one, (list, tuple)) and all(type(key) in (int, str) for key in one) for one in listed):
        raise InvalidInput("each group of an optimizer's state must have params, a list of indices or names")
    sizes, own = [len(one) for one in listed], [len(group["params"]) for group in optimizer.param_groups]
    if sizes != own:
        raise InvalidInput(
            f"the saved optimizer has groups of {_listed(sizes)} parameters, but this one has groups of {_listed(own)}"
            ": it belongs to another model or a different order of parameters"
        )
    keys, parameters = [key for one in listed for key in one], parameters_of(optimizer)
    if len(set(keys)) < len(set(map(id, parameters))):
        raise InvalidInput("a parameter appears twice in an optimizer's state")
    return dict(zip(keys, parameters, strict=True))


def _checked_entry(entry: Any, key: object) -> Mapping[str, Any]:
    """Return what is saved of a parameter. Raises InvalidInput unless it is a dictionary with whole counters."""
    if not isinstance(entry, Mapping):
        raise InvalidInput(f"the state of parameter {key} must be a dictionary, not {type(entry).__name__}")
    for name in COUNTERS:
        value = entry.get(name, 0)
        if not (type(value) is int and 0 <= value < 2**64):
            raise InvalidInput(f"{name} of parameter {key} must be a whole number of 0 or more, not {brief(value)}")
    return entry


def _check_moment(name: str, value: Any, parameter: Tensor, key: object) -> None:
    """Raise InvalidInput unless a saved value has a number for each element of the parameter; a step is one number."""
    if name == "step":
        if not (_is_number(value) and value >= 0) or getattr(value, "ndim", None):
            raise InvalidInput(f"the step of parameter {key} must be a number of 0 or more, not {brief(value)}")
        return
    is_alike = isinstance(value, Tensor) and value.is_floating_point() == parameter.is_floating_point()
    if not (is_alike and value.shape == parameter.shape):
        raise InvalidInput(
            f"{name} of parameter {key} must be a floating-point tensor of shape {tuple(parameter.shape)}, not "
            f"{_described(value)}: the state belongs to another model or a different order of parameters"
        )


# Entries that a parameter's state must have in torch's element-wise optimizers, once there is a state.
_REQUIRED = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "SparseAdam"), ("step", "exp_avg", "exp_avg_sq")),
    "ASGD": ("step", "ax"),
    "Adadelta": ("step", "square_avg", "acc_delta"),
    "Adagrad": ("step", "sum"),
    "Adamax": ("step", "exp_avg", "exp_inf"),
    "RMSprop": ("step", "square_avg"),
    "Rprop": ("step", "prev", "step_size"),
    "SGD": (),
}
# Entries required by an option; only torch's SGD recreates its momentum if it is missing.
_REQUIRED_BY = {
    "Adam": {"amsgrad": "max_exp_avg_sq"},
    "AdamW": {"amsgrad": "max_exp_avg_sq"},
    "RMSprop": {"centered": "grad_avg", "momentum": "momentum_buffer"},
}
_SWITCHES = ("capturable", "differentiable", "foreach", "fused", "maximize")
_OPTIONAL = ("grad_avg", MASTER_WEIGHT, "max_exp_avg_sq", "momentum_buffer")  # depending on the optimizer's options


def kind_of(part: Any) -> str | None:
    """Return the class name of an optimizer (the innermost, within master weights) or of a scheduler; else None."""
    if isinstance(part, Optimizer):
        return type(_innermost(part)).__name__
    return type(part).__name__ if isinstance(part, LRScheduler) else None


def check_saved(part: Any, saved: Any, kind: object, present: Mapping[str, Any]) -> None:
    """Raise InvalidInput for a state from which this part cannot continue; changes nothing.

    `kind` is `kind_of` the saved part, None if unknown; `present` is the part's own state.
    """
    own = kind_of(part)
    if own is not None and kind is not None and kind != own:
        raise InvalidInput(f"it was saved from {kind}, but this optimizer is {own}: load it into the same class")
    if isinstance(part, Optimizer):
        _check_optimizer(part, saved)
    elif isinstance(part, LRScheduler):
        _check_scheduler(saved, present)
    elif isinstance(part, nn.Module):
        _check_model(saved, present)
        for name, _ in part.named_parameters(remove_duplicate=False):
            _check_finite(saved.get(name), name)


def _innermost(optimizer: Optimizer) -> Optimizer:
    while isinstance(inner := getattr(optimizer, "inner", None), Optimizer):
        optimizer = inner
    return optimizer


# -- optimizers -------------------------------------------------------------------------------------------------------
def _check_optimizer(optimizer: Optimizer, saved: Any) -> None:
    require_optimizer_state(saved)
    parameters = _parameters_by_key(optimizer, saved["param_groups"])
    inner = _innermost(optimizer)
    for number, (own, group) in enumerate(zip(optimizer.param_groups, saved["param_groups"], strict=True)):
        # an entry that a scheduler added (initial_lr) is compared if both have it
        compared = {name: value for name, value in own.items() if name in inner.defaults or name in group}
        _check_options(compared, group, f"parameter group {number}")
        _check_betas(group, f"parameter group {number}")
    is_torch_s = type(inner).__module__.startswith(("torch.optim.", "lowp.optim."))
    has_masters = any(isinstance(entry, Mapping) and MASTER_WEIGHT in entry for entry in saved["state"].values())
    for index, entry in saved["state"].items():
        if index not in parameters:
            raise InvalidInput(f"it has a state of parameter {index!r}, but there are {len(parameters)} parameters")
        for name, value in _checked_entry(entry, index).items():
            _check_finite(value, f"{name} of parameter {index}")
        if has_masters and MASTER_WEIGHT not in entry:
            raise InvalidInput(f"the state of parameter {index} lacks {MASTER_WEIGHT}, which others have")
        if is_torch_s and type(inner).__name__ in _REQUIRED:
            required = _REQUIRED[type(inner).__name__] + _required_by_options(inner, index, saved["param_groups"])
            _check_moments(entry, parameters[index], index, required)


def _check_options(own: Mapping[str, Any], group: Mapping[str, Any], place: str) -> None:
    """Check that numbers, pairs and switches keep their kinds. A switch of another class may be missing."""
    for name, value in own.items():
        if isinstance(value, bool) or name in _SWITCHES:
            if not isinstance(group.get(name), (bool, type(None))):
                raise InvalidInput(f"{place} has {name}={brief(group[name])}: give True or False")
        elif _is_number(value) and not _is_number(group.get(name)):
            raise InvalidInput(f"{place} has {name}={brief(group.get(name))}: give a finite number")
        elif isinstance(value, (list, tuple)) and value and all(map(_is_number, value)):
            given = group.get(name)
            if not isinstance(given, (list, tuple)) or len(given) != len(value) or not all(map(_is_number, given)):
                raise InvalidInput(f"{place} has {name}={brief(given)}: {len(value)} finite numbers must be given")


def _check_betas(group: Mapping[str, Any], place: str) -> None:
    betas = group.get("betas")
    if betas is not None and not all(0 <= beta < 1 for beta in betas):
        raise InvalidInput(f"{place} has betas={brief(betas)}: each must be at least 0 and below 1")


def _required_by_options(inner: Optimizer, index: object, groups: Any) -> tuple[str, ...]:
    """Return the moments that a parameter must have for the options of its group."""
    group = next(one for one in groups if index in one["params"])
    return tuple(name for option, name in _REQUIRED_BY.get(type(inner).__name__, {}).items() if group.get(option))


def _check_moments(entry: Mapping[Any, Any], parameter: Tensor, index: object, required: tuple[str, ...]) -> None:
    missing = [name for name in required if name not in entry]
    if missing and not entry.keys() <= OF_MASTERS:
        raise InvalidInput(f"the state of parameter {index} lacks {', '.join(missing)}")
    for name, value in entry.items():
        is_moment = name in ("step", *required) or (name in _OPTIONAL and value is not None)
        if is_moment or getattr(value, "ndim", None):
            _check_moment(name, value, parameter, index)


# -- schedulers and models --------------------------------------------------------------------------------------------
def _check_scheduler(saved: Any, present: Mapping[str, Any]) -> None:
    if not isinstance(saved, Mapping) or "last_epoch" not in saved:
        raise InvalidInput("a scheduler's state must be a dictionary from state_dict() with last_epoch")
    _check_options({name: value for name, value in present.items() if name in saved}, saved, "it")


def _check_model(saved: Any, present: Mapping[str, Any]) -> None:
    if not isinstance(saved, Mapping):
        raise InvalidInput(f"a model's state must be a dictionary from state_dict(), not {type(saved).__name__}")
    for name, value in present.items():
        given = saved.get(name)
        if not isinstance(value, Tensor) or name not in saved:
            continue  # torch itself reports missing entries
        if not isinstance(given, Tensor):
            raise InvalidInput(f"{name} must be {_described(value)}, not {type(given).__name__}")
        if given.is_floating_point() != value.is_floating_point() or given.is_complex() != value.is_complex():
            raise InvalidInput(f"{name} must be {_described(value)}, not {_described(given)}: its numbers would change")


def _check_finite(value: Any, name: str) -> None:
    """Raise InvalidInput for a tensor of floating-point numbers from which no training can go on."""
    if isinstance(value, Tensor) and value.is_floating_point() and not torch.isfinite(value).all():
        raise InvalidInput(
            f"{name} has infinities or NaN, from which no run can go on: load an earlier checkpoint. To look at this "
            "one, read it with torch.load"
        )


# -- words ------------------------------------------------------------------------------------------------------------
def _is_number(value: Any) -> bool:
    """Whether the value is a finite number or a tensor of one."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and math.isfinite(value.item())
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"a tensor of {str(value.dtype).removeprefix('torch.')}, shape {tuple(value.shape)}"


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes)) or "no"
