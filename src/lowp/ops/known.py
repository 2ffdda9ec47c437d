"""What is known of tensors that were just written: the int16 mantissas that they stand for.

A tensor that an op wrote under a shared exponent is read by the next one, kept for backward, and looked at once more on
its way back. Its mantissas are remembered with it, so that each is computed once, and one payload serves all who keep
it. They are held as long as the tensor lives and stands unchanged: what changes it in place (its version tells) makes
them unknown. Views share them. What torch does not count (collectives of torch.distributed, ``.data``, NumPy) shows in
a sample of elements, unless it changes few of them; parameters, which some programs clip through ``.data``, are
therefore never remembered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.formats import Format
from lowp.kernels.cpu import bytes_at
from lowp.kernels.mantissas import Mantissas, current_exponent, exact_exponent, to_mantissas

__all__ = ["Known", "exact", "find", "mantissas", "note", "noted"]


class Known:
    """A tensor's exponent in a format, and its payload where that was computed."""

    __slots__ = ("exponent", "format", "memory", "payload", "reference", "sample", "version")

    def __init__(self, x: Tensor, format: Format | Cast, exponent: int, payload: Tensor | None) -> None:
        key = id(x)
        self.reference = weakref.ref(x, lambda _: (_known.pop(key, None), None)[1])
        self.version, self.memory, self.sample = x._version, x.data_ptr(), _sample(x)
        self.format, self.exponent, self.payload = format, exponent, payload

    def mantissas(self, x: Tensor, base: Tensor) -> Mantissas:
        """The mantissas of x, which is `base` or a view of it; the payload is there."""
        assert self.payload is not None
        payload = self.payload
        if x is not base:
            payload = payload.as_strided(x.shape, x.stride(), x.storage_offset() - base.storage_offset())
        return Mantissas(payload, self.exponent, 0, 0, 0)


_known: dict[int, Known] = {}
_SAMPLE = 64  # bytes


def note(x: Tensor, format: Format | Cast, exponent: int, payload: Tensor | None = None) -> None:
    """Remember that x, of fp32, holds values of a format under an exponent, and its payload; or a cast's of x.

    A payload of other strides is dropped. One with -32768 is known by this alone: under the exponent of its own maximum
    such a tensor is not exact.
    """
    if type(x) is Tensor and x.dtype is torch.float32 and not x.is_inference() and x._base is None:
        laid = payload is None or payload.stride() == x.stride()
        _known[id(x)] = Known(x, format, exponent, payload if laid else None)


def find(x: Tensor, format: Format | Cast) -> tuple[Known, Tensor] | None:
    """Return what is known of x in a format, or by a cast, and the tensor it is known of: x, or what it views."""
    found = noted(x)
    if found is None or (found.format is not format and found.format != format):
        return None
    return found, x if x._base is None else x._base


def noted(x: Tensor) -> Known | None:
    """Return what is known of x, or of what it is a view of, in whatever format."""
    if type(x) is not Tensor or x.dtype is not torch.float32 or x.is_inference():
        return None
    base = x if x._base is None else x._base
    found = _known.get(id(base))
    if found is None or found.reference() is not base or found.version != x._version:
        return None
    if found.memory != base.data_ptr() or x.is_neg():
        return None
    return found if found.sample == _sample(base) else None


def _sample(x: Tensor) -> bytes:
    """Return the bytes of a few elements at both ends and in the middle of x's memory."""
    if x.device.type != "cpu" or x.numel() == 0:
        return b""
    size = int(min(4 * x.numel(), x.untyped_storage().nbytes() - 4 * x.storage_offset()))
    piece, start = min(size, _SAMPLE), int(x.data_ptr())
    return b"".join(bytes_at(start + at, piece) for at in (0, (size - piece) // 2, size - piece))


def exact(x: Tensor, to: Cast) -> Mantissas | None:
    """Return x as mantissas that stand for every bit of it, known or computed; None where it is not in the format."""
    found = find(x, to.format)
    if found is not None:
        return _mantissas_of(x, *found, to)
    exponent = exact_exponent(x, to)
    if exponent is None:
        return None
    laid, back = _as_it_lies(x)
    payload = back(to_mantissas(laid, to, exponent).payload)
    note(x, to.format, exponent, payload)
    return Mantissas(payload, exponent, 0, 0, 0)


def _as_it_lies(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the numbers of x in the order of its memory, and what lays others out as they are."""
    if x.is_contiguous() or torch.empty_like(x, device="meta").stride() != x.stride():
        return x, lambda y: y
    flat = x.detach().as_strided((x.numel(),), (1,), x.storage_offset())
    return flat, lambda y: y.as_strided(x.shape, x.stride())


def _mantissas_of(x: Tensor, known: Known, base: Tensor, to: Cast) -> Mantissas:
    if known.payload is not None:
        return known.mantissas(x, base)
    laid, back = _as_it_lies(x)
    payload = back(to_mantissas(laid, to, known.exponent).payload)
    if x is base and payload.stride() == x.stride():
        known.payload = payload
    return Mantissas(payload, known.exponent, 0, 0, 0)


def mantissas(x: Tensor, to: Cast) -> Mantissas | None:
    """Return x as mantissas by a cast that is not stochastic, known or computed; None where x is not finite.

    What is computed is remembered for results of ops: other contractions read them too. The caller's own data may share
    their memory with what torch does not see, and are rounded anew each time.
    """
    scaling = to.scaling
    plain = scaling is None or (scaling.headroom == 0 and scaling.exponent is None)
    found = find(x, to.format) if plain else None
    if found is None and x._base is None:  # a view has a maximum of its own
        found = find(x, to)
    if found is not None:
        return _mantissas_of(x, *found, to)
    exponent = current_exponent(x, to)
    if exponent is None:
        return None
    result = to_mantissas(x, to, exponent)
    if x.grad_fn is not None:
        note(x, to, exponent, result.payload)
    return result
