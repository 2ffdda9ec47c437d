"""What an optimizer's step writes on a CPU, in one call of the C++ library before it and one after it."""

from collections.abc import Container, Sequence

from torch import Tensor

from lowp.casts import Cast
from lowp.exponents.shared import SharedExponents
from lowp.exponents.sites import features_axis, is_of_optimizer
from lowp.exponents.table import ExponentTable
from lowp.kernels.int16 import entries, low_words
from lowp.kernels.int16.cpu_int16 import memory_of


class StepWriter:
    """Holds weights before an optimizer's step; after it writes update, weight and what the optimizer keeps.

    Whatever `SharedExponents.write` has to see is left out: on other devices, at a second write of a step, of weights
    whose sites have not begun, and gradients that may need a second word. `sites` are those of update and weight.
    """

    def __init__(
        self, exponents: SharedExponents, cast: Cast, weights: Sequence[Tensor], sites: Sequence[tuple[str, str]]
    ) -> None:
        table = exponents.table(cast)
        self._table = table if table is not None and table.is_quick else None
        self._held = None if self._table is None else _held(self._table, weights, sites)
        self.weights: Sequence[Tensor] = () if self._held is None else self._held.weights  # those that are held

    def end(
        self, tensors: Sequence[Tensor], sites: Sequence[str], squares: Container[int]
    ) -> tuple[dict[Tensor, Tensor], list[int]]:
        """Write tensors at their sites, in place, and the weights; return those that are left to `write`.

        Of weights that have moved to other memory, with their values before the step; of tensors, their places. Of
        means of squares, at the places `squares`, the root is written: see `FlexWeights`.
        """
        table, held, before = self._table, self._held, dict[Tensor, Tensor]()
        if table is None:
            return before, list(range(len(tensors)))
        if held is not None and held.have_moved():
            before, held = dict(zip(held.weights, held.before, strict=True)), None
        given, rest = _chosen(table, tensors, sites, squares) if tensors else ([], [])
        if given or held is not None:
            table.written |= dict.fromkeys(entries.write_in_place(table.block, table.cast, given, held), True)
        return before, rest


def _held(table: ExponentTable, weights: Sequence[Tensor], sites: Sequence[tuple[str, str]]) -> entries.Steps | None:
    """Return the steps to come of weights; None if there are none."""
    ready, places, are_direct = list[Tensor](), list[int](), memory_of(*weights) is not None
    for weight, (update_site, site) in zip(weights, sites, strict=True):
        update, own = table.names.get(update_site), table.names.get(site)
        if update is None or own is None or update in table.written or own in table.written:
            continue
        if are_direct or memory_of(weight) is not None:
            ready.append(weight)
            places += (update, own)
    if len(set(places)) < len(places):  # two parameters of one name
        return None
    found = entries.Steps(table.block, ready, places) if ready else None
    return found if found is not None and found.weights else None


def _chosen(
    table: ExponentTable, tensors: Sequence[Tensor], sites: Sequence[str], squares: Container[int]
) -> tuple[list[tuple[Tensor, int, int]], list[int]]:
    """Return tensors with their entries, and how each is written, and the places of the rest."""
    guess = table.scaling.guess
    is_near = -100 <= guess.min_exponent and guess.max_exponent <= 100  # units are normal numbers of fp32
    if not is_near or len(set(sites)) < len(sites):
        return [], list(range(len(tensors)))
    if not table.written.keys().isdisjoint(map(table.names.get, sites)):  # not for the first time in a step
        return [], list(range(len(tensors)))
    are_direct, given, rest = memory_of(*tensors) is not None, [], []
    for place, (x, site) in enumerate(zip(tensors, sites, strict=True)):
        how: int | None = entries.ROOTS if place in squares else entries.VALUES
        if features_axis(site, x) is not None:
            is_two = how == entries.VALUES and is_of_optimizer(site) and low_words.has_low_word(table.cast)
            how = entries.TWO_WORDS if is_two else None
        index = table.names.get(site)
        if index is None:  # of the rest, too: entries are in the order of sites
            index = table.index(site)
        if how is None or not (are_direct or memory_of(x) is not None):
            rest.append(place)
        else:
            given.append((x, index, how))
    return given, rest
