"""Decoder-only language models: embedding, blocks, last norm, head. The plain dense family is one function here.

`CausalLM` decides which layers share a cache group: group 0 is full attention, and each sliding window has a group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from engine.cache.spec import FULL_ATTENTION, SLIDING_WINDOW, CacheSpec, GroupSpec, StateSpec
from engine.models.hf_config import HfConfig, ModelError
from engine.models.layers import (
    Attention,
    AttentionConfig,
    Branch,
    ForwardContext,
    GatedMLP,
    Mixer,
    RecurrentMixer,
    RMSNorm,
)
from engine.models.recurrent_state import StateLayout
from engine.models.rope import RopeConfig, RopeTable
from engine.models.vocabulary import Vocabulary
from engine.models.weights import Weight, WeightScope

HEAD_NAME = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and settings of a decoder-only model, and the names of its weights in the checkpoint."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    norm_eps: float
    max_positions: int
    """Longest context that the checkpoint was made for, in tokens."""
    tie_embeddings: bool
    """Whether embedding and output head share one matrix."""
    zero_centred_norm: bool = False
    """Whether the checkpoint stores the gains of norms minus one."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of the output of every mixer and MLP, before it is added to the residual."""
    logit_scale: float = 1.0
    prefix: str = "model"
    """Beginning of the names of all tensors but the head, as in model.layers.0."""
    norm_name: str = "norm"
    embedding_name: str = "embed_tokens"
    ignored_prefixes: tuple[str, ...] = ()
    """Beginnings of the names of tensors that are not loaded, such as a vision tower."""
    renamed_prefixes: Mapping[str, str] = field(default_factory=dict)
    """Prefix that some checkpoints of the family use -> prefix of this model."""

    @staticmethod
    def from_hf(config: HfConfig, *, tie_embeddings: bool = False, norm_eps: float = 1e-6) -> DecoderConfig:
        """Read a config.json with the names that most families use. The arguments are the family's defaults."""
        return DecoderConfig(
            vocab_size=config.get_integer("vocab_size"),
            hidden_size=config.get_integer("hidden_size"),
            num_layers=config.get_integer("num_hidden_layers"),
            norm_eps=config.get("rms_norm_eps", norm_eps),
            max_positions=config.get_integer("max_position_embeddings"),
            tie_embeddings=config.get("tie_word_embeddings", tie_embeddings),
        )


class CausalLM:
    """A decoder-only language model, built from its config. `engine.models.loader` fills its weights."""

    def __init__(
        self,
        root_scope: WeightScope,
        config: DecoderConfig,
        make_block: Callable[[WeightScope, int], list[Branch]],
    ) -> None:
        """Make all layers of the model. Their weights are declared, so that the loader knows what to read and fill.

        `root_scope`: collects the declared weights, under their names in the checkpoint. `make_block`: makes a block's
        branches from the scope of its weights (model.layers.0) and its index (0).
        """
        self.config = config
        self.shard = root_scope.shard
        self.samples_tokens = root_scope.shard.rank == 0
        """Whether this rank draws tokens: only rank 0 gets whole logits."""

        # Each layer declares its weights in the scope that it is made with.
        body_scope = root_scope.enter_scope(config.prefix)
        layers_scope = body_scope.enter_scope("layers")
        self.vocabulary = _make_vocabulary(root_scope, body_scope, config)
        self.blocks = [make_block(layers_scope.enter_scope(i), i) for i in range(config.num_layers)]
        self.norm = RMSNorm(body_scope, config.norm_name, config.hidden_size, config.norm_eps, config.zero_centred_norm)
        self.weights: list[Weight] = root_scope.weights
        self.ignored_prefixes = config.ignored_prefixes + ((HEAD_NAME,) if config.tie_embeddings else ())
        """Beginnings of the names of the checkpoint's tensors that are not loaded."""

        # Mixers are the layers in which a token depends on earlier tokens. Each comes with the index of its block.
        layers = [(i, branch.layer) for i, block in enumerate(self.blocks) for branch in block]
        self.attention_layers = [(i, layer) for i, layer in layers if isinstance(layer, Attention)]
        self.recurrent_layers = [(i, layer) for i, layer in layers if isinstance(layer, RecurrentMixer)]
        _, self._last_mixer = max((*self.attention_layers, *self.recurrent_layers), key=lambda layer: layer[0])
        """After this layer, only the tokens that need logits are computed."""
        self._layers_by_group = _group_layers(self.attention_layers)
        """Attention layers that share a block table, by group."""
        self._rope_configs = _list_rope_configs(self.attention_layers)
        """The different settings of rotary embedding: the attention layers with equal settings share one table."""
        self._number_layers()

    def _number_layers(self) -> None:
        """Tell each mixer the indices at which it finds its inputs in the `ForwardContext` of a step.

        An attention layer gets the index of its cache group, its index in the group, and that of its rotary table. A
        recurrent layer gets the index of its state.
        """
        for group_index, layers in enumerate(self._layers_by_group):
            for group_layer_index, (_, attention) in enumerate(layers):
                attention.group_index = group_index
                attention.group_layer_index = group_layer_index
                if attention.config.rope is not None:
                    attention.rope_index = self._rope_configs.index(attention.config.rope)
        for index, (_, recurrent) in enumerate(self.recurrent_layers):
            recurrent.recurrent_index = index

    @property
    def _config_by_group(self) -> list[AttentionConfig]:
        """Attention config of each group's first layer. Its window and KV sizes are those of the whole group."""
        return [layers[0][1].config for layers in self._layers_by_group]

    @property
    def window_by_group(self) -> list[int | None]:
        """Sliding window of each group, in tokens; None: full attention."""
        return [config.window for config in self._config_by_group]

    def make_cache_spec(self, block_size: int, dtype: torch.dtype) -> CacheSpec:
        """Return what the cache needs to know of the model: its KV in each group, and its recurrent state.

        `dtype`: dtype of KV and state. `block_size`: tokens of a cache block.
        """
        groups = tuple(self._make_group_spec(index, dtype) for index in range(len(self._layers_by_group)))
        state = None
        if self.recurrent_layers:
            layer_indices = tuple(index for index, _ in self.recurrent_layers)
            state = StateSpec(layer_indices, self.make_state_layout(dtype).state_bytes)
        return CacheSpec(block_size, groups, state)

    def _make_group_spec(self, group_index: int, dtype: torch.dtype) -> GroupSpec:
        """Describe a group of attention layers. The cache keeps the whole context in group 0, even with a window."""
        config = self._config_by_group[group_index]
        window = None if group_index == 0 else config.window
        return GroupSpec(
            kind=FULL_ATTENTION if window is None else SLIDING_WINDOW,
            layer_indices=tuple(index for index, _ in self._layers_by_group[group_index]),
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype_bytes=dtype.itemsize,
            sliding_window=window,
        )

    def make_state_layout(self, dtype: torch.dtype) -> StateLayout:
        return StateLayout(tuple(recurrent.state_shape for _, recurrent in self.recurrent_layers), dtype)

    def make_rope_tables(self, max_positions: int, dtype: torch.dtype, device: torch.device) -> list[RopeTable]:
        return [RopeTable(rope, max_positions, dtype, device) for rope in self._rope_configs]

    def forward(self, token_ids: Tensor, context: ForwardContext, selected_tokens: Tensor | None = None) -> Tensor:
        """Run the model on a step's tokens: store their KV and state, and return the hidden states after the last norm.

        `selected_tokens`: indices of the tokens to return; None: all. The others are dropped after the last attention
        or recurrent layer, because until then the selected tokens depend on them. Returns [selected tokens, hidden].
        """
        x = self.vocabulary.look_up(token_ids)
        if self.config.embedding_scale != 1.0:
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype)  # a host tensor: no copy to wait for
        residual: Tensor | None = None
        for branch in chain.from_iterable(self.blocks):
            x, residual = branch(x, residual, context)
            if branch.layer is self._last_mixer and selected_tokens is not None:
                x, residual = x[selected_tokens], residual[selected_tokens]
                if x.shape[0] == 0:  # no token is selected, and the cache is filled
                    return x
        assert residual is not None
        normed, _ = self.norm.add(x, residual, context)
        return normed

    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        """Compute logits in the model's dtype: [rows, hidden] -> [rows, vocab]. All ranks must call this.

        Returns None on all ranks but rank 0, to which they send their parts of the logits.
        """
        logits = self.vocabulary.compute_logits(hidden)
        return logits if logits is None or self.config.logit_scale == 1.0 else logits * self.config.logit_scale


def _make_vocabulary(root_scope: WeightScope, body_scope: WeightScope, config: DecoderConfig) -> Vocabulary:
    """Make the embedding and the output head. If they share one matrix, the checkpoint's head is not used."""
    embedding_name, head_name = f"{config.embedding_name}.weight", None if config.tie_embeddings else HEAD_NAME
    return Vocabulary(body_scope, root_scope, embedding_name, head_name, config.vocab_size, config.hidden_size)


def _list_rope_configs(layers: Sequence[tuple[int, Attention]]) -> list[RopeConfig]:
    """Return the different rotary settings of attention layers. Raises ModelError for settings that cannot be used."""
    ropes: list[RopeConfig] = []
    for _, attention in layers:
        rope = attention.config.rope
        if rope is not None and rope not in ropes:
            rope.compute_frequencies()  # raises ModelError now, before weights are read
            ropes.append(rope)
    return ropes


def _group_layers(layers: Sequence[tuple[int, Attention]]) -> list[list[tuple[int, Attention]]]:
    """Return the attention layers of each cache group, full attention first. A layer comes with its block's index.

    Layers with the same window and the same sizes of K and V are a group. A cache block holds the K and V of all layers
    of its group, so that one block table serves them.
    """
    layers_by_key: dict[tuple[int | None, int, int], list[tuple[int, Attention]]] = {}
    for block_index, attention in layers:
        config = attention.config
        key = (config.window, config.num_kv_heads, config.head_dim)
        layers_by_key.setdefault(key, []).append((block_index, attention))
    sorted_keys = sorted(layers_by_key, key=lambda key: (key[0] is not None, key[0] or 0))
    return [layers_by_key[key] for key in sorted_keys]


def read_attention_config(
    config: HfConfig, decoder: DecoderConfig, *, theta: float = 10000.0, rotary_fraction: float = 1.0
) -> AttentionConfig:
    """Read the attention settings of a config.json with the names that most families use. Raises ModelError.

    `theta` and `rotary_fraction`: the family's defaults of rotary embedding.
    """
    num_heads = config.get_integer("num_attention_heads")
    num_kv_heads = config.get_optional_integer("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{config.source}: num_key_value_heads {num_kv_heads}: "
            f"expected a divisor of num_attention_heads {num_heads}"
        )
    head_dim = config.get_optional_integer("head_dim") or decoder.hidden_size // num_heads
    bias = config.get("attention_bias", False)
    return AttentionConfig(
        hidden_size=decoder.hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=RopeConfig.from_hf(config, head_dim, theta=theta, rotary_fraction=rotary_fraction),
        qkv_bias=bias,
        output_bias=bias,
        zero_centred_norm=decoder.zero_centred_norm,
    )


MakeMixer = Callable[[WeightScope], Mixer]
"""Function that makes a mixer from the scope of a block's weights."""
MakeMLP = Callable[[WeightScope, int], Mixer]
"""Function that makes a block's MLP from the scope of the block's weights and the block's index."""


def build_alternating_decoder(
    root: WeightScope,
    decoder: DecoderConfig,
    mixers: Sequence[MakeMixer],
    make_mlp: MakeMLP,
    *,
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
) -> CausalLM:
    """Build a decoder in which each block has a mixer (attention or a recurrent layer) and an MLP, each after a norm.

    `mixers`: for each block, a function that makes its mixer. `make_mlp`: makes the MLP of the block with an index.
    `norms`: names of a block's two norms in the checkpoint.
    """

    def make_branch(scope: WeightScope, norm_name: str, layer: Mixer) -> Branch:
        norm = RMSNorm(scope, norm_name, decoder.hidden_size, decoder.norm_eps, decoder.zero_centred_norm)
        return Branch(norm, layer, residual_scale=decoder.residual_scale)

    def make_block(scope: WeightScope, index: int) -> list[Branch]:
        mixer_norm, mlp_norm = norms
        mixer, mlp = mixers[index](scope), make_mlp(scope, index)
        return [make_branch(scope, mixer_norm, mixer), make_branch(scope, mlp_norm, mlp)]

    return CausalLM(root, decoder, make_block)


def build_dense_decoder(
    root: WeightScope,
    config: HfConfig,
    decoder: DecoderConfig,
    attention: AttentionConfig,
    *,
    window_by_layer: Sequence[int | None] | None = None,
    make_mlp: MakeMLP | None = None,
) -> CausalLM:
    """Build a decoder like Llama: every block is attention and then an MLP, and the weights have Llama's names.

    `window_by_layer`: sliding window of each layer; None: all have that of `attention`. `make_mlp`: makes the MLP of
    the block with an index; None: all are gated MLPs.
    """
    config.require_value("hidden_act", "silu")

    def make_attention_builder(window: int | None) -> MakeMixer:
        return lambda scope: Attention(scope.enter_scope("self_attn"), replace(attention, window=window))

    def make_gated_mlp(scope: WeightScope, index: int) -> GatedMLP:
        intermediate_size, bias = config.get_integer("intermediate_size"), config.get("mlp_bias", False)
        return GatedMLP(scope.enter_scope("mlp"), decoder.hidden_size, intermediate_size, bias)

    if window_by_layer is None:
        window_by_layer = [attention.window] * decoder.num_layers
    attentions = [make_attention_builder(window) for window in window_by_layer]
    return build_alternating_decoder(root, decoder, attentions, make_gated_mlp if make_mlp is None else make_mlp)
