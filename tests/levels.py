"""The products of inference at each of the C++ library's instruction sets."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lowp.kernels import cpu


@contextmanager
def at_level(level: int | None) -> Iterator[None]:
    """Run them with the instruction set of this place in `cpu.INSTRUCTION_SETS`, -1 the best; None changes nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if level is not None:
            patch.setattr(cpu, "level", lambda: level)
        yield
