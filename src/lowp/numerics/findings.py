"""The findings of a profile: the meaning of each number, the cause, and advice. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from lowp.errors import UnknownName, unknown

__all__ = ["FINDINGS", "Finding", "Kind", "explained"]


@dataclass(frozen=True)
class Kind:
    """One kind of finding, whose number never changes."""

    id: str
    title: str
    meaning: str
    cause: str
    change: str
    source: str


@dataclass(frozen=True)
class Finding:
    """A finding of one profile. `severity`: ``error`` if training suffers, ``warning`` if it may."""

    id: str
    severity: str
    summary: str
    evidence: str
    change: str
    effect: str
    modules: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        """The kind of this finding."""
        return FINDINGS[self.id]

    def document(self) -> dict[str, object]:
        """Plain data."""
        names = ("id", "severity", "summary", "evidence", "change", "effect")
        return {**{name: getattr(self, name) for name in names}, "modules": list(self.modules)}


_MIXED = "Micikevicius et al. 2018, arXiv 1710.03740"
_KINDS = (
    Kind(
        "N101",
        "updates are lost in 16-bit weights",
        "In weights that are stored in this format, without an fp32 copy, nearly no update changes anything.",
        "A format with p bits of significand keeps w + d apart from w only if |d| is at least half "
        "a spacing at w: about "
        "|w| 2^-p, so 2^-9 for bf16 next to 1.0. Weights of normalisations start at exactly 1.0 "
        "and Adam's steps are as "
        "large as the learning rate: they stay 1.0.",
        "Keep fp32 parameters (the presets bf16 and fp16 do), or store 16 bits with "
        "lowp.MasterWeights(optimizer), with "
        "kind='split' for the same memory as fp32, or kind='stochastic' for no copy.",
        f"{_MIXED}, section 3.1; Zamirai et al. 2020, arXiv 2010.06192",
    ),
    Kind(
        "N204",
        "no loss scale fits a layer",
        "The gradients of this layer span more than fp16 does: under every scale some overflow or "
        "too many are flushed.",
        "One layer has much larger gradients than others (the last one, or one without a normalisation), or its own "
        "gradients span more than 2^40.",
        "Keep this layer in bf16, as the policy of the profile does, or normalise its input.",
        f"{_MIXED}, section 3.2",
    ),
    Kind(
        "N205",
        "activations are too large for fp16",
        "A result of the forward pass is beyond 65504, the largest number of fp16, or within a factor of two of it.",
        "Sums of many squares, attention logits without a scale, residual streams that are never normalised.",
        "Keep this layer in bf16, as the policy of the profile does, or divide its input by a constant.",
        "IEEE 754 binary16",
    ),
    Kind(
        "N310",
        "the loss is reduced in 16 bits",
        "A loss or a long sum reads 16-bit numbers: its terms have been rounded to 8 or 11 bits before.",
        "The model's output has 16 bits in autocast, and the loss is computed from it by ops that are not widened.",
        "Call .float() on the model's output before the loss, or compute the loss inside the region of lowp.autocast.",
        "the op lists of torch 2.13",
    ),
    Kind(
        "N401",
        "numbers became infinite or NaN",
        "A loss or a gradient of the run was not finite; the finding names the operation that produced it.",
        "See the operation and its inputs: a logarithm or division of 0, a row that is masked as a whole, an overflow, "
        "bad data, a learning rate that is too large.",
        "Correct that operation: the operations after it only propagate the numbers.",
        "",
    ),
    Kind(
        "N402",
        "the loss scaler skips too many steps",
        "More than one step in ten was skipped because of an overflow: the model did not learn from these batches.",
        "The scale grows again as soon as it has been lowered, or some batches have far larger gradients than others.",
        "Begin with the recommended scale and let it grow slowly: GradScaler(init_scale=..., growth_interval=2000).",
        f"{_MIXED}, section 3.2",
    ),
)
FINDINGS = {kind.id: kind for kind in _KINDS}


def explained(id: str) -> str:
    """Return the full description of a kind of finding; raises UnknownName, with similar names, for another id."""
    kind = FINDINGS.get(id.upper())
    if kind is None:
        raise UnknownName(unknown("finding", id, FINDINGS))
    source = f"\n\nSource: {kind.source}" if kind.source else ""
    return f"{kind.id}: {kind.title}\n\n{kind.meaning}\n\nWhy: {kind.cause}\n\nWhat to do: {kind.change}{source}"
