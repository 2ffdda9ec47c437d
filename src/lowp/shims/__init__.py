"""The functions of other emulators on lowp's kernels, so that results published with them can be checked.

`lowp.shims.qtorch` has those of QPyTorch, `lowp.shims.microxcaling` the `mx_specs` of Microsoft's microxcaling. The
signatures and defaults are theirs, the numbers are the right ones: where the original rounds otherwise, the docstring
says so, with an input that shows it. `docs/exactness.md` has the measurements.
"""

from lowp.shims.microxcaling import (
    MxSpecs,
    apply_mx_specs,
    finalize_mx_specs,
    get_backwards_mx_specs,
    get_default_mx_specs,
    policy_from_mx_specs,
    quantize_bfloat,
    quantize_elemwise_op,
    quantize_mx_op,
)
from lowp.shims.qtorch import (
    BlockFloatingPoint,
    FixedPoint,
    FloatingPoint,
    Number,
    Quantizer,
    block_quantize,
    fixed_point_quantize,
    float_quantize,
    quantizer,
)

__all__ = ["BlockFloatingPoint", "FixedPoint", "FloatingPoint", "MxSpecs", "Number", "Quantizer", "apply_mx_specs"]
__all__ += ["block_quantize", "finalize_mx_specs", "fixed_point_quantize", "float_quantize", "get_backwards_mx_specs"]
__all__ += ["get_default_mx_specs", "policy_from_mx_specs", "quantize_bfloat", "quantize_elemwise_op"]
__all__ += ["quantize_mx_op", "quantizer"]
