"""Unmodified scripts: `lowp run` starts Python as usual, with one extra module that waits for the import of torch.

The script runs as itself: its own interpreter, ``__main__``, argv, standard input, exit code and tracebacks. The
environment holds lowp's settings (`record`), and lowp starts when torch is imported (`boot`). It patches six places
of torch: module calls (`forward`), backward passes (`backward`), the gradients of leaves and the gradients shown to
hooks (`gradients`), optimizer steps (`stepping`), and the script's own autocast and GradScaler. `session`
connects them; `record` reports at the end.
"""
