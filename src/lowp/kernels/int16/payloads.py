"""The int16 mantissas computed from a tensor, kept beside its memory and verified before each use.

A tensor that an op wrote under a shared exponent is read by the next op, saved for backward, and read again there. All
of them share one payload, which belongs to the tensor's storage, lives as long as the storage, and also serves views.
Memory can change without notice: through ``.data``, NumPy, DLPack, collectives, a pointer. Before a payload is
used, every element is therefore compared with the current memory, in one pass that reads as much as a conversion; if an
element differs the mantissas are computed again. An exponent without mantissas is only a hint: the first one to try.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from typing import cast as cast_to

import torch
from torch import Tensor

from lowp.casts import Cast, Rounding
from lowp.formats import Format
from lowp.kernels import cpu, tracing
from lowp.kernels.choose.dispatch import answers_at_once, uses_library
from lowp.kernels.int16 import cpu_int16, mantissas, masks
from lowp.kernels.int16.mantissas import (
    NOT_FINITE,
    Mantissas,
    as_it_lies,
    current_mantissas,
    exact_mantissas,
    has_mantissas,
    int16_element,
    own_exponent,
    values,
)


class _Record(NamedTuple):
    """What is kept of a storage, as an attribute of it: torch keeps the object, and what is set on it, with the memory.

    `of`: the format of the values, or the cast by which the mantissas were rounded. `first`: where those begin.
    """

    of: Format | Cast
    exponent: Tensor
    payload: Tensor | None
    first: Any


def keep(x: Tensor, of: Format | Cast, exponent: Tensor, payload: Tensor | None = None) -> None:
    """Keep the exponent under which x holds values of a format, and its mantissas; or those of a cast of x.

    Payloads must be dense with the memory layout of x. Nothing is kept for views and parameters.
    """
    if x._base is not None or type(x) is not Tensor or x.dtype is not torch.float32 or x.layout is not torch.strided:
        return
    # what outlived its torch.func transform has no storage
    if not (x.is_neg() or x._is_zerotensor() or tracing.is_wrapped(x)):
        if payload is not None and (payload.stride() != x.stride() or payload.storage_offset()):
            payload = None
        x.untyped_storage().lowp_record = _Record(of, exponent, payload, x.storage_offset())  # type: ignore[attr-defined]


def keep_own(made: Iterable[tuple[Tensor, Tensor | None, Tensor | None] | None], of: Format) -> list[Tensor | None]:
    """Do `keep` for new tensors of a kernel, plain and contiguous: given mantissas and exponents too. Return them."""
    found: list[Tensor | None] = []
    for one in made:
        found.append(None if one is None else one[0])
        if one is not None and one[2] is not None:
            one[0].untyped_storage().lowp_record = _Record(of, one[2], one[1], 0)  # type: ignore[attr-defined]
    return found


def hint(x: Tensor, format: Format | None = None) -> tuple[Format, Tensor] | None:
    """Return the format and the exponent of x's memory when it was last read, optionally only for one format."""
    found = _find(x, format)
    return None if found is None or isinstance(found.of, Cast) else (found.of, found.exponent)


def kept(x: Tensor, format: Format) -> Mantissas | None:
    """Return the mantissas kept of x in a format, not compared with it, for a kernel that does; None if there are none.

    They lie as x.
    """
    found = _find(x, format)
    if found is None or (payload := found.payload) is None:
        return None
    if x.shape != payload.shape or x.stride() != payload.stride() or x.storage_offset() != found.first:
        payload = _of_view(found, x)
    return None if payload is None else Mantissas(payload, found.exponent)


def _find(x: Tensor, of: Format | Cast | None = None) -> _Record | None:
    """Return what is kept of x; optionally only of one format, or of one cast."""
    # as `keep`, in no function of both: every operand is asked
    if type(x) is not Tensor or x.dtype is not torch.float32 or x.layout is not torch.strided:
        return None
    if x.is_neg() or x._is_zerotensor() or tracing.is_wrapped(x):
        return None
    found: _Record | None = getattr(x.untyped_storage(), "lowp_record", None)
    return found if found is None or of is None or found.of is of or found.of == of else None


def _of_view(found: _Record, x: Tensor) -> Tensor | None:
    """Return the mantissas of x's elements with x's layout; None if some elements have none."""
    payload = found.payload
    if payload is None:
        return None
    offset = x.storage_offset() - found.first
    if offset == 0 and x.shape == payload.shape and x.stride() == payload.stride():
        return payload
    reach = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    if offset < 0 or x.numel() == 0 or offset + reach >= payload.numel():
        return None
    return payload.as_strided(x.shape, x.stride(), offset)


# -- mantissas ----------------------------------------------------------------------------------------------------


def exact(x: Tensor, cast: Cast) -> Mantissas | None:
    """Return x as mantissas that represent every element exactly; None if x is not in the cast's format.

    The cast's scaling is ignored. A -0 counts as 0. None on an accelerator, whose values are not read back.
    """
    return _exact(x, cast, _find(x, cast.format)) if answers_at_once(x) else None


def _exact(x: Tensor, cast: Cast, found: _Record | None) -> Mantissas | None:
    """Return the same, given the record beside x's memory of the cast's format."""
    if (known := _verified(x, found)) is not None:
        return known
    laid, back = as_it_lies(x)
    computed = exact_mantissas(laid, cast, None if found is None else found.exponent)
    if computed is None:
        return None
    payload = back(computed.payload)
    keep(x, cast.format, computed.exponent, payload)
    return Mantissas(payload, computed.exponent)


def relu(x: Tensor, cast: Cast, with_values: bool = True) -> tuple[Mantissas, Tensor | None] | None:
    """Return ReLU of x as mantissas and, if one pass gives both, as values; None if x is not in the format.

    The pass compares every element with its kept mantissa.
    """
    found = kept(x, cast.format) if with_values and x.is_contiguous() else None
    if found is not None and (both := cpu_int16.relu(x.detach(), *found)) is not None:
        return Mantissas(both[0], found.exponent), both[1]
    known = exact(x, cast)
    return None if known is None else (Mantissas(known.payload.clamp(min=0), known.exponent), None)


def passed_where_positive(x: Tensor, chosen: Tensor) -> Tensor:
    """Return x where int16 of its shape are positive, and 0 elsewhere, with what is kept of x: nothing is compared.

    Where gradients are recorded, the result is part of the graph, and has no mantissas.
    """
    found = _find(x)
    if found is not None and isinstance(found.of, Cast):
        found = None
    if torch.is_grad_enabled():
        result: Tensor = torch.ops.aten.threshold_backward(x, chosen, 0)
        mantissas = None
    else:
        result, mantissas = masks.passed_where_positive(x, chosen, None if found is None else _of_view(found, x))
    if found is not None and not result.requires_grad:
        keep(result, cast_to(Format, found.of), found.exponent, mantissas)
    return result


def is_exact(x: Tensor, cast: Cast) -> bool:
    """Whether every element of x is in the cast's format under one exponent; False on an accelerator."""
    return answers_at_once(x) and exact_under(x, cast)[0] is True


def exact_under(x: Tensor, cast: Cast) -> tuple[bool | Tensor, Tensor]:
    """Return whether every element of x is in the cast's format, and under which exponent; any where not.

    A bool on a CPU, and on a device a tensor of bools, 0-d, of which nothing is read.
    """
    found = _find(x, cast.format)
    if not answers_at_once(x):
        return mantissas.exact(x, cast, None if found is None else found.exponent)
    if (verified := _verified(x, found)) is not None:
        return True, verified.exponent
    is_own, exponent = mantissas.exact(x, cast)
    if is_own:
        keep(x, cast.format, exponent)
    elif found is not None and (known := _exact(x, cast, found)) is not None:
        # a tensor with -32768 is not exact under the exponent of its own maximum
        return True, known.exponent
    return is_own, exponent


def are_exact(tensors: Sequence[Tensor], cast: Cast) -> list[bool]:
    """Return `is_exact` of each tensor; one call compares all that lie as their kept mantissas with these."""
    given, places = array("q"), list[int]()
    format = cast.format
    for place, x in enumerate(tensors if uses_library() else ()):
        found = _find(x, format) if x.is_contiguous() and x.is_cpu else None
        if found is None or (payload := found.payload) is None:
            continue
        at = x.data_ptr()
        if x.shape == payload.shape and x.storage_offset() == found.first and at >= cpu.LOW and not at % 4:
            given.extend((at, payload.data_ptr(), 1, count := x.numel(), count, found.exponent.data_ptr()))
            places.append(place)
    same = cpu_int16.are_int16(given) if places else ()
    if len(same) == len(tensors) and all(same):
        return [True] * len(same)
    known = dict(zip(places, same, strict=True))
    return [known.get(place, False) or is_exact(x, cast) for place, x in enumerate(tensors)]


def is_kept(x: Tensor, cast: Cast) -> bool:
    """Whether x is what its kept mantissas stand for, and a cast under its own exponent leaves it so.

    False without kept mantissas, even if a cast would leave x as it is; and with a mantissa of -32768, since the
    exponent of the tensor's own maximum is then larger.
    """
    if cast.is_stochastic or not is_free(cast) or not has_mantissas(cast):
        return False
    known = kept(x, cast.format) if uses_library() and answers_at_once(x) else None
    if known is None or not _stands_for(x, known.payload, known.exponent):
        return False
    return int16_element(cast).symmetric or x.numel() == 0 or int(known.payload.amin()) > -32768


def is_free(cast: Cast) -> bool:
    """Whether the exponent of a cast follows from a tensor's maximum alone."""
    return cast.scaling is None or (cast.scaling.headroom == 0 and cast.scaling.exponent is None)


def rounded(x: Tensor, cast: Cast, seed: Callable[[], Tensor | int] = lambda: 0) -> Mantissas | None:
    """Return x as mantissas by a cast; None if x is in fp64, or on a CPU and not finite.

    Mantissas of results of ops are kept on a CPU, since other contractions read them too, except those of stochastic
    casts. On a device the exponent under which x was written counts where it determines the cast.
    """
    if x.dtype is torch.float64:
        return None
    found, drawn = _find(x), seed() if cast.is_stochastic else 0
    if not answers_at_once(x):
        under = found.exponent if found is not None and found.of == cast.format and is_free(cast) else None
        return current_mantissas(x, cast, drawn, under)
    if found is not None and not cast.is_stochastic:
        again = _rounded_again(x, cast, found)
        if again is not None:
            return again
    result = current_mantissas(x, cast, drawn)
    if int(result.exponent) == NOT_FINITE:
        return None
    if x.grad_fn is not None and not cast.is_stochastic:
        keep(x, cast, result.exponent, result.payload)
    return result


def _rounded_again(x: Tensor, cast: Cast, found: _Record) -> Mantissas | None:
    """Return the mantissas of a cast of x from its record, after a comparison of every element."""
    if found.of == cast.format and is_free(cast):
        return _exact(x, cast, found)
    payload = _of_view(found, x)
    if payload is None or found.of != cast or cast.rounding is not Rounding.NEAREST_EVEN:
        return None
    lie = _rows(x)
    if lie is None or not uses_library():
        return None
    maximum = cpu_int16.rounds_to_int16(x, payload, found.exponent, lie, int16_element(cast).symmetric)
    if maximum is None or not math.isfinite(maximum):
        return None
    own = own_exponent(torch.full((), maximum, dtype=torch.float32, device="cpu"), cast)
    return Mantissas(payload, found.exponent) if torch.equal(own, found.exponent) else None


# -- memory -------------------------------------------------------------------------------------------------------


def _verified(x: Tensor, found: _Record | None) -> Mantissas | None:
    """Return the mantissas of a record that stand for every element of x; None if there are none."""
    payload = None if found is None else _of_view(found, x)
    if found is None or payload is None or not _stands_for(x, payload, found.exponent):
        return None
    return Mantissas(payload, found.exponent)


def _stands_for(x: Tensor, payload: Tensor, exponent: Tensor) -> bool:
    """Whether every element of x equals its mantissa * 2**exponent; both have the same layout."""
    lie = _rows(x) if uses_library() else None
    is_same = None if lie is None else cpu_int16.is_int16(x, payload, exponent, lie)
    return torch.equal(values(payload, exponent), x.detach()) if is_same is None else is_same


def _rows(x: Tensor) -> cpu_int16.Rows | None:
    """Return the memory layout of x as rows, for any order of dimensions; None if it does not consist of rows."""
    if x.data_ptr() % 4:
        return None
    if x.is_contiguous():
        return cpu_int16.Rows(1, (elements := x.numel()), elements)
    dims = sorted((step, size) for step, size in zip(x.stride(), x.shape, strict=True) if size > 1 and step > 0)
    merged: list[tuple[int, int]] = []
    for step, size in dims:
        if merged and merged[-1][0] * merged[-1][1] == step:
            merged[-1] = (merged[-1][0], merged[-1][1] * size)
        else:
            merged.append((step, size))
    if len(merged) == 1 and merged[0][0] == 1:
        return cpu_int16.Rows(1, merged[0][1], merged[0][1])
    if len(merged) == 2 and merged[0][0] == 1:
        return cpu_int16.Rows(merged[1][1], merged[0][1], merged[1][0])
    return None
