"""Compiles every Triton kernel for a Hopper GPU, down to machine code, on a machine that needs not have one.

    python tests/kernels/compile_for_hopper.py [quick] bfloat16 ...

A program of its own, since the interpreter must be off before triton is imported. It drives the Triton backend over the
shapes of real models on tensors without data, catches each launch instead of doing it, and compiles what would be
launched with the argument types and alignment that Triton would have found. `quick` takes one shape of each kernel.
Prints one line of JSON a kernel: shared memory, registers, stack.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from block_tables import make_block_table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kernels import PagedKV, RaggedBatch
from kernels.sampling import DrawSettings
from kernels.triton.backend import TritonKernels

TARGET = GPUTarget("cuda", 90, 32)
SHARED_BYTES_MAX = 227 << 10
TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
    torch.float64: "*fp64",
}  # fmt: skip

seen: set[str] = set()


def registers(cubin: bytes) -> dict[str, int]:
    """Registers of a thread and bytes of its stack (what was spilled), from the tool that comes with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return {} if found is None else {"registers": int(found[1]), "stack_bytes": int(found[2])}


def compile_instead(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages") if name in kwargs}
    bound = dict(zip(self.arg_names, args)) | kwargs
    assert set(bound) == set(self.arg_names), f"{self.fn.__name__}: {set(bound) ^ set(self.arg_names)}"
    assert len(grid) <= 3
    constants = {p.name for p in self.params if p.is_constexpr}
    general = {p.name for p in self.params if p.do_not_specialize}
    signature: dict[str, str] = {}
    constexprs: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, name in enumerate(self.arg_names):
        value = bound[name]
        if name in constants or (type(value) is int and value == 1 and name not in general):
            signature[name], constexprs[(i,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and name not in general:
                attributes[(i,)] = [["tt.divisibility", 16]]
    key = f"{self.fn.__name__} {signature} {constexprs} {attributes} {options}"
    if key in seen:
        return
    seen.add(key)
    compiled = triton.compile(ASTSource(self, signature, constexprs, attributes), target=TARGET, options=options)
    shared = compiled.metadata.shared
    sizes = {self.arg_names[i]: v for (i,), v in constexprs.items()}
    facts = {"kernel": self.fn.__name__, "shared_bytes": shared} | registers(compiled.asm["cubin"])
    print(json.dumps(facts | options | {"sizes": sizes}), flush=True)
    assert shared <= SHARED_BYTES_MAX, f"{self.fn.__name__}: {shared} bytes of shared memory"


def backend() -> TritonKernels:
    ops = TritonKernels.__new__(TritonKernels)
    ops.device, ops._processor_count = torch.device("cpu"), 132
    return ops


def attention(ops: TritonKernels, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, window: int | None) -> None:
    unit = 2 * 16 * kv_heads * dim
    kv = PagedKV(torch.empty(600 * unit, dtype=dtype), unit, 1, 16, 1, kv_heads, dim)
    table = np.arange(600).reshape(2, 300)
    for starts, ends in (([4095, 20], [4096, 21]), ([4095, 0], [4096, 100])):
        qkv = torch.empty(sum(ends) - sum(starts), heads + 2 * kv_heads, dim, dtype=dtype)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        ops.attention(
            q,
            k,
            v,
            kv,
            0,
            ops.plan_attention(RaggedBatch.from_positions(starts, ends), make_block_table(table, kv), kv, window),
            0.1,
        )
    fixed = ops.make_fixed_decode_plan(256, 256, kv, window)  # no split
    ops.attention(*(torch.empty(256, n, dim, dtype=dtype) for n in (heads, kv_heads, kv_heads)), kv, 0, fixed, 0.1)


def rows(ops: TritonKernels, dtype: torch.dtype) -> None:
    x, weight = torch.empty(8, 4096, dtype=dtype), torch.empty(4096, dtype=dtype)
    ops.add_rms_norm(x, x.clone(), weight, 1e-6)
    ops.rms_norm(x.view(8, 32, 128), torch.empty(32, 128, dtype=dtype), 1e-6, True)
    ops.norm_then_gate(x.view(8, 32, 128), x.view(8, 32, 128), weight[:128], 1e-6)
    ops.gate_then_norm(x, x, weight, 1e-6, 8)
    for width in (128, 64):
        turn = torch.empty(8, width, dtype=dtype)
        ops.rotate(x.view(8, 32, 128), turn, turn)
        ops.norm_and_rotate(x.view(8, 32, 128), torch.empty(32, 128, dtype=dtype), 1e-6, False, turn, turn)
    ops.silu_and_mul(x)
    ops.gelu_tanh_and_mul(x)


def experts(ops: TritonKernels, dtype: torch.dtype, tokens: int) -> None:
    x, chosen = torch.empty(tokens, 2048, dtype=dtype), torch.arange(tokens)[:, None] * 8 % 64 + torch.arange(8)
    gate_up, down = torch.empty(64, 2 * 768, 2048, dtype=dtype), torch.empty(64, 2048, 768, dtype=dtype)
    ops.apply_experts(x, gate_up, down, chosen, torch.empty(tokens, 8, dtype=dtype))


def recurrent(ops: TritonKernels, dtype: torch.dtype) -> None:
    plan = ops.plan_state(RaggedBatch.from_positions([5, 0], [6, 100]), np.array([1, 0]))
    n = 101
    tails = torch.empty(2, 3, 8192, dtype=dtype)
    for silu, bias in ((True, None), (False, torch.empty(8192, dtype=dtype))):
        ops.causal_conv(torch.empty(n, 8192, dtype=dtype), torch.empty(8192, 4, dtype=dtype), bias, tails, plan, silu)
    mixed = torch.empty(n, 8192, dtype=dtype)
    q, k, v = mixed[:, :2048].view(n, 16, 128), mixed[:, 2048:4096].view(n, 16, 128), mixed[:, 4096:].view(n, 32, 128)
    ops.gated_delta(q, k, v, torch.empty(n, 32), torch.empty(n, 32, dtype=dtype), torch.empty(2, 32, 128, 128), plan)
    x, b = mixed.view(n, 128, 64), torch.empty(n, 8, 128, dtype=dtype)
    head = torch.empty(128)
    ops.state_space(x, torch.empty(n, 128), head, b, b, head, torch.empty(2, 128, 64, 128), plan)


def sampling(ops: TritonKernels, dtype: torch.dtype) -> None:
    numbers = torch.empty(4)
    settings = DrawSettings(numbers, numbers, numbers.int(), numbers, numbers.double())
    ops.draw(torch.empty(4, 151936, dtype=dtype), settings)


def main(dtypes: list[str], quick: bool) -> None:
    JITFunction.run = compile_instead  # type: ignore[method-assign]
    ops = backend()
    for name in dtypes:
        dtype = getattr(torch, name)
        rows(ops, dtype)
        attention(ops, dtype, 32, 8, 128, None)
        experts(ops, dtype, 1024)
        recurrent(ops, dtype)
        sampling(ops, dtype)
        if not quick:
            attention(ops, dtype, 16, 8, 128, 1024)
            attention(ops, dtype, 16, 4, 256, None)
            attention(ops, dtype, 12, 12, 64, None)
            experts(ops, dtype, 1)


if __name__ == "__main__":
    main([name for name in sys.argv[1:] if name != "quick"] or ["bfloat16"], "quick" in sys.argv)
