"""The op tables: one row per op with its class and its runner, and torch's own lists as tables of the same shape.

`lowp-1` is the same on every device: the CUDA lists of torch 2.13, except that norms and softmax read 16 bits, compute
in fp32 and write 16 bits, and that ops without a 16-bit kernel on any device (FFTs, decompositions) compute in fp32.
``torch-2.13-cpu`` and ``torch-2.13-cuda`` are torch's lists unchanged.

An op has one name for all its spellings: ``matmul`` is torch.matmul, Tensor.matmul, ``@``, the in-place and out= forms,
and torch.ops.aten.matmul. `row_of` finds the row of a function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
import torch.overrides

from lowp.compat import remembered
from lowp.ops.call import Call, Quick
from lowp.ops.torch_lists import LISTS
from lowp.policy import Policy, Rule

__all__ = ["MADE_OF_PRODUCTS", "TABLES", "TORCH_POLICIES", "Row", "is_structural", "name_of", "op_names", "row_of"]


@dataclass(frozen=True)
class Row:
    """An op: its name, its class, the runner that applies a rule (``module:function`` in lowp.ops), its operands.

    `product` is the runner of products that torch only promotes, for a rule that names the op itself, or that casts the
    operands of contractions and not their results. `at_site` is the runner, of the row and a call, for results written
    under shared exponents of sites. `masked` is the runner, beside contractions of integers, that keeps less of an op
    that no rule casts ('' if there is none).
    """

    name: str
    op_class: str
    runner: str = "generic:plain"
    operands: str = "input"
    product: str = ""
    source: str = ""
    at_site: str = "int16.flexpoint:fused"
    masked: str = ""

    @property
    def is_contraction(self) -> bool:
        """Whether the op sums products."""
        return self.op_class == "contraction"

    def run(self, rule: Rule | None) -> Callable[[Call], Any]:
        """Return the runner for calls under a rule."""
        takes_casts = rule is not None and not rule.is_empty
        return runner(self.product if self.product and takes_casts else self.runner)

    def quick(self, rule: Rule | None) -> Quick | None:
        """Return the fast path of common calls under a rule, without a `Call`; None if there is none."""
        if rule is None or rule.is_empty:
            return runner("generic:quick_promote") if self.runner == "generic:promote" else None
        return runner(_QUICK[self.runner])(rule) if self.runner in _QUICK else None


@remembered
def runner(spelled: str) -> Callable[..., Any]:
    """Return the function that ``module:function`` names within lowp.ops."""
    module, _, name = spelled.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"lowp.ops.{module}"), name)
    return found


# -- lowp-1 -------------------------------------------------------------------------------------------------------

# runner -> the contractions it runs, operands in the order input, weight unless said otherwise
_CONTRACTIONS = {
    "contraction:linear": "linear",
    "contraction:matmul": "matmul mm mv bmm",
    "contraction:reversed_matmul": "__rmatmul__",
    "contraction:added": "addmm addmv addr addbmm baddbmm",
    "contraction:einsum": "einsum",
    "contraction:vecdot": "linalg_vecdot",
    "contraction:chain": "chain_matmul linalg_multi_dot",
    "convolution:convolution": "conv1d conv2d conv3d convolution _convolution",
    "convolution:conv_transpose": "conv_transpose1d conv_transpose2d conv_transpose3d",
    "convolution:conv_tbc": "conv_tbc",
    "attention:scaled_dot_product_attention": "scaled_dot_product_attention",
    "multihead:multi_head_attention_forward": "multi_head_attention_forward",
    "recurrent:recurrent": "lstm gru rnn_tanh rnn_relu",
    "recurrent:cell": "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
    "generic:linear_cross_entropy": "linear_cross_entropy",
    "generic:lowered": (
        "prelu _thnn_fused_lstm_cell _thnn_fused_gru_cell _scaled_dot_product_flash_attention cudnn_convolution "
        "cudnn_convolution_transpose mkldnn_rnn_layer _native_multi_head_attention _addmm_activation "
        "miopen_convolution miopen_convolution_add_relu miopen_convolution_relu miopen_convolution_transpose "
        "miopen_depthwise_convolution miopen_rnn"
    ),
}
# runner -> what finds a `Quick` under a rule
_QUICK = {
    "contraction:linear": "contraction:quick_linear",
    "contraction:matmul": "contraction:quick_matmul",
    "convolution:convolution": "convolution:quick",
    "convolution:conv_transpose": "convolution:quick",
    "generic:wide": "generic:quick_wide",
    "norm:batch_norm": "norm:quick_batch_norm",
}
# the tensors that come first, where they are not input and weight; other weights are told by being parameters
_OPERANDS = {
    "contraction:added": "bias input weight",
    "attention:scaled_dot_product_attention": "input input input",
    "multihead:multi_head_attention_forward": "input input input",
    "recurrent:recurrent": "input",
    "recurrent:cell": "input",
}
# products that torch only promotes; contractions under a rule that names them, or of operands alone
_PROMOTED_PRODUCTS = {
    "contraction:matmul": "dot vdot",
    "contraction:tensordot": "tensordot",
    "contraction:bilinear": "bilinear",
    "contraction:outer": "outer",
    "contraction:inner": "inner",
}
# made of products, and not cast as contractions unless a rule names them
MADE_OF_PRODUCTS = frozenset(
    """
    cdist corrcoef cov embedding_bag kron linalg_matrix_power linalg_pinv lobpcg matrix_exp linalg_matrix_exp
    matrix_power pca_lowrank pinverse svd_lowrank
    """.split()
)
_NORMS = {
    "norm:layer_norm": "layer_norm",
    "norm:group_norm": "group_norm",
    "norm:batch_norm": "batch_norm",
    "norm:instance_norm": "instance_norm",
    "norm:rms_norm": "rms_norm",
    "generic:inside": "native_layer_norm native_group_norm native_batch_norm _fused_rms_norm",
}
_SOFTMAX = {"softmax:softmax": "softmax log_softmax softmin", "generic:inside": "gumbel_softmax"}
_PROMOTE = "cat stack where lerp index_copy index_add scatter masked_scatter grid_sample"
# Python composites and ops with no 16-bit kernel on any device, beyond torch's own fp32 lists
_WIDE = """
    cross_entropy ctc_loss gaussian_nll_loss multilabel_soft_margin_loss triplet_margin_with_distance_loss
    interpolate normalize local_response_norm lp_pool1d lp_pool2d lp_pool3d pairwise_distance norm_except_dim
    lobpcg pca_lowrank svd_lowrank lu stft istft float_power logcumsumexp corrcoef cov
    cholesky cholesky_inverse cholesky_solve geqrf inverse logdet det slogdet lu_solve lu_unpack matrix_exp
    matrix_power orgqr ormqr pinverse polar qr quantile nanquantile svd triangular_solve view_as_complex
    fft_fft fft_fft2 fft_fftn fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_ihfft2 fft_ihfftn
    fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn
    linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
    linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve
    linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_matrix_power
    linalg_matrix_rank linalg_norm linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_ex
    linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve
"""

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


# -- int16 under shared exponents ---------------------------------------------------------------------------------

# runner -> ops, or runners of theirs, whose results are not those of the whole function, written once
_AT_SITES = {
    # write each of their products themselves, from the exact sum
    "int16.flexpoint:by_itself": """
        contraction:linear contraction:matmul contraction:reversed_matmul contraction:added contraction:einsum
        contraction:vecdot contraction:chain contraction:tensordot contraction:outer contraction:inner
        convolution:convolution convolution:conv_transpose
    """,
    "int16.flexpoint:norm": "norm:layer_norm norm:group_norm norm:batch_norm",
    # select elements: the result has the values, and so the exponent, of the input
    "int16.pooling:relu": "relu",
    "int16.pooling:max_pool2d": "max_pool2d",
    "int16.pooling:max_pool3d": "max_pool3d",
    "int16.pooling:selecting": """
        max_pool1d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_unpool1d max_unpool2d
        max_unpool3d fractional_max_pool2d fractional_max_pool3d amax amin max_pool1d_with_indices
        max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool1d_with_indices
        adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices fractional_max_pool2d_with_indices
        fractional_max_pool3d_with_indices median nanmedian cummax cummin
    """,
    # functions of tensors alone, without chance or side effects, of which torch keeps an input or a result
    "int16.flexpoint:again": """
        gelu silu mish tanh sigmoid softplus elu selu celu hardtanh relu6 hardswish hardsigmoid leaky_relu
        log_sigmoid softsign tanhshrink softshrink hardshrink exp exp2 expm1 log log1p log2 log10 sqrt
        rsqrt sin cos pow square reciprocal abs clamp maximum minimum addcmul addcdiv linalg_norm linalg_vector_norm
        softmax log_softmax softmin logsumexp var std prod avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d
        adaptive_avg_pool2d adaptive_avg_pool3d local_response_norm glu normalize cosine_similarity rms_norm
        cross_entropy nll_loss mse_loss smooth_l1_loss l1_loss huber_loss kl_div binary_cross_entropy_with_logits
    """,
    "int16.flexpoint:multiplied": "mul",
    "int16.flexpoint:divided": "div",
    "int16.flexpoint:dropped": "dropout",
}
# runner -> ops that no rule casts, of whose gradient a mask or places are all that has to be kept
_MASKED = {
    f"int16.masks:{name}": name
    for name in ("relu", "relu6", "hardtanh", "leaky_relu", "dropout", "max_pool2d", "max_pool3d")
}
_at_sites, _masked = (
    {name: spelled for spelled, names in groups.items() for name in names.split()} for groups in (_AT_SITES, _MASKED)
)


def _in_int16(row: Row) -> Row:
    """Return a row with what its op is where tensors are int16 under shared exponents."""
    at_site = _at_sites.get(row.name) or _at_sites.get(row.product or row.runner, row.at_site)
    return replace(row, at_site=at_site, masked=_masked.get(row.name, ""))


def _rows(groups: dict[str, str], op_class: str, **given: str) -> Iterator[Row]:
    for spelled, names in groups.items():
        operands = _OPERANDS.get(spelled, "input weight") if op_class == "contraction" else "input"
        for name in names.split():
            yield Row(name, op_class, spelled, operands, **given)


def _bare(names: tuple[str, ...]) -> Iterator[str]:
    """Yield the names that ops are known by, without their overloads, each once."""
    bare = (name.partition(".")[0] for name in names)
    yield from dict.fromkeys(ALIASES.get(name, name) for name in bare)


def _lowp_1() -> dict[str, Row]:
    cuda = LISTS["cuda"]
    listed = "torch's CUDA lists"
    wide = [*_bare(cuda["fp32"]), *_bare(cuda["fp32_set_opt_dtype"]), *_bare(cuda["fp32_append_dtype"])]
    rows = [
        *(Row(name, "wide", "generic:wide", source=listed) for name in wide),
        *(Row(name, "wide", "generic:wide", source="no 16-bit kernel, or made of such") for name in _WIDE.split()),
        *(Row(name, "promote", "generic:promote", source=listed) for name in _bare(cuda["promote"])),
        *(Row(name, "promote", "generic:promote", source="promotes") for name in _PROMOTE.split()),
        *(
            Row(name, "promote", "generic:promote", "input weight", spelled, listed)
            for spelled, names in _PROMOTED_PRODUCTS.items()
            for name in names.split()
        ),
        *_rows(_CONTRACTIONS, "contraction"),
        *_rows(_NORMS, "norm"),
        *_rows(_SOFTMAX, "softmax"),
        *(Row(name, "wide", "generic:refused", source="raises: torch bans it") for name in cuda["banned"]),
    ]
    return {row.name: _in_int16(row) for row in rows}


def _of_torch(device: str) -> dict[str, Row]:
    """Return torch's lists as rows; ops on no list are pointwise."""
    lists, full = LISTS[device], _lowp_1()
    rows: dict[str, Row] = {}
    for kind, names in lists.items():
        for name in _bare(names):
            source = f"{device} {kind}"
            known = full.get(name)
            if kind == "lower_precision_fp":
                spelled = known.runner if known is not None and known.is_contraction else "generic:lowered"
                operands = _OPERANDS.get(spelled, "input weight")
                rows[name] = Row(name, "contraction", spelled, operands, source=source)
            elif kind == "promote":
                rows[name] = Row(name, "promote", "generic:promote", source=source)
            else:
                rows[name] = Row(name, "wide", "generic:refused" if kind == "banned" else "generic:wide", source=source)
    # Python functions that stand before listed ops and are seen in their place
    for name in ("multi_head_attention_forward", "lstm", "gru", "rnn_tanh", "rnn_relu", "__rmatmul__"):
        rows[name] = full[name]
    if "upsample_nearest1d" in rows:
        rows["interpolate"] = Row("interpolate", "wide", "generic:wide", source=f"{device}: upsample_nearest1d")
    return {name: _in_int16(row) for name, row in rows.items()}


TABLES: dict[str, dict[str, Row]] = {
    "lowp-1": _lowp_1(),
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
    return None if is_structural(name) else _in_int16(Row(name, "pointwise", "generic:pointwise"))


@cache
def _overridable() -> frozenset[str]:
    """Return the names of the ops of all functions that a function mode sees."""
    return frozenset(map(name_of, torch.overrides.get_testing_overrides()))


def op_names(table: str = "lowp-1") -> list[str]:
    """Return every name that a rule can use: the table's rows, then the pointwise ops."""
    rows = TABLES[table]
    return [*rows, *sorted(name for name in _overridable() if name not in rows and not is_structural(name))]
