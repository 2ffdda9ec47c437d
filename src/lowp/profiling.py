"""`lowp.profile`: records a training, to predict what every number format would do to it."""

from pathlib import Path

from lowp import files
from lowp.numerics.profiler import Profiler
from lowp.numerics.record import merged_over_ranks


class profile(Profiler):
    """Record the numbers of a training: ``with lowp.profile(model, optimizer) as profile: ...`` around the loop.

    Records weights, inputs, outputs, the gradients of activations and weights, and applied updates, by module, op, role
    and phase, in steps 0, 1, 2, 4, 8 … and every fiftieth; each of these is spread over as many steps as `max_overhead`
    requires: a share of the time (``"3%"``), ``"auto"`` (3 %, or 0.25 s if that is more), or None for no limit. `model`
    is a model or a dictionary of several by name. Models may run in plain fp32, in a region of lowp or of
    torch.autocast, compiled, with checkpointing, or wrapped for several ranks.

    If the loss is scaled, `precision` or `scaler` must be the object that scales it; gradients are then recorded
    without the scale. `out` is a file to which each recorded step is written, so that the record of a killed run is not
    lost. If a loss or a gradient is infinite or NaN, its step is run again to find the operation that produced it;
    `divergence=False` disables this. `record` is the result; `save` writes it, and `report` what it
    says of the formats.

    Raises InvalidInput at the end of the block if no step of the model ran in it.
    """

    def report(self, path: str | Path) -> None:
        """Write the report, one HTML file. With several ranks all must call this, and the first writes.

        Raises InvalidInput for an empty profile.
        """
        from lowp.numerics.advice import advise
        from lowp.report.profile_html import page

        record = merged_over_ranks(self.record)
        if record is not None:
            text = page(record, advise(record))
            files.write(Path(path), text)
