"""`router top`: the workers of a router in a terminal, from `GET /workers`.

`make_table_rows` and `format_summary` are pure: they make text of two answers and of the seconds between them.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeGuard
from urllib.parse import urlsplit

import click

from options import ConfigError
from options.command import NumberType
from options.tls import make_client_context
from router.http_client import FetchError, fetch, make_key_headers, open_session

COLUMNS = ("worker", "state", "req/s", "prefill", "decode", "queue s", "predicted", "reported")
SORT_ORDERS = ("trouble", "name", "load", "requests")
MAX_ANSWER_BYTES = 64 << 20
ANSWER_S_MAX = 5.0

WorkersPage = dict[str, Any]
"""The body of `GET /workers`."""


class WorkerRow(NamedTuple):
    """Row of one worker, or of one data-parallel rank."""

    cells: list[str]
    """Text of each of COLUMNS; "-" where nothing was measured."""
    problem: str
    """Alarms, or why the worker is not up; an empty text if it is well."""
    requests_per_s: float = 0.0
    queue_s: float = 0.0


def make_table_rows(
    page: WorkersPage, previous_page: WorkersPage | None, interval_s: float, sort: str = "trouble"
) -> list[WorkerRow]:
    """Return the rows of all workers in the order of `sort`. Rates are those since `previous_page`."""
    previous_row_by_target = {row.get("target"): row for row in (previous_page or {}).get("workers", [])}
    rows = [_make_row(row, previous_row_by_target.get(row.get("target")), interval_s) for row in page["workers"]]
    sort_key_by_order: dict[str, Callable[[WorkerRow], Any]] = {
        "trouble": lambda row: (row.cells[1] == "up" and not row.problem, row.cells[0]),
        "name": lambda row: row.cells[0],
        "requests": lambda row: -row.requests_per_s,
        "load": lambda row: -row.queue_s,
    }
    return sorted(rows, key=sort_key_by_order[sort])


def _make_row(worker: dict[str, Any], previous: dict[str, Any] | None, interval_s: float) -> WorkerRow:
    """Return the table row of a worker, from its entry in the body of `GET /workers`.

    `previous`: the entry `interval_s` seconds ago, for the rate of requests; None: show no rate.
    """
    if "target" not in worker:  # the router has never reached it, and knows no figures
        cells = [worker["worker_id"], worker["state"], *["-"] * (len(COLUMNS) - 2)]
        return WorkerRow(cells, worker.get("state_reason", ""))
    requests_per_s, rate_text = 0.0, "-"
    if previous is not None and interval_s > 0:
        new_requests = worker["routed_requests"] - previous["routed_requests"]
        requests_per_s = max(new_requests / interval_s, 0)  # negative after a restart of the router
        rate_text = f"{requests_per_s:.1f}"
    cells = [
        worker["target"],
        worker["state"],
        rate_text,
        str(worker["prefilling"]),
        str(worker["decoding"]),
        f"{worker['queue_s']:.2f}",
        _format_tokens(worker["predicted_cached_tokens"]),
        _format_tokens(worker["reported_cached_tokens"]),
    ]
    problem = ", ".join(worker["alarms"]) or worker["state_reason"]
    return WorkerRow(cells, problem, requests_per_s, float(worker["queue_s"]))


def format_summary(page: WorkersPage, previous_page: WorkersPage | None, interval_s: float) -> str:
    """Return one line on the whole router: its health, its load, and the prompt tokens found in caches per second."""
    count_by_state = Counter(row["state"] for row in page["workers"])
    state_counts = ", ".join(f"{count} {state}" for state, count in count_by_state.items())
    troubled_count = sum(row["state"] != "up" or bool(row.get("alarms")) for row in page["workers"])
    health = f"{troubled_count} in trouble" if troubled_count else "Healthy"
    if not page["workers"]:
        health = "No workers"
    requests_rate = tokens_rate = "-"
    if previous_page is not None and interval_s > 0:
        routed_requests = page["counters"].get("routed", 0) - previous_page["counters"].get("routed", 0)
        cached_tokens = _sum_cached_tokens(page) - _sum_cached_tokens(previous_page)
        requests_rate = f"{max(routed_requests / interval_s, 0):.1f}"
        tokens_rate = f"{max(cached_tokens / interval_s, 0):,.0f}"
    return (
        f"{health}: {state_counts or 'none'}; {requests_rate} requests/s, {page['in_flight']} in flight, "
        f"{page['queued']} queued; {tokens_rate} cached tokens/s"
    )


def format_transfers(page: WorkersPage, previous_page: WorkersPage | None, interval_s: float) -> str:
    """Return a line such as "KV that moves: 2.0 pulls/s, 0.5 prefills/s, 0 failed"; "" if no worker can move KV.

    A pull copies cached KV from another worker, and a prefill has another worker compute the prompt. A protocol by
    which no KV can move is listed with the reason, for example "none in nixl: PROBLEM".
    """
    groups = page.get("kv_groups", [])
    counts_by_kind = page.get("kv_transfers", {})
    if not groups and not counts_by_kind:
        return ""
    parts = []
    for kind, counts in counts_by_kind.items():
        transfers_per_s = "-"
        if previous_page is not None and interval_s > 0:
            previous_counts = previous_page.get("kv_transfers", {}).get(kind, {})
            new_transfers = counts["started"] - previous_counts.get("started", 0)
            transfers_per_s = f"{max(new_transfers / interval_s, 0):.1f}"
        parts.append(f"{transfers_per_s} {kind}s/s")
    parts.append(f"{page['counters'].get('failed_transfers', 0)} failed")
    parts += [f"none in {group['dialect']}: {group['problem']}" for group in groups if group["problem"]]
    return "KV that moves: " + ", ".join(parts)


def _sum_cached_tokens(page: WorkersPage) -> int:
    """Return the cached prompt tokens of all workers: as reported, or as predicted if no worker reports them."""
    reported_tokens: int = sum(row.get("reported_cached_tokens", 0) for row in page["workers"])
    predicted_tokens: int = sum(row.get("predicted_cached_tokens", 0) for row in page["workers"])
    return reported_tokens or predicted_tokens


def _format_tokens(count: int) -> str:
    return f"{count:,}" if count else "-"


def _choose_colour(row: WorkerRow) -> str | None:
    """Return the colour of a row: none if the worker is well, yellow for an alarm, red if it answers none."""
    if row.cells[1] not in ("up", "draining"):
        return "red"
    return "yellow" if row.problem else None


def _suggest_remedy(url: str, reason: str) -> str:
    """Return what a user can do about a router that could not be asked for this reason."""
    if "certificate verify failed" in reason:
        return "name who has signed its certificate, --tls-ca FILE"
    if "disconnected" in reason and url.startswith("http://"):
        return "does it speak HTTPS? Then name it with https://"
    return "is this the address of the router's admin routes, and does it run?"


def fetch_workers(url: str, headers: dict[str, str], tls: ssl.SSLContext) -> WorkersPage:
    """Return the decoded body of a router's `GET /workers`. `headers`: HTTP headers with the admin key.

    Raises click.ClickException if the router cannot be reached, refuses the key, or is no router.
    """
    try:
        status, answer = asyncio.run(_fetch(f"{url}/workers", headers, tls))
    except FetchError as error:
        raise click.ClickException(f"{url}: {error}: {_suggest_remedy(url, str(error))}") from None
    if status in (401, 403):
        raise click.ClickException(f"{url} answers {status}: give the admin key, --key")
    try:
        page = json.loads(answer)
    except (ValueError, RecursionError):
        page = None
    if status != 200 or not _is_workers_page(page):
        raise click.ClickException(f"{url}/workers is not a router's ({status}): give the URL of a `router run`")
    return page


def _is_workers_page(page: Any) -> TypeGuard[WorkersPage]:
    """Return whether an answer has all that is shown of a router, so that later updates can be drawn too."""
    try:
        _draw(page, page, 1.0, SORT_ORDERS[0])
    except (AttributeError, KeyError, TypeError, ValueError):
        return False
    return True


async def _fetch(url: str, headers: dict[str, str], tls: ssl.SSLContext) -> tuple[int, bytes]:
    async with open_session(tls) as session:
        return await fetch(session, url, headers=headers, seconds=ANSWER_S_MAX, bytes_max=MAX_ANSWER_BYTES)


FILE_TYPE = click.Path(dir_okay=False)


@click.command(help="""Watch a router's workers: state, requests, queues, cached tokens, alarms. Ctrl-C ends it.

\b
  router top http://127.0.0.1:8080 --key KEY
  router top --once --sort load
""", short_help="Watch the workers of a router.")  # fmt: skip
@click.argument("url", default="http://127.0.0.1:8080")
@click.option("--key", metavar="KEY", envvar="ROUTER_ADMIN_API_KEY",
              help="Admin key of the router; ROUTER_ADMIN_API_KEY sets it too.")  # fmt: skip
@click.option("--tls-ca", type=FILE_TYPE, metavar="FILE",
              help="Authorities (PEM) of an https:// router. [default: the system's]")  # fmt: skip
@click.option("--tls-cert", type=FILE_TYPE, metavar="FILE",
              help="Certificate (PEM) shown to a router that requires one.")  # fmt: skip
@click.option("--tls-key", type=FILE_TYPE, metavar="FILE", help="Private key (PEM) of --tls-cert.")
@click.option("--every", metavar="SECONDS", type=NumberType(float, 0.1, 3600), default=2.0, show_default=True,
              help="Seconds between two updates.")  # fmt: skip
@click.option("--sort", type=click.Choice(SORT_ORDERS), default="trouble", show_default=True,
              help="Order of workers; trouble: those with a problem first.")  # fmt: skip
@click.option("--once", is_flag=True, help="Print one update and end.")
def top(
    url: str, key: str | None, tls_ca: str | None, tls_cert: str | None, tls_key: str | None, every: float, sort: str,
    once: bool,
) -> None:  # fmt: skip
    """Print the workers once, or redraw them until Ctrl-C."""
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        raise click.ClickException("the package `rich` is missing: install blockcast[top]") from None
    if urlsplit(url).scheme not in ("http", "https"):
        raise click.ClickException(f"URL {url!r}: expected http://HOST:PORT or https://HOST:PORT")
    try:
        tls = make_client_context(tls_cert, tls_key, tls_ca, "--tls")
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    fetch_page = partial(fetch_workers, url.rstrip("/"), make_key_headers(key), tls)
    previous_page = fetch_page()
    polled_s = time.monotonic()
    if once:
        time.sleep(min(every, 2.0))
        page = fetch_page()
        Console().print(_draw(page, previous_page, time.monotonic() - polled_s, sort))
        return
    first_view = _draw(previous_page, None, 0.0, sort)
    with suppress(KeyboardInterrupt), Live(first_view, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(every)
            page = fetch_page()
            now_s = time.monotonic()
            live.update(_draw(page, previous_page, now_s - polled_s, sort), refresh=True)
            previous_page, polled_s = page, now_s


def _draw(page: WorkersPage, previous_page: WorkersPage | None, interval_s: float, sort: str) -> Any:
    """Return what the terminal shows, as a rich Group: a summary, the table of workers, a line for each problem."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = make_table_rows(page, previous_page, interval_s, sort)
    table = Table(box=None, padding=(0, 2, 0, 0), expand=False)
    table.add_column("worker", overflow="fold", min_width=12)
    table.add_column("state", no_wrap=True)
    for column in COLUMNS[2:]:
        table.add_column(column, no_wrap=True, justify="right")
    for row in rows:
        table.add_row(*row.cells, style=_choose_colour(row))
    problems = [Text(f"{row.cells[0]}: {row.problem}", style=_choose_colour(row) or "") for row in rows if row.problem]
    summary = [Text(format_summary(page, previous_page, interval_s), style="bold")]
    transfers = format_transfers(page, previous_page, interval_s)
    if transfers:
        summary.append(Text(transfers))
    return Group(*summary, table, *problems)
