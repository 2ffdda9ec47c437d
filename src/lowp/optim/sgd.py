"""SGD with momentum on parameters stored in few bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowp.casts import Cast
from lowp.errors import InvalidInput
from lowp.kernels import updates
from lowp.optim.blockwise import BlockwiseOptimizer, StateFormats


class SGD(BlockwiseOptimizer):
    """torch.optim.SGD's update in fp32, on parameters stored in few bits.

    `storage` bf16 with `split` keeps a bf16 weight and a 16-bit remainder: 4 bytes that are the fp32 master. Without
    `split`: `masters` ``fp32`` (a copy beside the weight), ``stochastic`` or ``none``. `moments` is the format of the
    momentum, fp32 or bf16 (rounded stochastically). storage=None is plain fp32. Arguments of torch that are not
    supported (fused, foreach …) raise an error that names an alternative.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        storage: str | Cast | None = "bf16",
        split: bool = True,
        masters: str = "fp32",
        moments: str | Cast = "fp32",
        seed: int = 0,
        **others: Any,
    ) -> None:
        if lr < 0 or momentum < 0 or weight_decay < 0:
            raise InvalidInput(f"lr={lr}, momentum={momentum}, weight_decay={weight_decay}: give numbers of 0 or more")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise InvalidInput("nesterov=True needs a momentum above zero and dampening=0")
        defaults = {
            **{"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay},
            **{"nesterov": nesterov, "maximize": maximize},
        }
        self.moments = ("momentum_buffer",) if momentum else ()
        formats = StateFormats(storage, split, masters, moments, seed)
        super().__init__(params, defaults, formats, others)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which may have momentum even if the others have none."""
        if param_group.get("momentum", 0.0):
            self.moments = ("momentum_buffer",)
        super().add_param_group(param_group)

    def update_block(
        self, weight: Tensor, gradient: Tensor, moments: dict[str, Tensor], step: Tensor, group: dict[str, Any]
    ) -> None:
        """torch's own update on one fp32 block; the first step's momentum is the gradient, as torch's is.

        Whether it is the first is decided on the device, since a step that was skipped does not count. Where the
        device has a kernel, the same formula, as the kernel rounds.
        """
        if updates.has_kernels(weight.device):
            (rate,) = updates.rates(step.reshape(1), _numbers(group))
            updates.sgd_block(weight, gradient, moments.get("momentum_buffer"), rate, _numbers(group))
            return
        if group["maximize"]:
            gradient = -gradient
        if group["weight_decay"]:
            gradient = gradient.add(weight, alpha=group["weight_decay"])
        if group["momentum"]:
            buffer = moments["momentum_buffer"]
            moved = buffer.mul(group["momentum"]).add_(gradient, alpha=1 - group["dampening"])
            buffer.copy_(torch.where(step > 0, moved, gradient))
            gradient = gradient.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
        rate = group["lr"]
        if isinstance(rate, Tensor) and rate.device.type != "cpu":
            weight.sub_(gradient * rate)  # a learning rate on the device is not read
        else:
            weight.add_(gradient, alpha=-float(rate))

    def update_together(self, columns: updates.Columns, group: dict[str, Any]) -> None:
        """The same formula on the stored tensors, in one kernel."""
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        updates.sgd(columns, _numbers(group), grad_scale, found_inf)


def _numbers(group: dict[str, Any]) -> updates.SgdNumbers:
    names = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
    return updates.SgdNumbers(*(group[name] for name in names))
