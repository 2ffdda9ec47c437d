"""The numerics profiler: predicts from one fp32 run what every number format would do to a model, and gives advice.

`profiler` watches a training (its hooks are in `watching`, the choice of steps in `schedule`) and produces a `record`,
made of spectra. `prediction` computes the effect of a format, `advice` what to change, `policies` the effect of a
policy, and the cheapest one. `divergence` finds the op that made a number infinite or NaN, `difference` the first
difference of two runs. Everything after the record is arithmetic on the record: nothing runs again.
"""
