"""The number of operations in a training step, and of those with operands in 16 bits.

An operation is a multiplication or an addition of a contraction (matrix products, convolutions, attention, forward and
backward): 2 m n k of a matrix product, by the formulas of torch.utils.flop_counter. Other ops are not counted. A
contraction counts as 16-bit if every floating-point operand is in 16 bits: by its dtype, or by its values, since a CPU
without 16-bit arithmetic computes on fp32 copies. Such values are all numbers of fp16, all numbers of bf16, or all
16-bit integers times one power of two. Sums are always wider. The share is therefore measured on the values, not read
from a policy. The operands of a fused attention are query, key and value; its probabilities stay fp32.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from lowp import casts
from lowp.compat import private
from lowp.formats import ScaledFormat
from lowp.kernels.int16 import integer_run

METHOD = (
    "operations: multiplications and additions of the contractions of one step, forward and backward (2 m n k of a "
    "matrix product, formulas of torch.utils.flop_counter), counted as they ran; in 16 bits where every operand is, by "
    "its dtype or by all its values; sums are wider everywhere"
)

_DispatchMode = cast(type, private("torch.utils._python_dispatch.TorchDispatchMode"))
_COPIES = ("aten::clone", "aten::_to_copy", "aten::copy_")


@dataclass(frozen=True)
class Operations:
    """Operations of one step: all, and those in 16 bits or fewer."""

    total: int
    narrow: int

    @property
    def share(self) -> float | None:
        """The share in 16 bits, 0 to 1; None without contractions."""
        return self.narrow / self.total if self.total else None


def counted(step: Callable[[], object]) -> Operations:
    """Take a step and count its operations, with unchanged results but more slowly; torch.compile is not supported."""
    counter = _Counter()
    with integer_run.observed(counter.product_of_integers), counter:
        step()
    return Operations(counter.total, counter.narrow)


class _Counter(_DispatchMode):  # type: ignore[misc, valid-type]
    """A dispatch mode that counts every op of forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.narrow = 0
        self.paused = False  # inside an integer product, which is counted as a whole
        self._formulas = FlopCounterMode().flop_registry
        # results of casts to a format with a scale of any value: their storages, while they are alive
        self._written: dict[int, StorageWeakRef] = {}

    def add(self, operations: int, narrow: bool) -> None:
        """Count a contraction."""
        self.total += operations
        self.narrow += operations if narrow else 0

    @contextmanager
    def product_of_integers(self, operations: int) -> Iterator[None]:
        """Count a product of int16 mantissas as a whole, and not the ops that implement it."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False
        self.add(operations, narrow=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op, and count it if it is a contraction."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.paused:
            return result
        name = func.name().partition(".")[0]
        if name == "lowp::quantize" and _is_narrow(args[1]):
            self._remember(result)
        elif name in _COPIES and self._is_written(args[1] if name == "aten::copy_" else args[0]):
            self._remember(result)
        operations = self._operations(func, name, args, kwargs, result)
        if operations:
            self.add(operations, all(self._is_narrow(x) for x in _operands(name, args)))
        return result

    def _operations(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
        if "scaled_dot_product" in name:
            count = sdpa_backward_flop_count if "backward" in name else sdpa_flop_count
            return int(count(*(tuple(x.shape) for x in _operands(name, args))))
        formula = self._formulas.get(func.overloadpacket)
        return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))

    def _is_narrow(self, x: Tensor) -> bool:
        return x.element_size() <= 2 or self._is_written(x) or fits_16_bits(x)

    def _remember(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        self._written[storage.data_ptr()] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def _is_written(self, x: Tensor) -> bool:
        if x.layout is not torch.strided:
            return False
        found = self._written.get(x.untyped_storage().data_ptr())
        return found is not None and not found.expired()  # type: ignore[no-untyped-call]


def _operands(name: str, args: tuple[Any, ...]) -> Iterator[Tensor]:
    """Yield the floating-point tensors that are multiplied, without addends and masks."""
    first = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
    if name in ("aten::addmm", "aten::baddbmm", "aten::addbmm"):
        first = first[1:]
    elif "scaled_dot_product" in name:
        first = first[: 4 if "backward" in name else 3]
    elif "convolution" in name:
        first = first[: 3 if "backward" in name else 2]
        if "backward" in name:  # gradient, input, weight; an operand that is no factor gives its shape
            wanted: Sequence[bool] = args[-1]
            used = {0, *((1,) if wanted[1] else ()), *((2,) if wanted[0] else ())}
            first = [x for place, x in enumerate(first) if place in used]
    return iter(first)


def _is_narrow(text: str) -> bool:
    """Whether a cast's text names elements of at most 16 bits under a scale of any value."""
    format = casts.parse(text).format
    return isinstance(format, ScaledFormat) and format.element.bits <= 16


def fits_16_bits(x: Tensor) -> bool:
    """Whether all values are numbers of fp16, all of bf16, or all int16 times one power of two; True if empty.

    Infinities and NaNs are numbers of both float formats.
    """
    x = x.detach()
    if any(torch.equal(torch.nan_to_num(x), torch.nan_to_num(x.to(dtype).to(x.dtype))) for dtype in _SIXTEEN):
        return True
    maximum = float(x.abs().max())
    if not math.isfinite(maximum):
        return False
    mantissas = torch.ldexp(x.double(), torch.tensor(15 - math.frexp(maximum)[1], device=x.device))
    return torch.equal(mantissas, mantissas.round())


_SIXTEEN = (torch.float16, torch.bfloat16)
