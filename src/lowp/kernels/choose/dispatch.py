"""The one place that chooses the implementation, and `use`, which forces one.

Casts call `implementation`; products and payloads of integers call `forced`, `uses_library` and `answers_at_once`.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from lowp.errors import Unavailable, UnknownName, check_name, unknown
from lowp.kernels import cpu, triton
from lowp.kernels.choose.hardware import is_on_host
from lowp.kernels.numbers import bitwise, native, reference
from lowp.kernels.tracing import is_compiling, is_real, is_transformed

IMPLEMENTATIONS: dict[str, ModuleType] = {"reference": reference, "bitwise": bitwise, "native": native, "cpu": cpu}
IMPLEMENTATIONS["triton"] = triton

_BY_TRITON = (torch.float32, torch.float16, torch.bfloat16)

# the environment's choice, for every thread
_asked = os.environ.get("LOWP_USE") or None
if _asked is not None and _asked not in IMPLEMENTATIONS:
    raise UnknownName(unknown("implementation in LOWP_USE", _asked, IMPLEMENTATIONS))
_forced: ContextVar[str | None] = ContextVar("lowp.kernels.use", default=_asked)
chosen = _forced.get  # `forced`, for code that no compiler traces


def forced() -> str | None:
    """Return the name that `use` holds here, or LOWP_USE in the environment; under torch.compile the latter alone."""
    return _asked if torch.compiler.is_compiling() else _forced.get()


def available(device: str = "cpu") -> tuple[str, ...]:
    """Return the names of what computes on tensors of a type of device.

    `use` takes one more on a CPU: triton, whose kernels its interpreter runs there, operation by operation, for tests.
    """
    absent = {"cpu": device != "cpu" or cpu.library() is None, "triton": device == "cpu" or not triton.is_installed()}
    return tuple(name for name in IMPLEMENTATIONS if not absent.get(name))


def use(name: str) -> AbstractContextManager[None]:
    """Return a context in which every kernel is the named implementation: reference, bitwise, native, cpu or triton.

    It holds for this thread (or asyncio task) and leaves what it found; LOWP_USE=NAME in the environment is the same
    for a whole process, threads and compiled code included. Raises ValueError for an unknown name and
    Unavailable for one that this machine lacks; inside, a call that the implementation cannot do raises Unavailable.
    """
    check_name("implementation", name, IMPLEMENTATIONS)
    if name == "triton" and not triton.is_installed():
        raise Unavailable(
            "the triton kernels need the package triton, which is not installed: pip install triton, on Linux; "
            f"{', '.join(available())} give the same bits"
        )
    if name not in (*available(), "triton"):
        raise Unavailable(f"the {name} kernels are not on this machine; {', '.join(available())} give the same bits")
    return _use(name)


@contextmanager
def _use(name: str) -> Iterator[None]:
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def implementation(device: torch.device, function: str = "quantize") -> ModuleType:
    """Return the module that implements `function` for tensors on this device."""
    name = _forced.get()
    if name is None:
        return fastest(device, function)
    module = IMPLEMENTATIONS[name]
    if name == "cpu" and device.type != "cpu":
        raise Unavailable(f"the cpu kernels take tensors on the CPU, not on {device}: bitwise and reference take these")
    if name == "triton" and device.type not in ("cpu", *triton.DEVICES):
        raise Unavailable(f"the triton kernels take tensors on cuda or cpu, not on {device}: bitwise takes these")
    if not hasattr(module, function):
        having = [other for other in available() if hasattr(IMPLEMENTATIONS[other], function)]
        raise Unavailable(f"{name} has no {function}; {', '.join(having)} have it")
    return module


def fastest(device: torch.device, function: str = "quantize") -> ModuleType:
    """Return the module that implements `function` for tensors on this device if nothing is forced."""
    if device.type in triton.DEVICES and triton.is_installed() and hasattr(triton, function):
        return triton
    return cpu if device.type == "cpu" and cpu.library() is not None else bitwise


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device; (0, 0) if torch finds none."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)


def uses_library() -> bool:
    """Whether the C++ library computes here: it is present, and nothing else is forced."""
    way = _asked if torch.compiler.is_compiling() else _forced.get()  # `forced`, without a call
    return way in (None, "cpu") and cpu.library() is not None


def by_triton(x: Tensor) -> bool:
    """Whether a tensor of a device is written as int16 by Triton's kernels, by choice or by `use`; else in torch.

    Of 32 and 16 bits; torch sees what it compiles, transforms or only imagines.
    """
    return x.dtype in _BY_TRITON and runs_triton(x)


def runs_triton(x: Tensor) -> bool:
    """Whether Triton's kernels run on a tensor, by choice or by `use`, whatever its dtype."""
    way = forced()
    chosen = fastest(x.device) is triton if way is None else way == "triton"
    return chosen and is_real(x) and not is_compiling() and not is_transformed()


def answers_at_once(one: Tensor | torch.device) -> bool:
    """Whether integer kernels run where a tensor is, so that their observations are known at once: on CPUs.

    On other devices exponents stay on the device, and also if the kernels of a device are forced on a CPU.
    """
    return is_on_host(one) and _forced.get() != "triton"
