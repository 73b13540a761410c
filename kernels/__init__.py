"""Attention, state-space and norm operations behind one interface: `select(device)` gives the backend to use.

Ground: imports nothing of ours. See `kernels.interface` for shapes and invariants.
"""

from __future__ import annotations

import torch

from kernels.interface import Kernels, PagedKV, Ragged, StatePlan

__all__ = ["BACKENDS", "Kernels", "PagedKV", "Ragged", "StatePlan", "select"]

BACKENDS = ("auto", "cpu", "reference")


def select(device: torch.device | str, backend: str = "auto") -> Kernels:
    """The kernels for a device. `auto` takes the fastest that runs there.

    Raises ValueError for a backend that is unknown or cannot run on the device.
    """
    from kernels.cpu import CpuKernels
    from kernels.reference import ReferenceKernels

    device = torch.device(device)
    if backend not in BACKENDS:
        raise ValueError(f"attention backend {backend!r}: expected one of {', '.join(BACKENDS)}")
    if backend == "auto":
        backend = "cpu" if device.type == "cpu" else "reference"
    if backend == "cpu":
        if device.type != "cpu":
            raise ValueError(f"attention backend 'cpu' cannot run on device {device}")
        return CpuKernels(device)
    return ReferenceKernels(device)
