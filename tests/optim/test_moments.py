"""Moments and masters in few bits: the C++ step equals its definition, and what is kept can be resumed from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowp
from lowp.errors import InvalidInput
from lowp.kernels.steps import updates
from lowp.optim import SGD, AdamW, Lion, Muon, join, split, storage
from lowp.optim.moments import SCALES, Moments

RULES: dict[str, Callable[..., Any]] = {
    "adamw": lambda p, **k: AdamW(p, lr=1e-2, weight_decay=0.1, **k),
    "adamw_slow": lambda p, **k: AdamW(p, lr=1e-2, betas=(0.3, 0.9), maximize=True, **k),
    "sgd": lambda p, **k: SGD(p, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=1e-3, **k),
    "nesterov": lambda p, **k: SGD(p, lr=0.1, momentum=0.9, nesterov=True, **k),
    "plain": lambda p, **k: SGD(p, lr=0.1, **k),
    "lion": lambda p, **k: Lion(p, lr=1e-2, weight_decay=0.1, **k),
}
STORED: tuple[dict[str, Any], ...] = (
    {"moments": "int8", "masters": "split-8"},
    {"moments": "fp8"},
    {"moments": "bf16", "masters": "stochastic"},
    {"moments": "mxfp4:stochastic", "masters": "none"},
    {"moments": "i8s@fp32/64", "storage": None},
    {"moments": "e3m2@e8m0/16", "masters": "stochastic", "storage": "fp16"},
    {"moments": "i16s@fp32/64", "storage": None},
)
SHAPES = ((3, 5), (70_001,), (), (0,), (4, 3, 2, 2))


def _parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def _give(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        size = 10.0 ** torch.randint(-7, 2, parameter.shape, generator=generator)
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * size).to(parameter.dtype)


def _bits(optimizer: Any, parameters: list[nn.Parameter]) -> list[Tensor]:
    kept = [value for parameter in parameters for value in optimizer.state[parameter].values()]
    return [one.detach().reshape(-1).view(torch.uint8) for one in (*parameters, *kept)]


@pytest.mark.parametrize("stored", STORED, ids=lambda given: "-".join(map(str, given.values())))
@pytest.mark.parametrize("rule", RULES)
def test_the_library_steps_bit_for_bit_as_the_definition(
    rule: str, stored: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, calls = [], []
    for in_torch in (False, True):
        parameters = _parameters()
        optimizer = RULES[rule](parameters, seed=7, **stored)
        step = updates.step_on_cpu
        monkeypatch.setattr(updates, "step_on_cpu", lambda *given, step=step: (calls.append(1), step(*given)))
        for number in range(3):
            _give(parameters, number)
            if in_torch:
                with lowp.kernels.use("bitwise"):
                    optimizer.step()
            else:
                optimizer.step()
        found.append(_bits(optimizer, parameters))
    assert len(calls) == (3 if "momentum" in rule or optimizer.moments or stored["moments"] else 0)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("scaled", [False, True])
def test_scaled_gradients_and_skipped_steps_are_those_of_the_definition(scaled: bool) -> None:
    found = []
    for way in ("cpu", "bitwise"):
        parameters = _parameters()
        optimizer: Any = AdamW(parameters, moments="int8", masters="split-8")
        for number in range(3):
            _give(parameters, number)
            optimizer.grad_scale = torch.tensor(3.0 if scaled else 1.0)
            optimizer.found_inf = torch.tensor(float(number == 1))
            before = _bits(optimizer, parameters)
            with lowp.kernels.use(way):
                optimizer.step()
            if number == 1:
                assert all(torch.equal(a, b) for a, b in zip(before, _bits(optimizer, parameters), strict=True))
        found.append(_bits(optimizer, parameters))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    "options, bytes_each",
    [
        ({}, 14),
        ({"moments": "bf16"}, 10),
        ({"moments": "int8"}, 8 + 1 / 16),
        ({"moments": "fp8", "masters": "split-8"}, 7 + 1 / 16),
        ({"moments": "int8", "masters": "stochastic"}, 6 + 1 / 16),
        ({"moments": "mxfp4:stochastic", "masters": "split-8"}, 6 + 1 / 16),
    ],
)
def test_bytes_a_parameter(options: dict[str, Any], bytes_each: float) -> None:
    weight = nn.Parameter(torch.randn(64, 128))
    optimizer = AdamW([weight], **options)
    _give([weight], 0)
    optimizer.step()
    assert weight.grad is not None
    assert (sum(optimizer.memory().values()) + weight.grad.nbytes) / weight.numel() == bytes_each


def _most_held(run: Callable[[], Any]) -> int:
    """Return the largest number of bytes that torch's tensors take beside those that are there already."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    held = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@pytest.mark.parametrize("releases, bytes_each", [(False, 7 + 1 / 16), (True, 5 + 1 / 16)])
@pytest.mark.parametrize("apart", [False, True])
def test_no_copy_of_what_is_stored_is_made_on_the_way(
    releases: bool, bytes_each: float, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, width = 16, 160
    monkeypatch.setattr(storage, "BLOCK", 1 << 10)

    def train() -> None:
        precision = lowp.Precision("bf16-storage")
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
        x = torch.randn(2, width).bfloat16()
        if apart:
            precision.prepare_model(model)
        optimizer: Any = AdamW(model.parameters(), moments="int8", masters="split-8")
        if apart:
            precision.prepare_optimizer(optimizer)
        if releases:
            optimizer.release_gradients()
        for _ in range(2):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

    train()  # what is made once a process
    wanted = max(bytes_each, 7.0 if apart else 0)  # prepared apart, fp32 values wait for their optimizer
    assert _most_held(train) < (wanted + 0.5) * count * width**2


@pytest.mark.parametrize("moments", ["int8", "fp8", "mxfp4:stochastic", "bf16"])
def test_training_resumes_to_the_same_bits_and_the_state_is_torch_s(moments: str) -> None:
    first, second, plain = _parameters(), _parameters(1), _parameters()
    optimizer, resumed = (AdamW(these, moments=moments, masters="split-8") for these in (first, second))
    for number in range(2):
        _give(first, number)
        optimizer.step()
    saved = optimizer.state_dict()
    resumed.load_state_dict(saved)
    assert all(torch.equal(a, b) for a, b in zip(_bits(optimizer, first), _bits(resumed, second), strict=True))
    for these, one in ((first, optimizer), (second, resumed)):
        _give(these, 2)
        one.step()
    assert all(torch.equal(a, b) for a, b in zip(_bits(optimizer, first), _bits(resumed, second), strict=True))
    for entry, parameter in zip(saved["state"].values(), first, strict=True):
        assert set(entry) == {"step", "exp_avg", "exp_avg_sq", "master_weight"}
        assert {entry[name].shape for name in ("exp_avg", "exp_avg_sq", "master_weight")} == {parameter.shape}
    torch_s = torch.optim.AdamW(plain)
    torch_s.load_state_dict(saved)
    _give(plain, 2)
    torch_s.step()
    assert torch_s.state[plain[0]]["exp_avg_sq"].dtype is torch.float32


@pytest.mark.parametrize("moments", ["int8", "mxfp4:stochastic", "mxfp8"])
def test_a_second_moment_above_zero_never_becomes_zero(moments: str) -> None:
    kept = Moments.parse(moments)
    squares = torch.cat([torch.tensor([1e6]), torch.logspace(-30, 3, 30), torch.zeros(1)])
    state = kept.start(squares, "exp_avg_sq")
    kept.save(state, "exp_avg_sq", slice(0, 32), squares.clone(), (3, 0))
    read = kept.load(state, "exp_avg_sq", slice(0, 32))
    assert (read[:-1] > 0).all() and read[-1] == 0
    assert read[0] >= 0.5e6


def test_moments_in_eight_bits_are_unbiased() -> None:
    weights = [nn.Parameter(torch.zeros(20_000)) for _ in range(2)]
    pair = AdamW(weights[:1]), AdamW(weights[1:], moments="int8")
    for step in range(200):
        gradient = torch.randn(20_000, generator=torch.Generator().manual_seed(step))
        for optimizer, weight in zip(pair, weights, strict=True):
            weight.grad = gradient.to(weight.dtype)
            optimizer.step()
    wanted, found = (one.state_dict()["state"][0] for one in pair)
    assert float(found["exp_avg_sq"].mean()) == pytest.approx(float(wanted["exp_avg_sq"].mean()), rel=5e-3)
    assert float((found["exp_avg"] - wanted["exp_avg"]).mean()) == pytest.approx(0, abs=2e-4)


def test_what_is_not_finite_is_kept_as_a_number() -> None:
    parameters = _parameters()
    optimizer = AdamW(parameters, moments="int8")
    _give(parameters, 0)
    gradient = parameters[1].grad
    assert gradient is not None
    gradient[3] = float("nan")
    optimizer.step()
    assert optimizer.master(parameters[1]).isnan().nonzero().tolist() == [[3]]
    assert all(value.isfinite().all() for value in optimizer.state_dict()["state"][1].values() if value.dim() == 0)
    assert optimizer.state_dict()["state"][1]["exp_avg"].isfinite().all()


def test_a_master_of_24_bits_is_the_nearest() -> None:
    value = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    half, rest = split(value, 8)
    assert half.dtype is torch.bfloat16 and rest.dtype is torch.int8
    joined = join(half, rest)
    nearest = lowp.quantize(value, "e8m15:nearest-away")
    assert torch.equal(joined, nearest)
    assert all(torch.equal(a, b) for a, b in zip(split(joined, 8), (half, rest), strict=True))


@pytest.mark.parametrize("moments", ["i4s@e8m0/16", "i16s@e8m0/16", f"i8s@fp32/{storage.BLOCK}"])
def test_moments_of_4_to_16_bits_in_blocks_of_a_power_of_two_are_kept(moments: str) -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = AdamW([weight], moments=moments, lr=0.1)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].element_size() * 8 >= 4 and bool((weight < 1).all())


def test_eight_bits_beside_a_weight_lose_no_update_of_a_small_rate() -> None:
    moved = {}
    for kind in ("fp32", "split-8", "none"):
        weight = nn.Parameter(torch.ones(1000))
        optimizer = lowp.MasterWeights(torch.optim.SGD([weight], lr=1e-5), storage="bf16", kind=kind)
        for _ in range(200):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved[kind] = 1 - float(optimizer.master(weight).mean())
    assert moved["none"] == 0 and moved["split-8"] == pytest.approx(moved["fp32"], rel=1e-2)


@pytest.mark.parametrize(
    "moments",
    [
        *("fp16", "int8-affine", "nvfp4", "flex16+5", "i8s@fp32/row", "mxfp8:delayed", "i8s@fp32/48"),
        *("i3s@e8m0/16", "i17s@e8m0/16"),  # 4 to 16 bits are packed
        *("e8m0@fp32/16", f"i8s@fp32/{2 * storage.BLOCK}"),
    ],
)
def test_formats_that_keep_no_moments_are_refused(moments: str) -> None:
    with pytest.raises(InvalidInput, match=r"give fp32, bf16, int8, fp8, or a format whose blocks of a power of two"):
        AdamW([nn.Parameter(torch.ones(4))], moments=moments)


@pytest.mark.parametrize("moments", ["i12s@fp32/64", "e5m6@e8m0/32"])
def test_moments_of_12_bits_are_packed_and_step_as_those_of_fp32(moments: str) -> None:
    size = storage.BLOCK + 77  # of two pieces, the second of which ends within a block
    stepped = []
    for kept in (moments, "fp32"):
        weight = nn.Parameter(torch.zeros(size))
        optimizer: Any = AdamW([weight], lr=1.0, moments=kept, storage=None)
        for seed in range(3):
            weight.grad = 1 + torch.rand(size, generator=torch.Generator().manual_seed(seed))
            optimizer.step()
        stepped.append((weight.detach(), optimizer.state[weight]["exp_avg"].nbytes))
    (few, few_bytes), (all_bits, all_bytes) = stepped
    assert few_bytes == -(-size * 12 // 8) and all_bytes == size * 4
    assert torch.allclose(few, all_bits, rtol=2.0**-6, atol=0) and not torch.equal(few, all_bits)


def test_split_takes_8_or_16_bits() -> None:
    with pytest.raises(InvalidInput, match=r"split\(bits=12\): a remainder has 16 bits or 8"):
        split(torch.ones(2), 12)
    with pytest.raises(InvalidInput, match="split-8 masters consist of bf16 and a remainder"):
        AdamW([nn.Parameter(torch.ones(4))], storage="fp16", masters="split-8")


def test_lion_is_the_rule_of_its_paper() -> None:
    weight, average = torch.linspace(-1, 1, 50), torch.zeros(50)
    parameter = nn.Parameter(weight.clone())
    optimizer = Lion([parameter], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1, storage=None)
    for step in range(3):
        gradient = torch.randn(50, generator=torch.Generator().manual_seed(step))
        parameter.grad = gradient
        optimizer.step()
        weight = weight * (1 - 0.01 * 0.1) - 0.01 * (average * 0.9 + gradient * 0.1).sign()
        average = average * 0.99 + gradient * 0.01
    assert torch.allclose(parameter.detach(), weight, atol=1e-6, rtol=0)


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
@pytest.mark.parametrize("options", [{"storage": None}, {}, {"split": False}], ids=["plain", "split", "fp32"])
def test_muon_equals_torch_on_fp32_bit_for_bit(options: dict[str, Any], adjust: Any) -> None:
    shapes = (8, 24), (24, 8), (300, 300)
    made = [
        [nn.Parameter(torch.linspace(-1, 1, rows * columns).view(rows, columns)) for rows, columns in shapes]
        for _ in "12"
    ]
    theirs = torch.optim.Muon(made[0], lr=0.02, adjust_lr_fn=adjust)
    ours = Muon(made[1], lr=0.02, adjust_lr_fn=adjust, **options)
    for step in range(3):
        for these, optimizer in zip(made, (theirs, ours), strict=True):
            _give(these, step)
            for parameter in these:
                assert parameter.grad is not None
                parameter.grad = parameter.grad.bfloat16().to(parameter.dtype)
            optimizer.step()
    assert all(torch.equal(ours.master(b), a) for a, b in zip(*made, strict=True))


def test_muon_keeps_its_momentum_in_few_bits_and_takes_matrices_alone() -> None:
    parameter = nn.Parameter(torch.randn(40, 40))
    optimizer = Muon([parameter], moments="int8", masters="split-8")
    parameter.grad = torch.randn(40, 40).bfloat16()
    optimizer.step()
    assert optimizer.state[parameter]["momentum_buffer" + SCALES].numel() == 50
    with pytest.raises(InvalidInput, match=r"Muon takes matrices, not a parameter of shape \(4,\): give it to lowp"):
        Muon([nn.Parameter(torch.ones(4))])
    with pytest.raises(InvalidInput, match="adjust_lr_fn='half': give 'original' or 'match_rms_adamw'"):
        Muon([parameter], adjust_lr_fn="half")


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8", "fp8"])
def test_equal_gradients_move_a_weight_by_the_learning_rate_from_the_first_step_on(moments: str) -> None:
    weight = nn.Parameter(torch.zeros(64))
    optimizer = AdamW([weight], lr=0.01, weight_decay=0.0, storage=None, moments=moments)
    for step in range(1, 5):  # both means are corrected for their beginning: Kingma and Ba 2015, section 3
        weight.grad = torch.tensor([1.0, -1.0]).repeat(32) * 0.25
        optimizer.step()
        wanted = torch.tensor([-0.01, 0.01]).repeat(32) * step
        torch.testing.assert_close(weight.detach(), wanted, rtol=1e-5 if step == 1 else 0.1, atol=0)


@pytest.mark.parametrize("way", ["cpu", "bitwise"])
def test_a_group_without_momentum_beside_one_with_it_steps_as_alone(way: str) -> None:
    together, alone = _parameters(), _parameters()
    options: dict[str, Any] = {"momentum": 0.0, "dampening": 0.5}
    both: Any = SGD([{"params": together[:1]}, {"params": together[1:], **options}], momentum=0.9, moments="bf16")
    one: Any = SGD(alone[1:], moments="bf16", **options)
    with lowp.kernels.use(way):
        for number in range(3):
            _give(together, number)
            _give(alone, number)
            both.step()
            one.step()
    assert all(torch.equal(both.master(a), one.master(b)) for a, b in zip(together[1:], alone[1:], strict=True))
    assert [parameter for parameter in together if "momentum_buffer" in both.state[parameter]] == together[:1]
    both.load_state_dict(copy.deepcopy(both.state_dict()))
    both.param_groups[1]["momentum"] = 0.5  # as a scheduler might
    both.step()
    assert all("momentum_buffer" in both.state[parameter] for parameter in together)


@pytest.mark.parametrize("make", [SGD, AdamW, Lion])
def test_gradients_that_are_views_which_negate_step_as_what_they_stand_for(make: Any) -> None:
    found = []
    for lie in (torch.clone, lambda gradient: torch._neg_view(-gradient)):
        parameter = nn.Parameter(torch.linspace(-1, 1, 40))
        optimizer = make([parameter], lr=1e-2)
        for _ in range(2):
            parameter.grad = lie(torch.linspace(1, -2, 40).to(parameter.dtype))
            optimizer.step()
        found.append(parameter.detach())
    assert torch.equal(*found)
