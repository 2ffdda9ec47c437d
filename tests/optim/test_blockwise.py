"""lowp's own SGD and AdamW."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowp
from lowp.errors import InvalidInput
from lowp.kernels.steps import updates
from lowp.optim import SGD, AdamW, blockwise
from lowp.optim.blockwise import BlockUpdate, BlockwiseOptimizer

Make = Callable[..., Any]
PAIRS: dict[str, tuple[Make, Make]] = {
    "adamw": (lambda p, **k: AdamW(p, lr=1e-2, **k), lambda p: torch.optim.AdamW(p, lr=1e-2)),
    "sgd": (
        lambda p, **k: SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True, **k),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    ),
    "sgd_plain": (lambda p, **k: SGD(p, lr=0.1, **k), lambda p: torch.optim.SGD(p, lr=0.1)),
}
SHAPES = ((3, 5), (70_001,), (), (0,), (4, 3, 2, 2))


def _parameters(layout: torch.memory_format = torch.contiguous_format) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [nn.Parameter(one.to(memory_format=layout) if one.dim() == 4 else one) for one in made]


def _give(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16().to(parameter.dtype)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("storage", ["split", "fp32_masters", "plain"])
@pytest.mark.parametrize("name", PAIRS)
def test_every_storage_equals_torch_on_fp32_bit_for_bit(name: str, storage: str, layout: torch.memory_format) -> None:
    own, reference = PAIRS[name]
    options: dict[str, Any] = {"split": {}, "fp32_masters": {"split": False}, "plain": {"storage": None}}[storage]
    expected, parameters = _parameters(), _parameters(layout)
    ours, theirs = own(parameters, **options), reference(expected)
    for step in range(4):
        _give(expected, step)
        _give(parameters, step)
        theirs.step()
        ours.step()
    for wanted, parameter in zip(expected, parameters, strict=True):
        assert torch.equal(ours.master(parameter), wanted)


def test_bytes_a_parameter_are_fourteen_and_ten() -> None:
    for moments, bytes_each in (("fp32", 14), ("bf16", 10)):
        weight = nn.Parameter(torch.randn(1000))
        optimizer = AdamW([weight], moments=moments)
        _give([weight], 0)
        optimizer.step()
        assert weight.grad is not None
        assert (sum(optimizer.memory().values()) + weight.grad.nbytes) / weight.numel() == bytes_each


@pytest.mark.parametrize("name", PAIRS)
def test_a_skipped_step_changes_nothing_and_reads_nothing(name: str) -> None:
    parameters = _parameters()
    optimizer: BlockwiseOptimizer = PAIRS[name][0](parameters)
    scaler = lowp.GradScaler("cpu", init_scale=4.0)
    _give(parameters, 0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    before = [optimizer.master(parameter).clone() for parameter in parameters]
    _give(parameters, 1)
    grad = parameters[1].grad
    assert grad is not None
    grad[17] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert not scaler.stepped
    for value, parameter in zip(before, parameters, strict=True):
        assert torch.equal(optimizer.master(parameter), value)
        assert float(optimizer.state[parameter]["step"]) == 1.0
        assert all(not kept.isnan().any() for kept in optimizer.state[parameter].values())


def test_gradients_are_unscaled_as_the_scaler_would() -> None:
    results = []
    for unscale_first in (True, False):
        parameters = _parameters()
        optimizer = AdamW(parameters)
        scaler = lowp.GradScaler("cpu", init_scale=3.0)
        _give(parameters, 0)
        scaler.scale(torch.ones(()))
        if unscale_first:
            for parameter in parameters:  # as fp32, which keeps what bf16 would round away
                assert parameter.grad is not None
                widened = parameter.grad.float()
                parameter.grad_dtype = None
                parameter.grad = widened
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        results.append([optimizer.master(parameter) for parameter in parameters])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_bf16_moments_do_not_stall() -> None:
    exact, weight = nn.Parameter(torch.zeros(20_000)), nn.Parameter(torch.zeros(20_000))
    pair = (AdamW([exact], betas=(0.9, 0.999)), AdamW([weight], betas=(0.9, 0.999), moments="bf16"))
    for _ in range(300):
        for optimizer, parameter in zip(pair, (exact, weight), strict=True):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    wanted = float(pair[0].state[exact]["exp_avg_sq"].mean())
    assert float(pair[1].state[weight]["exp_avg_sq"].float().mean()) == pytest.approx(wanted, rel=2e-3)


@pytest.mark.parametrize("target", [{}, {"split": False}, {"storage": None}], ids=["split", "fp32", "plain"])
def test_a_checkpoint_continues_bit_for_bit_in_any_storage(target: dict[str, Any]) -> None:
    first, second = _parameters(), _parameters()
    optimizer, resumed = AdamW(first), AdamW(second, **target)
    _give(first, 0)
    optimizer.step()
    resumed.load_state_dict(optimizer.state_dict())
    for parameters, one in ((first, optimizer), (second, resumed)):
        _give(parameters, 1)
        one.step()
    assert all(torch.equal(optimizer.master(a), resumed.master(b)) for a, b in zip(first, second, strict=True))


def test_a_torch_checkpoint_loads() -> None:
    reference_parameters, parameters = _parameters(), _parameters()
    reference, optimizer = torch.optim.AdamW(reference_parameters, lr=1e-2), AdamW(parameters, lr=1e-2)
    _give(reference_parameters, 0)
    reference.step()
    optimizer.load_state_dict(reference.state_dict())
    optimizer.set_masters(dict(zip(parameters, reference_parameters, strict=True)))
    for one, these in ((reference, reference_parameters), (optimizer, parameters)):
        _give(these, 1)
        one.step()
    assert all(torch.equal(optimizer.master(b), a) for a, b in zip(reference_parameters, parameters, strict=True))


def test_the_block_length_does_not_change_stochastic_free_results(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for block in (1 << 16, 1000):
        monkeypatch.setattr(blockwise, "BLOCK", block)
        parameters = _parameters()
        optimizer = AdamW(parameters)
        _give(parameters, 0)
        optimizer.step()
        results.append([optimizer.master(parameter) for parameter in parameters])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_bad_input_is_named() -> None:
    weight = nn.Parameter(torch.ones(4))
    with pytest.raises(InvalidInput, match="moments=fp16: give fp32, bf16, int8, fp8, or a format whose blocks"):
        AdamW([weight], moments="fp16")
    with pytest.raises(InvalidInput, match="give two numbers in"):
        AdamW([weight], betas=(1.0, 0.9))
    with pytest.raises(InvalidInput, match="nesterov=True needs"):
        SGD([weight], nesterov=True)
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = SGD(embedding.parameters(), storage=None)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(InvalidInput, match="does not support sparse gradients"):
        optimizer.step()


@pytest.mark.parametrize(
    "kind, options, text",
    [
        (
            AdamW,
            {"fused": True},
            r"lowp.optim.AdamW does not take fused=True: there is one implementation .* leave it",
        ),
        (SGD, {"foreach": True}, "lowp.optim.SGD does not take foreach=True: there is one implementation here"),
        (AdamW, {"amsgrad": True}, r"wrap torch's optimizer, lowp.MasterWeights\(torch.optim.AdamW\(params, amsgrad"),
        (SGD, {"differentiable": True}, "use torch's optimizer on fp32 parameters"),
        (AdamW, {"capturable": True}, "on the device already: leave it out"),
    ],
)
def test_arguments_of_torch_that_are_not_served_say_what_to_do(kind: Make, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        kind([nn.Parameter(torch.ones(2))], **options)


def test_arguments_of_torch_that_ask_for_nothing_are_taken_and_unknown_ones_are_named() -> None:
    AdamW([nn.Parameter(torch.ones(2))], fused=None, foreach=False, amsgrad=False)
    with pytest.raises(TypeError, match=r"unknown argument of lowp.optim.AdamW 'weight_deccay'; did you mean weight_d"):
        AdamW([nn.Parameter(torch.ones(2))], weight_deccay=0.1)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("nesterov, dampening", [(False, 0.0), (False, 0.5), (True, 0.0)])
def test_a_skipped_first_step_does_not_start_the_momentum(nesterov: bool, dampening: float, maximize: bool) -> None:
    options: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.1, "lr": torch.tensor(0.1)}
    options |= {"nesterov": nesterov, "dampening": dampening, "maximize": maximize}
    expected, parameters = _parameters(), _parameters()
    theirs, ours = torch.optim.SGD(expected, **options), SGD(parameters, **options)
    _give(parameters, 9)
    ours.found_inf = torch.ones(())  # type: ignore[attr-defined]
    ours.step()
    del ours.found_inf  # type: ignore[attr-defined]
    for step in range(3):
        for these, optimizer in ((expected, theirs), (parameters, ours)):
            _give(these, step)
            optimizer.step()
    assert all(torch.equal(ours.master(b), a) for a, b in zip(expected, parameters, strict=True))


def test_a_group_may_have_a_momentum_of_its_own() -> None:
    expected, parameters = _parameters(), _parameters()
    theirs, ours = (
        make([{"params": these[:2], "momentum": 0.9}, {"params": these[2:]}], lr=0.1)
        for make, these in ((torch.optim.SGD, expected), (SGD, parameters))
    )
    for step in range(3):
        for these, optimizer in ((expected, theirs), (parameters, ours)):
            _give(these, step)
            optimizer.step()
    assert all(torch.equal(ours.master(b), a) for a, b in zip(expected, parameters, strict=True))


def test_the_momentum_of_a_torch_checkpoint_loads() -> None:
    expected, parameters = _parameters(), _parameters()
    theirs, ours = torch.optim.SGD(expected, lr=0.1, momentum=0.9), SGD(parameters, lr=0.1, momentum=0.9)
    _give(expected, 0)
    theirs.step()
    ours.load_state_dict(theirs.state_dict())
    ours.set_masters(dict(zip(parameters, expected, strict=True)))
    for these, optimizer in ((expected, theirs), (parameters, ours)):
        _give(these, 1)
        optimizer.step()
    assert all(torch.equal(ours.master(b), a) for a, b in zip(expected, parameters, strict=True))


class _Unreadable(torch.overrides.TorchFunctionMode):
    """Raises if a tensor is read on the host, which on a GPU waits for the device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("item", "__float__", "__int__", "__bool__", "tolist", "__index__"):
            raise AssertionError(f"{func.__name__} was called")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}])
def test_sgd_updates_a_block_without_reading_anything(options: dict[str, Any]) -> None:
    optimizer = SGD([nn.Parameter(torch.ones(3))], lr=0.1, **options)
    moments = {name: torch.zeros(3) for name in optimizer.moments}
    weight, group = torch.ones(3), optimizer.param_groups[0]
    with _Unreadable():
        optimizer.update_block(BlockUpdate(weight, torch.ones(3), moments, torch.zeros(()), weight), group)
    assert weight.tolist() == pytest.approx([1 - 0.1 * (1.9 if "nesterov" in options else 1.0)] * 3)


@pytest.mark.parametrize(
    "name, value, text",
    [
        (
            "exp_avg",
            torch.zeros(7),
            r"exp_avg of parameter 1 must be a floating-point tensor of shape \(70001,\), not a .* shape \(7,\)",
        ),
        ("exp_avg_sq", torch.zeros(1), r"exp_avg_sq of parameter 1 must be a floating-point tensor .* shape \(1,\)"),
        ("exp_avg", "x", "exp_avg of parameter 1 must be a floating-point tensor .* not str"),
        ("master_weight", torch.zeros(()), r"master_weight of parameter 1 .* a different order of parameters"),
        ("step", "x", "the step of parameter 1 must be a number of 0 or more, not 'x'"),
        ("step", -1.0, "the step of parameter 1 must be a number of 0 or more, not -1.0"),
        ("step", torch.zeros(1), "the step of parameter 1 must be a number of 0 or more, not tensor"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(name: str, value: object, text: str) -> None:
    parameters = _parameters()
    optimizer = AdamW(parameters)
    _give(parameters, 0)
    optimizer.step()
    bad, good = optimizer.state_dict(), optimizer.state_dict()
    before = [optimizer.master(parameter).clone() for parameter in parameters]
    bad["state"][0] = {**bad["state"][0], "exp_avg": torch.ones(3, 5)}
    bad["state"][1] = {**bad["state"][1], name: value}
    with pytest.raises(InvalidInput, match=text):
        optimizer.load_state_dict(bad)
    assert all(torch.equal(optimizer.master(a), b) for a, b in zip(parameters, before, strict=True))
    assert torch.equal(optimizer.state[parameters[0]]["exp_avg"], good["state"][0]["exp_avg"])


@pytest.mark.parametrize(
    "state, text",
    [
        (3, "an optimizer's state must be a dictionary from state_dict"),
        ({"state": {}}, "missing: param_groups"),
        ({"state": "x", "param_groups": []}, "the entry 'state' of an optimizer's state must be a dictionary, not 'x'"),
    ],
)
def test_what_is_no_optimizers_state_is_refused(state: Any, text: str) -> None:
    for optimizer in (AdamW(_parameters()), lowp.MasterWeights(torch.optim.AdamW(_parameters()))):
        with pytest.raises(InvalidInput, match=text):
            optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    ("storage", "calls"),
    [({}, [2]), ({"storage": None}, [2]), ({"split": False}, []), ({"storage": "fp16", "split": False}, [])],
)
def test_a_device_with_kernels_steps_weights_in_fp32_or_in_two_parts_by_one(
    storage: dict[str, Any], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = [nn.Parameter(torch.ones(size)) for size in (3, 5)]
    optimizer = lowp.optim.AdamW(weights, **storage)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    called: list[int] = []
    monkeypatch.setattr(updates, "has_kernels", lambda device: True)
    monkeypatch.setattr(updates, "step", lambda columns, *_: called.append(len(columns.weights)))
    optimizer.step()
    assert called == calls


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: nn.Conv1d(4, 4, 1), lambda: nn.LayerNorm(4)])
def test_an_error_of_dtypes_in_a_first_loop_says_what_to_do(make: Callable[[], nn.Module]) -> None:
    model, x = nn.Sequential(make()), torch.ones(4, 4)
    optimizer = AdamW(model.parameters())
    with pytest.raises(
        RuntimeError, match=r"type.*\. The optimizer of lowp\.optim has stored the weights in bf16"
    ) as one:
        model(x)
    assert 'in a region, `with lowp.autocast("bf16"):`, give it inputs in bf16, or keep fp32' in str(one.value)
    with lowp.autocast("bf16"):
        model(x).sum().backward()
    optimizer.step()
    for told in (model, nn.Sequential(nn.Linear(4, 4))):  # after a first pass, and where the storage was chosen
        AdamW(told.parameters(), storage="bf16")
        with pytest.raises(RuntimeError, match="type") as other:
            told(x)
        assert "lowp" not in str(other.value)


def test_other_errors_of_a_first_pass_are_as_they_were() -> None:
    model = nn.Linear(4, 4)
    AdamW(model.parameters())
    with pytest.raises(RuntimeError) as one:
        model(torch.ones(4, 3).bfloat16())
    assert "lowp" not in str(one.value)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    "passed_on",
    [
        torch.jit.script,
        lambda model: torch.export.export(model, (torch.ones(3, 4, dtype=torch.bfloat16),)).module(),
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
    ],
    ids=["script", "export", "deepcopy", "pickle"],
)
def test_a_model_is_passed_on_before_its_first_pass(passed_on: Callable[[nn.Module], nn.Module]) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.ones(3, 4)
    AdamW(model.parameters())
    other = passed_on(model)
    if type(other) is nn.Sequential:
        with pytest.raises(RuntimeError, match="has stored the weights in bf16"):
            other(x)
    assert torch.equal(other(x.bfloat16()), model(x.bfloat16()))
    assert not any("__prepare_scriptable__" in vars(one) for each in (other, model) for one in each.modules())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_step_leaves_nothing_in_a_module_that_is_not_called() -> None:
    model, x = nn.TransformerEncoderLayer(4, 1, 4, dropout=0.0, batch_first=True), torch.ones(2, 3, 4).bfloat16()
    before = {name: set(vars(one)) for name, one in model.named_modules()}
    optimizer = AdamW(model.parameters())
    model(x).sum().backward()
    assert model.self_attn.out_proj._forward_hooks
    optimizer.step()
    assert not any(one._forward_hooks for one in model.modules())
    assert {name: set(vars(one)) for name, one in model.named_modules()} == before
    assert torch.jit.script(model)(x).shape == x.shape


def test_a_module_that_prepares_itself_for_scripting_gets_no_advice() -> None:
    class Own(nn.Linear):
        def __prepare_scriptable__(self) -> nn.Module:
            return self

    model = Own(4, 4)
    AdamW(model.parameters())
    assert not model._forward_hooks
