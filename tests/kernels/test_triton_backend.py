"""What the contract does not reach: split contexts, plans of fixed shape, padding, hard inputs, dispatch."""

from __future__ import annotations

import mmap
import os
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels import PagedKV, RaggedBatch, select_kernels
from kernels.reference.backend import ReferenceKernels
from tests.kernels.block_tables import make_block_table

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a GPU, or Triton's interpreter: set TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = (
    [
        pytest.mark.long,
    ]
    if INTERPRETED
    else [pytest.mark.gpu, pytest.mark.usefixtures("on_gpu")]
)
interpreter_only = pytest.mark.skipif(not INTERPRETED, reason="of the interpreter")


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    assert actual.shape == exact.shape
    return ((actual.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30)).item()


def filled_pool(dtype: torch.dtype, lens: list[int], kv_heads: int, dim: int) -> tuple[PagedKV, np.ndarray]:
    """A pool of 16-token blocks, poisoned outside the contexts, and the block table."""
    widths = [-(-n // 16) for n in lens]
    unit = 2 * 2 * 16 * kv_heads * dim
    count = sum(widths) + 3
    kv = PagedKV(torch.full((count * unit,), float("nan"), dtype=dtype), unit, 1, 16, 2, kv_heads, dim)
    blocks = torch.randperm(count).cpu().numpy()
    table = np.full((len(lens), max(widths)), 10**6)
    at = 0
    for i, (n, width) in enumerate(zip(lens, widths, strict=True)):
        table[i, :width] = blocks[at : at + width]
        at += width
        for layer in range(2):
            for view in kv.view_layer(layer):
                rows = kv.compute_block_rows(table[i, :width])[:, None] + np.arange(16)
                view[rows.reshape(-1)[:n]] = torch.randn(n, kv_heads, dim).to(dtype)
    return kv, table


def twin(kv: PagedKV) -> PagedKV:
    return replace(kv, buffer=kv.buffer.double())


@pytest.mark.parametrize("window", [None, 700])
def test_decode_over_split_contexts(rng, window):
    ops = select_kernels(DEVICE, "triton")
    ops._processor_count = 20  # as on a device that has some: contexts are split, some into parts that they do not have
    lens = [1, 17, rng.randrange(513, 1200)]
    kv, table = filled_pool(torch.float32, lens, 2, 16)
    q, k, v = torch.randn(3, 6, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    batch, exact, exact_kv = RaggedBatch.from_positions([n - 1 for n in lens], lens), ReferenceKernels(DEVICE), twin(kv)
    plan = ops.plan_attention(batch, make_block_table(table, kv), kv, window)
    assert plan.split_count > 1
    output = ops.attention(q, k, v, kv, 1, plan, 0.3)
    expected = exact.attention(
        q.double(),
        k.double(),
        v.double(),
        exact_kv,
        1,
        exact.plan_attention(batch, make_block_table(table, exact_kv), exact_kv, window),
        0.3,
    )
    assert relative_error(output, expected) < 1e-5


def test_a_fixed_plan_is_refilled_and_padded(rng):
    ops, exact = select_kernels(DEVICE, "triton"), ReferenceKernels(DEVICE)
    lens = [5, 16, 33]
    kv, table = filled_pool(torch.float32, lens, 2, 16)
    fixed = ops.make_fixed_decode_plan(4, 8, kv, None)
    for members in ([0, 1, 2], [2], [1, 0]):
        before = kv.buffer.clone()
        some = [lens[i] for i in members]
        batch = RaggedBatch.from_positions([n - 1 for n in some], some)
        kept = make_block_table(table, kv)
        kept = replace(kept, table_rows=np.array(members))
        q, k, v = torch.randn(4, 4, 16), torch.randn(4, 2, 16), torch.randn(4, 2, 16)
        exact_kv = twin(kv)
        ops.refill_decode_plan(fixed, batch, kept, kv)
        output = ops.attention(q, k, v, kv, 0, fixed, 0.25)
        n = len(members)
        plan = exact.plan_attention(batch, make_block_table(table[members], exact_kv), exact_kv, None)
        expected = exact.attention(q[:n].double(), k[:n].double(), v[:n].double(), exact_kv, 0, plan, 0.25)
        assert relative_error(output[:n], expected) < 1e-5
        assert torch.equal(output[n:], torch.zeros_like(output[n:]))  # padding attends to nothing
        changed = (kv.buffer.nan_to_num(7.0) != before.nan_to_num(7.0)).sum().item()
        assert changed == n * 2 * kv.elems_per_row  # and stores nothing


def test_padded_states_are_left_alone(rng):
    ops = select_kernels(DEVICE, "triton")
    plan = ops.make_fixed_state_plan(3)
    ops.refill_state_plan(plan, np.array([4]))
    tails, states, ssm = torch.randn(6, 3, 20), torch.randn(6, 2, 16, 8), torch.randn(6, 4, 8, 16)
    before = [t.clone() for t in (tails, states, ssm)]
    ops.causal_conv(torch.randn(3, 20), torch.randn(20, 4), None, tails, plan, True)
    heads = torch.randn(3, 2, 16)
    ops.gated_delta(heads, heads, torch.randn(3, 2, 8), -torch.rand(3, 2), torch.rand(3, 2), states, plan)
    b = torch.randn(3, 1, 16)
    ops.state_space(torch.randn(3, 4, 8), torch.rand(3, 4), -torch.rand(4), b, b, torch.randn(4), ssm, plan)
    for old, new in zip(before, (tails, states, ssm), strict=True):
        assert not torch.equal(old[4], new[4])
        rest = [0, 1, 2, 3, 5]
        assert torch.equal(old[rest], new[rest])


def test_a_prompt_that_repeats_one_key(rng):
    """The worst case for the inverse inside the chunked delta rule: its powers grow like binomials, it does not."""
    ops, exact = select_kernels(DEVICE, "triton"), ReferenceKernels(DEVICE)
    tokens = 130
    k = torch.randn(1, 2, 16).expand(tokens, 2, 16).contiguous()
    q, v = torch.randn(tokens, 2, 16), torch.randn(tokens, 2, 16)
    decay, rate = torch.zeros(tokens, 2), torch.ones(tokens, 2)
    states = torch.randn(3, 2, 16, 16)
    exact_states = states.double()
    batch, units = RaggedBatch.from_positions([0], [tokens]), np.array([1])
    output = ops.gated_delta(q, k, v, decay, rate, states, ops.plan_state(batch, units))
    args = (x.double() for x in (q, k, v, decay, rate))
    expected = exact.gated_delta(*args, exact_states, exact.plan_state(batch, units))
    assert relative_error(output, expected) < 1e-5
    assert relative_error(states, exact_states) < 1e-5


def test_sequences_without_queries_change_nothing(rng):
    ops = select_kernels(DEVICE, "triton")
    lens = [7, 20]
    kv, table = filled_pool(torch.float32, lens, 2, 16)
    batch = RaggedBatch.from_positions([6, 20], lens)  # the second computes nothing in this step
    q, k, v = torch.randn(1, 4, 16), torch.randn(1, 2, 16), torch.randn(1, 2, 16)
    out = ops.attention(q, k, v, kv, 0, ops.plan_attention(batch, make_block_table(table, kv), kv, None), 0.25)
    assert out.isfinite().all()
    tails = torch.randn(4, 3, 20)
    before = tails.clone()
    ops.causal_conv(torch.randn(1, 20), torch.randn(20, 4), None, tails, ops.plan_state(batch, np.array([0, 2])), True)
    assert torch.equal(tails[1:], before[1:])
    assert not torch.equal(tails[0], before[0])


@pytest.mark.parametrize("routing", ["one expert", "spread"])
def test_experts_that_get_none_or_all(rng, routing):
    ops, exact = select_kernels(DEVICE, "triton"), ReferenceKernels(DEVICE)
    tokens = 40
    x, weights = torch.randn(tokens, 32), torch.rand(tokens, 2)
    gate_up, down = torch.randn(5, 40, 32) / 6, torch.randn(5, 32, 20) / 4
    first = torch.full((tokens, 1), 3) if routing == "one expert" else torch.randint(0, 2, (tokens, 1))
    expert_ids = torch.cat((first, torch.full((tokens, 1), 4)), 1)
    output = ops.apply_experts(x, gate_up, down, expert_ids, weights)
    expected = exact.apply_experts(x.double(), gate_up.double(), down.double(), expert_ids, weights.double())
    assert relative_error(output, expected) < 1e-5


@interpreter_only
def test_dispatch(monkeypatch, caplog):
    assert [select_kernels("cpu", name).name for name in ("auto", "torch", "cpu", "reference", "triton")] == [
        "cpu", "cpu", "cpu", "reference", "triton",
    ]  # fmt: skip
    assert not caplog.records
    assert select_kernels("meta", "torch").name == "reference"
    assert "the host waits for the device in every layer" in caplog.text
    with pytest.raises(ValueError, match=r"attention backend 'flash-attn': .* is not installed"):
        select_kernels("cpu", "flash-attn")
    with pytest.raises(ValueError, match="attention backend 'cpu' cannot run on device meta"):
        select_kernels("meta", "cpu")
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ValueError, match="attention backend 'triton': the package triton must be installed"):
        select_kernels("cpu", "triton")


@interpreter_only
def test_the_interpreter_is_asked_for(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="attention backend 'triton' on device cpu: expected a CUDA device"):
        select_kernels("cpu", "triton")


def reserved(elems: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of which only what is touched takes memory."""
    if not INTERPRETED:
        return torch.zeros(elems, dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, elems * dtype.itemsize, flags=flags), dtype=dtype)


FAR = 2**31
"""Elements before those that are used: more than 32-bit offsets reach."""


def test_keys_and_values_far_into_a_large_pool(rng):
    ops, exact = select_kernels(DEVICE, "triton"), ReferenceKernels(DEVICE)
    unit = 2 * 16 * 2 * 16
    near = PagedKV(torch.randn(8 * unit).bfloat16(), unit, 1, 16, 1, 2, 16)
    buffer = reserved(FAR + 8 * unit, torch.bfloat16)
    buffer[FAR:] = near.buffer
    far, table = PagedKV(buffer, unit, 1, 16, 1, 2, 16), np.array([[5, 3, 0], [1, 6, 7]])
    batch = RaggedBatch.from_positions([40, 20], [41, 48])  # one decodes, one is a prompt
    q, k, v = torch.randn(29, 4, 16), torch.randn(29, 2, 16), torch.randn(29, 2, 16)
    plan = exact.plan_attention(batch, make_block_table(table, twin(near)), twin(near), None)
    expected = exact.attention(q.double(), k.double(), v.double(), twin(near), 0, plan, 0.25)
    plan = ops.plan_attention(batch, make_block_table(table + FAR // unit, far), far, None)
    output = ops.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), far, 0, plan, 0.25)
    assert relative_error(output, expected) < 1e-2
    slots = [table[0, 2] * 32 + 8, table[1, 1] * 32 + 4]  # of the first key that each sequence stored
    for at, token in zip(slots, (0, 1), strict=True):
        assert torch.equal(far.view_layer(0)[0][FAR // 32 + at], k[token].bfloat16())


def test_states_far_into_a_large_pool(rng):
    ops = select_kernels(DEVICE, "triton")
    batch, units = RaggedBatch.from_positions([5, 0], [6, 70]), np.array([1, 2])
    tokens, stride = 71, 2**29
    inputs = {
        "x": torch.randn(tokens, 20), "weight": torch.randn(20, 4), "heads": torch.randn(tokens, 2, 16),
        "values": torch.randn(tokens, 2, 8), "gates": torch.rand(tokens, 2), "b": torch.randn(tokens, 1, 16),
        "rates": -torch.rand(2),
    }  # fmt: skip
    answers = []
    for apart in (False, True):
        torch.manual_seed(0)
        results = []
        for shape in ((3, 20), (2, 16, 8), (2, 8, 16)):
            start = torch.randn(2, *shape)
            if apart:  # the second unit begins 2**32 bytes, the third 2**31 elements after the first
                memory = reserved(4 * stride + 1024, torch.float32)
                states = memory.as_strided((5, *shape), (stride, *start.stride()[1:]))[::2]
            else:
                states = torch.zeros(3, *shape)
            states[1:] = start
            results.append(states)
        tails, delta, ssm = results
        plan, i = ops.plan_state(batch, units), inputs
        results.append(ops.causal_conv(i["x"], i["weight"], None, tails, plan, True))
        results.append(ops.gated_delta(i["heads"], i["heads"], i["values"], -i["gates"], i["gates"], delta, plan))
        results.append(ops.state_space(i["values"], i["gates"], i["rates"], i["b"], i["b"], i["rates"], ssm, plan))
        answers.append([result.clone() for result in results])
    for near, far in zip(*answers, strict=True):
        assert torch.equal(near, far)
