"""Policies that train a model in what it will be served in."""

from lowp import casts
from lowp.casts import Cast
from lowp.formats import Format
from lowp.policy import Policy, Rule


def training_policy(format: str | Cast | Format) -> Policy:
    """The policy under which `lowp.autocast` and `lowp.Precision` train for `quantize_model` in this format.

    Every contraction reads its weight rounded to the format, and with int8 its input too; gradients pass straight
    through the rounding (Bengio et al. 2013, arXiv 1308.3432). Weights and gradients stay fp32.
    If a format clips, weights beyond half a step above its largest value get no gradient (Hubara et al. 2016, arXiv
    1609.07061): in ternary and binary, whose scale is a mean and not the maximum.
    """
    cast = casts.parse(format)
    rounded = cast if str(cast) == "int8" else None
    return Policy((Rule(("contraction",), input=rounded, weight=cast),))
