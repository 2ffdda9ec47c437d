"""Training without a wider copy: weights, updates and optimizer state are all stored under shared exponents.

Source: Koester et al. 2017, arXiv 1711.02213, section 4: "all tensors" are flex16+5, including the weights and the
optimizer's state, with the hyper-parameters of the fp32 run.
"""

import math
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lowp import distributed
from lowp.casts import Cast
from lowp.compat import skipped_by_compilers, widest_float
from lowp.errors import InvalidInput, Misuse
from lowp.exponents import SharedExponents, StepWriter, largest
from lowp.formats import PowerOfTwo, ScaledFormat
from lowp.kernels.int16 import payloads
from lowp.kernels.int16.mantissas import int16_element
from lowp.ops.observing import everywhere, step
from lowp.optim.masters import Wrapper
from lowp.optim.model_state import Attachment, StoredModel, attach, given_names, own
from lowp.optim.moments import SQUARES
from lowp.optim.shards import local, refuse_shards
from lowp.optim.skipping import skips_on_device, step_unless
from lowp.optim.state_dicts import entries_by_parameter, parameters_of
from lowp.optim.storage import Storage
from lowp.scaling.powers import times

_VERSION = 1  # of a saved state
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
        if value.data_ptr() != here.data_ptr():
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

    def write_gradients(self, given: Sequence[tuple[Tensor, str]]) -> None:
        """Write the gradients of which not all, on any rank, is in the format; the others are only shown.

        Given with the names of their parameters.
        """
        tensors = list(map(itemgetter(0), given))
        are_exact = self.are_exact(tensors) if self.groups else payloads.are_exact(tensors, self.cast)
        if self.groups:
            written = [one for one, is_exact in zip(given, are_exact, strict=True) if not is_exact]
            self.begin([gradient for gradient, _ in written], [gradient_of(name) for _, name in written])
        elif not everywhere and all(are_exact):
            return
        for (gradient, name), is_exact in zip(given, are_exact, strict=True):
            if not is_exact or gradient.dtype is not torch.float32:
                self.write_in_place(gradient, gradient_of(name), unless_exact=not self.groups or bool(is_exact))
            elif everywhere:
                self._tell(gradient, gradient_of(name))

    def write_steps(self, before: Mapping[Tensor, Tensor], named: Iterable[tuple[Tensor, str]]) -> None:
        """Write what a step has changed of weights, and then each as the sum of what it was, `before`, and its update.

        Given all of a step's weights with their names.
        """
        if not before:
            return
        names = dict(named)
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


class FlexWeights(Wrapper):
    """Lets any torch optimizer train parameters that are int16 under shared exponents, without masters.

    The parameters are written when the wrapper is made, and stay fp32 tensors whose values the format holds. A step of
    the inner optimizer computes in fp32 on such values; then the update is written, the weight as the sum of the old
    one and the update, and every floating-point tensor of the optimizer's state with more than one element; of means of
    squares (Adam's second moment) it is the root that is in the format, see `UnderExponents.write_square_in_place`.
    Gradients that are sums (accumulated, averaged over ranks, clipped) are written first. Complex parameters stay
    complex64. `names` gives the parameters' names, in place of those that the optimizer was given; the parameters in
    `stored` hold values of the format already.

    `param_groups`, `state` and `state_dict` are the inner optimizer's; the exponents are kept by `exponents`.
    """

    storage: UnderExponents
    skip: Tensor | None = None  # a flag of the device: where it is set the step changes nothing, see `skips_there`

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cast: Cast,
        exponents: SharedExponents,
        names: Mapping[Tensor, str] | None = None,
        stored: Container[Tensor] = (),
    ) -> None:
        super().__init__(optimizer, UnderExponents(cast, "none", exponents, {}))
        self.cast, self.exponents = cast, exponents
        self._buffers: dict[str, tuple[Callable[[], nn.Module | None], str]] = {}
        self._every, self._named = list[Tensor](), list[tuple[Tensor, str]]()  # all, and those that are stored
        self._adopt(names, stored)

    @torch.no_grad()
    @skipped_by_compilers
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the inner optimizer and write update, weights and state. Raises Misuse for a closure."""
        trained = self._trained(closure)
        storage, skip = self.storage, self.skip
        if skip is None:
            self.write_gradients()
        weights = [(local(one), name) for one, name in trained] if storage.groups else trained
        parameters, here = [one for one, _ in trained], [one for one, _ in weights]
        sites = [(update_of(name).text, weight_of(name).text) for _, name in trained]
        if storage.groups:
            storage.admit(here, [site for _, site in sites])
        writer = StepWriter(self.exponents, self.cast, here, sites) if skip is None and not everywhere else None
        held = set() if writer is None else set(map(id, writer.weights))  # a tensor takes long to be hashed
        before = {weight: weight.detach().clone() for weight in here if id(weight) not in held}
        result = self.inner.step() if skip is None else step_unless(skip, self.inner, parameters)
        with nullcontext() if skip is None else self.exponents.uncounted(skip):
            storage.write_steps(before, weights)
            storage.write_steps(self._write_states(trained, writer), weights)
            for name, (module, key) in self._buffers.items():  # running statistics, which forward passes have moved
                if isinstance(buffer := getattr(module(), key, None), Tensor):
                    storage.write_in_place(buffer, buffer_of(name), unless_exact=True)
        return result

    def _trained(self, closure: Callable[[], Any] | None) -> list[tuple[Tensor, str]]:
        """Return the parameters with gradients, by name. Raises Misuse for a closure, InvalidInput for sparse ones."""
        if closure is not None:
            raise Misuse(
                "a closure would read weights that are not rounded yet: train optimizers that need one (LBFGS) with "
                "fp32 parameters, as in Precision('dfp16')"
            )
        trained = [one for one in self._stored_by_name() if one[0].grad is not None]
        if sparse := next((name for one, name in trained if one.grad.is_sparse), None):  # type: ignore[union-attr]
            raise InvalidInput(
                f"the gradient of {sparse} is sparse, which {self.cast} does not support: create the embedding with "
                "sparse=False, or train in dfp16, whose optimizer is fp32"
            )
        return trained

    def _write_states(self, trained: Iterable[tuple[Tensor, str]], writer: StepWriter | None) -> dict[Tensor, Tensor]:
        """Write what the inner optimizer keeps of the parameters, and what `writer` holds, all at once if possible.

        Returns the values before the step of weights that `writer` has held in vain.
        """
        kept = [
            (value, site_of("optimizer state", key, name), key in SQUARES)
            for parameter, name in trained
            for key, value in self.inner.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0
        ]
        moved, rest = dict[Tensor, Tensor](), list(range(len(kept)))
        if writer is not None:
            together = [] if self.storage.groups else [value for value, *_ in kept]
            squares = {place for place, (*_, is_square) in enumerate(kept) if is_square}
            moved, left = writer.end(together, [site.text for _, site, _ in kept], squares)
            rest = left if together else rest
        for value, site, is_square in [kept[place] for place in rest]:  # sites are written in order
            shard = local(value)
            if is_square:
                self.storage.write_square_in_place(shard, site, self.skip)
            else:
                self.storage.begin([shard], [site])
                self.storage.write_in_place(shard, site)
        return moved

    def skips_there(self) -> bool:
        """Whether `skip` can be given to the next step: of optimizers that skip by themselves, and of torch's own.

        Of the latter where their state is there, on the device: a count on the host is not taken back.
        """
        is_real = not any(parameter.is_complex() for parameter in parameters_of(self))
        return is_real and skips_on_device(self.inner, [x for x, _ in self._stored_by_name() if x.grad is not None])

    def write_gradients(self) -> None:
        """Write the gradients as the step reads them: those that are not finite are then among the faults.

        Within torch.no_grad().
        """
        given = [(x, name) for one, name in self._stored_by_name() if (x := one.grad) is not None and not x.is_sparse]
        self.storage.write_gradients([(local(x), name) for x, name in given] if self.storage.groups else given)

    def attach(self, model: nn.Module) -> Attachment:
        """Write what is loaded into the model, and its running statistics after each step."""
        for path, module in model.named_modules():
            for name in ("running_mean", "running_var"):
                if isinstance(getattr(module, name, None), Tensor):
                    self._buffers[f"{path}.{name}".lstrip(".")] = (weakref.ref(module), name)
        names = [name for name, one in model.named_parameters(remove_duplicate=False) if self.holds(one)]
        return attach(model, StoredModel(Storage(None, "none"), names, self))  # a copy takes values as they are

    # -- parameters, checkpoints and copies ---------------------------------------------------------------------------
    def _stored_by_name(self) -> list[tuple[Tensor, str]]:
        """Return the parameters that are stored in the format, with their names; a new one is converted first."""
        every = parameters_of(self.inner)
        if [*map(id, every)] != [*map(id, self._every)]:
            self._adopt()  # a group may have been added to the inner optimizer itself
            self._every = every
            self._named = [(one, self.storage.names[one]) for one in every if self.holds(one)]
        return self._named

    def _adopt(self, names: Mapping[Tensor, str] | None = None, stored: Container[Tensor] = ()) -> None:
        parameters = [one for one in parameters_of(self) if not one.is_complex()]  # nor does a region round these
        new = [one for one in parameters if not self.holds(one)]
        refuse_shards(self.cast, [one for one in new if one not in stored])
        self.storage = replace(self.storage, groups=distributed.mesh_groups(parameters))
        known = {**given_names(self.inner), **(names or {})}
        with torch.no_grad():
            for parameter in new:
                if parameter.dtype is not torch.float32 or parameter.is_sparse:
                    kind = "sparse" if parameter.is_sparse else parameter.dtype
                    text = f"a {kind} parameter cannot be stored in {self.cast}: give dense fp32 parameters"
                    raise InvalidInput(text)
                self.storage.names[parameter] = known.get(parameter, f"parameter {len(self.storage.names)}")
                self._master_state[parameter] = {}
                if parameter in stored:  # another rank may have sent it since: values in the format stay unchanged
                    self.storage.set(parameter, {}, local(parameter))
                else:
                    self.storage.adopt(parameter, {})
            own(self, self._master_state)

    def _packed(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), "flex_weights": {"version": _VERSION, "cast": str(self.cast)}}

    def _load(self, state_dict: dict[str, Any]) -> None:
        entries_by_parameter(self, state_dict)
        state = dict(state_dict)
        saved = state.pop("flex_weights", {"version": _VERSION})
        version = saved.get("version") if isinstance(saved, Mapping) else saved
        if version != _VERSION:
            raise InvalidInput(f"flex weights of version {version} cannot be read: this lowp reads version {_VERSION}")
        self.inner.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        buffers = {name: (found, key) for name, (module, key) in self._buffers.items() if (found := module())}
        storage = replace(self.storage, groups=())  # as of no rows
        return {**super().__getstate__(), "_every": [], "storage": storage, "_buffers": buffers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        buffers = {name: (weakref.ref(module), key) for name, (module, key) in state["_buffers"].items()}
        super().__setstate__({**state, "_buffers": buffers})

    def __repr__(self) -> str:
        return f"FlexWeights({self.cast}, {self.inner!r})"
