"""Make the links of README.md lead to the repository, for the page of a package index: `absolute_links.py ADDRESS`.

python .ci/absolute_links.py https://github.com/OWNER/NAME/blob/v1.0.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def absolute(text: str, address: str) -> str:
    """Return Markdown whose relative links begin with `address`; pictures are asked for as files, not as pages."""

    def replaced(match: re.Match[str]) -> str:
        picture, target = match[1], match[2]
        return f"{picture}({address}/{target}{'?raw=true' if picture.startswith('!') else ''})"

    return re.sub(r"(!?\[[^\]]*\])\((?![a-z]+:|#)([^)\s]+)\)", replaced, text)


if __name__ == "__main__":
    README.write_text(absolute(README.read_text(encoding="utf-8"), sys.argv[1].rstrip("/")), encoding="utf-8")
