"""The state of a `Precision` in a checkpoint: its version and entries, and the check before anything is loaded."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from lowp.errors import InvalidInput, brief
from lowp.policy import Policy
from lowp.presets import Preset
from lowp.rng_state import check_rng_states

VERSION = 1
_ENTRIES = ("name", "policy", "loss_scale", "masters", "scaler", "steps", "skipped_steps", "seed", "random")


def lines_of(preset: Preset, seed: int) -> list[str]:
    """Return, line by line, what has to be equal on all ranks of a training; names may differ."""
    scale = [f"loss_scale.{name} = {value}" for name, value in asdict(preset.loss_scale).items()]
    policy = replace(preset.policy, name="", loss_scale=None).to_toml()
    return [f"seed = {seed}", f"masters = {preset.masters}", *scale, *policy.splitlines()]


def check(state: Any, preset: Preset, needs: Sequence[str]) -> None:
    """Raise InvalidInput for a state from which a precision of this preset, and with these needs, cannot continue."""
    if not isinstance(state, dict):
        raise InvalidInput(f"a precision's state must be a dictionary from state_dict(), not {type(state).__name__}")
    if state.get("version") != VERSION:
        raise InvalidInput(
            f"a precision's state of version {brief(state.get('version'))} cannot be read: this lowp reads {VERSION}"
        )
    missing = [name for name in _ENTRIES if name not in state]
    if missing:
        raise InvalidInput(f"a precision's state must have {', '.join(_ENTRIES)}; missing: {', '.join(missing)}")
    if not isinstance(state["policy"], str):
        raise InvalidInput(f"the policy of a precision's state must be TOML text, not {type(state['policy']).__name__}")
    if Policy.from_toml(state["policy"], "the checkpoint's policy") != preset.policy:
        raise InvalidInput(
            f"the checkpoint was trained in {state['name']} and this run is in {preset.name}: use "
            f"Precision({state['name']!r}), or load the model alone, whose state is fp32 in every precision"
        )
    for name, own in (("loss_scale", str(preset.loss_scale)), ("masters", str(preset.masters))):
        if state[name] != own:
            raise InvalidInput(
                f"the checkpoint was trained with {name}={brief(state[name])} and this run has {name}={own!r}: "
                "give the same to Precision, or load model and optimizer without the precision"
            )
    for name in ("steps", "skipped_steps"):
        if type(state[name]) is not int or not 0 <= state[name] < 2**63:
            raise InvalidInput(
                f"a precision's state with {name}={brief(state[name])}: give a number of steps, 0 or more"
            )
    for name in needs:
        if state.get(name) is None:
            raise InvalidInput(f"a precision's state has no {name}, which {preset.name} needs")
    check_rng_states(state["random"])
