"""Policies: lists of rules, of which the first that matches wins, read from and written to TOML."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lowp import casts
from lowp.casts import Cast
from lowp.errors import InvalidInput, UnknownName, check_name, unknown
from lowp.loss_scale import LossScale
from lowp.policy.rules import (
    CAST_ROLES,
    OF_OPERANDS,
    OP_CLASSES,
    PRODUCTS,
    Rule,
    carried,
    check_text,
    is_like,
    known_keys,
)

_LONGEST_TEXT = 1 << 18  # bytes of a policy: thousands of rules
_MOST_DOTS = 8
_STRING = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|'[^'\n]*'")


@dataclass(frozen=True)
class Policy:
    """A list of rules, of which the first match applies; the op table; and the format that stores the parameters.

    `parameters=None` leaves the parameters unchanged (fp32). `table` is the op table: ``lowp-1`` is the same on
    every device; ``torch-2.13-cpu`` and ``torch-2.13-cuda`` are torch's own lists. `loss_scale` is the default of a
    run with this policy; None: dynamic if gradients are rounded to a narrow exponent. A region alone does not scale the
    loss.
    """

    rules: tuple[Rule, ...] = ()
    parameters: Cast | None = None
    table: str = "lowp-1"
    name: str = field(default="", compare=False)
    loss_scale: LossScale | None = None

    TABLES = ("lowp-1", "torch-2.13-cpu", "torch-2.13-cuda")

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))
        check_text(self.name, "the name of a policy")
        check_name("op table", self.table, self.TABLES)
        if self.parameters is not None:
            object.__setattr__(self, "parameters", carried("parameters", casts.parse(self.parameters)))
            if self.parameters.is_delayed:
                raise InvalidInput(f"parameters={self.parameters}: {OF_OPERANDS} {self.parameters.current}")
        if self.loss_scale is not None:
            object.__setattr__(self, "loss_scale", LossScale.parse(self.loss_scale))

    def match(self, op: str, op_class: str, path: str = "") -> Rule | None:
        """The first rule for this op of this class at this module path, or None."""
        return next((rule for rule in self.rules if rule.matches(op, op_class, path)), None)

    @property
    def uses_paths(self) -> bool:
        """Whether any rule asks where an op runs, so that a region must follow the modules."""
        return any(rule.where != "*" for rule in self.rules)

    def before(self, *rules: Rule) -> Policy:
        """The policy with these rules put first, so that they take precedence."""
        return replace(self, rules=(*rules, *self.rules))

    def unused(self, used: Iterable[Rule]) -> tuple[Rule, ...]:
        """The rules that are not among those used, in order."""
        seen = set(used)
        return tuple(rule for rule in self.rules if rule not in seen)

    # -- text -----------------------------------------------------------------------------------------------------
    def to_toml(self) -> str:
        """The policy as TOML, which `from_toml` reads back to an equal policy."""
        import tomli_w  # here, for only what writes a policy needs it

        return tomli_w.dumps(self.document())

    def document(self) -> dict[str, Any]:
        """The policy as plain data, with the keys of a policy file."""
        texts = {"name": self.name, "table": self.table, "parameters": str(self.parameters or "")}
        texts["loss_scale"] = "" if self.loss_scale is None else str(self.loss_scale)
        rules = [_rule_values(rule) for rule in self.rules]
        return {key: value for key, value in {**texts, "rule": rules}.items() if value}

    @classmethod
    def from_toml(cls, text: str, source: str = "policy") -> Policy:
        """A policy from TOML text of up to 256 KiB; `source` names it in errors.

        Raises InvalidInput for a text without keys, and with the near names for an unknown key, format, rounding or
        table.
        """
        if len(text) > _LONGEST_TEXT:
            raise InvalidInput(_too_long(source, len(text)))
        try:
            data = _read_toml(text)
        except ValueError as error:
            raise InvalidInput(f"{source} is not TOML: {error}") from None
        if not data:
            raise InvalidInput(
                f"{source} is empty: give rules, as `lowp policy show fp16 --toml` prints them, or the name of an op "
                'table, such as table = "lowp-1", for a policy without any'
            )
        known_keys(data, ("name", "table", "parameters", "loss_scale", "rule"), source)
        rules = data.pop("rule", [])
        if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
            raise InvalidInput(f"{source}: rules must be [[rule]] tables")
        if isinstance(data.get("loss_scale"), (int, float)):
            data["loss_scale"] = str(data["loss_scale"])
        try:
            given = _strings(data)
            parameters = casts.parse(given["parameters"]) if "parameters" in given else None
            parsed = tuple(_rule(rule, index) for index, rule in enumerate(rules, 1))
            scale = LossScale.parse(given["loss_scale"]) if "loss_scale" in given else None
            return cls(parsed, parameters, given.get("table", "lowp-1"), given.get("name", ""), scale)
        except ValueError as error:
            raise InvalidInput(f"{source}: {error}") from None

    @classmethod
    def load(cls, path: str | Path) -> Policy:
        """A policy from a TOML file."""
        path = Path(path)
        if not path.is_file():
            raise InvalidInput(
                f"there is no policy file {path}: give a TOML file, as `lowp policy show fp16 --toml` prints one"
            )
        size = path.stat().st_size
        if size > _LONGEST_TEXT:
            raise InvalidInput(_too_long(path, size))
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{path} is not UTF-8 text, which TOML requires: {error}") from None
        return cls.from_toml(text, str(path))

    def __str__(self) -> str:
        head = (
            f"policy {self.name or 'unnamed'} on op table {self.table}, parameters {self.parameters or 'as they are'}"
        )
        return "\n".join([head, *(f"  {index}. {rule}" for index, rule in enumerate(self.rules, 1))])


def _read_toml(text: str) -> dict[str, Any]:
    """Return the tables of TOML text. Raises ValueError for other text, or for deeper nesting than any policy has.

    Dots outside strings are counted first: the time to read a key grows with the square of its parts, and no key of a
    policy has two parts.
    """
    dots = max((line.count(".") for line in _STRING.sub("", text).splitlines()), default=0)
    if dots > _MOST_DOTS:
        raise ValueError(f"a line has {dots} dots outside strings, but a policy has no dotted keys")
    # the standard library's reader, or before Python 3.11 the package that it was taken from
    reader = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        data: dict[str, Any] = reader.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    return data


def _too_long(source: object, length: int) -> str:
    return f"{source} is {length:,} bytes long, and a policy has {_LONGEST_TEXT:,} at most: is it another file?"


def _rule_values(rule: Rule) -> dict[str, Any]:
    """Return the entries of a rule by the keys of a policy file."""
    values: dict[str, Any] = {"ops": list(rule.ops)} if rule.ops else {}
    if rule.where != "*":
        values["where"] = rule.where
    roles = (*CAST_ROLES, "accumulate")
    values |= {role: str(getattr(rule, role)) for role in roles if getattr(rule, role) is not None}
    return values | {product: getattr(rule, product).values() for product in PRODUCTS if getattr(rule, product)}


def _rule(data: Mapping[str, object], index: int) -> Rule:
    place = f"rule {index}"
    known_keys(data, [one.name for one in fields(Rule)], place)
    ops = data.get("ops", ())
    if isinstance(ops, str):
        ops = (ops,)
    if not isinstance(ops, (list, tuple)) or not all(isinstance(op, str) for op in ops):
        raise InvalidInput(f'{place}: ops must be a list of names, as in ["linear", "conv*"], not {ops!r}')
    try:
        products: dict[str, Any] = {key: data[key] for key in PRODUCTS if key in data}
        return Rule.of(*ops, **_strings({key: data[key] for key in data if key not in ("ops", *PRODUCTS)}), **products)
    except ValueError as error:
        raise InvalidInput(f"{place}: {error}") from None


def _strings(data: Mapping[str, object]) -> dict[str, str]:
    strings = {}
    for key, value in data.items():
        if not isinstance(value, str):
            raise InvalidInput(f'{key} must be text, as in {key} = "fp16", not {value!r}')
        strings[key] = value
    return strings


def check_ops(policy: Policy, known: Iterable[str]) -> None:
    """Raise UnknownName for a rule with an op or class that is not in the table (a pattern must match one)."""
    names = [*OP_CLASSES, *known]
    for rule in policy.rules:
        for op in rule.ops:
            if not any(is_like(name, op) for name in names):
                raise UnknownName(f"rule {str(rule)!r}: " + unknown("op", op, names, shown=OP_CLASSES))
