"""One layer of a recurrent network in one direction, as one autograd Function.

The hidden projection of every step is a contraction under the rule, the gates are fp32. Backward keeps the projected
inputs and the hidden states as they were written (16 bits where the format has 16) and computes the gates again, all
steps at once; the weight's gradient is one product over all steps, summed in fp32, instead of one rounding a step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from lowp.compat import constant_when_compiled, remembered_by_identity
from lowp.ops.call import RoleCasts, rounding_once
from lowp.ops.casting import Operand
from lowp.ops.direct import Direct, direct, linear_form
from lowp.ops.products import computed, product
from lowp.ops.recurrent_cells import Cell
from lowp.ops.shields import shield
from lowp.ops.trilinear import FIRST, OUTPUT, SECOND, Linear
from lowp.policy import Rule


@dataclass(frozen=True)
class Layer:
    """A cell, how its tensors are rounded, and the layout of the rows of all steps: `batches[t]` rows at step t.

    The batches of a packed sequence shrink; rows that end earlier keep their last state. `reverse` walks from the end.
    """

    cell: Cell
    casts: RoleCasts
    batches: tuple[int, ...]
    reverse: bool

    @cached_property
    def straight(self) -> Direct | None:
        """What projects hidden states straight from their arguments; None where the definition does."""
        return None if self.casts.watch is not None else direct(of_rounded_weights(self.casts.rule))

    def steps(self) -> Iterator[tuple[int, int, int]]:
        """Yield (first row, past the last row, number of rows) of every step, in the order of the walk."""
        found, start = [], 0
        for count in self.batches:
            found.append((start, start + count, count))
            start += count
        return reversed(found) if self.reverse else iter(found)

    def project(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the hidden projection, rounded as an output, in fp32. `weight` is rounded already."""
        if self.straight is not None:
            found = self.straight.contract(None, linear_form, hidden, weight, bias, None)
            if found is not None:
                return found.float()
        hidden = self.casts.carry(hidden, "input")
        return computed(_form(hidden, weight), OUTPUT, self.casts, hidden, weight, bias).float()


@constant_when_compiled
@remembered_by_identity
def of_rounded_weights(rule: Rule) -> Rule:
    """Return the rule of products with a weight that is rounded already."""
    return replace(rounding_once(rule), weight=None)


def _form(hidden: Tensor, weight: Tensor) -> Linear:
    return Linear(tuple(hidden.shape), tuple(weight.shape))


def run(
    layer: Layer, projected: Tensor, hidden: Tensor, memory: Tensor | None, weight: Operand, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return all hidden states (rows as in `projected`), the last hidden state and the last memory, all rounded."""
    found = _Sequence.apply(layer, projected, hidden, memory, weight.edge, bias, weight.value)  # type: ignore[no-untyped-call]
    return cast("tuple[Tensor, Tensor, Tensor | None]", found)


class _Sequence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layer: Layer,
        projected: Tensor,
        hidden: Tensor,
        memory: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        value: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        rounded_weight = weight if value is None else value
        wide = rounded_weight.float()
        result, state, last_memory = _walked(
            layer,
            projected,
            (hidden.clone(), None if memory is None else memory.float().clone()),
            lambda state: layer.project(state, wide, bias),
            lambda new: layer.casts.cast(new, "output"),
        )
        ctx.layer, ctx.edge = layer, None if value is None else weight
        ctx.save_for_backward(projected, hidden, memory, rounded_weight, bias, result)
        return result, state.to(result.dtype).clone(), last_memory

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # a checkpoint may run its region now
        with shield():
            if torch.is_grad_enabled():
                return _differentiable(ctx.layer, saved, ctx.edge, gradients, ctx.needs_input_grad)
            return _Backward(ctx.layer, saved, gradients, ctx.needs_input_grad).run()


def _walked(
    layer: Layer,
    projected: Tensor,
    states: tuple[Tensor, Tensor | None],
    project: Callable[[Tensor], Tensor],
    write: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Walk through the steps, and return what `run` does. `states`: the hidden state, and the memory in fp32."""
    state, memory = states
    outputs: list[tuple[int, Tensor]] = []
    for start, stop, count in layer.steps():
        kept = None if memory is None else memory[:count]
        h = project(state[:count])
        new, new_memory = layer.cell.step(projected[start:stop].float(), h, state[:count].float(), kept)
        written = write(new)
        outputs.append((start, written))
        state = _replaced(state.to(written.dtype), count, written)
        if memory is not None and new_memory is not None:
            memory = _replaced(memory, count, new_memory)
    return _in_order(outputs), state, None if memory is None else layer.casts.cast(memory, "output")


def _in_order(rows: list[tuple[int, Tensor]]) -> Tensor:
    """Return the rows of all steps from their beginnings and those of each."""
    return torch.cat([one for _, one in sorted(rows, key=lambda pair: pair[0])])


def _replaced(state: Tensor, count: int, new: Tensor) -> Tensor:
    """Return the state with its first rows replaced."""
    return new if count == state.shape[0] else torch.cat([new, state[count:]])


class _Backward:
    """The walk back through the steps."""

    def __init__(
        self, layer: Layer, saved: tuple[Any, ...], gradients: tuple[Tensor | None, ...], wanted: tuple[bool, ...]
    ) -> None:
        self.layer, self.wanted = layer, wanted
        self.projected, self.hidden, self.memory, self.weight, self.bias, self.result = saved
        self.gradients = gradients

    def run(self) -> tuple[Tensor | None, ...]:
        layer, casts = self.layer, self.layer.casts
        wide = self.weight.float()
        before = self._states_before()
        h = layer.project(before, wide, self.bias)
        gates = layer.cell.gates_of(self.projected.float(), h)
        memories = self._memories(gates) if layer.cell.has_memory else None
        slopes = layer.cell.slopes(gates, before.float(), memories)
        outer, last, last_memory = self.gradients
        into = torch.zeros(before.shape, dtype=torch.float32, device=before.device) if outer is None else outer.float()
        batch = self.hidden.shape[0]
        zero = into.new_zeros(batch, into.shape[1])
        carry = zero if last is None else last.float()
        memory = zero if last_memory is None else last_memory.float()
        x_gradient, h_gradient = torch.empty_like(h), torch.empty_like(h)
        for start, stop, count in reversed(list(layer.steps())):
            rows = tuple(one[start:stop] for one in slopes)
            found = layer.cell.derivative(rows, into[start:stop] + carry[:count], memory[:count])
            x_gradient[start:stop] = found[0]
            narrow = casts.carry(found[1], "grad").float()
            h_gradient[start:stop] = narrow
            back = self._back(narrow, wide)
            carry = _replaced(carry, count, back if found[2] is None else back + found[2])
            if found[3] is not None:
                memory = _replaced(memory, count, found[3])
        return (
            None,
            x_gradient,
            carry,
            memory if self.memory is not None else None,
            *self._parameters(before, h_gradient),
            None,
        )

    def _back(self, gradient: Tensor, wide: Tensor) -> Tensor:
        """Return the gradient of the hidden state through its projection."""
        shape = (gradient.shape[0], wide.shape[1])
        return computed(Linear(shape, tuple(wide.shape)), FIRST, self.layer.casts, wide, gradient).float()

    def _parameters(self, before: Tensor, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        casts = self.layer.casts
        weight = bias = None
        if self.wanted[4]:
            operand = casts.carry(before, "input")
            weight = computed(_form(operand, self.weight), SECOND, casts, operand, gradient)
        if self.wanted[5]:
            bias = casts.cast(gradient.sum(0), "bias gradient").to(self.bias.dtype)
        return weight, bias

    def _states_before(self) -> Tensor:
        """Return the hidden state that every row saw."""
        state, found = self.hidden, []
        for start, stop, count in self.layer.steps():
            found.append((start, state[:count]))
            state = _replaced(state.to(self.result.dtype), count, self.result[start:stop])
        return _in_order(found)

    def _memories(self, gates: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return the memory before and after every row, computed again (c = f c + i g)."""
        i, f, g, _ = gates
        state, added = self.memory.float(), i * g
        old, new = torch.empty_like(added), torch.empty_like(added)
        for start, stop, count in self.layer.steps():
            old[start:stop] = state[:count]
            torch.mul(f[start:stop], state[:count], out=new[start:stop]).add_(added[start:stop])
            state = _replaced(state, count, new[start:stop])
        return old, new


def composed(
    layer: Layer,
    projected: Tensor,
    hidden: Tensor,
    memory: Tensor | None,
    weight: Operand,
    bias: Tensor | None,
    readout: Operand | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same layer as a chain of differentiable ops: for double backward, torch.func, torch.compile and projections.

    `readout` is the projection of an LSTM's hidden state (proj_size).
    """
    casts = layer.casts

    def product_with(x: Tensor, weight: Operand, bias: Tensor | None = None) -> Tensor:
        return product(_form(x, weight.edge), OUTPUT, casts, Operand(casts.carry(x, "input")), weight, bias)

    return _walked(
        layer,
        projected,
        (hidden, None if memory is None else memory.float()),
        lambda state: product_with(state, weight, bias).float(),
        lambda new: casts.cast(new, "output") if readout is None else product_with(new, readout),
    )


def _differentiable(
    layer: Layer,
    saved: tuple[Any, ...],
    edge: Tensor | None,
    gradients: tuple[Tensor | None, ...],
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Return gradients that can be differentiated again."""
    projected, hidden, memory, weight, bias, _ = saved
    operand = Operand(weight) if edge is None else Operand(edge, weight)
    outputs = composed(layer, projected, hidden, memory, operand, bias)
    inputs = (None, projected, hidden, memory, operand.edge, bias, None)
    pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if y is not None and g is not None]
    indices = [index for index, one in enumerate(inputs) if one is not None and wanted[index]]
    found = torch.autograd.grad(
        [y for y, _ in pairs],
        [cast(Tensor, inputs[index]) for index in indices],
        [g.to(y.dtype) for y, g in pairs],
        create_graph=True,
        allow_unused=True,
    )
    result: list[Tensor | None] = [None] * 7
    for index, one in zip(indices, found, strict=True):
        result[index] = one
    return tuple(result)
