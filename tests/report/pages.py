"""Pages of profiles made by hand, as text: a line an element, of all but the first those that stand not in the first.

    python tests/report/pages.py > tests/report/pages.txt

writes them anew, for which `test_pages.py` looks.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from lowp.loss_scale import LossScale
from lowp.numerics.advice import Advice, FormatVerdict
from lowp.numerics.findings import Finding
from lowp.numerics.part import Print
from lowp.numerics.prediction import Window
from lowp.numerics.record import Key, Octaves, OpSeen, Part, Record, StepSeen
from lowp.numerics.spectrum import Spectrum, Updates
from lowp.policy import Policy, Rule
from lowp.report.profile_html import page

LINEAR = Key("b.0.up", "linear", "output", "forward")
POLICY = Policy((Rule.of("contraction", where="a", input="fp16"),), loss_scale=LossScale.parse("1024"))


def record(size: float = 1.0) -> Record:
    part = Part()
    ops = (("b.0.up", "linear", "contraction"), ("b.0", "add", "pointwise"), ("", "mul", "pointwise"))
    for module, op, op_class in (*ops, ("", "loss", "wide"), ("b.1", "scaled_dot_product_attention", "contraction")):
        part.ops[module, op] = OpSeen(op_class, line="train.py:7" if op != "mul" else "")
    kinds: tuple[tuple[str, str, str, list[float]], ...] = (
        ("b.2", "relu", "output", [4.0]),  # whose op is not known
        ("", "mul", "output", [size]),
        ("", "loss", "grad", [1.0]),  # in fp32 in every precision
        ("b.1", "scaled_dot_product_attention", "grad", [2.0**-30, 2.0**-9]),
        ("b.0", "add", "output", [16.0]),
        ("b.0.up", "weight", "weight_grad", [0.5 * size]),
        ("b.0.up", "weight", "weight", [0.0, 2.0 * size]),
        ("b.0.up", "linear", "grad", [0.0]),
    )
    phases = {"output": "forward", "weight": "step"}
    part.tensors = {
        Key(module, op, role, phases.get(role, "backward")): Spectrum.of(torch.tensor(numbers))
        for module, op, role, numbers in kinds
    }
    part.tensors[LINEAR] = Spectrum.of(torch.tensor([1.0, 3.0, -0.5, 0.0]))
    part.tensors[Key("b.0.up", "weight", "update", "step")] = Spectrum.of(torch.ones(4))
    weights, updates = torch.tensor([1.0, 1.0, 2.0**-6, 1.0, 0.5]), torch.tensor([0.125, -0.125, 8.0, 0.0, 32.0])
    part.updates["b.0.up.weight"] = Updates.of(weights, updates, updates)
    part.octaves = {0: {LINEAR: Octaves(0, (1, 0, 3))}, 5: {Key("b.0", "add", "output", "forward"): Octaves(4, (1,))}}
    part.prints = {0: [Print(LINEAR, 7, (1.0,))], 5: [Print(LINEAR, 7, (size,))]}
    part.steps = [
        StepSeen(0, loss=4.0, scale=1024.0, sampled=True),
        StepSeen(3, scale=2048.0, skipped=True, largest_gradient=0.1),
        StepSeen(4, largest_gradient=2.0),  # of which neither loss nor scale is known
        StepSeen(5, loss=math.nan, scale=1000.0, sampled=True),
        StepSeen(8, loss=1.0),
    ]
    header = {"title": "python mine.py & more", "parameters": 12345, "precision": "fp32", "device": "a device"}
    header |= {"torch": "2.0", "lowp": "1.0", "started": "today", "fingerprint": "x"}
    sampling = {"max_overhead": 0.03, "overhead": 0.02, "looks": 2.5, "modules": 4, "modules_seen": 3}
    return Record(header, part, {**sampling, "total_seconds": 1.234, "steps": 9, "unguarded": 2})


def advice(**more: Any) -> Advice:
    verdicts = (
        FormatVerdict("fp16", 0.00125, 0, None, math.inf, "with loss scale 2^10", True, 10),
        FormatVerdict("pure bf16", 0.0, 1, 0.256, 38.6, "WILL STALL", False),
    )
    given = {"verdicts": verdicts, "findings": (), "window": Window(-4, 5), "policy": POLICY, **more}
    return Advice(**given)


def fault() -> dict[str, Any]:
    found = {"step": 3, "what": "loss", "operation": "log", "op": "log", "module": "head", "line": "train.py:8"}
    return {**found, "phase": "forward", "nan": 0, "inf": 1, "scale": 1.0, "hint": "", "inputs": [], "history": []}


def in_part() -> str:
    findings = (Finding("N101", "2^-3 of", "here"), Finding("N402", "skips", "there", change="begin", effect="it ends"))
    return page(record(), advice(findings=findings, more=2), record(2.0), "lowp run <x>")


def whole() -> str:
    one = record()
    one.header = {**one.header, "title": f"python {'long/' * 12}mine.py --more 1"}
    one.sampling = {**one.sampling, "max_overhead": None}
    one.part.steps = [StepSeen(0, scale=1.0)]
    return page(one, advice(window=Window(-126, 127)))


def faulty() -> str:
    one = record()
    one.header = {"title": f"{'long/' * 9}mine --more 1234"}  # of 61 letters
    one.sampling, one.part.faults, one.part.steps = {"max_overhead": 0.03}, [fault()], []
    findings = (Finding("N401", "it is", "not shown"),)
    return page(one, advice(findings=findings, window=Window(1, 0)))


def empty() -> str:
    return page(Record({"title": f"{'long/' * 9}mine --more 123"}), advice(verdicts=(), window=Window(-20, -15)))


def both_equal() -> str:
    one, other = record(), record()
    other.part.tensors = {}
    return page(one, advice(findings=(Finding("N101", "some", "here"),), window=Window(20, 30)), other)


PAGES: dict[str, Callable[[], str]] = {
    one.__name__.replace("_", " "): one for one in (in_part, whole, faulty, empty, both_equal)
}


def shown(html: str) -> str:
    """Return a page as text, without what is the same in every one, and what is told of each finding anywhere."""
    html = re.sub(r"<style>.*?</style>|<script>.*?</script>|<noscript>.*?</noscript>", "", html, flags=re.DOTALL)
    html = re.sub(r"(Why, and finding N\d+</summary>)<p>.*?</p><p>.*?</p>", r"\1", html)
    html = re.sub(r'"formats":\{.*\}(?=,"scaled")', '"formats":{}', html)
    lines = re.sub(r"(?<=>)\n*(?=<(?!/|t[dh]|code|strong|span|option))|(?<=\]),(?=\[\")", "\n", html).splitlines()
    return "".join(f"{line}\n" for line in lines if line.strip())


def listed(name: str) -> list[str]:
    """Return the lines of a page, of all but the first their number and those that are not in the first."""
    first, *_ = PAGES
    lines, known = (shown(PAGES[one]()).splitlines() for one in (name, first))
    return lines if name == first else [f"{len(lines)} lines", *(one for one in lines if one not in known)]


if __name__ == "__main__":
    print("".join(f"# {name}\n" + "".join(f"{line}\n" for line in listed(name)) for name in PAGES), end="")
