"""`/dashboard`: one self-contained page, and the stream of server-sent events that keeps it alive.

Owns what the page shows beyond `/workers`: the last few decisions with the terms of every candidate, five minutes of
totals (what was predicted of all prompts, and what workers said of those whose answers told), the hottest prefixes.
Refuses to slow anything down: candidates' terms are only kept while somebody watches, one request in eight is looked at
for prefixes, a viewer that reads too slowly misses updates instead of piling them up.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from prompts.tokenizer import Tokenizer
from router.decide.core import RouterCore
from router.decide.messages import Decision, RouteRequest
from router.edge.exchange import Exchange
from router.edge.proxy import Proxy
from router.http.connection import ClientConnection
from router.index.protocol import Scope
from router.prompting.reader import PromptReader
from router.turns.parts import Why
from router.turns.why import NO_LOSS

BEAT_S: Final = 1.0
POINT_S: Final = 2.0
POINTS_MAX: Final = 150
DECISIONS_MAX: Final = 60
"""Decisions kept, and sent at most a beat."""
TTFTS_MAX: Final = 10_000
"""Times a point of the history is the median of."""
SAMPLE_EVERY: Final = 8
SAMPLES_MAX: Final = 96
PREFIX_TOKENS_MAX: Final = 4096
PREFIX_STEP: Final = 64
"""Prefixes are compared at multiples of so many tokens."""
CONTEXT_TOKENS: Final = 6
"""Shown before the first token that tells a prefix from its siblings."""
NODES_MAX: Final = 14
PAGE = Path(__file__).with_name("dashboard.html")


class Viewer:
    """One open page. Implements the Work of its connection."""

    def __init__(self, connection: ClientConnection, left: Callable[[Viewer], None]) -> None:
        self._connection = connection
        self._left = left
        self._paused = False
        connection.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-store\r\n"
            b"x-accel-buffering: no\r\nconnection: close\r\n\r\nretry: 2000\n\n"
        )

    def send(self, event: str, data: bytes) -> None:
        """Send one event, unless the page is behind."""
        if not self._paused:
            self._connection.write(b"event: %b\ndata: %b\n\n" % (event.encode(), data))

    def client_gone(self) -> None:
        self._left(self)

    def client_paused(self) -> None:
        self._paused = True

    def client_resumed(self) -> None:
        self._paused = False


class _Ended:
    """What is kept of a request, without its body and its prompt. A row is made of it where somebody looks."""

    def __init__(
        self, exchange: Exchange, route: RouteRequest, decision: Decision, cached: int | None, at: float
    ) -> None:
        first_s = exchange.first_byte_s
        self._trace_id, self._outcome, self._at, self._cached = exchange.trace_id, exchange.outcome, at, cached
        self._ttft_s = None if first_s is None else first_s - exchange.started_s
        self._model, self._stream, self._tokenized = route.model, route.stream, route.token_ids is not None
        self._decision = decision

    @property
    def name(self) -> str:
        return self._trace_id.decode("latin-1")

    def row(self, why: Why | None) -> dict[str, Any]:
        decision, parts = self._decision, () if why is None else why.parts
        return {
            "id": self.name,
            "why": [[part.reason, part.tokens] for part in parts if part.reason not in NO_LOSS],
            "at": self._at,
            "model": self._model,
            "worker": decision.worker,
            "outcome": self._outcome,
            "attempt": decision.attempt,
            "stream": self._stream,
            "prompt_tokens": decision.prompt_tokens,
            "tokenized": self._tokenized,
            "predicted_cached_tokens": decision.predicted_cached_tokens,
            "cached_tokens": self._cached,
            "predicted_ttft_s": decision.predicted_ttft_s,
            "ttft_s": self._ttft_s,
            "waited_s": decision.waited_s,
            "candidates": decision.candidates or [decision.terms],
            "not_eligible": decision.not_eligible,
        }


class Dashboard:
    """Collects while requests end, tells viewers once a second."""

    def __init__(
        self,
        core: RouterCore,
        proxy: Proxy,
        prompts: PromptReader,
        workers: Callable[[], dict[str, Any]],
        *,
        version: str = "",
        why: Callable[[str], Why | None] = lambda name: None,
    ) -> None:
        """`why`: what is known of why a request's prompt was computed."""
        self._core = core
        self._version, self._why = version, why
        self._retried = self._ended_count = 0
        self._proxy = proxy
        self._prompts = prompts
        self._workers = workers
        self._viewers: set[Viewer] = set()
        self._decisions: deque[_Ended] = deque(maxlen=DECISIONS_MAX)
        self._fresh: deque[_Ended] = deque(maxlen=DECISIONS_MAX)
        """Of these, what viewers were not told yet."""
        self._samples: deque[tuple[Scope, Sequence[int]]] = deque(maxlen=SAMPLES_MAX)
        """Prompts, for the tree of hot prefixes."""
        self._points: deque[dict[str, float | None]] = deque(maxlen=POINTS_MAX)
        self._requests = self._failed = self._prompt = self._predicted = self._told_of = self._actual = 0
        self._ttft_s: list[float] = []
        self._next_point_s = 0.0
        self._next_beat_s = 0.0
        self._beats = 0
        proxy.on_end.append(self._ended)

    def page(self) -> bytes:
        return PAGE.read_bytes()

    def watch(self, connection: ClientConnection) -> Viewer:
        """Start the stream of events on `connection`."""
        viewer = Viewer(connection, self._leave)
        self._viewers.add(viewer)
        self._proxy.explains = True
        viewer.send("state", self._state())
        viewer.send("history", msgspec.json.encode(list(self._points)))
        viewer.send("decisions", msgspec.json.encode(self._rows(self._decisions)))
        viewer.send("prefixes", msgspec.json.encode(self.prefixes()))
        return viewer

    def _leave(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)
        self._proxy.explains = bool(self._viewers)

    def beat(self, now: float) -> None:
        """Call a few times a second."""
        if now >= self._next_point_s:
            self._add_point(now)
        if now < self._next_beat_s or not self._viewers:
            return
        self._next_beat_s = now + BEAT_S
        self._beats += 1
        events = [("state", self._state())]
        if self._fresh:
            events.append(("decisions", msgspec.json.encode(self._rows(self._fresh))))
            self._fresh.clear()
        if self._points:
            events.append(("point", msgspec.json.encode(self._points[-1])))
        if self._beats % 3 == 0:
            events.append(("prefixes", msgspec.json.encode(self.prefixes())))
        for viewer in list(self._viewers):
            for name, data in events:
                viewer.send(name, data)

    def _state(self) -> bytes:
        state = self._workers()
        state["now"] = time.time()
        state["turn_tokens"] = dict(self._proxy.metrics.turn_tokens)
        cost = self._core.config.cost
        state["version"] = self._version
        state["weights"] = {"decode": cost.decode_weight, "utilisation": cost.utilisation_weight}
        return msgspec.json.encode(state)

    def _add_point(self, now: float) -> None:
        """Close an interval of the history."""
        self._next_point_s = now + POINT_S
        ordered, retried = sorted(self._ttft_s), self._core.counters["retried"]
        self._points.append(
            {
                "at": round(time.time(), 1),
                "requests_per_s": self._requests / POINT_S,
                "failed": self._failed,
                "prompt_tokens": self._prompt,
                "predicted_tokens": self._predicted,
                "told_of_tokens": self._told_of,
                "actual_tokens": self._actual,
                "retried": retried - self._retried,
                "ttft_p50_ms": 1e3 * ordered[len(ordered) // 2] if ordered else None,
                "ttft_p99_ms": 1e3 * ordered[99 * len(ordered) // 100] if ordered else None,
            }
        )
        self._retried = retried
        self._requests = self._failed = self._prompt = self._predicted = self._told_of = self._actual = 0
        self._ttft_s = []

    def _ended(self, exchange: Exchange) -> None:
        """An exchange ended: count it, and note its decision."""
        self._requests += 1
        if exchange.outcome != "status_200":
            self._failed += 1
        route, decision, usage = exchange.route, exchange.decision, exchange.usage
        if route is None or decision is None:
            return
        first_s = exchange.first_byte_s
        if first_s is not None and len(self._ttft_s) < TTFTS_MAX:
            self._ttft_s.append(first_s - exchange.started_s)
        cached = usage.cached_tokens if usage is not None else None
        if route.token_ids is not None:
            self._prompt += route.prompt_tokens
            self._predicted += decision.predicted_cached_tokens
            if cached is not None:
                self._told_of += route.prompt_tokens
                self._actual += cached
        self._ended_count += 1
        if route.token_ids is not None and self._ended_count % SAMPLE_EVERY == 0:
            self._samples.append((route.scope, route.token_ids[:PREFIX_TOKENS_MAX]))
        row = _Ended(exchange, route, decision, cached, time.time())
        self._decisions.append(row)
        if self._viewers:
            self._fresh.append(row)

    def _rows(self, ended: Iterable[_Ended]) -> list[dict[str, Any]]:
        return [one.row(self._why(one.name)) for one in ended]

    # Hot prefixes -------------------------------------------------------------------------------------------------

    def prefixes(self) -> list[dict[str, Any]]:
        """The most frequent prefixes of the sampled prompts, parents before children, with who holds each."""
        nodes: list[dict[str, Any]] = []
        scopes = sorted({scope for scope, _ in self._samples}, key=lambda s: (s.model, s.lora or "", s.salt or ""))
        for number, scope in enumerate(scopes):
            self._grow(nodes, scope, [ids for of, ids in self._samples if of == scope], 0, (number,))
        nodes.sort(key=lambda node: -node["heat"])
        nodes = sorted(nodes[:NODES_MAX], key=lambda node: node["key"])
        for node in nodes:
            del node["heat"], node["key"]
        return nodes

    def _grow(
        self,
        nodes: list[dict[str, Any]],
        scope: Scope,
        prompts: list[Sequence[int]],
        start: int,
        above: tuple[int, ...],
    ) -> None:
        """Add the nodes below position `start`, where all `prompts` agree up to it."""
        groups: dict[tuple[int, ...], list[Sequence[int]]] = {}
        for ids in prompts:
            piece = tuple(ids[start : start + PREFIX_STEP])
            if len(piece) == PREFIX_STEP:
                groups.setdefault(piece, []).append(ids)
        shared = max(0, _alike([list(piece) for piece, members in groups.items() if len(members) > 1]) - CONTEXT_TOKENS)
        for number, members in enumerate(sorted(groups.values(), key=len, reverse=True)):
            if len(members) < 2 or len(above) > 7:
                continue
            path = (*above, number)
            end = start + PREFIX_STEP
            while end + PREFIX_STEP <= min(map(len, members)) and _agree(members, end, end + PREFIX_STEP):
                end += PREFIX_STEP
            head = members[0]
            nodes.append(
                {
                    "key": path,
                    "depth": len(above) - 1,
                    "model": scope.lora or scope.model,
                    "start": start,
                    "end": end,
                    "share": len(members) / max(1, len(self._samples)),
                    "text": ("… " if shared else "") + self._text(scope, head[start + shared : end]),
                    "holders": self._holders(scope, head[:end], start),
                    "heat": len(members) * (end - start),
                }
            )
            self._grow(nodes, scope, members, end, path)

    def _text(self, scope: Scope, ids: Sequence[int]) -> str:
        tokenizer: Tokenizer | None = self._prompts.get(scope.model)
        if tokenizer is None:
            return f"{len(ids)} tokens"
        text = tokenizer.decode(list(ids[:48]), skip_special_tokens=True)
        return " ".join(text.split())[:120]

    def _holders(self, scope: Scope, ids: Sequence[int], start: int) -> dict[str, int]:
        """worker -> how much of the prefix it could reuse, in tokens, where that is something beyond `start`."""
        # One more token: a match never covers the whole prompt, because the last token has to be computed.
        found = {match.holder: match.tokens for match in self._core.index.match([*ids, 0], scope)}
        held: dict[str, int] = {}
        for worker_id, worker in self._core.workers.items():
            best = max((found.get(holder, 0) for holder in worker.holders), default=0)
            if best >= start + PREFIX_STEP // 2:
                held[worker_id] = best
        return held


def _alike(pieces: list[list[int]]) -> int:
    """How many first tokens all of several pieces share, so that what tells them apart can be shown."""
    if len(pieces) < 2:
        return 0
    return next((i for i, ids in enumerate(zip(*pieces)) if len(set(ids)) > 1), 0)


def _agree(prompts: list[Sequence[int]], start: int, end: int) -> bool:
    first = prompts[0][start:end]
    return all(prompt[start:end] == first for prompt in prompts[1:])
