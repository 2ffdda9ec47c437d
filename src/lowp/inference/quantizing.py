"""`quantize_model`: the layers of a trained model in few bits, for inference; and policies that train for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lowp import casts
from lowp.casts import Cast
from lowp.errors import InvalidInput
from lowp.formats import FloatFormat, Format, ScaledFormat
from lowp.inference.attention import ServedAttention, projections
from lowp.inference.calibration import BITS, ActivationRange, check_bits
from lowp.inference.convolutions import ServedConvolution, matrix_of
from lowp.inference.modules import ServedEmbedding, ServedLinear, Weight, packed
from lowp.inference.rounding import SecondMoments, Sensitivity, check_rounding
from lowp.kernels.packed.byte_rows import Range
from lowp.policy import Policy, Rule

_MADE = "_lowp_served"
_REPLACED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding, nn.MultiheadAttention)
_ROLES = ("query", "key", "value", "out")


def quantize_model(
    model: nn.Module,
    format: str | Cast | Format | torch.dtype = "int8",
    calibration_data: Iterable[Any] | None = None,
    *,
    calibration: str = "maximum",
    rounding: str = "nearest",
    bits: int = BITS,
    keep: Iterable[str] = (),
    attention: bool = True,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> nn.Module:
    """Return a copy of a trained model for inference, whose layers hold their weights in `format`.

    Linear, Conv1d, Conv2d, Embedding and MultiheadAttention layers are replaced; `unquantized` lists the other layers
    with weights and the reasons. ``int8``: one scale per row (output channel) of the weight, sums of products in int32.
    The activations of each layer are quantised over a range of its own, determined from `calibration_data` by
    ``maximum``, ``percentile`` (the middle 99.99 %) or ``error`` (least squared error), or, without data, from each
    tensor. They have 7 `bits`, whose sums of pairs always fit 16 bits, or 8. ``int4``, ``mxfp4``, ``nvfp4``, ``e2m1``
    and others of up to 4 bits: packed weights times fp32 activations. ``ternary`` and ``binary``: weights of two bits
    and one, times activations in bytes. Every other format: weights in its dtype or packed, whose values are multiplied
    in fp32.

    With ``rounding="gptq"`` each weight is rounded so that its layer's results on the calibration data change least
    (arXiv 2210.17323), those of embeddings so that the model's results do, by their gradients; convolutions in groups
    are rounded to nearest. Scales are those of the least error, unless the format names a rule, as ``mxfp8:rceil``.

    `calibration_data` is an iterable of at least one batch: a tensor is passed to the model, a tuple or list as its
    arguments, a dictionary as its keyword arguments; `forward(model, batch)` replaces this call. Modules whose name
    matches a pattern in `keep` are not replaced; with ``attention=False`` the products of attention stay fp32. The copy
    is in eval mode, on the CPU; its state_dict holds the packed weights. Raises InvalidInput for an invalid format, for
    data that yield no batch, and for a pattern that matches no module.
    """
    cast = casts.parse(format)
    how = _How(cast, calibration, rounding == "gptq", check_bits(bits), bits, attention)
    _check_format(cast)
    check_rounding(rounding, cast, calibration_data is not None)
    if not isinstance(model, nn.Module):
        raise InvalidInput(f"a model is quantized, not {type(model).__name__}: load a checkpoint into it first")
    if isinstance(calibration_data, (Tensor, Mapping)):
        kind = type(calibration_data).__name__
        raise InvalidInput(f"calibration_data is one batch, a {kind}: give a list of batches, such as [x]")
    ActivationRange(calibration)  # raises for an unknown method before any work
    with torch.inference_mode(False):  # gptq takes gradients of it
        served = copy.deepcopy(model).eval().requires_grad_(False)
    chosen, reasons = _chosen(served, tuple(keep))
    seen = _Seen({}, {})
    if calibration_data is not None:
        seen, read = _calibrated(served, chosen, calibration_data, how, forward)
        reasons |= dict.fromkeys(read, "the model's own code reads its weight, as of tied embeddings")
        chosen = {name: module for name, module in chosen.items() if name not in read}
    for name, module in chosen.items():
        if reason := _unfit(module):
            reasons[name] = reason
            continue
        served = put(served, name, _made(name, module, how, seen).eval())
    made_as = {"format": str(cast), "bits": bits, "attention": attention, "kept": reasons}
    object.__setattr__(served, _MADE, made_as)
    return served


class _How(NamedTuple):
    """What `quantize_model` was asked for."""

    cast: Cast
    calibration: str
    by_moments: bool
    highest: int
    bits: int
    attention: bool


def _chosen(model: nn.Module, keep: tuple[str, ...]) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The layers to replace, and the reasons of the others with weights."""
    names = {name: module for name, module in model.named_modules() if type(module) in _REPLACED}
    for pattern in keep:
        if not any(fnmatchcase(name, pattern) for name, _ in model.named_modules()):
            raise InvalidInput(f"no module is named {pattern}; layers are {', '.join(names) or 'none'}")
    reasons = {name: "asked for (keep)" for name in names if any(fnmatchcase(name, one) for one in keep)}
    reasons |= {name: f"{type(module).__name__} has no packed form" for name, module in _others(model, names)}
    return {name: module for name, module in names.items() if name not in reasons}, reasons


def unquantized(model: nn.Module) -> Mapping[str, str]:
    """The layers with weights that `quantize_model` did not replace, with the reasons."""
    reasons: Mapping[str, str] = made_of(model)["kept"]
    return reasons


def made_of(model: nn.Module) -> Mapping[str, Any]:
    """What `quantize_model` was asked for: format, bits, attention, and the layers it kept."""
    found: Mapping[str, Any] | None = getattr(model, _MADE, None)
    if found is None:
        raise InvalidInput(f"{type(model).__name__} is not a model from lowp.quantize_model, which is needed here")
    return found


def training_policy(format: str | Cast | Format) -> Policy:
    """The policy under which `lowp.autocast` and `lowp.Precision` train for `quantize_model` in this format.

    Every contraction reads its weight rounded to the format, and with int8 its input too; gradients pass straight
    through the rounding (Bengio et al. 2013, arXiv 1308.3432). Weights and gradients stay fp32.
    If a format clips, weights beyond half a step above its largest value get no gradient (Hubara et al. 2016, arXiv
    1609.07061): in ternary and binary, whose scale is a mean and not the maximum.
    """
    cast = casts.parse(format)
    rounded = cast if str(cast) == "int8" else None
    return Policy((Rule(("contraction",), input=rounded, weight=cast),))


def _check_format(cast: Cast) -> None:
    element = cast.element
    if isinstance(element, FloatFormat) and not element.signed:
        raise InvalidInput(f"{cast} has no negative numbers, which weights need: give a signed format")
    if cast.scaling is not None and cast.scaling.kind not in ("current", "static"):
        raise InvalidInput(f"{cast}: a {cast.scaling.kind} scale depends on earlier tensors: give a cast without it")
    if isinstance(cast.format, ScaledFormat) and cast.format.scope.kind == "channel":
        raise InvalidInput(f"{cast}: the scope of weights must be row, not channel")


def _others(model: nn.Module, names: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Layers that are not replaced and have a weight matrix of their own."""
    inside = {id(one) for module in names.values() for one in module.modules()}
    for name, module in model.named_modules():
        if id(module) not in inside and any(one.ndim > 1 for one in module.parameters(recurse=False)):
            yield name, module


def put(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Return the model with a module in the place of the layer of this name; '' is the model itself."""
    if not name:
        return module
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)
    return model


def _unfit(module: nn.Module) -> str:
    """Return why a layer is not replaced; '' if it is."""
    if any(parameter.dtype not in (torch.float32, torch.float16, torch.bfloat16) for parameter in module.parameters()):
        return "its parameters are neither fp32, fp16 nor bf16"
    if not all(bool(parameter.isfinite().all()) for parameter in module.parameters()):
        return "its parameters are not finite"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "max_norm writes its weight in the forward pass"
    if isinstance(module, nn.MultiheadAttention):
        if not module._qkv_same_embed_dim or module.bias_k is not None or module.add_zero_attn:
            return "keys and values of other widths, or added to"
    return ""


# -- calibration ------------------------------------------------------------------------------------------------------
def _calibrated(
    model: nn.Module,
    chosen: Mapping[str, nn.Module],
    data: Iterable[Any],
    how: _How,
    forward: Callable[[nn.Module, Any], Any] | None,
) -> tuple[_Seen, set[str]]:
    """What passed every place, and the layers whose weight is read by others' code.

    A place is a layer's name, of attention with query, key, value and out.
    """
    ranges: dict[str, ActivationRange] = {}
    moments: dict[str, SecondMoments] = {}

    def watch(name: str, layer: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        x = arguments[0] if arguments else next(iter(keywords.values()), None)
        if isinstance(x, Tensor) and x.is_floating_point():
            ranges.setdefault(name, ActivationRange(how.calibration)).add(x)
            if how.by_moments:
                moments.setdefault(name, SecondMoments()).add(layer, x.detach())

    batches, readers, sensitivity = 0, _Readers(chosen), Sensitivity()
    with ExitStack() as stack, torch.inference_mode(False), torch.set_grad_enabled(how.by_moments), readers:
        for name, module in chosen.items():
            if how.by_moments and isinstance(module, nn.Embedding):
                stack.callback(module.register_forward_hook(partial(sensitivity.after, name)).remove)
            if isinstance(module, nn.MultiheadAttention) and not _unfit(module):
                model, watched = _opened(model, name, module, stack)
            else:
                watched = {name: module}
            for place, layer in watched.items():
                hook = layer.register_forward_pre_hook(partial(watch, place), with_kwargs=True)
                stack.callback(hook.remove)
        for batch in data:
            sensitivity.add(run_batch(model, batch, forward), moments)
            batches += 1
    if not batches:
        raise InvalidInput("calibration_data has no batch: give one, or omit it for dynamic ranges")
    if not ranges and any(isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)) for module in chosen.values()):
        raise InvalidInput("no layer was called during calibration: give batches, or forward=, that run the model")
    found = {name: one.range(how.highest) for name, one in ranges.items() if one.anything}
    return _Seen(found, moments), readers.found


class _Readers(TorchFunctionMode):
    """Finds the layers whose weight is an operand of another function than theirs: a packed weight is none."""

    _OWN: Mapping[type, Any] = {nn.Embedding: F.embedding, nn.Linear: F.linear}

    def __init__(self, chosen: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.found: set[str] = set()
        self._layers: dict[int, dict[str, Any]] = {}  # by weight, which several may share: a layer's own function
        for name, module in chosen.items():
            if type(module) in self._OWN:
                self._layers.setdefault(id(module.weight), {})[name] = self._OWN[type(module)]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for one in (*args, *kwargs.values()):
            layers = self._layers.get(id(one))
            if layers is not None and func not in layers.values():
                self.found.update(layers)
        return func(*args, **kwargs)


def _opened(
    model: nn.Module, name: str, module: nn.MultiheadAttention, stack: ExitStack
) -> tuple[nn.Module, dict[str, nn.Module]]:
    """Put four plain layers in the place of an attention, which torch computes in one, until the stack is left."""
    layers = []
    for weight, bias in projections(module):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        layer.weight = nn.Parameter(weight.detach(), False)
        layer.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), False))
        layers.append(layer)
    opened = ServedAttention(layers, module, BITS, False)
    watched: dict[str, nn.Module] = {f"{name}.{role}": layer for role, layer in zip(_ROLES, layers, strict=True)}
    stack.callback(put, model, name, module)
    return put(model, name, opened), watched


def run_batch(model: nn.Module, batch: Any, forward: Callable[[nn.Module, Any], Any] | None) -> Any:
    """Run a model on a batch, as `quantize_model` does."""
    if forward is not None:
        return forward(model, batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


# -- layers -----------------------------------------------------------------------------------------------------------
class _Seen(NamedTuple):
    """What calibration has found, by places."""

    ranges: Mapping[str, Range]
    moments: Mapping[str, SecondMoments]

    def packed(self, place: str, weight: Tensor, how: _How) -> Weight:
        """The weight of a place in its format."""
        moments = self.moments.get(place)
        rounded = weight if moments is None else moments.rounded(weight, how.cast)
        return packed(rounded, how.cast, self.ranges.get(place), how.highest)


def _made(name: str, module: nn.Module, how: _How, seen: _Seen) -> nn.Module:
    if isinstance(module, nn.Linear):
        return ServedLinear(seen.packed(name, module.weight, how), module.bias)
    if isinstance(module, nn.Embedding):
        return ServedEmbedding(seen.packed(name, module.weight, how), None)
    if isinstance(module, nn.MultiheadAttention):
        layers = [
            ServedLinear(seen.packed(f"{name}.{role}", weight, how), bias)
            for role, (weight, bias) in zip(_ROLES, projections(module), strict=True)
        ]
        return ServedAttention(layers, module, how.bits, how.attention and str(how.cast) == "int8")
    assert isinstance(module, (nn.Conv1d, nn.Conv2d))
    return ServedConvolution(seen.packed(name, matrix_of(module), how), module)
