"""Train recipes on several ranks with gradients in few bits; or print a model of the time that an exchange takes.

    python bench/exchange.py [--json bench/results/exchange.json] [--steps 60]
    python bench/exchange.py --model [--parameters 1e9] [--latency 5e-6] [--casts 1e10]

The first trains the GPT and ResNet-20 recipes on 2 and on 4 ranks, over gloo, under DistributedDataParallel: the same
batches for every way and every number of ranks, each rank a share of them, at a fifth of the recipe's learning rate.
`loss` is the mean over the last fifth of the steps, `sent` the bytes a step that a rank sends, `share` those of what it
would send in fp32.

The second prints a MODEL, not a measurement: seconds to average the gradients once, for 8 to 10,000 ranks, by the
bandwidth of a rank's link. A rank sends (R-1)/R of its gradients twice, and 2 (R-1) messages of a fixed latency, in
fp32 as in few bits; bytes are counted on parts of the size that R ranks have. Casts read and write `--casts` bytes a
second: 3 numbers for each that is sent once. Sends and casts do not overlap, and no link is shared.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel

import lowp
from lowp.recipes import get, results

NAMES, WORLDS, BATCH = ("gpt", "resnet-20"), (2, 4), 32
SLOWER = 5  # steps without a warm-up, at the recipe's rate, depend on any last bit
# way -> the cast, and whether what rounding takes is fed back
WAYS: dict[str, tuple[str | None, bool]] = {
    "fp32": (None, False),
    "bf16": ("bf16", False),
    "mxfp8": ("mxfp8", False),
    "mxfp8, fed back": ("mxfp8", True),
    "int8:stochastic": ("int8:stochastic", False),
    "int8, fed back": ("int8", True),
}
RANKS, LINKS = (8, 64, 512, 4096, 10_000), (1, 10, 100, 400)  # ranks; Gbit/s
ROW = 1024  # numbers under the scale of a row, as lowp.GradientCompression has them


def trained(name: str, way: str, steps: int) -> dict[str, float]:
    """Train a recipe on this rank's share of every batch; return the loss and the bytes of a step."""
    recipe, (cast, is_fed_back) = get(name), WAYS[way]
    size = recipe.size("cpu")
    torch.manual_seed(0)
    data, model = recipe.load(size, None).training, recipe.make_model(size)
    optimizer = recipe.make_optimizer(model, size.learning_rate / SLOWER)
    wrapped = DistributedDataParallel(model)
    sent = None if cast is None else lowp.GradientCompression(cast, error_feedback=is_fed_back).attach(wrapped)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        indices = torch.randint(len(data), (BATCH,), generator=generator)
        optimizer.zero_grad()
        loss = recipe.loss(wrapped, data.batch(indices.chunk(ranks)[rank]))
        loss.backward()
        if recipe.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        losses.append(loss.detach())
    last = torch.stack(losses[-math.ceil(steps / 5) :]).mean()
    torch.distributed.all_reduce(last)
    count = sum(one.numel() for one in model.parameters())
    whole = 2 * 4 * count * (ranks - 1) // ranks
    bytes_sent = whole if sent is None else sent.bytes_sent / steps
    share = 1.0 if sent is None else sent.bytes_sent / sent.bytes_in_fp32
    return {"loss": last.item() / ranks, "sent": bytes_sent, "share": share}


def work(rank: int, ranks: int, folder: str, steps: int, names: tuple[str, ...] = NAMES) -> None:
    """Act as one of the ranks: train the recipes in every way."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store {ranks}", ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    found = {name: {way: trained(name, way, steps) for way in WAYS} for name in names}
    torch.distributed.destroy_process_group()
    if rank == 0:
        Path(folder, f"{ranks}.json").write_text(json.dumps(found))


def measured(steps: int) -> dict[str, Any]:
    """Return what every recipe has come to on every number of ranks in every way."""
    found: dict[str, Any] = {name: {} for name in NAMES}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in WORLDS:
            start_processes(work, (ranks, folder, steps), ranks, start_method="spawn")
            for name, ways in json.loads(Path(folder, f"{ranks}.json").read_text()).items():
                found[name][str(ranks)] = ways
    return found


# -- the model --------------------------------------------------------------------------------------------------------
def bytes_of(cast: str | None, count: int) -> float:
    """Return the bytes of one part of `count` numbers."""
    if cast is None:
        return 4.0 * count
    rows = max(math.ceil(count / ROW), 1)
    few = min(rows, 64)  # parts of more rows are as large in proportion
    codes = lowp.encode(torch.zeros(few, math.ceil(count / rows)), cast, packed=True)
    return codes.nbytes / few * rows


def modelled(cast: str | None, parameters: float, ranks: int, gigabits: float, latency: float, casts: float) -> float:
    """Return the seconds that the model gives for averaging gradients once."""
    count = math.ceil(parameters / ranks)
    sending = 2 * (ranks - 1) * (latency + bytes_of(cast, count) / (gigabits * 1e9 / 8))
    return sending + (0.0 if cast is None else 3 * 4 * parameters / casts)


def print_model(parameters: float, latency: float, casts: float) -> None:
    print("MODEL, not a measurement: seconds to average the gradients of a step once")
    print(f"{parameters:,.0f} parameters, {latency:g} s a message, casts at {casts:,.0f} bytes a second")
    print(f"{'ranks':>8}{'Gbit/s':>9}" + "".join(f"{name:>12}" for name in ("fp32", "bf16", "mxfp8", "int8")))
    for ranks in RANKS:
        for link in LINKS:
            ways = [modelled(one, parameters, ranks, link, latency, casts) for one in (None, "bf16", "mxfp8", "int8")]
            print(f"{ranks:>8,}{link:>9}" + "".join(f"{seconds:>12.3f}" for seconds in ways))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="store_true", help="print the model of time against bandwidth")
    parser.add_argument("--parameters", type=float, default=1e9, help="of the model (default: 1e9)")
    parser.add_argument("--latency", type=float, default=5e-6, help="seconds a message (default: 5e-6)")
    parser.add_argument("--casts", type=float, default=1e10, help="bytes a second that casts take (default: 1e10)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.model:
        print_model(given.parameters, given.latency, given.casts)
        return
    found = measured(given.steps)
    for name, worlds in found.items():
        for ranks, ways in worlds.items():
            for way, row in ways.items():
                print(f"{name:10} {ranks} ranks {way:16} loss {row['loss']:.4f}  share {row['share']:.3f}")
    if given.json is not None:
        document = {**results.header("bench-exchange"), "steps": given.steps, "batch": BATCH, "results": found}
        results.write(given.json, document)


if __name__ == "__main__":
    main()
