"""Training without a wider copy: weights, updates and optimizer state are all stored under shared exponents.

Source: Koester et al. 2017, arXiv 1711.02213, section 4: "all tensors" are flex16+5, including the weights and the
optimizer's state, with the hyper-parameters of the fp32 run.
"""

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowp.casts import Cast
from lowp.compat import skipped_by_compilers
from lowp.distributed import mesh_groups
from lowp.errors import InvalidInput, Misuse
from lowp.exponents import SharedExponents, StepWriter
from lowp.kernels.int16 import payloads
from lowp.ops.observing import everywhere
from lowp.optim.exponents import Site, UnderExponents, buffer_of, gradient_of, site_of, update_of, weight_of
from lowp.optim.masters import Wrapper
from lowp.optim.model_state import Attachment, MasterKeeper, StoredModel, attach, given_names, own
from lowp.optim.moments import SQUARES
from lowp.optim.shards import local, refuse_shards
from lowp.optim.skipping import begin_momentum, flagged, skips_on_device, steps_by_itself
from lowp.optim.state_dicts import entries_by_parameter, parameters_of
from lowp.optim.storage import Storage

_VERSION = 1


class _Row(NamedTuple):
    """A parameter, the site of its gradient, and the names of those of update and weight."""

    parameter: Tensor
    gradient: Site
    steps: tuple[str, str]


class FlexWeights(MasterKeeper, Wrapper):
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

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cast: Cast,
        exponents: SharedExponents,
        names: Mapping[Tensor, str] | None = None,
        stored: Container[Tensor] = (),
    ) -> None:
        super().__init__(optimizer)
        self.cast, self.exponents = cast, exponents
        self.storage = UnderExponents(cast, "none", exponents, {})
        self._buffers: dict[str, tuple[Callable[[], nn.Module | None], str]] = {}
        self._is_skipped: Tensor | None = None
        self._compared: payloads.Compared | None = None  # the gradients, for the step that follows
        self._every, self._known = list[Tensor](), list[_Row]()  # all parameters, and those that are stored
        self._adopt(names, stored)

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
        storage, weights = self.storage, parameters
        names: Mapping[Tensor, str] = storage.names
        if storage.groups:
            weights = [local(one) for one in parameters]
            names = {one: row.gradient.name for one, row in zip(weights, trained, strict=True)}
            storage.admit(weights, [site for _, site in sites])
        writer = None
        if self._is_skipped is None and not everywhere:
            writer = StepWriter(self.exponents, self.cast, weights, sites)
        others = weights if writer is None else _without(weights, writer.weights)
        before = {parameter: parameter.detach().clone() for parameter in others}
        result = self._step_inner(parameters)
        with nullcontext() if self._is_skipped is None else self.exponents.uncounted(self._is_skipped):
            if before:
                storage.write_steps(before, names)
            if moved := self._write_states(parameters, writer):
                storage.write_steps(moved, names)
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
                self.storage.write_in_place(buffer, buffer_of(name), unless_exact=True)

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
        return skips_on_device(self.inner, [row.parameter for row in self._rows() if row.parameter.grad is not None])

    def write_gradients(self) -> None:
        """Write the gradients as the step reads them: those that are not finite are then among the faults.

        Within torch.no_grad().
        """
        given = list[tuple[Tensor, Site]]()
        for row in self._rows():
            if (gradient := row.parameter.grad) is not None and not gradient.is_sparse:
                given.append((gradient, row.gradient))
        known, self._compared = self._compared, None
        if self.storage.groups:
            given = [(local(gradient), site) for gradient, site in given]
        elif not everywhere:  # hooks may have run since the gradients were compared: their memory is, again
            gradients = [gradient for gradient, _ in given]
            is_same = known is not None and known.are_still(gradients)
            self._compared = known if is_same else payloads.Compared.of(gradients, self.cast.format)
            if self._compared is not None:
                return
        self.storage.write_gradients(given)

    def forget_gradients(self) -> None:
        """Release what `write_gradients` keeps for the step, which is not taken."""
        self._compared = None

    def _write_states(self, trained: Iterable[Tensor], writer: StepWriter | None) -> dict[Tensor, Tensor]:
        """Write what the inner optimizer keeps of the parameters, and what `writer` holds, all at once if possible.

        Returns the values before the step of weights that `writer` has held in vain.
        """
        tensors, sites, squares = list[Tensor](), list[Site](), set[int]()
        for parameter in trained:
            name = self.storage.names[parameter]
            for key, value in self.inner.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0:
                    if key in SQUARES:
                        squares.add(len(tensors))
                    tensors.append(value)
                    sites.append(site_of("optimizer state", key, name))
        rest, moved = list(range(len(tensors))), dict[Tensor, Tensor]()
        if writer is not None and not self.storage.groups:
            moved, rest = writer.end(tensors, [site.text for site in sites], squares)
        elif writer is not None:
            moved, _ = writer.end((), (), squares)
        for place in rest:  # sites are written in order
            value, site = local(tensors[place]), sites[place]
            if place in squares:
                self.storage.write_square_in_place(value, site, self._is_skipped)
            else:
                self.storage.begin([value], [site])
                self.storage.write_in_place(value, site)
        return moved

    def attach(self, model: nn.Module) -> Attachment:
        """Write what is loaded into the model, and its running statistics after each step."""
        for path, module in model.named_modules():
            for name in ("running_mean", "running_var"):
                if isinstance(getattr(module, name, None), Tensor):
                    self._buffers[f"{path}.{name}".lstrip(".")] = (weakref.ref(module), name)
        names = [name for name, one in model.named_parameters(remove_duplicate=False) if self.holds(one)]
        return attach(model, StoredModel(Storage(None, "none"), names, self))  # a copy takes values as they are

    def holds(self, parameter: Tensor) -> bool:
        """Whether a tensor is a parameter of this optimizer."""
        return parameter in self.storage.names

    def _kept(self, parameter: Tensor) -> dict[str, Tensor]:
        return {}

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

    def _rows(self) -> list[_Row]:
        """Return the parameters that are stored in the format, with their sites; a new one is converted first."""
        every = parameters_of(self.inner)
        if [*map(id, every)] != [*map(id, self._every)]:
            self._adopt()  # a group may have been added to the inner optimizer itself
            self._every, self._known = every, []
            for one in every:
                if (name := self.storage.names.get(one)) is not None:
                    self._known.append(_Row(one, gradient_of(name), (update_of(name).text, weight_of(name).text)))
        return self._known

    def _adopt(self, names: Mapping[Tensor, str] | None = None, stored: Container[Tensor] = ()) -> None:
        parameters = [one for one in parameters_of(self) if not one.is_complex()]  # nor does a region round these
        new = [one for one in parameters if not self.holds(one)]
        refuse_shards(self.cast, [one for one in new if one not in stored])
        self.storage = replace(self.storage, groups=mesh_groups(parameters))
        known = {**given_names(self.inner), **(names or {})}
        with torch.no_grad():
            for parameter in new:
                if parameter.dtype is not torch.float32 or parameter.is_sparse:
                    raise InvalidInput(
                        f"a {parameter.dtype} parameter cannot be stored in {self.cast}: give fp32 parameters"
                    )
                self.storage.names[parameter] = known.get(parameter, f"parameter {len(self.storage.names)}")
                if parameter in stored:  # another rank may have sent it since: values in the format stay unchanged
                    self.storage.set(parameter, {}, local(parameter))
                else:
                    self.storage.adopt(parameter, {})
            own(self, self.storage.names)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_compared": None,
            "_every": [],
            "storage": replace(self.storage, groups=()),  # as of no rows
            "_buffers": {name: (found, key) for name, (module, key) in self._buffers.items() if (found := module())},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        buffers = {name: (weakref.ref(module), key) for name, (module, key) in state["_buffers"].items()}
        super().__setstate__({**state, "_buffers": buffers})
        own(self, self.storage.names)

    def __repr__(self) -> str:
        return f"FlexWeights({self.cast}, {self.inner!r})"


def _without(parameters: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    known = set(map(id, others))  # a tensor takes long to be hashed
    return [one for one in parameters if id(one) not in known]
