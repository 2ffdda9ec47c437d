"""The gates of recurrent cells, in fp32: one step forward, and its derivative from recomputable data.

A step takes the two projections of all gates side by side (of the input and of the hidden state) and the state; letters
are those of torch.nn.LSTM, GRU and RNN.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cell(ABC):
    """A recurrent cell: how many gates it has, and whether it has a cell state besides the hidden one."""

    gates: int
    has_memory: bool = False

    @abstractmethod
    def step(self, x: Tensor, h: Tensor, hidden: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the new hidden state and memory of the projections x and h and the old state."""

    @abstractmethod
    def prepare(self, x: Tensor, h: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the data that `derivative` needs, for all steps at once."""

    @abstractmethod
    def derivative(
        self, prepared: tuple[Tensor, ...], memory: tuple[Tensor, Tensor] | None, gradient: Tensor, carry: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return the gradients of x, h, of the old hidden state past the projection, and of the old memory.

        `memory` is the old and the new memory, `gradient` that of the new hidden state, `carry` of the new memory.
        """


class LSTM(Cell):
    """Long short-term memory: gates i, f, g, o."""

    def step(self, x: Tensor, h: Tensor, hidden: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert memory is not None
        i, f, g, o = (x + h).chunk(4, -1)
        memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
        return o.sigmoid() * memory.tanh(), memory

    def prepare(self, x: Tensor, h: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        i, f, g, o = (x + h).chunk(4, -1)
        return i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()

    def derivative(
        self, prepared: tuple[Tensor, ...], memory: tuple[Tensor, Tensor] | None, gradient: Tensor, carry: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        assert memory is not None
        i, f, g, o = prepared
        old, new = memory[0], memory[1].tanh()
        through = gradient * o * (1 - new * new)
        carry = through if carry is None else carry + through
        parts = [
            carry * g * i * (1 - i),
            carry * old * f * (1 - f),
            carry * i * (1 - g * g),
            gradient * new * o * (1 - o),
        ]
        gates = torch.cat(parts, -1)
        return gates, gates, None, carry * f


class GRU(Cell):
    """Gated recurrent unit: gates r, z, n; the reset gate acts after the projection of the hidden state."""

    def step(self, x: Tensor, h: Tensor, hidden: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        _, z, n, _ = self._gates(x, h)
        return n + z * (hidden - n), None

    @staticmethod
    def _gates(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        size = x.shape[-1] // 3
        r, z = (x[..., : 2 * size] + h[..., : 2 * size]).sigmoid().chunk(2, -1)
        candidate = h[..., 2 * size :]
        return r, z, (x[..., 2 * size :] + r * candidate).tanh(), candidate

    def prepare(self, x: Tensor, h: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        return (*self._gates(x, h), hidden)

    def derivative(
        self, prepared: tuple[Tensor, ...], memory: tuple[Tensor, Tensor] | None, gradient: Tensor, carry: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        r, z, n, candidate, hidden = prepared
        new = gradient * (1 - z) * (1 - n * n)
        update = gradient * (hidden - n) * z * (1 - z)
        reset = new * candidate * r * (1 - r)
        return torch.cat([reset, update, new], -1), torch.cat([reset, update, new * r], -1), gradient * z, None


class TanhRNN(Cell):
    """Elman's cell with tanh."""

    def step(self, x: Tensor, h: Tensor, hidden: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return (x + h).tanh(), None

    def prepare(self, x: Tensor, h: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        return ((x + h).tanh(),)

    def derivative(
        self, prepared: tuple[Tensor, ...], memory: tuple[Tensor, Tensor] | None, gradient: Tensor, carry: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        gates = gradient * (1 - prepared[0] * prepared[0])
        return gates, gates, None, None


class ReluRNN(Cell):
    """Elman's cell with the positive part."""

    def step(self, x: Tensor, h: Tensor, hidden: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return (x + h).relu(), None

    def prepare(self, x: Tensor, h: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        return (x + h > 0,)

    def derivative(
        self, prepared: tuple[Tensor, ...], memory: tuple[Tensor, Tensor] | None, gradient: Tensor, carry: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        gates = gradient * prepared[0]
        return gates, gates, None, None


CELLS: dict[str, Cell] = {"lstm": LSTM(4, True), "gru": GRU(3), "rnn_tanh": TanhRNN(1), "rnn_relu": ReluRNN(1)}
