"""The shell around router/turns: tells the ledger of first bytes and ends, asks index and feed what it wants to know.

Nothing here is on a decision's path: a request is looked at after its first byte was passed on, with others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec
import xxhash

from prompts.routing import RoutingRequest
from prompts.sampled import Span
from prompts.segments import ID_TYPE
from prompts.tokenizer import Tokenizer
from router.counters import Metrics
from router.decide.books import AskedPrompt
from router.decide.core import RouterCore
from router.decide.messages import Decision, ReportedUsage, RouteRequest
from router.decide.workers import CacheView
from router.edge.exchange import Exchange
from router.edge.proxy import Proxy
from router.index.protocol import Scope, Tokens
from router.prompting.known import Known
from router.prompting.outline import outline
from router.prompting.outlined import Outline
from router.prompting.pool import Helpers
from router.prompting.reader import PromptReader
from router.prompting.sessions import Session
from router.turns._native import Begun
from router.turns.config import TurnsConfig
from router.turns.ledger import Ledger, short_keys
from router.turns.parts import Why, why_of
from router.turns.why import BLOCK_TOKENS, GROUPS, Asked, Facts, Outliner

log = logging.getLogger("router")

NAME_CHARS: Final = 256
WAIT_S: Final = 0.25
"""That a first byte or an end waits for others, at most."""
WAITING_MAX, WAITING_TOKENS_MAX = 64, 200_000
"""So many of them, of prompts with so many tokens, are looked at at once: a millisecond or two."""


class Read(Protocol):
    """What a request asks for, as router/app/reading.py read it."""

    parsed: RoutingRequest
    outline: Outline | None
    drawn: Callable[[int], Outline | None] | None
    known: Known | None
    beginning: array[int] | None
    kept: int
    stays: bool
    session: Session
    spans: list[Span]


class _Looked:
    """A request whose conversation is looked at: from its reading until what its end told was added up. Of the
    exchange only what is needed is kept: it holds the body."""

    __slots__ = (
        "begun", "decision", "end_s", "first_s", "is_looked_at", "is_over", "is_sampled", "is_whole", "name", "pieces",
        "prompt", "read", "request_id", "route", "said", "usage",
    )  # fmt: skip

    def __init__(self, request_id: str, read: Read) -> None:
        self.request_id = request_id
        self.read: Read | None = read
        self.name = ""
        """That the client knows."""
        self.route: RouteRequest | None = None
        self.decision: Decision | None = None
        self.prompt: AskedPrompt | None = None
        """These three from its first byte on."""
        self.pieces: Sequence[bytes] = ()
        """Its body, where it may have to be read again."""
        self.first_s = self.end_s = 0.0
        self.is_looked_at = False
        """Its first byte was, or is, elsewhere."""
        self.begun: Begun | None = None
        """What came of that."""
        self.is_over = False
        """Its end came before that."""
        self.is_whole = self.is_sampled = False
        """Its answer is; its decisions are logged."""
        self.usage: ReportedUsage | None = None
        self.said = 0
        """Tokens of its answer."""


class Reasons:
    """One a process."""

    def __init__(
        self,
        config: TurnsConfig,
        core: RouterCore,
        proxy: Proxy,
        prompts: PromptReader,
        helpers: Helpers,
        metrics: Metrics,
        *,
        emptied: Mapping[str, float],
    ) -> None:
        self.ledger = Ledger(config, metrics.turns, metrics.turn_tokens, metrics.reused_tokens)
        self._core, self._proxy, self._prompts, self._helpers = core, proxy, prompts, helpers
        self._emptied = emptied
        self._requests: dict[str, _Looked] = {}
        """Those that have not ended."""
        self._waiting: list[_Looked] = []
        """First bytes and ends that nobody looked at yet, in their order."""
        self._waiting_tokens = 0
        self._timer: asyncio.TimerHandle | None = None
        self._outlining: set[asyncio.Task[None]] = set()
        if config.enabled:
            proxy.on_first_byte.append(self._first_byte)
            proxy.on_end.append(self._ended)
        self.enabled, self.share = config.enabled, config.share

    def enter(self, request_id: str, read: Read) -> None:
        """A request was read and is about to be placed."""
        if self.enabled and read.parsed.kind != "other" and self._drawn(read):
            self._requests[request_id] = _Looked(request_id, read)

    def _drawn(self, read: Read) -> bool:
        """Whether its conversation, with those that it started, is one of the share."""
        return self.share >= 1 or is_drawn(
            read.session.parent or read.session.name or beginning(read.parsed), self.share
        )

    def outlined(self, session: str | None) -> int:
        """How many messages of the session's next prompt are known."""
        if session is None:
            return 0
        self.settle()
        return self.ledger.book.outlined(session)

    def get(self, name: str) -> Why | None:
        """What is known of a request."""
        self.settle()
        return self.ledger.get(name)

    def explain(self, read: Read, route: RouteRequest, decision: Decision, now: float) -> dict[str, Any] | None:
        """Why a request would miss that is not sent."""
        if not self.enabled or route.token_ids is None:
            return None
        self.settle()
        ids = _ids(route.token_ids)
        prompt = self._core.index.prepare(ids)
        keys = self._core.index.chunk_keys(prompt, route.scope, self._core.config.working_set.chunk_tokens)
        asked = self._asked("", read, route, ids, keys, decision)
        facts = self._facts(prompt, route)
        return shown(self.ledger.explain(asked, _outliner(read), decision, facts, now, time.time()))

    def note(
        self, name: str, read: Read, route: RouteRequest, decision: Decision, usage: ReportedUsage | None, said: int
    ) -> None:
        """A request that ended elsewhere, as it was priced at its arrival."""
        if not self.enabled or route.token_ids is None:
            return
        ids, now = _ids(route.token_ids), self._proxy.now()
        prompt = self._core.index.prepare(ids)
        keys = self._core.index.chunk_keys(prompt, route.scope, self._core.config.working_set.chunk_tokens)
        asked = self._asked(name, read, route, ids, keys, decision)
        facts = self._facts(prompt, route)
        begun = self.ledger.begun(asked, _outliner(read), decision, facts, now, time.time())
        self.ledger.ended(begun, usage, said, now)
        self.ledger.tell()

    def _facts(self, prompt: Tokens, route: RouteRequest) -> IndexFacts:
        return IndexFacts(self._core, self._emptied, prompt, route.scope, self._prompts.get(route.scope.model))

    # Requests -----------------------------------------------------------------------------------------------------

    def _first_byte(self, exchange: Exchange) -> None:
        one, route, decision = self._requests.get(exchange.request_id), exchange.route, exchange.decision
        if one is None or one.route is not None or route is None or decision is None or route.token_ids is None:
            return
        prompt = self._core.book.asked(route.request_id)
        if prompt is None or one.read is None:
            return
        one.route, one.decision, one.prompt = route, decision, prompt
        one.first_s, one.name = self._proxy.now(), exchange.trace_id.decode("latin-1")
        outline = one.read.outline
        if outline is not None and outline.after:
            one.pieces = exchange.request.pieces
        self._waiting_tokens += prompt.tokens
        self._wait(one)

    def _ended(self, exchange: Exchange) -> None:
        one = self._requests.pop(exchange.request_id, None)
        if one is None or one.route is None:
            return
        one.end_s, one.is_whole, one.usage = self._proxy.now(), exchange.outcome == "status_200", exchange.usage
        one.is_sampled = exchange.sampled
        said = None if one.usage is None else one.usage.completion_tokens
        one.said = said if said is not None else exchange.progress.reads if one.route.stream else 0
        self._wait(one)

    def _wait(self, one: _Looked) -> None:
        """Look at it soon, with others: what runs once a request is in no processor's cache, which costs thrice as much
        as the work itself."""
        self._waiting.append(one)
        if len(self._waiting) >= WAITING_MAX or self._waiting_tokens >= WAITING_TOKENS_MAX:
            self.settle()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WAIT_S, self.settle)

    def settle(self) -> None:
        """Look at all that waits to be looked at."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting, self._waiting_tokens = self._waiting, [], 0
        wall_s = time.time() - self._proxy.now()
        for one in waiting:
            try:
                if not one.is_looked_at:
                    one.is_looked_at = True
                    self._begin(one, wall_s)
                elif one.begun is not None:
                    self._end(one, one.begun)
                else:
                    one.is_over = True  # its first byte raised, or is looked at elsewhere
            except Exception as error:  # noqa: BLE001  a boundary: it ends this request's reasons, and nothing else
                self._proxy.metrics.crashed("reasons", error)
        self.ledger.tell()

    def _begin(self, one: _Looked, wall_s: float) -> None:
        """`wall_s`: what the clock on the wall is ahead."""
        read, route, decision, prompt = one.read, one.route, one.decision, one.prompt
        one.read = one.prompt = None
        assert read is not None and route is not None and decision is not None and prompt is not None
        keys = prompt.keys(self._core.config.working_set.chunk_tokens)
        asked = self._asked(one.name, read, route, _ids(route.token_ids or ()), keys, decision)
        facts = self._facts(prompt.ids, route)
        if one.pieces and not self.ledger.book.goes_on(asked):
            whole = self._helpers.outline(one.pieces, read.parsed.kind)
            later = self._begin_later(one, whole, asked, decision, facts, wall_s)
            task = asyncio.get_running_loop().create_task(later)
            self._outlining.add(task)
            task.add_done_callback(self._outlining.discard)
        else:
            at_s = one.first_s + wall_s
            one.begun = self.ledger.begun(asked, _outliner(read), decision, facts, one.first_s, at_s)
        one.pieces = ()

    async def _begin_later(
        self, one: _Looked, outlined: Awaitable[Outline | None], asked: Asked, decision: Decision, facts: Facts,
        wall_s: float,
    ) -> None:  # fmt: skip
        """The conversation was changed: its large body is looked at once more, elsewhere."""
        try:
            whole = await outlined
            outlines: Outliner = lambda after: whole if not after else None  # noqa: E731
            one.begun = self.ledger.begun(asked, outlines, decision, facts, one.first_s, one.first_s + wall_s)
            if one.is_over:
                self._end(one, one.begun)
                self.ledger.tell()
        except Exception as error:  # noqa: BLE001  a boundary
            self._proxy.metrics.crashed("reasons", error)

    def _end(self, one: _Looked, begun: Begun) -> None:
        if not one.is_whole:
            return
        self.ledger.ended(begun, one.usage, one.said, one.end_s)
        if one.is_sampled:
            fields = shown(why_of(begun))
            log.info("why %s", msgspec.json.encode(fields).decode(), extra={"fields": {"why": fields}})

    # What the ledger wants to know ----------------------------------------------------------------------------------

    def _asked(
        self, name: str, read: Read, route: RouteRequest, ids: array[int], keys: Sequence[int], decision: Decision
    ) -> Asked:
        worker = self._core.workers.get(decision.worker)
        block = worker.spec.block_size if worker is not None else None
        core = self._core
        short: Sequence[int] = ()
        begins: int | None = None
        if route.session is None:
            begins = _begins(read)
            if self.ledger.wants_short(keys):
                short = short_keys(core.index, ids, route.scope, core.config.working_set.chunk_tokens)
        sampled = sum([len(ids) for _, _, ids in read.spans]) if read.spans else 0
        return (
            name, ids, read.beginning, read.kept, read.stays, route.scope, keys, short, begins, route.session,
            route.parent, decision.worker, block or BLOCK_TOKENS, sampled, route.final,
        )  # fmt: skip


class IndexFacts:
    """What the ledger wants to know of one prompt, asked of index, feed and tokenizer."""

    __slots__ = ("_core", "_emptied", "_prompt", "_scope", "_tokenizer")

    def __init__(
        self, core: RouterCore, emptied: Mapping[str, float], prompt: Tokens, scope: Scope, tokenizer: Tokenizer | None
    ) -> None:
        self._core, self._emptied, self._prompt, self._scope, self._tokenizer = core, emptied, prompt, scope, tokenizer

    def gone(self, start: int, step: int) -> tuple[int, str, float] | None:
        found = self._core.index.gone(self._prompt, self._scope, start, step)
        if found is None:
            return None
        end, holder, when_s = found
        workers = (worker.worker_id for worker in self._core.workers.values() if holder in worker.holders)
        return end, next(workers, "one that is known no more"), when_s

    def emptied(self, worker_id: str) -> float | None:
        return self._emptied.get(worker_id)

    def thinks(self, ids: list[int]) -> bool:
        if self._tokenizer is None:
            return False
        text = self._tokenizer.decode(ids, skip_special_tokens=False).lower()
        return "think" in text or "analysis" in text

    def guessed(self, worker_id: str) -> bool:
        worker = self._core.workers.get(worker_id)
        return worker is not None and worker.spec.cache_view is CacheView.HISTORY


def begins_with(parsed: RoutingRequest) -> int | None:
    """A digest of what its user said first; None of what is no chat."""
    return None if parsed.messages is None else _digest(beginning(parsed))


def _begins(read: Read) -> int | None:
    known = read.known
    if known is None or known.kind != "chat":
        return begins_with(read.parsed)
    if known.begins is None:  # the same for all that have it
        known.begins = begins_with(read.parsed)
    return known.begins


def is_drawn(name: str, share: float) -> bool:
    """Whether a conversation of this name, or that begins so, is one of the share."""
    return _digest(name) < share * 2**32


def _digest(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "replace")) & 0xFFFF_FFFF


def beginning(parsed: RoutingRequest) -> str:
    """What stays the same in all turns of a conversation without a name: what its user said first."""
    found: Any = parsed.prompt
    for message in parsed.messages or ():
        if message.get("role") not in ("system", "developer"):
            found = message.get("content")
            break
    if isinstance(found, list) and found and isinstance(found[0], dict):
        found = found[0].get("text")
    return found[:NAME_CHARS] if isinstance(found, str) else repr(found[:16] if isinstance(found, list) else None)


def _outliner(read: Read) -> Outliner:
    if read.drawn is not None:
        return read.drawn
    if read.outline is not None:
        made = read.outline
        return lambda after: made if made.after == after else None
    parsed = read.parsed
    return lambda after: outline(parsed, after)


def _ids(ids: Sequence[int]) -> array[int]:
    return ids if isinstance(ids, array) else array(ID_TYPE, ids)


def shown(why: Why) -> dict[str, Any]:
    """As JSON has it."""
    fields: dict[str, Any] = msgspec.to_builtins(why)
    for part, row in zip(why.parts, fields["parts"]):
        row |= {"tokens": part.tokens, "group": GROUPS.get(part.reason, "none")}
    return fields
