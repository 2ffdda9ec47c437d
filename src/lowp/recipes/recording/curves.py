"""Error by epoch in several precisions with several seeds: a comparison without further measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowp.recipes import results
from lowp.recipes.comparison import Study, variants_of
from lowp.recipes.recording.runs import Stop, Told
from lowp.recipes.training import Settings

__all__ = ["record_curves"]


def record_curves(
    settings: Settings,
    precisions: Sequence[str],
    seeds: int,
    *,
    stop: Stop = lambda: False,
    told: Told = lambda name, epoch: None,
) -> dict[str, Any]:
    """Train in fp32 and each of the precisions with each seed from 0 on; return the document of a comparison."""
    study = Study(variants_of(settings, precisions), range(seeds), samples=0)
    study.command = results.command_line()
    for _ in study.run(told, stop=stop):
        pass
    return study.document()
