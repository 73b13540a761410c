"""`router top`: the workers of a router in a terminal, from `GET /workers`.

`make_table_rows` and `format_summary` are pure: they make text of two answers and of the seconds between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import click

from router.commands.client import AdminClient, add_router_options

COLUMNS = ("worker", "state", "req/s", "prefill", "decode", "queue s", "predicted", "reported")
SORT_ORDERS = ("trouble", "name", "load", "requests")

WorkersPage = dict[str, Any]
"""The body of `GET /workers`."""
_CACHED_TOKENS_FIELDS = ("reported_cached_tokens", "predicted_cached_tokens")


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
    if "target" not in worker:  # never reached
        cells = [worker["worker_id"], worker["state"], *["-"] * (len(COLUMNS) - 2)]
        return WorkerRow(cells, worker.get("state_reason", ""))
    has_rate = previous is not None and interval_s > 0
    new_requests = worker["routed_requests"] - (previous or worker)["routed_requests"]
    requests_per_s = new_requests / interval_s if has_rate else 0.0
    cells = [
        worker["target"],
        worker["state"],
        f"{requests_per_s:.1f}" if has_rate else "-",
        str(worker["prefilling"]),
        str(worker["decoding"]),
        f"{worker['queue_s']:.2f}",
        _format_tokens(worker["predicted_cached_tokens"]),
        _format_tokens(worker["reported_cached_tokens"]),
    ]
    problem = ", ".join(worker["alarms"]) or worker["state_reason"]
    return WorkerRow(cells, problem, requests_per_s, float(worker["queue_s"]))


def format_summary(page: WorkersPage, previous_page: WorkersPage | None, interval_s: float) -> str:
    """Return one line on the whole router: its health, its load, and the tokens that caches save."""
    states = [row["state"] for row in page["workers"]]
    state_counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states), key=states.index))
    troubled_count = sum(row["state"] != "up" or bool(row.get("alarms")) for row in page["workers"])
    health = "No workers" if not states else f"{troubled_count} in trouble" if troubled_count else "Healthy"
    requests_rate, tokens_rate = "-", "-"
    if previous_page is not None and interval_s > 0:
        routed_requests = page["counters"].get("routed", 0) - previous_page["counters"].get("routed", 0)
        cached_tokens = _sum_cached_tokens(page) - _sum_cached_tokens(previous_page)
        requests_rate, tokens_rate = f"{routed_requests / interval_s:.1f}", f"{max(cached_tokens / interval_s, 0):,.0f}"
    return (
        f"{health}: {state_counts or 'none'}; {requests_rate} requests/s, {page['in_flight']} in flight, "
        f"{page['queued']} queued; {tokens_rate} cached tokens/s"
    )


def _sum_cached_tokens(page: WorkersPage) -> int:
    """Return the cached prompt tokens of all workers: as reported, or as predicted if no worker reports them."""
    sums: list[int] = [sum(row.get(name, 0) for row in page["workers"]) for name in _CACHED_TOKENS_FIELDS]
    return sums[0] or sums[1]


def _format_tokens(count: int) -> str:
    return f"{count:,}" if count else "-"


def _choose_colour(row: WorkerRow) -> str | None:
    """Return the colour of a row: none if the worker is well, yellow for an alarm, red if it takes no requests."""
    if row.cells[1] not in ("up", "draining"):
        return "red"
    return "yellow" if row.problem else None


def fetch_workers(router: AdminClient) -> WorkersPage:
    """Fetch the router's workers. Raises click.ClickException."""
    status, page = router.fetch_json("/workers", timeout_s=5)
    if status != 200 or not isinstance(page, dict) or "workers" not in page:
        raise click.ClickException(f"{router.url}/workers is not a router's ({status})")
    return page


@click.command(help="""Watch a router's workers: state, requests, queues, cached tokens, alarms. Ctrl-C ends it.

\b
  router top http://127.0.0.1:8080 --key KEY
  router top --once --sort load
""")  # fmt: skip
@add_router_options
@click.option(
    "--every", type=click.FloatRange(0.1, 3600), default=2.0, show_default=True, help="Seconds between two updates."
)
@click.option(
    "--sort",
    type=click.Choice(SORT_ORDERS),
    default="trouble",
    show_default=True,
    help="Order of workers; trouble: those with a problem first.",
)
@click.option("--once", is_flag=True, help="Print one update and end.")
def top(router: AdminClient, every: float, sort: str, once: bool) -> None:
    try:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        raise click.ClickException("the package `rich` is missing: install blockcast[top]") from None

    def draw(now: WorkersPage, before: WorkersPage | None, seconds: float) -> Group:
        rows = make_table_rows(now, before, seconds, sort)
        table = Table(box=None, padding=(0, 2, 0, 0), expand=False)
        table.add_column("worker", overflow="fold", min_width=12)
        table.add_column("state", no_wrap=True)
        for name in COLUMNS[2:]:
            table.add_column(name, no_wrap=True, justify="right")
        for row in rows:
            table.add_row(*row.cells, style=_choose_colour(row))
        problems = [
            Text(f"{row.cells[0]}: {row.problem}", style=_choose_colour(row) or "") for row in rows if row.problem
        ]
        return Group(Text(format_summary(now, before, seconds), style="bold"), table, *problems)

    before, polled_s = fetch_workers(router), time.monotonic()
    if once:
        time.sleep(min(every, 2.0))
        now = fetch_workers(router)
        Console().print(draw(now, before, time.monotonic() - polled_s))
        return
    with Live(draw(before, None, 0.0), screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every)
                now, now_s = fetch_workers(router), time.monotonic()
                live.update(draw(now, before, now_s - polled_s), refresh=True)
                before, polled_s = now, now_s
        except KeyboardInterrupt:
            return
