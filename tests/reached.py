"""A plugin of pytest for `mutants.py`: notes the tests that enter functions around places, or runs those first.

LOWP_REACHED is a JSON file of tests by place, `file:line` in lowp. LOWP_PLACE is the place whose tests come first, the
slow ones of them last; where it is empty, the tests that reach each place are written into the file. What runs on
import, and in other processes, is reached by none.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Generator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType, FrameType
from typing import cast

import pytest

FILE = Path(os.environ["LOWP_REACHED"])
PLACE = os.environ["LOWP_PLACE"]
PROCESSES, SLOW = "processes", "slow"  # in the place of a place: the tests that start some, and those of some seconds
SECONDS = 1.5  # with what noting takes


def pytest_configure(config: pytest.Config) -> None:
    if not PLACE:
        config.pluginmanager.register(Noted())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if PLACE:
        found = json.loads(FILE.read_text())
        first, slow = set(found[PLACE]), set(found[SLOW])
        items.sort(key=lambda item: (item.nodeid not in first, item.nodeid in slow))


class Noted:
    """Notes each test at the places whose functions it enters."""

    def __init__(self) -> None:
        self.found: dict[str, set[str]] = {place: set() for place in (*json.loads(FILE.read_text()), PROCESSES, SLOW)}
        self.around: dict[int, tuple[CodeType, list[str]]] = {}  # the places in codes, which are held: by their ids
        self.entered: set[int] = set()  # the codes that the test has entered
        self.root = str(Path(cast(str, cast(ModuleSpec, find_spec("lowp")).origin)).parent)
        self.files = {os.path.join(self.root, place.partition(":")[0]) for place in self.found if ":" in place}
        self.test = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.test = item.nodeid
        self.entered.clear()
        started, ended = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
        sys.settrace(self.enter)
        threading.settrace(self.enter)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            if resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt > ended:
                self.found[PROCESSES].add(self.test)
            if time.monotonic() - started > SECONDS:
                self.found[SLOW].add(self.test)

    def enter(self, frame: FrameType, *_: object) -> None:
        code = frame.f_code
        if code is BaseProcess.start.__code__:  # which a server may fork that is nobody's child here
            self.found[PROCESSES].add(self.test)
        if code.co_filename in self.files and id(code) not in self.entered:
            self.entered.add(id(code))
            if id(code) not in self.around:
                self.around[id(code)] = code, self.within(code)
            for place in self.around[id(code)][1]:
                self.found[place].add(self.test)

    def within(self, code: CodeType) -> list[str]:
        name = os.path.relpath(code.co_filename, self.root).replace(os.sep, "/")
        return [one for line in {line for *_, line in code.co_lines()} if (one := f"{name}:{line}") in self.found]

    def pytest_sessionfinish(self) -> None:
        FILE.write_text(json.dumps({place: sorted(tests) for place, tests in self.found.items()}))
