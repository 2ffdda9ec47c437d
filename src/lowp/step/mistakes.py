"""Detects mistakes of a training loop: what is trained is not what was prepared, or a call is forgotten or misplaced.

Forgotten are unscaling before a step or before clipping, and the region.
"""

import math
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowp.errors import InvalidInput, Misuse
from lowp.ops.casting import native_dtype
from lowp.optim.model_state import owner_of
from lowp.optim.preparing import MasterStorage, Preparation
from lowp.optim.shards import is_sharded, is_zero
from lowp.optim.state_dicts import parameters_of
from lowp.policy import Rule
from lowp.presets import Preset
from lowp.step.scaler import GradScaler

Optimizer = torch.optim.Optimizer
_NO_MODULE: dict[str, Any] = {}
_waiting: dict[int, weakref.ref[GradScaler]] = {}  # by id; a WeakSet takes microseconds, which small steps feel


def expect_step(scaler: GradScaler) -> None:
    """Note that gradients are scaled: until `step_comes`, optimizers of watched models must not step."""
    if scaler.is_enabled() and not torch.compiler.is_compiling():
        _watch_optimizers()
        _waiting[id(scaler)] = weakref.ref(scaler)


def step_comes(scaler: GradScaler) -> None:
    """Note that the scaler itself is about to step its optimizers."""
    _waiting.pop(id(scaler), None)


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_scaled)


def _refuse_scaled(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise Misuse before a step on scaled gradients. Costs nothing in a correct loop, where no scaler waits."""
    if torch.compiler.is_compiling():
        return
    for key, reference in list(_waiting.items()):
        scaler = reference()
        if scaler is None:
            _waiting.pop(key, None)
        elif scaler.holds_scaled_gradients(optimizer):
            raise Misuse(
                f"optimizer.step() would apply gradients that are multiplied by the loss scale "
                f"{scaler.get_scale():g}: call precision.step(optimizer), which divides them by it and skips the step "
                "if one is not finite, or precision.unscale_(optimizer) first"
            )


def not_rounded(preset: Preset, ops: Sequence[str], unused: Sequence[Rule], was_entered: bool) -> str:
    """Return what the region of a first step has not done, for a warning; nothing if it did what the precision says.

    `ops`: those that ran under rules; `unused`: the rules that matched nothing.
    """
    name, rules = preset.name, preset.policy.rules
    if rules and not was_entered and not ops:
        return (
            f"nothing ran in {name} in the first step, because precision.autocast() was not entered: "
            "compute the loss within `with precision.autocast():`"
        )
    narrow = [one for one in rules if one.input is not None and native_dtype(one.input) is None]
    if not narrow or not ops or any(one not in unused for one in narrow):
        return ""
    return (
        f"nothing was rounded to {name} in the first step: no call matched its rules for "
        f"{', '.join(op for one in narrow for op in one.ops)}, and {', '.join(ops)} ran under its other "
        f"rules. For other ops and modules edit the policy that `lowp policy show {name} --toml` prints"
    )


class FirstStep:
    """The scaled gradients of `models` as a backward pass has left them, looked at when the first step begins.

    A line that the loop lacks is missing in its first step too; later ones are not looked at.
    """

    def __init__(self, models: Iterable[nn.Module]) -> None:
        found = {id(one): one.grad for model in models for one in model.parameters() if one.grad is not None}
        dense = {key: one for key, one in found.items() if type(one) is torch.Tensor and not one.is_sparse}
        self._left = {key: (one, one._version, torch.linalg.vector_norm(one.detach())) for key, one in dense.items()}

    def begins(self, scaler: GradScaler, optimizers: Sequence[torch.optim.Optimizer], forgotten: str) -> bool:
        """Warn of what was forgotten: `forgotten`, if it says something, and to unscale before clipping.

        Returns whether this is settled: not if gradients were changed that were infinite. Reads a device only if
        gradients were changed in place while they were scaled.
        """
        if forgotten:
            warnings.warn(forgotten, UserWarning, stacklevel=4)
        settled = True
        for optimizer in filter(scaler.holds_scaled_gradients, optimizers):
            keys = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
            left = [self._left[key] for key in keys if key in self._left]
            changed = [
                (norm, torch.linalg.vector_norm(one.detach())) for one, version, norm in left if one._version != version
            ]
            if not changed:
                continue
            before, after = (math.hypot(*(float(norm) for norm in norms)) for norms in zip(*changed, strict=True))
            scale = scaler.get_scale()
            settled = settled and math.isfinite(before)
            # averages and masks leave the order of magnitude, which the loss scale raises by far more
            if math.isfinite(before) and after * math.sqrt(scale) < before:
                warnings.warn(
                    f"between precision.backward and precision.step gradients were reduced from a norm of {before:.4g} "
                    f"to {after:.4g} while they were multiplied by the loss scale {scale:g}, by which the step divides "
                    "them: call precision.unscale_(optimizer) before clipping",
                    UserWarning,
                    stacklevel=4,
                )
        return settled


class _Place(NamedTuple):
    """Where a parameter stands in a model, and its dtype. No reference to it: swap_tensors refuses weak ones."""

    module: weakref.ref[nn.Module]
    name: str
    identity: int
    dtype: torch.dtype
    path: str


class _Known(NamedTuple):
    """An optimizer that has been looked at: how many parameters of models it holds, and the first and last of them."""

    optimizer: weakref.ref[Optimizer]
    held: int
    ends: tuple[_Place, ...]


class Trained:
    """The models and optimizers of a precision, and whether they still belong together.

    An optimizer is looked at in full at its first step, and again if its first or last parameter is no longer what it
    was, as after ``half()`` and after ``load_state_dict(assign=True)``. To compare these two takes less than a
    microsecond and reads nothing of a device.
    """

    def __init__(self, preset: Preset, storing: Preparation | None) -> None:
        self._preset, self._storing = preset, storing
        # whether optimizers keep masters or exponents of what is stored
        self._keeps = storing is not None and (preset.masters.kind != "none" or not isinstance(storing, MasterStorage))
        self._models: list[weakref.ref[nn.Module]] = []
        self._known: dict[int, _Known] = {}  # by id of the optimizer

    def models(self) -> list[nn.Module]:
        """Return the prepared models that still exist."""
        return [model for known in self._models if (model := known()) is not None]

    def add(self, model: nn.Module) -> bool:
        """Add a prepared model; return whether it is new."""
        is_new = all(known is not model for known in self.models())
        if is_new:
            self._models.append(weakref.ref(model))
        return is_new

    def admit(self, optimizer: Optimizer | None, *models: nn.Module) -> None:
        """Raise InvalidInput, before models and their optimizer are prepared, if they cannot be trained together."""
        given = [] if optimizer is None else parameters_of(optimizer)
        names = {id(one): name for model in models for name, one in model.named_parameters()}
        if self._storing is None:
            for one in [*given, *(one for model in models for one in model.parameters())]:
                self._refuse_dtype(one, names.get(id(one), ""), optimizer)
        if optimizer is not None and isinstance(self._storing, MasterStorage):
            self._storing.admit(optimizer, *models)

    def check(self, optimizers: Sequence[Optimizer], may_lack_gradients: bool) -> None:
        """Raise or warn, before a step, if optimizers do not train the models, or not as they were prepared."""
        for optimizer in optimizers:
            known = self._known.get(id(optimizer))
            if known is None or known[0]() is not optimizer:
                self._look(optimizer, 0, may_lack_gradients)
                continue
            for module, name, identity, dtype, _ in known[2]:
                held = getattr(module(), "_parameters", _NO_MODULE)
                found: Any = held[name] if name in held else None  # those of a ScriptModule have no `get`
                if id(found) != identity or found.dtype is not dtype:
                    self._look(optimizer, known[1], True)
                    break

    def _look(self, optimizer: Optimizer, before: int, may_lack_gradients: bool) -> None:
        keeper = optimizer.optim if is_zero(optimizer) else optimizer  # type: ignore[attr-defined]
        places = {place.identity: place for place in self._places()}
        given = parameters_of(keeper)
        mine = [one for one in given if id(one) in places]
        for one in mine:
            self._refuse_unkept(one, places[id(one)].path, keeper)
            self._refuse_dtype(one, places[id(one)].path, keeper)
        if len(mine) < before:
            warnings.warn(
                f"{before - len(mine)} of the {before} parameters that the optimizer trains are no longer the model's: "
                "load_state_dict(assign=True) replaces parameters, and so does a new layer, and what is there now is "
                "not trained. Load without assign=True, or make the optimizer anew and call prepare again",
                UserWarning,
                stacklevel=5,
            )
        elif places and not mine and not may_lack_gradients and all(one.grad is None for one in given):
            warnings.warn(
                "the optimizer holds no parameter of a prepared model, and none with a gradient: its steps change "
                "nothing. Make the optimizer of model.parameters(), after any load_state_dict(assign=True)",
                UserWarning,
                stacklevel=5,
            )
        # FSDP2 may leave gathered parameters in the places of their shards
        is_seen = mine and not any(map(is_sharded, mine))
        ends = tuple(places[id(mine[at])] for at in (0, -1)) if is_seen else ()
        self._known = {key: known for key, known in self._known.items() if known.optimizer() is not None}
        self._known[id(optimizer)] = _Known(weakref.ref(optimizer), len(mine), ends)

    def _places(self) -> Iterator[_Place]:
        for model in self.models():
            for path, module in model.named_modules():
                for name, one in module._parameters.items():
                    if one is not None:
                        yield _Place(weakref.ref(module), name, id(one), one.dtype, f"{path}.{name}".lstrip("."))

    def _refuse_unkept(self, parameter: Tensor, path: str, optimizer: Optimizer) -> None:
        """Raise Misuse for a parameter in few bits whose masters, or exponent, its optimizer does not keep."""
        owner: Any = owner_of(parameter)
        if (
            self._keeps
            and parameter.is_floating_point()
            and (owner is None or getattr(owner, "inner", None) is optimizer)
        ):
            raise Misuse(
                f"{self._preset.name} stores {path} in {self._preset.policy.parameters}, and this optimizer is not "
                "what prepare returned: it would round every update to that format. Step the optimizer that "
                "precision.prepare_optimizer(optimizer), or prepare, has returned"
            )

    def _refuse_dtype(self, parameter: Tensor, path: str, optimizer: Optimizer | None) -> None:
        """Raise InvalidInput for a parameter that was converted after prepare, or that is narrow and has no master."""
        owner, dtype = owner_of(parameter), parameter.dtype
        storage = getattr(owner, "storage", None) or getattr(self._storing, "storage", None)
        stored = torch.float32 if storage is None else storage.dtype
        name = path or f"a parameter of shape {tuple(parameter.shape)}"
        is_as_given = self._storing is None and storage is not None and storage.cast is None
        if not parameter.is_floating_point() or is_as_given:
            return
        if (storage is not None or self._storing is not None) and dtype is not stored:
            raise InvalidInput(
                f"{name} is {dtype}, and was {stored} when its optimizer was prepared: convert the model back, or a "
                "copy of it instead, such as copy.deepcopy(model).half() for inference"
            )
        is_narrow = dtype.itemsize < 4 and parameter.requires_grad and storage is None and self._preset.policy.rules
        if is_narrow and not getattr(optimizer, "allows_fp16_gradients", False):
            raise InvalidInput(
                f"{name} is {dtype}, and {self._preset.name} trains parameters as they are: without masters most "
                "updates would be rounded away. Convert the model back with float(), or take a precision with masters: "
                f"{'fp16' if dtype is torch.float16 else 'bf16'}-storage"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_models": self.models(), "_known": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "_models": [weakref.ref(model) for model in state["_models"]]})
