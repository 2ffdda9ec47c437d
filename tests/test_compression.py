"""Gradients in few bits between three real processes, against what each part is by definition."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowp
from lowp import compression
from lowp.errors import InvalidInput
from lowp.optim.storage import seed_of

RANKS = 3
CASTS = ["bf16", "fp16:stochastic", "e4m3fn", "e2m1", "mxfp8", "mxfp8:stochastic", "int8", "int8:stochastic", "nvfp4"]
CASTS += ["i8s@fp32/128", "int8-affine", "int4", "dfp16", "ternary", "e5m7"]
SEED = 7


def work(rank: int, jobs: dict[str, Callable[[int, str], Any]], folder: str) -> None:
    """Act as one of the processes: join the others, run the jobs, write their results or exceptions to a file."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", RANKS)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    results: dict[str, Any] = {}
    for name, job in jobs.items():
        try:
            results[name] = job(rank, folder)
        except Exception:
            results[name] = traceback.format_exc()
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


class Given(nn.Module):
    """A parameter whose gradient is whatever is given."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def gradient_of(rank: int, count: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(count, generator=generator) * torch.randn(count, generator=generator).exp()


def reduced(wrapped: nn.Module, gradient: Tensor) -> Tensor:
    """Return the gradient of all ranks, of which this rank's is given."""
    wrapped.zero_grad()
    wrapped(gradient).backward()
    found: Any = next(wrapped.parameters()).grad
    return found.full_tensor() if hasattr(found, "full_tensor") else found.clone()


def _parts(gradient: Tensor) -> Tensor:
    """Return a gradient cut into rows for each rank."""
    count = -(-len(gradient) // RANKS)
    rows = -(-count // compression.ROW)
    padded = gradient.new_zeros(RANKS, rows, -(-count // rows))
    padded.view(-1)[: len(gradient)] = gradient
    return padded


def defined(gradients: list[Tensor], cast: str, exchange: int = 1) -> Tensor:
    """Return the mean of gradients as it is defined: each sum of rounded parts is rounded again."""
    parts, means = [_parts(one) for one in gradients], []
    for owner in range(RANKS):
        total, offset = torch.zeros_like(parts[0][0]), owner * parts[0][0].numel()
        for rank in range(RANKS):
            drawn = seed_of(SEED, exchange, rank, 0)
            part = parts[rank][owner]
            total += part if rank == owner else lowp.quantize(part, cast, seed=drawn, offset=offset)
        means.append(lowp.quantize(total / RANKS, cast, seed=seed_of(SEED, exchange, owner, 1), offset=offset))
    return torch.stack(means).view(-1)[: len(gradients[0])]


# -- jobs -------------------------------------------------------------------------------------------------------------
def by_definition(rank: int, folder: str) -> dict[str, Any]:
    """Reduce one gradient in each cast; return it beside its definition, and the share of fp32's bytes."""
    found = {}
    for count in (6000, 5):
        gradients = [gradient_of(one, count) for one in range(RANKS)]
        for cast in CASTS:
            wrapped = DistributedDataParallel(Given(count))
            sent = lowp.GradientCompression(cast, seed=SEED).attach(wrapped)
            result = reduced(wrapped, gradients[rank])
            found[f"{cast} {count}"] = [result, defined(gradients, cast), sent.bytes_sent / sent.bytes_in_fp32]
    return found


def of_shards(rank: int, folder: str) -> dict[str, Any]:
    """Reduce a gradient that FSDP2 shards; return it beside the mean of what the other ranks have rounded."""
    found, count = {}, 6000
    gradients = [gradient_of(one, count) for one in range(RANKS)]
    for cast in CASTS:
        model = Given(count)
        fully_shard(model)
        lowp.GradientCompression(cast, seed=SEED).attach(model)
        parts, means = [_parts(one) for one in gradients], []
        for owner in range(RANKS):
            rounded = [
                part[owner]
                if one == owner
                else lowp.quantize(part[owner], cast, seed=seed_of(SEED, 1, one, 0), offset=owner * part[0].numel())
                for one, part in enumerate(parts)
            ]
            means.append((rounded[0] + rounded[1] + rounded[2]) / RANKS)
        found[cast] = [reduced(model, gradients[rank]), torch.stack(means).view(-1)[:count]]
    return found


def infinities(rank: int, folder: str) -> dict[str, list[float]]:
    """One rank's gradient has an infinity; return what each rank has at its place, and how many are finite."""
    found = {}
    for cast in ("bf16", "int8", "mxfp8", "e2m1"):
        for kind in ("ddp", "fsdp"):
            model: Any = Given(3072)
            model = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
            lowp.GradientCompression(cast, error_feedback=True).attach(model)
            gradient = torch.ones(3072)
            gradient[1500] = torch.inf if rank == 2 else 1.0
            spoilt, clean = reduced(model, gradient), reduced(model, torch.ones(3072))
            found[f"{cast} {kind}"] = [spoilt[1500].item(), int(spoilt.isfinite().sum()), clean.max().item()]
    return found


def fed_back(rank: int, folder: str) -> dict[str, list[float]]:
    """Reduce a gradient thirty times; return how far the mean of the results is from it, without and with feedback."""
    found: dict[str, list[float]] = {}
    for kind in ("ddp", "fsdp"):
        for feedback in (False, True):
            gradients = [gradient_of(one, 1200) for one in range(RANKS)]
            model: Any = Given(1200)
            model = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
            lowp.GradientCompression("int4", error_feedback=feedback).attach(model)
            mean = sum(reduced(model, gradients[rank]) for _ in range(30)) / 30
            error = mean - sum(gradients) / RANKS
            found.setdefault(kind, []).append(error.norm().item())
    return found


def feedback_of_a_moving_scale(rank: int, folder: str) -> bool:
    """Twice the loss scale and twice the gradient give twice the result."""

    class Scaled:
        scale = 1.0

    results = []
    for factor in (1.0, 4.0):
        wrapped, precision = DistributedDataParallel(Given(900)), Scaled()
        lowp.GradientCompression("mxfp8", error_feedback=True).attach(wrapped, precision)
        reduced(wrapped, gradient_of(rank, 900))
        precision.scale = factor
        results.append(reduced(wrapped, factor * gradient_of(rank, 900, 1)) / factor)
    return torch.equal(*results)


def resumed(rank: int, folder: str) -> list[Any]:
    """Continue from a checkpoint to the same bits; return what is said of states that do not fit, too."""
    same = []
    for kind in ("ddp", "fsdp"):

        def wrap(kind: str = kind) -> tuple[Any, Any]:
            model: Any = Given(1200)
            model = DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)
            return model, lowp.GradientCompression("int4:stochastic", error_feedback=True, seed=SEED).attach(model)

        model, sent = wrap()
        for step in range(2):
            reduced(model, gradient_of(rank, 1200, step))
        lowp.save(f"{folder}/{kind}{rank}.lowp", compression=sent)
        expected = reduced(model, gradient_of(rank, 1200, 2))
        model, sent = wrap()
        lowp.load(f"{folder}/{kind}{rank}.lowp", compression=sent)
        same.append(torch.equal(reduced(model, gradient_of(rank, 1200, 2)), expected))
    said, state = [], sent.state_dict()
    for changed in ({"rank": (rank + 1) % RANKS}, {"cast": "int8"}, {"residuals": 3}, {"exchanges": -1}):
        with pytest.raises(InvalidInput) as caught:
            sent.load_state_dict({**state, **changed})
        said.append(str(caught.value))
    del state["seed"]
    with pytest.raises(InvalidInput, match="the state of a GradientCompression lacks seed"):
        sent.load_state_dict(state)
    return [same, said]


def trained(rank: int, folder: str) -> Any:
    """Train layers in two buckets, in bf16 parameters and with accumulated gradients; return what ranks have."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, 4)).to(memory_format=torch.channels_last)
    precision = lowp.Precision("bf16-storage")
    wrapped = DistributedDataParallel(precision.prepare_model(model), bucket_cap_mb=0.0001)
    optimizer = precision.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    lowp.GradientCompression(torch.bfloat16, error_feedback=True).attach(wrapped, precision)
    losses = []
    for step in range(6):
        x = gradient_of(rank, 6 * 48, step % 3).view(6, 3, 4, 4)
        with wrapped.no_sync(), precision.autocast():
            precision.backward(wrapped(x[:3]).float().square().mean())
        with precision.autocast():
            loss = wrapped(x[3:]).float().square().mean()
        precision.backward(loss)
        precision.step(optimizer)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [one.float().flatten().tolist() for one in model.parameters()]


def refused(rank: int, folder: str) -> list[str]:
    """Return what is said where gradients cannot be compressed."""
    said = []
    model = fully_shard(Given(8))
    model.set_gradient_divide_factor(5.0)
    lowp.GradientCompression("bf16").attach(model)
    for function in (
        lambda: lowp.GradientCompression("bf16").attach(nn.Linear(2, 2)),
        lambda: reduced(model, torch.ones(8)),
    ):
        with pytest.raises(InvalidInput) as caught:
            function()
        said.append(str(caught.value))
    return said


JOBS = (by_definition, of_shards, infinities, fed_back, feedback_of_a_moving_scale, resumed, trained, refused)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[..., Any]], list[Any]]:
    """Run all jobs once, and return the results of each rank."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    forked.ranks(work, ({job.__name__: job for job in JOBS}, str(folder)), RANKS)
    found = [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]

    def of(job: Callable[..., Any]) -> list[Any]:
        results = [each[job.__name__] for each in found]
        assert not any(isinstance(one, str) and one.startswith("Traceback") for one in results), results[0]
        return results

    return of


def _each(found: list[dict[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Yield what every rank has found, by name."""
    for name in found[0]:
        yield name, [one[name] for one in found]


def test_all_ranks_have_the_bits_of_the_definition_in_every_cast(result: Any) -> None:
    for name, found in _each(result(by_definition)):
        for mean, expected, _ in found:
            assert torch.equal(mean, expected), name
            assert torch.equal(mean, found[0][0]), name


def test_a_step_sends_half_of_the_bytes_of_fp32_in_bf16_and_little_more_than_a_quarter_in_fp8_and_int8(
    result: Any,
) -> None:
    shares = {name: found[0][2] for name, found in _each(result(by_definition)) if name.endswith("6000")}
    assert shares["bf16 6000"] == 0.5
    assert all(0.25 < shares[f"{name} 6000"] < 0.26 for name in ("mxfp8", "int8", "mxfp8:stochastic"))


def test_shards_have_the_bits_of_the_definition_in_every_cast(result: Any) -> None:
    for name, found in _each(result(of_shards)):
        for mean, expected in found:
            assert torch.equal(mean, expected), name


def test_what_is_infinite_on_one_rank_reaches_all_in_every_cast_and_is_not_kept(result: Any) -> None:
    for name, found in _each(result(infinities)):
        for spoilt, finite, clean in found:
            assert not abs(spoilt) < torch.inf and clean == 1.0, name
            assert finite == 3071 if name == "bf16 ddp" else finite >= 2048, name


def test_what_rounding_takes_is_fed_back(result: Any) -> None:
    for kind, found in _each(result(fed_back)):
        for without, fed in found:
            assert fed < without / 10, kind


def test_residuals_follow_the_loss_scale(result: Any) -> None:
    assert result(feedback_of_a_moving_scale) == [True] * RANKS


def test_a_checkpoint_goes_on_to_the_bit_and_another_rank_s_is_refused(result: Any) -> None:
    for rank, (same, (other, cast, residuals, exchanges)) in enumerate(result(resumed)):
        assert same == [True, True]
        assert f"saved with rank = {(rank + 1) % RANKS}, and this one has {rank}: load what the same rank" in other
        assert "saved with cast = 'int8', and this one has 'int4:stochastic'" in cast
        assert residuals == "the residuals of a GradientCompression must be tensors by name"
        assert exchanges == "the exchanges of a GradientCompression are -1: give their number, 0 or more"


def test_models_in_several_buckets_and_few_bits_stay_together(result: Any) -> None:
    found = result(trained)
    for losses, weights in found:
        assert weights == found[0][1] and losses[-1] < losses[0]


def test_what_cannot_be_compressed_says_what_to_do(result: Any) -> None:
    for plain, premultiplied in result(refused):
        assert plain.startswith("gradients of a Linear are not sent to other ranks: give the model in Distributed")
        assert "are summed or averaged, not reduced by" in premultiplied


def test_a_cast_that_needs_earlier_tensors_is_refused() -> None:
    with pytest.raises(InvalidInput, match="int8:delayed: a delayed scale depends on earlier tensors"):
        lowp.GradientCompression("int8:delayed")
    assert repr(lowp.GradientCompression("mxfp8")) == "GradientCompression('mxfp8', error_feedback=False, seed=0)"


def test_one_rank_alone_sends_nothing() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(Given(8))
        sent = lowp.GradientCompression("int8").attach(wrapped)
        assert reduced(wrapped, torch.arange(8.0)).tolist() == list(range(8)) and sent.bytes_sent == 0
    finally:
        torch.distributed.destroy_process_group()
