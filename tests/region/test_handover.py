"""Which calls take which way: straight from their arguments, as they are, or by torch's own dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import lowp
from lowp import kernels
from lowp.ops import trilinear
from lowp.ops.rows import Row
from lowp.policy import Rule
from lowp.region import handover
from lowp.region.entries import current_engine
from lowp.region.handover import ELSEWHERE, HandOver

BRAIN = torch.bfloat16
RULE = Rule.of("contraction", input="bf16", weight="bf16", output="bf16")
WIDE = Rule.of("wide", input="fp32")
X, WEIGHT = torch.ones(2, 3), torch.ones(4, 3)
BATCHES = torch.ones(2, 4, 3)
ATTENTION = "multi_head_attention_forward"


def way(op: str = "linear", devices: tuple[str, ...] = ("cpu",), weights: Any = None) -> HandOver:
    return HandOver(op, frozenset(devices), BRAIN, weights, frozenset(devices))


@pytest.fixture
def engine() -> Iterator[Any]:
    with lowp.autocast("bf16"):
        yield current_engine()


# -- what a rule hands over -------------------------------------------------------------------------------------------
def handed(op: str, op_class: str, rule: Rule | None, **more: Any) -> HandOver | None:
    row, function = Row(op, op_class, more.pop("runner", "generic:plain")), more.pop("function", torch.mm)
    return handover.hand_over(function, row, rule, more.pop("dtype", BRAIN))


@pytest.mark.parametrize(("kind", "own"), [(None, {"cpu"}), ("cuda", {"cpu", "cuda"})])
def test_an_op_is_handed_over_on_the_devices_that_do_what_its_rule_says(
    kind: str | None, own: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = frozenset({"cpu", "cuda"})
    monkeypatch.setattr(handover, "accelerator", lambda: kind)
    monkeypatch.setattr(handover, "multiplies", lambda device, dtype: dtype is BRAIN)
    assert handed("linear", "contraction", RULE) == HandOver("linear", both, BRAIN, RULE.weight, frozenset(own))
    fused = handed("scaled_dot_product_attention", "contraction", RULE)
    assert fused is not None and fused.devices == both and fused.usual == own - {"cpu"}
    assert handed("exp", "wide", WIDE) == HandOver("exp", frozenset({"cuda"}), BRAIN, None, frozenset(own - {"cpu"}))
    for rule in (None, Rule()):
        found = handed("cat", "promote", rule)
        assert found is not None and found.devices == both and found.weights is None
    monkeypatch.setattr(handover, "multiplies", lambda device, dtype: device == "cuda")
    found = handed("linear", "contraction", RULE)
    assert found is not None and found.usual == own - {"cpu"} and not found.may_be_small
    assert way().may_be_small and not way("matmul").may_be_small and not way(devices=("cpu", "cuda")).may_be_small


@pytest.mark.parametrize(
    ("op", "op_class", "rule", "more"),
    [
        ("linear", "contraction", None, {}),
        ("linear", "contraction", RULE, {"dtype": torch.float16}),
        ("linear", "contraction", RULE, {"function": Tensor.addmm_}),
        ("linear", "contraction", RULE, {"runner": "generic:refused"}),
        ("linear", "contraction", Rule.of("contraction", input="bf16", weight="bf16"), {}),
        ("relu", "contraction", RULE, {}),  # in no list
        ("cat", "promote", RULE, {}),
        ("exp", "wide", None, {}),
        ("exp", "wide", Rule.of("wide", input="bf16"), {}),
        ("exp", "wide", Rule.of("wide", output="fp32"), {}),
        ("exp", "neutral", WIDE, {}),
        *(
            ("exp", "wide", Rule.of("wide", **{"input": "fp32", name: "fp32"}), {})
            for name in ("weight", "grad", "output", "accumulate")
        ),
        ("exp", "wide", Rule.of("wide", input="fp32", saved="e4m3fn"), {}),
    ],
)
def test_what_torch_does_otherwise_is_not_handed_over(op: str, op_class: str, rule: Rule | None, more: Any) -> None:
    assert handed(op, op_class, rule, **more) is None


# -- what the arguments say -------------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:ComplexHalf support")
def test_torch_runs_calls_of_narrow_strided_tensors_on_a_device_that_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    fused: list[bool] = []

    def own_device(x: Tensor, dtype: torch.dtype, is_fused: bool) -> str:
        fused.append(is_fused)
        return x.device.type

    monkeypatch.setattr(handover, "torchs_own_device", own_device)
    wide, nested = WEIGHT.double(), torch.nested.nested_tensor([X, X])
    there = torch.ones(2, device="meta")
    fit: tuple[tuple[Any, ...], ...]
    fit = (X, WEIGHT), (2, X, there), ([WEIGHT, X],), ((X, None),), (torch.arange(3), "a")
    for args in fit:
        assert handover.device_of(way(), args, {}) == "cpu", args
        assert handover.device_of(way(), (), {str(place): one for place, one in enumerate(args)}) == "cpu", args
    unfit = (wide, WEIGHT.to_sparse(), nested, *(WEIGHT.to(one) for one in handover._LEFT_ALONE))
    others: list[tuple[Any, ...]] = [
        (),
        (3,),
        (there, X),
        *((X, one) for one in unfit),
        *(([X, one],) for one in unfit),
    ]
    for args in others:
        assert handover.device_of(way(), args, {}) is None, args
        assert handover.device_of(way(), (), {str(place): one for place, one in enumerate(args)}) is None, args
    assert handover.device_of(way(), (X,), {"weight": WEIGHT, "out": None}) == "cpu"
    assert handover.device_of(way(), (X,), {"out": X}) is None
    assert not any(fused)
    fused.clear()
    assert handover.device_of(way(ATTENTION), (X,), {"need_weights": False}) == "cpu"
    assert handover.device_of(way(ATTENTION), (X,), {}) is None
    assert handover.device_of(way(ATTENTION), (X,), {"need_weights": True}) is None
    assert handover.device_of(way("scaled_dot_product_attention"), (X,), {}) == "cpu" and fused == [True] * 4
    assert handover.device_of(way(devices=("cuda",)), (X,), {}) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_leaves_that_are_to_be_cast_are_told_of_plain_tensors_alone() -> None:
    leaf, half, narrow = nn.Parameter(WEIGHT), nn.Parameter(WEIGHT.half()), nn.Parameter(WEIGHT.bfloat16())
    plain = torch.ones(3, requires_grad=True)

    def leaves(*args: Any, of: HandOver = way(), **kwargs: Any) -> list[int] | None:  # noqa: B008
        found = handover._leaves_of_plain(args, kwargs, of)
        return None if found is None else [id(one) for one in found]

    assert leaves(X, leaf, half, narrow, plain * 1, plain) == [id(leaf), id(half), id(plain)]
    assert leaves(X, 3, None, (1, 2), bias=leaf) == [id(leaf)] and leaves(weight=leaf) == [id(leaf)]
    assert leaves(torch.arange(3)) == leaves(X.bfloat16()) == leaves(X.detach()) == []
    own: Tensor = WEIGHT.as_subclass(type("Own", (Tensor,), {}))
    others = (WEIGHT.double(), WEIGHT.to(torch.complex64), WEIGHT.to_sparse(), torch.nested.nested_tensor([X]), own)
    for one in (*others, [X], [1], (X,), (), (1.0,)):
        assert leaves(X, one) is None and leaves(X, other=one) is None and leaves(one) is None
    assert leaves(3) is None and leaves() is None and leaves(X, of=way(devices=("cuda",))) is None
    assert leaves(torch.ones(2, device="meta")) is None


@pytest.mark.parametrize("few", [True, False])
def test_small_linear_layers_and_one_matrix_beside_many_are_lowps(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trilinear, "FEW", (6, 12) if few else (0, 0))
    turned, leaf = BATCHES.transpose(0, 1), nn.Parameter(WEIGHT)

    def is_lowps(*args: Any, op: str = "linear", **kwargs: Any) -> bool:
        return handover._is_lowps(op, args, kwargs)

    for args, kwargs in (((X, WEIGHT), {}), ((X,), {"weight": leaf}), ((), {"input": X, "weight": WEIGHT})):
        assert is_lowps(*args, **kwargs) is few and not is_lowps(*args, op="matmul", **kwargs)
    assert not is_lowps(torch.ones(3, 3), WEIGHT) and not is_lowps(X, torch.ones(5, 3)) and not is_lowps(X)
    assert not is_lowps(X, bias=X) and not is_lowps(X.as_subclass(type("Own", (Tensor,), {})), WEIGHT)
    assert not is_lowps(X, WEIGHT.as_subclass(type("Own", (Tensor,), {})))
    assert not is_lowps(X.to("meta"), WEIGHT.to("meta"))
    with kernels.use("bitwise"):
        assert not is_lowps(X, WEIGHT) and is_lowps(turned, WEIGHT)
    found = list[bool]()

    def ask(x: Tensor) -> Tensor:
        found.append(is_lowps(x, WEIGHT))
        return x

    torch.func.vmap(ask)(X)
    monkeypatch.setattr(handover, "is_jit_tracing", lambda: True)
    assert found == [False] and not is_lowps(X, WEIGHT)
    for op in ("linear", "matmul"):
        assert is_lowps(turned, WEIGHT, op=op) and not is_lowps(BATCHES, WEIGHT, op=op)  # of which torch makes one
        assert is_lowps(WEIGHT, BATCHES, op=op) and is_lowps(torch.ones(3), torch.ones(1, 2, 3, 3), op=op)
        assert not is_lowps(turned, torch.ones(3), op=op) and not is_lowps(turned, BATCHES, op=op)
        assert not is_lowps(turned, leaf, op=op)  # whose gradient is one product
        with torch.no_grad():
            assert is_lowps(turned, leaf, op=op)


# -- the ways ---------------------------------------------------------------------------------------------------------
def given(**more: Any) -> Any:
    """Return an engine of a region on the host."""
    return SimpleNamespace(**{"is_strict": False, "is_on_host": True, "without_kernel": no_kernel, **more})


def no_kernel(error: RuntimeError, *call: Any) -> Any:
    return str(error), torch.is_autocast_enabled("cpu"), *call


def asked(*args: Any, **kwargs: Any) -> tuple[bool, Any, Any]:
    """Return whether torch.autocast is on, and the arguments."""
    return torch.is_autocast_enabled("cpu"), args, kwargs


def failing(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("gone")


@pytest.mark.parametrize("is_on_host", [True, False])
@pytest.mark.usefixtures("engine")
def test_calls_straight_from_arguments_and_calls_as_they_are_are_shielded(is_on_host: bool) -> None:
    plan, one = SimpleNamespace(looks=False, quick=asked), given(is_on_host=is_on_host)
    assert handover.quickly(one, plan, failing, (1,), {"a": 2}) == (False, (failing, (1,), {"a": 2}, one), {})
    assert torch.is_autocast_enabled("cpu")
    assert handover.as_it_is(one, plan, asked, (1,), {"a": 2}) == (False, (1,), {"a": 2})
    assert torch.is_autocast_enabled("cpu")
    assert handover.as_it_is(one, plan, failing, (1,), {"a": 2}) == ("gone", False, failing, (1,), {"a": 2})
    assert torch.is_autocast_enabled("cpu")
    plan.quick = lambda *call: None
    assert handover.quickly(one, plan, asked, (), {}) is ELSEWHERE
    plan.quick = failing
    with pytest.raises(RuntimeError, match="gone"):
        handover.quickly(one, plan, asked, (), {})
    assert torch.is_autocast_enabled("cpu")
    strict = given(is_on_host=is_on_host, is_strict=True)
    for each in (handover.quickly, handover.as_it_is, handover.while_small):
        assert each(strict, plan, asked, (X,), {}) is ELSEWHERE


@pytest.mark.usefixtures("engine")
def test_what_torch_transforms_or_traces_is_not_run_straight_from_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []

    def ask(x: Tensor, looks: bool = False) -> Tensor:
        plan = SimpleNamespace(looks=looks, quick=asked)
        found.append(handover.quickly(given(), plan, asked, (), {}) is ELSEWHERE)
        return x

    torch.func.vmap(ask)(X)
    with forward_ad.dual_level():
        ask(X)
    for looks in (False, True):
        ask(X, looks)
        with monkeypatch.context() as patch:
            patch.setattr(handover, "is_jit_tracing", lambda: True)
            ask(X, looks)
    assert found == [True, True, False, False, False, True]


@pytest.mark.usefixtures("engine")
def test_little_is_less_than_64_kib_of_a_plain_tensor() -> None:
    def is_little(*args: Any) -> bool:
        return handover.while_small(given(), None, asked, args, {}) is not ELSEWHERE

    few, many = torch.ones(2**14 - 1), torch.ones(2**14)
    assert is_little(few) and is_little(few, many) and not is_little(many) and not is_little(many, few)
    assert not is_little() and not is_little(3) and not is_little(nn.Parameter(few))


def test_calls_under_torch_autocast_keep_none_of_its_casts(engine: Any) -> None:
    def caches(*args: Any, **kwargs: Any) -> tuple[bool, bool, Any]:
        return torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled(), args

    for enabled in (True, False):
        torch.set_autocast_cache_enabled(enabled)
        assert handover._under_autocast(given(), caches, (1,), {}) == (True, False, (1,))
        assert torch.is_autocast_cache_enabled() is enabled
        assert handover._under_autocast(given(), failing, (1,), {"a": 2}) == ("gone", False, failing, (1,), {"a": 2})
        assert torch.is_autocast_cache_enabled() is enabled and torch.is_autocast_enabled("cpu")
    torch.set_autocast_cache_enabled(True)


def test_usual_calls_take_the_short_way_to_torch_autocast(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_under_autocast", lambda engine, func, args, kwargs: (func, args, kwargs))

    def is_taken(*args: Any, of: HandOver = way("mm"), **kwargs: Any) -> bool:  # noqa: B008
        found = handover.as_usual(engine, SimpleNamespace(way=of), asked, args, kwargs)
        assert found is ELSEWHERE or found == (asked, args, kwargs)
        return found is not ELSEWHERE

    leaf, kept = nn.Parameter(WEIGHT), way("mm", weights=RULE.weight)
    assert is_taken(X, WEIGHT) and is_taken(X, leaf) and is_taken(X, leaf)
    assert is_taken(X, leaf, of=kept) and not is_taken(X, leaf, of=kept) and is_taken(X, WEIGHT, of=kept)
    assert not is_taken(X, out=None) and not is_taken([X])
    assert not is_taken(X, WEIGHT, of=way()) and not is_taken(X, weight=WEIGHT, of=way())  # which is small
    large = torch.ones(2**13 + 1, 3)
    assert is_taken(large, WEIGHT, of=way()) and is_taken(X, WEIGHT, of=way("matmul"))
    assert not is_taken(WEIGHT, BATCHES, of=way("matmul")) and is_taken(WEIGHT, BATCHES)
    assert is_taken(X, need_weights=False, of=way(ATTENTION)) and is_taken(X, need_weights=True)
    assert not is_taken(X, need_weights=True, of=way(ATTENTION)) and not is_taken(X, of=way(ATTENTION))
    with kernels.use("bitwise"):
        assert not is_taken(X, WEIGHT)
    engine.is_strict = True
    assert not is_taken(X, WEIGHT)


@pytest.mark.parametrize("has_rule", [True, False])
def test_other_calls_are_handed_over_with_the_weights_that_are_kept(
    has_rule: bool, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[Any] = []

    def under(engine: Any, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        running.append(engine.running)
        return func(*args, **kwargs)

    monkeypatch.setattr(handover, "device_of", lambda of, args, kwargs: None if "out" in kwargs else "cpu")
    monkeypatch.setattr(handover, "_under_autocast", under)
    leaf, of = nn.Parameter(WEIGHT), way("mm", weights=RULE.weight if has_rule else None)
    plan = SimpleNamespace(way=of, row=Row("mm", "contraction"), rule=RULE if has_rule else None)
    engine.running = ("outer", True)
    found = [handover.handed_over(engine, plan, asked, (X,), {"weight": leaf})[2]["weight"] for _ in range(2)]
    assert (
        found[0] is leaf and (found[1] is leaf) is not has_rule and found[1].dtype is (BRAIN if has_rule else X.dtype)
    )
    assert running == [("mm", has_rule)] * 2 and engine.running == ("outer", True)
    assert handover.handed_over(engine, plan, asked, (X,), {"out": X}) is ELSEWHERE
    for op, args, is_there in (("linear", (X, WEIGHT), False), ("linear", (torch.ones(2**13 + 1, 3), WEIGHT), True)):
        plan.way = way(op)
        assert (handover.handed_over(engine, plan, asked, args, {}) is not ELSEWHERE) is is_there
    with pytest.raises(RuntimeError, match="gone"):
        handover.handed_over(engine, plan, failing, (X,), {})
    assert engine.running == ("outer", True)
