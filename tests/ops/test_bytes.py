"""Linear layers under a rule of int8 without a gradient: exact sums of bytes in every implementation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lowp
from lowp import kernels
from lowp.inference import training_policy
from lowp.kernels import byte_rows, cpu
from lowp.kernels.products import LEAST_ROWS
from lowp.policy import Policy, Rule

POLICY = training_policy("int8")


def layer_and_input() -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(70, 33), torch.randn(2, LEAST_ROWS // 2, 70)


def exact(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return the sum of integers, rounded once, times the scale of the column and then that of the row, plus bias."""
    rows, weight = (kernels.encode(one.detach(), "int8") for one in (x.reshape(-1, x.shape[-1]), layer.weight))
    sums = (rows.payload.double() @ weight.payload.double().t()).float()
    return ((sums * weight.scale) * rows.scale[:, None] + layer.bias.detach()).reshape(*x.shape[:-1], -1)


def test_without_a_gradient_the_sum_is_exact_and_near_the_emulated_one() -> None:
    layer, x = layer_and_input()
    with lowp.autocast(POLICY):
        emulated = layer(x)
        with torch.no_grad():
            found, again = layer(x), layer(x)
    assert emulated.requires_grad
    assert torch.equal(found, exact(layer, x))
    assert torch.equal(again, found)
    torch.testing.assert_close(found, emulated.detach(), rtol=1e-5, atol=1e-6)
    with kernels.use("reference"), torch.no_grad(), lowp.autocast(POLICY):
        torch.testing.assert_close(layer(x), found, rtol=1e-5, atol=1e-6)


def test_a_result_is_rounded_as_the_rule_says() -> None:
    layer, x = layer_and_input()
    rule = Rule(("contraction",), input="int8", weight="int8", output="bf16")  # type: ignore[arg-type]
    with torch.no_grad(), lowp.autocast(Policy((rule,))):
        assert torch.equal(layer(x), exact(layer, x).bfloat16())


def test_a_weight_that_is_written_within_a_region_is_packed_anew() -> None:
    layer, x = layer_and_input()
    with torch.no_grad(), lowp.autocast(POLICY):
        layer(x)
        layer.weight.mul_(0.3)
        assert torch.equal(layer(x), exact(layer, x))


def test_few_rows_and_infinite_numbers_go_the_long_way() -> None:
    layer, x = layer_and_input()
    with lowp.autocast(POLICY):
        few = layer(x[0]).detach()
        with torch.no_grad():
            assert torch.equal(layer(x[0]), few)
            x[0, 0, 0] = torch.inf
            assert bool(layer(x)[0, 0].isinf().all())
            assert bool(layer(x)[0, 1:].isfinite().all())


@pytest.mark.parametrize("level", [0, 1, -1])
def test_rows_in_bytes_are_those_of_format_int8(level: int) -> None:
    if cpu.library() is None:
        pytest.skip("the C++ library was not built")
    torch.manual_seed(0)
    x = torch.randn(9, 77) * torch.tensor([[1.0, 1e-38, 1e-42, 1e30, 0, 1, 1, 1, 1]]).t()
    x[5] = torch.arange(77) - 38.5  # quotients in the middle, and next to it
    x[5, 0], x[6], x[6, 0] = 127, (torch.arange(77) - 38.5).nextafter(torch.tensor(0.0)), -127
    x[7], x[8] = -x[7].abs(), x[8].nextafter(torch.tensor(9.0))
    wanted = kernels.encode(x, "int8")
    found = byte_rows.rows_in_bytes(x, level)
    assert found is not None
    assert torch.equal(found.scales, wanted.scale)
    assert torch.equal(found.payload[:, :77].int() - 128, wanted.payload.int())
    assert bool((found.payload[:, 77:] == 128).all())
    with kernels.use("bitwise"):
        defined = byte_rows.rows_in_bytes(x)
    assert defined is not None
    assert torch.equal(defined.payload, found.payload)
    assert torch.equal(defined.scales, found.scales)
    x[3, 5] = torch.nan
    assert byte_rows.rows_in_bytes(x, level) is None
