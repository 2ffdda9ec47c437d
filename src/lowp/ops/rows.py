"""The ops of the table `lowp-1`, each with every fact about it: a row for the ops of which all facts are the same.

To add an op, write its name into the row that it belongs to, or a row of its own and the runner that this names. Ops of
no row are pointwise, or structural (`table.is_structural`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from lowp.compat import remembered
from lowp.ops.call import Call, Quick
from lowp.policy import Rule

# How results are written under the exponents of sites (`Row.at_site`). The first two are for one runner each.
BY_ITSELF = "int16.flexpoint:by_itself"  # its products, from their exact sums
OF_NORM = "int16.flexpoint:norm"
FUSED = "int16.flexpoint:fused"  # as those of the whole function, once
AGAIN = "int16.flexpoint:again"  # the same of a function of tensors alone, of which torch keeps an input or a result
SELECTED = "int16.pooling:selecting"  # elements of the input, and so in its exponent


@dataclass(frozen=True)
class Row:
    """An op: its name, its class, the runner that applies a rule (``module:function`` in lowp.ops), its operands.

    `operands` are the roles of the tensors that come first; other weights are told by being parameters. `quick` makes,
    of a rule, the fast path of common calls. `product` is the runner of products that torch only promotes, for a rule
    that names the op itself, or that casts the operands of contractions and not their results. `at_site` is the runner,
    of the row and a call, for results written under shared exponents of sites. `masked` is the runner, beside
    contractions of integers, that keeps less of an op that no rule casts ('' if there is none).
    """

    name: str
    op_class: str
    runner: str = "generic:plain"
    operands: str = "input"
    quick: str = ""
    product: str = ""
    at_site: str = FUSED
    masked: str = ""

    @property
    def is_contraction(self) -> bool:
        """Whether the op sums products."""
        return self.op_class == "contraction"

    def run(self, rule: Rule | None) -> Callable[[Call], Any]:
        """Return the runner for calls under a rule."""
        takes_casts = rule is not None and not rule.is_empty
        found = runner(self.product if self.product and takes_casts else self.runner)
        is_kept = rule is not None and rule.saved is not None and not (self.is_contraction or self.product)
        return runner("kept:keeping_input")(found) if is_kept else found

    def quickly(self, rule: Rule | None) -> Quick | None:
        """Return the fast path of common calls under a rule, without a `Call`; None if there is none."""
        if rule is None or rule.is_empty:
            return runner("generic:quick_promote") if self.runner == "generic:promote" else None
        if rule.saved is not None:
            return None
        return runner(self.quick)(rule) if self.quick else None


@remembered
def runner(spelled: str) -> Callable[..., Any]:
    """Return the function that ``module:function`` names within lowp.ops."""
    module, _, name = spelled.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"lowp.ops.{module}"), name)
    return found


_CONTRACTION = Row("", "contraction", operands="input weight")
_SUMMED = replace(_CONTRACTION, at_site=BY_ITSELF)  # contractions that write their own products
_NORM, _SOFTMAX = Row("", "norm"), Row("", "softmax")
WIDE = Row("", "wide", "generic:wide", quick="generic:quick_wide")
REFUSED = replace(WIDE, runner="generic:refused", quick="")
PROMOTED = Row("", "promote", "generic:promote")
_PRODUCT = replace(PROMOTED, operands="input weight", at_site=BY_ITSELF)  # that torch only promotes
POINTWISE = Row("", "pointwise", "generic:wide")

_ROWS: list[tuple[Row, str]] = [
    # -- contractions -------------------------------------------------------------------------------------------------
    (replace(_SUMMED, runner="contraction:linear", quick="contraction:quick_linear"), "linear"),
    (replace(_SUMMED, runner="contraction:matmul", quick="contraction:quick_matmul"), "matmul mm mv bmm"),
    (replace(_SUMMED, runner="contraction:reversed_matmul"), "__rmatmul__"),
    (replace(_SUMMED, runner="contraction:added", operands="bias input weight"), "addmm addmv addr addbmm baddbmm"),
    (replace(_SUMMED, runner="contraction:einsum"), "einsum"),
    (replace(_SUMMED, runner="contraction:vecdot"), "linalg_vecdot"),
    (replace(_SUMMED, runner="contraction:chain"), "chain_matmul linalg_multi_dot"),
    (
        replace(_SUMMED, runner="convolution:convolution", quick="convolution:quick"),
        "conv1d conv2d conv3d convolution _convolution",
    ),
    (
        replace(_SUMMED, runner="convolution:conv_transpose", quick="convolution:quick"),
        "conv_transpose1d conv_transpose2d conv_transpose3d",
    ),
    (replace(_CONTRACTION, runner="convolution:conv_tbc"), "conv_tbc"),
    (
        replace(_CONTRACTION, runner="attention:scaled_dot_product_attention", operands="input input input"),
        "scaled_dot_product_attention",
    ),
    (
        replace(_CONTRACTION, runner="multihead:multi_head_attention_forward", operands="input input input"),
        "multi_head_attention_forward",
    ),
    (replace(_CONTRACTION, runner="recurrent:recurrent", operands="input"), "lstm gru rnn_tanh rnn_relu"),
    (
        replace(_CONTRACTION, runner="recurrent:cell", operands="input"),
        "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
    ),
    (replace(_CONTRACTION, runner="generic:linear_cross_entropy"), "linear_cross_entropy"),
    (
        replace(_CONTRACTION, runner="generic:lowered"),
        """
        prelu _thnn_fused_lstm_cell _thnn_fused_gru_cell _scaled_dot_product_flash_attention cudnn_convolution
        cudnn_convolution_transpose mkldnn_rnn_layer _native_multi_head_attention _addmm_activation
        miopen_convolution miopen_convolution_add_relu miopen_convolution_relu miopen_convolution_transpose
        miopen_depthwise_convolution miopen_rnn
        """,
    ),
    # -- norms and softmax --------------------------------------------------------------------------------------------
    (replace(_NORM, runner="norm:layer_norm", quick="norm:quick_norm", at_site=OF_NORM), "layer_norm"),
    (replace(_NORM, runner="norm:group_norm", quick="norm:quick_norm", at_site=OF_NORM), "group_norm"),
    (replace(_NORM, runner="norm:batch_norm", quick="norm:quick_batch_norm", at_site=OF_NORM), "batch_norm"),
    (replace(_NORM, runner="norm:instance_norm"), "instance_norm"),
    (replace(_NORM, runner="norm:rms_norm", quick="norm:quick_norm", at_site=AGAIN), "rms_norm"),
    (replace(_NORM, runner="generic:inside"), "native_layer_norm native_group_norm native_batch_norm _fused_rms_norm"),
    (replace(_SOFTMAX, runner="softmax:softmax", at_site=AGAIN), "softmax log_softmax softmin"),
    (replace(_SOFTMAX, runner="generic:inside"), "gumbel_softmax"),
    # -- in fp32: torch's CUDA lists, Python composites, and ops with no 16-bit kernel on any device ------------------
    (
        replace(WIDE, at_site=AGAIN),
        """
        exp expm1 log log10 log2 log1p reciprocal rsqrt pow softplus cosine_similarity nll_loss kl_div l1_loss
        smooth_l1_loss huber_loss mse_loss binary_cross_entropy_with_logits logsumexp prod linalg_vector_norm
        linalg_norm cross_entropy normalize local_response_norm
        """,
    ),
    (
        WIDE,
        """
        acos asin cosh erfinv sinh tan frobenius_norm nuclear_norm poisson_nll_loss cosine_embedding_loss nll_loss2d
        hinge_embedding_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
        multi_margin_loss dist pdist cdist renorm upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
        _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
        _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa cumprod cumsum
        linalg_matrix_norm sum
        ctc_loss gaussian_nll_loss multilabel_soft_margin_loss triplet_margin_with_distance_loss interpolate lp_pool1d
        lp_pool2d lp_pool3d pairwise_distance norm_except_dim lobpcg pca_lowrank svd_lowrank lu stft istft float_power
        logcumsumexp corrcoef cov cholesky cholesky_inverse cholesky_solve geqrf inverse logdet det slogdet lu_solve
        lu_unpack matrix_exp matrix_power orgqr ormqr pinverse polar qr quantile nanquantile svd triangular_solve
        view_as_complex
        fft_fft fft_fft2 fft_fftn fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_ihfft2
        fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn
        linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det linalg_eig linalg_eigh linalg_eigvals
        linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor linalg_ldl_factor_ex
        linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp
        linalg_matrix_power linalg_matrix_rank linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_ex
        linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve
        """,
    ),
    (REFUSED, "binary_cross_entropy"),  # torch bans it
    # -- in the widest type of several tensors ------------------------------------------------------------------------
    (replace(PROMOTED, at_site=AGAIN), "addcdiv addcmul"),
    (
        PROMOTED,
        """
        atan2 cross grid_sampler index_put scatter_add cat stack where lerp index_copy index_add scatter
        masked_scatter grid_sample
        """,
    ),
    (replace(_PRODUCT, product="contraction:matmul"), "dot vdot"),
    (replace(_PRODUCT, product="contraction:tensordot"), "tensordot"),
    (replace(_PRODUCT, product="contraction:outer"), "outer"),
    (replace(_PRODUCT, product="contraction:inner"), "inner"),
    (replace(_PRODUCT, product="contraction:bilinear", at_site=FUSED), "bilinear"),
    # -- pointwise, where more is known than of others ----------------------------------------------------------------
    (
        replace(POINTWISE, at_site=AGAIN),
        """
        gelu silu mish tanh sigmoid elu selu celu hardswish hardsigmoid log_sigmoid softsign tanhshrink softshrink
        hardshrink exp2 sqrt sin cos square abs clamp maximum minimum var std glu avg_pool1d avg_pool2d avg_pool3d
        adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d mul div
        """,
    ),
    (
        replace(POINTWISE, at_site=SELECTED),
        """
        max_pool1d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_unpool1d max_unpool2d max_unpool3d
        fractional_max_pool2d fractional_max_pool3d amax amin max_pool1d_with_indices max_pool2d_with_indices
        max_pool3d_with_indices adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices
        adaptive_max_pool3d_with_indices fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices
        median nanmedian cummax cummin
        """,
    ),
    (replace(POINTWISE, at_site="int16.pooling:relu", masked="int16.masks:relu"), "relu"),
    (replace(POINTWISE, at_site=AGAIN, masked="int16.masks:relu6"), "relu6"),
    (replace(POINTWISE, at_site=AGAIN, masked="int16.masks:hardtanh"), "hardtanh"),
    (replace(POINTWISE, at_site=AGAIN, masked="int16.masks:leaky_relu"), "leaky_relu"),
    (replace(POINTWISE, at_site="int16.pooling:max_pool2d", masked="int16.masks:max_pool2d"), "max_pool2d"),
    (replace(POINTWISE, at_site="int16.pooling:max_pool3d", masked="int16.masks:max_pool3d"), "max_pool3d"),
    (replace(POINTWISE, at_site=AGAIN, masked="int16.masks:dropout"), "dropout"),
]
OPS = {name: replace(row, name=name) for row, names in _ROWS for name in names.split()}

# made of products, and not cast as contractions unless a rule names them
MADE_OF_PRODUCTS = frozenset(
    """
    cdist corrcoef cov embedding_bag kron linalg_matrix_power linalg_pinv lobpcg matrix_exp linalg_matrix_exp
    matrix_power pca_lowrank pinverse svd_lowrank
    """.split()
)
