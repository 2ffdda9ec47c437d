"""GradScaler: torch's behaviour as torch's own suites ask for it, then what lowp adds."""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowp.grad_scaler import GradScaler, NonFinite, NonFiniteGradients, gradients
from lowp.scaling import AdaptiveLossScale, DynamicLossScale, StaticLossScale

INF, NAN = math.inf, math.nan
SYNCS = ("_local_scalar_dense", "is_nonzero", "equal", "nonzero")


class CountReads(TorchDispatchMode):
    """Counts the calls that would make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func.overloadpacket.__name__ in SYNCS
        return func(*args, **(kwargs or {}))


@pytest.fixture
def to_list(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count Tensor.tolist, which reads without a dispatched call."""
    calls: list[int] = []
    original = torch.Tensor.tolist

    def counting(tensor: torch.Tensor) -> Any:
        calls.append(1)
        return original(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counting)
    return calls


class OwnOptimizer(torch.optim.SGD):
    """An optimizer that unscales and skips by itself, as lowp's do."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad if self.grad_scale is None else parameter.grad / self.grad_scale
                stepped = parameter.detach() - group["lr"] * gradient
                parameter.data.copy_(torch.where(self.found_inf > 0, parameter.detach(), stepped))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.5, foreach=True),
    "fused": lambda parameters: torch.optim.SGD(parameters, lr=0.5, fused=True),
    "own": lambda parameters: OwnOptimizer(parameters, lr=0.5),
}
UNREAD = ("fused", "own")


@pytest.fixture(params=OPTIMIZERS)
def make_optimizer(request: pytest.FixtureRequest) -> Callable[..., torch.optim.Optimizer]:
    return OPTIMIZERS[request.param]


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def batches(count: int = 4) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def one_parameter(gradient: Any, optimizer: str = "plain", dtype: torch.dtype = torch.float32) -> torch.optim.Optimizer:
    """Return an optimizer over one parameter of ones with this gradient."""
    values = gradient if isinstance(gradient, torch.Tensor) else torch.tensor(gradient, dtype=dtype)
    parameter = nn.Parameter(torch.ones(values.shape, dtype=values.dtype))
    parameter.grad = values
    return OPTIMIZERS[optimizer]([parameter])


def parameter_of(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    parameter: torch.Tensor = optimizer.param_groups[0]["params"][0]
    return parameter


def started(**keywords: Any) -> GradScaler:
    """Return a scaler on the CPU that has scaled a loss."""
    scaler = GradScaler("cpu", **keywords)
    scaler.scale(torch.ones(()))
    return scaler


# -- the same as torch's -----------------------------------------------------------------------------------------------
def test_it_is_torchs() -> None:
    scaler = GradScaler("cpu")
    for kind in (torch.amp.GradScaler, torch.GradScaler, torch.cuda.amp.GradScaler, torch.cpu.amp.GradScaler):
        assert isinstance(scaler, kind)


def test_a_number_as_first_argument_is_the_scale() -> None:
    for scaler in (
        GradScaler(128.0, 4.0, 0.25, 7),
        GradScaler("cpu", 128.0, 4.0, 0.25, 7),
        GradScaler(128, 4.0, 0.25, 7),
    ):
        state = scaler.state_dict()
        assert list(state.values())[:4] == [128.0, 4.0, 0.25, 7]
    assert not GradScaler(128.0, 4.0, 0.25, 7, False).is_enabled()
    assert not GradScaler("cpu", 128.0, 4.0, 0.25, 7, False).is_enabled()
    assert GradScaler(128.0, growth_factor=3.0).get_growth_factor() == 3.0


def test_cuda_that_is_not_there_warns_and_disables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling"):
        scaler = GradScaler("cuda")
    assert not scaler.is_enabled() and scaler.get_scale() == 1.0
    assert not GradScaler("cuda", enabled=False).is_enabled()


def test_without_a_device_it_works_on_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    scaler = GradScaler()
    assert scaler.is_enabled() and scaler.get_scale() == 65536.0


@pytest.mark.parametrize("clip", ["no", "scaled", "unscaled"])
@pytest.mark.parametrize("pickled", [False, True])
def test_training_with_an_overflow_equals_training_without_that_step(
    make_optimizer: Callable[..., torch.optim.Optimizer], clip: str, pickled: bool
) -> None:
    for enabled in (True, False):
        scaler = GradScaler("cpu", init_scale=128.0, growth_interval=1, enabled=enabled)
        plain, scaled = make_model(), make_model()
        plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
        optimizer = make_optimizer(scaled.parameters()) if enabled else torch.optim.SGD(scaled.parameters(), lr=0.5)
        for number, batch in enumerate(batches()):
            plain_optimizer.zero_grad()
            loss_of(plain, batch).backward()
            if clip != "no":
                nn.utils.clip_grad_norm_(plain.parameters(), 0.2)
            if number != 2 or not enabled:
                plain_optimizer.step()
            optimizer.zero_grad()
            scaler.scale(loss_of(scaled, batch)).backward()
            if clip == "scaled":
                nn.utils.clip_grad_norm_(scaled.parameters(), 0.2 * scaler.get_scale())
            if number == 2 and enabled:
                scaled[1].weight.grad.fill_(INF)
            if clip == "unscaled":
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(scaled.parameters(), 0.2)
            scaler.step(optimizer)
            assert bool(scaler.stepped) == (number != 2 or not enabled)
            scaler.update()
            if pickled:
                scaler = pickle.loads(pickle.dumps(scaler))
        assert scaler.get_scale() == (128.0 * 2**3 * 0.5 if enabled else 1.0)
        for one, other in zip(plain.parameters(), scaled.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 if clip == "scaled" else 1e-7)


def test_accumulated_gradients_are_unscaled_once() -> None:
    model, plain = make_model(), make_model()
    optimizer, plain_optimizer = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, plain))
    scaler = GradScaler("cpu", init_scale=128.0)
    for number, batch in enumerate(batches(), start=1):
        scaler.scale(loss_of(model, batch) / 2).backward()
        (loss_of(plain, batch) / 2).backward()
        if number % 2 == 0:
            scaler.step(optimizer)
            scaler.update()
            plain_optimizer.step()
            optimizer.zero_grad()
            plain_optimizer.zero_grad()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_a_gradient_penalty_comes_out_as_without_scaling() -> None:
    gradients = {}
    for scaled in (False, True):
        model = make_model()
        scaler = GradScaler("cpu", init_scale=128.0, enabled=scaled)
        loss = loss_of(model, next(batches()))
        grads = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        norm = sum((g / scaler.get_scale()).pow(2).sum() for g in grads).sqrt()
        scaler.scale(loss + norm).backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        scaler.unscale_(optimizer)
        gradients[scaled] = [p.grad for p in model.parameters()]
    for one, other in zip(gradients[False], gradients[True], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_several_models_optimizers_and_losses_share_a_scale_and_skip_apart() -> None:
    models = [make_model(0), make_model(1)]
    optimizers = [
        torch.optim.SGD(models[0].parameters(), lr=0.5),
        torch.optim.SGD(models[1].parameters(), lr=0.5, fused=True),
    ]
    scaler = GradScaler("cpu", init_scale=128.0, growth_interval=1)
    for number, (x, y) in enumerate(batches()):
        for optimizer in optimizers:
            optimizer.zero_grad()
        outputs = [model(x) for model in models]
        scaler.scale(nn.functional.mse_loss(0.3 * outputs[0] + 0.7 * outputs[1], y)).backward(retain_graph=True)
        scaler.scale(nn.functional.mse_loss(0.6 * outputs[0] - 0.4 * outputs[1], y)).backward()
        if number == 1:
            models[1][1].weight.grad.fill_(NAN)
        scaler.unscale_(optimizers[0])
        for optimizer in optimizers:
            scaler.step(optimizer)
        assert [bool(scaler.stepped_for(optimizer)) for optimizer in optimizers] == [True, number != 1]
        scaler.update()
    assert scaler.get_scale() == 128.0 * 2**3 * 0.5


def test_nested_outputs_are_scaled_in_their_shape() -> None:
    scaler = GradScaler("cpu", init_scale=2.0)
    four, eight = torch.full((1,), 4.0), torch.full((1,), 8.0)
    scaled = scaler.scale([eight, (four, eight), [four, [eight]]])
    assert scaled == [16.0, (8.0, 16.0), [8.0, [16.0]]] and isinstance(scaled[1], tuple)
    assert list(scaler.scale(x for x in (four, eight))) == [8.0, 16.0]
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        scaler.scale(4.0)


def test_gradients_of_every_kind_are_unscaled_and_checked() -> None:
    def storm(inject: int) -> list[torch.Tensor]:
        full = torch.full((6, 6), 4.0)
        kinds = [full.clone(), full.clone()[:, :5], full.half(), full.half()[:, :5], full.double(), full.bfloat16().t()]
        if inject >= 0:
            kinds[inject][2, 2] = INF if inject % 2 else NAN
        return kinds

    parameters = [torch.empty_like(gradient) for gradient in storm(-1)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    for inject in range(-1, len(parameters)):
        for parameter, gradient in zip(parameters, storm(inject), strict=True):
            parameter.grad = gradient
        found = GradScaler("cpu")._unscale_grads_(optimizer, torch.full((1,), 0.25), torch.zeros(1), True)
        assert [flag.item() for flag in found.values()] == [float(inject >= 0)]
        if inject < 0:
            assert all(bool((p.grad == 1.0).all()) for p in parameters if p.grad is not None)


@pytest.mark.parametrize(
    ("values", "dtype", "found"),
    [
        ([16.0, 32.0, 64.0], torch.float32, 0.0),
        ([16.0, 32.0, INF], torch.float32, 1.0),
        ([16.0, 32.0, NAN], torch.float32, 1.0),
        ([16.0, 32.0, 64.0], torch.float16, 0.0),
        ([64000.0, 32.0, 64000.0], torch.float16, 1.0),  # finite, but not when added, as they must be
    ],
)
def test_sparse_gradients_are_unscaled_and_checked(values: list[float], dtype: torch.dtype, found: float) -> None:
    indices = torch.tensor([[0, 1, 0], [2, 0, 2]])
    with torch.sparse.check_sparse_tensor_invariants():
        gradient = torch.sparse_coo_tensor(indices, torch.tensor(values, dtype=dtype), (2, 3))
        optimizer = torch.optim.SGD([nn.Parameter(gradient.clone())], lr=1.0)
        parameter = parameter_of(optimizer)
        parameter.grad = gradient.clone()
        flags = GradScaler("cpu")._unscale_grads_(optimizer, torch.full((1,), 0.25), torch.zeros(1), True)
        assert flags[parameter.device] == found
        if not found:
            assert parameter.grad is not None
            assert torch.equal(parameter.grad.to_dense(), gradient.to_dense() / 4)


def test_embeddings_with_sparse_gradients_train() -> None:
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(embedding.parameters())
    scaler = GradScaler("cpu")
    before = embedding.weight.detach().clone()
    scaler.scale(embedding(torch.tensor([1, 1, 2])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert bool(scaler.stepped) and (before != embedding.weight).any(dim=1).tolist() == [
        False,
        True,
        True,
        False,
        False,
    ]


def test_fp16_gradients_of_a_plain_optimizer_are_refused() -> None:
    scaler = started()
    with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients\. .*lowp\.MasterWeights\(optimizer\)"):
        scaler.step(one_parameter([1.0], dtype=torch.float16))


def test_fp16_gradients_of_an_optimizer_with_masters_are_unscaled_without_loss() -> None:
    optimizer = one_parameter([2.0**-10, 1.0], dtype=torch.float16)
    optimizer.allows_fp16_gradients = True  # type: ignore[attr-defined]
    parameter = parameter_of(optimizer)
    started().unscale_(optimizer)
    assert parameter.grad is not None and parameter.grad.tolist() == [2.0**-26, 2.0**-16]
    parameter.grad = None
    (parameter * 2).sum().backward()
    assert parameter.grad.dtype == torch.float16  # the next backward is as if nothing had been


def test_an_optimizer_may_take_the_scaler_or_the_scale_and_the_flag() -> None:
    seen: list[str] = []

    class Old(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:
            assert isinstance(grad_scaler, torch.amp.GradScaler)
            assert not hasattr(self, "grad_scale") and not hasattr(self, "found_inf")
            grad_scaler.unscale_(self)
            seen.append("old")

    class New(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None) -> None:
            seen.append(f"{self.grad_scale.item()} {self.found_inf.item()}")

    scaler = started(init_scale=2.0)
    old, new = (kind([nn.Parameter(torch.ones(1))]) for kind in (Old, New))
    for optimizer in (old, new):
        parameter_of(optimizer).grad = torch.ones(1)
    with pytest.warns(FutureWarning, match="going to stop passing itself"):
        scaler.step(old)
    new.grad_scale = torch.tensor(3.0)  # what a user has set is multiplied
    scaler.step(new)
    assert not hasattr(new, "grad_scale") and not hasattr(new, "found_inf")
    scaler.update()
    assert seen == ["old", "6.0 0.0"]


def test_the_scale_and_the_flag_are_taken_back_when_a_step_raises() -> None:
    class Failing(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None) -> None:
            raise KeyError("on purpose")

    optimizer = Failing([nn.Parameter(torch.ones(1))])
    parameter_of(optimizer).grad = torch.ones(1)
    with pytest.raises(KeyError, match="on purpose"):
        started().step(optimizer)
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")


def test_gradients_broken_after_unscaling_are_stepped_with_as_torch_does() -> None:
    for name in OPTIMIZERS:
        optimizer = one_parameter([1.0], name)
        scaler = started()
        scaler.unscale_(optimizer)
        parameter_of(optimizer).grad.fill_(NAN)  # type: ignore[union-attr]
        scaler.step(optimizer)
        assert bool(parameter_of(optimizer).isnan())


def test_step_returns_what_the_optimizer_returns() -> None:
    class Returning(torch.optim.SGD):
        def step(self, closure: Any = None) -> float:  # type: ignore[override]
            return 7.0

    scaler = started()
    optimizer = Returning([nn.Parameter(torch.ones(1))])
    for gradient, returned in ((1.0, 7.0), (INF, None)):
        parameter_of(optimizer).grad = torch.tensor([gradient])
        assert scaler.step(optimizer, None) == returned
        scaler.update()


def test_a_disabled_scaler_passes_everything_through() -> None:
    scaler = GradScaler("cpu", enabled=False)
    loss = torch.ones(())
    optimizer = one_parameter([INF])
    assert scaler.scale(loss) is loss
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert parameter_of(optimizer).item() == -INF and bool(scaler.stepped)
    assert scaler.state_dict() == {} and scaler.get_scale() == 1.0 and scaler.nonfinite is None
    scaler.load_state_dict({})


def test_a_scaler_whose_fp16_check_was_patched_out_still_works() -> None:
    """Users replace _unscale_grads_ by a function of torch's four arguments."""
    scaler = started()
    original = scaler._unscale_grads_

    def patched(optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        return original(optimizer, inv_scale, found_inf, True)

    scaler._unscale_grads_ = patched  # type: ignore[method-assign]
    optimizer = one_parameter([1.0], dtype=torch.float16)
    scaler.step(optimizer)
    assert bool(scaler.stepped)


# -- checkpoints -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("lazily", [True, False])
def test_state_goes_between_lowp_and_torch(lazily: bool) -> None:
    arguments = {"init_scale": 3.0, "growth_factor": 4.0, "backoff_factor": 0.5, "growth_interval": 2}
    kinds: list[Callable[..., torch.amp.GradScaler]] = [GradScaler, torch.amp.GradScaler]
    for source in kinds:
        for target in kinds:
            saved = source("cpu", **arguments)
            loaded = target("cpu", init_scale=6.0, growth_factor=7.0, backoff_factor=0.8, growth_interval=1)
            loaded._init_growth_tracker = 7
            if lazily:
                loaded.scale(torch.ones(1))
            loaded.load_state_dict(saved.state_dict())
            assert (loaded.get_scale(), loaded.get_growth_factor()) == (3.0, 4.0)
            assert (loaded.get_backoff_factor(), loaded.get_growth_interval()) == (0.5, 2)
            assert loaded._init_growth_tracker == 0 and loaded._get_growth_tracker() == 0


def test_a_resumed_scaler_goes_on_as_the_one_that_was_saved() -> None:
    scaler = GradScaler("cpu", init_scale=256.0, growth_interval=3, hysteresis=2)
    resumed = None
    gradients = [1.0, INF, 1.0, 1.0, INF, 1.0, 1.0, 1.0, INF]
    for number, gradient in enumerate(gradients):
        if number == 4:
            resumed = GradScaler("cpu", hysteresis=2)
            resumed.load_state_dict(copy.deepcopy(scaler.state_dict()))
        for each in (scaler, resumed):
            if each is not None:
                each.scale(torch.ones(()))
                each.step(one_parameter([gradient]))
                each.update()
    assert resumed is not None and resumed.state_dict() == scaler.state_dict()
    assert scaler.state_dict()["lowp"] == {"steps": 9, "overflows": 1, "stuck": 0}


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"scale": 0.0}, ValueError, "the scale of the loaded state cannot be 0.0: allowed is a finite number"),
        ({"scale": NAN}, ValueError, "cannot be nan"),
        ({"scale": INF}, ValueError, "cannot be inf"),
        ({"scale": "65536"}, ValueError, "cannot be '65536'"),
        ({"growth_factor": 0.5}, AssertionError, "growth factor must be > 1.0"),
        ({"backoff_factor": 1.5}, AssertionError, "backoff factor must be < 1.0"),
        ({"growth_interval": "often"}, ValueError, "growth_interval must be a number of steps"),
        ({"_growth_tracker": -1}, ValueError, "_growth_tracker=-1"),
        ({"lowp": [1]}, ValueError, "entry 'lowp' is a dictionary of counters"),
        ({"lowp": {"steps": "x"}}, ValueError, "steps='x'"),
        ({"scale": None, "growth_factor": None}, KeyError, "missing: scale, growth_factor"),
    ],
)
def test_a_bad_state_is_refused_and_changes_nothing(change: dict[str, Any], kind: type[Exception], text: str) -> None:
    scaler = started(init_scale=8.0, growth_factor=3.0)
    before = scaler.state_dict()
    state = {**GradScaler("cpu").state_dict(), **change}
    with pytest.raises(kind) as caught:
        scaler.load_state_dict({name: value for name, value in state.items() if value is not None})
    assert text in str(caught.value) and scaler.state_dict() == before


def test_an_empty_state_and_no_dictionary_are_refused() -> None:
    with pytest.raises(RuntimeError, match="source state dict is empty, possibly because it was saved from a disabled"):
        GradScaler("cpu").load_state_dict({})
    with pytest.raises(ValueError, match="a scaler's state is a dictionary"):
        GradScaler("cpu").load_state_dict([1.0])  # type: ignore[arg-type]


def test_it_is_pickled_and_copied_between_steps_only() -> None:
    scaler = started(init_scale=4.0, growth_interval=5)
    scaler.watch(make_model())
    scaler.unscale_(one_parameter([1.0]))
    with pytest.raises(AssertionError, match="may only be pickled at the beginning of an iteration, or at the end"):
        pickle.dumps(scaler)
    scaler.update()
    for other in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        assert other.state_dict() == scaler.state_dict() and other._scale is None


# -- misuse ------------------------------------------------------------------------------------------------------------
def unscale_twice(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def unscale_after_step(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


def step_twice(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    scaler.step(optimizer)
    scaler.step(optimizer)


def step_without_gradients(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    scaler.step(optimizer)


@pytest.mark.parametrize(
    ("misuse", "kind", "text"),
    [
        (unscale_twice, RuntimeError, "unscale_() has already been called on this optimizer since the last update()."),
        (unscale_after_step, RuntimeError, "unscale_() is being called after step()."),
        (step_twice, RuntimeError, "step() has already been called since the last update()."),
        (
            step_without_gradients,
            AssertionError,
            "No inf checks were recorded for this optimizer. None of its parameters",
        ),
        (lambda scaler, _: scaler.update(), AssertionError, "No inf checks were recorded prior to update."),
        (lambda scaler, optimizer: scaler.step(optimizer, closure=lambda: 1.0), RuntimeError, "Closure use is not"),
        (lambda scaler, optimizer: scaler.step(optimizer, lambda: 1.0), RuntimeError, "Closure use is not currently"),
    ],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_calls_out_of_order_are_refused(name: str, misuse: Any, kind: type[Exception], text: str) -> None:
    scaler = started()
    with pytest.raises(kind) as caught:
        misuse(scaler, one_parameter([1.0], name))
    assert text in str(caught.value)
    assert scaler.get_scale() == 65536.0


@pytest.mark.parametrize("call", ["step", "unscale_", "update"])
def test_calls_before_scale_are_refused(call: str) -> None:
    scaler = GradScaler("cpu")
    with pytest.raises(
        AssertionError, match=rf"Attempted {call} but _scale is None.  This may indicate your script did"
    ):
        getattr(scaler, call)(*([] if call == "update" else [one_parameter([1.0])]))


@pytest.mark.parametrize("new_scale", [0, 0.0, -1.0, INF, NAN, 1e-39, "1", torch.tensor(0.0), torch.tensor([NAN])])
def test_a_scale_outside_the_bounds_is_refused_and_changes_nothing(new_scale: Any) -> None:
    scaler = started()
    scaler.step(one_parameter([1.0]))
    with pytest.raises(
        ValueError, match=r"new_scale cannot be .*: allowed is a finite number from the floor 1\.1754944e-38"
    ):
        scaler.update(new_scale)
    assert scaler.get_scale() == 65536.0


@pytest.mark.parametrize("new_scale", [32.0, 32, torch.tensor(32.0), torch.tensor([32.0])])
def test_a_new_scale_may_be_a_number_or_a_tensor(new_scale: Any) -> None:
    scaler = started()
    scaler.update(new_scale)
    assert scaler.get_scale() == 32.0


@pytest.mark.parametrize("new_scale", [torch.ones(2), torch.ones(1, requires_grad=True), torch.ones(1, device="meta")])
def test_a_tensor_that_is_no_scale_is_refused(new_scale: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match=r"new_scale should be a float or a 1-element .*requires_grad=False"):
        started().update(new_scale)


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: GradScaler("cpu", growth_factor=1.0), AssertionError, "growth factor must be > 1.0"),
        (lambda: GradScaler("cpu", backoff_factor=1.0), AssertionError, "backoff factor must be < 1.0"),
        (lambda: GradScaler("cpu", init_scale=0.5, floor=1.0), ValueError, "floor 1 "),
        (lambda: GradScaler("cpu", init_scal=1.0), TypeError, "'init_scal'; did you mean init_scale"),
        (lambda: GradScaler("cpu", 1.0, 2.0, 0.5, 10, True, 3), TypeError, "at most 6 positional arguments"),
        (lambda: GradScaler(1.0, init_scale=2.0), TypeError, "two values for 'init_scale'"),
        (lambda: GradScaler("cpu", loss_scale="high"), ValueError, "loss_scale cannot be 'high'"),
        (lambda: GradScaler("cpu", process_group="some"), ValueError, "process_group cannot be 'some'"),
        (lambda: GradScaler("cpu", patience=0), ValueError, "patience=0"),
        (lambda: GradScaler("cpu", sample_interval=-1), ValueError, "sample_interval=-1"),
        (lambda: GradScaler("cpu").set_growth_factor(0.5), AssertionError, "growth factor must be > 1.0"),
        (lambda: GradScaler("cpu").set_backoff_factor(NAN), AssertionError, "backoff factor must be < 1.0"),
        (lambda: GradScaler("cpu").set_growth_interval(0), ValueError, "growth_interval must be a number of steps"),
    ],
)
def test_arguments_that_cannot_work_are_refused(make: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        make()
    assert text in str(caught.value)


# -- beyond torch ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("keywords", "scaling"),
    [
        ({}, DynamicLossScale()),
        ({"loss_scale": "dynamic", "init_scale": 8.0}, DynamicLossScale(8.0)),
        ({"init_scale": 128, "dynamic": False}, StaticLossScale(128)),
        ({"init_scale": 128, "loss_scale": "static"}, StaticLossScale(128)),
        ({"loss_scale": 128.0}, StaticLossScale(128.0)),
        ({"loss_scale": AdaptiveLossScale(headroom=2)}, AdaptiveLossScale(headroom=2)),
        ({"target_underflow": 0.01}, AdaptiveLossScale(target_underflow=0.01)),
        (
            {"floor": 1.0, "ceiling": 2.0**20, "hysteresis": 3},
            DynamicLossScale(floor=1.0, ceiling=2.0**20, hysteresis=3),
        ),
    ],
)
def test_the_loss_scale_is_what_the_arguments_say(keywords: dict[str, Any], scaling: Any) -> None:
    scaler = GradScaler("cpu", **keywords)
    assert scaler._scaling == scaling and scaler.get_scale() == scaling.initial


def test_a_static_scale_skips_and_stays() -> None:
    scaler = started(init_scale=128, dynamic=False)
    for gradient in (1.0, INF, 1.0):
        scaler.step(one_parameter([gradient]))
        assert bool(scaler.stepped) == (gradient == 1.0)
        scaler.update()
    assert scaler.get_scale() == 128.0
    loaded = GradScaler("cpu")
    loaded.load_state_dict(scaler.state_dict())
    assert (loaded.get_scale(), loaded.get_growth_factor()) == (128.0, 2.0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_stay_finite_whatever_overflows(name: str) -> None:
    """torch's scale underflows to 0 here, and the finite gradient that follows is written into the weights as NaN."""
    scaler = started(patience=10**6)
    optimizer = one_parameter([INF], name)
    for _ in range(200):
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**-126
    parameter_of(optimizer).grad = torch.tensor([2.0**-126])
    scaler.step(optimizer)
    assert bool(scaler.stepped) and parameter_of(optimizer).tolist() == [0.5]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("explicitly", [False, True])
def test_a_finite_gradient_that_unscaling_would_make_infinite_is_an_overflow(name: str, explicitly: bool) -> None:
    scaler = started(init_scale=2.0**-100)
    optimizer = one_parameter([1e9], name)
    if explicitly:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert not bool(scaler.stepped) and parameter_of(optimizer).tolist() == [1.0]


@pytest.mark.parametrize("name", UNREAD)
def test_nothing_is_read_with_optimizers_that_skip_by_themselves(name: str, to_list: list[int]) -> None:
    model = nn.Sequential(make_model(), nn.BatchNorm1d(8))
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = GradScaler("cpu")
    scaler.watch(model)
    mode = CountReads()
    for number, batch in enumerate(batches(6)):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        with mode:
            scaler.scale(loss).backward()
            if number == 2:
                model[1].weight.grad.fill_(INF)
            if number % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            stepped = scaler.stepped
            scaler.update()
        assert bool(stepped) == (number != 2)
    assert (mode.reads, len(to_list)) == (0, 0)


def test_other_optimizers_cost_one_read(to_list: list[int]) -> None:
    scaler, mode = GradScaler("cpu"), CountReads()
    optimizer = one_parameter([1.0])
    with mode:
        for _ in range(5):
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
    assert (mode.reads, len(to_list)) == (0, 5)


def test_reads_are_counted_at_all() -> None:
    with CountReads() as mode:
        torch.ones(()).item()
    assert mode.reads == 1


def test_learning_rate_schedules_can_follow_the_steps() -> None:
    scaler = started()
    optimizer = one_parameter([1.0])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    assert not scaler.stepped
    for gradient in (INF, 1.0, INF, 1.0):
        parameter_of(optimizer).grad = torch.tensor([gradient])
        scaler.step(optimizer)
        scaler.update()
        if scaler.stepped:
            scheduler.step()
    assert scheduler.get_last_lr() == [0.125]
    assert not scaler.stepped_for(one_parameter([1.0]))


# -- the first non-finite gradient -------------------------------------------------------------------------------------
@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("clipped", [True, False])
def test_the_first_nonfinite_gradient_is_named(
    make_optimizer: Callable[..., torch.optim.Optimizer], watched: bool, clipped: bool
) -> None:
    model = make_model()
    scaler = GradScaler("cpu", init_scale=1024.0)
    if watched:
        scaler.watch(model)
    optimizer = make_optimizer(model.parameters() if watched else model.named_parameters())
    for number, batch in enumerate(batches(3)):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        if number == 1:
            model[1].weight.grad[0, 0] = NAN
            model[0].bias.grad[3] = INF
        if clipped:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.nonfinite is not None) == (number >= 1)
    found = scaler.nonfinite
    assert isinstance(found, NonFinite)
    assert (found.name, found.kind, found.step, found.scale) == ("1.weight", "nan", 1, 1024.0)
    assert found.others == ("0.bias",) and found.loss_finite
    assert found.maximum is not None and 0 < found.maximum < 1


def test_the_largest_finite_gradient_is_exact_where_the_host_decides() -> None:
    scaler = started(init_scale=2.0)
    optimizer = one_parameter([[3.0, -8.0], [INF, NAN]])
    scaler.step(optimizer)
    assert str(scaler.nonfinite) == (
        "nan first in the gradient of param_groups[0]['params'][0], shape (2, 2), step 0, "
        "largest finite gradient 4 (8 scaled), loss scale 2"
    )


def test_the_order_is_that_of_backward_and_not_of_definition() -> None:
    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x))  # type: ignore[no-any-return]

    model = Crossed()
    scaler = GradScaler("cpu")
    scaler.watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.full((1, 2), 1.0)).sum() * INF).backward()
    scaler.step(optimizer)
    scaler.update()
    found = scaler.nonfinite
    assert found is not None and found.name.startswith("last.") and found.loss_finite is False
    assert "; the loss itself was not finite" in str(found)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_nonfinite_loss_does_not_raise(name: str) -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = OPTIMIZERS[name]([parameter])
    scaler = GradScaler("cpu")
    scaler.scale([parameter.sum() * NAN, parameter.sum()])[0].backward()
    scaler.step(optimizer)
    scaler.update()
    assert parameter.item() == 1.0 and scaler.nonfinite is not None and scaler.nonfinite.loss_finite is False


@pytest.mark.parametrize(
    ("name", "keywords", "steps"),
    [
        ("plain", {"init_scale": 4.0, "floor": 1.0, "patience": 3}, 5),
        ("plain", {"loss_scale": 8.0, "patience": 3}, 3),
        ("fused", {"init_scale": 4.0, "floor": 1.0, "patience": 3}, 9),  # late: nothing was waited for
        ("own", {"loss_scale": 8.0, "patience": 3}, 6),
    ],
)
def test_overflows_that_no_scale_cures_end_in_an_error_with_a_name(name: str, keywords: Any, steps: int) -> None:
    model = make_model()
    scaler = GradScaler("cpu", **keywords)
    scaler.watch(model)
    optimizer = OPTIMIZERS[name](model.parameters())

    def step() -> None:
        scaler.scale(torch.ones(()))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        model[0].bias.grad.fill_(INF)
        scaler.step(optimizer)
        scaler.update()

    for _ in range(steps - 1):
        step()
    with pytest.raises(NonFiniteGradients) as caught:
        step()
    assert "3 steps in a row were skipped with the loss scale at" in str(caught.value)
    assert "inf first in the gradient of 0.bias" in str(caught.value)
    step()  # the update was done; whoever catches the error can go on


# -- underflow ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_underflow_rate_is_the_share_that_fp16_flushes_at_this_scale(name: str) -> None:
    scaler = started(init_scale=2.0)
    assert scaler.underflow is None
    optimizer = one_parameter([0.0, 1.0, 2.0**-26, -(2.0**-27), 2.0**-25, 1e-45], name)
    scaler.step(optimizer)
    assert scaler.underflow is not None and scaler.underflow.item() == pytest.approx(3 / 5)


def test_underflow_is_sampled_every_so_often() -> None:
    scaler = started(sample_interval=3)
    rates = []
    for number in range(5):
        scaler.step(one_parameter([1.0, 1e-30] if number < 3 else [1.0, 1.0]))
        scaler.update()
        assert scaler.underflow is not None
        rates.append(scaler.underflow.item())
    assert rates == [0.5, 0.5, 0.5, 0.0, 0.0]
    silent = started(sample_interval=0)
    silent.step(one_parameter([1e-30]))
    assert silent.underflow is None


def test_the_underflow_of_large_gradients_is_that_of_a_sample_of_them() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(1000, 1024) * 2.0**-24
    scaler = started()
    scaler.step(one_parameter(gradient.clone()))
    flushed = ((gradient != 0) & (gradient.half() == 0)).float().mean().item()
    assert 0.2 < flushed < 0.5
    assert scaler.underflow is not None and scaler.underflow.item() == pytest.approx(flushed, abs=0.005)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_scale_that_follows_underflow_ends_it(name: str) -> None:
    torch.manual_seed(0)
    scaler = GradScaler("cpu", init_scale=1.0, target_underflow=1e-3, sample_interval=1)
    gradient = torch.randn(4096) * 1e-8
    optimizer = one_parameter(gradient, name)
    rates = []
    for _ in range(3):
        scaler.scale(torch.ones(()))
        parameter_of(optimizer).grad = gradient * scaler.get_scale()
        scaler.step(optimizer)
        assert scaler.underflow is not None
        rates.append(scaler.underflow.item())
        scaler.update()
    assert rates[0] > 0.9 and rates[1] <= 1e-3 and rates[2] <= 1e-3
    assert 2.0**10 < scaler.get_scale() < 2.0**18


# -- a skipped step changes nothing ------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_batch_norm_statistics_survive_a_skipped_step(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = GradScaler("cpu")
    scaler.protect(model)
    for overflowed in (False, True, False):
        before = {key: value.clone() for key, value in model.state_dict().items()}
        x = torch.randn(8, 4)
        optimizer.zero_grad()
        scaler.scale(model(x * INF if overflowed else x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        after = model.state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before) == overflowed


def test_scale_works_under_functional_transforms() -> None:
    scaler = started(init_scale=4.0)
    assert torch.func.grad(lambda x: scaler.scale(x * x))(torch.tensor(3.0)) == 24.0
    scaler.step(one_parameter([INF]))
    scaler.update()
    assert scaler.get_scale() == 2.0


def test_scale_compiles_without_a_graph_break() -> None:
    scaler = started(init_scale=4.0)
    scaled = torch.compile(lambda x: scaler.scale((x * x).sum()), fullgraph=True, backend="eager")
    x = torch.ones(3, requires_grad=True)
    scaled(x).backward()
    assert x.grad is not None and x.grad.tolist() == [8.0] * 3


# -- side by side with torch's -----------------------------------------------------------------------------------------
KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "fused Adagrad": lambda parameters: torch.optim.Adagrad(parameters, fused=True),
}


def random_training(scaler_kind: Callable[..., torch.amp.GradScaler], kind: str, seed: int) -> list[Any]:
    """Return scale, growth tracker and parameters after each of 20 steps with overflows, clipping and manual scales."""
    choose = random.Random(seed)
    model = make_model(seed)
    optimizer = KINDS[kind](model.parameters())
    scaler = scaler_kind(
        "cpu",
        init_scale=2.0 ** choose.randint(0, 20),
        growth_interval=choose.randint(1, 4),
        growth_factor=choose.choice([2.0, 1.3]),
        backoff_factor=choose.choice([0.5, 0.3]),
    )
    trace: list[Any] = []
    for batch in batches(20):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batch)).backward()
        if choose.random() < 0.2:
            model[choose.randint(0, 1)].weight.grad[0, 0] = choose.choice([INF, NAN])
        if choose.random() < 0.5:
            scaler.unscale_(optimizer)
            if choose.random() < 0.5:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update(choose.choice([8.0, 1024.0]) if choose.random() < 0.1 else None)
        parameters = [parameter.detach().tolist() for parameter in model.parameters()]
        trace.append((scaler.get_scale(), scaler._get_growth_tracker(), parameters))
    return trace


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_and_scale_equals_torchs_to_the_bit(kind: str) -> None:
    for seed in range(8):
        assert random_training(GradScaler, kind, seed) == random_training(torch.amp.GradScaler, kind, seed)


# -- on a GPU ----------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
def test_nothing_is_waited_for_on_a_gpu() -> None:
    model = nn.Sequential(make_model(), nn.BatchNorm1d(8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = GradScaler("cuda", init_scale=1024.0)
    scaler.watch(model)
    data = [(x.cuda(), y.cuda()) for x, y in batches(4)]
    for number, batch in enumerate(data):
        optimizer.zero_grad()
        torch.cuda.set_sync_debug_mode("error" if number else "default")  # the first step allocates
        try:
            scaler.scale(loss_of(model, batch)).backward()
            if number == 2:
                model[0][1].weight.grad[0, 0].fill_(NAN)
            if number % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert bool(scaler.stepped) == (number != 2)
    found = scaler.nonfinite
    assert found is not None and (found.name, found.kind, found.step) == ("0.1.weight", "nan", 2)
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("value", [-5.0, float("-inf")])
def test_negative_gradients_count_by_their_magnitude(value: float) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), GradScaler("cpu", init_scale=1.0)
    scaler.scale(weight.sum())
    weight.grad = torch.tensor([-2.0, value, float("-inf")])
    scaler.step(optimizer)
    assert not scaler.stepped
    assert scaler.nonfinite is not None
    assert scaler.nonfinite.kind == "inf"
    assert scaler.nonfinite.maximum == (5.0 if value == -5.0 else 2.0)
    sizes = gradients.largest(gradients.by_kind([gradients.Gradient(torch.tensor([-7.0, 3.0]), 0)]), 1, weight.device)
    assert sizes.tolist() == [7.0]
