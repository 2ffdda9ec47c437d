"""Mantissas kept beside a tensor's memory: used only if every element is unchanged."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowp
from lowp.casts import parse
from lowp.exponents import SharedExponents
from lowp.kernels import cpu, use
from lowp.kernels.choose.dispatch import available
from lowp.kernels.int16 import payloads
from lowp.kernels.int16.mantissas import as_exponent

FLEX, DFP = parse("flex16+5"), parse("dfp16")
needs_library = pytest.mark.skipif(cpu.library() is None, reason="without the library each reader rounds for itself")
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.t(),
    "reshaped": lambda x: x.view(2, 20, 42),
    "rows": lambda x: x[3:11],
    "columns": lambda x: x[:, 5:29],
    "columns, transposed": lambda x: x[:, 5:29].t(),
    "every other": lambda x: x[::2, ::3],
    "heads": lambda x: x.view(4, 10, 3, 2, 7)[:, :, 1].permute(0, 2, 1, 3),
    "expanded": lambda x: x[:1].expand(5, 42),
    "one element": lambda x: x[7, 9],
}


def values(seed: int = 0) -> Tensor:
    x = torch.randn(40, 42, generator=torch.Generator().manual_seed(seed))
    return lowp.quantize(x, "flex16+5")  # type: ignore[no-any-return]


def written() -> Tensor:
    """Return a result that an op has just written, whose mantissas are kept."""
    with lowp.autocast("flex16+5"):
        return F.linear(values(), values(1).requires_grad_()).detach()


def stands_for(x: Tensor) -> bool:
    found = payloads.exact(x, FLEX)
    assert found is not None and found.payload.shape == x.shape
    return torch.equal(found.payload.double() * 2.0**found.exponent, x.double())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_are_served_from_what_is_kept_of_the_whole(layout: str) -> None:
    x = torch.cat([written(), written()[:, :2]], 1)
    kept = payloads.exact(x, FLEX)
    view = LAYOUTS[layout](x)
    found = payloads.exact(view, FLEX)
    assert kept is not None and found is not None and stands_for(view)
    assert found.payload.untyped_storage().data_ptr() == kept.payload.untyped_storage().data_ptr()
    assert found.exponent == kept.exponent


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_of_what_has_changed_are_computed_anew(layout: str) -> None:
    x = torch.cat([written(), written()[:, :2]], 1)
    kept = payloads.exact(x, FLEX)
    view = LAYOUTS[layout](x)
    view.detach().numpy()[...] *= 2
    found = payloads.exact(view, FLEX)
    assert kept is not None and found is not None and stands_for(view)
    assert found.payload.untyped_storage().data_ptr() != kept.payload.untyped_storage().data_ptr()


def test_every_single_element_is_compared() -> None:
    x = written()
    for index in range(x.numel()):
        numbers = x.numpy().reshape(-1)
        before = float(numbers[index])
        for other in (before + 2.0**-6, -before if before else 1.0, float("nan"), float("inf")):
            numbers[index] = other
            found = payloads.exact(x, FLEX)
            assert (found is None) == (abs(other) == float("inf") or other != other)
            assert found is None or float(found.payload.view(-1)[index]) * 2.0**found.exponent == other
        numbers[index] = before


@pytest.mark.parametrize("exponent", [-120, -100, 0, 100])
def test_units_beyond_those_of_fp32_are_told_apart(exponent: int) -> None:
    cast = parse("dfp16")
    x = torch.full((1000,), 2.0**exponent)
    payloads.keep(x, cast.format, as_exponent(100), torch.zeros(1000, dtype=torch.int16))
    found = payloads.exact(x, cast)
    assert found is not None and bool((found.payload.double() * 2.0**found.exponent == x).all())


@needs_library
@pytest.mark.parametrize("layout", ["whole", "heads", "transposed"])
def test_a_tensor_that_its_own_cast_leaves_is_known_by_its_mantissas(layout: str) -> None:
    x = torch.cat([written(), written()[:, :2]], 1)
    view = LAYOUTS[layout](x)
    assert not payloads.is_kept(view, FLEX)
    assert payloads.exact(x, FLEX) is not None
    assert payloads.is_kept(view, FLEX) and torch.equal(lowp.quantize(view, FLEX), view)
    others = ("flex16+5:stochastic", "flex16+5:static(-8)", "dfp16", "bf16")
    assert not any(payloads.is_kept(view, parse(other)) for other in others)
    view.detach().numpy()[...] *= 1.01
    assert not payloads.is_kept(view, FLEX)


@needs_library
def test_the_lowest_mantissa_is_none_that_a_cast_leaves() -> None:
    mantissas = torch.full((40,), 3, dtype=torch.int16)
    mantissas[7] = -32768
    x = mantissas.float() * 2.0**-5
    payloads.keep(x, FLEX.format, as_exponent(-5), mantissas)
    assert payloads.exact(x, FLEX) is not None and not payloads.is_kept(x, FLEX)
    assert not torch.equal(lowp.quantize(x, FLEX), x)  # 3 is no mantissa under -4, the exponent of its maximum


@needs_library
def test_a_cast_that_rounded_another_maximum_is_made_anew() -> None:
    with lowp.autocast("dfp16"):
        x = torch.tanh(values().requires_grad_())
    first = payloads.rounded(x, DFP)
    again = payloads.rounded(x, DFP)
    x.detach().numpy()[3, 3] = 5.0
    other = payloads.rounded(x, DFP)
    assert first is not None and again is not None and other is not None
    assert first.payload.data_ptr() == again.payload.data_ptr() != other.payload.data_ptr()
    assert other.exponent == first.exponent + 3
    x.detach().numpy()[3, 3] = float("inf")
    assert payloads.rounded(x, DFP) is None


def test_what_is_kept_ends_with_the_memory() -> None:
    x = written()
    known = payloads.kept(x, FLEX.format)
    assert known is not None
    alias, payload = x.detach(), weakref.ref(known.payload)
    del x, known
    assert payload() is not None and stands_for(alias)
    del alias
    assert payload() is None


def test_swapped_tensors_keep_what_is_their_own() -> None:
    x, y = written(), torch.ones(3)
    torch.utils.swap_tensors(x, y)
    assert stands_for(x) and stands_for(y)


def test_nothing_is_kept_of_parameters_views_and_what_has_no_memory() -> None:
    for x in (nn.Parameter(values()), values()[1:], torch._efficientzerotensor((3,)), values().double()):
        payloads.keep(x, FLEX.format, as_exponent(-10))
        assert payloads.hint(x) is None
    assert payloads.exact(torch._efficientzerotensor((3,)), FLEX) is not None


@pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
def test_without_the_library_the_answers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = written()
    monkeypatch.setattr(cpu, "library", lambda: None)
    assert stands_for(x) and stands_for(x[3:, 2:])
    x.numpy()[20, 20] += 1.0
    assert stands_for(x) and stands_for(x[3:, 2:])


@pytest.mark.parametrize("kernel", ["cpu", "bitwise"])
def test_the_lowest_mantissa_is_exact_under_the_exponent_that_is_kept(kernel: str) -> None:
    if kernel == "cpu" and cpu.library() is None:
        pytest.skip("the C++ library was not built")
    cast = parse("flex16+5")
    with use(kernel):
        x = torch.tensor([-32768.0, 3.0, 0.0]) * 2.0**-9
        assert not payloads.is_exact(x, cast)  # under the exponent of its own maximum
        payloads.keep(x, cast.format, as_exponent(-9))
        assert payloads.is_exact(x, cast)
        x[1] += 2.0**-11
        assert not payloads.is_exact(x, cast)


@pytest.mark.parametrize("way", available())
def test_the_lowest_mantissa_is_exact_under_the_largest_exponent_which_no_maximum_leaves(way: str) -> None:
    """Of numbers that end, begin or stand anywhere, at any byte; 32768 is none of the format, nor any of dfp16."""
    among, predicted = torch.arange(-9000.0, 9000.0), parse("flex16+5:autoflex")
    with use(way):
        for place in (0, 4097, -1):
            x = among.clone()
            x[place] = -32768.0
            assert payloads.exact_under(x, FLEX) == (True, 0)
            assert not payloads.is_exact(2 * x, FLEX) and not payloads.is_exact(x / 2, FLEX)
            assert not payloads.is_exact(x * 2.0**113, DFP)
            given = x.clone()
            exponents = SharedExponents()
            for _ in range(2):
                assert exponents.write(given, predicted, "gradient of w", unless_exact=True).values is given
                exponents.write(given / 3, predicted, "gradient of w")
                exponents.flush()
            x[place - 1] = 32768.0
            assert not payloads.is_exact(x, FLEX)
