"""Stores the parameters of models in few bits and passes their masters to optimizers that are made later.

A model is converted before DistributedDataParallel or fully_shard gets its parameters; the optimizer is made after
that. Until then the fp32 values are kept with the model, and an optimizer claims those of its parameters.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lowp import distributed
from lowp.casts import Cast
from lowp.compat import unwrapped
from lowp.errors import InvalidInput
from lowp.exponents import SharedExponents, is_flexpoint
from lowp.optim.blockwise import BlockwiseOptimizer
from lowp.optim.exponents import FlexWeights
from lowp.optim.masters import MasterWeights
from lowp.optim.model_state import StoredModel, attach, owner_of
from lowp.optim.shards import is_fully_sharded, is_sharded, is_split_twice, is_zero, refuse_shards
from lowp.optim.state_dicts import parameters_of
from lowp.optim.storage import Storage
from lowp.presets import PRESETS, Preset

Optimizer: TypeAlias = torch.optim.Optimizer
_MODULUS = (1 << 61) - 1


def check_masters(preset: Preset) -> None:
    """Raise InvalidInput for masters that do not fit the format in which a preset stores parameters."""
    if is_flexpoint(preset.policy.parameters) and preset.masters.kind != "none":
        raise InvalidInput(
            f"masters={preset.masters}: in {preset.policy.parameters} weights and updates have their "
            "own exponents and no masters: omit masters, or use dfp16, whose parameters are fp32"
        )
    if preset.masters.kind != "none" and preset.policy.parameters is None:
        raise InvalidInput(
            f"masters={preset.masters} keeps the fp32 value of parameters in few bits, but {preset.name} "
            f"leaves the parameters in fp32: use {_stored(preset)}, or a policy with parameters="
        )
    if preset.masters.kind == "split" and str(preset.policy.parameters) != "bf16":
        raise InvalidInput(
            f"masters=split needs parameters in bf16, but {preset.name} stores parameters in "
            f"{preset.policy.parameters}: use bf16-storage, or masters='fp32'"
        )


def _stored(preset: Preset) -> str:
    """Return a preset that stores parameters in few bits and supports these masters, in the same format if possible."""
    if preset.masters.kind == "split":
        return "bf16-storage"
    name = f"{preset.name}-storage"
    return name if name in PRESETS else "fp16-storage or bf16-storage"


def _refuse_scripted(model: nn.Module, storage: str) -> None:
    if isinstance(model, torch.jit.ScriptModule):
        raise InvalidInput(
            f"the parameters of a TorchScript module cannot be stored in {storage}, because its state_dict() takes no "
            "hooks that give and take fp32: prepare the module itself and compile it with torch.compile, or take a "
            "precision that leaves parameters in fp32, such as fp16 or bf16"
        )


class _Prepared:
    """Models that were prepared, as long as they exist, each with what is known of it."""

    def __init__(self) -> None:
        self._models: list[tuple[Callable[[], nn.Module | None], Any]] = []

    def release(self, model: nn.Module) -> None:
        """Drop the fp32 values of a model's parameters that no optimizer has claimed, if there are any."""

    def _living(self) -> Iterator[tuple[nn.Module, Any]]:
        for reference, known in self._models:
            if (model := reference()) is not None:
                yield model, known

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_models": list(self._living())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "_models": [(weakref.ref(model), known) for model, known in state["_models"]]})


class MasterStorage(_Prepared):
    """Models whose parameters are stored in few bits, and optimizers that keep their masters."""

    def __init__(self, storage: Storage, seed: int) -> None:
        super().__init__()
        self.storage, self.seed = storage, seed

    def model(self, model: nn.Module) -> None:
        """Convert the parameters in place. Raises InvalidInput, with nothing changed, if the model is wrapped."""
        _refuse_scripted(model, str(self.storage.cast))
        convertible = [one for one in model.parameters() if one.is_floating_point() and owner_of(one) is None]
        self.storage.refuse(convertible)
        inner = unwrapped(model)
        if all(found() is not inner for found, _ in self._models):
            stored = StoredModel(self.storage)
            stored.store(inner, keep=self.storage.kind in ("fp32", "split"))
            attach(inner, stored)
            self._models.append((weakref.ref(inner), stored))

    def admit(self, optimizer: Optimizer, *models: nn.Module) -> None:
        """Raise InvalidInput for an optimizer that would train none of what is stored here, or with `models` will be.

        A flat parameter of which the weights are views, and the parameters of another model, are no model's own.
        """
        stored = [*models, *(model for model, _ in self._living())]
        owned = [one for model in stored for one in model.parameters()]
        given = parameters_of(optimizer)
        self.storage.refuse([one for one in [*owned, *given] if owner_of(one) is None])
        if owned and given and {id(one) for one in owned}.isdisjoint(map(id, given)):
            raise InvalidInput(
                "none of the optimizer's parameters belongs to a prepared model: it would train none of the weights "
                f"that are stored in {self.storage.cast}. Make the optimizer of model.parameters(); one of parameters "
                "outside of the model is not prepared"
            )

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Give an optimizer the masters of its parameters, wrapped in MasterWeights unless it keeps masters itself."""
        keeper: Any = optimizer.optim if is_zero(optimizer) else optimizer  # type: ignore[attr-defined]
        if not isinstance(keeper, (MasterWeights, BlockwiseOptimizer)):
            if self.storage.kind == "none":
                return optimizer
            keeper = optimizer = MasterWeights(optimizer, self.storage.cast, kind=self.storage.kind, seed=self.seed)
        for model, stored in self._living():
            names = [name for name, one in model.named_parameters(remove_duplicate=False) if owner_of(one) is keeper]
            if names:
                keeper.names.add(model)
                stored.names.update(names)
                stored.owners.append(keeper)
                keeper.set_masters(stored.claim(model, parameters_of(keeper)))
        return optimizer

    def release(self, model: nn.Module) -> None:
        """Drop the fp32 values of a model's parameters that no optimizer has claimed."""
        for found, stored in self._living():
            if found is unwrapped(model):
                stored.unclaimed.clear()


class FlexStorage(_Prepared):
    """Models whose parameters are stored under shared exponents, and optimizers that write all that they change."""

    def __init__(self, cast: Cast, exponents: SharedExponents | None) -> None:
        if exponents is None:
            raise InvalidInput(
                f"parameters={cast} needs a rule that rounds results in the same way, such as "
                f"Rule.of(output={str(cast)!r})"
            )
        super().__init__()
        self.cast, self.exponents = cast, exponents
        self._names: dict[Tensor, str] = {}

    def model(self, model: nn.Module) -> None:
        """Write the parameters, in place, under exponents that belong to their names."""
        _refuse_scripted(model, str(self.cast))
        refuse_shards(self.cast, model.parameters())
        if any(one.is_meta for one in model.parameters()):
            raise InvalidInput(
                f"a parameter on the meta device has no values to write in {self.cast}: materialize and initialize the "
                "model first (model.to_empty(device=...), then its weights), then call prepare"
            )
        new = {one: name for name, one in unwrapped(model).named_parameters() if one not in self._names}
        if not new:
            return
        prefix = f"model {len(self._models) + 1}: " if self._models else ""
        self._models.append((weakref.ref(unwrapped(model)), prefix))
        self.exponents.passes.keep_sites_of(model)
        with torch.no_grad():
            for parameter, name in new.items():
                self._names[parameter] = prefix + name
                if parameter.is_floating_point():
                    parameter.copy_(self.exponents.write(parameter, self.cast, f"weight of {prefix}{name}").values)
        self.exponents.flush()

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer wrapped so that it writes updates, weights and state."""
        if isinstance(optimizer, FlexWeights):
            return optimizer
        self._follow_shards()
        own_names = {one: self._names[one] for one in parameters_of(optimizer) if one in self._names}
        wrapped = FlexWeights(optimizer, self.cast, self.exponents, own_names, stored=own_names)
        for model, _ in self._living():
            if any(one in own_names for one in model.parameters()):
                wrapped.attach(model)
        return wrapped

    def _follow_shards(self) -> None:
        """Give the names of parameters that FSDP2 has sharded since to their shards. Raises InvalidInput for others."""
        for model, prefix in self._living():
            shards = {prefix + name: one for name, one in model.named_parameters() if is_sharded(one)}
            gathered = {id(one) for part in model.modules() if is_fully_sharded(part) for one in part.parameters()}
            refuse_shards(self.cast, [one for one in shards.values() if id(one) not in gathered or is_split_twice(one)])
            stored = {one: name for name, one in shards.items() if name in self._names.values()}
            self._names = {one: name for one, name in self._names.items() if name not in shards} | stored


Preparation: TypeAlias = MasterStorage | FlexStorage


def agree_on_masters(optimizers: Sequence[Optimizer]) -> None:
    """Make the masters equal on ranks whose stored parameters are equal. Every rank must call this.

    DistributedDataParallel sends the parameters of the first rank to all ranks, but not their masters. If only the
    masters differ, they are set to the values of the parameters. Shards are left alone.
    """
    group = distributed.world()
    if group is None or group.size() == 1:
        return
    keepers = [one for one in optimizers if isinstance(one, (MasterWeights, BlockwiseOptimizer))]
    pairs = [(one, p) for one in keepers for p in parameters_of(one) if not is_sharded(p)]
    stored = _checksum(parameter for _, parameter in pairs)
    masters = _checksum(keeper.master(parameter) for keeper, parameter in pairs)
    sums = torch.tensor([stored, masters, _MODULUS - stored, _MODULUS - masters], device="cpu")
    distributed.agree_on_maximum_(sums, group)
    # a value is equal on all ranks if its maximum and its minimum are
    same_stored, same_masters = (int(sums[i] + sums[i + 2]) == _MODULUS for i in (0, 1))
    if same_stored and not same_masters:
        for keeper, parameter in pairs:
            keeper.set_masters({parameter: parameter.detach().float()})


def _checksum(tensors: Iterable[Tensor]) -> int:
    """Return a checksum below `_MODULUS` of the tensors' bits and their order."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    total = 0
    for tensor in tensors:
        bits = tensor.detach().contiguous().view(words[tensor.element_size()]).to(torch.int64).flatten()
        places = torch.arange(1, bits.numel() + 1, device=bits.device)
        total = (total * 1_000_003 + int((bits * places).sum())) % _MODULUS
    return total
