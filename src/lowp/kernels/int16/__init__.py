"""Tensors as int16 under an exponent, their products, and how they are written."""
