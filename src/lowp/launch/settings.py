"""A run's settings in the environment: LOWP_PRECISION alone, or with LOWP_RUN, which `lowp run` sets too."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from lowp.errors import InvalidInput

PRECISION = "LOWP_PRECISION"
RUN = "LOWP_RUN"


@dataclass(frozen=True)
class RunSettings:
    """How the scripts of one `lowp run`, and the processes they start, train.

    Each process leaves its record in `directory` for process `leader`, which reports on all of them at its end. The
    first process that leaves a record creates the directory. Both are empty if the environment was set by hand; then
    each process that trained reports on itself.
    """

    precision: str
    loss_scale: str = ""
    strict: bool = False
    override: bool = False
    report: str = ""
    monitor: str | None = None  # the file of a monitor, "" for one without a file, None for none
    directory: str = ""
    leader: int = 0
    started: float = field(default_factory=time.time)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> RunSettings | None:
        """Return the settings of an environment, None if it has none. Raises InvalidInput if they are damaged."""
        precision = environment.get(PRECISION, "").strip()
        if not precision:
            return None
        text = environment.get(RUN, "")
        try:
            given = json.loads(text) if text else {}
            return cls(**{**given, "precision": precision})
        except (ValueError, TypeError):
            raise InvalidInput(
                f"{RUN} is set by `lowp run` for the processes that it starts, and {text[:80]!r} was not set by it: "
                f"unset {RUN}; {PRECISION} sets the precision"
            ) from None

    def to_environment(self) -> dict[str, str]:
        """Return the two variables."""
        given = asdict(self)
        return {PRECISION: given.pop("precision"), RUN: json.dumps(given)}
