"""Sites: the spots of a training step at which ops write, and how the passes of a step are told apart.

An op's spot consists of its module path, its name, and a count if the op runs there several times: "0 linear", "rnn
linear #3". Within a step a model may run several times on different data: a discriminator on real images, on generated
images, and again while the generator is trained. These runs differ by

* the count of the op within one entry of a region (``#2``), in an evaluation within one run of the outermost module;
* the number of runs of the outermost module since the last step of any optimizer (``pass 2``). Four passes are
  distinguished, and later passes share the fourth's spots: the micro-batches of an accumulated step are such passes, in
  any number;
* whether the gradient flows on to the arguments of the outermost module (``differentiable input``), as through a
  discriminator to a generator. What follows the module without parameters of its own, such as a loss, has its mark.

Scales from earlier steps belong to a module and a role, whatever number of runs a step has: all runs of the outermost
module share their spots there, and only an op that one of them runs again has a count.

A site's name also determines the class of its tensors: weights, activations, gradients, updates.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowp.casts import Cast
from lowp.compat import once
from lowp.kernels.int16 import low_words

LAST_PASS = 4
Tell = Callable[[Tensor, str, Cast], None]


class Passes:
    """The number of runs of each outermost module since the last step. `step` counts the steps.

    `apart`: whether the runs of a step have spots of their own.
    """

    def __init__(self, apart: bool = True) -> None:
        self.step, self.apart = 0, apart
        self._begun: dict[str, int] = {}
        self._roots: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._trained: WeakSet[nn.Module] = WeakSet()
        self._kept: set[int] = set()  # the numbers of trained models, also of those that are gone
        _all_passes[id(self)] = weakref.ref(self)
        _watch_optimizers()

    def end_step(self) -> None:
        """End the step: all counts start again."""
        self.step += 1
        self._begun.clear()

    def begin(self, root: str) -> int:
        """Return the number of a pass that begins, from 1."""
        number = self._begun[root] = min(self._begun.get(root, 0) + 1, LAST_PASS)
        return number

    def root(self, module: nn.Module | None) -> str:
        """Return the prefix of the sites of a model, which keeps models apart: '' for the first model.

        A module that is not trained, such as a softmax made in every step, leaves its number to the next when it is
        gone; no other model gets the number of a trained one.
        """
        if module is None:
            return ""
        number = self._roots.get(module)
        if number is None:
            taken = {*self._roots.values(), *self._kept}
            number = self._roots[module] = next(one for one in count() if one not in taken)
            if module in self._trained:
                self._kept.add(number)
        return f"model {number + 1}: " if number else ""

    def keep_sites_of(self, model: nn.Module) -> None:
        """Keep the sites of a model and of its parts for these modules alone, also after they are gone."""
        for module in model.modules():
            self._trained.add(module)
            if module in self._roots:
                self._kept.add(self._roots[module])

    def __getstate__(self) -> dict[str, Any]:
        """Return the state; a copy refers to the copies of its models."""
        return {**self.__dict__, "_roots": list(self._roots.items()), "_trained": list(self._trained)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        roots, trained = WeakKeyDictionary(dict(state["_roots"])), WeakSet(state.get("_trained", ()))
        self.__dict__.update({"_kept": set(), "apart": True, **state, "_roots": roots, "_trained": trained})
        _all_passes[id(self)] = weakref.ref(self)
        _watch_optimizers()


_all_passes: dict[int, weakref.ref[Passes]] = {}  # by id; a WeakSet takes microseconds, which small steps feel


@once
def _watch_optimizers() -> None:
    """End the count of passes at every optimizer's step, also at one outside of `Precision`."""
    register_optimizer_step_post_hook(_end_steps)


def _end_steps(*_: Any) -> None:
    for key, known in list(_all_passes.items()):
        if (passes := known()) is None:
            _all_passes.pop(key, None)
        else:
            passes.end_step()


class Trail:
    """The exponents under which one run of a checkpointed function wrote its outputs, for the run that repeats it.

    `training`: whether the function belongs to a training step, whose graph may be made by the repeated run only.
    """

    def __init__(self, training: bool) -> None:
        self.training = training
        self.exponents: dict[str, Tensor] = {}
        self.is_repeated = False


@dataclass
class _Count:
    """The number of runs of each op in an entry, and the pass of each outermost module, within a step.

    `of_runs`: the keys in `met` of an outermost module's ops, by its id, in training and in an evaluation.
    """

    step: int
    met: dict[tuple[str, bool], int] = field(default_factory=dict)
    of_runs: dict[tuple[int, bool], list[tuple[str, bool]]] = field(default_factory=dict)
    passes: dict[str, int] = field(default_factory=dict)


class Spots:
    """The spots of one entry of a region: names the spot of each op as the op runs."""

    def __init__(self, passes: Passes, trail: Trail | None = None) -> None:
        self.trail = trail
        self._passes, self._count, self._mark = passes, _Count(passes.step), ""

    def within(self, trail: Trail | None) -> Spots:
        """Return spots that share their counts with these, with a trail."""
        other = Spots(self._passes, trail)
        other._count, other._mark = self._count, self._mark
        return other

    def copy(self, trail: Trail | None = None) -> Spots:
        """Return spots that start at these counts and count separately."""
        other = self.within(trail)
        other._count = replace(self._count, met=dict(self._count.met), of_runs=dict(self._count.of_runs))
        return other

    def enter(self, module: nn.Module, arguments: Any) -> None:
        """Note, when an outermost module is called, whether the gradient flows on to its arguments.

        In an evaluation, and where runs are not told apart, each run in one entry has the spots of the first.
        """
        training, apart = self.training, self._passes.apart
        if not (training and apart):
            for key in self._count.of_runs.pop((id(module), training), ()):
                self._count.met.pop(key, None)
        mark = ", differentiable input" if apart and _requires_grad(arguments) else ""
        if apart and mark != self._mark and next(module.parameters(), None) is not None:  # a walk through the module
            self._mark = mark

    def spot(self, module: nn.Module | None, path: str, op: str) -> str:
        """Return the name of the spot of the op that runs; an evaluation does not begin a pass."""
        count, repeated = self._count, self.trail is not None and self.trail.is_repeated
        if count.step != self._passes.step and not repeated:  # an entry may stay open for many steps
            count.step = self._passes.step
            count.met.clear()
            count.of_runs.clear()
            count.passes.clear()
        root = self._passes.root(module)
        training = torch.is_grad_enabled() or (self.trail is not None and self.trail.training)
        if training and self._passes.apart and root not in count.passes:
            count.passes[root] = self._passes.begin(root)
        where = root + f"{path} {op}".strip()
        mark = self._mark
        key = where + mark, training
        met = count.met[key] = count.met.get(key, 0) + 1
        if met == 1 and module is not None:
            count.of_runs.setdefault((id(module), training), []).append(key)
        number = count.passes.get(root, 1)
        return f"{where}{f' #{met}' if met > 1 else ''}{f', pass {number}' if number > 1 else ''}{mark}"

    @property
    def training(self) -> bool:
        """Whether present writes belong to a training step."""
        return torch.is_grad_enabled() or (self.trail is not None and self.trail.training)


def _requires_grad(values: Any) -> bool:
    if isinstance(values, Tensor):
        return values.requires_grad
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return False
    return any(map(_requires_grad, values))


# -- classes ------------------------------------------------------------------------------------------------------

CLASSES = ("weights", "activations", "activation gradients", "weight gradients", "updates", "optimizer state")
_CLASS_OF_ROLE = {
    "weight": "weights",
    "buffer": "activations",
    "update": "updates",
    "gradient": "weight gradients",
    "weight gradient": "weight gradients",
    "bias gradient": "weight gradients",
    "output": "activations",
}


def class_of(site: str) -> str:
    """Return the class of a site's tensors: weights, activations, updates ..."""
    role = site.partition(" of ")[0].rstrip(" 0123456789")
    if role in _CLASS_OF_ROLE:
        return _CLASS_OF_ROLE[role]
    return "activation gradients" if role.endswith("gradient") else "optimizer state"


def is_of_optimizer(site: str) -> bool:
    """Whether a site is a moment of an optimizer. A moment with many features always takes two words."""
    return class_of(site) == "optimizer state"


def features_axis(site: str, x: Tensor) -> int | None:
    """Return the axis with enough features that one word may lose some of them; None if there is none.

    Only gradients and tensors of the optimizer have one: the first axis for parameters; for activations the longest
    axis except the first, which is that of examples.
    """
    if max(x.shape, default=0) < low_words.FEATURES:
        return None
    kind = class_of(site)
    if kind in ("weight gradients", "optimizer state"):
        axis = 0
    elif kind == "activation gradients" and x.dim() > 1:
        axis = max(range(1, x.dim()), key=lambda one: x.shape[one])
    else:
        return None
    return axis if x.shape[axis] >= low_words.FEATURES else None


def is_result(site: str) -> bool:
    """Whether a site is a result of the forward pass."""
    return site.startswith("output of ")
