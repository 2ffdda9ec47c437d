"""`python -m lowp` is the command `lowp`."""

import sys

from lowp.cli import main

if __name__ == "__main__":
    sys.exit(main())
