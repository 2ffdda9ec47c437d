"""Optimizers that step inside backward: a parameter as soon as its gradient is there, which is freed at once."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from lowp.errors import InvalidInput, Misuse
from lowp.optim.shards import holder_of
from lowp.optim.state_dicts import parameters_of


class Released:
    """The hooks by which an optimizer steps inside backward; `remove` removes them."""

    def __init__(self, optimizer: Any, step: Callable[[Tensor], None]) -> None:
        self._optimizer, self._step, self._is_checked = optimizer, step, False
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
