"""The colours of the terminal, the reports and the figures, and what each of them means.

A word stands beside every colour. Text in any of them has a contrast of 4.5 to 1 or more on its ground (WCAG 2.2).
"""

from typing import NamedTuple


class Grade(NamedTuple):
    """How a judgement looks: a mark, a colour on a light and on a dark ground, and a style of rich for the terminal."""

    mark: str
    light: str
    dark: str
    terminal: str


GRADES = {
    "safe": Grade("✓", "#1a6b34", "#7fd49a", "green"),
    "with care": Grade("!", "#8a5a00", "#ffcf70", "yellow"),
    "loses": Grade("✗", "#b3261e", "#ff8a80", "red"),
    "not judged": Grade("?", "#555c68", "#aab2bf", "cyan"),
}
# of figures, whose ground is white; lightness differs, so that hue is not needed to tell lines apart
SERIES = ("#2f6db5", "#8b2f7a", "#1a6b34", "#8a5a00", "#b3261e", "#117a8b", "#555c68")
BLUE, PURPLE, GREEN, AMBER, RED, CYAN, GREY = SERIES
_PRECISIONS = {
    **{"fp32": GREY, "fp16": PURPLE, "bf16": BLUE, "flex": AMBER, "dfp16": GREEN},
    **{"fp8": RED, "e4m3": RED, "int8": CYAN},
}
# of memory, in the order of the bars: pairs of a dark and a light one
PARTS = {
    **{"weights": BLUE, "masters": "#a9c8ea"},
    **{"gradients": GREEN, "optimizer": "#a8d5b5"},
    **{"activations": PURPLE, "casts": "#e0b3d7"},
    **{"temporaries": AMBER, "other": "#e3cd9c"},
    **{"update": CYAN, "slack": "#ffffff"},
}
_GROUNDS = {
    "text": ("#1a1c20", "#e6e8ec"),
    "muted": ("#555c68", "#aab2bf"),
    "back": ("#ffffff", "#14161a"),
    "soft": ("#f3f5f8", "#1f2329"),
    "line": ("#c4cad3", "#444b57"),
    "first": (BLUE, "#86b4ff"),
    "second": (AMBER, "#ffcf70"),
}


def series(label: str, place: int = 0) -> str:
    """Return the colour of a precision by its label; of an unknown one that of its place in the figure."""
    known = (colour for name, colour in _PRECISIONS.items() if label.startswith(name))
    return next(known, SERIES[place % len(SERIES)])


def css() -> str:
    """Return the colours as variables of a style sheet, for light grounds and for dark ones."""
    both = {**_GROUNDS, **{name.replace(" ", "-"): (one.light, one.dark) for name, one in GRADES.items()}}
    light, dark = ("".join(f"--{name}:{pair[place]};" for name, pair in both.items()) for place in (0, 1))
    return f":root{{color-scheme:light dark;{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
