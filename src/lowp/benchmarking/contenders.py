"""The rows of a measurement: fp32, torch.amp and lowp's precisions, as the same training in the same loop."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowp import presets
from lowp.formats import FORMATS, FloatFormat, Format, ScaledFormat
from lowp.kernels.products import torchs_own_device
from lowp.ops.direct import one_dtype
from lowp.precision import Precision
from lowp.recipes.recipe import Data
from lowp.recipes.training import STOPS, Settings, Training

BASELINE = "fp32"
# torch raises RuntimeError if it has no 16-bit kernel for an op on this device
STOPPED_BY = (*STOPS, RuntimeError)
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Contender:
    """A row of a benchmark, as plain values that can be sent to another process.

    `kind` is ``fp32``, ``torch.amp`` or ``lowp``; `settings.precision` is its precision. `tf32`: whether a GPU may
    round the operands of fp32 products to TF32.
    """

    label: str
    kind: str
    settings: Settings
    tf32: bool = False

    @property
    def narrow(self) -> Format | None:
        """The format of the operands of products: the widest one in the policy; None for fp32."""
        if self.kind == "fp32":
            return None
        if self.kind == "torch.amp":
            return FORMATS[self.settings.precision]
        rules = [rule for rule in presets.parse(self.settings.precision).policy.rules if rule.weight is not None]
        operands = (cast for rule in rules for cast in (rule.input, rule.weight, *rule.grads) if cast is not None)
        return max((cast.format for cast in operands), key=significand_bits, default=None)

    @property
    def sums_integers(self) -> bool:
        """Whether products are summed as integers."""
        rules = presets.parse(self.settings.precision).policy.rules if self.kind == "lowp" else ()
        return any(rule.accumulate is not None and rule.accumulate.format in ("int32", "exact") for rule in rules)


def contenders_of(settings: Settings, precisions: Sequence[str], torch_amp: bool) -> list[Contender]:
    """Return the rows: fp32 (on a GPU with TF32 off and on), torch.amp in fp16 and bf16, and each precision of lowp.

    Raises InvalidInput for unknown precisions, with similar names.
    """
    plain = replace(settings, precision="fp32", loss_scale=None, accumulate=None).filled()
    rows = [Contender(BASELINE, "fp32", plain)]
    if torch.device(settings.device).type == "cuda":
        rows.append(Contender("fp32, TF32 on", "fp32", plain, tf32=True))
    if torch_amp:
        rows += [Contender(f"torch.amp {name}", "torch.amp", replace(plain, precision=name)) for name in _DTYPES]
    for precision in dict.fromkeys(word.strip() for word in precisions):
        if precision != "fp32":
            rows.append(Contender(f"lowp {precision}", "lowp", replace(settings, precision=precision).filled()))
    return rows


def begin(contender: Contender, data: Data) -> Training:
    """Return the training of a contender with its models, before the first step."""
    if contender.kind != "torch.amp":
        return Training(contender.settings, data)
    training = Training(replace(contender.settings, precision="fp32"), data)
    training.precision = TorchAmp(contender.settings.precision, training.device)
    return training


def step_of(training: Training, contender: Contender, batch: Any) -> Tensor:
    """Take one step with the TF32 setting of the contender, and return the loss."""
    with tf32_of(contender):
        return training.step(batch)


class TorchAmp(Precision):
    """The interface of `Precision` on torch.autocast and, for fp16, torch.amp.GradScaler, as PyTorch's AMP recipe."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__("fp32")
        self._device_type, self._dtype = device.type, _DTYPES[name]
        self._torch_scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def autocast(self) -> Any:
        """Return torch.autocast in the dtype."""
        return torch.autocast(self._device_type, dtype=self._dtype)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Scale the loss and run backward."""
        self._torch_scaler.scale(loss).backward(**options)  # type: ignore[no-untyped-call]

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the loss scale."""
        self._torch_scaler.unscale_(optimizer)

    def step(self, *optimizers: torch.optim.Optimizer, closure: Any = None) -> Any:
        """Step the optimizers with finite gradients, and update the scale."""
        results = [self._torch_scaler.step(optimizer) for optimizer in optimizers]
        self._torch_scaler.update()
        self.steps += 1
        return results[-1]

    @property
    def scale(self) -> float:
        """The loss scale, 1 without scaling. Waits for the device."""
        return float(self._torch_scaler.get_scale())


@contextmanager
def tf32_allowed(allowed: bool) -> Iterator[None]:
    """Set whether CUDA's fp32 products and convolutions may use TF32, and restore the setting at the end."""
    cudnn: Any = torch.backends.cudnn
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "tf32" if allowed else "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def tf32_of(contender: Contender) -> AbstractContextManager[None]:
    """Return a context with the TF32 setting of the contender, without effect on a CPU."""
    is_cuda = torch.device(contender.settings.device).type == "cuda"
    return tf32_allowed(contender.tf32) if is_cuda else nullcontext()


def products_of(contender: Contender) -> str:
    """Return the implementation of the products of linear layers in words, as in `lowp --version --verbose`."""
    device, precision = torch.device(contender.settings.device), contender.settings.precision
    if contender.kind != "lowp":
        return "fp32" if contender.kind == "fp32" else f"torch's {precision}"
    return products_under(precision, device)


def products_under(precision: str, device: torch.device) -> str:
    """Return the same for one of lowp's precisions."""
    policy = presets.parse(precision).policy
    rule = policy.match("linear", "contraction", "within")  # no module that rules name
    if rule is None or rule.is_empty:
        return "fp32"
    if rule.accumulate is not None and rule.accumulate.format in ("int32", "exact"):
        return "int16" if rule.weight is None else f"int{significand_bits(rule.weight.format)}"
    dtype = one_dtype(rule)
    is_own = dtype is not None and torchs_own_device(torch.empty(0, device=device), dtype) is not None
    return f"torch's {precision}" if is_own else "fp32 of rounded operands"


def significand_bits(format: Format) -> int:
    """Return the bits of the significand including the hidden bit; all bits of an integer."""
    element = format.element if isinstance(format, ScaledFormat) else format
    return element.precision if isinstance(element, FloatFormat) else element.bits
