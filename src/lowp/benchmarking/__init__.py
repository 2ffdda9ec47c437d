"""Measurement of the time, memory and operations of training steps, for rows that are measured together."""
