"""What the engine was told: frozen values, read once at the edge (the CLI or `LLM`), handed to every part.

Nothing is derived here from a model or a machine; what is derived (the context length, the number of blocks) is a
result of loading, reported in `messages.CoreInfo`, and never written back.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from events.config import KVEventsConfig, make_rank_endpoint
from options import FILE, FOLDER, ROOT, SECRET, Flag, Key, Schema, Seconds, Size, check
from options.tls import make_server_context

__version__ = "0.1.0"

Count = Annotated[int, Meta(ge=1, le=10**9, title="N")]
Tokens = Annotated[int, Meta(ge=1, le=10**9, title="TOKENS")]
Bytes = Annotated[int, Meta(ge=1, le=10**15, title="BYTES"), Size()]
Device = Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d+)?)$", title="DEVICE", examples=["auto", "cpu", "cuda:0"])]
ToolCallParserName = Literal["auto", "none", "hermes", "qwen3_coder", "llama3_json", "mistral", "pythonic", "granite"]
ReasoningParserName = Literal["auto", "none", "qwen3", "deepseek_r1", "mistral", "granite"]
Backend = Literal["auto", "triton", "flash-attn", "torch", "cpu", "reference"]

EVENTS_HELP = (
    "JSON of vLLM's keys: enable_kv_cache_events, publisher, endpoint, replay_endpoint, buffer_steps, hwm, "
    "max_queue_size, topic. Without any of them events are on, on ports that the system chooses, on the interface of "
    "--host; a router finds them by GET /kv_event_sources. Events carry prompts as token ids: keep them on a private "
    "network. '{\"enable_kv_cache_events\": false}' turns them off."
)


DEFAULT_STEP_TOKENS = 2048


# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the core process needs. Sizes are in tokens unless the name says otherwise."""

    model: Annotated[str | None,
        "A local folder of an HF checkpoint, or a hub name. [default: the built-in random model]"] = None
    tokenizer: Annotated[str | None, FOLDER, Flag(metavar="FOLDER"),
        "Tokenizer files, where they are not MODEL's."] = None
    dtype: Annotated[Literal["auto", "bfloat16", "float16", "float32"], Flag(),
        "Of weights and cache; auto: the checkpoint's own."] = "auto"
    device: Annotated[Device, Flag(), "auto, cpu, cuda or cuda:N. auto takes a GPU where one works."] = "auto"
    max_model_len: Annotated[Tokens | None, Flag(), "Longest prompt plus answer. [default: the model's own]"] = None
    block_size: Annotated[Tokens, Flag(), "Tokens of a cache block, of its hash and of an event."] = 16
    max_num_seqs: Annotated[Count, Flag(), "Sequences in one step."] = 256
    max_num_batched_tokens: Annotated[Tokens | None, Flag(),
        "Tokens in one step; longer prompts are computed in chunks. [default: 2048; of a large model on a CPU as many "
        "as take about a second]"] = None
    prefill_order: Annotated[Literal["shortest", "arrival"], Flag(),
        "Whose prompt is computed first: shortest: who has the fewest tokens left to compute, and who has waited long; "
        "arrival: who came first."] = "shortest"
    num_gpu_blocks_override: Annotated[Count | None, Flag(), "Blocks of the cache, on any device."] = None
    kv_cache_memory_bytes: Annotated[Bytes | None, Flag(), "Size of the cache, on any device: 4GB, 512MiB."] = None
    host_cache_memory: Annotated[Bytes | None, Flag(),
        "Host memory under the cache: what the cache evicts goes there and comes back when a prompt has it "
        "(docs/eviction.md). [default: none]"] = None
    gpu_memory_utilization: Annotated[float, Meta(gt=0.0, le=1.0), Flag(),
        "Share of a GPU's memory for weights, steps and the cache, which gets what they leave."] = 0.9
    enable_prefix_caching: Annotated[bool, Flag("--enable-prefix-caching/--no-enable-prefix-caching"),
        "Reuse what earlier prompts computed."] = True
    eviction_policy: Annotated[Literal["lru", "adaptive"], Flag(),
        "What leaves a full cache first: the oldest, or what conversations like it are seen to need least, attention's "
        "blocks and recurrent states alike (docs/eviction.md; models with sliding windows take lru)."] = "lru"
    kv_events: Annotated[KVEventsConfig, Flag("--kv-events-config", metavar="JSON"), EVENTS_HELP] = field(
        default_factory=KVEventsConfig
    )
    generation_config: Annotated[Literal["auto", "vllm"], Flag(),
        "Default sampling parameters: auto takes the model's generation_config.json, vllm none."] = "auto"
    attention_backend: Annotated[Backend | None, Flag(), "Kernels. [default: auto]"] = None
    num_threads: Annotated[Count, Flag(), "CPU threads of the step loop."] = 1
    """One a worker keeps workers on one machine out of each other's way."""
    seed: Annotated[int, Meta(ge=-(10**18), le=10**18), Flag(), "Of sampling without a seed of its own."] = 0
    tensor_parallel_size: Annotated[Count, Flag("--tensor-parallel-size", "-tp"),
        "Processes that compute the model together, one a GPU, each a part of every layer."] = 1
    simulate: Annotated[str | None, Flag(metavar="SPEC"),
        "Compute nothing: steps sleep as long as they would take. SPEC is a preset such as h100:llama-3.1-8b, a file "
        "or a JSON object of step times (docs/simulation.md). Of MODEL only the tokenizer is needed, or none."] = None
    time_scale: Annotated[float, Meta(gt=0.0, le=1000.0, title="FACTOR"), Flag(),
        "With --simulate: multiplies all step times; 0.1 is ten times as fast."] = 1.0
    overlap: Annotated[Literal["auto", "on", "off"], Flag(),
        "Plan and begin a step while the one before is computed. auto: on a GPU, where it has not run yet; not on a "
        "CPU, where it gains little (docs/performance.md); never with --tensor-parallel-size."] = "auto"
    enforce_eager: Annotated[bool, Flag(), "On a GPU: no recorded decode steps (CUDA graphs)."] = False
    """Launch every kernel of a decode step instead of replaying a recorded step."""
    check_invariants: Annotated[bool, Flag(hidden=True), "Verify scheduler and pool after every step: slow."] = False
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Flag("--log-level", "--uvicorn-log-level"),
        "How much is logged, to stderr."] = "info"
    log_json: Annotated[bool, Flag(), "One JSON object a line."] = False

    def __post_init__(self) -> None:
        check(self)
        if self.kv_events.is_enabled:
            make_rank_endpoint(self.kv_events.endpoint, 0)

    @property
    def step_tokens_max(self) -> int:
        """`max_num_batched_tokens`, or its default."""
        return DEFAULT_STEP_TOKENS if self.max_num_batched_tokens is None else self.max_num_batched_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything the HTTP process needs besides the engine's own settings."""

    host: Annotated[str, Flag(metavar="HOST"), "Interface of the API and of the events."] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), Flag(), "0 lets the system choose."] = 8000
    served_model_names: Annotated[tuple[str, ...], Flag("--served-model-name", metavar="NAME..."),
        "Names that requests may use; answers carry the one that was asked for. [default: MODEL]"] = ()
    api_keys: Annotated[tuple[Key, ...], SECRET, Flag("--api-key", metavar="KEY", env="ENGINE_API_KEY"),
        "Require Authorization: Bearer KEY (or x-api-key). May be repeated; or set ENGINE_API_KEY."] = field(
        default=(), repr=False)
    admin_api_key: Annotated[Key | None, SECRET, Flag("--admin-api-key", metavar="KEY", env="ENGINE_ADMIN_API_KEY"),
        "Of the operator's routes: /sleep, /wake_up, /collective_rpc, /reset_prefix_cache. With --api-key and without "
        "this they are refused."] = field(default=None, repr=False)
    weights_folders: Annotated[tuple[str, ...], Flag("--allowed-weights-path", metavar="FOLDER"),
        "/collective_rpc may load weights from folders below this one, besides MODEL itself. May be repeated."] = ()
    max_connections: Annotated[int | None, Meta(ge=1, le=10**6, title="N"), Flag(),
        "Clients' connections at a time; further ones are answered 503 and closed. [default: 4096, or as many as there "
        "are file descriptors for]"] = None
    tls_cert: Annotated[str | None, FILE, Flag("--tls-cert", "--ssl-certfile", metavar="FILE"),
        "PEM; with --tls-key: HTTPS."] = None
    tls_key: Annotated[str | None, FILE, Flag("--tls-key", "--ssl-keyfile", metavar="FILE"),
        "PEM; of --tls-cert."] = None
    tls_client_ca: Annotated[str | None, FILE, Flag("--tls-client-ca", "--ssl-ca-certs", metavar="FILE"),
        "PEM; clients must bring a certificate that one of these has signed."] = None
    sleep_mode: Annotated[bool, Flag("--enable-sleep-mode/--no-sleep-mode"),
        "Serve /sleep, /wake_up, /is_sleeping and /collective_rpc (reload_weights), as vLLM does: for the operator "
        "(docs/weights.md)."] = False
    chat_template: Annotated[str | None, Flag(metavar="FILE"),
        "Jinja template (or its text) instead of the model's own."] = None
    tool_call_parser: Annotated[ToolCallParserName, Flag(),
        "How the model writes tool calls (docs/tools.md). auto: as its chat template shows; none: calls are text."
    ] = "auto"
    reasoning_parser: Annotated[ReasoningParserName, Flag(),
        "How the model encloses its thought. auto: as its chat template shows; none: it is told as any other text."
    ] = "auto"
    max_queue: Annotated[int, Meta(ge=0, le=10**9, title="N"), Flag(),
        "Sequences inside, running and waiting, before new ones get 429. 0: no limit."] = 1024
    max_body_bytes: Annotated[Bytes, "Of a request; longer ones are answered 413."] = 64 << 20
    body_timeout_s: Annotated[Seconds, "For a client to send a whole request."] = 60.0
    request_timeout_s: Annotated[Seconds | None, Flag("--request-timeout"),
        "Longest a request may take, waiting included. [default: no limit]"] = None
    stall_timeout_s: Annotated[Seconds, "A streaming client that takes no byte for so long is dropped."] = 120.0
    shutdown_timeout_s: Annotated[float, Meta(ge=0, le=1e9, title="SECONDS"), Flag("--shutdown-timeout"),
        "How long running requests may finish after SIGTERM or Ctrl-C."] = 30.0
    log_requests: Annotated[bool, Flag("--enable-log-requests/--disable-log-requests"), "One line a request."] = False

    def __post_init__(self) -> None:
        check(self)
        make_server_context(self.tls_cert, self.tls_key, self.tls_client_ca)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What `engine serve` is told."""

    server: Annotated[ServerConfig, ROOT] = field(default_factory=ServerConfig)
    engine: Annotated[EngineConfig, ROOT] = field(default_factory=EngineConfig)


SCHEMA = Schema(ServeConfig, "engine")


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
