"""Modules of TorchScript in a region: ops that cannot be rounded are reported, and traces keep no cast of a weight."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lowp import Precision
from lowp.errors import InvalidInput
from lowp.region import autocast, following

pytestmark = pytest.mark.filterwarnings("ignore:.*(TracerWarning|torch.jit|trace).*")


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.fixture(autouse=True)
def nothing_was_told() -> None:
    following._told.clear()


def script(how: str) -> nn.Module:
    torch.manual_seed(0)
    return torch.jit.script(Named()) if how == "script" else torch.jit.trace(Named(), torch.ones(2, 4))


@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.parametrize("precision", ["e4m3fn", "dfp16", "bf16-tpu", "flex16+5"])
def test_a_module_that_no_rule_reaches_is_told_once_and_reported(how: str, precision: str) -> None:
    module = script(how)
    expected = f"nothing that module Named computes is rounded as policy .*{precision[:4]}"
    with pytest.warns(UserWarning, match=expected) as told:
        with autocast(precision) as region, torch.no_grad():
            module(torch.ones(2, 4))
    assert [one.filename for one in told] == [__file__]
    assert region.report().unseen == ("the TorchScript module Named",)
    with warnings.catch_warnings(), autocast(precision):
        warnings.simplefilter("error")
        nn.Sequential(module)(torch.ones(2, 4))


@pytest.mark.parametrize("how", ["script", "trace"])
def test_a_strict_region_refuses_it(how: str) -> None:
    module = script(how)
    with pytest.raises(InvalidInput, match=r"module Named is TorchScript's, whose ops no rule of policy dfp16 reaches"):
        with autocast("dfp16", strict=True):
            module(torch.ones(2, 4))


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_nothing_is_told_where_torch_casts_or_nothing_is_to_be_cast(precision: str) -> None:
    module = script("script")
    with warnings.catch_warnings(), autocast(precision) as region:
        warnings.simplefilter("error")
        y = module(torch.ones(2, 4))
    assert y.dtype is getattr(torch, {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}[precision])
    assert region.report().unseen == ()


@pytest.mark.parametrize("precision", ["e4m3fn", "fp32"])
def test_nothing_is_told_where_a_region_is_not_in_force(precision: str) -> None:
    module, x = script("script"), torch.ones(2, 4)
    region = autocast(precision)
    region.observe(lambda one: None)  # so that one of fp32 has an engine
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(x)
        with region:
            with torch.autocast("cpu", enabled=False):
                module(x)
            with autocast("fp32"):
                module(x)
            if precision == "fp32":
                module(x)
    assert region.report().unseen == ()


def test_nothing_is_told_of_a_module_that_was_traced_in_a_region() -> None:
    x = torch.randn(2, 4)
    with warnings.catch_warnings(), autocast("e5m7") as region, torch.no_grad():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        module = Named()
        assert torch.equal(torch.jit.trace(module, x)(x), module(x))
    assert region.report().unseen == ()


@pytest.mark.parametrize("precision", ["e5m7", "bf16-tpu", "fp16", "bf16"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_trace_records_the_cast_of_a_weight_and_not_what_it_was_cast_to_before(precision: str, grad: bool) -> None:
    x, module = torch.randn(2, 4), Named()
    with autocast(precision), torch.set_grad_enabled(grad):
        module(x)
        traced = torch.jit.trace(module, x, check_trace=False)
        with torch.no_grad():
            module.layer.weight.mul_(2)
        torch.testing.assert_close(traced(x), module(x), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("precision", ["fp16", "e4m3fn"])
def test_a_scripted_model_trains_under_a_loss_scale_and_loads(precision: str) -> None:
    model, x = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))), torch.randn(8, 4)
    training = Precision(precision)
    model, optimizer = training.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = model[0].weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(2):
            with training.autocast():
                loss = model[0](x).float().square().mean()
            training.backward(loss)
            training.step(optimizer)
    assert bool(training.stepped) and not torch.equal(model[0].weight, before)
    model.load_state_dict(model.state_dict())


@pytest.mark.parametrize("precision", ["bf16-storage", "fp16-storage", "flex16+5"])
def test_a_precision_that_stores_parameters_refuses_a_scripted_model_unchanged(precision: str) -> None:
    model = script("script")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InvalidInput, match="the parameters of a TorchScript module cannot be stored in"):
        Precision(precision).prepare(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Asks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled():
            return x + 1
        return x


def test_a_module_that_asks_for_autocast_is_scripted_after_a_generator_was_in_a_region() -> None:
    def outputs() -> Iterator[Tensor]:
        with autocast("bf16"):
            yield nn.Linear(4, 4)(torch.ones(2, 4))

    list(outputs())
    assert torch.jit.script(Asks())(torch.ones(2)).tolist() == [1.0, 1.0]
