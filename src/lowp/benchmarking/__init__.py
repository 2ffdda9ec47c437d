"""Time, memory and operations of training steps: how each is measured, and the rows that are measured together."""
