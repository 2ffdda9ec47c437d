"""Records of the metric by epoch in several precisions with several seeds."""

from collections.abc import Sequence
from typing import Any

from lowp.recipes import results
from lowp.recipes.comparison import Study, variants_of
from lowp.recipes.recording.runs import NOBODY, Onlooker
from lowp.recipes.training import Settings


def record_curves(
    settings: Settings, precisions: Sequence[str], seeds: int, onlooker: Onlooker = NOBODY
) -> dict[str, Any]:
    """Train in fp32 and in each precision with seeds from 0 to `seeds` - 1; return the document of a comparison.

    Flushed gradients and lost updates are not sampled.
    """
    study = Study(variants_of(settings, precisions), range(seeds), samples=0)
    study.command = results.command_line()
    for _ in study.run(onlooker.on_progress, stop=onlooker.stop):
        pass
    return study.document()
