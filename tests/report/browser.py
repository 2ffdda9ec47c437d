"""A headless Chromium that a test controls by keys like a user, over the DevTools protocol on a pair of pipes."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_PATIENCE = 120.0  # seconds
_KEYS = {"Tab": 9, "Enter": 13, " ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40}
_TEXTS = {"Enter": "\r", " ": " "}
# the browser reads from descriptor 3 and writes to 4; those given may be 3 or 4 themselves
_WITH_PIPES = """
import fcntl, os, sys
given = [fcntl.fcntl(int(one), fcntl.F_DUPFD, 10) for one in sys.argv[1:3]]
for one, wanted in zip(given, (3, 4)):
    os.dup2(one, wanted)
    os.close(one)
os.execvp(sys.argv[3], sys.argv[3:])
"""


class Page:
    """A page in a new browser: ``with Page(file) as page: page.press("Tab")``."""

    def __init__(self, file: Path, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        assert BROWSER is not None
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WITH_PIPES, str(theirs_in), str(theirs_out), *command],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out, self._unread, self._numbers = ours_in, ours_out, b"", count(1)
        self._session = ""
        try:
            self._open(file, width, height, dark)
        except BaseException:
            self.close()
            raise

    def _open(self, file: Path, width: int, height: int, dark: bool) -> None:
        (target,) = (one for one in self.call("Target.getTargets", {})["targetInfos"] if one["type"] == "page")
        attached = self.call("Target.attachToTarget", {"targetId": target["targetId"], "flatten": True})
        self._session = attached["sessionId"]
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.call("Page.navigate", {"url": file.as_uri()})
        while self.value("location.protocol + document.readyState") != "file:complete":
            time.sleep(0.02)
        self.call("Page.bringToFront", {})

    def call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            assert select.select([self._in], [], [], _PATIENCE)[0], "the browser does not answer"
            read = os.read(self._in, 1 << 20)
            assert read, "the browser has ended"
            self._unread += read
        first, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message

    def press(self, key: str, times: int = 1) -> None:
        """Press a key and let it go: Tab, an arrow, Home, End, Enter, the space bar."""
        for _ in range(times):
            given: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
            text = {"text": _TEXTS[key]} if key in _TEXTS else {}
            self.call("Input.dispatchKeyEvent", {"type": "keyDown" if text else "rawKeyDown", **given, **text})
            self.call("Input.dispatchKeyEvent", {"type": "keyUp", **given})

    def value(self, expression: str) -> Any:
        """Evaluate JavaScript in the page."""
        found = self.call("Runtime.evaluate", {"expression": expression, "returnByValue": True})
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, file: Path) -> None:
        """Save the whole page as a PNG."""
        taken = self.call("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True})
        file.write_bytes(base64.b64decode(taken["data"]))

    def close(self) -> None:
        """End the browser."""
        for one in (self._in, self._out):
            os.close(one)
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
