"""The `mx_specs` of Microsoft's microxcaling on exact kernels: its dictionary, its operations, and a policy from it.

Rouhani et al. 2023, "Microscaling Data Formats for Deep Learning", arXiv 2310.10537; OCP Microscaling Formats (MX) 1.0.
Roundings by their names there: `nearest` takes ties away from zero, `even` to even, `floor` toward zero, `dither` is
stochastic. What differs, because the original's fp32 arithmetic is wrong there (each input was run through its
elemwise_ops.py):

* exponents come from bits. There floor(log2(x)) in fp32 is one too large just below a power of two: 7.9999995 gets
  the exponent 3, so that `floor` makes 7 of it in fp8_e4m3, not 7.5, and a block with that maximum twice its scale.
* rounding adds no 0.5 in fp32: 0.49999997 of the smallest subnormal is 0, not the smallest subnormal.
* a zero keeps its sign in floating-point formats.
* `floor` never makes infinity out of a finite number (IEEE 754, section 7.4): 70000 in `fp` 16 is 65504.
* gradients pass straight through. There they end at the floor function.

Kept is that a block with a NaN, an infinity or an exponent beyond the range of `scale_bits` becomes NaN.
"""

from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowp import formats, kernels
from lowp.errors import InvalidInput, UnknownName, check_name, unknown
from lowp.formats import FloatFormat, IntFormat
from lowp.kernels.numbers.floats import floor_log2, widen
from lowp.policy import Policy, Rule
from lowp.shims.straight_through import drawn_seed, straight_through, whole_number

ELEMENTS = {
    **{"fp8_e5m2": "e5m2", "fp8_e4m3": "e4m3fn", "fp6_e3m2": "e3m2", "fp6_e2m3": "e2m3"},
    **{"fp4_e2m1": "e2m1", "fp4": "e2m1", "int8": "i8s", "int4": "i4s", "int2": "i2s"},
    **{"float16": "fp16", "fp16": "fp16", "bfloat16": "bf16", "bf16": "bf16"},
}
ROUNDINGS = {"nearest": "nearest-away", "even": "nearest-even", "floor": "toward-zero", "dither": "stochastic"}

_FORMAT_KEYS = ("w_elem_format", "a_elem_format", "w_elem_format_bp", "a_elem_format_bp_ex", "a_elem_format_bp_os")
_ROUND_KEYS = (
    *("round", "round_m", "round_weight", "round_output", "round_grad_weight", "round_grad_input", "round_mx_output"),
    *("round_mx_input_grad_input", "round_mx_weight_grad_input", "round_mx_grad_output_grad_input"),
    *("round_mx_input_grad_weight", "round_mx_grad_output_grad_weight"),
)
DEFAULTS: dict[str, Any] = {
    "scale_bits": 0,
    **dict.fromkeys(_FORMAT_KEYS),
    **{"mx_flush_fp32_subnorms": False, "shared_exp_method": "max", "block_size": 0, "bfloat": 0, "fp": 0},
    **{"bfloat_subnorms": True, "quantize_backprop": True},
    **dict.fromkeys(_ROUND_KEYS, "nearest"),
    **dict.fromkeys(("softmax_exp2", "vec_use_exp2", "vec_use_recip", "custom_cuda"), False),
}


# -- the dictionary ---------------------------------------------------------------------------------------------------
class MxSpecs(UserDict[str, Any]):
    """A dictionary with every key of mx_specs: those given, the others at their defaults.

    Raises ValueError for an unknown key or a value that the key cannot have, whenever it is set.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__({**DEFAULTS, **dict(*given, **named)})

    def __setitem__(self, key: str, value: Any) -> None:
        _check(key, value)
        super().__setitem__(key, value)


Specs = Mapping[str, Any]


def _check(key: str, value: Any) -> None:
    check_name("key of mx_specs", key, DEFAULTS)
    if key in _FORMAT_KEYS:
        if value is not None:
            _element(value)
    elif key in _ROUND_KEYS:
        _rounding(value)
    elif key == "shared_exp_method":
        if value not in ("max", "none"):
            raise UnknownName(unknown(key, value, ("max", "none")))
    elif isinstance(DEFAULTS[key], bool):
        if not isinstance(value, bool):
            raise InvalidInput(f"mx_specs[{key!r}] is True or False, not {value!r}")
    else:
        whole_number(f"mx_specs[{key!r}]", value, 0, 2**31)


def _element(name: Any) -> str:
    """Return the element format's name there: given as text in any case, or as a member of its enumeration."""
    text = str(getattr(name, "name", name)).lower()
    check_name("MX element format", text, ELEMENTS)
    return text


def _rounding(name: Any) -> str:
    check_name("rounding of mx_specs", name, ROUNDINGS)
    return ROUNDINGS[name]


def get_default_mx_specs() -> MxSpecs:
    """Return the defaults, under which nothing is rounded."""
    return MxSpecs()


def apply_mx_specs(mx_specs: Specs | None, default_mx_specs: Specs | None = None) -> MxSpecs:
    """Return the specs with missing keys, and keys that are None, taken from the defaults."""
    specs = MxSpecs(default_mx_specs or {})
    for key, value in (mx_specs or {}).items():
        if value is not None or key not in DEFAULTS:
            specs[key] = value
    return specs


def finalize_mx_specs(specs: Specs, early_exit: bool = True) -> MxSpecs | None:
    """Return complete specs: a backward format that is not given is that of forward, a rounding the one it refines.

    None where nothing would be rounded and `early_exit` is set.
    """
    given = dict(specs)
    if early_exit and not any(given.get(key) for key in (*_FORMAT_KEYS, "bfloat", "fp")):
        for key, value in given.items():
            _check(key, DEFAULTS.get(key) if value is None else value)
        return None
    inherited = {"w_elem_format_bp": "w_elem_format"}
    inherited |= dict.fromkeys(("a_elem_format_bp_os", "a_elem_format_bp_ex"), "a_elem_format")
    first = ("round_m", "round_output", "round_grad_weight", "round_grad_input", "round_weight", "round_mx_output")
    inherited |= dict.fromkeys(first, "round")
    inherited |= {
        key: "round_grad_input" for key in _ROUND_KEYS if key.startswith("round_mx_") and key not in inherited
    }
    for key, source in inherited.items():
        if given.get(key) is None and source in given:
            given[key] = given[source]
    return apply_mx_specs(given)


def get_backwards_mx_specs(specs: Specs) -> MxSpecs:
    """Return the specs of the backward pass: nothing is rounded where `quantize_backprop` is False."""
    backward = apply_mx_specs(specs)
    if not backward["quantize_backprop"]:
        backward.update({**dict.fromkeys(_FORMAT_KEYS), "block_size": 0, "bfloat": 0, "fp": 0})
    return backward


# -- operations -------------------------------------------------------------------------------------------------------
def quantize_mx_op(
    A: Tensor,
    mx_specs: Specs,
    elem_format: Any = None,
    block_size: int | None = None,
    axes: int | Iterable[int] | None = None,
    round: str = "nearest",
    expand_and_reshape: bool = False,
    *,
    seed: int | Tensor | None = None,
) -> Tensor:
    """Return A rounded to MX blocks along `axes`; with `elem_format` None, A itself.

    Elements within `block_size` neighbours along every one of the axes share a scale (0: all along the axes; the last
    block may be shorter): 2**(floor(log2(maximum)) - largest exponent of the element format), not below
    2**-(2**(scale_bits - 1) - 1). `shared_exp_method` "none" gives each element a scale of its own. Elements saturate.
    `expand_and_reshape` does nothing, as there.

    A block with a NaN, an infinity, or a scale beyond 2**(2**(scale_bits - 1) - 1) is NaN. `seed` is for `dither`.
    Raises ValueError for unknown names, axes that A does not have, and a dtype that cannot hold the results.
    """
    if elem_format is None:
        return A
    specs, mode = apply_mx_specs(mx_specs), _rounding(round)
    size = whole_number("block_size", specs["block_size"] if block_size is None else block_size, 0, 2**31)
    chosen = [] if specs["shared_exp_method"] == "none" else _axes(axes, A.dim())
    seed = drawn_seed(seed) if mode == "stochastic" else 0
    scale_bits = whole_number("scale_bits", specs["scale_bits"] or 8, 2, 10)
    largest_scale = 2 ** (scale_bits - 1) - 1
    element = formats.parse(ELEMENTS[_element(elem_format)])
    assert isinstance(element, (FloatFormat, IntFormat))
    cast = f"{element}@{_scale(element, -largest_scale, 1023 - 127)}/row:{mode}"
    # integers there are 1.xxx with the point behind the first bit
    top = element.max_exponent if isinstance(element, FloatFormat) else 0
    flush = bool(specs["mx_flush_fp32_subnorms"])

    def rounded(x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x.clone()
        blocks, undo = _tiled(x, chosen, size)
        largest = widen(blocks).abs().amax(-1, keepdim=True)
        exponent = floor_log2(largest)
        if flush:
            blocks = torch.where(exponent <= -127, torch.zeros_like(blocks).copysign(blocks), blocks)
        values = kernels.quantize(blocks, cast, seed=seed)
        beyond = ~largest.isfinite() | (exponent - top > largest_scale)
        return undo(torch.where(beyond, torch.nan, values))

    return straight_through(A, rounded)


def quantize_elemwise_op(
    A: Tensor, mx_specs: Specs | None, round: str | None = None, *, seed: int | Tensor | None = None
) -> Tensor:
    """Return A rounded to the `bfloat` (8 exponent bits) or `fp` (5) format of the specs, or A where both are 0.

    The numbers are total widths, as bfloat 16; overflow gives infinity, `bfloat_subnorms` False flushes numbers below
    the normal ones before rounding. Raises ValueError where both are given, or a width leaves no mantissa bit.
    """
    if mx_specs is None:
        return A
    specs = apply_mx_specs(mx_specs)
    format = _elementwise(specs)
    if format is None:
        return A
    mode = _rounding(specs["round"] if round is None else round)
    seed = drawn_seed(seed) if mode == "stochastic" else 0
    result: Tensor = kernels.quantize(A, f"{format.spelling}:{mode}", seed=seed)
    return result


def quantize_bfloat(x: Tensor, mx_specs: Specs | None, round: str | None = None) -> Tensor:
    """Return x rounded by `quantize_elemwise_op`; its gradient is rounded, too, unless `quantize_backprop` is False."""
    if mx_specs is None:
        return x
    specs = apply_mx_specs(mx_specs)
    forward = partial(quantize_elemwise_op, mx_specs=specs, round=round)
    backward = partial(quantize_elemwise_op, mx_specs=get_backwards_mx_specs(specs), round=round or specs["round"])
    return straight_through(x, forward, backward)


def _elementwise(specs: Specs) -> FloatFormat | None:
    bfloat, fp = specs["bfloat"], specs["fp"]
    if bfloat and fp:
        raise InvalidInput(f"mx_specs has bfloat {bfloat} and fp {fp}: give one of them, and 0 for the other")
    if not (bfloat or fp) or bfloat == 32:
        return None
    key, width, exponent_bits = ("bfloat", bfloat, 8) if bfloat else ("fp", fp, 5)
    mantissa_bits = whole_number(f"mx_specs[{key!r}]", width, exponent_bits + 2, exponent_bits + 24) - exponent_bits - 1
    return FloatFormat(f"{key}{width}", exponent_bits, mantissa_bits, subnormals=specs["bfloat_subnorms"])


def _axes(axes: int | Iterable[int] | None, dimensions: int) -> list[int]:
    if axes is None:
        raise InvalidInput("quantize_mx_op needs axes, along which elements share a scale: axes=[-1] is the last")
    given = [axes] if isinstance(axes, int) else list(axes)
    if not given or any(not -dimensions <= axis < dimensions for axis in given):
        raise InvalidInput(f"axes {given} are not all dimensions of a tensor with {dimensions} of them")
    found = sorted({axis % dimensions for axis in given})
    if len(found) < len(given):
        raise InvalidInput(f"axes {given} name a dimension twice")
    return found


def _tiled(x: Tensor, axes: list[int], size: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return x with the elements of a block along the last dimension, and what brings such a tensor back.

    Each axis is cut into (blocks, block), filled up with zeros, and the inner halves are put last. With no axes every
    element is a block.
    """
    pads: list[int] = []
    split: list[int] = []
    inner: list[int] = []
    for axis, length in enumerate(x.shape):
        block = (min(size, length) or length) if axis in axes else 1
        if axis in axes:
            inner.append(len(split) + 1)
        pads = [0, -length % block, *pads]
        split += [-(-length // block), block] if axis in axes else [length]
    outer = [axis for axis in range(len(split)) if axis not in inner]
    padded = torch.nn.functional.pad(x, pads) if any(pads) else x
    permuted = padded.reshape(split).permute(outer + inner)
    tiles = permuted.reshape(*(split[axis] for axis in outer), -1).contiguous()

    def undo(values: Tensor) -> Tensor:
        order = outer + inner
        back = values.reshape(permuted.shape).permute([order.index(axis) for axis in range(len(order))])
        whole = back.reshape(padded.shape)
        return whole[tuple(slice(length) for length in x.shape)].contiguous()

    return tiles, undo


# -- in lowp's terms --------------------------------------------------------------------------------------------------
def _scale(element: FloatFormat | IntFormat, lowest: int, highest: int) -> str:
    """Return the scale's range of exponents in lowp's terms, where integers have no point."""
    behind_point = 0 if isinstance(element, FloatFormat) else element.maximum.bit_length() - 1
    return f"2^{lowest - behind_point}..{highest - behind_point}"


def policy_from_mx_specs(mx_specs: Specs) -> Policy:
    """Return the policy under which `lowp.autocast` runs what microxcaling runs under these specs.

    Operands of contractions become MX blocks along the dimension that is summed (rounded anew for each of the three
    products), results and the operands of norms, softmax and pointwise ops the `bfloat` or `fp` format. The specs are
    finalised first.

    An operand is rounded once, to MX, where microxcaling rounds it to `bfloat` before. With `quantize_backprop` False
    gradients are not rounded as operands; forward operands keep their rounding in backward, and what is written is
    rounded as in forward. Raises ValueError for what a rule cannot say, and names the keys that must agree.
    """
    specs = finalize_mx_specs(mx_specs)
    if specs is None:
        return Policy(name="mx")
    backward = specs["quantize_backprop"]
    _expressible(specs, backward)
    format = _elementwise(specs)
    written = None if format is None else f"{format.spelling}:{ROUNDINGS[specs['round_output']]}"
    inner = specs["round_mx_output"]
    activation = _operand(specs, specs["a_elem_format"], inner, written)
    weight = _operand(specs, specs["w_elem_format"], inner, written)
    gradient = None
    if backward:
        mode = specs["round_mx_grad_output_grad_input"]
        gradient = _operand(specs, specs["a_elem_format_bp_os"], mode, written)
    rules = [Rule.of("contraction", input=activation, weight=weight, grad=gradient, output=written)]
    if written is not None:
        rules.append(Rule.of("norm", "softmax", "pointwise", input=written, output=written))
    return Policy(tuple(rules), name="mx")


def _operand(specs: Specs, element_name: Any, rounding: str, otherwise: str | None) -> str | None:
    """Return the cast of an operand: MX blocks, or without an element format what is rounded element by element."""
    if element_name is None:
        return otherwise
    element = formats.parse(ELEMENTS[_element(element_name)])
    assert isinstance(element, (FloatFormat, IntFormat))
    bits = whole_number("scale_bits", specs["scale_bits"] or 8, 2, 10)
    scale = _scale(element, 1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1)
    if bits == 8 and isinstance(element, FloatFormat):
        scale = "e8m0"
    scope = "1" if specs["shared_exp_method"] == "none" else str(specs["block_size"] or "row")
    return f"{element}@{scale}/{scope}:{ROUNDINGS[rounding]}"


def _expressible(specs: Specs, backward: bool) -> None:
    """Raise InvalidInput for specs that say more than one rule can."""
    for key in ("softmax_exp2", "vec_use_exp2", "vec_use_recip", "mx_flush_fp32_subnorms"):
        if specs[key]:
            raise InvalidInput(f"a policy cannot express mx_specs[{key!r}]: set it to False")
    together = [
        ("w_elem_format", "w_elem_format_bp"),
        ("a_elem_format", "a_elem_format_bp_ex"),
        ("a_elem_format_bp_os", "a_elem_format_bp_ex"),
        ("round_mx_output", "round_mx_input_grad_weight", "round_mx_weight_grad_input"),
        ("round_mx_grad_output_grad_input", "round_mx_grad_output_grad_weight"),
        ("round_output", "round_grad_input", "round_grad_weight"),
    ]
    for keys in together if backward else ():
        if len({_element(specs[key]) if specs[key] and key in _FORMAT_KEYS else specs[key] for key in keys}) > 1:
            given = ", ".join(f"{key} {specs[key]}" for key in keys)
            raise InvalidInput(
                f"a rule rounds an operand in the same way in all products, so these must agree: {given}"
            )
