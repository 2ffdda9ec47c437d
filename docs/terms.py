"""Link terms of the glossary where a page first uses them, if it does not link them itself."""

from __future__ import annotations

import re

# words of a text, and the anchor of the glossary; pages link ambiguous ones (site, format, cast) themselves
TERMS = {
    "contractions?": "contraction",
    "flushed": "flushed",
    "kernels?": "kernel",
    "loss scales?": "loss-scale",
    "lost updates?": "lost-update",
    "master weights": "master-weights",
    "(?:policy|policies)": "policy",
    "presets?": "preset",
    "recipes?": "recipe",
    "regions?": "region",
    "saturat(?:ed|es?)": "saturated",
    "shared exponents?": "shared-exponent",
    "skipped steps?": "skipped-step",
    "SQNR": "sqnr",
    "stochastic(?:ally| rounding)": "stochastic-rounding",
    "subnormals?": "subnormal",
    "ulps?": "ulp",
}
# where no link may stand: code, links, pictures, tags and headings
_KEPT = re.compile(
    r"^```.*?^```$|`[^`\n]*`|!?\[[^\]]*\]\([^)]*\)|<[^>\n]*>|^(?:#|:::)[^\n]*$", re.MULTILINE | re.DOTALL
)


def linked(text: str) -> str:
    """Return a page with a link at the first use of each term."""
    for words, anchor in TERMS.items():
        if f"glossary.md#{anchor})" in text:
            continue
        kept = [match.span() for match in _KEPT.finditer(text)]
        for match in re.finditer(rf"\b{words}\b", text, re.IGNORECASE):
            if not any(begin <= match.start() < end for begin, end in kept):
                text = f"{text[: match.start()]}[{match[0]}](glossary.md#{anchor}){text[match.end() :]}"
                break
    return text
