"""Ops under a policy: one table row per op, and the runners that apply the op's rule."""
