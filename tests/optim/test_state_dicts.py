"""States of optimizers, schedulers and models: which a run can go on from, and what is said of others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import lowp
from lowp.errors import InvalidInput
from lowp.optim.state_dicts import check_saved, kind_of

INDEX = ("state", 0)
GROUP = ("param_groups", 0)
ONLY_MASTER = {"master_weight": torch.zeros(3, 4), "master_steps": 1, "master_seed": 2}
MODEL = {"weight": torch.zeros(2), "count": torch.tensor(1), "extra": 3}


class Adagrad(torch.optim.Adagrad):
    """Another library's, which keeps what it likes."""


MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params: lowp.MasterWeights(torch.optim.AdamW(params, 1e-3), "fp16"),
    "Adam": torch.optim.Adam,
    "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True),
    "Adagrad": Adagrad,
}


def made(kind: str, tied: bool = False) -> torch.optim.Optimizer:
    """Return an optimizer of two parameters, or of one that appears twice, after a step."""
    weight, bias = (nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3)))
    optimizer = MAKERS[kind]([weight, weight if tied else bias])
    for parameter in (weight, bias):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def check(part: Any, place: tuple[Any, ...], value: object) -> None:
    """Check the state of a part with a value at a place, or without what stands there."""
    state = part.state_dict()
    entry = state if place else None
    for key in place[:-1]:
        entry = entry[key]
    if entry is None:
        state = value
    elif value is ...:
        del entry[place[-1]]
    else:
        entry[place[-1]] = value
    check_saved(part, state, kind_of(part), part.state_dict())


@pytest.mark.parametrize(
    ("kind", "place", "value"),
    [
        ("AdamW", (*INDEX, "master_seed"), 2**64 - 1),
        ("AdamW", (*INDEX, "master_steps"), 0),
        ("AdamW", (*INDEX, "master_steps"), ...),
        ("AdamW", (*INDEX, "step"), 0),
        ("AdamW", (*INDEX, "note"), "x"),
        ("AdamW", (*INDEX, "count"), torch.tensor(3)),
        ("AdamW", (*GROUP, "betas"), [torch.tensor(0.0), 0.5]),
        ("AdamW", (*GROUP, "foreach"), None),
        ("AdamW", (*GROUP, "fused"), ...),  # an older torch has fewer switches
        ("AdamW", (*GROUP, "lr"), torch.tensor([1e-3])),
        ("AdamW", (*GROUP, "initial_lr"), "x"),  # which this one has not
        ("AdamW", ("param_groups",), ({**MAKERS["AdamW"]([torch.ones(1)]).param_groups[0], "params": [0, 1]},)),
        ("AdamW", INDEX, ONLY_MASTER),  # of a parameter that no step has moved
        ("AdamW", INDEX, {"master_weight": torch.zeros(3, 4)}),
        ("AdamW", INDEX, ...),
        ("AdamW", ("state",), {}),
        ("SGD", (*INDEX, "momentum_buffer"), None),
        ("SGD", INDEX, {}),
        ("Adagrad", INDEX, {"total": torch.zeros(5)}),
    ],
    ids=str,
)
def test_a_run_goes_on_from_a_state_that_has_what_the_optimizer_needs(
    kind: str, place: tuple[Any, ...], value: object
) -> None:
    check(made(kind), place, value)


@pytest.mark.parametrize(
    ("kind", "place", "value", "text"),
    [
        (
            "AdamW",
            (*INDEX, "exp_avg"),
            torch.zeros(2),
            "exp_avg of parameter 0 must be a floating-point tensor of shape",
        ),
        ("AdamW", (*INDEX, "exp_avg"), torch.zeros(3, 4).long(), "exp_avg .* floating-point .*, not a tensor of int64"),
        ("AdamW", (*INDEX, "exp_avg"), torch.zeros(3, 4).cfloat(), "exp_avg .* tensor .*, not a tensor of complex64"),
        ("AdamW", (*INDEX, "exp_avg"), 3, r"exp_avg of parameter 0 must be a .* of shape \(3, 4\), not int"),
        ("AdamW", (*INDEX, "exp_avg"), torch.full((3, 4), torch.inf), "exp_avg of parameter 0 has infinities or NaN"),
        ("AdamW", (*INDEX, "max_exp_avg_sq"), 3, "max_exp_avg_sq of parameter 0 must be a floating-point tensor"),
        ("AdamW", (*INDEX, "of rows"), torch.zeros(3), "of rows of parameter 0 must be a floating-point tensor"),
        ("AdamW", (*INDEX, "exp_avg"), ..., "the state of parameter 0 lacks exp_avg$"),
        ("AdamW", INDEX, {"step": 1.0, **ONLY_MASTER}, "the state of parameter 0 lacks exp_avg, exp_avg_sq"),
        ("AdamW", INDEX, {}, "the state of parameter 0 lacks master_weight, which others have"),
        ("AdamW", INDEX, 3, "the state of parameter 0 must be a dictionary, not int"),
        *(
            ("AdamW", (*INDEX, "step"), step, "the step of parameter 0 must be a number of 0 or more, not")
            for step in (-1, torch.ones(1), float("nan"), torch.tensor(1j), True, "x")
        ),
        ("AdamW", (*INDEX, "master_weight"), torch.zeros(3), "master_weight of parameter 0 must be a floating-point"),
        ("AdamW", (*INDEX, "master_weight"), [1], "master_weight of parameter 0 must be a floating-point .*, not list"),
        *(
            ("AdamW", (*INDEX, "master_seed"), seed, f"master_seed of parameter 0 must be a whole number .* not {text}")
            for seed, text in ((-1, "-1"), (2**64, "184"), (True, "True"), ("x", "'x'"))
        ),
        ("AdamW", ("state", 9), {}, "it has a state of parameter 9, but there are 2 parameters"),
        ("AdamW", ("state",), [], "the entry 'state' of an optimizer's state must be a dictionary"),
        ("AdamW", ("state",), ..., "an optimizer's state must have state and param_groups; missing: state$"),
        ("AdamW", (), None, "an optimizer's state must be a dictionary from state_dict.., not NoneType"),
        ("AdamW", ("param_groups",), 3, "'param_groups' of an optimizer's state must be a list of dictionaries"),
        ("AdamW", GROUP, 3, "'param_groups' of an optimizer's state must be a list of dictionaries"),
        ("AdamW", (*GROUP, "params"), 3, "must have params, a list of indices or names"),
        ("AdamW", (*GROUP, "params"), [0, 1.5], "must have params, a list of indices or names"),
        ("AdamW", (*GROUP, "params"), [0], "has groups of 1 parameters, but this one has groups of 2: it belongs to"),
        ("AdamW", ("param_groups",), [], "has groups of no parameters, but this one has groups of 2: it belongs to"),
        ("AdamW", (*GROUP, "params"), [1, 1], "a parameter appears twice in an optimizer's state"),
        ("AdamW", (*GROUP, "lr"), "fast", "parameter group 0 has lr='fast': give a finite number"),
        ("AdamW", (*GROUP, "lr"), float("inf"), "parameter group 0 has lr=inf: give a finite number"),
        ("AdamW", (*GROUP, "lr"), torch.ones(2), "parameter group 0 has lr=.*: give a finite number"),
        ("AdamW", (*GROUP, "lr"), ..., "parameter group 0 has lr=None: give a finite number"),
        ("AdamW", (*GROUP, "maximize"), 1, "parameter group 0 has maximize=1: give True or False"),
        ("AdamW", (*GROUP, "foreach"), 1, "parameter group 0 has foreach=1: give True or False"),
        ("AdamW", (*GROUP, "amsgrad"), 1, "parameter group 0 has amsgrad=1: give True or False"),
        ("AdamW", (*GROUP, "amsgrad"), True, "the state of parameter 0 lacks max_exp_avg_sq"),
        ("RMSprop", (*INDEX, "grad_avg"), ..., "the state of parameter 0 lacks grad_avg"),
        ("RMSprop", (*INDEX, "momentum_buffer"), ..., "the state of parameter 0 lacks momentum_buffer"),
        ("SGD", (*INDEX, "momentum_buffer"), 3, "momentum_buffer of parameter 0 must be a floating-point tensor"),
        ("Adagrad", (*GROUP, "lr"), "fast", "parameter group 0 has lr='fast': give a finite number"),
    ],
    ids=str,
)
def test_a_state_from_which_an_optimizer_cannot_go_on_is_refused_in_words(
    kind: str, place: tuple[Any, ...], value: object, text: str
) -> None:
    with pytest.raises(InvalidInput, match=text):
        check(made(kind), place, value)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_an_optimizer_has_twice_may_be_saved_as_one() -> None:
    check(made("SGD", tied=True), (*GROUP, "lr"), 0.2)


@pytest.mark.parametrize("initial", [1.0, "x"])
def test_a_rate_that_a_scheduler_has_added_is_compared_where_both_have_it(initial: object) -> None:
    optimizer = made("Adam")
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    check(optimizer, (*GROUP, "initial_lr"), ...)
    with nullcontext() if initial == 1 else pytest.raises(InvalidInput, match="has initial_lr='x': give a finite"):
        check(optimizer, (*GROUP, "initial_lr"), initial)


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        ((), 3, "a scheduler's state must be a dictionary from state_dict.. with last_epoch"),
        (("last_epoch",), ..., "a scheduler's state must be a dictionary from state_dict.. with last_epoch"),
        (("gamma",), None, "it has gamma=None: give a finite number"),
        (("base_lrs",), [0.1, 0.1], "it has base_lrs=.*: 1 finite numbers must be given"),
        (("base_lrs",), ["x"], "it has base_lrs=.*: 1 finite numbers must be given"),
        (("base_lrs",), 3, "it has base_lrs=3: 1 finite numbers must be given"),
        (("gamma",), ..., ""),  # an older torch has fewer entries
        (("another",), "x", ""),
    ],
    ids=str,
)
def test_a_schedulers_state_has_numbers_where_it_had_numbers(place: tuple[Any, ...], value: object, text: str) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(made("SGD"), 2)
    with pytest.raises(InvalidInput, match=text) if text else nullcontext():
        check(scheduler, place, value)


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (
            {"weight": torch.zeros(2).long()},
            "weight must be a tensor of float32, .* not a tensor of int64, .*would change",
        ),
        ({"weight": torch.zeros(2).cfloat()}, "weight must be .*, not a tensor of complex64, .*would change"),
        ({"count": torch.tensor(1.0)}, "count must be a tensor of int64, .* not a tensor of float32, .*would change"),
        ({"weight": "x"}, r"weight must be a tensor of float32, shape \(2,\), not str"),
        ({"weight": None}, "weight must be a tensor of float32, .* not NoneType"),
        ({"weight": torch.tensor([1.0, torch.nan])}, "weight has infinities or NaN, from which no run can go on"),
        ({"weight": torch.zeros(2).half(), "extra": "x", "more": 1}, ""),
        ({"weight": torch.zeros(5)}, ""),  # torch itself tells of shapes, and of what is missing
        ({"weight": ..., "count": ...}, ""),
    ],
    ids=str,
)
def test_a_models_state_has_numbers_of_the_same_kind(edit: dict[str, Any], text: str) -> None:
    model = nn.Module()
    model.register_parameter("weight", nn.Parameter(torch.zeros(2)))
    saved = {name: value for name, value in (MODEL | edit).items() if value is not ...}
    with pytest.raises(InvalidInput, match=text) if text else nullcontext():
        check_saved(model, saved, None, MODEL)


def test_a_models_state_is_a_dictionary() -> None:
    with pytest.raises(InvalidInput, match=r"a model's state must be a dictionary from state_dict\(\), not list"):
        check_saved(nn.Linear(1, 1), [], None, {})


def test_a_state_goes_to_the_class_that_it_was_saved_from() -> None:
    wrapped, plain = made("AdamW"), torch.optim.AdamW([nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3))])
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 2)
    assert [kind_of(one) for one in (wrapped, plain, scheduler, nn.Linear(1, 1))] == ["AdamW", "AdamW", "StepLR", None]
    for kind in ("AdamW", None):
        check_saved(plain, plain.state_dict(), kind, plain.state_dict())
    with pytest.raises(InvalidInput, match="it was saved from SGD, but this optimizer is AdamW: load it into the same"):
        check_saved(plain, plain.state_dict(), "SGD", plain.state_dict())
    check_saved(nn.Linear(1, 1), {}, "SGD", {})
    check_saved(3, "anything", "SGD", {})  # any other part checks what it loads
