"""Parameters under shared exponents that are written in the forward pass, or that no exponent can be shared by."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import lowp
from lowp.errors import InvalidInput
from lowp.exponents import SharedExponents
from lowp.kernels.int16.payloads import are_exact
from lowp.optim import FlexWeights
from lowp.optim.exponents import _is_exact_below

IN_FLEX = lowp.Precision("flex16+5").policy.parameters


def _trained(precision: lowp.Precision, model: nn.Module, x: Tensor, steps: int = 4) -> tuple[nn.Module, float]:
    model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5))
    for _ in range(steps):
        optimizer.zero_grad()
        with precision.autocast():
            loss = model(x).square().mean()
        precision.backward(loss)
        precision.step(optimizer)
    return model, float(loss.detach())


class Pooled(nn.Module):
    """The mean of rows of a table whose norms are at most 1."""

    def __init__(self, bag: bool, norm_type: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = bag
        self.table = (nn.EmbeddingBag if bag else nn.Embedding)(20, 16, max_norm=1.0, norm_type=norm_type)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.table(x)
        return rows if self.bag else rows.mean(1)


@pytest.mark.parametrize("norm_type", [2.0, 1.0])
@pytest.mark.parametrize("bag", [False, True])
def test_the_largest_norm_of_an_embedding_is_that_of_fp32(bag: bool, norm_type: float) -> None:
    x = torch.arange(15).view(5, 3)  # the last five rows are not read
    expected, loss = _trained(lowp.Precision("fp32"), Pooled(bag, norm_type), x)
    model, seen = _trained(lowp.Precision("flex16+5"), Pooled(bag, norm_type), x)
    for got, want in zip(model.parameters(), expected.parameters(), strict=True):
        assert want[:15].norm(norm_type, dim=1).max() < 1.01 < want[15:].norm(norm_type, dim=1).min()
        # int16 with a few free bits: weights below 4 have a unit of 2**-11 at most, and take a few roundings a step
        assert (got - want).abs().max() < 8 * 2.0**-11
        assert IN_FLEX is not None
        assert are_exact([got.detach()], IN_FLEX) == [True]
    assert seen == pytest.approx(loss, rel=1e-2)


class Spectral(nn.Module):
    """A linear layer on Fourier coefficients, between real ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(9, 4, 4, dtype=torch.complex64) / 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        coefficients = torch.einsum("bix,xio->box", torch.fft.rfft(x), self.weight)
        result: Tensor = self.last(torch.fft.irfft(coefficients, n=16).transpose(1, 2))
        return result


def test_complex_parameters_are_trained_as_they_are() -> None:
    x = torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(1))
    expected, loss = _trained(lowp.Precision("fp32"), Spectral(), x)
    model, seen = _trained(lowp.Precision("flex16+5"), Spectral(), x)
    assert seen == pytest.approx(loss, rel=1e-2)
    weight, reference = model.get_parameter("weight"), expected.get_parameter("weight")
    assert weight.dtype is torch.complex64
    assert 0 < (weight - reference).abs().max() < 1e-2 < (reference - Spectral().weight).abs().max()


@pytest.mark.parametrize(
    ("x", "kind"), [(torch.zeros(2).double(), "torch.float64"), (torch.eye(2).to_sparse(), "sparse")], ids=str
)
def test_parameters_that_no_exponent_serves_are_refused(x: Tensor, kind: str) -> None:
    assert IN_FLEX is not None
    with pytest.raises(
        InvalidInput, match=f"a {kind} parameter cannot be stored in flex.*: give dense fp32 parameters"
    ):
        FlexWeights(torch.optim.SGD([nn.Parameter(x)], lr=0.1), IN_FLEX, SharedExponents())


@pytest.mark.parametrize(("dtype", "can_skip"), [(torch.float32, True), (torch.complex64, False)])
def test_a_device_may_skip_a_step_of_real_parameters_alone(dtype: torch.dtype, can_skip: bool) -> None:
    """Those that are complex have no exponents, whose flags say where a step is faulty."""
    assert IN_FLEX is not None
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=dtype))]
    optimizer = FlexWeights(torch.optim.SGD(parameters, lr=0.1), IN_FLEX, SharedExponents())
    assert optimizer.skips_there() is can_skip


def test_a_model_whose_optimizer_is_prepared_after_it_loads_values_of_the_format() -> None:
    precision = lowp.Precision("flex16+5")
    model, _ = precision.prepare(nn.Linear(3, 3), None)
    other = nn.Linear(3, 3)
    precision.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    precision.prepare_optimizer(torch.optim.SGD(other.parameters(), lr=0.1))
    for one, is_written in ((model, True), (other, False)):
        one.load_state_dict({"weight": torch.tensor([[1.0, 1 / 3, 2**-20]] * 3), "bias": torch.zeros(3)})
        assert IN_FLEX is not None and are_exact([one.weight.detach()], IN_FLEX) == [is_written]


def test_values_that_are_set_are_rounded_to_the_format_and_none_is_cut_off() -> None:
    precision, layer, values = lowp.Precision("flex16+5"), nn.Linear(2, 2), torch.tensor([[1000.1, 0.5], [-7.0, 0.0]])
    _, optimizer = precision.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    optimizer.set_masters({layer.weight: values, nn.Parameter(torch.ones(2)): torch.zeros(2)})  # type: ignore[attr-defined]
    assert IN_FLEX is not None and are_exact([layer.weight.detach()], IN_FLEX) == [True]
    assert torch.allclose(layer.weight.detach(), values, rtol=0, atol=2.0**-6)
    assert torch.equal(optimizer.master(layer.weight), layer.weight)  # type: ignore[attr-defined]


def test_a_convolution_of_one_channel_that_lies_in_channels_last_is_trained_as_another() -> None:
    found, x = [], torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        layer = nn.Conv2d(1, 4, 3).to(memory_format=layout)  # type: ignore[call-overload]
        found.append((*_trained(lowp.Precision("flex16+5"), layer, x), layer.weight.stride()))
    (one, loss, _), (other, other_loss, stride) = found
    assert torch.equal(one.weight, other.weight) and loss == other_loss and stride == (9, 1, 3, 1)  # type: ignore[arg-type]


def test_a_group_that_comes_later_has_the_names_that_it_is_given() -> None:
    first, second, exponents = nn.Linear(2, 2, bias=False), nn.Linear(2, 2), SharedExponents()
    assert IN_FLEX is not None
    optimizer = FlexWeights(torch.optim.SGD(first.named_parameters(prefix="first"), lr=0.1), IN_FLEX, exponents)
    optimizer.add_param_group({"params": list(second.named_parameters(prefix="second"))})
    assert exponents.sites() == [f"weight of {name}" for name in ("first.weight", "second.weight", "second.bias")]


@pytest.mark.parametrize(
    ("numbers", "is_held"),
    [
        ((-32768, 32767, 0, 1), True),
        ((-32768, -1), True),
        ((-32768, 32768), False),
        ((-32768, 0.5), False),
        ((-32767, 1), False),  # whose maximum is no power of two
    ],
)
def test_a_tensor_whose_lowest_number_is_the_lowest_of_int16_is_held_under_that_exponent(
    numbers: tuple[float, ...], is_held: bool
) -> None:
    assert IN_FLEX is not None
    for exponent in (-20, -3):
        x = torch.tensor(numbers) * 2.0**exponent
        assert _is_exact_below(x, float(x.abs().max()), IN_FLEX) is is_held
    beyond = torch.tensor(numbers) * 2.0**-40  # below the smallest exponent of flex16+5
    assert not _is_exact_below(beyond, float(beyond.abs().max()), IN_FLEX)
