"""Unscales every gradient that the script sees: in ``.grad``, in its hooks and in retained gradients.

A backward pass runs on a scaled seed. Each leaf divides its gradient by the scale before accumulation and notes whether
the gradient was finite, because the script may clip it.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from lowp.compat import private
from lowp.launch.boot import replaces
from lowp.launch.session import Session, nothing

SIXTEEN_BIT = (torch.float16, torch.bfloat16)
_MODULE = "torch.nn.Module"


class Gradients:
    """The leaves of one session and the state of their gradients.

    `scale` and `inverse` belong to the running backward pass; None while no scaled pass runs. `is_trial`: the running
    pass searches for the first scale, so the script's hooks are not called.
    """

    def __init__(
        self, register: Callable[[Tensor, Callable[[Tensor], Any]], Any], held_as: Callable[[Tensor], Tensor]
    ) -> None:
        self._register = register
        self._held_as = held_as  # the parameter that an optimizer holds for a leaf
        self.is_trial = False
        self.scale: Tensor | None = None
        self.inverse: Tensor | None = None
        self._adopted: Any = WeakTensorKeyDictionary()
        self._nonfinite: Any = WeakTensorKeyDictionary()
        self._waiting: Any = WeakTensorKeyDictionary()  # leaves that have received a gradient since their last step
        self._retained: Any = WeakTensorKeyDictionary()  # by hidden tensor: what it retained before the running pass

    def unscaled(self, gradient: Tensor) -> Tensor:
        """Return a gradient of the running pass divided by the scale."""
        return gradient if self.inverse is None else gradient * self.inverse.to(gradient.device)

    def scaled(self, gradient: Tensor) -> Tensor:
        """Return a gradient multiplied by the scale of the running pass."""
        return gradient if self.scale is None else gradient * self.scale.to(gradient.device)

    def shown(self, gradient: Tensor | None) -> Tensor | None:
        """Return a gradient as a hook of the script sees it: unscaled, and in fp32 if it is in 16 bits.

        Without the scale, gradients would be too small for 16 bits. One that is undefined is None.
        """
        if gradient is None:
            return None
        is_narrow = self.inverse is not None and gradient.dtype in SIXTEEN_BIT
        return self.unscaled(gradient.float() if is_narrow else gradient)

    def given(self, gradient: Tensor, place: Tensor | None) -> Tensor:
        """Return what a hook of the script gives for a gradient of the running pass, scaled, in the dtype of that."""
        if self.scale is None:
            return gradient
        return self.scaled(gradient).to(gradient.dtype if place is None else place.dtype)

    # -- leaves -----------------------------------------------------------------------------------------------------
    def adopt(self, leaf: Any) -> None:
        """Register the hook by which a leaf unscales its gradient."""
        if not (isinstance(leaf, Tensor) and leaf.is_leaf and leaf.requires_grad) or leaf in self._adopted:
            return
        place = self._adopted[leaf] = _Place(leaf)

        @unserializable_hook  # type: ignore[untyped-decorator]
        def unscale(gradient: Tensor | None) -> Tensor | None:
            if gradient is None:  # undefined, as gradcheck makes it: a gradient of zeros
                return None
            leaf = place.leaf()
            if leaf is not None and not self.is_trial:
                self._waiting[self._held_as(leaf)] = True
            if self.inverse is None:
                return None
            if leaf is not None:
                self._note(leaf, gradient)
            return self.unscaled(gradient)

        self._register(leaf, unscale)

    def is_adopted(self, leaf: Tensor) -> bool:
        """Whether a leaf unscales its own gradient."""
        return leaf in self._adopted

    def _note(self, leaf: Tensor, gradient: Tensor) -> None:
        bad, held = _is_nonfinite(gradient.detach()), self._held_as(leaf)
        # ignore the note on a gradient that the script has dropped since; FSDP2 accumulates elsewhere than in `.grad`
        before = None if held is leaf and leaf.grad is None else self._nonfinite.get(held)
        self._nonfinite[held] = bad if before is None else before | bad

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

    @contextmanager
    def exchanging(self, one: Tensor, other: Tensor) -> Iterator[None]:
        """Take all weak references from two tensors while their contents, hooks and gradients are exchanged."""
        tables = self._adopted, self._nonfinite, self._waiting, self._retained
        kept = [(table, at, table.pop(at)) for table in tables for at in (one, other) if at in table]
        places = [found for _, _, found in kept if isinstance(found, _Place)]
        for place in places:
            place.leaf = nothing
        goes = {one: one, other: other}
        try:
            yield
            goes = {one: other, other: one}
        finally:
            for table, at, found in kept:
                table[goes[at]] = found
                if isinstance(found, _Place):
                    found.leaf = TensorWeakRef(goes[at])
            if places:  # a tensor without a place has the content of one that is not adopted
                self.adopt(one)
                self.adopt(other)

    # -- what is retained of hidden tensors -------------------------------------------------------------------------
    def retain(self, tensor: Tensor) -> None:
        """Unscale the gradients that a non-leaf tensor retains."""
        self._retained[tensor] = None

    def set_retained_aside(self) -> None:
        """Before a pass, set aside what tensors have retained in earlier passes, which is unscaled."""
        for tensor in list(self._retained):
            self._retained[tensor], tensor.grad = tensor.grad, None

    def unscale_retained(self) -> None:
        """After a pass, unscale what tensors have retained in it, and add what they had before."""
        for tensor, before in list(self._retained.items()):
            found = None if tensor.grad is None else self.unscaled(tensor.grad)
            tensor.grad = before if found is None else found if before is None else before + found
            self._retained[tensor] = None


class _Place:
    """Where a hook of a leaf finds that leaf."""

    def __init__(self, leaf: Tensor) -> None:
        self.leaf: Callable[[], Tensor | None] = TensorWeakRef(leaf)


def _is_nonfinite(gradient: Tensor) -> Tensor:
    if gradient.layout is not torch.strided:
        gradient = gradient._values() if gradient.layout is torch.sparse_coo else gradient.values()
    local = getattr(gradient, "to_local", None)
    gradient = gradient if local is None else local()
    return ~torch.isfinite(gradient).all()


def leaves_of(roots: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves that a backward pass from these tensors reaches."""
    from lowp.step.searching import nodes_of

    yield from (root for root in roots if root.is_leaf)
    yield from (node.variable for node in nodes_of(roots) if hasattr(node, "variable"))


def install(session: Session) -> None:
    """Make parameters, hooks and retained gradients see the values that they would see without a loss scale.

    In every precision that changes something, what a hook computes is the script's, and runs as outside of the pass.
    """
    if session.is_plain:
        return
    gradients = Gradients(cast(Any, Tensor).register_hook, session.held_as)
    if session.is_scaling:
        session.gradients = gradients
        _install_leaves(gradients)
    _install_tensor_hooks(session, gradients)
    _install_module_hooks(session, gradients)
    _install_exchange(session)


def _install_leaves(gradients: Gradients) -> None:
    """Unscale what parameters accumulate and hidden tensors retain."""
    retain = cast(Any, Tensor).retain_grad

    def on_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        gradients.adopt(parameter)

    @replaces(Tensor)
    def retain_grad(self: Tensor) -> None:
        retain(self)
        if not self.is_leaf:
            gradients.retain(self)

    register_module_parameter_registration_hook(on_parameter)


def _install_tensor_hooks(session: Session, gradients: Gradients) -> None:
    """Pass unscaled gradients to hooks of tensors."""
    register = cast(Any, Tensor).register_hook

    @replaces(Tensor)
    def register_hook(self: Tensor, hook: Callable[[Tensor | None], Any]) -> Any:
        # in a region torch's own function calls this one again, with the hook that it was given
        if getattr(hook, "lowp_shows", False):
            return register(self, hook)
        is_leaf = self.is_leaf
        if is_leaf and session.is_scaling:
            gradients.adopt(self)

        @wraps(hook)
        def shown(gradient: Tensor | None) -> Any:
            if gradients.is_trial:
                return None
            with session.in_hook():
                # a leaf has unscaled its gradient before: it was adopted before this hook was registered
                given = hook(gradient if is_leaf else gradients.shown(gradient))
            return given if given is None or is_leaf else gradients.given(given, gradient)

        shown.lowp_shows = True  # type: ignore[attr-defined]
        return register(self, shown)


def _install_module_hooks(session: Session, gradients: Gradients) -> None:
    """Pass unscaled gradients to backward hooks of modules, which stay the script's own: files of a model hold them."""
    module = cast(Any, nn.Module)

    def shown_all(seen: Any) -> Any:
        if isinstance(seen, Tensor):
            return gradients.shown(seen)
        return tuple(gradients.shown(one) if isinstance(one, Tensor) else one for one in seen)

    def given_all(result: Any, places: Any) -> Any:
        if isinstance(result, Tensor):
            return gradients.given(result, places if isinstance(places, Tensor) else places[0])
        return tuple(
            gradients.given(one, place) if isinstance(one, Tensor) and isinstance(place, Tensor) else one
            for one, place in zip_longest(result, places)
        )

    def showing(hook: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(hook)
        def shown(owner: nn.Module, *seen: Any) -> Any:
            if gradients.is_trial:
                return None
            with session.in_hook():
                result = hook(owner, *map(shown_all, seen))
            return None if result is None else given_all(result, seen[0])  # a result stands for the first of them

        return shown

    after: Callable[[nn.Module], tuple[list[Any], list[Any]]] = cast(Any, private(f"{_MODULE}._get_backward_hooks"))
    before: Callable[[nn.Module], list[Any]] = cast(Any, private(f"{_MODULE}._get_backward_pre_hooks"))

    def _get_backward_hooks(self: nn.Module) -> tuple[list[Any], list[Any]]:
        full, other = after(self)
        return [*map(showing, full)], [*map(showing, other)]

    def _get_backward_pre_hooks(self: nn.Module) -> list[Any]:
        return [*map(showing, before(self))]

    module._get_backward_hooks, module._get_backward_pre_hooks = _get_backward_hooks, _get_backward_pre_hooks


# -- tensors that are exchanged ----------------------------------------------------------------------------------------
# Python's views of the hooks; torch leaves these dictionaries with the objects and moves only what calls them
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _install_exchange(session: Session) -> None:
    """Let tensors that the session refers to be exchanged as in plain torch."""
    original: Any = torch.utils.swap_tensors

    @replaces(torch.utils)
    def swap_tensors(t1: Tensor, t2: Tensor) -> None:
        with session.exchanging(t1, t2):
            original(t1, t2)
            if session.is_scaling:  # else the hooks are the script's
                _exchange_hooks(t1, t2)


def _exchange_hooks(one: Any, other: Any) -> None:
    """Let each tensor have the hooks of its content: torch does not call what is registered later on another's."""
    for name in _HOOKS:
        hooks, others = getattr(one, name, None), getattr(other, name, None)
        if hooks is not None or others is not None:
            setattr(one, name, others)
            setattr(other, name, hooks)
