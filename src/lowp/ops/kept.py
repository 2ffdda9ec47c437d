"""What backward reads of activations, kept as codes of a rule's `saved` and decoded when it is read.

Hooks on saved tensors encode what an op gives autograd: of a product its input (rounded by forward, or as it came where
a product of the backward pass rounds it anew), of another op every tensor as large as its input, but no parameter. The
values that backward reads are those of the cast. Scales by block run along the memory, whatever the shape. Hooks that
enclose these, as of a checkpoint, get the codes. Source: Xi et al. 2024 (COAT), arXiv 2410.19313.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lowp import kernels
from lowp.casts import Cast
from lowp.compat import enclosing_hooks
from lowp.errors import InvalidInput, Unavailable
from lowp.formats import ScaledFormat
from lowp.kernels.casts.run import is_dense
from lowp.kernels.tracing import functorch_is_active
from lowp.nested import tensors_of
from lowp.ops.call import Call
from lowp.ops.casting import seed_of
from lowp.quantized import Quantized

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class _Kept(NamedTuple):
    """A tensor as codes: what makes it of them, and them as the enclosing hooks have packed them."""

    decoded: Callable[[list[Tensor]], Tensor]
    tensors: list[Any]


def keeping_input(runner: Callable[[Call], Any]) -> Callable[[Call], Any]:
    """Return a runner of an op that is no product, whose saved tensors are kept as codes."""

    def run(call: Call) -> Any:
        given = [x for x in tensors_of((call.args, call.kwargs)) if x.dtype in _FLOATS]
        parameters = {x.untyped_storage().data_ptr() for x in given if isinstance(x, nn.Parameter)}
        size = max((x.numel() for x in given if not isinstance(x, nn.Parameter)), default=0)
        with _hooks(call, lambda x: x.numel() >= size and x.untyped_storage().data_ptr() not in parameters):
            return runner(call)

    return run


def keeping(call: Call, tensors: Sequence[Tensor]) -> AbstractContextManager[object]:
    """Keep tensors that a product saves as codes."""
    has_addresses = not (torch.compiler.is_compiling() or functorch_is_active())
    kept = {(x.data_ptr(), x.shape) for x in tensors if has_addresses}
    return _hooks(call, lambda x: (x.data_ptr(), x.shape) in kept)


def _hooks(call: Call, is_kept: Callable[[Tensor], bool]) -> AbstractContextManager[object]:
    """Keep the tensors that autograd saves here, and that a function chooses, as codes; under torch.func as they are.

    Raises Unavailable while torch.compile traces.
    """
    if torch.compiler.is_compiling():
        raise Unavailable(
            f"saved={call.rule.saved} keeps codes for backward, and torch.compile chooses by itself what it keeps: "
            "compile under a policy without saved"
        )
    if functorch_is_active():
        return nullcontext()
    to, outer, seed = cast(Cast, call.rule.saved), enclosing_hooks(), call.seed  # the hooks stay: not with the call

    def pack(x: Tensor) -> Any:
        found = _encoded(x, to, seed) if x.dtype in _FLOATS and is_kept(x) else None
        if found is None:
            return x if outer is None else outer[0](x)
        return found if outer is None else found._replace(tensors=[outer[0](one) for one in found.tensors])

    def unpack(kept: Any) -> Tensor:
        if not isinstance(kept, _Kept):
            return kept if outer is None else outer[1](kept)
        return kept.decoded(kept.tensors if outer is None else [outer[1](one) for one in kept.tensors])

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _encoded(x: Tensor, to: Cast, draw: Callable[[], Tensor | int]) -> _Kept | None:
    """Return a tensor as codes; None for one that has no codes, as a NaN in int8, which is kept as it is."""
    if x.layout is not torch.strided or x.is_nested or not x.numel():
        return None
    x, shape, strides, dtype = x.detach(), x.shape, x.stride(), x.dtype
    by_place = not isinstance(to.format, ScaledFormat) or to.format.scope.kind in ("block", "tensor")
    if by_place and is_dense(shape, strides):
        numbers = x.as_strided((x.numel(),), (1,))
    else:
        numbers, strides = x.contiguous(), x.contiguous().stride()
    try:
        codes = kernels.encode(numbers.float(), to, seed=seed_of(x, to, draw), packed=True)
    except InvalidInput:
        return None

    def restored(values: Tensor) -> Tensor:
        return values.to(dtype).as_strided(shape, strides)

    if not isinstance(codes, Quantized):
        length = numbers.shape[-1]
        return _Kept(lambda found: restored(kernels.decode(found[0], to.format, packed=True, length=length)), [codes])
    named, packed = codes.tensors(), codes.length
    names = tuple(named)

    def decoded(found: list[Tensor]) -> Tensor:
        parts: dict[str, Any] = dict(zip(names, found, strict=True))
        return restored(kernels.dequantize(Quantized(cast=to, length=packed, **parts)))

    return _Kept(decoded, list(named.values()))
