"""What lowp run uses of fastai 2's optimizer."""

from collections import defaultdict


class Optimizer:
    def __init__(self, params, lr):
        self.param_lists, self.state, self.lr = [list(params)], defaultdict(dict), lr

    def zero_grad(self):
        for p in self.param_lists[0]:
            if p.grad is not None:
                p.grad.detach_().zero_()

    def step(self, closure=None):
        for p in self.param_lists[0]:
            p.data.add_(p.grad.data, alpha=-self.lr)
