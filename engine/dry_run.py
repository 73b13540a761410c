"""Describes the layout of a model's cache, from its config.json alone, for `engine serve --dry-run`."""

from __future__ import annotations

from engine.cache.spec import FULL_KIND, CacheSpec
from engine.config import EngineConfig
from engine.execution.device_pool import compute_unit_stride
from engine.execution.sizing import count_units, resolve_device
from engine.executor import resolve_model
from engine.models import HfConfig, Shard, build_model
from engine.models.loader import resolve_dtype


def describe_cache(config: EngineConfig) -> str:
    """Return the text of `--dry-run`: how the model's KV cache would be laid out in memory.

    No weights are read. Raises ConfigError or ModelError.
    """
    name, folder = resolve_model(config.model)
    device = resolve_device(config.device)
    hf_config = HfConfig.read(folder)
    model = build_model(hf_config, Shard(0, config.tensor_parallel_size))
    spec = model.make_cache_spec(config.block_size, resolve_dtype(config.dtype, hf_config))
    unit_count = count_units(config, spec, device)
    unit_bytes = compute_unit_stride(spec)
    token_count = unit_count * spec.blocks_per_unit(FULL_KIND) * spec.block_size
    lines = [
        f"{name}: {unit_count:,} units of {unit_bytes:,} bytes on {device}, up to {token_count:,} tokens of KV",
        *_describe_groups(spec),
        f"  padding: at most {spec.compute_padding_share(unit_bytes):.2%} of a unit",
    ]
    return "\n".join(lines)


def _describe_groups(spec: CacheSpec) -> list[str]:
    lines = []
    for index, group in enumerate(spec.groups):
        window = "" if group.sliding_window is None else f", window {group.sliding_window:,}"
        lines.append(
            f"  group {index}: {group.kind}{window}, {len(group.layer_indices)} layers, blocks of {spec.block_size} "
            f"tokens = {spec.block_bytes(index):,} bytes, {spec.blocks_per_unit(index)} a unit"
        )
    if spec.state is not None:
        lines.append(f"  state: {len(spec.state.layer_indices)} layers, {spec.state.state_bytes:,} bytes, 1 a unit")
    return lines
