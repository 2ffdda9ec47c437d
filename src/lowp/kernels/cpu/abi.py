"""The C ABI of the library: the types of its functions, and the parameter blocks that describe casts.

The functions are declared in cpu/*.cpp, the block in cpu/cast.hpp; its enums and the order of its fields are repeated
here.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from ctypes import Structure, addressof, byref, c_char_p, c_double, c_float, c_int, c_int64, c_uint64, c_void_p
from dataclasses import replace
from typing import Any

import torch

from lowp.casts import Cast, Overflow, Rounding, carry_of
from lowp.compat import remembered_by_identity
from lowp.formats import FloatFormat, IntFormat, PowerOfTwo, ScaledFormat
from lowp.kernels.numbers import scaled
from lowp.scaling import Autoflex

TYPE_NUMBERS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
_ROUNDINGS = {mode: number for number, mode in enumerate(Rounding)}
_OVERFLOWS = {overflow: number for number, overflow in enumerate(Overflow)}
_FLOAT, _INTEGER, _BINARY = 0, 1, 2
_BEYOND = 1 << 20  # an exponent above all


# letters of types: those of the module struct, and v for none and s for a string
_TYPES = {"v": None, "P": c_void_p, "i": c_int, "q": c_int64, "Q": c_uint64, "f": c_float, "d": c_double, "s": c_char_p}


def _struct(name: str, *rows: tuple[Any, str]) -> Any:
    """Return a struct of the library: rows of a type, by its letter or itself, and its fields, `*n` for n in one."""
    fields = []
    for kind, names in rows:
        one: Any = _TYPES[kind] if isinstance(kind, str) else kind
        for field, _, count in (word.partition("*") for word in names.split()):
            fields.append((field, one * int(count) if count else one))
    return type(name, (Structure,), {"_fields_": fields})


# of cpu/cast.hpp
CastBlock = _struct(
    "lowp_cast",
    ("i", "kind bits mantissa_bits bias min_exponent has_nan minus_zero is_signed subnormals has_zero"),
    ("i", "rounding overflow random_bits unused"),
    ("q", "infinity nan"),
    ("d", "maximum minimum"),
)
SharingBlock = _struct(
    "lowp_sharing",
    (CastBlock, "element scale outer other"),
    ("i", "power top lowest last of_zeros marks stored_from tries_four corrects"),
    ("d", "headroom highest outer_highest smallest outer_smallest"),
    ("q", "carry"),
)
MomentBlock = _struct("lowp_moment", ("P", "cast sharing"), ("q", "type group scale_bytes root"))
RuleBlock = _struct(
    "lowp_rule",
    ("q", "kind rest_bytes type gradient_type flags"),
    ("P", "cast"),
    (MomentBlock, "moments*2"),
    ("f", "numbers*8"),
)
# of cpu/exponents.hpp; a table is pointers to columns, in the order in which `entries` gives them
AutoflexBlock = _struct(
    "lowp_autoflex",
    ("d", "beta gamma"),
    ("i", "bits window min_exponent max_exponent headroom warm_headroom start_headroom adapt"),
)
TableBlock = _struct("lowp_table", (AutoflexBlock, "rule"), ("q", "crowds"), ("P", "columns*16"))
# of cpu/layer.cpp
ConversionBlock = _struct("lowp_conversion", ("P", "cast"), ("q", "offset lowest highest"))
LayerBlock = _struct(
    "lowp_layer", (ConversionBlock, "x weight gradient"), ("P", "output geometry products"), ("q", "sizes*3")
)
# of cpu/product.hpp
OperandBlock = _struct("lowp_operand", ("P", "cast"), ("q", "batch*2 line step type keeps"))
PlanBlock = _struct(
    "lowp_plan",
    ("q", "batch*2 rows columns depth"),
    (OperandBlock, "left right"),
    ("P", "cast"),
    ("q", "out_batch*2 out_line type"),
)
RoundingBlock = _struct("lowp_rounding", ("P", "cast sharing"), ("q", "type out_type count row group inner across"))
RotationBlock = _struct("lowp_rotation", ("q", "type size count length inner"))
CodesBlock = _struct("lowp_codes", ("P", "sharing"), ("q", "rows columns line step"))
BytesBlock = _struct("lowp_bytes", ("q", "rows columns depth line step"))
StepBlock = _struct(
    "lowp_step",
    ("q", "kind places*6 seeds*3"),
    (PlanBlock, "product"),
    (RoundingBlock, "rounding"),
    (CodesBlock, "codes"),
    (BytesBlock, "bytes"),
    (RotationBlock, "rotation"),
)
StepsBlock = _struct("lowp_steps", ("P", "steps"), ("q", "count own"))

# one row per function: the letter of its return type, and those of its arguments
_FUNCTIONS = {
    "lowp_build": "s",
    "lowp_set_team": "v P",
    "lowp_casts_select": "i i",
    "lowp_quantize": "v PiPiPqQqii",
    "lowp_encode": "q PiPiPqQqi",
    "lowp_decode": "v PiPiPqi",
    "lowp_quantize_groups": "i PiPiPqqqqqPPQqi",
    "lowp_quantize_measured": "i PiPPqdPQqi",
    "lowp_encode_groups": "q PiPPiPiPqqqQqi",
    "lowp_decode_groups": "i PPiPidPiPqqqi",
    "lowp_write_int16": "v PiPPPPqQiP",
    "lowp_sum_int16": "v PqqqPi",
    "lowp_current_int16": "i PPiiiPqQiP",
    "lowp_from_int16": "v PPPqi",
    "lowp_is_exact_int16": "i PPiiiqiP",
    "lowp_exact_int16": "q PPPqi",
    "lowp_same_int16": "q PPqqqPiii",
    "lowp_same_int16_list": "v PqiP",
    "lowp_are_rounded_list": "v PiPqiP",
    "lowp_store_rounded_list": "v PiPqiP",
    "lowp_step_list": "v PPqqPfi",
    "lowp_pack_nonzero": "v PPqi",
    "lowp_pass_bits": "v PPPqi",
    "lowp_pass_positive": "v PPPPPqi",
    "lowp_relu_int16": "i PPPPPqi",
    "lowp_write_entries": "q PPPqi",
    "lowp_hold_entries": "v PPqiP",
    "lowp_end_entries": "v PPPqPPqi",
    "lowp_remember_maxima": "v PqPqPPPPPdd",
    "lowp_observe_entries": "v PPq",
    "lowp_met_in_entries": "i Pq",
    "lowp_layer_forward": "i sPPPiP",
    "lowp_layer_backward": "i sPPPiP",
    "lowp_statistics": "i iPqiPP",
    "lowp_spectrum": "i iPqdiP",
    "lowp_largest": "f PPqi",
    "lowp_take": "v qPPPqqP",
    "lowp_updates": "v PPPqiPP",
    "lowp_random_words": "v QQqP",
    "lowp_random_block": "v QPP",
    "lowp_program": "i PPPi",
    "lowp_bytes_pack": "v PqqqqiPPPi",
    "lowp_bytes_extremes": "v iPqqqPi",
    "lowp_bytes_quantize": "v iPqqqfiiqPi",
    "lowp_bytes_multiply": "v iPqqPPqfiPPPPPi",
    "lowp_bytes_linear": "v iPqqqfiiPPqPPPPPi",
    "lowp_bytes_windows": "v PPiPi",
    "lowp_codes_values": "i PPPPPPPi",
    "lowp_codes_multiply": "i iPPfPPPPPPi",
    "lowp_rows_multiply": "i iPqPPPPdPPi",
    "lowp_rows_values": "v iPPPdqqPi",
    "lowp_bits_multiply": "v iPqPqqqPi",
    "lowp_integer_matmul": "i sPPPPPiiiPiiPP",
    "lowp_integer_convolution": "i siPPPPiiiPiiPP",
}
SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    name: (_TYPES[letters[0]], tuple(_TYPES[letter] for letter in letters[2:])) for name, letters in _FUNCTIONS.items()
}


@functools.lru_cache(maxsize=1024)
def format_parameters(format: FloatFormat | IntFormat) -> object:
    """Return a pointer to the parameter block of a format, for functions that only use its codes."""
    return parameters(Cast(format))


@remembered_by_identity
def sharing_parameters(cast: Cast) -> object:
    """Return a pointer to the parameters of a cast's shared scales; None for casts without. They describe `scaled`."""
    format, scaling = cast.format, cast.scaling
    if not isinstance(format, ScaledFormat) or scaling is None:
        return None
    element, scale = format.element, format.scale
    block = SharingBlock(element=_block(cast.element_cast), highest=scaled.aim(cast), headroom=2.0**scaling.headroom)
    if isinstance(scale, FloatFormat):
        block.scale, block.smallest = _block(Cast(scale, overflow=Overflow.SATURATE)), scale.smallest_normal
        block.marks = scale.bits <= 8 and scale.has_nan and scaling.kind == "current"
    if isinstance(scale, PowerOfTwo) or not (scale.has_zero or scale.mantissa_bits):
        block.power, block.top, block.last = True, element.max_exponent - scaling.headroom, scale.max_exponent
        block.carry = carry_of(cast, 52)
        block.of_zeros = block.lowest = block.stored_from = scale.min_exponent
        if format.scope.kind == "tensor":
            block.of_zeros = min(max(0, block.lowest), block.last)
            block.stored_from = 0 if isinstance(scale, PowerOfTwo) else block.lowest
        if scaling.exponent is not None:
            block.of_zeros = block.lowest = scaling.exponent
            block.top = _BEYOND
    elif outer := format.outer:
        block.outer, block.outer_smallest = _block(Cast(outer, overflow=Overflow.SATURATE)), outer.smallest_normal
        block.outer_highest = scaled.largest_scaled(cast)
    if format.other is not None:
        block.other = _block(replace(cast.element_cast, format=format.other))
    block.tries_four, block.corrects = scaling.rule == "4/6", cast.is_corrected
    return byref(block)


@remembered_by_identity
def parameters(cast: Cast) -> object:
    """Return a pointer to the parameter block of a cast; the pointer keeps the block alive."""
    return byref(_block(cast))


def _block(cast: Cast) -> Any:
    element = cast.element
    block = CastBlock(
        bits=element.bits,
        rounding=_ROUNDINGS[cast.rounding],
        overflow=_OVERFLOWS[cast.overflow or Overflow.SATURATE],
        random_bits=cast.random_bits or 0,
        maximum=element.maximum,
        minimum=element.minimum,
    )
    if isinstance(element, FloatFormat):
        for name in ("mantissa_bits", "bias", "min_exponent", "has_nan", "subnormals", "has_zero"):
            setattr(block, name, getattr(element, name))
        block.kind, block.minus_zero, block.is_signed = _FLOAT, element.has_minus_zero, element.signed
        block.infinity = -1 if element.infinity_code is None else element.infinity_code
        block.nan = -1 if element.nan_code is None else element.nan_code
    else:
        block.kind = _BINARY if element.bits == 1 else _INTEGER
    return block


def table_block(scaling: Autoflex, crowds: bool, addresses: Sequence[int | None], kept: object) -> object:
    """Return a pointer to a table of shared exponents: the parameters of a scaling, and the addresses of columns.

    `kept` lives as long as it does.
    """
    names = [name for name, *_ in AutoflexBlock._fields_]
    rule = AutoflexBlock(**{name: getattr(scaling, name) for name in names})
    block = TableBlock(rule, crowds, (c_void_p * 16)(*addresses))
    block.kept = kept
    return byref(block)


def layer_block(
    conversions: Sequence[tuple[object, int, int, int]],
    output: object | None,
    geometry: array[int] | None,
    products: array[int] | None,
    sizes: tuple[int, int, int],
) -> object:
    """Return a pointer to a layer: how x, weight and gradient are converted, and how results are rounded.

    It is a convolution, or three products of matrices; `sizes`: elements of x, weight and result.
    """
    blocks = [ConversionBlock(addressof(to._obj), *bounds) for to, *bounds in conversions]  # type: ignore[attr-defined]
    rounding = None if output is None else addressof(output._obj)  # type: ignore[attr-defined]
    memory = (None if one is None else one.buffer_info()[0] for one in (geometry, products))
    block = LayerBlock(*blocks, rounding, *memory, sizes)
    block.kept = conversions, output, geometry, products
    return byref(block)


def rule_block(
    integers: Sequence[int], weight: Cast | None, moments: Sequence[tuple[Cast, bool]], numbers: Sequence[float]
) -> object:
    """Return a pointer to an optimizer's rule: the first five fields, casts of the weights and of moments, numbers.

    Of each moment is told whether its codes are those of its root.
    """
    block = RuleBlock(*integers, cast_address(weight), numbers=(c_float * 8)(*numbers))
    for slot, (cast, of_roots) in enumerate(moments):
        if isinstance(format := cast.format, ScaledFormat):
            scale_bytes = scaled.stored_scale_dtype(format).itemsize
            block.moments[slot] = MomentBlock(None, sharing_address(cast), 0, format.scope.size, scale_bytes, of_roots)
        elif str(format) == "bf16":
            block.moments[slot] = MomentBlock(cast_address(cast), None, TYPE_NUMBERS[torch.bfloat16])
    return byref(block)


def cast_address(cast: Cast | None) -> int | None:
    """Return the address of a cast's parameter block, which lives as long as the process; None for no cast."""
    return None if cast is None else addressof(parameters(cast)._obj)  # type: ignore[attr-defined]


def sharing_address(cast: Cast) -> int | None:
    """Return the address of the parameters of a cast's shared scales; None for casts without."""
    block = sharing_parameters(cast)
    return None if block is None else addressof(block._obj)  # type: ignore[attr-defined]


def step_blocks(count: int) -> Any:
    """Return the blocks of a program of `count` steps."""
    return (StepBlock * count)()


def steps_block(blocks: Any, own: int) -> tuple[object, int]:
    """Return a program of steps with as many bytes of its own, and its address, while the program lives."""
    block = StepsBlock(addressof(blocks), len(blocks), own)
    block.kept = blocks
    return block, addressof(block)
