"""The op tables: one row per op with its class and its runner, and torch's own lists as tables of the same shape.

`lowp-1` is the same on every device: the CUDA lists of torch 2.13, except that norms and softmax read 16 bits, compute
in fp32 and write 16 bits, and that ops without a 16-bit kernel on any device (FFTs, decompositions) compute in fp32.
``torch-2.13-cpu`` and ``torch-2.13-cuda`` are torch's lists unchanged.

An op has one name for all its spellings: ``matmul`` is torch.matmul, Tensor.matmul, ``@``, the in-place and out= forms,
and torch.ops.aten.matmul. `row_of` finds the row of a function.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.overrides

from lowp.compat import remembered
from lowp.ops.rows import BY_ITSELF, FUSED, OF_NORM, OPS, POINTWISE, PROMOTED, REFUSED, WIDE, Row
from lowp.ops.torch_lists import LISTS, STRUCTURAL
from lowp.policy import Policy, Rule

# another name for the same op; torch.norm has its namesake's name because "norm" is a class of ops
ALIASES = {
    "norm": "linalg_norm",
    **{"dsmm": "mm", "spmm": "mm", "hspmm": "mm", "hsmm": "mm", "smm": "mm", "_sparse_mm": "mm"},
    **{"saddmm": "addmm", "sspaddmm": "addmm", "_sparse_addmm": "addmm", "sparse_sampled_addmm": "addmm"},
    **{"linalg_matmul": "matmul", "__matmul__": "matmul", "__imatmul__": "matmul", "concat": "cat"},
    **{"concatenate": "cat", "linalg_cross": "cross", "ger": "outer"},
    **{"special_softmax": "softmax", "_softmax": "softmax", "special_log_softmax": "log_softmax"},
    **{"_log_softmax": "log_softmax", "special_logsumexp": "logsumexp", "special_expm1": "expm1"},
    **{"special_log1p": "log1p", "special_erfinv": "erfinv", "arccos": "acos", "arcsin": "asin", "arctan2": "atan2"},
    **{"arctan": "atan", "arccosh": "acosh", "arcsinh": "asinh", "arctanh": "atanh", "special_sinc": "sinc"},
    **{"multiply": "mul", "divide": "div", "true_divide": "div", "subtract": "sub", "negative": "neg"},
    **{"absolute": "abs", "clip": "clamp", "special_expit": "sigmoid", "cross_entropy_loss": "cross_entropy"},
}
_OPERATORS = {"floordiv": "floor_divide", "truediv": "div", "mod": "remainder", "invert": "bitwise_not"}


# what torch's lists do, as rows
_LISTED = {
    "lower_precision_fp": Row("", "contraction", "generic:lowered", "input weight"),
    "promote": PROMOTED,
    "banned": REFUSED,
    **dict.fromkeys(("fp32", "fp32_set_opt_dtype", "fp32_append_dtype"), WIDE),
}


def _bare(names: tuple[str, ...]) -> Iterator[str]:
    """Yield the names that ops are known by, without their overloads, each once."""
    bare = (name.partition(".")[0] for name in names)
    yield from dict.fromkeys(ALIASES.get(name, name) for name in bare)


def _as(row: Row, name: str) -> Row:
    """Return a row with the name of an op, and what is known of the op whatever runs it."""
    known = OPS.get(name, POINTWISE)
    at_site = FUSED if known.at_site in (BY_ITSELF, OF_NORM) else known.at_site
    return replace(row, name=name, at_site=at_site, masked=known.masked)


def _of_torch(device: str) -> dict[str, Row]:
    """Return torch's lists as rows; ops on no list are pointwise."""
    rows: dict[str, Row] = {}
    for kind, names in LISTS[device].items():
        for name in _bare(names):
            lowered = OPS[name] if kind == "lower_precision_fp" and name in OPS else None
            rows[name] = lowered if lowered is not None and lowered.is_contraction else _as(_LISTED[kind], name)
    # Python functions that stand before listed ops and are seen in their place
    for name in ("multi_head_attention_forward", "lstm", "gru", "rnn_tanh", "rnn_relu", "__rmatmul__"):
        rows[name] = OPS[name]
    if "upsample_nearest1d" in rows:
        rows["interpolate"] = OPS["interpolate"]
    return rows


TABLES: dict[str, dict[str, Row]] = {
    "lowp-1": {name: row for name, row in OPS.items() if row.op_class != "pointwise"},
    "torch-2.13-cpu": _of_torch("cpu"),
    "torch-2.13-cuda": _of_torch("cuda"),
}


def _torch_policy(device: str, cast: str) -> Policy:
    """Return torch's own autocast on a device as a policy: its lists, and casts to one 16-bit format and to fp32."""
    rules = (Rule.of("contraction", input=cast, weight=cast, grad=cast, output=cast), Rule.of("wide", input="fp32"))
    return Policy(rules, table=f"torch-2.13-{device}", name=f"torch-2.13-{device}")


TORCH_POLICIES = {policy.name: policy for policy in (_torch_policy("cpu", "bf16"), _torch_policy("cuda", "fp16"))}


# -- functions ----------------------------------------------------------------------------------------------------

# of further names of functions that are never cast
_STRUCTURAL_SUFFIXES = ("_copy", "_scatter", "_inverse", "_like")
_STRUCTURAL_PREFIXES = tuple("_ is_ sparse_ quantize fbgemm_ sym_ to_ choose_qparams fake_quantize".split())
_STRUCTURAL_MODULES = ("torch.distributed", "torch.foreach", "torch.nn.init")


_known = TABLES["lowp-1"].keys() | ALIASES.keys() | STRUCTURAL


@remembered
def name_of(function: Callable[..., Any]) -> str:
    """Return the name of an op: without namespace, overload, in-place underscore and operator dunders.

    Functions of custom operators, torch.distributed, torch.foreach and torch.nn.init get a name that begins with an
    underscore: they are never cast.
    """
    if type(function).__module__ == "torch._ops":  # aten.mm or aten.mm.default
        namespace, _, name = str(function).partition(".")
        name = name.partition(".")[0] if namespace == "aten" else "_" + namespace
    else:
        name = str(getattr(function, "__name__", function))
        if isinstance(function, FunctionType) and str(function.__module__).startswith(_STRUCTURAL_MODULES):
            name = "_" + name
    if name not in _known:
        name = _without_affixes(name)
    return ALIASES.get(name, name)


def _without_affixes(name: str) -> str:
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        candidates = [name, name[1:]] if name[:1] in ("r", "i") else [name]
        for one in candidates:
            if one in _OPERATORS or hasattr(torch, one):
                return _OPERATORS.get(one, one)
        return name
    return name[:-1] if name.endswith("_") and len(name) > 1 else name


def is_structural(name: str) -> bool:
    """Whether an op moves, describes, compares, makes or fills tensors, so that no rule ever applies to it."""
    if name in _known:
        return name in STRUCTURAL
    return name.startswith(_STRUCTURAL_PREFIXES) or name.endswith(_STRUCTURAL_SUFFIXES)


def row_of(function: Callable[..., Any], table: str = "lowp-1") -> Row | None:
    """Return the row of a function in a table, a pointwise row if it has none, or None for a structural function."""
    name = name_of(function)
    if (row := TABLES[table].get(name)) is not None:
        return row
    if is_structural(name):
        return None
    return _as(POINTWISE, name)


@cache
def _overridable() -> frozenset[str]:
    """Return the names of the ops of all functions that a function mode sees."""
    return frozenset(map(name_of, torch.overrides.get_testing_overrides()))


def op_names(table: str = "lowp-1") -> list[str]:
    """Return every name that a rule can use: the table's rows, then the pointwise ops."""
    rows = TABLES[table]
    return [*rows, *sorted(name for name in _overridable() if name not in rows and not is_structural(name))]
