"""SGD with momentum on parameters stored in few bits."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.sgd import sgd

from lowp.casts import Cast
from lowp.errors import InvalidInput
from lowp.optim.blockwise import BlockwiseOptimizer


class SGD(BlockwiseOptimizer):
    """torch.optim.SGD's update in fp32, on parameters stored in few bits.

    `storage` bf16 with `split` keeps a bf16 weight and a 16-bit remainder: 4 bytes that are the fp32 master. Without
    `split`: `masters` ``fp32`` (a copy beside the weight), ``stochastic`` or ``none``. `moments` is the format of the
    momentum, fp32 or bf16 (rounded stochastically). storage=None is plain fp32.
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
    ) -> None:
        if lr < 0 or momentum < 0 or weight_decay < 0:
            raise InvalidInput(f"lr={lr}, momentum={momentum}, weight_decay={weight_decay}: none may be negative")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise InvalidInput("nesterov momentum needs a momentum above zero and no dampening")
        defaults = {
            **{"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay},
            **{"nesterov": nesterov, "maximize": maximize},
        }
        self.moments = ("momentum_buffer",) if momentum else ()
        kind = "split" if split and storage is not None else masters
        super().__init__(params, defaults, storage=storage, kind=kind, moment_storage=moments, seed=seed)

    def update_block(
        self, weight: Tensor, gradient: Tensor, moments: dict[str, Tensor], step: Tensor, group: dict[str, Any]
    ) -> None:
        """torch's own update on one fp32 block; the first step's momentum is the gradient, as torch's is."""
        buffer = moments.get("momentum_buffer") if group["momentum"] else None
        buffers: list[Tensor | None] = [buffer if buffer is not None and float(step) > 0 else None]
        options = {
            name: group[name] for name in ("weight_decay", "momentum", "lr", "dampening", "nesterov", "maximize")
        }
        sgd([weight], [gradient], buffers, foreach=False, fused=False, **options)
        if buffer is not None and buffers[0] is not buffer and buffers[0] is not None:
            buffer.copy_(buffers[0])
