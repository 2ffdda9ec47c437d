"""Lightning: a precision plugin for its Trainer and for Fabric.

    trainer = Trainer(plugins=[LowpPrecision("flex16+5")])
    fabric = Fabric(plugins=LowpPrecision("fp16"))

It serves those of the packages lightning and pytorch-lightning that a script has imported when it makes the plugin, or
else the one that is installed; lightning-fabric, too. Tested with Lightning 2.5 and 2.6.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import nn

import lowp
from lowp.integrations.others import widened
from lowp.integrations.turns import Turns

_PACKAGES = ("lightning.pytorch", "pytorch_lightning", "lightning_fabric")
# Lightning's names; on a CPU it makes bf16 of 16-mixed by itself, and here fp16 is fp16
_NAMES: dict[Any, str] = {"16-mixed": "fp16", "bf16-mixed": "bf16", "32-true": "fp32"}
_NAMES |= {16: "fp16", "16": "fp16", 32: "fp32", "32": "fp32"}
_TRUE = {"16-true": "fp16-storage", "bf16-true": "bf16-storage"}


def _lightnings() -> list[type]:
    """Return Lightning's own plugins: of the packages that are imported, or of the first that is installed."""
    names = [name for name in _PACKAGES if name in sys.modules]
    if not names:
        names = [name for name in _PACKAGES if find_spec(name.partition(".")[0])][:1] or [_PACKAGES[0]]
    if len(names) > 1 and names[-1] == "lightning_fabric":  # a part of pytorch_lightning
        names.pop()
    return [import_module(f"{name}.plugins.precision").Precision for name in names]


_Base: Any = type("_Base", tuple(_lightnings()), {})


class LowpPrecision(_Base):  # type: ignore[misc]
    """A plugin by which Lightning trains in a precision: a `lowp.Precision`, what that takes, or ``16-mixed``.

    Steps, validation, tests and predictions run in the precision; gradients are unscaled before Lightning clips them,
    and before `on_before_optimizer_step`. Lightning's checkpoints hold the state of the precision: a resumed run has
    the bits of one that was not stopped. The loggers get `loss_scale` and `skipped_steps` if the loss is scaled.

    `monitor`, True or a dictionary of the options of `lowp.Monitor`, watches the training; its numbers go to the
    loggers. `lowp` is the Precision. With Fabric, a precision that stores parameters in few bits needs
    ``model, optimizer = plugin.lowp.prepare(model, optimizer)`` before ``fabric.setup``, and ``fabric.save(path,
    {"precision": plugin, ...})`` saves its state.
    """

    def __new__(cls, *arguments: Any, **keywords: Any) -> LowpPrecision:
        """Return a plugin that is also one of the packages that were imported since this module was."""
        mine: Any = cls
        others = tuple(one for one in _lightnings() if not issubclass(mine, one))
        made: LowpPrecision = object.__new__(_joined(mine, others) if others else mine)
        return made

    def __init__(self, precision: Any = "bf16", *, monitor: bool | Mapping[str, Any] = False, **options: Any) -> None:
        if precision in _TRUE:
            raise lowp.InvalidInput(
                f"{precision!r} trains parameters in 16 bits without masters, so that most updates are rounded away: "
                f"give {_TRUE[precision]!r}, which keeps masters, or {precision.replace('true', 'mixed')!r}"
            )
        is_made = isinstance(precision, lowp.Precision)
        if is_made and options:
            raise lowp.InvalidInput(
                f"{', '.join(options)} given beside a Precision, which has its own: give the options to lowp.Precision"
            )
        self.lowp = precision if is_made else lowp.Precision(_NAMES.get(precision, precision), **options)
        self.precision = self.lowp.preset.name  # what `trainer.precision` says
        self.monitor: lowp.Monitor | None = None
        self._watches = {} if monitor is True else monitor
        self._turns = Turns(self.lowp)
        self._loggers: list[Any] = []
        self._late: dict[str, Any] | None = None
        self._has_trainer = False

    def __repr__(self) -> str:
        return f"LowpPrecision({self.precision!r})"

    @property
    def scaler(self) -> Any:
        """The loss scaler, which Lightning shows as `trainer.scaler`; None without one."""
        return self.lowp.scaler if self._turns.has_scale else None

    # -- models and optimizers ----------------------------------------------------------------------------------------
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Prepare a model, before it is wrapped."""
        return self.lowp.prepare_model(module)

    def connect(self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, Any, Any]:
        """Prepare the optimizers of a Trainer, and begin to watch."""
        self._has_trainer = True
        optimizers = [self.lowp.prepare_optimizer(optimizer) for optimizer in optimizers]
        if self._watches is not False and optimizers:
            options = {"precision": self.lowp, **self._watches}
            sinks = options.get("sinks", ())
            options["sinks"] = [*(sinks if isinstance(sinks, (list, tuple)) else [sinks]), self]
            self.monitor = lowp.Monitor(model, optimizers, **options)
        return model, optimizers, lr_schedulers

    def teardown(self) -> None:
        """Stop watching."""
        if self.monitor is not None:
            self.monitor.close()

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the region in which steps run."""
        self._turns.end()
        self._load_late()
        return self.lowp.autocast()

    def convert_output(self, data: Any) -> Any:
        """Return what a model of Fabric has computed, in fp32."""
        return widened(data)

    # -- a step -------------------------------------------------------------------------------------------------------
    def backward(self, tensor: torch.Tensor, model: Any, *arguments: Any, **keywords: Any) -> None:
        """Run the backward pass of a loss, by the LightningModule's own `backward` if it has one.

        Other arguments are those of `Tensor.backward`, by place or by name; a Trainer gives its optimizer before them.
        """
        given = arguments[1:] if self._has_trainer else arguments
        if self._has_trainer and type(model).backward.__qualname__ != "LightningModule.backward":
            self._turns.end()
            model.backward(self.lowp.scaler.scale(tensor), *given, **keywords)
        else:
            _, *options = signature(torch.Tensor.backward).bind(tensor, *given, **keywords).arguments.items()
            self._turns.backward(tensor, **dict(options))

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> Any:
        """Call the hooks of a Trainer."""
        return super().pre_backward(tensor, module) if self._has_trainer else tensor

    def post_backward(self, tensor: torch.Tensor, module: Any) -> Any:
        """Call the hooks of a Trainer."""
        return super().post_backward(tensor, module) if self._has_trainer else tensor

    def unscale_gradients(self, optimizer: Any) -> None:
        """Divide gradients by the loss scale before Fabric clips them."""
        self._turns.unscale_(getattr(optimizer, "optimizer", optimizer))

    def clip_gradients(self, optimizer: Any, *arguments: Any, **keywords: Any) -> None:
        """Clip gradients, in manual optimization too, after they are divided by the loss scale."""
        if self.lowp.scaler.has_scaled:
            self.unscale_gradients(optimizer)
        super().clip_gradients(optimizer, *arguments, **keywords)

    def _clip_gradients(self, model: Any, *arguments: Any, **keywords: Any) -> None:
        """Clip as the package of the LightningModule does; that of another would find no LightningModule in it."""
        package = next(one.__module__ for one in type(model).__mro__ if one.__name__ == "LightningModule")
        root = package.partition(".core.")[0]
        own: Any = next(one for one in type(self).__mro__ if one.__module__.startswith(f"{root}.plugins."))
        own._clip_gradients(self, model, *arguments, **keywords)

    def optimizer_step(
        self, optimizer: Any, model: Any = None, closure: Callable[[], Any] | None = None, **keywords: Any
    ) -> Any:
        """Step an optimizer of a Trainer, whose closure computes the gradients; or one of Fabric."""
        if keywords:
            raise lowp.InvalidInput(
                f"optimizer.step() was given {', '.join(keywords)}, and takes a closure alone: set what the optimizer "
                "is to know in its param_groups before the step"
            )
        if model is None:
            return self._turns.step(optimizer, (optimizer,), closure)
        assert closure is not None
        if isinstance(getattr(optimizer, "inner", optimizer), torch.optim.LBFGS):  # computes them again and again
            closure = partial(super()._wrap_closure, model, optimizer, closure)
            return self._turns.step(optimizer, (optimizer,), closure)
        result = closure()
        is_without = result is None or (self._turns.has_scale and not self.lowp.scaler.has_scaled)
        if is_without and model.automatic_optimization:  # of gradients: training_step has returned None, or is averaged
            super()._after_closure(model, optimizer)
        else:
            self._turns.unscale_(optimizer)
            super()._after_closure(model, optimizer)
            self._turns.step(optimizer, model.trainer.optimizers)
            self._tell(model.trainer)
        return result

    # -- loggers ------------------------------------------------------------------------------------------------------
    def _tell(self, trainer: Any) -> None:
        """Log the loss scale and the skipped steps, as often as the Trainer logs."""
        self._loggers = trainer.loggers
        if self._turns.has_scale and trainer.log_every_n_steps and self.lowp.steps % trainer.log_every_n_steps == 0:
            numbers = {"loss_scale": self.lowp.scale, "skipped_steps": self.lowp.skipped_steps}
            self.log(numbers, trainer.global_step)

    def log(self, numbers: dict[str, float], step: int) -> None:
        """Give numbers to the loggers of the Trainer."""
        for logger in self._loggers:
            logger.log_metrics(numbers, step=step)

    # -- checkpoints --------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the precision, with the random states of every rank."""
        self._turns.end()
        self._load_late()
        state = self.lowp.state_dict()
        return {"random of ranks": _of_all_ranks(state.pop("random")), **state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`."""
        ranks = state.get("random of ranks", [])
        rank, world = _place()
        random = ranks[rank] if len(ranks) == world else self.lowp.state_dict()["random"]
        state = {**{name: one for name, one in state.items() if name != "random of ranks"}, "random": random}
        self.lowp.load_state_dict(state)
        # loading an optimizer, which Lightning does later, changes shared exponents
        self._late = state if state.get("exponents") is not None else None

    def _load_late(self) -> None:
        if self._late is not None:
            state, self._late = self._late, None
            self.lowp.load_state_dict({**state, "random": self.lowp.state_dict()["random"]})

    def __reduce__(self) -> tuple[Any, ...]:
        cls = type(self)
        plain = cls.__mro__[1] if cls.__qualname__ == cls.__mro__[1].__qualname__ else cls
        return _new, (plain,), {**self.__dict__, "monitor": None, "_loggers": []}


@cache
def _joined(cls: Any, others: tuple[type, ...]) -> type:
    """Return a class with further bases, and the name of `cls`, by which checkpoints know a plugin."""
    return type(cls.__name__, (cls, *others), {"__module__": cls.__module__, "__doc__": cls.__doc__})


def _new(cls: Any) -> Any:
    return cls.__new__(cls)


# -- ranks ------------------------------------------------------------------------------------------------------------
def _place() -> tuple[int, int]:
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if there else (0, 1)


def _of_all_ranks(value: Any) -> list[Any]:
    world = _place()[1]
    values = [value] * world
    if world > 1:
        torch.distributed.all_gather_object(values, value)
    return values
