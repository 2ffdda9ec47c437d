"""The arguments of GradScaler: torch's in torch's two spellings, and lowp's own."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from numbers import Real
from typing import Any

import torch

from lowp.compat import accelerator
from lowp.distributed import resolve
from lowp.errors import InvalidInput, unknown
from lowp.presets import LossScale
from lowp.scaling import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    AdaptiveLossScale,
    DynamicLossScale,
    LossScaling,
    StaticLossScale,
)
from lowp.scaling.loss_scale import scaling_of

# torch.amp.GradScaler's order; torch.cuda.amp's is the same without the device.
_POSITIONAL = ("device", "init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of GradScaler, which documents them."""

    device: str | torch.device | None = None
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True
    loss_scale: LossScaling | LossScale | float | str | None = None
    dynamic: bool = True
    floor: float = SMALLEST_SCALE
    ceiling: float = LARGEST_SCALE
    hysteresis: int = 1
    target_underflow: float | None = None
    sample_interval: int | None = None
    patience: int = 25
    process_group: Any = "auto"

    @classmethod
    def read(cls, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Options:
        """Read a call in torch.amp's spelling, or in torch.cuda.amp's where the first argument is a number."""
        in_cuda_spelling = bool(arguments) and isinstance(arguments[0], Real) and not isinstance(arguments[0], bool)
        positional = _POSITIONAL[1:] if in_cuda_spelling else _POSITIONAL
        if len(arguments) > len(positional):
            raise TypeError(
                f"GradScaler takes at most {len(positional)} positional arguments here ({', '.join(positional)}), "
                f"not {len(arguments)}; give the others by name"
            )
        given = dict(zip(positional, arguments, strict=False))
        for name in keywords:
            if name not in cls.__dataclass_fields__:
                raise TypeError(unknown("argument of GradScaler", name, cls.__dataclass_fields__))
            if name in given:
                raise TypeError(f"GradScaler got two values for {name!r}, one by position and one by name")
        options = cls(**given, **keywords)
        resolve(options.process_group)
        return options

    @classmethod
    def signature(cls) -> inspect.Signature:
        """Return the signature of GradScaler for help(): torch's arguments, and lowp's as keywords."""
        kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return inspect.Signature(
            [
                inspect.Parameter(field.name, kinds[field.name in _POSITIONAL], default=field.default)
                for field in dataclasses.fields(cls)
            ]
        )

    def scaling(self) -> LossScaling:
        """Return the loss scale that the arguments describe."""
        asked = self.loss_scale
        bounds = {"floor": self.floor, "ceiling": self.ceiling}
        if isinstance(asked, LossScaling):
            return asked
        if isinstance(asked, LossScale):
            return scaling_of(asked) or StaticLossScale(1.0)
        if isinstance(asked, Real) and not isinstance(asked, bool):
            return StaticLossScale(float(asked), **bounds)
        if asked not in (None, "dynamic", "static"):
            raise InvalidInput(
                f"loss_scale cannot be {asked!r}: allowed are a number (a static scale), 'dynamic', 'static' and an "
                "object such as lowp.scaling.DynamicLossScale(...) or a LossScale, as a preset has"
            )
        if asked == "static" or not self.dynamic:
            return StaticLossScale(self.init_scale, **bounds)
        moves = {name: getattr(self, name) for name in ("growth_factor", "backoff_factor", "growth_interval")}
        moves |= {"hysteresis": self.hysteresis, **bounds}
        if self.target_underflow is None:
            return DynamicLossScale(self.init_scale, **moves)
        return AdaptiveLossScale(self.init_scale, **moves, target_underflow=self.target_underflow)

    def device_type(self) -> str:
        """Return the kind of device: the one given, else the accelerator of this machine, else the CPU."""
        if self.device is not None:
            return torch.device(self.device).type
        return accelerator() or "cpu"

    def usable(self, stacklevel: int) -> bool:
        """Return whether the scaler is enabled. Warns as torch does if CUDA is requested but not available."""
        if self.enabled and self.device_type() == "cuda" and not torch.cuda.is_available():
            message = "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling."
            warnings.warn(message, stacklevel=stacklevel)
            return False
        return bool(self.enabled)

    def interval_of(self, scaling: LossScaling) -> int:
        """Return the number of steps between two samples of the exponents. Raises InvalidInput for invalid numbers."""
        interval = self.sample_interval
        if interval is None:
            interval = 10 if isinstance(scaling, AdaptiveLossScale) else 100
        whole = all(isinstance(one, int) and not isinstance(one, bool) for one in (interval, self.patience))
        if not whole or interval < 0 or self.patience < 1:
            raise InvalidInput(
                f"sample_interval={interval!r} and patience={self.patience!r} are numbers of steps: allowed are 0 "
                "(never) or more for the first and 1 or more for the second"
            )
        return interval
