"""Tests of whether torch must see a call: compilers, modes, torch.func, subclasses, fake tensors."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowp.compat import functorch_transforms, private

mode_count: Any = private("torch._C._len_torch_dispatch_stack")
_modes: Any = private("torch.utils._python_dispatch._get_current_dispatch_mode_stack")
is_jit_tracing: Any = private("torch._C._is_tracing")  # whether torch.jit.trace records what runs
_transform: Any = private("torch._C._functorch.peek_interpreter_stack")
is_wrapped: Any = private("torch._C._functorch.is_functorch_wrapped_tensor")
_functionalize: Any = private("torch._C._functorch.TransformType.Functionalize")
private("torch.autograd.forward_ad._current_level")  # read at every call below; raises here if it is missing

is_compiling = torch.compiler.is_compiling


def is_plain(x: Tensor) -> bool:
    """Whether torch need not see the call: no gradient, no mode, no transform, no lazy negation."""
    return not is_differentiated(x) and is_quiet() and not x.is_neg()


def is_differentiated(x: Tensor) -> bool:
    """Whether autograd records operations on `x`."""
    return x.requires_grad and torch.is_grad_enabled()


def is_real(x: Tensor) -> bool:
    """Whether the tensor is an ordinary one, with memory that kernels may read."""
    return type(x) in (Tensor, torch.nn.Parameter) and not x.is_meta and not is_wrapped(x)


def is_sharded(x: object) -> bool:
    """Whether a tensor is a DTensor, as parameters of FSDP2 (fully_shard) and tensor parallelism are."""
    return hasattr(x, "device_mesh") and hasattr(x, "placements")


def is_eager(x: Tensor) -> bool:
    """Whether the kernels may run on the tensor directly: an ordinary tensor, without compilers, modes and transforms.

    A tensor that outlived its torch.func transform is a wrapper without storage, of type Tensor, which torch unwraps.
    """
    return is_quiet() and is_real(x)


def unwrapped(x: Tensor) -> Tensor:
    """Return what x wraps if it outlived its torch.func transform, else x; for operators, which torch does not unwrap.

    Raises torch's RuntimeError for a tensor that outlived torch.func.vmap.
    """
    is_dead = not is_compiling() and _transform() is None and is_wrapped(x)
    return x.view_as(x) if is_dead else x


def is_transformed() -> bool:
    """Whether the call is inside torch.func or forward-mode differentiation."""
    return not is_compiling() and (functorch_transforms() or forward_ad._current_level >= 0)


def functorch_is_active() -> bool:
    """Whether torch.func (vmap, grad, jvp), forward-mode autograd or torch.compile is active."""
    return is_compiling() or functorch_transforms() or forward_ad._current_level >= 0


def is_functionalized() -> bool:
    """Whether the innermost transform is torch.func.functionalize."""
    found = _transform()
    return found is not None and found.key() == _functionalize


def is_watched() -> bool:
    """Whether a mode is active that must see operators: a dispatch mode that does not say that kernels may read."""
    return not all(getattr(one, "lets_kernels_read", False) for one in _modes())


def is_quiet() -> bool:
    """Whether no compiler, no mode that must see operators and no transform is active."""
    return (
        not is_compiling()
        and not (mode_count() and is_watched())
        and _transform() is None
        and forward_ad._current_level < 0
        and not is_jit_tracing()
    )
