"""CUDA tensors without CUDA: fake ones, which know dtype, shape and device of what every op returns, and no numbers.

A CPU build of torch has no guard for CUDA devices, which autograd's nodes and some bindings ask for even so; that of a
build for CUDA asks a driver. The guard of the meta device does nothing, which is all that a fake tensor needs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import lowp.region  # noqa: F401  # its constants are no fake tensors: it is loaded before the first of them is made

_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
_CUDA, _META = 1, 14  # of c10::DeviceType

# what launches no kernel
_FREE = frozenset(
    """
    device view _unsafe_view reshape _reshape_alias t transpose permute unsqueeze squeeze expand select slice detach
    alias unbind split split_with_sizes chunk as_strided unflatten empty empty_like empty_strided new_empty
    new_empty_strided lift_fresh
    """.split()
)


@contextmanager
def fake_cuda() -> Iterator[FakeTensorMode]:
    """Make every tensor within a fake one, those on cuda too."""
    with _guarded(), FakeTensorMode() as mode:
        yield mode


@contextmanager
def _guarded() -> Iterator[None]:
    if torch.cuda.device_count() > 0:
        yield
        return
    try:
        library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("*c10.*"))))
        guards = (ctypes.c_void_p * 22).in_dll(library, _GUARDS)
    except (OSError, StopIteration, ValueError):
        pytest.skip("this build of torch has its device guards elsewhere")
    before = guards[_CUDA]
    guards[_CUDA] = guards[_META]
    try:
        with _without_driver():
            yield
    finally:
        guards[_CUDA] = before


@contextmanager
def _without_driver() -> Iterator[None]:
    """Let a torch built for CUDA ask no driver: no graph is captured, and fake tensors need no context."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        # torch 2.11 makes a context wherever torch.cuda.is_available(), which tests may pretend
        patch.setattr(fake_tensor, "init_gpu_context", lambda device: None)
        yield


@contextmanager
def torch_autocast(dtype: torch.dtype) -> Iterator[None]:
    """torch.autocast("cuda", dtype), which switches itself off where there is no CUDA."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


def on_cuda(model: nn.Module) -> nn.Module:
    """Put fake CUDA tensors in the place of a model's parameters and buffers; tied ones stay tied."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
                    made[id(tensor)] = nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty
                tensors[name] = made[id(tensor)]
    return model


def like(values: Any, device: str = "cuda") -> Any:
    """Return fake tensors of the shapes and dtypes of tensors, however they are nested."""
    return tree_map_only(Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device=device), values)


class Launches(TorchDispatchMode):
    """Notes the aten ops that launch kernels, with the dtypes of what they write."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[torch.dtype, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name not in _FREE:
            self.seen.append((name, tuple(x.dtype for x in tree_leaves(result) if isinstance(x, Tensor))))
        return result

    def names(self) -> list[str]:
        """Return the names of the ops in their order."""
        return [name for name, _ in self.seen]
