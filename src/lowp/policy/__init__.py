"""A policy: which number format every tensor of a training step is rounded to, as rules that are data. No torch.

A rule names ops (or classes of ops) and modules, and gives one cast for each role a tensor plays there. The first rule
that matches wins. A policy is frozen, hashable, printable; it is read from and written to TOML.
"""

from lowp.policy.policies import Policy, check_ops
from lowp.policy.rules import HADAMARD_SIZES, OP_CLASSES, Accumulation, Operands, Rule

__all__ = ["HADAMARD_SIZES", "OP_CLASSES", "Accumulation", "Operands", "Policy", "Rule", "check_ops"]
