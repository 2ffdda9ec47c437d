"""Keras 3 on torch: a compiled model that trains in a precision of lowp.

    model.compile(optimizer="adam", loss="mse")
    precision = serve(model, "bf16")
    model.fit(x, y)

Tested with Keras 3.15.
"""

from __future__ import annotations

from typing import Any

import keras
import torch

import lowp
from lowp.integrations.others import Other, made, widened


def serve(model: Any, precision: Any = "bf16") -> lowp.Precision:
    """Let a compiled Keras model train, evaluate and predict in a precision with fp32 parameters; return the Precision.

    `precision` is a `lowp.Precision` or what that takes. `fit`, `train_on_batch` and `evaluate` are Keras's own, and so
    are files of the model. The moving statistics of Keras's BatchNormalization are those of skipped steps, too. Raises
    InvalidInput for a precision that stores parameters in few bits, a model that is not compiled, another backend than
    torch, a dtype policy of Keras's in 16 bits, and an optimizer with a loss scale.
    """
    used = made(precision, "Keras")
    if keras.backend.backend() != "torch":
        raise lowp.InvalidInput(
            f"Keras computes with {keras.backend.backend()}, and lowp with torch: set KERAS_BACKEND=torch before Keras "
            "is imported"
        )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        raise lowp.InvalidInput("the model is not compiled: call model.compile(optimizer=..., loss=...) first")
    has_scale = optimizer.loss_scale_factor is not None or hasattr(optimizer, "inner_optimizer")
    if model.compute_dtype != "float32" or has_scale:
        raise lowp.InvalidInput(
            f"Keras's own mixed precision comes beside the lowp precision {used.preset.name}: leave the dtype policy "
            "at float32, and the optimizer without a loss scale"
        )
    call, apply = used.autocast()(model.call), optimizer.apply
    model.call = lambda *given, **named: widened(call(*given, **named))
    optimizer.scale_loss = lambda loss: _Loss(used, model, loss)
    optimizer.apply = lambda gradients, trainable_variables=None: _step(
        used, apply, gradients, trainable_variables or model.trainable_variables
    )
    return used


class _Loss:
    """A loss in the place of the scaled one, on which Keras calls backward."""

    def __init__(self, precision: lowp.Precision, model: Any, loss: torch.Tensor) -> None:
        self._precision, self._loss = precision, loss
        precision.prepare_model(model)  # a model may have its weights only now; once

    def backward(self) -> None:
        self._precision.backward(self._loss)


def _step(precision: lowp.Precision, apply: Any, gradients: Any, variables: Any) -> None:
    """Step a Keras optimizer, whose gradients are those of the torch parameters."""
    values = [variable.value for variable in variables]
    for value, gradient in zip(values, gradients, strict=True):
        value.grad = gradient
    precision.step(Other(values, lambda: apply([value.grad for value in values], variables)))
