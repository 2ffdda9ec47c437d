"""Unmodified scripts: `lowp run` starts Python as it would have been started, with one module that waits for torch.

The script runs as itself: its own interpreter, ``__main__``, argv, standard input, exit code and tracebacks. What is
lowp's is decided by the environment (`settings`), begins when torch is imported (`boot`), and stands at six places of
torch: module calls (`forward`), backward passes (`backward`), the gradients of leaves and what hooks are shown of
others (`gradients`), optimizer steps (`stepping`), and the script's own autocast and GradScaler (`standing`).
`session` ties them together; `record` is what is told at the end.
"""
