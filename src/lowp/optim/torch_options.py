"""Advice for arguments of torch's optimizers that lowp's optimizers do not have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lowp.errors import InvalidInput, unknown

_ONE_WAY = (
    "there is one implementation here, block by block, with the same results and without waiting for the device: "
    "leave it out"
)
_INSTEAD = {
    "fused": _ONE_WAY,
    "foreach": _ONE_WAY,
    "capturable": "counters and moments are on the device already: leave it out",
    "differentiable": "the update writes stored weights in place: use torch's optimizer on fp32 parameters",
    "amsgrad": (
        "the largest second moment is not kept here: wrap torch's optimizer, "
        "lowp.MasterWeights(torch.optim.AdamW(params, amsgrad=True))"
    ),
}


def refuse_others(kind: str, others: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise for unsupported arguments: InvalidInput for torch's own, TypeError for unknown ones.

    An argument of torch's that is None or False is accepted, since it requests nothing.
    """
    for name, value in others.items():
        if name not in _INSTEAD:
            allowed = [one for one in known if one not in ("params", "others")]
            raise TypeError(unknown(f"argument of {kind}", name, allowed))
        if value:
            raise InvalidInput(f"{kind} does not take {name}={value}: {_INSTEAD[name]}")
