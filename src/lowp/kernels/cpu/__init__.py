"""The C++ kernels, by ctypes: the only module that loads the library.

Every function takes contiguous CPU tensors of fp32, fp64, fp16 or bf16, uses `threads` threads and writes the result to
`out`. The results are bit-identical to `lowp.kernels.numbers.reference`; kernels/README.md defines them. The caller
must check whether a dtype can hold the values of a format.

The functions of the library take tensors and arrays, never addresses: `_guarded` reads the address of each, in the call
that uses it, and refuses tensors without memory of their own.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import struct
import warnings
from array import array
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_void_p
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lowp import __version__
from lowp.casts import Cast
from lowp.compat import skipped_by_compilers
from lowp.errors import InvalidInput, Unavailable
from lowp.formats import FloatFormat, IntFormat
from lowp.kernels.cpu.abi import SIGNATURES, TYPE_NUMBERS, format_parameters, parameters
from lowp.kernels.numbers.philox import Seed, drawn
from lowp.kernels.tracing import is_wrapped

# another build of the library, such as that of `make sanitize`, goes by the environment variable
PATH = Path(os.environ.get("LOWP_CPU_LIBRARY") or Path(__file__).parent / "liblowp_cpu.so")
INSTRUCTION_SETS = ("portable", "avx2", "avx512")  # by level; processors other than x86-64 have only the first
MASK = (1 << 64) - 1
LOW = 1 << 40  # an address above it is one: no tensor begins as many bytes after its memory


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library; None, with one warning, if it was not built or does not load."""
    try:
        own = ctypes.CDLL(str(PATH))
        _check_build(own)
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(own, name)
            function.restype, function.argtypes = result, arguments
            setattr(own, name, _guarded(function, [at for at, one in enumerate(arguments) if one is c_void_p]))
    except (OSError, AttributeError) as error:
        reason = "it was not built" if not PATH.exists() else str(error)
        warnings.warn(
            f"lowp's C++ library {PATH} is not used ({reason}); torch operations round alike, more slowly; products "
            "are summed in another order. Install lowp with a C++ compiler (GCC or Clang) to build it",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    if chosen := os.environ.get("LOWP_CPU_ISA"):
        _select(own, chosen)
    own.lowp_set_team(None if uses_own_threads() else c_void_p(_openmp_parallel()))
    return own


def _guarded(function: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """Return a function of the library that takes at `places`, where the library takes pointers, what has memory.

    That is tensors, arrays, bytes, objects of ctypes, None, and lists of integers, tensors and None, which become int64
    numbers and addresses. All of them live until the call has returned. A compiler that traced the reading of an
    address would free a tensor after its last use in torch, which is before the call: none traces this.
    """

    def call(*given: Any) -> Any:
        passed = [*given]
        for place in places:
            one = passed[place]
            if isinstance(one, Tensor):  # as `address`, in no function where there is memory
                is_known = type(one) in PLAIN and one.is_cpu and (pointer := one.data_ptr()) >= LOW
                passed[place] = pointer if is_known else address(one)
            elif isinstance(one, array):
                passed[place] = one.buffer_info()[0]
            elif isinstance(one, list):
                passed[place] = struct.pack(f"{len(one)}q", *numbers_of(one))
            elif isinstance(one, int):
                raise TypeError(f"a number for the memory at {place} of {function}: give the tensor or array")
        return function(*passed)

    call.unguarded = function  # type: ignore[attr-defined]  # for callers that have checked
    return skipped_by_compilers(call)


def numbers_of(given: Sequence[int | Tensor | None]) -> list[int]:
    """Return numbers, and in the place of each tensor its `address`; 0 for None."""
    tensors = [one for one in given if isinstance(one, Tensor)]
    found = addresses_of(tensors)
    if len(found) == len(given):
        return found
    rest = iter(found)
    return [next(rest) if isinstance(one, Tensor) else one or 0 for one in given]


def addresses_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the `address` of each tensor, by a few functions for all."""
    is_plain = PLAIN.issuperset(map(type, tensors)) and all(map(_is_on_cpu, tensors))
    found = list(map(Tensor.data_ptr, tensors)) if is_plain else []
    return found if min(found, default=0) >= LOW else [address(x) for x in tensors]


def uses_own_threads() -> bool:
    """Whether the library uses its own threads: if ``LOWP_THREADS=own`` is set, or if torch's are not available.

    torch's threads are not available if its OpenMP runtime is unknown, and in a forked child, where they do not exist.
    """
    asked = os.environ.get("LOWP_THREADS", "")
    if asked not in ("", "own", "torch"):
        raise InvalidInput(f"LOWP_THREADS={asked!r}: allowed are 'torch' (where its threads are OpenMP's) and 'own'")
    return asked == "own" or _forked or _openmp_parallel() is None


_forked = False


def _note_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


@functools.cache
def _openmp_parallel() -> int | None:
    """The address of the function that runs work on the threads of torch's OpenMP runtime; None where it has none.

    GOMP_parallel is of GCC's runtime, which torch's builds for Linux bring along; LLVM's has it there, too.
    """
    try:
        loaded = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(loaded.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def _check_build(own: ctypes.CDLL) -> None:
    """Raise OSError for a library of another lowp version or of other sources than those present.

    Its functions could be called with arguments that they do not expect.
    """
    if not hasattr(own, "lowp_build"):
        raise OSError("it was built for an earlier version of lowp: build it again")
    own.lowp_build.restype = c_char_p
    version, digest = own.lowp_build().decode().split(" ")
    if version != __version__:
        raise OSError(f"it is of lowp {version}, this is lowp {__version__}: build it again, or start Python anew")
    folder = Path(__file__).parent
    if digest != (_sources(folder) or digest):
        raise OSError(f"it was built from other sources than those in {folder}: build it again")


def _sources(folder: Path) -> str | None:
    """Return the digest of the C++ sources as CMakeLists.txt computes it; None without sources, as in a wheel."""
    files = sorted(file for file in folder.glob("*") if file.suffix in (".cpp", ".hpp", ".inc"))
    lines = (f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest() if files else None


_asked = ""  # the argument of `select`; '' for the best


def asked() -> str:
    """Return the instruction set selected for every kernel by `select`; '' is the best available."""
    library()
    return _asked


def select(instruction_set: str | None) -> str:
    """Use the kernels compiled for "portable", "avx2", "avx512" or "neon", or the best this CPU has (None).

    Casts and integer products alike. Returns which casts run: "portable" for "neon" on ARM, where the compiler makes
    those with neon. The environment variable LOWP_CPU_ISA does the same from the start. Raises Unavailable for one the
    CPU lacks.
    """
    return _select(loaded(), instruction_set)


def _select(own: ctypes.CDLL, instruction_set: str | None) -> str:
    global _asked
    found: int = own.lowp_casts_select(_level(own, instruction_set))
    if found < 0:
        raise Unavailable(f"this CPU has no {instruction_set}; it has {', '.join(available(own))}")
    _asked = instruction_set or ""
    return INSTRUCTION_SETS[found]


def _level(own: ctypes.CDLL, instruction_set: str | None) -> int:
    """Return the number of an instruction set among those of the casts; -1 for the best."""
    if not instruction_set:
        return -1
    if instruction_set == "neon":
        if platform.machine().lower() in ("arm64", "aarch64"):
            return 0  # every such processor has it, and the compiler uses it
        raise Unavailable(f"this CPU has no neon; it has {', '.join(available(own))}")
    if instruction_set not in INSTRUCTION_SETS:
        allowed = ", ".join((*INSTRUCTION_SETS, "neon"))
        raise Unavailable(f"no kernels for {instruction_set!r}; allowed: {allowed}")
    return INSTRUCTION_SETS.index(instruction_set)


def level() -> int:
    """Return the instruction set for a call, by its place in INSTRUCTION_SETS: `asked`, or -1, the best."""
    name = asked()
    return INSTRUCTION_SETS.index(name) if name in INSTRUCTION_SETS else -1


@functools.cache
def has_multiply_add() -> bool:
    """Whether this processor has fused multiply-adds for the products in fp32: all but x86-64 without AVX2."""
    return platform.machine().lower() not in ("x86_64", "amd64") or len(available()) > 1


def available(own: ctypes.CDLL | None = None) -> tuple[str, ...]:
    """Return the instruction sets that this CPU has kernels for."""
    own = own or loaded()
    best = own.lowp_casts_select(-1)
    own.lowp_casts_select(_level(own, _asked))  # restore
    return tuple(name for level, name in enumerate(INSTRUCTION_SETS) if level <= best)


PLAIN = frozenset((Tensor, Parameter))
_is_on_cpu = attrgetter("is_cpu")
HOST = torch.device("cpu")  # whose name takes as long to read as a small tensor to make


def address(x: Tensor) -> int:
    """Return the address of a CPU tensor's elements: the one check of all memory that the library is given.

    Raises InvalidInput for a tensor on another device, for one that stands for others or for nothing (a fake tensor, a
    wrapper), and for elements without memory.
    """
    kind = type(x)
    if kind in PLAIN and x.is_cpu and (pointer := x.data_ptr()) >= LOW:
        return pointer  # as of most, at the least cost
    if not x.is_cpu or (kind not in PLAIN and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__):
        raise InvalidInput(
            f"a {kind.__name__} {tuple(x.shape)} on {x.device} has no memory of its own that the C++ library reads: "
            "give a torch.Tensor on the CPU"
        )
    return begin(x)


FLOATS: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
_STRIDED = torch.strided


def addresses(tensors: Sequence[Tensor | None], dtypes: Sequence[torch.dtype] = FLOATS) -> list[int] | None:
    """Return where these tensors lie, 0 for None; None if one is not ordinary.

    The one test of an ordinary tensor: with memory on a CPU, in one of these dtypes. Whether torch has to see the call
    is another: `is_quiet`. An operand that a gradient is recorded for must be passed by an autograd Function. Raises
    InvalidInput for elements without memory.
    """
    found = []
    for x in tensors:  # in no function of `map`, which takes longer
        if x is None:
            found.append(0)
        elif type(x) not in PLAIN or not x.is_cpu or x.dtype not in dtypes or x.layout is not _STRIDED:
            return None
        elif x.is_nested or x.is_neg() or is_wrapped(x):
            return None
        elif (pointer := x.data_ptr()) >= LOW:
            found.append(pointer)
        elif x._is_zerotensor():
            return None
        else:
            found.append(begin(x))
    return found


def begin(x: Tensor) -> int:
    """Return where a tensor's elements begin, on any device. Raises InvalidInput for elements without memory."""
    pointer = x.data_ptr()
    if pointer != x.storage_offset() * x.element_size() or not x.numel():  # where the storage begins at 0, as if freed
        return pointer
    raise InvalidInput(
        f"a tensor {tuple(x.shape)} without memory: its storage was resized to 0, as FSDP frees parameters, "
        "or it is a zero tensor of autograd: gather the parameter first, or give torch.zeros"
    )


def quantize(x: Tensor, cast: Cast, seed: Seed, out: Tensor, keeps: bool = False) -> None:
    """Write the result of casting every element into `out`, of x's shape; `out` may be `x`.

    The dtype of `out` is x's, or another one that holds every value of the format. `keeps`: infinities and NaN stay.
    """
    kind, to, threads = TYPE_NUMBERS[x.dtype], TYPE_NUMBERS[out.dtype], torch.get_num_threads()
    loaded().lowp_quantize(parameters(cast), kind, x, to, out, x.numel(), *drawn_bits(seed), keeps, threads)


def drawn_bits(seed: Seed) -> tuple[int, int]:
    """Return the 64 bits of a seed, and the index of the first element."""
    if isinstance(seed, int):
        return seed & MASK, 0
    seed, first = drawn(seed)
    return int(seed) & MASK, first


def encode(x: Tensor, cast: Cast, seed: Seed, out: Tensor) -> int:
    """Write the code of every element into `out`, integers of 1, 2, 4 or 8 bytes; return the NaNs without a code.

    Their code is 0. Integer formats give two's complement.
    """
    given = TYPE_NUMBERS[x.dtype], x, out.element_size(), out, x.numel(), *drawn_bits(seed)
    nans: int = loaded().lowp_encode(parameters(cast), *given, torch.get_num_threads())
    return nans


def decode(codes: Tensor, format: FloatFormat | IntFormat, out: Tensor) -> None:
    """Write the value of every code (integers of 1, 2, 4 or 8 bytes) into `out`, exactly."""
    given = codes.element_size(), codes, TYPE_NUMBERS[out.dtype], out, codes.numel()
    loaded().lowp_decode(format_parameters(format), *given, torch.get_num_threads())


def statistics(x: Tensor) -> tuple[Tensor, float, float, int, int, int]:
    """Return exponent histogram (int64, 256), largest finite |x|, sum of squares, zeros, NaNs and infinities.

    The bins are those of fp32's biased exponent; fp64 numbers outside are counted in bins 0 and 254. The sum is taken
    in fp64 over the finite elements, in an order that depends on neither the threads nor the processor.
    """
    counts = torch.zeros(259, dtype=torch.int64, device="cpu")
    reals = torch.zeros(2, dtype=torch.float64, device="cpu")
    failed = loaded().lowp_statistics(TYPE_NUMBERS[x.dtype], x, x.numel(), torch.get_num_threads(), counts, reals)
    if failed:
        raise MemoryError(f"no memory for the partial sums of {x.numel()} elements")
    zeros, nans, infinities = counts[256:].tolist()
    maximum, squares = reals.tolist()
    return counts[:256], maximum, squares, zeros, nans, infinities


@functools.cache
def loaded() -> ctypes.CDLL:
    """Return the library. Raises Unavailable if it is not present."""
    found = library()
    if found is None:
        raise Unavailable("lowp's C++ library is not available; the bitwise and reference kernels are")
    return found
