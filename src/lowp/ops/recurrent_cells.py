"""The gates of recurrent cells, in fp32: one step forward, and its derivative from recomputable data.

A step takes the two projections of all gates side by side (of the input and of the hidden state) and the state; letters
are those of torch.nn.LSTM, GRU and RNN.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

Slopes = tuple[Tensor, ...]


class Cell(ABC):
    """A recurrent cell, and whether it has a cell state besides the hidden one."""

    has_memory = False

    @abstractmethod
    def step(self, x: Tensor, h: Tensor, hidden: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the new hidden state and memory of the projections x and h and the old state."""

    @abstractmethod
    def gates_of(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        """Return the gates of projections, of all steps at once."""

    @abstractmethod
    def slopes(self, gates: tuple[Tensor, ...], hidden: Tensor, memory: tuple[Tensor, Tensor] | None) -> Slopes:
        """Return the factors of gradients that `derivative` takes, of all steps at once.

        `hidden` is the state before each step, `memory` that before and after it.
        """

    @abstractmethod
    def derivative(
        self, slopes: Slopes, gradient: Tensor, carry: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of x, h, of the old hidden state past the projection, and of the old memory.

        `gradient` is that of the new hidden state, `carry` of the new memory.
        """


class LSTM(Cell):
    """Long short-term memory: gates i, f, g, o."""

    has_memory = True

    def step(self, x: Tensor, h: Tensor, hidden: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert memory is not None
        i, f, g, o = self.gates_of(x, h)
        memory = f * memory + i * g
        return o * memory.tanh(), memory

    def gates_of(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        sums = x + h
        i, f, _, o = sums.sigmoid().chunk(4, -1)
        return i, f, sums.chunk(4, -1)[2].tanh(), o

    def slopes(self, gates: tuple[Tensor, ...], hidden: Tensor, memory: tuple[Tensor, Tensor] | None) -> Slopes:
        assert memory is not None
        i, f, g, o = gates
        old, new = memory[0], memory[1].tanh()
        of_carry = g * i * (1 - i), old * f * (1 - f), i * (1 - g * g)
        return torch.stack((*of_carry, new * o * (1 - o)), 1), o * (1 - new * new), f

    def derivative(
        self, slopes: Slopes, gradient: Tensor, carry: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        of_gates, through, f = slopes
        carry = carry + gradient * through
        found = torch.empty_like(of_gates)
        torch.mul(of_gates[:, :3], carry.unsqueeze(1), out=found[:, :3])
        torch.mul(of_gates[:, 3], gradient, out=found[:, 3])
        gates = found.flatten(1)
        return gates, gates, None, carry * f


class GRU(Cell):
    """Gated recurrent unit: gates r, z, n; the reset gate acts after the projection of the hidden state."""

    def step(self, x: Tensor, h: Tensor, hidden: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        _, z, n, _ = self.gates_of(x, h)
        return n + z * (hidden - n), None

    def gates_of(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        size = x.shape[-1] // 3
        r, z = (x[..., : 2 * size] + h[..., : 2 * size]).sigmoid().chunk(2, -1)
        candidate = h[..., 2 * size :]
        return r, z, (x[..., 2 * size :] + r * candidate).tanh(), candidate

    def slopes(self, gates: tuple[Tensor, ...], hidden: Tensor, memory: tuple[Tensor, Tensor] | None) -> Slopes:
        r, z, n, candidate = gates
        return (1 - z) * (1 - n * n), (hidden - n) * z * (1 - z), candidate * r * (1 - r), r, z

    def derivative(
        self, slopes: Slopes, gradient: Tensor, carry: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        of_new, of_update, of_reset, r, z = slopes
        new, update = gradient * of_new, gradient * of_update
        reset = new * of_reset
        return torch.cat([reset, update, new], -1), torch.cat([reset, update, new * r], -1), gradient * z, None


class TanhRNN(Cell):
    """Elman's cell with tanh."""

    def step(self, x: Tensor, h: Tensor, hidden: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return (x + h).tanh(), None

    def gates_of(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        return ((x + h).tanh(),)

    def slopes(self, gates: tuple[Tensor, ...], hidden: Tensor, memory: tuple[Tensor, Tensor] | None) -> Slopes:
        return (1 - gates[0] * gates[0],)

    def derivative(
        self, slopes: Slopes, gradient: Tensor, carry: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        gates = gradient * slopes[0]
        return gates, gates, None, None


class ReluRNN(TanhRNN):
    """Elman's cell with the positive part."""

    def step(self, x: Tensor, h: Tensor, hidden: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return (x + h).relu(), None

    def gates_of(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        return (x + h > 0,)

    def slopes(self, gates: tuple[Tensor, ...], hidden: Tensor, memory: tuple[Tensor, Tensor] | None) -> Slopes:
        return gates


CELLS: dict[str, Cell] = {"lstm": LSTM(), "gru": GRU(), "rnn_tanh": TanhRNN(), "rnn_relu": ReluRNN()}
