"""AdamW on parameters stored in few bits."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.adamw import adamw

from lowp.casts import Cast
from lowp.errors import InvalidInput
from lowp.kernels import updates
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
        if lr < 0 or eps < 0 or weight_decay < 0:
            raise InvalidInput(f"lr={lr}, eps={eps}, weight_decay={weight_decay}: give numbers of 0 or more")
        if not all(0 <= beta < 1 for beta in betas):
            raise InvalidInput(f"betas={betas}: give two numbers in [0, 1)")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        formats = StateFormats(storage, split, masters, moments, seed)
        super().__init__(params, defaults, formats, others)

    def update_block(
        self, weight: Tensor, gradient: Tensor, moments: dict[str, Tensor], step: Tensor, group: dict[str, Any]
    ) -> None:
        """torch's own update on one fp32 block; where the device has a kernel, that formula as the kernel rounds."""
        if updates.has_kernels(weight.device):
            numbers = _numbers(group)
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
        updates.adamw(columns, _numbers(group), grad_scale, found_inf)


def _numbers(group: dict[str, Any]) -> updates.AdamWNumbers:
    beta1, beta2 = group["betas"]
    return updates.AdamWNumbers(group["lr"], beta1, beta2, group["eps"], group["weight_decay"], group["maximize"])
