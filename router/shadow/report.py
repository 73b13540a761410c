"""The report of `router shadow`: one HTML page that loads nothing else, and the same as JSON. No I/O.

Lost tokens are split by their cause (router/miss_reasons/attribution.py): the workload (prompts that changed, and
blocks for which no cache had room), routing (another worker had the blocks), and the index (it was wrong).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from math import log
from time import gmtime, strftime

import msgspec

from router.miss_reasons.explanation import GROUPS
from router.shadow.replay import Comparison, ObservedEngine

PARTS = {"workload": ("workload", "capacity"), "routing": ("routing",), "index": ("index",)}
"""Cause of lost tokens -> groups of reasons."""
COLOURS = {"workload": "#b36b00", "routing": "#b3261e", "index": "#5b4bb3"}
SIMULATED_NOTE = (
    "<p>By the simulation of today: a log does not tell which blocks were cached at the time, nor whether an index "
    "would have been right. Workload: blocks that no worker had any more, and changes of a session's prompt since its "
    "previous request.</p>"
)
METHOD_NOTE = (
    "<h2>How this was found</h2><p>The requests are simulated twice, on engines as fast as yours were measured: once "
    "placed as they were, and once as router run would place them. The measured times are scaled by the ratio of both "
    "simulations. A request that waited for the end of an answer waits for it in the simulation too: the next turn of "
    "a conversation; a request of a session or user whose requests never overlap; and a new conversation, if a fixed "
    "number of users seems to hold one after the other. All other requests arrive at their recorded times. The last "
    "column of the first table shows how far the simulation of today is from what was measured. If it is far off, do "
    "not trust the other columns.</p></html>"
)
WIDTH, HEIGHT = 640, 180


class ShadowReport(msgspec.Struct):
    """Contents of the report. Its fields are those of `GET /shadow`."""

    version: str
    since: float
    """Time of the start, in seconds since 1970."""
    until: float
    requests: dict[str, int]
    """Outcome -> requests that were seen."""
    comparison: Comparison | None
    problem: str | None
    """Why the last comparison failed; None if it did not."""
    tokens: dict[str, int]
    """Reason -> prompt tokens that had to be computed."""
    turns: dict[str, int]
    """Reason -> requests with it as their main reason."""
    course: list[tuple[float, dict[str, int]]]
    """(seconds since the start, `tokens` at that time)."""
    workers: list[ObservedEngine]
    seen: int
    """Number of requests that are compared."""
    lost: dict[str, int] = {}
    """Cause -> tokens computed without need, by `tokens`, or for a log by the simulation; set by the constructor."""
    lost_s: dict[str, float] = {}
    """Cause -> seconds of prefill for these tokens, if the workers' speed is known."""

    def __post_init__(self) -> None:
        self.lost = sum_lost_tokens_by_part(self.tokens)
        if not self.tokens and self.comparison is not None:
            self.lost = self.comparison.lost
        rate = mean_prefill_s_per_token(self.comparison)
        self.lost_s = {} if rate is None else {part: tokens * rate for part, tokens in self.lost.items()}


def sum_lost_tokens_by_part(tokens: Mapping[str, int]) -> dict[str, int]:
    """Return cause -> tokens. `tokens` are those by reason."""
    tokens_by_group: Counter[str] = Counter()
    for reason, token_count in tokens.items():
        tokens_by_group[GROUPS.get(reason, "")] += token_count
    return {part: sum(tokens_by_group[group] for group in groups) for part, groups in PARTS.items()}


def mean_prefill_s_per_token(comparison: Comparison | None) -> float | None:
    """Return the mean prefill time of a token over all workers; None if it was not measured."""
    if comparison is None or comparison.measured is None or not comparison.steps:
        return None
    return sum(steps.prefill_s_per_token for steps in comparison.steps.values()) / len(comparison.steps)


def render_page(report: ShadowReport) -> bytes:
    """Return the report as an HTML page in UTF-8."""
    parts = [
        _render_head(report),
        _render_savings(report),
        _render_losses(report),
        _render_plots(report),
        _render_workers(report),
        METHOD_NOTE,
    ]
    return "".join(parts).encode()


def _render_head(report: ShadowReport) -> str:
    clock = f"{_format_clock(report.since)} to {_format_clock(report.until)} UTC"
    counts = ", ".join(f"{number:,} {escape(name)}" for name, number in sorted(report.requests.items()))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>router shadow</title><style>{STYLE}</style><h1>What today's placement loses</h1>"
        f"<p>{clock}; requests: {counts or 'none yet'}. router {escape(report.version)}</p>"
    )


def _render_savings(report: ShadowReport) -> str:
    comparison = report.comparison
    if comparison is None:
        return f"<p class=warn>Nothing was compared yet. {escape(report.problem or 'Too few requests.')}</p>"
    base = comparison.measured or comparison.today
    rows = []
    for title, name, unit in (
        ("prompt tokens computed", "computed_tokens", ""),
        ("waiting for first tokens", "ttft_s", " s"),
        ("requests in flight", "seconds", " s"),
    ):
        base_value = getattr(base, name)
        saved_value = getattr(comparison.saved, name)
        simulated_value = getattr(comparison.today, name)
        if base_value is None:
            rows.append((title, *"-----"))
            continue
        share = f"{saved_value / base_value:+.0%}" if base_value > 0 else "-"
        error = "-" if comparison.measured is None or base_value <= 0 else f"{simulated_value / base_value - 1:+.1%}"
        cells = (
            f"{base_value:,.0f}{unit}",
            f"{base_value - saved_value:,.0f}{unit}",
            f"{saved_value:,.0f}{unit}",
            share,
            error,
        )
        rows.append((title, *cells))
    kind = "measured" if comparison.measured is not None else "simulated"
    head = ("", f"today, {kind}", "with router run", "saved", "share of today", "error of the simulation of today")
    return (
        f"<h2>What switching gives</h2><p>{comparison.requests:,} requests of {comparison.prompt_tokens:,} prompt "
        f"tokens, after {comparison.warming:,} that only filled the caches. {comparison.waited:,} requests waited for "
        f"the end of another one, and do so with router run too.</p>{_render_table(head, rows)}"
    )


def _render_losses(report: ShadowReport) -> str:
    rows = [
        (part, f"{tokens:,}", f"{report.lost_s[part]:,.1f} s" if part in report.lost_s else "-")
        for part, tokens in report.lost.items()
    ]
    reasons = [
        (reason, next((p for p, groups in PARTS.items() if GROUPS.get(reason) in groups), "no loss"), f"{tokens:,}",
         f"{report.turns.get(reason, 0):,}")
        for reason, tokens in sorted(report.tokens.items(), key=lambda pair: -pair[1])
    ]  # fmt: skip
    return (
        "<h2>Why prompts were computed</h2>" + ("" if report.tokens else SIMULATED_NOTE)
        + _render_table(("cause", "tokens", "prefill"), rows)
        + (_render_table(("reason", "cause", "tokens", "requests"), reasons) if reasons else "")
    )  # fmt: skip


def _render_plots(report: ShadowReport) -> str:
    comparison = report.comparison
    curves = ""
    if comparison is not None and comparison.quantiles:
        curves = (
            "<h2>Time to the first token</h2><p>Share of requests whose first token came within so many seconds.</p>"
            + _render_quantile_curves(comparison.quantiles)
        )
    return curves + "<h2>Lost tokens over time</h2>" + _render_lost_tokens_over_time(report.course)


def _render_workers(report: ShadowReport) -> str:
    steps = report.comparison.steps if report.comparison is not None else {}
    rows = []
    for engine in report.workers:
        step_times = steps.get(engine.name)
        rate = f"{step_times.prefill_s_per_token * 1e6:,.0f} us" if step_times is not None else "-"
        step = f"{step_times.step_s * 1e3:.1f} ms" if step_times is not None else "-"
        cache = f"{engine.cache_tokens:,}" if engine.cache_tokens else "unknown: simulated as unlimited"
        rows.append((engine.name, cache, rate, step))
    return "<h2>Workers</h2>" + _render_table(
        ("worker", "cache, tokens", "time per prefill token", "time per step"), rows
    )


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
    """Draw distributions of times, on a logarithmic axis."""
    low = max(min(min(values) for values in quantiles.values()), 1e-3)
    high = max(max(max(values) for values in quantiles.values()), low * 10)
    colours = dict(zip(quantiles, ("#888", "#b3261e", "#1b7f4d")))
    svg_lines = []
    for i, (name, values) in enumerate(quantiles.items()):
        points = " ".join(
            f"{40 + (WIDTH - 60) * _log_fraction(v, low, high):.1f},"
            f"{HEIGHT - 20 - (HEIGHT - 40) * k / (len(values) - 1):.1f}"
            for k, v in enumerate(values)
        )
        svg_lines.append(f'<polyline fill="none" stroke="{colours[name]}" stroke-width="2" points="{points}"/>')
        svg_lines.append(
            f'<text x="{50 + 190 * i}" y="12"><tspan fill="{colours[name]}">&#9632;</tspan> {escape(name)}</text>'
        )
    ticks = [10.0**k for k in range(-3, 4) if low <= 10.0**k <= high]
    for tick in ticks:
        x = 40 + (WIDTH - 60) * _log_fraction(tick, low, high)
        svg_lines.append(f'<text x="{x:.0f}" y="{HEIGHT - 4}" text-anchor="middle">{tick:g} s</text>')
    for k in (0, 50, 100):
        svg_lines.append(f'<text x="0" y="{HEIGHT - 16 - (HEIGHT - 40) * k / 100:.0f}">{k} %</text>')
    return _render_svg(svg_lines)


def _render_lost_tokens_over_time(course: Sequence[tuple[float, Mapping[str, int]]]) -> str:
    """Draw the tokens lost in each slice of time, stacked by cause."""
    slices = []
    sample_step = max(1, (len(course) - 1) // 120 + 1)
    samples = list(course[::sample_step])
    for (_, tokens_before), (at, tokens_after) in pairwise(samples):
        lost_before, lost_after = sum_lost_tokens_by_part(tokens_before), sum_lost_tokens_by_part(tokens_after)
        slices.append((at, {part: max(lost_after[part] - lost_before[part], 0) for part in lost_after}))
    largest_slice = max((sum(losses.values()) for _, losses in slices), default=0)
    if not largest_slice:
        return "<p>None.</p>"
    width, svg_lines = (WIDTH - 60) / len(slices), []
    for i, (_, losses) in enumerate(slices):
        y = HEIGHT - 20.0
        for part, tokens in losses.items():
            height = (HEIGHT - 40) * tokens / largest_slice
            y -= height
            svg_lines.append(
                f'<rect x="{50 + i * width:.1f}" y="{y:.1f}" width="{max(width - 0.5, 0.5):.1f}" height="{height:.1f}" '
                f'fill="{COLOURS[part]}"/>'
            )
    for i, part in enumerate(PARTS):
        svg_lines.append(f'<text x="{50 + 120 * i}" y="12"><tspan fill="{COLOURS[part]}">&#9632;</tspan> {part}</text>')
    svg_lines.append(f'<text x="0" y="30">{largest_slice:,}</text><text x="0" y="{HEIGHT - 20}">0</text>')
    svg_lines.append(f'<text x="{WIDTH - 10}" y="{HEIGHT - 4}" text-anchor="end">{slices[-1][0] / 60:.1f} min</text>')
    return _render_svg(svg_lines)


def _render_svg(lines: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(lines)}</svg>'


def _log_fraction(value: float, low: float, high: float) -> float:
    return min(max(log(max(value, low) / low) / log(high / low), 0.0), 1.0)


def _format_clock(wall_time_s: float) -> str:
    return strftime("%Y-%m-%d %H:%M", gmtime(wall_time_s))
