"""Stored parameters over two real processes: DistributedDataParallel, FSDP2 and ZeroRedundancyOptimizer."""

from __future__ import annotations

import copy
import itertools
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import torch.distributed
import torch.distributed.checkpoint as dcp
from optim.cases import train_step
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import lowp
from lowp.errors import InvalidInput, Misuse
from lowp.optim import blockwise
from lowp.optim.shards import local, shard_of

RANKS = 2


def work(rank: int, jobs: dict[str, Callable[[int, str], Any]], folder: str) -> None:
    """Act as one of the processes: join the others, run the jobs, write their results or exceptions to a file."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
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


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


ADAMW: dict[str, Callable[..., torch.optim.Optimizer]] = {"torch": torch.optim.AdamW, "lowp": lowp.optim.AdamW}


def _train(precision: lowp.Precision, model: nn.Module, optimizer: Any, rank: int, steps: int = 4) -> list[float]:
    """Return the losses of training on this rank's own data."""
    losses = []
    for step in range(steps):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        losses.append(train_step(precision, model, optimizer, x))
    return losses


def _weights(model: nn.Module) -> list[list[float]]:
    return [value.flatten().tolist() for value in model.state_dict().values()]


def data_parallel(rank: int, folder: str) -> Any:
    """Each rank starts with its own weights, as without a seed: the first rank's are used."""
    found = {}
    for kind, make in ADAMW.items():
        for order in ("apart", "before"):
            precision, model = lowp.Precision("bf16-storage"), _model(rank)
            if order == "apart":
                wrapped = DistributedDataParallel(precision.prepare_model(model))
                optimizer = precision.prepare_optimizer(make(wrapped.parameters(), lr=1e-2))
            else:
                model, optimizer = precision.prepare(model, make(model.parameters(), lr=1e-2))
                wrapped = DistributedDataParallel(model)
            _train(precision, wrapped, optimizer, rank)
            found[f"{kind} {order}"] = _weights(model)
    return found


# what would convert the parameters of a model that DistributedDataParallel holds: through the wrapper or around it
TOO_LATE: dict[str, Callable[[nn.Module], Any]] = {
    "prepare": lambda wrapped: lowp.Precision("bf16-storage").prepare(
        wrapped, torch.optim.SGD(wrapped.module.parameters())
    ),
    **{
        f"inner module, {name}": lambda wrapped, name=name: lowp.Precision(name).prepare_model(wrapped.module)
        for name in ("bf16-storage", "fp16-storage", "fp16-naive")
    },
    "a layer": lambda wrapped: lowp.Precision("bf16-storage").prepare_model(wrapped.module[2]),
    "lowp.optim": lambda wrapped: lowp.optim.AdamW(wrapped.parameters()),
    "MasterWeights": lambda wrapped: lowp.MasterWeights(torch.optim.SGD(wrapped.parameters())),
}


def wrapped_too_early(rank: int, folder: str) -> dict[str, str]:
    said = {}
    for name, convert in TOO_LATE.items():
        model = _model(0)
        wrapped, before = DistributedDataParallel(model), model[0].weight
        try:
            convert(wrapped)
            said[name] = "taken"
        except InvalidInput as error:
            said[name] = f"{error} {before is model[0].weight and {one.dtype for one in model.parameters()}}"
    return said


def wrapped_before_and_unwrapped(rank: int, folder: str) -> bool:
    """A wrapper that is gone holds nothing."""
    model = _model(0)
    DistributedDataParallel(model)
    lowp.Precision("bf16-storage").prepare_model(model)
    return model[0].weight.dtype is torch.bfloat16


def wrapped_before_it_is_prepared(rank: int, folder: str) -> Any:
    """If nothing is converted any order is allowed."""
    found = {}
    for name in ("fp16", "flex16+5"):
        precision, model = lowp.Precision(name), _model(0)
        wrapped, optimizer = precision.prepare(DistributedDataParallel(model), torch.optim.SGD(model.parameters(), 0.1))
        _train(precision, wrapped, optimizer, rank)
        found[name] = _weights(model)
    return found


def fully_sharded(rank: int, folder: str) -> Any:
    """Both ranks see the same data, so that the mean of their gradients is the gradient of one."""
    found = {}
    mesh = init_device_mesh("cpu", (RANKS,))
    for name in ("bf16-storage", "fp16-storage"):
        for kind, make in ADAMW.items():
            losses = []
            options = {"storage": "fp16", "split": False} if (kind, name) == ("lowp", "fp16-storage") else {}
            for sharded in (False, True):
                precision, model = lowp.Precision(name), _model(0)
                precision.prepare_model(model)
                if sharded:
                    fully_shard(model, mesh=mesh)
                optimizer = precision.prepare_optimizer(make(model.parameters(), lr=1e-2, **options))
                losses.append(_train(precision, model, optimizer, 0))
            found[f"{name} {kind}"] = losses
    return found


def sharded_checkpoint(rank: int, folder: str) -> Any:
    """Saved after two steps by torch.distributed.checkpoint, loaded into other weights, and continued."""
    mesh, found = init_device_mesh("cpu", (RANKS,)), {}

    def build(make: Callable[..., Any], seed: int) -> tuple[lowp.Precision, nn.Module, Any]:
        precision, model = lowp.Precision("bf16-storage"), _model(seed)
        fully_shard(precision.prepare_model(model), mesh=mesh)
        return precision, model, precision.prepare_optimizer(make(model.parameters(), lr=1e-2))

    for kind, make in ADAMW.items():
        precision, model, optimizer = build(make, 0)
        _train(precision, model, optimizer, 0, steps=2)
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/{kind}")
        expected = _train(precision, model, optimizer, 0, steps=2)
        precision, model, optimizer = build(make, 1)
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/{kind}")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        found[kind] = [expected, _train(precision, model, optimizer, 0, steps=2)]
    return found


def shards_that_are_refused(rank: int, folder: str) -> list[str]:
    mesh, said = init_device_mesh("cpu", (RANKS,)), []
    for name, masters in (("bf16-storage", None), ("flex16+5", None), ("bf16-storage", "split")):
        precision, model = lowp.Precision(name, masters=masters), _model(0)
        try:
            if masters is not None:
                precision.prepare_model(model)
            fully_shard(model, mesh=mesh)
            precision.prepare(model, torch.optim.AdamW(model.parameters()))
        except InvalidInput as error:
            said.append(str(error))
    return said


def shards_without_masters(rank: int, folder: str) -> list[str]:
    mesh, said = init_device_mesh("cpu", (RANKS,)), []
    for name in ("bf16-storage", "fp16-storage"):
        precision, model = lowp.Precision(name), _model(0)
        fully_shard(precision.prepare_model(model), mesh=mesh)
        try:
            _train(precision, model, torch.optim.SGD(model.parameters(), 0.1), rank)
        except Misuse as error:
            said.append(str(error))
    return said


def redundancy(rank: int, folder: str) -> Any:
    """ZeroRedundancyOptimizer gives each rank some of the parameters and sends them to the others."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of its own deprecated functions

    model, said = _model(0), []
    for make in (
        lambda: ZeroRedundancyOptimizer(model.parameters(), optimizer_class=lowp.optim.AdamW, lr=1e-2),
        lambda: lowp.MasterWeights(ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)),
    ):
        try:
            make()
        except InvalidInput as error:
            said.append(str(error))
    precision, model = lowp.Precision("bf16-storage"), _model(0)
    wrapped = DistributedDataParallel(precision.prepare_model(model))
    zero = ZeroRedundancyOptimizer(wrapped.parameters(), optimizer_class=lowp.optim.AdamW, lr=1e-2)
    losses = _train(precision, wrapped, precision.prepare_optimizer(zero), rank)
    return said, losses, [one.detach().flatten().tolist() for one in model.parameters()]


DRAWING: dict[str, Callable[..., Any]] = {
    "AdamW": lambda one: lowp.optim.AdamW(one, 1e-2, storage="bf16", split=False, masters="stochastic", moments="bf16"),
    "SGD": lambda one: lowp.optim.SGD(one, 1e-2, storage="e5m7:stochastic", split=False, masters="none"),
    "MasterWeights": lambda one: lowp.MasterWeights(torch.optim.SGD(one, 1e-2), "e5m7:stochastic"),
}
PLACEMENTS = ((Shard(0),), (Shard(1),), (Shard(2),), (Replicate(),), (Replicate(), Shard(1)), (Shard(0), Shard(2)))


def drawn_in_parts(rank: int, folder: str) -> list[str]:
    """Step a parameter of 5 x 6 x 7, in blocks of 32, whole and in parts; return where these differ."""
    other, meshes = [], [init_device_mesh("cpu", shape) for shape in ((RANKS,), (RANKS, 1))]
    generator = torch.Generator().manual_seed(0)
    drawn, gradient = (torch.randn(5, 6, 7, generator=generator).bfloat16() for _ in range(2))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(blockwise, "BLOCK", 32)
        for kind, make in DRAWING.items():
            start = drawn if kind == "AdamW" else drawn.float()
            whole = nn.Parameter(start.clone())
            parts = {}
            for placements in PLACEMENTS:
                mesh = meshes[len(placements) - 1]
                parts[placements] = nn.Parameter(distribute_tensor(start.clone(), mesh, placements))
            for one in (whole, *parts.values()):
                optimizer = make([one])
                for _ in range(3):
                    one.grad = shard_of(gradient.to(one.dtype), one)
                    optimizer.step()
            other += [f"{kind}, {at}" for at, part in parts.items() if not torch.equal(part.full_tensor(), whole)]
            other += [kind] if torch.equal(whole[0], whole[1]) or torch.equal(whole, start) else []
    return other


def parallel_and_drawn(rank: int, folder: str) -> dict[str, float]:
    """Train in tensor parallelism, with weights that are rounded stochastically, and whole; return how far apart."""
    found = {}
    mesh = init_device_mesh("cpu", (RANKS,))
    for kind in ("SGD", "MasterWeights"):
        trained = []
        for is_parallel in (False, True):
            model = _model(0)
            if is_parallel:
                parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
            optimizer = DRAWING[kind](model.parameters())
            for step in range(3):
                x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            values = [value.full_tensor() if is_parallel else value for value in model.state_dict().values()]
            trained.append(torch.cat([value.flatten() for value in values]))
        found[kind] = float((trained[0] - trained[1]).norm() / trained[0].norm())
    return found


FEW: dict[str, Callable[..., Any]] = {
    "adamw": lambda p: lowp.optim.AdamW(p, lr=1e-2, moments="int8", masters="split-8"),
    "lion": lambda p: lowp.optim.Lion(p, lr=1e-3, moments="mxfp4:stochastic", masters="stochastic"),
    "muon": lambda p: lowp.optim.Muon(p, lr=1e-2, moments="fp8"),
}


def _steps(model: nn.Module, optimizer: Any, steps: range, rank: int = 0) -> list[float]:
    """Return the losses of steps in plain torch, on the same data on all ranks of one number."""
    losses = []
    for _ in steps:
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(rank))
        loss = model(x.bfloat16()).float().sub(x[:, :4]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def moments_in_few_bits(rank: int, folder: str) -> Any:
    """Whole, sharded, sharded with released gradients, and from a checkpoint of two steps."""
    mesh, found = init_device_mesh("cpu", (RANKS,)), {}

    def build(make: Callable[..., Any], sharded: bool, seed: int = 0) -> tuple[nn.Module, Any]:
        model, optimizer = _few(make, seed)
        if sharded:
            fully_shard(model, mesh=mesh)
            optimizer = make(model.parameters())
        return model, optimizer

    for name, make in FEW.items():
        losses = [_steps(*build(make, sharded), range(6)) for sharded in (False, True)]
        model, optimizer = build(make, True)
        optimizer.release_gradients()
        losses.append(_steps(model, optimizer, range(6)))
        model, optimizer = build(make, True)
        begun = _steps(model, optimizer, range(2))
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/{name}")
        model, optimizer = build(make, True, seed=1)
        weights, state = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/{name}")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        losses.append(begun + _steps(model, optimizer, range(2, 6)))
        found[name] = losses
    return found


def _few(make: Callable[..., Any], seed: int = 0) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 4, bias=False)).bfloat16()
    return model, make(model.parameters())


def few_bits_in_parallel(rank: int, folder: str) -> Any:
    """DistributedDataParallel, ranks with their own data: losses and weights of a run, and of one that resumes it."""
    found = {}
    for name, make in FEW.items():
        model, optimizer = _few(make)
        wrapped = DistributedDataParallel(model)
        _steps(wrapped, optimizer, range(2), rank)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        other, its_optimizer = _few(make, seed=1)
        other.load_state_dict(saved[0])
        its_optimizer.load_state_dict(saved[1])
        runs = [(wrapped, optimizer), (DistributedDataParallel(other), its_optimizer)]
        found[name] = [(_steps(*run, range(2, 5), rank), _weights(run[0])) for run in runs]
    return found


def released_too_early(rank: int, folder: str) -> list[str]:
    """Gradients released of what DistributedDataParallel holds, or will hold."""
    said = []
    for is_wrapped_first in (True, False):
        model, optimizer = _few(FEW["adamw"])
        wrapped: nn.Module = DistributedDataParallel(model) if is_wrapped_first else model
        try:
            optimizer.release_gradients()
            _steps(wrapped if is_wrapped_first else DistributedDataParallel(model), optimizer, range(1))
        except InvalidInput as error:
            said.append(str(error))
        del wrapped
    return said


def sharded_states(rank: int, folder: str) -> Any:
    """FSDP2: the share of what is kept that a rank holds, and what a checkpoint opens as in fp32."""
    mesh, found = init_device_mesh("cpu", (RANKS,)), {}
    for name, make in FEW.items():
        (whole, its), (model, optimizer) = _few(make), _few(make)
        fully_shard(model, mesh=mesh)
        optimizer = make(model.parameters())
        for one, optim in ((whole, its), (model, optimizer)):
            _steps(one, optim, range(2))
        share = [
            sum(local(value).nbytes for entry in optim.state.values() for value in entry.values() if value.dim())
            for optim in (optimizer, its)
        ]
        _, state = get_state_dict(model, optimizer)
        dcp.save({"optimizer": state}, checkpoint_id=f"{folder}/{name} in fp32")
        opened = {}  # as plain fp32 tensors, without lowp
        for key, value in its.state_dict()["state"].items():
            prefix = f"optimizer.state.{key * 2}.weight"
            opened.update({f"{prefix}.{part}": torch.zeros_like(one) for part, one in value.items()})
        dcp.load(opened, checkpoint_id=f"{folder}/{name} in fp32")
        wanted = [one for entry in its.state_dict()["state"].values() for one in entry.values()]
        is_same = [torch.equal(a, b) and a.dtype is torch.float32 for a, b in zip(opened.values(), wanted, strict=True)]
        found[name] = share, all(is_same)
    return found


JOBS = (
    drawn_in_parts,
    parallel_and_drawn,
    moments_in_few_bits,
    few_bits_in_parallel,
    released_too_early,
    sharded_states,
    data_parallel,
    wrapped_too_early,
    wrapped_before_and_unwrapped,
    wrapped_before_it_is_prepared,
    fully_sharded,
    sharded_checkpoint,
    shards_that_are_refused,
    shards_without_masters,
    redundancy,
)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[..., Any]], list[Any]]:
    """Run all jobs once, and return the results of each rank."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    jobs = {job.__name__: job for job in JOBS}
    forked.ranks(work, (jobs, str(folder)), RANKS)
    found = [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]

    def of(job: Callable[..., Any]) -> list[Any]:
        results = [each[job.__name__] for each in found]
        assert not any(isinstance(one, str) and one.startswith("Traceback") for one in results), results[0]
        return results

    return of


def test_ranks_stay_together_whether_the_model_is_prepared_before_it_is_wrapped(result: Any) -> None:
    one, other = result(data_parallel)
    assert one == other


def test_a_model_that_is_wrapped_too_early_is_refused_and_left_as_it_was(result: Any) -> None:
    for rank in result(wrapped_too_early):
        for way, said in rank.items():
            assert "call precision.prepare_model(model) first, then DistributedDataParallel(model), then" in said, way
            assert said.endswith("{torch.float32}"), way


def test_a_wrapper_that_is_gone_holds_no_parameters(result: Any) -> None:
    assert result(wrapped_before_and_unwrapped) == [True] * RANKS


def test_where_nothing_is_converted_the_order_is_free(result: Any) -> None:
    one, other = result(wrapped_before_it_is_prepared)
    assert one == other


def test_shards_train_as_whole_tensors_do(result: Any) -> None:
    for found in result(fully_sharded):
        assert len(found) == 4
        for name, (whole, sharded) in found.items():
            assert whole == sharded, name


def test_a_sharded_checkpoint_goes_on_to_the_bit(result: Any) -> None:
    for found in result(sharded_checkpoint):
        for kind, (expected, resumed) in found.items():
            assert expected == resumed, kind


def test_shards_of_moments_in_few_bits_step_as_wholes_do_and_resume_to_the_bit(result: Any) -> None:
    one, other = result(moments_in_few_bits)
    assert one == other
    for name in FEW:
        whole, *others = one[name]
        assert whole[-1] < whole[0] and all(losses == whole for losses in others), (name, one[name])


def test_few_bits_stay_together_in_data_parallel_and_resume_to_the_bit(result: Any) -> None:
    one, other = result(few_bits_in_parallel)
    for name in FEW:
        (losses, weights), (resumed, its_weights) = one[name]
        assert weights == its_weights == other[name][0][1], name
        assert losses == resumed and losses != other[name][0][0], name  # the data differ


def test_gradients_of_data_parallel_are_not_released_in_either_order(result: Any) -> None:
    for said in result(released_too_early):
        assert len(said) == 2
        assert all(
            "cannot be released before DistributedDataParallel has averaged them over the ranks" in one for one in said
        )


def test_a_rank_keeps_its_part_of_few_bits_and_a_checkpoint_opens_in_fp32(result: Any) -> None:
    for found in result(sharded_states):
        for name, ((part, whole), opens) in found.items():
            assert part * RANKS == whole and opens, name


def test_what_cannot_be_sharded_says_what_to_do(result: Any) -> None:
    for late, flex, split in result(shards_that_are_refused):
        assert "convert the model before it is sharded, precision.prepare_model(model), then fully_shard" in late
        assert "an exponent belongs to the whole tensor. Call precision.prepare_model(model) before fully_shard" in flex
        assert "cannot have masters of kind split: give kind='fp32', or use lowp.optim.AdamW" in split


def test_shards_are_stepped_only_by_an_optimizer_that_keeps_masters(result: Any) -> None:
    for said in result(shards_without_masters):
        assert len(said) == 2 and all("this optimizer is not what prepare returned" in one for one in said)


def test_zero_redundancy_takes_a_converted_model_and_refuses_another(result: Any) -> None:
    (said, losses, weights), other = result(redundancy)
    assert "convert the whole model on every rank first" in said[0]
    assert "optimizer_class=lowp.optim.AdamW), which keeps masters for its share" in said[1]
    assert losses[-1] < losses[0] and weights == other[2]


def test_a_part_of_any_cut_draws_the_random_numbers_of_its_places_in_the_whole(result: Any) -> None:
    assert result(drawn_in_parts) == [[]] * RANKS


def test_tensor_parallelism_rounds_weights_stochastically_as_one_process_does(result: Any) -> None:
    for found in result(parallel_and_drawn):
        assert all(apart < 5e-4 for apart in found.values()), found  # of one number that a sum's order rounds otherwise


def test_shards_of_several_models_have_the_exponents_and_names_of_their_wholes() -> None:
    def trained(mesh: DeviceMesh | None) -> tuple[list[float], dict[tuple[str, str, str], int]]:
        torch.manual_seed(0)
        precision = lowp.Precision("flex16+5")
        models = [nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 3)) for width in (6, 3)]
        for model in models:
            precision.prepare_model(model)
            if mesh is not None:
                fully_shard(model, mesh=mesh)
        weights = [one for model in models for one in model.parameters()]
        optimizer = precision.prepare_optimizer(torch.optim.SGD(weights, 0.1))
        losses = _train(precision, nn.Sequential(*models), optimizer, 0)
        places = itertools.product(("weight", "update"), ("", "model 2: "), names)
        assert precision.exponents is not None
        return losses, {site: precision.exponents.exponent("{} of {}{}".format(*site)) for site in places}

    names = [name for name, _ in _model(0).named_parameters()]
    whole = trained(None)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert trained(init_device_mesh("cpu", (1,))) == whole
    finally:
        torch.distributed.destroy_process_group()
