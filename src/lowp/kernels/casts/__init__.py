"""Casts: quantize, encode, decode, statistics, and what computes them."""
