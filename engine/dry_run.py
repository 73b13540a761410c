"""How a model's cache is laid out, from its config.json alone, and what vLLM's would take beside it.

`engine serve --dry-run` prints it, and the tables of docs/hybrid-cache.md are made of it. Ours are the numbers of the
model itself (`cache_spec`); vLLM's follow its own rules for pages and for what a state is kept in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.cache.spec import CacheSpec
from engine.config import EngineConfig
from engine.execution.runner import unit_stride_bytes
from engine.execution.sizing import count_units, resolve_device
from engine.loading import model_folder
from engine.models import CausalLM, HfConfig, Shard, build_model
from engine.models.loader import DTYPES, resolve_dtype

PROMPTS = (100, 1_000, 10_000)
VLLM_BLOCK_STEP = 16
"""vLLM rounds an inflated attention block up to a multiple of so many tokens."""
VLLM_FP32_STATE = ("NemotronHForCausalLM",)
"""Whose recurrent matrices vLLM keeps in fp32 where the config says nothing; those of others in the model's dtype."""


@dataclass(frozen=True, slots=True)
class Pages:
    """One model's cache, and vLLM's of the same model."""

    spec: CacheSpec
    vllm_state_bytes: int
    """One recurrent layer's state in vLLM; 0 where the model has none."""

    @staticmethod
    def of(config: HfConfig, model: CausalLM, block_size: int, dtype: torch.dtype) -> Pages:
        return Pages(model.cache_spec(block_size, dtype), _vllm_state_bytes(config, model, dtype))

    @property
    def vllm_block(self) -> int:
        """Tokens of vLLM's attention block: all layers have pages of one size, so it grows until it holds a state."""
        full = self.spec.groups[0]
        tokens = self.vllm_state_bytes * len(full.layers) / full.token_bytes
        return max(1, math.ceil(tokens / VLLM_BLOCK_STEP)) * VLLM_BLOCK_STEP

    def waste(self, prompt_tokens: int) -> tuple[float, float]:
        """Part of the memory held for one running prompt that holds nothing, 0 .. 1: (vLLM's, ours).

        vLLM: whole blocks, and a page of a block's size for every layer's state, in groups of as many layers as attend
        fully. Ours: the last block's empty slots and the padding of the units; blocks of a unit that this sequence
        leaves free serve others. Each is measured against the state in its own dtype.
        """
        spec, full, block = self.spec, self.spec.groups[0], self.vllm_block
        kv_bytes = prompt_tokens * full.token_bytes
        theirs = math.ceil(prompt_tokens / block) * block * full.token_bytes
        ours = math.ceil(prompt_tokens / spec.block_size) * spec.unit_bytes / spec.blocks_per_unit(0)
        if spec.state is None:
            return 1 - kv_bytes / theirs, 1 - kv_bytes / ours
        layers = len(spec.state.layers)
        theirs += math.ceil(layers / len(full.layers)) * block * full.token_bytes
        ours += spec.unit_bytes
        used = kv_bytes + layers * self.vllm_state_bytes
        return 1 - used / theirs, 1 - (kv_bytes + spec.state.state_bytes) / ours


def _vllm_state_bytes(config: HfConfig, model: CausalLM, dtype: torch.dtype) -> int:
    """Convolution tail in the model's dtype, recurrent matrix in the one that the config or vLLM chooses."""
    text = config.sub("text_config") if "text_config" in config else config
    named = text.get("mamba_ssm_dtype", "") or text.get("mamba_ssm_cache_dtype", "")
    chosen = torch.float32 if config.architecture in VLLM_FP32_STATE else dtype
    shapes = [recurrent.state_shape for _, recurrent in model.recurrents]
    return max(
        (
            math.prod(shape.tail) * dtype.itemsize
            + (math.prod(shape.recurrent) * DTYPES.get(named, chosen).itemsize if shape.recurrent else 0)
            for shape in shapes
        ),
        default=0,
    )


def describe_cache(config: EngineConfig) -> str:
    """A few lines for a person. Raises ConfigError or ModelError."""
    name, folder = model_folder(config.model)
    device = resolve_device(config.device)
    hf_config = HfConfig.read(folder)
    model = build_model(hf_config, Shard(0, config.tensor_parallel_size))
    pages = Pages.of(hf_config, model, config.block_size, resolve_dtype(config.dtype, hf_config))
    spec = pages.spec
    units = count_units(config, spec, device)
    tokens = units * spec.blocks_per_unit(0) * spec.block_size
    lines = [
        f"{name}: {units:,} units of {unit_stride_bytes(spec):,} bytes on {device}, up to {tokens:,} tokens of KV",
        *_groups(spec),
        f"  padding: at most {spec.padding:.2%} of a unit",
    ]
    if spec.state is not None:
        lines.append(f"  vLLM would inflate its attention block to {pages.vllm_block:,} tokens;")
        for prompt in PROMPTS:
            theirs, ours = pages.waste(prompt)
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
