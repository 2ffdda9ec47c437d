"""The op lists of torch.autocast in torch 2.13, as data: which aten ops run in which precision.

Read off aten/src/ATen/autocast_mode.h and autocast_mode.cpp of torch 2.13.0. A name may carry the overload, as in
``pow.Scalar``. Ops on no list run in the dtype of their inputs.
"""

from functools import cache

# list -> what it does: lower_precision_fp casts to the region's dtype; fp32 casts to fp32; fp32_set_opt_dtype and
# fp32_append_dtype ask the op for an fp32 result; promote casts to the widest dtype among the inputs; banned raises
LISTS: dict[str, dict[str, tuple[str, ...]]] = {
    "cuda": {
        "lower_precision_fp": tuple(
            """
            _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d
            conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul
            einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
            _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
            _scaled_dot_product_flash_attention scaled_dot_product_attention cudnn_convolution
            cudnn_convolution_transpose
            """.split()
        ),
        "fp32": tuple(
            """
            acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan
            pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm
            rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity
            poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div
            l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss
            soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist
            pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
            _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
            upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
            _upsample_bicubic2d_aa
            """.split()
        ),
        "fp32_set_opt_dtype": tuple(
            """
            prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm
            linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
            """.split()
        ),
        "promote": tuple(
            """
            addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
            """.split()
        ),
        "fp32_append_dtype": tuple(
            """
            norm.Scalar norm.ScalarOpt_dim
            """.split()
        ),
        "banned": tuple(
            """
            binary_cross_entropy
            """.split()
        ),
    },
    "cpu": {
        "lower_precision_fp": tuple(
            """
            conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding bmm mm linalg_vecdot
            baddbmm addmm _addmm_activation addbmm linear _convolution.deprecated matmul conv_tbc
            mkldnn_rnn_layer conv_transpose1d conv_transpose2d.input conv_transpose3d.input prelu
            scaled_dot_product_attention _native_multi_head_attention
            """.split()
        ),
        "fp32": tuple(
            """
            _grid_sampler_2d_cpu_fallback _lu_with_info adaptive_avg_pool3d adaptive_max_pool3d
            avg_pool3d binary_cross_entropy binary_cross_entropy_with_logits cdist cholesky
            cholesky_inverse cholesky_solve cosine_embedding_loss cross_entropy_loss ctc_loss.IntList
            ctc_loss.Tensor fake_quantize_per_tensor_affine fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft
            fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn
            fractional_max_pool2d fractional_max_pool3d geqrf grid_sampler grid_sampler_2d
            grid_sampler_3d hinge_embedding_loss huber_loss inverse kl_div l1_loss linalg_cholesky
            linalg_cholesky_ex linalg_cond linalg_cond.p_str linalg_eig linalg_eigh linalg_eigvals
            linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq
            linalg_matrix_rank linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor
            linalg_matrix_rank.tol_tensor linalg_qr linalg_solve linalg_svd linalg_svdvals
            linalg_tensorinv linalg_tensorsolve lu_solve margin_ranking_loss max_pool3d max_unpool2d
            max_unpool3d mse_loss multi_margin_loss multilabel_margin_loss
            multilabel_margin_loss_forward nanquantile nanquantile.scalar nll_loss nll_loss2d orgqr
            ormqr pinverse poisson_nll_loss polar prod prod.dim_int qr quantile quantile.scalar
            reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d
            smooth_l1_loss soft_margin_loss stft stft.center svd trace triangular_solve
            triplet_margin_loss view_as_complex
            """.split()
        ),
        "promote": tuple(
            """
            stack cat index_copy
            """.split()
        ),
    },
}

# Python functions and composites that are made of listed ops alone, and what the lists do with them then
_COMPOSITES = {
    "cuda": {
        "lower_precision_fp": ("multi_head_attention_forward", "__rmatmul__", "lstm", "gru", "rnn_tanh", "rnn_relu"),
        "fp32": ("cross_entropy", "linalg_norm"),
        "promote": ("cat", "stack", "where"),  # they promote by themselves, in the same kernel
    },
    "cpu": {"lower_precision_fp": ("multi_head_attention_forward", "__rmatmul__"), "fp32": ("cross_entropy",)},
}
_KINDS = {"contraction": ("lower_precision_fp",), "promote": ("promote",)}
_WIDE = ("fp32", "fp32_set_opt_dtype", "fp32_append_dtype")


@cache
def devices_that_agree(op: str, op_class: str) -> frozenset[str]:
    """Return the devices where torch.autocast does with an op what its class says: lower it, promote or widen it."""
    kinds = _KINDS.get(op_class, _WIDE)
    return frozenset(
        device
        for device, lists in LISTS.items()
        for kind in kinds
        if op in _COMPOSITES[device].get(kind, ()) or any(name.partition(".")[0] == op for name in lists.get(kind, ()))
    )
