"""The kernels chosen on this machine, the reasons, and how to force others, in words."""

import torch

from lowp.compat import accelerator
from lowp.errors import counted
from lowp.kernels import cpu
from lowp.kernels.choose.dispatch import forced, uses_library
from lowp.kernels.choose.hardware import multiplies, products_of_bf16, why_fp16_is_emulated

_OTHER_SET = "LOWP_CPU_ISA={} in the environment, or lowp.kernels.cpu.select({!r})"
_OTHER_WAY = "with lowp.kernels.use({!r})"


def choices() -> dict[str, str]:
    """Return, by subject, the choice, its reason, and how to force another one. Nothing is chosen by timing."""
    found = {"processor": _processor()}
    if cpu.library() is None:
        found["casts"] = "torch's integer operations (bitwise): the C++ library was not built; the bits are the same"
    else:
        chosen, having = cpu.select(cpu.asked() or None), cpu.available()
        why = "asked for" if cpu.asked() else "the best this processor has"
        found["C++ library"] = (
            f"{chosen}, {why}, of {', '.join(having)}; other: {_OTHER_SET.format(having[0], having[0])}"
        )
        own = cpu.uses_own_threads()
        found["threads"] = (
            "the library's own" if own else "torch's OpenMP threads; other: LOWP_THREADS=own in the environment"
        )
        found["casts"] = f"{forced() or 'the C++ library'}; other: {_OTHER_WAY.format('bitwise')}: the same bits"
    found["bf16 products"] = _products(torch.bfloat16, products_of_bf16()[1])
    found["fp16 products"] = _products(torch.float16, why_fp16_is_emulated())
    found["int16 products"] = (
        "the C++ library" if uses_library() else "torch's fp64 products, which are exact"
    ) + f"; other: {_OTHER_WAY.format('bitwise')}"
    return found


def _products(dtype: torch.dtype, why: str) -> str:
    """How products of a 16-bit dtype run on a CPU, and why."""
    way = forced()
    if way == "reference":
        return f"sums in fp64, asked for; other: {_OTHER_WAY.format('native')}"
    reason = why if way is None else "asked for"
    if way == "native" or (way is None and multiplies("cpu", dtype)):
        return f"torch's own, {reason}; other: LOWP_USE=cpu in the environment, or {_OTHER_WAY.format('cpu')}"
    return (
        f"fp32 products of rounded operands, {reason}, rounded once; other: LOWP_USE=native in the environment, or "
        f"{_OTHER_WAY.format('native')}; on a GPU torch's own"
    )


def _processor() -> str:
    """Return what torch and this library know about the processor, the threads and the accelerators."""
    return (
        f"torch uses {torch.backends.cpu.get_cpu_capability()}, {counted(torch.get_num_threads(), 'thread')}; "
        f"{f'accelerator {kind}' if (kind := accelerator()) else 'no accelerator'}"
    )
