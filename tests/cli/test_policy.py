"""`lowp policy`: list, show, check, and reading its output again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowp.policy import Policy
from lowp.presets import PRESETS

Command = Callable[..., Any]


def test_the_list_has_every_preset_and_torch_s_own(lowp: Command) -> None:
    result = lowp("policy", "list")
    assert result.code == 0
    for name in (*PRESETS, "torch-2.13-cpu", "torch-2.13-cuda"):
        assert f"\n{name} " in result.out


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_shown_with_its_rules_scale_and_source(lowp: Command, name: str) -> None:
    result = lowp("policy", "show", name)
    preset = PRESETS[name]
    assert result.out.startswith(str(preset.policy))
    assert f"loss scale {preset.loss_scale}, master weights {preset.masters}" in result.out
    assert f"source: {preset.source}" in result.out


@pytest.mark.parametrize("name", [*PRESETS, "e5m7", "torch-2.13-cpu"])
def test_what_is_printed_as_toml_is_a_policy_file(lowp: Command, tmp_path: Path, name: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(lowp("policy", "show", name, "--toml").out)
    assert Policy.load(file).name == name
    count = len(Policy.load(file).rules)
    checked = lowp("policy", "check", str(file))
    assert (checked.code, checked.err) == (0, "")
    assert f"{count} rule" in checked.out
    assert lowp("policy", "show", str(file)).out.startswith(f"policy {name} on op table")


def test_the_op_table_is_shown_class_by_class(lowp: Command) -> None:
    shown = lowp("policy", "show", "fp16", "--ops").out
    assert "op table lowp-1; what is not listed is pointwise" in shown
    assert "\ncontraction: " in shown
    assert "conv_transpose2d" in shown.split()
    cpu = lowp("policy", "show", "torch-2.13-cpu", "--ops").out
    assert "layer_norm" not in cpu
    assert "quantile" in cpu


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[[rule]]\nops = ["linaer"]\n', "unknown op 'linaer'; did you mean linear"),
        ('[[rule]]\nops = ["linear"]\ninput = "fp61"\n', "unknown format 'fp61'"),
    ],
)
def test_a_wrong_file_is_one_line_on_stderr(lowp: Command, tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    result = lowp("policy", "check", str(file))
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert expected in result.err


def test_a_rule_that_is_never_reached_is_told(lowp: Command, tmp_path: Path) -> None:
    file = tmp_path / "hidden.toml"
    file.write_text('[[rule]]\noutput = "bf16"\n\n[[rule]]\nops = ["linear"]\ninput = "fp16"\n')
    assert "rule 2 is never reached" in lowp("policy", "check", str(file)).out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("shwo",), "unknown action 'shwo'; did you mean show?"),
        (("show",), "lowp policy show needs a name or a file, such as fp16"),
        (("check",), "such as my.toml"),
        (("list", "fp16"), "does not take a name"),
        (("show", "fp61"), "unknown precision 'fp61'; did you mean"),
        (("show", "torch-2.13"), "torch-2.13-cpu"),
        (("check", "gone.toml"), "no policy file gone.toml"),
    ],
)
def test_wrong_arguments_are_explained(lowp: Command, arguments: tuple[str, ...], expected: str) -> None:
    result = lowp("policy", *arguments)
    assert result.code == 2
    assert expected in result.err
