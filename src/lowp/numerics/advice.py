"""Advice on a profile: a verdict for each format, at most five findings, and a policy that follows them."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from lowp import presets
from lowp.loss_scale import DYNAMIC, LossScale
from lowp.numerics.findings import Finding
from lowp.numerics.part import Part, failure, parameter_key
from lowp.numerics.prediction import Window, effect, lost_updates
from lowp.numerics.record import Key, Record
from lowp.numerics.spectrum import Spectrum
from lowp.numerics.windows import window_of
from lowp.policy import Policy, Rule

MOST_FINDINGS = 5
_HARMFUL = 0.01  # share of flushed gradients or lost updates from which a format is used with care
_STALLS = 0.2  # share of lost updates from which a format is said to stall
_LOST_WHOLLY = 0.99
_LEAST_SIGNAL = 20.0  # dB that an operand keeps: an error of a tenth of its size
_LEAST_SIGNAL_OF_GRADIENTS = 12.0
_MANY_SKIPPED = 0.1
_HALF = {"float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class FormatVerdict:
    """The effect of one format: shares from 0 to 1, the median signal-to-noise ratio in dB, and a short verdict."""

    format: str
    flushed: float
    overflow: int
    stalled: float | None
    signal_to_noise: float
    verdict: str
    usable: bool
    scale: int | None = None
    is_whole: bool = True

    @property
    def grade(self) -> str:
        """``safe``, ``with care`` for some layers alone or with losses that are mostly harmless, ``loses``, …"""
        if not self.usable:
            return "not judged" if self.verdict.startswith("not judged") else "loses"
        harmed = self.overflow or max(self.flushed, self.stalled or 0.0) >= _HARMFUL
        return "with care" if harmed or not self.is_whole else "safe"

    def document(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "grade": self.grade}


@dataclass(frozen=True)
class Advice:
    """Verdicts, findings, the window of loss scales, and the policy; `more` findings were left out.

    There is no verdict if no operand of a product was recorded.
    """

    verdicts: tuple[FormatVerdict, ...]
    findings: tuple[Finding, ...]
    window: Window
    policy: Policy
    more: int = 0
    quiet: int = 0  # tensors that need no change
    named: tuple[str, ...] = field(default=())

    def document(self) -> dict[str, Any]:
        """Plain data, for the reports."""
        return {
            "verdicts": [one.document() for one in self.verdicts],
            "findings": [one.document() for one in self.findings],
            "window": [self.window.lowest, self.window.highest],
            "recommended": self.window.recommended,
            "policy": self.policy.to_toml(),
            "more": self.more,
            "quiet": self.quiet,
        }


def advise(record: Record) -> Advice:
    """Judge a profile. Raises InvalidInput for an empty one."""
    record.require_content()
    window, outside = window_of(record)
    large = _too_large(record)
    coarse = [module for module in modules_of_contractions(record) if not fits_fp8(record, module)]
    found = [
        *_faults(record),
        *_lost(record),
        *_kept_in_bf16("N204", outside, "no fp16 loss scale fits"),
        *_kept_in_bf16("N205", large, "too large for fp16, or nearly"),
        *_half_losses(record),
        *_skipped(record, window),
    ]
    found.sort(key=lambda one: one.severity != "error")
    named = tuple(dict.fromkeys(module for one in found for module in one.modules))
    policy = _policy(record, window, {record.within(module) for module in (*outside, *large)})
    verdicts = (
        ()
        if not _operands(record)
        else (
            _fp16(record, window, {*outside, *large}),
            _sixteen(record, "bf16"),
            _stored(record, "bf16"),
            _fp8(record, coarse),
            _sixteen(record, "dfp16"),
        )
    )
    quiet = sum(not {key.module, key.path}.intersection(named) for key in record.tensors)
    return Advice(
        verdicts, tuple(found[:MOST_FINDINGS]), window, policy, max(len(found) - MOST_FINDINGS, 0), quiet, named
    )


# -- what is looked at ------------------------------------------------------------------------------------------------
def modules_of_contractions(record: Record) -> dict[str, list[Key]]:
    """Return the operands of each module's products, and the gradients that arrive there."""
    found: dict[str, list[Key]] = {}
    for (module, op), seen in record.ops.items():
        if seen.op_class != "contraction":
            continue
        roles = (("input", "forward"), ("weight", "forward"), ("grad", "backward"))
        keys = [Key(module, op, *one) for one in roles]
        keys += [parameter_key(name, "weight", "step") for name in seen.named("weight")]
        found.setdefault(module, []).extend(key for key in keys if key in record.tensors)
    return {module: keys for module, keys in found.items() if keys}


def _too_large(record: Record) -> dict[str, str]:
    """Return the modules whose results are beyond fp16's largest number, or within a factor of two of it."""
    found: dict[str, str] = {}
    for key, seen in record.tensors.items():
        op = record.ops.get((key.module, key.op))
        if key.role == "output" and op is not None and op.op_class in ("contraction", "norm") and seen.maximum > 32752:
            is_beyond = seen.maximum > 65504
            end = "fp16 ends at 65504" if is_beyond else "more than half of 65504, where fp16 ends"
            found[key.module] = f"{key.op} writes up to {seen.maximum:.3g}{';' if is_beyond else ','} {end}"
    return found


def fits_fp8(record: Record, module: str) -> bool:
    """Whether the operands of a module keep enough of their signal in e4m3, and its gradients in e5m2."""
    for key in modules_of_contractions(record)[module]:
        backward = key.role == "grad"
        to = "e5m2@fp32/tensor" if backward else "e4m3fn@fp32/tensor"
        least = _LEAST_SIGNAL_OF_GRADIENTS if backward else _LEAST_SIGNAL
        if effect(record.tensors[key], to).signal_to_noise < least:
            return False
    return True


# -- verdicts ---------------------------------------------------------------------------------------------------------
def _operands(record: Record) -> list[tuple[Key, Spectrum]]:
    keys = [key for keys in modules_of_contractions(record).values() for key in keys]
    return [(key, record.tensors[key]) for key in keys]


def _judged(record: Record, to: str, scale: float = 1.0, without: Iterable[str] = ()) -> tuple[float, int, float]:
    """Return the share of flushed gradients, the tensors that overflow, and the median signal-to-noise ratio."""
    left_out = set(without)
    flushed = present = 0.0
    overflow, ratios = 0, []
    for key, seen in _operands(record):
        if key.module in left_out or not seen.nonzero:
            continue
        found = effect(seen, to, scale if key.role == "grad" else 1.0)
        overflow += found.overflows
        if math.isfinite(found.signal_to_noise):
            ratios.append(found.signal_to_noise)
        if key.role == "grad":
            flushed, present = flushed + found.flushed * seen.nonzero, present + seen.nonzero
    return flushed / present if present else 0.0, overflow, statistics.median(ratios) if ratios else math.inf


def _fp16(record: Record, window: Window, outside: set[str]) -> FormatVerdict:
    if window.is_unknown:
        _, overflow, ratio = _judged(record, "fp16", 1.0, outside)
        return FormatVerdict("fp16", 0.0, overflow, None, ratio, "not judged: no gradient was recorded", False)
    if window.is_empty:
        _, overflow, ratio = _judged(record, "fp16")
        return FormatVerdict("fp16", 0.0, overflow, None, ratio, "not usable: no loss scale fits any layer", False)
    scale = window.recommended
    flushed, overflow, ratio = _judged(record, "fp16", 2.0**scale, outside)
    rest = f", {len(outside)} layer{'s'[: len(outside) != 1]} in bf16" if outside else ""
    word = f"with a dynamic loss scale{rest}" if record.is_partial else f"with loss scale 2^{scale}{rest}"
    return FormatVerdict("fp16", flushed, overflow, None, ratio, word, True, scale, not outside)


def _sixteen(record: Record, name: str) -> FormatVerdict:
    flushed, overflow, ratio = _judged(record, name)
    return FormatVerdict(name, flushed, overflow, None, ratio, "with fp32 masters", True)


def lost_share(seen: Record | Part, format: str, parameters: Iterable[str]) -> float:
    """Return the share of updates of some parameters that change no weight which is stored in the format."""
    lost = present = 0.0
    for name in parameters:
        updates, weights = seen.updates[name], seen.tensors.get(parameter_key(name, "weight", "step"), Spectrum())
        lost, present = lost + updates.present * lost_updates(updates, weights, format), present + updates.present
    return lost / present if present else 0.0


def _stored(record: Record, name: str) -> FormatVerdict:
    """Weights in the format and no masters."""
    present = [parameter for parameter, one in record.updates.items() if one.present]
    share = lost_share(record, name, present)
    flushed, overflow, ratio = _judged(record, name)
    if not present:
        return FormatVerdict(
            f"pure {name}", flushed, overflow, None, ratio, "not judged: no update was recorded", False
        )
    whole = sum(lost_share(record, name, [one]) >= _LOST_WHOLLY for one in present)
    word = f"STALLS in {whole} of {len(record.updates)} parameters" if whole else "works without masters"
    word = "WILL STALL" if share > _STALLS else word
    return FormatVerdict(f"pure {name}", flushed, overflow, share, ratio, word, not whole and share <= _STALLS)


def _fp8(record: Record, coarse: list[str]) -> FormatVerdict:
    modules = modules_of_contractions(record)
    flushed, overflow, ratio = _judged(record, "e4m3fn@fp32/tensor", without=coarse)
    kept = len(modules) - len(coarse)
    word = f"for {kept} of {len(modules)} layers" if coarse else "for all layers"
    return FormatVerdict("fp8", flushed, overflow, None, ratio, word, kept > 0, is_whole=not coarse)


# -- findings ---------------------------------------------------------------------------------------------------------
def _some(names: Iterable[str]) -> str:
    listed = [name or "the model" for name in names]
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def _lost(record: Record) -> list[Finding]:
    """Return a finding for the parameters for which pure bf16 stalls; an error if they are already stored in bf16."""
    shares = {name: lost_share(record, "bf16", [name]) for name, one in record.updates.items() if one.present}
    lost = _stored(record, "bf16").stalled or 0.0
    stalled = [name for name, share in shares.items() if share >= (_STALLS if lost > _STALLS else _LOST_WHOLLY)]
    how_many = "all" if all(shares[name] >= _LOST_WHOLLY for name in stalled) else f"{lost:.0%} of the"
    stored = [_HALF[dtype] for dtype in record.header.get("dtypes", []) if dtype in _HALF]
    if not stalled:
        return []
    sample = stalled[0]
    weight, update = (record.tensors[parameter_key(sample, one, "step")].maximum for one in ("weight", "update"))
    summary = f"{len(stalled)} of {len(shares)} parameters: {how_many} updates are lost in pure bf16"
    evidence = f"{sample}: |w| up to {weight:.3g}, |update| up to {update:.3g}, needs more than {weight * 2.0**-9:.3g}"
    return [Finding("N101", summary, evidence, tuple(stalled), severity="error" if stored else "")]


def _kept_in_bf16(id: str, found: dict[str, str], what: str) -> list[Finding]:
    """Return a finding for the modules that fp16 does not take, if there are any; `found` says why by module."""
    if not found:
        return []
    first = next(iter(found))
    return [Finding(id, f"{_some(found)}: {what}", f"{first or 'the model'}: {found[first]}", tuple(found))]


def _half_losses(record: Record) -> list[Finding]:
    found = []
    for (module, op), seen in record.ops.items():
        dtype = seen.dtypes.get("input", "")
        if seen.op_class == "wide" and (dtype in _HALF or (module == "" and dtype in ("fp16", "bf16"))):
            summary = f"{op} reads {_HALF.get(dtype, dtype)} ({seen.line or module})"
            found.append(Finding("N310", summary, f"{seen.calls} calls on {dtype}", (module,)))
    return found[:1]


def _faults(record: Record) -> list[Finding]:
    found = []
    for fault in record.part.faults[:1]:
        where = f" of {fault['module']}" if fault["module"] else ""
        summary = f"{failure(fault)}, first in {fault['op'] or 'an unknown operation'}{where}"
        evidence = " ".join(filter(None, [fault["line"], f"{fault['nan']} NaN, {fault['inf']} infinite."]))
        found.append(Finding("N401", summary, evidence, (fault["module"],), change=fault["hint"]))
    return found


def _skipped(record: Record, window: Window) -> list[Finding]:
    skipped, steps = sum(one.skipped for one in record.steps), int(record.sampling.get("steps") or 0)
    if steps < 20 or skipped <= _MANY_SKIPPED * steps:
        return []
    scale = loss_scale_of(record, window) if record.is_partial else f"2^{window.recommended}"
    evidence = f"the window of scales is 2^{window.lowest} to 2^{window.highest}"
    return [Finding("N402", f"{skipped} of {steps} steps were skipped", evidence, change=f"begin with {scale}")]


# -- the policy -------------------------------------------------------------------------------------------------------
def loss_scale_of(record: Record, window: Window) -> LossScale:
    """The loss scale to train with in fp16: the recommended one, from which it moves.

    Where modules were left out, whose gradients may be larger, it is one that the first step finds by trial.
    """
    return DYNAMIC if record.is_partial else LossScale.parse(f"dynamic({2.0**window.recommended!r})")


def _policy(record: Record, window: Window, apart: set[str]) -> Policy:
    """fp16 where it fits, and bf16 where it does not or no gradient told: a preset after rules for single modules."""
    in_fp16 = not window.is_empty and not window.is_unknown
    base = presets.PRESETS["fp16" if in_fp16 else "bf16"].policy
    scale = loss_scale_of(record, window) if in_fp16 else None
    rules = [
        Rule.of("contraction", "norm", where=module, input="bf16", weight="bf16", grad="bf16", output="bf16")
        for module in sorted(apart)
        if module
    ]
    return Policy((*rules, *base.rules), base.parameters, base.table, "profiled", scale)
