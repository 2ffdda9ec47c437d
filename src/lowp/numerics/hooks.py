"""The hooks of a profile that are in place only while something of a step is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowp.hooks import Uncopied
from lowp.numerics.models import Models


class StepHooks:
    """Hooks around each call of the models, and before each step of the optimizer, or if it is None of any."""

    def __init__(
        self,
        models: Models,
        optimizer: Optimizer | None,
        before_forward: Callable[..., None],
        after_forward: Callable[..., None],
        before_step: Callable[..., None],
    ) -> None:
        self._models, self._optimizer = models, optimizer
        self._before_forward, self._after_forward, self._before_step = before_forward, after_forward, before_step
        self._handles: list[Any] = []

    def put(self, on: bool) -> None:
        """Add the hooks where they are not in place, or remove them."""
        if not on:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
        elif not self._handles:
            for root in self._models.roots.values():
                before, after = Uncopied(self._before_forward), Uncopied(self._after_forward)
                self._handles.append(root.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
                self._handles.append(root.register_forward_hook(after, always_call=True))
            register = register_optimizer_step_pre_hook
            if self._optimizer is not None:
                register = self._optimizer.register_step_pre_hook
            self._handles.append(register(self._before_step))

    def renew(self) -> None:
        """Put the hooks on the models that there are."""
        self.put(False)
        self.put(True)
