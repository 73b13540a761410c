"""`engine serve --dry-run`: how a model's cache would be laid out, from its config.json alone."""

from __future__ import annotations

from engine.assembly import locate
from engine.cache.layouts import report, waste
from engine.cache.spec import CacheSpec
from engine.config import EngineConfig
from engine.execution.runner import unit_stride_bytes
from engine.execution.sizing import count_units, resolve_device
from engine.models import HfConfig, Shard, build_model
from engine.models.loader import resolve_dtype

PROMPTS = (100, 1_000, 10_000)


def describe_cache(config: EngineConfig) -> str:
    """A few lines for a person. Raises ConfigError or ModelError."""
    name, folder = locate(config.model)
    device = resolve_device(config.device)
    hf_config = HfConfig.read(folder)
    model = build_model(hf_config, Shard(0, config.tensor_parallel_size))
    spec = model.cache_spec(config.block_size, resolve_dtype(config.dtype, hf_config))
    units = count_units(config, spec, device)
    tokens = units * spec.blocks_per_unit(0) * spec.block_size
    lines = [
        f"{name}: {units:,} units of {unit_stride_bytes(spec):,} bytes on {device}, up to {tokens:,} tokens of KV",
        *_groups(spec),
        f"  padding: at most {spec.padding:.2%} of a unit",
    ]
    if spec.state is not None:
        lines.append(f"  vLLM would inflate its attention block to {report(spec).vllm_block_tokens:,} tokens;")
        for prompt in PROMPTS:
            theirs, ours = waste(spec, prompt)
            lines.append(
                f"    a prompt of {prompt:,} tokens would waste {theirs:.1%} of its memory there, {ours:.1%} here"
            )
    return "\n".join(lines)


def _groups(spec: CacheSpec) -> list[str]:
    lines = []
    for index, group in enumerate(spec.groups):
        window = "" if group.sliding_window is None else f", window {group.sliding_window:,}"
        lines.append(
            f"  group {index}: {group.kind}{window}, {len(group.layers)} layers, blocks of {spec.block_size} tokens = "
            f"{spec.block_bytes(index):,} bytes, {spec.blocks_per_unit(index)} a unit"
        )
    if spec.state is not None:
        lines.append(f"  state: {len(spec.state.layers)} layers, {spec.state.state_bytes:,} bytes, 1 a unit")
    return lines
