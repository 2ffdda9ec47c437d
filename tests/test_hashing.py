"""The hash of a cast is computed once, and belongs to one process."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, replace

from lowp.casts import Cast, parse
from lowp.hashing import hashed_once


def test_a_hash_is_computed_once() -> None:
    asked = []

    class Part:
        def __hash__(self) -> int:
            asked.append(self)
            return 7

    @hashed_once
    @dataclass(frozen=True)
    class Whole:
        part: Part

    whole = Whole(Part())
    assert hash(whole) == hash(whole) and len(asked) == 1


def test_copies_and_pickles_leave_the_hash_behind() -> None:
    value = parse(Cast("e4m3fn", "stochastic", random_bits=8))
    found = hash(value)
    for again in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value)), replace(value)):
        assert "_hash" not in vars(again)
        assert again == value and hash(again) == found
