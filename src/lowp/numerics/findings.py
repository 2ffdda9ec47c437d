"""The findings of a profile and of a monitor: the meaning of each number, the cause, and advice. No torch."""

from dataclasses import dataclass

from lowp.errors import UnknownName, unknown


@dataclass(frozen=True)
class Kind:
    """One kind of finding, whose number never changes."""

    id: str
    title: str
    meaning: str
    cause: str
    change: str
    source: str
    brief: str = ""  # what to do, in a line

    @property
    def advice(self) -> str:
        """What to do, in a line."""
        return self.brief or self.change


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
        "Keep fp32 parameters, or wrap the optimizer in lowp.MasterWeights.",
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
        "Keep this layer in bf16, or divide its input by a constant.",
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
        "Correct that layer: what comes after it only passes the numbers on.",
    ),
    Kind(
        "N402",
        "the loss scaler skips too many steps",
        "More than one step in ten was skipped because of an overflow: the model did not learn from these batches.",
        "The scale grows again as soon as it has been lowered, or some batches have far larger gradients than others.",
        "Begin with the recommended scale and let it grow slowly: GradScaler(init_scale=..., growth_interval=2000).",
        f"{_MIXED}, section 3.2",
        "Begin with a lower scale and let it grow slowly.",
    ),
    Kind(
        "N102",
        "a layer gets no gradient",
        "The optimizer holds these parameters, and their gradient is missing or zero in step after step.",
        "A detach(), a torch.no_grad() or requires_grad_(False) cuts the graph; the result is not used; an "
        "activation behind the layer is dead.",
        "Look for what cuts the graph behind the layer; take parameters that are not meant to learn out of the "
        "optimizer.",
        "",
        "Look for a detach(), no_grad() or dead activation behind it.",
    ),
    Kind(
        "N103",
        "updates are as large as the weights",
        "One step changes a weight by a third of its size and more, in step after step.",
        "The learning rate is too large, or warm-up is missing, or the gradients are not divided by a loss scale "
        "or by the number of accumulated batches.",
        "Lower the learning rate, or clip the gradients; updates of about a thousandth of the weights are usual.",
        "",
        "Lower the learning rate, or clip the gradients.",
    ),
    Kind(
        "N104",
        "weights shrink to nothing",
        "The weights of this layer have less than a sixteenth of the size that they had when the monitor began.",
        "A weight decay that is too large beside the gradients; a learning rate that multiplies it (AdamW decays "
        "by lr * weight_decay in each step).",
        "Lower the weight decay, or leave this layer out of it.",
        "Loshchilov and Hutter 2019, arXiv 1711.05101",
        "Lower its weight decay.",
    ),
    Kind(
        "N206",
        "fp16 gradients without a loss scale",
        "Most numbers of a gradient in fp16 are below 2^-14, where fp16 keeps fewer bits, and below 2^-25 becomes "
        "zero; nothing scales the loss.",
        "fp16 autocast without a GradScaler, or one that the script never calls.",
        "Scale the loss: lowp.GradScaler() or torch.amp.GradScaler(), or compute in bf16.",
        "Micikevicius et al. 2018, arXiv 1710.03740, section 3.2",
        "Scale the loss by a GradScaler, or use bf16.",
    ),
    Kind(
        "N207",
        "the loss scale starts anew",
        "The loss scale jumped, or begins anew while the optimizer goes on from a checkpoint.",
        "The checkpoint has no state of the scaler, or the script does not load it: the first steps after each "
        "start overflow and are skipped.",
        "Save scaler.state_dict() with the checkpoint and load it before the first step.",
        "",
        "Save and load scaler.state_dict() with the checkpoint.",
    ),
    Kind(
        "N208",
        "gradients are clipped while they are scaled",
        "The norm of all gradients is the same in each step, and times the loss scale it is the limit of the clipping.",
        "clip_grad_norm_ runs before scaler.unscale_(optimizer): the gradients that it limits are still "
        "multiplied by the loss scale.",
        "Call scaler.unscale_(optimizer) before clip_grad_norm_.",
        "the documentation of torch.amp, on gradient clipping",
        "Call scaler.unscale_(optimizer) before clipping.",
    ),
    Kind(
        "N301",
        "activations grow",
        "The largest result of this layer is many times what it was when the monitor began, and large.",
        "A residual stream without a normalisation, attention logits without a limit, a learning rate that is too "
        "large.",
        "Normalise the input of the layer (for attention, queries and keys), or lower the learning rate; keep the "
        "layer out of fp16.",
        "",
        "Normalise its input, or lower the learning rate; keep it out of fp16.",
    ),
    Kind(
        "N302",
        "a layer gives only zeros",
        "Every result of this layer is zero in step after step: no gradient passes it.",
        "A ReLU whose inputs have all become negative, often after one step that was too large; an input that is zero.",
        "Lower the learning rate or clip the gradients, and start from a checkpoint before this; a LeakyReLU or "
        "GELU cannot die.",
        "",
        "Return to an earlier checkpoint with a lower learning rate or clipping.",
    ),
    Kind(
        "N303",
        "numbers are cut off under a shared exponent",
        "In most writes of this tensor a number was larger than its shared exponent can hold.",
        "The tensor grows faster than the exponent is predicted, or two kinds of data take turns at one place.",
        "Lower the learning rate; compute the two kinds in modules of their own; or keep the layer in bf16 by a rule.",
        "Koster et al. 2017, arXiv 1711.02213",
        "Lower the learning rate, or keep it in bf16 by a rule.",
    ),
    Kind(
        "N403",
        "the loss jumps",
        "A loss was several times as large as each of those before it.",
        "A batch with bad data, a learning rate that is too large, or an overflow in 16 bits that clipping has hidden.",
        "Look at the batch of this step; clip the gradients; lower the learning rate.",
        "",
        "Look at the batch of that step; clip the gradients.",
    ),
    Kind(
        "N404",
        "accumulated batches are added and not averaged",
        "Several backward passes run before each step, and each adds the gradient of the mean of its batch: the "
        "sum is that many times too large.",
        "The loss is not divided by the number of accumulated batches.",
        "Divide the loss by the number of batches before backward(), or the gradients before the step.",
        "",
        "Divide the loss by the number of batches before backward().",
    ),
    Kind(
        "N501",
        "a dtype has changed",
        "A parameter, or a state of the optimizer, has another dtype than in the step before.",
        "load_state_dict casts the state of an optimizer to the dtype of its parameters; "
        "load_state_dict(assign=True), half() and to() change parameters.",
        "Convert the model before the optimizer is made, and load states of the same dtypes.",
        "",
        "Load states in the dtypes that they were saved in, before the optimizer is made.",
    ),
    Kind(
        "N502",
        "parameters are not trained any more",
        "A parameter that had been trained is no longer the model's, or no longer takes gradients.",
        "load_state_dict(assign=True) and new layers replace parameters, and the optimizer keeps the old ones; "
        "requires_grad_(False) was not taken back.",
        "Make the optimizer after loading, or load without assign=True; call requires_grad_(True) after an "
        "evaluation that has frozen it.",
        "",
        "Make the optimizer anew, or take back requires_grad_(False).",
    ),
    Kind(
        "N503",
        "a rank has other weights",
        "The ranks of DistributedDataParallel should hold the same weights, bit for bit, and do not.",
        "A checkpoint that only one rank has loaded after the model was wrapped, a step that one rank skipped, "
        "parameters changed outside of the optimizer.",
        "Load checkpoints on all ranks, or before the model is wrapped; let all ranks skip together.",
        "",
        "Load the checkpoint on every rank; let all ranks skip together.",
    ),
    Kind(
        "N504",
        "an average of the weights does not move",
        "The averaged weights (EMA, SWA) are the same in look after look, while the weights that they average move.",
        "update_parameters is not called, or the average is stored in 16 bits, whose rounding takes each small "
        "step away.",
        "Call update_parameters after each step, and keep the average in fp32.",
        "",
        "Call update_parameters after each step, and keep the average in fp32.",
    ),
    Kind(
        "N505",
        "two computations of the same numbers differ",
        "Two results that should agree, such as the log-probabilities of rollout and training, are apart.",
        "The two run in different formats, with other kernels, with other weights (not synchronised since the "
        "last step), or with dropout in one of them.",
        "Compute both in the same precision and with the same weights, or correct by their ratio.",
        "",
        "Compute both in the same precision and with the same weights.",
    ),
)
FINDINGS = {kind.id: kind for kind in sorted(_KINDS, key=lambda kind: kind.id)}


def explained(id: str) -> str:
    """Return the full description of a kind of finding; raises UnknownName, with similar names, for another id."""
    kind = FINDINGS.get(id.upper())
    if kind is None:
        raise UnknownName(unknown("finding", id, FINDINGS))
    source = f"\n\nSource: {kind.source}" if kind.source else ""
    return f"{kind.id}: {kind.title}\n\n{kind.meaning}\n\nWhy: {kind.cause}\n\nWhat to do: {kind.change}{source}"
