"""What is looked at in one step: every op of the forward pass, the gradients that arrive at its outputs, the weights.

A function mode sees the ops of a model in plain fp32, under torch.autocast and in torch.compile's eager stance; in a
region of lowp's the region's own observers do. Gradients come through hooks on the outputs, parameters by the
optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lowp.kernels.spectra import count_tensor
from lowp.numerics.modes import (
    Paths,
    depth,
    in_backward,
    is_on,
    local,
    op_of,
    put_on,
    source_line,
    take_off,
    tensors_in,
)
from lowp.numerics.record import Key, OpSeen, Part, Print
from lowp.numerics.spectrum import Spectrum
from lowp.numerics.updates import Updates
from lowp.ops.observing import Observation
from lowp.region import entries

__all__ = ["Watch", "parameter_key"]

_READ = ("contraction", "norm", "softmax", "wide")  # classes whose inputs are looked at
_PROBES = 4


def parameter_key(name: str, role: str, phase: str) -> Key:
    """The key of a parameter: its module, and its own name in place of an op's."""
    module, _, own = name.rpartition(".")
    return Key(module, own, role, phase)


class Seen(NamedTuple):
    """What one look at a tensor told."""

    spectrum: Spectrum
    print: Print


class Watch(TorchFunctionMode):
    """Looks at one step, from its first op to the optimizer's; what it saw is in `part` once `finish` was called."""

    def __init__(self, step: int, paths: Paths, model: nn.Module, scale: Callable[[], float]) -> None:
        super().__init__()
        self.step, self.part = step, Part()
        self._paths, self._scale = paths, scale
        self._names = {id(one): name for name, one in model.named_parameters()}
        self._parameters = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        self._weight_gradients: dict[str, Seen] = {}
        self._gradients: dict[int, Seen] = {}
        self._hooked = 0
        self._computed_again: nn.Module | None = None
        self._prints: list[Print] = []
        self._weights: dict[str, Tensor] = {}
        self._ends: list[Callable[[], None]] = []
        self._told: list[Seen] = []
        self._addresses = {local(one.detach()).data_ptr(): name for name, one in model.named_parameters()}
        self._passes = 0
        self.on_backward: Callable[[Tensor], None] = lambda loss: None

    # -- the forward pass ---------------------------------------------------------------------------------------------
    def follow(self) -> None:
        """Follow the modules that are called from now on."""
        self._ends.append(self._paths.follow(self._entered, self._left))
        for name, parameter in self._parameters:
            listen: Any = parameter.register_post_accumulate_grad_hook
            self._ends.append(listen(partial(self._accumulated, name)).remove)

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        """Look at a gradient as backward leaves it: before it is clipped, which formats do not see."""
        gradient = parameter.grad
        if gradient is not None and not gradient.is_sparse:
            key = parameter_key(name, "weight_grad", "backward")
            self._weight_gradients[name] = looked_at(key, gradient, self._scale())

    def _entered(self, module: nn.Module) -> None:
        if in_backward() and not is_on(self):  # a checkpoint computes again, where no mode is in force
            self._computed_again = module
            put_on(self, depth())

    def _left(self, module: nn.Module, result: Any) -> None:
        if self._computed_again is module:
            self._computed_again = None
            take_off(self)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a call and look at it."""
        kwargs = kwargs or {}
        if func is Tensor.backward:
            if not self._passes:
                self._told.clear()  # of passes that tried loss scales
            self._passes += 1
            self.on_backward(args[0])
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        row = op_of(func)
        if row is not None and not self._in_region():
            self._saw(row.name, row.op_class, row.operands, (args, kwargs), result)
        return result

    def _in_region(self) -> bool:
        entry = entries.current()
        return entry is not None and entry.engine is not None and entry.engine.active

    def observed(self, seen: Observation) -> None:
        """Count a tensor that a region of lowp's tells of: it knows the ops as the user called them."""
        reads = seen.op_class in _READ
        if seen.phase == "backward" and seen.role == "grad" and (seen.tensor.ndim or reads):
            key = Key(seen.path, seen.op, "grad", "backward")
            self._told.append(looked_at(key, seen.tensor, self._scale()))
        if seen.phase != "forward" or in_backward():
            return
        op = self._op(seen.path, seen.op, seen.op_class, "input weight")
        name = self._addresses.get(seen.tensor.data_ptr()) if seen.role == "weight" else None
        if seen.role == "output":
            op.calls += 1
        if name is not None:
            op.parameters[seen.role] = name
        elif seen.role == "output" or reads:
            to = seen.cast.format if seen.cast is not None else str(seen.tensor.dtype).removeprefix("torch.")
            op.dtypes[seen.role] = str(to)
            self._count(Key(seen.path, seen.op, seen.role, "forward"), seen.tensor)

    def _saw(self, op: str, op_class: str, operands: str, given: tuple[Any, Any], result: Any) -> None:
        """Count an op that has run."""
        outputs = [one for one in tensors_in(result) if one.is_floating_point()]
        if not outputs:
            return
        module = self._paths.current
        again = in_backward()
        reads = op_class in _READ
        if not again:
            seen = self._op(module, op, op_class, operands)
            seen.calls += 1
            if reads:
                self._look_at_operands(seen, module, op, given)
            if op_class == "contraction":
                seen.multiplications += _multiplications(op, given[0], outputs[0])
            for one in outputs:
                seen.dtypes["output"] = str(one.dtype).removeprefix("torch.")
                self._count(Key(module, op, "output", "forward"), one)
        if torch.is_grad_enabled():
            for one in outputs:
                if one.requires_grad and one.grad_fn is not None and (one.ndim or reads):
                    self._await_gradient(Key(module, op, "grad", "backward"), one)

    def _op(self, module: str, op: str, op_class: str, operands: str) -> OpSeen:
        place = (module, op)
        if place not in self.part.ops:
            self.part.ops[place] = OpSeen(op_class, line=source_line(), operands=operands)
        return self.part.ops[place]

    def _look_at_operands(self, seen: OpSeen, module: str, op: str, given: tuple[Any, Any]) -> None:
        roles = seen.operands.split()
        for place, one in enumerate(one for one in tensors_in(given) if one.is_floating_point()):
            role = roles[place] if place < len(roles) else ""
            name = self._names.get(id(one))
            if name is not None:
                seen.parameters[role or name.rpartition(".")[2]] = name
            elif role in ("input", "weight"):
                seen.dtypes[role] = str(one.dtype).removeprefix("torch.")
                self._count(Key(module, op, role, "forward"), one)

    def _count(self, key: Key, tensor: Tensor) -> None:
        if not (tensor.is_sparse or tensor.is_meta):
            self._keep(looked_at(key, tensor))

    def _keep(self, seen: Seen) -> None:
        tensors, key = self.part.tensors, seen.print.key
        tensors[key] = tensors[key] + seen.spectrum if key in tensors else seen.spectrum
        self._prints.append(seen.print)

    # -- the backward pass --------------------------------------------------------------------------------------------
    def _await_gradient(self, key: Key, output: Tensor) -> None:
        """Count the gradient of an output; the last one of each hook, where a pass is tried with several scales."""
        self._hooked += 1
        number = self._hooked

        def arrived(gradient: Tensor) -> None:
            self._gradients[number] = looked_at(key, gradient, self._scale())

        output.register_hook(arrived)  # type: ignore[no-untyped-call]

    # -- the optimizer's step -----------------------------------------------------------------------------------------
    def before_step(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Look at weights, and at gradients that no backward pass has left."""
        for name, parameter in parameters:
            if name in self._weights:
                continue
            weight = local(parameter.detach())
            self._count(parameter_key(name, "weight", "step"), weight)
            self._weights[name] = weight.clone()
            if name not in self._weight_gradients and parameter.grad is not None and not parameter.grad.is_sparse:
                self._count(parameter_key(name, "weight_grad", "backward"), local(parameter.grad))

    def after_step(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Look at what the step has changed."""
        for name, parameter in parameters:
            before = self._weights.pop(name, None)
            if before is None or parameter.grad is None:
                continue
            update = local(parameter.detach()).float() - before.float()
            key = parameter_key(name, "update", "step")
            self.part.tensors[key] = Spectrum.of(update)
            gradient = None if parameter.grad.is_sparse else local(parameter.grad)
            seen = Updates.of(before, update, gradient)
            self.part.updates[name] = self.part.updates[name] + seen if name in self.part.updates else seen

    def exponents(self) -> NDArray[np.int64]:
        """How many gradients of activations of this step are in each octave, without the loss scale."""
        counts = np.zeros(256, np.int64)
        for seen in (*self._gradients.values(), *self._told):
            counts += seen.spectrum.octaves
        return counts

    def stop(self) -> None:
        """Stop looking at ops; the step of the optimizer is still to come."""
        for end in self._ends:
            end()
        self._ends.clear()

    def finish(self) -> Part:
        """Count the gradients that have arrived and return all that was seen."""
        self.stop()
        for seen in (*self._gradients.values(), *self._told, *self._weight_gradients.values()):
            self._keep(seen)
        self._gradients.clear()
        self._told.clear()
        self._weight_gradients.clear()
        self.part.prints[self.step] = self._prints
        return self.part


def looked_at(key: Key, tensor: Tensor, scale: float = 1.0) -> Seen:
    """Count a tensor divided by `scale`, in one read, and take its print: the sum of its bits, and a few numbers."""
    flat = local(tensor.detach()).reshape(-1)
    counts, last = count_tensor(flat, scale), flat.numel() - 1
    numbers: list[float] = []
    if last >= 0:
        few = flat[[last * place // (_PROBES - 1) for place in range(_PROBES)]].float()
        numbers = (few / scale if scale != 1.0 else few).tolist()
    return Seen(Spectrum.from_counts(counts, last + 1), Print(key, counts.checksum, tuple(numbers)))


def _multiplications(op: str, args: tuple[Any, ...], output: Tensor) -> int:
    """How many products a contraction sums up, from the shapes of its operands; 0 where they do not tell."""
    given = tensors_in(args)
    if len(given) < 2 or not given[0].ndim:
        return 0
    if op.startswith("conv"):  # each output of a convolution is a sum over the window of its weight
        window = given[1][0].numel() if given[1].shape[0] == output.shape[1] else given[1][:, 0].numel()
        return output.numel() * window
    return output.numel() * given[0].shape[-1]
