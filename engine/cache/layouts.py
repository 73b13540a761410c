"""Page arithmetic of real checkpoints: from `config.json` to groups, state and units, and what vLLM would take.

Pure numbers, for `--dry-run` and the documentation; the models themselves build their `CacheSpec` from loaded configs.
Recurrent state is counted as the models keep it: conv tails of `kernel - 1` positions in the model's dtype, recurrent
matrices in fp32 for gated delta nets and in the model's dtype for Mamba-2, as vLLM's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.cache.spec import FULL_ATTENTION, SLIDING_WINDOW, CacheSpec, GroupSpec, StateSpec

_VLLM_BLOCK_STEP = 16
"""vLLM rounds an inflated attention block up to a multiple of so many tokens."""


def spec_from_config(config: Mapping[str, Any], block_size: int = 16, dtype_bytes: int = 2) -> CacheSpec:
    """The cache of a model from its `config.json` (multimodal ones: its `text_config`).

    Raises ValueError for a config that lacks what its `model_type` needs.
    """
    config = {**config, **config.get("text_config", {})}
    kinds = _layer_kinds(config)
    layers = {
        kind: tuple(i for i, k in enumerate(kinds) if k == kind) for kind in ("full", "sliding", "linear", "mamba")
    }
    heads = _need(config, "num_key_value_heads")
    head_dim = config.get("head_dim") or config.get("attention_head_dim")
    head_dim = head_dim or _need(config, "hidden_size") // _need(config, "num_attention_heads")
    groups = [GroupSpec(FULL_ATTENTION, layers["full"], heads, head_dim, dtype_bytes)]
    if layers["sliding"]:
        window = _need(config, "sliding_window")
        groups.append(GroupSpec(SLIDING_WINDOW, layers["sliding"], heads, head_dim, dtype_bytes, window))
    recurrent = tuple(sorted(layers["linear"] + layers["mamba"]))
    state = None
    if recurrent:
        per_layer = _delta_net_bytes(config, dtype_bytes) if layers["linear"] else _mamba2_bytes(config, dtype_bytes)
        state = StateSpec(recurrent, per_layer * len(recurrent))
    return CacheSpec(block_size=block_size, groups=tuple(groups), state=state)


@dataclass(frozen=True, slots=True)
class PageReport:
    """One model's row of the table; bytes unless the name says otherwise."""

    token_bytes: int
    """KV of one token in all groups."""
    state_bytes: int
    unit_bytes: int
    blocks_per_unit: tuple[int, ...]
    padding: float
    """Part of a unit, 0 .. 1, that the kind which fits worst leaves unused."""
    vllm_block_tokens: int
    """Attention block that vLLM inflates to so that its page holds one layer's state; 16 where there is no state."""


def report(spec: CacheSpec) -> PageReport:
    return PageReport(
        token_bytes=sum(group.token_bytes for group in spec.groups),
        state_bytes=spec.state.state_bytes if spec.state else 0,
        unit_bytes=spec.unit_bytes,
        blocks_per_unit=tuple(spec.blocks_per_unit(g) for g in range(len(spec.groups))),
        padding=spec.padding,
        vllm_block_tokens=vllm_block_tokens(spec),
    )


def vllm_block_tokens(spec: CacheSpec) -> int:
    """vLLM's rule: every layer has pages of one size, so an attention block grows until it is as large as a state."""
    if spec.state is None:
        return _VLLM_BLOCK_STEP
    group = spec.groups[0]
    tokens = -(-spec.state.state_bytes // len(spec.state.layers) // (group.token_bytes // len(group.layers)))
    return -(-tokens // _VLLM_BLOCK_STEP) * _VLLM_BLOCK_STEP


def waste(spec: CacheSpec, prompt_tokens: int) -> tuple[float, float]:
    """Part of the memory held for one running prompt that holds nothing, 0 .. 1: (vLLM's, ours).

    vLLM: groups of as many layers as attend fully, each with pages of the inflated block. Ours: the last block's empty
    slots and the padding of the units; sub-blocks that the sequence leaves free in a unit serve others.
    """
    full = spec.groups[0]
    used = prompt_tokens * full.token_bytes + (spec.state.state_bytes if spec.state else 0)
    block = vllm_block_tokens(spec)
    theirs = -(-prompt_tokens // block) * block * full.token_bytes
    ours = -(-prompt_tokens // spec.block_size) * spec.unit_bytes / spec.blocks_per_unit(0)
    if spec.state is not None:
        groups = -(-len(spec.state.layers) // len(full.layers))
        theirs += groups * block * full.token_bytes
        ours += spec.unit_bytes
    return 1 - used / theirs, 1 - used / ours


def format_table(rows: Mapping[str, CacheSpec], prompts: Sequence[int] = (100, 1_000, 10_000)) -> str:
    """The table of docs/hybrid-cache.md, in Markdown."""
    head = ["model", "KV / token", "state", "unit", "blocks / unit", "padding", "vLLM block"]
    head += [f"waste at {tokens:,} (vLLM, ours)" for tokens in prompts]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for name, spec in rows.items():
        row = report(spec)
        cells = [name, f"{row.token_bytes:,} B", f"{row.state_bytes / 1e6:.1f} MB", f"{row.unit_bytes / 1e6:.2f} MB"]
        cells += [" + ".join(map(str, row.blocks_per_unit)), f"{row.padding:.2%}", str(row.vllm_block_tokens)]
        cells += ["{:.1%}, {:.1%}".format(*waste(spec, tokens)) if spec.state else "-" for tokens in prompts]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _layer_kinds(config: Mapping[str, Any]) -> list[str]:
    """`full`, `sliding`, `linear`, `mamba` or `none` (no cache) for every layer."""
    count = _need(config, "num_hidden_layers")
    if "hybrid_override_pattern" in config:  # Nemotron-H: M mamba, * attention, - MLP
        return [{"M": "mamba", "*": "full"}.get(letter, "none") for letter in config["hybrid_override_pattern"]]
    if "attn_layer_indices" in config:  # Bamba
        return ["full" if i in config["attn_layer_indices"] else "mamba" for i in range(count)]
    if "layer_types" in config:
        names = {
            "full_attention": "full",
            "attention": "full",
            "sliding_attention": "sliding",
            "linear_attention": "linear",
            "mamba": "mamba",
        }
        unknown = set(config["layer_types"]) - set(names)
        if unknown:
            raise ValueError(f"layer_types: expected {sorted(names)}, got {sorted(unknown)}")
        return [names[kind] for kind in config["layer_types"]]
    if "full_attention_interval" in config:  # Qwen3-Next, Qwen3.5
        every = config["full_attention_interval"]
        return ["full" if (i + 1) % every == 0 else "linear" for i in range(count)]
    if "sliding_window_pattern" in config:  # Gemma-3
        every = config["sliding_window_pattern"]
        return ["full" if (i + 1) % every == 0 else "sliding" for i in range(count)]
    return ["full"] * count


def _delta_net_bytes(config: Mapping[str, Any], dtype_bytes: int) -> int:
    key = _need(config, "linear_num_key_heads") * _need(config, "linear_key_head_dim")
    value_dim, value_heads = _need(config, "linear_value_head_dim"), _need(config, "linear_num_value_heads")
    conv = (2 * key + value_heads * value_dim) * (_need(config, "linear_conv_kernel_dim") - 1) * dtype_bytes
    return int(conv + value_heads * config["linear_key_head_dim"] * value_dim * 4)


def _mamba2_bytes(config: Mapping[str, Any], dtype_bytes: int) -> int:
    heads = config.get("mamba_n_heads") or _need(config, "mamba_num_heads")
    head_dim = config.get("mamba_d_head") or _need(config, "mamba_head_dim")
    state = config.get("mamba_d_state") or _need(config, "ssm_state_size")
    groups = config.get("mamba_n_groups") or _need(config, "n_groups")
    kernel = config.get("mamba_d_conv") or _need(config, "conv_kernel")
    conv = (heads * head_dim + 2 * groups * state) * (kernel - 1)
    return int((conv + heads * head_dim * state) * dtype_bytes)


def _need(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int):
        raise ValueError(f"config.json: {name}: expected an integer for {config.get('model_type')!r}, got {value!r}")
    return value


PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-Next-80B-A3B": {
        "num_hidden_layers": 48,
        "full_attention_interval": 4,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "Qwen3.5-4B": {
        "num_hidden_layers": 32,
        "full_attention_interval": 4,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "Nemotron-H-8B": {
        "num_hidden_layers": 52,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
    },
    "Granite-4.0-H-tiny": {
        "num_hidden_layers": 40,
        "attn_layer_indices": [5, 15, 25, 35],
        "num_key_value_heads": 4,
        "head_dim": 128,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
    },
    "Bamba-9B": {
        "num_hidden_layers": 32,
        "attn_layer_indices": [9, 18, 27],
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
    },
    "Gemma-3-4B": {
        "num_hidden_layers": 34,
        "sliding_window_pattern": 6,
        "sliding_window": 1024,
        "num_key_value_heads": 4,
        "head_dim": 256,
    },
}
"""What the `config.json` of published models says about their caches."""
