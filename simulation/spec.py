"""Specification of a simulated engine: step times, cache size and answers, from JSON, a file, or `GPU:MODEL`.

A preset is computed from published numbers, not measured: weights and KV are read at 80 % of a GPU's bandwidth, and
products run at 50 % of its dense bf16 rate. `benchmarks/step_times.py` learns a specification from a real engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from options import ConfigError
from prompts.chat_completions import Json, decode_json
from prompts.errors import RequestError
from simulation.steps import StepTimes

Seconds = Annotated[float, Meta(ge=0.0, le=3600.0)]
Count = Annotated[int, Meta(ge=1, le=10**12)]

MAX_TEXT_CHARS = 4096
"""Longest scripted answer in characters; the grammar of a much longer one would be slow."""

BANDWIDTH_SHARE, COMPUTE_SHARE, MEMORY_SHARE = 0.8, 0.5, 0.9
STEP_OVERHEAD_S = 1e-3
"""Seconds of a step besides the device's work: scheduling, launching, sampling."""
SEQUENCE_OVERHEAD_S = 10e-6
"""Seconds of each sequence in a step, besides the device's work."""
FIRST_TOOL = "*"
"""Name in a script for the first tool of a request."""


class ScriptTurn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Answer at one turn of the conversation: a tool call, a text, or without both a random text."""

    call: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """Name of the called tool; FIRST_TOOL: the first one of the request."""
    arguments: dict[str, Json] | None = None
    """Arguments of the call; None: some that the tool's schema allows."""
    text: Annotated[str, Meta(min_length=1, max_length=MAX_TEXT_CHARS)] | None = None

    def __post_init__(self) -> None:
        if self.text is not None and self.call is not None:
            raise ValueError("expected call or text, not both")
        if self.arguments is not None and self.call is None:
            raise ValueError("arguments: expected only beside call")


CALL_ONE_TOOL_TURNS = (ScriptTurn(call=FIRST_TOOL), ScriptTurn())
"""Turns that `"script": "tools"` stands for."""


class SimulationSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speed, cache and answers of a simulated engine, as a JSON object describes them.

    A decode step takes step_s + decode_request_s * sequences + decode_context_s * tokens of all their contexts.
    """

    prefill_s_per_token: Seconds
    """Seconds of a prompt token with nothing before it."""
    quadratic_tokens: Annotated[float, Meta(gt=0.0)] = 1e9
    """Tokens before a prompt token at which it takes twice that time; the time grows in proportion."""
    step_s: Seconds = 0.0
    """Fixed seconds of each step."""
    decode_request_s: Seconds = 0.0
    """Seconds that each decoding sequence adds to a step."""
    decode_context_s: Seconds = 0.0
    """Seconds that each token in the context of a decoding sequence adds to a step."""
    kv_tokens: Count
    """Tokens that the cache holds, unless --num-gpu-blocks-override is given."""
    kv_bytes_per_token: Count | None = None
    """Bytes of KV of one token; needed for --host-cache-memory."""
    host_gb_s: Annotated[float, Meta(gt=0.0, le=1e6)] = 25.0
    """Rate at which KV comes back from host memory, in 1e9 bytes a second."""
    transfer_gb_s: Annotated[float, Meta(gt=0.0, le=1e6)] = 5.0
    """Rate at which KV comes from other engines (--kv-transfer), in 1e9 bytes a second."""
    max_model_len: Count = 131_072
    """Longest context, unless --max-model-len is given."""
    answer_tokens: Count | None = None
    """Length of an answer, its end token included; None: as long as the request allows."""
    script: str | Annotated[tuple[ScriptTurn, ...], Meta(min_length=1, max_length=1024)] | None = None
    """Answers of the engine, in one of four forms.

    None: words without meaning. A path: the answer is a line of this text file, always the same for the same prompt.
    A list of turns: the first answer of a conversation is the first turn, and so on. "tools": CALL_ONE_TOOL_TURNS.
    """
    source: str = "given"
    """Origin of the numbers."""

    @property
    def script_turns(self) -> tuple[ScriptTurn, ...]:
        """The turns that `script` lists or, as "tools", stands for; empty if it is a file or None."""
        if self.script == "tools":
            return CALL_ONE_TOOL_TURNS
        return self.script if isinstance(self.script, tuple) else ()

    def make_step_times(self, step_tokens: int, time_scale: float) -> StepTimes:
        """Return the times of steps of at most `step_tokens` tokens; `time_scale` multiplies all of them."""
        field_names = ("prefill_s_per_token", "quadratic_tokens", "step_s", "decode_request_s", "decode_context_s")
        load_s = (self.kv_bytes_per_token or 0) / (self.host_gb_s * 1e9)
        value_by_field = {name: getattr(self, name) for name in field_names}
        times = StepTimes(**value_by_field, step_tokens=step_tokens, load_s_per_token=load_s)
        return times.scale(time_scale, time_scale)


class GpuPreset(NamedTuple):
    """Figures of a GPU's data sheet."""

    bytes_per_s: float
    """Bandwidth of its memory."""
    bf16_per_s: float
    """Operations on bf16 in a second, without sparsity."""
    memory_bytes: float


class ModelPreset(NamedTuple):
    """Sizes of a model."""

    parameter_count: float
    num_layers: int
    attention_width: int
    """Width of attention: query heads times head size."""
    kv_bytes_per_token: int
    max_model_len: int


GPU_BY_NAME = {
    "h200": GpuPreset(4.8e12, 989e12, 141e9),
    "h100": GpuPreset(3.35e12, 989e12, 80e9),
    "a100": GpuPreset(2.04e12, 312e12, 80e9),
    "l40s": GpuPreset(0.864e12, 362e12, 48e9),
    "l4": GpuPreset(0.3e12, 121e12, 24e9),
}
MODEL_BY_NAME = {
    "llama-3.1-8b": ModelPreset(8.03e9, 32, 4096, 131_072, 131_072),
    "qwen3-0.6b": ModelPreset(0.6e9, 28, 2048, 114_688, 40_960),
    "qwen3-8b": ModelPreset(8.19e9, 36, 4096, 147_456, 40_960),
    "qwen3-32b": ModelPreset(32.8e9, 64, 8192, 262_144, 40_960),
}
_SPEC_DECODER = msgspec.json.Decoder(SimulationSpec)
PRESET_NAMES = tuple(f"{gpu}:{model}" for gpu in GPU_BY_NAME for model in MODEL_BY_NAME)


def read_spec(spec_text: str) -> SimulationSpec:
    """Return the simulation that `--simulate SPEC` describes. Raises ConfigError.

    SPEC is a preset (`h100:qwen3-8b`), a JSON object (`{"kv_tokens": 100000}`), or the path of a file with such an
    object.
    """
    gpu_name, _, model_name = spec_text.partition(":")
    if gpu_name in GPU_BY_NAME and model_name in MODEL_BY_NAME:
        return _make_preset_spec(gpu_name, model_name)
    if spec_text.lstrip().startswith("{"):
        return _decode_spec(spec_text, "SPEC")
    return _decode_spec(_read_spec_file(spec_text), spec_text)


def _read_spec_file(path: str) -> str:
    """Return the text of a file named on the command line. Raises ConfigError that lists all forms of a SPEC."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--simulate {path!r}: no such file ({error}), and no preset; expected a JSON object, a file with one, or "
            f"GPU:MODEL of {', '.join(GPU_BY_NAME)} and {', '.join(MODEL_BY_NAME)}"
        ) from None


def _decode_spec(json_text: str, source: str) -> SimulationSpec:
    """Decode the JSON of a spec. Raises ConfigError that names `source`, where the JSON came from."""
    try:
        return decode_json(_SPEC_DECODER, json_text.encode())
    except RequestError as error:  # its message speaks of a request's body, which a spec is not
        reason = error.message.removeprefix("the body: ").replace("the body is", "this is")
        field_names = ", ".join(SimulationSpec.__struct_fields__)
        raise ConfigError(f"--simulate {source}: {reason}; a SPEC is a JSON object with {field_names}") from None


def _make_preset_spec(gpu_name: str, model_name: str) -> SimulationSpec:
    """Return the simulated speed and memory of a model on one GPU, computed from their data sheets.

    Prefill is limited by arithmetic: two operations a parameter and token. A step is limited by memory: it reads the
    weights, in two bytes a parameter, and the KV cache of its requests. Raises ConfigError if the weights do not fit.
    """
    gpu, model = GPU_BY_NAME[gpu_name], MODEL_BY_NAME[model_name]
    weight_bytes = 2 * model.parameter_count
    kv_tokens = int((MEMORY_SHARE * gpu.memory_bytes - weight_bytes) / model.kv_bytes_per_token)
    if kv_tokens < 1:
        raise ConfigError(f"--simulate {gpu_name}:{model_name}: the weights do not fit in the memory of one such GPU")
    bytes_per_s = BANDWIDTH_SHARE * gpu.bytes_per_s
    operations_per_s = COMPUTE_SHARE * gpu.bf16_per_s
    return SimulationSpec(
        prefill_s_per_token=2 * model.parameter_count / operations_per_s,
        # A token's scores and sums over a context of n are 4 * n * width operations a layer.
        quadratic_tokens=model.parameter_count / (2 * model.num_layers * model.attention_width),
        step_s=STEP_OVERHEAD_S + weight_bytes / bytes_per_s,
        decode_request_s=SEQUENCE_OVERHEAD_S,
        decode_context_s=model.kv_bytes_per_token / bytes_per_s,
        kv_tokens=kv_tokens,
        kv_bytes_per_token=model.kv_bytes_per_token,
        max_model_len=min(model.max_model_len, kv_tokens),
        source=f"{gpu_name}:{model_name}, by arithmetic",
    )
