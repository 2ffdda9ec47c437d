"""What is known of tensors that were just written: the int16 mantissas that they stand for.

A tensor that an op wrote under a shared exponent is read by the next one, kept for backward, and looked at once more on
its way back. Its mantissas are remembered with it, so that each is computed once, and one payload serves all who keep
it. They are held as long as the tensor lives and stands unchanged: what changes it in place (its version tells) makes
them unknown. Views share them. Writing through ``.data`` is not seen; parameters, which some programs clip that way,
are therefore never remembered.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.formats import Format
from lowp.kernels.mantissas import Mantissas, current_exponent, to_mantissas

__all__ = ["Known", "find", "mantissas", "note"]


class Known:
    """A tensor's exponent in a format, and its payload where that was computed."""

    __slots__ = ("exponent", "format", "memory", "payload", "reference", "version")

    def __init__(self, x: Tensor, format: Format, exponent: int, payload: Tensor | None) -> None:
        key = id(x)
        self.reference = weakref.ref(x, lambda _: (_known.pop(key, None), None)[1])
        self.version, self.memory = x._version, x.data_ptr()
        self.format, self.exponent, self.payload = format, exponent, payload

    def mantissas(self, x: Tensor, base: Tensor) -> Mantissas:
        """The mantissas of x, which is `base` or a view of it; the payload is there."""
        assert self.payload is not None
        payload = self.payload
        if x is not base:
            payload = payload.as_strided(x.shape, x.stride(), x.storage_offset() - base.storage_offset())
        return Mantissas(payload, self.exponent, 0, 0, 0)


_known: dict[int, Known] = {}


def note(x: Tensor, format: Format, exponent: int, payload: Tensor | None = None) -> None:
    """Remember that x, of fp32, holds values of a format under an exponent, and its payload, of the same strides.

    A payload with -32768 is not to be noted: under the exponent of its own maximum such a tensor is not exact.
    """
    if type(x) is Tensor and x.dtype is torch.float32 and not x.is_inference() and x._base is None:
        _known[id(x)] = Known(x, format, exponent, payload)


def find(x: Tensor, format: Format) -> tuple[Known, Tensor] | None:
    """Return what is known of x, and the tensor it is known of, of which x may be a view."""
    if type(x) is not Tensor or x.dtype is not torch.float32 or x.is_inference():
        return None
    base = x if x._base is None else x._base
    found = _known.get(id(base))
    if found is None or found.reference() is not base or found.version != x._version:
        return None
    if found.memory != base.data_ptr() or x.is_neg() or (found.format is not format and found.format != format):
        return None
    return found, base


def mantissas(x: Tensor, to: Cast) -> Mantissas | None:
    """Return x as mantissas by a cast that is not stochastic, known or computed; None where x is not finite."""
    scaling = to.scaling
    plain = scaling is None or (scaling.headroom == 0 and scaling.exponent is None)
    found = find(x, to.format) if plain else None
    if found is None:
        exponent = current_exponent(x, to)
        return None if exponent is None else to_mantissas(x, to, exponent)
    known, base = found
    if known.payload is None:
        payload = to_mantissas(x, to, known.exponent)
        if x is base and x.is_contiguous():
            known.payload = payload.payload
        return payload
    return known.mantissas(x, base)
