"""Rotary position embedding: frequencies of the scaling rules, and the tables that kernels read.

Scaling rules: linear (Chen et al., 2023), llama3 (Llama 3.1's model card), YaRN (Peng et al., 2023). longrope is not
supported. transformers 5 keeps them in `rope_parameters`, transformers 4 in `rope_theta` and
`rope_scaling`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.models.hf_config import HfConfig, ModelError


class RopeFrequencies(NamedTuple):
    """Frequencies of rotary embedding after the scaling rule of a checkpoint."""

    inverse: Tensor
    """[rotary_dim / 2] fp32: angle per position of each pair of dims."""
    magnitude: float = 1.0
    """Factor on cos and sin."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Settings of rotary embedding, which turns the first `rotary_dim` dims of each head by an angle per position."""

    rotary_dim: int
    theta: float
    scaling: Mapping[str, Any] = field(default_factory=dict)
    original_positions: int = 0
    source: str = field(default="config.json", compare=False)
    """File that errors name. It may differ between checkpoints of one model."""

    @staticmethod
    def from_hf(
        config: HfConfig,
        head_dim: int,
        *,
        theta: float = 10000.0,
        rotary_fraction: float = 1.0,
        layer_type: str | None = None,
    ) -> RopeConfig:
        """Read the settings of rotary embedding from a config.json of transformers 4 or 5.

        `theta` and `rotary_fraction`: the family's defaults. `layer_type`: the settings to read, if the config has
        several. `head_dim`: size of an attention head.
        """
        key = "rope_parameters" if config.values.get("rope_parameters") else "rope_scaling"
        parameters = config.get_object(key) if config.values.get(key) else HfConfig({}, config.source)
        if layer_type is not None and layer_type in parameters:
            parameters = parameters.get_object(layer_type)
        rotary_fraction = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", rotary_fraction))
        return RopeConfig(
            rotary_dim=int(head_dim * rotary_fraction),
            theta=parameters.get("rope_theta", config.get("rope_theta", theta)),
            scaling=parameters.values,
            original_positions=config.get("max_position_embeddings", 0),
            source=config.source,
        )

    def compute_frequencies(self) -> RopeFrequencies:
        """Return the frequencies of rotary embedding by the checkpoint's scaling rule. Raises ModelError."""
        frequencies = self._scale_frequencies()
        if not (frequencies.inverse.isfinite().all() and math.isfinite(frequencies.magnitude)):
            raise ModelError(f"{self.source}: rope_theta {self.theta:g} and its scaling: expected finite frequencies")
        return frequencies

    def _scale_frequencies(self) -> RopeFrequencies:
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.int64).float() / self.rotary_dim
        inverse_frequencies = 1.0 / self.theta**exponents
        rope_type = self.scaling.get("rope_type", self.scaling.get("type", "default"))
        if rope_type == "default":
            return RopeFrequencies(inverse_frequencies)
        if rope_type == "linear":
            return RopeFrequencies(inverse_frequencies / self._get_number("factor"))
        if rope_type == "llama3":
            return RopeFrequencies(self._scale_llama3(inverse_frequencies))
        if rope_type == "yarn":
            return self._scale_yarn(inverse_frequencies)
        raise ModelError(
            f"{self.source}: rope scaling {rope_type!r} is not supported; expected default, linear, llama3 or yarn"
        )

    def _get_number(self, key: str, default: float | None = None) -> float:
        value = self.scaling.get(key)
        if value is None:  # absent or null
            value = default
        if not isinstance(value, (int, float)):
            raise ModelError(f"{self.source}: rope scaling {key}: expected a number, got {value!r}")
        return float(value)

    def _scale_llama3(self, inverse_frequencies: Tensor) -> Tensor:
        """Scale frequencies as Llama 3.1 does: divide low ones by the factor, keep high ones, and mix between them."""
        factor = self._get_number("factor")
        low_rotations, high_rotations = self._get_number("low_freq_factor"), self._get_number("high_freq_factor")
        original_positions = self._get_number("original_max_position_embeddings")
        wavelength = 2 * math.pi / inverse_frequencies
        rotations = original_positions / wavelength
        kept_share = ((rotations - low_rotations) / (high_rotations - low_rotations)).clamp(0, 1)
        return inverse_frequencies * ((1 - kept_share) / factor + kept_share)

    def _scale_yarn(self, inverse_frequencies: Tensor) -> RopeFrequencies:
        """Scale rotary frequencies for a longer context by YaRN (Peng et al., 2023).

        Dims that rotate often over the original context keep their frequency. The frequencies of dims that rotate
        rarely are divided by the factor. Between these bounds the two are mixed.
        """
        factor = self._get_number("factor")
        original_positions = self._get_number("original_max_position_embeddings", float(self.original_positions))

        def find_dim(rotations: float) -> float:
            """Return the dim that makes so many rotations over the original context."""
            wavelength = original_positions / (rotations * 2 * math.pi)
            return self.rotary_dim * math.log(wavelength) / (2 * math.log(self.theta))

        low_dim = find_dim(self._get_number("beta_fast", 32.0))
        high_dim = find_dim(self._get_number("beta_slow", 1.0))
        if self.scaling.get("truncate", True):
            low_dim, high_dim = math.floor(low_dim), math.ceil(high_dim)
        low_dim = max(low_dim, 0)
        high_dim = min(high_dim, self.rotary_dim - 1)
        ramp = (torch.arange(self.rotary_dim // 2, dtype=torch.float32) - low_dim) / max(high_dim - low_dim, 0.001)
        divided_share = ramp.clamp(0, 1)
        frequencies = inverse_frequencies / factor * divided_share + inverse_frequencies * (1 - divided_share)
        return RopeFrequencies(frequencies, self._compute_yarn_magnitude(factor))

    def _compute_yarn_magnitude(self, factor: float) -> float:
        """Return YaRN's factor on cos and sin. The config may give the factor, or two weights to compute it from."""
        if self.scaling.get("attention_factor") is not None:
            return self._get_number("attention_factor")

        def compute_magnitude(weight: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

        mscale, mscale_all_dim = self.scaling.get("mscale"), self.scaling.get("mscale_all_dim")
        if mscale and mscale_all_dim:
            return compute_magnitude(float(mscale)) / compute_magnitude(float(mscale_all_dim))
        return compute_magnitude(1.0)


class RopeTable:
    """Table of cos and signed sin, the arguments of `Kernels.rotate`, for the positions [0, max_positions)."""

    def __init__(self, config: RopeConfig, max_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        inverse, magnitude = config.compute_frequencies()
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse)
        cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
        self.cos = torch.cat((cos, cos), -1).to(device, dtype)  # [positions, rotary_dim]
        self.signed_sin = torch.cat((-sin, sin), -1).to(device, dtype)

    def look_up(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, signed sin) of each position: [tokens, rotary_dim] each."""
        return self.cos.index_select(0, positions), self.signed_sin.index_select(0, positions)
