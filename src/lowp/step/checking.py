"""Unscales and checks gradients, and records what a later report needs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import torch
from torch.amp.grad_scaler import OptState

from lowp import distributed
from lowp.compat import private, real_tensors, skipped_by_compilers, widest_float
from lowp.errors import Misuse
from lowp.kernels.choose import hardware
from lowp.optim.releasing import refuse_released
from lowp.scaling import SMALLEST_SCALE, AdaptiveLossScale
from lowp.scaling.loss_scale import inverse_of, underflow
from lowp.step import gradients as grads
from lowp.step.provenance import all_finite
from lowp.step.state import ScalerState

_Replicator = cast(Callable[[torch.Tensor], Any], private("torch.amp.grad_scaler._MultiDeviceReplicator"))
_is_functorch_wrapped = cast(Callable[[torch.Tensor], bool], private("torch._C._functorch.is_functorch_wrapped_tensor"))

Optimizer = torch.optim.Optimizer
_MOST_LOSSES = 64  # losses of one step that are checked when gradients overflow


def _bounded_inverse(scale: torch.Tensor) -> torch.Tensor:
    """Return 1 / scale. The result is never infinite, so that a zero gradient stays zero."""
    if hardware.is_on_host(scale) and scale.dim() == 0:  # same value, faster than torch's calls
        return torch.full((), 1.0 / max(scale.item(), SMALLEST_SCALE), dtype=torch.float32, device="cpu")
    return inverse_of(scale.clamp(min=SMALLEST_SCALE))


def combined(flags: Collection[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the largest of the flags as a 0-dimensional fp32 tensor on `device`; 0 if there are none.

    A single flag of that kind is returned itself.
    """
    if len(flags) == 1:
        (flag,) = flags
        if flag.dim() == 0 and flag.dtype is torch.float32 and flag.device == device:
            return flag
    found = [flag.to(device, torch.float32, non_blocking=True).reshape(()) for flag in flags]
    return torch.stack(found).amax() if found else torch.zeros((), dtype=torch.float32, device=device)


class Checks(ScalerState):
    """The part of a scaler that handles gradients. Each method works on one optimizer."""

    # The sizes of the gradients checked last and the record of their step, until the ranks have agreed.
    _seen: tuple[torch.Tensor, torch.Tensor] | None = None
    _agreed_with: Sequence[torch.distributed.ProcessGroup] = ()

    @skipped_by_compilers
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the scale, in place, and record whether all were finite; reads nothing.

        Once per optimizer and step, before clipping or looking at gradients; `step` does it otherwise. Sparse
        gradients, and fp16 ones of an optimizer that allows them, may be replaced.
        """
        if not self._enabled:
            return
        refuse_released(optimizer)
        state = self._state("unscale_")
        stage = self._per_optimizer_states[id(optimizer)]
        if stage["stage"] is OptState.UNSCALED:
            raise Misuse(
                "unscale_() has already been called on this optimizer since the last update(). Call it once per step, "
                "after the last backward, or leave it to step()"
            )
        if stage["stage"] is OptState.STEPPED:
            raise Misuse("unscale_() is being called after step(). Call it before, and update() after all steps")
        allow_fp16 = bool(getattr(optimizer, "allows_fp16_gradients", False))
        if allow_fp16:
            grads.widen_fp16(optimizer)
        found = self._unscaled_at_once(optimizer, state.scale)
        if found is None:
            found_inf = torch.zeros((), dtype=torch.float32, device=state.scale.device)
            found = self._unscale_grads_(optimizer, _bounded_inverse(state.scale), found_inf, allow_fp16)
            found = self._agreed(optimizer, found, found_inf)
        stage["found_inf_per_device"] = found
        stage.update(stage=OptState.UNSCALED, of=weakref.ref(optimizer))

    def check_(self, optimizer: Optimizer, nonfinite: torch.Tensor | None = None) -> None:
        """Record, instead of `unscale_`, whether gradients that backward has already unscaled are finite.

        `nonfinite`: a flag that was set while they were computed, before clipping could hide an infinity.
        """
        scale = self._state("check_").scale
        self._look(optimizer, torch.ones_like(scale), nonfinite)
        self._per_optimizer_states[id(optimizer)].update(stage=OptState.UNSCALED, of=weakref.ref(optimizer))

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[str, Any]:
        """Note, in one flag per device, whether the gradients, left scaled, are finite and stay finite unscaled."""
        return self._look(optimizer, _bounded_inverse(self._state("_check_inf_per_device").scale))

    def _look(self, optimizer: Optimizer, inverse: torch.Tensor, flag: torch.Tensor | None = None) -> dict[str, Any]:
        """Record whether gradients are finite, and are so times `inverse`; none is changed."""
        found_inf = torch.zeros((), dtype=torch.float32, device=inverse.device)
        found_inf = found_inf if flag is None else flag.to(found_inf)
        found = self._checked(optimizer, grads.by_kind(grads.collect(optimizer, True)), inverse, found_inf)
        stage = self._per_optimizer_states[id(optimizer)]
        stage["found_inf_per_device"] = self._agreed(optimizer, found, found_inf)
        return cast("dict[str, Any]", stage["found_inf_per_device"])

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale in place and return one flag per device; nothing is read. The name and the arguments are torch's."""
        kinds = grads.by_kind(grads.collect(optimizer, allow_fp16))
        return self._checked(optimizer, kinds, inv_scale, found_inf, unscale=True)

    def _unscaled_at_once(self, optimizer: Optimizer, scale: torch.Tensor) -> dict[torch.device, torch.Tensor] | None:
        """Unscale plain fp32 gradients on the CPU in place, with no rank to agree with; None for other gradients.

        One pass suffices: the division by a scale from 1 on cannot make them overflow. The size of each gradient is
        measured, and kept, only if one was not finite.
        """
        if not hardware.is_on_host(scale) or scale.dim() or self._samples_now() or distributed.is_running():
            return None
        if "_unscale_grads_" in self.__dict__ or type(self)._unscale_grads_ is not Checks._unscale_grads_:
            return None  # somebody has put a function of theirs in its place
        if not (number := scale.item()) >= 1 or not (values := grads.plain_on_host((optimizer,))):
            return None
        inverse, zero = self._inverse_of(number)
        found_inf = zero.clone()
        grads.unscale_and_check_(values, found_inf, inverse)
        found = {found_inf.device: found_inf}
        if found_inf.item():
            kinds = grads.by_kind(grads.collect(optimizer, True))
            sizes = grads.largest(kinds, len(grads.parameters_of(optimizer)), inverse.device)
            self._seen = sizes, self._about(inverse)
            return self._agreed(optimizer, found, found_inf)
        self._agreed_with = ()
        return found

    def _inverse_of(self, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return 1 / scale and 0 as 0-dimensional fp32 tensors on the CPU, which are only read; kept for this scale."""
        if self._inverse is not None and self._inverse[0] == scale:
            return self._inverse[1:]
        with real_tensors():
            inverse = torch.full((), 1.0 / scale, dtype=torch.float32, device="cpu")
            zero = torch.zeros((), dtype=torch.float32, device="cpu")
        self._inverse = scale, inverse, zero
        return inverse, zero

    @torch.no_grad()
    def _checked(
        self,
        optimizer: Optimizer,
        kinds: grads.Kinds,
        inverse: torch.Tensor,
        found_inf: torch.Tensor,
        unscale: bool = False,
    ) -> dict[torch.device, torch.Tensor]:
        """Return one flag per device: set if a gradient is not finite or will not be once unscaled.

        If asked, the gradients are unscaled, by the kernel that checks them where the device has one. Their sizes are
        kept for the report before clipping, which makes all gradients NaN if one is.
        """
        if not kinds:
            return {}
        inv_scale, inverse = inverse, inverse.reshape(())
        count, samples = len(grads.parameters_of(optimizer)), self._samples_now()
        by_kernel = grads.checked_by_kernel(kinds, count, inverse, unscale, samples)
        if by_kernel is None:
            exponents = grads.exponent_histogram(kinds, found_inf.device) if samples else None
            by_kernel = grads.Checked(grads.largest(kinds, count, inverse.device), exponents)
        else:
            unscale = False
        self._count(by_kernel.exponents)
        sizes = by_kernel.sizes * inverse
        flag = grads.not_finite(sizes.float()).any().to(found_inf)
        self._seen = sizes, self._about(inverse)
        flags, inverses = _Replicator(torch.maximum(found_inf, flag)), _Replicator(inv_scale)
        for (device, _), group in kinds.items():
            there = flags.get(device)
            if unscale:
                grads.unscale_and_check_([each.values for each in group], there, inverses.get(device))
        return cast("dict[torch.device, torch.Tensor]", flags._per_device_tensors)

    def _about(self, inverse: torch.Tensor) -> torch.Tensor:
        """Return the record of this step on the device: its number, the scale, whether the losses were finite."""
        kind = widest_float(inverse.device)
        step = torch.full((), float(self._steps), dtype=kind, device=inverse.device)
        return torch.stack((step, inverse.to(kind).reciprocal(), all_finite(self._losses, step)))

    def _agreed(
        self, optimizer: Optimizer, found: dict[torch.device, torch.Tensor], nothing: torch.Tensor
    ) -> dict[torch.device, torch.Tensor]:
        """Share the flags over all ranks of the group, or of the meshes of DTensor gradients; then record the step."""
        self._agreed_with = groups = self._groups(optimizer)
        if groups:
            shared = combined(found.values(), nothing.device)
            for group in groups:
                distributed.agree_on_maximum_(shared, group)
            for flag in found.values():
                flag.copy_(shared.to(flag, non_blocking=True).expand_as(flag))
            found = found or {shared.device: shared}
        if self._seen is not None:
            sizes, about = self._seen
            self._provenance.latch(optimizer, sizes, combined(found.values(), sizes.device), about)
            self._seen = None
        return found

    def _groups(self, optimizer: Optimizer) -> list[torch.distributed.ProcessGroup]:
        """Return the groups of more than one rank to agree with."""
        if not distributed.is_running():
            return []
        group = distributed.resolve(self._process_group)
        if group is not None:
            groups = [group]
        else:
            gradients = (p.grad for p in grads.parameters_of(optimizer) if p.grad is not None)
            groups = distributed.mesh_groups(gradients)
        return [each for each in groups if each.size() > 1]

    def _count(self, counts: torch.Tensor | None) -> None:
        """Add counts of scaled gradients by exponent to those of this step; None adds nothing."""
        if counts is None:
            return
        self._exponents = counts if self._exponents is None else self._exponents + counts
        name = self._scaling.format if isinstance(self._scaling, AdaptiveLossScale) else "fp16"
        self._underflow = underflow(self._exponents, name)

    def _samples_now(self) -> bool:
        return self._sample_interval > 0 and self._steps % self._sample_interval == 0

    def _exponents_of_all(self, device: torch.device) -> torch.Tensor | None:
        """Return this step's counts by exponent, summed over all ranks, if the scale follows them; else None."""
        alone = self._told is not None and not self._agreed_with  # ranks may profile different steps
        if not isinstance(self._scaling, AdaptiveLossScale) or not (self._samples_now() or alone):
            return None
        counts = torch.zeros(256, dtype=torch.int64, device=device)
        for seen in (self._exponents, self._told):
            counts = counts if seen is None else counts + seen.to(device)
        for group in self._agreed_with:
            distributed.sum_over_(counts, group)
        return counts

    def _remember_losses(self, outputs: object) -> None:
        """Keep the losses of this step, to report whether they were finite if gradients overflow."""
        if torch.compiler.is_compiling():
            return
        if isinstance(outputs, (list, tuple)):
            for output in outputs:
                self._remember_losses(output)
        elif isinstance(outputs, torch.Tensor) and outputs.numel() == 1 and len(self._losses) < _MOST_LOSSES:
            if not _is_functorch_wrapped(outputs):
                self._losses.append(outputs.detach())
