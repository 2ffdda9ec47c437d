"""Starts lowp in the processes of `lowp run`, then runs the interpreter's own sitecustomize.

`lowp run` puts this folder first on PYTHONPATH, so that the processes that a script starts find it too. It removes
itself from this process's sys.path, so that the script sees its usual path.
"""

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _here]
if os.environ.get("LOWP_PRECISION", "").strip():
    try:
        from lowp.launch import boot
    except ImportError as _error:
        print(f"lowp run: {sys.executable} cannot import lowp ({_error}): it runs without", file=sys.stderr)
    else:
        boot.start()
_own = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401  (the interpreter's own, if there is one)
except ModuleNotFoundError as _error:
    if _error.name != "sitecustomize":
        raise
    sys.modules["sitecustomize"] = _own
