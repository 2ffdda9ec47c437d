"""fastai: a callback by which a Learner trains in a precision of lowp.

    learn = Learner(dls, model, cbs=LowpMixedPrecision("bf16"))

Tested with fastai 2.8.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from fastai.callback.fp16 import MixedPrecision, NonNativeMixedPrecision
from fastai.learner import Callback, CancelBackwardException, CancelStepException

import lowp
from lowp.integrations.others import Other, made, widened


class LowpMixedPrecision(Callback):  # type: ignore[misc]
    """Trains a Learner in a precision with fp32 parameters: a `lowp.Precision`, or what that takes.

    The model computes in the precision and returns fp32. Gradients are divided by the loss scale before `GradientClip`
    sees them, and `GradientAccumulation` may come before. A step that overflows is skipped. `lowp` is the Precision.
    Raises InvalidInput for a precision that stores parameters in few bits, and beside `to_fp16()` or `to_bf16()`.
    """

    order = MixedPrecision.order  # after GradientAccumulation, before GradientClip

    def __init__(self, precision: Any = "bf16") -> None:
        super().__init__()
        self.lowp: lowp.Precision = made(precision, "fastai")
        self._hooks: list[Any] = []

    def before_fit(self) -> None:
        """Prepare the model, and let it compute in the precision."""
        beside = [one for one in self.learn.cbs if isinstance(one, (MixedPrecision, NonNativeMixedPrecision))]
        if beside:
            raise lowp.InvalidInput(
                f"{type(beside[0]).__name__} comes beside the lowp precision {self.lowp.preset.name}: omit to_fp16() "
                "and to_bf16(), or call learn.to_fp32(), which removes it"
            )
        model, region = self.learn.model, self.lowp.autocast()

        def leave(module: Any, given: Any, found: Any) -> None:
            region.__exit__(None, None, None)

        self.lowp.prepare_model(model)
        self._unhook()  # of a fit that an error has ended
        self._hooks = [
            model.register_forward_pre_hook(lambda module, given: region.__enter__() and None),
            model.register_forward_hook(lambda module, given, found: widened(found)),
            model.register_forward_hook(leave, always_call=True),
        ]

    def before_backward(self) -> None:
        """Run the backward pass with the loss scale, in the place of the Learner's own."""
        self.lowp.backward(self.learn.loss_grad)
        raise CancelBackwardException

    def before_step(self) -> None:
        """Unscale the gradients, and skip the step of the Learner if one is not finite."""
        taken: list[bool] = []
        self.lowp.step(Other(chain(*self.learn.opt.param_lists), lambda: taken.append(True)))
        if not taken:
            raise CancelStepException

    def after_fit(self) -> None:
        """Let the model compute in fp32 again."""
        self._unhook()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
