"""Exact, bit-level explanations of conversions, sums, products, D = A B + C, and weight updates. Loads no torch.

Every function returns a frozen dataclass of numbers (integers, fractions, `Rounded`). `render` converts the dataclass
to text, and `as_json` to plain data. `round_exact` is the definition of rounding with which every kernel must agree.
"""

from lowp.explain.arithmetic import Alignment, Arithmetic, add, divide, evaluate, multiply, split_expression, subtract
from lowp.explain.conversion import Conversion, SharedScale, convert
from lowp.explain.exact import Outcome, Rounded, RoundingRule, outcomes, round_exact
from lowp.explain.flexpoint import (
    FlexArithmetic,
    FlexNumber,
    Rescaled,
    flex_arithmetic,
    flex_number,
    flex_product,
    flex_sum,
    is_flex,
    rescale,
)
from lowp.explain.multiply_add import Accumulated, Addend, MultiplyAdd, fused_multiply_add, render_multiply_add
from lowp.explain.numbers import Number, parse_number
from lowp.explain.render import as_json, render
from lowp.explain.update import Threshold, Trajectory, Verdict, WeightUpdate, weight_update
from lowp.explain.worked import WORKED_CASES, WorkedCase

__all__ = ["WORKED_CASES", "Accumulated", "Addend", "Alignment", "Arithmetic", "Conversion", "FlexArithmetic"]
__all__ += ["FlexNumber", "MultiplyAdd", "Number", "Outcome", "Rescaled", "Rounded", "RoundingRule", "SharedScale"]
__all__ += ["Threshold", "Trajectory", "Verdict", "WeightUpdate", "WorkedCase", "add", "as_json", "convert", "divide"]
__all__ += ["evaluate", "flex_arithmetic", "flex_number", "flex_product", "flex_sum", "fused_multiply_add", "is_flex"]
__all__ += ["multiply", "outcomes", "parse_number", "render", "render_multiply_add", "rescale", "round_exact"]
__all__ += ["split_expression", "subtract", "weight_update"]
