"""The storage of parameters, and of all that their optimizer's step writes, as int16 under shared exponents."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lowp import distributed
from lowp.casts import Cast
from lowp.compat import widest_float
from lowp.exponents import SharedExponents, largest
from lowp.formats import PowerOfTwo, ScaledFormat
from lowp.kernels.int16 import payloads
from lowp.kernels.int16.mantissas import int16_element
from lowp.ops.observing import everywhere, step
from lowp.optim.shards import local
from lowp.optim.storage import Storage
from lowp.scaling.powers import times

_MOST_SITES = 1 << 15  # that are kept in memory: their names are asked for at every step


class Site(NamedTuple):
    """One tensor that a step writes: its role for observers, the name of its exponent, and that of the parameter."""

    role: str
    text: str  # such as ``weight of 0.bias``
    name: str


@lru_cache(_MOST_SITES)
def site_of(role: str, part: str, name: str) -> Site:
    """Return the site of a part, such as a moment, of what a parameter has."""
    return Site(role, f"{part} of {name}", name)


weight_of, gradient_of = partial(site_of, "weight", "weight"), partial(site_of, "weight gradient", "gradient")
update_of, buffer_of = partial(site_of, "update", "update"), partial(site_of, "buffer", "buffer")


@dataclass(frozen=True, eq=False)
class UnderExponents(Storage):
    """Nothing is kept: parameters are fp32 tensors of values of the format, each under the exponent of its site.

    A step is written by `write_steps`, since an update has an exponent of its own, of which the weight is the sum.
    `names` are those of the parameters. `groups` are the ranks over which some are sharded: all of them make the same
    calls, since an exponent belongs to the whole; without any, shards are wholes.
    """

    cast: Cast
    exponents: SharedExponents
    names: dict[Tensor, str]
    groups: Sequence[Any] = ()
    has_kernels: ClassVar[bool] = False
    _is_rounded: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Its formats are not those of `Storage`."""

    def adopt(self, parameter: Tensor, state: dict[str, Tensor]) -> None:
        self.write_in_place(local(parameter.detach()), weight_of(self.names[parameter]))

    def set(self, parameter: Tensor, state: Mapping[str, Tensor], value: Tensor) -> None:
        here, site = local(parameter.detach()), weight_of(self.names[parameter])
        here.copy_(value.detach().view(here.shape))
        self.admit([here], [site.text])
        self.begin([here], [site])
        self.write_in_place(here, site, unless_exact=True)

    # -- what a step writes ---------------------------------------------------------------------------------------
    def write(self, x: Tensor, site: Site, unless_exact: bool = False) -> Tensor:
        """Return the values that are written of a tensor at a site; itself if it is exact, and if that is asked for."""
        if everywhere:
            self._tell(x, site)
        return self.exponents.write(x, self.cast, site.text, unless_exact=unless_exact).values

    def write_in_place(self, x: Tensor, site: Site, unless_exact: bool = False) -> None:
        """Write a tensor in its own memory."""
        if (result := self.write(x, site, unless_exact)) is not x:
            x.copy_(result)

    def write_gradients(self, given: Sequence[tuple[Tensor, Site]]) -> None:
        """Write the gradients of which not all, on any rank, is in the format; the others are only shown."""
        tensors = [gradient for gradient, _ in given]
        are_exact = self.are_exact(tensors) if self.groups else payloads.are_exact(tensors, self.cast)
        pairs = list(zip(given, are_exact, strict=True))
        if self.groups:
            written = [one for one, is_exact in pairs if not is_exact]
            self.begin([gradient for gradient, _ in written], [site for _, site in written])
        for (gradient, site), is_exact in pairs:
            if not is_exact or gradient.dtype is not torch.float32:
                self.write_in_place(gradient, site, unless_exact=not self.groups or bool(is_exact))
            elif everywhere:
                self._tell(gradient, site)

    def write_steps(self, before: Mapping[Tensor, Tensor], names: Mapping[Tensor, str]) -> None:
        """Write what a step has changed of each parameter, and then each as the sum of what it was and its update."""
        coming = list[tuple[Tensor, Tensor, Site]]()
        for parameter, old in before.items():
            wide, moved = widest_float(parameter.device), update_of(names[parameter])
            change = parameter.to(wide) - old.to(wide)
            self.begin([change], [moved])
            new = old.to(wide) + self.write(change, moved).to(wide)
            coming.append((parameter, new, weight_of(names[parameter])))
        if (table := self.exponents.table(self.cast)) is not None:
            table.admit(list(before.values()), [site.text for *_, site in coming])
        for parameter, new, site in coming:
            self.begin([new], [site])
            parameter.copy_(self.write(new, site))

    def write_square_in_place(self, x: Tensor, site: Site, skip: Tensor | None) -> None:
        """Write a non-negative x as squares of values of the format; nonzero elements stay nonzero.

        Squares span twice as many binary places as gradients, more than 15. Written directly, most would become zero,
        and a quotient by their root would be unbounded. The root spans no more than the gradients. A nonzero root below
        half a unit becomes one unit: the denominator of a small gradient may be too large but is never zero. Where
        `skip` is set nothing changes.
        """
        root = x.to(widest_float(x.device)).sqrt()
        self.begin([root], [site])
        self._tell(root, site)
        rounded, exponent, _ = self.exponents.write(root, self.cast, site.text)
        assert exponent is not None  # of a write that is noted
        unit = times(torch.ones((), dtype=torch.float32, device=exponent.device), exponent)
        squares = torch.where((root > 0) & (rounded == 0), unit, rounded).square()
        x.copy_(squares if skip is None else torch.where(skip, x, squares))

    def _tell(self, x: Tensor, site: Site) -> None:
        if (watch := step(site.name)) is not None:
            watch(x, site.role, self.cast, "step")

    # -- wholes of shards -----------------------------------------------------------------------------------------
    def begin(self, shards: Sequence[Tensor], sites: Sequence[Site]) -> None:
        """Let sites that are written first begin with the exponents of wholes. All ranks know which sites these are."""
        if self.groups and (table := self.exponents.table(self.cast)) is not None:
            new = [place for place, site in enumerate(sites) if not table.has_begun(site.text)]
            for place, maximum in zip(new, self._maxima([shards[place] for place in new]), strict=True):
                table.begin(maximum, table.place(sites[place].text))

    def admit(self, shards: Sequence[Tensor], sites: Sequence[str]) -> None:
        """Restart sites whose exponents do not hold what stands in wholes, as `ExponentTable.admit`."""
        maxima = self._maxima(shards) if self.groups else shards
        if (table := self.exponents.table(self.cast)) is not None:
            table.admit(maxima, sites)

    def are_exact(self, shards: Sequence[Tensor]) -> list[bool]:
        """Return whether every element of each whole is in the format under one exponent.

        That is the exponent of its maximum, or the one below, under which the maximum may be the mantissa -32768.
        """
        given = list(zip(shards, self._maxima(shards), strict=True))
        missed = [
            [
                not payloads.is_exact(torch.cat([x.reshape(-1).to(end.dtype), end]), self.cast),
                not _is_exact_below(x, float(end), self.cast),
            ]
            for x, end in given
        ]
        return [not all(one) for one in self._agreed(torch.tensor(missed, dtype=torch.float32, device="cpu")).tolist()]

    def _maxima(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return the largest finite |x| of each whole, in tensors of one element on the devices of the shards."""
        if not shards:
            return []
        maxima = torch.stack([largest(x, False).float() for x in shards])
        return [one.reshape(1) for one in self._agreed(maxima)]

    def _agreed(self, values: Tensor) -> Tensor:
        for group in self.groups:
            distributed.agree_on_maximum_(values, group)
        return values


def _is_exact_below(x: Tensor, maximum: float, cast: Cast) -> bool:
    """Whether x is in int16 under the exponent by which -maximum is -32768."""
    format, (fraction, exponent) = cast.format, math.frexp(maximum)
    assert isinstance(format, ScaledFormat) and isinstance(format.scale, PowerOfTwo)
    if fraction != 0.5 or int16_element(cast).symmetric or exponent - 16 < format.scale.min_exponent:
        return False
    scaled = x.double() * 2.0 ** (16 - exponent)
    return bool(((scaled == scaled.round()) & (scaled >= -32768) & (scaled <= 32767)).all())
