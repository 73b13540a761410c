"""The shell around router/turns: tells the ledger of first bytes and ends, asks index and feed what it wants to know.

Nothing here is on a decision's path: a request is looked at after its first byte was passed on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec
import xxhash

from prompts.routing import Kind, RoutingRequest
from prompts.sampled import Span
from prompts.segments import ID_TYPE
from prompts.tokenizer import Tokenizer
from router.counters import Metrics
from router.decide.core import RouterCore
from router.decide.messages import Decision, ReportedUsage, RouteRequest
from router.decide.workers import CacheView
from router.edge.exchange import Exchange
from router.edge.proxy import Proxy
from router.index.protocol import Scope, Tokens
from router.prompting.outline import outline
from router.prompting.outlined import Outline
from router.prompting.pool import Helpers
from router.prompting.reader import PromptReader
from router.prompting.sessions import Session
from router.turns.book import short_keys
from router.turns.config import TurnsConfig
from router.turns.ledger import AskedTurn, BegunTurn, Ledger
from router.turns.parts import Why
from router.turns.why import BLOCK_TOKENS, GROUPS, Facts

log = logging.getLogger("router")

NAME_CHARS: Final = 256


class Read(Protocol):
    """What a request asks for, as router/app/reading.py read it."""

    parsed: RoutingRequest
    outline: Outline | None
    drawn: Callable[[int], Outline | None] | None
    session: Session
    spans: list[Span]


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
        self.ledger = Ledger(config, core.index.shared, metrics.turns, metrics.turn_tokens, metrics.reused_tokens)
        self._core, self._proxy, self._prompts, self._helpers = core, proxy, prompts, helpers
        self._emptied = emptied
        self._read: dict[str, Read] = {}
        """What requests without a first byte ask for."""
        self._begun: dict[str, BegunTurn | None] = {}
        """Requests past their first byte; None while their outline is made elsewhere."""
        self._outlining: set[asyncio.Task[None]] = set()
        if config.enabled:
            proxy.on_first_byte.append(self._first_byte)
            proxy.on_end.append(self._ended)
        self.enabled, self.share = config.enabled, config.share

    def enter(self, request_id: str, read: Read) -> None:
        """A request was read and is about to be placed."""
        if self.enabled and read.parsed.kind != "other" and self._drawn(read):
            self._read[request_id] = read

    def _drawn(self, read: Read) -> bool:
        """Whether its conversation, with those that it started, is one of the share."""
        return self.share >= 1 or is_drawn(
            read.session.parent or read.session.name or beginning(read.parsed), self.share
        )

    def outlined(self, session: str | None) -> int:
        """How many messages of the session's next prompt are known."""
        return self.ledger.book.outlined(session)

    def explain(self, read: Read, route: RouteRequest, decision: Decision, now: float) -> dict[str, Any] | None:
        """Why a request would miss that is not sent."""
        if not self.enabled or route.token_ids is None:
            return None
        ids = _ids(route.token_ids)
        prompt = self._core.index.prepare(ids)
        keys = self._core.index.chunk_keys(prompt, route.scope, self._core.config.working_set.chunk_tokens)
        asked = self._asked("", read, route, ids, keys, decision)
        return shown(self.ledger.explain(asked, decision, self._facts(prompt, route), now, time.time()))

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
        begun = self.ledger.begun(asked, decision, self._facts(prompt, route), now, time.time())
        self.ledger.ended(begun, usage, said, now)

    def _facts(self, prompt: Tokens, route: RouteRequest) -> IndexFacts:
        return IndexFacts(self._core, self._emptied, prompt, route.scope, self._prompts.get(route.scope.model))

    # Requests -----------------------------------------------------------------------------------------------------

    def _first_byte(self, exchange: Exchange) -> None:
        read, route, decision = self._read.pop(exchange.request_id, None), exchange.route, exchange.decision
        if read is None or route is None or decision is None or route.token_ids is None:
            return
        prompt = self._core.book.asked(route.request_id)
        if prompt is None:
            return
        ids = _ids(route.token_ids)
        keys = prompt.keys(self._core.config.working_set.chunk_tokens)
        asked = self._asked(exchange.trace_id.decode("latin-1"), read, route, ids, keys, decision)
        facts = self._facts(prompt.ids, route)
        now = self._proxy.now()
        if read.outline is not None and read.outline.after and self.ledger.parts_ways(asked):
            self._begun[exchange.request_id] = None
            task = asyncio.get_running_loop().create_task(
                self._begin_later(exchange, asked, read.parsed.kind, decision, facts, now)
            )
            self._outlining.add(task)
            task.add_done_callback(self._outlining.discard)
        else:
            self._begun[exchange.request_id] = self.ledger.begun(asked, decision, facts, now, time.time())

    async def _begin_later(
        self, exchange: Exchange, asked: AskedTurn, kind: Kind, decision: Decision, facts: Facts, now: float
    ) -> None:
        """The conversation was changed: its large body is looked at once more, elsewhere."""
        whole = await self._helpers.outline(exchange.request.pieces, kind)
        asked.outline = lambda after: whole if not after else None
        begun = self.ledger.begun(asked, decision, facts, now, time.time())
        if exchange.request_id in self._begun:
            self._begun[exchange.request_id] = begun
        if exchange.done:
            self._end(exchange, begun)

    def _ended(self, exchange: Exchange) -> None:
        self._read.pop(exchange.request_id, None)
        begun = self._begun.pop(exchange.request_id, None)
        if begun is not None:
            self._end(exchange, begun)

    def _end(self, exchange: Exchange, begun: BegunTurn) -> None:
        if exchange.outcome != "status_200":
            return
        usage, route = exchange.usage, exchange.route
        said = usage.completion_tokens if usage is not None else None
        if said is None:
            said = exchange.progress.reads if route is not None and route.stream else 0
        self.ledger.ended(begun, usage, said, self._proxy.now())
        if exchange.sampled:
            fields = shown(begun.why)
            log.info("why %s", msgspec.json.encode(fields).decode(), extra={"fields": {"why": fields}})

    # What the ledger wants to know ----------------------------------------------------------------------------------

    def _asked(
        self, name: str, read: Read, route: RouteRequest, ids: array[int], keys: Sequence[int], decision: Decision
    ) -> AskedTurn:
        worker = self._core.workers.get(decision.worker)
        block = worker.spec.block_size if worker is not None else None
        core = self._core
        short: Sequence[int] = ()
        begins: int | None = None
        if route.session is None:
            begins = begins_with(read.parsed)
            if self.ledger.wants_short(keys):
                short = short_keys(core.index, ids, route.scope, core.config.working_set.chunk_tokens)
        return AskedTurn(
            name, ids, route.scope, keys, _outliner(read), decision.worker, block or BLOCK_TOKENS, route.session,
            route.parent, route.final, sum(len(ids) for _, _, ids in read.spans), short, begins,
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

    def text(self, ids: array[int]) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def guessed(self, worker_id: str) -> bool:
        worker = self._core.workers.get(worker_id)
        return worker is not None and worker.spec.cache_view is CacheView.HISTORY


def begins_with(parsed: RoutingRequest) -> int | None:
    """A digest of what its user said first; None of what is no chat."""
    return None if parsed.messages is None else _digest(beginning(parsed))


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


def _outliner(read: Read) -> Callable[[int], Outline | None]:
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
