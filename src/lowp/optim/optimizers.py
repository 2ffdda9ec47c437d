"""Optimizers on parameters and moments stored in few bits: the rules, AdamW, SGD, Lion and Muon."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from lowp.compat import private
from lowp.errors import InvalidInput
from lowp.kernels.steps import rules
from lowp.optim.blockwise import BlockUpdate, BlockwiseOptimizer
from lowp.optim.moments import FormatOptions
from lowp.optim.shards import is_sharded, local, shard_like, shard_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

_orthogonalized = cast(Callable[..., Tensor], private("torch.optim._muon._zeropower_via_newtonschulz"))


class AdamW(BlockwiseOptimizer):
    """torch.optim.AdamW's update in fp32, on parameters and moments stored in few bits.

    `storage` is the format of the weights, None for plain fp32. `masters` is what is kept beside a weight: ``split``
    (the default: a 16-bit remainder; bf16 and it are the fp32 master), ``split-8`` (8 bits: a master of 24 bits),
    ``fp32`` (a copy; also by split=False), ``stochastic`` or ``none`` (nothing). `moments`: ``fp32``, ``bf16``,
    ``int8``, ``fp8`` (blocks of 32 under one scale, rounded stochastically), or a cast of such blocks, such as
    ``mxfp4:stochastic``; of the second moment the root is kept, which never becomes zero. With a bf16 gradient a
    parameter takes 14 bytes, 7.1 with ``int8`` and ``split-8``, and 5.1 with gradients released in backward
    (`release_gradients`).

    Arguments of torch that are not supported (fused, foreach, amsgrad …) raise an error that names an alternative.

    Sources: Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2; Dettmers et al. 2022, arXiv 2110.02861.
    """

    moments = ("exp_avg", "exp_avg_sq")
    rule = rules.AdamWStep

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        **options: Unpack[FormatOptions],
    ) -> None:
        _check_not_negative(lr=lr, eps=eps, weight_decay=weight_decay)
        _check_betas(betas)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, options)

    def update_block(self, piece: BlockUpdate, group: dict[str, Any]) -> None:
        """torch's own update on one fp32 block."""
        adamw(
            [piece.weight],
            [piece.gradient],
            [piece.moments["exp_avg"]],
            [piece.moments["exp_avg_sq"]],
            [],
            [piece.step],
            foreach=False,
            fused=False,
            capturable=piece.step.device.type != "cpu",
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )


class SGD(BlockwiseOptimizer):
    """torch.optim.SGD's update in fp32, on parameters stored in few bits.

    `storage`, `split`, `masters` and `moments`, the format of the momentum, are those of `AdamW`. Arguments of torch
    that are not supported (fused, foreach …) raise an error that names an alternative.
    """

    moments = ("momentum_buffer",)
    rule = rules.SgdStep

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
        **options: Unpack[FormatOptions],
    ) -> None:
        _check_not_negative(lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise InvalidInput("nesterov=True needs a momentum above zero and dampening=0")
        defaults = {
            **{"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay},
            **{"nesterov": nesterov, "maximize": maximize},
        }
        super().__init__(params, defaults, options)

    def moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the name of the momentum, if a group has one."""
        return self.moments if group["momentum"] else ()

    def update_block(self, piece: BlockUpdate, group: dict[str, Any]) -> None:
        """torch's own update on one fp32 block; the first step's momentum is the gradient, as torch's is.

        Whether it is the first is decided on the device, since a step that was skipped does not count.
        """
        weight, gradient = piece.weight, -piece.gradient if group["maximize"] else piece.gradient
        if group["weight_decay"]:
            gradient = gradient.add(weight, alpha=group["weight_decay"])
        if group["momentum"]:
            buffer = piece.moments["momentum_buffer"]
            moved = buffer.mul(group["momentum"]).add_(gradient, alpha=1 - group["dampening"])
            buffer.copy_(torch.where(piece.step > 0, moved, gradient))
            gradient = gradient.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
        rate = group["lr"]
        if isinstance(rate, Tensor) and rate.device.type != "cpu":
            weight.sub_(gradient * rate)  # a learning rate on the device is not read
        else:
            weight.add_(gradient, alpha=-float(rate))


class Lion(BlockwiseOptimizer):
    """Lion: steps by the sign of a momentum, its only moment, on parameters and a moment stored in few bits.

    `storage`, `split`, `masters` and `moments` are those of `AdamW`. The learning rate is a third to a tenth of
    AdamW's, the weight decay as many times larger.

    Source: Chen et al. 2023, arXiv 2302.06675, program 1.
    """

    moments = ("exp_avg",)
    rule = rules.LionStep

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[FormatOptions],
    ) -> None:
        _check_not_negative(lr=lr, weight_decay=weight_decay)
        _check_betas(betas)
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, options)


class Muon(BlockwiseOptimizer):
    """torch.optim.Muon's update, by an orthogonalized momentum, on matrices and a momentum stored in few bits.

    `storage`, `split`, `masters` and `moments` are those of `AdamW`, the other arguments torch's. It takes matrices
    alone: give embeddings, biases and the rest to AdamW. A rank with shards of a matrix gathers its momentum and makes
    the whole matrix orthogonal.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.
    """

    moments = ("momentum_buffer",)
    in_blocks = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        **options: Unpack[FormatOptions],
    ) -> None:
        _check_not_negative(lr=lr, weight_decay=weight_decay, momentum=momentum, eps=eps)
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise InvalidInput(f"adjust_lr_fn={adjust_lr_fn!r}: give 'original' or 'match_rms_adamw'")
        defaults = {
            **{"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov},
            **{"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn},
        }
        super().__init__(params, defaults, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices. Raises InvalidInput for parameters of another number of dimensions."""
        torch.optim.Optimizer.add_param_group(self, param_group)
        group = self.param_groups.pop()
        others = [tuple(one.shape) for one in group["params"] if one.dim() != 2]
        if others:
            raise InvalidInput(
                f"Muon takes matrices, not a parameter of shape {others[0]}: give it to lowp.optim.AdamW"
            )
        super().add_param_group(group)

    def update_block(self, piece: BlockUpdate, group: dict[str, Any]) -> None:
        """torch's own update of a whole matrix."""
        shape, rate = local(piece.parameter).shape, group["lr"]
        buffer = piece.moments["momentum_buffer"].lerp_(piece.gradient, 1 - group["momentum"])
        update = piece.gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        update = _gathered(update.view(shape), piece.parameter)
        update = _orthogonalized(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
        rows, columns = piece.parameter.shape
        is_matched = group["adjust_lr_fn"] == "match_rms_adamw"
        ratio = 0.2 * math.sqrt(max(rows, columns)) if is_matched else math.sqrt(max(1, rows / columns))
        piece.weight.mul_(1 - rate * group["weight_decay"])
        piece.weight.add_(local(shard_of(update, piece.parameter)).reshape(-1), alpha=-(rate * ratio))


def _gathered(values: Tensor, parameter: Tensor) -> Tensor:
    """Return the whole of what ranks have of a tensor that is sharded as a parameter."""
    return cast(Any, shard_like(values, parameter)).full_tensor() if is_sharded(parameter) else values


def _check_not_negative(**given: float) -> None:
    if any(value < 0 for value in given.values()):
        raise InvalidInput(
            f"{', '.join(f'{name}={value}' for name, value in given.items())}: give numbers of 0 or more"
        )


def _check_betas(betas: tuple[float, float]) -> None:
    if not all(0 <= beta < 1 for beta in betas):
        raise InvalidInput(f"betas={betas}: give two numbers in [0, 1)")
