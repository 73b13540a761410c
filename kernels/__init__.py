"""Operations of a model on one step's batch, behind one interface with several backends (`select_kernels`).

Imports no other package of this program. See `kernels.interface` for shapes and invariants.
"""

from kernels.backends import BACKENDS, select_kernels
from kernels.interface import Kernels, PagedKV, RaggedBatch, StatePlan

DISTRIBUTION = "blockcast"

__all__ = ["BACKENDS", "Kernels", "PagedKV", "RaggedBatch", "StatePlan", "select_kernels"]
