"""Choice of the backend for a device. A backend's packages are imported only when it is chosen."""

from __future__ import annotations

import logging
from importlib.util import find_spec

import torch

from kernels.cpu.packed import HAS_NATIVE
from kernels.reference.backend import ReferenceKernels

BACKENDS = ("auto", "triton", "flash-attn", "torch", "cpu", "reference")
"""Backends that `select_kernels` knows.

`torch` is plain torch operations: `cpu` on a CPU, `reference` elsewhere. `flash-attn` is `triton` with the attention of
prompts from FlashAttention, version 3 where it is installed, else 2.
"""

HOPPER_MAJOR = 9
"""Compute capability of the generation that FlashAttention-3 is made for."""

INSTALL_HINT = "in a checkout: `BLOCKCAST_KERNELS=ON pip install --force-reinstall --no-deps .`"
log = logging.getLogger(__name__)


def select_kernels(device: torch.device | str, backend: str = "auto") -> ReferenceKernels:
    """Return the named implementation of a model's operations (attention, norms, sampling and others) for a device.

    On CUDA, `auto` means the fastest installed backend, `triton` or `flash-attn`; on other devices it means `torch`.
    `torch` means `cpu` on a CPU if that backend is installed, and otherwise `reference`.
    Raises ValueError if a backend is unknown, is not installed, or cannot run on the device.
    """
    device = torch.device(device)
    if backend not in BACKENDS:
        raise ValueError(f"attention backend {backend!r}: expected one of {', '.join(BACKENDS)}")
    if backend == "auto":
        backend = _choose_fastest(device) if device.type == "cuda" else "torch"
    if backend == "torch":
        backend = _choose_torch_backend(device)
    if backend == "reference":
        return ReferenceKernels(device)
    if backend == "cpu":
        if device.type != "cpu":
            raise ValueError(f"attention backend 'cpu' cannot run on device {device}")
        if not HAS_NATIVE:
            raise ValueError(f"attention backend 'cpu': its operations are not in this installation: {INSTALL_HINT}")
        from kernels.cpu.backend import CpuKernels

        return CpuKernels(device)
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"attention backend {backend!r}: the package triton must be installed, 'blockcast[gpu]' ({error})"
        ) from error
    if backend == "triton":
        from kernels.triton.backend import TritonKernels

        return TritonKernels(device)
    from kernels.flash_attention import FlashAttentionKernels

    return FlashAttentionKernels(device)


def _choose_torch_backend(device: torch.device) -> str:
    """Return the name of the backend that "torch" stands for on a device. Logs a warning if that backend is slow."""
    if device.type != "cpu":
        log.warning(
            "attention backend 'torch' on %s is for comparison, not for serving: sequences are computed one at a "
            "time, and the host waits for the device in every layer",
            device,
        )
        return "reference"
    if HAS_NATIVE:
        return "cpu"
    log.warning(
        "no operations for CPUs in this installation, so it runs on plain torch, which is slower: %s", INSTALL_HINT
    )
    return "reference"


def _choose_fastest(device: torch.device) -> str:
    """Return the fastest backend for CUDA. FlashAttention-3 computes prompts at about twice the rate of Triton."""
    is_hopper = torch.cuda.get_device_capability(device)[0] == HOPPER_MAJOR
    return "flash-attn" if is_hopper and find_spec("flash_attn_interface") is not None else "triton"
