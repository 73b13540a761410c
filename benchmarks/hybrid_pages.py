"""The page table of docs/hybrid-cache.md: how published models' caches are laid out, told by the models themselves.

    python benchmarks/hybrid_pages.py

A model is built from its config alone, without weights. One that the engine cannot load has no row.
"""

from __future__ import annotations

import _path  # noqa: F401
import torch
from throughput_shapes import SHAPES

from engine.cache.spec import CacheSpec
from engine.models import HfConfig, build_model

BLOCK = 16
ROWS = {
    "Qwen3.5-4B": "qwen3.5-4b",
    "Nemotron-H-8B": "nemotron-h-8b",
    "Bamba-9B": "bamba-9b",
    "Gemma-3-4B": "gemma-3-4b",
}


def spec_of(row: str) -> CacheSpec:
    return build_model(HfConfig(SHAPES[ROWS[row]], row)).cache_spec(BLOCK, torch.bfloat16)


def page_table() -> str:
    """In Markdown."""
    head = ["model", "KV / token", "state", "unit", "blocks / unit", "padding"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in ROWS:
        spec = spec_of(row)
        blocks = " + ".join(str(spec.blocks_per_unit(g)) for g in range(len(spec.groups)))
        cells = [row, f"{sum(group.token_bytes for group in spec.groups):,} B"]
        cells += [f"{spec.state.state_bytes / 1e6:.1f} MB" if spec.state else "-", f"{spec.unit_bytes / 1e6:.2f} MB"]
        cells += [blocks, f"{spec.padding:.2%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page_table())
