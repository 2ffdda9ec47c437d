"""What only tensors of int16 mantissas under one exponent need (dfp16, flex16+5); nothing else in lowp reads these.

* `contraction`: the three products of a contraction as products of integers, in both formats. Backward keeps payloads.
* `linear`: usual linear layers in both formats, which reach the node of `contraction` from their arguments alone.
* `masks`: activations, dropout and max-pooling beside dfp16's contractions, of which backward keeps a bit an element.
* `flexpoint`: which way an op of flex16+5 goes, whose every result is rounded under the shared exponent of its site.
* `nodes`: the nodes of the graph that round results and gradients there, and contractions that integers cannot do.
* `saved`: functions between the contractions, whose inputs backward keeps as mantissas and computes from again.
* `pooling`: ReLU and max-pooling, which select elements and so keep the exponent of what they read.

Payloads and products of integers are in `lowp.kernels` (`payloads`, `mantissas`, `integer`), exponents and the sites
of a step in `lowp.exponents`: both lie below, and are called directly.
"""
