"""Optimizers that step inside backward: a parameter as soon as its gradient is there, which is freed at once."""

import math
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from lowp.errors import InvalidInput, Misuse, brief
from lowp.optim.shards import holder_of
from lowp.optim.state_dicts import parameters_of

_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")


class Released:
    """The hooks by which an optimizer steps inside backward; `remove` removes them.

    A gradient with a norm above `max_norm` is first scaled down to that norm.
    """

    def __init__(self, optimizer: Any, step: Callable[[Tensor], None], max_norm: float = math.inf) -> None:
        if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or not max_norm > 0:
            raise InvalidInput(f"max_norm={brief(max_norm)}: give a number above 0, such as 1.0")
        self.max_norm = max_norm
        self._optimizer, self._step, self._is_checked, self._has_looked = optimizer, step, False, max_norm < math.inf
        self._refuse_averaged()
        self._stepped: set[int] = set()  # since `end`
        trained = [one for one in parameters_of(optimizer) if one.requires_grad]
        self._handles = [cast(Any, one).register_post_accumulate_grad_hook(self._step_now) for one in trained]

    @torch.no_grad()
    def _step_now(self, parameter: Tensor) -> None:
        if not self._is_checked:  # a wrapper may have taken the parameters since
            self._refuse_averaged()
            self._is_checked = True
        if id(parameter) in self._stepped:
            raise Misuse(
                "backward has reached a parameter twice before optimizer.step(): with release_gradients every backward "
                "pass is a step, so that gradients cannot be accumulated. Call optimizer.step() after each backward "
                "pass, or leave release_gradients out"
            )
        self._stepped.add(id(parameter))
        if self.max_norm < math.inf:
            clip_grad_norm_([parameter], self.max_norm)
        self._step(parameter)
        parameter.grad = None

    def _refuse_averaged(self) -> None:
        """Raise InvalidInput if a wrapper averages the gradients over ranks after they are there."""
        if (kind := holder_of(parameters_of(self._optimizer))) is not None:
            raise InvalidInput(
                f"gradients cannot be released before {kind} has averaged them over the ranks: use fully_shard, which "
                "averages each before it is released, or leave the step to optimizer.step()"
            )

    def end(self) -> None:
        """End a step: the next backward pass is another one."""
        self._stepped.clear()

    def warn_of_clipping(self) -> None:
        """Warn once if a function that calls `step` clips gradients after backward, where none are left.

        torch's functions find no gradient there, and do nothing without a word.
        """
        frame: FrameType | None = None if self._has_looked else sys._getframe(1)
        self._has_looked, depth = True, 1
        while frame is not None:
            name = next((one for one in _CLIPS if one in frame.f_code.co_names), None)
            if name is not None:
                warnings.warn(
                    f"{frame.f_code.co_name} calls {name}, which limits nothing: backward has stepped on the gradients "
                    "and freed them. Give release_gradients(max_norm=1.0), which limits each gradient by its own norm "
                    "before its step, or leave release_gradients out",
                    UserWarning,
                    stacklevel=depth + 1,
                )
                return
            frame, depth = frame.f_back, depth + 1

    def remove(self) -> None:
        """Leave gradients to `step` again."""
        self._optimizer.released = None
        for handle in self._handles:
            handle.remove()


def refuse_released(optimizer: Optimizer) -> None:
    """Raise Misuse for an optimizer that steps inside backward, by `release_gradients`, before all gradients exist."""
    if getattr(getattr(optimizer, "inner", optimizer), "released", None) is not None:
        raise Misuse(
            "a loss scale looks at all gradients before the first update: leave release_gradients out, or train "
            "without a loss scale, as bf16 does"
        )
