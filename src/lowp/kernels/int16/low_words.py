"""A second int16 word for gradients of which one word under a shared exponent would lose whole features.

The gradient of a softmax over V classes holds (p - 1) / N at the right class of an example, and p / N at all others,
which is about 1 / V of it. Under one exponent 15 bits reach V = 32,768 at best: the columns of the classes that are no
example's answer are rounded to a unit or to nothing, and with them all that the weights of those classes would learn.
So a tensor of `FEATURES` features or more, an eighth of which lie wholly below `UNITS` units, is written as two words:
the int16 mantissas under its exponent, and what they leave as int16 mantissas `LOW_BITS` binary places lower. A sum of
products is the sum of two then. Both words together are carried as one fp32 number, which holds them exactly.
"""

import warnings

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.kernels.int16.mantissas import NOTHING, Mantissas, has_mantissas, own_exponent, times, to_mantissas
from lowp.scaling import powers

FEATURES = 1024  # with fewer, the smallest of equal shares still has several bits
UNITS = 4
LOW_BITS = 14  # two products of low words never exceed those of high ones, so that sums of them are chained as long
_SAMPLED = 256


def has_low_word(cast: Cast | None) -> bool:
    """Whether gradients of a cast may take a second word: int16, rounded to nearest, and not ``words=1``."""
    if cast is None or not has_mantissas(cast) or cast.is_stochastic:
        return False
    return cast.scaling is not None and cast.scaling.words > 1


def is_coarse(x: Tensor, exponent: Tensor, axis: int = -1) -> Tensor:
    """Whether an eighth of x's features along `axis`, those of zeros apart, lie wholly below `UNITS` * 2**exponent.

    A 0-d bool on x's device. Of many features every so-manieth is looked at, 256 at least.
    """
    if x.dim() == 0 or x.shape[axis] < FEATURES or x.numel() == 0:
        return torch.zeros((), dtype=torch.bool, device=x.device)
    largest = _features(x, axis).abs().amax(1)
    bound = times(torch.full((), float(UNITS), dtype=torch.float32, device=x.device), exponent)
    return ((largest > 0) & (largest < bound)).sum() * 8 > (largest > 0).sum()


def _features(x: Tensor, axis: int) -> Tensor:
    x = x.detach().movedim(axis, 0)[:: x.shape[axis] // _SAMPLED]
    return x.flatten(1) if x.dim() > 1 else x[:, None]


def low_word(x: Tensor, high: Mantissas, cast: Cast) -> Mantissas:
    """Return what the mantissas of x leave of it as mantissas `LOW_BITS` lower, half a unit of theirs at most.

    Under the exponent `NOTHING` where one word is enough.
    """
    half = times(torch.full((), 0.5, dtype=torch.float32, device=x.device), high.exponent)
    exponent = high.exponent - LOW_BITS
    payload = to_mantissas((x.detach().float() - high.values).clamp_(-half, half), cast, exponent).payload
    return Mantissas(payload, torch.where(is_coarse(x, high.exponent), exponent, NOTHING))


def low_value(x: Tensor, high: Tensor, exponent: Tensor, axis: int | None = -1) -> Tensor:
    """Return the value of the second word, in fp32, for x written as the values `high`; zeros where x needs none.

    Without an axis it always needs one. NaN where x is not finite.
    """
    rest = x.detach() - high
    units = powers.times(rest, LOW_BITS - exponent).round().clamp_(-(2.0 ** (LOW_BITS - 1)), 2.0 ** (LOW_BITS - 1))
    low = powers.times(units, exponent - LOW_BITS)
    return low.float() if axis is None else torch.where(is_coarse(x, exponent, axis), low, 0.0).float()


def with_low_word(x: Tensor, high: Tensor, cast: Cast) -> Tensor:
    """Return the values `high` that a cast gave x under x's own maximum, with a second word where x is coarse.

    For products that run on values: on a device without the integer kernels. Nothing waits for it.
    """
    if x.numel() == 0 or x.dim() < 2 or x.shape[-1] < FEATURES:
        return high
    return high + low_value(x, high, own_exponent(x, cast)).to(high.dtype)


# -- where there is no second word --------------------------------------------------------------------------------


_warned: set[Cast] = set()


def warn_of_loss(x: Tensor, value: Tensor, cast: Cast, what: str, axis: int = -1) -> None:
    """Warn, once for a cast, that an eighth of x's features are wrong by an eighth or more of their largest element."""
    count = x.shape[axis] if x.dim() else 0
    if count < FEATURES or cast in _warned or x.numel() == 0 or not x.is_cpu:
        return
    features, kept = (_features(one, axis) for one in (x, value))
    largest = features.abs().amax(1)
    lost = (features - kept).abs().amax(1) > largest / 8
    if int(lost.sum()) * 8 <= int((largest > 0).sum()):
        return
    _warned.add(cast)
    share = float(lost.sum() / (largest > 0).sum())
    warnings.warn(
        f"{what}: of its {count} features {share:.0%} are lost under the shared scale of {cast}, as happens with the "
        "gradients of a large vocabulary, so that their weights learn nothing. dfp16 and flex16+5 "
        "take a second word there (leave words=1 out); or give that layer another format by a rule of its own, such as "
        "Rule.of('linear', where='head', input='bf16', weight='bf16', grad='bf16')",
        UserWarning,
        stacklevel=2,
    )
