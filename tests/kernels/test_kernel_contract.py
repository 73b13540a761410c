"""Every backend against the torch reference in fp64: fresh random inputs, strided units, poisoned memory."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels import Kernels, PagedKV, RaggedBatch, select_kernels
from kernels.cpu import packed
from kernels.cpu.packed import BlockedMatrix, NativeMatrix, pack_matrix, should_use_native_products
from kernels.reference.backend import ReferenceKernels
from tests.kernels.block_tables import make_block_table

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
CPU = torch.device("cpu")
INSTRUCTION_SETS = packed._native.instruction_sets()

GPU = pytest.param("triton-gpu", marks=pytest.mark.gpu)


@pytest.fixture(params=["cpu", "reference", "triton", GPU])
def ops(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "triton-gpu":
        request.getfixturevalue("on_gpu")
        return select_kernels("cuda", "triton")
    if request.param == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is a GPU: set TRITON_INTERPRET=1 to test the Triton kernels on CPU tensors")
    return select_kernels("cpu", request.param)


@pytest.fixture(params=list(TOLERANCE), ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def scan_tolerances(ops: Kernels, dtype: torch.dtype) -> tuple[float, float]:
    """(of outputs, of states) of the recurrences. On a GPU their products are TF32's, unless inputs are fp32."""
    if dtype == torch.float32 or ops.device.type == "cpu":
        return TOLERANCE[dtype], 1e-5
    return TOLERANCE[torch.bfloat16], 5e-3


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    assert actual.shape == exact.shape
    return ((actual.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30)).item()


def make_pool(
    dtype: torch.dtype, block_size: int, layers: int, kv_heads: int, dim: int, per_unit: int, units: int
) -> PagedKV:
    """A poisoned pool whose units have a tail that belongs to no block."""
    row = kv_heads * dim
    unit_elems = per_unit * 2 * layers * block_size * row + (3 * row if per_unit > 1 else 0)
    buffer = torch.full((units * unit_elems,), float("nan"), dtype=dtype)
    return PagedKV(buffer, unit_elems, per_unit, block_size, layers, kv_heads, dim)


def twin(kv: PagedKV) -> PagedKV:
    """The same pool in fp64."""
    return replace(kv, buffer=kv.buffer.double())


def random_tables(rng: random.Random, lens: list[int], kv: PagedKV) -> np.ndarray:
    blocks = rng.sample(
        range(kv.buffer.numel() // kv.elems_per_unit * kv.blocks_per_unit), sum(-(-n // kv.block_size) for n in lens)
    )
    table = np.full((len(lens), max(-(-n // kv.block_size) for n in lens) + 1), 10**6)  # past the context: never read
    for i, n in enumerate(lens):
        for j in range(-(-n // kv.block_size)):
            table[i, j] = blocks.pop()
    return table


@pytest.mark.parametrize("window", [None, 1, 9, 40])
@pytest.mark.parametrize(("block_size", "per_unit"), [(16, 1), (16, 3), (1, 2), (32, 1)])
def test_attention(ops, dtype, rng, window, block_size, per_unit):
    heads, kv_heads, dim = rng.choice([(4, 2, 16), (4, 4, 8), (6, 1, 32), (8, 2, 24)])
    layers, layer = 3, rng.randrange(3)
    kv = make_pool(dtype, block_size, layers, kv_heads, dim, per_unit, 900 // block_size // per_unit + 40)
    lens = [rng.choice((1, 15, 16, 17, 33, 64)) for _ in range(4)] + [rng.choice((2, 31, 70, 120)) for _ in range(3)]
    starts = [n - 1 for n in lens[:4]] + [rng.choice((0, n // 3, n - 2)) for n in lens[4:]]
    table = random_tables(rng, lens, kv)
    exact, exact_kv = ReferenceKernels(ops.device), twin(kv)

    def run(firsts: list[int], ends: list[int], rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        batch = RaggedBatch.from_positions(firsts, ends)
        # q, k and v are views into one wider tensor, as after a fused projection
        qkv = torch.randn(len(batch.positions), heads + 2 * kv_heads, dim).to(dtype)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        output = ops.attention(
            q, k, v, kv, layer, ops.plan_attention(batch, make_block_table(rows, kv), kv, window), dim**-0.5
        )
        expected = exact.attention(
            q.double(), k.double(), v.double(), exact_kv, layer,
            exact.plan_attention(batch, make_block_table(rows, exact_kv), exact_kv, window), dim**-0.5,
        )  # fmt: skip
        return output, expected

    fill = [i for i in range(len(lens)) if starts[i] > 1]
    if fill:  # what was cached before this step
        found, expected = run([0] * len(fill), [starts[i] for i in fill], table[fill])
        assert relative_error(found, expected) < TOLERANCE[dtype]
    single = [i for i in range(len(lens)) if starts[i] == 1]
    if single:
        run([0] * len(single), [1] * len(single), table[single])
    order = sorted(range(len(lens)), key=lambda i: lens[i] - starts[i] > 1)
    found, expected = run([starts[i] for i in order], [lens[i] for i in order], table[order])
    assert found.dtype == dtype
    assert relative_error(found, expected) < TOLERANCE[dtype]
    if dtype == torch.float32:  # what is stored is what was given, and nothing else was written
        assert torch.equal(kv.buffer.double().nan_to_num(7.0), exact_kv.buffer.nan_to_num(7.0))


def test_decode_buckets_of_very_different_lengths(ops, rng):
    kv = make_pool(torch.float32, 16, 1, 2, 16, 1, 400)
    lens = [1, 2000, 3, 900, 17, 1500, 2, 16]
    rng.shuffle(lens)
    table = random_tables(rng, lens, kv)
    kv.buffer.normal_()
    exact, exact_kv = ReferenceKernels(ops.device), twin(kv)
    batch = RaggedBatch.from_positions([n - 1 for n in lens], lens)
    q, k, v = torch.randn(8, 4, 16), torch.randn(8, 2, 16), torch.randn(8, 2, 16)
    output = ops.attention(q, k, v, kv, 0, ops.plan_attention(batch, make_block_table(table, kv), kv, None), 0.25)
    plan = exact.plan_attention(batch, make_block_table(table, exact_kv), exact_kv, None)
    expected = exact.attention(q.double(), k.double(), v.double(), exact_kv, 0, plan, 0.25)
    assert relative_error(output, expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prefixes_that_a_batch_shares(ops, dtype, rng):
    """Some decode behind one prefix, some behind a longer one that begins with it, one behind another, one alone."""
    block_size, per_unit = rng.choice(((16, 1), (16, 3), (24, 2), (128, 1)))
    heads, kv_heads, dim = rng.choice(((4, 2, 16), (6, 1, 32), (3, 3, 48)))
    kv = make_pool(dtype, block_size, 2, kv_heads, dim, per_unit, 9000 // block_size // per_unit + 90)
    kv.buffer.normal_()
    per_row = [1100 // block_size * block_size, 1500 // block_size * block_size]
    free = rng.sample(range(kv.buffer.numel() // kv.elems_per_unit * kv.blocks_per_unit), 9000 // block_size + 60)

    def blocks(tokens: int) -> list[int]:
        return [free.pop() for _ in range(-(-tokens // block_size))]

    first = blocks(per_row[0])
    longer = first + blocks(per_row[1] - per_row[0])
    other = blocks(1024)
    tables, lens = [], []
    for prefix, own_blocks in (
        [(first, rng.choice((1, 5, 70))) for _ in range(2)] + [(longer, rng.choice((1, 17, 130))) for _ in range(3)]
        + [(other, 40), (other, 1), ([], 1200), ([], 3), (first, 90)]
    ):  # fmt: skip
        tables.append(prefix + blocks(own_blocks))
        lens.append(len(prefix) * block_size + own_blocks)
    starts = [n - 1 for n in lens[:-1]] + [lens[-1] - 60]  # the last one is a prompt
    order = [*rng.sample(range(len(lens) - 1), len(lens) - 1), len(lens) - 1]
    table = np.full((len(lens), max(map(len, tables))), 10**6)
    for row, i in enumerate(order):
        table[row, : len(tables[i])] = tables[i]
    batch = RaggedBatch.from_positions([starts[i] for i in order], [lens[i] for i in order])
    exact = ReferenceKernels(CPU)
    exact_kv = twin(kv)
    q, k, v = (torch.randn(len(batch.positions), n, dim).to(dtype) for n in (heads, kv_heads, kv_heads))
    for window in (None, 600):
        output = ops.attention(
            q, k, v, kv, 1, ops.plan_attention(batch, make_block_table(table, kv), kv, window), dim**-0.5
        )
        plan = exact.plan_attention(batch, make_block_table(table, exact_kv), exact_kv, window)
        expected = exact.attention(q.double(), k.double(), v.double(), exact_kv, 1, plan, dim**-0.5)
        assert relative_error(output, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("tokens", [1, 17])
def test_norms(ops, dtype, rng, zero_centred, tokens):
    x, residual, weight = torch.randn(3, tokens, 48).to(dtype).unbind()
    weight, exact = weight[0].contiguous(), ReferenceKernels(ops.device)
    output = ops.rms_norm(x, weight, 1e-6, zero_centred)
    assert relative_error(output, exact.rms_norm(x.double(), weight.double(), 1e-6, zero_centred)) < TOLERANCE[dtype]
    expected_norm, total = ops.add_rms_norm(x, residual.clone(), weight, 1e-6, zero_centred)
    expected, expected_total = exact.add_rms_norm(x.double(), residual.double(), weight.double(), 1e-6, zero_centred)
    assert relative_error(total, expected_total) < TOLERANCE[dtype]
    assert relative_error(expected_norm, expected) < TOLERANCE[dtype]
    heads, gains = torch.randn(tokens, 5, 16).to(dtype), torch.randn(3, 16).to(dtype)
    output = ops.rms_norm(heads[:, 1:4], gains, 1e-6, zero_centred)
    assert (
        relative_error(output, exact.rms_norm(heads[:, 1:4].double(), gains.double(), 1e-6, zero_centred))
        < TOLERANCE[dtype]
    )


@pytest.mark.parametrize("width", [16, 4])
def test_rotate(ops, dtype, rng, width):
    x, angle = torch.randn(9, 6, 16).to(dtype), torch.randn(9, width // 2)
    cos = torch.cat((angle.cos(), angle.cos()), -1).to(dtype)
    sin = torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
    first, second, rest = x[:, 1:5].double().split([width // 2, width // 2, 16 - width], -1)
    c, s = cos.double()[:, None, : width // 2], sin.double()[:, None, width // 2 :]
    expected = torch.cat((first * c - second * s, second * c + first * s, rest), -1)
    assert relative_error(ops.rotate(x[:, 1:5], cos, sin), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("width", [16, 4])
@pytest.mark.parametrize("zero_centred", [False, True])
def test_norm_and_rotate(ops, dtype, rng, width, zero_centred):
    x, angle = torch.randn(9, 6, 16).to(dtype)[:, 1:5], torch.randn(9, width // 2)
    cos = torch.cat((angle.cos(), angle.cos()), -1).to(dtype)
    sin = torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
    for gains in (torch.randn(4, 16).to(dtype), torch.randn(16).to(dtype)):
        output = ops.norm_and_rotate(x, gains, 1e-6, zero_centred, cos, sin)
        gain = gains.double() + (1 if zero_centred else 0)
        normed = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * gain
        first, second, rest = normed.split([width // 2, width // 2, 16 - width], -1)
        c, s = cos.double()[:, None, : width // 2], sin.double()[:, None, width // 2 :]
        expected = torch.cat((first * c - second * s, second * c + first * s, rest), -1)
        assert relative_error(output, expected) < TOLERANCE[dtype]


def test_gated_activations(ops, dtype, rng):
    x = torch.randn(7, 64).to(dtype)
    gate, up = x.double().chunk(2, -1)
    assert relative_error(ops.silu_and_mul(x), gate * gate.sigmoid() * up) < TOLERANCE[dtype]
    gelu = torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert relative_error(ops.gelu_tanh_and_mul(x), gelu) < TOLERANCE[dtype]


def naive_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of each token's experts in fp64, one expert of one token at a time."""
    output = torch.zeros_like(x, dtype=torch.float64)
    for token, values in enumerate(x.double()):
        for expert, weight in zip(expert_ids[token].tolist(), weights[token].double(), strict=True):
            gate, up = (gate_up[expert].double() @ values).chunk(2)
            output[token] += weight * (down[expert].double() @ (gate * gate.sigmoid() * up))
    return output


@pytest.mark.parametrize("tokens", [1, 13])
def test_experts(ops, dtype, rng, tokens):
    x, weights = torch.randn(tokens, 32).to(dtype), torch.rand(tokens, 2).to(dtype)
    gate_up, down = (torch.randn(6, 40, 32) / 6).to(dtype), (torch.randn(6, 32, 20) / 4).to(dtype)
    expert_ids = torch.stack([torch.randperm(6)[:2] for _ in range(tokens)])
    output = ops.apply_experts(x, gate_up, down, expert_ids, weights)
    assert relative_error(output, naive_experts(x, gate_up, down, expert_ids, weights)) < 2 * TOLERANCE[dtype]


def test_unknown_backends_are_refused():
    with pytest.raises(ValueError, match="attention backend 'nope': expected one of auto, "):
        select_kernels("cpu", "nope")


def state_batch(rng: random.Random) -> tuple[RaggedBatch, np.ndarray, list[int]]:
    """A ragged batch with its state units: some single tokens, some chunks of awkward lengths."""
    lens = [1] * rng.randrange(3) + [rng.choice((2, 3, 63, 64, 65, 130)) for _ in range(rng.randrange(1, 3))]
    units = np.array(rng.sample(range(9), len(lens)))
    return RaggedBatch.from_positions([5] * len(lens), [5 + n for n in lens]), units, lens


def strided_states(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """[9 units, *shape] views with a gap between units, as in the pool."""
    size = int(np.prod(shape))
    return torch.randn(9 * (size + 16)).to(dtype).view(9, -1)[:, 8 : 8 + size].unflatten(1, shape)


def untouched(before: torch.Tensor, after: torch.Tensor, units: np.ndarray) -> bool:
    rest = [u for u in range(9) if u not in units]
    return torch.equal(before[rest], after[rest])


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("silu", [True, False])
def test_causal_conv(ops, dtype, rng, width, silu):
    batch, units, _ = state_batch(rng)
    x, weight = torch.randn(len(batch.positions), 24).to(dtype), torch.randn(24, width).to(dtype)
    bias = torch.randn(24).to(dtype) if rng.random() < 0.5 else None
    tails = strided_states((width - 1, 24), dtype)
    before = tails.clone()
    output = ops.causal_conv(x, weight, bias, tails, ops.plan_state(batch, units), silu)
    for i, unit in enumerate(units):
        part = slice(*batch.query_starts[i : i + 2])
        inputs = torch.cat((before[unit], x[part])).double()
        expected = torch.nn.functional.conv1d(
            inputs.t()[None], weight.double()[:, None], None if bias is None else bias.double(), groups=24
        )[0].t()
        expected = torch.nn.functional.silu(expected) if silu else expected
        assert relative_error(output[part], expected) < TOLERANCE[dtype]
        assert torch.equal(tails[unit], torch.cat((before[unit], x[part]))[1 - width :])
    assert untouched(before, tails, units)


@pytest.mark.parametrize("fast_decay", [False, True])
def test_gated_delta(ops, dtype, rng, fast_decay):
    batch, units, _ = state_batch(rng)
    tokens, key_heads, value_heads = len(batch.positions), 2, rng.choice((2, 4))
    mixed = torch.randn(tokens, 4 * 16 + value_heads * 8).to(dtype)  # q, k and v lie in one tensor
    q, k = mixed[:, :32].view(tokens, key_heads, 16), mixed[:, 32:64].view(tokens, key_heads, 16)
    v = mixed[:, 64:].view(tokens, value_heads, 8)
    log_decay = -torch.rand(tokens, value_heads) * (20.0 if fast_decay else 0.2)
    rate = torch.rand(tokens, value_heads).to(dtype)
    states = strided_states((value_heads, 16, 8), torch.float32)
    before = states.clone()
    outputs, of_states = scan_tolerances(ops, dtype)
    found = ops.gated_delta(q, k, v, log_decay, rate, states, ops.plan_state(batch, units))
    assert found.dtype == dtype
    unit = torch.nn.functional.normalize
    for i, at in enumerate(units):
        state = before[at].double()
        expected = []
        for t in range(*batch.query_starts[i : i + 2]):
            keys, queries = (x[t].double().repeat_interleave(value_heads // 2, 0) for x in (k, q))
            keys, queries = unit(keys, dim=-1), unit(queries, dim=-1) / 4
            state = state * log_decay[t].double().exp()[:, None, None]
            told = torch.einsum("hkv,hk->hv", state, keys)
            state = state + torch.einsum("hk,hv->hkv", keys, rate[t].double()[:, None] * (v[t].double() - told))
            expected.append(torch.einsum("hkv,hk->hv", state, queries))
        part = slice(*batch.query_starts[i : i + 2])
        assert relative_error(found[part], torch.stack(expected)) < outputs
        assert relative_error(states[at], state) < of_states
    assert untouched(before, states, units)


@pytest.mark.parametrize("fast_decay", [False, True])
def test_state_space(ops, dtype, rng, fast_decay):
    batch, units, _ = state_batch(rng)
    tokens, heads, groups = len(batch.positions), 4, rng.choice((1, 2, 4))
    x, b, c = torch.randn(tokens, heads, 8), torch.randn(tokens, groups, 16), torch.randn(tokens, groups, 16)
    x, b, c = x.to(dtype), b.to(dtype), c.to(dtype)
    dt, rate = torch.rand(tokens, heads) + 0.01, -torch.rand(heads) * (30.0 if fast_decay else 0.5) - 0.01
    skip = torch.randn(heads)
    states = strided_states((heads, 8, 16), torch.float32)
    before = states.clone()
    outputs, of_states = scan_tolerances(ops, dtype)
    output = ops.state_space(x, dt, rate, b, c, skip, states, ops.plan_state(batch, units))
    assert output.dtype == dtype
    for i, at in enumerate(units):
        state = before[at].double()
        expected = []
        for t in range(*batch.query_starts[i : i + 2]):
            into, outof = (y[t].double().repeat_interleave(heads // groups, 0) for y in (b, c))
            state = state * (dt[t] * rate).double().exp()[:, None, None]
            state = state + torch.einsum("hp,hn->hpn", dt[t].double()[:, None] * x[t].double(), into)
            expected.append(torch.einsum("hpn,hn->hp", state, outof) + skip.double()[:, None] * x[t].double())
        part = slice(*batch.query_starts[i : i + 2])
        assert relative_error(output[part], torch.stack(expected)) < outputs
        assert relative_error(states[at], state) < of_states
    assert untouched(before, states, units)


def test_gated_norms(ops, dtype, rng):
    x, gate = torch.randn(2, 5, 4, 16).to(dtype).unbind()
    weight, wide_weight = torch.randn(16).to(dtype), torch.randn(64).to(dtype)
    gated = gate.double() * gate.double().sigmoid()

    def norm(value: torch.Tensor) -> torch.Tensor:
        return value / (value.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()

    output = ops.norm_then_gate(x, gate, weight, 1e-6)
    assert relative_error(output, norm(x.double()) * weight.double() * gated) < TOLERANCE[dtype]
    flat, flat_gate = x.view(5, 64), gate.view(5, 64)
    for groups in (1, 4):
        expected = norm((x.double() * gated).view(5, groups, -1)).view(5, 64) * wide_weight.double()
        output = ops.gate_then_norm(flat, flat_gate, wide_weight, 1e-6, groups)
        assert relative_error(output, expected) < TOLERANCE[dtype]


@pytest.fixture(params=["avx512bf16", "avx512", "avx2", "2 threads", "oneDNN", "oneDNN alone"])
def packing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    """The layout of packed matrices."""
    if request.param.startswith("oneDNN"):
        monkeypatch.setattr(packed, "should_use_native_products", lambda: False)
        if request.param == "oneDNN alone":
            monkeypatch.setattr(packed, "SMALL_PRODUCT_MAX", 0)
        yield BlockedMatrix
        return
    chosen = "avx2" if request.param == "2 threads" else request.param
    if chosen not in INSTRUCTION_SETS:
        pytest.skip(f"this CPU has no {chosen}")
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if request.param == "2 threads" else 1)
    packed._native.use(chosen)
    yield NativeMatrix if should_use_native_products() else BlockedMatrix
    torch.set_num_threads(threads)
    packed._native.use(INSTRUCTION_SETS[0])


# 5000 inputs: more than a stretch of the native products. 1.1 million weights: enough for two threads.
@pytest.mark.parametrize("shape", [(24, 40), (1000, 48), (1100, 1000), (64, 2), (70, 5000)])
@pytest.mark.parametrize("tokens", [1, 3, 6, 7, 12, 13, 24, 25, 97, 200])
def test_packed_matrices(rng, packing, shape, tokens):
    weight, x = torch.randn(shape).bfloat16() / 5, torch.randn(tokens, shape[1]).bfloat16()
    bias = torch.randn(shape[0]).bfloat16() if rng.random() < 0.5 else None
    if rng.random() < 0.5:
        x = torch.randn(tokens, shape[1] + 3).bfloat16()[:, 1:-2]
    matrix = pack_matrix(weight)
    if matrix is None:
        pytest.skip("this CPU does not multiply bf16 in hardware")
    assert isinstance(matrix, packing)
    with torch.inference_mode():
        output = matrix.multiply(x, bias)
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    assert output.dtype == torch.bfloat16
    # Sums are fp32: what is left is the rounding of the result.
    assert relative_error(output, exact) < 2.5e-3
    assert pack_matrix(weight.float()) is None
