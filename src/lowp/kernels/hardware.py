"""Which formats a device multiplies itself, by what it reports and what torch is held to; never by timing.

A CPU multiplies bf16 alone, where it has instructions for that and torch and oneDNN may use them:

* x86: AVX512-BF16 (vdpbf16ps) or AMX-BF16 (tdpbf16ps), unless ``ATEN_CPU_CAPABILITY`` holds torch, or
  ``ONEDNN_MAX_CPU_ISA`` oneDNN, to less;
* Arm: the BF16 extension (bfmmla), unless ``ATEN_CPU_CAPABILITY`` is ``default``.

Such a product sums in fp32 and is rounded once. The instructions take operands and sums below 2^-126 for zero.

Bytes are torch's where the processor reports tiles for them (AMX-INT8) and nothing is held to less. Where oneDNN is
held to less than VNNI, `torch._int_mm` gives wrong sums (torch 2.13).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache

import torch

from lowp.compat import constant_when_compiled

__all__ = ["is_on_host", "multiplies", "products_of_bf16"]

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
    return _decided(instructions, torch.backends.cpu.get_cpu_capability(), os.environ)


def _decided(instructions: list[str], capability: str, environment: Mapping[str, str]) -> tuple[bool, str]:
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
    return True, has


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
