"""Models: layers, families, and weights from checkpoints. `registry` has the supported architectures."""

from engine.models.decoder import CausalLM
from engine.models.hf_config import HfConfig, ModelError
from engine.models.registry import BUILDER_BY_ARCHITECTURE, build_model
from engine.models.shard import Shard

__all__ = ["BUILDER_BY_ARCHITECTURE", "CausalLM", "HfConfig", "ModelError", "Shard", "build_model"]
