"""Functions in Triton's language, which are not executed as Python and have no Python types.

`triton.jit` compiles them for a device; `launch` runs them on a CPU in the interpreter.
"""
