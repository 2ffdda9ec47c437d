"""Ops under a policy: a row an op, and the runners that carry out its rule."""
