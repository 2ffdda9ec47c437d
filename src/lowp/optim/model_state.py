"""A model whose `state_dict` gives and takes fp32, whatever format its parameters are stored in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lowp.errors import InvalidInput


class Attachment(NamedTuple):
    """The hooks of one attached model; `remove` takes them off."""

    handles: tuple[RemovableHandle, ...]

    def remove(self) -> None:
        """Take the hooks off: `state_dict` gives the stored format again."""
        for handle in self.handles:
            handle.remove()


def attach(
    model: nn.Module,
    master_of: Callable[[Tensor], Tensor | None],
    set_masters: Callable[[dict[Tensor, Tensor]], None],
) -> Attachment:
    """Make `model.state_dict()` give fp32 masters and `model.load_state_dict()` take fp32 (or any) values into them.

    `master_of(parameter)` is its fp32 value, or None for a parameter without one. `set_masters` is called once after a
    load, with the values by parameter; it also writes the parameters, since only it knows how they are rounded.
    """
    pending: dict[Tensor, Tensor] = {}

    def parameters() -> dict[str, Tensor]:
        return dict(model.named_parameters(remove_duplicate=False))

    def give(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        for name, parameter in parameters().items():
            master = master_of(parameter) if prefix + name in state else None
            if master is not None:
                state[prefix + name] = master.detach().clone()

    def remember(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        pending.clear()
        for name, parameter in parameters().items():
            value = state.get(prefix + name)
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point():
                pending[parameter] = value

    def take(module: nn.Module, incompatible: Any) -> None:
        set_masters(dict(pending))
        pending.clear()

    hooked: Any = model  # torch leaves these three without annotations
    return Attachment(
        (
            hooked.register_state_dict_post_hook(give),
            hooked.register_load_state_dict_pre_hook(remember),
            hooked.register_load_state_dict_post_hook(take),
        )
    )


def require_optimizer_state(state: Any) -> None:
    """Raise InvalidInput unless this is a dictionary as an optimizer's `state_dict` gives it."""
    if not isinstance(state, Mapping):
        raise InvalidInput(f"an optimizer's state is a dictionary as state_dict() gives it, not {type(state).__name__}")
    missing = [name for name in ("state", "param_groups") if name not in state]
    if missing:
        raise InvalidInput(f"an optimizer's state needs state and param_groups; missing: {', '.join(missing)}")
    if not isinstance(state["state"], Mapping):
        raise InvalidInput(f"the entry 'state' of an optimizer's state is a dictionary, not {state['state']!r}")
