"""Training steps on a GPU, by ``pytest -m gpu``; the same bodies run on the CPU in every run of the tests."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from step.cases import NAN, batches, loss_of, make_model
from torch import Tensor, nn
from torch_versions import compiles_regions

import lowp
from lowp.recipes.training import Settings, Training, moved

PRESETS = ("fp16", "bf16", "bf16-storage", "fp8", "flex16+5")


@contextmanager
def nothing_read(device: str) -> Iterator[None]:
    """Let CUDA refuse everything that waits for it."""
    if device == "cpu":
        yield
        return
    try:
        with warnings.catch_warnings():  # torch says of the mode that it does not detect everything
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


Step = Callable[[Tensor, Tensor], Tensor]


def _trained(preset: str, device: str) -> tuple[lowp.Precision, nn.Module, torch.optim.Optimizer, Step]:
    """Return what is trained, and a function that takes a step of it."""
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 16), nn.LayerNorm(16)]
    network: nn.Module = nn.Sequential(*body, nn.GELU(), nn.Linear(16, 4)).to(device)
    precision = lowp.Precision(preset, loss_scale="dynamic(1024)" if preset == "fp16" else None)
    fused = torch.optim.AdamW(network.parameters(), lr=0.02, fused=True, capturable=device == "cuda")
    model, optimizer = precision.prepare(network, fused)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        with precision.autocast():
            loss = F.cross_entropy(model(x), labels)
        precision.backward(loss)
        precision.step(optimizer)
        return loss.detach()

    return precision, model, optimizer, step


def _batches(count: int, device: str) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    pairs = [(torch.randn(8, 1, 8, 8, generator=generator), torch.arange(8) % 4) for _ in range(count)]
    return [(x.to(device), labels.to(device)) for x, labels in pairs]


@pytest.mark.parametrize("preset", PRESETS)
def test_after_the_first_steps_nothing_is_waited_for(device: str, preset: str) -> None:
    precision, model, _, step = _trained(preset, device)
    losses = []
    for number, batch in enumerate(_batches(6, device)):
        if number < 2:  # sites, momenta and the table of kernels are made
            losses.append(step(*batch))
            continue
        with nothing_read(device):
            losses.append(step(*batch))
    assert all(loss.isfinite() for loss in losses) and precision.skipped_steps == 0
    assert all(one.isfinite().all() for one in model.state_dict().values())


def test_a_step_with_an_infinity_is_skipped_without_a_wait_and_told_afterwards(device: str) -> None:
    model = nn.Sequential(make_model(), nn.BatchNorm1d(8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = lowp.GradScaler(device, init_scale=1024.0)
    scaler.watch(model)
    for number, (x, labels) in enumerate(batches(4)):
        x, labels = x.to(device), labels.to(device)
        optimizer.zero_grad()
        with nothing_read(device) if number else nullcontext():  # the first step allocates
            scaler.scale(loss_of(model, (x, labels))).backward()
            if number == 2:
                model[0][1].weight.grad[0, 0].fill_(NAN)
            if number % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert bool(scaler.stepped) == (number != 2)
    found = scaler.nonfinite
    assert found is not None and (found.name, found.kind, found.step) == ("0.1.weight", "nan", 2)
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("preset", ["fp16", "bf16"])
def test_a_layer_of_a_transformer_computes_what_it_does_under_torch_autocast(device: str, preset: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, activation="gelu", batch_first=True).to(device)
    x, factors = (torch.randn(2, 16, 32).to(device) for _ in range(2))

    def stepped(region: Any) -> list[Tensor]:
        layer.zero_grad()
        with region:
            result = layer(x)
        (result.float() * factors).sum().backward()
        return [result.detach().float(), *(one.grad for one in layer.parameters() if one.grad is not None)]

    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[preset]
    found, expected = stepped(lowp.autocast(preset)), stepped(torch.autocast(device, dtype))
    assert len(found) == len(expected) == 1 + len(list(layer.parameters()))
    for one, other in zip(found, expected, strict=True):  # a few roundings of 2**-8, and of 2**-11 in fp16
        assert float((one - other).norm()) <= 0.03 * float(other.norm())


def test_a_checkpoint_of_a_device_is_read_on_a_cpu_and_on_a_device(device: str, tmp_path: Path) -> None:
    precision, model, optimizer, step = _trained("fp16", device)
    for batch in _batches(2, device):
        step(*batch)
    lowp.save(tmp_path / "run.pt", model=model, optimizer=optimizer, precision=precision)
    for place in dict.fromkeys(["cpu", device]):
        own, other, others, _ = _trained("fp16", place)
        lowp.load(tmp_path / "run.pt", map_location=place, model=other, optimizer=others, precision=own)
        assert own.scale == precision.scale and own.steps == precision.steps
        for name, one in model.state_dict().items():
            assert torch.equal(other.state_dict()[name].cpu(), one.cpu()), name


@pytest.mark.parametrize("preset", ["bf16", "fp16", "flex16+5"])
def test_a_step_that_a_graph_has_captured_does_what_the_eager_step_does(device: str, preset: str) -> None:
    data = _batches(8, device)
    _, expected, _, eager = _trained(preset, device)
    losses = [float(eager(*batch)) for batch in data]
    _, model, _, step = _trained(preset, device)
    x, labels = (one.clone() for one in data[0])
    found: list[float] = []
    with _beside(device):
        for batch in data[:4]:
            x.copy_(batch[0])
            found.append(float(step(x, labels)))
    replay = _captured(device, lambda: step(x, labels))
    for batch in data[4:]:
        x.copy_(batch[0])
        found.append(float(replay()))
    assert found == pytest.approx(losses, rel=1e-2)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=1e-2, atol=1e-2)


@contextmanager
def _beside(device: str) -> Iterator[None]:
    """Let what comes before a capture run on a stream of its own, as torch's notes on CUDA graphs have it."""
    if device == "cpu":
        yield
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


def _captured(device: str, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a call as a replay of a CUDA graph; on the CPU as it is."""
    if device == "cpu":
        return call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


OTHERS = ("seq2seq", "gpt", "resnet-20", "ssd", "faster-rcnn", "words", "unet", "bert", "rossmann")


@pytest.mark.parametrize(
    ("name", "preset"),
    [("digits", "fp16"), ("digits", "bf16"), *(pytest.param(name, "fp16", marks=pytest.mark.slow) for name in OTHERS)],
)
def test_a_recipe_takes_steps_and_is_evaluated(device: str, name: str, preset: str) -> None:
    training = Training(Settings(name, precision=preset, device=device, batch=4))
    training.model.train()
    data = training.data.training
    for number in range(2):
        batch = data.batch(torch.arange(4) + 4 * number, torch.Generator().manual_seed(number))
        loss = training.step(moved(batch, training.device))
    assert loss.isfinite() and loss.device.type == device
    held = training.data.validation
    training.model.eval()
    with torch.no_grad(), training.precision.autocast():
        found = training.recipe.evaluate(training.model, [moved(held.batch(torch.arange(4)), training.device)])
    assert "loss" in found


@compiles_regions
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does it
@pytest.mark.parametrize("kind", ["e4m3fn:stochastic", "bf16"])
def test_what_is_compiled_has_the_numbers_of_eager_mode(device: str, kind: str) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 16).to(device), torch.randn(8, 32).to(device)

    def run(x: Tensor) -> Tensor:
        return F.relu(layer(lowp.quantize(x, kind, seed=5)))

    compiled = torch.compile(run, backend="inductor" if device == "cuda" else "aot_eager", fullgraph=True)
    with lowp.autocast("bf16"):
        assert torch.allclose(compiled(x).float(), run(x).float(), rtol=0.02, atol=0.02)
