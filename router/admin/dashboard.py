"""`/dashboard`: one self-contained page, and the updates that it asks for once a second.

Owns what the page shows beside `/workers`: the latest decisions with the terms of every candidate, and five minutes of
totals. Candidates' terms are recorded while somebody watches, and for decisions that are logged.
"""

from __future__ import annotations

import re
import time
from base64 import b64encode
from collections import deque
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from prompts.errors import bad_value
from router.decide.messages import Decision, RouteRequest, TransferKind
from router.edge.proxy import Proxy
from router.edge.request_context import RequestContext
from router.http.local_replies import Header
from router.http.request import HttpRequest
from router.http.routes import CachedPage, Response, Routes
from router.miss_reasons.explanation import NO_LOSS, MissExplanation

WATCH_S: Final = 90.0
"""Time after a request for updates in which the page counts as watched: in a background tab it asks once a minute."""
POINT_INTERVAL_S: Final = 2.0
POINTS_MAX: Final = 150
DECISIONS_MAX: Final = 60
"""Latest decisions that are kept for the page."""
TTFTS_MAX: Final = 10_000
"""Most times to first token of which a point shows the percentiles."""
SUM_NAMES: Final = (
    "requests_per_s", "failed", "prompt_tokens", "predicted_tokens", "reported_prompt_tokens", "actual_tokens",
    "pulls", "prefills", "moved_tokens", "moved_bytes", "transfer_s", "computed_locally",
)  # fmt: skip
"""Sums of a point in the page's history.

`prompt_tokens` and `predicted_tokens` are of prompts that were tokenised here, the next two of those with a report of
cached tokens. `computed_locally`: requests without a transfer although another worker had more of the prompt cached.
"""
PAGE_PATH: Final = Path(__file__).with_name("dashboard.html")
HTML: Final = b"text/html; charset=utf-8"
_INLINE_PATTERN = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


def make_security_headers(page: bytes) -> tuple[Header, ...]:
    """Return HTTP headers that let a page run only its own scripts, allowed by their hashes, and forbid frames."""
    hashes_by_tag: dict[bytes, list[bytes]] = {b"script": [], b"style": []}
    for tag, text in _INLINE_PATTERN.findall(page):
        hashes_by_tag[tag].append(b"'sha256-%b'" % b64encode(sha256(text).digest()))
    policy = b"; ".join(
        (
            b"default-src 'none'",
            *(b"%b-src %b" % (tag, b" ".join(hashes)) for tag, hashes in hashes_by_tag.items()),
            b"img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        )
    )
    return (
        (b"content-security-policy", policy),
        (b"x-frame-options", b"DENY"),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
    )


def make_decision_row(
    context: RequestContext, route: RouteRequest, decision: Decision, cached_tokens: int | None
) -> dict[str, Any]:
    """Return what the dashboard shows of a request that ended; `cached_tokens`: as the worker reported, if it did."""
    return {
        "id": context.name,
        "at": time.time(),
        "model": route.model,
        "worker": decision.worker,
        "transfer": decision.transfer,
        "outcome": context.outcome,
        "attempt": decision.attempt,
        "stream": route.is_streaming,
        "prompt_tokens": decision.prompt_tokens,
        "tokenized": route.token_ids is not None,
        "predicted_cached_tokens": decision.predicted_cached_tokens,
        "cached_tokens": cached_tokens,
        "predicted_ttft_s": decision.predicted_ttft_s,
        "ttft_s": context.ttft_s,
        "queued_s": decision.queued_s,
        "candidates": decision.candidates or [decision.terms],
        "not_eligible": decision.not_eligible,
    }


def list_losses(explanation: MissExplanation | None) -> list[tuple[str, int]]:
    """Return (reason, tokens) of the tokens of a prompt that were lost; none if nothing is known of it."""
    uncached_ranges = () if explanation is None else explanation.uncached_ranges
    return [(lost.reason, lost.tokens) for lost in uncached_ranges if lost.reason not in NO_LOSS]


class _IntervalTotals:
    """Sums over the requests that ended in one interval, for one point in the dashboard's charts."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(SUM_NAMES, 0.0)
        self._ttfts_s: list[float] = []

    def add(self, context: RequestContext, cached_tokens: int | None, moved_bytes: int) -> None:
        """Add a request that ended.

        `cached_tokens`: as the worker reported them; None if it did not. `moved_bytes`: those of its KV transfer.
        """
        sums = self._sums
        sums["requests_per_s"] += 1 / POINT_INTERVAL_S
        sums["failed"] += context.outcome != "status_200"
        route, decision = context.route, context.decision
        if route is None or decision is None:  # it was not routed
            return
        self._add_transfer(decision, moved_bytes)
        if context.ttft_s is not None and len(self._ttfts_s) < TTFTS_MAX:
            self._ttfts_s.append(context.ttft_s)
        if route.token_ids is None:  # the prompt was not tokenised, so nothing was predicted
            return
        sums["prompt_tokens"] += route.prompt_tokens
        sums["predicted_tokens"] += decision.predicted_cached_tokens
        if cached_tokens is not None:
            sums["reported_prompt_tokens"] += route.prompt_tokens
            sums["actual_tokens"] += cached_tokens

    def _add_transfer(self, decision: Decision, moved_bytes: int) -> None:
        """Add the KV transfer that was planned for a request, with its predicted tokens, bytes and seconds."""
        sums = self._sums
        transfer = decision.transfer
        if transfer is None:
            sums["computed_locally"] += decision.most_cached is not None
            return
        sums["pulls" if transfer.kind is TransferKind.PULL else "prefills"] += 1
        sums["moved_tokens"] += transfer.tokens
        sums["moved_bytes"] += moved_bytes
        sums["transfer_s"] += transfer.transfer_s

    def make_point(self) -> dict[str, Any]:
        """Return a point of the page's history."""
        ttfts_s = sorted(self._ttfts_s)
        return self._sums | {
            "at": time.time(),
            "ttft_p50_ms": 1e3 * ttfts_s[len(ttfts_s) // 2] if ttfts_s else None,
            "ttft_p99_ms": 1e3 * ttfts_s[99 * len(ttfts_s) // 100] if ttfts_s else None,
        }


class Dashboard:
    """Live page of a router's workers and latest decisions; browsers that show it ask for updates once a second."""

    def __init__(
        self,
        proxy: Proxy,
        describe_workers: Callable[[], dict[str, Any]],
        *,
        version: str = "",
        get_explanation: Callable[[str], MissExplanation | None] = lambda request_name: None,
    ) -> None:
        """Begin without decisions. `proxy` reports each request when it ends.

        `describe_workers`: returns the body of `/workers`. `get_explanation`: returns why a prompt was not cached.
        """
        self._proxy = proxy
        self._describe_workers = describe_workers
        self._version = version
        self._get_explanation = get_explanation
        self._watched_until_s = 0.0
        """Time until which the page counts as watched."""
        self._state_page = CachedPage(self._render_state, proxy.now)
        self._decisions: deque[dict[str, Any]] = deque(maxlen=DECISIONS_MAX)
        """Latest routing decisions, as rows of the page."""

        self._points: deque[dict[str, Any]] = deque(maxlen=POINTS_MAX)
        """Points of the page's charts, one for each POINT_INTERVAL_S."""
        self._totals = _IntervalTotals()
        """Sums for the next point."""
        self._retry_count = 0
        """Attempts repeated until the last point."""
        self._next_point_at_s = 0.0
        proxy.on_end.append(self._on_request_end)

    def register(self, routes: Routes) -> None:
        """Serve the page, which is for everybody, and its updates, which are not."""
        page = PAGE_PATH.read_bytes()
        response = Response(page, content_type=HTML, headers=make_security_headers(page))
        routes.add("GET", "/dashboard", lambda *_: response, public=True)
        routes.add("GET", "/dashboard/updates", self._get_updates, public=False)

    def _get_updates(self, request: HttpRequest, argument: str) -> Response:
        """Answer `GET /dashboard/updates?after=TIME`: the present state, and the points and decisions after TIME.

        TIME is `now` of the last answer, in seconds since 1970.
        """
        self._watched_until_s = self._proxy.now() + WATCH_S
        self._proxy.explains_decisions = True
        after_s = _read_after(request)
        rows = [row for row in self._decisions if row["at"] > after_s]
        # Each row is encoded once, for all pages that ask: 60 decisions among 500 workers take 26 ms. (Raw stays Raw.)
        for row in rows:
            row["candidates"] = msgspec.Raw(msgspec.json.encode(row["candidates"]))
        body = {
            "now": time.time(),
            "state": msgspec.Raw(self._state_page(request, argument).body),
            "points": [point for point in self._points if point["at"] > after_s],
            "decisions": [row | {"why": list_losses(self._get_explanation(row["id"]))} for row in rows],
        }
        return Response(msgspec.json.encode(body))

    def _render_state(self) -> Response:
        """Return the present state of all workers, with what the page shows beside it."""
        cache_miss_tokens = dict(self._proxy.metrics.cache_miss_tokens)
        state = self._describe_workers() | {"cache_miss_tokens": cache_miss_tokens, "version": self._version}
        return Response(msgspec.json.encode(state))

    def tick(self, now: float) -> None:
        """Add a point to the history when it is time. Call a few times a second."""
        self._proxy.explains_decisions = now < self._watched_until_s
        if now >= self._next_point_at_s:
            self._next_point_at_s = now + POINT_INTERVAL_S
            self._add_point()

    def _add_point(self) -> None:
        retry_count = self._proxy.core.counters["retried"]
        self._points.append(self._totals.make_point() | {"retried": retry_count - self._retry_count})
        self._retry_count = retry_count
        self._totals = _IntervalTotals()

    def _on_request_end(self, context: RequestContext) -> None:
        route, decision, usage = context.route, context.decision, context.usage
        cached_tokens = None if usage is None else usage.cached_tokens
        transfer = None if decision is None else decision.transfer
        moved_bytes = 0 if transfer is None else self._proxy.count_transfer_bytes(transfer)
        self._totals.add(context, cached_tokens, moved_bytes)
        if route is not None and decision is not None:
            self._decisions.append(make_decision_row(context, route, decision, cached_tokens))


def _read_after(request: HttpRequest) -> float:
    """Return the time in the query of a request for updates; 0 without one. Raises RequestError."""
    (text,) = parse_qs(request.target.partition(b"?")[2].decode("latin-1")).get("after", ["0"])[-1:]
    try:
        return float(text)
    except ValueError:
        raise bad_value("after", text, "a time in seconds since 1970") from None
