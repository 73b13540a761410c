"""Operations of a model on one step's batch, behind one interface with several backends (`select_kernels`).

Imports no other package of this program. See `kernels.reference.backend` for shapes.
"""

from kernels.backends import BACKENDS, select_kernels
from kernels.interface import PagedKV, RaggedBatch
from kernels.reference.backend import ReferenceKernels as Kernels

DISTRIBUTION = "blockcast"

__all__ = ["BACKENDS", "Kernels", "PagedKV", "RaggedBatch", "select_kernels"]
