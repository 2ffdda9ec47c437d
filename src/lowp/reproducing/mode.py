"""`lowp.reproducible`: a mode in which the operators of a step have one definition, forward, backward and update.

The mode sees every operator that reaches torch's kernels, also those that autograd and optimizers call. It leaves alone
what has the same bits everywhere (`SAME`, and what only moves tensors), computes `definitions.DEFINED` itself, and runs
and names all others.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from lowp.compat import private
from lowp.errors import Unavailable
from lowp.kernels import cpu, use
from lowp.kernels.choose.hardware import is_on_host
from lowp.ops.table import is_structural
from lowp.reproducing.definitions import DEFINED

_DispatchMode: Any = private("torch.utils._python_dispatch.TorchDispatchMode")

# One IEEE operation a number, selections, windows summed in order, and the bits of the generator.
SAME = frozenset(
    """
    mul div neg abs reciprocal rsqrt square maximum minimum clamp clamp_min clamp_max relu relu6 threshold
    threshold_backward leaky_relu leaky_relu_backward hardtanh hardtanh_backward hardswish hardswish_backward
    hardsigmoid hardsigmoid_backward floor ceil round trunc frac sign sgn fmod remainder floor_divide where amax amin
    max min aminmax cummax cummin median mse_loss_backward nll_loss_backward nll_loss2d_backward
    smooth_l1_loss_backward huber_loss_backward sigmoid_backward native_dropout native_dropout_backward embedding index
    max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d avg_pool2d avg_pool2d_backward
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward bernoulli copysign masked_fill index_copy scatter cat stack lift
    lift_fresh randperm eye
    scalar_tensor arange unbind heaviside new_zeros new_ones new_empty new_empty_strided new_full
    slice_backward select_backward diagonal_backward upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _to_copy _unsafe_view _unsafe_index _reshape_alias _local_scalar_dense _assert_async _assert_scalar
    _efficientzerotensor _neg_view _fused_sdp_choice _amp_foreach_non_finite_check_and_unscale_
    """.split()
)

# moves no numbers alone, although no rule casts it
_COMPUTES = frozenset("exponential_ log_normal_ cauchy_ geometric_ multinomial histc bincount fold".split())


class Reproducible(_DispatchMode):  # type: ignore[misc]
    """What `reproducible` enters. `unpromised`: how often each operator ran whose bits may differ elsewhere."""

    lets_kernels_read = True  # for lowp.kernels.tracing: tensors are ordinary ones, and kernels need not be seen

    def __init__(self) -> None:
        super().__init__()
        self.unpromised: Counter[str] = Counter()
        self._entered: list[ExitStack] = []

    def __enter__(self) -> Reproducible:
        if cpu.library() is None or not cpu.has_multiply_add():
            raise Unavailable(
                "lowp.reproducible needs the C++ library of lowp and a processor with fused multiply-adds: "
                f"{'the library was not built' if cpu.library() is None else 'this processor has none'}"
            )
        stack = ExitStack()
        stack.enter_context(use("cpu"))
        self._entered.append(stack)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._entered.pop().close()
        if self.unpromised and not self._entered and error[0] is None:
            names = ", ".join(sorted(self.unpromised))
            warnings.warn(
                f"these operators ran as torch has them, and may have other bits on another processor: {names}; "
                "docs/reproducible.md lists those that have one definition",
                stacklevel=2,
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "aten":
            if func.namespace not in ("lowp", "prim", "profiler"):
                self.unpromised[str(func)] += 1
            return func(*args, **kwargs)
        if any(isinstance(one, Tensor) and one.is_meta for one in args):
            return func(*args, **kwargs)  # shapes without numbers, of which lowp makes plans
        name = func.overloadpacket.__name__
        one = name.removeprefix("_foreach_")
        if one != name and (_defined(one) is not None or _is_same(one)):
            return self._one_by_one(one, args, kwargs)
        own = _defined(name)
        if own is not None and not _is_elsewhere(args):
            with torch.no_grad():
                return _stored(name, own, args, kwargs)
        if _is_elsewhere(args) or not _is_same(name):
            self.unpromised[name] += 1
        return func(*args, **kwargs)

    def _one_by_one(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of lists of tensors by that of one tensor."""
        one = getattr(torch.ops.aten, name)
        found = []
        for index in range(len(args[0])):
            given = [each[index] if isinstance(each, (list, tuple)) else each for each in args]
            options = {key: each[index] if isinstance(each, (list, tuple)) else each for key, each in kwargs.items()}
            if len(given) > 3:  # addcmul and addcdiv take by name what their lists take by place
                options["value"] = given.pop()
            with self:
                found.append(one(*given, **options))
        return None if name.endswith("_") else found


def reproducible() -> Reproducible:
    """Return a context in which a step on a CPU has the same bits on every processor, with any number of threads.

    Products of bf16 are emulated also where the processor has its own; convolutions are products of matrices, attention
    is two products; sums, norms, softmax, losses and functions such as exp are computed by definitions of lowp, in
    forward, backward and the optimizer, inside and outside of regions. Several times slower. What ran without a
    definition is counted by name in `unpromised` of the context, and a warning names it at the end.

    It holds for this thread and leaves what it found; a whole program may stand in it, or call `__enter__` first.
    Entering raises Unavailable without the C++ library or fused multiply-adds. docs/reproducible.md says what is
    promised.
    """
    return Reproducible()


def _bare(name: str) -> str:
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def _defined(name: str) -> Callable[..., Any] | None:
    return DEFINED.get(name) or DEFINED.get(_bare(name))


def _is_same(name: str) -> bool:
    bare = _bare(name)
    if name in SAME or bare in SAME:
        return True
    is_public = not name.startswith("_") or name.startswith("__")  # a rule never names another, which tells nothing
    return is_public and name not in _COMPUTES and (is_structural(name) or is_structural(bare))


def _is_elsewhere(args: tuple[Any, ...]) -> bool:
    """Whether a tensor is not an ordinary one on a CPU, or has complex numbers."""
    tensors = (one for one in args if isinstance(one, Tensor))
    return any(not is_on_host(one) or one.layout is not torch.strided or one.is_complex() for one in tensors)


def _stored(name: str, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a definition, and store its result where the operator does."""
    out = kwargs.get("out")
    found = own(*args, **{key: one for key, one in kwargs.items() if key != "out"})
    if out is not None:
        return out.resize_(found.shape).copy_(found)
    return args[0].copy_(found) if _bare(name) != name else found
