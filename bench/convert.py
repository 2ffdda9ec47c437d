"""Measure what `lowp convert` takes of memory: a checkpoint in shards, made here, in other formats.

Run: `python bench/convert.py [--gibibytes 2] [--tensor 64] [--shards 4] [--formats bf16,int8,int4]`.

Each conversion is a process of its own; beside its largest resident memory stands that of one that converts a
checkpoint of one small tensor: the difference is what the conversion needs. A file's memory, mapped, counts too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

CHILD = """
import sys, time, lowp.portable
begun = time.perf_counter()
lowp.portable.convert(sys.argv[1], sys.argv[2], sys.argv[3])
# not ru_maxrss, which a process takes over from the one that began it
(line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(line.split()[1], time.perf_counter() - begun)
"""


def write_shards(folder: Path, shards: int, tensors: int, mebibytes: int) -> None:
    """A checkpoint of fp32 tensors [rows, 1024] in shards with an index; the same noise in each."""
    from safetensors.torch import save_file  # type: ignore[import-not-found, unused-ignore]

    folder.mkdir()
    noise, weight_map = torch.randn(mebibytes * 256, 1024), {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        names = [f"layers.{one}.weight" for one in range(shard, tensors, shards)]
        save_file({one: noise.clone() for one in names}, folder / name)
        weight_map.update(dict.fromkeys(names, name))
    index = {"metadata": {"total_size": tensors * noise.nbytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def peak(source: Path, target: Path, format: str) -> tuple[float, float]:
    """MiB of the largest resident memory of a conversion, and its seconds; Linux alone tells the former."""
    command = [sys.executable, "-c", CHILD, str(source), str(target), format]
    size, seconds = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return int(size) / 1024, float(seconds)


def copied(source: Path, target: Path) -> float:
    """Seconds of reading all files of a folder and writing their bytes to one, down to the disk: what a disk takes."""
    begun = time.perf_counter()
    with target.open("wb") as out:
        for one in sorted(source.iterdir()):
            with one.open("rb") as file:
                shutil.copyfileobj(file, out, 1 << 22)
        out.flush()
        os.fsync(out.fileno())
    target.unlink()
    return time.perf_counter() - begun


def main() -> None:
    """Print a line a format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gibibytes", type=float, default=2)
    parser.add_argument("--tensor", type=int, default=64, help="MiB of one tensor")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--formats", default="bf16,int8,int4")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tensors = max(arguments.shards, round(arguments.gibibytes * 1024 / arguments.tensor))
        write_shards(folder / "small", 1, 1, 1)
        write_shards(folder / "large", arguments.shards, tensors, arguments.tensor)
        print(f"{tensors} tensors of {arguments.tensor} MiB in {arguments.shards} shards")
        print(f"a copy of it: {copied(folder / 'large', folder / 'copy'):.1f} s")
        for format in arguments.formats.split(","):
            least, _ = peak(folder / "small", folder / f"small-{format}.safetensors", format)
            most, seconds = peak(folder / "large", folder / f"large-{format}.safetensors", format)
            (folder / f"large-{format}.safetensors").unlink()
            more = most - least
            print(f"{format:8} {most:6.0f} MiB at most, {more:6.0f} more than for one MiB; {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
