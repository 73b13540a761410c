"""Everything a router is told: one frozen value, from a file, the environment and flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from options import FILE, FOLDER, ROOT, SECRET, ConfigError, Flag, Key, LoadedConfig, Schema, Size
from prompts.segments import CACHE_BYTES_DEFAULT
from router.decide.config import CoreConfig
from router.edge.config import EdgeConfig
from router.fleet.discovery import WorkerFlag, parse_worker_flag
from router.fleet.kubernetes import SPEC, KubernetesSource
from router.fleet.members import FleetConfig
from router.fleet.worker_lists import read_workers_file
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
KubernetesSpec = Annotated[
    str, Meta(pattern=SPEC, title="SPEC", examples=["vllm", "pool/vllm", "llm/service/vllm:http"])
]
HostName = Annotated[str, Meta(pattern=r"^[^\s/:]+$", title="NAME", examples=["router.example"])]


# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig:
    """Paths in files and in `--set` are those of these fields; core and edge have no name of their own there."""

    workers: Annotated[tuple[str, ...], Flag("--worker", metavar="SPEC"),
        "A worker: its URL, or url=...,events=tcp://...,replay=tcp://...,topic=...,id=...,roles=a;b. May be "
        "repeated. events=none: guess its cache from what is sent to it. cache_tokens=N: how much it holds, "
        "unless it tells. seats=N: sequences it runs at once, else that is learned. prefill_order=shortest: it "
        "computes the prompt with the least left first (engines of ours tell). reannounce=1: its clients ask "
        "for kv_cache_report_mode=full, so stores that repeat are no second copies. model=NAME,root=FOLDER,"
        "block_size=N instead of url=: others send it its requests, and ask POST /route where to."] = ()
    workers_file: Annotated[str | None, FILE, Flag(metavar="FILE"),
        "One URL or SPEC a line; watched for changes."] = None
    worker_dns: Annotated[tuple[str, ...], Flag(metavar="URL"),
        "A URL whose host resolves to many workers, looked up again every few seconds. May be repeated."] = ()
    kubernetes: Annotated[tuple[KubernetesSpec, ...], Flag(metavar="SPEC"),
        "Workers that Kubernetes knows: [[NAMESPACE/](service|pool)/]NAME[:PORT], the endpoints of a Service or the "
        "pods of an InferencePool. Needs the extra `kubernetes`. May be repeated."] = ()
    bind_events: Annotated[tuple[Endpoint, ...], Flag(metavar="ENDPOINT"),
        "Listen there for publishers that connect, e.g. tcp://*:5557; the worker is known by its topic "
        "(kv@HOST...). May be repeated."] = ()
    peers: Annotated[tuple[Endpoint, ...], Flag("--peer", metavar="ENDPOINT"),
        "Another router of the same workers, where it has --peer-bind: its requests in flight count as load. May "
        "be repeated."] = ()
    peer_bind: Annotated[Endpoint | None, Flag(), "Tell other routers this one's load there, e.g. tcp://*:5600."] = None
    snapshot_from: Annotated[tuple[Url, ...], Flag(metavar="URL"),
        "A running router's admin address: take what it knows of workers that offer no snapshot (vLLM with "
        "replay), at the start and after a gap. May be repeated."] = ()
    host: Annotated[str, Flag(metavar="HOST"), "Interface of the API."] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), Flag(), "0 lets the system choose."] = 8080
    reuse_port: Annotated[bool, Flag(),
        "Share --port with other routers on this machine that were started with this flag too: the kernel spreads new "
        "connections over them. Give each its own --admin, and --peer to agree about load."] = False
    admin: Annotated[HostPort | None, Flag(),
        "Serve /workers, /route and /dashboard there only. [default: on --port, to loopback only]"] = None
    admin_api_key: Annotated[Key | None, SECRET, Flag(env="ROUTER_ADMIN_API_KEY"),
        "Of the admin routes; also what is sent to --snapshot-from. [default: made and printed at the start]",
    ] = field(default=None, repr=False)
    admin_hosts: Annotated[tuple[HostName, ...], Flag("--admin-host", metavar="NAME"),
        "A name by which the admin routes may be asked for, besides addresses and localhost. May be repeated."] = ()
    tokenizer: Annotated[str | None, FOLDER, Flag(metavar="FOLDER"),
        "Tokenizer files for every model. [default: where each worker has them]"] = None
    chat_template: Annotated[str | None, Flag(metavar="FILE"), "Instead of the model's own, as the workers do."] = None
    segment_cache_mb: Annotated[int, Meta(ge=0, le=10**7, title="MIB"), Size(1 << 20), Flag(),
        "Memory for the encoded parts of prompts, each model; 0 encodes every prompt whole.",
    ] = CACHE_BYTES_DEFAULT >> 20
    conversation_cache_mb: Annotated[int, Meta(ge=0, le=10**7, title="MIB"), Size(1 << 20), Flag(),
        "Memory for conversations with bodies from 1 KB on, so that only the new part of one that returns is read; 0 "
        "reads every body whole.",
    ] = 64
    tokenize_threads: Annotated[Annotated[int, Meta(ge=1, le=256)] | None,
        "Threads that encode prompts. [default: one a core, at most 8]"] = None
    worker_api_key: Annotated[Key | None, SECRET, Flag(env="ROUTER_WORKER_API_KEY"),
        "Sent to workers instead of the client's. [default: the client's is passed on]",
    ] = field(default=None, repr=False)
    tls_cert: Annotated[str | None, FILE, Flag(metavar="FILE"), "PEM; with --tls-key: HTTPS on all addresses."] = None
    tls_key: Annotated[str | None, FILE, Flag(metavar="FILE"), "PEM; of --tls-cert."] = None
    tls_client_ca: Annotated[str | None, FILE, Flag(metavar="FILE"),
        "PEM; clients must bring a certificate that one of these has signed, on all addresses."] = None
    worker_tls_ca: Annotated[str | None, FILE, Flag(metavar="FILE"),
        "PEM; who must have signed the certificates of https:// workers. [default: whom the system trusts]"] = None
    worker_tls_cert: Annotated[str | None, FILE, Flag(metavar="FILE"),
        "PEM; with --worker-tls-key: shown to workers that ask for a certificate."] = None
    worker_tls_key: Annotated[str | None, FILE, Flag(metavar="FILE"), "PEM; of --worker-tls-cert."] = None
    core: Annotated[CoreConfig, ROOT] = field(default_factory=CoreConfig)
    edge: Annotated[EdgeConfig, ROOT] = field(default_factory=EdgeConfig)
    tenancy: Annotated[TenancyConfig, ROOT] = field(default_factory=TenancyConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    miss_reasons: MissReasonsConfig = field(default_factory=MissReasonsConfig)
    prompt_workers: PromptWorkerConfig = field(default_factory=PromptWorkerConfig)
    seed: Annotated[int, Meta(ge=0, le=10**12), "Of everything drawn by chance."] = 0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Flag(),
        "How much is logged, to stderr."] = "info"
    log_requests: Annotated[Share, Flag(),
        "Share of requests that get a line in the log, with worker, prediction and outcome."] = 0.0
    log_decisions: Annotated[Share, Flag(),
        "Share of requests whose decisions get a line with every candidate's terms, as JSON."] = 0.0
    otlp_endpoint: Annotated[Url | None, Flag(metavar="URL"),
        "Send traces there: OpenTelemetry, OTLP over HTTP, such as http://127.0.0.1:4318. [default: no traces]"] = None
    trace_share: Annotated[Share, Flag(),
        "Share of requests that are traced, besides those whose traceparent says so."] = 0.01
    log_json: Annotated[bool, Flag(), "One JSON object a line."] = False

    def __post_init__(self) -> None:
        ids = [flag.worker_id for flag in self.worker_flags]
        duplicate = next((worker_id for worker_id in ids if ids.count(worker_id) > 1), None)
        if duplicate is not None:
            raise ConfigError(f"worker {duplicate} is given twice")
        for text in self.worker_dns:
            parse_worker_flag(text)
        for text in self.kubernetes:
            KubernetesSource.parse(text)
        if self.kubernetes and find_spec("kubernetes_asyncio") is None:
            raise ConfigError("--kubernetes needs more: pip install 'blockcast[kubernetes]'")
        if self.admin_address is not None and self.admin_address[1] > 65535:
            raise ConfigError(f"--admin: got {self.admin!r}, expected HOST:PORT with a port of at most 65535")
        if self.reuse_port and self.port == 0:
            raise ConfigError("--reuse-port: give --port a number, the same to every router that shares it")
        for flag, parts in (
            ("--tls", (self.tls_cert, self.tls_key)), ("--worker-tls", (self.worker_tls_cert, self.worker_tls_key)),
        ):  # fmt: skip
            if (parts[0] is None) != (parts[1] is None):
                raise ConfigError(f"{flag}-cert and {flag}-key: expected both or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("--tls-client-ca: needs --tls-cert and --tls-key")

    @property
    def worker_flags(self) -> list[WorkerFlag]:
        return [parse_worker_flag(text) for text in self.workers]

    @property
    def admin_address(self) -> tuple[str, int] | None:
        """Of the admin routes; None serves them to loopback on the main one."""
        if self.admin is None:
            return None
        host, _, port = self.admin.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def http_port(self) -> int:
        """Of the main HTTP address."""
        return self.port

    @staticmethod
    def verify(loaded_config: LoadedConfig) -> ProcessConfig:
        """What a start would find wrong besides: in a workers file every line. Raises ConfigError."""
        config: ProcessConfig = loaded_config.config
        if config.workers_file is not None:
            read_workers_file(Path(config.workers_file))
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class EppConfig(ProcessConfig):
    """Of `router epp`: `port` is gRPC's, and HTTP serves metrics and admin routes alone."""

    port: Annotated[int, Meta(ge=0, le=65535), Flag(), "Of the endpoint picker; 0 lets the system choose."] = 9002
    picker: Annotated[PickerConfig, ROOT] = field(default_factory=PickerConfig)

    def __post_init__(self) -> None:
        ProcessConfig.__post_init__(self)
        if self.reuse_port:
            raise ConfigError("--reuse-port: not for `router epp`: start several, with --peer each")
        if self.picker.self_signed and self.tls_cert is not None:
            raise ConfigError("--self-signed: not with --tls-cert")

    @property
    def http_port(self) -> int:
        return self.picker.metrics_port


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowProcessConfig(ProcessConfig):
    """Of `router shadow`."""

    port: Annotated[int, Meta(ge=0, le=65535), Flag(), "Of the requests; 0 lets the system choose."] = 8090
    shadow: ShadowConfig = field(default_factory=ShadowConfig)

    def __post_init__(self) -> None:
        ProcessConfig.__post_init__(self)
        if self.reuse_port:
            raise ConfigError("--reuse-port: not for `router shadow`, which decides nothing")
        if self.core.queue.fair:
            raise ConfigError("--fair: not for `router shadow`, which holds nothing")


SCHEMA = Schema(ProcessConfig, "router")
SHADOW_SCHEMA = Schema(ShadowProcessConfig, "router")
EPP_SCHEMA = Schema(EppConfig, "router")
