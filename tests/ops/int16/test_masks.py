"""Activations, dropout and max-pooling beside integer contractions: torch's bits, with one bit per element saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.overrides
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowp
from lowp.ops.call import Call
from lowp.ops.int16 import masks
from lowp.ops.int16.masks import has_integer_operands
from lowp.ops.table import name_of, row_of
from lowp.policy import Policy, Rule
from lowp.presets import PRESETS, parse
from lowp.region import handover


@pytest.fixture(autouse=True)
def _masks_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tensors be masked that are so small that torch's own functions serve them."""
    monkeypatch.setattr(handover, "_LITTLE", 0)


SPECIAL = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-45, -1e-45, 6.0, -1.0, 1.0, 0.5])
# of a tensor that is no leaf
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "torch.relu": torch.relu,
    "Tensor.relu": lambda x: x.relu(),
    "relu by name": lambda x: F.relu(input=x),
    "relu in place": lambda x: F.relu(x, inplace=True),
    "relu_": lambda x: x.relu_(),
    "torch.relu_": torch.relu_,
    "relu6": F.relu6,
    "relu6 in place": lambda x: F.relu6(x, True),
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.75),
    "hardtanh in place": lambda x: F.hardtanh(x, max_val=0.5, inplace=True),
    "leaky_relu": F.leaky_relu,
    "leaky_relu in place": lambda x: F.leaky_relu(x, 0.2, inplace=True),
    "leaky_relu of a negative slope": lambda x: F.leaky_relu(x, -0.3),
    "dropout": lambda x: F.dropout(x, 0.3),
    "torch.dropout": lambda x: torch.dropout(x, 0.6, True),
    "max_pool2d": lambda x: F.max_pool2d(x, 2, padding=1),
    "max_pool2d with overlap": lambda x: F.max_pool2d(x, 3, 1, ceil_mode=True),
    "max_pool3d": lambda x: F.max_pool3d(x, (2, 2, 2)),
}
IN_PLACE = [name for name in OPS if "in place" in name or name.endswith("_")]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@contextmanager
def torchs_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run masked ops by torch's own functions."""
    with monkeypatch.context() as patched:
        patched.setattr(masks, "_is_followed", lambda x: False)
        yield


def outcome(op: Callable[[Tensor], Tensor], x: Tensor, precision: str = "dfp16") -> tuple[Tensor, Tensor]:
    """Return the result and the gradient of an op whose input is not a leaf, both with their strides."""
    torch.manual_seed(1)
    x = x.detach().requires_grad_()
    with lowp.autocast(precision):
        y = op(x.clone())
    (slope,) = torch.autograd.grad(y, x, torch.empty_like(y).copy_(drawn(*y.shape, seed=7)))
    return y.detach(), slope


def same(one: Tensor, other: Tensor) -> bool:
    return one.stride() == other.stride() and torch.equal(one.view(torch.int32), other.view(torch.int32))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 2),
    "with gaps": lambda x: x[..., 1:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPS)
def test_results_and_gradients_have_the_bits_of_torchs_own(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if layout == "channels last" and name == "max_pool3d":
        pytest.skip("torch itself refuses it")
    x = LAYOUTS[layout](drawn(3, 5, 7, 9))
    found = outcome(OPS[name], x)
    with torchs_own(monkeypatch):
        expected = outcome(OPS[name], x)
    assert all(map(same, found, expected))


@pytest.mark.parametrize("name", [name for name in OPS if "pool" not in name])
def test_so_have_zeros_infinities_and_nans_and_every_length(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for x in (SPECIAL, drawn(1)[0], drawn(0, 3), drawn(8), drawn(9), drawn(1, 1).expand(4, 5)):
        found = outcome(OPS[name], x)
        with torchs_own(monkeypatch):
            expected = outcome(OPS[name], x)
        assert all(map(same, found, expected))


@pytest.mark.parametrize("name", [name for name in OPS if "negative slope" not in name])
def test_bits_or_places_are_all_that_is_kept(name: str) -> None:
    saved: list[Tensor] = []
    x = drawn(4, 6, 6, 6).requires_grad_()
    with lowp.autocast("dfp16"):
        h = x.clone()
        with torch.autograd.graph.saved_tensors_hooks(lambda one: (saved.append(one), one)[1], lambda one: one):
            y = OPS[name](h)
    assert {one.dtype for one in saved} == {torch.uint8}
    assert [one.numel() for one in saved] == [y.numel() if "pool" in name else x.numel() // 8]


@pytest.mark.parametrize("numbers", [(1 << 14) - 1, 1 << 14])
def test_of_few_numbers_torchs_own_function_keeps_what_it_keeps(numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with lowp.autocast("dfp16"):
        y = F.relu(drawn(numbers).requires_grad_() * 1.0)
    assert ("MaskedNode" in type(y.grad_fn).__name__) == (numbers == 1 << 14)


def network(x: Tensor, w: Tensor, inplace: bool = False) -> Tensor:
    h = F.conv2d(x, w, padding=1)
    h = F.max_pool2d(F.relu(h, inplace=inplace), 2)
    return F.leaky_relu(F.dropout(F.conv2d(h, w, padding=1), 0.2), 0.1)


def weights() -> tuple[Tensor, Tensor]:
    return drawn(2, 4, 8, 8).requires_grad_(), drawn(4, 4, 3, 3, seed=1).requires_grad_()


def test_a_gradient_of_a_gradient_has_the_bits_of_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def penalty() -> list[Tensor]:
        torch.manual_seed(2)
        x, w = weights()
        with lowp.autocast("dfp16"):
            y = network(x, w)
            slopes = torch.autograd.grad(y.square().sum(), (x, w), create_graph=True)
            sum(slope.square().sum() for slope in slopes).backward()  # type: ignore[union-attr]
        assert x.grad is not None and w.grad is not None
        return [*(slope.detach() for slope in slopes), x.grad, w.grad]

    found = penalty()
    with torchs_own(monkeypatch):
        expected = penalty()
    assert all(map(torch.equal, found, expected)) and all(float(one.abs().max()) > 0 for one in found)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_computes_the_same_masks_again(reentrant: bool, inplace: bool) -> None:
    found = []
    for wrapped in (False, True):
        torch.manual_seed(3)
        x, w = weights()
        with lowp.autocast("dfp16"):
            y = checkpoint(network, x, w, inplace, use_reentrant=reentrant) if wrapped else network(x, w, inplace)
        y.square().sum().backward()
        assert x.grad is not None and w.grad is not None
        found.append([y.detach(), x.grad, w.grad])
    assert all(map(torch.equal, *found))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_torch_func_and_forward_mode_run_torchs_own() -> None:
    x, w = drawn(3, 5), drawn(4, 5, seed=1)

    def loss(x: Tensor) -> Tensor:
        return F.hardtanh(F.leaky_relu(F.relu(F.linear(x, w)))).square().sum()

    with lowp.autocast("dfp16"):
        leaf = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(loss(leaf), leaf)
        torch.testing.assert_close(torch.func.grad(loss)(x), expected, rtol=1e-2, atol=1e-2)
        assert torch.func.vmap(torch.func.grad(loss))(x).shape == x.shape
        _, tangent = torch.func.jvp(loss, (x,), (torch.ones_like(x),))
        torch.testing.assert_close(tangent, expected.sum(), rtol=1e-2, atol=1e-2)
        with torch.autograd.forward_ad.dual_level():  # type: ignore[no-untyped-call]
            dual = torch.autograd.forward_ad.make_dual(leaf * 1.0, torch.ones_like(x))
            y = F.dropout(F.relu(dual), 0.0)
            tangent = torch.autograd.forward_ad.unpack_dual(y).tangent
    assert tangent is not None and torch.equal(tangent, (x > 0).float())


def test_torch_compile_follows_in_one_graph() -> None:
    def body(x: Tensor) -> Tensor:
        h = masks.dropout(Call("dropout", F.dropout, (x, 0.0), {}, Rule()))
        h = masks.relu(Call("relu", F.relu, (h,), {}, Rule()))
        return masks.max_pool2d(Call("max_pool2d", F.max_pool2d, (h, 2), {}, Rule()))  # type: ignore[no-any-return]

    torch.compiler.reset()
    compiled = torch.compile(body, backend="aot_eager", fullgraph=True)
    found = []
    for function in (body, compiled):
        x = drawn(2, 4, 8, 8).requires_grad_()
        y = function(x)
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), x)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("name", OPS)
def test_without_gradients_torchs_own_function_runs(name: str) -> None:
    x = drawn(4, 6, 6, 6)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, lowp.autocast("dfp16"):
            torch.manual_seed(1)
            found = OPS[name](x.clone())
            torch.manual_seed(1)
        assert found.grad_fn is None and torch.equal(found, OPS[name](x.clone()))


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_written_in_place_is_seen_by_version_checks(name: str) -> None:
    x = drawn(3, 5).requires_grad_()
    with lowp.autocast("dfp16"):
        h = x * 1.0
        square = h * h
        y = OPS[name](h)
        assert y is h and torch.equal(h, OPS[name](x.detach().clone()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()
    with lowp.autocast("dfp16"), pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        OPS[name](x)


def test_in_place_on_a_view_what_it_looks_at_has_the_gradient() -> None:
    x = drawn(4, 6).requires_grad_()
    with lowp.autocast("dfp16"):
        h = x * 1.0
        F.relu(h[:, 2:], inplace=True)
    h.sum().backward()
    assert torch.equal(x.grad[:, 2:], (x[:, 2:] > 0).float()) and bool((x.grad[:, :2] == 1).all())  # type: ignore[index]


def test_wrong_arguments_get_torchs_own_errors() -> None:
    x = drawn(4, 6).requires_grad_() * 1.0
    for op in (lambda x: F.relu(x, wrong=1), lambda x: F.max_pool2d(x, 2, bad=3), lambda x: F.hardtanh(x, 1, -1)):
        with pytest.raises(Exception) as plain:
            op(x)
        with lowp.autocast("dfp16"), pytest.raises(type(plain.value)) as found:
            op(x)
        assert str(found.value) == str(plain.value)


def test_a_rule_that_speaks_of_an_op_is_carried_out_instead() -> None:
    policy = PRESETS["dfp16"].policy.before(Rule.of("relu", output="bf16"), Rule.of("dropout"))
    x = drawn(4, 6).requires_grad_() * 1.0
    with lowp.autocast(policy):
        assert F.relu(x).dtype is torch.bfloat16
        assert "MaskedNode" not in type(F.dropout(x, 0.5).grad_fn).__name__
        assert "MaskedNode" in type(F.relu6(x).grad_fn).__name__


def test_policies_with_integer_operands_are_meant() -> None:
    meant = {name for name in (*PRESETS, "int8", "int4", "e4m3fn") if has_integer_operands(parse(name).policy)}
    assert meant == {"dfp16", "int8", "int4"} and not has_integer_operands(Policy())


def test_each_masked_op_is_a_name_of_the_table_and_is_tried_here() -> None:
    functions: list[Any] = [F.relu, F.relu6, F.hardtanh, F.leaky_relu, F.dropout, torch.max_pool2d, F.max_pool3d]
    rows = [row_of(one) for one in torch.overrides.get_testing_overrides()]
    found = {row.name for row in rows if row is not None and row.masked}
    assert {name_of(one) for one in functions} == found
    assert all(any(name.startswith(one) for name in OPS) for one in found)


def test_modules_and_whole_steps_have_the_bits_of_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> list[Tensor]:
        torch.manual_seed(4)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3),
            nn.LeakyReLU(0.1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(288, 16), nn.ReLU6(), nn.Linear(16, 3),
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            with lowp.autocast("dfp16"):
                loss = F.cross_entropy(model(drawn(4, 3, 16, 16, seed=step)), torch.tensor([0, 1, 2, 0]))
            loss.backward()
            optimizer.step()
        return [one.detach() for one in model.parameters()]

    found = trained()
    with torchs_own(monkeypatch):
        expected = trained()
    assert all(map(torch.equal, found, expected))
