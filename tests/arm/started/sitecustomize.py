"""Read at the start of every Python of the run: the processor is AArch64, all of which have fused multiply-adds."""

import platform

platform.machine = lambda: "aarch64"
