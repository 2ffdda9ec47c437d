"""What a step does to many tensors at once: optimizers' updates, stored weights, the counts of a profile."""
