"""Tensors saved for backward under shared exponents: int16 payloads, which give the same bits as fp32."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowp
from lowp.casts import parse
from lowp.kernels import cpu
from lowp.kernels.choose.dispatch import uses_library
from lowp.kernels.int16 import entries, payloads
from lowp.ops.call import Call
from lowp.ops.int16 import flexpoint, pooling
from lowp.ops.int16 import layer as layer_room
from lowp.ops.int16 import saved as saved_room
from lowp.ops.observing import observe

FLEX = parse("flex16+5")


def flexed(*shape: int, seed: int = 0) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return lowp.quantize(x, "flex16+5")  # type: ignore[no-any-return]


def norm(op: Callable[..., Tensor], *args: Any) -> Callable[[Tensor, Tensor], Tensor]:
    weight, bias = nn.Parameter(flexed(6, seed=5)), nn.Parameter(flexed(6, seed=6))
    return lambda x, y: op(x, *args, weight, bias) * y


CLASSES = torch.tensor([1, 2, 5, 2])
OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda x, y: torch.relu(x) * y,
    "relu in place": lambda x, y: F.relu(x * y, inplace=True),
    "relu_": lambda x, y: (x * y).relu_(),
    "relu of a view": lambda x, y: F.relu((x * y).transpose(1, 2)[..., 2:]),
    "max_pool2d": lambda x, y: F.max_pool2d(x * y, 2, padding=1),
    "max_pool2d with overlap": lambda x, y: F.max_pool2d(torch.relu(x * y), 3, 1, ceil_mode=True),
    "max_pool3d": lambda x, y: F.max_pool3d(x * y, (2, 2, 2)),
    "max_pool3d without a batch": lambda x, y: F.max_pool3d((x * y).view(1, 24, 6, 6), 2),
    "max_pool2d with indices": lambda x, y: F.max_pool2d(x * y, 2, return_indices=True)[0],
    "adaptive_max_pool2d": lambda x, y: F.adaptive_max_pool2d(x * y, 3),
    "gelu": lambda x, y: F.gelu(x) * y,
    "gelu tanh": lambda x, y: F.gelu(x * y, approximate="tanh"),
    "tanh": lambda x, y: torch.tanh(x) * torch.sigmoid(y),
    "silu": lambda x, y: F.silu(x, inplace=False) * y,
    "softmax": lambda x, y: torch.softmax(x * y, -1),
    "log_softmax": lambda x, y: F.log_softmax(x.transpose(1, 2) * y.transpose(1, 2), 1),
    "a product broadcast": lambda x, y: x * y[:, :1, :1] + y[0] * x,
    "a square": lambda x, y: (x * x) / (1 + y.abs()),
    "a product by a number": lambda x, y: (x * 0.3) * y,
    "power and root": lambda x, y: (x.pow(2) + y.square() + 1).sqrt(),
    "exp and log": lambda x, y: torch.exp(-x.abs()) + torch.log(y.abs() + 1),
    "dropout": lambda x, y: F.dropout(x * y, 0.3),
    "dropout of a view": lambda x, y: F.dropout((x * y).transpose(1, 2), 0.5, training=True),
    "batch_norm": norm(lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True)),
    "layer_norm": norm(lambda x, w, b: F.layer_norm(x.transpose(1, 3), (6,), w, b).transpose(1, 3)),
    "group_norm": norm(lambda x, w, b: F.group_norm(x, 3, w, b)),
    "rms_norm": norm(lambda x, w, b: F.rms_norm(x.transpose(1, 3), (6,), w).transpose(1, 3)),
    "avg_pool2d": lambda x, y: F.avg_pool2d(torch.relu(x * y), 2),
    "instance_norm": lambda x, y: F.instance_norm(x * y),
    "maximum": lambda x, y: torch.maximum(x, y) + torch.where(x > y, x, y) * y,
    "cross_entropy": lambda x, y: F.cross_entropy((x * y).flatten(1), torch.tensor([1, 0, 5, 2])),
    "cross_entropy, an ignored class": lambda x, y: F.cross_entropy((x * y)[:, 0, 0], CLASSES, ignore_index=2),
    "cross_entropy, none": lambda x, y: F.cross_entropy((x * y).flatten(0, 2), torch.arange(144) % 6, reduction="none"),
    "cross_entropy, sum": lambda x, y: F.cross_entropy((x * y)[0].flatten(1), torch.arange(6) * 3, reduction="sum"),
    "cross_entropy, indices": lambda x, y: F.cross_entropy((x * y)[:, 0, 0], CLASSES),
    "cross_entropy, smoothed": lambda x, y: F.cross_entropy((x * y)[:, 0, 0], CLASSES, label_smoothing=0.1),
    "cross_entropy, weighted": lambda x, y: F.cross_entropy((x * y)[:, 0, 0], CLASSES, y[0, 0, 0].detach().abs()),
    "cross_entropy, probabilities": lambda x, y: F.cross_entropy((x * y)[:, 0, 0], torch.softmax(y[:, 0, 0], 1)),
    "mse_loss": lambda x, y: F.mse_loss(x * y, y),
}


def outcome(function: Callable[[Tensor, Tensor], Tensor], steps: int = 3) -> list[Tensor]:
    """Return results and gradients of a few steps, whose exponents are predicted from earlier ones."""
    torch.manual_seed(0)
    region, found = lowp.autocast("flex16+5"), []
    for step in range(steps):
        x, y = (flexed(4, 6, 6, 6, seed=2 * step + i).requires_grad_() for i in range(2))
        with region:
            z = function(x * 1.0, y * 1.0)
        gradient = torch.randn(z.shape, generator=torch.Generator().manual_seed(9))
        z.backward(gradient)
        assert x.grad is not None and y.grad is not None and region.exponents is not None
        found += [z.detach(), x.grad, y.grad]
        region.exponents.flush()
    assert region.exponents is not None
    summary = region.exponents.summary()["all"]
    return [*found, torch.tensor([summary.writes, summary.saturated, summary.moved, summary.tensors])]


@pytest.mark.parametrize("name", OPS)
def test_backward_has_the_bits_that_it_has_from_what_torch_keeps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = outcome(OPS[name])
    monkeypatch.setattr(saved_room, "_followed", lambda call: None)
    monkeypatch.setattr(pooling, "selected", lambda call, runner=None: call.func(*call.args, **call.kwargs))
    monkeypatch.setattr(flexpoint, "answers_at_once", lambda tensor: False)
    for found, expected in zip(kept, outcome(OPS[name]), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "kind", ["an ignored class", "none", "sum", "indices", "smoothed", "weighted", "probabilities"]
)
def test_the_loss_of_class_indices_needs_no_graph_of_its_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count = [0]
    derivative = saved_room._nll_derivative

    def counted(*given: Any) -> Tensor:
        count[0] += 1
        return derivative(*given)

    monkeypatch.setattr(saved_room, "_nll_derivative", counted)
    assert outcome(OPS[f"cross_entropy, {kind}"])
    assert count[0] == (0 if kind in ("smoothed", "weighted", "probabilities") else 3)


@pytest.mark.skipif(not uses_library(), reason="the C++ library alone writes in place")
def test_results_that_nobody_else_reads_are_written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bool] = []
    write = entries.write

    def spied(table: Any, cast: Any, index: int, x: Tensor, payload: Tensor, values: Tensor, how: int = 0) -> Any:
        written.append(values.data_ptr() == x.data_ptr())
        return write(table, cast, index, x, payload, values, how)

    monkeypatch.setattr(entries, "write", spied)
    assert outcome(OPS["batch_norm"]) and not any(written)  # small ones are not looked at
    monkeypatch.setattr(saved_room, "LEAST_IN_PLACE", 0)
    kept = outcome(OPS["batch_norm"])
    assert any(written)
    monkeypatch.setattr(saved_room, "_is_alone", lambda x, others: False)
    written.clear()
    assert all(map(torch.equal, kept, outcome(OPS["batch_norm"]))) and not any(written)


@pytest.mark.skipif(not uses_library(), reason="the C++ library alone writes in place")
def test_memory_that_others_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_room, "LEAST_IN_PLACE", 24)
    x = flexed(4, 6)
    part = torch.empty(48)[:24].view(4, 6)
    assert saved_room._is_alone(x.clone(), [x, None])
    assert not any(saved_room._is_alone(one, [x, None]) for one in (x, x.view(-1), x.detach(), x.t(), part))
    assert not saved_room._is_alone(x[:3].clone(), [x, None])  # fewer elements than it is worth while for


def test_an_observer_keeps_what_it_was_shown_before_the_cast() -> None:
    shown: list[tuple[Tensor, Tensor]] = []
    end = observe(lambda one: shown.append((one.tensor, one.tensor.clone())))
    try:
        outcome(OPS["batch_norm"], steps=1)
    finally:
        end()
    assert len(shown) > 4 and all(torch.equal(x, before) for x, before in shown)


@pytest.mark.parametrize("name", OPS)
def test_nothing_large_is_kept_in_fp32(name: str) -> None:
    if name in ("adaptive_max_pool2d", "max_pool2d with indices", "instance_norm"):
        pytest.skip("torch's own functions")
    saved: list[Tensor] = []
    region = lowp.autocast("flex16+5")
    x, y = (flexed(4, 6, 6, 6, seed=i).requires_grad_() for i in range(2))
    with region:
        a, b = x * 1.0, y * 1.0
        with torch.autograd.graph.saved_tensors_hooks(lambda one: (saved.append(one), one)[1], lambda one: one):
            OPS[name](a, b)
    sizes: dict[torch.dtype, int] = {}
    for one in saved:
        sizes[one.dtype] = max(sizes.get(one.dtype, 0), one.numel())
    assert sizes.pop(torch.float32, 0) <= 4 * 6 * 6  # statistics of a norm
    # indices of a pooling; those of classes are the caller's
    assert torch.int64 not in {one.dtype for one in saved if one.numel() > 4 * 6 * 6}
    assert sizes


def test_one_payload_serves_relu_and_the_contractions_behind_it() -> None:
    saved: list[Tensor] = []
    w, v = flexed(5, 7).requires_grad_(), flexed(4, 5).requires_grad_()
    with lowp.autocast("flex16+5"):
        h = F.linear(flexed(3, 7), w)
        with torch.autograd.graph.saved_tensors_hooks(lambda one: (saved.append(one), one)[1], lambda one: one):
            r = F.relu(h)
            F.linear(r, v), r @ v.t()
    places = {one.untyped_storage().data_ptr() for one in saved if one.shape == r.shape}
    assert len(places) == 1 and {one.dtype for one in saved if one.numel() > 2} == {torch.int16}


@pytest.mark.filterwarnings("ignore:numbers beyond the largest of flex16:UserWarning")  # of norms, in the second pass
@pytest.mark.parametrize("name", ["relu", "max_pool2d", "gelu", "softmax", "layer_norm", "batch_norm"])
def test_a_gradient_of_a_gradient_is_that_of_fp32(name: str) -> None:
    def penalty(precision: str) -> list[Tensor]:
        x, y = (flexed(4, 6, 6, 6, seed=i).requires_grad_() for i in range(2))
        with lowp.autocast(precision):
            z = OPS[name](x * 1.0, y * 1.0)
            slopes = torch.autograd.grad(z.square().sum(), (x, y), create_graph=True)
            sum(slope.square().sum() for slope in slopes).backward()  # type: ignore[union-attr]
        assert x.grad is not None and y.grad is not None
        return [*(slope.detach() for slope in slopes), x.grad, y.grad]

    # both passes write at the same sites: there has to be room for the second, and 8 bits are left
    for found, expected in zip(penalty("flex16+5:autoflex(headroom=7)"), penalty("fp32"), strict=True):
        assert float((found - expected).abs().max()) < 0.1 * float(expected.abs().max())


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_computes_again_what_was_kept(reentrant: bool) -> None:
    def body(x: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(F.layer_norm(F.gelu(x) * x, (6,))), 2)

    gradients = []
    for wrapped in (False, True):
        x = flexed(4, 6, 6, 6).requires_grad_()
        with lowp.autocast("flex16+5"):
            h = x * 1.0
            z = checkpoint(body, h, use_reentrant=reentrant) if wrapped else body(h)
        z.sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)
    # what is computed again is another write, under an exponent of its own
    assert torch.allclose(*gradients, rtol=0, atol=float(gradients[0].abs().max()) / 50)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_computes_again_what_was_cut_off_at_both_ends(reentrant: bool) -> None:
    region, weight = lowp.autocast("flex16+5"), flexed(6, 6).requires_grad_()
    for factor in (1.0, 50.0):
        x = flexed(4, 6, 6, 6).requires_grad_()
        with region:
            h = x * factor
            z = checkpoint(lambda h: F.gelu(F.linear(h, weight)), h, use_reentrant=reentrant)
            z.sum().backward()
        assert x.grad is not None and region.exponents is not None
        region.exponents.flush()
    assert region.exponents.summary()["all"].saturated > 0


IN_PLACE: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "silu": lambda x, inplace: F.silu(x, inplace=inplace),
    "leaky_relu": lambda x, inplace: F.leaky_relu(x, 0.1, inplace),
    "relu6": lambda x, inplace: F.relu6(x, inplace),
    "hardtanh": lambda x, inplace: F.hardtanh(x, -0.5, 0.5, inplace=inplace),
    "hardswish": lambda x, inplace: F.hardswish(x, inplace),
    "elu": lambda x, inplace: F.elu(x, 1.0, inplace),
    "dropout": lambda x, inplace: F.dropout(x, 0.3, True, inplace),
    "dropout of no training": lambda x, inplace: F.dropout(x, 0.3, False, inplace),
    "rrelu": lambda x, inplace: F.rrelu(x, 0.1, 0.3, True, inplace),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_asked_for_in_place_has_the_bits_of_a_result_of_its_own(name: str) -> None:
    def run(x: Tensor, inplace: bool) -> Tensor:
        h = x * 1.0
        z = IN_PLACE[name](h, inplace)
        assert not inplace or z is h
        return z * 3.0

    expected = outcome(lambda x, y: run(x, False) * y)
    for found, wanted in zip(outcome(lambda x, y: run(x, True) * y), expected, strict=True):
        assert torch.equal(found, wanted)
    results = []
    for inplace in (True, False):
        torch.manual_seed(0)
        with torch.no_grad(), lowp.autocast("flex16+5"):
            results.append(IN_PLACE[name](flexed(9), inplace))
    assert torch.equal(*results)


def test_a_tensor_with_the_lowest_mantissa_is_known_by_it() -> None:
    region = lowp.autocast("flex16+5")
    for factor in (1.0, 1000.0):
        with region:
            cut, summed = flexed(9, 9).mul(factor), F.linear(flexed(9, 9), flexed(9, 9) * factor)
        assert region.exponents is not None
        region.exponents.flush()
    for one in (cut, summed):
        found = payloads.exact(one, FLEX)
        assert found is not None and int(found.payload.min()) == -32768
        assert torch.equal(found.payload.float() * 2.0**found.exponent, one)


@pytest.mark.skipif(cpu.library() is None, reason="without the library each contraction rounds for itself")
def test_what_two_contractions_read_is_rounded_once_for_both() -> None:
    saved: list[Tensor] = []
    w, v = (torch.randn(5, 7, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(2))
    x = torch.randn(layer_room._MANY // 7 + 1, 7, generator=torch.Generator().manual_seed(2))  # small ones do not share
    with lowp.autocast("dfp16"):
        h = torch.tanh(x.clone().requires_grad_())
        with torch.autograd.graph.saved_tensors_hooks(lambda one: (saved.append(one), one)[1], lambda one: one):
            first, second = F.linear(h, w), F.linear(h, v)
            half = F.linear(h[:, :4], w[:, :4])
        assert torch.equal(first, F.linear(torch.tanh(x), w)) and torch.equal(second, F.linear(torch.tanh(x), v))
        assert torch.equal(half, F.linear(torch.tanh(x)[:, :4].clone(), w[:, :4]))
    places = [one.untyped_storage().data_ptr() for one in saved if one.shape == h.shape]
    assert len(places) == 2 and len(set(places)) == 1
    x[0, 0] = 100.0  # the caller's own data may change unseen: through NumPy, which shares their memory
    x.numpy()[0, 0] = 3.0
    with lowp.autocast("dfp16"):
        assert torch.allclose(F.linear(x, w), F.linear(x.clone(), w))


def test_an_infinity_goes_the_way_of_torch() -> None:
    region = lowp.autocast("flex16+5")
    x = flexed(4, 6, 6, 6).requires_grad_()
    with region:
        h = x * torch.tensor(torch.inf)
        z = F.max_pool2d(F.relu(h), 2)
    z.sum().backward()
    assert z.isinf().any() and region.exponents is not None
    assert next(iter(region.exponents.faults())) == "output of mul"


@pytest.mark.skipif(cpu.library() is None, reason="the C++ library was not built")
def test_without_the_library_the_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(x: Tensor, y: Tensor) -> Tensor:
        return F.dropout(F.relu(F.gelu(x) * y), 0.3)

    fast = outcome(body)
    monkeypatch.setattr(cpu, "library", lambda: None)
    for found, expected in zip(outcome(body), fast, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda y, index: F.cross_entropy(y, index),
        lambda y, index: F.cross_entropy(y, index, label_smoothing=0.1),
        lambda y, index: F.nll_loss(y.log_softmax(1), index),
        lambda y, index: (y.abs() + 1).pow(index[:, None]).sum(),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "flex16+5"])
def test_indices_that_are_written_before_backward_are_noticed(
    precision: str, function: Callable[[Tensor, Tensor], Tensor]
) -> None:
    weight, index = nn.Parameter(torch.randn(4, 5)), torch.tensor([3, 2, 1, 0])
    with lowp.autocast(precision):
        loss = function(torch.randn(4, 4) @ weight, index)
    index.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


X = torch.ones(4, requires_grad=True)


@pytest.mark.parametrize(
    ("args", "kwargs", "has_mask"),
    [
        ((X,), {}, True),
        ((), {"input": X, "p": 0.9}, True),
        ((X, 0.5, False), {}, False),
        ((X, 0.5), {"train": False}, False),
        ((X, 0.5, True, True), {}, False),
        ((X, 0.0), {}, False),
        ((X, 1.0), {}, False),
        ((torch.empty(0),), {}, False),
    ],
    ids=["alone", "named", "evaluation", "torch's name", "in place", "none", "all", "empty"],
)
def test_dropout_saves_a_mask_where_it_drops_some_elements(
    args: tuple[Any, ...], kwargs: dict[str, Any], has_mask: bool
) -> None:
    found = saved_room.dropout_function(cast(Call, SimpleNamespace(args=args, kwargs=kwargs)))
    assert (found is not None) is has_mask and (found is None or found[1] == [X])
