"""Kernels compiled for a chip without a device: their resources and their machine instructions."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lowp.casts import Cast, parse
from lowp.formats import ScaledFormat
from lowp.kernels.steps import rules
from lowp.kernels.triton import mantissas as int16
from lowp.kernels.triton import steps
from lowp.kernels.triton.device import (
    casts,
    codes,
    counts,
    gradients,
    predictions,
    products,
    rows,
    scaled,
    tries,
    updates,
)
from lowp.kernels.triton.device import mantissas as sixteen
from lowp.kernels.triton.launch import BLOCK, COUNTING_WARPS, ROUNDS, WIDE_BLOCK
from lowp.kernels.triton.plans import DTYPES, Codes, Numbers, exact, is_direct, layout, plan
from lowp.kernels.triton.products import CHAINED_TILE, TILE
from lowp.kernels.triton.scaled import Shared, planned, warps_of
from lowp.kernels.triton.steps import Way

INTEGER_NAMES = {1: "i8", 2: "i16", 4: "i32", 8: "i64"}  # Triton's dtypes, by bytes
CHUNK = steps.BLOCK * steps.ROUNDS  # elements per program of steps and of gradient checks
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_JUMP = re.compile(r"\bBRA\S*\s.*?(0x[0-9a-f]+)")


class Configuration(NamedTuple):
    """A kernel with the types of its arguments and its constants, and the bytes it reads and writes per element."""

    name: str
    kernel: Any
    arguments: dict[str, Any]  # types
    constants: dict[str, Any]
    elements: int  # per program
    bytes: float  # per element
    warps: int = 4
    rounds: int = 1  # iterations of a program's loop, if it has one


@dataclass(frozen=True)
class Compiled:
    """Resources of a kernel: registers per thread, bytes of stack and spills, bytes of shared memory."""

    registers: int
    stack: int
    local: int
    shared: int
    cubin: bytes

    @functools.cached_property
    def code(self) -> list[tuple[int, str]]:
        """The instructions with their addresses."""
        lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*?);", _asked(self.cubin, "-sass"))
        return [(int(address, 16), text) for address, text in lines]

    @property
    def sass(self) -> str:
        """The instructions, one per line."""
        return "\n".join(text for _, text in self.code)


def compiled(configuration: Configuration, capability: int) -> Compiled:
    """Compile for a compute capability, such as 90, and return the result. Raises Triton's exceptions."""
    names = configuration.kernel.arg_names
    signature = {name: configuration.arguments.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in configuration.constants.items()}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if str(signature[name]).startswith("*") or (name in ALIGNED and signature[name] == "i32")
    }
    source = ASTSource(configuration.kernel, signature, constants, aligned)
    target = GPUTarget("cuda", capability, 32)
    binary = triton.compile(
        source, target=target, options={"num_warps": configuration.warps, "enable_fp_fusion": False}
    )
    cubin = binary.asm["cubin"]
    usage = _asked(cubin, "--dump-resource-usage")
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Compiled(found["REG"], found["STACK"], found["LOCAL"], binary.metadata.shared, cubin)


def executed(compiled: Compiled, rounds: int = 1) -> list[tuple[str, int]]:
    """Return the instructions without padding, and how often a program executes each of them.

    Instructions between a backward jump and its target are a loop, which is executed `rounds` times.
    """
    jumps = [(int(found[1], 16), address) for address, text in compiled.code if (found := _JUMP.search(text))]
    loops = [(first, last) for first, last in jumps if first < last]
    return [
        (text, rounds if any(first <= address <= last for first, last in loops) else 1)
        for address, text in compiled.code
        if not text.strip().startswith("NOP")
    ]


def usual_path(configuration: Configuration) -> Configuration:
    """Return the kernel without its rare branches.

    Of more than 32 random bits, which one draw in 2**32 takes (where a word decides, the question stays); of groups
    with infinities, NaNs or numbers at the ends of fp32's range, and of scales at a midpoint of
    their format; of statistics outside of 32 octaves, or not finite.
    """
    constants = dict(configuration.constants)
    form, sharing = constants.get("FORM"), constants.get("SHARING")
    if form is not None and form.random_bits > 32:
        usual = form if form.by_noise else form._replace(random_bits=32)
        constants["FORM"] = usual
        if "EXACT" in constants:
            constants["EXACT"] = None if form.by_noise and form.varying else exact(usual)
    if "OTHERS" in constants:
        constants["OTHERS"] = False
    if sharing is not None:
        constants["SHARING"] = sharing._replace(again=False)
    return configuration._replace(constants=constants)


# arguments that are 0, or a multiple of 16, in all but rare calls: Triton compiles others apart
ALIGNED = ("skipped", "total", "length", "m", "n", "depth", "along_m", "along_n", "along_bk", "batch_a", "batch_b")
UNIT_STRIDES = ("along_ak", "along_bk")  # of operands whose depth lies together


def _asked(cubin: bytes, question: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_TOOLS / "cuobjdump"), question, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# -- what is compiled -------------------------------------------------------------------------------------------------
def quantize(cast: Cast, dtype: torch.dtype) -> Configuration:
    """Return the kernel of a cast's values."""
    form, numbers = plan(cast, dtype)
    pointer = f"*{INTEGER_NAMES[dtype.itemsize]}"
    types = {"x": pointer, "out": pointer, "seed": "*i64", "count": "i32", "skipped": "i32", "first": "i64"}
    constants = {"DTYPE": DTYPES[dtype], "FORM": form, "EXACT": exact(form), "TAIL": False}
    constants["BLOCK"] = block = WIDE_BLOCK if form.wide else BLOCK
    arguments = types | {"numbers": _typed(form.wide, numbers)}
    return Configuration(
        f"quantize {cast} {DTYPES[dtype]}", casts.quantize, arguments, constants, block, 2 * dtype.itemsize
    )


def encode(cast: Cast, dtype: torch.dtype) -> Configuration:
    """Return the kernel of a cast's codes."""
    form, numbers = plan(cast, dtype)
    shape, places = layout(cast.element, form.wide)
    size = code_bytes(cast)
    types = {"x": f"*{INTEGER_NAMES[dtype.itemsize]}", "out": f"*{INTEGER_NAMES[size]}", "seed": "*i64", "nans": "*i32"}
    types |= {"count": "i32", "skipped": "i32", "first": "i64"}
    arguments = types | {"numbers": _typed(form.wide, numbers), "codes": _typed(form.wide, places)}
    constants = {"DTYPE": DTYPES[dtype], "FORM": form, "EXACT": exact(form), "LAYOUT": shape, "TAIL": False}
    constants |= {"DIRECT": is_direct(form, shape), "BLOCK": (block := WIDE_BLOCK if form.wide else BLOCK)}
    return Configuration(
        f"encode {cast} {DTYPES[dtype]}", codes.encode, arguments, constants, block, dtype.itemsize + size
    )


def decode(cast: Cast, dtype: torch.dtype) -> Configuration:
    """Return the kernel of the values of a format's codes."""
    shape, places = layout(cast.element, False)
    size = code_bytes(cast)
    types = {"raw": f"*{INTEGER_NAMES[size]}", "out": f"*{INTEGER_NAMES[dtype.itemsize]}", "count": "i32"}
    arguments = types | {"codes": _typed(shape.wide, places)}
    constants = {"DTYPE": DTYPES[dtype], "LAYOUT": shape, "TAIL": False, "BLOCK": BLOCK}
    return Configuration(
        f"decode {cast} {DTYPES[dtype]}", codes.decode, arguments, constants, BLOCK, dtype.itemsize + size
    )


def packed(configuration: Configuration) -> Configuration:
    """Return the kernel of codes of 4 bits with two of them to a byte."""
    constants = configuration.constants | {"LAYOUT": configuration.constants["LAYOUT"]._replace(packed=True)}
    name, size = f"{configuration.name} packed", configuration.bytes - 0.5
    return configuration._replace(name=name, constants=constants, bytes=size)


def statistics(dtype: torch.dtype) -> Configuration:
    """Return the kernel of a tensor's statistics."""
    arguments = {"x": f"*{INTEGER_NAMES[dtype.itemsize]}", "partial": "*i64", "count": "i32"}
    constants: dict[str, Any] = {"DTYPE": DTYPES[dtype], "OTHERS": True, "TAIL": False, "ROUNDS": ROUNDS}
    constants["BLOCK"] = BLOCK
    name, block = f"statistics {DTYPES[dtype]}", BLOCK * ROUNDS
    return Configuration(name, counts.statistics, arguments, constants, block, dtype.itemsize, COUNTING_WARPS)


def shared(text: str, dtype: torch.dtype, written_as_codes: bool, row: int = 2048) -> Configuration:
    """Return the kernel of a cast under the scales of blocks, or of rows of `row` numbers."""
    cast = parse(text)
    made = planned(cast, dtype, written_as_codes)
    assert made is not None and isinstance(cast.format, ScaledFormat)
    scope, pointer = cast.format.scope, f"*{INTEGER_NAMES[dtype.itemsize]}"
    size = code_bytes(cast) if written_as_codes else dtype.itemsize
    kept = "*i32" if not made.sharing.power and not made.sharing.outer else "*i8"
    types: dict[str, Any] = {"x": pointer, "out": f"*{INTEGER_NAMES[size]}", "scales": kept, "outers": "*fp32"}
    types |= {"lost": "*i32", "seed": "*i64", "maxima": "*i32", "total": "i32", "length": "i32", "first": "i64"}
    types |= {"numbers": _typed(made.form.wide, made.numbers), "codes": _typed(False, made.codes)}
    types |= {"scale_numbers": _typed(False, made.scale_numbers), "scale_codes": _typed(False, made.scale_codes)}
    types["sharing"] = types["second"] = Shared(*["i32"] * 4, *["fp32"] * 3)  # type: ignore[arg-type]
    constants: dict[str, Any] = {"DTYPE": DTYPES[dtype], "FORM": made.form, "EXACT": exact(made.form)}
    constants |= {"LAYOUT": made.layout, "SHARING": made.sharing, "BLOCK": BLOCK}
    is_block = scope.kind == "block"
    is_part = scope.kind == "tensor"
    constants |= {"SIZE": scope.size} if is_block else {} if is_part else {"WHOLE": row <= BLOCK}
    share = scaled_bytes(cast.format, row) if written_as_codes else 0.0
    name = f"{'encode' if written_as_codes else 'quantize'} {text} {DTYPES[dtype]}"
    kernel = scaled.blocks if is_block else rows.parts if is_part else rows.rows
    if made.second is not None:
        kernel, constants["WHOLES"] = tries.tried, cast.format.other is not None
    return Configuration(name, kernel, types, constants, BLOCK, dtype.itemsize + size + share, warps_of(made))


def scaled_bytes(format: ScaledFormat, row: int) -> float:
    """Return the bytes of scales that an element has its share of."""
    return format.scale_bits / 8 / (format.scope.size if format.scope.kind == "block" else row)


def product(kind: str, tile: tuple[int, int, int, int]) -> Configuration:
    """Return the kernel of int16 products: rows, columns, depth and warps of a program; elements are those written."""
    rows, columns, depth, warps = tile
    out = {"int64": "*i64", "fp64": "*fp64", "int16": "*i16"}.get(kind, "*fp32")
    types = {"a": "*i16", "b": "*i16", "out": out, "seen": "*i64", "scale": "*fp64"}
    sizes = ("m", "n", "depth", "batch_a", "along_m", "along_ak", "batch_b", "along_bk", "along_n")
    arguments = types | {name: "i32" for name in sizes if name not in UNIT_STRIDES}
    constants = {"KIND": kind, "LOWEST": -32768, "ROWS": rows, "COLUMNS": columns, "DEPTH": depth}
    constants |= dict.fromkeys(UNIT_STRIDES, 1)
    return Configuration(f"product {kind}", products.matmul, arguments, constants, rows * columns, 0, warps)


def mantissas(kind: str, dtype: torch.dtype, rounding: str = "nearest-even") -> Configuration:
    """Return a kernel of int16 under an exponent of the device.

    `kind`: look, look hinted, look again, convert, begin, write, write perhaps (where it counts).
    """
    form, numbers = int16.rounding(parse(f"dfp16:{rounding}"))
    name, way = kind.split(" ")[0], kind.partition(" ")[2]
    kernel = {"look": sixteen.look, "convert": sixteen.convert, "begin": sixteen.begin, "write": sixteen.write}[name]
    kernel = sixteen.look_again if way == "again" else kernel
    types: dict[str, Any] = dict.fromkeys(("hint", "found", "exponent", "exponents", "before", "otherwise"), "*i32")
    types |= {"x": f"*{INTEGER_NAMES[dtype.itemsize]}", "out": "*i16" if name == "convert" else "*i32", "seed": "*i64"}
    types |= dict.fromkeys(("exact", "started", "when", "flags"), "*i8") | {"record": "*i64", "scratch": "*i32"}
    types |= {"bounds": "*fp64", "guesses": "*i32"} | dict.fromkeys(("total", "index", "size", "of_zeros"), "i32")
    types |= {"numbers": _typed(False, numbers), "form": int16.Own(*["i32"] * 3)}  # type: ignore[arg-type]
    constants = {"LOWEST": -32768, "HINTED": way == "hinted", "FIXED": False, "FINITE": False, "FORM": form}
    constants |= {"WHEN": way == "perhaps", "TABLE": 1024, "DTYPE": DTYPES[dtype], "BLOCK": BLOCK}
    names = kernel.arg_names
    types, constants = ({key: one for key, one in all.items() if key in names} for all in (types, constants))
    written = {"convert": 2, "write": 4}.get(name, 0)
    text = f"int16 {kind}{'' if rounding == 'nearest-even' else f' {rounding}'} {DTYPES[dtype]}"
    return Configuration(text, kernel, types, constants, BLOCK, dtype.itemsize + written, int16.WARPS)


def observe(window: int = 16) -> Configuration:
    """Return the kernel that predicts the exponents of a table's entries, of which each has a window of maxima."""
    names = predictions.observe.arg_names
    types: dict[str, Any] = dict.fromkeys(("places", "exponents", "seens", "befores"), "*i32")
    types |= dict.fromkeys(("writtens", "results", "faulty", "starteds"), "*i8")
    types |= dict.fromkeys(("rows", "writes", "saturateds", "moves", "bads"), "*i64")
    types |= dict.fromkeys(("histories", "needed", "in_time", "headroom", "measured"), "*fp64")
    types |= dict.fromkeys(("count", "limit", "unit"), "i32")
    types["form"] = int16.Exponents(*["i32"] * 4)  # type: ignore[arg-type]
    steps_taken = (window - 1).bit_length()
    constants: dict[str, Any] = {"BETA": 3.0, "GAMMA": 100.0, "WRITTEN": True, "ADAPT": True, "WINDOW": window}
    constants |= {"WIDTH": 1 << steps_taken, "STEPS": steps_taken, "BLOCK": int16.ENTRIES}
    assert set(names) == types.keys() | constants.keys()
    traffic = 16 * window + 2 * (4 * 3 + 8 * 8) + 8 + 10 * 8 + 3
    return Configuration(f"observe {window}", predictions.observe, types, constants, int16.ENTRIES, traffic)


def step(way: Way, moments: str = "fp32", weight: str | None = None) -> Configuration:
    """Return the kernel of an optimizer's step."""
    kept = steps.kept(None if weight is None else parse(weight), parse(moments))
    assert kept is not None
    form = rules.AdamWNumbers if way.adamw else rules.LionNumbers if way.lion else rules.SgdNumbers
    way = way._replace(rounds=kept.rounds, moments=kept.kind, stored="bf16" if way.rest else way.stored)
    types: dict[str, Any] = {"table": "*i64", "chunks": "*i32", "rates": "*fp32", "inverse": "*fp32", "skip": "*fp32"}
    types["form"] = form(*["fp32"] * len(form._fields))  # type: ignore[arg-type]
    made = kept.moments
    types |= {"weight_numbers": _typed(False, kept.weight.numbers), "numbers": _typed(False, made.numbers)}
    types |= {"codes": _typed(False, made.codes), "sharing": Shared(*["i32"] * 4, *["fp32"] * 3)}  # type: ignore[arg-type]
    constants = {"WAY": way, "CAST": kept.weight.form, "CAST_EXACT": exact(kept.weight.form), "FORM": made.form}
    constants |= {"EXACT": exact(made.form), "LAYOUT": made.layout, "SHARING": made.sharing, "SIZE": kept.size}
    constants |= {"ALIGNED": True, "CHUNK": CHUNK, "BLOCK": steps.BLOCK}
    # bytes of weight, gradient and moments in fp32, which are read, and written but for the gradient
    traffic = (
        _gradient_bytes(way.dtype) + 8 + 8 * (2 if way.adamw else int(way.momentum)) if steps.is_plain(kept) else 0
    )
    chosen = " ".join(name for name, value in way._asdict().items() if value is True)
    name = f"step {way.dtype} {chosen} {weight} {moments} {way.rest}"
    return Configuration(name, updates.step, types, constants, CHUNK, traffic, steps.warps_for(kept), steps.ROUNDS)


def few_bits(rule: str, weight: str | None, moments: str, rest: int = 0, stored: str = "bf16") -> Configuration:
    """Return the kernel of a step with weights rounded by a cast, and moments in few bits."""
    is_sgd = rule == "sgd"
    way = Way(
        "bf16", rest, True, False, rule == "adamw", True, is_sgd, lion=rule == "lion", decay=is_sgd, stored=stored
    )
    return step(way, moments, weight)


def check(dtype: str, unscale: bool, counts: bool) -> Configuration:
    """Return the kernel that looks at gradients of a dtype."""
    types = {"table": "*i64", "chunks": "*i32", "inverse": "*fp32", "found": "*fp32"}
    types |= {"largest": "*i32", "histogram": "*i32"}
    constants = {"DTYPE": dtype, "UNSCALE": unscale, "COUNTS": counts, "ALIGNED": True}
    constants |= {"CHUNK": CHUNK, "BLOCK": steps.BLOCK}
    name = f"check {dtype}{' unscale' if unscale else ''}{' counts' if counts else ''}"
    traffic = _gradient_bytes(dtype) * (2 if unscale else 1)
    return Configuration(name, gradients.check, types, constants, CHUNK, traffic, rounds=steps.ROUNDS)


def _gradient_bytes(dtype: str) -> int:
    return 4 if dtype == "fp32" else 2


def code_bytes(cast: Cast) -> int:
    """Return the bytes of a code that is not packed."""
    return next(size for size in (1, 2, 4, 8) if cast.element.bits <= 8 * size)


def _typed(wide: bool, numbers: Numbers | Codes) -> Any:
    return type(numbers)(*["i64" if wide else "i32"] * len(numbers))  # type: ignore[arg-type]


USUAL = (
    *("fp16", "bf16", "bf16-tpu", "e5m2", "e4m3fn", "e4m3fn:saturate", "e2m1", "i8s", "bf16:stochastic"),
    *("e4m3fn:stochastic", "e4m3fn:stochastic-8", "bf16:toward-zero", "e5m2:up", "e4m3fn:nearest-away"),
)
OTHERS = ("e4m3fn@fp32/tensor", "int8:stochastic", "nvfp4:stochastic")
SHARED = ("mxfp8", "mxfp8:stochastic", "mxfp4", "nvfp4", "nvfp4:4/6", "if4", "int8", "e4m3fn@fp32/row", *OTHERS)


FEW_BITS: tuple[tuple[Any, ...], ...] = (  # of `few_bits`: rule, cast of the weight, moments, remainder, dtype
    ("adamw", "e8m15:stochastic-8", "mxint8:stochastic", 8),
    ("adamw", None, "mxfp8:stochastic", 16),
    ("adamw", "bf16:stochastic", "mxfp8:stochastic"),
    ("adamw", "e5m7:stochastic", "mxfp4:stochastic", 0, "fp32"),
    ("lion", None, "bf16:stochastic", 16),
    ("sgd", "bf16:stochastic", "mxint8:stochastic"),
)


def configurations() -> Iterator[Configuration]:
    """Yield every kernel, in the casts that training uses."""
    half = (torch.float16, torch.bfloat16)
    for text in USUAL:
        cast = parse(text)
        yield quantize(cast, torch.float32)
        if cast.element.bits <= 8:
            yield from (quantize(cast, dtype) for dtype in half)
            yield from (encode(cast, dtype) for dtype in (torch.float32, *half))
    for text in ("e4m3fn", "e5m2", "e2m1", "i8s"):
        yield from (decode(parse(text), dtype) for dtype in (torch.float32, *half))
    for dtype in (torch.float32, *half):
        four_bits = parse("e2m1")
        yield from map(packed, (encode(four_bits, dtype), decode(four_bits, dtype)))
        yield from (packed(shared(text, dtype, True)) for text in ("mxfp4", "nvfp4"))
    yield from (statistics(dtype) for dtype in (torch.float32, *half, torch.float64))
    for text in SHARED:
        yield from (shared(text, dtype, codes) for dtype in (torch.float32, *half) for codes in (False, True))
    for dtype in (torch.float32, *half):
        yield from (mantissas(kind, dtype) for kind in ("look", "look hinted", "convert", "write", "write perhaps"))
    yield from (mantissas(kind, torch.float32) for kind in ("look again", "begin"))
    for rounding in ("stochastic", "up"):
        yield from (mantissas(kind, torch.float32, rounding) for kind in ("convert", "write perhaps"))
    for gradient in ("fp32", "bf16", "fp16"):
        yield step(Way(gradient, rest=16, scaled=True, maximize=False, adamw=True, near=True))
        yield step(Way(gradient, rest=16, scaled=True, maximize=False, momentum=True, decay=True))
        yield from (check(gradient, True, counted) for counted in (False, True))


def products_of_integers() -> Iterator[Configuration]:
    """Yield the int16 products, which need tensor cores for int8: compute capability 8.0 and above."""
    yield from (product(kind, TILE) for kind in ("int16", "int64", "fp32", "fp64"))
    yield product("chained", CHAINED_TILE)
