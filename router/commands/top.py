"""`router top`: the fleet in a terminal, as `GET /workers` tells it.

`make_table_rows` and `format_summary` are pure: two answers of the route and the seconds between them become text. The
rest asks and draws.
"""

from __future__ import annotations

import time
from typing import Any

import click

from router.commands.client import AdminClient, add_router_options

COLUMNS = ("worker", "state", "requests/s", "prefilling", "decoding", "queue s", "predicted", "reported", "alarms")
SORT_ORDERS = ("trouble", "name", "load", "requests")

WorkersPage = dict[str, Any]
"""The body of `GET /workers`."""


def make_table_rows(
    page: WorkersPage, previous_page: WorkersPage | None, interval_s: float, sort: str = "trouble"
) -> list[list[str]]:
    """One a target, in the order of COLUMNS. "-" where nothing was measured."""
    previous_row_by_target = {row.get("target"): row for row in (previous_page or {}).get("workers", [])}
    scored_rows = []
    for row in page["workers"]:
        if "target" not in row:  # never reached
            scored_rows.append(([row["worker_id"], row["state"], *["-"] * 6, row.get("state_reason", "")], 0.0, 0.0))
            continue
        previous_row = previous_row_by_target.get(row["target"], {})
        new_requests = row["routed_requests"] - previous_row.get("routed_requests", row["routed_requests"])
        requests_per_s = new_requests / interval_s if previous_row and interval_s > 0 else None
        alarms = ", ".join(row["alarms"]) or row["state_reason"]
        scored_rows.append((
            [row["target"], row["state"], _format_number(requests_per_s), str(row["prefilling"]), str(row["decoding"]),
             f"{row['queue_s']:.2f}", _format_tokens(row["predicted_cached_tokens"]),
             _format_tokens(row["reported_cached_tokens"]), alarms], requests_per_s or 0.0, float(row["queue_s"]),
        ))  # fmt: skip
    sort_key_by_order = {
        "trouble": lambda scored_row: (scored_row[0][1] == "up" and not scored_row[0][-1], scored_row[0][0]),
        "name": lambda scored_row: scored_row[0][0],
        "requests": lambda scored_row: -scored_row[1],
        "load": lambda scored_row: -scored_row[2],
    }
    return [cells for cells, _, _ in sorted(scored_rows, key=sort_key_by_order[sort])]


def format_summary(page: WorkersPage, previous_page: WorkersPage | None, interval_s: float) -> str:
    """One line on the whole router, its health first."""
    states = [row["state"] for row in page["workers"]]
    state_counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states), key=states.index))
    routed_requests = page["counters"].get("routed", 0) - (previous_page or page)["counters"].get("routed", 0)
    requests_per_s = (
        f"{routed_requests / interval_s:.1f} requests/s"
        if previous_page is not None and interval_s > 0
        else "- requests/s"
    )
    troubled_count = sum(row["state"] != "up" or bool(row.get("alarms")) for row in page["workers"])
    health = "No workers" if not states else f"{troubled_count} in trouble" if troubled_count else "Healthy"
    return (
        f"{health}: {state_counts or 'none'}; {requests_per_s}, {page['in_flight']} in flight, "
        f"{page['queued']} queued, index {page['index']['entries']:,} blocks "
        f"in {page['index']['memory_bytes'] / 2**20:.0f} MiB"
    )


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _format_tokens(count: int) -> str:
    return f"{count:,}" if count else "-"


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
    help="Order of workers; trouble: those that are not well first.",
)
@click.option("--once", is_flag=True, help="Print one update and end.")
def top(router: AdminClient, every: float, sort: str, once: bool) -> None:
    try:
        from rich.console import Console
        from rich.live import Live
        from rich.table import Table
    except ImportError:
        raise click.ClickException("the package `rich` is missing: install blockcast[top]") from None

    def make_table(now: WorkersPage, before: WorkersPage | None, seconds: float) -> Table:
        table = Table(*COLUMNS, title=format_summary(now, before, seconds), title_justify="left", expand=False)
        for cells in make_table_rows(now, before, seconds, sort):
            up = cells[1] in ("up", "draining")
            table.add_row(*cells, style=None if up and not cells[-1] else "yellow" if up else "red")
        return table

    before, polled_s = fetch_workers(router), time.monotonic()
    if once:
        time.sleep(min(every, 2.0))
        now = fetch_workers(router)
        Console().print(make_table(now, before, time.monotonic() - polled_s))
        return
    with Live(make_table(before, None, 0.0), screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every)
                now, now_s = fetch_workers(router), time.monotonic()
                live.update(make_table(now, before, now_s - polled_s), refresh=True)
                before, polled_s = now, now_s
        except KeyboardInterrupt:
            return
