"""Tensor parallelism: one rank leads, the others follow its orders."""
