"""Settings of a router's process, read from a file, the environment and flags into one frozen value."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from options import FILE, FOLDER, ROOT, SECRET, ConfigError, Flag, Key, LoadedConfig, Schema, Size
from options.tls import make_client_context, make_server_context
from prompts.kv_source import KV_PARAMS_FIELD, read_fleet_key
from router.decide.config import CoreConfig
from router.decide.workers import BLOCKCAST, KINDS_BY_DIALECT
from router.edge.config import EdgeConfig
from router.fleet.config import FleetConfig
from router.fleet.kubernetes import KubernetesSource
from router.fleet.worker_lists import read_workers_file
from router.fleet.worker_settings import WorkerSettings, parse_worker_flag
from router.miss_reasons.config import MissReasonsConfig
from router.picker.config import PickerConfig
from router.prompting.config import PromptWorkerConfig
from router.shadow.config import ShadowConfig
from router.tenancy.config import TenancyConfig

Share = Annotated[float, Meta(ge=0, le=1, title="SHARE")]
Endpoint = Annotated[
    str, Meta(pattern=r"^(tcp://.+:(\d{1,5}|\*)|(ipc|inproc)://.+)$", title="ENDPOINT", examples=["tcp://*:5557"])
]
Url = Annotated[str, Meta(min_length=1, title="URL")]
HostPort = Annotated[str, Meta(pattern=r"^.+:\d{1,5}$", title="HOST:PORT", examples=["127.0.0.1:9000"])]
KubernetesSpec = Annotated[str, Meta(title="SPEC", examples=["vllm", "pool/vllm", "llm/service/vllm:http"])]
HostName = Annotated[str, Meta(pattern=r"^[^\s/:]+$", title="NAME", examples=["router.example"])]


# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """Settings of `router run`. A setting's path in files and `--set` is made of the names of these fields.

    `core`, `edge` and `tenancy` are not part of the path.
    """

    workers: Annotated[tuple[str, ...], Flag("--worker", metavar="SPEC"),
        "A worker: its URL, or KEY=VALUE pairs (docs/reference/settings.md).",
        "Keys: events=tcp://..., replay=tcp://... and topic=... name its event streams; events=none means that it "
        "publishes none, and its cache is estimated from the requests sent to it. id=... names it. roles=a;b are its "
        "roles. kv=nixl, kv=mooncake, kv=p2p (vLLM) or kv=sglang says how it moves KV, and bootstrap=HOST:PORT is "
        "where others meet it (docs/concepts/prefill-decode.md). cache_tokens=N and max_num_seqs=N are the size of its "
        "cache and its largest batch, where it does not report them. prefill_order=shortest means that it computes the "
        "shortest prompt first (our engine reports this). reannounce=1 means that clients ask it for "
        "kv_cache_report_mode=full, so that a repeated store is not a second copy. "
        "model=NAME,root=FOLDER,block_size=N without url= describes a worker that gets its requests from another "
        "program, which asks POST /route."] = ()
    workers_file: Annotated[str | None, FILE, Flag(metavar="FILE"),
        "Read workers from FILE, one URL or SPEC a line; changes are followed."] = None
    worker_dns: Annotated[tuple[str, ...], Flag(metavar="URL"),
        "A URL with a host name that resolves to many workers, looked up every 10 s."] = ()
    kubernetes: Annotated[tuple[KubernetesSpec, ...], Flag(metavar="SPEC"),
        "Follow a Service or InferencePool: [[NAMESPACE/]KIND/]NAME[:PORT].",
        "KIND is service or pool: workers are its endpoints or its pods. Needs `pip install "
        "blockcast[kubernetes]`."] = ()
    bind_events: Annotated[tuple[Endpoint, ...], Flag(metavar="ENDPOINT"),
        "Accept event publishers that connect here, such as tcp://*:5557.",
        "The topic names the publisher's worker (kv@HOST...)."] = ()
    peers: Annotated[tuple[Endpoint, ...], Flag("--peer", metavar="ENDPOINT"),
        "The --peer-bind address of another router; its requests count as load."] = ()
    peer_bind: Annotated[Endpoint | None, Flag(),
        "Publish this router's load for its peers, such as tcp://*:5600."] = None
    snapshot_from: Annotated[tuple[Url, ...], Flag(metavar="URL"),
        "The admin URL of a running router, to copy its index from at the start.",
        "It is asked again after a gap in the events of a worker that offers no snapshot (vLLM with replay)."] = ()
    host: Annotated[str, Flag(metavar="HOST"), "Address to listen on."] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), Flag(), "Port to listen on; 0 lets the system choose."] = 8080
    reuse_port: Annotated[bool, Flag(),
        "Share --port with other routers on this machine that have this flag.",
        "The kernel spreads new connections over them. Give each its own --admin address, and --peer."] = False
    admin: Annotated[HostPort | None, Flag(),
        "Serve the admin routes and the dashboard here. [default: --port, for loopback]"] = None
    admin_api_key: Annotated[Key | None, SECRET, Flag(env="ROUTER_ADMIN_API_KEY"),
        "Key of the admin routes and of --snapshot-from. [default: random, printed]",
    ] = field(default=None, repr=False)
    admin_hosts: Annotated[tuple[HostName, ...], Flag("--admin-host", metavar="NAME"),
        "Another host name under which the admin routes may be requested.",
        "IP addresses and localhost are always accepted."] = ()
    tokenizer: Annotated[str | None, FOLDER, Flag(metavar="FOLDER"),
        "Folder with the tokenizer of every model. [default: the workers' own]"] = None
    chat_template: Annotated[str | None, Flag(metavar="FILE"),
        "Chat template instead of the model's own, as the workers have it."] = None
    conversation_cache_mb: Annotated[int, Meta(ge=0, le=10**7, title="MIB"), Size(1 << 20), Flag(),
        "Memory for conversations with bodies from 1 KB on, so that only the new part of one that returns is read; 0 "
        "reads every body whole.",
    ] = 64
    tokenize_threads: Annotated[Annotated[int, Meta(ge=1, le=256)] | None,
        "Threads that tokenise prompts. [default: one a core, at most 8]"] = None
    worker_api_key: Annotated[Key | None, SECRET, Flag(env="ROUTER_WORKER_API_KEY"),
        "Key that workers get. [default: the client's own]",
    ] = field(default=None, repr=False)
    kv_transfer_key_file: Annotated[str | None, FILE, Flag(metavar="FILE"),
        "The engines' --kv-transfer-key-file: KV moves among them.",
        "Or put the key into BLOCKCAST_ROUTER_KV_TRANSFER_KEY (docs/concepts/moving-kv.md)."] = None
    kv_transfer_key: Annotated[Key | None, SECRET, "That key itself; best set by its variable."] = field(
        default=None, repr=False)
    tls_cert: Annotated[str | None, FILE, Flag(metavar="FILE"),
        "Certificate (PEM) for HTTPS on all addresses; with --tls-key."] = None
    tls_key: Annotated[str | None, FILE, Flag(metavar="FILE"), "Private key (PEM) of --tls-cert."] = None
    tls_client_ca: Annotated[str | None, FILE, Flag(metavar="FILE"),
        "Require client certificates that these authorities (PEM) have signed."] = None
    worker_tls_ca: Annotated[str | None, FILE, Flag(metavar="FILE"),
        "Authorities (PEM) of https:// workers. [default: the system's]"] = None
    worker_tls_cert: Annotated[str | None, FILE, Flag(metavar="FILE"),
        "Certificate (PEM) shown to workers that require one; with --worker-tls-key."] = None
    worker_tls_key: Annotated[str | None, FILE, Flag(metavar="FILE"), "Private key (PEM) of --worker-tls-cert."] = None
    core: Annotated[CoreConfig, ROOT] = field(default_factory=CoreConfig)
    edge: Annotated[EdgeConfig, ROOT] = field(default_factory=EdgeConfig)
    tenancy: Annotated[TenancyConfig, ROOT] = field(default_factory=TenancyConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    miss_reasons: MissReasonsConfig = field(default_factory=MissReasonsConfig)
    prompt_workers: PromptWorkerConfig = field(default_factory=PromptWorkerConfig)
    seed: Annotated[int, Meta(ge=0, le=10**12), "Seed of all random choices."] = 0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Flag(),
        "Lowest level that is logged, to stderr."] = "info"
    log_requests: Annotated[Share, Flag(),
        "Share of requests that are logged with worker, prediction and outcome."] = 0.0
    log_decisions: Annotated[Share, Flag(),
        "Share of requests for which the prices of all workers are logged."] = 0.0
    otlp_endpoint: Annotated[Url | None, Flag(metavar="URL"),
        "Send OpenTelemetry traces here (OTLP over HTTP). [default: no traces]"] = None
    trace_share: Annotated[Share, Flag(),
        "Share of requests that are traced; a sampled traceparent always is."] = 0.01
    log_json: Annotated[bool, Flag(), "Log one JSON object a line."] = False

    def __post_init__(self) -> None:
        """Check that the settings fit together. Raises ConfigError."""
        self._check_workers()
        if self.admin_address is not None and self.admin_address[1] > 65535:
            raise ConfigError(f"--admin: got {self.admin!r}, expected HOST:PORT with a port of at most 65535")
        if self.reuse_port and self.port == 0:
            raise ConfigError("--reuse-port: give --port a number, the same to every router that shares it")
        if self.tokenizer is not None and not (Path(self.tokenizer) / "tokenizer.json").is_file():
            raise ConfigError(f"--tokenizer: {self.tokenizer} has no tokenizer.json, expected a checkpoint's folder")

    def _check_workers(self) -> None:
        """Raise ConfigError if a worker, or a source of workers, cannot be used."""
        worker_ids = [flag.worker_id for flag in self.worker_flags]
        for worker_id in worker_ids:
            if worker_ids.count(worker_id) > 1:
                raise ConfigError(f"worker {worker_id} is given twice")
        for url in self.worker_dns:
            parse_worker_flag(url)
        for spec in self.kubernetes:
            KubernetesSource.parse(spec)
        if self.kubernetes and find_spec("kubernetes_asyncio") is None:
            raise ConfigError("--kubernetes needs more: pip install 'blockcast[kubernetes]'")

    def read_fleet_key(self) -> bytes | None:
        """Return the key under which engines move KV; None if there is none. Raises ConfigError."""
        return read_fleet_key(self.kv_transfer_key_file, self.kv_transfer_key, "BLOCKCAST_ROUTER_KV_TRANSFER_KEY")

    def make_worker_tls(self) -> ssl.SSLContext:
        """Return the TLS context of connections to workers. Raises ConfigError."""
        return make_client_context(*self.worker_tls_files)

    @property
    def worker_tls_files(self) -> tuple[str | None, str | None, str | None, str]:
        """Certificate, key and authorities for workers with https, and how the flags that name them begin."""
        return self.worker_tls_cert, self.worker_tls_key, self.worker_tls_ca, "--worker-tls"

    @property
    def kv_dialects(self) -> frozenset[str]:
        """Dialects in which this router has workers move KV. Raises ConfigError."""
        if any(name == KV_PARAMS_FIELD or name.startswith("bootstrap_") for name in self.edge.passed_fields):
            return frozenset()  # clients have workers move KV themselves
        if self.read_fleet_key() is None:
            return frozenset(KINDS_BY_DIALECT) - {BLOCKCAST}
        return frozenset(KINDS_BY_DIALECT)

    @property
    def worker_flags(self) -> list[WorkerSettings]:
        return [parse_worker_flag(text) for text in self.workers]

    @property
    def admin_address(self) -> tuple[str, int] | None:
        """Address of the admin routes; None serves them on the main address, to loopback only."""
        if self.admin is None:
            return None
        host, _, port = self.admin.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def http_port(self) -> int:
        """Port of the main HTTP address."""
        return self.port

    @staticmethod
    def verify(loaded_config: LoadedConfig) -> ProcessConfig:
        """Check what only a start would check: TLS files, and each line of a workers file. Raises ConfigError."""
        config: ProcessConfig = loaded_config.config
        make_server_context(config.tls_cert, config.tls_key, config.tls_client_ca)
        config.make_worker_tls()
        if config.workers_file is not None:
            read_workers_file(Path(config.workers_file))
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class EppConfig(ProcessConfig):
    """Settings of `router epp`, which chooses workers for Envoy's requests; Envoy itself forwards the requests.

    `port` is the gRPC port at which Envoy asks. HTTP serves the router's own routes only.
    """

    port: Annotated[int, Meta(ge=0, le=65535), Flag(),
        "Port of the endpoint picker (gRPC); 0 lets the system choose."] = 9002
    picker: Annotated[PickerConfig, ROOT] = field(default_factory=PickerConfig)

    def __post_init__(self) -> None:
        ProcessConfig.__post_init__(self)
        if self.reuse_port:
            raise ConfigError("--reuse-port: not for `router epp`: start several, with --peer each")
        if self.picker.self_signed and self.tls_cert is not None:
            raise ConfigError("--self-signed: not with --tls-cert")

    @property
    def kv_dialects(self) -> frozenset[str]:
        return frozenset()  # Envoy forwards the requests, and adds no fields

    @property
    def http_port(self) -> int:
        return self.picker.metrics_port


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowProcessConfig(ProcessConfig):
    """Settings of `router shadow`, which sends no requests, and compares its choices with those of another router."""

    port: Annotated[int, Meta(ge=0, le=65535), Flag(), "Port to listen on; 0 lets the system choose."] = 8090
    shadow: ShadowConfig = field(default_factory=ShadowConfig)

    def __post_init__(self) -> None:
        ProcessConfig.__post_init__(self)
        if self.reuse_port:
            raise ConfigError("--reuse-port: not for `router shadow`, which decides nothing")
        if self.core.queue.fair:
            raise ConfigError("--fair: not for `router shadow`, which holds nothing")
        report = self.shadow.report
        if report is not None and not Path(report).parent.is_dir():
            raise ConfigError(f"--report: got {report!r}, expected a file in a folder that exists")

    @property
    def kv_dialects(self) -> frozenset[str]:
        return frozenset()


HELP_SECTIONS = {
    "Options": (
        "workers", "kubernetes", "host", "port", "api_keys", "admin", "admin_api_key", "tokenizer", "log_level"),
    "Workers and their events": (
        "workers_file", "worker_dns", "bind_events", "worker_api_key", "worker_tls_ca", "worker_tls_cert",
        "worker_tls_key", "fleet.trust_event_endpoints", "kv_transfer_key_file"),
    "Several routers": ("peers", "peer_bind", "snapshot_from", "reuse_port"),
    "Choosing a worker": ("policy", "policy_function", "session_affinity", "session_headers", "continue_streams"),
    "Queue and fair shares": (
        "queue.fair", "key_shares", "queue.background_priority", "queue.background_running", "queue.ttft_s_max",
        "requests_max"),
    "API keys": ("key_requests_max", "key_tokens_max", "priority_min", "key_priorities", "tenant_salts"),
    "Models": ("chat_template", "model_aliases", "model_fallbacks", "model_canaries"),
    "Clients": (
        "tls_cert", "tls_key", "tls_client_ca", "cors_origins", "pass_routes", "passed_fields", "cache_headers",
        "connections_max", "limits.body_bytes_max", "admin_hosts"),
    "Timeouts": (
        "timeouts.connect_s", "timeouts.first_byte_s", "timeouts.idle_s", "timeouts.total_s",
        "client_timeouts.request_s", "client_timeouts.send_s", "ready_s", "unready_s", "shutdown_s"),
    "Logs and traces": (
        "log_requests", "log_decisions", "log_json", "otlp_endpoint", "trace_share", "miss_reasons.enabled",
        "miss_reasons.share"),
}  # fmt: skip
"""The headings of `router run --help` and the settings under each; the rest is set by file, environment or --set."""
PICKER_SETTINGS = ("health_port", "metrics_port", "self_signed", "fallbacks", "objectives")
SHADOW_SETTINGS = ("shadow.log", "shadow.report", "shadow.requests_max", "shadow.warm_share", "shadow.every_s")

SCHEMA = Schema(ProcessConfig, "router", HELP_SECTIONS)
SHADOW_SCHEMA = Schema(ShadowProcessConfig, "router", {**HELP_SECTIONS, "Comparison": SHADOW_SETTINGS})
EPP_SCHEMA = Schema(EppConfig, "router", {**HELP_SECTIONS, "Endpoint picker": PICKER_SETTINGS})
