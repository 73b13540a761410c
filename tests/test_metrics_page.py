"""The tables of docs/reference/metrics.md are what the router's and the engine's `/metrics` declare.

python tests/test_metrics_page.py       # writes them anew
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric

from engine.http.metrics import ServerMetrics, collect_families
from engine.transfer.interface import TransferStats
from router.admin.metrics_page import NAME_PREFIX, build_page_families
from router.decide.registry import CoreSnapshot
from router.fleet.worker_stream import STREAM_COUNTERS
from router.index.protocol import IndexStats
from router.metrics import Metrics
from router.prompting.conversation_reader import ConversationReader

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "metrics.md"
HEAD = "| metric (labels) | meaning |\n|---|---|\n"


class AnyValues:
    """Stand-in for reports of the engine: every attribute is a number."""

    def __getattr__(self, name: str) -> Any:
        return 1


def declare_router_metrics() -> list[Metric]:
    """Return the families of a router without traffic."""
    core = SimpleNamespace(
        snapshot=lambda _: CoreSnapshot([], 0, 0, {}),
        workers={},
        index=SimpleNamespace(stats=lambda: IndexStats(0, 0, 0, 0, 0)),
    )
    sources: Any = SimpleNamespace(
        proxy=SimpleNamespace(core=core, metrics=Metrics(), now=lambda: 0.0),
        prompt_reader=SimpleNamespace(cpu_s=0.0, conversations=ConversationReader(0)),
        worker_pool=SimpleNamespace(cpu_s=0.0, counts={}, waiting_bytes=0),
        fleet=SimpleNamespace(failed_checks={}, list_starting_reasons=dict),
        feed=SimpleNamespace(
            sum_counters=dict, list_event_lags=dict, events=SimpleNamespace(fault_count=0, ignored_message_count=0)
        ),
        count_peer_messages=dict,
    )
    return list(build_page_families(sources))


def declare_engine_metrics() -> list[Metric]:
    """Return the families of an engine with events, a simulation and transfers."""
    stats = AnyValues()
    stats.__dict__.update(transfers=TransferStats(), host_memory=AnyValues(), totals=AnyValues())
    core_report: Any = SimpleNamespace(stats=stats, publisher_stats=AnyValues(), simulation_lag=AnyValues())
    info: Any = AnyValues()
    return list(collect_families(ServerMetrics(), core_report, info, "m"))


def render_table(families: Iterable[Metric], *, prefix: str = "") -> str:
    """Return a Markdown table with one row for each family."""
    lines = []
    for family in sorted(families, key=lambda family: family.name):
        name = family.name.removeprefix(prefix) + ("_total" if isinstance(family, CounterMetricFamily) else "")
        labels = [label for label in family._labelnames if label not in ("model_name", "engine")]  # type: ignore[attr-defined]
        shown_labels = f" ({', '.join(labels)})" if labels else ""
        kind = " (histogram)" if isinstance(family, HistogramMetricFamily) else ""
        lines.append(f"| `{name}`{shown_labels} | {family.documentation}{kind} |\n")
    return HEAD + "".join(lines)


def render_router_table() -> str:
    """Return the table of the router. One row has the counters of event streams."""
    names = ", ".join(STREAM_COUNTERS)
    table = render_table(declare_router_metrics(), prefix=NAME_PREFIX)
    return table + f"| `events_NAME_total` (worker) | Counters of a worker's event streams. NAME: {names}. |\n"


def with_tables(page: str) -> str:
    """Return the page with both tables as the programs declare them."""
    for mark, table in (
        ("router-metrics", render_router_table()),
        ("engine-metrics", render_table(declare_engine_metrics())),
    ):
        before, _, rest = page.partition(f"<!-- {mark} -->\n")
        after = rest.partition(f"<!-- /{mark} -->")[2]
        page = f"{before}<!-- {mark} -->\n{table}<!-- /{mark} -->{after}"
    return page


def test_the_tables_are_what_the_programs_declare() -> None:
    page = PAGE.read_text()
    assert len(re.findall(r"^\| `", page, re.MULTILINE)) > 60
    assert page == with_tables(page), "run python tests/test_metrics_page.py"


def test_every_counter_of_event_streams_is_explained() -> None:
    explanation = PAGE.read_text().partition("* `NAME` of `events_NAME_total`")[2].partition("\n\n")[0]
    for name in STREAM_COUNTERS:
        assert re.search(rf"`{name}`", explanation), name


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
