"""lowp explain: accepted questions, worked cases, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from lowp.explain import WORKED_CASES

SUM = """\
1.125 + 0.12457275390625 in fp16
  format      fp16 (e5m10, bias 15), nearest-even, overflow: inf
  left        1.125
              0 01111 0010000000   1.0010000000 x 2^0
  right       0.12457275390625
              0 01011 1111111001   1.1111111001 x 2^-4
  align       exponents 01111 - 01011 = 4:
              1.1111111001 moves right by 4 places to 0.0001111111|1001
              guard 1, the rest (001) sticky 1
  add           1.0010000000
              + 0.0001111111|1001
              = 1.0011111111|1001
  mantissas   0010000000 + 0001111111 = 0011111111, rounded up to 0100000000
  exact       the sum is 1.24957275390625
  exponent    floor(log2 |x|) = 0; field 0 + 15 = 15 = 01111
  spacing     one unit (ulp) here is 2^-10 = 0.0009765625
  significand 1.0011111111|1001 x 2^0
  cut off     1001: guard 1, round 0, sticky 1
  rule        the cut part is 0.5625 of a unit, more than half: up by one unit
  result      0 01111 0100000000   0x3d00   sign exponent mantissa
  value       1.25
  error       0.000427246 = 0.4375 ulp, relative 0.0003419
  in fp32     1.24957275390625 (exact)
              0 01111111 00111111111001000000000
"""


def test_the_worked_sum_is_printed_step_by_step(lowp: Callable[..., Any]) -> None:
    assert lowp("explain", "1.125 + 0.12457275390625", "--in", "fp16") == (0, SUM, "")
    # the shell may split it, and the options may come first
    assert lowp("explain", "--in", "fp16", "1.125", "+", "0.12457275390625").out == SUM


def test_the_worked_update_is_printed(lowp: Callable[..., Any]) -> None:
    arguments = ("--weight", "1.125", "--gradient", "0.00041999", "--steps", "101", "--in", "fp16")
    out = lowp("explain", *arguments).out
    for shown in (
        "weight + gradient in fp16: 1.125 + 0.00041999",
        "0.000420093536376953125 (from 0.00041999)",
        "0 00011 1011100010",
        "LOST: the weight stays as it was",
        "above |update| 2^-11 = 0.00048828125",
        "at exactly that size it is lost",
        "fp16        1.125, for ever: no step moves it",
        "fp32        1.167429447174072265625",
    ):
        assert shown in out
    assert "weight - gradient" in lowp("explain", *arguments, "--minus").out
    assert "weight - 0.1 x gradient" in lowp("explain", *arguments, "--learning-rate", "0.1").out


def test_the_worked_cases_run_with_their_titles(lowp: Callable[..., Any]) -> None:
    result = lowp("explain", "--worked")
    assert result.code == 0
    for index, case in enumerate(WORKED_CASES, 1):
        assert f"{index}. {case.title}\n$ lowp explain " in result.out
        assert lowp("explain", *case.arguments).out.rstrip() in result.out
    assert max(len(line) for line in result.out.splitlines() if not line.startswith("$ ")) <= 80


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("1.12156456132", "--to", "fp16"), "result      0 01111 0001111100   0x3c7c"),
        (("1.12156456132", "--to", "fp32"), "value       1.12156450748443603515625"),
        (("1.12156456132", "--in", "fp32"), "value       1.12156450748443603515625"),
        (("0x3c7c", "--from", "fp16", "--to", "fp32"), "value       1.12109375"),
        (("0x3c7c", "--to", "fp32"), "value       15484"),
        (("0x1.8p3", "--from", "fp16", "--to", "fp32"), "value       12"),
        (("1.5 * 2.25", "--in", "bf16"), "value       3.375"),
        (("1 / 3", "--in", "fp16"), "the quotient is 1/3"),
        (("-1e-5", "--to", "fp16"), "result      1 00000 0010101000"),
        (("-inf", "--to", "e4m3fn"), "infinity becomes NaN (overflow: nan)"),
        (("-inf", "--to", "e4m3fn:saturate"), "infinity becomes the largest number"),
        (("-1/3", "--to", "bf16"), "value       -0.333984375"),
        (("-0x1p-3", "--to", "e5m2"), "value       -0.125"),
        (("-2^-25", "--to", "fp16"), "underflow to zero"),
        (("-0", "--to", "fp16"), "result      1 00000 0000000000   0x8000"),
        (("nan", "--to", "e2m1"), "no bits: e2m1 has no nan"),
        (("500", "--to", "e4m3fn:toward-zero:saturate"), "beyond the largest number, 448: saturate"),
        (("0b0", "01011", "1111111001", "--from", "fp16", "--to", "fp32"), "0 01111011 11111110010000000000000"),
        (("0x3c7c", "--bits", "--to", "fp16"), "value       1.12109375"),
        (("bits:0x3c7c", "--to", "fp16"), "value       1.12109375"),
        (("0x3c7c", "--to", "fp32"), "value       15484"),
        (("0x3c7c + 0x3c00", "--bits", "--in", "fp16"), "value       2.12109375"),
        (("0.3", "--to", "flex16+5", "--exponent", "-8"), "element 77 times the scale"),
        (("0.3", "--to", "int8", "--scale", "0.01"), "element 30 times the scale"),
        (("0.3", "--to", "mxfp8"), "for a tensor with this number as its largest"),
        (("0.3", "--to", "e5m2:stochastic"), "chance      0.800000: 0.3125"),
        (("0.3", "--to", "e5m2:stochastic", "--random", "0.9"), "value       0.25"),
        (("1.00048828125000001", "--to", "fp16", "--via", "fp32"), "two roundings are not one"),
        (("1.00048828125000001", "--to", "fp16"), "double rounding (--via fp32)"),
        (("60000 + 60000", "--in", "fp16"), "beyond the largest number, 65504: inf"),
        (("1.125 + 0.12457275390625", "--in", "fp16", "--to", "fp32"), "value       1.24957275390625"),
        (("0.999999", "--to", "e4m3fn"), "just below 1 of a unit, more than half"),
        (("--fma",), "D[4,1] step by step"),
        (("--fma", "--element", "2,2", "--accumulate", "fp16"), "D[2,2] step by step"),
        (("--fma", "--a", "1 2", "--b", "3; 4", "--order", "sequential"), "one after the other"),
        (("--fma", "--in", "bf16"), "A and B in bf16"),
        (("--weight", "-1", "--gradient", "-2^-12", "--in", "fp16", "--minus"), "numbers are closer"),
        (("--weight", "1", "--gradient", "1e-9", "--in", "fp16"), "LOST before it is added"),
        (("--weight", "65504", "--gradient", "100", "--in", "fp16:saturate"), "at no size"),
        (("--weight", "1", "--gradient", "0.0001", "--in", "bf16:stochastic"), "KEPT ON AVERAGE"),
    ],
)
def test_what_is_asked_is_shown(lowp: Callable[..., Any], arguments: tuple[str, ...], shown: str) -> None:
    result = lowp("explain", *arguments)
    assert (result.code, result.err) == (0, "")
    assert shown in result.out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "nothing to explain: give a number and --to"),
        (("1.5",), "1.5: the format is missing: give --to, for example --to fp16"),
        (("1 + 2",), "1 + 2: the format is missing: give --in, for example --in fp16"),
        (("1.2.3", "--to", "fp16"), "'1.2.3' is not a number: give a decimal"),
        (("1 % 2", "--in", "fp16"), "unknown operator '%'; allowed: +, -, *, /"),
        (("1", "--to", "fp61"), "unknown format 'fp61'; did you mean fp64, fp16"),
        (
            ("1", "--to", "fp16:nearest-evn"),
            "unknown rounding, overflow or scaling 'nearest-evn'; did you mean nearest-even",
        ),
        (("1 + 2", "--in", "mxfp8"), "give a format without a shared scale, such as e4m3fn"),
        (("1 / 2", "--in", "flex16+5"), "of mantissas, not /"),
        (("inf + 2", "--in", "flex16+5"), "which has no infinity and no NaN"),
        (("1", "--fma"), "a number and --fma cannot be combined: give one of them"),
        (("--weight", "1", "--in", "fp16"), "--gradient is missing"),
        (("--weight", "1", "--gradient", "1"), "the format of the weight is missing"),
        (("--weight", "1", "--gradient", "1", "--in", "fp16", "--minus", "--learning-rate", "1"), "omit --minus"),
        (
            ("--weight", "1", "--gradient", "1", "--in", "i8"),
            "explained in signed float formats (fp16, bf16, e4m3fn, e5m7)",
        ),
        (("--fma", "--element", "5,1"), "--element 5,1: give row and column, from 1,1 to 4,4"),
        (("--fma", "--a", "1", "--b", "1", "--element", "2,2"), "D is 1 x 1: it has no element 2,2"),
        (("0.3", "--to", "e5m2:stochastic", "--random", "1"), "outside [0, 1)"),
        (("0.3", "--to", "int8", "--scale", "inf"), "--scale inf: give a finite number"),
    ],
)
def test_what_cannot_be_explained_is_one_line(lowp: Callable[..., Any], arguments: tuple[str, ...], text: str) -> None:
    result = lowp("explain", *arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("lowp: error: ") and result.err.count("\n") == 1
    assert text in result.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("0.1", "--in", "fp16", "--via", "fp32", "--to", "bf16"), "--in and --via are both the format before --to"),
        (("1 + 2", "--in", "fp16", "--via", "fp32"), "--via says nothing about an operation: omit it; allowed: --to"),
        (("1 + 2", "--in", "flex16+5", "--to", "fp16"), "--to says nothing about an operation in a flex format"),
        (("--weight", "1", "--gradient", "2", "--in", "fp16", "--to", "bf16"), "--to says nothing about --weight"),
        (("--weight", "1", "--gradient", "2", "--in", "fp16", "--order", "x"), "--order says nothing about --weight"),
        (("--fma", "--steps", "2"), "--steps says nothing about --fma: omit it; allowed: --fma, --a"),
        (("0.1", "--to", "fp16", "--random", "0.5"), "--random is for a stochastic cast, and fp16 is none: give fp16:"),
        (("0.1", "--to", "fp16", "--rescale", "3"), "fp16 has no mantissas under a shared exponent"),
        (("0.1", "--to", "flex16+5", "--rescale", "3", "--scale", "2"), "--scale says nothing about --rescale"),
        (("N101", "--to", "fp16"), "--to says nothing about a finding: omit it; allowed: no options"),
        (("N1011",), "unknown finding 'N1011'; did you mean N101"),
        (("--worked", "--json"), "--json says nothing about --worked: omit it; allowed: --worked, --plain"),
    ],
)
def test_no_option_is_ignored(lowp: Callable[..., Any], arguments: tuple[str, ...], text: str) -> None:
    result = lowp("explain", *arguments)
    assert (result.code, result.out) == (2, "")
    assert text in result.err


def test_a_number_in_one_format_is_converted_to_another(lowp: Callable[..., Any]) -> None:
    both = lowp("explain", "1.00390625001", "--in", "fp32", "--to", "bf16")
    assert both == lowp("explain", "1.00390625001", "--via", "fp32", "--to", "bf16")
    assert both.out != lowp("explain", "1.00390625001", "--to", "bf16").out


def test_machines_get_the_same_facts(lowp: Callable[..., Any]) -> None:
    data = json.loads(lowp("explain", "1.125 + 0.12457275390625", "--in", "fp16", "--json").out)
    assert data["alignment"]["shift"] == 4
    assert data["alignment"]["cut"] == "1001"
    assert data["rounded"]["result"] == 1.25
    assert data["rounded"]["bits"] == "0 01111 0100000000"
    assert json.loads(lowp("explain", "--fma", "--json").out)["order"] == "tensor-core"
