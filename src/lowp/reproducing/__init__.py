"""Training whose bits depend neither on the processor's instructions nor on the number of threads."""

from lowp.reproducing.mode import Reproducible, reproducible

__all__ = ["Reproducible", "reproducible"]
