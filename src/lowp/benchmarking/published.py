"""Published measurements of torch.amp on GPUs for three of the recipes, for comparison with one's own."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

SOURCE = (
    "A. Bilogur's guide to mixed precision training, June 2020 (PyTorch 1.6 nightly; whole trainings, fp32 and "
    "torch.amp fp16; memory as reserved)"
)


@dataclass(frozen=True)
class PublishedRun:
    """One network on one GPU: seconds of a whole training and gigabytes of memory, in fp32 and under torch.amp."""

    gpu: str
    seconds: tuple[float, float]
    gigabytes: tuple[float, float]

    @property
    def time_ratio(self) -> float:
        """The ratio of the time under torch.amp to that in fp32."""
        return self.seconds[1] / self.seconds[0]

    @property
    def memory_ratio(self) -> float:
        """The ratio of the memory under torch.amp to that in fp32."""
        return self.gigabytes[1] / self.gigabytes[0]


def _time(minutes: int, seconds: int) -> float:
    return 60.0 * minutes + seconds


_ROWS: dict[str, tuple[PublishedRun, ...]] = {
    "rossmann": (
        PublishedRun("V100", (_time(10, 10), _time(10, 55)), (1.19, 1.19)),
        PublishedRun("T4", (_time(8, 43), _time(8, 39)), (0.932, 0.936)),
    ),
    "unet": (
        PublishedRun("V100", (_time(8, 25), _time(7, 58)), (4.33, 3.71)),
        PublishedRun("T4", (_time(13, 7), _time(9, 14)), (4.26, 2.67)),
    ),
    "bert": (
        PublishedRun("V100", (_time(17, 38), _time(8, 10)), (9.62, 8.76)),
        PublishedRun("T4", (_time(55, 17), _time(20, 27)), (9.35, 8.49)),
    ),
}


def published(recipe: str) -> dict[str, Any] | None:
    """Return the published figures of a recipe as plain values with their source; None for other recipes."""
    if recipe not in _ROWS:
        return None
    rows = [{**asdict(row), "time_ratio": row.time_ratio, "memory_ratio": row.memory_ratio} for row in _ROWS[recipe]]
    return {"source": SOURCE, "size": "full", "gpus": rows}
