"""The command line: `fleet up`, `status`, `scale`, `roll`, `down`."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from typing import IO, Any

import click
import msgspec

from fleet.spec import (
    NAME_PATTERN,
    NAMESPACE,
    FleetSpec,
    MemberKind,
    SpecError,
    build_engine_command,
    parse_env,
    split_flags,
)
from options.command import NumberType, ProgramGroup, SectionedCommand, SectionedOption

POLL_S = 0.25
MAX_CALL_S = 60.0
MAX_CONNECT_S = 5.0
_name_option = click.option(
    "--name", default="fleet", show_default=True, help="Name of the fleet; a cluster may have several."
)
_address_option = click.option(
    "--address", default="auto", show_default=True, help="Address of Ray, auto or HOST:PORT; RAY_ADDRESS sets it too."
)
_wait_option = click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until all of it is done.")
_timeout_option = click.option(
    "--timeout", type=float, default=1800.0, show_default=True, metavar="SECONDS", help="Longest that --wait takes."
)
_resource_option = partial(click.option, cls=SectionedOption, heading="Resources and simulation")
_timeout_setting = partial(
    click.option, cls=SectionedOption, heading="Timeouts of programs", show_default=True, metavar="SECONDS"
)


def _add_fleet_options(command: Any) -> Any:
    return _name_option(_address_option(command))


@contextmanager
def report_errors() -> Iterator[IO[str]]:
    """Report a user's mistake in one line, and keep stdout free of what Ray prints about its nodes."""
    out = sys.stdout
    try:
        with redirect_stdout(sys.stderr):
            try:
                yield out
            finally:
                if "ray" in sys.modules:  # its threads print as long as it is connected
                    sys.modules["ray"].shutdown()
    except (SpecError, ValueError, ConnectionError) as error:
        raise click.ClickException(str(error)) from error
    except TimeoutError as error:
        raise click.ClickException(f"the directory did not answer within {MAX_CALL_S:g} s: {error}") from error


def _connect(address: str) -> None:
    """Connect this process to the Ray cluster. Raises SpecError if there is none, or Ray is not installed."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", address)
    _check_reachable(address)
    try:
        import ray
    except ImportError as error:
        raise SpecError(f"{error}: pip install 'blockcast[ray]'") from error
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
    except ConnectionError as error:
        raise _make_no_ray_error(address, error) from error


def _check_reachable(address: str) -> None:
    """Raise SpecError if nothing listens at HOST:PORT, for which Ray itself would wait minutes."""
    host, _, port = address.rpartition(":")
    is_host_and_port = host and "/" not in host and port.isdecimal()
    if not is_host_and_port:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), MAX_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise _make_no_ray_error(address, error) from None


def _make_no_ray_error(address: str, error: Exception) -> SpecError:
    return SpecError(f"no Ray at {address}: {error}; `ray start --head` starts one")


def _get_directory(name: str) -> Any:
    import ray

    try:
        return ray.get_actor(f"{name}-directory", namespace=NAMESPACE)
    except ValueError:
        raise SpecError(f"no fleet {name!r} runs on this cluster: `fleet up` starts one") from None


def call_directory(method: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the directory actor, and return its result. Raises SpecError if the fleet was ended."""
    import ray

    try:
        return ray.get(method.remote(*args, **kwargs), timeout=MAX_CALL_S)
    except ray.exceptions.ActorDiedError:
        raise SpecError("the fleet was ended meanwhile (`fleet down`)") from None


def wait_until(directory: Any, timeout_s: float, is_done: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Poll the fleet's status until `is_done(status)`, and return that status. New events are printed meanwhile.

    `directory`: Ray actor that manages the fleet. Prints the status and raises ClickException after `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    last_printed_s = time.time() - 1.0  # the command that is waited for may have caused events already
    while True:
        status: dict[str, Any] = call_directory(directory.status)
        for event_s, text in status["events"]:
            if event_s > last_printed_s:
                click.echo(text, err=True)
                last_printed_s = event_s
        if is_done(status):
            return status
        if time.monotonic() > deadline_s:
            print_status(status)
            raise click.ClickException(f"not done within {timeout_s:g} s; it goes on, `fleet status` shows how far")
        time.sleep(POLL_S)


def print_status(status: dict[str, Any]) -> None:
    """Print the status of a fleet: a line for the fleet, for each member, and for each failing program."""
    target_by_kind = status["targets"]
    state = "settled" if status["settled"] else "changing"
    click.echo(
        f"{status['name']}: {target_by_kind['engine']['count']} engines, "
        f"{target_by_kind['router']['count']} routers, {state}"
    )
    for member in status["members"]:
        click.echo(_format_member(member))
    for kind, count in status["hung"].items():
        click.echo(f"  {kind}s that did not answer and were killed: {count}")
    for failure in status["failures"]:
        retry = f"again in {failure['retry_in_s']:.0f} s" if failure["retry_in_s"] else "started again"
        click.echo(f"  {failure['kind']} {failure['slot']} failed {failure['failures']} times in a row, {retry}")


def _format_member(member: dict[str, Any]) -> str:
    text = f"  {member['name']:24} {member['phase']:9} r{member['revision']} {member['seconds']:7.0f} s  "
    text += f"{member['url'] or '-':32} node {member['node'][:8] or '-'}"
    if member["kind"] == "engine":
        text += f"  {member['in_flight']} in flight, queue {member['queue_s']:.2f} s"
    if member["wait"]:
        text += f"  {member['wait']}"
    if member["silent_s"]:
        text += f"  DOES NOT ANSWER for {member['silent_s']:.0f} s"
    return text


@click.group(cls=ProgramGroup, context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Workers and routers on a Ray cluster: started, placed, restarted, replaced and scaled."""


# fmt: off
@cli.command(cls=SectionedCommand)
@click.argument("model", required=False, default="")
@click.argument("flags", nargs=-1, metavar="[-- ENGINE FLAGS...]")
@click.option("--replicas", type=NumberType(int, 0, 999_999), default=1, show_default=True, help="Number of workers.")
@click.option("--routers", type=NumberType(int, 0, 64), default=1, show_default=True, help="Number of routers.")
@click.option("--engine", default="ours", show_default=True, metavar="ours|vllm|PATH",
    help="Engine of the workers; PATH is a vllm program on the nodes.")
@click.option("--tensor-parallel-size", "-tp", type=NumberType(int, 1, 64), default=1, show_default=True,
    help="Ranks of a worker, all on one node.")
@_resource_option("--simulate", metavar="SPEC", help="Workers compute nothing (docs/how-to/simulate-a-fleet.md).")
@_resource_option("--time-scale", type=float, help="With --simulate: factor on all step times.")
@_resource_option("--cpus", type=NumberType(float, 0), default=1.0, show_default=True,
    help="CPUs that Ray reserves for a worker.")
@_resource_option("--gpus", type=NumberType(int, 0, 64),
    help="GPUs of a worker. [default: one a rank, where there are any]")
@_resource_option("--router-cpus", type=NumberType(float, 0), default=1.0, show_default=True,
    help="CPUs that Ray reserves for a router.")
@_resource_option("--router-host", default="", help="Address that routers listen on. [default: their node's]")
@click.option("--router-port", type=NumberType(int, 0, 65000), default=8080, show_default=True,
    help="Port of the first router; others count up.")
@click.option("--router-flags", default="", metavar="TEXT", help="Flags of `router run`, quoted as in a shell.")
@_resource_option("--env", multiple=True, metavar="NAME[=VALUE]",
    help="Environment variable of all programs. Repeatable.")
@_timeout_setting("--start-timeout", type=float, default=1800.0,
    help="A program that does not serve by then is restarted.")
@_timeout_setting("--drain-timeout", type=float, default=300.0,
    help="Longest that requests of a stopping worker may take.")
@_timeout_setting("--stop-timeout", type=float, default=60.0, help="Time from SIGTERM to SIGKILL.")
@_timeout_setting("--hang-timeout", type=NumberType(float, 0), default=120.0,
    help="A program without answers to health checks for so long is restarted.")
@_wait_option
@_timeout_option
@_add_fleet_options
def up(model: str, flags: tuple[str, ...], replicas: int, routers: int, name: str, **options: Any) -> None:
    """Start workers of MODEL and routers before them, and keep them up.

    \b
    ray start --head
    fleet up /models/llama --replicas 8 --routers 2 -- --max-num-seqs 64
    """
    with report_errors() as out:
        if re.match(NAME_PATTERN, name) is None:
            raise SpecError(f"--name: got {name!r}, expected letters, digits, - and _")
        spec = make_fleet_spec(name, model, flags, options)  # first, so that mistakes are reported at once
        _connect(options["address"])
        from fleet.directory import create_directory

        spec = msgspec.structs.replace(spec, worker_gpus=_count_worker_gpus(options))
        try:
            directory = create_directory(spec, replicas, routers)
        except ValueError as error:
            raise SpecError(f"fleet {name!r} runs already: scale, roll, or `fleet down` first") from error
        wait_and_print_routers(directory, options, out)
# fmt: on


def make_fleet_spec(name: str, model: str, flags: tuple[str, ...], options: dict[str, Any]) -> FleetSpec:
    """Return the spec of a new fleet from the arguments and options of `fleet up`. Raises SpecError.

    `worker_gpus` stays 0, because the cluster has to be asked about its GPUs first.
    """
    model, flags = split_model(model, flags)
    env = parse_env(options["env"], os.environ)
    return FleetSpec(
        name=name,
        engine_command=build_engine_command(options["engine"], model, (*make_engine_flags(options), *flags)),
        router_flags=split_flags("--router-flags", options["router_flags"]),
        env=env,
        worker_cpus=options["cpus"],
        router_cpus=options["router_cpus"],
        router_host=options["router_host"],
        router_port=options["router_port"],
        start_timeout_s=options["start_timeout"],
        drain_timeout_s=options["drain_timeout"],
        stop_timeout_s=options["stop_timeout"],
        hang_timeout_s=options["hang_timeout"],
        admin_key=env.get("ROUTER_ADMIN_API_KEY") or secrets.token_hex(16),
    )


def _count_worker_gpus(options: dict[str, Any]) -> int:
    """Return the GPUs of a worker: those of the flag, or one for each rank if the cluster has any."""
    if options["gpus"] is not None:
        return int(options["gpus"])
    import ray

    return options["tensor_parallel_size"] if ray.cluster_resources().get("GPU") else 0


def make_engine_flags(options: dict[str, Any]) -> tuple[str, ...]:
    """Return the worker's flags for those options of `up` that it passes on to the worker."""
    ranks = options["tensor_parallel_size"]
    value_by_flag = {
        "--tensor-parallel-size": ranks if ranks > 1 else None,
        "--time-scale": options["time_scale"],
        "--simulate": options["simulate"],
    }
    return tuple(word for flag, value in value_by_flag.items() if value is not None for word in (flag, str(value)))


def split_model(model: str, flags: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the model and the engine flags. Without MODEL, click takes the first word after `--` for it."""
    return ("", (model, *flags)) if model.startswith("-") else (model, flags)


def wait_and_print_routers(directory: Any, options: dict[str, Any], out: IO[str]) -> None:
    """Wait until the fleet is settled, if the user wants that, and print the routers' addresses on stdout."""
    if options["wait"]:
        status = wait_until(directory, options["timeout"], lambda status: bool(status["settled"]))
        for member in status["members"]:
            if member["kind"] == "router":
                click.echo(member["url"], file=out)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@click.option("--events", is_flag=True, help="Print recent events too.")
@_add_fleet_options
def status(as_json: bool, events: bool, name: str, address: str) -> None:
    """List the members, their nodes and what is being done."""
    with report_errors():
        _connect(address)
        report = call_directory(_get_directory(name).status)
    if as_json:
        click.echo(json.dumps(report, indent=1))
        return
    print_status(report)
    for event_s, text in report["events"] if events else ():
        click.echo(f"  {time.strftime('%H:%M:%S', time.localtime(event_s))} {text}")


@cli.command()
@click.argument("replicas", type=NumberType(int, 0, 999_999), required=False)
@click.option("--routers", type=NumberType(int, 0, 64), help="Number of routers.")
@_wait_option
@_timeout_option
@_add_fleet_options
def scale(replicas: int | None, routers: int | None, name: str, **options: Any) -> None:
    """Have REPLICAS workers. Workers that go are drained first."""
    with report_errors() as out:
        _connect(options["address"])
        directory = _get_directory(name)
        call_directory(directory.scale, replicas, routers)
        wait_and_print_routers(directory, options, out)


@cli.command()
@click.argument("model", required=False)
@click.argument("flags", nargs=-1, metavar="[-- ENGINE FLAGS...]")
@click.option("--routers", "is_for_routers", is_flag=True, help="Replace the routers instead of the workers.")
@click.option(
    "--engine", default="ours", show_default=True, metavar="ours|vllm|PATH", help="With MODEL: engine of the workers."
)
@click.option("--router-flags", metavar="TEXT", help="With --routers: new flags of `router run`.")
@click.option("--surge", is_flag=True, help="Start a replacement before the old one is drained.")
@_wait_option
@_timeout_option
@_add_fleet_options
def roll(
    model: str | None, flags: tuple[str, ...], is_for_routers: bool, engine: str, router_flags: str | None,
    surge: bool, name: str, **options: Any,
) -> None:  # fmt: skip
    """Replace the workers one by one: with the same command line, or with MODEL and ENGINE FLAGS instead of it."""
    with report_errors() as out:
        has_worker_options = model is not None or surge
        if is_for_routers and has_worker_options:
            raise SpecError("--routers: takes neither MODEL nor --surge, whose port would be another one")
        if router_flags is not None and not is_for_routers:
            raise SpecError("--router-flags: for --routers only")
        spec_changes = make_spec_changes(model, flags, engine, router_flags)
        _connect(options["address"])
        directory = _get_directory(name)
        call_directory(directory.roll, MemberKind.ROUTER if is_for_routers else MemberKind.ENGINE, spec_changes, surge)
        wait_and_print_routers(directory, options, out)


def make_spec_changes(
    model: str | None, flags: tuple[str, ...], engine: str, router_flags: str | None
) -> dict[str, Any]:
    """Return the fields of the fleet's spec that a roll changes; none if the command lines stay as they are."""
    spec_changes: dict[str, Any] = {}
    if router_flags is not None:
        spec_changes["router_flags"] = split_flags("--router-flags", router_flags)
    if model is not None:
        model, flags = split_model(model, flags)
        spec_changes["engine_command"] = build_engine_command(engine, model, flags)
    return spec_changes


@cli.command()
@click.option("--now", is_flag=True, help="Kill all programs; requests in flight are cut off.")
@_timeout_option
@_add_fleet_options
def down(now: bool, timeout: float, name: str, address: str) -> None:
    """End the fleet: routers complete their requests, then the workers stop."""
    with report_errors():
        _connect(address)
        directory = _get_directory(name)
        call_directory(directory.stop_all, now=now)
        wait_until(directory, timeout, lambda status: not status["members"])
        from fleet.directory import delete_fleet

        delete_fleet(name, directory)


def main(args: list[str] | None = None) -> None:
    cli.main(args=args if args is not None else sys.argv[1:], prog_name="fleet")
