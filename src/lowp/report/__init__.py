"""Terminal tables, progress bars, pictures and HTML pages of measurements, as functions of plain documents."""

import sys


def can_show(characters: str, encoding: str | None = None) -> bool:
    """Return whether an encoding, by default that of standard output, has these characters."""
    try:
        characters.encode(encoding or sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
