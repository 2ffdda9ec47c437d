"""Launches of kernels: on the device of their tensors, or in Triton's interpreter for tensors on the CPU."""

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor
from triton.errors import TritonError
from triton.runtime.interpreter import FunctionRewriter, GridExecutor, InterpretedFunction
from triton.runtime.jit import JITFunction

from lowp.errors import Unavailable

Kernel = Any  # the result of triton.jit, which has no type stubs
BLOCK = 2048  # elements per program
WIDE_BLOCK = 512  # the same with 64-bit arithmetic
ROUNDS = 4  # blocks that a program counts before it writes its counts
COUNTING_WARPS = 8  # for such a program: its counts are in registers
INTERPRETED_BLOCK = 1 << 17  # the interpreter's time depends on the number of operations: few and long ones


def launch(kernel: Kernel, like: Tensor, count: int, block: int, *arguments: Any, warps: int = 4) -> None:
    """Run a kernel over `count` elements, `block` per program, on the device of `like`; BLOCK is its last argument."""
    block = block_for(like, count, block)
    run(kernel, (-(-count // block),), *arguments, block, warps=warps)


def run(kernel: Kernel, grid: tuple[int, ...], *arguments: Any, warps: int = 4) -> None:
    """Run a kernel on the device of its first argument. Multiplications and additions are not fused.

    Raises Unavailable if Triton does not support the device, or the device lacks the resources.
    """
    device = arguments[0].device
    if device.type == "cpu":
        interpret(kernel, grid, *arguments)
        return
    try:
        with torch.get_device_module(device).device(device):
            kernel[grid](*arguments, num_warps=warps, enable_fp_fusion=False)
    except TritonError as error:
        raise Unavailable(
            f"Triton cannot run {kernel.fn.__name__} on {device}: {type(error).__name__}: {error}; "
            "lowp.kernels.use('bitwise') gives the same bits"
        ) from error


def block_for(like: Tensor, count: int, block: int) -> int:
    """Return the number of elements per program on the device of `like`."""
    return min(INTERPRETED_BLOCK, max(16, 1 << (count - 1).bit_length())) if like.is_cpu else block


def programs_for(like: Tensor, count: int, block: int) -> int:
    """Return the number of programs that `launch` starts, at least one."""
    return max(1, -(-count // block_for(like, count, block)))


def interpret(kernel: Kernel, grid: tuple[int, ...], *arguments: Any) -> None:
    """Run a kernel on CPU tensors, operation by operation, in NumPy."""
    function = _scope(kernel.fn.__module__)[kernel.fn.__name__]
    with numpy.errstate(all="ignore"):
        GridExecutor(function, list(inspect.signature(function).parameters), grid)(*arguments)


@functools.cache
def _scope(module: str) -> dict[str, Any]:
    """Return a module's names for the interpreter: its kernels as Python functions.

    They look up names in this scope, so that a kernel calls others of its module and imported ones in the same form.
    """
    names = vars(sys.modules[module])
    scope = dict(names)
    for name, value in names.items():
        if isinstance(value, (JITFunction, InterpretedFunction)):  # the latter where TRITON_INTERPRET is set
            function = value.fn
            if function.__module__ == module:
                scope[name] = _rewritten(function, scope)
            else:
                scope[name] = _scope(function.__module__)[function.__name__]
    return scope


def _rewritten(function: Callable[..., Any], scope: dict[str, Any]) -> Callable[..., Any]:
    moved = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
    moved.__module__ = function.__module__
    rewritten: Callable[..., Any] = FunctionRewriter(moved).rewrite_ast()
    return rewritten
