"""Numbers in torch's operations: the definition of casts, the same in integers, and what all implementations share."""
