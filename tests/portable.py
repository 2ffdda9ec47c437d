"""Runs the tests as other processors would: `make test-portable`.

    python tests/portable.py [CONFIGURATION ...] [-- PYTEST OPTIONS]

torch, MKL, oneDNN and lowp choose kernels by the processor's instruction sets, and different kernels sum in different
orders. Here each is limited to fewer instruction sets; sets that a machine lacks are not emulated.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lowp.kernels import cpu

# What processors of a level run. No processor has AVX2 for one library alone, so all are held to a level together.
HELD = {
    # torch's plain C++ kernels, SSE 4.1, and MKL's oldest code path (MKL_CBWR is heeded on AMD's processors, too)
    "sse4": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_CBWR": "COMPATIBLE",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "LOWP_CPU_ISA": "portable",
    },
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "MKL_CBWR": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "LOWP_CPU_ISA": "avx2",
    },
    # no AMX, no 16-bit products of the processor's own
    "avx512": {
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "MKL_CBWR": "AVX512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "LOWP_CPU_ISA": "avx512",
    },
    "library-absent": {"LOWP_CPU_LIBRARY": os.path.join(os.sep, "nowhere", "liblowp_cpu.so")},
}


def configurations() -> dict[str, dict[str, str]]:
    """Return the environment of every configuration that this machine can run, by name."""
    if cpu.library() is None:
        return {"library-absent": HELD["library-absent"]}
    return {name: held for name, held in HELD.items() if held.get("LOWP_CPU_ISA", "portable") in cpu.available()}


def main(arguments: Sequence[str]) -> int:
    """Run the named configurations, or all; return the number of those that failed."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = arguments[end + 1 :] or ["-n", "2", "--dist", "worksteal"]
    every = configurations()
    plain = {key: value for key, value in os.environ.items() if not any(key in held for held in every.values())}
    chosen = arguments[:end] or list(every)
    if unknown := [name for name in chosen if name not in every]:
        print(f"no configuration {', '.join(unknown)} on this machine; it has {', '.join(every)}", file=sys.stderr)
        return 2
    root = Path(__file__).resolve().parent.parent
    failed = []
    for name in chosen:
        print(f"== {name}: {' '.join(f'{key}={value}' for key, value in every[name].items())}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", *options]
        # what inductor has compiled for one level it takes from its cache for any other
        compiled = {"TORCHINDUCTOR_CACHE_DIR": str(root / "build" / "portable" / name)}
        environment = {"OMP_NUM_THREADS": "1", **plain, **compiled, **every[name]}
        if subprocess.run(command, cwd=root, env=environment).returncode:
            failed.append(name)
    told = "".join(f", not {name}" for name in failed)
    print(f"== {len(chosen) - len(failed)} of {len(chosen)} configurations passed{told}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
