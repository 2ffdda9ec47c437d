"""Runs a step again from its tape, beside the training, which is not changed."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowp.compat import hooks_after_accumulation, unwrapped
from lowp.numerics.models import Models
from lowp.numerics.modes import tensors_in
from lowp.numerics.tape import Slot, Tape, mapped, random_state, set_random_state


@contextmanager
def beside(tape: Tape, models: Models) -> Iterator[None]:
    """Let the step of a tape run again in here, as it was written: without torch.compile, in its region.

    Parameters have no gradients in here, and their hooks rest that run when a gradient is complete: an optimizer may
    step in them. Gradients, buffers and the random state are what they were afterwards.
    """
    parameters = [one for _, one in models.named_parameters()]
    gradients = [(one, one.grad) for one in parameters]
    hooks = [(one, dict(one)) for one in map(hooks_after_accumulation, parameters) if one]
    random = random_state()
    try:
        for one in parameters:
            one.grad = None
        for resting, _ in hooks:
            resting.clear()
        with ExitStack() as stack:
            stack.enter_context(_copied_buffers(models))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # warnings about the step were given when it ran first
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if tape.region is not None:
                stack.enter_context(tape.region.resume())
            for device, _, dtype in tape.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            yield
    finally:
        set_random_state(random)
        for resting, kept in hooks:
            resting.update(kept)
        for parameter, before in gradients:
            parameter.grad = before


@contextmanager
def _copied_buffers(models: Models) -> Iterator[None]:
    """Let the models write copies of their buffers: a graph that waits for its backward pass may hold the buffers.

    Statistics that a norm in training has written in this step, and does not read, begin finite: they are no cause.
    """
    held = [
        (module, name, buffer)
        for model in models
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    copies = {id(buffer): buffer.detach().clone() for _, _, buffer in held}
    try:
        for module, name, buffer in held:
            if module.training and name in ("running_mean", "running_var"):
                copies[id(buffer)].nan_to_num_()
            module._buffers[name] = copies[id(buffer)]
        yield
    finally:
        for module, name, buffer in held:
            module._buffers[name] = buffer


def calls_again(tape: Tape, at_line: Callable[[str], None] = lambda line: None) -> Tensor | None:
    """Make the calls of the tape again and return the new loss; None if they do not produce the loss.

    `at_line` is called before each call with the line that made it, and with '' after the last call.
    """
    made: dict[int, Tensor] = {}
    for call in tape.calls:
        function, of_model = call.function, call.random is not None
        if call.random is not None:
            set_random_state(call.random)
            function = unwrapped(cast(nn.Module, function))
        elif not call.results:
            continue

        def filled(x: Any, of_model: bool = of_model) -> Any:
            if isinstance(x, Slot):
                return made[x.number]
            return _detached(x) if of_model else x

        at_line(call.line)
        result = function(*mapped(filled, call.args), **mapped(filled, call.kwargs))
        made.update(zip(call.results, tensors_in(result), strict=False))
    at_line("")
    found = made.get(-1 if tape.loss is None else tape.loss)
    return found if found is not None and found.requires_grad else None


def _detached(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return x.detach().requires_grad_(x.requires_grad) if x.is_floating_point() else x
