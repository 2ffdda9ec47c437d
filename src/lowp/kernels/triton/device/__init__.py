"""What is written in Triton's language: functions that no Python runs and no Python types describe.

`triton.jit` compiles them for a device; `launch` has the interpreter run them on a CPU.
"""
