"""A call for every op on torch.autocast's CUDA lists, on tensors of a dtype that lie on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten: Any = torch.ops.aten


class Tensors:
    """Makes the arguments of a call."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device="cuda")

    def index(self, *shape: int) -> Tensor:
        """Return int64 labels."""
        return self(*shape, dtype=torch.int64)


_ALL = [0, 0], [1, 1], [1, 1], [0, 0], 1  # padding, stride and dilation of a convolution, and its groups

# what one call of an op looks like; ops on several lists, or with several overloads, share it
CALLS: dict[str, Callable[[Tensors], Any]] = {
    # contractions
    "_convolution.deprecated": lambda t: aten._convolution.deprecated(
        t(1, 2, 5, 5), t(3, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, False
    ),
    "_convolution": lambda t: torch._convolution(
        t(1, 2, 5, 5), t(3, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, False, False
    ),
    "conv1d": lambda t: F.conv1d(t(1, 2, 5), t(3, 2, 3), t(3)),
    "conv2d": lambda t: F.conv2d(t(1, 2, 5, 5), t(3, 2, 3, 3), t(3)),
    "conv3d": lambda t: F.conv3d(t(1, 2, 5, 5, 5), t(3, 2, 3, 3, 3)),
    "conv_tbc": lambda t: torch.conv_tbc(t(6, 1, 2), t(3, 2, 4), t(4)),
    "conv_transpose1d": lambda t: F.conv_transpose1d(t(1, 2, 5), t(2, 3, 3)),
    "conv_transpose2d.input": lambda t: F.conv_transpose2d(t(1, 2, 5, 5), t(2, 3, 3, 3)),
    "conv_transpose3d.input": lambda t: F.conv_transpose3d(t(1, 2, 5, 5, 5), t(2, 3, 3, 3, 3)),
    "convolution": lambda t: torch.convolution(
        t(1, 2, 5, 5), t(3, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    ),
    "prelu": lambda t: F.prelu(t(2, 3), t(1)),
    "addmm": lambda t: torch.addmm(t(2, 4), t(2, 3), t(3, 4)),
    "addmv": lambda t: torch.addmv(t(2), t(2, 3), t(3)),
    "addr": lambda t: torch.addr(t(2, 3), t(2), t(3)),
    "matmul": lambda t: t(2, 3) @ t(3, 4),
    "einsum": lambda t: torch.einsum("ij,jk->ik", t(2, 3), t(3, 4)),
    "mm": lambda t: torch.mm(t(2, 3), t(3, 4)),
    "mv": lambda t: torch.mv(t(2, 3), t(3)),
    "linalg_vecdot": lambda t: torch.linalg.vecdot(t(2, 3), t(2, 3)),
    "linear": lambda t: F.linear(t(2, 3), t(4, 3), t(4)),
    "addbmm": lambda t: torch.addbmm(t(2, 4), t(5, 2, 3), t(5, 3, 4)),
    "baddbmm": lambda t: torch.baddbmm(t(5, 2, 4), t(5, 2, 3), t(5, 3, 4)),
    "bmm": lambda t: torch.bmm(t(5, 2, 3), t(5, 3, 4)),
    "chain_matmul": lambda t: torch.chain_matmul(t(2, 3), t(3, 4), t(4, 2)),
    "linalg_multi_dot": lambda t: torch.linalg.multi_dot([t(2, 3), t(3, 4), t(4, 2)]),
    "rnn_tanh_cell": lambda t: torch.rnn_tanh_cell(t(2, 3), t(2, 4), t(4, 3), t(4, 4), t(4), t(4)),
    "rnn_relu_cell": lambda t: torch.rnn_relu_cell(t(2, 3), t(2, 4), t(4, 3), t(4, 4), t(4), t(4)),
    "scaled_dot_product_attention": lambda t: F.scaled_dot_product_attention(
        t(1, 2, 4, 8), t(1, 2, 4, 8), t(1, 2, 4, 8)
    ),
    # fp32
    **{
        name: lambda t, name=name: getattr(torch, name)(t(2, 3))  # type: ignore[misc]
        for name in "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan".split()
    },
    "pow.Tensor_Scalar": lambda t: torch.pow(t(2, 3), 3),
    "pow.Tensor_Tensor": lambda t: t(2, 3) ** t(2, 3),
    "pow.Scalar": lambda t: torch.pow(2.0, t(2, 3)),
    "softplus": lambda t: F.softplus(t(2, 3)),
    "layer_norm": lambda t: F.layer_norm(t(2, 3), (3,), t(3), t(3)),
    "native_layer_norm": lambda t: torch.native_layer_norm(t(2, 3), (3,), t(3), t(3), 1e-5)[0],
    "rms_norm": lambda t: F.rms_norm(t(2, 3), (3,), t(3)),
    "group_norm": lambda t: F.group_norm(t(2, 4, 5), 2, t(4), t(4)),
    "frobenius_norm.dim": lambda t: aten.frobenius_norm.dim(t(2, 3), [1]),
    "nuclear_norm": lambda t: aten.nuclear_norm(t(2, 3)),
    "nuclear_norm.dim": lambda t: aten.nuclear_norm.dim(t(2, 3), [0, 1]),
    "cosine_similarity": lambda t: F.cosine_similarity(t(2, 3), t(2, 3)),
    "poisson_nll_loss": lambda t: F.poisson_nll_loss(t(2, 3), t(2, 3)),
    "cosine_embedding_loss": lambda t: F.cosine_embedding_loss(t(2, 3), t(2, 3), t(2)),
    "nll_loss": lambda t: F.nll_loss(t(2, 3), t.index(2)),
    "nll_loss2d": lambda t: F.nll_loss(t(2, 3, 4, 4), t.index(2, 4, 4)),
    "hinge_embedding_loss": lambda t: F.hinge_embedding_loss(t(2, 3), t(2, 3)),
    "kl_div": lambda t: F.kl_div(t(2, 3), t(2, 3), reduction="sum"),
    "l1_loss": lambda t: F.l1_loss(t(2, 3), t(2, 3)),
    "smooth_l1_loss": lambda t: F.smooth_l1_loss(t(2, 3), t(2, 3)),
    "huber_loss": lambda t: F.huber_loss(t(2, 3), t(2, 3)),
    "mse_loss": lambda t: F.mse_loss(t(2, 3), t(2, 3)),
    "margin_ranking_loss": lambda t: F.margin_ranking_loss(t(3), t(3), t(3)),
    "multilabel_margin_loss": lambda t: F.multilabel_margin_loss(t(2, 3), t.index(2, 3)),
    "soft_margin_loss": lambda t: F.soft_margin_loss(t(2, 3), t(2, 3)),
    "triplet_margin_loss": lambda t: F.triplet_margin_loss(t(2, 3), t(2, 3), t(2, 3)),
    "multi_margin_loss": lambda t: F.multi_margin_loss(t(2, 3), t.index(2)),
    "binary_cross_entropy_with_logits": lambda t: F.binary_cross_entropy_with_logits(t(2, 3), t(2, 3)),
    "dist": lambda t: torch.dist(t(2, 3), t(2, 3)),
    "pdist": lambda t: F.pdist(t(2, 3)),
    "cdist": lambda t: torch.cdist(t(2, 3), t(2, 3)),
    "renorm": lambda t: torch.renorm(t(2, 3), 2, 0, 1.0),
    "logsumexp": lambda t: torch.logsumexp(t(2, 3), 1),
    "upsample_nearest1d": lambda t: F.interpolate(t(1, 2, 4), scale_factor=2),
    "_upsample_nearest_exact1d": lambda t: F.interpolate(t(1, 2, 4), scale_factor=2, mode="nearest-exact"),
    "upsample_nearest2d": lambda t: F.interpolate(t(1, 2, 4, 4), scale_factor=2),
    "_upsample_nearest_exact2d": lambda t: F.interpolate(t(1, 2, 4, 4), scale_factor=2, mode="nearest-exact"),
    "upsample_nearest3d": lambda t: F.interpolate(t(1, 2, 4, 4, 4), scale_factor=2),
    "_upsample_nearest_exact3d": lambda t: F.interpolate(t(1, 2, 4, 4, 4), scale_factor=2, mode="nearest-exact"),
    "upsample_linear1d": lambda t: F.interpolate(t(1, 2, 4), scale_factor=2, mode="linear"),
    "upsample_bilinear2d": lambda t: F.interpolate(t(1, 2, 4, 4), scale_factor=2, mode="bilinear"),
    "_upsample_bilinear2d_aa": lambda t: F.interpolate(t(1, 2, 4, 4), scale_factor=2, mode="bilinear", antialias=True),
    "upsample_trilinear3d": lambda t: F.interpolate(t(1, 2, 4, 4, 4), scale_factor=2, mode="trilinear"),
    "upsample_bicubic2d": lambda t: F.interpolate(t(1, 2, 4, 4), scale_factor=2, mode="bicubic"),
    "_upsample_bicubic2d_aa": lambda t: F.interpolate(t(1, 2, 4, 4), scale_factor=2, mode="bicubic", antialias=True),
    # a result in fp32
    "prod": lambda t: torch.prod(t(2, 3)),
    "prod.dim_int": lambda t: torch.prod(t(2, 3), 1),
    "softmax.int": lambda t: F.softmax(t(2, 3), 1),
    "log_softmax.int": lambda t: F.log_softmax(t(2, 3), 1),
    "cumprod": lambda t: torch.cumprod(t(2, 3), 1),
    "cumsum": lambda t: torch.cumsum(t(2, 3), 1),
    "linalg_vector_norm": lambda t: torch.linalg.vector_norm(t(2, 3)),
    "linalg_matrix_norm": lambda t: torch.linalg.matrix_norm(t(2, 3)),
    "linalg_matrix_norm.str_ord": lambda t: torch.linalg.matrix_norm(t(2, 3), "fro"),
    "sum": lambda t: torch.sum(t(2, 3)),
    "sum.dim_IntList": lambda t: t(2, 3).sum(1),
    "norm.Scalar": lambda t: torch.norm(t(2, 3), 2),
    "norm.ScalarOpt_dim": lambda t: torch.norm(t(2, 3), 2, 1),
    # the widest type among the inputs
    "addcdiv": lambda t: torch.addcdiv(t(2, 3), t(2, 3), t(2, 3, dtype=torch.float32)),
    "addcmul": lambda t: torch.addcmul(t(2, 3), t(2, 3), t(2, 3, dtype=torch.float32)),
    "atan2": lambda t: torch.atan2(t(2, 3), t(2, 3, dtype=torch.float32)),
    "bilinear": lambda t: F.bilinear(t(2, 3), t(2, 4, dtype=torch.float32), t(5, 3, 4)),
    "cross": lambda t: torch.cross(t(2, 3), t(2, 3, dtype=torch.float32), dim=1),
    "dot": lambda t: torch.dot(t(3), t(3, dtype=torch.float32)),
    "vdot": lambda t: torch.vdot(t(3), t(3, dtype=torch.float32)),
    "grid_sampler": lambda t: F.grid_sample(t(1, 2, 4, 4), t(1, 3, 3, 2, dtype=torch.float32), align_corners=False),
    "index_put": lambda t: torch.index_put(t(4), (t.index(2),), t(2, dtype=torch.float32)),
    "tensordot": lambda t: torch.tensordot(t(2, 3), t(3, 4, dtype=torch.float32), 1),
    "scatter_add": lambda t: torch.scatter_add(t(2, 3), 0, t.index(1, 3), t(1, 3, dtype=torch.float32)),
    # made of listed ones
    "multi_head_attention_forward": lambda t: F.multi_head_attention_forward(
        *(t(4, 1, 8) for _ in range(3)),
        8,
        2,
        t(24, 8),
        t(24),
        None,
        None,
        False,
        0.0,
        t(8, 8),
        t(8),
        need_weights=False,
    )[0],
    "cross_entropy": lambda t: F.cross_entropy(t(2, 3), t.index(2)),
    "cat": lambda t: torch.cat([t(2, 3), t(2, 3, dtype=torch.float32)]),
    "stack": lambda t: torch.stack([t(2, 3), t(2, 3, dtype=torch.float32)]),
    "where": lambda t: torch.where(t(2, 3, dtype=torch.bool), t(2, 3), t(2, 3, dtype=torch.float32)),
}

# kernels that are in CUDA builds of torch alone, not even as shapes in others
CUDA_ALONE = frozenset(
    """
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell _scaled_dot_product_flash_attention
    cudnn_convolution cudnn_convolution_transpose
    """.split()
)
# norms and softmax read and write 16 bits, where torch.autocast reads and writes 32
NARROW = frozenset("layer_norm native_layer_norm rms_norm group_norm softmax.int log_softmax.int".split())
