"""Timing on a device, and what the device can do at most: shared by the kernel and the throughput benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import _path  # noqa: F401
import torch
from harness import figures

GRAPH_CALLS = 8
"""Calls in one captured graph, so that launching from Python is not what is measured."""


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_ms(call: Callable[[], Any], device: torch.device, budget_ms: float = 200.0, *, in_graph: bool = True) -> float:
    """Median time of a call. On CUDA calls are timed by events, captured in a graph where possible; else by the clock.

    `in_graph`: False: never captured.
    """
    call()
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    once_ms = (time.perf_counter() - start) * 1e3
    rounds = max(3, min(50, int(budget_ms / max(once_ms, 1e-3))))
    if device.type != "cuda":
        return sorted(_wall_ms(call, device) for _ in range(rounds))[rounds // 2]
    repeat, replay = _capture_repeats(call) if in_graph else (1, call)
    samples = []
    for _ in range(rounds):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        replay()
        after.record()
        after.synchronize()
        samples.append(before.elapsed_time(after) / repeat)
    return sorted(samples)[rounds // 2]


def _capture_repeats(call: Callable[[], Any]) -> tuple[int, Callable[[], Any]]:
    """(calls in a CUDA graph, its replay); the plain call, which has run before, where it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        # The outer one goes back to the stream, which torch forgets where the recording fails.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            for _ in range(GRAPH_CALLS):
                call()
    except RuntimeError:  # it waits for the device somewhere: time it with what it waits for
        torch.cuda.synchronize()
        return 1, call
    return GRAPH_CALLS, graph.replay


def kernel_times(call: Callable[[], Any], device: torch.device, kernels_max: int = 14) -> list[dict[str, Any]]:
    """Of one call, by kernel: launches and microseconds on the device, the dearest first, then what is left of them."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        call()
        synchronize(device)
    entries = [
        {"kernel": event.key[:80], "launches": event.count, "us": round(event.self_device_time_total, 1)}
        for event in profile.key_averages()
        if event.device_type != torch.autograd.DeviceType.CPU  # operations count their kernels once more
    ]
    entries.sort(key=lambda entry: -entry["us"])
    other_kernels = entries[kernels_max:]
    if other_kernels:
        launches, us = (sum(entry[key] for entry in other_kernels) for key in ("launches", "us"))
        entries[kernels_max:] = [{"kernel": f"{len(other_kernels)} others", "launches": launches, "us": round(us, 1)}]
    return entries


def _wall_ms(call: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3


def copy_rate(device: torch.device, mebibytes: int) -> float:
    """Bytes a second read and written by a copy of a large buffer.

    It is not timed in a CUDA graph, where a copy is left to the copy engines, which are slower.
    """
    source = torch.randint(256, (mebibytes << 20,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / time_ms(lambda: target.copy_(source), device, in_graph=False) * 1e3


def matrix_rate(device: torch.device, size: int, dtype: torch.dtype) -> float:
    """Floating point operations a second in a product of two square matrices."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / time_ms(lambda: torch.mm(a, b, out=out), device) * 1e3


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        **figures.describe_machine("torch", "triton", "transformers", "flash-attn-3"),
        "device": name,
    }
