"""`lowp profile script.py`: the first model that an unmodified script trains is watched, in its own process."""

from __future__ import annotations

import atexit
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowp.errors import InvalidInput, LowpError
from lowp.launch.settings import PRECISION

__all__ = ["PROFILE", "profile_script", "start"]

PROFILE = "LOWP_PROFILE"


def profile_script(script: Sequence[str], max_overhead: str, out: Path | None) -> tuple[int, Path]:
    """Run a script as Python would, under the profiler; return its exit code and the file of the record.

    Raises InvalidInput where there is no such script.
    """
    if script[0] != "-m" and not os.path.exists(script[0]):
        raise InvalidInput(f"there is no script {script[0]!r} here ({os.getcwd()})")
    if list(script) == ["-m"]:
        raise InvalidInput("-m needs the name of a module: lowp profile -m package.train")
    path = Path(tempfile.gettempdir()) / f"lowp-profile-{secrets.token_hex(8)}.json" if out is None else out.resolve()
    if path.exists():
        path.unlink()  # what is there afterwards is of this run
    site = str(Path(__file__).resolve().parent / "site")
    paths = [site, os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        PRECISION: "fp32",
        PROFILE: json.dumps({"out": str(path), "max_overhead": max_overhead, "title": " ".join(script)}),
        "PYTHONPATH": os.pathsep.join(one for one in paths if one),
    }
    sys.stdout.flush()
    return subprocess.call([sys.executable, *script], env=environment), path


def start() -> None:
    """Begin in this process, where torch has just been imported: wait for the first model that is trained."""
    settings = json.loads(os.environ[PROFILE])
    if int(os.environ.get("RANK", 0)):
        return  # of several ranks, the first is watched
    from torch.nn.modules.module import register_module_forward_pre_hook

    from lowp.numerics.profiler import Profiler

    def first(module: Any, args: Any) -> None:
        import torch

        trains = module.training and torch.is_grad_enabled()
        if not trains or not any(one.requires_grad for one in module.parameters()):
            return
        handle.remove()
        profiler = Profiler(module, out=settings["out"], max_overhead=settings["max_overhead"], title=settings["title"])
        profiler.__enter__()
        profiler.begin_within(module, args)
        atexit.register(_end, profiler, os.getpid())

    handle = register_module_forward_pre_hook(first)


def _end(profiler: Any, process: int) -> None:
    if os.getpid() != process:
        return
    try:
        profiler.__exit__(None, None, None)
    except LowpError as error:
        print(f"lowp profile: {error}", file=sys.stderr)
