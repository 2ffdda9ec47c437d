"""The lines that a profile prints."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import re
import sys
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console

from lowp.loss_scale import LossScale
from lowp.numerics.advice import Advice, FormatVerdict
from lowp.numerics.findings import Finding
from lowp.numerics.policies import HighLayers, Product
from lowp.numerics.prediction import Effect, Window
from lowp.numerics.record import Key, Octaves, OpSeen, Part, Record, StepSeen
from lowp.numerics.spectrum import Spectrum, Updates
from lowp.policy import Policy, Rule
from lowp.presets import PRESETS
from lowp.report import profile_html, profile_strips
from lowp.report.profile import headline, print_precision, print_profile, scale_line, to_csv, to_tensorboard
from lowp.report.profile_strips import raised, scale_words, strips


@pytest.mark.parametrize(
    ("sampling", "told"),
    [
        ({"max_overhead": 0.03, "overhead": 0.025, "own_seconds": 9.0, "allowance": 0.25}, "overhead 2.5 %"),
        (
            {"max_overhead": 0.03, "overhead": 0.858, "own_seconds": 0.271, "allowance": 0.25, "looks": 5.0},
            "overhead 0.27 s, above 0.25 s and 3 % of the run",
        ),
        (
            {"max_overhead": 0.03, "overhead": 1.341, "own_seconds": 0.182, "allowance": 0.25, "looks": 5.0},
            "overhead 0.18 s, of 0.25 s allowed",
        ),
        (
            {"max_overhead": 0.03, "overhead": 0.5, "own_seconds": 2.0, "allowance": 0.0, "looks": 1.0},
            "overhead 50.0 %, above 3 %: a single recording costs that much here",
        ),
        (
            {"max_overhead": 0.03, "overhead": 0.04, "own_seconds": 2.0, "allowance": 0.0, "looks": 2.5},
            "overhead 4.0 %, above 3 %",
        ),
        ({"max_overhead": None, "overhead": 0.4, "own_seconds": 2.0}, "overhead 40.0 %"),
        ({"max_overhead": 0.03, "overhead": 0.03}, "overhead 3.0 %"),
        (
            {"max_overhead": 0.03, "overhead": 0.5, "own_seconds": 0.25, "allowance": 0.25},
            "overhead 0.25 s, of 0.25 s allowed",
        ),
        ({"max_overhead": 0.03, "overhead": 0.5, "allowance": 0.25}, "overhead inf s, above 0.25 s and 3 % of the run"),
        (
            {"max_overhead": 0.03, "overhead": 0.5},
            "overhead 50.0 %, above 3 %: a single recording costs that much here",
        ),
    ],
)
def test_an_overhead_above_the_share_is_told_beside_the_budget(sampling: dict[str, float], told: str) -> None:
    assert headline(Record({"title": "a model"}, sampling=dict(sampling))).split(" · ")[-1] == told


def made_by_hand() -> Record:
    part = Part()
    part.tensors = {
        Key("a", "linear", "input", "forward"): Spectrum.of(torch.tensor([1.0, -2.0, 0.0, math.nan])),
        Key("", "weight", "weight", "step"): Spectrum.of(torch.tensor([0.0])),
    }
    part.steps = [StepSeen(step, loss=1.0, sampled=step < 2) for step in range(3)]
    sampling = {"max_overhead": 0.03, "overhead": 0.02, "looks": 2.5, "modules": 4, "modules_seen": 3}
    return Record({"title": "mine", "parameters": 12345}, part, {**sampling, "total_seconds": 1.234})


def advised(apart: str, *verdicts: FormatVerdict, window: Window, **more: Any) -> Advice:
    base = PRESETS["fp16"].policy
    rules = [Rule.of("contraction", where=module, input="bf16") for module in apart]
    policy = Policy((*rules, *base.rules), base.parameters, base.table, "mine", LossScale.parse("dynamic(1024)"))
    return Advice(verdicts, more.pop("findings", ()), window, policy, **more)


def printed(*given: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_profile(console, *given)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


FP16 = FormatVerdict("fp16", 0.00125, 0, None, math.inf, "with loss scale 2^10", True, 10)
WHOLE = """\
mine · 12,345 parameters · 2 tensors · 2.5 recordings of each module over 2 steps · overhead 2.0 %
VERDICT  Train in fp16 with a dynamic loss scale and keep the weights in fp32, a, b, c and 2 more layers in bf16: \
stored in bf16 they would lose 26 % of their updates (judged by 3 of 4 modules alone)
 ! N101  some   here [x] → keep master weights
 ✗ N402  skips   there → begin
   and 2 more in the report
 ✓ 7 tensors need no change
format      use            flushed   overflow   stalled    SQNR   verdict
──────────────────────────────────────────────────────────────────────────────────────
fp16        ✓ safe         0.125 %          0         -   exact   with loss scale 2^10
pure bf16   ✗ loses        0.000 %          1   25.60 %   39 dB   WILL STALL
fp8         ! with care    2.000 %          0         -   20 dB   for all layers
bf16        ? not judged   0.000 %          0         -    1 dB   not judged: x

Scale window of 3 of 4 modules alone 2^-4 ├─────────────────────■──┤ 2^35: the first step finds what fits the others too
3 of 4 modules were recorded in 3 % of 1.2 s: --max-overhead none records all of them, and so does a longer run
Next: lowp run x
Why:  lowp explain N101
"""
SMALL = """\
mine · 12,345 parameters · 2 tensors · 2 sampled steps · overhead 2.0 % · the run did not end
VERDICT  Train in fp16 with loss scale 2^17 and keep the weights in fp32, a in bf16
 ✓ 0 tensors need no change
format   use      flushed   overflow   stalled    SQNR   verdict
─────────────────────────────────────────────────────────────────────────────
fp16     ✓ safe   0.125 %          0         -   exact   with loss scale 2^10

Scale window 2^0 ├────────────────────■───┤ 2^20, recommended 2^17
"""


def test_a_profile_is_printed_as_a_whole() -> None:
    record = made_by_hand()
    others = (
        FormatVerdict("pure bf16", 0.0, 1, 0.256, 38.6, "WILL STALL", False),
        FormatVerdict("fp8", 0.02, 0, None, 20.4, "for all layers", True),
        FormatVerdict("bf16", 0.0, 0, None, 1.0, "not judged: x", False),
    )
    findings = (Finding("N101", "some", "here [x]", ("a",)), Finding("N402", "skips", "there", change="begin"))
    advice = advised("abcde", FP16, *others, window=Window(-4, 35), findings=findings, more=2, quiet=7)
    assert printed(record, advice, "lowp run x") == WHOLE
    record.sampling["max_overhead"], record.complete = None, False
    assert printed(record, advised("a", FP16, window=Window(0, 20))) == SMALL
    three = printed(record, advised("abc", FP16, window=Window(-126, 127)))
    assert "a, b, c in bf16" in three and "Scale window: unknown, no gradient was recorded" in three
    record.sampling.update(max_overhead=0.03, looks=1.0)
    del record.sampling["modules"]
    assert "1.0 recording of each module over 2 steps" in headline(record)
    in_bf16 = dataclasses.replace(advised("", FP16, window=Window(-126, 127)), policy=PRESETS["bf16"].policy)
    assert "keep the weights in fp32: no gradient was recorded, by which fp16 is judged (judged by" in printed(
        record, in_bf16
    )
    text = printed(record, advised("", FP16, window=Window(1, 0)), "lowp run x")
    assert "(judged by a part of the modules alone)" in text and "no scale fits any layer" in text
    assert "were recorded in" not in text and "Next: lowp run x" in text and "Why:" not in text
    record.part.steps = record.part.steps[:1]
    assert "over 1 step " in headline(record)
    lines = {quiet: printed(record, advised("", FP16, window=Window(0, 1), quiet=quiet)) for quiet in (1, 2, 1000)}
    assert [re.findall(r"✓ (.*) no change", text) for text in lines.values()] == [
        *(["1 tensor needs"], ["2 tensors need"], ["1,000 tensors need"])
    ]


def test_what_a_precision_does_is_printed_as_a_whole() -> None:
    def product(*losses: tuple[float, float]) -> Product:
        return Product([Effect(flushed, 0.0, 0.0, ratio, 1.0, 2.0) for flushed, ratio in losses])

    effects = {
        Key("a", "linear", "input", "forward"): Effect(0.5, 0.1, 0.0, 3.4, 1.0, 2.0, True),
        Key("", "linear", "grad", "backward"): Effect(0.0, 0.0, 0.25, 40.0, 3.0, 2.0),
        Key("b", "linear", "input", "forward"): Effect(0.0, 0.0, 0.0, math.inf, 1.0, 2.0),
    }
    products = {
        ("", "linear"): {"forward": product((0.0, 10.0), (0.125, 20.0))},
        **{(f"layers.{place}", "linear"): {"input_gradient": product((0.0, 60.0 - place))} for place in range(12)},
        ("b", "conv2d"): {"forward": product((0.0, 10.0)), "weight_gradient": product((0.5, 30.0))},
    }
    high = HighLayers(PRESETS["fp8"].policy, {"a": 0.5, "": 0.25, "c": 0.125, "d": 0.1}, ("a", ""))
    console = Console(file=io.StringIO(), width=200)
    print_precision(console, "fp8", effects, products, {"a.weight": 0.00123, "b.weight": 2.0}, high)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[:5] == [
        "fp8: 3 tensors are rounded, 1 overflow; those that lose most:",
        "  the model linear grad: 0.000 % flushed, 25.000 % too large, 40 dB",
        "  a linear input: 50.000 % flushed, 0.000 % too large, 3 dB, a bound",
        "  b linear input: 0.000 % flushed, 0.000 % too large, inf dB",
        "products: the share flushed, the mean square error",
    ]
    rows = [" ".join(line.split()) for line in lines]
    assert "layer forward input gradient weight gradient" in rows
    assert "the model itself linear 12.5 % 11.000 % - -" in rows  # a tenth and a hundredth
    assert "b conv2d 0.0 % 10.000 % - 50.0 % 0.100 %" in rows
    layers = [row.split()[0] for row in rows if row.startswith("layers.")]
    assert layers == [f"layers.{place}" for place in range(2, 12)]  # the largest twelve errors, in the model's order
    assert rows[-2:] == [
        "predicted change of the loss if only one of these tensors is rounded: a.weight 1.2e-03, b.weight 2.0e+00",
        "keep a, the model itself in bf16 (--high 2): of the layers' predicted changes of the loss, squared, a 50%, "
        "the model itself 25%, c 12%",
    ]
    console = Console(file=io.StringIO(), width=200)
    print_precision(console, "fp8", {}, {}, {}, HighLayers(high.policy, {"a": 0.0}, ()))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown == "fp8: 0 tensors are rounded, 0 overflow; those that lose most:\n"
    console = Console(file=io.StringIO(), width=200)
    print_precision(console, "fp8", {}, {}, {}, HighLayers(high.policy, {"a": 0.2, "b": 0.2}, ()))
    assert "no layer stands out: of the layers' predicted" in console.file.getvalue()  # type: ignore[attr-defined]


def test_lines_that_are_longer_than_the_terminal_are_not_broken() -> None:
    effects = {Key("a" * 90, "linear", "input", "forward"): Effect(0.5, 0.1, 0.0, 3.4, 1.0, 2.0)}
    high = HighLayers(PRESETS["fp8"].policy, {"a" * 90: 0.5}, ("a" * 90,))
    for width in (40, 400):
        console = Console(file=io.StringIO(), width=width)
        print_precision(console, "fp8", effects, {}, {"b" * 90: 2.0}, high)
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert [line.split()[0] for line in lines] == ["fp8:", "a" * 90, "predicted", "keep"]


@pytest.mark.parametrize(
    ("window", "bar"),
    [
        (Window(-24, 40), f"2^-24 ├{'─' * 22}■─┤ 2^40, recommended 2^37"),
        (Window(-25, 41), f"2^-24 ├{'─' * 22}■─┤ 2^40, recommended 2^38"),
        (Window(-23, 39), f"2^-23 ├{'─' * 22}■─┤ 2^39, recommended 2^36"),
        (Window(3, 4), f"2^3 ├■{'─' * 23}┤ 2^4, recommended 2^3"),
        (Window(5, 5), f"2^5 ├■{'─' * 23}┤ 2^5, recommended 2^5"),
        (Window(0, 6), f"2^0 ├{'─' * 12}■{'─' * 11}┤ 2^6, recommended 2^3"),
    ],
)
def test_a_window_of_scales_is_drawn_with_its_recommended_one(window: Window, bar: str) -> None:
    assert scale_line(window) == f"Scale window {bar}"


def test_a_table_has_a_line_a_tensor_with_what_formats_do_to_it(tmp_path: Path) -> None:
    to_csv(made_by_hand(), tmp_path / "profile.csv")
    heads, first, second = csv.reader(io.StringIO((tmp_path / "profile.csv").read_text()))
    formats = ("fp16", "bf16", "e4m3fn", "e5m2")
    effects = [f"{what}_{name}" for name in formats for what in ("flushed", "overflow", "sqnr")]
    numbers = ["count", "zeros", "nan", "inf", "maximum", "root_mean_square", "lowest", "highest"]
    assert heads == ["module", "op", "role", "phase", *numbers, *effects]
    assert first[:9] == ["a", "linear", "input", "forward", "4", "1", "1", "0", "2.0"]
    assert float(first[9]) == pytest.approx((5 / 3) ** 0.5) and first[10:12] == ["0", "1"]
    assert first[12:] == ["0.0", "0.0", "inf"] * 4  # each format has these numbers
    assert second[:12] == ["", "weight", "weight", "step", "1", "1", "0", "0", "0.0", "0.0", "", ""]


def test_tensorboard_gets_a_histogram_of_octaves_a_tensor_and_what_is_known_of_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Writer:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path)

        def __enter__(self) -> Writer:
            return self

        def __exit__(self, *_: object) -> None:
            done.append("closed")

        def add_histogram_raw(self, **given: Any) -> None:
            done.append(given)

        def add_scalar(self, *given: Any) -> None:
            done.append(given)

    done: list[Any] = []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", cast(Any, SimpleNamespace(SummaryWriter=Writer)))
    record = made_by_hand()
    record.tensors[Key("a", "linear", "input", "forward")] = Spectrum.of(torch.tensor([0.5, 0.75, 0.0, -8.0]))
    record.steps[1].scale, record.steps[1].loss = 8.0, None
    record.steps[2].largest_gradient = 0.25
    to_tensorboard(record, tmp_path)
    histogram, *numbers, last = done
    assert histogram == {
        **{"tag": "input/a/linear", "min": -1, "max": 4, "num": 3, "sum": -2 + 3, "sum_squares": 2 + 9},
        **{"bucket_limits": [0, 1, 2, 3, 4], "bucket_counts": [2, 0, 0, 0, 1], "global_step": 1},
    }
    assert numbers == [("loss", 1.0, 0), ("scale", 8.0, 1), ("loss", 1.0, 2), ("largest_gradient", 0.25, 2)]
    assert last == "closed"


def test_the_data_of_strips_are_those_of_a_profile_made_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part()
    for module, op, op_class in (
        ("b.0.up", "linear", "contraction"),
        ("b.0", "add", "pointwise"),
        ("", "loss", "wide"),
    ):
        part.ops[module, op] = OpSeen(op_class, line="train.py:7")
    first, second, loss = (
        Key("b.0.up", "linear", "output", "forward"),
        Key("b.0", "add", "output", "forward"),
        Key("", "loss", "grad", "backward"),
    )
    part.tensors = {
        loss: Spectrum.of(torch.ones(1)),  # in fp32 in every precision
        second: Spectrum.of(torch.tensor([16.0])),
        first: Spectrum.of(torch.tensor([1.0, 3.0, -0.5, 0.0])),
        Key("b.0.up", "linear", "grad", "backward"): Spectrum.of(torch.zeros(1)),
        Key("b.0.up", "weight", "update", "step"): Spectrum.of(torch.ones(4)),
    }
    weights, updates = torch.tensor([1.0, 1.0, 2.0**-6, 1.0]), torch.tensor([0.125, -0.125, 8.0, 0.0])
    part.updates["b.0.up.weight"] = Updates.of(weights, updates, updates)
    part.octaves = {0: {first: Octaves(0, (1, 0, 3))}, 5: {second: Octaves(4, (1,))}}
    part.steps = [StepSeen(0, loss=0.12345, scale=1024.0), StepSeen(5, loss=math.nan, scale=1000.0)]
    record, other = Record({}, part), Record({}, Part())
    other.tensors[first] = Spectrum.of(torch.tensor([2.0]))
    found = strips(record, other)
    rows = [
        ["b.0", "up · linear", -1, (1, 1, 1), 3.0, [-1, 1, 0, 1], [[0, "$#'"], 0], [1, (1,)]],
        ["b.0", "sum (add), train.py:7", 4, (1,), 16.0, [4, 1], [0, [4, "$"]]],
    ]
    empty: dict[str, Any] = {"gradients": [], "weight_gradients": [], "weights": []}
    ratios = [["b.0", "up.weight", -3, (2, 0, 0, 0, 0, 0, 0, 1)]]  # those above 2^4 are told as 2^4
    assert found["maps"] == {**empty, "activations": rows, "ratios": ratios}
    assert found["axis"] == [-28, 19] and set(found["left_out"].values()) == {0}
    words = ["step 0, loss 0.1235, loss scale 2\u00b9\u2070", "step 5, loss scale 1000"]
    assert found["steps"] == [{"step": step, "words": text} for step, text in zip((0, 5), words, strict=True)]
    assert found["formats"]["fp16"] == {"smallest": -25, "normal": -14, "maximum": 65504.0, "precision": 11}
    monkeypatch.setattr(profile_strips, "_MOST_ROWS", 1)
    merged = strips(record, other)["maps"]["activations"]
    powers, steps = [-1, 1, 0, 1, 4, 1], [[0, "$#'"], [4, "$"]]
    assert merged == [["b.0", "b.0", -1, (1, 1, 1, 0, 0, 1), 16.0, powers, steps, [1, (1,)]]]
    del part.tensors[second], part.octaves[0]
    part.tensors[first] = Spectrum.of(torch.tensor([2.0**-100, 2.0**100]))
    found = strips(record)
    assert found["axis"] == [-64, 40] and [one["step"] for one in found["steps"]] == [5]


def test_of_many_steps_as_many_are_shown_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    key = Key("a", "linear", "output", "forward")
    part = Part(tensors={key: Spectrum.of(torch.ones(1)), key._replace(role="input"): Spectrum.of(torch.ones(1))})
    part.octaves = {step: {key: Octaves(0, (1,))} for step in range(0, 230, 10)}
    shown = [one["step"] for one in strips(Record({}, part))["steps"]]
    assert shown == [0, 20, 40, 60, 80, 100, 120, 140, 160, 180, 200, 220]
    for size, steps in ((28 * 4, [0, 70, 150, 220]), (28, [0, 220])):
        monkeypatch.setattr(profile_strips, "_MOST_STEP_BYTES", size)
        assert [one["step"] for one in strips(Record({}, part))["steps"]] == steps
    assert raised("2^-16 to 2^10, 2^1.5, 12^3") == "2\u207b\u00b9\u2076 to 2\u00b9\u2070, 2^1.5, 12^3"
    assert [scale_words(scale) for scale in (1.0, 0.5, 1000.0, 123456.0)] == ["2^0", "2^-1", "1000", "1.235e+05"]


# -- the report -------------------------------------------------------------------------------------------------------
def cells(html: str) -> list[list[str]]:
    """Return the rows of the tables, without their markup."""
    return [[unescape(one) for one in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in html.split("<tr>")[1:]]


def test_a_fault_is_shown_with_its_inputs_and_the_steps_before() -> None:
    record = made_by_hand()
    fault = {"step": 3, "what": "gradients", "operation": "DivBackward0", "op": "div", "module": "", "line": "t.py:8"}
    fault |= {"phase": "backward", "nan": 2, "inf": 1, "scale": 1.0, "hint": "add 2^-10"}
    fault["inputs"] = [
        {"shape": [2, 3], "dtype": "float32", "smallest": -0.5, "largest": 1e7, "inf": 4},
        {"shape": [], "dtype": "float16", "nan": 1},
    ]
    fault["history"] = [{"step": 2, "loss": 0.123456789, "scale": None, "largest_gradient": 2.0}]
    record.part.faults.append(fault)
    html = profile_html._faults(record)
    head = (
        "<h3>Step 3: the gradients were not finite</h3><p>First: <strong>div</strong> (DivBackward0, backward) t.py:8: "
    )
    assert f"{head}2 NaN, 1 infinite. add 2\u207b\u00b9\u2070</p>" in html
    assert cells(html) == [
        ["input", "shape", "dtype", "range", "NaN", "infinite"],
        ["0", "2x3", "float32", "-0.5 .. 1e+07", "0", "4"],
        ["1", "one number", "float16", "none is finite", "1", "0"],
        ["step", "loss", "loss scale", "largest gradient"],
        ["2", "0.123457", "", "2"],
    ]
    fault.update(module="head", line="", history=[])
    html = profile_html._faults(record)
    assert "backward) in head: 2 NaN" in html and "The steps before" not in html
    assert profile_html._faults(made_by_hand()) == ""


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (FP16, "with loss scale 2^10; 0.12 % of the gradients become zero"),
        (FormatVerdict("fp16", 9e-6, 0, None, 1.0, "fits", True), "fits"),
        (FormatVerdict("fp16", 1e-5, 0, 0.0, 1.0, "fits", True), "fits; 0.001 % of the gradients become zero"),
        (
            FormatVerdict("fp16", 0.0, 2, 0.25, 1.0, "STALLS in 1 of 2 parameters", False),
            "stalls in 1 of 2 parameters; 2 tensors overflow; 25 % of the updates are lost",
        ),
        (
            FormatVerdict("fp16", 0.0, 0, 0.5, 1.0, "WILL STALL", False),
            "the weights would stop moving; 50 % of the updates are lost",
        ),
        (FormatVerdict("fp16", 0.0, 0, None, 1.0, "not judged: no gradient", False), "no gradient"),
    ],
)
def test_a_card_says_what_a_format_does(verdict: FormatVerdict, words: str) -> None:
    assert profile_html._card_words(verdict) == words


def test_a_curve_goes_through_its_points_with_its_ends_in_words() -> None:
    def words(value: float) -> str:
        return f"<{value:g}>"

    found = profile_html._curve("Loss", [(0, 4.0), (5, 1.0), (10, 2.0)], words, [5, 8])
    assert 'points="0.00,2.00 50.00,30.00 100.00,20.67"' in found and 'data-last="10"' in found
    told = "Loss: <4> at step 0, <2> at step 10; from <1> to <4>; 2 skipped"
    assert unescape(found.partition("<figcaption>")[2].partition("</figcaption>")[0]) == told
    marks = [("skipped", "50.00"), ("skipped", "80.00"), ("now", "-1")]
    assert re.findall(r'<line class="(\w+)" x1="([^"]+)" x2="\2" y1="0" y2="31"/>', found) == marks
    flat = profile_html._curve("Scale", [(0, 3.0)], words)
    assert 'points="0.00,30.00"' in flat and "Scale: &lt;3&gt; at step 0, &lt;3&gt; at step 0<" in flat
    assert profile_html._curve("Loss", [], words) == ""


def test_the_second_of_two_runs_is_told_by_the_median_and_the_largest_change() -> None:
    def run(*sizes: float) -> Record:
        record = Record({"fingerprint": "x"})
        for place, size in enumerate(sizes):
            record.tensors[Key(f"{place}", "weight", "weight", "step")] = Spectrum.of(torch.tensor([size]))
        return record

    change = profile_html._change(run(1.0, 1.0, 1.0, 0.0), run(2.0, 0.125, 1.0, 1.0), "weight", "Weights")
    assert change == ("Weights", "1 times", "0.125 times", "1 weight")
    same = profile_html._change(run(1.0), run(1.0), "weight", "Weights")
    assert same == ("Weights", "1 times", "1 times", "none")
    assert profile_html._change(run(1.0), run(), "weight", "Weights") == ()
    assert profile_html._change(run(1.0), run(1.0), "grad", "Gradients") == ()


def test_the_window_of_scales_is_told_and_the_slider_begins_within_it() -> None:
    def of(window: Window) -> tuple[object, object]:
        record = made_by_hand()
        record.sampling["max_overhead"] = None
        found = profile_html._evidence(record, advised("", FP16, window=window), None)
        assert found["second"] == ""
        return found["window"], found["scale"]

    assert of(Window(-4, 35)) == ("2\u207b\u2074 to 2\u00b3\u2075", 32)
    assert of(Window(1, 0)) == ("none fits all layers", 0)
    assert of(Window(-126, 127)) == ("unknown, no gradient was recorded", 0)
    partly = profile_html._evidence(made_by_hand(), advised("", FP16, window=Window(-4, 8)), made_by_hand())
    assert str(partly["window"]).endswith(", of 3 of 4 modules alone") and partly["scale"] == 5
    assert "The lower strip is the second run." in str(partly["second"])
