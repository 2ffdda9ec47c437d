"""Which formats a device multiplies itself, by what it reports and what torch is held to; never by timing.

A CPU multiplies bf16 alone, where it has instructions for that and torch and oneDNN may use them:

* x86: AMX-BF16 (tdpbf16ps), and AVX512-BF16 (vdpbf16ps) but for Intel's, which takes twice the time of fp32's products;
  unless ``ATEN_CPU_CAPABILITY`` holds torch, or ``ONEDNN_MAX_CPU_ISA`` oneDNN, to less;
* Arm: the BF16 extension (bfmmla), unless ``ATEN_CPU_CAPABILITY`` is ``default``.

Such a product sums in fp32 and is rounded once. The instructions take operands and sums below 2^-126 for zero.

fp16 is never left to a CPU: with AVX512-FP16 torch's matrix products take the time of fp32's, and its gradients of
convolutions hundreds of times that; without, all take tens to hundreds of times (torch 2.13 to 2.15).

Bytes are torch's where the processor reports tiles for them (AMX-INT8) and nothing is held to less. Where oneDNN is
held to less than VNNI, `torch._int_mm` gives wrong sums (torch 2.13).
"""

import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from lowp.compat import constant_when_compiled

_INSTRUCTIONS = {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX-BF16", "bf16": "Arm BF16"}
# The values of ONEDNN_MAX_CPU_ISA that leave oneDNN without products of bf16
_WITHOUT = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")


@cache
def products_of_bf16() -> tuple[bool, str]:
    """Return whether this CPU multiplies bf16 itself, and why, in words.

    Found once: torch and oneDNN read the environment once, too.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False, "this torch was built without oneDNN"
    capabilities = torch.cpu.get_capabilities()
    instructions = [words for name, words in _INSTRUCTIONS.items() if capabilities.get(name)]
    return _decided(instructions, torch.backends.cpu.get_cpu_capability(), os.environ, _is_intel())


def _is_intel() -> bool:
    """Whether the processor says that it is Intel's."""
    try:
        told = Path("/proc/cpuinfo").read_text()
    except OSError:
        told = platform.processor()
    return "GenuineIntel" in told


def _decided(
    instructions: list[str], capability: str, environment: Mapping[str, str], is_intel: bool
) -> tuple[bool, str]:
    if not instructions:
        return False, "the processor reports no AVX512-BF16, AMX-BF16 or Arm BF16"
    has = f"the processor reports {' and '.join(instructions)}"
    is_arm = instructions == ["Arm BF16"]
    asked = environment.get("ATEN_CPU_CAPABILITY", "").lower()
    if asked == "default" if is_arm else not capability.startswith("AVX512"):
        return False, f"{has}, but torch is held to {capability}"
    for limit in _LIMITS:
        if (given := environment.get(limit, "").upper()) in _WITHOUT:
            return False, f"{has}, but {limit} holds oneDNN to {given}"
    if is_intel and not ("AMX-BF16" in instructions and _uses_tiles(capability, environment)):
        held = " is held from AMX, and" if "AMX-BF16" in instructions else ""
        return False, f"{has}, but{held} without AMX Intel's bf16 products take twice the time of fp32's"
    return True, has


def why_fp16_is_emulated() -> str:
    """Return in words why no CPU multiplies fp16 itself, as `multiplies` has it."""
    if torch.cpu.get_capabilities().get("avx512_fp16"):
        return (
            "the processor reports AVX512-FP16, with which torch's matrix products take the time of fp32's and its "
            "gradients of convolutions hundreds of times that"
        )
    return "torch sums no fp16 products faster than fp32's on a CPU"


def has_numbers(device: torch.device) -> bool:
    """Whether tensors of a device hold numbers: on the meta device they are shapes."""
    return device.type != "meta"


def is_on_host(x: torch.Tensor | torch.device) -> bool:
    """Return whether the values of a tensor, or of tensors on a device, can be read without synchronization."""
    return x.is_cpu if isinstance(x, torch.Tensor) else x.type == "cpu"


@cache
def tiles_of_bytes() -> bool:
    """Whether this CPU multiplies bytes in tiles (AMX) that torch and oneDNN may use. Found once, as above."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    has_tiles = bool(torch.cpu.get_capabilities().get("amx_int8"))
    return has_tiles and _uses_tiles(torch.backends.cpu.get_cpu_capability(), os.environ)


def _uses_tiles(capability: str, environment: Mapping[str, str]) -> bool:
    limits = [environment.get(limit, "").upper() for limit in _LIMITS]
    return capability.startswith("AVX512") and all(one in ("", "ALL", "DEFAULT") or "AMX" in one for one in limits)


@constant_when_compiled
def multiplies(device: str, dtype: torch.dtype) -> bool:
    """Whether a kind of device multiplies a 16-bit dtype itself, as `torch.device.type` names it."""
    if device == "cpu":
        return dtype is torch.bfloat16 and products_of_bf16()[0]
    return device == "cuda"
