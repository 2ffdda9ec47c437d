"""The report of a region: used rules, contractions that no rule matched, and ops that ran in fp32."""

from __future__ import annotations

from dataclasses import dataclass

from lowp.policy import Policy, Rule
from lowp.presets import PRESETS

__all__ = ["Report"]

_OF_PRESETS = frozenset(rule for preset in PRESETS.values() for rule in preset.policy.rules)


@dataclass(frozen=True)
class Report:
    """What happened in a region so far.

    `unused`: rules that matched nothing, in order. `unseen`: contractions that no rule matched, as ``op`` or
    ``op in path``. `widened`: ops that ran in fp32 because the device has no 16-bit kernel, as ``op on device``. `ops`:
    ops that ran under a rule. `audited`: whether the dispatcher was watched too, so that contractions inside other
    functions count as seen or unseen. `left_alone`: contractions that a rule matches but whose operands are never
    rounded, as ``op in float64``. `unrounded`: ops made of products that only a rule with their name rounds.
    """

    policy: Policy
    unused: tuple[Rule, ...] = ()
    unseen: tuple[str, ...] = ()
    widened: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    audited: bool = False
    left_alone: tuple[str, ...] = ()
    unrounded: tuple[str, ...] = ()

    @property
    def unused_by_user(self) -> tuple[Rule, ...]:
        """The unused rules that are not a preset's: a preset has rules for ops that a model need not have."""
        return tuple(rule for rule in self.unused if rule not in _OF_PRESETS)

    def __str__(self) -> str:
        lines = [f"policy {self.policy.name or 'unnamed'}: {len(self.ops)} ops ran under its rules"]
        lines += [f"  unused rule {self.policy.rules.index(rule) + 1}: {rule}" for rule in self.unused]
        lines += [f"  no rule for {name}" for name in self.unseen]
        lines += [f"  in fp32 for want of a kernel: {name}" for name in self.widened]
        lines += [f"  left as it is, as under torch.autocast: {name}" for name in self.left_alone]
        lines += [f"  not rounded, as no rule names it: {name}" for name in self.unrounded]
        if not self.audited:
            lines.append("  contractions inside other functions were not watched: strict=True watches them")
        return "\n".join(lines)
