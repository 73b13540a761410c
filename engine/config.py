"""Settings of the engine: frozen values, read once by the CLI or `LLM` and passed to every part.

Nothing here depends on a model or a machine. Values that do, such as the number of blocks, are results of loading: they
are in `messages.CoreInfo`, and never written back.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from events.config import KVEventsConfig, make_rank_endpoint
from options import FILE, FOLDER, ROOT, SECRET, ConfigError, Flag, Key, Schema, Seconds, Size, check_config
from options.addresses import bracket_host
from options.tls import make_server_context
from prompts.kv_source import read_fleet_key

__version__ = "0.1.0"

Count = Annotated[int, Meta(ge=1, le=10**9, title="N")]
Port = Annotated[int, Meta(ge=0, le=65535)]
Tokens = Annotated[int, Meta(ge=1, le=10**9, title="TOKENS")]
Bytes = Annotated[int, Meta(ge=1, le=10**15, title="BYTES"), Size()]
Device = Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d+)?)$", title="DEVICE", examples=["auto", "cpu", "cuda:0"])]
ToolCallParserName = Literal["auto", "none", "hermes", "qwen3_coder", "llama3_json", "mistral", "pythonic", "granite"]
ReasoningParserName = Literal["auto", "none", "qwen3", "deepseek_r1", "mistral", "granite"]
Backend = Literal["auto", "triton", "flash-attn", "torch", "cpu", "reference"]

EVENTS_HELP = "vLLM's JSON of event settings. [default: events on, on free ports of --host]"
EVENTS_DETAILS = (
    "Keys: enable_kv_cache_events, publisher, endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size, topic. A "
    "router finds the ports by GET /kv_event_sources. Events carry prompts as token ids: keep them on a private "
    "network. '{\"enable_kv_cache_events\": false}' turns them off."
)


DEFAULT_STEP_TOKENS = 2048


# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """Settings of how this engine exchanges blocks of its KV cache with other engines, its peers.

    Each setting has its type, its command line flag and its help text. A fleet is all engines that share one key.
    """

    port: Annotated[Port | None, Flag("--kv-transfer", metavar="PORT"),
        "Give cached blocks to peers on this port, and take theirs. [default: off]",
        "Needs the fleet's key; 0 lets the system choose a port (docs/concepts/moving-kv.md)."] = None
    host: Annotated[str, "Address of that port. [default: --host]"] = ""
    key_file: Annotated[str | None, FILE, Flag("--kv-transfer-key-file", metavar="FILE"),
        "File with the fleet's key, which all its engines and routers have.",
        "Or put the key into BLOCKCAST_ENGINE_KV_TRANSFER_KEY."] = None
    key: Annotated[Key | None, SECRET, "The fleet's key itself; best set by its variable."] = field(
        default=None, repr=False)
    timeout_s: Annotated[Seconds, Flag("--kv-transfer-timeout"),
        "Longest that a request waits for blocks of a peer."] = 5.0

    def __post_init__(self) -> None:
        check_config(self)

    def read_key(self) -> bytes:
        """Return the fleet's key. Raises ConfigError if there is none."""
        variable = "BLOCKCAST_ENGINE_KV_TRANSFER_KEY"
        key = read_fleet_key(self.key_file, self.key, variable)
        if key is None:
            raise ConfigError(f"--kv-transfer: expected the fleet's key, by --kv-transfer-key-file or {variable}")
        return key


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of the process that computes. Sizes are in tokens unless the name has another unit."""

    model: Annotated[str | None,
        "Folder of a Hugging Face checkpoint, or its name on the hub. [default: a random model]"] = None
    tokenizer: Annotated[str | None, FOLDER, Flag(metavar="FOLDER"),
        "Folder with the tokenizer, where it is not MODEL's."] = None
    dtype: Annotated[Literal["auto", "bfloat16", "float16", "float32"], Flag(),
        "Type of weights and cache; auto takes the checkpoint's."] = "auto"
    device: Annotated[Device, Flag(), "auto, cpu, cuda or cuda:N; auto takes a GPU where one works."] = "auto"
    max_model_len: Annotated[Tokens | None, Flag(),
        "Longest prompt with its answer. [default: the model's limit]"] = None
    block_size: Annotated[Tokens, Flag(), "Tokens of a cache block, and of a block in events."] = 16
    max_num_seqs: Annotated[Count, Flag(), "Most sequences in one step."] = 256
    max_num_batched_tokens: Annotated[Tokens | None, Flag(),
        "Most tokens in one step; longer prompts are split. [default: 2048]",
        "A large model on a CPU takes as many by default as it computes in about a second."] = None
    prefill_order: Annotated[Literal["shortest", "arrival"], Flag(),
        "Compute the shortest prompt first, or in order of arrival.",
        "With shortest, a prompt that has waited long goes first too."] = "shortest"
    num_gpu_blocks_override: Annotated[Count | None, Flag(), "Size of the cache in blocks, on any device."] = None
    kv_cache_memory_bytes: Annotated[Bytes | None, Flag(),
        "Size of the cache in bytes, on any device: 4GB, 512MiB."] = None
    host_cache_memory: Annotated[Bytes | None, Flag(),
        "Host memory for blocks that the cache evicts: 8GiB. [default: none]",
        "They come back when a prompt needs them (docs/how-to/size-the-cache.md)."] = None
    gpu_memory_utilization: Annotated[float, Meta(gt=0.0, le=1.0), Flag(),
        "Share of a GPU's memory for weights, steps and cache."] = 0.9
    enable_prefix_caching: Annotated[bool, Flag("--enable-prefix-caching/--no-enable-prefix-caching"),
        "Reuse the cached prefixes of earlier prompts."] = True
    eviction_policy: Annotated[Literal["lru", "adaptive"], Flag(),
        "Evict the least recently used blocks, or learn which are reused.",
        "docs/how-to/size-the-cache.md; models with sliding windows take lru."] = "lru"
    kv_events: Annotated[KVEventsConfig, Flag("--kv-events-config", metavar="JSON"),
        EVENTS_HELP, EVENTS_DETAILS] = field(default_factory=KVEventsConfig)
    generation_config: Annotated[Literal["auto", "vllm"], Flag(),
        "Default sampling: auto reads generation_config.json."] = "auto"
    attention_backend: Annotated[Backend | None, Flag(), "Kernels to use. [default: auto]"] = None
    num_threads: Annotated[Count, Flag(), "CPU threads that compute a step."] = 1
    """The default of one thread keeps several workers on one machine from slowing each other."""
    seed: Annotated[int, Meta(ge=-(10**18), le=10**18), Flag(), "Seed of sampling for requests without one."] = 0
    tensor_parallel_size: Annotated[Count, Flag("--tensor-parallel-size", "-tp"),
        "Processes that share each layer of the model, one a GPU."] = 1
    simulate: Annotated[str | None, Flag(metavar="SPEC"),
        "Compute nothing; sleep as long as steps take by SPEC, such as h100:llama-3.1-8b.",
        "SPEC is a preset, a file, or a JSON object of step times (docs/how-to/simulate-a-fleet.md). "
        "Of MODEL only the tokenizer is needed, or nothing."] = None
    time_scale: Annotated[float, Meta(gt=0.0, le=1000.0, title="FACTOR"), Flag(),
        "With --simulate: factor on all step times; 0.1 is ten times as fast."] = 1.0
    overlap: Annotated[Literal["auto", "on", "off"], Flag(),
        "Plan a step while another is computed; auto: on a GPU.",
        "On a CPU tokens only come a step later; never with --tensor-parallel-size."] = "auto"
    enforce_eager: Annotated[bool, Flag(), "Do not use CUDA graphs."] = False
    """Whether every kernel of a decode step is launched, instead of replaying a recorded step."""
    kv_transfer: KVTransferConfig = field(default_factory=KVTransferConfig)
    check_invariants: Annotated[bool, Flag(hidden=True), "Check scheduler and cache after every step (slow)."] = False
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Flag("--log-level", "--uvicorn-log-level"),
        "Lowest level that is logged, to stderr."] = "info"
    log_json: Annotated[bool, Flag(), "Log one JSON object a line."] = False

    def __post_init__(self) -> None:
        check_config(self)
        if self.kv_events.is_enabled:
            make_rank_endpoint(self.kv_events.endpoint, 0)

    @property
    def step_tokens_max(self) -> int:
        """Most tokens of a step: `max_num_batched_tokens`, or its default."""
        return DEFAULT_STEP_TOKENS if self.max_num_batched_tokens is None else self.max_num_batched_tokens

    def overlaps_steps(self, device_type: str) -> bool:
        """Return whether a step is planned and begun while the one before is computed, on `cpu` or `cuda`."""
        if self.tensor_parallel_size > 1:  # followers would need the tokens that rank 0 draws
            return False
        return self.overlap == "on" or (self.overlap == "auto" and device_type != "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the process that serves HTTP.

    A field's annotation has its type, the range of its value, its command line flag, its help text, and sometimes
    another text, which only the manual shows.
    """

    # Address, access and connections
    host: Annotated[str, Flag(metavar="HOST"), "Address to listen on, for the API and events."] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), Flag(), "Port to listen on; 0 lets the system choose."] = 8000
    served_model_names: Annotated[tuple[str, ...], Flag("--served-model-name", metavar="NAME..."),
        "Names of the model in requests and answers. [default: MODEL]"] = ()
    api_keys: Annotated[tuple[Key, ...], SECRET, Flag("--api-key", metavar="KEY", env="ENGINE_API_KEY"),
        "Key that clients must send; ENGINE_API_KEY sets it too.",
        "Clients send it as Authorization: Bearer KEY, or x-api-key."] = field(
        default=(), repr=False)
    admin_api_key: Annotated[Key | None, SECRET, Flag("--admin-api-key", metavar="KEY", env="ENGINE_ADMIN_API_KEY"),
        "Key of the operator's routes, such as /sleep and /reset_prefix_cache.",
        "Also of /wake_up and /collective_rpc. Without it, they answer 403 if --api-key is "
        "set."] = field(default=None, repr=False)
    weights_folders: Annotated[tuple[str, ...], Flag("--allowed-weights-path", metavar="FOLDER"),
        "Folder below which /collective_rpc may load weights, besides MODEL."] = ()
    max_connections: Annotated[int | None, Meta(ge=1, le=10**6, title="N"), Flag(),
        "Most connections at once; more are answered 503. [default: 4096]",
        "Fewer where there are fewer file descriptors."] = None

    # HTTPS
    tls_cert: Annotated[str | None, FILE, Flag("--tls-cert", "--ssl-certfile", metavar="FILE"),
        "Certificate (PEM) for HTTPS; with --tls-key."] = None
    tls_key: Annotated[str | None, FILE, Flag("--tls-key", "--ssl-keyfile", metavar="FILE"),
        "Private key (PEM) of --tls-cert."] = None
    tls_client_ca: Annotated[str | None, FILE, Flag("--tls-client-ca", "--ssl-ca-certs", metavar="FILE"),
        "Require client certificates that these authorities (PEM) have signed."] = None

    # Features
    sleep_mode: Annotated[bool, Flag("--enable-sleep-mode/--no-sleep-mode"),
        "Serve /sleep, /wake_up and /collective_rpc, as vLLM does.",
        "Also /is_sleeping; /collective_rpc has reload_weights (docs/how-to/change-weights.md)."] = False
    chat_template: Annotated[str | None, Flag(metavar="FILE"),
        "Chat template (a file or Jinja text) instead of the model's own."] = None
    tool_call_parser: Annotated[ToolCallParserName, Flag(),
        "Format of tool calls; auto: by the chat template; none: not parsed."
    ] = "auto"
    reasoning_parser: Annotated[ReasoningParserName, Flag(),
        "Format of reasoning; auto: by the chat template; none: not parsed."
    ] = "auto"

    # Limits
    max_queue: Annotated[int, Meta(ge=0, le=10**9, title="N"), Flag(),
        "Most sequences, running and waiting; more get 429. 0: no limit."] = 1024
    max_body_bytes: Annotated[Bytes, "Largest body of a request; larger ones are answered 413."] = 64 << 20
    body_timeout_s: Annotated[Seconds, "Longest that a client may take to send a request."] = 60.0
    request_timeout_s: Annotated[Seconds | None, Flag("--request-timeout"),
        "Longest that a request may take, waiting included. [default: no limit]"] = None
    stall_timeout_s: Annotated[Seconds, "Longest that a client may read nothing of a stream."] = 120.0
    shutdown_timeout_s: Annotated[float, Meta(ge=0, le=1e9, title="SECONDS"), Flag("--shutdown-timeout"),
        "Longest that running requests may take after SIGTERM or Ctrl-C."] = 30.0

    # Logs
    log_requests: Annotated[bool, Flag("--enable-log-requests/--disable-log-requests"),
        "Log one line a request."] = False

    def __post_init__(self) -> None:
        check_config(self)
        make_server_context(self.tls_cert, self.tls_key, self.tls_client_ca)  # only checks that the files can be used


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """All settings of `engine serve`."""

    server: Annotated[ServerConfig, ROOT] = field(default_factory=ServerConfig)
    engine: Annotated[EngineConfig, ROOT] = field(default_factory=EngineConfig)


HELP_SECTIONS = {
    "Options": ("host", "port", "api_keys", "served_model_names", "max_model_len", "num_gpu_blocks_override",
                "kv_cache_memory_bytes", "kv_events", "log_level"),
    "Model": ("tokenizer", "dtype", "device", "tensor_parallel_size", "chat_template", "tool_call_parser",
              "reasoning_parser", "generation_config"),
    "Cache": ("block_size", "enable_prefix_caching", "eviction_policy", "host_cache_memory", "gpu_memory_utilization"),
    "Scheduling": ("max_num_seqs", "max_num_batched_tokens", "prefill_order", "max_queue", "request_timeout_s",
                   "overlap", "enforce_eager", "attention_backend", "num_threads", "seed"),
    "Simulation": ("simulate", "time_scale"),
    "Access": ("max_connections", "tls_cert", "tls_key", "tls_client_ca", "admin_api_key", "sleep_mode",
               "weights_folders", "kv_transfer.port", "kv_transfer.key_file", "kv_transfer.timeout_s"),
    "Logs and shutdown": ("log_requests", "log_json", "shutdown_timeout_s"),
}  # fmt: skip
SCHEMA = Schema(ServeConfig, "engine", HELP_SECTIONS)


def make_default_kv_events(host: str) -> KVEventsConfig:
    """Return the event settings without `--kv-events-config`: on, on free ports of the API's interface."""
    if host == "localhost":
        interface = "127.0.0.1"
    elif is_loopback(host):
        interface = bracket_host(host)
    else:
        interface = "[::]" if ":" in host else "*"
    return KVEventsConfig(
        enable_kv_cache_events=True, endpoint=f"tcp://{interface}:*", replay_endpoint=f"tcp://{interface}:*"
    )


def is_loopback(host: str) -> bool:
    """Return whether an HTTP host can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
