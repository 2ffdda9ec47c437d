"""The numerics profiler: what every number format would do to a model, from one run in fp32, and what to do about it.

`profiler` watches a training (its hooks are in `watching`, the steps it looks at in `sampling`); `record` is what it
leaves, made of `spectrum` and `updates`; `prediction` says what a format would do to it, `advice` what to change,
`search` which policy is cheapest; `divergence` finds what made a number infinite or NaN, `difference` where two runs
part. Everything after the record is arithmetic on it: nothing runs again.
"""
