"""What computes: which implementation, what the processor is, and why, in words."""
