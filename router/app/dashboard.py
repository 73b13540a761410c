"""`/dashboard`: one self-contained page, and the stream of server-sent events that keeps it alive.

Owns what the page shows beyond `/workers`: the last few decisions with the terms of every candidate, and five minutes
of totals (what was predicted of all prompts, and what workers said of those whose answers told). Refuses to slow
anything down: candidates' terms are only kept while somebody watches, and a viewer that reads too slowly misses updates
instead of piling them up.
"""

from __future__ import annotations

import re
import time
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import msgspec

from router.decide.core import RouterCore
from router.decide.messages import Decision, RouteRequest
from router.edge.proxy import Proxy
from router.edge.request_context import RequestContext
from router.http.connection import ClientConnection
from router.http.local_replies import Header
from router.http.routes import Response
from router.miss_reasons.explanation import NO_LOSS, MissExplanation

UPDATE_S: Final = 1.0
POINT_S: Final = 2.0
POINTS_MAX: Final = 150
DECISIONS_MAX: Final = 60
"""Decisions kept, and sent at most a beat."""
TTFTS_MAX: Final = 10_000
"""Times a point of the history is the median of."""
PAGE = Path(__file__).with_name("dashboard.html")


HTML: Final = b"text/html; charset=utf-8"
_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


def make_security_headers(page: bytes) -> tuple[Header, ...]:
    """Headers that let a page run its own script and nothing else, and that let no other page show it in a frame."""
    hashes: dict[bytes, list[bytes]] = {b"script": [], b"style": []}
    for kind, text in _INLINE.findall(page):
        hashes[kind].append(b"'sha256-%b'" % b64encode(sha256(text).digest()))
    policy = b"; ".join(
        (
            b"default-src 'none'",
            *(b"%b-src %b" % (kind, b" ".join(values)) for kind, values in hashes.items()),
            b"img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        )
    )
    return (
        (b"content-security-policy", policy),
        (b"x-frame-options", b"DENY"),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
    )


class Viewer:
    """One open page. Implements the Responder of its connection."""

    def __init__(self, connection: ClientConnection, on_leave: Callable[[Viewer], None]) -> None:
        self._connection = connection
        self._on_leave = on_leave
        self._is_paused = False
        connection.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-store\r\n"
            b"x-accel-buffering: no\r\nconnection: close\r\n\r\nretry: 2000\n\n"
        )

    def send(self, event: str, data: bytes) -> None:
        """Send one event, unless the page is behind."""
        if not self._is_paused:
            self._connection.write(b"event: %b\ndata: %b\n\n" % (event.encode(), data))

    def on_client_gone(self) -> None:
        self._on_leave(self)

    def on_client_paused(self) -> None:
        self._is_paused = True

    def on_client_resumed(self) -> None:
        self._is_paused = False


class _RequestSummary:
    """Summary of a request that ended, without its body and its prompt. A row is made of it when a viewer needs one."""

    def __init__(
        self,
        context: RequestContext,
        route: RouteRequest,
        decision: Decision,
        cached_tokens: int | None,
        ended_at: float,
    ) -> None:
        first_s = context.progress.first_byte_at_s
        self._trace_id = context.trace_id
        self._outcome = context.outcome
        self._ended_at = ended_at
        self._cached_tokens = cached_tokens
        self._ttft_s = None if first_s is None else first_s - context.started_at_s
        self._model, self._stream, self._is_tokenized = route.model, route.is_streaming, route.token_ids is not None
        self._decision = decision

    @property
    def name(self) -> str:
        return self._trace_id.decode("latin-1")

    def make_row(self, why: MissExplanation | None) -> dict[str, Any]:
        decision, uncached_ranges = self._decision, () if why is None else why.uncached_ranges
        return {
            "id": self.name,
            "why": [
                [uncached_range.reason, uncached_range.tokens]
                for uncached_range in uncached_ranges
                if uncached_range.reason not in NO_LOSS
            ],
            "at": self._ended_at,
            "model": self._model,
            "worker": decision.worker,
            "outcome": self._outcome,
            "attempt": decision.attempt,
            "stream": self._stream,
            "prompt_tokens": decision.prompt_tokens,
            "tokenized": self._is_tokenized,
            "predicted_cached_tokens": decision.predicted_cached_tokens,
            "cached_tokens": self._cached_tokens,
            "predicted_ttft_s": decision.predicted_ttft_s,
            "ttft_s": self._ttft_s,
            "queued_s": decision.queued_s,
            "candidates": decision.candidates or [decision.terms],
            "not_eligible": decision.not_eligible,
        }


class Dashboard:
    """Collects while requests end, tells viewers once a second."""

    def __init__(
        self,
        core: RouterCore,
        proxy: Proxy,
        workers: Callable[[], dict[str, Any]],
        *,
        version: str = "",
        why: Callable[[str], MissExplanation | None] = lambda name: None,
    ) -> None:
        """`why`: what is known of why a request's prompt was computed."""
        page = PAGE.read_bytes()
        self.page = Response(page, content_type=HTML, headers=make_security_headers(page))
        self._core = core
        self._version, self._why = version, why
        self._retry_count = 0
        self._proxy = proxy
        self._workers = workers
        self._viewers: set[Viewer] = set()
        self._decisions: deque[_RequestSummary] = deque(maxlen=DECISIONS_MAX)
        self._unsent: deque[_RequestSummary] = deque(maxlen=DECISIONS_MAX)
        """Decisions that were not sent to the viewers yet."""
        self._points: deque[dict[str, float | None]] = deque(maxlen=POINTS_MAX)
        self._request_count = self._failure_count = self._prompt_tokens = self._predicted_tokens = (
            self._reported_prompt_tokens
        ) = self._reported_cached_tokens = 0
        self._ttft_s: list[float] = []
        self._next_point_s = 0.0
        self._next_beat_s = 0.0
        proxy.on_end.append(self._on_request_end)

    def watch(self, connection: ClientConnection) -> Viewer:
        """Start the stream of events on `connection`."""
        viewer = Viewer(connection, self._remove_viewer)
        self._viewers.add(viewer)
        self._proxy.explains_decisions = True
        viewer.send("state", self._encode_state())
        viewer.send("history", msgspec.json.encode(list(self._points)))
        viewer.send("decisions", msgspec.json.encode(self._make_rows(self._decisions)))
        return viewer

    def _remove_viewer(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)
        self._proxy.explains_decisions = bool(self._viewers)

    def tick(self, now: float) -> None:
        """Call a few times a second."""
        if now >= self._next_point_s:
            self._add_point(now)
        if now < self._next_beat_s or not self._viewers:
            return
        self._next_beat_s = now + UPDATE_S
        unsent_events = [("state", self._encode_state())]
        if self._unsent:
            unsent_events.append(("decisions", msgspec.json.encode(self._make_rows(self._unsent))))
            self._unsent.clear()
        if self._points:
            unsent_events.append(("point", msgspec.json.encode(self._points[-1])))
        for viewer in list(self._viewers):
            for event_name, data in unsent_events:
                viewer.send(event_name, data)

    def _encode_state(self) -> bytes:
        state = self._workers()
        state["now"] = time.time()
        state["cache_miss_tokens"] = dict(self._proxy.metrics.cache_miss_tokens)
        state["version"] = self._version
        return msgspec.json.encode(state)

    def _add_point(self, now: float) -> None:
        """Close an interval of the history."""
        self._next_point_s = now + POINT_S
        ttft_sorted, retries = sorted(self._ttft_s), self._core.counters["retried"]
        self._points.append(
            {
                "at": round(time.time(), 1),
                "requests_per_s": self._request_count / POINT_S,
                "failed": self._failure_count,
                "prompt_tokens": self._prompt_tokens,
                "predicted_tokens": self._predicted_tokens,
                "reported_prompt_tokens": self._reported_prompt_tokens,
                "actual_tokens": self._reported_cached_tokens,
                "retried": retries - self._retry_count,
                "ttft_p50_ms": 1e3 * ttft_sorted[len(ttft_sorted) // 2] if ttft_sorted else None,
                "ttft_p99_ms": 1e3 * ttft_sorted[99 * len(ttft_sorted) // 100] if ttft_sorted else None,
            }
        )
        self._retry_count = retries
        self._request_count = self._failure_count = self._prompt_tokens = self._predicted_tokens = (
            self._reported_prompt_tokens
        ) = self._reported_cached_tokens = 0
        self._ttft_s = []

    def _on_request_end(self, context: RequestContext) -> None:
        """A request ended: count it, and note its decision."""
        self._request_count += 1
        if context.outcome != "status_200":
            self._failure_count += 1
        route, decision, usage = context.route, context.decision, context.usage
        if route is None or decision is None:
            return
        first_s = context.progress.first_byte_at_s
        if first_s is not None and len(self._ttft_s) < TTFTS_MAX:
            self._ttft_s.append(first_s - context.started_at_s)
        cached_tokens = usage.cached_tokens if usage is not None else None
        if route.token_ids is not None:
            self._prompt_tokens += route.prompt_tokens
            self._predicted_tokens += decision.predicted_cached_tokens
            if cached_tokens is not None:
                self._reported_prompt_tokens += route.prompt_tokens
                self._reported_cached_tokens += cached_tokens
        summary = _RequestSummary(context, route, decision, cached_tokens, time.time())
        self._decisions.append(summary)
        if self._viewers:
            self._unsent.append(summary)

    def _make_rows(self, requests: Iterable[_RequestSummary]) -> list[dict[str, Any]]:
        return [request.make_row(self._why(request.name)) for request in requests]
