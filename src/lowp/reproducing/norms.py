"""Layer, batch and group norm and their gradients, as the aten operators of these names take them."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lowp.reproducing import functions as f

Three = tuple[Tensor | None, Tensor | None, Tensor | None]


def _normed(x: Tensor, dims: Sequence[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised numbers, and mean and 1 / deviation along dimensions, which are kept."""
    mean = f.mean(x, dims, True)
    moved = f.wide(x) - mean
    scale = (f.mean(moved.square(), dims, True) + eps).rsqrt()
    return moved * scale, mean, scale


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int]) -> Tensor:
    x = x if weight is None else x * f.wide(weight).reshape(shape)
    return x if bias is None else x + f.wide(bias).reshape(shape)


def _norm_gradients(
    gradient: Tensor, normed: Tensor, scale: Tensor, dims: Sequence[int], weight: Tensor | None, shape: Sequence[int]
) -> Tensor:
    """Return the gradient of the numbers that were normalised along dimensions and multiplied by a weight."""
    gradient = _affine(f.wide(gradient), weight, None, shape)
    common = f.mean(gradient, dims, True) + normed * f.mean(gradient * normed, dims, True)
    return (gradient - common) * scale


def _of_parameters(
    gradient: Tensor, normed: Tensor, dims: Sequence[int], weight: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    dtype = gradient.dtype if weight is None else weight.dtype
    gradient = f.wide(gradient)
    shape = None if weight is None else weight.shape

    def summed(x: Tensor) -> Tensor:
        found = f.total(x, dims).to(dtype) if dims else x.to(dtype)
        return found if shape is None else found.reshape(shape)

    return summed(gradient * normed) if wanted[1] else None, summed(gradient) if wanted[2] else None


def layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
    dims = range(x.dim() - len(shape), x.dim())
    normed, mean, scale = _normed(x, dims, eps)
    return _affine(normed, weight, bias, shape).to(x.dtype), mean, scale


def layer_norm_backward(gradient: Tensor, x: Tensor, shape: Sequence[int], *given: Any) -> Three:
    mean, scale, weight, _bias, wanted = given
    first = x.dim() - len(shape)
    normed = (f.wide(x) - mean) * scale
    of_x = _norm_gradients(gradient, normed, scale, range(first, x.dim()), weight, shape).to(x.dtype)
    return (of_x if wanted[0] else None, *_of_parameters(gradient, normed, range(first), weight, wanted))


def _over_channels(x: Tensor) -> tuple[list[int], list[int]]:
    """Return the dimensions other than the channels', and the shape of one number a channel."""
    return [dim for dim in range(x.dim()) if dim != 1], [1, -1, *(1 for _ in x.shape[2:])]


def batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *given: Any) -> Any:
    running_mean, running_var, training, momentum, eps = given
    dims, shape = _over_channels(x)
    if not training:
        scale = (f.wide(running_var) + eps).rsqrt().reshape(shape)
        normed = (f.wide(x) - f.wide(running_mean).reshape(shape)) * scale
        return _affine(normed, weight, bias, shape).to(x.dtype), x.new_empty(0), x.new_empty(0)
    normed, mean, scale = _normed(x, dims, eps)
    if running_mean is not None and running_var is not None:
        variance = f.moments(x, dims, 1, False)[0]
        for running, new in ((running_mean, mean.flatten()), (running_var, variance)):
            running.copy_(running * (1 - momentum) + new * momentum)
    return _affine(normed, weight, bias, shape).to(x.dtype), mean.flatten(), scale.flatten()


def batch_norm_backward(gradient: Tensor, x: Tensor, weight: Tensor | None, *given: Any) -> Three:
    running_mean, running_var, mean, scale, training, eps, wanted = given
    dims, shape = _over_channels(x)
    if not training:
        mean, scale = f.wide(running_mean), (f.wide(running_var) + eps).rsqrt()
    scale = scale.reshape(shape)
    normed = (f.wide(x) - mean.reshape(shape)) * scale
    of_x = (
        _norm_gradients(gradient, normed, scale, dims, weight, shape)
        if training
        else _affine(f.wide(gradient), weight, None, shape) * scale
    )
    return (of_x.to(x.dtype) if wanted[0] else None, *_of_parameters(gradient, normed, dims, weight, wanted))


def group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *given: Any) -> Any:
    n, channels, size, groups, eps = given
    normed, mean, scale = _normed(x.reshape(n, groups, -1), [2], eps)
    result = _affine(normed.reshape(n, channels, size), weight, bias, (1, channels, 1))
    return result.reshape(x.shape).to(x.dtype), mean.flatten(1), scale.flatten(1)


def group_norm_backward(gradient: Tensor, x: Tensor, mean: Tensor, scale: Tensor, *given: Any) -> Three:
    weight, n, channels, size, groups, wanted = given
    normed = (f.wide(x).reshape(n, groups, -1) - mean[..., None]) * scale[..., None]
    incoming = _affine(f.wide(gradient).reshape(n, channels, size), weight, None, (1, channels, 1))
    of_x = _norm_gradients(incoming.reshape(normed.shape), normed, scale[..., None], [2], None, ())
    flat, by_channel = gradient.reshape(n, channels, size), normed.reshape(n, channels, size)
    of_parameters = _of_parameters(flat, by_channel, [0, 2], weight, wanted)
    return (of_x.reshape(x.shape).to(x.dtype) if wanted[0] else None, *of_parameters)
