"""The names of functions of torch by which ops are sorted, from `torch.toml`: its own lists, and what is no op."""

import re
from functools import cache
from pathlib import Path

# Python's reader of TOML takes 15 ms to load, which the first call of every process would wait for.
_LINES = re.compile(r'^(?:\[lists\.(\w+)\]$|(\w+) = "+([^"]*)")', re.MULTILINE)


def _read() -> dict[str, dict[str, tuple[str, ...]]]:
    """Return the names by device, '' for what is of no device, and kind."""
    found: dict[str, dict[str, tuple[str, ...]]] = {"": {}}
    text = Path(__file__).with_name("torch.toml").read_text(encoding="utf-8")
    for device, kind, names in _LINES.findall(text):
        if device:
            found[device] = {}
        else:
            found[next(reversed(found))][kind] = tuple(names.split())
    return found


LISTS = _read()
STRUCTURAL = frozenset(LISTS.pop("")["structural"])

# Python functions and composites that are made of listed ops alone, and what the lists do with them then
_COMPOSITES = {
    "cuda": {
        "lower_precision_fp": ("multi_head_attention_forward", "__rmatmul__", "lstm", "gru", "rnn_tanh", "rnn_relu"),
        "fp32": ("cross_entropy", "linalg_norm"),
        "promote": ("cat", "stack", "where"),  # they promote by themselves, in the same kernel
    },
    "cpu": {"lower_precision_fp": ("multi_head_attention_forward", "__rmatmul__"), "fp32": ("cross_entropy",)},
}
_KINDS = {"contraction": ("lower_precision_fp",), "promote": ("promote",)}
_WIDE = ("fp32", "fp32_set_opt_dtype", "fp32_append_dtype")


@cache
def devices_that_agree(op: str, op_class: str) -> frozenset[str]:
    """Return the devices where torch.autocast does with an op what its class says: lower it, promote or widen it."""
    kinds = _KINDS.get(op_class, _WIDE)
    return frozenset(
        device
        for device, lists in LISTS.items()
        for kind in kinds
        if op in _COMPOSITES[device].get(kind, ()) or any(name.partition(".")[0] == op for name in lists.get(kind, ()))
    )
