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
from lowp.ops.rows import (
    BY_ITSELF,
    FUSED,
    MADE_OF_PRODUCTS,
    OF_NORM,
    OPS,
    POINTWISE,
    PROMOTED,
    REFUSED,
    WIDE,
    Row,
    runner,
)
from lowp.ops.torch_lists import LISTS
from lowp.policy import Policy, Rule

__all__ = [
    "MADE_OF_PRODUCTS",
    "TABLES",
    "TORCH_POLICIES",
    "Row",
    "is_structural",
    "name_of",
    "op_names",
    "row_of",
    "runner",
]


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

# What moves, describes, compares, makes or fills tensors, and what is not computed in floating point: never cast.
_STRUCTURAL = frozenset(
    """
    __array__ __array_wrap__ __bool__ __complex__ __contains__ __deepcopy__ __dlpack__ __dlpack_device__ __float__
    __format__ __get__ __set__ __delete__ __getitem__ __setitem__ __index__ __int__ __len__ __long__ __nonzero__
    __repr__ __reversed__ __reduce_ex__ __setstate__ __hash__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__
    __xor__ __invert__ __iand__ __ior__ __ixor__ __rand__ __ror__ __rxor__ __lshift__ __rshift__ __ilshift__
    __irshift__ __rlshift__ __rrshift__ __iter__ __str__ __dir__ adjoint alias all allclose any apply_ argmax argmin
    argsort argwhere as_strided atleast_1d atleast_2d atleast_3d autocast_to_full_precision
    autocast_to_reduced_precision backward bernoulli bfloat16 bincount bool broadcast broadcast_tensors broadcast_to
    bucketize byte cartesian_prod cauchy_ cdouble cfloat chalf channel_shuffle char chunk clone coalesce combinations
    complex conj conj_physical const_data_ptr constant_ contiguous copy_ count_nonzero cpu cuda data_ptr dense_dim
    dequantize detach detach_ diag diag_embed diagflat diagonal dim dim_order double dsplit element_size empty
    empty_like empty_strided equal eq expand expand_as exponential_ fill_ fill_diagonal_ flatten flip fliplr flipud
    float frexp full full_like gather ge geometric_ get_device gradcheck greater greater_equal gt half hash_tensor
    hsplit imag index_fill index_select int int_repr ipu is_coalesced is_complex is_conj is_contiguous is_distributed
    is_floating_point is_inference is_neg is_nonzero is_pinned is_same_size is_set_to is_shared is_signed isclose
    isfinite isin isinf isnan isneginf isposinf isreal item kaiming_uniform_ kthvalue le less less_equal log_normal_
    logical_and logical_not logical_or logical_xor long lt map2_ map_ masked_fill masked_select meshgrid mode
    module_load moveaxis movedim mtia multinomial narrow native_channel_shuffle ndimension ne nelement nonzero
    nonzero_static normal normal_ not_equal numel numpy one_hot ones ones_like permute pin_memory pixel_shuffle
    pixel_unshuffle put q_per_channel_axis q_per_channel_scales q_per_channel_zero_points q_scale q_zero_point qscheme
    rand rand_like randint randint_like randn randn_like random_ ravel real record_stream register_hook
    register_post_accumulate_grad_hook repeat repeat_interleave requires_grad_ reshape reshape_as resize resize_
    resize_as resize_as_ resize_as_sparse resolve_conj resolve_neg retain_grad roll rot90 searchsorted select set_
    share_memory_ short signbit size slice sort sparse_dim sparse_mask split split_with_sizes squeeze storage
    storage_offset storage_type stride sum_to_size swapaxes swapdims t take take_along_dim tensor tensor_split tile to
    to_dense to_mkldnn to_sparse tolist topk transpose tril triu type type_as unbind unflatten unfold uniform_ unique
    unique_consecutive unravel_index unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze untyped_storage
    values view view_as view_as_real vsplit xpu zero_ zeros zeros_like crow_indices ccol_indices col_indices
    row_indices indices fold affine_grid affine_grid_generator pad constant_pad_nd
    block_diag histc histogram histogramdd result_type can_cast get_autocast_dtype is_autocast_enabled
    set_autocast_enabled set_autocast_dtype grad row_stack column_stack hstack vstack dstack sym_float sym_int sym_ite
    sym_max sym_min sym_not sym_sum sym_sqrt fft_fftshift fft_ifftshift bitwise_and bitwise_not bitwise_or bitwise_xor
    bitwise_left_shift bitwise_right_shift gcd lcm align_as align_to refine_names rename
    """.split()
)
_STRUCTURAL_SUFFIXES = ("_copy", "_scatter", "_inverse", "_like")
_STRUCTURAL_PREFIXES = tuple("_ is_ sparse_ quantize fbgemm_ sym_ to_ choose_qparams fake_quantize".split())
_STRUCTURAL_MODULES = ("torch.distributed", "torch.foreach", "torch.nn.init")


_known = TABLES["lowp-1"].keys() | ALIASES.keys() | _STRUCTURAL


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
        return name in _STRUCTURAL
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
