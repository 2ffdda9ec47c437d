"""Named precisions: a policy, a loss scale and the kind of master weights, each with its source. No torch."""

from dataclasses import dataclass, replace
from pathlib import Path

from lowp import casts, formats
from lowp.casts import Cast, Overflow, Rounding
from lowp.errors import UnknownName, check_name, counted, unknown
from lowp.formats import FloatFormat, ScaledFormat
from lowp.formats.checks import Dtype
from lowp.loss_scale import DYNAMIC, LossScale
from lowp.policy import Accumulation, Policy, Rule

__all__ = ["PRESETS", "LossScale", "Masters", "Preset", "clipped_gradients", "parse"]


@dataclass(frozen=True)
class Masters:
    """How parameters that are stored in few bits are updated.

    ``fp32``: a full-precision copy beside them (Micikevicius et al. 2018, section 3.1). ``split``: bf16 weights and a
    16-bit remainder that together are the fp32 value. ``stochastic``: no copy, the update is rounded stochastically
    (Zamirai et al. 2020, arXiv 2010.06192). ``none``: no copy, the update is rounded to nearest, and may be lost.
    """

    kind: str = "none"

    KINDS = ("none", "fp32", "split", "stochastic")

    def __post_init__(self) -> None:
        check_name("kind of master weights", self.kind, self.KINDS)

    def __str__(self) -> str:
        return self.kind


@dataclass(frozen=True)
class Preset:
    """A precision by name. `source` says whose definition it follows, `summary` what a user gets, in a line."""

    name: str
    policy: Policy
    loss_scale: LossScale
    masters: Masters
    summary: str
    source: str


def _sixteen_bit(cast: str, parameters: str | None = None) -> Policy:
    """Contractions, norms and softmax in a 16-bit format; wide ops in fp32; other ops in the type of their input."""
    return Policy(
        (
            Rule.of("contraction", input=cast, weight=cast, grad=cast, output=cast),
            Rule.of("norm", "softmax", input=cast, output=cast),
            Rule.of("wide", input="fp32"),
        ),
        None if parameters is None else casts.parse(parameters),
    )


def _operands(forward: str | Cast, backward: str | Cast | None = None) -> Policy:
    """Operands of contractions and their gradients in the format; results and all other ops in fp32."""
    backward = backward or forward
    return Policy((Rule.of("contraction", input=forward, weight=forward, grad=backward),))


def _dfp16() -> Policy:
    """Operands shifted right by two bits, as in the authors' drivers: 14 bits make chains of 32 products safe."""
    operand = "dfp16:current(headroom=2)"
    return Policy((Rule.of("contraction", input=operand, weight=operand, grad=operand, accumulate="int32"),))


def _int8() -> Policy:
    """Operands of contractions in int8 under a scale per row; the products of linear layers sum integers."""
    casts = {"input": "int8", "weight": "int8", "grad": "int8:stochastic"}
    return Policy((Rule.of("linear", **casts, accumulate="int32"), Rule.of("contraction", **casts)))


# where models have their last layers: by the usual names, and in the module that is called, as weights shared with an
# embedding are
_LAST = ("", "*head", "*classif*")
# and their first block of many
_FIRST = ("*blocks.0.*", "*layers.0.*", "*layer.0.*", "*.h.0.*")
_LINEAR = ("linear", "addmm")  # addmm: the layers of GPT-2 in transformers, whose weights are transposed


def _but_the_last(*rules: Rule, high: tuple[str, ...] = _LAST) -> Policy:
    """Rules for layers, but for those in modules `high`, the last one; all else as bf16."""
    bf16 = _sixteen_bit("bf16")
    return replace(bf16, rules=(*(replace(bf16.rules[0], where=path) for path in high), *rules, *bf16.rules))


def _four_bits(operand: str, weight: str, input_gradient: str | None = None, high: tuple[str, ...] = _LAST) -> Policy:
    """Linear layers and convolutions in four bits.

    Gradients are rounded stochastically. Both operands of a linear weight's gradient are rotated, and those of the
    input's where its weight is named. `high`: the modules in bf16.
    """
    casts = {"input": operand, "weight": weight, "grad": f"{operand}:stochastic", "output": "bf16"}
    turned = f"input={operand} hadamard=16"
    linear = Rule.of(*_LINEAR, **casts, input_gradient=input_gradient, weight_gradient=turned)
    return _but_the_last(linear, Rule.of("conv*", **casts), high=high)


def _quartet2() -> Policy:
    """Linear layers in nvfp4: forward under scales by 4/6, both operands of both gradients rotated and unbiased.

    What backward reads is rounded from the tensors as they came, not from the values of forward. The authors' training
    code rotates 32 numbers, their kernels 128, for layers whose sums are so long.
    """
    casts = {"input": "nvfp4:4/6", "weight": "nvfp4:4/6", "output": "bf16"}
    backward = {f"{product}_gradient": f"grad=nvfp4:eden {other}=nvfp4:eden hadamard=32" for product, other in _READ}
    return _but_the_last(Rule.of(*_LINEAR, **casts, **backward))


def _mxfp8() -> Policy:
    """Linear layers in mxfp8 whose blocks lie along the sum of each product, and whose scales cut nothing off."""
    cast = "mxfp8:rceil"
    backward = {f"{product}_gradient": f"{other}={cast}" for product, other in _READ}
    return _but_the_last(Rule.of(*_LINEAR, input=cast, weight=cast, grad=cast, output="bf16", **backward))


# the operand of forward that each product of the backward pass reads
_READ = (("input", "weight"), ("weight", "input"))


# scalings whose exponents belong to sites
_OF_PLACES = ("autoflex", "frozen", "reactive", "static")


def _predicted(scaling: str) -> Policy:
    """Every tensor int16 under the exponent of its own site, parameters and optimizer state included; exact sums."""
    written = casts.parse(f"flex16+5:{scaling}")
    rule = Rule.of(input="flex16+5", weight="flex16+5", grad="flex16+5", output=written, accumulate="exact")
    return Policy((rule,), written)


def _row(
    name: str, policy: Policy, summary: str, source: str, loss_scale: str = "none", masters: str = "none"
) -> Preset:
    return Preset(name, replace(policy, name=name), LossScale.parse(loss_scale), Masters(masters), summary, source)


_MIXED = "Micikevicius et al. 2018, arXiv 1710.03740"
_TPU = "Google Cloud TPU documentation, 'The bfloat16 numerical format'"
_ROWS = [
    _row("fp32", Policy(), "plain torch, bit for bit", "IEEE 754 binary32"),
    _row(
        "fp16",
        _sixteen_bit("fp16"),
        "fp16 contractions, norms and softmax; fp32 parameters; dynamic loss scale",
        f"{_MIXED}; the op lists of torch 2.13",
        loss_scale="dynamic",
    ),
    _row(
        "bf16",
        _sixteen_bit("bf16"),
        "bf16 contractions, norms and softmax; fp32 parameters; no loss scale",
        "Kalamkar et al. 2019, arXiv 1905.12322; the op lists of torch 2.13",
    ),
    _row(
        "fp16-storage",
        _sixteen_bit("fp16", "fp16"),
        "all weights, activations and gradients stored in fp16, fp32 master weights",
        f"{_MIXED} (Apex O2)",
        loss_scale="dynamic",
        masters="fp32",
    ),
    _row(
        "bf16-storage",
        _sixteen_bit("bf16", "bf16"),
        "all weights, activations and gradients stored in bf16, fp32 master weights",
        _TPU,
        masters="fp32",
    ),
    _row(
        "bf16-tpu",
        _operands("bf16-tpu"),
        "parameters and activations fp32, contraction operands bf16 with subnormals flushed, sums in fp32",
        _TPU,
    ),
    _row(
        "bf16-trunc",
        _sixteen_bit("bf16-trunc"),
        "as bf16, but every conversion cuts the fp32 number after its first 16 bits",
        "bfloat16 of the TensorFlow white paper, Abadi et al. 2016, arXiv 1603.04467, section 5.5",
    ),
    _row(
        "fp16-naive",
        _sixteen_bit("fp16", "fp16"),
        "everything fp16, no master weights, no loss scale: shows what is lost",
        f"{_MIXED}, section 3.1",
    ),
    _row(
        "dfp16",
        _dfp16(),
        "contraction operands int16 under one exponent a tensor, sums in int32 chains; the rest and the masters fp32",
        "Das et al. 2018, arXiv 1802.00930",
    ),
    _row(
        "int8",
        _int8(),
        "contraction operands int8 under a scale a row, gradients rounded stochastically; linear layers sum in int32",
        "scales a row as in SwitchBack, Wortsman et al. 2023, arXiv 2304.13013; int8 gradients as in Jetfire, Xi "
        "et al. 2024, arXiv 2403.12422",
    ),
    _row(
        "flex16+5",
        _predicted("autoflex"),
        "every tensor int16 under a predicted exponent, weights, updates and optimizer state too; exact sums",
        "Koester et al. 2017, arXiv 1711.02213 (Flexpoint, Autoflex)",
    ),
    _row(
        "fp8",
        _operands("e4m3fn@fp32/tensor", "e5m2@fp32/tensor"),
        "contraction operands e4m3 forward and e5m2 backward, each tensor scaled by its own maximum",
        "Micikevicius et al. 2022, arXiv 2209.05433",
    ),
    _row(
        "fp8-delayed",
        _operands("e4m3fn@fp32/tensor:delayed(window=1024)", "e5m2@fp32/tensor:delayed(window=1024)"),
        "as fp8, under scales from the maxima of earlier steps, so that a cast reads its tensor once",
        "DelayedScaling of NVIDIA's Transformer Engine with its defaults",
    ),
    _row(
        "mxfp8-rceil",
        _mxfp8(),
        "linear layers in e4m3, blocks of 32 along the sum of each product, scales rounded up; the rest as bf16",
        "Mishra et al. 2025 (NVIDIA), arXiv 2506.08027",
    ),
    _row(
        "nvfp4",
        _four_bits("nvfp4", "e2m1@e4m3fn@fp32/16x16", high=(*_LAST, *_FIRST)),
        "linear layers after the first block in nvfp4, weights in tiles, gradients stochastic and rotated; else bf16",
        "NVIDIA 2025, arXiv 2509.25149",
    ),
    _row(
        "mxfp4",
        _four_bits("mxfp4", "mxfp4", "weight=mxfp4 hadamard=16"),
        "linear layers in mxfp4, gradients stochastic, operands of both gradients rotated; the rest as bf16",
        "stochastic and rotated gradients as in Tseng et al. 2025, arXiv 2502.20586",
    ),
    _row(
        "quartet2",
        _quartet2(),
        "linear layers in nvfp4, forward under scales by 4/6, both gradients rotated and unbiased; the rest as bf16",
        "Quartet II, Panferov et al. 2026, arXiv 2601.22813",
    ),
]
PRESETS: dict[str, Preset] = {preset.name: preset for preset in _ROWS}


def parse(
    precision: str | Preset | Policy | Path | Dtype,
    loss_scale: str | float | LossScale | None = None,
    masters: str | Masters | None = None,
    accumulate: str | Accumulation | None = None,
) -> Preset:
    """A preset by name, a bare format for contraction operands and gradients (the rest fp32), or a policy file (.toml).

    ``nvfp4:nearest-even`` is the bare format, too: the preset of its name rounds gradients stochastically. The others
    replace what the preset has. Raises InvalidInput with the near names for anything else.
    """
    preset = _parse(precision)
    if loss_scale is not None:
        preset = replace(preset, loss_scale=LossScale.parse(loss_scale))
    if masters is not None:
        preset = replace(preset, masters=masters if isinstance(masters, Masters) else Masters(masters))
    if accumulate is not None:
        preset = replace(preset, policy=_accumulating(preset.policy, Accumulation.parse(accumulate)))
    return preset


def _accumulating(policy: Policy, accumulate: Accumulation) -> Policy:
    """Return the policy with `accumulate` in every rule that casts operands of a product."""
    if not any(rule.weight is not None or rule.input is not None for rule in policy.rules):
        return policy.before(Rule.of("contraction", accumulate=accumulate))
    rules = (replace(rule, accumulate=accumulate) if rule.weight is not None else rule for rule in policy.rules)
    return replace(policy, rules=tuple(rules))


def _parse(precision: str | Preset | Policy | Path | Dtype) -> Preset:
    if isinstance(precision, Preset):
        return precision
    if isinstance(precision, Policy):
        return _of_policy(precision)
    text = str(precision).strip()
    if text in PRESETS:
        return PRESETS[text]
    if isinstance(precision, Path) or text.endswith(".toml"):
        return _of_policy(Policy.load(text))
    try:
        cast = casts.parse(text)
    except ValueError as error:
        if "unknown format" not in str(error):
            raise
        names = [*PRESETS, *formats.FORMATS, *formats.ALIASES]
        raise UnknownName(unknown("precision", text, names, shown=PRESETS) + "; or any format, such as e5m7") from None
    preset = PRESETS.get(str(cast))
    if preset is None:
        return _of_cast(cast, str(cast))
    rules = preset.policy.rules
    is_bare = Rounding.NEAREST_EVEN.value in text and any(one.is_stochastic for rule in rules for one in rule.casts)
    return _of_cast(cast, text) if is_bare else preset


def _of_cast(cast: Cast, name: str) -> Preset:
    """Operands and gradients of contractions in a user's format, with a loss scale if its exponent is narrow.

    If overflow would give NaN, the forward operands saturate instead, so that only gradients drive the scale.
    """
    if _is_predicted(cast):
        flex = PRESETS["flex16+5"]
        policy = replace(_predicted(str(cast.scaling)), name=name)
        return replace(flex, name=name, policy=policy, summary=f"every tensor int16, exponents {cast.scaling}")
    forward = replace(cast, overflow=Overflow.SATURATE) if cast.overflow is Overflow.NAN else cast
    scaled = isinstance(cast.format, ScaledFormat)
    return Preset(
        name,
        replace(_operands(forward, cast), name=name),
        DYNAMIC if _is_narrow(cast) else LossScale(),
        Masters(),
        f"contraction operands and gradients in {cast}{' with its shared scale' if scaled else ''}, the rest fp32",
        "a format given by the user",
    )


def _is_predicted(cast: Cast) -> bool:
    """Whether exponents belong to sites and are predicted: such weights and their updates need no masters."""
    return cast.format == formats.parse("flex16+5") and cast.scaling is not None and cast.scaling.kind in _OF_PLACES


def _is_narrow(cast: Cast | None) -> bool:
    """Whether gradients in this format need a loss scale: at most 5 exponent bits, and no shared scale."""
    return cast is not None and isinstance(cast.format, FloatFormat) and cast.format.exponent_bits <= 5


def clipped_gradients(preset: Preset) -> str | None:
    """Return a sentence if gradients are clipped where the dynamic loss scale of a preset waits for an overflow."""
    if preset.loss_scale.kind != "dynamic":
        return None
    for cast in (cast for rule in preset.policy.rules for cast in rule.grads):
        if isinstance(cast.format, FloatFormat) and cast.overflow is Overflow.SATURATE:
            return (
                f"gradients in {cast} are clipped at {cast.format.maximum:g} and never overflow, so the dynamic loss "
                "scale is not lowered for them: give a constant loss scale, such as 64, or a format with a shared "
                "scale, such as mxfp6 or mxfp4"
            )
    return None


def _of_policy(policy: Policy) -> Preset:
    """Return the preset of a user's policy.

    The loss scale is the policy's own, else dynamic if a gradient is rounded to a narrow exponent. Masters are fp32 if
    the policy stores parameters in a format without predicted exponents.
    """
    narrow = any(_is_narrow(cast) for rule in policy.rules for cast in rule.grads)
    scale = DYNAMIC if narrow else LossScale()
    return Preset(
        policy.name or "policy",
        policy,
        scale if policy.loss_scale is None else policy.loss_scale,
        Masters("none" if policy.parameters is None or _is_predicted(policy.parameters) else "fp32"),
        f"{counted(len(policy.rules), 'rule')} given by the user",
        "a policy given by the user",
    )
