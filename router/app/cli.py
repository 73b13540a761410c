"""The command line: flags, turned once into ProcessConfig."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

from router.app.process import ProcessConfig, run_process
from router.app.supervise import supervise
from router.decide.config import POLICIES, ConfigError, CoreConfig
from router.edge.config import EdgeConfig, Timeouts
from router.fleet.discovery import WorkerFlag, parse_worker_flag
from router.fleet.members import FleetConfig
from router.http.connection import ClientTimeouts
from router.http.request import HttpLimits

HELP = """Send each request to the worker of URL... that will answer it soonest.

Workers are OpenAI-compatible servers: `engine serve`, vLLM, SGLang. Where a worker publishes its KV cache events is
asked of the worker itself (/kv_event_sources), else looked for at vLLM's default port, else given with --worker.
The cache of one that publishes nothing is guessed from what was sent to it.

\b
Try it:
  router run http://gpu1:8000 http://gpu2:8000
  curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello"}]}'
  curl http://127.0.0.1:8080/workers
"""


def own_version() -> str:
    """Of the installed distribution; a checkout that was not installed has none."""
    try:
        return version("blockcast")
    except PackageNotFoundError:
        return "unknown"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(own_version(), prog_name="router")
def cli() -> None:
    """A router that follows the KV cache events of the workers behind it."""


def _options(function: Any) -> Any:
    """All flags of `run`, in the order of --help."""
    seconds: dict[str, Any] = {"type": click.FloatRange(min=0.001), "metavar": "SECONDS", "show_default": True}
    flags = [
        click.argument("urls", nargs=-1, metavar="[URL]..."),
        click.option("--worker", "workers", multiple=True, metavar="SPEC",
                     help="A worker with settings of its own: url=...,events=tcp://...,replay=tcp://...,topic=...,"
                     "id=...,roles=a;b. May be repeated. events=none: guess its cache from what is sent to it. "
                     "cache_tokens=N: how much it holds, where it does not tell. reannounce=1: its clients ask for "
                     "kv_cache_report_mode=full, so stores that repeat are no second copies."),
        click.option("--workers-file", type=click.Path(path_type=Path, dir_okay=False, exists=True),
                     help="One URL or SPEC a line; watched for changes."),
        click.option("--worker-dns", "names", multiple=True, metavar="URL",
                     help="A URL whose host resolves to many workers, looked up again every few seconds."),
        click.option("--bind-events", multiple=True, metavar="ENDPOINT",
                     help="Listen there for publishers that connect, e.g. tcp://*:5557; the worker is known by its "
                     "topic (kv@HOST...). May be repeated."),
        click.option("--peer", "peers", multiple=True, metavar="ENDPOINT",
                     help="Another router of the same workers, where it has --peer-bind: its requests in flight count "
                     "as load. May be repeated."),
        click.option("--peer-bind", metavar="ENDPOINT",
                     help="Tell other routers this one's load there, e.g. tcp://*:5600."),
        click.option("--snapshot-from", "snapshot_urls", multiple=True, metavar="URL",
                     help="A running router's admin address: take what it knows of workers that offer no snapshot "
                     "(vLLM with replay), at the start and after a gap. May be repeated."),
        click.option("--host", default="127.0.0.1", show_default=True, help="Interface of the API."),
        click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True,
                     help="0 lets the system choose."),
        click.option("--admin", metavar="HOST:PORT",
                     help="Serve /workers, /route and /dashboard there only. [default: on --port, to loopback only]"),
        click.option("--policy", type=click.Choice(POLICIES), default="kv", show_default=True,
                     help="kv: the lowest price, as docs/routing.md has it. The others are for comparison."),
        click.option("--tokenizer", type=click.Path(exists=True, file_okay=False), metavar="FOLDER",
                     help="Tokenizer files for every model. [default: where each worker has them]"),
        click.option("--chat-template", metavar="FILE", help="Instead of the model's own, as the workers do."),
        click.option("--segment-cache-mb", type=click.IntRange(0), default=64, show_default=True,
                     help="Memory for the encoded parts of prompts, each model; 0 encodes every prompt whole."),
        click.option("--api-key", "api_keys", multiple=True, envvar="ROUTER_API_KEY", metavar="KEY",
                     help="Require Authorization: Bearer KEY under /v1. May be repeated; or set ROUTER_API_KEY."),
        click.option("--worker-api-key", envvar="ROUTER_WORKER_API_KEY", metavar="KEY",
                     help="Sent to workers instead of the client's. [default: the client's is passed on]"),
        click.option("--tls-cert", type=click.Path(path_type=Path, dir_okay=False, exists=True),
                     help="PEM; with --tls-key: HTTPS on all addresses."),
        click.option("--tls-key", type=click.Path(path_type=Path, dir_okay=False, exists=True)),
        click.option("--queue/--no-queue", default=False, show_default=True,
                     help="Hold requests in the router while every worker is busy, shortest first."),
        click.option("--session-affinity/--no-session-affinity", default=False, show_default=True,
                     help="Keep a session (x-session-id, or `user`) on its worker."),
        click.option("--set", "settings", multiple=True, metavar="KEY=VALUE",
                     help="Any setting of docs/routing.md, e.g. service.prefill_s_per_token=5e-5. May be repeated."),
        click.option("--connect-timeout", default=5.0, help="To reach a worker.", **seconds),
        click.option("--first-byte-timeout", default=600.0, help="From the request's end to the answer's first byte.",
                     **seconds),
        click.option("--idle-timeout", default=300.0, help="Without a byte in the middle of an answer.", **seconds),
        click.option("--total-timeout", default=3600.0, help="From the request to the answer's end.", **seconds),
        click.option("--request-timeout", default=60.0, help="For a client to send a whole request.", **seconds),
        click.option("--shutdown-timeout", default=30.0, help="For requests in flight after SIGTERM.", **seconds),
        click.option("--health-interval", default=2.0, help="Between two looks at a worker.", **seconds),
        click.option("--max-body-bytes", type=click.IntRange(min=1), default=64 << 20, show_default=True,
                     help="Of a request; longer ones are answered 413."),
        click.option("--max-connections", type=click.IntRange(min=1), default=20_000, show_default=True,
                     help="Of clients; more are answered 503."),
        click.option("--max-in-flight", type=click.IntRange(min=1), default=100_000, show_default=True,
                     help="Requests in flight or held; more are answered 429."),
        click.option("--processes", type=click.IntRange(1, 256), default=1, show_default=True,
                     help="Equal processes on one port; each keeps the whole index."),
        click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info",
                     show_default=True),
        click.option("--log-requests", type=click.FloatRange(0, 1), default=0.0, show_default=True, metavar="SHARE",
                     help="Share of requests that get a line in the log, with worker, prediction and outcome."),
        click.option("--log-decisions", type=click.FloatRange(0, 1), default=0.0, show_default=True, metavar="SHARE",
                     help="Share of requests whose decisions get a line with every candidate's terms, as JSON."),
        click.option("--log-json", is_flag=True, help="One JSON object a line."),
    ]  # fmt: skip
    for flag in reversed(flags):
        function = flag(function)
    return function


@cli.command(help=HELP)
@_options
def run(**flags: Any) -> None:
    configure_logging(flags["log_level"], as_json=flags["log_json"])
    try:
        config = build_config(flags)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    count = flags["processes"]
    try:
        if count == 1:
            run_process(config, own_version())
        else:
            sys.exit(supervise(config, count, lambda own: run_process(own, own_version())))
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"cannot serve on {config.host}:{config.port}: {error}") from None


def build_config(flags: dict[str, Any]) -> ProcessConfig:
    """Raises ConfigError."""
    workers = [parse_worker_flag(text) for text in (*flags["urls"], *flags["workers"])]
    ids = [worker.worker_id for worker in workers]
    double = next((worker_id for worker_id in ids if ids.count(worker_id) > 1), None)
    if double is not None:
        raise ConfigError(f"worker {double} is given twice")
    if not (workers or flags["names"] or flags["workers_file"]) and flags["admin"] is None:
        logging.getLogger("router").warning("no workers yet: add them with POST /workers")
    if flags["processes"] > 1 and (flags["peers"] or flags["peer_bind"] or flags["bind_events"]):
        raise ConfigError("--processes: cannot be combined with --peer, --peer-bind or --bind-events")
    if (flags["tls_cert"] is None) != (flags["tls_key"] is None):
        raise ConfigError("--tls-cert and --tls-key: expected both or neither")
    timeouts = Timeouts(
        connect_s=flags["connect_timeout"],
        first_byte_s=flags["first_byte_timeout"],
        idle_s=flags["idle_timeout"],
        total_s=flags["total_timeout"],
    )
    return ProcessConfig(
        host=flags["host"],
        port=flags["port"],
        core=core_config(flags),
        edge=EdgeConfig(
            limits=HttpLimits(body_bytes_max=flags["max_body_bytes"]),
            timeouts=timeouts,
            client_timeouts=ClientTimeouts(request_s=flags["request_timeout"]),
            api_keys=flags["api_keys"],
            connections_max=flags["max_connections"],
            shutdown_s=flags["shutdown_timeout"],
        ),
        fleet=FleetConfig(health_s=flags["health_interval"]),
        workers=tuple(workers),
        names=tuple(_name(text) for text in flags["names"]),
        workers_file=flags["workers_file"],
        tokenizer=flags["tokenizer"],
        chat_template=flags["chat_template"],
        segment_cache_bytes=flags["segment_cache_mb"] << 20,
        bind_events=flags["bind_events"],
        peers=flags["peers"],
        peer_bind=flags["peer_bind"],
        snapshot_urls=flags["snapshot_urls"],
        worker_api_key=flags["worker_api_key"],
        admin=None if flags["admin"] is None else _address("--admin", flags["admin"]),
        tls=None if flags["tls_cert"] is None else (flags["tls_cert"], flags["tls_key"]),
        log_share=flags["log_requests"],
        log_decisions=flags["log_decisions"],
    )


def core_config(flags: dict[str, Any]) -> CoreConfig:
    """The core's settings: `--set` first, then the flags that have names of their own. Raises ConfigError."""
    settings: dict[str, Any] = {}
    for text in flags["settings"]:
        key, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(f"--set {text}: expected KEY=VALUE")
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        *path, last = key.split(".")
        place = settings
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--set {text}: {part} is not a group of settings")
        place[last] = parsed
    settings["policy"] = flags["policy"]
    settings["session_affinity"] = flags["session_affinity"]
    settings["requests_max"] = flags["max_in_flight"]
    if flags["queue"]:
        settings.setdefault("queue", {})["enabled"] = True
    try:
        return CoreConfig.parse(settings)
    except TypeError as error:
        raise ConfigError(f"--set: {error}") from None


def _address(flag: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{flag}: got {text!r}, expected HOST:PORT")
    return host.strip("[]"), int(port)


def _name(text: str) -> WorkerFlag:
    return parse_worker_flag(text)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ts, level, logger, message, and the fields of `extra={"fields": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logging(level: str, *, as_json: bool) -> None:
    """Log to stderr; stdout carries only the line that tells the address."""
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonFormatter() if as_json else plain)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def main(args: Sequence[str] | None = None) -> None:
    """Console script `router`."""
    cli(args=list(args) if args is not None else None, prog_name="router")
