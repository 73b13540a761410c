"""The native CPU operations against fp64, with every instruction set this CPU has: shapes, bounds and bad input."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from kernels import PagedKV, RaggedBatch
from kernels.cpu import _native
from kernels.cpu.backend import CpuKernels
from kernels.reference.backend import ReferenceKernels
from tests.kernels.block_tables import make_block_table

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(params=_native.instruction_sets())
def ops(request):
    _native.use(request.param)
    yield CpuKernels(CPU)
    _native.use(_native.instruction_sets()[0])


def test_products_without_fused_multiply_add_are_refused(ops):
    if _native.has_products():
        pytest.skip("this instruction set has it")
    with pytest.raises(RuntimeError, match="products need fused multiply-add, which is not in baseline"):
        _native.product(0, 1, 1, 0, 1, 1, 0, 0, 1)


@pytest.fixture(params=list(TOLERANCE), ids=str)
def dtype(request):
    return request.param


def relative_error(actual, exact):
    assert actual.shape == exact.shape
    return ((actual.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30)).item()


def filled_pool(rng, dtype, lens, block_size, per_unit, layers, kv_heads, dim, magnitude=1.0):
    """A pool that is NaN outside the contexts of `lens`, and its block table, which is nonsense past each context."""
    row = kv_heads * dim
    widths = [-(-n // block_size) for n in lens]
    units = -(-sum(widths) // per_unit) + 2
    unit = per_unit * 2 * layers * block_size * row + 2 * row
    kv = PagedKV(
        torch.full((units * unit,), float("nan"), dtype=dtype), unit, per_unit, block_size, layers, kv_heads, dim
    )
    table = np.full((len(lens), max(widths) + 1), -7)
    blocks = rng.sample(range(units * per_unit), sum(widths))
    for i, (n, width) in enumerate(zip(lens, widths)):
        table[i, :width] = [blocks.pop() for _ in range(width)]
        positions = np.arange(n)
        rows = kv.compute_block_rows(table[i, positions // block_size]) + positions % block_size
        for layer in range(layers):
            for view in kv.view_layer(layer):
                view[rows] = (torch.randn(n, kv_heads, dim) * magnitude).to(dtype)
    return kv, table


def twin(kv):
    sizes = (kv.elems_per_unit, kv.blocks_per_unit, kv.block_size, kv.num_layers, kv.num_kv_heads, kv.head_dim)
    return PagedKV(kv.buffer.double(), *sizes)


def compare(ops, kv, table, starts, ends, heads, layer, window, scale):
    """Relative error of one step; also that it stored what it was given and wrote nothing else."""
    batch, exact, exact_kv = RaggedBatch.from_positions(starts, ends), ReferenceKernels(CPU), twin(kv)
    qkv = torch.randn(len(batch.positions), heads + 2 * kv.num_kv_heads, kv.head_dim).to(kv.buffer.dtype)
    q, k, v = qkv.split([heads, kv.num_kv_heads, kv.num_kv_heads], 1)
    plan = ops.plan_attention(batch, make_block_table(table, kv), kv, window)
    assert isinstance(plan, _native.AttentionPlan)
    output = ops.attention(q, k, v, kv, layer, plan, scale)
    expected = exact.attention(
        q.double(),
        k.double(),
        v.double(),
        exact_kv,
        layer,
        exact.plan_attention(batch, make_block_table(table, exact_kv), exact_kv, window),
        scale,
    )
    assert torch.equal(kv.buffer.double().nan_to_num(7.0), exact_kv.buffer.nan_to_num(7.0))
    assert output.dtype == q.dtype
    return relative_error(output, expected)


@pytest.mark.parametrize("dim", [16, 48, 64, 80, 128, 256])
@pytest.mark.parametrize("window", [None, 1, 70])
def test_decode(ops, dtype, rng, dim, window):
    kv_heads = rng.choice((1, 2, 3))
    group = rng.choice((1, 2, 3, 4, 5, 7, 8))
    block_size, per_unit = rng.choice(((16, 1), (16, 3), (1, 2), (32, 1), (24, 2)))
    lens = [1, block_size, block_size + 1, 63, 64, 65, 130, rng.randrange(200, 600)]
    rng.shuffle(lens)
    kv, table = filled_pool(rng, dtype, lens, block_size, per_unit, 2, kv_heads, dim)
    starts = [n - 1 for n in lens]
    error = compare(ops, kv, table, starts, lens, group * kv_heads, rng.randrange(2), window, dim**-0.5)
    assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("dim", [16, 32, 48, 80, 128, 256])
@pytest.mark.parametrize("window", [None, 1, 5, 90])
def test_chunks_short_and_long_beside_decoding(ops, dtype, rng, dim, window):
    kv_heads, group = rng.choice((1, 2, 3)), rng.choice((1, 2, 3, 4, 5, 8))
    block_size, per_unit = rng.choice(((16, 1), (16, 3), (1, 2), (32, 1), (24, 2)))
    queries = [1, 1, 2, 3, 4, 9, 63, 64, 65, 1 + rng.randrange(250)]
    lens = [n + rng.choice((0, 1, 15, 64, 130)) for n in queries]
    order = sorted(range(len(lens)), key=lambda i: queries[i] > 1)
    queries, lens = [queries[i] for i in order], [lens[i] for i in order]
    kv, table = filled_pool(rng, dtype, lens, block_size, per_unit, 2, kv_heads, dim)
    starts = [n - count for n, count in zip(lens, queries)]
    error = compare(ops, kv, table, starts, lens, group * kv_heads, rng.randrange(2), window, dim**-0.5)
    assert error < TOLERANCE[dtype]


def test_many_query_heads_share_a_kv_head(ops, dtype, rng):
    """More than there are rows in a block of queries."""
    kv, table = filled_pool(rng, dtype, [30], 16, 1, 1, 1, 16)
    assert compare(ops, kv, table, [20], [30], 400, 0, None, 0.25) < TOLERANCE[dtype]


def test_chunks_with_sharp_scores(ops, rng):
    lens = [200, 333]
    kv, table = filled_pool(rng, torch.float32, lens, 16, 1, 1, 1, 64, magnitude=30.0)
    assert compare(ops, kv, table, [0, 100], lens, 3, 0, None, 1.0) < 1e-4


def test_sharp_scores(ops, rng):
    """Scores of hundreds: all the weight on few keys, the largest one anywhere in the context."""
    lens = [1, 200, 333]
    kv, table = filled_pool(rng, torch.float32, lens, 16, 1, 1, 1, 64, magnitude=30.0)
    assert compare(ops, kv, table, [n - 1 for n in lens], lens, 3, 0, None, 1.0) < 1e-4


def test_threads_share_the_work(ops, rng):
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        lens = [2500, 1, 3000, 700]
        kv, table = filled_pool(rng, torch.bfloat16, lens, 16, 1, 1, 4, 128)
        assert compare(ops, kv, table, [n - 1 for n in lens], lens, 8, 0, None, 0.1) < 1e-2
        lens = [400, 300, 700]
        kv, table = filled_pool(rng, torch.bfloat16, lens, 16, 1, 1, 4, 128)
        assert compare(ops, kv, table, [399, 299, 100], lens, 8, 0, None, 0.1) < 1e-2
    finally:
        torch.set_num_threads(threads)


LOAD_WITH_SMALL_SIGNAL_STACK = """
import ctypes, sys
from importlib.util import module_from_spec, spec_from_file_location

class Stack(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

stack = ctypes.create_string_buffer(8192)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(stack), 0, 8192)), None) == 0
spec = spec_from_file_location("_native", sys.argv[1])
native = module_from_spec(spec)
spec.loader.exec_module(native)
print(*native.instruction_sets())
"""


@pytest.mark.skipif("amx" not in _native.instruction_sets(), reason="this CPU has no AMX")
def test_no_tiles_without_the_kernels_permission():
    """Linux refuses tiles to a process with a signal stack too small for their registers."""
    command = [sys.executable, "-c", LOAD_WITH_SMALL_SIGNAL_STACK, _native.__file__]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.split() == [name for name in _native.instruction_sets() if name != "amx"]


def test_sequences_without_queries_change_nothing(rng):
    ops = CpuKernels(CPU)
    kv, table = filled_pool(rng, torch.float32, [7, 20], 16, 1, 1, 2, 16)
    assert compare(ops, kv, table, [6, 20], [7, 20], 4, 0, None, 0.25) < 1e-5


def test_blocks_outside_the_pool_are_refused(rng):
    ops = CpuKernels(CPU)
    kv, table = filled_pool(rng, torch.float32, [40], 16, 1, 1, 2, 16)
    for bad in (-1, 10**6):
        table[0, 1] = bad
        with pytest.raises(ValueError, match=f"block {bad}: expected one inside the pool"):
            ops.plan_attention(RaggedBatch.from_positions([39], [40]), make_block_table(table, kv), kv, None)
    with pytest.raises(ValueError, match=r"sequence 0 of 90 tokens: expected .* all its blocks"):
        ops.plan_attention(RaggedBatch.from_positions([89], [90]), make_block_table(table, kv), kv, None)


@pytest.mark.parametrize("size", [1, 15, 16, 33, 96])
def test_rows_of_any_length(ops, dtype, rng, size):
    exact = ReferenceKernels(CPU)
    x, residual = torch.randn(2, 5, size).to(dtype).unbind()
    weight = torch.randn(size).to(dtype)
    output = ops.rms_norm(x, weight, 1e-6)
    assert relative_error(output, exact.rms_norm(x.double(), weight.double(), 1e-6)) < TOLERANCE[dtype]
    normed, total = ops.add_rms_norm(x, residual.clone(), weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, ops.rms_norm(total, weight, 1e-6))
    gated = torch.randn(5, 2 * size).to(dtype) * 10
    assert relative_error(ops.silu_and_mul(gated), exact.silu_and_mul(gated.double())) < TOLERANCE[dtype]
    heads, angle = torch.randn(5, 9, 2 * size + 3).to(dtype)[:, 2:6], torch.randn(5, size)
    cos, sin = torch.cat((angle.cos(),) * 2, -1).to(dtype), torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
    expected = exact.rotate(heads.double(), cos.double(), sin.double())
    assert relative_error(ops.rotate(heads, cos, sin), expected) < TOLERANCE[dtype]


def test_rounding_to_bf16_is_torchs(ops):
    bits = torch.randint(0, 2**16, (4096,), dtype=torch.int32).to(torch.int16)
    x = torch.cat((bits.view(torch.bfloat16), torch.tensor([float("inf"), -float("inf"), float("nan")]).bfloat16()))[
        None
    ]
    zeros = torch.zeros_like(x)
    _, total = ops.add_rms_norm(x, zeros, torch.ones(x.shape[1], dtype=torch.bfloat16), 1e-6)
    assert torch.equal(total.nan_to_num(1.5), (x + 0).nan_to_num(1.5))
    halves = torch.randn(1, 4096).bfloat16(), torch.randn(1, 4096).bfloat16()
    _, total = ops.add_rms_norm(halves[0], halves[1].clone(), torch.ones(4096, dtype=torch.bfloat16), 1e-6)
    assert torch.equal(total, halves[0] + halves[1])


def test_long_contexts_lose_nothing(ops, rng):
    """Equal values come back as they are, however many tiles they are summed over."""
    lens = [20_000]
    kv, table = filled_pool(rng, torch.float32, lens, 16, 1, 1, 1, 16)
    v_rows = kv.view_layer(0)[1]
    v_rows[kv.compute_block_rows(table[0, :-1])[:, None] + np.arange(16)] = 0.75
    q, k = torch.randn(1, 2, 16), torch.randn(1, 1, 16)
    plan = ops.plan_attention(RaggedBatch.from_positions([19_999], lens), make_block_table(table, kv), kv, None)
    output = ops.attention(q, k, torch.full((1, 1, 16), 0.75), kv, 0, plan, 0.25)
    assert relative_error(output, torch.full_like(output, 0.75)) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("threads", [1, 2])
def test_many_sequences_with_one_prefix_in_threads(ops, dtype, rng, threads):
    torch.set_num_threads(threads)
    try:
        kv, table = filled_pool(rng, dtype, [2100] * 40, 16, 1, 1, 2, 64)
        table[1:, :128] = table[0, :128]
        ends = [2048 + rng.randrange(2, 50) for _ in range(40)]
        assert compare(ops, kv, table, [end - 1 for end in ends], ends, 4, 0, None, 0.125) < TOLERANCE[dtype]
    finally:
        torch.set_num_threads(1)
