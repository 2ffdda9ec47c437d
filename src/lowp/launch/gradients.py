"""Unscales every gradient that the script sees: in ``.grad``, in its hooks and in retained gradients.

A backward pass runs on a scaled seed. Each leaf divides its gradient by the scale before accumulation and notes whether
the gradient was finite, because the script may clip it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from lowp.launch.session import Session

__all__ = ["Gradients", "install"]


class Gradients:
    """The leaves of one session and the state of their gradients.

    `scale` and `inverse` belong to the running backward pass; None while no scaled pass runs. `is_trial`: the running
    pass searches for the first scale, so the script's hooks are not called.
    """

    def __init__(self, register: Callable[[Tensor, Callable[[Tensor], Any]], Any]) -> None:
        self._register = register
        self.is_trial = False
        self.scale: Tensor | None = None
        self.inverse: Tensor | None = None
        self._adopted: Any = WeakTensorKeyDictionary()
        self._nonfinite: Any = WeakTensorKeyDictionary()
        self._waiting: Any = WeakTensorKeyDictionary()  # leaves that have received a gradient since their last step
        self._retained: list[TensorWeakRef] = []

    def unscaled(self, gradient: Tensor) -> Tensor:
        """Return a gradient of the running pass divided by the scale, as the script sees it."""
        return gradient if self.inverse is None else gradient * self.inverse.to(gradient.device)

    def scaled(self, gradient: Tensor) -> Tensor:
        """Return a gradient that the script gives in place of another, multiplied by the scale of the running pass."""
        return gradient if self.scale is None else gradient * self.scale.to(gradient.device)

    # -- leaves -----------------------------------------------------------------------------------------------------
    def adopt(self, leaf: Any) -> None:
        """Register the hook by which a leaf unscales its gradient."""
        if not (isinstance(leaf, Tensor) and leaf.is_leaf and leaf.requires_grad) or leaf in self._adopted:
            return
        self._adopted[leaf] = True
        reference = TensorWeakRef(leaf)

        @unserializable_hook  # type: ignore[untyped-decorator]
        def unscale(gradient: Tensor) -> Tensor | None:
            owner = reference()
            if owner is not None and not self.is_trial:
                self._waiting[owner] = True
            if self.inverse is None:
                return None
            if owner is not None:
                self._note(owner, gradient)
            return self.unscaled(gradient)

        self._register(leaf, unscale)

    def is_adopted(self, leaf: Tensor) -> bool:
        """Whether a leaf unscales its own gradient."""
        return leaf in self._adopted

    def _note(self, leaf: Tensor, gradient: Tensor) -> None:
        bad = _is_nonfinite(gradient.detach())
        # ignore the note on a gradient that the script has dropped since
        before = None if leaf.grad is None else self._nonfinite.get(leaf)
        self._nonfinite[leaf] = bad if before is None else before | bad

    def take_nonfinite(self, leaves: Iterable[Tensor]) -> Tensor | None:
        """Return whether any gradient of these leaves was not finite, and forget it; None if nothing was noted."""
        found = [self._take(leaf) for leaf in leaves]
        flags = [flag for flag in found if flag is not None]
        return torch.stack([flag.to(flags[0].device) for flag in flags]).any() if flags else None

    def are_waiting(self, leaves: Container[Tensor]) -> bool:
        """Whether any of these leaves has received a gradient since its last step."""
        return any(leaf in leaves for leaf in list(self._waiting))

    def forget(self, leaves: Iterable[Tensor]) -> None:
        """Forget the notes on gradients that have been zeroed."""
        for leaf in leaves:
            self._take(leaf)

    def _take(self, leaf: Tensor) -> Tensor | None:
        self._waiting.pop(leaf, None)
        found: Tensor | None = self._nonfinite.pop(leaf, None)
        return found

    # -- what is retained of hidden tensors -------------------------------------------------------------------------
    def retain(self, tensor: Tensor) -> None:
        """Unscale the gradient that a non-leaf tensor retains, after the pass."""
        self._retained.append(TensorWeakRef(tensor))

    def unscale_retained(self) -> None:
        """Unscale the gradients retained in the pass that has just ended."""
        for reference in self._retained:
            tensor = reference()
            if tensor is not None and tensor.grad is not None:
                tensor.grad = self.unscaled(tensor.grad)


def _is_nonfinite(gradient: Tensor) -> Tensor:
    if gradient.layout is not torch.strided:
        gradient = gradient._values() if gradient.layout is torch.sparse_coo else gradient.values()
    local = getattr(gradient, "to_local", None)
    gradient = gradient if local is None else local()
    return ~torch.isfinite(gradient).all()


def leaves_of(roots: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves that a backward pass from these tensors reaches."""
    todo: list[Any] = [root.grad_fn for root in roots]
    yield from (root for root in roots if root.is_leaf)
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable
        todo.extend(following for following, _ in node.next_functions)


def install(session: Session) -> None:
    """Make parameters, hooks and retained gradients see the values that they would see without a loss scale."""
    if not session.is_scaling:
        return
    tensor = cast(Any, Tensor)
    register, retain = tensor.register_hook, tensor.retain_grad
    gradients = session.gradients = Gradients(register)

    def on_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        gradients.adopt(parameter)

    register_module_parameter_registration_hook(on_parameter)

    @wraps(register)
    def register_hook(self: Tensor, hook: Callable[[Tensor], Any]) -> Any:
        if self.is_leaf:
            gradients.adopt(self)

        @wraps(hook)
        def shown(gradient: Tensor) -> Any:
            if gradients.is_trial:
                return None
            given = hook(gradients.unscaled(gradient))
            return None if given is None else gradients.scaled(given)

        return register(self, shown)

    @wraps(retain)
    def retain_grad(self: Tensor) -> None:
        retain(self)
        if not self.is_leaf:
            gradients.retain(self)

    tensor.register_hook, tensor.retain_grad = register_hook, retain_grad
    _install_module_hooks(gradients)


def _install_module_hooks(gradients: Gradients) -> None:
    """Pass unscaled gradients to full backward hooks of modules."""
    module = cast(Any, nn.Module)

    def each(change: Callable[[Tensor], Tensor], given: Any) -> Any:
        if isinstance(given, Tensor):
            return change(given)
        return tuple(change(one) if isinstance(one, Tensor) else one for one in given)

    def patched(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def register(self: nn.Module, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            @wraps(hook)
            def shown(owner: nn.Module, *seen: Any) -> Any:
                if gradients.is_trial:
                    return None
                result = hook(owner, *(each(gradients.unscaled, one) for one in seen))
                return None if result is None else each(gradients.scaled, result)

            return original(self, shown, *args, **kwargs)

        return register

    for name in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        setattr(module, name, patched(getattr(module, name)))
