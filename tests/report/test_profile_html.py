"""The report of a profile: one small self-contained file that says first what to do, and whose controls move strips."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from numerics.small import network, recorded, train
from report.browser import BROWSER, Page
from torch.optim import SGD

import lowp
from lowp.numerics.advice import advise
from lowp.numerics.prediction import Window
from lowp.numerics.record import Key, OpSeen, Record, StepSeen
from lowp.report.palette import GRADES
from lowp.report.profile import recommendation
from lowp.report.profile_html import page
from lowp.report.profile_strips import block_of, raised, scale_words, strips

browser = pytest.mark.skipif(BROWSER is None, reason="no headless Chromium is installed")
OUTPUT = Key("0", "linear", "output", "forward")


@pytest.fixture(scope="module")
def record() -> Record:
    return recorded(3)


def report(record: Record, folder: Path, other: Record | None = None) -> Path:
    file = folder / "report.html"
    file.write_text(page(record, advise(record), other), encoding="utf-8")
    return file


def deeper(record: Record, blocks: int, name: str = "blocks") -> Record:
    """Return the record of a model of several times these layers."""
    header = {**record.header, "models": []}
    found = Record(header, type(record.part)(steps=record.steps), record.sampling)
    for block in range(blocks):

        def moved(module: str, block: int = block) -> str:
            return f"{name}.{block}.{module}".rstrip(".")

        for (module, op), seen in record.ops.items():
            parameters = {role: moved(one) for role, one in seen.parameters.items()}
            found.ops[moved(module), op] = dataclasses.replace(seen, parameters=parameters)
        found.tensors.update({key._replace(module=moved(key.module)): seen for key, seen in record.tensors.items()})
        found.updates.update({moved(parameter): seen for parameter, seen in record.updates.items()})
        for step, octaves in record.part.octaves.items():
            own = found.part.octaves.setdefault(step, {})
            own.update({key._replace(module=moved(key.module)): seen for key, seen in octaves.items()})
    return found


class Structure(HTMLParser):
    """Records the open tags, and the attributes for screen readers."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, text: str) -> None:
        if not self.tags or self.tags[-1][0] not in ("style", "script"):
            self.texts.append(text)


def structure_of(text: str) -> Structure:
    structure = Structure()
    structure.feed(text)
    return structure


# -- the file ---------------------------------------------------------------------------------------------------------
def test_the_report_needs_nothing_from_elsewhere(record: Record) -> None:
    text = page(record, advise(record))
    assert not re.search(r"https?://|@import|src=", text)
    assert "prefers-color-scheme:dark" in text


def test_the_report_of_twelve_blocks_has_less_than_300_kilobytes(record: Record) -> None:
    tensors = len(deeper(record, 12).tensors) / 12
    many = deeper(record, round(765 / tensors))  # as many tensors as a GPT of twelve layers has
    assert 700 < len(many.tensors) < 800
    assert 80_000 < len(page(many, advise(many)).encode()) < 300_000


def test_a_model_of_a_thousand_blocks_has_a_row_for_some_and_says_how_many_more(record: Record) -> None:
    many = deeper(record, 1000)
    data = strips(many)
    assert len(data["maps"]["gradients"]) == 160 and data["left_out"]["gradients"] == 840
    assert len(json.dumps(data)) < 300_000


def test_a_profile_writes_its_report(tmp_path: Path) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    with lowp.profile(model, optimizer, max_overhead=None) as profile:
        train(model, optimizer, 2)
    profile.report(tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and "<h1>Train in fp16" in text


def test_each_picture_has_words_and_each_field_a_label(record: Record) -> None:
    tags = structure_of(page(record, advise(record))).tags
    assert ("html", {"lang": "en"}) in tags
    assert all(given.get("role") == "img" and given.get("aria-label") for tag, given in tags if tag == "svg")
    assert all(given.get("scope") for tag, given in tags if tag == "th")
    fields = sum(tag in ("input", "select") for tag, _ in tags)
    assert sum(tag == "label" for tag, _ in tags) == fields == 3
    assert ("p", {"id": "totals", "role": "status"}) in tags


def test_a_name_with_markup_in_it_stays_text(record: Record) -> None:
    evil = Record({**record.header, "title": "</script><b>x"}, record.part, record.sampling)
    evil.part.tensors[OUTPUT._replace(module="</script><i>")] = record.tensors[OUTPUT]
    text = page(evil, advise(record))
    del evil.part.tensors[OUTPUT._replace(module="</script><i>")]
    assert "<b>x" not in text and "<i>" not in text


def test_powers_of_two_are_raised(record: Record) -> None:
    assert raised("2^-16 and 2^3, x2^4, 2^12.5") == "2⁻¹⁶ and 2³, x2^4, 2^12.5"
    assert scale_words(2.0**16) == "2^16" and scale_words(1e9) == "1e+09"
    words = " ".join(structure_of(page(record, advise(record))).texts)
    assert "loss scale 2" in words and "2^" not in words.replace("dynamic(2^", "")


# -- what it says -----------------------------------------------------------------------------------------------------
def test_the_recommendation_is_the_heading_and_a_command_is_not(record: Record) -> None:
    command = f"python {'/home/someone/' * 6}train.py --lr 0.1"
    long = Record({**record.header, "title": command}, record.part, record.sampling)
    text = page(long, advise(long))
    heading = re.findall(r"<h1>(.*?)</h1>", text)
    assert heading == [raised(recommendation(long, advise(long))) + "."] and "train.py" not in heading[0]
    assert "Profile of train.py · " in text and text.count(command) == 2  # the title of the window, and what ran


def test_a_recommendation_names_format_scale_and_what_bf16_weights_would_lose(record: Record) -> None:
    advice = advise(record)
    words = recommendation(record, advice)
    assert words.startswith(f"Train in fp16 with loss scale 2^{advice.window.recommended} and keep the weights in fp32")
    (stored,) = (one for one in advice.verdicts if one.format == "pure bf16")
    stalled = dataclasses.replace(stored, usable=False, stalled=0.47)
    verdicts = tuple(stalled if one is stored else one for one in advice.verdicts)
    assert recommendation(record, dataclasses.replace(advice, verdicts=verdicts)).endswith(
        ": stored in bf16 they would lose 47 % of their updates"
    )


def test_a_recommendation_says_on_how_many_modules_it_rests(record: Record) -> None:
    part = Record(
        record.header, record.part, {**record.sampling, "modules": 51, "modules_seen": 4, "max_overhead": 0.03}
    )
    words = recommendation(part, advise(part))
    assert words.startswith("Train in fp16 with a dynamic loss scale and keep the weights in fp32")
    assert words.endswith("(judged by 4 of 51 modules alone)")


def test_a_recommendation_of_bf16_says_why_it_is_not_fp16(record: Record) -> None:
    advice = advise(record)
    policy = dataclasses.replace(advice.policy, loss_scale=None)
    empty = dataclasses.replace(advice, policy=policy, window=Window(1, 0))
    assert "Train in bf16 and keep the weights in fp32: no loss scale brings the gradients into fp16" in recommendation(
        record, empty
    )


def test_each_format_has_a_colour_and_a_word(record: Record) -> None:
    advice = advise(record)
    tags, text = structure_of(page(record, advice)).tags, page(record, advice)
    kinds = [str(given.get("class")) for tag, given in tags if tag == "li"][: len(advice.verdicts)]
    assert kinds == [one.grade.replace(" ", "-") for one in advice.verdicts]
    for verdict in advice.verdicts:
        assert verdict.grade in GRADES
        assert re.search(rf"<h3>{verdict.format}</h3><p class=\"grade\"><span[^>]*>.</span> {verdict.grade}</p>", text)


def test_a_fault_is_the_heading_and_skips_are_shown(record: Record) -> None:
    fault = {"step": 3, "what": "loss", "kind": "operation", "operation": "log", "op": "log", "module": "head"}
    fault |= {"line": "train.py:8", "phase": "forward", "nan": 0, "inf": 1, "scale": 1.0, "hint": "clamp"}
    fault |= {"inputs": [{"shape": [2], "dtype": "float32", "smallest": 0.0, "largest": 1.0}], "history": []}
    record.part.faults.append(fault)
    record.part.steps.append(StepSeen(5, scale=1024.0, skipped=True))
    try:
        text = page(record, advise(record))
    finally:
        record.part.faults.clear()
        record.part.steps.pop()
    assert (
        "<h1>Mend the training first: in step 3 the loss was not finite, first in log of head (train.py:8).</h1>"
        in text
    )
    assert "<h3>Step 3: the loss was not finite</h3>" in text and "1 skipped" in text and "skipped: overflow" in text


def test_two_runs_are_compared_by_kind_of_tensor(record: Record) -> None:
    other = recorded(2)
    key = Key("0", "weight", "weight", "step")
    other.part.tensors[key] = dataclasses.replace(other.tensors[key], sum_squares=9 * other.tensors[key].sum_squares)
    text = page(record, advise(record), other)
    assert "Two runs" in text and "Bitwise equal in every step that both recorded." in text
    assert re.search(r'<th scope="row">Weights</th><td>[\d.]+ times</td><td>3[\d.]* times</td><td>0 weight</td>', text)
    assert len(strips(record, other)["maps"]["weights"][0]) == 8 and len(strips(record)["maps"]["weights"][0]) < 8


def test_a_tensor_that_is_zero_in_the_second_run_stays_beside_the_first(record: Record) -> None:
    other, key = recorded(2), Key("0", "weight", "weight", "step")
    other.part.tensors[key] = type(other.tensors[key]).of(torch.zeros(9))
    found, alone = (strips(record, one)["maps"]["weights"] for one in (other, None))
    assert len(found) == len(alone) and "Two runs" in page(record, advise(record), other)


# -- strips -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "block"),
    [
        ("blocks.0.norm1", "blocks.0"),
        ("transformer.h.3.attn.c_attn", "transformer.h.3"),
        ("encoder.embed.table", "encoder.embed"),
        ("down1.conv", "down1"),
        ("layer1.0.conv2", "layer1"),
        ("encoder.conv1", "encoder"),
        ("head", "head"),
        ("0", "0"),
        ("", ""),
    ],
)
def test_a_block_ends_with_the_first_number_of_a_path(path: str, block: str) -> None:
    assert block_of(path) == block


def test_rows_are_in_the_order_of_the_layers_forward_and_backward(record: Record) -> None:
    maps = strips(deeper(record, 12))["maps"]
    for name in ("activations", "gradients", "weights"):
        blocks = list(dict.fromkeys(row[0] for row in maps[name]))
        assert blocks == [f"blocks.{number}" for number in range(12)]
    first = [row[1] for row in maps["gradients"] if row[0] == "blocks.0"]
    assert first == ["0 · linear", "1 · relu", "2 · layer norm", "3 · linear"]


def test_a_sum_says_what_it_is_and_where_it_stands(record: Record) -> None:
    record.part.ops["3", "add"] = OpSeen("pointwise", line="train.py:16")
    record.part.tensors[Key("3", "add", "output", "forward")] = record.tensors[OUTPUT]
    try:
        labels = [row[1] for row in strips(record)["maps"]["activations"]]
    finally:
        del record.part.ops["3", "add"], record.part.tensors[Key("3", "add", "output", "forward")]
    assert "sum (add), train.py:16" in labels and "add" not in labels


def test_a_strip_has_all_numbers_and_those_of_each_recorded_step(record: Record) -> None:
    data = strips(record)
    assert [one["words"].split(",")[0] for one in data["steps"]] == [f"step {step}" for step in record.sampled]
    row = next(row for row in data["maps"]["activations"] if row[:2] == ["0", "linear"])
    assert sum(row[3]) == record.tensors[OUTPUT].nonzero
    for (first, letters), step in zip(row[6], record.sampled, strict=True):
        exact = record.part.octaves[step][OUTPUT]
        assert first == exact.first and len(letters) == len(exact.counts)
        for letter, count in zip(letters, exact.counts, strict=True):
            told = 2 ** ((ord(letter) - 36) / 2) if letter != "#" else 0
            assert told == 0 == count or count / 1.2 < told < 1.2 * count


def test_a_record_of_an_earlier_lowp_has_a_report_without_steps(record: Record, tmp_path: Path) -> None:
    document = record.document()
    del document["octaves"]
    (tmp_path / "old.json").write_text(json.dumps(document))
    old = Record.load(tmp_path / "old.json")
    assert strips(old)["steps"] == [] and "<h1>" in page(old, advise(old))


# -- in a browser -----------------------------------------------------------------------------------------------------
FOCUS = "document.activeElement.id"
TOTALS = "document.getElementById('totals').textContent"
FLAG = "document.querySelector('[data-map=gradients] .flag').textContent"
# whether what has the focus can be seen: it is in the window, and nothing lies over its middle
IN_SIGHT = """(() => {
  const one = document.activeElement, box = one.getBoundingClientRect();
  const y = Math.min(Math.max(box.top, 0) + 4, innerHeight - 1);
  const found = document.elementFromPoint(box.left + Math.min(box.width, 100) / 2, y);
  return one.contains(found) || (one.tagName == 'SUMMARY' && found.closest('summary') == one);
})()"""
STRIPS = "[...document.querySelectorAll('.strip')].filter(one => one.checkVisibility())"


@pytest.fixture(scope="module")
def deep(record: Record, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the report of three blocks."""
    return report(deeper(record, 3), tmp_path_factory.mktemp("deep"))


@browser
@pytest.mark.parametrize("width", [390, 768, 1440])
def test_strips_have_one_axis_and_nothing_is_cut_on_narrow_and_wide_screens(deep: Path, width: int) -> None:
    with Page(deep, width=width) as page:
        hidden = page.value("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert hidden == 0, "the page itself does not scroll sideways"
        places = page.value(f"{STRIPS}.map(one => [one.getBoundingClientRect().left, one.offsetWidth])")
        assert len(places) >= 15 and len({tuple(place) for place in places}) == 1
        assert places[0][1] > 340
        cut = "[...document.querySelectorAll('.name, .effect')].filter(one => one.scrollWidth > one.clientWidth + 1)"
        assert page.value(f"{cut}.filter(one => getComputedStyle(one).display != 'inline').length") == 0
        small = "[...document.querySelectorAll('main *')].map(one => parseFloat(getComputedStyle(one).fontSize))"
        assert page.value(f"Math.min(...{small})") >= 13


@browser
def test_a_user_with_a_keyboard_reaches_everything_and_moves_the_strips(deep: Path) -> None:
    with Page(deep) as page:
        page.press("Tab")
        assert page.value("document.activeElement.className") == "skip"
        page.press("Enter")
        assert page.value("location.hash") == "#evidence"
        for wanted in ("format", "scale", "step"):
            page.press("Tab")
            assert page.value(FOCUS) == wanted and page.value(IN_SIGHT)
        bits = "document.querySelector('[data-map=gradients] .strip').style.getPropertyValue('--bits')"
        of_all = page.value(bits)
        page.press("ArrowRight", times=2)
        assert page.value("document.activeElement.getAttribute('aria-valuetext')").startswith("step 1, loss ")
        assert page.value(bits) != of_all and " in step 1, about: " in page.value(TOTALS)
        page.press("Home")
        assert page.value(bits) == of_all


@browser
def test_the_loss_scale_moves_the_limits_and_their_words(deep: Path) -> None:
    move = """(() => {
      const one = document.getElementById('%s');
      one.value = '%s'; one.dispatchEvent(new Event('input'));
    })()"""
    with Page(deep) as page:
        page.value(move % ("scale", 0))
        assert page.value(FLAG) == "below 2⁻²⁵ fp16 writes 0" and ", none of their tensors overflow" in page.value(
            TOTALS
        )
        page.value(move % ("scale", 40))
        assert page.value(FLAG).startswith("below 2⁻⁶⁵ fp16 writes 0 at loss scale 2⁴⁰") or "overflows" in page.value(
            FLAG
        )
        assert ", none of their tensors overflow" not in page.value(TOTALS)
        assert page.value("document.getElementById('scale').getAttribute('aria-valuetext')") == "2 to the power of 40"
        lost = "document.querySelectorAll('[data-map=gradients] .effect.lost').length"
        assert page.value(lost) > 0
        page.value(move % ("format", "bf16"))
        assert ", none of their tensors overflow" in page.value(TOTALS) and page.value(lost) == 0


@browser
def test_what_the_script_counts_is_what_the_prediction_says(record: Record, tmp_path: Path) -> None:
    from lowp.numerics.prediction import effect

    with Page(report(record, tmp_path)) as page:
        page.value("document.getElementById('format').value = 'e4m3fn'")
        page.value("document.getElementById('scale').value = 0")
        page.value("document.getElementById('scale').dispatchEvent(new Event('input'))")
        effects = page.value(
            "[...document.querySelectorAll('[data-map=gradients] .row')]"
            ".map(one => [one.children[0].textContent, one.children[2].textContent])"
        )
    assert [name for name, _ in effects] == ["0 · linear", "1 · relu", "2 · layer norm", "3 · linear"]
    for name, told in effects:
        module, op = name.split(" · ")
        seen = record.tensors[Key(module, op.replace(" ", "_"), "grad", "backward")]
        share = effect(seen, "e4m3fn").flushed
        found = re.match(r"([\d.]+) % become zero", told)
        assert (float(found[1]) / 100 if found else 0) == pytest.approx(share, rel=0.06), (name, told, share)


@browser
def test_blocks_and_tables_open_by_keyboard_and_nothing_that_has_the_focus_is_hidden(deep: Path) -> None:
    with Page(deep) as page:
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
        assert summaries == page.value("document.querySelectorAll('summary:not([hidden] *)').length") >= 15
        empty = f"{STRIPS}.filter(one => !one.style.getPropertyValue('--bits'))"
        for _ in range(100):  # a block tells of its opening a moment later
            if not page.value(f"{empty}.length"):
                break
        assert page.value(f"{empty}.map(one => one.closest('.row').textContent)") == [], "layers are drawn"


@browser
def test_the_policy_is_copied_or_selected_by_keyboard(deep: Path) -> None:
    with Page(deep) as page:
        while page.value("document.activeElement.dataset.copy") != "toml":
            page.press("Tab")
        page.press("Enter")
        for _ in range(100):  # the clipboard answers a moment later
            told = page.value("document.activeElement.textContent")
            if told != "Copy the policy":
                break
        assert told in ("Copied", "Selected: press Ctrl-C")
        if told != "Copied":
            selected = page.value("String(getSelection())")
            assert selected.split() == page.value("document.getElementById('toml').textContent").split()


@browser
def test_the_second_of_two_runs_is_drawn_below_the_first(record: Record, tmp_path: Path) -> None:
    with Page(report(record, tmp_path, recorded(2))) as page:
        assert page.value("document.querySelectorAll('.both .strip').length") >= 20


@browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(deep: Path, dark: bool) -> None:
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
      const texts = 'h1,h2,h3,p,th,td,summary,label,button,select,code,figcaption,.name,.effect,.flag,.ticks span';
      return [...document.querySelectorAll(texts)].map((one) => {
        const [a, b] = [luminance(getComputedStyle(one).color), luminance(behind(one))];
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      });
    })()"""
    with Page(deep, dark=dark) as page:
        found = page.value(contrast)
        assert len(found) > 100 and min(found) >= 4.5, min(found)
        is_dark = page.value("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)"
        assert is_dark == dark
