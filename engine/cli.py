"""The command line: `engine serve` and `engine config`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import msgspec

from engine.config import SCHEMA, EngineConfig, ServeConfig, __version__, make_default_kv_events
from engine.model_files import check_model_exists
from options import ConfigError, LoadedConfig
from options.command import ProgramGroup, SectionedCommand, add_flags, load_from_command_line, make_config_command
from options.logs import configure_logging

SIMULATION_PACKAGES = ("aiohttp", "tokenizers", "jinja2")
SERVING_PACKAGES = ("torch", "numpy", "safetensors", *SIMULATION_PACKAGES)
"""Packages that serving needs. They are looked for before the model is loaded, which happens in another process."""

HELP = """Run MODEL behind an OpenAI-compatible API and publish what its prefix cache holds.

MODEL is a folder with a Hugging Face checkpoint (config.json, *.safetensors, tokenizer.json), or its name on the hub,
from which it is fetched unless the local cache has it. Without MODEL a small random model is served: everything works,
the text means nothing.

\b
Try it:
  engine serve --port 8000
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}'
"""


@click.group(cls=ProgramGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="engine")
def cli() -> None:
    """An LLM engine that publishes its KV cache events."""


@cli.command(
    "serve", cls=SectionedCommand, help=HELP, short_help="Serve MODEL by an OpenAI-compatible API, with cache events."
)
@click.argument("model", required=False)
@add_flags(SCHEMA)
@click.option(
    "--enable-prompt-tokens-details", "--enable-auto-tool-choice", "--enable-chunked-prefill", "--trust-remote-code",
    is_flag=True, help="Accepted for vLLM's command lines.",
)  # fmt: skip
@click.option(
    "--dry-run", is_flag=True, help="Print how the cache would be laid out, or what would be simulated, and end."
)
def serve_command(dry_run: bool, **parameters: Any) -> None:
    """Serve a model until a signal ends the program.

    `dry_run`: instead, print how the KV cache would be laid out, or what would be simulated. `parameters`: the values
    of all other flags, and MODEL. A mistake in them ends the program before the model is loaded.
    """
    config = parse_config(parameters)
    _check_packages(config.engine)
    configure_logging(config.engine.log_level, as_json=config.engine.log_json)
    try:
        if dry_run:
            click.echo(describe_dry_run(config.engine))
            return
        if config.engine.model is not None:
            check_model_exists(config.engine.model, weights=config.engine.simulate is None)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    from engine.http.server import serve  # needs the packages that were checked above

    sys.exit(serve(config.engine, config.server))


def _check_packages(config: EngineConfig) -> None:
    """Raise ClickException if a package is missing that serving needs."""
    packages = SERVING_PACKAGES if config.simulate is None else SIMULATION_PACKAGES
    for name in packages:
        if find_spec(name) is None:
            raise click.ClickException(f"the package `{name}` is missing: install blockcast[engine]")


def describe_dry_run(config: EngineConfig) -> str:
    """Return the text that --dry-run prints. Raises ValueError."""
    if config.simulate is not None:
        from simulation.spec import read_spec

        return msgspec.json.format(msgspec.json.encode(read_spec(config.simulate))).decode()
    from engine.dry_run import describe_cache

    return describe_cache(config)


def parse_config(parameters: dict[str, Any]) -> ServeConfig:
    """Return the configuration of the parameters of `serve`."""
    return add_defaults_of_host(load_from_command_line(SCHEMA, parameters))


def add_defaults_of_host(loaded_config: LoadedConfig) -> ServeConfig:
    """Return the configuration, with the defaults of KV transfers and KV events that follow from the server's --host.

    Transfers listen on the host unless they have an address of their own. Events are on, at that host, unless the user
    has set any of their settings. Raises UsageError if transfers are on, and the key that all engines share is missing,
    or if a model of several ranks shall sleep.
    """
    config: ServeConfig = loaded_config.config
    engine_config, host = config.engine, config.server.host
    if config.server.sleep_mode and engine_config.tensor_parallel_size > 1:
        raise click.UsageError("--enable-sleep-mode: not with --tensor-parallel-size; leave one of them out")
    if engine_config.kv_transfer.port is not None:
        try:
            engine_config.kv_transfer.read_key()
        except ConfigError as error:
            raise click.UsageError(str(error)) from None
    if not engine_config.kv_transfer.host:
        transfer_config = replace(engine_config.kv_transfer, host=host)
        engine_config = replace(engine_config, kv_transfer=transfer_config)
    has_event_settings = any(setting.startswith("kv_events") for setting in loaded_config.origin_by_path)
    if not has_event_settings:
        engine_config = replace(engine_config, kv_events=make_default_kv_events(host))
    return replace(config, engine=engine_config)


cli.add_command(make_config_command(SCHEMA, add_defaults_of_host))


def repeat_name_flag(args: Sequence[str]) -> list[str]:
    """Return the arguments of a command line, with the flag --served-model-name repeated before each of its names.

    vLLM takes `serve MODEL --served-model-name A B`, but Click takes one value after a flag. Without MODEL right after
    `serve`, the arguments are left as they are, because B might be MODEL.
    """
    args = list(args)
    has_model_first = len(args) > 1 and not args[1].startswith("-")
    if args[:1] != ["serve"] or not has_model_first:
        return args
    expanded_args: list[str] = []
    is_name = False
    for arg in args:
        if arg == "--served-model-name":
            is_name = True  # each argument up to the next flag
        elif arg.startswith("-"):
            is_name = False
            expanded_args.append(arg)
        elif is_name:
            expanded_args += ["--served-model-name", arg]
        else:
            expanded_args.append(arg)
    return expanded_args


def main(args: Sequence[str]) -> None:
    cli.main(
        args=repeat_name_flag(args), prog_name=Path(sys.argv[0]).stem if "__main__" not in sys.argv[0] else "engine"
    )
