"""How far log-probabilities in training numerics are from those in which a model is served, and which layers do it."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowp import casts
from lowp.errors import InvalidInput, LowpError
from lowp.formats import FloatFormat
from lowp.inference.quantizing import put, quantize_model, run_batch, unquantized
from lowp.nested import mapped
from lowp.precision import Precision

FORMATS = ("bf16", "fp16", "int8", "fp8")
_CALIBRATED_ON = 8  # batches
_LIKELY = 0.01  # times the most probable class: the probability from which on a class counts among the largest
_FEW_BITS = 4  # elements of a format that is served as packed weights, and not in a region

Forward = Callable[[nn.Module, Any], Any]
Region = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class LayerMismatch:
    """One layer that alone is served in the format: the mean KL divergence that it causes, in nats."""

    layer: str
    kl: float


@dataclass(frozen=True)
class ServedFormat:
    """A format beside training numerics, over all tokens (or examples), in nats.

    * mean: the mean |Δ log-probability| of a class drawn from training's probabilities; largest: of any class at least
      1 % as probable as the most probable one.
    * kl: the mean KL divergence of serving from training; largest_kl: that of the worst token.
    * changed: the share of tokens whose most probable class is another one.
    * layers: those that alone cause the largest divergence on the first batch, the worst first.
    * kept: layers that the format does not serve, with the reasons; failure: why there are no numbers.
    """

    format: str
    tokens: int = 0
    largest: float = math.nan
    mean: float = math.nan
    kl: float = math.nan
    largest_kl: float = math.nan
    changed: float = math.nan
    layers: tuple[LayerMismatch, ...] = ()
    kept: Mapping[str, str] | None = None
    failure: str | None = None

    def __str__(self) -> str:
        if self.failure is not None:
            return f"{self.format}: {self.failure}"
        worst = f"; most by {self.layers[0].layer} ({self.layers[0].kl:.2g})" if self.layers else ""
        return (
            f"{self.format}: |Δ log p| {self.mean:.2g} on average and {self.largest:.2g} at most, KL {self.kl:.2g}, "
            f"{self.changed:.2%} of {self.tokens:,} argmax changed{worst}"
        )


@dataclass(frozen=True)
class ServingMismatch:
    """The rows of all formats, and the numerics of training that they are compared with."""

    training: str
    rows: tuple[ServedFormat, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.rows))

    def document(self) -> dict[str, Any]:
        """Plain data, numbers as numbers."""
        return {"training": self.training, "rows": [asdict(row) for row in self.rows]}


def mismatch(
    model: nn.Module,
    data: Iterable[Any],
    formats: Sequence[str] = FORMATS,
    *,
    training: str = "fp32",
    forward: Forward | None = None,
    dim: int = -1,
    layers: int = 3,
) -> ServingMismatch:
    """Compare the log-probabilities of a model in training numerics with those of formats that serve it.

    `data`: batches as for `quantize_model`; `forward(model, batch)` replaces the call. The result is a tensor of scores
    (logits), a tuple that begins with it, or an object or dictionary with ``logits``; its classes lie along `dim`.
    `training`: the precision whose forward pass is trained. Integers and formats of up to four bits are served by
    `quantize_model`, calibrated on the first 8 batches, all others in the region of their precision. `layers`: how many
    layers to name for each format, each measured alone on the first batch; 0 for none. The model is left as it was.

    Raises InvalidInput for a format that cannot serve, data without a batch, and results without classes.
    """
    batches = list(data) if not isinstance(data, (Tensor, Mapping)) else []
    if not batches:
        raise InvalidInput("data has no batch: give a list of batches, such as [x]")
    chosen = [served_format(format) for format in ([formats] if isinstance(formats, str) else formats)]
    call = _Call(forward, dim)
    was = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            model.eval()
            region = _region(training)
            rows = [_row(model, batches, format, call, region, layers) for format in chosen]
    finally:
        for module, mode in was:
            module.training = mode
    return ServingMismatch(training, tuple(rows))


class _Call:
    """Runs a model on a batch and gives the log-probabilities, fp64 [tokens, classes]."""

    def __init__(self, forward: Forward | None, dim: int) -> None:
        self.forward, self._dim = forward, dim

    def __call__(self, model: nn.Module, batch: Any, region: Region) -> Tensor:
        with region():
            found = run_batch(model, batch, self.forward)
        scores = _scores(found)
        if scores is None or not scores.is_floating_point() or not scores.dim() or scores.shape[self._dim] < 2:
            shape = type(found).__name__ if scores is None else f"a tensor {tuple(scores.shape)}"
            raise InvalidInput(
                f"the model gives {shape}, which has no scores of two classes or more along dim={self._dim}: give "
                "forward=, which returns the logits, or another dim="
            )
        return scores.double().movedim(self._dim, -1).flatten(0, -2).log_softmax(1)


def _scores(found: Any) -> Tensor | None:
    if isinstance(found, Mapping):
        found = found.get("logits")
    elif isinstance(found, (tuple, list)):
        found = found[0] if found else None
    elif not isinstance(found, Tensor):
        found = getattr(found, "logits", None)
    return found if isinstance(found, Tensor) else None


def _is_packed(format: str) -> bool:
    """Whether a format is served by `quantize_model`."""
    try:
        element = casts.parse(format).element
    except LowpError:
        return False
    return not isinstance(element, FloatFormat) or element.bits <= _FEW_BITS


def served_format(format: str) -> str:
    """Return a format of `mismatch`, or raise InvalidInput or UnknownName for one that cannot serve."""
    if _is_packed(format):
        quantize_model(nn.Linear(2, 2), format)
    else:
        Precision(format)
    return format


def _region(precision: str) -> Region:
    return nullcontext if precision == "fp32" else Precision(precision).autocast


# -- one format -------------------------------------------------------------------------------------------------------
def _row(
    model: nn.Module, batches: Sequence[Any], format: str, call: _Call, training: Region, layers: int
) -> ServedFormat:
    kept: Mapping[str, str] = {}
    served, region = model, training
    try:
        if _is_packed(format):
            served = quantize_model(model, format, batches[:_CALIBRATED_ON], forward=call.forward)
            kept = unquantized(served)
        else:
            region = _region(format)
        sums = _Sums()
        for batch in batches:
            sums.add(call(model, batch, training), call(served, batch, region))
        row = replace(sums.row(format), kept=dict(kept))
        if layers:
            row = replace(row, layers=_worst(model, served, batches[0], call, (training, region), layers))
        return row
    except (ArithmeticError, torch.OutOfMemoryError) as error:
        return ServedFormat(format, failure=f"{type(error).__name__}: {error}")


class _Sums:
    """Sums over tokens."""

    def __init__(self) -> None:
        self.tokens = 0
        self._mean = self._kl = self._changed = self._largest = self._largest_kl = 0.0

    def add(self, expected: Tensor, found: Tensor) -> None:
        """Add a batch's log-probabilities in training and in serving; what is not finite is infinitely far away."""
        expected = expected.to(found.device)
        apart = (expected - found).nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        share = expected.exp()
        size = torch.where(share > 0, apart.abs(), 0.0)
        kl = torch.where(share > 0, share * apart, 0.0).sum(1).clamp(min=0.0)
        self.tokens += len(expected)
        self._mean += float((share * size).sum())
        self._kl += float(kl.sum())
        self._changed += float((expected.argmax(1) != found.argmax(1)).sum())
        likely = size[share >= _LIKELY * share.max(1, keepdim=True).values]
        self._largest = max(self._largest, float(likely.max()) if likely.numel() else 0.0)
        self._largest_kl = max(self._largest_kl, float(kl.max()))

    def row(self, format: str) -> ServedFormat:
        """Return the means."""
        count = self.tokens
        return ServedFormat(
            format, count, self._largest, self._mean / count, self._kl / count, self._largest_kl, self._changed / count
        )


def _worst(
    model: nn.Module, served: nn.Module, batch: Any, call: _Call, regions: tuple[Region, Region], count: int
) -> tuple[LayerMismatch, ...]:
    """Return the layers that cause most alone, the worst first."""
    training, region = regions
    expected = call(model, batch, training)
    found = []
    for name in _layers(model):
        if served is model:
            replaced = _cast_alone(model, name, region)
        elif type(served.get_submodule(name)) is type(model.get_submodule(name)):  # kept as it is
            continue
        else:
            replaced = _served_alone(model, served, name)
        with replaced:
            sums = _Sums()
            sums.add(expected, call(model, batch, training))
            found.append(LayerMismatch(name, sums.row("").kl))
    return tuple(sorted((one for one in found if one.kl), key=lambda one: -one.kl)[:count])


def _layers(model: nn.Module) -> Iterator[str]:
    """Yield the layers with weights; an attention, which torch computes in one, as a whole."""
    inside: set[int] = set()
    for name, module in model.named_modules():
        if name and id(module) not in inside and any(True for _ in module.parameters(recurse=False)):
            inside.update(map(id, module.modules()))
            yield name


@contextmanager
def _served_alone(model: nn.Module, served: nn.Module, name: str) -> Iterator[None]:
    """Put the packed form of one layer in its place."""
    before = model.get_submodule(name)
    put(model, name, served.get_submodule(name))
    try:
        yield
    finally:
        put(model, name, before)


@contextmanager
def _cast_alone(model: nn.Module, name: str, region: Region) -> Iterator[None]:
    """Run one layer in a region, whose results go on in the dtype of its input."""
    layer = model.get_submodule(name)
    inner = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with region():
            found = inner(*args, **kwargs)
        like = next((one.dtype for one in args if isinstance(one, Tensor) and one.is_floating_point()), torch.float32)
        return mapped(lambda one: one.to(like) if one.is_floating_point() else one, found)

    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward
