"""Gradients that travel between ranks in few bits: a hook for DistributedDataParallel and its counterpart for FSDP2.

A rank cuts its gradients into one part a rank, sends each part encoded (all-to-all), and sums in fp32, in the order of
ranks, what it has received of its own part. Under DistributedDataParallel the mean is encoded again and sent to all
(all-gather); under FSDP2 every rank keeps its own. So all ranks have the same bits, and the same ones in every run of
as many ranks. Sources: the exchange is that of Tang et al. 2021, arXiv 2102.02888 (1-bit Adam); error feedback for both
roundings is Tang et al. 2019, arXiv 1905.05957, algorithm 1 (DoubleSqueeze).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias
from typing import cast as cast_to

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.functional import pad

from lowp import casts, distributed, kernels
from lowp.casts import Cast, Overflow
from lowp.compat import all_gather
from lowp.errors import InvalidInput, brief
from lowp.formats import FloatFormat, Format
from lowp.kernels.choose.dispatch import answers_at_once
from lowp.optim.shards import is_fully_sharded
from lowp.optim.storage import check_seed, seed_of
from lowp.quantized import Quantized

ProcessGroup: TypeAlias = "torch.distributed.ProcessGroup"
GradBucket: TypeAlias = Any  # torch.distributed.GradBucket, which builds without ranks lack
ROW = 1024  # numbers, at most, that share the scale of a row
_VERSION = 1
_ENTRIES = ("version", "cast", "error_feedback", "seed", "exchanges", "rank", "ranks", "residuals")


class GradientCompression:
    """Sends gradients between ranks in the format of a cast: ``bf16``, ``mxfp8``, ``int8:stochastic`` … (any cast).

        model = DistributedDataParallel(model)  # or fully_shard(model)
        compression = lowp.GradientCompression("mxfp8", error_feedback=True).attach(model)

    A scale of a *row* is shared by up to 1,024 neighbours of a bucket, one of a *tensor* by all that one rank sends to
    another. Stochastic casts draw by `seed`, rank and element. `error_feedback` keeps in fp32 what rounding has taken
    from this rank's gradients and adds it to the next ones: one number for each that the rank sends. What is
    infinite or NaN reaches all ranks in every format: where a format has neither, all of a part arrives as NaN.
    `bytes_sent` counts what this rank has sent, `bytes_in_fp32` what it would have sent in fp32.

    Raises InvalidInput for a cast whose scale depends on earlier tensors, and UnknownName for an unknown one.
    """

    def __init__(self, cast: str | Cast | Format | torch.dtype, *, error_feedback: bool = False, seed: int = 0) -> None:
        check_seed(seed)
        kernels.encode(torch.zeros(1), cast)  # casts that cannot be encoded raise here
        self.cast = casts.parse(cast)
        self.error_feedback, self.seed, self.exchanges = error_feedback, seed, 0
        self.bytes_sent = self.bytes_in_fp32 = 0
        self._residuals: dict[str, Tensor] = {}
        self._wires: dict[Any, _Wire] = {}  # by shape and device of a part
        self._names: dict[int, str] = {}
        self._group: distributed.Group = None
        self._scale: Callable[[], float] = lambda: 1.0

    def attach(self, model: nn.Module, precision: Any = None) -> GradientCompression:
        """Compress the gradients of a DistributedDataParallel or of a model with `fully_shard`; returns this object.

        A `precision` with a loss scale that moves is needed for error feedback alone, whose residuals it then scales.
        Raises InvalidInput for any other model, and torch's error for one that has a hook already.
        """
        if precision is not None:
            self._scale = lambda: float(precision.scale)
        sharded: list[tuple[str, Any]] = [
            (name, module) for name, module in model.named_modules() if is_fully_sharded(module)
        ]
        if isinstance(model, nn.parallel.DistributedDataParallel):
            self._group = model.process_group
            self._names = {id(one): name for name, one in model.module.named_parameters()}
            model.register_comm_hook(None, lambda state, bucket: self._reduced(bucket))
        elif sharded:
            for name, module in sharded:
                module.set_custom_reduce_scatter(_ReduceScatter(self, name))
        else:
            raise InvalidInput(
                f"gradients of a {type(model).__name__} are not sent to other ranks: give the model in "
                "DistributedDataParallel, or after fully_shard(model)"
            )
        return self

    # -- a step -------------------------------------------------------------------------------------------------------
    def _reduced(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Replace a bucket of gradients by their mean over the ranks."""
        buffer, group = bucket.buffer(), self._group
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        if group is not None and group.size() > 1:
            with torch.no_grad():
                self._all_reduce_(buffer, group, list(self._places(bucket)))
        done.set_result(buffer)
        return done

    def _places(self, bucket: GradBucket) -> Iterator[tuple[str, slice]]:
        """Yield each parameter's name, and where its gradient lies in the bucket."""
        start = bucket.buffer().storage_offset()
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            first = gradient.storage_offset() - start
            yield self._names[id(parameter)], slice(first, first + gradient.numel())

    def _all_reduce_(self, buffer: Tensor, group: ProcessGroup, places: list[tuple[str, slice]]) -> None:
        ranks, here, count, scale = group.size(), group.rank(), buffer.numel(), self._scale()
        rows, width = _rows(math.ceil(count / ranks))
        parts = buffer.new_zeros((ranks, rows, width), dtype=torch.float32)
        flat = parts.view(-1)
        flat[:count] = buffer
        for name, place in places:
            if name in self._residuals:
                flat[place].add_(self._residuals[name], alpha=scale)
        total, errors = self._exchanged(parts, group)
        mean, wire = total.div_(ranks), self._wire(total)
        sent = wire.write(mean, self._seed_of(group, 1), here * mean.numel())
        gathered = sent.new_empty(ranks * len(sent))
        all_gather(gathered, sent, group=group)
        self._count(len(sent), count, ranks)
        torch.stack([wire.read(one) for one in gathered.view(ranks, -1)], out=parts)
        buffer.copy_(flat[:count])
        if errors is not None:
            # all ranks lack what this second rounding took from the mean: this rank adds it to its own part
            errors[here] = (mean - parts[here]) * ranks
            for name, place in places:
                self._keep(name, errors.view(-1)[place], scale)

    def _reduce_scatter_(self, output: Tensor, whole: Tensor, group: ProcessGroup, is_mean: bool, name: str) -> None:
        """Write this rank's part of the sum, or mean, of what all ranks give."""
        ranks, count, scale = group.size(), output.numel(), self._scale()
        rows, width = _rows(count)
        parts = pad(whole.view(ranks, count).float(), (0, rows * width - count)).view(ranks, rows, width)
        known = self._residuals.get(name)
        if known is not None and known.numel() == parts.numel():
            parts = parts.add(known.view_as(parts), alpha=scale)
        total, errors = self._exchanged(parts, group)
        output.copy_((total / ranks if is_mean else total).view(-1)[:count])
        if errors is not None:
            self._keep(name, errors.view(-1), scale)

    def _exchanged(self, parts: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor | None]:
        """Return the sum over ranks of this rank's part, and what rounding took from the parts of this rank.

        This rank's own part is not rounded.
        """
        self.exchanges += 1
        here, wire, seed = group.rank(), self._wire(parts[0]), self._seed_of(group, 0)
        sent = torch.stack([wire.write(part, seed, rank * part.numel()) for rank, part in enumerate(parts)])
        received = torch.empty_like(sent)
        torch.distributed.all_to_all_single(received.view(-1), sent.view(-1), group=group)
        self._count(sent.shape[1], parts.numel(), len(parts))
        total = torch.zeros_like(parts[0])
        for rank, one in enumerate(received):
            total += parts[rank] if rank == here else wire.read(one)
        if not self.error_feedback:
            return total, None
        errors = [
            torch.zeros_like(part) if rank == here else part - wire.read(sent[rank]) for rank, part in enumerate(parts)
        ]
        return total, torch.stack(errors)

    def _keep(self, name: str, errors: Tensor, scale: float) -> None:
        """Keep what rounding took, where it is known: not of a part that was not finite."""
        known = self._residuals.get(name)
        if known is None or known.numel() != errors.numel():
            known = torch.zeros_like(errors)
        self._residuals[name] = torch.where(errors.isfinite(), errors / scale, known)

    def _wire(self, part: Tensor) -> _Wire:
        key = part.shape, part.device
        if key not in self._wires:
            self._wires[key] = _Wire(self.cast, part)
        return self._wires[key]

    def _seed_of(self, group: ProcessGroup, slot: int) -> int | Tensor:
        return seed_of(self.seed, self.exchanges, group.rank(), slot)

    def _count(self, length: int, numbers: int, ranks: int) -> None:
        """Count one exchange, in which a rank sends `length` bytes to each other rank, for its share of `numbers`."""
        self.bytes_sent += (ranks - 1) * length
        self.bytes_in_fp32 += 4 * numbers * (ranks - 1) // ranks

    # -- checkpoints --------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return what this rank goes on from, as plain values and tensors: each rank saves its own."""
        return {
            "version": _VERSION,
            "cast": str(self.cast),
            "error_feedback": self.error_feedback,
            "seed": self.seed,
            "exchanges": self.exchanges,
            "rank": distributed.rank(),
            "ranks": distributed.count(),
            "residuals": dict(self._residuals),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict` of the same rank. Raises InvalidInput, with nothing changed, for any other state."""
        missing = [name for name in _ENTRIES if name not in state]
        if missing:
            raise InvalidInput(f"the state of a GradientCompression lacks {', '.join(missing)}")
        own = self.state_dict()
        for name in ("version", "cast", "error_feedback", "rank", "ranks"):
            if state[name] != own[name]:
                raise InvalidInput(
                    f"a GradientCompression was saved with {name} = {brief(state[name])}, and this one has "
                    f"{own[name]!r}: load what the same rank of as many ranks has saved, or begin without, which loses "
                    "what error feedback has kept of one step"
                )
        residuals = state["residuals"]
        if not isinstance(residuals, Mapping) or not all(isinstance(one, Tensor) for one in residuals.values()):
            raise InvalidInput("the residuals of a GradientCompression must be tensors by name")
        check_seed(state["seed"], "a GradientCompression with ")
        if type(state["exchanges"]) is not int or state["exchanges"] < 0:
            raise InvalidInput(
                f"the exchanges of a GradientCompression are {brief(state['exchanges'])}: give their number, 0 or more"
            )
        self.seed, self.exchanges = state["seed"], state["exchanges"]
        self._residuals = {name: one.detach().clone() for name, one in residuals.items()}

    def __repr__(self) -> str:
        return f"GradientCompression({str(self.cast)!r}, error_feedback={self.error_feedback}, seed={self.seed})"


class _ReduceScatter:
    """The reduce-scatter of one group of FSDP2's parameters, as `set_custom_reduce_scatter` takes it."""

    def __init__(self, compression: GradientCompression, name: str) -> None:
        self._compression, self._name = compression, name

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what is sent or received."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce. Raises InvalidInput for anything other than a sum or a mean."""
        is_mean = op == torch.distributed.ReduceOp.AVG
        if not is_mean and op != torch.distributed.ReduceOp.SUM:
            raise InvalidInput(
                f"gradients in few bits are summed or averaged, not reduced by {op}: leave out "
                "set_gradient_divide_factor, or set_force_sum_reduction_for_comms(True)"
            )
        self._compression._reduce_scatter_(output_tensor, input_tensor, group, is_mean, self._name)


class _Wire:
    """How a part of one shape travels: its codes and scales as bytes, the widest first.

    If the format cannot hold infinities and NaN, the last byte tells whether there were any.
    """

    def __init__(self, cast: Cast, like: Tensor) -> None:
        self.cast, self.width = cast, like.shape[-1]
        has_nan = isinstance(cast.format, FloatFormat) and cast.format.has_nan
        self.is_flagged = not has_nan or cast.overflow is Overflow.SATURATE
        self.sample = kernels.encode(torch.zeros_like(like), cast, packed=True)
        fields = _fields(self.sample)
        self.order = sorted(fields, key=lambda name: -fields[name].element_size())
        used = sum(one.nbytes for one in fields.values()) + self.is_flagged
        # the parts of all ranks lie side by side, and the numbers of each are read in place
        self.rest = self.is_flagged + -used % fields[self.order[0]].element_size()

    def write(self, x: Tensor, seed: int | Tensor, offset: int) -> Tensor:
        """Return the bytes of x, uint8. What is not finite is not encoded where the format cannot hold it."""
        is_bad = torch.zeros((), dtype=torch.bool, device=x.device)
        if self.is_flagged:
            is_bad = ~torch.stack(torch.aminmax(x)).isfinite().all()
            x = torch.where(is_bad, 0.0, x) if not answers_at_once(x) or is_bad else x
        fields = _fields(kernels.encode(x, self.cast, seed=seed, offset=offset, packed=True))
        parts = [fields[name].reshape(-1).view(torch.uint8) for name in self.order]
        return torch.cat([*parts, is_bad.to(torch.uint8).expand(self.rest)])

    def read(self, data: Tensor) -> Tensor:
        """Return the values of what `write` has returned, in fp32; NaN if there was what the format cannot hold."""
        fields, found, first = _fields(self.sample), {}, 0
        for name in self.order:
            one = fields[name]
            found[name] = data[first : first + one.nbytes].view(one.dtype).view(one.shape)
            first += one.nbytes
        if isinstance(self.sample, Quantized):
            values: Tensor = kernels.dequantize(replace(self.sample, **cast_to(Any, found)))
        else:
            values = kernels.decode(found["payload"], self.cast, packed=True, length=self.width)
        return values.add_(torch.where(data[-1] > 0, torch.nan, 0.0)) if self.is_flagged else values


def _fields(encoded: Tensor | Quantized) -> dict[str, Tensor]:
    """Return the tensors of which codes consist."""
    return {"payload": encoded} if isinstance(encoded, Tensor) else encoded.tensors()


def _rows(count: int) -> tuple[int, int]:
    """Return in how many rows, and of how many numbers, `count` of them are laid out."""
    rows = max(math.ceil(count / ROW), 1)
    return rows, max(math.ceil(count / rows), 1)
