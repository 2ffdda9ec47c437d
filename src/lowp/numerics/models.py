"""The watched models, with names for their modules and parameters, and the optimizers that step them in turn."""

import hashlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from lowp.compat import is_compiled_in_place, unwrapped
from lowp.errors import InvalidInput


class _Part:
    """What a module held when it was looked through; objects go by their ids, so that none is kept alive."""

    def __init__(self, module: nn.Module) -> None:
        self._parameters, self._children, self._buffers = module._parameters, module._modules, module._buffers
        self._held = self._now()

    def _now(self) -> tuple[list[int], list[int], int]:
        return [*map(id, self._parameters.values())], [*map(id, self._children.values())], len(self._buffers)

    def is_current(self) -> bool:
        """Whether it holds the same modules and parameters, and as many buffers."""
        return self._now() == self._held


class Models:
    """Models by name. With more than one model, paths of modules and parameters begin with the model's name.

    `roots` are the models as they are called, wrapped or not; `modules` maps every path to its module, `paths` the id
    of a module to its path, `parameters` the id of a parameter to its name.
    """

    def __init__(self, given: nn.Module | Mapping[str, nn.Module], in_place: bool = False) -> None:
        """`in_place`: whether a model may be compiled in place, so that nothing within it can be seen."""
        self._in_place = in_place
        models = dict(given) if isinstance(given, Mapping) else {"": given}
        if not models:
            raise InvalidInput("a profile needs a model: the dictionary of models is empty")
        for one in models.values():
            _check(one, in_place)
        self.roots: dict[str, nn.Module] = {}
        self.modules: dict[str, nn.Module] = {}
        self.paths: dict[int, str] = {}
        self.parameters: dict[int, str] = {}
        self._first = ""  # the name of the first model if there are others
        self._hidden: set[str] = set()  # names of parameters that other tensors stood for when they were looked for
        self._parts: list[_Part] = []
        self._buffers: list[tuple[str, dict[str, Any], str]] = []  # their names, and where they are found
        self.version = 0  # of `parameters`: another one where these have changed
        for name, one in models.items():
            self._add(name if len(models) > 1 else "", one)

    def add(self, model: nn.Module, renames: bool = True) -> str:
        """Watch one more model; return the name that the first one gets by that, '' where all have theirs.

        `renames`: whether a first model without a name gets one.
        """
        _check(model, self._in_place)
        renamed = self._first if renames and "" in self.roots else ""
        if renamed:
            self.roots = {renamed: self.roots.pop("")}
            self.paths = {one: _joined(renamed, path) for one, path in self.paths.items()}
            self.modules = {_joined(renamed, path): module for path, module in self.modules.items()}
            self.parameters = {one: _joined(renamed, name) for one, name in self.parameters.items()}
        self._add(self._free(type(unwrapped(model)).__name__), model)
        return renamed

    def renew(self) -> bool:
        """Find modules and parameters that were replaced since; return whether there are new paths of modules.

        Parameters in whose place torch.func.functional_call puts other tensors for a call keep their names.
        """
        if all(part.is_current() for part in self._parts):
            return False
        before, known = self.modules, self.parameters
        self.modules, self.paths, self.parameters = {}, {}, {}
        self._hidden.clear()
        self._parts.clear()
        self._buffers.clear()
        for name, model in self.roots.items():
            self._collect(name, unwrapped(model))
        self.parameters.update({one: name for one, name in known.items() if name in self._hidden})
        self.version += 1
        return not self.modules.keys() <= before.keys()

    def _add(self, name: str, model: nn.Module) -> None:
        inner = unwrapped(model)
        self.roots[name] = model
        self.version += 1
        self._first = self._first or type(inner).__name__
        self._collect(name, inner)

    def _collect(self, name: str, inner: nn.Module) -> None:
        for path, module in inner.named_modules():
            self._parts.append(_Part(module))
            if id(module) not in self.paths:
                full = _joined(name, path.replace("._orig_mod", ""))
                self.paths[id(module)], self.modules[full] = full, module
        for path, parameter in inner.named_parameters():
            if isinstance(parameter, nn.Parameter):
                self.parameters.setdefault(id(parameter), _joined(name, path))
            else:
                self._hidden.add(_joined(name, path))
        for path, _ in inner.named_buffers():
            owner, _, own = path.rpartition(".")
            self._buffers.append((_joined(name, path), inner.get_submodule(owner)._buffers, own))

    def _free(self, name: str) -> str:
        """Return the name, with a number if another model has it."""
        number, free = 1, name
        while free in self.roots:
            number += 1
            free = f"{name}{number}"
        return free

    def __iter__(self) -> Iterator[nn.Module]:
        """Yield each model without its wrappers."""
        return map(unwrapped, self.roots.values())

    def owns(self, module: nn.Module) -> bool:
        """Whether a module belongs to one of the models or wraps one."""
        return id(unwrapped(module)) in self.paths

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter with its name in the record; not those that the models have got since `renew`."""
        for model in self:
            for one in model.parameters():
                if id(one) in self.parameters:
                    yield self.parameters[id(one)], one

    def named_buffers(self) -> Iterator[tuple[str, Any]]:
        """Yield every buffer with its name; not those that the models have got since `renew`."""
        return ((name, of[own]) for name, of, own in self._buffers if of.get(own) is not None)

    def path_of(self, path: str) -> str:
        """The path in the record of one that is relative to a model: the first model's that has it."""
        return next((full for name in self.roots if (full := _joined(name, path)) in self.modules), path)

    def header(self, precision: Any) -> dict[str, Any]:
        """Return the header of a record, which describes the run: plain data."""
        from lowp import __version__

        models = list(self)
        parameters = list({id(one): one for model in models for one in model.parameters()}.values())
        preset = getattr(precision, "preset", None)
        return {
            "model": ", ".join(type(one).__name__ for one in models),
            "fingerprint": fingerprint_of(*models),
            "parameters": sum(one.numel() for one in parameters),
            "dtypes": sorted({str(one.dtype).removeprefix("torch.") for one in parameters}),
            "device": str(parameters[0].device) if parameters else "cpu",
            "precision": preset.name if preset is not None else "fp32",
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "lowp": __version__,
            "torch": torch.__version__,
            **({"models": [name for name in self.roots if name]} if len(self.roots) > 1 else {}),
        }


def _joined(name: str, path: str) -> str:
    return ".".join(filter(None, (name, path)))


def _check(model: Any, in_place: bool) -> None:
    if not isinstance(model, nn.Module):
        what = "monitor" if in_place else "profile"
        raise TypeError(f"a {what} needs a torch module, not {type(model).__name__}")
    if not in_place and is_compiled_in_place(model):
        raise InvalidInput(
            "the model was compiled in place by model.compile(), within which nothing can be watched: profile it "
            "before that, or compile it by torch.compile(model) and give what that returns"
        )


def fingerprint_of(*models: nn.Module) -> str:
    """Return a hash of the names and shapes of the models' parameters."""
    text = "|".join(";".join(f"{name}{tuple(one.shape)}" for name, one in model.named_parameters()) for model in models)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# -- the optimizers that step in turn ----------------------------------------------------------------------------------
_FORGOTTEN = 64  # steps of others after which an optimizer is no longer expected


class _Found(NamedTuple):
    """The parameters of one optimizer, those of them that the models have, and the version of the models' names."""

    version: int
    given: list[nn.Parameter]
    ids: list[int]
    named: list[tuple[str, nn.Parameter]]

    def holds_for(self, version: int, given: list[nn.Parameter]) -> bool:
        """Whether the optimizer still has these parameters, and they their names."""
        return version == self.version and [*map(id, given)] == self.ids


class Cycle:
    """The optimizers that step in turn. A step of the training ends when each has stepped, or one has stepped twice."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._found: dict[int, _Found] = {}
        self._last: dict[int, int] = {}  # by optimizer, its last step, counted in steps of all
        self._optimizers: dict[int, Optimizer] = {}
        self._wrappers: dict[int, Optimizer] = {}
        self._stepped: set[int] = set()
        self._count = 0

    def parameters(self, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters of the models that an optimizer steps, with their names in the record."""
        given = [one for group in optimizer.param_groups for one in group["params"]]
        known = self._found.get(id(optimizer))
        if known is None or not known.holds_for(self._models.version, given):
            if not all(id(one) in self._models.parameters for one in given):
                self._models.renew()
            names = self._models.parameters
            found = [(names[id(one)], one) for one in given if id(one) in names]
            known = self._found[id(optimizer)] = _Found(self._models.version, given, [*map(id, given)], found)
        return known.named

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has stepped the models before."""
        return id(optimizer) in self._last

    def is_wrapper(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer that has not stepped before has the parameters of one that has, in the same order."""
        one = id(optimizer)
        if one not in self._last and one not in self._wrappers:
            mine = [id(parameter) for _, parameter in self.parameters(optimizer)]
            others = ([id(parameter) for _, parameter in self._found[other].named] for other in self._last)
            if mine and mine in others:
                self._wrappers[one] = optimizer
        return one in self._wrappers

    def ends_with(self, optimizer: Optimizer) -> bool:
        """Note that an optimizer has stepped. Return whether that ends the step of the training."""
        one = id(optimizer)
        is_new = one not in self._last
        self._optimizers[one] = optimizer
        self._count += 1
        self._last[one] = self._count
        if is_new or len(self._last) == 1:  # those that step first in the loop begin the steps to come
            self._stepped.clear()
            return True
        waited_for = {other for other, last in self._last.items() if self._count - last < _FORGOTTEN}
        if one not in self._stepped and not (self._stepped | {one}) >= waited_for:
            self._stepped.add(one)
            return False
        self._stepped.clear()
        return True

    @property
    def alone(self) -> Optimizer | None:
        """The only optimizer that steps; None if there are several, or if none has stepped."""
        return next(iter(self._optimizers.values())) if len(self._optimizers) == 1 else None

    def trains(self, model: nn.Module) -> bool:
        """Whether an optimizer that has stepped holds a parameter of the model."""
        trained = {id(one) for found in self._found.values() for _, one in found.named}
        return any(id(one) in trained for one in unwrapped(model).parameters())
