"""torch's engines for many ranks, four real processes over gloo: every precision beside the same training in one.

`AGREES` is the table that docs/ranks.md shows.
"""

from __future__ import annotations

import itertools
import math
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lowp
from lowp.errors import InvalidInput
from lowp.optim.shards import local, places_of, shard_of

RANKS, STEPS = 4, 2
FLOATS = ["fp32", "fp16", "bf16", "fp16-storage", "bf16-storage", "fp16-naive"]
EMULATED = ["bf16-tpu", "bf16-trunc", "fp8", "mxfp8", "nvfp4:nearest-even", "int8", "e5m7", "e5m7:stochastic"]
PRECISIONS = [*FLOATS, *EMULATED, "dfp16", "flex16+5"]
SAMPLE = ["fp16-storage", "flex16+5"]

# by engine, what is not the same to the bit: to the order of a sum (a bound of the difference of losses, whose unit is
# the format in which torch sums over ranks), or refused
SPLIT = {
    **{name: 2e-2 for name in ("bf16", "bf16-storage")},
    **{name: 2e-3 for name in ("fp16", "fp16-storage", "fp16-naive")},
    **{name: 1e-6 for name in ("fp32", *EMULATED)},
    "dfp16": 1e-4,  # the scale of a sum moves with its last bit
    "int8": 1e-2,  # one process rounds incoming gradients after the scales of the other operand, DTensors before them
    "flex16+5": "refused",
}
AGREES: dict[str, dict[str, Any]] = {
    "fully_shard": {"fp16-naive": 1e-3},  # torch divides gradients in fp16 before and after their sum
    "fully_shard, mixed": {},
    "HSDP": {"fp16-naive": 1e-3},
    "tensor parallel": SPLIT,
    "tensor parallel and fully_shard": SPLIT,
    # one process divides the loss by the micro-batches, the pipeline the gradient; its draws and shared exponents are
    # those of its own part of the step
    "pipeline": {"fp16-naive": 1e-3, **dict.fromkeys(["int8", "e5m7:stochastic", "flex16+5"], 1e-2)},
}
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def work(rank: int, jobs: dict[str, Callable[[str], Any]], folder: str, count: int) -> None:
    """Act as one of the processes: join the others, run the jobs, write their results or exceptions to a file."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's own about sequences of all-gathers
    store = torch.distributed.FileStore(f"{folder}/store {count}", count)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=count)
    results: dict[str, Any] = {}
    for name, job in jobs.items():
        try:
            results[name] = job(folder)
        except Exception:
            results[name] = traceback.format_exc()
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


# -- the same training in every engine --------------------------------------------------------------------------------
def network(has_norm: bool = True) -> nn.Sequential:
    """Return layers of which some have fewer rows than there are ranks."""
    torch.manual_seed(0)
    norm = nn.LayerNorm(32) if has_norm else nn.Tanh()
    return nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), norm, nn.Linear(32, 3), nn.Tanh(), nn.Linear(3, 1)
    )


def sharded(model: Any, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh, **options)
    return model  # type: ignore[no-any-return]


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    count = torch.distributed.get_world_size()
    two = init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("outer", "inner"))
    return init_device_mesh("cpu", (count,)), two


def wrapped(model: Any, engine: str, flat: DeviceMesh, two: DeviceMesh) -> nn.Module:
    """Return what an engine makes of a prepared model."""
    if engine == "fully_shard":
        return sharded(model, flat)
    if engine == "fully_shard, mixed":
        return sharded(model, flat, mp_policy=MIXED)
    if engine == "HSDP":
        return sharded(model, two)
    if engine == "tensor parallel":
        return parallelize_module(model, flat, PLAN)
    return sharded(parallelize_module(model, two["inner"], PLAN), two["outer"])


def in_bf16(model: Any) -> Callable[[Tensor], Any]:
    """Return a call of a whole model as `MIXED` calls its shards: with parameters and inputs of each in bf16."""
    for part in (model, model[0], model[2]):
        part.register_forward_pre_hook(lambda module, given: (given[0].bfloat16(),))
    names = [name for name, _ in model.named_parameters()]
    return lambda x: torch.func.functional_call(model, {one: model.get_parameter(one).bfloat16() for one in names}, x)


def trained(name: str, engine: str, meshes: Any, is_whole: bool, is_apart: bool = False) -> Any:
    """Train in an engine, or whole; return losses and weights.

    Ranks see the same batch, so that the mean of their gradients is each of them; or, `is_apart`, batches of their own,
    of which a whole model accumulates the gradients.
    """
    is_mixed, is_split = engine == "fully_shard, mixed", engine.startswith("tensor parallel")
    model, precision = network(not is_mixed), lowp.Precision(name)  # torch's norms take no bf16 beside inputs in fp32
    precision.prepare_model(model)
    call = model if is_whole else wrapped(model, engine, *meshes)
    by_sgd = is_split or is_apart or name == "fp16-naive"  # Adam divides by what a sum leaves of 0, or fp16 of 1e-8
    make: Any = torch.optim.SGD if by_sgd else torch.optim.AdamW
    optimizer = precision.prepare_optimizer(make(model.parameters(), lr=1e-2))
    call = in_bf16(model) if is_mixed and is_whole else call
    batches, losses = torch.randn(RANKS, 8, 32, generator=torch.Generator().manual_seed(5)), []
    mine = [torch.distributed.get_rank()] if is_apart else [0]
    for _ in range(STEPS):
        optimizer.zero_grad()
        for place in range(RANKS) if is_apart and is_whole else mine:
            with precision.autocast():
                loss = call(batches[place]).float().square().mean()
            precision.backward(loss / RANKS if is_apart and is_whole else loss)
        precision.step(optimizer)
        losses.append(loss.item())
    return losses, [_whole(one) for one in model.state_dict().values()]


def _whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x  # type: ignore[no-any-return]


def same(one: Any, other: Any) -> float | str:
    """Return how far losses and weights are apart, relative to each; "bits" if they are the same."""
    if one[0] == other[0] and all(map(torch.equal, one[1], other[1])):
        return "bits"
    losses = [abs(a - b) / abs(a) for a, b in zip(one[0], other[0], strict=True)]
    return max([*losses, *(float((a - b).norm() / a.norm()) for a, b in zip(one[1], other[1], strict=True))])


def agreement(names: list[str]) -> dict[str, dict[str, Any]]:
    """Return how far each engine is from one process, in some precisions."""
    found: dict[str, dict[str, Any]] = {}
    made, wholes = meshes(), {}
    for engine in AGREES:
        for name in names:
            try:
                if engine == "pipeline":
                    value = same(*piped(name))
                else:
                    kind = name, engine.startswith("tensor"), engine.endswith("mixed")
                    wholes[kind] = wholes.get(kind) or trained(name, engine, made, True)
                    value = same(wholes[kind], trained(name, engine, made, False))
            except InvalidInput as error:
                value = str(error)
            found.setdefault(engine, {})[name] = value
    return found


def agreement_of_a_sample(folder: str) -> Any:
    return agreement(SAMPLE)


def agreement_of_all(folder: str) -> Any:
    return agreement(PRECISIONS)


def batches_of_their_own(folder: str) -> dict[str, Any]:
    """Return how far ranks with batches of their own are from one process that accumulates their gradients."""
    names, made = ("bf16-storage", "e5m7"), meshes()
    return {name: _weights_apart(name, made) for name in names}


def _weights_apart(name: str, made: Any) -> float:
    one, other = (trained(name, "fully_shard", made, is_whole, True)[1] for is_whole in (True, False))
    return max(float((a - b).norm() / a.norm()) for a, b in zip(one, other, strict=True))


def overflows(folder: str) -> dict[str, Any]:
    """One rank's loss is infinite in the second of three steps; return scales, skipped steps, and what ranks hold."""
    made, found = meshes(), {}
    for name, engine in itertools.product(("fp16-storage", "fp8", "flex16+5"), ("fully_shard", "HSDP", "both")):
        if (name, engine) == ("flex16+5", "both"):
            continue
        options = {"loss_scale": "dynamic(1024)"} if name == "fp16-storage" else {}
        model, precision = network(), lowp.Precision(name, **options)
        precision.prepare_model(model)
        call = wrapped(model, engine, *made)
        optimizer = precision.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        weights = []
        for step in range(3):
            optimizer.zero_grad()
            with precision.autocast():
                loss = call(torch.ones(8, 32)).float().square().mean()
            bad = step == 1 and torch.distributed.get_rank() >= RANKS - 2  # the two of a tensor that both hold
            precision.backward(loss * (math.inf if bad else 1.0))
            precision.step(optimizer)
            weights.append([_whole(one).clone() for one in model.parameters()])
        moved = [not all(map(torch.equal, *pair)) for pair in itertools.pairwise(weights)]
        found[f"{name}, {engine}"] = moved, precision.scale, precision.skipped_steps, weights[-1]
    return found


def places(folder: str) -> list[str]:
    """Return the parameters whose parts do not lie where numbers that count the whole do, cut alike."""
    made, other = meshes(), []
    for engine in [one for one in AGREES if one != "pipeline"]:
        for name, one in wrapped(network(), engine, *made).named_parameters():
            wanted = local(shard_of(torch.arange(one.numel()).view(one.shape), one)).reshape(-1)
            found = places_of(one)
            found = torch.arange(found, found + wanted.numel()) if isinstance(found, int) else found
            other += [] if torch.equal(found, wanted) else [f"{engine}, {name}"]
    return other


# -- a pipeline -------------------------------------------------------------------------------------------------------
class Stage(nn.Module):
    """The layers of one rank, by the names that they have in the whole."""

    def __init__(self, model: nn.Sequential, names: list[str]) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, model[int(name)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def _distance(y: Tensor, target: Tensor) -> Tensor:
    return (y.float() - target).square().mean()


def piped(name: str) -> Any:
    """Train four stages with micro-batches, and a whole model that accumulates them; return this rank's weights."""
    rank, options = torch.distributed.get_rank(), {}
    if lowp.Precision(name).preset.loss_scale.kind != "none":
        options = {"loss_scale": "dynamic(1024)"}
    # where torch must find shapes it runs the stages on memory that holds anything, whose exponents would be shared
    shapes = torch.empty(4, 32, requires_grad=rank > 0), torch.empty(4, 32, requires_grad=True)
    x, target = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1))
    found = []
    for is_piped in (False, True):
        torch.manual_seed(0)
        layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.Tanh())))
        mine = [str(2 * rank), str(2 * rank + 1)]
        model = Stage(layers, mine) if is_piped else layers
        precision = lowp.Precision(name, **options)
        model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        if is_piped:
            schedule = ScheduleGPipe(
                PipelineStage(model, rank, RANKS, torch.device("cpu"), *(shapes if name == "flex16+5" else ())),
                4,
                loss_fn=lambda y, target, precision=precision: precision.scaler.scale(_distance(y, target)),
            )
        for _ in range(STEPS):
            optimizer.zero_grad()
            if is_piped:
                given = {0: (x,)}.get(rank, ())
                with precision.autocast():
                    schedule.step(*given, target=target if rank == RANKS - 1 else None)
                precision.scaler.scale(torch.ones(()))  # ranks without a loss step with a scaler, too
            for part, goal in zip(x.chunk(4), target.chunk(4), strict=True) if not is_piped else ():
                with precision.autocast():
                    loss = _distance(model(part), goal)
                precision.backward(loss / 4)
            precision.step(optimizer)
        state = model.state_dict()
        found.append(([], [state[f"{mine[0]}.{kind}"] for kind in ("weight", "bias")]))
    return found


# -- a test each ------------------------------------------------------------------------------------------------------
def _run(jobs: tuple[Callable[..., Any], ...], folder: Path, count: int = RANKS) -> list[dict[str, Any]]:
    """Run jobs in new processes; return the results of each rank."""
    forked.ranks(work, ({job.__name__: job for job in jobs}, str(folder), count), count)
    found = [torch.load(folder / f"{rank}.pt") for rank in range(count)]
    for one in found:
        for result in one.values():
            assert not (isinstance(result, str) and result.startswith("Traceback")), result
    return found


JOBS = (agreement_of_a_sample, batches_of_their_own, overflows, places)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[..., Any]], list[Any]]:
    """Run all short jobs once, and return the results of each rank."""
    found = _run(JOBS, tmp_path_factory.mktemp("ranks"))
    return lambda job: [one[job.__name__] for one in found]


def check(found: dict[str, dict[str, Any]]) -> None:
    for engine, by_name in found.items():
        for name, value in by_name.items():
            expected, place = AGREES[engine].get(name, "bits"), f"{engine}, {name}: {value}"
            if expected == "bits":
                assert value == "bits", place
            elif expected == "refused":
                assert "for tensor parallelism use dfp16" in value, place
            else:
                assert value == "bits" or value <= expected, place


def test_engines_train_as_one_process_does(result: Any) -> None:
    for found in result(agreement_of_a_sample):
        check(found)


def test_ranks_with_batches_of_their_own_train_as_one_process_that_accumulates_them(result: Any) -> None:
    for found in result(batches_of_their_own):
        for name, apart in found.items():
            assert apart < (1e-5 if name == "e5m7" else 1e-2), (name, apart)


def test_parts_are_found_in_the_whole_however_engines_cut_it(result: Any) -> None:
    assert result(places) == [[]] * RANKS


def test_all_ranks_skip_the_step_in_which_one_overflows(result: Any) -> None:
    first, *others = result(overflows)
    for name, (moved, scale, skipped, weights) in first.items():
        assert (moved, skipped) == ([False, True], 1), name
        assert scale == (512.0 if name.startswith("fp16") else 1.0), name
        for other in others:
            assert other[name][:3] == (moved, scale, skipped), name
            assert all(map(torch.equal, weights, other[name][3])), name


def table() -> str:
    """Return the rows of docs/ranks.md: precisions that agree alike, and how they do in each engine."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in PRECISIONS:
        cells = [AGREES[engine].get(name, "bits") for engine in AGREES]
        alike.setdefault(tuple(one if isinstance(one, str) else f"{one:g}" for one in cells), []).append(f"`{name}`")
    head = ["precision", *AGREES]
    rows = [head, ["---"] * len(head), *([", ".join(names), *cells] for cells, names in alike.items())]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def test_the_page_on_ranks_shows_how_each_precision_agrees_in_each_engine(repository: Path) -> None:
    page = (repository / "docs" / "ranks.md").read_text()
    assert table() in page, f"docs/ranks.md must have this table:\n{table()}"


@pytest.mark.slow
def test_engines_train_as_one_process_does_in_every_precision(tmp_path: Path) -> None:
    for one in _run((agreement_of_all,), tmp_path):
        check(one["agreement_of_all"])
