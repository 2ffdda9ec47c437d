"""Every figure of a recorded document: the picture is drawn, and its sentences state the document's numbers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report.figures import documents

from lowp.report import plots
from lowp.report.figures import costs, curves, flex, gradients, stall, style

Document = dict[str, Any]
FIGURES: list[tuple[Callable[[Document, Path], None], Callable[[Document], list[str]] | None, Document]] = [
    (gradients.updates, gradients.updates_words, documents.updates()),
    (gradients.gradients, gradients.gradients_words, documents.gradients()),
    (gradients.activation_gradients, gradients.activation_gradients_words, documents.activation_gradients()),
    (gradients.loss_scaling, gradients.loss_scaling_words, documents.loss_scaling()),
    (stall.stall, stall.stall_words, documents.stall()),
    (curves.curves, curves.curves_words, documents.curves()),
    (costs.cost, costs.cost_words, documents.cost()),
    (flex.autoflex, None, documents.autoflex()),
    (flex.flex_window, None, documents.flex_window()),
]
NAMES = [draw.__name__ for draw, _, _ in FIGURES]


@pytest.mark.parametrize(("draw", "words", "document"), FIGURES, ids=NAMES)
def test_a_picture_is_made_with_nothing_over_its_edge_its_title_or_another_panel(
    draw: Callable[[Document, Path], None],
    words: Callable[[Document], list[str]] | None,
    document: Document,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(style, "save", lambda figure, path: made.append(figure) or plots.save(figure, path))
    before = copy.deepcopy(document)
    draw(document, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert (words is None or words(document)) and document == before
    figure = made[0]
    assert figure.get_figwidth() == style.WIDTH
    width, height = figure.get_size_inches() * figure.dpi
    title = figure._suptitle.get_window_extent()
    assert title.x0 >= 0 and title.x1 <= width and title.y1 <= height
    boxes = {panel: panel.get_tightbbox() for panel in figure.axes}
    for panel, box in boxes.items():
        assert box.x0 >= -1 and box.x1 <= width + 1 and box.y0 >= -1, panel.get_title(loc="left")
        assert box.y1 <= title.y0 + 1, panel.get_title(loc="left")
        assert panel.get_legend() is None, "lines are labelled where they are"
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes.values(), 2))
    texts = [one for panel in figure.axes for one in panel.texts if one.get_text()]
    assert all(text.get_fontsize() >= 8 for text in [*texts, *figure.texts])


def title_of(draw: Callable[[Document, Path], None], document: Document, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the title of a picture, without drawing it to the end."""
    made: list[Any] = []
    monkeypatch.setattr(style, "save", lambda figure, path: made.append(figure))
    draw(document, Path("none.png"))
    return " ".join(made[0]._suptitle.get_text().split())


def test_a_title_says_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def title(draw: Callable[[Document, Path], None], document: Document) -> str:
        return title_of(draw, document, monkeypatch)

    naive = {**documents.gradients(), "precision": "fp16-naive", "fp32": 0.95}
    assert title(gradients.gradients, naive) == (
        "fp16-naive loses 7.5 points of accuracy: 92.0% of the weights with a gradient do not move"
    )
    assert title(gradients.gradients, {**naive, "fp32": None}).startswith("fp16-naive ends at accuracy 87.5%: 92.0%")
    assert title(gradients.updates, documents.updates()) == (
        "toy: weights stored in bf16 would lose 30.0% of their updates in epoch 1, in fp16 4.0%"
    )
    assert title(gradients.activation_gradients, documents.activation_gradients()) == (
        "toy: gradients of activations are 8 times smaller than those of weights; 25.0% are too small for fp16"
    )
    assert title(gradients.loss_scaling, documents.loss_scaling()).startswith(
        "toy: a loss scale of 256 leaves 0.10% of"
    )
    assert title(stall.stall, documents.stall()) == (
        "to nearest: 98.0% of the weights of toy never move, accuracy 50.0%; fp32: 50.0%"
    )
    assert title(curves.curves, documents.curves()) == "toy, top-1 error: fp16 ends 10.00 points above fp32 (2 seeds)"
    assert title(costs.cost, documents.cost()) == "A multiplication in fp32 takes the energy of about 8 in bf16"
    cut = documents.autoflex()
    cut["series"]["weights"]["mantissa"][0] = 32767
    assert title(flex.autoflex, documents.autoflex()).startswith(
        "toy in flex16+5: none of 12 writes is cut off, and the"
    )
    assert title(flex.autoflex, cut).startswith("toy in flex16+5: 1 of 12 writes is cut off")
    assert "at most 3.0% of the numbers of a tensor are below the unit" in title(
        flex.flex_window, documents.flex_window()
    )


def test_runs_that_end_as_fp32_are_said_to_and_failed_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    document = documents.curves()
    document["variants"].append({**document["variants"][0], "label": "bf16"})
    document["variants"][1]["runs"][0]["failure"] = "its loss was NaN"
    assert title_of(curves.curves, document, monkeypatch) == (
        "toy, top-1 error: fp16 failed in 1 of 2 runs, bf16 ends as fp32 (2 seeds)"
    )


def test_labels_at_the_ends_of_lines_are_apart_and_near_them() -> None:
    assert style._spread([0.1, 0.5, 0.9], 0.1) == [0.1, 0.5, 0.9]
    assert style._spread([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])
    assert style._spread([0.2, 0.5, 0.5, 0.52], 0.1) == pytest.approx([0.2, 0.40667, 0.50667, 0.60667], abs=1e-4)


def test_updates_tell_what_is_below_the_limits_and_what_would_be_lost() -> None:
    sentences = gradients.updates_words(documents.updates())
    assert sentences[2] == (
        "Epoch 4, learning rate 0.1: 40.0% of the updates are below 2^-8 of their weight, 5.0% below 2^-11. "
        "Of weights stored in bf16, 30.0% would stay unchanged, in fp16 4.0%."
    )


def test_gradients_tell_what_fp16_loses() -> None:
    first, second, third = gradients.gradients_words(documents.gradients())
    assert first == (
        "Of the gradients in fp32, 0.0500% are below 2^-24, fp16's smallest number; 0.0300% are zero in this run."
    )
    assert "19.0% are below 2^-24" in second and "95.0% of the updates are below 2^-11 of their weight" in third
    assert third.endswith("92.0% of the weights with a nonzero gradient stayed unchanged.")


def test_activation_gradients_tell_zeros_apart_and_compare_medians() -> None:
    first, second, third = gradients.activation_gradients_words(documents.activation_gradients())
    assert first.startswith("50.0% of the gradients of activations and 50.0% of those of weights are zero; ")
    assert (
        second
        == "Below fp16's smallest number, 2^-24: 25.0%, 1.0% (activations, weights). Subnormal in fp16: 50.0%, 50.0%."
    )
    few = documents.activation_gradients()
    few["activations"]["histogram"] = documents.histogram(0, (), zeros=1)
    few["weights"]["histogram"] = documents.histogram(0, (), zeros=0)
    assert gradients.activation_gradients_words(few)[0].startswith("100.0% of the gradients of activations and 0% of")
    assert third == "Medians: 2^-26.5 of activations, 2^-23.5 of weights: those of activations are 8 times smaller."


@pytest.mark.parametrize(
    ("scales", "words"),
    [((256.0, 256.0), "The scale was 256, 1 step of 40"), ((65536.0, 1024.0), "The scale was 65,536 to 1,024, 1 step")],
)
def test_loss_scaling_tells_the_scales_of_the_run(scales: tuple[float, ...], words: str) -> None:
    sentences = gradients.loss_scaling_words(documents.loss_scaling(scales))
    assert sentences[0].startswith(
        "Below 2^-24: 25.0% of the nonzero gradients of activations without a scale, 0.10% with"
    )
    assert sentences[-1].startswith(words) and "the last scale could be doubled 3 times" in sentences[-1]


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        *(((256.0, 256.0), "256"), ((256.0, 512.0), "256 to 512"), ((2048.0, 1024.0, 0.25, 0.5), "2,048 to 0.5")),
        ((1.0, 1.5), "1 to 1.5"),
    ],
)
def test_scales_of_a_run_are_the_first_and_the_last(scales: tuple[float, ...], words: str) -> None:
    assert f"The scale was {words}, " in gradients.loss_scaling_words(documents.loss_scaling(scales))[-1]


def test_a_scale_that_is_too_large_is_said_to_be() -> None:
    document = {**documents.loss_scaling(), "room": -1}
    assert gradients.loss_scaling_words(document)[-1].endswith("the last scale must be halved 1 time.")


def test_a_stall_is_told_in_a_sentence_a_variant() -> None:
    assert stall.stall_words(documents.stall())[-1] == (
        "to nearest: a step changes 1.0% of the weights; of those that fp32 changes, 98.0% end at their initial value; "
        "accuracy 50.0%."
    )


def test_the_share_that_moves_is_the_mean_of_nine_steps_around_each_and_of_fewer_at_the_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(style, "save", lambda figure, path: made.append(figure))
    document = documents.stall()
    document["variants"][1]["moving"] = [0.5, *[0.0] * 9, 0.9, *[0.0] * 8, 0.5]
    stall.stall(document, Path("none.png"))
    drawn = [*[50 / count for count in (5, 6, 7, 8, 9)], 0, *[10] * 9, *[50 / count for count in (9, 8, 7, 6, 5)]]
    assert made[0].axes[0].lines[1].get_ydata() == pytest.approx(drawn)


def test_medians_of_layers_have_as_much_room_above_the_first_as_below_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(style, "save", lambda figure, path: made.append(figure))
    gradients.activation_gradients(documents.activation_gradients(), Path("none.png"))
    panel = made[0].axes[-1]
    assert panel.get_ylim() == (1 + 0.7, -0.7) and [one.get_text() for one in panel.get_yticklabels()] == ["0", "2"]


def test_losses_of_a_stall_are_those_above_fp32_s(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(style, "save", lambda figure, path: made.append(figure))
    stall.stall(documents.stall(), Path("none.png"))
    (panel,) = (one for one in made[0].axes if one.get_xlabel() == "epoch")
    assert [text.get_text() for text in panel.texts] == ["masters +0.200", "stochastic +1.940", "to nearest +1.980"]


def test_curves_turn_shares_into_errors_and_have_top_5_where_it_was_measured() -> None:
    assert curves.curves_words(documents.curves())[0] == (
        "fp32: top-1 error 4.5% (4 to 5); validation loss 0.333 (0.333 to 0.333)."
    )
    assert (
        curves.curves_words(documents.curves(top5=0.99))[1]
        == "fp16: top-1 error 14.5% (14 to 15); top-5 error 1% (1 to 1)."
    )


def test_curves_leave_out_epochs_that_not_all_runs_reached_and_say_what_failed(tmp_path: Path) -> None:
    document = documents.curves()
    broken = document["variants"][1]["runs"][0]
    broken["history"], broken["failure"] = broken["history"][:2], "its weights were no numbers after epoch 2"
    document["variants"][1]["runs"][1]["history"][1]["loss"] = None
    assert curves.curves_words(document)[1] == (
        "fp16: top-1 error 24.5% (24 to 25); 1 of 2 runs failed: its weights were no numbers after epoch 2."
    )
    curves.curves(document, tmp_path / "a.png")


def test_an_error_of_zero_is_drawn_on_a_plain_axis(tmp_path: Path) -> None:
    curves.curves(documents.curves(top5=1.0), tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size > 1000


def test_costs_tell_estimates_from_the_table() -> None:
    assert costs.cost_words(documents.cost()) == [
        "Energy of a multiplication in fp32 as a multiple of that in: bf16 ~8."
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "unknown"),
        (0, "0%"),
        (1e-7, "less than 0.0001%"),
        (2e-5, "0.0020%"),
        (0.0031, "0.31%"),
        (0.31416, "31.4%"),
    ],
)
def test_a_share_has_digits_enough_to_be_seen(value: float | None, words: str) -> None:
    assert style.share(value) == words


def test_a_bin_lies_between_its_power_and_the_next() -> None:
    values, edges = style.bars(documents.histogram(-3, (1, 3), zeros=7))
    assert (values, edges) == ([25.0, 75.0], [-3, -2, -1])


def test_histograms_without_a_number_are_drawn_empty(tmp_path: Path) -> None:
    document = documents.activation_gradients()
    for name in ("activations", "weights"):
        document[name]["histogram"] = documents.histogram(0, (), zeros=4)
    gradients.activation_gradients({**document, "layers": []}, tmp_path / "empty.png")
    assert len(gradients.activation_gradients_words(document)) == 2


def test_a_run_has_one_colour_in_every_panel_and_its_loss_is_told_beside_fp32s(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(style, "save", lambda figure, path: made.append(figure))
    stall.stall(documents.stall(), Path("none.png"))
    moving, way, loss = made[0].axes
    colours = {text.get_text(): text.get_color() for text in moving.texts}
    assert list(colours) == ["to nearest", "stochastic", "masters", "fp32"] and len(set(colours.values())) == 4
    assert {text.get_text(): text.get_color() for text in way.texts} == colours
    names = {"masters": "+0.200", "stochastic": "+1.940", "to nearest": "+1.980"}
    told = {f"{name} {gap}": colours[name] for name, gap in names.items()}
    assert {text.get_text(): text.get_color() for text in loss.texts} == told
    for panel, first in ((moving, [100.0, 90.0, 3.0, 1.0]), (way, [0.1] * 4), (loss, [0.0] * 4)):
        assert [line.get_color() for line in panel.lines] == [colours[name] for name in ("fp32", *names)]
        assert [line.get_ydata()[0] for line in panel.lines] == pytest.approx(first)
    assert [line.get_ydata()[-1] for line in loss.lines[1:]] == pytest.approx([0.2, 1.94, 1.98])
    assert way.get_title("left") == "course of one weight, 0.weight[3, 1]"


def test_the_places_of_a_mantissa_are_drawn_below_the_numbers_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(style, "save", lambda figure, path: made.append(figure))
    document = documents.flex_window()
    windows = [window[moment] for window in document["windows"].values() for moment in ("first", "last")]
    for histogram, exponents in zip(windows, itertools.cycle(((-20, -20), (-21, -18))), strict=False):
        histogram["exponents"] = list(exponents)
    flex.flex_window(document, Path("none.png"))
    moved = [sorted(list(line.get_xdata()) for line in panel.lines) for panel in made[0].axes]
    assert moved == [[[-20, -5]] if place % 2 == 0 else [[-21, -6], [-18, -3]] for place in range(len(windows))]
    low, high = made[0].axes[-1].get_xlim()
    assert low <= -22 and high >= -2
