"""The command line: `router run` and `router config`."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import click

from options import ConfigError, Schema
from options.command import ProgramGroup, SectionedCommand, add_flags, load_from_command_line, make_config_command
from options.logs import configure_logging
from router.app.config import EPP_SCHEMA, SCHEMA, SHADOW_SCHEMA, ProcessConfig
from router.app.process import RouterProcess, run_process
from router.commands.top import top

if TYPE_CHECKING:
    from router.commands.check import Finding

log = logging.getLogger("router")

HELP = """Send each request to the worker of URL... that will answer it soonest.

Workers are OpenAI-compatible servers: `engine serve`, vLLM, SGLang. The router asks each worker where it publishes its
KV cache events (/kv_event_sources), or tries vLLM's default port. --worker names another address. The cache of a worker
without events is estimated from the requests sent to it.

\b
Try it:
  router run http://gpu1:8000 http://gpu2:8000
  curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello"}]}'
  curl http://127.0.0.1:8080/workers -H 'Authorization: Bearer KEY'    (the admin key, printed at the start)
"""


def find_installed_version() -> str:
    """Return the version of the installed distribution; "unknown" for a checkout that was not installed."""
    try:
        return version("blockcast")
    except PackageNotFoundError:
        return "unknown"


@click.group(cls=ProgramGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(find_installed_version(), prog_name="router")
def cli() -> None:
    """A router that follows the KV cache events of the workers behind it."""


@cli.command(cls=SectionedCommand, help=HELP, short_help="Send each request to the worker that will answer it first.")
@click.argument("urls", nargs=-1, metavar="[URL]...")
@add_flags(SCHEMA)
def run(urls: tuple[str, ...], **flags: Any) -> None:
    """Run a router until SIGTERM or SIGINT."""
    _run_or_exit(_load_config(SCHEMA, urls, flags), RouterProcess)


def _load_config(schema: Schema, urls: tuple[str, ...], flags: dict[str, Any]) -> Any:
    """Return the configuration of a command. `urls`: its arguments, which are workers. Raises click.UsageError."""
    flags["workers"] = (*urls, *flags["workers"])
    return load_from_command_line(schema, flags).config


def _run_or_exit(config: ProcessConfig, process_class: type[RouterProcess]) -> None:
    """Run a program of the router; warn if its configuration names no workers, and exit with one line if it fails."""
    configure_logging(config.log_level, as_json=config.log_json)
    has_workers = config.workers or config.worker_dns or config.workers_file or config.kubernetes
    if not (has_workers or config.admin):
        log.warning("no workers: name their URLs (router run http://HOST:PORT ...), or add them with POST /workers")
    try:
        run_process(config, find_installed_version(), process_class)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        raise click.ClickException(str(error)) from None


EPP_HELP = """Tell Envoy which worker of URL... each request goes to: the Endpoint Picker Protocol (ext_proc, gRPC).

Gateways of the Gateway API Inference Extension speak it too. Envoy carries the bytes; deploy/envoy/ configures it.

Chooses as `router run` does, with its flags, but moves no KV. Needs `pip install 'blockcast[epp]'`.

\b
  router epp http://gpu1:8000 http://gpu2:8000 --port 9002
"""


@cli.command(cls=SectionedCommand, help=EPP_HELP, short_help="Choose workers for Envoy (Endpoint Picker Protocol).")
@click.argument("urls", nargs=-1, metavar="[URL]...")
@add_flags(EPP_SCHEMA)
def epp(urls: tuple[str, ...], **flags: Any) -> None:
    """Run an endpoint picker until SIGTERM or SIGINT."""
    try:
        import router.picker.server  # noqa: F401
    except ImportError as error:
        raise click.ClickException(f"router epp needs more: pip install 'blockcast[epp]' ({error})") from None
    _run_or_exit(_load_config(EPP_SCHEMA, urls, flags), RouterProcess)


SHADOW_HELP = """Report what the present load balancer of the workers of URL... loses, and what `router run` would gain.

Follows the workers' caches and decides nothing. It reads copies of requests (nginx' `mirror`, Envoy's
`request_mirror_policies`), which are answered 204, or with --log a file of bodies. The report is on /shadow and
/shadow/report, and in the file of --report. Takes the flags of `router run`.

\b
  router shadow http://gpu1:8000 http://gpu2:8000 --port 8090 --report shadow.html
  router shadow http://gpu1:8000 http://gpu2:8000 --log bodies.jsonl --report shadow.html
"""


@cli.command(
    cls=SectionedCommand, help=SHADOW_HELP, short_help="Report what routing would save, beside your load balancer."
)
@click.argument("urls", nargs=-1, metavar="[URL]...")
@add_flags(SHADOW_SCHEMA)
def shadow(urls: tuple[str, ...], **flags: Any) -> None:
    """Watch requests until SIGTERM or SIGINT, or to the end of the log."""
    from router.app.shadow import ShadowProcess

    _run_or_exit(_load_config(SHADOW_SCHEMA, urls, flags), ShadowProcess)


CHECKED_PATHS = (
    "workers", "worker_api_key", "worker_tls_ca", "worker_tls_cert", "worker_tls_key", "tokenizer", "chat_template",
)  # fmt: skip
"""Settings that `router check` reads."""
CHECK_HELP = """Check what would keep predictions for the workers of URL... from being exact.

Checks events and their addresses, tokenizers, chat templates, salts, adapters and caches. Sends each worker up to five
prompts of random words, after a question. Takes all flags of `router run`, and those below matter. Ends with status 1
if something is wrong.

\b
  router check http://gpu1:8000 http://gpu2:8000
  router check --config router.toml --yes
"""


@cli.command(cls=SectionedCommand, help=CHECK_HELP, short_help="Check what would keep predictions from being exact.")
@click.argument("urls", nargs=-1, metavar="[URL]...")
@click.option("--yes", is_flag=True, help="Do not ask before prompts are sent.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a step.")
@add_flags(SCHEMA, CHECKED_PATHS)
def check(urls: tuple[str, ...], yes: bool, as_json: bool, **flags: Any) -> None:
    """Command `router check`: test each worker with a few requests, print each finding; exit with 1 if one is bad."""
    from router.commands.check import check_workers

    config: ProcessConfig = _load_config(SCHEMA, urls, flags)
    configure_logging("error", as_json=config.log_json)
    try:
        worker_flags = config.worker_flags
        tls = config.make_worker_tls()
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    if not worker_flags:
        raise click.UsageError("no workers: name their URLs")
    if not yes:
        question = f"Send up to five short prompts to each worker ({len(worker_flags)})?"
        click.confirm(question, default=True, abort=True, err=True)
    findings = check_workers(
        worker_flags,
        key=config.worker_api_key,
        tokenizer=config.tokenizer,
        chat_template=config.chat_template,
        tls=tls,
    )
    sys.exit(0 if asyncio.run(_print_findings(findings, as_json=as_json)) else 1)


async def _print_findings(findings: AsyncIterator[tuple[str, Finding]], *, as_json: bool) -> bool:
    """Print each finding about a worker when it comes, and return whether none is bad."""
    is_all_sound = True
    async for worker, finding in findings:
        is_all_sound &= finding.is_ok is not False
        if as_json:
            fields = {"worker": worker, "step": finding.step, "ok": finding.is_ok, "text": finding.text}
            click.echo(json.dumps(fields))
        else:
            mark = {True: "ok     ", False: "PROBLEM", None: "?      "}[finding.is_ok]
            click.echo(f"{worker}  {mark} {finding.step}: {finding.text}")
    return is_all_sound


cli.add_command(top)
cli.add_command(make_config_command(SCHEMA, ProcessConfig.verify))


def main(args: Sequence[str] | None = None) -> None:
    """Console script `router`."""
    cli(args=list(args) if args is not None else None, prog_name="router")
