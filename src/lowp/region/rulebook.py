"""The plan of a policy for each function and module path, computed once, and the report of the rules that were used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.compat import remembered_by_identity
from lowp.errors import InvalidInput, counted
from lowp.exponents import is_flexpoint
from lowp.formats import ScaledFormat
from lowp.ops import rows, table
from lowp.ops.call import Call, Quick
from lowp.ops.casting import result_dtype
from lowp.ops.generic import sixteen_bit
from lowp.ops.int16.masks import has_integer_operands
from lowp.ops.multihead import with_projections
from lowp.ops.rows import BY_ITSELF, Row
from lowp.policy import Policy, Rule
from lowp.presets import PRESETS
from lowp.region.handover import HandOver, Way, as_it_is, as_usual, hand_over, handed_over, quickly, while_small

_NO_RULE = Rule()
_LEFT_ALONE = frozenset((torch.float64, torch.complex32, torch.complex64, torch.complex128))
_BACKWARD = ("backward", "grad")
_MOST = 4096  # plans that are known under a policy
_OF_PRESETS = frozenset(rule for preset in PRESETS.values() for rule in preset.policy.rules)


@dataclass(frozen=True, slots=True, eq=False)  # of a NamedTuple the interpreter looks up each field anew
class Plan:
    """How calls of one function at one path run: its table row, the rule that matches it, and the runner."""

    row: Row
    rule: Rule | None
    run: Callable[[Call], Any] | None
    at_site: Callable[[Call], Any] | None = None  # the runner for exponents of sites, or scales from earlier steps
    rounds: bool = False  # the op is a contraction and the rule rounds it
    looks: bool = False  # a cast depends on the values or draws random numbers: a trace would keep those of one run
    way: HandOver | None = None  # set if torch's own dispatcher can carry out the rule
    quick: Quick | None = None  # fast path of the usual calls
    ways: tuple[Way, ...] = ()  # to be tried in this order before the runner, without observers
    is_delayed: bool = False  # a cast has a scale from earlier steps
    suspends: bool = False  # the function is a backward pass, to which no rule applies
    inner: Rule | None = None  # that of an attention's projections, if it is another one


Plans = dict[Callable[..., Any], "Plan | None"]
_OF_BACKWARD = Plan(Row("backward", "structural"), None, None, suspends=True)  # in no table; runs without rules


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

    @property
    def complaint(self) -> str:
        """What is said of them."""
        rules = "; ".join(f"rule {self.policy.rules.index(rule) + 1} ({rule})" for rule in self.unused_by_user)
        ops = ", ".join(self.ops) or "none"
        return f"policy {self.policy.name or 'unnamed'}: nothing matched {rules}. Ops under a rule so far: {ops}"

    def __str__(self) -> str:
        lines = [f"policy {self.policy.name or 'unnamed'}: {counted(len(self.ops), 'op')} ran under its rules"]
        lines += [f"  unused rule {self.policy.rules.index(rule) + 1}: {rule}" for rule in self.unused]
        lines += [f"  no rule for {name}" for name in self.unseen]
        lines += [f"  in fp32 for want of a kernel: {name}" for name in self.widened]
        lines += [f"  left as it is, as under torch.autocast: {name}" for name in self.left_alone]
        lines += [f"  not rounded, as no rule names it: {name}" for name in self.unrounded]
        if not self.audited:
            lines.append("  contractions inside other functions were not watched: strict=True watches them")
        return "\n".join(lines)


class Rulebook:
    """A policy with its plans for (function, path), each computed once, and the record of used rules and missed ops."""

    def __init__(self, policy: Policy, strict: bool) -> None:
        self.policy, self.strict, self.uses_paths = policy, strict, policy.uses_paths
        self._plans: dict[str, Plans] = {}
        self.passing: set[Callable[..., Any]] = set()  # functions that run as they are, at every path
        self._used: set[Rule] = set()
        self._ops: dict[str, None] = {}
        self._unseen: dict[str, None] = {}
        self._unrounded: dict[str, None] = {}
        self._widened: dict[str, None] = {}
        self.left_alone: dict[str, None] = {}
        self.has_rounded = False
        self.names: dict[tuple[Callable[..., Any], str], str] = {}  # attribute names of the plans in `compiled`
        self.compiled = SimpleNamespace()  # the plans that compiled code reads
        self._refuses = any(sixteen_bit(rule.output) for rule in policy.rules)
        self._masks = has_integer_operands(policy)

    @cached_property
    def traced(self) -> Rulebook:
        """The rulebook of the same policy under torch.compile."""
        return traced(self.policy, self.strict)

    def plans(self, path: str) -> Plans:
        """Return the plans known for a module path. If no rule has a path, all paths share one dict."""
        return self._plans.setdefault(path if self.uses_paths else "", {})

    def find(self, function: Callable[..., Any], path: str) -> Plan | None:
        """Compute and keep the plan of a function; None for functions that are neither cast nor shielded.

        Raises InvalidInput in a strict region for a contraction that no rule matches.
        """
        plan = self._planned(function, path)
        if plan is not None and not plan.suspends:
            self._note_found(plan, path)
        self.plans(path)[function] = plan
        return plan

    def _note_found(self, plan: Plan, path: str) -> None:
        row = plan.row
        if plan.rule is not None:
            self._used.update({plan.rule, plan.inner or plan.rule})
            self._ops[row.name] = None
        elif row.is_contraction and self.policy.rules:
            self.missed(f"{row.name} in {path}" if path else row.name)
        if (row.product or row.name in rows.MADE_OF_PRODUCTS) and self.policy.rules and _leaves_wide(row, plan.rule):
            self._unrounded[f"{row.name} in {path}" if path else row.name] = None

    def _planned(self, function: Callable[..., Any], path: str) -> Plan | None:
        """Return the plan of a function, which is computed once for all rulebooks of the policy."""
        if torch.compiler.is_compiling():
            return self._plan(function, path)
        known, key = _plans_of(self.policy), (function, path if self.uses_paths else "")
        if key not in known:
            if len(known) >= _MOST:
                known.clear()
            known[key] = self._plan(function, path)
        return known[key]

    def _plan(self, function: Callable[..., Any], path: str) -> Plan | None:
        if (row := table.row_of(function, self.policy.table)) is not None:
            return self._plan_of(row, function, path)
        return _OF_BACKWARD if table.name_of(function) in _BACKWARD else None

    def _plan_of(self, row: Row, function: Callable[..., Any], path: str) -> Plan | None:
        rule = self.policy.match(row.name, row.op_class, path) or self._of_contractions(row, path)
        if row.runner == "generic:refused" and not self._refuses:
            row = replace(row, runner="generic:wide")
        quick = row.quickly(rule)
        if rule is not None and (at_sites := _at_sites(row, rule, quick)) is not None:
            return at_sites
        rounds = bool(row.is_contraction or row.product) and rule is not None and not rule.is_empty
        looks = rule is not None and (_looks(rule) or row.runner.startswith("recurrent:"))
        run, way = self._runner(row, rule), hand_over(function, row, rule, self.main_dtype())
        if (inner := self._of_projections(row, rule, path)) is not None:
            run = with_projections(inner.current)
            return Plan(row, rule, run, None, rounds, looks or _looks(inner), inner=inner)
        is_plain = run is None and way is None and row.op_class != "structural"
        keeps_less = rule is None and run is not None and row.masked  # for backward
        ways = (as_it_is,) if is_plain else (while_small,) if keeps_less else _ways(way, quick)
        return Plan(row, rule, run, None, rounds, looks, way, quick, ways)

    def _runner(self, row: Row, rule: Rule | None) -> Callable[[Call], Any] | None:
        """Return what runs an op under a rule where it does not run as it is."""
        if rule is None and self._masks and row.masked:
            return rows.runner(row.masked)
        always = row.op_class == "promote" or row.runner == "generic:refused"
        return row.run(rule) if always or (rule is not None and not rule.is_empty) else None

    def _of_projections(self, row: Row, rule: Rule | None, path: str) -> Rule | None:
        """Return the rule of linear layers for the projections of an attention, unless a rule names the attention."""
        if row.name != "multi_head_attention_forward" or rule is None or row.name in rule.ops:
            return None
        found = self.policy.match("linear", "contraction", path)
        return None if found is rule else found

    def _of_contractions(self, row: Row, path: str) -> Rule | None:
        """Return the rule of contractions for a product that torch only promotes, if its results stay as wide."""
        rule = self.policy.match(row.name, "contraction", path) if row.product else None
        return rule if rule is not None and rule.output is None else None

    def missed(self, name: str) -> None:
        """Note a contraction that no rule matches. Raises InvalidInput in a strict region."""
        self._unseen[name] = None
        if self.strict:
            raise InvalidInput(
                f"no rule of policy {self.policy.name or 'unnamed'} matches the contraction {name}: add one, such as "
                f"Rule.of({name.partition(' ')[0]!r}, input=..., weight=...), or one without casts to leave it "
                "unrounded, or omit strict=True"
            )

    def missed_script(self, module: str) -> None:
        """Note a TorchScript module, to whose ops no rule can apply. Raises InvalidInput in a strict region."""
        self._unseen[f"the TorchScript module {module}"] = None
        if self.strict:
            raise InvalidInput(
                f"module {module} is TorchScript's, whose ops no rule of policy {self.policy.name or 'unnamed'} "
                "reaches: call the module itself, without torch.jit.script or torch.jit.trace, or omit strict=True"
            )

    def note(self, op: str, first: Tensor | None) -> None:
        """Note by its first operand whether a contraction under a rule is rounded or left as it is.

        float64, complex and MKLDNN operands are left as they are, as under torch.autocast. In a strict region such
        operands raise InvalidInput.
        """
        if first is None or (first.dtype not in _LEFT_ALONE and not first.is_mkldnn):
            self.has_rounded |= first is not None and first.is_floating_point()
            return
        kind = "MKLDNN" if first.is_mkldnn else str(first.dtype).removeprefix("torch.")
        self.left_alone[f"{op} in {kind}"] = None
        if self.strict:
            raise InvalidInput(
                f"policy {self.policy.name or 'unnamed'} rounds {op}, but its operands are {kind}, which is not "
                "rounded, as under torch.autocast: convert the model and its inputs with float(), or omit strict=True"
            )

    def widen(self, function: Callable[..., Any], path: str, device: str) -> Plan:
        """Note that a function has no 16-bit kernel on a device, and plan it in fp32 for all later calls."""
        plan = self.plans(path)[function]
        assert plan is not None
        self._widened[f"{plan.row.name} on {device}"] = None
        given = plan.rule or _NO_RULE
        rule = replace(given, input=Cast(cast(Any, "fp32")))
        widened = Plan(replace(plan.row, runner="generic:wide", product=""), rule, rows.runner("generic:wide"))
        self.plans(path)[function] = widened
        return widened

    def report(self) -> Report:
        """Return the report so far, of this rulebook and of code compiled under the same policy."""
        both = (self, self.traced)
        return Report(
            self.policy,
            self.policy.unused(self._used | both[1]._used),
            tuple(dict.fromkeys(name for one in both for name in one._unseen)),
            tuple(self._widened),
            tuple(dict.fromkeys(name for one in both for name in one._ops)),
            self.strict,
            tuple(dict.fromkeys(name for one in both for name in one.left_alone)),
            tuple(dict.fromkeys(name for one in both for name in one._unrounded)),
        )

    @property
    def is_flexpoint(self) -> bool:
        """Whether any rule writes results under exponents that belong to sites."""
        return any(is_flexpoint(rule.output) for rule in self.policy.rules)

    @property
    def is_delayed(self) -> bool:
        """Whether any rule casts operands under scales from earlier steps."""
        return any(rule.is_delayed for rule in self.policy.rules)

    @property
    def has_run(self) -> bool:
        """Whether any op has been looked up. Before that, an unused rule means nothing."""
        both = (self, self.traced)
        return any(plan is not None for one in both for plans in one._plans.values() for plan in plans.values())

    def main_dtype(self) -> torch.dtype:
        """Return the dtype that contractions write and torch.get_autocast_dtype returns."""
        row = table.TABLES[self.policy.table]["linear"]
        rule = self.policy.match(row.name, row.op_class)
        return torch.float32 if rule is None else result_dtype(rule.output)


@remembered_by_identity
def _plans_of(policy: Policy) -> dict[tuple[Callable[..., Any], str], Plan | None]:
    """Return the dict of plans known under a policy, by function and module path."""
    return {}


def _under(rule: Rule, run: Callable[[Call], Any]) -> Callable[[Call], Any]:
    """Return a runner that applies `rule` instead of the rule of the call."""

    def runner(call: Call) -> Any:
        return run(call.inner(call.func, call.args, call.kwargs, call.op, rule))

    return runner


@cache
def traced(policy: Policy, strict: bool) -> Rulebook:
    """Return the single rulebook of a policy under torch.compile, which would recompile for every new object."""
    return Rulebook(policy, strict)


def _at_sites(row: Row, rule: Rule, quick: Quick | None) -> Plan | None:
    """Return the plan of an op whose results, or whose operands' scales, have sites; None of others."""
    if rule.output is not None and is_flexpoint(rule.output):
        # without sites, as under torch.compile and torch.func, each tensor's exponent comes from its own maximum
        alone = replace(rule, output=Cast(rule.output.format, rule.output.rounding))
        at_site = partial(rows.runner(row.at_site), row)
        alone_run = _under(alone, row.run(alone))
        return Plan(row, rule, alone_run, at_site, row.is_contraction, True, None, quick, _ways(None, quick))
    if not rule.is_delayed:
        return None
    run = row.run(rule) if row.at_site == BY_ITSELF else None
    # other ops, and those without sites, have scales of the present step
    return Plan(row, rule, _under(rule.current, row.run(rule.current)), run, True, True, is_delayed=True)


def _ways(way: HandOver | None, quick: Quick | None) -> tuple[Way, ...]:
    """Return the ways of a call in order: torch's dispatcher first where a device runs most calls by it.

    On a CPU it comes after small linear layers, see `lowp.ops.trilinear.is_small`.
    """
    quicks = () if quick is None else (quickly,)
    if way is None or not way.usual:
        return quicks if way is None else (*quicks, handed_over)
    return (*quicks, as_usual, handed_over) if way.may_be_small else (as_usual, handed_over, *quicks)


def _leaves_wide(row: Row, rule: Rule | None) -> bool:
    """Whether an op runs in fp32 though no rule names it for that."""
    if rule is None:
        return True
    casts = [to for to in (rule.input, rule.weight, rule.output) if to is not None]
    return row.name not in rule.ops and all(str(to) == "fp32" for to in casts)


def _looks(rule: Rule) -> bool:
    return any(to.is_stochastic or isinstance(to.format, ScaledFormat) for to in rule.casts)
