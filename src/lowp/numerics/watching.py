"""What is looked at in one step: every op of the forward pass, the gradients that arrive at its outputs, the weights.

It observes the calls of torch's functions in plain fp32, under torch.autocast and in torch.compile's eager stance; in a
region of lowp's it observes the region. Gradients come through hooks on the outputs, parameters by the
optimizer.
"""

import time
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from functools import cached_property, partial
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lowp.kernels.steps.spectra import sampled, slope_of
from lowp.kernels.tracing import functorch_is_active
from lowp.nested import tensors_of
from lowp.numerics.models import Models
from lowp.numerics.modes import Paths, Seam, in_backward, numbers_of, op_of, source_line
from lowp.numerics.part import CountedTensor, add_up, looked_at, of_model, parameter_key
from lowp.numerics.record import Key, Octaves, OpSeen, Part, Print
from lowp.numerics.schedule import HOOK
from lowp.numerics.spectrum import Spectrum, Updates
from lowp.numerics.tape import Tape, calls_again
from lowp.ops.observing import Observation, observe
from lowp.region import entries

_READ = ("contraction", "norm", "softmax", "wide")  # classes whose inputs are looked at
_SENSITIVE = ("contraction", "norm", "softmax")  # classes whose activations policies round
_READ_ONE = ("linear", "conv", "layer_norm", "batch_norm", "group_norm", "instance_norm", "rms_norm", "softmax")
_ACTIVATION_OF = {"grad": "output", "input gradient": "input"}  # by the role of its gradient in a region
_SAMPLED = 2048  # numbers of an activation that are kept until its gradient arrives


class StepWatch:
    """Looks at one step, or at some modules in it, from its first op to the end; what it saw is in `part` then.

    `modules` are the paths of those that are looked at, None for all. `seam` lets it see the ops in these. `beside`:
    the step's own ops are left alone, as they are compiled, and are looked at as they run again. `seconds` counts the
    time that was spent here, and that which torch needs to come here, but for what `seam` counts.
    """

    def __init__(
        self,
        step: int,
        seam: Seam,
        models: Models,
        scale: Callable[[], float],
        modules: Collection[str] | None = None,
        beside: bool = False,
    ) -> None:
        self.step, self.part, self.seconds = step, Part(), 0.0
        self.beside, self.is_complete = beside, not beside  # complete: ops were looked at
        self._paths, self._models, self._scale, self._seam = Paths(models), models, scale, seam
        self._modules = None if modules is None else frozenset(modules)
        self._gradients: dict[int | Key, CountedTensor] = {}  # by hook, those of parameters by key
        self._slopes: dict[int, tuple[Key, NDArray[np.float64]]] = {}
        self._numbers = count()  # of hooks
        self._computed_again: nn.Module | None = None
        self._prints: list[Print] = []
        self._weights: dict[str, Tensor] = {}
        self._ends: list[Callable[[], None]] = []
        self._told: list[CountedTensor] = []
        self._unanswered: dict[Key, list[Tensor]] = {}  # of activations in a region, numbers whose gradients may come
        self._answered: list[tuple[Key, Tensor, NDArray[np.float64]]] = []
        self._has_passed = False  # whether a backward pass began
        self._first = ""  # what the first model was called when there came to be several

    # -- where it looks -----------------------------------------------------------------------------------------------
    def looks_at(self, module: str) -> bool:
        """Whether a module is looked at in this step."""
        return self._modules is None or module in self._modules

    def _is_looked_at(self, name: str, parameter: Tensor) -> bool:
        """Whether a parameter is looked at in this step: complex ones have no low precision."""
        return not parameter.is_complex() and self.looks_at(name.rpartition(".")[0])

    @property
    def is_whole(self) -> bool:
        """Whether every module is looked at."""
        return self._modules is None

    def rename(self, model: str) -> None:
        """Put the name of the only model so far before each path."""
        self._first = model
        self.part = self.part.renamed(model)
        for name in ("_prints", "_gradients", "_told", "_slopes", "_answered", "_unanswered"):
            setattr(self, name, of_model(getattr(self, name), model))

    def follow(self, running: nn.Module | None = None) -> None:
        """Follow the modules that are called from now on; `running` is a model whose call has begun."""
        self.pause()
        if not self.beside:
            self._follow_ops(running)
        for name, parameter in self._models.named_parameters():
            if parameter.requires_grad and self._is_looked_at(name, parameter):
                listen: Any = parameter.register_post_accumulate_grad_hook
                self._ends.append(listen(partial(self._accumulated, name)).remove)

    def _follow_ops(self, running: nn.Module | None = None) -> None:
        self._ends.append(self._paths.follow(self._entered, self._left, self._modules, running))
        self.resume()

    def look_again(self, tape: Tape, gradient: Tensor | None) -> None:
        """Look at the step of a tape, which runs once more in here; the time of that is not counted in `seconds`.

        `gradient` is that of the loss, None for 1. The watch is paused before and after. Raises ValueError where the
        loss did not come of the tape.
        """
        seconds, told = self.seconds, len(self._told)
        end = observe(self.observed) if tape.region is not None else None
        try:
            with tape.region.resume() if end is not None else nullcontext():
                self._follow_ops()
                loss = calls_again(tape)
                if loss is None:
                    raise ValueError("the loss was not computed from a call of the model")
                self._forget_gradients(told)
                torch.autograd.backward(loss, torch.ones_like(loss) if gradient is None else gradient)
            self.is_complete = True
        finally:
            if end is not None:
                end()
            self.pause()
            self.seconds = seconds

    def pause(self) -> None:
        """Stop looking at ops, until `follow` is called again; what the optimizer does is still looked at."""
        self._seam.let(self._saw_call, False)
        for end in self._ends:
            end()
        self._ends.clear()

    def resume(self) -> None:
        """Look at ops where the running module is looked at."""
        self._seam.let(self._saw_call, self.looks_at(self._paths.current))

    def _entered(self, module: nn.Module) -> None:
        started = time.perf_counter()
        if not in_backward():
            self.resume()
        elif self.looks_at(self._paths.current) and self._seam.let(self._saw_call, True):
            self._computed_again = module  # a checkpoint computes again, while none sees calls
        self._spent(started, HOOK)

    def _left(self, module: nn.Module, result: Any) -> None:
        started = time.perf_counter()
        if self._computed_again is module:
            self._computed_again = None
            self._seam.let(self._saw_call, False)
        elif not in_backward():
            self._seam.let(self._saw_call, self.looks_at(self._paths.around))
        self._spent(started, HOOK)

    def _spent(self, started: float, around: float) -> None:
        self.seconds += time.perf_counter() - started + around

    # -- the forward pass ---------------------------------------------------------------------------------------------
    def _saw_call(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Look at a call that has run."""
        row = op_of(func)
        if row is not None and self.looks_at(self._paths.current) and not self._in_region():
            self._saw(row.name, row.op_class, row.operands, (args, kwargs), result)

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        """Look at a gradient as backward leaves it: before it is clipped, which formats do not see."""
        started = time.perf_counter()
        gradient = parameter.grad
        if gradient is not None:
            key = parameter_key(name, "weight_grad", "backward")
            self._gradients[key] = looked_at(key, gradient, self._scale())
        self._spent(started, HOOK)

    @cached_property
    def _addresses(self) -> dict[int, str]:
        return {numbers_of(one.detach()).data_ptr(): name for name, one in self._models.named_parameters()}

    def _name_of(self, weight: Tensor) -> str | None:
        return None if functorch_is_active() else self._addresses.get(weight.data_ptr())

    def _in_region(self) -> bool:
        engine = entries.current_engine()
        return engine is not None and engine.active

    def observed(self, seen: Observation) -> None:
        """Count a tensor that a region of lowp's tells of: it knows the ops as the user called them."""
        started = time.perf_counter()
        self._observe(seen, self._models.path_of(seen.path))
        self._spent(started, 0.0)

    def _observe(self, seen: Observation, path: str) -> None:
        reads = seen.op_class in _READ
        if seen.phase == "backward" and seen.role == "grad" and (seen.tensor.ndim or reads):
            key = Key(path, seen.op, "grad", "backward")
            self._told.append(looked_at(key, seen.tensor, self._scale()))
        if seen.op_class in _SENSITIVE and (seen.phase == "backward" or not in_backward()):
            self._observe_slope(Key(path, seen.op, seen.role, seen.phase), numbers_of(seen.tensor))
        if seen.phase != "forward" or in_backward():
            return
        op = self._op(path, seen.op, seen.op_class, "input weight")
        name = self._name_of(seen.tensor) if seen.role == "weight" else None
        if seen.role == "output":
            op.calls += 1
        if name is not None:
            op.read(seen.role, name)
        elif seen.role == "output" or reads:
            to = seen.cast.format if seen.cast is not None else str(seen.tensor.dtype).removeprefix("torch.")
            op.dtypes[seen.role] = str(to)
            self._count(Key(path, seen.op, seen.role, "forward"), seen.tensor)

    def _saw(self, op: str, op_class: str, operands: str, given: tuple[Any, Any], result: Any) -> None:
        """Count an op that has run."""
        outputs = [one for one in tensors_of(result) if one.is_floating_point()]
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
                seen.multiplications += _multiplications(op, tensors_of(given), outputs[0])
            for one in outputs:
                seen.dtypes["output"] = str(one.dtype).removeprefix("torch.")
                self._count(Key(module, op, "output", "forward"), one)
        for one in outputs:
            if _has_gradient(one) and (one.ndim or reads):
                self._await(one, Key(module, op, "grad", "backward"), self._count_gradient)
                if op_class in _SENSITIVE:
                    self._await_slope(Key(module, op, "output", "forward"), one)

    def _observe_slope(self, key: Key, tensor: Tensor) -> None:
        """Keep numbers of an activation, or count its gradient: that of the last one of its key without a gradient.

        Backward passes go through the calls of an op in reverse. A key of which one call gets no gradient, as in an
        evaluation beside the training, has no slope: which call a gradient was of is not certain then. Nor have the
        inputs of ops that read several, such as attention.
        """
        role = key.role if key.phase == "forward" else _ACTIVATION_OF.get(key.role, "")
        reads_one = key.op.startswith(_READ_ONE)
        if tensor.is_meta or not tensor.numel() or not (role == "output" or (role == "input" and reads_one)):
            return
        numbers = sampled(tensor, _SAMPLED)
        if key.phase == "forward":
            self._unanswered.setdefault(key, []).append(numbers.clone())
            return
        key = Key(key.module, key.op, role, "forward")
        kept = self._unanswered.get(key)
        if kept and kept[-1].numel() == numbers.numel():
            slope = tensor.numel() / numbers.numel() * slope_of(kept[-1], numbers, self._scale())
            self._answered.append((key, kept.pop(), slope))

    def _forget_gradients(self, told: int) -> None:
        """Forget the gradients that a region has told of, but for the first ones: of passes that tried loss scales."""
        del self._told[told:]
        while self._answered:
            key, numbers, _ = self._answered.pop()
            self._unanswered[key].append(numbers)

    def _op(self, module: str, op: str, op_class: str, operands: str) -> OpSeen:
        place = (module, op)
        if place not in self.part.ops:
            self.part.ops[place] = OpSeen(op_class, line=source_line(), operands=operands)
        return self.part.ops[place]

    def _look_at_operands(self, seen: OpSeen, module: str, op: str, given: tuple[Any, Any]) -> None:
        roles = seen.operands.split()
        for place, one in enumerate(one for one in tensors_of(given) if one.is_floating_point()):
            role = roles[place] if place < len(roles) else ""
            name = self._models.parameters.get(id(one))
            if name is not None:
                seen.read(role or name.rpartition(".")[2], name)
            elif role in ("input", "weight"):
                seen.dtypes[role] = str(one.dtype).removeprefix("torch.")
                self._count(Key(module, op, role, "forward"), one)
                if seen.op_class in _SENSITIVE and _has_gradient(one):
                    self._await_slope(Key(module, op, role, "forward"), one)

    def _count(self, key: Key, tensor: Tensor) -> None:
        if not tensor.is_meta:
            self._keep(looked_at(key, tensor))

    def _keep(self, seen: CountedTensor) -> None:
        key = seen.print.key
        add_up(self.part.tensors, {key: seen.spectrum})
        add_up(self.part.blocks, {(key, layout): counted for layout, counted in seen.blocks.items()})
        self._prints.append(seen.print)

    # -- the backward pass --------------------------------------------------------------------------------------------
    def begin_backward(self) -> None:
        """See no ops until `resume`; before the first pass a region has told of gradients of trials of scales alone."""
        self._seam.let(self._saw_call, False)
        if not self._has_passed:
            self._forget_gradients(0)
        self._has_passed = True

    def _await(self, tensor: Tensor, key: Key, arrived: Callable[[int, Key, Tensor], None]) -> None:
        """Be told of the gradient of a tensor; the last one of each number counts, where scales are tried."""
        number, first = next(self._numbers), self._first

        def told(gradient: Tensor) -> None:
            started = time.perf_counter()
            arrived(number, key if first == self._first else key.of_model(self._first), gradient)
            self._spent(started, HOOK)

        tensor.register_hook(told)  # type: ignore[no-untyped-call]

    def _count_gradient(self, number: int, key: Key, gradient: Tensor) -> None:
        self._gradients[number] = looked_at(key, gradient, self._scale())

    def _await_slope(self, key: Key, activation: Tensor) -> None:
        """Keep some numbers of an activation until their gradients come, which are kept by the exponents of these."""
        kept = numbers_of(activation.detach())
        if not kept.numel():
            return
        numbers = sampled(kept, _SAMPLED)
        times = kept.numel() / numbers.numel()

        def arrived(number: int, key: Key, gradient: Tensor) -> None:
            found = sampled(numbers_of(gradient), _SAMPLED)
            if found.numel() == numbers.numel():  # of a sharded tensor's gradient torch may show another part
                self._slopes[number] = key, times * slope_of(numbers, found, self._scale())

        self._await(activation, key, arrived)

    # -- the optimizer's step -----------------------------------------------------------------------------------------
    def before_step(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Look at weights, and at gradients that no backward pass has left."""
        for name, parameter in parameters:
            if name in self._weights or not self._is_looked_at(name, parameter):
                continue
            weight = numbers_of(parameter.detach())
            self._count(parameter_key(name, "weight", "step"), weight)
            self._weights[name] = weight.clone()
            key = parameter_key(name, "weight_grad", "backward")
            if key not in self._gradients and parameter.grad is not None:
                self._count(key, numbers_of(parameter.grad))

    def after_step(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Look at what the step has changed."""
        for name, parameter in parameters:
            before = self._weights.pop(name, None)
            if before is None or parameter.grad is None:
                continue
            wide = torch.promote_types(before.dtype, torch.float32)
            update = numbers_of(parameter.detach()).to(wide) - before.to(wide)
            key = parameter_key(name, "update", "step")
            self.part.tensors[key] = Spectrum.of(update)
            gradient = numbers_of(parameter.grad) if parameter.grad.layout is torch.strided else None
            add_up(self.part.updates, {name: Updates.of(before, update, gradient)})

    def exponents(self) -> NDArray[np.int64]:
        """How many gradients of activations of this step are in each octave, without the loss scale."""
        counts = np.zeros(256, np.int64)
        for seen in (*self._gradients.values(), *self._told):
            if seen.print.key.role == "grad":
                counts += seen.spectrum.octaves
        return counts

    def finish(self) -> Part:
        """Count the gradients that have arrived and return all that was seen."""
        self.pause()
        for seen in (*self._gradients.values(), *self._told):
            self._keep(seen)
        certain = [(key, slope) for key, _, slope in self._answered if not self._unanswered[key]]
        for key, slope in (*self._slopes.values(), *certain):
            add_up(self.part.slopes, {key: slope})
        self._gradients.clear()
        self._slopes.clear()
        self._told.clear()
        self._unanswered.clear()
        self._answered.clear()
        self.part.prints[self.step] = self._prints
        self.part.octaves[self.step] = {
            key: Octaves.of(seen) for key, seen in self.part.tensors.items() if key.role != "input" and seen.nonzero
        }
        return self.part


def _has_gradient(activation: Tensor) -> bool:
    has_graph = torch.is_grad_enabled() and activation.grad_fn is not None
    return has_graph and not activation.is_meta and not functorch_is_active()


def _multiplications(op: str, given: list[Tensor], output: Tensor) -> int:
    """How many products a contraction sums up, from the shapes of its operands; 0 where they do not tell."""
    if len(given) < 2 or not given[0].ndim:
        return 0
    if op.startswith("conv"):  # each output of a convolution is a sum over the window of its weight
        window = given[1][0].numel() if given[1].shape[0] == output.shape[1] else given[1][:, 0].numel()
        return output.numel() * window
    return output.numel() * given[0].shape[-1]
