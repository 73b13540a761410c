#!/usr/bin/env python3
"""Each kernel: time, bytes, operations, share of the device's measured bandwidth or matrix rate; torch's own beside it.

    benchmarks/kernels.py --json kernels.json             # on a GPU: shapes of Qwen3, Qwen3.5, Nemotron-H
    benchmarks/kernels.py --device cpu --tiny             # that it runs, anywhere
    benchmarks/kernels.py --backend flash-attn --only prefill

Shares are of what the machine was measured to do in the same run: bytes over the rate of a large copy, operations over
the rate of a large matrix product; the larger of the two is what bounds the kernel. `error` is the norm of the
difference from the torch reference on the same inputs, over the reference's norm. Peers get contiguous K and V (no
paging), which is the easier task. On a GPU calls run from a captured graph.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import _path  # noqa: F401
import torch
from device_timing import copy_rate, machine, matrix_rate, time_ms
from harness.figures import markdown_table, write_json
from kernel_cases import TINY, Bench, KernelCase, Shape, expected

from kernels import Kernels, select_kernels


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    time_us: float
    moved_bytes: float
    operations: float
    bandwidth_share: float
    matrix_share: float
    error: float
    peers_us: dict[str, float]


def measure(name: str, make: Callable[[Kernels], KernelCase], ops: Kernels, rates: tuple[float, float]) -> Result:
    reference = expected(make, ops.device)
    torch.manual_seed(0)
    case = make(ops)
    error = ((case.call().double() - reference).norm() / reference.norm()).item()
    del reference
    seconds = time_ms(case.call, ops.device) / 1e3
    peers = {}
    for peer, call in case.peers.items():
        try:
            peers[peer] = time_ms(call, ops.device) * 1e3
        except Exception as error:  # noqa: BLE001 - it is not what is measured here
            print(f"{name}: {peer}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    return Result(
        name, seconds * 1e6, case.moved_bytes, case.operations, case.moved_bytes / seconds / rates[0],
        case.operations / seconds / rates[1], error, peers,
    )  # fmt: skip


COLUMNS = {
    "us": ("time_us", "{:.1f}"), "band": ("bandwidth_share", "{:.0%}"), "matrix": ("matrix_share", "{:.0%}"),
    "error": ("error", "{:.1e}"), "peers (us)": ("peers", "{}"),
}  # fmt: skip


def table(results: list[Result]) -> str:
    peers = {r.name: ", ".join(f"{name} {time:.1f}" for name, time in r.peers_us.items()) for r in results}
    return markdown_table({r.name: {**asdict(r), "peers": peers[r.name]} for r in results}, COLUMNS, "kernel")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--only", nargs="+", metavar="PART", help="kernels whose name contains one of these")
    parser.add_argument("--tiny", action="store_true", help="small shapes: whether it runs, not how fast")
    options = parser.parse_args()
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    if device.type == "cpu":
        torch.set_num_threads(1)
    ops = select_kernels(device, options.backend)
    bench = Bench(TINY if options.tiny else Shape(), device, dtype)
    rates = (copy_rate(device, 8 if options.tiny else 2048), matrix_rate(device, 256 if options.tiny else 8192, dtype))
    results: list[Result] = []
    failures: dict[str, str] = {}
    report: dict[str, Any] = {
        "machine": machine(device), "backend": ops.name, "dtype": options.dtype,
        "copy_bytes_per_s": rates[0], "matrix_flops": rates[1], "results": [], "failures": failures,
    }  # fmt: skip
    with torch.inference_mode():
        for name, make in bench.cases():
            if options.only and not any(part in name for part in options.only):
                continue
            try:
                results.append(measure(name, make, ops, rates))
            except Exception as error:  # noqa: BLE001 - a kernel that fails must not hide the others
                failures[name] = f"{type(error).__name__}: {error}"[:300]
            if device.type == "cuda":
                torch.cuda.empty_cache()
            report["results"] = [asdict(r) for r in results]
            write_json(options.json, report)  # after each, so that an end by force loses only one
    print(json.dumps(report["machine"]))
    print(f"{ops.name}, {options.dtype}: copy {rates[0] / 1e9:.0f} GB/s, matrix {rates[1] / 1e12:.1f} TFLOP/s")
    print(table(results))
    for name, text in failures.items():
        print(f"FAILED {name}: {text}")
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
