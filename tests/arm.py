"""Runs the C++ library's tests on its build for AArch64, under qemu: `make test-arm`.

    python tests/arm.py [PYTEST OPTIONS]

The tests run here, with a library that forwards every call to two processes: one has this machine's library, the other
AArch64's (arm/forward.cpp, arm/serve.cpp). Both compute; what they return and every byte that they write is compared,
and the tests go on with what AArch64 has written. Python takes the processor for AArch64 (arm/started). A table tells
the calls and the differences of every function; one that is never called fails the run. Then small trainings under
`lowp.reproducible` must have the hashes that are stored (reproducing/hashes.json), with every call of the library
computed by AArch64's.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path

from lowp.kernels import cpu
from lowp.kernels.cpu.abi import SIGNATURES

ROOT = Path(__file__).resolve().parent.parent
HERE, BUILT = ROOT / "tests" / "arm", ROOT / "build" / "arm"
OWN_LIBRARY = BUILT / "liblowp_cpu.so"  # a copy: a process crashes whose library is written over
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PACKAGES = {COMPILER: "g++-aarch64-linux-gnu", EMULATOR: "qemu-user", "g++": "g++", "cmake": "cmake"}
TYPES = {
    None: "void",
    ctypes.c_void_p: "void*",
    ctypes.c_char_p: "const char*",
    ctypes.c_int: "int",
    ctypes.c_int64: "int64_t",
    ctypes.c_uint64: "uint64_t",
    ctypes.c_float: "float",
    ctypes.c_double: "double",
}

FILES = "cpu groups mantissas masks integer int16_layer low_words byte_products few_rows payloads"
PART = (
    "-n",
    "2",
    "--dist",
    "worksteal",
    *(f"tests/kernels/test_{one}.py" for one in f"{FILES} fp32_products spectra eden".split()),
    "tests/exponents/test_delayed.py",
    "tests/optim/test_moments.py",
    "tests/optim/test_stored.py",
    "tests/ops/test_bytes.py",
)
# tests of the file itself, and of the threads of this machine's library
OWN = (
    "test_a_stale_library_is_refused_and_the_bits_stay_the_same",
    "test_the_library_works_on_torch_s_threads_unless_it_is_to_have_its_own",
    "test_a_handler_of_faults_runs_on_the_library_s_threads_and_no_other_signal_does",
)


def calls() -> str:
    """Return a row of C++ for every function of the library: its name, result, parameters and arguments."""
    lines = []
    for name, (result, arguments) in SIGNATURES.items():
        names = [f"a{at}" for at in range(len(arguments))]
        declared = ", ".join(f"{TYPES[type]} {one}" for type, one in zip(arguments, names, strict=True))
        lines.append(f"CALL({name}, {TYPES[result]}, ({declared}), ({', '.join([f'k_{name}', *names])}))\n")
    return "".join(lines)


def places() -> str:
    """Return in C++ the command lines of the two servers, and the folder of what they tell."""
    servers = (
        f"{BUILT / 'serve'} {OWN_LIBRARY}",
        f"{EMULATOR} -L /usr/aarch64-linux-gnu {BUILT / 'serve-aarch64'} {BUILT / 'library' / 'liblowp_cpu.so'}",
    )
    quoted = [json.dumps(str(one)) for one in (*servers, BUILT)]
    return "const char* const kServers[] = {{{}, {}}}, *const kFolder = {};\n".format(*quoted)


def build() -> None:
    """Build AArch64's library, a server for each processor and the library that forwards."""
    BUILT.mkdir(parents=True, exist_ok=True)
    shutil.copy(cpu.PATH, OWN_LIBRARY)
    (BUILT / "calls.inc").write_text(calls())
    (BUILT / "places.inc").write_text(places())
    library = BUILT / "library"
    target = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={COMPILER}"]
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", f"-I{BUILT}", "-pthread", "-ldl"]
    for command in (
        ["cmake", "-S", ROOT, "-B", library, *target],
        ["cmake", "--build", library, "--target", "lowp_cpu", "--parallel", "2"],
        ["g++", HERE / "serve.cpp", "-o", BUILT / "serve", "-rdynamic", *flags],
        [COMPILER, HERE / "serve.cpp", "-o", BUILT / "serve-aarch64", "-rdynamic", *flags],
        ["g++", HERE / "forward.cpp", "-o", BUILT / "forward.so", "-shared", "-fPIC", *flags],
    ):
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)


def run(options: Sequence[str], is_whole: bool) -> int:
    """Run pytest on the library that forwards; print the counts; return the number of what failed.

    `is_whole`: train for the stored hashes, too, and every function must have been called.
    """
    counts, log = BUILT / "counts", BUILT / "log"
    log.write_text("")
    counts.write_bytes(bytes(24 * len(SIGNATURES)))
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "LOWP_CPU_LIBRARY": str(BUILT / "forward.so"),
        "PYTHONPATH": str(HERE / "started"),
    }
    ended = subprocess.run([sys.executable, "-m", "pytest", "-q", *options], cwd=ROOT, env=environment).returncode
    failed = int(ended != 0) + (other_hashes(environment) if is_whole else 0)
    numbers = array("q", counts.read_bytes())
    print(f"{'function':44}{'calls':>10}{'bytes written':>16}{'differing calls':>17}")
    for at, name in enumerate(SIGNATURES):
        called, written, differing = numbers[3 * at : 3 * at + 3]
        print(f"{name:44}{called:>10,}{written:>16,}{differing:>17,}")
    print(log.read_text(), end="")
    never = [name for at, name in enumerate(SIGNATURES) if is_whole and not numbers[3 * at]]
    if never:
        print(f"never called: {', '.join(never)}")
    return failed + len(never) + sum(numbers[2::3])


def other_hashes(environment: dict[str, str]) -> int:
    """Train small networks; print which end with another hash than is stored; return their number."""
    stored = json.loads((ROOT / "tests" / "reproducing" / "hashes.json").read_text())["hashes"]
    script = str(ROOT / "tests" / "reproducing" / "training.py")
    command = [sys.executable, script, *(f"{name}/1" for name in stored)]
    printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout
    found = json.loads(printed)["hashes"]
    other = [name for name, value in stored.items() if found[f"{name}/1"] != value]
    print(f"trainings with the stored hash: {len(stored) - len(other)} of {len(stored)}", *other)
    return len(other)


def main(arguments: Sequence[str]) -> int:
    """Build, run, and return the exit code."""
    if missing := [package for program, package in PACKAGES.items() if shutil.which(program) is None]:
        print(f"missing: apt-get install {' '.join(missing)}", file=sys.stderr)
        return 2
    asked = "from lowp.kernels import cpu; raise SystemExit(cpu.library() is None)"  # why not is a warning
    if subprocess.run([sys.executable, "-c", asked]).returncode != 0:
        return 2
    build()
    whole = [*PART, *(f"--deselect=tests/kernels/test_cpu.py::{one}" for one in OWN)]
    return int(run(arguments or whole, is_whole=not arguments) != 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
