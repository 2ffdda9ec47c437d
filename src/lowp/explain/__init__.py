"""One number, bit by bit, exact: conversions, sums, products, D = A B + C, and weight updates. Loads no torch.

Every function returns a frozen dataclass of numbers (integers, fractions, `Rounded`); `render` makes text of it, and
`as_json` plain data. `round_exact` is the definition of rounding that every kernel must agree with.
"""

from __future__ import annotations

from lowp.explain.arithmetic import (
    Alignment,
    Arithmetic,
    add,
    divide,
    evaluate,
    multiply,
    split_expression,
    subtract,
)
from lowp.explain.conversion import Conversion, SharedScale, convert
from lowp.explain.exact import Outcome, Rounded, Rule, outcomes, round_exact
from lowp.explain.multiply_add import Accumulated, Addend, MultiplyAdd, fused_multiply_add
from lowp.explain.numbers import Number, parse_number
from lowp.explain.plain_data import as_json
from lowp.explain.render import render
from lowp.explain.render_multiply_add import render_multiply_add
from lowp.explain.update import Threshold, Trajectory, Verdict, WeightUpdate, weight_update
from lowp.explain.worked import WORKED_CASES, WorkedCase

__all__ = [
    "WORKED_CASES",
    "Accumulated",
    "Addend",
    "Alignment",
    "Arithmetic",
    "Conversion",
    "MultiplyAdd",
    "Number",
    "Outcome",
    "Rounded",
    "Rule",
    "SharedScale",
    "Threshold",
    "Trajectory",
    "Verdict",
    "WeightUpdate",
    "WorkedCase",
    "add",
    "as_json",
    "convert",
    "divide",
    "evaluate",
    "fused_multiply_add",
    "multiply",
    "outcomes",
    "parse_number",
    "render",
    "render_multiply_add",
    "round_exact",
    "split_expression",
    "subtract",
    "weight_update",
]
