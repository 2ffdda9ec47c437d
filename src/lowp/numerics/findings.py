"""The findings of a profile and of a monitor: the meaning of each number, the cause, and advice. No torch."""

from dataclasses import dataclass

from lowp.errors import UnknownName, unknown
from lowp.files import table


@dataclass(frozen=True)
class Kind:
    """One kind of finding, whose number never changes."""

    id: str
    title: str
    meaning: str
    cause: str
    change: str
    source: str = ""
    brief: str = ""  # what to do, in a line
    severity: str = ""  # of a finding of a profile, and in few words what to do, and what that does
    act: str = ""
    effect: str = ""

    @property
    def advice(self) -> str:
        """What to do, in a line."""
        return self.brief or self.change


@dataclass(frozen=True)
class Finding:
    """A finding of one profile. `severity`: ``error`` if training suffers, ``warning`` if it may.

    It, `change` and `effect` are those of the kind where they are not given.
    """

    id: str
    summary: str
    evidence: str
    modules: tuple[str, ...] = ()
    severity: str = ""
    change: str = ""
    effect: str = ""

    def __post_init__(self) -> None:
        row = self.kind
        for name, usual in (("severity", row.severity), ("change", row.act), ("effect", row.effect)):
            object.__setattr__(self, name, getattr(self, name) or usual)

    @property
    def kind(self) -> Kind:
        """The kind of this finding."""
        return FINDINGS[self.id]

    def document(self) -> dict[str, object]:
        """Plain data."""
        names = ("id", "severity", "summary", "evidence", "change", "effect")
        return {**{name: getattr(self, name) for name in names}, "modules": list(self.modules)}


FINDINGS = {id: Kind(id, **row) for id, row in table("numerics/findings.toml").items()}


def explained(id: str) -> str:
    """Return the full description of a kind of finding; raises UnknownName, with similar names, for another id."""
    kind = FINDINGS.get(id.upper())
    if kind is None:
        raise UnknownName(unknown("finding", id, FINDINGS))
    source = f"\n\nSource: {kind.source}" if kind.source else ""
    return f"{kind.id}: {kind.title}\n\n{kind.meaning}\n\nWhy: {kind.cause}\n\nWhat to do: {kind.change}{source}"
