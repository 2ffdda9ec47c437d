"""Contractions of integers: counts of a step's calls of the C++ library; transposed convolutions."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowp
from lowp.kernels import cpu
from lowp.kernels.int16.mantissas import Mantissas, as_exponent
from lowp.ops.convolution import Convolution
from lowp.ops.trilinear import FIRST, OUTPUT, SECOND, Einsum

# Three small layers, each by one call forward and by one backward.
DFP16 = {
    "lowp_layer_forward": 3,
    "lowp_layer_backward": 3,
    "lowp_pack_nonzero": 2,
    "lowp_pass_bits": 2,
    "lowp_largest": 1,  # looks whether gradients are finite
}
# There every tensor is in the format when it is read: it is compared with its mantissas, or recognised, and what is
# written is written once, statistics in the same pass; weights and their updates by one call.
FLEX = {
    "lowp_layer_forward": 3,
    "lowp_layer_backward": 3,
    "lowp_is_exact_int16": 1,
    "lowp_write_entries": 3,
    "lowp_same_int16": 1,
    "lowp_same_int16_list": 2,
    "lowp_from_int16": 1,
    "lowp_exact_int16": 0,
    "lowp_hold_entries": 1,
    "lowp_end_entries": 1,
    "lowp_relu_int16": 2,
    "lowp_pass_positive": 2,
    "lowp_observe_entries": 1,
    "lowp_met_in_entries": 2,
}


@pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
@pytest.mark.parametrize(("precision", "most"), [("dfp16", DFP16), ("flex16+5", FLEX)])
def test_a_step_of_a_network_converts_each_tensor_once(
    precision: str, most: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    numbers = lowp.Precision(precision)
    model, optimizer = numbers.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = torch.randn(16, 32), torch.randn(16, 4)
    calls = _counted(monkeypatch)
    for _ in range(4):  # the first ones begin the exponents
        calls.clear()
        with numbers.autocast():
            loss = F.mse_loss(model(x), y)
        numbers.backward(loss)
        numbers.step(optimizer)
        optimizer.zero_grad()
    assert not {name: count for name, count in calls.items() if count > most.get(name, 0)}


def _counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the calls of the C++ library from here on, by function."""
    own, calls = cpu.library(), Counter[str]()

    class Counting:
        def __getattr__(self, name: str) -> Any:
            calls[name] += 1
            return getattr(own, name)

    monkeypatch.setattr(cpu, "library", Counting)
    monkeypatch.setattr(cpu, "loaded", Counting)
    return calls


@pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
def test_a_gradient_from_outside_is_multiplied_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    numbers, layer = lowp.Precision("flex16+5"), nn.Linear(200, 200)
    layer, optimizer = numbers.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    for _ in range(2):  # the first step begins the exponents
        x = torch.randn(200, 200, requires_grad=True)
        with numbers.autocast():
            y = layer(x)
        with monkeypatch.context() as patch:
            calls = _counted(patch)
            y.backward(torch.randn(200, 200))
        numbers.step(optimizer)
    # the gradient is written, and not compared with its mantissas
    assert calls["lowp_write_entries"] == 1 and not calls["lowp_same_int16"] and not calls["lowp_current_int16"]


@pytest.mark.parametrize(
    ("dilation", "output_padding", "groups"),
    [(1, 1, 2), (3, 2, 1)],
    ids=["the plain one turned round", "larger than the plain one's input"],
)
def test_transposed_convolutions_of_integers_are_exact(dilation: int, output_padding: int, groups: int) -> None:
    x, w = (2, 4, 5, 6), (4, 6 // groups, 3, 2)
    form = Convolution(x, w, (2, 2), (1, 0), (dilation,) * 2, True, (output_padding,) * 2, groups)
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: tuple[int, ...]) -> Mantissas:
        payload = torch.randint(-32768, 32768, shape, generator=generator).to(torch.int16)
        return Mantissas(payload, as_exponent(-9))

    first, second = drawn(x), drawn(w)
    wide = form.product(OUTPUT, first.payload.double(), second.payload.double())
    output = drawn(tuple(wide.shape))
    for slot, left, right in ((OUTPUT, first, second), (FIRST, second, output), (SECOND, first, output)):
        expected = torch.ldexp(form.product(slot, left.payload.double(), right.payload.double()), torch.tensor(-18))
        assert torch.equal(form.integer_product(slot, left, right, True, torch.float64, None), expected)
        written = form.mantissas(slot, left, right, as_exponent(0), False, None)
        assert written is not None
        assert torch.equal(written.values, expected.round().clamp(-32768, 32767).to(torch.int16))


def test_only_sums_of_integers_are_written_from_their_integers() -> None:
    zero = as_exponent(0)
    rows, columns = (Mantissas(torch.full(shape, 3, dtype=torch.int16), zero) for shape in ((2, 4), (4, 5)))
    matrices = Einsum(("ij", "jk", "ik"), (2, 4), (4, 5))
    written = matrices.mantissas(OUTPUT, rows, columns, zero, False, None)
    assert written is not None and torch.equal(written.values, torch.full((2, 5), 36, dtype=torch.int16))
    scaled = Einsum(("ij", "jk", "ik"), (2, 4), (4, 5), scale=0.5)
    assert scaled.mantissas(OUTPUT, rows, columns, zero, False, None) is None
    summed_away = Einsum(("ij", "jk", "i"), (2, 4), (4, 5))  # each k of the gradient of the second is the same number
    sums = Mantissas(torch.full((2,), 3, dtype=torch.int16), zero)
    assert summed_away.mantissas(SECOND, rows, sums, zero, False, None) is None


@pytest.mark.parametrize("precision", ["dfp16", "flex16+5"])
def test_operands_and_a_bias_that_are_views_which_negate_are_read_as_what_they_stand_for(precision: str) -> None:
    layer, images = torch.randn(5, 6), torch.randn(2, 6, 4, 4)
    cases = {
        F.linear: (torch.randn(3, 6), layer, torch.randn(5)),
        F.conv2d: (images, torch.randn(5, 6, 3, 3), torch.randn(5)),
    }
    for function, operands in cases.items():
        with lowp.autocast(precision):
            wanted = function(*operands)
        for place, one in enumerate(operands):
            given = [*operands[:place], torch._neg_view(-one), *operands[place + 1 :]]
            with lowp.autocast(precision):
                assert torch.equal(function(*given), wanted), (function.__name__, place)
