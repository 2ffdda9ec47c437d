"""`lowp.profile`: watch a training, then ask what every number format would do to it."""

from __future__ import annotations

from lowp.numerics.profiler import Profiler

__all__ = ["profile"]


class profile(Profiler):
    """Watch a training step by step: ``with lowp.profile(model, optimizer) as profile: ...`` around the loop.

    Looks at steps 0, 1, 2, 4, 8 … and every fiftieth, spread over as many steps more as `max_overhead` asks for, and at
    the others hardly at all: at weights, inputs, outputs, the gradients of activations and weights, and applied
    updates, by module, op, role and phase. `max_overhead` is a share of the time (``"3%"``), None for no limit, or
    ``"auto"``: 3 %, or 0.25 s if that is more. `model` may be a dictionary of several by name. A model may be in plain
    fp32, in a region of lowp's or of torch.autocast, compiled, checkpointed, or wrapped for several ranks.

    `precision` or `scaler` is what scales the loss, where something does: gradients are recorded as they are without
    it. `out` is a file that gets a line a step, so that a run that is killed leaves what it has seen. A loss or a
    gradient that is infinite or NaN is traced to the operation that made it so, by running its step again;
    `divergence=False` leaves that out. `record` holds what was seen, `save` writes it.

    Raises InvalidInput at the end of the block where no step of the model ran in it.
    """
