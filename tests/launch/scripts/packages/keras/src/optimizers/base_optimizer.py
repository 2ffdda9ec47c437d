"""What lowp run uses of Keras 3's optimizer."""

import torch


class BaseOptimizer:
    def __init__(self, learning_rate):
        self.learning_rate, self._trainable_variables = learning_rate, []

    def build(self, variables):
        self._trainable_variables = list(variables)

    def apply(self, grads, trainable_variables=None):
        with torch.no_grad():
            for grad, variable in zip(grads, trainable_variables, strict=True):
                variable.value.add_(grad, alpha=-self.learning_rate)
