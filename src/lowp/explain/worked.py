"""The worked cases: a title and the arguments of `lowp explain` that show it."""

import shlex
from typing import NamedTuple


class WorkedCase(NamedTuple):
    """The title of a case and the arguments that show it."""

    title: str
    arguments: tuple[str, ...]


_TYPED = {
    "A decimal number in fp32": "1.12156456132 --to fp32",
    "The same number in fp16": "1.12156456132 --to fp16",
    "A sum that rounds up: alignment, guard and sticky bit": "'1.125 + 0.12457275390625' --in fp16",
    "The gradient of that sum widened to fp32: bits are appended": "'0b0 01011 1111111001' --from fp16 --to fp32",
    "The sum in fp32": "'1.125 + 0.12457275390625' --in fp32",
    "A misprinted digit that rounds to the same bits": "0.12457275190625 --to fp16",
    "The smallest fp16 number": "'2^-24' --to fp16",
    "Half of it is a tie, and becomes zero": "'2^-25' --to fp16",
    "2^-3 + 2^-14: half the spacing, a tie": "'2^-3 + 2^-14' --in fp16",
    "A small gradient in fp16": "0.00041999 --to fp16",
    "The update that never arrives": "--weight 1.125 --gradient 0.00041999 --steps 101 --in fp16",
    "The same update in bf16": "--weight 1.125 --gradient 0.00041999 --steps 101 --in bf16",
    "A product": "'1.5 * 2.25' --in bf16",
    "Rounded twice is not rounded once": "1.00048828125000001 --to fp16 --via fp32",
    "One element of D = A B + C on a tensor core": "--fma",
}
WORKED_CASES = tuple(WorkedCase(title, tuple(shlex.split(words))) for title, words in _TYPED.items())
