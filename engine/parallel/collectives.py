"""Operations in which all ranks of a tensor-parallel engine take part: each waits for the others.

gloo between CPUs, NCCL between GPUs. All ranks are on one machine.
"""

from __future__ import annotations

import datetime
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

COLLECTIVE_TIMEOUT_S = 300.0
"""Longest wait of one rank for another inside a step. The first step compiles kernels."""


def join_process_group(rank: int, size: int, store: TCPStore, device: torch.device) -> None:
    """Join the process group of all ranks; blocks until all have joined."""
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        device_id=device if device.type == "cuda" else None,  # connects now instead of in the first step
        store=store,
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )


def all_reduce_sum(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of x over all ranks, on every rank. Overwrites x."""
    x = x.contiguous()
    dist.all_reduce(x)
    return x


def gather_columns(x: torch.Tensor) -> torch.Tensor | None:
    """Put the x of all ranks, [rows, n] each, side by side: [rows, ranks * n] on rank 0, None elsewhere."""
    x = x.contiguous()
    if dist.get_rank():
        dist.gather(x, dst=0)
        return None
    parts = x.new_empty(dist.get_world_size(), *x.shape)
    dist.gather(x, list(parts), dst=0)
    return parts.transpose(0, 1).reshape(x.shape[0], -1)


def all_reduce_min(count: int, device: torch.device) -> int:
    """Return the smallest number of all ranks, on every rank. Each rank waits for the others."""
    minimum = torch.tensor(count, dtype=torch.int64, device=device)
    dist.all_reduce(minimum, op=dist.ReduceOp.MIN)
    return int(minimum.item())
