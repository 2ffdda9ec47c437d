"""`python -m lowp` is the command `lowp`."""

from __future__ import annotations

import sys

from lowp.cli import main

if __name__ == "__main__":
    sys.exit(main())
