"""A model whose `state_dict` gives and takes fp32 values, whatever format its parameters are stored in.

Three hooks of a model know the storage format and the names of the stored parameters. They get fp32 values from the
owner of each parameter: the optimizer that keeps its master. The owner is looked up by the parameter object. A copy of
the model (copy.deepcopy, pickle, torch.save) therefore has hooks of its own. A model copied alone has no owner: it
gives its stored values and rounds loaded values. A model copied or pickled with its optimizer belongs to the copy of
that optimizer.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lowp.errors import InvalidInput
from lowp.ops.observing import Watch, everywhere, step
from lowp.optim.shards import is_sharded, local, local_parts, modules_of, shard_like, shard_of
from lowp.optim.storage import STORAGE_STATE, Storage

# by the id of the parameter, which no other tensor has while its owner holds it; a weak reference to the parameter
# itself would keep torch.utils.swap_tensors from exchanging it
_owners: dict[int, weakref.ReferenceType[Any]] = {}


def own(owner: MasterKeeper, parameters: Iterable[Tensor]) -> None:
    """Make `owner` the source of the parameters' fp32 values, as long as it exists and holds them."""
    places = [id(parameter) for parameter in parameters]

    def disown(reference: weakref.ReferenceType[Any]) -> None:
        for place in places:
            if _owners.get(place) is reference:
                _owners.pop(place, None)

    reference = weakref.ref(owner, disown)
    _owners.update(dict.fromkeys(places, reference))


def owner_of(parameter: Tensor) -> MasterKeeper | None:
    """Return the owner of a parameter's fp32 value, or None."""
    reference = _owners.get(id(parameter))
    found: MasterKeeper | None = None if reference is None else reference()
    return found if found is not None and found.holds(parameter) else None


class DtypeAdvice:
    """Lets an error of dtypes in a module's first forward pass say that an optimizer has stored its weights in bf16.

    For optimizers that were not told how to store them: a loop that has run in fp32 with torch's meets such an error.
    A hook of the module does this until a pass has succeeded, or until the advice is called, which removes the hook
    and returns the module. As ``__prepare_scriptable__`` of the module it is called by torch.jit.script, which would
    compile the hook, or not take it.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    @classmethod
    def give(cls, parameters: Iterable[Tensor]) -> list[DtypeAdvice]:
        """Give it to the modules of these parameters that prepare nothing for scripting themselves."""
        given = []
        for module in modules_of(parameters):
            if not isinstance(module, torch.jit.ScriptModule) and not hasattr(module, _PREPARE):
                given.append(cls(module))
                setattr(module, _PREPARE, given[-1])
                module.register_forward_hook(_explain, always_call=True)
        return given

    def __call__(self) -> nn.Module | None:
        if (module := self._module()) is not None:
            for key in [key for key, hook in module._forward_hooks.items() if hook is _explain]:
                del module._forward_hooks[key]
            vars(module).pop(_PREPARE, None)
        return module

    def __reduce__(self) -> tuple[type[DtypeAdvice], tuple[nn.Module | None]]:
        return DtypeAdvice, (self._module(),)  # that of a copy is its own


_PREPARE = "__prepare_scriptable__"


def _explain(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    if torch.compiler.is_compiling():
        return
    error = sys.exc_info()[1] if output is None else None
    if error is None:  # a first pass has succeeded
        DtypeAdvice(module)()
    elif type(error) is RuntimeError and "type" in str(error) and any(_is_fp32(one) for one in inputs):
        error.args = (
            f"{error}. The optimizer of lowp.optim has stored the weights in bf16, its default: run the model in a "
            'region, `with lowp.autocast("bf16"):`, give it inputs in bf16, or keep fp32 weights by storage=None',
        )


def _is_fp32(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype is torch.float32


class Attachment(NamedTuple):
    """The hooks of one attached model; `remove` removes them."""

    handles: tuple[RemovableHandle, ...]

    def remove(self) -> None:
        """Remove the hooks: `state_dict` then gives the stored format again."""
        for handle in self.handles:
            handle.remove()


class MasterKeeper(ABC):
    """What an optimizer tells of the fp32 values behind its parameters: the face of masters of every storage."""

    storage: Storage
    names: ParameterNames
    param_groups: Any
    state: Any

    @abstractmethod
    def holds(self, parameter: Tensor) -> bool:
        """Whether this very tensor is a parameter of this optimizer, which then has a strong reference to it."""

    @abstractmethod
    def _kept(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the tensors kept for the fp32 value of a parameter that this optimizer holds."""

    def master(self, parameter: Tensor) -> Tensor:
        """The fp32 value behind a stored parameter; a DTensor's is a DTensor."""
        if not self.holds(parameter):
            raise InvalidInput(f"a tensor of shape {tuple(parameter.shape)} is not a parameter of this optimizer")
        value = self.storage.master(local(parameter), local_parts(self._kept(parameter)))
        return shard_like(value, parameter) if is_sharded(parameter) else value

    def set_masters(self, values: Mapping[Tensor, Tensor]) -> None:
        """Set fp32 values by parameter, and write the parameters: rounded to nearest, never stochastically."""
        with torch.no_grad():
            for parameter, value in values.items():
                if self.holds(parameter):
                    whole = shard_of(value.detach().to(parameter.device), parameter)
                    self.storage.set(parameter, self._kept(parameter), local(whole))

    def attach(self, model: nn.Module) -> Attachment:
        """Make `model.state_dict()` return fp32 masters, and `model.load_state_dict()` set them."""
        self.names.add(model)
        names = [name for name, one in model.named_parameters(remove_duplicate=False) if self.holds(one)]
        return attach(model, StoredModel(self.storage, names, self))

    def master_weights(self) -> list[Tensor]:
        """The tensors that are kept beside the parameters for their fp32 values: copies, or remainders."""
        return [value for parameter in self._stored() for value in self._kept(parameter).values()]

    def memory(self) -> dict[str, int]:
        """Bytes held: stored ``parameters``, what is kept for ``masters``, and the moments in ``state``."""
        entries = [pair for entry in self.state.values() for pair in entry.items() if pair[0] not in STORAGE_STATE]
        return {
            "parameters": sum(parameter.nbytes for parameter in self._stored()),
            "masters": sum(value.nbytes for value in self.master_weights()),
            "state": sum(value.nbytes for _, value in entries if isinstance(value, Tensor) and value.dim() > 0),
        }

    def _stored(self) -> list[Tensor]:
        return [one for group in self.param_groups for one in group["params"] if self.holds(one)]


class StoredModel:
    """The data of one model's hooks: its storage, the names of stored parameters, and unclaimed fp32 values.

    `owners` are strong references, so that the masters live as long as the model. `unclaimed` are fp32 values of
    parameters that were stored before their optimizer existed. A copy has neither.
    """

    def __init__(self, storage: Storage, names: Iterable[str] = (), owner: MasterKeeper | None = None) -> None:
        self.storage, self.names = storage, set(names)
        self.owners: list[MasterKeeper] = [] if owner is None else [owner]
        self.unclaimed: dict[str, Tensor] = {}
        self.pending: dict[str, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        self._warn_of_averaging()
        return {**self.__dict__, "owners": [], "unclaimed": {}, "pending": {}}

    def _warn_of_averaging(self) -> None:
        """Warn if the copy is for torch's AveragedModel, which adds in the dtype of the copy's parameters."""
        averaging = getattr(sys.modules.get("torch.optim.swa_utils"), "AveragedModel", None)
        frame: FrameType | None = sys._getframe(1)
        depth = 1
        while averaging is not None and frame is not None and frame.f_code is not averaging.__init__.__code__:
            frame, depth = frame.f_back, depth + 1
        if averaging is not None and frame is not None and self.storage.dtype.itemsize < 4:
            warnings.warn(
                f"AveragedModel of a model that stores parameters in {self.storage.cast} averages in it, and rounds "
                "small changes away: average an fp32 copy of the model that was made before prepare, by "
                "twin.load_state_dict(model.state_dict()) and averaged.update_parameters(twin)",
                UserWarning,
                stacklevel=depth + 1,
            )

    def mine(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and stored parameters of a model, including parameters that were added to the owner later."""
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name not in self.names and any(owner_of(parameter) is owner for owner in self.owners):
                self.names.add(name)
            if name in self.names:
                yield name, parameter

    def store(self, model: nn.Module, keep: bool) -> None:
        """Convert parameters without an owner into the storage, in place. `keep` keeps fp32 values for an owner."""
        found: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.is_floating_point() and owner_of(parameter) is None:
                found.setdefault(parameter, []).append(name)
        for parameter, names in found.items():
            self.names.update(names)
            if keep and parameter.dtype is not self.storage.dtype and not parameter.is_meta:
                value = parameter.detach().to(torch.float32)  # which the parameter leaves
                self.unclaimed.update(dict.fromkeys(names, value))
            Storage(self.storage.cast, "none").adopt(parameter, {})

    def claim(self, model: nn.Module, parameters: Iterable[Tensor]) -> dict[Tensor, Tensor]:
        """Return and forget the fp32 values of those `parameters` of the model whose stored values are unchanged.

        For a parameter that has been sharded since, this is its shard. A parameter that was written since, for example
        by DDP's broadcast, gets none.
        """
        wanted = {id(one) for one in parameters}
        found: dict[Tensor, Tensor] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) in wanted and name in self.unclaimed:
                value = self._unchanged(name, parameter)
                del self.unclaimed[name]
                if value is not None:
                    found[parameter] = value
        return found

    def _unchanged(self, name: str, parameter: Tensor) -> Tensor | None:
        """Return the unclaimed fp32 value of a parameter; None if there is none or the parameter was written since."""
        value = self.unclaimed.get(name)
        if value is None or value.shape != parameter.shape:
            return None
        value = shard_of(value.to(parameter.device), parameter)
        stored = self.storage.rounded(local(value)).to(parameter.dtype)
        return value if torch.equal(stored, local(parameter.detach())) else None

    # -- what the hooks do ----------------------------------------------------------------------------------------
    def give(self, model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Put fp32 values into a state dictionary of the model."""
        for name, parameter in self.mine(model):
            if prefix + name in state:
                owner = owner_of(parameter)
                value = self._unchanged(name, parameter) if owner is None else owner.master(parameter)
                value = parameter if value is None else value
                state[prefix + name] = value.detach().to(torch.float32, copy=True)

    def remember(self, model: nn.Module, state: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        """Keep the values that are about to be loaded, before they are rounded into the parameters."""
        self.pending.clear()
        for name, parameter in self.mine(model):
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point():
                self.pending[name] = value

    def take(self, model: nn.Module, incompatible: Any) -> None:
        """Set the masters to the loaded values; parameters without an owner are rounded into the storage."""
        owned: dict[int, tuple[MasterKeeper, dict[Tensor, Tensor]]] = {}
        for name, parameter in self.mine(model):
            value, owner = self.pending.get(name), owner_of(parameter)
            if value is not None and owner is not None:
                owned.setdefault(id(owner), (owner, {}))[1][parameter] = value
            elif value is not None and self.storage.cast is not None:
                if name in self.unclaimed:
                    self.unclaimed[name] = value.detach().to(parameter.device, torch.float32, copy=True)
                with torch.no_grad():
                    self.storage.set(parameter, {}, local(shard_of(value.detach().to(parameter.device), parameter)))
        self.pending.clear()
        for owner, values in owned.values():
            owner.set_masters(values)


def attach(model: nn.Module, stored: StoredModel) -> Attachment:
    """Make `model.state_dict()` give fp32 values and `model.load_state_dict()` take fp32 (or any) values."""
    hooked: Any = model  # torch has no annotations for these three
    # partial functions: torch sets attributes on each hook, and copies and pickles have hooks of their own
    return Attachment(
        (
            hooked.register_state_dict_post_hook(partial(StoredModel.give, stored)),
            hooked.register_load_state_dict_pre_hook(partial(StoredModel.remember, stored)),
            hooked.register_load_state_dict_post_hook(partial(StoredModel.take, stored)),
        )
    )


def given_names(optimizer: Optimizer) -> dict[Tensor, str]:
    """Return the names that an optimizer was given, as by `AdamW(model.named_parameters())`; empty if it has none."""
    names: dict[Tensor, str] = {}
    for group in optimizer.param_groups:
        names.update(zip(group["params"], group.get("param_names", ()), strict=False))
    return names


class ParameterNames:
    """The names of an optimizer's parameters.

    The first of these that exists: the name given to the optimizer, as by `AdamW(model.named_parameters())`; the name
    in the last model passed to `add`; ``parameter 3``, its position among all parameters.
    """

    def __init__(self) -> None:
        self._in_models: dict[Tensor, str] = {}

    def add(self, model: nn.Module) -> None:
        """Record the names that a model has for its parameters."""
        self._in_models.update({one: name for name, one in model.named_parameters()})

    def of(self, parameter: Tensor, optimizer: Optimizer) -> str:
        """Return the name of a parameter of an optimizer."""
        name = given_names(optimizer).get(parameter) or self._in_models.get(parameter)
        if name is None:
            every = (one for group in optimizer.param_groups for one in group["params"])
            name = next((f"parameter {number}" for number, one in enumerate(every) if one is parameter), "")
        return name

    def watches(self, parameters: Iterable[Tensor], optimizer: Optimizer) -> dict[Tensor, Watch]:
        """Return the observers' callback for the step of each parameter; empty if there are no observers."""
        if not everywhere:
            return {}
        found = {parameter: step(self.of(parameter, optimizer)) for parameter in parameters}
        return {parameter: watch for parameter, watch in found.items() if watch is not None}
