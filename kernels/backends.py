"""Which backend runs on a device. The packages that a backend stands on are imported when it is chosen."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import torch

from kernels.interface import Kernels

BACKENDS = ("auto", "triton", "flash-attn", "fla", "torch", "cpu", "reference")
"""What `select` knows. `torch` is plain torch operations: `cpu` on a CPU, `reference` elsewhere. `flash-attn` and `fla`
are `triton` with the attention of prompts, or their gated delta rule, from the packages of these names."""


log = logging.getLogger(__name__)


def select(device: torch.device | str, backend: str = "auto") -> Kernels:
    """The kernels for a device. `auto` takes the fastest that runs there: `triton` on CUDA, `cpu` on a CPU.

    Raises ValueError for a backend that is unknown, cannot run on the device, or is not installed.
    """
    device = torch.device(device)
    if backend not in BACKENDS:
        raise ValueError(f"attention backend {backend!r}: expected one of {', '.join(BACKENDS)}")
    if backend == "auto":
        backend = "triton" if device.type == "cuda" else "torch"
    if backend == "torch":
        if device.type != "cpu":
            log.warning(
                "attention backend 'torch' on %s is for comparison, not for serving: sequences are computed one at a "
                "time, and the host waits for the device in every layer", device,
            )  # fmt: skip
        backend = "cpu" if device.type == "cpu" else "reference"
    if backend == "cpu":
        if device.type != "cpu":
            raise ValueError(f"attention backend 'cpu' cannot run on device {device}")
        if find_spec("kernels.cpu._native") is None:
            raise ValueError(
                "attention backend 'cpu': its operations were not built (BLOCKCAST_KERNELS=OFF); install blockcast "
                "without that setting, or choose the backend 'reference'"
            )
        from kernels.cpu.backend import CpuKernels

        return CpuKernels(device)
    if backend == "reference":
        from kernels.reference.backend import ReferenceKernels

        return ReferenceKernels(device)
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"attention backend {backend!r}: the package triton must be installed, 'blockcast[gpu]' ({error})"
        ) from error
    from kernels.optional import FlaKernels, FlashAttnKernels
    from kernels.triton.backend import TritonKernels

    gpu_backends = {"triton": TritonKernels, "flash-attn": FlashAttnKernels, "fla": FlaKernels}
    return gpu_backends[backend](device)
