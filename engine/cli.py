"""The command line: flags under vLLM's names, turned once into EngineConfig and ServerConfig."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from engine.config import (
    DEFAULT_BLOCK_SIZE,
    DTYPES,
    ConfigError,
    EngineConfig,
    ServerConfig,
    __version__,
    default_kv_events,
)
from events.config import KVEventsConfig
from events.errors import EventsError

LOG_LEVELS = ("debug", "info", "warning", "error")

HELP = """Run MODEL behind an OpenAI-compatible API and publish what its prefix cache holds.

MODEL is a folder with a Hugging Face checkpoint (config.json, *.safetensors, tokenizer.json), or the name of one that
is in the local Hugging Face cache. Without MODEL a small random model is served: everything works, the text means
nothing.

\b
Try it:
  engine serve --port 8000
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 20}'
"""

EVENTS_HELP = """JSON of vLLM's keys: enable_kv_cache_events, publisher, endpoint, replay_endpoint, buffer_steps, hwm,
max_queue_size, topic. Without this flag events are on, on ports that the system chooses, on the interface of --host;
a router finds them by GET /kv_event_sources. Events carry prompts as token ids: keep them on a private network.
'{"enable_kv_cache_events": false}' turns them off."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="engine")
def cli() -> None:
    """An LLM engine that publishes its KV cache events."""


def _options(function: Any) -> Any:
    """All flags of `serve`, in the order of --help."""
    flags = [
        click.option("--host", default="127.0.0.1", show_default=True, help="Interface of the API and of the events."),
        click.option("--port", type=int, default=8000, show_default=True, help="0 lets the system choose."),
        click.option("--served-model-name", "served_model_names", multiple=True, metavar="NAME...",
                     help="Names that requests may use; answers carry the one that was asked for. [default: MODEL]"),
        click.option("--api-key", "api_keys", multiple=True, envvar="ENGINE_API_KEY", metavar="KEY",
                     help="Require Authorization: Bearer KEY. May be repeated; or set ENGINE_API_KEY."),
        click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True,
                     help="Of weights and cache; auto: the checkpoint's own."),
        click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N."),
        click.option("--max-model-len", type=int, metavar="TOKENS",
                     help="Longest prompt plus answer. [default: the model's own]"),
        click.option("--block-size", type=int, default=DEFAULT_BLOCK_SIZE, show_default=True, metavar="TOKENS",
                     help="Tokens of a cache block, of its hash and of an event."),
        click.option("--max-num-seqs", type=int, default=256, show_default=True, help="Sequences in one step."),
        click.option("--max-num-batched-tokens", type=int, default=2048, show_default=True, metavar="TOKENS",
                     help="Tokens in one step; longer prompts are computed in chunks."),
        click.option("--num-gpu-blocks-override", type=int, metavar="N", help="Blocks of the cache, on any device."),
        click.option("--kv-cache-memory-bytes", type=int, metavar="BYTES", help="Size of the cache, on any device."),
        click.option("--enable-prefix-caching/--no-enable-prefix-caching", default=True, show_default=True),
        click.option("--kv-events-config", metavar="JSON", help=EVENTS_HELP),
        click.option("--legacy-events", is_flag=True,
                     help="Publish events as arrays, for subscribers older than vLLM's map format."),
        click.option("--tokenizer", metavar="FOLDER", help="Tokenizer files, where they are not MODEL's."),
        click.option("--chat-template", metavar="FILE",
                     help="Jinja template (or its text) instead of the model's own."),
        click.option("--generation-config", type=click.Choice(["auto", "vllm"]), default="auto", show_default=True,
                     help="Default sampling parameters: auto takes the model's generation_config.json, vllm none."),
        click.option("--attention-backend", metavar="NAME",
                     help="Kernels: auto, triton, flash-attn, fla, torch, cpu or reference. [default: auto]"),
        click.option("--num-threads", type=int, default=1, show_default=True, help="CPU threads of the step loop."),
        click.option("--seed", type=int, default=0, show_default=True, help="Of sampling without a seed of its own."),
        click.option("--max-queue", type=click.IntRange(0), default=1024, show_default=True, metavar="N",
                     help="Sequences inside, running and waiting, before new ones get 429. 0: no limit."),
        click.option("--request-timeout", "request_timeout_s", type=float, metavar="SECONDS",
                     help="Longest a request may take, waiting included. [default: no limit]"),
        click.option("--shutdown-timeout", "shutdown_timeout_s", type=float, default=30.0, show_default=True,
                     metavar="SECONDS", help="How long running requests may finish after SIGTERM or Ctrl-C."),
        click.option("--log-level", "--uvicorn-log-level", "log_level", type=click.Choice(LOG_LEVELS), default="info",
                     show_default=True),
        click.option("--enable-log-requests/--disable-log-requests", "log_requests", default=False,
                     show_default=True, help="One line a request."),
        click.option("--tensor-parallel-size", "-tp", type=int, default=1, show_default=True, metavar="N",
                     help="Processes that compute the model together, one a GPU, each a part of every layer."),
        click.option("--enforce-eager", is_flag=True,
                     help="On a GPU: no recorded decode steps (CUDA graphs)."),
        click.option("--enable-prompt-tokens-details", is_flag=True,
                     help="Accepted for vLLM's command lines; cached tokens are always reported."),
        click.option("--check-invariants", is_flag=True, hidden=True),
        click.option("--dry-run", is_flag=True, help="Print how the cache would be laid out, and end."),
    ]  # fmt: skip
    for flag in reversed(flags):
        function = flag(function)
    return function


@cli.command("serve", help=HELP)
@click.argument("model", required=False)
@_options
def serve_command(model: str | None, **flags: Any) -> None:
    try:
        engine_config, server_config = parse(model, flags)
    except (ConfigError, EventsError) as error:
        raise click.UsageError(str(error)) from error
    logging.basicConfig(
        level=flags["log_level"].upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    if flags["dry_run"]:
        from engine.dry_run import describe_cache

        try:
            click.echo(describe_cache(engine_config))
        except ValueError as error:
            raise click.ClickException(str(error)) from error
        return
    from engine.http.server import serve

    sys.exit(serve(engine_config, server_config))


def parse(model: str | None, flags: dict[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    """Flags to configs. Raises ConfigError or EventsError naming the flag."""
    events = flags["kv_events_config"]
    engine_config = EngineConfig(
        model=model,
        kv_events=default_kv_events(flags["host"]) if events is None else KVEventsConfig.parse(events),
        **{name: flags[name] for name in _ENGINE_FLAGS},
    )
    server_config = ServerConfig(
        host=flags["host"],
        port=flags["port"],
        served_model_names=tuple(flags["served_model_names"]),
        api_keys=tuple(flags["api_keys"]),
        chat_template=flags["chat_template"],
        max_queue=flags["max_queue"] or None,
        shutdown_timeout_s=flags["shutdown_timeout_s"],
        request_timeout_s=flags["request_timeout_s"],
        log_requests=flags["log_requests"],
    )
    return engine_config, server_config


_ENGINE_FLAGS = (
    "tokenizer", "dtype", "device", "max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens",
    "num_gpu_blocks_override", "kv_cache_memory_bytes", "enable_prefix_caching", "attention_backend", "enforce_eager",
    "seed", "num_threads", "check_invariants", "log_level", "generation_config", "legacy_events",
    "tensor_parallel_size",
)  # fmt: skip


def spread_names(args: Sequence[str]) -> list[str]:
    """vLLM's `serve MODEL --served-model-name A B` as click wants it: the flag before each name.

    Only where MODEL stands right after `serve`; else the words after the first name may be MODEL.
    """
    args = list(args)
    if len(args) < 2 or args[0] != "serve" or args[1].startswith("-"):
        return args
    spread: list[str] = []
    names_follow = False
    for word in args:
        if word.startswith("-"):
            names_follow = word == "--served-model-name"
            if not names_follow:
                spread.append(word)
        elif names_follow:
            spread += ["--served-model-name", word]
        else:
            spread.append(word)
    return spread


def main(args: Sequence[str]) -> None:
    cli.main(args=spread_names(args), prog_name=Path(sys.argv[0]).stem if "__main__" not in sys.argv[0] else "engine")
