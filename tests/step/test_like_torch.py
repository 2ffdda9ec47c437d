"""The scaler behaves like torch's, by the tests of torch's own suites."""

from __future__ import annotations

import inspect
import linecache
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from step.cases import INF, NAN, OPTIMIZERS, batches, loss_of, make_model, one_parameter, parameter_of, started
from torch import nn

from lowp.step import GradScaler


def test_it_is_torchs() -> None:
    scaler = GradScaler("cpu")
    for kind in (torch.amp.GradScaler, torch.GradScaler, torch.cuda.amp.GradScaler, torch.cpu.amp.GradScaler):
        assert isinstance(scaler, kind)


def test_its_signature_is_torchs_but_for_the_default_device_and_lowps_own_arguments_by_name() -> None:
    def arguments(scaler: Any) -> list[tuple[str, Any, Any]]:
        return [(one.name, one.kind, one.default) for one in inspect.signature(scaler).parameters.values()]

    ours, torchs = arguments(GradScaler), arguments(torch.amp.GradScaler)
    assert torchs[0] == ("device", inspect.Parameter.POSITIONAL_OR_KEYWORD, "cuda")
    assert ours[0] == ("device", inspect.Parameter.POSITIONAL_OR_KEYWORD, None)
    assert ours[1 : len(torchs)] == torchs[1:]
    assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, kind, _ in ours[len(torchs) :])


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


def test_a_torch_built_for_cuda_on_a_machine_without_a_gpu_scales_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def built_for_cuda(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", built_for_cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    scaler = GradScaler()
    assert scaler.is_enabled() and scaler.get_scale() == 65536


def test_cuda_that_is_not_there_warns_and_disables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(
        UserWarning, match="torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling"
    ) as told:
        scaler = GradScaler("cuda")
    assert told[0].filename == __file__ and not scaler.is_enabled() and scaler.get_scale() == 1.0
    assert not GradScaler("cuda", enabled=False).is_enabled()


def test_without_a_device_it_works_on_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
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
    with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients.*MasterWeights\(optimizer, storage="):
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

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> str:  # type: ignore[override]
            assert isinstance(grad_scaler, torch.amp.GradScaler)
            assert not hasattr(self, "grad_scale") and not hasattr(self, "found_inf")
            grad_scaler.unscale_(self)
            seen.append("old")
            return "returned"

    class New(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None) -> None:
            seen.append(f"{self.grad_scale.item()} {self.found_inf.item()}")

    scaler = started(init_scale=2.0)
    old, new = (kind([nn.Parameter(torch.ones(1))]) for kind in (Old, New))
    for optimizer in (old, new):
        parameter_of(optimizer).grad = torch.ones(1)
    with pytest.warns(FutureWarning, match="going to stop passing itself") as told:
        assert scaler.step(old) == "returned"
    assert linecache.getline(told[0].filename, told[0].lineno).strip() == 'assert scaler.step(old) == "returned"'
    assert scaler.stepped_for(old)
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


def test_a_function_in_the_place_of_the_unscaling_is_called_in_every_class_and_object() -> None:
    class Scaler(GradScaler):
        def _unscale_grads_(self, *given: Any) -> Any:
            called.append(self)
            return super()._unscale_grads_(*given)

    called: list[GradScaler] = []
    own, other = Scaler("cpu", init_scale=4.0), GradScaler("cpu", init_scale=4.0)
    original = other._unscale_grads_
    other._unscale_grads_ = lambda *given: (called.append(other), original(*given))[1]  # type: ignore[method-assign]
    for scaler in (own, other, own, other):  # the first step of each takes a sample
        scaler.scale(torch.ones(()))
        scaler.step(one_parameter([1.0]))
        scaler.update()
    assert called == [own, other, own, other]
