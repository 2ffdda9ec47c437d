"""Training for few bits: clipped values get no gradient, and the accuracy lost by serving is recovered."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lowp
from lowp.inference import training_policy
from lowp.recipes.data.digits import TRAINING, read_digits

# a weight, and whether its elements are within the clipping range: half a step beyond the largest value
WEIGHTS = {
    "binary": ([0.1, -0.2, 0.3, 2.0, -0.1, 0.05], [1, 1, 1, 0, 1, 1]),  # the mean is 0.458, a step twice that
    "ternary": ([0.9, -0.8, 0.0, 0.7, 1.1, -4.0], [1, 1, 1, 1, 1, 0]),  # the large ones' mean is 1.5
    "int4": ([0.9, -0.8, 0.0, 0.7, 1.1, -4.0], [1, 1, 1, 1, 1, 1]),  # the scale is that of the maximum
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("format", "compiled"),
    [
        *((format, False) for format in WEIGHTS),
        ("binary", True),
        *(pytest.param(format, True, marks=pytest.mark.slow) for format in ("ternary", "int4")),
    ],
)
def test_numbers_beyond_the_clipping_range_get_no_gradient(format: str, compiled: bool) -> None:
    given, inside = WEIGHTS[format]
    weight = torch.tensor([given], requires_grad=True)

    def product(x: Tensor) -> Tensor:
        return nn.functional.linear(x, weight)

    run = torch.compile(product, backend="aot_eager") if compiled else product
    with lowp.autocast(training_policy(format)):
        found = run(torch.ones(2, 6))
    found.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[2.0 * one for one in inside]]


@pytest.mark.parametrize("format", ["int8", "int4", "ternary", "binary"])
def test_training_in_a_format_brings_back_what_serving_in_it_loses(format: str) -> None:
    pytest.importorskip("sklearn")
    images, labels = read_digits()
    images = images / 16
    accuracies = []
    for precision in (lowp.Precision("fp32"), lowp.Precision(training_policy(format))):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        model, optimizer = precision.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2))
        for _ in range(80):
            optimizer.zero_grad()
            with precision.autocast():
                loss = nn.functional.cross_entropy(model(images[:TRAINING]), labels[:TRAINING])
            precision.backward(loss)
            precision.step(optimizer)
        for served in (model.eval(), lowp.quantize_model(model, format)):
            accuracies.append(float((served(images[TRAINING:]).argmax(1) == labels[TRAINING:]).float().mean()))
    fp32, before, _, after = accuracies
    assert fp32 > 0.9
    assert after >= before - 0.01
    assert after >= fp32 - {"int8": 0.01, "int4": 0.02, "ternary": 0.04, "binary": 0.06}[format]
