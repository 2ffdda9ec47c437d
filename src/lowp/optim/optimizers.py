"""AdamW and SGD on parameters stored in few bits."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from lowp.casts import Cast
from lowp.errors import InvalidInput, unknown
from lowp.kernels.steps import updates
from lowp.optim.blockwise import BlockwiseOptimizer, StateFormats


class AdamW(BlockwiseOptimizer):
    """torch.optim.AdamW's update in fp32, on parameters stored in few bits.

    `storage` bf16 with `split` keeps a bf16 weight and a 16-bit remainder: 4 bytes that are the fp32 master, 14 bytes a
    parameter with the bf16 gradient and fp32 moments, 10 with `moments="bf16"` (rounded stochastically). Without
    `split`: `masters` ``fp32`` (a copy beside the weight), ``stochastic`` or ``none``. storage=None is plain fp32.

    Arguments of torch that are not supported (fused, foreach, amsgrad …) raise an error that names an alternative.

    Source: Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2.
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        storage: str | Cast | None = "bf16",
        split: bool = True,
        masters: str = "fp32",
        moments: str | Cast = "fp32",
        seed: int = 0,
        **others: Any,
    ) -> None:
        refuse_others(type(self), others)
        if lr < 0 or eps < 0 or weight_decay < 0:
            raise InvalidInput(f"lr={lr}, eps={eps}, weight_decay={weight_decay}: give numbers of 0 or more")
        if not all(0 <= beta < 1 for beta in betas):
            raise InvalidInput(f"betas={betas}: give two numbers in [0, 1)")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        formats = StateFormats(storage, split, masters, moments, seed)
        super().__init__(params, defaults, formats)

    def update_block(
        self, weight: Tensor, gradient: Tensor, moments: dict[str, Tensor], step: Tensor, group: dict[str, Any]
    ) -> None:
        """torch's own update on one fp32 block; where the device has a kernel, that formula as the kernel rounds."""
        if updates.has_kernels(weight.device):
            numbers = _adamw_numbers(group)
            (rate,) = updates.rates(step.reshape(1), numbers)
            updates.adamw_block(weight, gradient, moments["exp_avg"], moments["exp_avg_sq"], rate, numbers)
            return
        adamw(
            [weight],
            [gradient],
            [moments["exp_avg"]],
            [moments["exp_avg_sq"]],
            [],
            [step],
            foreach=False,
            fused=False,
            capturable=step.device.type != "cpu",
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )

    def update_together(self, columns: updates.Columns, group: dict[str, Any]) -> None:
        """The same formula on the stored tensors, in one kernel."""
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        updates.adamw(columns, _adamw_numbers(group), grad_scale, found_inf)


def _adamw_numbers(group: dict[str, Any]) -> updates.AdamWNumbers:
    beta1, beta2 = group["betas"]
    return updates.AdamWNumbers(group["lr"], beta1, beta2, group["eps"], group["weight_decay"], group["maximize"])


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
        refuse_others(type(self), others)
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
        super().__init__(params, defaults, formats)

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
            (rate,) = updates.rates(step.reshape(1), _sgd_numbers(group))
            updates.sgd_block(weight, gradient, moments.get("momentum_buffer"), rate, _sgd_numbers(group))
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
        updates.sgd(columns, _sgd_numbers(group), grad_scale, found_inf)


def _sgd_numbers(group: dict[str, Any]) -> updates.SgdNumbers:
    names = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
    return updates.SgdNumbers(*(group[name] for name in names))


_ONE_WAY = (
    "there is one implementation here, block by block, with the same results and without waiting for the device: "
    "leave it out"
)
_INSTEAD = {
    "fused": _ONE_WAY,
    "foreach": _ONE_WAY,
    "capturable": "counters and moments are on the device already: leave it out",
    "differentiable": "the update writes stored weights in place: use torch's optimizer on fp32 parameters",
    "amsgrad": (
        "the largest second moment is not kept here: wrap torch's optimizer, "
        "lowp.MasterWeights(torch.optim.AdamW(params, amsgrad=True))"
    ),
}


def refuse_others(optimizer: type, others: Mapping[str, Any]) -> None:
    """Raise for unsupported arguments: InvalidInput for torch's own, TypeError for unknown ones.

    An argument of torch's that is None or False is accepted, since it requests nothing.
    """
    kind = f"lowp.optim.{optimizer.__name__}"
    for name, value in others.items():
        if name not in _INSTEAD:
            allowed = [one for one in inspect.signature(optimizer).parameters if one not in ("params", "others")]
            raise TypeError(unknown(f"argument of {kind}", name, allowed))
        if value:
            raise InvalidInput(f"{kind} does not take {name}={value}: {_INSTEAD[name]}")
