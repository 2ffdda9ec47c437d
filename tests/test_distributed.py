"""Ranks agree: real processes over gloo, with DDP, with different shards, with DTensors, and with one rank."""

from __future__ import annotations

import itertools
import math
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import lowp
from lowp import distributed
from lowp.casts import parse
from lowp.errors import InvalidInput, Misuse
from lowp.kernels.int16.mantissas import current_mantissas
from lowp.loss_scale import LossScale
from lowp.numerics.record import Key, Record
from lowp.policy import Policy
from lowp.precision import Precision
from lowp.step import GradScaler

RANKS = 2
INPUT = Key("", "linear", "input", "forward")
Report = list[tuple[float, bool, float]]  # a step: the scale after it, whether it stepped, the sum of the weights


def work(rank: int, jobs: dict[str, Callable[[int], Any]], folder: str) -> None:
    """Act as one of the processes: join the others, run the jobs, write their results or exceptions to a file."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", RANKS)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    results: dict[str, Any] = {}
    for name, job in jobs.items():
        try:
            results[name] = job(rank)
        except Exception:
            results[name] = traceback.format_exc()
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, spoil: Callable[[int], None]
) -> Report:
    """Train four steps, with gradients modified between backward and step, and return the outcome of each."""
    report = []
    for step in range(4):
        optimizer.zero_grad()
        torch.manual_seed(100 * step + torch.distributed.get_rank())
        scaler.scale(model(torch.randn(4, 4)).pow(2).mean()).backward()
        spoil(step)
        scaler.step(optimizer)
        scaler.update()
        weights = sum(parameter.detach().sum().item() for parameter in model.parameters())
        report.append((scaler.get_scale(), bool(scaler.stepped), weights))
    return report


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def ddp_input_overflows(rank: int) -> list[Report]:
    """Only rank 1 sees an infinity, in its input; DDP's own all-reduce carries it to the gradients of both."""
    reports = []
    for fused in (False, True):
        for group in ("auto", None):
            model = DistributedDataParallel(small())
            overflow = [step == 1 and rank == 1 for step in range(4)]
            model.module[0].register_forward_pre_hook(
                lambda module, inputs, overflow=overflow: (inputs[0] * (torch.inf if overflow.pop(0) else 1.0),)
            )
            scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2, process_group=group)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
            reports.append(train(model, optimizer, scaler, lambda step: None))
    return reports


def ddp_gradient_spoilt(rank: int) -> list[Report]:
    """Only rank 0's copy of a gradient is modified, after DDP's all-reduce; with and without explicit unscaling."""
    reports = []
    for fused in (False, True):
        for explicitly in (False, True):
            model = DistributedDataParallel(small())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
            scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)

            def spoil(step: int, model: Any = model, scaler: Any = scaler, optimizer: Any = optimizer) -> None:
                if step == 1 and rank == 0:
                    model.module[0].weight.grad[0, 0] = torch.nan
                if explicitly:  # noqa: B023, called before the loop goes on
                    scaler.unscale_(optimizer)

            reports.append(train(model, optimizer, scaler, spoil))
    return reports


def shards_of_their_own(rank: int) -> list[Any]:
    """Each rank has different parameters, one of them none; one overflows. With and without agreement over a group."""
    found = []
    for group in (torch.distributed.group.WORLD, None):
        scaler = GradScaler("cpu", init_scale=8.0, process_group=group)
        scaler.scale(torch.ones(()))
        parameters = [nn.Parameter(torch.ones(1)) for _ in range(1 + rank)]
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        for parameter in parameters:
            parameter.grad = torch.tensor([torch.inf if rank == 1 else 1.0])
        scaler.step(optimizer)
        scaler.update()
        name = scaler.nonfinite.name if scaler.nonfinite is not None else None
        found.append((scaler.get_scale(), bool(scaler.stepped), name))
    empty = GradScaler("cpu", init_scale=8.0)
    empty.scale(torch.ones(()))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    if rank == 1:
        optimizer.param_groups[0]["params"][0].grad = torch.tensor([torch.nan])
    empty.step(optimizer)
    empty.update()
    found.append((empty.get_scale(), bool(empty.stepped)))
    return found


def dtensors(rank: int) -> list[Any]:
    """Gradients are sharded DTensors; only rank 1's shard overflows. No group is given: their mesh is used."""
    mesh = init_device_mesh("cpu", (RANKS,))
    found = []
    for spoilt in (False, True):
        parameter = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
        gradient = torch.full((4, 2), 8.0)
        gradient[3, 1] = torch.inf if spoilt else 8.0
        parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)])
        optimizer = torch.optim.SGD([parameter], lr=0.25)
        scaler = GradScaler("cpu", init_scale=8.0, process_group=None)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        assert isinstance(parameter, DTensor)
        found.append((scaler.get_scale(), bool(scaler.stepped), parameter.to_local().detach().tolist()))
    return found


def shards_that_underflow_apart(rank: int) -> list[float]:
    """Only rank 1's shard underflows, then has no gradient; the scale that follows underflow must stay one scale."""
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = GradScaler("cpu", init_scale=1.0, target_underflow=0.25, sample_interval=2)
    scales = []
    for step in range(3):
        scaler.scale(torch.ones(()))
        parameter.grad = torch.full((4,), (2.0**-30 if rank == 1 else 1.0) * scaler.get_scale())
        if step == 2 and rank == 1:
            parameter.grad = None
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def fully_sharded(rank: int) -> dict[str, bool]:
    """Train a model sharded in halves and a whole one on the same batch; return whether the losses are equal."""

    def losses(precision: Precision, is_sharded: bool) -> list[float]:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(8, 4)
        for part in (model[0], model[2], model) if is_sharded else ():
            fully_shard(part)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), []
        for _ in range(4):
            optimizer.zero_grad()
            with precision.autocast():
                loss = model(x).float().square().mean()
            precision.backward(loss)
            precision.step(optimizer)
            found.append(loss.item())
        return found

    names = ("bf16", "fp16", "e5m7", "dfp16")
    return {name: losses(Precision(name), True) == losses(Precision(name), False) for name in names}


def maxima(rank: int) -> list[Any]:
    value = torch.tensor([float(rank), 1.0 - rank])
    distributed.agree_on_maximum_(value, distributed.world())
    alone = torch.distributed.new_group([rank], use_local_synchronization=True)
    own = torch.tensor(float(rank))
    distributed.agree_on_maximum_(own, alone)
    return [value.tolist(), own.item(), distributed.resolve("auto") is torch.distributed.group.WORLD]


class Recomputing(nn.Sequential):
    """Two layers, of which the second one's backward has begun when the first one's refuses to run for a search."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = checkpoint(self[0], x.requires_grad_(), use_reentrant=True)
        return self[1](hidden)  # type: ignore[no-any-return]


def first_scales(rank: int) -> dict[str, Any]:
    """Train in fp16 with overflowing gradients, sixteen times larger on rank 1; return the scales and skipped steps."""
    found: dict[str, Any] = {}
    for kind in ("none", "ddp", "unused", "static", "sharded", "parallel", "nan", "reentrant", "sharded reentrant"):
        torch.manual_seed(0)
        model: nn.Module = nn.Linear(4, 4)
        precision = Precision("fp16")
        precision.prepare(model)
        if kind in ("ddp", "unused", "static"):
            model = DistributedDataParallel(
                model, find_unused_parameters=kind == "unused", static_graph=kind == "static"
            )
        if kind == "sharded":
            fully_shard(model)
        if kind == "sharded reentrant":
            model = fully_shard(Recomputing(fully_shard(model), fully_shard(nn.Linear(4, 4))))
        if kind == "parallel":
            parallelize_module(model, init_device_mesh("cpu", (RANKS,)), ColwiseParallel(output_layouts=Replicate()))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        for step in range(2):
            x = torch.full((4, 4), 10.0 * 16**rank)
            with precision.autocast():
                once = kind == "reentrant" and rank == 0
                y = checkpoint(model, x.requires_grad_(), use_reentrant=True) if once else model(x)
                loss = y.float().sum() * (math.nan if kind == "nan" and rank == 0 and step == 0 else 1.0)
            precision.backward(loss)
            if kind.startswith("sharded"):
                assert all(isinstance(one.grad, DTensor) for one in model.parameters()), "gradients were not reduced"
            precision.step(optimizer)
            found.setdefault(kind, []).append((precision.scale, precision.skipped_steps))
    return found


def profiles(rank: int) -> list[Any]:
    """Profile a step under DDP; return the ranks in the file of the first rank, and its counts beside one rank's."""
    found: list[Any] = []
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    with tempfile.TemporaryDirectory() as folder:
        with lowp.profile(model, optimizer, max_overhead=None) as profile:
            model(torch.randn(3 + rank, 4)).square().mean().backward()
            optimizer.step()
        file = Path(folder) / "run.json"
        profile.save(file)
        if file.exists():
            record = Record.load(file)
            found = [record.header["ranks"], record.tensors[INPUT].count, record.tensors[INPUT].maximum]
    return [found, profile.record.tensors[INPUT].count, profile.record.tensors[INPUT].maximum]


MISMATCHES: list[tuple[Callable[[], Precision], Callable[[], Precision], str]] = [
    (lambda: Precision("fp16"), lambda: Precision("bf16"), "fp16 with loss_scale.kind = dynamic"),
    (lambda: Precision("fp32"), lambda: Precision("fp16"), "fp32 with loss_scale.kind = none"),
    (lambda: Precision("bf16"), lambda: Precision("bf16-storage"), "bf16 with masters = none"),
    (lambda: Precision("fp8"), lambda: Precision("mxfp8"), "fp8 with "),
    (lambda: Precision("e4m3fn"), lambda: Precision("e4m3fn:stochastic"), 'input = "e4m3fn:saturate" on rank 0'),
    (lambda: Precision("flex16+5"), lambda: Precision("flex16+5:frozen"), 'parameters = "flex16+5:frozen" on rank 1'),
    (lambda: _scaled("dynamic(256)"), lambda: _scaled("dynamic(1024)"), "loss_scale.initial = 1024.0 on rank 1"),
    (lambda: _scaled(128), lambda: _scaled("dynamic"), "loss_scale.kind = static on rank 0"),
    (lambda: _scaled(_growing(10)), lambda: _scaled(_growing(20)), "loss_scale.interval = 20 on rank 1"),
    (lambda: _stored(seed=0), lambda: _stored(seed=1), "bf16-storage with seed = 1 on rank 1"),
    (lambda: _stored(masters="split"), lambda: _stored(masters="stochastic"), "masters = stochastic on rank 1"),
    (lambda: Precision("fp16", accumulate="fp16/16"), lambda: Precision("fp16"), "fp16 with other rules on rank 1"),
]


def _scaled(loss_scale: Any) -> Precision:
    return Precision("fp16", loss_scale=loss_scale)


def _growing(interval: int) -> LossScale:
    return LossScale("dynamic", 1024.0, interval=interval)


def _stored(**options: Any) -> Precision:
    return Precision("bf16-storage", **options)


def shards(rank: int) -> list[str]:
    """Cast DTensors with shards along each dimension; return which differ from the whole cast, or are gathered."""
    mesh, found = init_device_mesh("cpu", (RANKS,)), []
    generator = torch.Generator().manual_seed(3)
    for shape, last in itertools.product(((4, 64), (5, 3, 10), (1, 16)), (1.0, math.inf, math.nan)):
        x = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
        x.view(-1)[-1] *= last
        for name, dim in itertools.product(SHARDED, range(len(shape))):
            y = lowp.quantize(distribute_tensor(x, mesh, [Shard(dim)]), name, seed=5)
            if not torch.equal(_bits(y.full_tensor()), _bits(lowp.quantize(x, name, seed=5))):
                found.append(f"{name} {shape} {dim} {last} differs")
            if y.placements != (Shard(dim),) and shape == (4, 64) and last == 1:
                found.append(f"{name} along {dim}")
    part = DTensor.from_local(torch.full((4,), rank + 1.1), mesh, [Partial()])
    whole = distribute_tensor(torch.linspace(-4, 4, 64).reshape(4, 16), mesh, [Shard(1)])
    assert lowp.quantize(part, "e4m3fn").full_tensor().tolist() == [3.25] * 4
    plain = whole.full_tensor()
    assert torch.equal(lowp.dequantize(lowp.encode(whole, "nvfp4", packed=True)), lowp.quantize(plain, "nvfp4"))
    assert torch.equal(lowp.encode(whole, "e4m3fn"), lowp.encode(plain, "e4m3fn"))
    assert lowp.statistics(whole).maximum == 4
    compiled = torch.compile(lambda x: lowp.quantize(x, "nvfp4"), backend="eager", fullgraph=True)(whole)
    assert torch.equal(compiled.full_tensor(), lowp.quantize(plain, "nvfp4"))
    assert torch.equal(lowp.quantize(whole, "int8", out=whole.clone()).full_tensor(), lowp.quantize(plain, "int8"))
    with pytest.raises(InvalidInput, match=r"a DTensor \(4, 16\) on cpu has no memory of its own"):
        current_mantissas(whole, parse("dfp16"))
    return found


SHARDED = ["e4m3fn", "dfp16", "e4m3fn@fp32/tensor", "i4@fp32/tensor/affine", "e2m1@e8m0/tensor"]
SHARDED += ["int8", "mxfp8", "nvfp4", "e4m3fn@fp32/channel", "e2m1@e4m3@fp32/row", "ternary", "nvfp4:stochastic"]


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def tensor_parallel(rank: int) -> dict[str, Any]:
    """Train a pair of layers split over the ranks and a whole one; return the losses, the last without gradients."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def losses(name: str, is_parallel: bool) -> list[float]:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), torch.randn(16, 32)
        precision = Precision(name)
        precision.prepare_model(model)
        if is_parallel:
            parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)
        optimizer, found = precision.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.5)), []
        for _ in range(2):
            optimizer.zero_grad()
            with precision.autocast():
                loss = model(x).float().square().mean()
            precision.backward(loss)
            precision.step(optimizer)
            found.append(loss.item())
        with torch.inference_mode(), precision.autocast():
            found.append(model(x).float().square().mean().item())
        return found

    layer = parallelize_module(nn.Linear(8, 16), init_device_mesh("cpu", (RANKS,)), ColwiseParallel())
    with lowp.autocast("flex16+5"), pytest.raises(InvalidInput, match=r"\(2, 16\) that is distributed .* Use dfp16"):
        layer(torch.ones(2, 8))
    with pytest.raises(InvalidInput, match=r"by FSDP2 or tensor parallelism\) cannot be stored"):
        Precision("flex16+5").prepare(layer)
    return {name: [losses(name, is_parallel) for is_parallel in (True, False)] for name in PARALLEL}


PARALLEL = ("bf16-storage", "fp8", "e5m7:stochastic", "int8", "mxfp8", "nvfp4:nearest-even", "nvfp4", "mxfp4", "dfp16")


def mismatches(rank: int) -> list[str]:
    """Prepare a model in other precisions than the other rank, and in the same; return the errors that are raised."""
    found = []
    for one in MISMATCHES:
        model = nn.Linear(2, 2)
        with pytest.raises(Misuse) as caught:
            one[rank]().prepare(model)
        assert model.weight.dtype == torch.float32
        found.append(str(caught.value))
    with pytest.raises(Misuse, match=r"fp16 with .* on rank 0 and fp32 with .* on rank 1"):  # before what is exchanged
        Precision("fp32" if rank else "fp16").backward(nn.Linear(2, 2)(torch.ones(2)).sum())
    for same in ("fp8", torch.float16 if rank else "fp16", Policy(name=f"of rank {rank}")):
        precision = Precision(same)
        for _ in range(2 + rank):  # compared once
            precision.prepare(nn.Linear(2, 2))
    return found


def prepared_alone(rank: int) -> list[str]:
    """Only rank 0 prepares a model; what the ranks exchange next is not mixed with it."""
    patience, distributed._PATIENCE = distributed._PATIENCE, 0.1
    said = []
    if rank == 0:
        with pytest.warns(UserWarning, match="for other ranks to prepare") as caught:
            Precision("fp32").prepare(nn.Linear(2, 2))
        said = [str(one.message) for one in caught]
    DistributedDataParallel(nn.Linear(2, 2))
    distributed._PATIENCE = patience
    Precision("bf16").prepare(nn.Linear(2, 2))  # no longer compared
    return said


def fewer_batches(rank: int) -> dict[str, list[float]]:
    """Train under torch's Join, on rank 1 for three steps more; return the weights of the end."""
    found: dict[str, list[float]] = {}
    for name in ("fp16", "bf16", "mxfp8", "dfp16"):
        torch.manual_seed(0)
        x = torch.randn(RANKS, 8, 4)[rank]
        model = DistributedDataParallel(nn.Linear(4, 4))
        optimizer, region = torch.optim.SGD(model.parameters(), lr=0.1), lowp.autocast(name)
        scaler = lowp.GradScaler("cpu", process_group=None, enabled=name == "fp16")
        with Join([model]):
            for _ in range(2 + 3 * rank):
                with region:
                    loss = model(x).float().square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        found[name] = model.module.weight.detach().flatten().tolist()
    return found


JOBS = {
    job.__name__: job
    for job in (
        ddp_input_overflows,
        ddp_gradient_spoilt,
        shards_of_their_own,
        shards_that_underflow_apart,
        dtensors,
        fully_sharded,
        maxima,
        first_scales,
        profiles,
        shards,
        tensor_parallel,
        mismatches,
        fewer_batches,
        prepared_alone,  # the last, since it ends all comparisons
    )
}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[int], Any]], list[Any]]:
    """Return what a job returned on each rank; all run in one pair of processes, as starting takes seconds."""
    folder = tmp_path_factory.mktemp("ranks")
    forked.ranks(work, (JOBS, str(folder)), RANKS)
    results = [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]

    def of(job: Callable[[int], Any]) -> list[Any]:
        found = [each[job.__name__] for each in results]
        for each in found:
            assert not isinstance(each, str), each
        return found

    return of


def test_the_first_rank_saves_what_all_have_profiled(result: Any) -> None:
    (merged, *first), (nothing, *second) = result(profiles)
    assert (first[0], second[0], nothing) == (12, 16, [])
    assert merged == [2, 28, max(first[1], second[1])]


def test_ranks_agree_when_the_input_of_one_overflows(result: Any) -> None:
    first, second = result(ddp_input_overflows)
    assert first == second and len(first) == 4
    for report in first:
        assert [stepped for _, stepped, _ in report] == [True, False, True, True]
        assert [scale for scale, _, _ in report] == [1024.0, 512.0, 512.0, 1024.0]
        assert report[0][2] == report[1][2] != report[2][2]


def test_ranks_agree_when_one_copy_of_a_gradient_overflows(result: Any) -> None:
    first, second = result(ddp_gradient_spoilt)
    assert first == second and len(first) == 4
    for report in first:
        assert [stepped for _, stepped, _ in report] == [True, False, True, True]
        assert [scale for scale, _, _ in report] == [1024.0, 512.0, 512.0, 1024.0]


def test_ranks_with_shards_of_their_own_agree_over_a_group_and_decide_alone_without(result: Any) -> None:
    first, second = result(shards_of_their_own)
    second_name = "param_groups[0]['params'][1], shape (1,)"
    assert first == [(4.0, False, ""), (8.0, True, None), (4.0, False)]
    assert second == [(4.0, False, second_name), (4.0, False, second_name), (4.0, False)]


def test_ranks_follow_the_underflow_of_all_of_them(result: Any) -> None:
    assert result(shards_that_underflow_apart) == [[2.0**5] * 3] * 2


def test_dtensor_gradients_are_unscaled_and_agreed_on_over_their_mesh(result: Any) -> None:
    for found in result(dtensors):
        assert found == [(8.0, True, [[0.75, 0.75]] * 2), (4.0, False, [[1.0, 1.0]] * 2)]


def test_fully_sharded_parameters_train_as_whole_ones(result: Any) -> None:
    assert result(fully_sharded) == [{"bf16": True, "fp16": True, "e5m7": True, "dfp16": True}] * RANKS


def test_a_rank_may_have_fewer_batches_than_another(result: Any) -> None:
    first, second = result(fewer_batches)
    assert first == second
    assert list(first) == ["fp16", "bf16", "mxfp8", "dfp16"]


def test_ranks_begin_with_the_scale_of_the_one_that_needs_the_smallest(result: Any) -> None:
    first, second = result(first_scales)
    assert first == second
    # a weight's gradient is 4 * 160 * scale there: below 65504 with 5 powers of two of room from a scale of 2 on
    for kind in ("none", "ddp", "unused", "sharded", "parallel"):
        assert first[kind] == [(2.0, 0)] * 2, kind


def test_ranks_begin_with_one_scale_where_one_of_them_cannot_search(result: Any) -> None:
    for found in result(first_scales):
        for kind in ("static", "nan", "reentrant", "sharded reentrant"):
            assert found[kind] == [(32768.0, 1), (16384.0, 2)], kind


def test_shards_are_cast_as_they_are_in_the_whole_and_gathered_only_where_a_scale_or_a_draw_needs_it(
    result: Any,
) -> None:
    gathered = ["int8 along 1", "e4m3fn@fp32/channel along 1", "e2m1@e4m3@fp32/row along 1", "ternary along 1"]
    gathered += ["nvfp4:stochastic along 0", "nvfp4:stochastic along 1"]
    assert [sorted(found) for found in result(shards)] == [sorted(gathered)] * RANKS


def test_tensor_parallel_layers_train_as_whole_ones_in_every_precision(result: Any) -> None:
    first, second = result(tensor_parallel)
    assert first == second
    sums = dict.fromkeys(("bf16-storage", "nvfp4", "mxfp4"), 1e-2)  # in bf16, of each rank
    apart = sums | {"int8": 1e-2}  # draws of gradients before or after a scale
    for name, (parallel, whole) in first.items():
        assert parallel == pytest.approx(whole, rel=apart.get(name, 1e-6)), name


def test_ranks_that_prepare_other_precisions_all_raise_with_both_named(result: Any) -> None:
    first, second = result(mismatches)
    assert first == second
    for text, (_, _, said) in zip(first, MISMATCHES, strict=True):
        assert said in text and "on rank 0 and" in text and "on rank 1. Give all ranks the same" in text


def test_a_rank_that_prepares_alone_waits_no_longer_than_its_patience(result: Any) -> None:
    said = "rank 0 has waited 0.1 s for other ranks to prepare a model: whether all ranks train in one precision is "
    assert result(prepared_alone) == [[said + "not compared"], []]


def test_a_maximum_is_taken_over_a_group(result: Any) -> None:
    assert result(maxima) == [[[1.0, 1.0], 0.0, True], [[1.0, 1.0], 1.0, True]]


def test_without_torch_distributed_there_is_nobody_to_agree_with() -> None:
    value = torch.tensor(3.0)
    distributed.agree_on_maximum_(value, distributed.world())
    assert value == 3.0 and distributed.resolve("auto") is None and distributed.resolve(None) is None
    assert distributed.mesh_groups([value]) == []


def test_what_is_no_group_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"process_group cannot be 3: allowed are 'auto'"):
        distributed.resolve(3)
