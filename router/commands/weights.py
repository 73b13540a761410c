"""`router weights`: sleep, wake up, other weights, an empty cache, one worker after the other."""

from __future__ import annotations

import click

from router.commands.client import AdminClient, asks_router

ORDER_S_MAX = 7 * 86_400.0
"""For all workers, one after the other."""


@click.command(help="""Have the workers of the router at URL change, one by one, while the others answer.

reload: take the weights of --path, a folder as the workers see it, without --path those of the same folder again.
sleep: give memory back, and get no requests until wake. reset: forget what is cached. Each worker gets no new requests,
ends those it has, changes, and is known to have an empty cache before it works again. The first that fails ends it.

\b
  router weights reload --path /models/step-200 http://127.0.0.1:8080
  router weights sleep --level 2 --worker gpu1:8000
""")  # fmt: skip
@click.argument("do", type=click.Choice(("reload", "sleep", "wake", "reset")))
@click.option("--worker", metavar="ID", help="This one only.")
@click.option("--path", metavar="FOLDER", help="Of reload.")
@click.option("--level", type=click.IntRange(1, 2), default=1, show_default=True, help="Of sleep; 2: the weights too.")
@click.option("--drain-timeout", type=click.FloatRange(0, 86_400), default=600.0, show_default=True, help="Seconds.")
@asks_router
def weights(
    router: AdminClient, do: str, worker: str | None, path: str | None, level: int, drain_timeout: float
) -> None:
    body = {"do": do, "level": level, "drain_s": drain_timeout}
    body |= {name: value for name, value in (("worker_id", worker), ("path", path)) if value is not None}
    _, told = router.ask("/weights", body, seconds=ORDER_S_MAX)
    if not isinstance(told, dict) or "workers" not in told:
        error = told.get("error") if isinstance(told, dict) else None
        raise click.ClickException(f"{router.url}: {error.get('message', told) if isinstance(error, dict) else told}")
    for one in told["workers"]:
        click.echo(f"{one['worker_id']}  {'done' if one['done'] else 'FAILED: ' + one['error']} ({one['seconds']:g} s)")
    if not told["workers"] or not all(one["done"] for one in told["workers"]):
        raise click.exceptions.Exit(1)
