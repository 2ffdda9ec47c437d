"""Runs tests with other versions of torch, each in a folder of its own: `make test-versions`.

    python tests/versions.py [VERSION ...] [-- PYTEST OPTIONS]

Runs all tests with the newest version and with `nightly`, and those in `PART` with the others; `-- tests` runs all. pip
installs torch and its requirements, Triton among them, into build/versions/VERSION, once, and `nightly`, a CPU build,
every time; everything else is that of this environment. On Linux a version from PyPI takes 5 GB and needs no GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# the last release of each minor version but that of constraints.txt, from the minimum to the newest
VERSIONS = ("2.11.0", "2.12.1", "2.14.1", "2.15.0")
NIGHTLY = ("--pre", "--index-url", "https://download.pytorch.org/whl/nightly/cpu", "torch")
# the tests of what depends on torch's version: its private names, modes, autograd, compiler, optimizers, and Triton
PART = (
    *("test_compat.py", "gpu", "region", "exponents", "optim", "step", "kernels/test_compile.py"),
    *("kernels/triton", "ops/test_products.py", "ops/test_table.py", "ops/int16", "numerics/test_profiler.py"),
)
# Triton 3.6's interpreter takes arrays of one element as numbers, which NumPy deprecates and 2.4 no longer allows.
BESIDE = ("numpy<2.4",)
# torch 2.12 says the second although the call opts out; a nightly is newer than what lowp is tested with
WARNINGS = (
    "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning",
    "ignore:Sparse invariant checks are implicitly disabled:UserWarning",
    "ignore:lowp is tested with torch up to:UserWarning",
    # said by torch 2.15's own code: by forward-mode derivatives, by the compiler, and by what tests trace
    "ignore:`torch.jit.:FutureWarning",
    "ignore:The .grad attribute of a Tensor:UserWarning",
)


def installed(version: str, root: Path) -> Path:
    """Return the folder that has a version of torch, installed first if necessary."""
    folder = root / "build" / "versions" / version
    done = folder / "installed"
    if version == "nightly" or not done.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", str(folder)]
        wanted = NIGHTLY if version == "nightly" else (f"torch=={version}",)
        subprocess.run([*command, *wanted, *BESIDE], check=True)
        done.touch()
    return folder


def main(arguments: Sequence[str]) -> int:
    """Run the tests with the named versions, or all; return the number of those that failed."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    chosen = arguments[:end] or VERSIONS
    root = Path(__file__).resolve().parent.parent
    failed = []
    for version in chosen:
        found = [str(installed(version, root)), os.environ.get("PYTHONPATH", "")]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, found))}
        told = "import torch, triton; print(f'== torch {torch.__version__}, triton {triton.__version__}', flush=True)"
        subprocess.run([sys.executable, "-c", told], cwd=root, env=environment, check=True)
        ignored = [word for text in WARNINGS for word in ("-W", text)]
        part = () if version in (VERSIONS[-1], "nightly") else PART
        options = arguments[end + 1 :] or ["-n", "2", "--dist", "worksteal", *(f"tests/{one}" for one in part)]
        command = [sys.executable, "-m", "pytest", "-q", *ignored, *options]
        if subprocess.run(command, cwd=root, env=environment).returncode:
            failed.append(version)
    told = "".join(f", not {version}" for version in failed)
    print(f"== {len(chosen) - len(failed)} of {len(chosen)} versions passed{told}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
