"""Regions: the formats of ops, nesting and ending, and torch's state inside a region."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowp
from lowp import presets
from lowp.errors import InvalidInput, Misuse, Unavailable, UnknownName
from lowp.policy import Policy, Rule
from lowp.region import Observation, autocast, context
from lowp.region.rulebook import Report, traced

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def product() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def gradients(model: nn.Module, output: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(output.float().pow(2).sum(), list(model.parameters())))


# -- the formats --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", HALF), ("bf16", BRAIN), ("bf16-trunc", BRAIN)])
def test_a_16_bit_region_writes_16_bits_and_says_so(precision: str, dtype: torch.dtype, model: nn.Module) -> None:
    with autocast(precision):
        assert model(torch.randn(3, 8)).dtype is dtype
        for device in ("cpu", "cuda"):
            assert torch.is_autocast_enabled(device)
            assert torch.get_autocast_dtype(device) is dtype


@pytest.mark.parametrize("precision", ["e4m3fn", "bf16-tpu", "fp8", "e5m7"])
def test_an_emulated_region_writes_fp32_and_says_so(precision: str, model: nn.Module) -> None:
    with autocast(precision):
        assert model(torch.randn(3, 8)).dtype is FULL
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is FULL


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_linear_layer_is_the_fp32_product_of_cast_operands_rounded_once(precision: str) -> None:
    layer, x = nn.Linear(64, 32), torch.randn(16, 64)
    dtype = HALF if precision == "fp16" else BRAIN

    def rounded(t: Tensor) -> Tensor:
        return t.detach().to(dtype).float()

    with autocast(precision):
        y = layer(x)
    y.backward(torch.ones_like(y))
    assert layer.weight.grad is not None
    assert torch.equal(y, F.linear(rounded(x), rounded(layer.weight), layer.bias.detach()).to(dtype))
    assert torch.equal(layer.weight.grad, (torch.ones(32, 16) @ rounded(x)).to(dtype).float())


@pytest.mark.parametrize("precision", ["fp16", "bf16", "e5m7"])
@pytest.mark.parametrize("sizes", [(33, 70, 5), (130, 65, 1025)], ids=["small", "large"])
def test_a_layer_called_by_keywords_has_the_bits_of_one_called_by_position(
    sizes: tuple[int, int, int], precision: str
) -> None:
    rows, depth, columns = sizes
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(one, generator=generator) for one in ((rows, depth), (columns, depth), (columns,)))

    def run(*args: Tensor, **kwargs: Tensor) -> list[Tensor]:
        y = F.linear(*args, **kwargs)
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, weight, bias])]

    for one in (x, weight, bias):
        one.requires_grad_()
    with autocast(precision):
        wanted = run(x, weight, bias)
        for found in (
            run(x, weight, bias=bias),
            run(x, weight=weight, bias=bias),
            run(input=x, weight=weight, bias=bias),
        ):
            assert all(map(torch.equal, found, wanted))


def test_each_operand_is_cast_by_its_role() -> None:
    policy = Policy((Rule.of("contraction", input="e4m3fn", weight="e5m2", grad="e3m2"),))
    layer, x = nn.Linear(4, 4, bias=False), torch.randn(4, 4, requires_grad=True)
    with autocast(policy):
        y = layer(x)
    gradient = torch.full((4, 4), 0.3)
    y.backward(gradient)
    x8, w8 = (t.detach().to(d).float() for t, d in ((x, torch.float8_e4m3fn), (layer.weight, torch.float8_e5m2)))
    g6 = torch.full((4, 4), 0.3125)  # e3m2: 0.3 between 0.25 and 0.3125
    assert torch.equal(y, x8 @ w8.t())
    assert torch.equal(x.grad, g6 @ w8)
    assert torch.equal(layer.weight.grad, g6.t() @ x8)


def test_the_fp32_preset_does_not_touch_anything(model: nn.Module) -> None:
    x = torch.randn(3, 8)
    expected = gradients(model, model(x))
    calls = []
    with autocast("fp32") as region:
        assert torch.overrides._get_current_function_mode_stack() == []
        calls.append(gradients(model, model(x)))
    assert all(torch.equal(a, b) for a, b in zip(expected, calls[0], strict=True))
    assert region.report().ops == ()


CASES: list[tuple[str, Callable[[Tensor, Tensor], Any], torch.dtype]] = [
    ("operator", lambda a, b: a @ b, HALF),
    ("reflected operator", lambda a, b: a.__rmatmul__(b), HALF),
    ("einsum", lambda a, b: torch.einsum("ij,jk->ik", a, b), HALF),
    ("method", lambda a, b: a.mm(b), HALF),
    ("aten packet", lambda a, b: torch.ops.aten.mm(a, b), HALF),
    ("aten overload", lambda a, b: torch.ops.aten.mm.default(a, b), HALF),
    ("prelu", lambda a, b: F.prelu(a, torch.ones(1)), HALF),
    ("softmax", lambda a, b: F.softmax(a, -1), HALF),
    ("layer_norm", lambda a, b: F.layer_norm(a, (4,)), HALF),
    ("cross_entropy", lambda a, b: F.cross_entropy(b, torch.arange(4)), FULL),
    ("mse_loss", lambda a, b: F.mse_loss(b, b), FULL),
    ("exp", lambda a, b: b.exp(), FULL),
    ("power operator", lambda a, b: b**2, FULL),
    ("reflected power", lambda a, b: 2**b, FULL),
    ("sum", lambda a, b: b.sum(), FULL),
    ("norm", lambda a, b: b.norm(), FULL),
    ("fft", lambda a, b: torch.fft.rfft(b).real, FULL),
    ("inverse", lambda a, b: torch.linalg.inv(torch.eye(4).half()), FULL),
    ("interpolate", lambda a, b: F.interpolate(b[None], scale_factor=2), FULL),
    ("cat", lambda a, b: torch.cat([a, b]), FULL),
    ("addcmul", lambda a, b: torch.addcmul(a, b, b), FULL),
    ("dot", lambda a, b: torch.dot(a[0], b[0]), FULL),
    ("dot of 16 bits", lambda a, b: torch.dot(b[0], b[0]), HALF),
    ("where", lambda a, b: torch.where(b > 0, a, b), FULL),
    ("relu", lambda a, b: F.relu(b), HALF),
    ("add", lambda a, b: b + b, HALF),
    ("fp64 stays", lambda a, b: a.double() @ a.double(), torch.float64),
    ("fp64 stays in wide ops", lambda a, b: a.double().exp(), torch.float64),
    ("integers stay", lambda a, b: torch.arange(4).reshape(2, 2) @ torch.arange(4).reshape(2, 2), torch.int64),
]


if hasattr(F, "linear_cross_entropy"):  # from torch 2.13 on
    CASES.append(("linear_cross_entropy", lambda a, b: F.linear_cross_entropy(a, a, torch.arange(4)), FULL))


@pytest.mark.filterwarnings("ignore:.*has rounded no contraction.*matmul in float64:UserWarning")
@pytest.mark.parametrize(("call", "dtype"), [pytest.param(c, d, id=n) for n, c, d in CASES])
def test_the_type_an_op_writes(call: Callable[[Tensor, Tensor], Any], dtype: torch.dtype) -> None:
    with autocast("fp16"):
        assert call(torch.rand(4, 4), torch.rand(4, 4).half()).dtype is dtype


def test_in_place_and_out_forms_keep_the_types_of_their_tensors() -> None:
    a, b, out = torch.rand(3, 3), torch.rand(3, 3).half(), torch.empty(0)
    expected = (a.half().float() @ b.float()).half().float()
    with autocast("fp16"):
        assert torch.mm(a, b, out=out) is out
        assert torch.equal(out, expected)
        c = a.clone()
        assert c.addmm_(b, b) is c
        assert c.dtype is FULL
        h = b.clone()
        h.exp_()
        assert torch.equal(h, b.float().exp().half())
        h **= 2
        assert h.dtype is HALF
        total = torch.empty((), dtype=HALF)
        assert torch.sum(b, dim=(0, 1), out=total) is total


@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(8, 4),
        nn.GRU(8, 4),
        nn.RNN(8, 4),
        nn.LSTMCell(8, 4),
        nn.MultiheadAttention(8, 2),
        nn.Conv1d(2, 4, 3),
        nn.BatchNorm1d(2),
        nn.GroupNorm(1, 2),
        nn.InstanceNorm1d(2, affine=True),
        nn.TransformerEncoderLayer(8, 2),
        nn.Bilinear(8, 8, 2),
    ],
    ids=lambda module: type(module).__name__,
)
@pytest.mark.parametrize("precision", ["fp16", "e4m3fn"])
def test_modules_run_forward_and_backward(module: nn.Module, precision: str) -> None:
    x = torch.randn(3, 8) if isinstance(module, nn.LSTMCell) else torch.randn(3, 2, 8)
    inputs = {"MultiheadAttention": 3, "Bilinear": 2}.get(type(module).__name__, 1) * (x,)
    with autocast(precision):
        y = module(*inputs)
    while isinstance(y, tuple):
        y = y[0]
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
    module.zero_grad()


def test_an_op_without_a_16_bit_kernel_goes_to_fp32_and_is_reported() -> None:
    region = autocast("fp16")
    x = torch.rand(4).half()
    with region:
        for _ in range(2):
            assert torch.special.bessel_j0(x).dtype is FULL
    assert region.report().widened == ("special_bessel_j0 on cpu",)


def test_an_error_of_dtypes_names_those_of_its_operands_where_they_are_several() -> None:
    engine, full, half = autocast("fp16")._compiled, torch.ones(2, 2), torch.ones(2, 2).half()
    mixed = RuntimeError("expected scalar type Half but found Float")
    with pytest.raises(RuntimeError) as told:
        engine.without_kernel(mixed, torch.special.bessel_j0, (full,), {"out": half})
    assert told.value.__cause__ is mixed and str(told.value) == (
        "expected scalar type Half but found Float. special_bessel_j0 was given float16 and float32: products in this "
        "region write another dtype than the model is stored in. Convert the model with float(), or store it in few "
        "bits by lowp.Precision(...).prepare(model, optimizer)"
    )
    missing = RuntimeError("\"x\" not implemented for 'Half'")
    for error, args in ((mixed, (full, full)), (mixed, (half, full.int())), (mixed, (half,)), (missing, ())):
        with pytest.raises(RuntimeError) as plain:
            engine.without_kernel(error, torch.special.bessel_j0, args, {})
        assert plain.value is error
    engine.rulebook.find(torch.special.bessel_j0, "")
    assert engine.without_kernel(missing, torch.special.bessel_j0, (half,), {}).dtype is FULL


@pytest.mark.parametrize("precision", ["bf16", "fp16", "e4m3fn", "mxfp8", "int8", "dfp16", "flex16+5"])
def test_what_no_rule_rounds_beside_what_one_does_is_named(precision: str) -> None:
    x, weight, large = torch.randn(8, 16), torch.randn(4, 16), torch.randn(512, 512)
    calls: list[tuple[str, Callable[[], Tensor]]] = [
        ("linear was given float32 and float64: ", lambda: F.linear(x, weight, torch.zeros(4).double())),
        ("linear was given float32 and float64: ", lambda: F.linear(x.double(), weight)),
        ("linear was given float32 and int64: ", lambda: F.linear(large, large, torch.arange(512))),
        ("einsum was given float32 and float64: ", lambda: torch.einsum("ij,kj->ik", x, weight.double())),
        ("conv1d was given float32 and float64: ", lambda: F.conv1d(x[None], weight[:, :, None].double()[:, :8])),
    ]
    with autocast(precision):
        for named, call in calls:
            with pytest.raises(RuntimeError, match=f"{named}.* leaves other dtypes to torch, .* with float"):
                call()


@pytest.mark.parametrize("call", [F.binary_cross_entropy, nn.BCELoss()], ids=["function", "module"])
def test_binary_cross_entropy_is_refused_and_names_the_safe_form(call: Callable[..., Tensor]) -> None:
    with pytest.raises(Misuse, match="binary_cross_entropy_with_logits") as caught, autocast("fp16"):
        call(torch.rand(3), torch.rand(3))
    assert isinstance(caught.value, RuntimeError)
    with autocast("bf16-tpu"):
        assert call(torch.rand(3), torch.rand(3)).dtype is FULL
    allowed = presets.PRESETS["fp16"].policy.before(Rule.of("binary_cross_entropy", input="fp32"))
    with autocast(allowed):
        assert call(torch.rand(3).half(), torch.rand(3).half()).dtype is FULL


# -- how regions nest ---------------------------------------------------------------------------------------------


def test_an_inner_region_replaces_the_outer_one() -> None:
    with autocast("fp16"):
        with autocast("bf16"):
            assert product() is BRAIN
            with autocast("fp32"):
                assert product() is FULL
                assert not torch.is_autocast_enabled("cpu")
            with autocast("fp16", enabled=False):
                assert product() is FULL
            with autocast("cpu", dtype=torch.bfloat16):
                assert product() is BRAIN
                assert torch.exp(torch.ones(2, dtype=BRAIN)).dtype is BRAIN  # torch's CPU lists, not lowp-1
            assert product() is BRAIN
        assert product() is HALF
        assert torch.get_autocast_dtype("cpu") is HALF


def test_torch_autocast_within_a_region_is_honoured() -> None:
    for precision in ("fp16", "e4m3fn"):
        with autocast(precision):
            with torch.autocast("cpu", enabled=False):
                x, w = torch.rand(2, 2), torch.rand(2, 2)
                assert torch.equal(x @ w, torch.matmul(x, w))
                assert (x @ w).dtype is FULL
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert product() is BRAIN
                assert torch.exp(torch.ones(2, dtype=BRAIN)).dtype is BRAIN


def test_a_region_within_torch_autocast_wins() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with autocast("fp16"):
            assert product() is HALF
        with autocast("fp32"):
            assert product() is FULL
        assert product() is BRAIN


def test_the_same_region_can_be_entered_within_itself_and_after_an_error() -> None:
    region = autocast("fp16")
    with region:
        with pytest.raises(ZeroDivisionError), region:
            raise ZeroDivisionError
        assert product() is HALF
    with region:
        assert product() is HALF


def test_a_region_decorates_functions_and_recursion() -> None:
    @autocast("fp16")
    def down(n: int) -> list[torch.dtype]:
        """Count."""
        return [product()] if n == 0 else [product(), *down(n - 1)]

    assert down.__doc__ == "Count."
    assert down(2) == [HALF] * 3
    with pytest.raises(InvalidInput, match="needs a function, not int"):
        autocast("fp16")(3)  # type: ignore[arg-type]


def test_a_region_is_of_its_thread() -> None:
    found: list[torch.dtype] = []

    def work() -> None:
        found.append(product())
        with autocast("bf16"):
            found.append(product())
        found.append(product())

    with autocast("fp16"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert product() is HALF
    assert found == [FULL, BRAIN, FULL]


def test_one_region_serves_several_threads() -> None:
    region, layer, found = autocast("fp16"), nn.Linear(4, 4), []
    x = torch.ones(2, 4)

    def work() -> None:
        for _ in range(20):
            with region:
                found.append(layer(x))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 60
    assert all(torch.equal(one, found[0]) for one in found)


def test_a_generator_that_holds_a_region_gives_it_back() -> None:
    def steps() -> Iterator[torch.dtype]:
        with autocast("fp16"):
            yield product()
            yield product()

    assert list(steps()) == [HALF, HALF]


# -- torch's spelling ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelled",
    [
        lambda: autocast("cpu", torch.bfloat16, True, None),
        lambda: autocast("cpu", dtype=torch.bfloat16),
        lambda: autocast(device_type="cpu", dtype=torch.bfloat16, enabled=True, cache_enabled=False),
        lambda: autocast(device_type="cpu"),
    ],
)
def test_torch_spelling_is_torch_autocast(spelled: Callable[[], Any]) -> None:
    region = spelled()
    assert isinstance(region, torch.autocast)
    with region as entered:
        assert product() is BRAIN and entered is region
        assert torch.exp(torch.ones(2, dtype=BRAIN)).dtype is BRAIN
    assert spelled()(product)() is BRAIN


def test_torch_cuda_amp_spelling_follows_torch_where_there_is_no_cuda() -> None:
    if torch.cuda.is_available():
        pytest.skip("for machines without CUDA")  # pragma: no cover
    for spelled in (autocast, lambda: autocast(True, torch.float16, True), lambda: autocast(dtype=torch.float16)):
        with pytest.warns(UserWarning, match="CUDA is not available"):
            region = spelled()
        assert isinstance(region, torch.autocast)
        assert (region.device, region.fast_dtype, region._cache_enabled) == ("cuda", HALF, True)
    for spelled in (lambda: autocast(False), lambda: autocast(enabled=False)):
        with spelled():
            assert product() is FULL
    for options in ((False,), (False, HALF), (False, HALF, True)):
        assert autocast(*options)._cache_enabled
    assert not autocast(False, HALF, False)._cache_enabled and not autocast(False, cache_enabled=False)._cache_enabled


def test_torch_refuses_what_torch_refuses() -> None:
    with pytest.raises(ValueError, match="Expected `device_type` of type `str`"):
        autocast(torch.device("cpu"))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="Invalid device string: 'not a real device'"):
        autocast(device_type="not a real device")
    with pytest.warns(UserWarning, match="target dtype is not supported"):
        region = autocast("cpu", dtype=torch.float64)
    with region:
        assert product() is FULL


def test_a_torch_region_entered_within_itself_restores_what_it_saw() -> None:
    region = autocast("cpu", dtype=torch.bfloat16)
    with region:
        with region:
            assert product() is BRAIN
        assert product() is BRAIN


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (lambda: autocast("fp61"), "unknown precision 'fp61'; did you mean"),
        (lambda: autocast("fp16", device_type="cpu"), "not both"),
        (lambda: autocast("cpu", strict=True), "strict=True needs a policy"),
        (lambda: autocast("gone.toml"), "no policy file gone.toml"),
        (lambda: autocast(Policy((Rule.of("lineer", input="fp16"),))), "unknown op 'lineer'; did you mean linear"),
        (lambda: autocast(presets.PRESETS["fp16"], dtype=HALF), "omit dtype"),
    ],
)
def test_wrong_input_is_explained(arguments: Callable[[], Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        arguments()


# -- what is given, what is told ----------------------------------------------------------------------------------


def test_a_policy_file_runs(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text(presets.PRESETS["bf16"].policy.to_toml())
    for given in (file, str(file), presets.PRESETS["bf16"], presets.PRESETS["bf16"].policy, "torch-2.13-cpu"):
        with autocast(given):
            assert product() is BRAIN


def test_torch_lists_as_rules_give_what_torch_gives() -> None:
    x, layer = torch.randn(4, 8), nn.Linear(8, 8)

    def run() -> list[Tensor]:
        y = layer(x)
        return [y, y.softmax(-1), y.exp(), F.mse_loss(y, y.detach() + 1), F.layer_norm(y, (8,)), y.sum()]

    with autocast("torch-2.13-cpu"):
        ours = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        theirs = run()
    assert [one.dtype for one in ours] == [one.dtype for one in theirs]


@pytest.mark.parametrize("precision", ["flex16+5", "fp8-delayed"])
def test_a_region_made_for_each_step_anew_is_told_where_its_scales_come_from_earlier_steps(precision: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(region: Callable[[], Any], steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            with region():
                loss = model(torch.randn(2, 4)).square().mean()
            loss.backward()
            optimizer.step()

    for _ in range(5):  # as in a search
        kept = autocast(precision)
        train(lambda kept=kept: kept, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(lambda: autocast(precision), 3)
    with pytest.warns(UserWarning) as told:
        train(lambda: autocast(precision), 6)
    assert [str(one.message) for one in told] == [
        f"autocast({precision!r}) was made 4 times for one step each: it takes scales from earlier steps, which lie in "
        f"the region. Make it once, region = lowp.autocast({precision!r}), and enter it in every step: with region: ..."
    ]
    assert told[0].filename == __file__


def test_an_unused_rule_of_the_users_is_told_once() -> None:
    policy = presets.PRESETS["fp16"].policy.before(Rule.of("conv3d", where="nowhere.*", input="bf16"))
    context._warned.discard(policy)
    with pytest.warns(UserWarning, match=r"nothing matched rule 1 \(conv3d in nowhere\.\*: input=bf16\)"):
        with autocast(policy) as region:
            product()
    with autocast(policy):
        product()
    assert region.report().unused_by_user == policy.rules[:1]
    assert "unused rule 1: conv3d in nowhere.*" in str(region.report())
    with pytest.raises(InvalidInput, match="nothing matched rule 1"), autocast(policy, strict=True):
        product()


def test_unused_rules_are_refused_also_where_an_error_is_being_handled() -> None:
    policy = Policy((Rule.of("conv3d", input="bf16"), Rule.of("matmul", input="bf16")))
    try:
        raise ValueError
    except ValueError as error:
        with pytest.raises(InvalidInput, match="nothing matched rule 1"), autocast(policy, strict=True):
            product()
        with pytest.raises(KeyError), autocast(policy, strict=True):
            product()
            raise KeyError from error


def test_a_report_tells_in_lines_what_ran_and_what_no_rule_named() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.ModuleDict({"x": nn.Linear(3, 3)}), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a["x"](x)) @ torch.ones(3, 3) + torch.kron(x, x).sum()

    rules = Rule.of("linear", where="a.*", input="bf16"), Rule.of("linear", where="nowhere", input="fp16")
    policy = Policy(rules, name="mine")
    context._warned.add(policy)
    with autocast(policy) as region:
        Two()(torch.ones(2, 3))
    assert str(region.report()) == (
        "policy mine: 1 op ran under its rules\n"
        "  unused rule 2: linear in nowhere: input=fp16\n"
        "  no rule for linear in b\n"
        "  no rule for matmul\n"
        "  not rounded, as no rule names it: kron\n"
        "  contractions inside other functions were not watched: strict=True watches them"
    )
    assert region.report().complaint == (
        "policy mine: nothing matched rule 2 (linear in nowhere: input=fp16). Ops under a rule so far: linear"
    )
    whole = Report(
        Policy(rules), rules[:1], ("mm",), ("gelu on cpu",), ("linear", "mm"), True, ("mv in float64",), ("kron",)
    )
    assert str(whole) == (
        "policy unnamed: 2 ops ran under its rules\n"
        "  unused rule 1: linear in a.*: input=bf16\n"
        "  no rule for mm\n"
        "  in fp32 for want of a kernel: gelu on cpu\n"
        "  left as it is, as under torch.autocast: mv in float64\n"
        "  not rounded, as no rule names it: kron"
    )
    assert Report(Policy(rules), rules).complaint == (
        "policy unnamed: nothing matched rule 1 (linear in a.*: input=bf16); rule 2 (linear in nowhere: input=fp16). "
        "Ops under a rule so far: none"
    )


def test_rules_that_matched_nothing_are_told_where_a_thread_leaves_a_region_that_has_run_for_the_last_time() -> None:
    policy = Policy((Rule.of("conv3d", input="bf16"), Rule.of("matmul", input="e5m7")), name="of conv3d")
    region = autocast(policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with region:
            pass  # of which nothing is known
        region.__enter__()
        with region:
            product()
        with pytest.raises(ZeroDivisionError), region:
            raise ZeroDivisionError
        with region.resume():
            product()
    with pytest.warns(UserWarning, match=r"policy of conv3d: nothing matched rule 1 \(conv3d: input=bf16\)") as told:
        region.__exit__(None, None, None)
    assert [one.filename for one in told] == [__file__]
    strict = autocast(policy, strict=True)
    for _ in range(2):  # each time
        with pytest.raises(
            InvalidInput, match=r"Ops under a rule so far: matmul. Correct its ops or where, or omit str"
        ):
            with strict:
                product()


@pytest.mark.filterwarnings("ignore:policy unnamed. nothing matched")
@pytest.mark.parametrize(
    ("unused", "strict", "looks"), [(False, True, 1), (True, False, 1), (True, True, 3), (False, False, 1)]
)
def test_a_region_looks_for_unused_rules_until_it_has_told_of_them(
    unused: bool, strict: bool, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = (Rule.of("matmul", input="e5m7"), *([Rule.of("conv3d", input="e5m6")] if unused else []))
    region, found = autocast(Policy(rules), strict=strict), list[Report]()
    report = region._rulebook.report
    monkeypatch.setattr(region._rulebook, "report", lambda: found.append(report()) or found[-1])
    for _ in range(3):
        with suppress(InvalidInput), region:
            product()
    assert len(found) == looks


def test_nothing_is_told_of_a_region_that_is_off_whatever_compiled_code_has_run(tmp_path: Path) -> None:
    policy = Policy((Rule.of("conv3d", input="e5m7"), Rule.of("matmul", input="e5m3")))
    traced(policy, False).find(torch.mm, "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with autocast(policy, enabled=False):
            product()
    (tmp_path / "mine.toml").write_text(policy.to_toml())
    with pytest.warns(UserWarning, match=r"policy unnamed: nothing matched rule 1 \(conv3d"):
        with autocast(str(tmp_path / "mine.toml")) as region:
            product()
    assert region.was_entered and not autocast(policy).was_entered


def test_the_rules_of_a_preset_may_stay_unused() -> None:
    with autocast("fp16", strict=True) as region:
        product()
    assert len(region.report().unused) == 2
    assert region.report().unused_by_user == ()


def test_contractions_without_a_rule_are_reported_and_refused_when_strict() -> None:
    policy = Policy((Rule.of("conv2d", input="fp16"),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with autocast(policy) as region:
            product()
    assert region.report().unseen == ("matmul",)
    assert "no rule for matmul" in str(region.report())
    with pytest.raises(InvalidInput, match="no rule of policy unnamed matches the contraction matmul"):
        with autocast(policy, strict=True):
            product()
    with autocast(Policy((Rule.of("matmul"),)), strict=True) as region:
        assert product() is FULL
    assert region.report().unseen == ()


def test_a_contraction_below_the_surface_is_found_by_the_audit() -> None:
    with pytest.raises(InvalidInput, match="matches the contraction tensordot"), autocast("fp16", strict=True):
        torch.cov(torch.rand(3, 5))  # under the rule for wide ops
        torch.tensordot(torch.rand(2, 2), torch.rand(2, 2))


def test_rules_by_op_class_op_and_path(model: nn.Module) -> None:
    policy = presets.PRESETS["fp16"].policy.before(
        Rule.of("linear", where="2", input="bf16", weight="bf16", output="bf16"), Rule.of("relu", output="e4m3fn")
    )
    seen: list[Observation] = []
    region = autocast(policy)
    end = region.observe(seen.append)
    with region:
        y = model(torch.randn(3, 8))
    end()
    with region:
        model(torch.randn(3, 8))
    assert y.dtype is BRAIN
    written = [one for one in seen if one.role == "output"]
    assert [(one.op, one.path) for one in written] == [("linear", "0"), ("relu", "1"), ("linear", "2")]
    assert [str(one.cast) for one in written] == ["fp16", "e4m3fn", "bf16"]
    assert [one.role for one in seen if one.path == "0"] == ["input", "weight", "output"]
    rounded = written[1].tensor.float().to(torch.float8_e4m3fn).float()
    assert torch.equal(seen[-3].tensor, rounded)  # what the second layer reads


@pytest.mark.parametrize("precision", ["fp16", "bf16", "e5m7"])
def test_a_product_written_into_a_tensor_has_the_values_of_one_that_is_returned(precision: str) -> None:
    a, b, out = torch.randn(30, 40), torch.randn(40, 20), torch.empty(30, 20)
    with autocast(precision):
        wanted = torch.mm(a, b)
        assert torch.mm(a, b, out=out) is out
    assert torch.equal(out, wanted.float())


@pytest.mark.parametrize(("rows", "is_small"), [(31, True), (32, False)])
def test_a_large_relu_keeps_bits_for_its_backward_and_a_small_one_its_result(rows: int, is_small: bool) -> None:
    kept: list[int] = []
    x = torch.randn(rows, 512, requires_grad=True)
    with (
        autocast("int8"),
        torch.autograd.graph.saved_tensors_hooks(lambda one: (kept.append(one.nbytes), one)[1], lambda one: one),
    ):
        F.relu(x)
    assert kept == [x.nbytes if is_small else x.numel() // 8]


def test_a_rule_is_followed_where_torch_s_lists_read_fp32() -> None:
    x, y = torch.randn(2, 3, 40)
    with autocast(presets.PRESETS["bf16"].policy.before(Rule.of("wide", input="bf16"))):
        found = F.mse_loss(x, y)
    assert torch.equal(found, F.mse_loss(x.bfloat16(), y.bfloat16()))


def test_a_product_that_torch_only_promotes_obeys_a_rule_that_names_it() -> None:
    a, b = torch.rand(4), torch.rand(4)
    with autocast(Policy((Rule.of("dot", input="bf16", weight="bf16"),))):
        assert torch.equal(torch.dot(a, b), torch.dot(a.bfloat16().float(), b.bfloat16().float()))


MATRIX = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
PRODUCTS: dict[str, Callable[[], Tensor]] = {
    "dot": lambda: torch.dot(MATRIX[0], MATRIX[1]),
    "vdot": lambda: torch.vdot(MATRIX[0], MATRIX[1]),
    "inner": lambda: torch.inner(MATRIX, MATRIX),
    "outer": lambda: torch.outer(MATRIX[0], MATRIX[1]),
    "tensordot": lambda: torch.tensordot(MATRIX, MATRIX, 1),
    "bilinear": lambda: F.bilinear(MATRIX, MATRIX, torch.stack((MATRIX, MATRIX))),
}


@pytest.mark.parametrize("precision", ["e5m7", "e4m3fn", "bf16-tpu", "mxfp8", "dfp16"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_that_torch_promotes_are_contractions_where_operands_alone_are_cast(name: str, precision: str) -> None:
    with autocast(precision, strict=True) as region:
        found = PRODUCTS[name]()
    assert found.dtype is torch.float32 and not torch.equal(found, PRODUCTS[name]())
    assert region.report().unrounded == () and name in region.report().ops
    with autocast("fp16") as region:
        assert torch.equal(PRODUCTS[name](), PRODUCTS[name]())
        assert region.report().unrounded == (name,)


@pytest.mark.parametrize("precision", ["e5m7", "bf16"])
def test_ops_made_of_products_that_no_rule_names_are_reported(precision: str) -> None:
    weights = {"per_sample_weights": torch.rand(1, 2), "mode": "sum"}
    ops: dict[str, Callable[[], Tensor]] = {
        "kron": lambda: torch.kron(MATRIX, MATRIX),
        "cdist": lambda: torch.cdist(MATRIX, MATRIX),
        "matrix_power": lambda: torch.matrix_power(MATRIX, 2),
        "cov": lambda: torch.cov(MATRIX),
        "corrcoef": lambda: torch.corrcoef(MATRIX),
        "linalg_pinv": lambda: torch.linalg.pinv(MATRIX),
        "embedding_bag": lambda: F.embedding_bag(torch.tensor([[0, 1]]), MATRIX, **weights),
    }
    with autocast(precision) as region:
        for op in ops.values():
            op()
        assert region.report().unrounded == tuple(ops)
    assert "not rounded, as no rule names it: kron" in str(region.report())
    with autocast(Policy((Rule.of("kron", "cdist", input="e4m3fn"),))) as region:
        found = [ops["kron"](), ops["cdist"]()]
        assert region.report().unrounded == ()
    rounded = lowp.quantize(MATRIX, "e4m3fn")
    assert torch.equal(found[0], torch.kron(rounded, rounded))
    assert torch.equal(found[1], torch.cdist(rounded, rounded))


def test_an_observer_watches_the_fp32_preset(model: nn.Module) -> None:
    x, seen = torch.randn(3, 8), []
    region = autocast("fp32")
    region.observe(lambda one: seen.append(one.op) if one.role == "output" else None)
    with region:
        y = model(x)
    assert torch.equal(y, model(x))
    assert seen == ["linear", "relu", "linear"]


def test_a_call_that_a_compiler_traces_runs_in_the_region_unless_that_casts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, rules = torch.rand(2, 2), presets.PRESETS["fp16"].policy.rules

    def written(region: Any) -> Any:
        results = (
            region.__torch_function__(torch.mm, (), (x, x)),
            region.__torch_function__(torch.mm, (), (x,), {"mat2": x}),
        )
        assert torch.equal(*results)
        return results[0].dtype

    off = autocast("fp16", enabled=False), autocast("fp32"), autocast(Policy(()))
    paths = autocast(Policy((*rules, Rule.of("linear", where="a", input="bf16"))))
    assert written(autocast("fp16")) is HALF and [written(one) for one in off] == [FULL] * 3
    with pytest.raises(Unavailable, match="a policy with rules for module paths cannot be entered inside a compiled"):
        written(paths)
    monkeypatch.setattr(context, "COMPILES_REGIONS", False)
    with pytest.raises(Unavailable):
        written(autocast("fp16"))
    assert [written(one) for one in off] == [FULL] * 3


def test_a_region_is_shown_as_it_is_made() -> None:
    assert repr(autocast("e5m7")) == "autocast('e5m7')" and repr(autocast("fp32", enabled=False)).endswith(
        "('fp32', enabled=False)"
    )


@pytest.mark.parametrize("kind", [None, "mps"])
def test_a_region_is_switched_on_for_the_devices_of_the_machine(
    kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "accelerator", lambda: kind)
    present = inspect.getclosurevars(context._present).nonlocals["done"].__wrapped__
    assert present() == (("cpu",) if kind is None else ("cpu", kind))


def test_unknown_names_are_value_errors() -> None:
    with pytest.raises(UnknownName):
        autocast("no-such-precision")


# -- what it is, and copies ---------------------------------------------------------------------------------------


def test_what_is_made_in_torch_s_spelling_is_an_instance_of_both() -> None:
    for made in (autocast("cpu", dtype=BRAIN), autocast(device_type="cpu", enabled=False)):
        assert isinstance(made, autocast) and isinstance(made, torch.autocast)
    assert isinstance(autocast("fp16"), autocast) and not isinstance(autocast("fp16"), torch.autocast)
    assert not isinstance(torch.autocast("cpu"), autocast) and not isinstance(3, autocast)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda region: pickle.loads(pickle.dumps(region)),
}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("precision", ["fp16", "e5m7", "flex16+5", "fp32", "torch-2.13-cpu"])
def test_copies_of_a_region_are_whole(precision: str, make: Callable[[Any], Any], model: nn.Module) -> None:
    region, x = autocast(precision), torch.randn(3, 8)
    with region:
        model(x)
    copied = make(region)
    with region:
        expected, dtype = model(x), torch.get_autocast_dtype("cpu")
    with copied:
        found = model(x)
        assert torch.get_autocast_dtype("cpu") is dtype
    assert copied is not region and isinstance(copied, autocast) and repr(copied) == repr(region)
    assert found.dtype is expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_a_copy_is_off_or_strict_as_its_original(make: Callable[[Any], Any], model: nn.Module) -> None:
    with make(autocast("fp16", enabled=False)):
        assert product() is FULL
    with pytest.raises(InvalidInput, match="matches the contraction"):
        with make(autocast(Policy((Rule.of("conv2d", input="fp16"),)), strict=True)):
            product()
    with make(autocast("cpu", dtype=BRAIN)):
        assert product() is BRAIN
