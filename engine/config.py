"""What the engine was told: one frozen value, parsed once at the edge (the CLI or `LLM`), handed to every part.

Nothing is derived here from a model or a machine; what is derived (the context length, the number of blocks) is a
result of loading, reported in `messages.CoreInfo`, and never written back.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from events.config import KVEventsConfig

__version__ = "0.1.0"
DTYPES = ("auto", "bfloat16", "float16", "float32")
DEFAULT_BLOCK_SIZE = 16


class ConfigError(ValueError):
    """A setting that cannot be served; the message names the flag, the value and what is expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the core process needs. Sizes are in tokens unless the name says otherwise."""

    model: str | None = None
    """A local folder of an HF checkpoint, or a hub name that is in the local cache; None: the built-in random model."""
    tokenizer: str | None = None
    """Folder of tokenizer files, where it is not the model's."""
    dtype: str = "auto"
    device: str = "auto"
    """`auto` takes a GPU where one works, else the CPU."""
    max_model_len: int | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    attention_backend: str | None = None
    enforce_eager: bool = False
    """On a GPU: launch every kernel of a decode step instead of replaying a recorded step."""
    seed: int = 0
    num_threads: int = 1
    """Threads of the step loop's tensor library; one a worker keeps workers on one machine out of each other's way."""
    generation_config: str = "auto"
    """Where default sampling parameters come from: `auto` (the model's generation_config.json) or `vllm` (none)."""
    kv_events: KVEventsConfig = field(default_factory=KVEventsConfig)
    tensor_parallel_size: int = 1
    """Processes that compute the model together, each a part of every layer."""
    check_invariants: bool = False
    """Verify the scheduler's and the pool's invariants after every step: for tests, slow."""
    log_level: str = "info"
    legacy_events: bool = False
    """Publish events as positional arrays, as vLLM did before June 2026."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype {self.dtype!r}: expected one of {', '.join(DTYPES)}")
        for flag, value in (
            ("--max-model-len", self.max_model_len),
            ("--block-size", self.block_size),
            ("--max-num-seqs", self.max_num_seqs),
            ("--max-num-batched-tokens", self.max_num_batched_tokens),
            ("--num-gpu-blocks-override", self.num_gpu_blocks_override),
            ("--kv-cache-memory-bytes", self.kv_cache_memory_bytes),
            ("--num-threads", self.num_threads),
            ("--tensor-parallel-size", self.tensor_parallel_size),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{flag} {value}: expected a positive integer")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything the HTTP process needs besides the engine's own settings."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    """Names that requests may use; the first is the one answers carry. Empty: the model's own name."""
    api_keys: tuple[str, ...] = ()
    chat_template: str | None = None
    """Text of a Jinja chat template that replaces the model's own."""
    max_queue: int | None = 1024
    """Sequences that may be inside the engine (waiting and running) before new ones are refused; None: no limit."""
    max_body_bytes: int = 64 << 20
    body_timeout_s: float = 60.0
    shutdown_timeout_s: float = 30.0
    """How long running requests may finish after SIGTERM or Ctrl-C."""
    request_timeout_s: float | None = None
    """How long one request may take; None: as long as it needs."""
    stall_timeout_s: float = 120.0
    """A streaming client that takes no byte for so long is dropped."""
    log_requests: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port}: expected 0 to 65535")
        if self.max_queue is not None and self.max_queue < 1:
            raise ConfigError(f"--max-queue {self.max_queue}: expected a positive integer")


def default_kv_events(host: str) -> KVEventsConfig:
    """Events on, on free ports of the API's interface: what is served without `--kv-events-config`."""
    interface = "127.0.0.1" if is_loopback(host) else "*"
    return KVEventsConfig(
        enable_kv_cache_events=True, endpoint=f"tcp://{interface}:*", replay_endpoint=f"tcp://{interface}:*"
    )


def is_loopback(host: str) -> bool:
    """Whether an HTTP host can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
