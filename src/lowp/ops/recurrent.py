"""Runners of the recurrent calls: torch.lstm, gru, rnn_tanh, rnn_relu (whole networks) and their cells.

Every projection is a contraction under the rule: of the input for all steps at once, of the hidden state step by step.
The gates and an LSTM's memory are fp32; hidden states are rounded as outputs, the memory once, when it is returned.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowp.kernels.tracing import functorch_is_active
from lowp.ops.call import Call, RoleCasts
from lowp.ops.casting import Operand, operand
from lowp.ops.contraction import linear, runner
from lowp.ops.products import cast_operand, summed
from lowp.ops.recurrent_cells import CELLS
from lowp.ops.sequence import Layer, composed, run
from lowp.ops.signature import Empty, bound, check, require

_NAMES = ("params", "has_biases", "num_layers", "dropout", "train", "bidirectional")


@runner
def recurrent(call: Call) -> tuple[Tensor, ...]:
    """torch.lstm, gru, rnn_tanh, rnn_relu: (input, hx, params, has_biases, num_layers, dropout, train, bidirectional,
    batch_first), or for packed sequences (data, batch_sizes, hx, params, has_biases, num_layers, dropout, train,
    bidirectional). Returns the outputs, the last hidden states, and for lstm the last memories.
    """
    packed = "batch_sizes" in call.kwargs or (len(call.args) > 3 and isinstance(call.args[3], (list, tuple)))
    if packed:
        data, sizes, state, params, *settings = bound(call, "data", "batch_sizes", "hx", *_NAMES)
        batches = tuple(sizes.tolist())
    else:
        data, state, params, *settings, batch_first = bound(call, "input", "hx", *_NAMES, "batch_first")
        require(data.dim() == 3)
        data = data.transpose(0, 1) if batch_first else data
        length, batch = data.shape[:2]
        batches, data = (batch,) * length, data.reshape(length * batch, data.shape[2])
    states = [state] if isinstance(state, Tensor) else list(state)
    check(data, *states, *params)
    if not data.shape[0]:
        raise Empty
    result, *last = _network(call, data, batches, states, list(params), *settings)
    if not packed:
        result = result.reshape(length, batch, -1)
        result = result.transpose(0, 1) if batch_first else result
    return result, *last


def _network(
    call: Call,
    data: Tensor,
    batches: tuple[int, ...],
    states: list[Tensor],
    params: list[Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> list[Tensor]:
    """Return the outputs (rows of all steps) and the last states of all layers and directions."""
    directions = 2 if bidirectional else 1
    each = len(params) // (layers * directions)
    require(each * layers * directions == len(params) and each - 2 - 2 * biases in (0, 1))
    last: list[list[Tensor]] = [[] for _ in states]
    for level in range(layers):
        outputs = []
        for direction in range(directions):
            index = level * directions + direction
            own_parameters = params[index * each : (index + 1) * each]
            found = _one(call, data, batches, [one[index] for one in states], own_parameters, biases, direction == 1)
            outputs.append(found[0])
            for kept, one in zip(last, found[1:], strict=True):
                kept.append(one)
        data = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and level < layers - 1:
            data = F.dropout(data, dropout)
    return [data, *(torch.stack(kept) for kept in last)]


def _one(
    call: Call,
    data: Tensor,
    batches: tuple[int, ...],
    states: list[Tensor],
    params: list[Tensor],
    biases: bool,
    reverse: bool,
) -> list[Tensor]:
    """Run one layer in one direction; `params` are those of w_ih, w_hh, b_ih, b_hh and w_hr that exist."""
    input_bias, hidden_bias = (params[2], params[3]) if biases else (None, None)
    readout = params[-1] if len(params) % 2 else None
    name = call.op.removesuffix("_cell")
    layer = Layer(CELLS[name], summed(call.casts), batches, reverse)
    # the first layer's input lies as the caller gave it; a projection of all steps is one product
    projected = linear(call.inner(F.linear, (data, params[0], input_bias)))
    hidden, memory = states[0], states[1] if layer.cell.has_memory else None
    weight = _weight(call, params[1], layer.casts)
    bias = None if hidden_bias is None else hidden_bias.float()
    if readout is not None:
        found = composed(layer, projected, hidden, memory, weight, bias, _weight(call, readout, layer.casts))
    elif functorch_is_active():
        found = composed(layer, projected, hidden, memory, weight, bias)
    else:
        found = run(layer, projected, hidden, memory, weight, bias)
    return [one for one in found if one is not None]


def _weight(call: Call, weight: Tensor, casts: RoleCasts) -> Operand:
    return operand(weight, cast_operand(call, casts, weight, "weight"), casts.gradient_dtype)


@runner
def cell(call: Call) -> Any:
    """torch.lstm_cell, gru_cell, rnn_tanh_cell, rnn_relu_cell(input, hx, w_ih, w_hh, b_ih=None, b_hh=None)."""
    x, state, w_ih, w_hh, b_ih, b_hh = bound(call, "input", "hx", "w_ih", "w_hh", b_ih=None, b_hh=None)
    states = [state] if isinstance(state, Tensor) else list(state)
    check(x, *states, w_ih, w_hh, b_ih, b_hh)
    require(x.dim() in (1, 2) and all(one.dim() == x.dim() for one in states) and (b_ih is None) == (b_hh is None))
    single = x.dim() == 1
    if single:
        x, states = x.unsqueeze(0), [one.unsqueeze(0) for one in states]
    require(all(one.shape[0] == x.shape[0] for one in states))
    params = [w_ih, w_hh] if b_ih is None else [w_ih, w_hh, b_ih, b_hh]
    _, *last = _one(call, x, (x.shape[0],), states, params, b_ih is not None, False)
    last = [one.squeeze(0) if single else one for one in last]
    return tuple(last) if len(last) > 1 else last[0]
