"""Files of served models: the packed weights as they are, and how they were made."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowp import files
from lowp.errors import InvalidInput
from lowp.inference.modules import Served
from lowp.inference.quantizing import made_of, quantize_model
from lowp.portable.safetensors_file import Spool
from lowp.portable.sources import open_source

_KEY = "lowp.served"


def save(model: nn.Module, path: str | Path) -> None:
    """Write a model of `quantize_model` as a safetensors file, which `load` opens, and `lowp.load` as a state_dict.

    The file is written under a temporary name and renamed. Raises InvalidInput for another model.
    """
    target = Path(path)
    if target.suffix != ".safetensors":
        raise InvalidInput(f"{target} is no .safetensors file, as which served models are saved: give such a name")
    files.check_target(target)
    layers = {name: one for name, one in model.named_modules() if isinstance(one, Served)}
    made = dict(made_of(model)) | {
        "static": [name for name, one in layers.items() if not getattr(one.weight, "dynamic", True)]
    }
    with files.replacing(target) as file, Spool(files.target_of(target).parent) as spool:
        for name, tensor in model.state_dict().items():
            spool.add(name, [tensor], tuple(tensor.shape))
        spool.write(file, {_KEY: json.dumps(made)})


def load(model: nn.Module, path: str | Path) -> nn.Module:
    """Return a copy of a model with the packed weights of a file that `save` or ``lowp convert --serve`` wrote.

    The numbers that `model` has do not count. Raises InvalidInput for another file, and for one of another model.
    """
    with open_source(path) as source:
        text = source.metadata.get(_KEY)
        if text is None:
            raise InvalidInput(
                f"{path} holds no served model: give a file of lowp.inference.save or lowp convert --serve; lowp.load "
                "reads weights"
            )
        state = {name: source.stored[name]() for name in source.names()}
    try:
        made = json.loads(text)
        format, bits, attention, kept = (made[name] for name in ("format", "bits", "attention", "kept"))
        served = quantize_model(_finite(model), format, bits=bits, keep=kept, attention=attention)
        for name in made["static"]:
            layer: Any = served.get_submodule(name)
            layer.weight.dynamic = False
            layer.describe()
        _check(served, state)
        served.load_state_dict(state)
        made_of(served)["kept"].update(kept)
    except (InvalidInput, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise InvalidInput(f"{path} does not fit the model: {error}") from None
    return served


def _finite(model: nn.Module) -> nn.Module:
    """Return the model, or a copy with zeros for parameters that were never set: layers of NaN are not packed."""
    if all(bool(one.isfinite().all()) for one in model.parameters()):
        return model
    model = copy.deepcopy(model).requires_grad_(False)
    for one in model.parameters():
        one.zero_()
    return model


def _check(served: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Raise InvalidInput for a tensor whose dtype is another one than that of the model's."""
    for name, own in served.state_dict().items():
        given = state.get(name)
        if given is not None and given.dtype is not own.dtype:
            raise InvalidInput(f"{name} is {given.dtype}, where {own.dtype} belongs")
