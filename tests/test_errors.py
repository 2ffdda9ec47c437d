"""The error texts that name the allowed values."""

from __future__ import annotations

import pytest

from lowp import errors
from lowp.errors import counted, near, unknown

FORMATS = ["fp32", "fp16", "bf16", "bf16-tpu", "e4m3fn"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("bf61", "unknown format 'bf61'; did you mean bf16? Also allowed: fp32, fp16, bf16-tpu, e4m3fn"),
        ("bf16-", "unknown format 'bf16-'; did you mean bf16, bf16-tpu or fp16? Also allowed: fp32, e4m3fn"),
        ("E4M3FN", "unknown format 'E4M3FN'; did you mean e4m3fn? Also allowed: fp32, fp16, bf16, bf16-tpu"),
        ("zzz", "unknown format 'zzz'; allowed: fp32, fp16, bf16, bf16-tpu, e4m3fn"),
        (3, "unknown format 3; allowed: fp32, fp16, bf16, bf16-tpu, e4m3fn"),
    ],
)
def test_the_near_names_come_first(given: object, text: str) -> None:
    assert unknown("format", given, FORMATS) == text


def test_a_table_of_one_or_none_is_said() -> None:
    assert unknown("mode", "nearst", ["nearest"]) == "unknown mode 'nearst'; did you mean nearest?"
    assert unknown("mode", "nearst", []) == "unknown mode 'nearst'; allowed: nothing"


def test_aliases_are_near_but_not_listed() -> None:
    text = unknown("format", "bfloat61", [*FORMATS, "bfloat16"], shown=FORMATS)
    assert text.startswith("unknown format 'bfloat61'; did you mean bfloat16")
    assert unknown("format", "zzz", [*FORMATS, "bfloat16"], shown=FORMATS) == unknown("format", "zzz", FORMATS)


def test_near_returns_names_as_they_are_spelled_in_the_table() -> None:
    assert near("adamw", ["SGD", "AdamW"]) == ["AdamW"]
    assert near("fp61", FORMATS, count=1) == ["fp16"]


def test_what_begins_alike_is_near_however_long_it_is() -> None:
    words = ["nearest-even", "nearest-away", "static", "saturate", "inf", "up"]
    assert near("sat", words)[0] == "saturate"
    assert near("infinity", words)[0] == "inf"
    assert near("nearest", words)[:2] == ["nearest-even", "nearest-away"]
    assert near("sa", words) == []  # too little to say so


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("InvalidInput", ValueError),
        ("UnknownName", ValueError),
        ("Unavailable", RuntimeError),
        ("Misuse", RuntimeError),
    ],
)
def test_each_error_is_also_python_s_own(name: str, builtin: type[Exception]) -> None:
    raised = getattr(errors, name)
    assert issubclass(raised, builtin)
    assert issubclass(raised, errors.LowpError)


def test_one_of_a_thing_has_no_plural() -> None:
    assert [counted(number, "optimizer step") for number in (0, 1, 4690)] == [
        "0 optimizer steps",
        "1 optimizer step",
        "4,690 optimizer steps",
    ]
