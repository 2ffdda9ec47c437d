"""The report of a profile: one small self-contained file, whose slider updates its figures."""

from __future__ import annotations

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from numerics.small import recorded
from report.browser import BROWSER, Page

from lowp.numerics.advice import advise
from lowp.numerics.record import Key, Record, StepSeen
from lowp.report.profile import verdict_line
from lowp.report.profile_html import page

browser = pytest.mark.skipif(BROWSER is None, reason="no headless Chromium is installed")


@pytest.fixture(scope="module")
def record() -> Record:
    return recorded(3)


def report(record: Record, folder: Path, script: str = "") -> Path:
    file = folder / "report.html"
    file.write_text(page(record, advise(record)).replace("</body>", f"<script>{script}</script></body>"))
    return file


class Structure(HTMLParser):
    """Records the open tags, and the attributes for screen readers."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))


def test_the_report_needs_nothing_from_elsewhere(record: Record) -> None:
    text = page(record, advise(record))
    assert len(text) < 1_000_000
    without = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|@import|src=", without)
    assert "prefers-color-scheme:dark" in text


def test_each_picture_has_words_and_a_table_and_each_field_a_label(record: Record) -> None:
    structure = Structure()
    structure.feed(page(record, advise(record)))
    tags = structure.tags
    assert ("html", {"lang": "en"}) in tags
    assert all(given.get("role") == "img" and given.get("aria-label") for tag, given in tags if tag == "svg")
    assert sum(tag == "summary" for tag, _ in tags) >= sum(tag == "svg" for tag, _ in tags)
    assert all(given.get("scope") for tag, given in tags if tag == "th")
    fields = sum(tag in ("input", "select") for tag, _ in tags)
    assert sum(tag == "label" for tag, _ in tags) == fields == 4
    assert any(given.get("aria-live") for _, given in tags)


def test_a_verdict_says_of_how_many_modules_it_is(record: Record) -> None:
    advice = advise(record)
    part = {**record.sampling, "modules": 51, "modules_seen": 4, "max_overhead": 0.03}
    assert verdict_line(record, advice).startswith("fp16 ")
    assert verdict_line(Record(record.header, record.part, part), advice).startswith("for 4 of 51 modules alone: fp16 ")


def test_a_name_with_markup_in_it_stays_text(record: Record) -> None:
    evil = Record({**record.header, "title": "</script><b>x"}, record.part, record.sampling)
    evil.part.tensors[Key("</script><i>", "linear", "output", "forward")] = next(iter(record.tensors.values()))
    text = page(evil, advise(record))
    del evil.part.tensors[Key("</script><i>", "linear", "output", "forward")]
    assert "<b>x" not in text and "<i>" not in text


def test_a_model_of_a_thousand_layers_has_a_report_under_a_megabyte(record: Record) -> None:
    seen = record.tensors[Key("0", "linear", "output", "forward")]
    many = Record(record.header, type(record.part)(), record.sampling)
    for number in range(1000):
        for role, phase in (("output", "forward"), ("grad", "backward")):
            many.part.tensors[Key(f"transformer.layers.{number}.attention", "linear", role, phase)] = seen
    many.part.steps = [StepSeen(0, sampled=True)]
    assert len(page(many, advise(many))) < 1_000_000


def test_faults_skips_and_a_second_run_are_shown(record: Record) -> None:
    other = Record(record.header, record.part, record.sampling)
    fault = {"step": 3, "what": "loss", "kind": "operation", "operation": "log", "op": "log", "module": "head"}
    fault |= {
        "line": "train.py:8",
        "phase": "forward",
        "nan": 0,
        "inf": 1,
        "scale": 1.0,
        "hint": "clamp",
        "history": [],
    }
    fault |= {"inputs": [{"shape": [2], "dtype": "float32", "smallest": 0.0, "largest": 1.0}]}
    record.part.faults.append(fault)
    record.part.steps.append(StepSeen(5, scale=1024.0, skipped=True))
    try:
        text = page(record, advise(record), other)
    finally:
        record.part.faults.clear()
        record.part.steps.pop()
    assert "train.py:8" in text and "step 5 was skipped" in text
    assert "<h3>Step 3: the loss was not finite</h3>" in text
    assert "Two runs" in text and "largest: second run" in text


def dump(file: Path) -> str:
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", file.as_uri()]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    return found.stdout


MOVED = """
const told = [];
const scale = document.getElementById('scale'), totals = document.getElementById('totals');
const line = () => document.querySelector('[data-map=gradients] [data-limit=largest]').getAttribute('x1');
for (const value of [0, 40]) {
  scale.value = value; scale.dispatchEvent(new Event('input'));
  told.push([totals.textContent, line(), scale.getAttribute('aria-valuetext')]);
}
const format = document.getElementById('format');
format.value = 'bf16'; format.dispatchEvent(new Event('change')); told.push([totals.textContent]);
document.body.dataset.told = JSON.stringify(told);
document.title = window.errors || 'without errors';
"""


@pytest.fixture(scope="module")
def moved(record: Record, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the page in a browser, after its controls have been moved."""
    return dump(report(record, tmp_path_factory.mktemp("moved"), MOVED))


@browser
def test_the_slider_moves_the_figures_and_the_limits(moved: str) -> None:
    import html
    import json

    found = re.search(r'data-told="([^"]*)"', moved)
    assert found is not None, moved[-500:]
    at_rest, after, in_bf16 = json.loads(html.unescape(found[1]))
    assert ", 0 of their tensors overflow" in at_rest[0]
    assert ", 0 of their tensors overflow" not in after[0] and after[1] != at_rest[1]
    assert after[2] == "2 to the power of 40"
    assert ", 0 of their tensors overflow" in in_bf16[0]


@browser
def test_heat_maps_have_a_row_a_layer(moved: str) -> None:
    assert len(re.findall(r"<rect ", moved)) > 50
    assert "0 linear: " in moved


FOCUS = "document.activeElement.id"
TOTALS = "document.getElementById('totals').textContent"
LARGEST = "Number(document.querySelector('[data-map=gradients] [data-limit=largest]').getAttribute('x1'))"
# whether what has the focus can be seen: it is in the window, and nothing lies over its middle
IN_SIGHT = """(() => {
  const one = document.activeElement, box = one.getBoundingClientRect();
  const y = Math.min(Math.max(box.top, 0) + 4, innerHeight - 1);
  const found = document.elementFromPoint(box.left + Math.min(box.width, 100) / 2, y);
  return one.contains(found) || (one.tagName == 'SUMMARY' && found.closest('summary') == one);
})()"""


@browser
@pytest.mark.parametrize("width", [390, 1200])
def test_a_heat_map_is_in_sight_on_narrow_and_wide_screens(record: Record, tmp_path: Path, width: int) -> None:
    with Page(report(record, tmp_path), width=width) as page:
        hidden = page.value("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert hidden == 0, "the page itself does not scroll sideways"
        inside = page.value("""(() => {
          const box = document.querySelector('[data-map=weights] .scroll').getBoundingClientRect();
          const cells = [...document.querySelectorAll('[data-map=weights] rect')];
          return cells.filter(one => one.getBoundingClientRect().right <= box.right).length / cells.length;
        })()""")
        assert inside > 0.8


@browser
def test_a_user_with_a_keyboard_reaches_everything_and_moves_the_figures(record: Record, tmp_path: Path) -> None:
    with Page(report(record, tmp_path)) as page:
        page.press("Tab")
        assert page.value("document.activeElement.className") == "skip"
        page.press("Enter")
        assert page.value("location.hash") == "#verdict"
        for wanted in ("format", "low", "high", "scale"):
            page.press("Tab")
            while page.value(FOCUS) not in ("format", "low", "high", "scale"):
                page.press("Tab")
            assert page.value(FOCUS) == wanted and page.value(IN_SIGHT)
        scale, line, told = page.value("Number(document.activeElement.value)"), page.value(LARGEST), page.value(TOTALS)
        page.press("ArrowRight", times=3)
        assert page.value("document.activeElement.getAttribute('aria-valuetext')") == f"2 to the power of {scale + 3}"
        assert line - page.value(LARGEST) == 3 * 12  # an octave is twelve pixels wide
        page.press("End")
        assert page.value("document.getElementById('scale-value').textContent") == "2^40"
        assert ", 0 of their tensors overflow" not in page.value(TOTALS) != told
        page.press("Home")
        assert page.value("document.getElementById('scale-value').textContent") == "2^-10"
        assert ", 0 of their tensors overflow" in page.value(TOTALS)


@browser
def test_tables_open_by_keyboard_and_nothing_that_has_the_focus_is_hidden(record: Record, tmp_path: Path) -> None:
    with Page(report(record, tmp_path)) as page:
        summaries = 0
        for _ in range(200):
            page.press("Tab")
            if page.value("document.activeElement == document.body"):
                break
            assert page.value(IN_SIGHT), page.value("document.activeElement.outerHTML.slice(0, 200)")
            if page.value("document.activeElement.tagName") == "SUMMARY":
                page.press("Enter")
                assert page.value("document.activeElement.parentElement.open")
                summaries += 1
        assert summaries == page.value("document.querySelectorAll('summary:not([hidden] *)').length") >= 7


@browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(record: Record, tmp_path: Path, dark: bool) -> None:
    """The contrast is at least 4.5 to 1, as required by WCAG 2.2, 1.4.3."""
    contrast = """(() => {
      const luminance = (text) => {
        const [r, g, b] = text.match(/[0-9.]+/g).map(Number).map((one) => one / 255)
          .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      const behind = (one) => {
        const found = getComputedStyle(one).backgroundColor;
        return /, 0\\)$/.test(found) ? one.parentElement ? behind(one.parentElement) : 'rgb(255,255,255)' : found;
      };
      return [...document.querySelectorAll('h1,h2,h3,p,th,td,summary,label,button,select,code')].map((one) => {
        const [a, b] = [luminance(getComputedStyle(one).color), luminance(behind(one))];
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      });
    })()"""
    with Page(report(record, tmp_path), dark=dark) as page:
        found = page.value(contrast)
        assert len(found) > 50 and min(found) >= 4.5, min(found)
        is_dark = page.value("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)"
        assert is_dark == dark
