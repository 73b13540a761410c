"""Operations that are borrowed: against stand-ins that do what the packages' documentation says, and take no argument
that the packages, as they were published, do not."""

from __future__ import annotations

import inspect
import json
import os
import sys
import types
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels import PagedKV, RaggedBatch, backends, select_kernels
from kernels.flash_attention import view_overlapping_pages
from kernels.reference.backend import ReferenceKernels, attend
from tests.kernels.block_tables import make_block_table

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("stand-ins are for CPU tensors: set TRITON_INTERPRET=1", allow_module_level=True)

CPU = torch.device("cpu")
SIGNATURES = json.loads((Path(__file__).parents[1] / "golden" / "kernel_signatures.json").read_text())


def as_published(name, call):
    """The call, which refuses what the published one would refuse."""
    parameters = SIGNATURES[name]["parameters"]

    def checked(*args, **kwargs):
        given = [parameter for parameter, _, by_place in parameters if by_place][: len(args)]
        assert len(given) == len(args)
        assert not set(given) & kwargs.keys()
        assert kwargs.keys() <= {parameter for parameter, _, _ in parameters}
        assert {parameter for parameter, needed, _ in parameters if needed} <= {*given, *kwargs}
        return call(*args, **kwargs)

    checked.__signature__ = inspect.Signature(
        inspect.Parameter(parameter, inspect.Parameter.KEYWORD_ONLY) for parameter, _, _ in parameters
    )
    return checked


def test_what_is_not_published_is_refused():
    call = as_published("flash_attn_with_kvcache", lambda *args, **kwargs: None)
    call(1, 2, 3, causal=True)
    for args, kwargs in (((1, 2), {}), ((1, 2, 3), {"scale": 1}), ((1, 2, 3), {"q": 1})):
        with pytest.raises(AssertionError):
            call(*args, **kwargs)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("flash_attn_interface", "flash_attn_with_kvcache"),
        ("flash_attn", "flash_attn_varlen_func"),
    ],
)
@pytest.mark.gpu
def test_what_is_installed_is_what_was_recorded(module, name):
    owner = pytest.importorskip(module)
    for part in name.split("."):
        owner = getattr(owner, part)
    installed = set(inspect.signature(owner).parameters)
    assert {parameter for parameter, _, _ in SIGNATURES[name]["parameters"]} <= installed


def cached(k_pages, v_pages, table, count):
    """[count, heads, dim] each, of the sequence with this page table."""
    size = k_pages.shape[1]
    pick = table[: -(-count // size)].long()
    return k_pages[pick].flatten(0, 1)[:count], v_pages[pick].flatten(0, 1)[:count]


def flash_by_reference(
    q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, window_size
):
    assert causal
    assert k_cache.stride(-1) == v_cache.stride(-1) == page_table.stride(-1) == 1
    assert {cache_seqlens.dtype, page_table.dtype, cu_seqlens_q.dtype} == {torch.int32}
    assert int(cu_seqlens_q.diff().max()) == max_seqlen_q
    window = None if window_size == (-1, -1) else window_size[0] + 1
    bounds, out = cu_seqlens_q.tolist(), torch.empty_like(q)
    for i, (begin, end) in enumerate(pairwise(bounds)):
        k, v = cached(k_cache, v_cache, page_table[i], int(cache_seqlens[i]))
        out[begin:end] = attend(q[begin:end], k, v, window, softmax_scale)
    return out


def flash_2_by_reference(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size
):
    assert causal
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert (int(cu_seqlens_q.diff().max()), int(cu_seqlens_k.diff().max())) == (max_seqlen_q, max_seqlen_k)
    window = None if window_size == (-1, -1) else window_size[0] + 1
    out = torch.empty_like(q)
    for asked, known in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True):
        out[slice(*asked)] = attend(q[slice(*asked)], k[slice(*known)], v[slice(*known)], window, softmax_scale)
    return out


@pytest.fixture
def lent(monkeypatch):
    """The packages, as stand-ins."""
    flash = as_published("flash_attn_with_kvcache", flash_by_reference)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", types.SimpleNamespace(flash_attn_with_kvcache=flash))
    flash_2 = as_published("flash_attn_varlen_func", flash_2_by_reference)
    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_varlen_func=flash_2))


def pool(lens, block_size, per_unit, dim, dtype):
    """Poisoned outside the contexts; units have a tail that belongs to no block. With the block table."""
    layers, heads = 3, 2
    widths = [-(-n // block_size) for n in lens]
    units = -(-sum(widths) // per_unit) + 2
    elems = per_unit * 2 * layers * block_size * heads * dim + 3 * heads * dim
    kv = PagedKV(
        torch.full((units * elems,), float("nan"), dtype=dtype), elems, per_unit, block_size, layers, heads, dim
    )
    blocks = torch.randperm(units * per_unit).tolist()
    table = np.full((len(lens), max(widths)), 10**6)
    for i, (n, width) in enumerate(zip(lens, widths, strict=True)):
        table[i, :width] = [blocks.pop() for _ in range(width)]
        positions = np.arange(n)
        rows = kv.compute_block_rows(table[i, positions // block_size]) + positions % block_size
        for layer in range(layers):
            for view in kv.view_layer(layer):
                view[rows] = torch.randn(n, heads, dim).to(dtype)
    return kv, table


@pytest.mark.parametrize("per_unit", [1, 3])
@pytest.mark.parametrize("version", [3, 2])
def test_prompts_are_attended_by_what_is_borrowed(lent, rng, monkeypatch, version, per_unit):
    if version == 2:
        monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    ops, exact = select_kernels(CPU, "flash-attn"), ReferenceKernels(CPU)
    lens, starts = [9, 40, 33, 16], [8, 0, 20, 11]
    kv, table = pool(lens, 16, per_unit, 16, torch.bfloat16)
    batch, exact_kv = RaggedBatch.from_positions(starts, lens), replace(kv, buffer=kv.buffer.double())
    count = len(batch.positions)
    for window in (None, 11, None):
        plan = ops.plan_attention(batch, make_block_table(table, kv), kv, window)
        exact_plan = exact.plan_attention(batch, make_block_table(table, exact_kv), exact_kv, window)
        for layer in (0, 2):
            q, k, v = (torch.randn(count, heads, 16).bfloat16() for heads in (4, 2, 2))
            found = ops.attention(q, k, v, kv, layer, plan, 0.25)
            expected = exact.attention(q.double(), k.double(), v.double(), exact_kv, layer, exact_plan, 0.25)
            assert (found.double() - expected).norm() < 1e-2 * expected.norm()


def test_pages_are_all_that_the_pool_has():
    kv, _ = pool([16], 16, 3, 16, torch.float32)
    for layer in range(3):
        last = kv.buffer.numel() // kv.elems_per_row - 2 * 16 - layer * kv.rows_per_layer
        for number, view in enumerate(view_overlapping_pages(kv, layer)):
            assert len(view) == last + 1
            start = (last + layer * kv.rows_per_layer + number * 16) * kv.elems_per_row
            flat = kv.buffer[start : start + 16 * kv.elems_per_row]
            assert flat.data_ptr() == view[-1].data_ptr()
            assert view[-1].is_contiguous()


@pytest.mark.parametrize(("block_size", "dim", "dtype"), [
    (64, 16, torch.bfloat16), (16, 20, torch.bfloat16), (16, 16, torch.float32),
])  # fmt: skip
def test_what_a_package_does_not_take_is_computed_here(lent, rng, monkeypatch, block_size, dim, dtype):
    monkeypatch.setattr(sys.modules["flash_attn_interface"], "flash_attn_with_kvcache", None)
    ops, lens = select_kernels(CPU, "flash-attn"), [40]
    kv, table = pool(lens, block_size, 1, dim, dtype)
    q, k, v = (torch.randn(40, heads, dim).to(dtype) for heads in (4, 2, 2))
    batch = RaggedBatch.from_positions([0], lens)
    assert (
        ops.attention(q, k, v, kv, 1, ops.plan_attention(batch, make_block_table(table, kv), kv, None), 0.25)
        .isfinite()
        .all()
    )


@pytest.mark.parametrize(("major", "installed", "chosen"), [
    (9, True, "flash-attn"), (9, False, "triton"), (8, True, "triton"), (10, True, "triton"),
])  # fmt: skip
def test_auto_takes_the_fastest_that_is_installed(monkeypatch, major, installed, chosen):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(backends, "find_spec", lambda name: (installed and name == "flash_attn_interface") or None)
    assert backends._choose_fastest(torch.device("cuda")) == chosen
