"""Transfers of arrays to a device and back, through pinned memory, so that the host does not wait for the copy.

Pinned memory comes from torch's caching host allocator, which reuses memory only after the copies from it are done. So
nothing is overwritten before the device has read it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNED_INTS = 4
"""Pieces of an upload start at multiples of 16 bytes: Triton compiles anew for pointers that do not."""


def copy_to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to the device without waiting; on a CPU return the array itself. The dtype stays."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type != "cpu" else tensor


def overwrite(target: Tensor, array: npt.NDArray[Any]) -> None:
    """Write the array, which is of the same dtype, over the beginning of a flat tensor; the host does not wait."""
    tensor = torch.from_numpy(array.reshape(-1))
    if target.device.type != "cpu":
        tensor = tensor.pin_memory()
    target[: array.size].copy_(tensor, non_blocking=True)


def upload(arrays: list[npt.NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """Copy arrays to the device in one transfer, for which the host does not wait. Returns flat int32 tensors.

    The arrays are put into one buffer in pinned memory, each at a multiple of ALIGNED_INTS integers.
    """
    spans: list[slice] = []
    buffer_size = 0
    for array in arrays:
        end = buffer_size + array.size
        spans.append(slice(buffer_size, end))
        buffer_size = -(-end // ALIGNED_INTS) * ALIGNED_INTS  # rounded up
    host_buffer = torch.empty(buffer_size, dtype=torch.int32, device="cpu", pin_memory=device.type != "cpu")
    host_ints = host_buffer.numpy()
    for span, array in zip(spans, arrays, strict=True):
        host_ints[span] = array.reshape(-1)
    device_ints = host_buffer.to(device, non_blocking=True)
    return [device_ints[span] for span in spans]


def start_copy_to_host(tensors: list[Tensor]) -> Callable[[], list[list[Any]]]:
    """Start copying tensors to the host, and return a function that waits for the copies and returns them as lists.

    The function waits only for work that the device had before this call.
    """
    if not tensors or tensors[0].device.type == "cpu":
        return lambda: [tensor.tolist() for tensor in tensors]
    copies = [torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True) for x in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    copy_event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copy_event.record(torch.cuda.current_stream(tensors[0].device))

    def wait_and_read() -> list[list[Any]]:
        copy_event.synchronize()
        return [copy.tolist() for copy in copies]

    return wait_and_read
