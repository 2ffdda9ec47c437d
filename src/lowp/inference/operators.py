"""Served layers as operators of torch: what compilers and exporters see of them, without what is in them.

An operator runs what the layer runs by itself, so that the bits are the same. A layer travels as the text of what it is
beside its tensors; the program that `torch.export` makes of a model can be loaded where this module is imported.
"""

import copy
import functools
import json
from typing import Any

import torch
from torch import Tensor, nn

from lowp.inference.attention import attended, by_kernels
from lowp.inference.convolutions import Geometry, ServedConvolution
from lowp.inference.modules import Int8, Nibble, Served, ServedEmbedding, ServedLinear, Sign, Stored

_KINDS = {one.__name__: one for one in (ServedLinear, ServedConvolution, ServedEmbedding, Int8, Nibble, Sign, Stored)}


@functools.lru_cache(maxsize=4096)
def _empty_layer(text: str) -> tuple[Any, tuple[str, ...]]:
    """A layer without its tensors, and the names of those of its weight."""
    kind, of_layer, kind_of_weight, of_weight, held = json.loads(text)
    layer, weight = (_KINDS[one].__new__(_KINDS[one]) for one in (kind, kind_of_weight))
    nn.Module.__init__(layer)
    nn.Module.__init__(weight)
    if "geometry" in of_layer:
        values: list[Any] = [tuple(one) if isinstance(one, list) else one for one in of_layer["geometry"]]
        of_layer["geometry"] = Geometry(*values)
    vars(layer).update(of_layer)
    vars(weight).update(of_weight)
    layer.weight = weight
    return layer, tuple(held)


def _layer(text: str, held: list[Tensor]) -> Any:
    empty, names = _empty_layer(text)
    layer, weight = copy.copy(empty), copy.copy(empty.weight)
    weight._buffers = dict(zip(names, held, strict=False))
    layer._modules, layer._buffers = {"weight": weight}, {"bias": held[-1] if len(held) > len(names) else None}
    return layer


@torch.library.custom_op("lowp::served", mutates_args=())
def _served(x: Tensor, held: list[Tensor], text: str) -> Tensor:
    layer: Served = _layer(text, held)
    return layer.computed(x).contiguous()


@_served.register_fake
def _(x: Tensor, held: list[Tensor], text: str) -> Tensor:
    layer: Served = _layer(text, held)
    return layer.empty(x).contiguous()


@_served.register_vmap
def _(info: Any, dimensions: Any, x: Tensor, held: list[Tensor], text: str) -> tuple[Tensor, int]:
    return torch.stack([_served(one, held, text) for one in x.unbind(dimensions[0])]), 0


@torch.library.custom_op("lowp::attention_in_bytes", mutates_args=())
def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, highest: int
) -> Tensor:
    return attended(query, key, value, mask, is_causal, scale, functools.partial(by_kernels, highest))


@_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
    batch = torch.broadcast_shapes(*(one.shape[:-2] for one in (query, key, value)))  # type: ignore[no-untyped-call]
    return query.new_empty(*batch, query.shape[-2], value.shape[-1])


@_attention.register_vmap
def _(info: Any, dimensions: Any, *given: Any) -> tuple[Tensor, int]:
    examples = [
        [one if at is None else one.select(at, index) for one, at in zip(given, dimensions, strict=True)]
        for index in range(info.batch_size)
    ]
    return torch.stack([_attention(*one) for one in examples]), 0
