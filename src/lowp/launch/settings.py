"""What the environment says of a run: LOWP_PRECISION alone, or with LOWP_RUN, which `lowp run` sets beside it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from lowp.errors import InvalidInput

__all__ = ["PRECISION", "RUN", "Settings"]

PRECISION = "LOWP_PRECISION"
RUN = "LOWP_RUN"


@dataclass(frozen=True)
class Settings:
    """How the scripts of one `lowp run`, and the processes they start, are to train.

    `directory` is where each process leaves its record for process `leader`, which tells of them all at its end; the
    first one that does makes it. Both are empty where the environment was set by hand, and each process that trained
    then tells of itself.
    """

    precision: str
    loss_scale: str = ""
    strict: bool = False
    override: bool = False
    report: str = ""
    directory: str = ""
    leader: int = 0
    started: float = field(default_factory=time.time)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings | None:
        """Return what the environment asks for, None where it asks for nothing; InvalidInput where it is damaged."""
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
