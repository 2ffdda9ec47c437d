"""Torch's operators that have other bits on other processors or with other numbers of threads, defined anew.

`DEFINED` maps the name of an aten operator, without overload, to a function of the same arguments. An operator in place
has the name of the one out of place; lists of tensors (`_foreach_`) are taken one by one by their mode.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowp.ops.convolution import Convolution
from lowp.ops.trilinear import FIRST, OUTPUT, SECOND
from lowp.reproducing import functions as f
from lowp.reproducing import norms
from lowp.reproducing.functions import wide as _wide

Three = tuple[Tensor | None, Tensor | None, Tensor | None]


def _scaled(x: Tensor, factor: Any) -> Tensor:
    return x if isinstance(factor, (int, float)) and factor == 1 else x * factor


# -- products ---------------------------------------------------------------------------------------------------------
def _product(left: Tensor, right: Tensor, **_: Any) -> Tensor:
    return f.multiplied(left, right).to(left.dtype)


def _added(bias: Tensor, left: Tensor, right: Tensor, beta: float = 1, alpha: float = 1, **_: Any) -> Tensor:
    found = _scaled(f.multiplied(left, right), alpha)
    return (found if beta == 0 else found + _scaled(_wide(bias), beta)).to(left.dtype)


def _added_batches(bias: Tensor, left: Tensor, right: Tensor, **options: Any) -> Tensor:
    return _added(bias, left.transpose(0, 1).flatten(1), right.flatten(0, 1), **options)


def _slot(form: Convolution, slot: int, left: Tensor, right: Tensor) -> Tensor:
    rows, columns, finish = form.matrices(slot, left, right)
    found: Tensor = finish(f.multiplied(rows, columns))
    return found


def _form(x: Tensor, weight: Tensor, settings: Sequence[Any]) -> Convolution:
    stride, padding, dilation, transposed, output_padding, groups = settings
    dims = weight.dim() - 2
    sizes = (tuple(one) * dims if len(one) == 1 else tuple(one) for one in (stride, padding, dilation, output_padding))
    stride, padding, dilation, output_padding = sizes
    form = Convolution(
        tuple(x.shape), tuple(weight.shape), stride, padding, dilation, transposed, output_padding, groups
    )
    if not form.is_possible:
        raise RuntimeError(f"no convolution of {tuple(x.shape)} by {tuple(weight.shape)} with {form}")
    return form


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    dims = weight.dim() - 2
    batch = x if x.dim() > dims + 1 else x[None]
    form = _form(batch, weight, settings[:6])
    found = _slot(form, OUTPUT, batch, weight)
    found = found if bias is None else found + form.spread(_wide(bias))
    return (found if batch is x else found[0]).to(x.dtype)


def _convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *settings_and_wanted: Any
) -> Three:
    *settings, wanted = settings_and_wanted
    form = _form(x, weight, settings)
    dims = [dim for dim in range(gradient.dim()) if dim != 1]
    return (
        _slot(form, FIRST, weight, gradient).to(x.dtype) if wanted[0] else None,
        _slot(form, SECOND, x, gradient).to(weight.dtype) if wanted[1] else None,
        f.total(gradient, dims).to(gradient.dtype) if wanted[2] else None,
    )


def _scores(query: Tensor, key: Tensor, causal: bool, mask: Tensor | None, scale: float) -> Tensor:
    found = f.multiplied(query, key.mT) * scale
    if causal:
        found = found.masked_fill(~torch.ones(found.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    return found if mask is None else found + _wide(mask)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0,
    causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, causal, attn_mask, 1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    logarithms = _logsumexp(scores, -1)
    result = f.multiplied(_shares(scores, logarithms), _wide(value))
    return result.to(query.dtype), logarithms


def _shares(scores: Tensor, logarithms: Tensor) -> Tensor:
    """Return softmax of the scores; 0 in rows that are masked everywhere."""
    return f.exp(scores - logarithms.where(logarithms != -math.inf, 0).unsqueeze(-1))


def _attention_backward(
    gradient: Tensor, *given: Any, attn_mask: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, result, logarithms, _dropout, causal = given
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    shares = _shares(_scores(query, key, causal, attn_mask, scale), logarithms)
    gradient = _wide(gradient)
    own = f.total(gradient * _wide(result), -1, True)
    of_scores = (f.multiplied(gradient, _wide(value).mT) - own) * shares * scale
    return (
        f.multiplied(of_scores, _wide(key)).to(query.dtype),
        f.multiplied(of_scores.mT, _wide(query)).to(key.dtype),
        f.multiplied(shares.mT, gradient).to(value.dtype),
    )


# -- sums -------------------------------------------------------------------------------------------------------------
def _sum(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    if not x.is_floating_point():
        x = x.to(dtype or torch.int64)
    return f.total(x, dim, keepdim).to(dtype or x.dtype)


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    return f.mean(x if dtype is None else x.to(dtype), dim, keepdim).to(dtype or x.dtype)


def _var_mean(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    found = f.moments(x, dim, 1 if correction is None else correction, keepdim)
    return tuple(one.to(x.dtype) for one in found)


def _std(x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return f.sqrt(f.moments(x, dim, 1 if correction is None else correction, keepdim)[0]).to(x.dtype)


def _norm(x: Tensor, p: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    x, own = (x if dtype is None else x.to(dtype)), dtype or x.dtype
    size = _wide(x).abs()
    dims = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    if math.isinf(p):
        return (size.amax if p > 0 else size.amin)(dims, keepdim).to(own)
    if p == 0:
        return f.total((size != 0).to(size.dtype), dims, keepdim).to(own)
    if p == 1:
        return f.total(size, dims, keepdim).to(own)
    if p == 2:
        return f.sqrt(f.total(size.square(), dims, keepdim)).to(own)
    return f.power(f.total(f.power(size, p), dims, keepdim), 1 / p).to(own)


def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    most = _wide(x).amax(dim, True)
    most = most.where(most.isfinite(), 0)
    found = f.log(f.total(f.exp(_wide(x) - most), dim, True)) + most
    return (found if keepdim else found.squeeze(dim)).to(x.dtype)


# -- softmax and losses -----------------------------------------------------------------------------------------------
def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = _wide(x)
    found = f.exp(wide - wide.amax(dim, True)) if x.numel() else wide
    found = found / f.total(found, dim, True)
    return found if half_to_float else found.to(x.dtype)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    moved = _wide(x)
    moved = moved - moved.amax(dim, True) if x.numel() else moved
    found = moved - f.log(f.total(f.exp(moved), dim, True))
    return found if half_to_float else found.to(x.dtype)


def _softmax_backward(gradient: Tensor, result: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    gradient, result = _wide(gradient), _wide(result)
    return ((gradient - f.total(gradient * result, dim, True)) * result).to(dtype)


def _log_softmax_backward(gradient: Tensor, result: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    gradient = _wide(gradient)
    return (gradient - f.exp(_wide(result)) * f.total(gradient, dim, True)).to(dtype)


def _nll_loss(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int) -> Any:
    axis = 0 if x.dim() == 1 else 1
    inside = torch.where(target == ignored, 0, target)
    picked = -_wide(x).gather(axis, inside.unsqueeze(axis)).squeeze(axis)
    weights = torch.ones_like(picked) if weight is None else _wide(weight)[inside]
    weights = weights.where(target != ignored, 0)
    losses, whole = (picked * weights).where(weights != 0, 0), f.total(weights)
    if reduction == 0:
        return losses.to(x.dtype), x.new_zeros(())
    summed = f.total(losses)
    return (summed / whole if reduction == 1 else summed).to(x.dtype), whole.to(x.dtype)


def _reduced(function: Callable[..., Tensor], place: int) -> Callable[..., Tensor]:
    """Return a loss whose `reduction`, the argument of this index, is made by the sums of this module."""

    def loss(*given: Any, reduction: int = 1, **options: Any) -> Tensor:
        if len(given) > place:
            reduction = given[place]
        losses = function(*given[:place], 0, *given[place + 1 :], **options)
        return losses if reduction == 0 else (_mean if reduction == 1 else _sum)(losses)

    return loss


# -- functions of numbers ---------------------------------------------------------------------------------------------
def _difference(x: Any, y: Any, alpha: float = 1) -> Tensor:
    return torch.sub(x, y if alpha == 1 else torch.mul(y, alpha))


def _gelu_parts(x: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """Return what gelu multiplies x with, and its derivative, in fp64."""
    if approximate == "none":
        share = (f.erf(x * math.sqrt(0.5)) + 1) * 0.5
        return share, f.exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
    root, third = math.sqrt(2 / math.pi), 0.044715
    bent = f.tanh((x + x * x * x * third) * root)
    slope = (x * x * (3 * third) + 1) * root
    return (bent + 1) * 0.5, (1 - bent * bent) * slope * 0.5


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    found: Tensor = f.in_fp64(lambda x: x * _gelu_parts(x, approximate)[0])(x)
    return found


def _times(gradient: Tensor, derivative: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (_wide(gradient) * f.in_fp64(derivative)(_wide(x))).to(gradient.dtype)


def _gelu_backward(gradient: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    def derivative(x: Tensor) -> Tensor:
        share, slope = _gelu_parts(x, approximate)
        return share + x * slope

    return _times(gradient, derivative, x)


def _silu_slope(x: Tensor) -> Tensor:
    share = f.sigmoid(x)
    return share * (1 + x * (1 - share))


def _softplus(x: Tensor, beta: float = 1, threshold: float = 20) -> Tensor:
    return f.in_fp64(lambda x: torch.where(x * beta > threshold, x, f.log1p(f.exp(x * beta)) / beta))(x)


def _softplus_backward(gradient: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    return _times(gradient, lambda x: torch.where(x * beta > threshold, 1.0, f.sigmoid(x * beta)), x)


def _serial(name: str) -> Callable[..., Any]:
    """Return an operator of torch that adds numbers into others, run by one thread, which adds them in order."""

    def one_by_one(*given: Any, **options: Any) -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return getattr(torch.ops.aten, name)(*given, **options)
        finally:
            torch.set_num_threads(before)

    return one_by_one


def _normal(mean: Any = 0.0, std: Any = 1.0, size: Any = None, generator: Any = None, **options: Any) -> Tensor:
    shape = (torch.as_tensor(mean) + torch.as_tensor(std)).shape if size is None else size
    like = torch.empty(shape, **{"dtype": torch.get_default_dtype(), **options})
    found: Tensor = f.normal(like, generator) * std + mean
    return found


def _uniform_in_place(x: Tensor, low: float = 0, high: float = 1, *, generator: Any = None) -> Tensor:
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    return torch.rand(x.shape, dtype=dtype, generator=generator) * (high - low) + low


def _standard(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return what fills a new tensor with normal numbers, made like what is given first: a size or a tensor."""

    def made(like: Any, *, generator: Any = None, **options: Any) -> Tensor:
        return f.normal(empty(like, **{name: one for name, one in options.items() if one is not None}), generator)

    return made


_ADDING = """
    embedding_dense_backward index_add index_put _index_put_impl_ scatter_add scatter_reduce index_reduce cumsum
    _embedding_bag_dense_backward max_pool2d_with_indices_backward adaptive_max_pool2d_backward
    max_pool3d_with_indices_backward unfold_backward put
"""
DEFINED: dict[str, Callable[..., Any]] = {
    **{name: getattr(f, name) for name in "exp expm1 log log1p tanh sigmoid erf sqrt sin cos".split()},
    **{name: _serial(name) for name in _ADDING.split()},
    **dict.fromkeys(("mm", "bmm"), _product),
    **dict.fromkeys(("addmm", "baddbmm"), _added),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit"), norms.batch_norm),
    "mv": lambda left, right: _product(left, right[:, None])[:, 0],
    "dot": lambda left, right: _product(left[None], right[:, None])[0, 0],
    "addmv": lambda bias, left, right, **options: _added(bias[..., None], left, right[:, None], **options)[:, 0],
    "addbmm": _added_batches,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "sum": _sum,
    "mean": _mean,
    "var": lambda x, dim=None, **options: _var_mean(x, dim, **options)[0],
    "var_mean": _var_mean,
    "std": _std,
    "linalg_vector_norm": _norm,
    "norm": _norm,
    "logsumexp": _logsumexp,
    "_softmax": _softmax,
    "_log_softmax": _log_softmax,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _log_softmax_backward,
    "nll_loss_forward": _nll_loss,
    "nll_loss2d_forward": _nll_loss,
    "mse_loss": _reduced(torch.ops.aten.mse_loss, 2),
    "smooth_l1_loss": _reduced(torch.ops.aten.smooth_l1_loss, 2),
    "huber_loss": _reduced(torch.ops.aten.huber_loss, 2),
    "native_layer_norm": norms.layer_norm,
    "native_layer_norm_backward": norms.layer_norm_backward,
    "native_batch_norm_backward": norms.batch_norm_backward,
    "native_group_norm": norms.group_norm,
    "native_group_norm_backward": norms.group_norm_backward,
    "add": lambda x, y, *, alpha=1: torch.add(x, y if alpha == 1 else torch.mul(y, alpha)),
    "sub": _difference,
    "rsub": lambda x, y, alpha=1: _difference(y, x, alpha=alpha),
    "addcmul": lambda x, y, z, *, value=1: x + _scaled(y * z, value),
    "addcdiv": lambda x, y, z, *, value=1: x + _scaled(y / z, value),
    "lerp": lambda x, y, weight: x + (y - x) * weight,
    "pow": f.power,
    "tanh_backward": lambda gradient, y: gradient * (1 - y * y),
    "gelu": _gelu,
    "gelu_backward": _gelu_backward,
    "silu": f.in_fp64(lambda x: x * f.sigmoid(x)),
    "silu_backward": lambda gradient, x: _times(gradient, _silu_slope, x),
    "softplus": _softplus,
    "softplus_backward": _softplus_backward,
    "exp2": f.in_fp64(lambda x: f.exp(x * math.log(2))),
    "log2": f.in_fp64(lambda x: f.log(x) / math.log(2)),
    "log10": f.in_fp64(lambda x: f.log(x) / math.log(10)),
    "randn": _standard(torch.empty),
    "randn_like": _standard(torch.empty_like),
    "normal": _normal,
    "normal_": lambda x, mean=0, std=1, *, generator=None: f.normal(x, generator) * std + mean,
    "uniform_": _uniform_in_place,
}
