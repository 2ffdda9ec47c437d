"""Contractions of integers: what a step asks of the C++ library, counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowp
from lowp.kernels import cpu

# Three layers. Inputs, weights and output gradients are looked at and converted once each; of the nine products the
# gradient of the data is not asked for; a bias's gradient is summed from the values of the mantissas.
DFP16 = {"lowp_grid": 9, "lowp_write_int16": 9, "lowp_integer_matmul": 8, "lowp_from_int16": 3}
# There every tensor is in the format when it is read: it is compared with its mantissas, or recognised, and what is
# written is written once, statistics in the same pass; weights and their updates by one call.
FLEX = {
    "lowp_grid": 6,
    "lowp_write_int16": 12,
    "lowp_integer_matmul": 8,
    "lowp_same_int16": 18,
    "lowp_from_int16": 9,
    "lowp_exact_int16": 8,
    "lowp_step_int16": 6,
}


@pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
@pytest.mark.parametrize(("precision", "most"), [("dfp16", DFP16), ("flex16+5", FLEX)])
def test_a_step_of_a_network_converts_each_tensor_once(
    precision: str, most: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, calls = cpu.library(), Counter[str]()

    class Counting:
        def __getattr__(self, name: str) -> Any:
            calls[name] += 1
            return getattr(own, name)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    numbers = lowp.Precision(precision)
    model, optimizer = numbers.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = torch.randn(16, 32), torch.randn(16, 4)
    monkeypatch.setattr(cpu, "library", Counting)
    for _ in range(4):  # the first ones begin the exponents
        calls.clear()
        with numbers.autocast():
            loss = F.mse_loss(model(x), y)
        numbers.backward(loss)
        numbers.step(optimizer)
        optimizer.zero_grad()
    assert not {name: count for name, count in calls.items() if count > most.get(name, 0)}
