"""The loss scale: that of a watched training, and those that bring the gradients of a profiled model into fp16."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lowp.errors import InvalidInput
from lowp.numerics.part import parameter_key
from lowp.numerics.prediction import Window, scale_window
from lowp.numerics.record import Key, OpSeen, Record
from lowp.numerics.spectrum import Spectrum

_MOST_FLUSHED = 0.05  # of a gradient, beyond which a layer is kept out of fp16
_ROUNDING = 2.0**-12  # half the unit roundoff of fp16: the relative error of a rounded number is of that size


def window_of(record: Record) -> tuple[Window, dict[str, str]]:
    """The loss scales that bring the gradients of most modules into fp16, and why the others do not fit.

    A module fits where nothing overflows and less than 5 % of each gradient is flushed. Of the scales that fit most
    modules the window begins where less than 0.1 % is flushed, if there is one.
    """
    windows: dict[str, Window] = {}
    wanted: dict[str, int] = {}
    for key, seen in _gradients(record):
        if seen.nonzero:
            one = scale_window(seen, "fp16", flushed=_MOST_FLUSHED)
            windows[key.module] = windows[key.module].meet(one) if key.module in windows else one
            wanted[key.module] = max(wanted.get(key.module, -126), scale_window(seen, "fp16").lowest)
    if not windows:
        return Window(-126, 127), {}
    fit = {power: sum(one.lowest <= power <= one.highest for one in windows.values()) for power in range(-126, 128)}
    most = max(fit.values())
    if not most:
        return Window(1, 0), dict.fromkeys(windows, "fits under no scale")
    highest = max(power for power, count in fit.items() if count == most)
    outside = {
        module: f"fits 2^{one.lowest} to 2^{one.highest}" if not one.is_empty else "fits under no scale"
        for module, one in windows.items()
        if not one.lowest <= highest <= one.highest
    }
    inside = [module for module in windows if module not in outside]
    lowest = max(windows[module].lowest for module in inside)
    clean = max(wanted[module] for module in inside)
    return Window(max(lowest, min(clean, highest - 3)), highest), outside


def _gradients(record: Record) -> Iterator[tuple[Key, Spectrum]]:
    """The gradients that are in 16 bits: those of outputs that 16 bits reach, and of the parameters of products."""
    noise = _noise_of_biases(record)
    products = {
        name for seen in record.ops.values() if seen.op_class == "contraction" for name in seen.parameters.values()
    }
    for key, seen in record.tensors.items():
        if key.role == "weight_grad":
            if key.path in products:
                yield key, seen.from_size(noise.get(key.path, 0.0))
        elif key.role == "grad" and (op := record.ops.get((key.module, key.op))):
            if op.op_class != "wide":
                yield key, seen


def _noise_of_biases(record: Record) -> dict[str, float]:
    """By bias of a product the size up to which its gradient is rounding error once it is summed up in fp16.

    A bias has the sum of its output's gradient over the batch, of which each number g is rounded by about 2^-12 |g|:
    the sum by 2^-12 sqrt(sum g^2). Where the sum is zero but for rounding, as for the keys of an attention and in front
    of a normalisation over the batch, numbers of any smallness are left, which say nothing of a loss scale.
    """
    found: dict[str, float] = {}
    for (module, op), seen in record.ops.items():
        gradient = record.tensors.get(Key(module, op, "grad", "backward"))
        for name in _biases(seen):
            bias = record.tensors.get(parameter_key(name, "weight_grad", "backward"))
            if gradient is not None and bias is not None and bias.count:
                found[name] = _ROUNDING * math.sqrt(gradient.sum_squares / bias.count)
    return found


def _biases(seen: OpSeen) -> list[str]:
    """The biases that a product adds to its result as a whole: those beside one weight."""
    if seen.op_class != "contraction" or len(seen.parameters) != 2 or "weight" not in seen.parameters:
        return []
    return [name for role, name in seen.parameters.items() if role == "bias"]


def initial_scale(record: Record) -> float:
    """The loss scale at which a GradScaler starts; at most 2^16, as torch's, where modules were left out.

    Raises InvalidInput if no gradient was recorded, or if no loss scale fits all layers.
    """
    window, outside = window_of(record)
    if window.is_unknown:
        raise InvalidInput("no gradient was recorded, which a loss scale needs: give max_overhead=None")
    if window.is_empty:
        raise InvalidInput(f"no loss scale fits fp16 here: {outside}")
    return float(2.0 ** (min(window.recommended, 16) if record.is_partial else window.recommended))


# -- the scale of a watched training -----------------------------------------------------------------------------------
class WatchedScale:
    """The loss scale of a run. `scaler` is an object with `is_enabled` and `get_scale`; None if nothing scales."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._before: float | None = None

    @property
    def is_used(self) -> bool:
        """Whether anything scales the loss."""
        return self._scaler is not None

    def value(self) -> float:
        """The present scale; 1 if there is none."""
        scaler = self._scaler
        return 1.0 if scaler is None or not scaler.is_enabled() else float(scaler.get_scale())

    def begin_backward(self) -> float:
        """Note the scale at the start of a backward pass, and return it."""
        value = self.value()
        self._before = value if self.is_used else None
        return value

    def stepped(self) -> None:
        """Note that the step of that backward pass was taken."""
        self._before = None

    def has_skipped(self) -> bool:
        """Whether the step of the last backward pass was skipped: it was not taken, and the scale is lower now."""
        before, self._before = self._before, None
        return before is not None and self.value() < before

    def feed(self, counts: NDArray[np.int64]) -> None:
        """Pass counts of activation gradients, int64 [256] by octave without the scale, to a scaler of lowp's.

        They underflow like those of weights, which the scaler sees itself.
        """
        feed = getattr(self._scaler, "add_exponents", None)
        if feed is not None:
            power = round(math.log2(self.value()))
            scaled = np.zeros(256, np.int64)
            places = np.flatnonzero(counts)
            np.add.at(scaled, np.clip(places + power, 0, 254), counts[places])
            feed(torch.from_numpy(scaled))
