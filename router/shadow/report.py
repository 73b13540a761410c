"""The report of `router shadow`: one HTML page that loads nothing else, and the same as JSON. No I/O.

Lost tokens are split by their cause (router/miss_reasons/attribution.py): the workload (prompts that changed, and
blocks for which no cache had room), routing (another worker had the blocks), and the index (it was wrong).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import log
from statistics import fmean
from time import gmtime, strftime

import msgspec

from router.miss_reasons.explanation import GROUPS
from router.shadow.replay import Comparison, ObservedEngine

CAUSES = {"workload": ("workload", "capacity"), "routing": ("routing",), "index": ("index",)}
"""Groups of reasons that make up each cause of lost tokens."""
CAUSE_BY_GROUP = {group: cause for cause, groups in CAUSES.items() for group in groups}
METHOD_NOTE = (
    "<h2>How this was found</h2><p>The requests are simulated twice, on engines with the speeds and caches of the "
    "table of workers: once placed as they were, and once as router run would place them. Measured times are scaled "
    "by the ratio of both simulations. A request that waited for the end of an answer waits for it in the simulation "
    "too: the next turn of a conversation, and a request of a session or user whose requests never overlap. All "
    "other requests arrive at their recorded times. The last column of the first table shows how far the simulation "
    "of today is from what was measured. If it is far off, do not trust the other columns.</p></html>"
)
TOTALS = (
    ("prompt tokens computed", "computed_tokens", ""),
    ("waiting for first tokens", "ttft_s", " s"),
    ("requests in flight", "seconds", " s"),
)
"""Rows of the table of savings: title, field of ReplayTotals, and unit."""
WIDTH, HEIGHT, LEFT_MARGIN, MARGIN = 640, 180, 40, 20
"""Size of the plot and its margins, in units of its SVG picture."""
COLOURS = ("#888", "#b3261e", "#1b7f4d")
"""Colours of the curves in their order."""


class ShadowReport(msgspec.Struct):
    """Report of `router shadow`: what its router would save. Its fields are those of the JSON of `GET /shadow`."""

    version: str
    since: float
    """Time of the start, in seconds since 1970."""
    until: float
    requests: dict[str, int]
    """Requests that were seen, by outcome."""
    comparison: Comparison | None
    problem: str | None
    """Why the last comparison failed; None if it did not."""
    tokens: dict[str, int]
    """Prompt tokens that had to be computed, by reason."""
    turns: dict[str, int]
    """Requests by their main reason."""
    workers: list[ObservedEngine]
    """Workers of all requests, and all others that are known now."""
    seen: int
    """Number of recorded requests; the first of them only fill the caches of the comparison."""
    lost: Mapping[str, int | None]
    """Those of `tokens` that were computed without need, by cause; None for a log, which does not show them."""
    lost_s: dict[str, float | None] = {}
    """Seconds of prefill for the tokens in `lost`; None until they are measured. Set by the constructor."""

    def __post_init__(self) -> None:
        s_per_token = mean_prefill_s_per_token(self.comparison)
        self.lost_s = {
            cause: None if tokens is None or s_per_token is None else tokens * s_per_token
            for cause, tokens in self.lost.items()
        }


def sum_lost_tokens_by_cause(tokens_by_reason: Mapping[str, int]) -> dict[str, int]:
    """Return the lost tokens by cause, with 0 for a cause that lost none."""
    lost = dict.fromkeys(CAUSES, 0)
    for reason, tokens in tokens_by_reason.items():
        cause = CAUSE_BY_GROUP.get(GROUPS.get(reason, ""))
        if cause is not None:
            lost[cause] += tokens
    return lost


def mean_prefill_s_per_token(comparison: Comparison | None) -> float | None:
    """Return the mean prefill time of a token over all workers; None if it was not measured."""
    if comparison is None or comparison.measured_totals is None or not comparison.step_times_by_worker:
        return None
    return fmean(step_times.prefill_s_per_token for step_times in comparison.step_times_by_worker.values())


def render_page(report: ShadowReport) -> bytes:
    """Return the report as an HTML page in UTF-8."""
    parts = [
        _render_head(report),
        _render_unplaced(report),
        _render_savings(report),
        _render_losses(report),
        _render_plots(report),
        _render_workers(report),
        METHOD_NOTE,
    ]
    return "".join(parts).encode()


def _render_head(report: ShadowReport) -> str:
    clock = f"{_format_clock(report.since)} to {_format_clock(report.until)} UTC"
    counts = ", ".join(f"{number:,} {escape(outcome)}" for outcome, number in sorted(report.requests.items()))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>router shadow</title><style>{STYLE}</style><h1>What today's placement loses</h1>"
        f"<p>{clock}; requests: {counts or 'none yet'}. router {escape(report.version)}</p>"
    )


def _render_unplaced(report: ShadowReport) -> str:
    """Render how many requests are not compared because their worker is unknown, and why; empty if there are none."""
    unplaced_count = report.requests.get("unplaced", 0)
    if not unplaced_count:
        return ""
    reasons = "the log gives them a worker that is not in the table below, or no cache grew by their prompts"
    return f"<p class=warn>{unplaced_count:,} requests are left out: {reasons}.</p>"


def _render_savings(report: ShadowReport) -> str:
    """Render how many requests were compared and what `router run` would save, or why nothing was compared."""
    comparison = report.comparison
    if comparison is None:
        return f"<p class=warn>Nothing was compared yet. {escape(report.problem or 'Too few requests.')}</p>"
    return (
        f"<h2>What switching gives</h2><p>{comparison.request_count:,} requests of {comparison.prompt_tokens:,} prompt "
        f"tokens, after {comparison.warm_up_request_count:,} that only filled the caches. "
        f"{comparison.waiting_request_count:,} requests waited for the end of another one, and do so with router run "
        f"too.</p>{_render_doubts(report, comparison)}{_render_savings_table(comparison)}"
    )


def _render_doubts(report: ShadowReport, comparison: Comparison) -> str:
    """Render what makes the savings no estimate of the user's fleet: default speeds, and a placement that was made up.

    Both occur with a log in which lines lack times or workers.
    """
    doubts = []
    if comparison.measured_totals is None:
        doubts.append("No time to a first token was recorded, so the engines have default speeds, not yours.")
    dealt_count = report.requests.get("dealt", 0)
    if dealt_count:
        doubts.append(
            f"{dealt_count:,} requests name no worker, so the workers got them in turn, not as your balancer does it."
        )
    return "".join(f"<p class=warn>{doubt} The savings are no estimate of yours.</p>" for doubt in doubts)


def _render_savings_table(comparison: Comparison) -> str:
    """Render the totals of today, measured if possible, beside those of `router run`; dashes if one is unknown."""
    measured, simulated = comparison.measured_totals, comparison.simulated_present
    kind = "simulated" if measured is None else "measured"
    head = ("", f"today, {kind}", "with router run", "saved", "share of today", "error of the simulation of today")
    rows = []
    for title, field, unit in TOTALS:
        today, saved = getattr(measured or simulated, field), getattr(comparison.saved, field)
        cells = ["-"] * 3 if today is None else [f"{total:,.0f}{unit}" for total in (today, today - saved, saved)]
        has_share = today is not None and today > 0
        share = f"{saved / today:+.0%}" if has_share else "-"
        error = f"{getattr(simulated, field) / today - 1:+.1%}" if has_share and measured is not None else "-"
        rows.append((title, *cells, share, error))
    return _render_table(head, rows)


def _render_losses(report: ShadowReport) -> str:
    """Render HTML tables of the prompt tokens that were not cached: by cause of the loss, and by detailed reason."""
    if not report.tokens:
        return ""
    cause_rows = []
    for cause, tokens in report.lost.items():
        seconds = report.lost_s[cause]
        cause_rows.append((cause, f"{tokens:,}", "-" if seconds is None else f"{seconds:,.1f} s"))
    reason_rows = []
    for reason, tokens in sorted(report.tokens.items(), key=lambda item: -item[1]):
        cause = CAUSE_BY_GROUP.get(GROUPS.get(reason, ""), "no loss")
        reason_rows.append((reason, cause, f"{tokens:,}", f"{report.turns.get(reason, 0):,}"))
    causes_table = _render_table(("cause", "tokens", "prefill"), cause_rows)
    reasons_table = _render_table(("reason", "cause", "tokens", "requests"), reason_rows)
    return "<h2>Why prompts were computed</h2>" + causes_table + reasons_table


def _render_plots(report: ShadowReport) -> str:
    if report.comparison is None or not report.comparison.ttft_percentiles_by_curve:
        return ""
    head = "<h2>Time to the first token</h2><p>Share of requests whose first token came within so many seconds.</p>"
    return head + _render_quantile_curves(report.comparison.ttft_percentiles_by_curve)


def _render_workers(report: ShadowReport) -> str:
    """Render the HTML table of the workers, with their measured speeds if a comparison was made."""
    step_times_by_worker = report.comparison.step_times_by_worker if report.comparison is not None else {}
    rows = []
    for engine in report.workers:
        step_times = step_times_by_worker.get(engine.name)
        prefill_time = step_time = "-"
        if step_times is not None:
            prefill_time = f"{step_times.prefill_s_per_token * 1e6:,.0f} us"
            step_time = f"{step_times.step_s * 1e3:.1f} ms"
        cache = f"{engine.cache_tokens:,}" if engine.cache_tokens else "unknown: simulated as unlimited"
        rows.append((engine.name, cache, prefill_time, step_time))
    head = ("worker", "cache, tokens", "time per prefill token", "time per step")
    return "<h2>Workers</h2>" + _render_table(head, rows)


# Drawing --------------------------------------------------------------------------------------------------------------

STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem;color:#222;"
    "background:#fff}table{border-collapse:collapse;margin:.6rem 0;display:block;overflow-x:auto}td,th{padding:.2rem "
    ".9rem .2rem 0;text-align:right;border-bottom:1px solid #8884}td:first-child,th:first-child{text-align:left}"
    "svg{width:100%;height:auto;font-size:11px}svg text{fill:currentColor}.warn{color:#b3261e;font-weight:600}"
    "@media(prefers-color-scheme:dark){body{background:#16181c;color:#ddd}}"
)


def _render_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    header_cells = "".join(f"<th>{escape(cell)}" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}" for cell in row) for row in rows)
    return f"<table><tr>{header_cells}{body}</table>"


def _render_quantile_curves(quantiles: Mapping[str, Sequence[float]]) -> str:
    """Draw the distribution of times of each curve as an SVG picture, with a logarithmic axis of seconds.

    `quantiles`: name of a curve -> its percentiles 0 to 100, in seconds.
    """
    shortest_s = max(min(min(times) for times in quantiles.values()), 1e-3)
    longest_s = max(max(max(times) for times in quantiles.values()), shortest_s * 10)

    def to_x(time_s: float) -> float:
        axis_share = log(max(time_s, shortest_s) / shortest_s) / log(longest_s / shortest_s)
        return LEFT_MARGIN + (WIDTH - LEFT_MARGIN - MARGIN) * min(axis_share, 1.0)

    def to_y(request_share: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * request_share

    elements = []
    for number, (name, times) in enumerate(quantiles.items()):
        colour = COLOURS[number]
        points = [f"{to_x(time):.1f},{to_y(rank / (len(times) - 1)):.1f}" for rank, time in enumerate(times)]
        elements.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{" ".join(points)}"/>')
        key = f'<tspan fill="{colour}">&#9632;</tspan> {escape(name)}'
        elements.append(f'<text x="{50 + 190 * number}" y="12">{key}</text>')
    ticks_s = [tick_s for tick_s in (0.001, 0.01, 0.1, 1, 10, 100, 1000) if shortest_s <= tick_s <= longest_s]
    elements += [f'<text x="{to_x(s):.0f}" y="{HEIGHT - 4}" text-anchor="middle">{s:g} s</text>' for s in ticks_s]
    elements += [f'<text x="0" y="{to_y(share) + 4:.0f}">{share * 100:.0f} %</text>' for share in (0.0, 0.5, 1.0)]
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(elements)}</svg>'


def _format_clock(wall_time_s: float) -> str:
    return strftime("%Y-%m-%d %H:%M", gmtime(wall_time_s))
