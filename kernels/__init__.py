"""Attention, state-space and norm operations behind one interface: `select(device)` gives the backend to use.

Ground: imports nothing of ours. See `kernels.interface` for shapes and invariants.
"""

from kernels.backends import BACKENDS, select_kernels
from kernels.interface import Kernels, PagedKV, RaggedBatch, StatePlan

DISTRIBUTION = "blockcast"

__all__ = ["BACKENDS", "Kernels", "PagedKV", "RaggedBatch", "StatePlan", "select_kernels"]
