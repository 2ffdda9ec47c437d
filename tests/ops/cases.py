"""The ops of the runners as a table: how each is called, and the shapes of its operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lowp.ops.call import Call
from lowp.ops.table import row_of
from lowp.policy import Rule

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def sixteen_bit(cast: str, **more: Any) -> Rule:
    """Return the rule of the presets fp16 and bf16 for contractions, norms and softmax."""
    return Rule.of(**{"input": cast, "weight": cast, "grad": cast, "output": cast, **more})


class Case(NamedTuple):
    """A call: the function, the shapes of its tensors, its other arguments, and which tensor (if any) is a bias."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    kwargs: dict[str, Any]
    bias: int | None = None
    leading: tuple[Any, ...] = ()

    def tensors(self, seed: int = 0) -> list[Tensor]:
        """Return its tensors, normally distributed."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator) for shape in self.shapes]

    def call(self, *tensors: Tensor) -> Any:
        """Call the function itself."""
        return self.function(*self.leading, *tensors, **self.kwargs)

    def run(self, rule: Rule, *tensors: Tensor) -> Any:
        """Call its runner under a rule."""
        return under(rule, self.function, *self.leading, *tensors, **self.kwargs)


def under(rule: Rule, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function as in a region with this rule."""
    row = row_of(function)
    assert row is not None
    return row.run(rule)(Call(row.name, function, args, kwargs, rule))


def _multi_dot(*matrices: Tensor) -> Tensor:
    result: Tensor = torch.linalg.multi_dot(matrices)
    return result


_MATMUL = {
    "1x2": ((6,), (6, 7)),
    "2x1": ((5, 6), (6,)),
    "1x1": ((6,), (6,)),
    "2x2": ((5, 6), (6, 7)),
    "3x2": ((3, 5, 6), (6, 7)),
    "3x3": ((3, 5, 6), (3, 6, 7)),
    "4x3": ((2, 3, 5, 6), (3, 6, 7)),
    "broadcast": ((2, 1, 5, 6), (3, 6, 7)),
    "broadcast 1": ((1, 5, 6), (3, 6, 7)),
    "4x1": ((2, 3, 5, 6), (6,)),
    "1x3": ((6,), (3, 6, 7)),
    "large": ((64, 256), (256, 128)),
    "one": ((1, 1), (1, 1)),
}
_EINSUM = {
    "bij,bjk->bik": ((2, 3, 4), (2, 4, 5)),
    "ij,jk": ((3, 4), (4, 5)),
    "...i,oi->...o": ((2, 3, 4), (5, 4)),
    "ij,ij->": ((3, 4), (3, 4)),
    "i,j->ij": ((3,), (4,)),
    "ii,ij->j": ((3, 3), (3, 4)),
    "ij,kl->jl": ((2, 3), (4, 5)),
    "bij,bjk->bki": ((1, 3, 4), (2, 4, 5)),
    "...ij,...jk->...ik": ((2, 1, 3, 4), (5, 4, 2)),
}

CONTRACTIONS: dict[str, Case] = {
    "linear": Case(F.linear, ((7, 5, 64), (33, 64)), {}),
    "linear bias": Case(F.linear, ((70, 64), (33, 64), (33,)), {}, 2),
    "linear of one row": Case(F.linear, ((64,), (33, 64), (33,)), {}, 2),
    "linear of one output": Case(F.linear, ((5, 64), (64,)), {}),
    **{f"matmul {name}": Case(torch.matmul, shapes, {}) for name, shapes in _MATMUL.items()},
    "Tensor.matmul": Case(torch.Tensor.matmul, ((5, 6), (6, 7)), {}),
    "@": Case(torch.Tensor.__matmul__, ((5, 6), (6, 7)), {}),
    "mm": Case(torch.mm, ((5, 6), (6, 7)), {}),
    "mv": Case(torch.mv, ((5, 6), (6,)), {}),
    "bmm": Case(torch.bmm, ((4, 5, 6), (4, 6, 7)), {}),
    "dot": Case(torch.dot, ((6,), (6,)), {}),
    "addmm": Case(torch.addmm, ((7,), (5, 6), (6, 7)), {"beta": 0.5, "alpha": 3}, 0),
    "addmm method": Case(torch.Tensor.addmm, ((5, 7), (5, 6), (6, 7)), {}, 0),
    "addmm without input": Case(torch.addmm, ((5, 7), (5, 6), (6, 7)), {"beta": 0, "alpha": 2}, 0),
    "addmv": Case(torch.addmv, ((5,), (5, 6), (6,)), {}, 0),
    "addr": Case(torch.addr, ((5, 6), (5,), (6,)), {}, 0),
    "addbmm": Case(torch.addbmm, ((5, 7), (4, 5, 6), (4, 6, 7)), {}, 0),
    "baddbmm": Case(torch.baddbmm, ((4, 5, 7), (4, 5, 6), (4, 6, 7)), {"beta": 2}, 0),
    **{f"einsum {text}": Case(torch.einsum, shapes, {}, leading=(text,)) for text, shapes in _EINSUM.items()},
    "tensordot": Case(torch.tensordot, ((3, 4, 5), (4, 5, 6)), {}),
    "tensordot dims": Case(torch.tensordot, ((3, 4, 5), (5, 6, 4)), {"dims": ([1, 2], [2, 0])}),
    "inner": Case(torch.inner, ((3, 5), (4, 5)), {}),
    "outer": Case(torch.outer, ((3,), (4,)), {}),
    "vecdot": Case(torch.linalg.vecdot, ((3, 5), (3, 5)), {}),
    "conv1d": Case(F.conv1d, ((4, 6, 13), (8, 6, 3), (8,)), {"padding": 1, "stride": 2}, 2),
    "conv2d": Case(F.conv2d, ((4, 6, 12, 12), (8, 6, 3, 3), (8,)), {"padding": 1}, 2),
    "conv2d groups": Case(
        F.conv2d,
        ((4, 6, 13, 12), (8, 3, 3, 2)),
        {"padding": (1, 2), "stride": (2, 1), "groups": 2, "dilation": (1, 2)},
    ),
    "conv2d same": Case(F.conv2d, ((2, 6, 9, 8), (4, 6, 3, 5)), {"padding": "same"}),
    "conv2d valid": Case(F.conv2d, ((6, 13, 12), (8, 6, 2, 3)), {"padding": "valid"}),
    "conv3d": Case(F.conv3d, ((2, 6, 5, 7, 6), (8, 6, 3, 2, 2)), {"padding": 1, "stride": 2}),
    "conv_transpose1d": Case(
        F.conv_transpose1d, ((4, 6, 13), (6, 8, 3), (8,)), {"padding": 1, "stride": 2, "output_padding": 1}, 2
    ),
    "conv_transpose2d": Case(
        F.conv_transpose2d, ((4, 6, 13, 5), (6, 8, 3, 2)), {"padding": 1, "stride": 2, "groups": 2, "output_padding": 1}
    ),
    "conv_transpose3d": Case(F.conv_transpose3d, ((2, 6, 5, 7, 6), (6, 8, 3, 2, 2)), {"padding": 1, "stride": 2}),
    "conv_tbc": Case(torch.conv_tbc, ((9, 2, 6), (3, 6, 8), (8,)), {"pad": 1}, 2),
    "attention": Case(F.scaled_dot_product_attention, ((2, 4, 9, 8), (2, 4, 11, 8), (2, 4, 11, 8)), {}),
    "attention causal": Case(
        F.scaled_dot_product_attention, ((2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 9, 8)), {"is_causal": True, "scale": 0.3}
    ),
    "attention masked": Case(
        F.scaled_dot_product_attention,
        ((2, 4, 9, 8), (2, 4, 11, 8), (2, 4, 11, 6)),
        {"attn_mask": torch.arange(11).remainder(3).ne(1).expand(9, 11)},
    ),
    "attention grouped": Case(
        F.scaled_dot_product_attention, ((2, 4, 9, 8), (2, 2, 11, 8), (2, 2, 11, 8)), {"enable_gqa": True}
    ),
}
# contracted in pairs, each intermediate rounded: equal to the definition pair by pair, not as a whole
CHAINS: dict[str, Case] = {
    "einsum of three": Case(torch.einsum, ((2, 3), (5, 3, 4), (2, 4)), {}, leading=("bi,oij,bj->bo",)),
    "bilinear": Case(F.bilinear, ((3, 5), (3, 4), (6, 5, 4), (6,)), {}, 3),
    "multi_dot": Case(_multi_dot, ((3, 5), (5, 4), (4, 6), (6, 2)), {}),
}
