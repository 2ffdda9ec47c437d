"""Measure the memory of `lowp convert` on a sharded checkpoint, which is created first, in several formats.

Run: `python bench/convert.py [--gibibytes 2] [--tensor 64] [--shards 4] [--formats bf16,int8,int4]`.

Each conversion runs in its own process. Its peak resident memory is printed with the difference to that of a process
which converts a checkpoint of one small tensor. Mapped memory of files is included.
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
    """Write a checkpoint of fp32 tensors [rows, 1024] in shards with an index; all contain the same noise."""
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
    """Return the peak resident memory of a conversion in MiB, which needs Linux, and its time in seconds."""
    command = [sys.executable, "-c", CHILD, str(source), str(target), format]
    size, seconds = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return int(size) / 1024, float(seconds)


def copied(source: Path, target: Path) -> float:
    """Return the time in seconds to read all files of a folder and write their bytes to one file on the disk."""
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
    """Print a line per format."""
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
            print(f"{format:8} peak {most:6.0f} MiB, {more:6.0f} more than for one MiB; {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
