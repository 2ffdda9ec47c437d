"""One look at a tensor: its numbers are counted, and its print is taken, by which two runs are compared."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lowp.kernels.steps.spectra import count_tensor, numbers_at
from lowp.numerics.modes import numbers_of, untransformed
from lowp.numerics.part import Key, Print
from lowp.numerics.spectrum import Spectrum

_PROBES = 4  # numbers of a print


def parameter_key(name: str, role: str, phase: str) -> Key:
    """The key of a parameter: its module, and its own name in place of an op's."""
    module, _, own = name.rpartition(".")
    return Key(module, own, role, phase)


class CountedTensor(NamedTuple):
    """What one look at a tensor told."""

    spectrum: Spectrum
    print: Print

    def of_model(self, name: str) -> CountedTensor:
        """The same with a model's name before the path."""
        return self._replace(print=self.print._replace(key=self.print.key.of_model(name)))


def looked_at(key: Key, tensor: Tensor, scale: float = 1.0) -> CountedTensor:
    """Count a tensor divided by `scale`, in one read, and take its print: the sum of its bits, and a few numbers."""
    with untransformed(tensor) as whole:
        flat = numbers_of(whole.detach()).reshape(-1)
        counts, last = count_tensor(flat, scale), flat.numel() - 1
        numbers: list[float] = []
        if last >= 0:
            numbers = numbers_at(flat, [last * place // (_PROBES - 1) for place in range(_PROBES)], scale)
    return CountedTensor(Spectrum.from_counts(counts, last + 1), Print(key, counts.checksum, tuple(numbers)))
