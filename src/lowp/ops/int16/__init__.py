"""Ops on tensors of int16 mantissas under one exponent (dfp16, flex16+5).

* `contraction`: the three products of a contraction as products of integers, in both formats. Backward keeps payloads.
* `layer`: linear layers and convolutions in both formats, from their arguments: one call of the C++ library each way.
* `masks`: activations, dropout and max-pooling beside dfp16's contractions; backward keeps one bit per element.
* `flexpoint`: the runners of flex16+5, in which every result is rounded under the shared exponent of its site.
* `nodes`: the nodes of the graph that round results and gradients at sites, and contractions without integers.
* `saved`: functions between the contractions; backward keeps their inputs as mantissas and computes from them.
* `pooling`: ReLU and max-pooling, which select elements and so keep the exponent of their input.

Payloads and products of integers are in `lowp.kernels` (`payloads`, `mantissas`, `integer`), exponents and the sites
of a step in `lowp.exponents`; both are lower layers and are called directly.
"""
