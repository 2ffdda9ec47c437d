"""Training without a wider copy: weights, updates and optimizer state are all stored under shared exponents.

Source: Koester et al. 2017, arXiv 1711.02213, section 4: "all tensors" are flex16+5, including the weights and the
optimizer's state, with the hyper-parameters of the fp32 run.
"""

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowp.casts import Cast
from lowp.compat import skipped_by_compilers, widest_float
from lowp.errors import InvalidInput, Misuse
from lowp.exponents import SharedExponents, StepWriter
from lowp.kernels.int16 import payloads
from lowp.ops.observing import everywhere, step
from lowp.optim.masters import Wrapper
from lowp.optim.model_state import Attachment, MasterKeeper, StoredModel, attach, given_names, own
from lowp.optim.moments import SQUARES
from lowp.optim.shards import Wholes, local, refuse_shards
from lowp.optim.skipping import begin_momentum, flagged, skips_on_device, steps_by_itself
from lowp.optim.state_dicts import entries_by_parameter, parameters_of
from lowp.optim.storage import Storage
from lowp.scaling.powers import times

_VERSION = 1
_MOST_SITES = 1 << 15  # that are kept in memory: their names are asked for at every step


class _Site(NamedTuple):
    """One tensor that a step writes: its role for observers, its place in the parameter's state, and the name.

    `str()` gives the site of its exponent, ``weight of 0.bias``.
    """

    role: str
    part: str
    name: str

    def __str__(self) -> str:
        return f"{self.part} of {self.name}"


@lru_cache(_MOST_SITES)
def _site(role: str, part: str, name: str) -> _Site:
    return _Site(role, part, name)


@lru_cache(_MOST_SITES)
def _text(role: str, part: str, name: str) -> str:
    return str(_site(role, part, name))


_weight, _gradient = partial(_site, "weight", "weight"), partial(_site, "weight gradient", "gradient")
_update, _buffer = partial(_site, "update", "update"), partial(_site, "buffer", "buffer")


class _Row(NamedTuple):
    """A parameter, its name, and the sites of its gradient, and of update and weight."""

    parameter: Tensor
    name: str
    gradient: _Site
    steps: tuple[str, str]


class FlexWeights(MasterKeeper, Wrapper):
    """Lets any torch optimizer train parameters that are int16 under shared exponents, without masters.

    The parameters are written when the wrapper is made, and stay fp32 tensors whose values the format holds. A step of
    the inner optimizer computes in fp32 on such values; then the update is written, the weight as the sum of the old
    one and the update, and every floating-point tensor of the optimizer's state with more than one element; of means of
    squares (Adam's second moment) it is the root that is in the format, see `_rounded_square`. Gradients that are sums
    (accumulated, averaged over ranks, clipped) are written first. Complex parameters stay complex64. `names` gives the
    parameters' names, in place of those that the optimizer was given; the parameters in `stored` hold values of the
    format already.

    `param_groups`, `state` and `state_dict` are the inner optimizer's; the exponents are kept by `exponents`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cast: Cast,
        exponents: SharedExponents,
        names: Mapping[Tensor, str] | None = None,
        stored: Container[Tensor] = (),
    ) -> None:
        super().__init__(optimizer)
        self.cast, self.exponents, self.storage = cast, exponents, Storage(None, "none")
        self._names: dict[Tensor, str] = {**given_names(optimizer), **(names or {})}
        self._buffers: dict[str, tuple[Callable[[], nn.Module | None], str]] = {}
        self._adopted: set[Tensor] = set()
        self._is_skipped: Tensor | None = None
        self._compared: payloads.Compared | None = None  # the gradients, for the step that follows
        self._known: list[_Row] = []
        self._adopt(stored)

    @torch.no_grad()
    @skipped_by_compilers
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the inner optimizer and write update, weights and state. Raises Misuse for a closure."""
        if closure is not None:
            raise Misuse(
                "a closure would read weights that are not rounded yet: train optimizers that need one (LBFGS) with "
                "fp32 parameters, as in Precision('dfp16')"
            )
        trained = [row for row in self._rows() if row.parameter.grad is not None]
        self._refuse_sparse(trained)
        if self._is_skipped is None:
            self.write_gradients()
            self._compared = None
        parameters, sites = [row.parameter for row in trained], [row.steps for row in trained]
        weights, names = parameters, self._names
        if self._wholes:
            weights = [local(one) for one in parameters]
            names = {one: row.name for one, row in zip(weights, trained, strict=True)}
            self._wholes.admit(self.exponents, self.cast, weights, [site for _, site in sites])
        writer = None
        if self._is_skipped is None and not everywhere:
            writer = StepWriter(self.exponents, self.cast, weights, sites)
        others = weights if writer is None else _without(weights, writer.weights)
        before = {parameter: parameter.detach().clone() for parameter in others}
        result = self._step_inner(parameters)
        with nullcontext() if self._is_skipped is None else self.exponents.unless(self._is_skipped):
            if before:
                self._write_steps(before, names)
            if moved := self._write_states(parameters, writer):
                self._write_steps(moved, names)
            self._write_buffers()
        return result

    def _refuse_sparse(self, trained: Sequence[_Row]) -> None:
        sparse = [row.gradient.name for row in trained if row.parameter.grad.is_sparse]  # type: ignore[union-attr]
        if sparse:
            raise InvalidInput(
                f"the gradient of {sparse[0]} is sparse, which {self.cast} does not support: create the embedding with "
                "sparse=False, or train in dfp16, whose optimizer is fp32"
            )

    def _step_inner(self, trained: Sequence[Tensor]) -> Any:
        """Step the inner optimizer on these parameters; where a device has decided to skip, nothing changes."""
        skip = self._is_skipped
        if skip is None:
            return self.inner.step()
        begin_momentum(self.inner)
        if steps_by_itself(self.inner):
            with flagged(self.inner, found_inf=skip.float()):
                return self.inner.step()
        tensors = [*trained, *(value for one in trained for value in self.inner.state.get(one, {}).values())]
        shards = [local(value) for value in tensors if isinstance(value, Tensor)]
        kept = [(value, value.clone()) for value in shards]
        result = self.inner.step()
        for value, old in kept:
            value.copy_(torch.where(skip, old, value))
        return result

    def _write_buffers(self) -> None:
        """Write the running statistics, which the forward pass has moved."""
        for name, (module, key) in self._buffers.items():
            if isinstance(buffer := getattr(module(), key, None), Tensor):
                buffer.copy_(self._rounded(buffer, _buffer(name), unless_exact=True))

    @contextmanager
    def skipping(self, is_skipped: Tensor | None) -> Iterator[None]:
        """Let a step change nothing where a flag of the device is set, and write no gradients, which have been."""
        self._is_skipped = is_skipped
        try:
            yield
        finally:
            self._is_skipped = None

    def skips_there(self) -> bool:
        """Whether `skipping` can be asked of the next step: of optimizers that skip by themselves, and of torch's own.

        Of the latter where their state is there, on the device: a count on the host is not taken back.
        """
        if any(parameter.is_complex() for parameter in parameters_of(self)):
            return False
        return skips_on_device(self.inner, [one for one in self._parameters() if one.grad is not None])

    def write_gradients(self) -> None:
        """Write the gradients as the step reads them: those that are not finite are then among the faults.

        Within torch.no_grad().
        """
        given = list[tuple[Tensor, _Site]]()
        for row in self._rows():
            if (gradient := row.parameter.grad) is not None and not gradient.is_sparse:
                given.append((gradient, row.gradient))
        if self._wholes:
            self._write_sharded_gradients([(local(gradient), site) for gradient, site in given])
            return
        known, self._compared = self._compared, None
        if not everywhere:  # hooks may have run since the gradients were compared: their memory is, again
            gradients = [gradient for gradient, _ in given]
            is_same = known is not None and known.are_still(gradients)
            self._compared = known if is_same else payloads.Compared.of(gradients, self.cast.format)
            if self._compared is not None:
                return
        are_exact = payloads.are_exact([gradient for gradient, _ in given], self.cast)
        for (gradient, site), is_exact in zip(given, are_exact, strict=True):
            if not is_exact or gradient.dtype is not torch.float32:
                self._write_(gradient, site, unless_exact=True)
            elif everywhere:
                self._tell(gradient, site)

    def _write_sharded_gradients(self, given: Sequence[tuple[Tensor, _Site]]) -> None:
        """Write the gradients of which the whole is not in the format, on all ranks."""
        are_exact = self._wholes.are_exact([gradient for gradient, _ in given], self.cast)
        written = [one for one, is_exact in zip(given, are_exact, strict=True) if not is_exact]
        self._begin([gradient for gradient, _ in written], [str(site) for _, site in written])
        for gradient, site in written:
            self._write_(gradient, site)

    def _begin(self, shards: Sequence[Tensor], sites: Sequence[str]) -> None:
        """Let sites of shards that are written first begin with the exponents of wholes."""
        if self._wholes:
            self._wholes.begin(self.exponents, self.cast, shards, sites)

    def forget_gradients(self) -> None:
        """Release what `write_gradients` keeps for the step, which is not taken."""
        self._compared = None

    def _write_steps(self, before: Mapping[Tensor, Tensor], names: Mapping[Tensor, str]) -> None:
        """Write what a step has changed of each parameter, and then each as the sum of what it was and its update."""
        weights, coming = [_weight(names[parameter]) for parameter in before], list[Tensor]()
        for parameter, old in before.items():
            wide, moved = widest_float(parameter.device), _update(names[parameter])
            change = parameter.to(wide) - old.to(wide)
            self._begin([change], [str(moved)])
            coming.append(old.to(wide) + self._rounded(change, moved).to(wide))
        self.exponents.admit(list(before.values()), self.cast, [str(one) for one in weights])
        for parameter, new, weight in zip(before, coming, weights, strict=True):
            self._begin([new], [str(weight)])
            parameter.copy_(self._rounded(new, weight))

    def _write_states(self, trained: Iterable[Tensor], writer: StepWriter | None) -> dict[Tensor, Tensor]:
        """Write what the inner optimizer keeps of the parameters, and what `writer` holds, all at once if possible.

        Returns the values before the step of weights that `writer` has held in vain.
        """
        tensors, names, squares = list[Tensor](), list[tuple[str, str, str]](), set[int]()
        for parameter in trained:
            name = self._names[parameter]
            for key, value in self.inner.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0:
                    if key in SQUARES:
                        squares.add(len(tensors))
                    tensors.append(value)
                    names.append(("optimizer state", key, name))
        rest, moved = list(range(len(tensors))), dict[Tensor, Tensor]()
        if writer is not None and not self._wholes:
            moved, rest = writer.end(tensors, [_text(*one) for one in names], squares)
        elif writer is not None:
            moved, _ = writer.end((), (), squares)
        for place in rest:  # sites are written in order
            value, site = local(tensors[place]), _site(*names[place])
            if place in squares:
                value.copy_(self._rounded_square(value, site))
            else:
                self._begin([value], [str(site)])
                self._write_(value, site)
        return moved

    def attach(self, model: nn.Module) -> Attachment:
        """Write what is loaded into the model, and its running statistics after each step."""
        for path, module in model.named_modules():
            for name in ("running_mean", "running_var"):
                if isinstance(getattr(module, name, None), Tensor):
                    self._buffers[f"{path}.{name}".lstrip(".")] = (weakref.ref(module), name)
        names = [name for name, one in model.named_parameters(remove_duplicate=False) if self.holds(one)]
        return attach(model, StoredModel(self.storage, names, self))

    def set_masters(self, values: Mapping[Tensor, Tensor]) -> None:
        """Write what has been put into parameters, as by `model.load_state_dict`, to the format."""
        with torch.no_grad():
            for parameter in values:
                if parameter in self._adopted:
                    site, here = _weight(self._names[parameter]), local(parameter.detach())
                    if self._wholes:
                        self._wholes.admit(self.exponents, self.cast, [here], [str(site)])
                        self._begin([here], [str(site)])
                    self.exponents.admit([here], self.cast, [str(site)])
                    here.copy_(self._rounded(here, site, unless_exact=True))

    def holds(self, parameter: Tensor) -> bool:
        """Whether a tensor is a parameter of this optimizer."""
        return parameter in self._adopted

    def _kept(self, parameter: Tensor) -> dict[str, Tensor]:
        return {}

    def _packed(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), "flex_weights": {"version": _VERSION, "cast": str(self.cast)}}

    def _load(self, state_dict: dict[str, Any]) -> None:
        entries_by_parameter(self, state_dict)
        state = dict(state_dict)
        saved = state.pop("flex_weights", {"version": _VERSION})
        if not isinstance(saved, Mapping) or saved.get("version") != _VERSION:
            version = saved.get("version") if isinstance(saved, Mapping) else saved
            raise InvalidInput(f"flex weights of version {version} cannot be read: this lowp reads version {_VERSION}")
        self.inner.load_state_dict(state)

    def _parameters(self) -> list[Tensor]:
        """The parameters that are stored in the format: all but complex ones, which a region does not round either."""
        return [one for one in parameters_of(self) if not one.is_complex()]

    def _rows(self) -> list[_Row]:
        """Return the parameters that are stored in the format, with their sites; a new one is converted first."""
        known, count = self._known, 0
        for group in self.inner.param_groups:
            for one in group["params"]:
                if not one.is_complex():
                    if count >= len(known) or known[count].parameter is not one:
                        return self._renewed()
                    count += 1
        return known if count == len(known) else self._renewed()

    def _renewed(self) -> list[_Row]:
        parameters = self._parameters()
        if not self._adopted.issuperset(parameters):  # a group was added to the inner optimizer itself
            self._adopt()
        self._wholes = Wholes(parameters)
        names = [self._names[one] for one in parameters]
        self._known = [
            _Row(one, name, _gradient(name), (str(_update(name)), str(_weight(name))))
            for one, name in zip(parameters, names, strict=True)
        ]
        return self._known

    def _adopt(self, stored: Container[Tensor] = ()) -> None:
        new = [one for one in self._parameters() if one not in self._adopted]
        refuse_shards(self.cast, [one for one in new if one not in stored])
        self._wholes = Wholes(self._parameters())
        with torch.no_grad():
            for parameter in new:
                if parameter.dtype is not torch.float32 or parameter.is_sparse:
                    raise InvalidInput(
                        f"a {parameter.dtype} parameter cannot be stored in {self.cast}: give fp32 parameters"
                    )
                name = self._names.setdefault(parameter, f"parameter {len(self._adopted)}")
                # another rank may have sent a stored parameter since: values that are in the format stay unchanged
                here = local(parameter.detach())
                here.copy_(self._rounded(here, _weight(name), unless_exact=parameter in stored))
                self._adopted.add(parameter)
            own(self, self._adopted)

    def _tell(self, x: Tensor, site: _Site) -> None:
        if (watch := step(site.name)) is not None:
            watch(x, site.role, self.cast, "step")

    def _rounded(self, x: Tensor, site: _Site, unless_exact: bool = False) -> Tensor:
        self._tell(x, site)
        return self.exponents.write(x, self.cast, str(site), unless_exact=unless_exact).values

    def _write_(self, x: Tensor, site: _Site, unless_exact: bool = False) -> None:
        """Write a tensor in place."""
        result = self._rounded(x, site, unless_exact)
        if result is not x:
            x.copy_(result)

    def _rounded_square(self, x: Tensor, site: _Site) -> Tensor:
        """Return a non-negative x as squares of values of the format; nonzero elements stay nonzero.

        Squares span twice as many binary places as gradients, more than 15. Written directly, most would become zero,
        and a quotient by their root would be unbounded. The root spans no more than the gradients. A nonzero root below
        half a unit becomes one unit: the denominator of a small gradient may be too large but is never zero.
        """
        root = x.to(widest_float(x.device)).sqrt()
        self._begin([root], [str(site)])
        self._tell(root, site)
        rounded, exponent, _ = self.exponents.write(root, self.cast, str(site))
        assert exponent is not None  # of a write that is noted
        unit = times(torch.ones((), dtype=torch.float32, device=exponent.device), exponent)
        squares = torch.where((root > 0) & (rounded == 0), unit, rounded).square()
        return squares if self._is_skipped is None else torch.where(self._is_skipped, x, squares)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_compared": None,
            "_known": [],
            "_wholes": Wholes(()),  # as of no rows
            "_buffers": {name: (module(), key) for name, (module, key) in self._buffers.items()},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        found = {name: (module, key) for name, (module, key) in state["_buffers"].items() if module is not None}
        buffers = {name: (weakref.ref(module), key) for name, (module, key) in found.items()}
        super().__setstate__({**state, "_buffers": buffers})
        own(self, self._adopted)

    def __repr__(self) -> str:
        return f"FlexWeights({self.cast}, {self.inner!r})"


def _without(parameters: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    known = set(map(id, others))  # a tensor takes long to be hashed
    return [one for one in parameters if id(one) not in known]
