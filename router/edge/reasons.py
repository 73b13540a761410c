"""The shell around router/turns: tells the ledger of first bytes and ends, asks index and feed what it wants to know.

Nothing here is on a decision's path: a request is looked at after its first byte was passed on, with others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from prompts.segments import ID_TYPE
from prompts.tokenizer import Tokenizer
from router.counters import Metrics
from router.decide.core import RouterCore
from router.decide.messages import Decision, ReportedUsage, RouteRequest
from router.decide.workers import CacheView
from router.edge.exchange import Exchange
from router.edge.proxy import Proxy
from router.prompting.outlined import Outline
from router.prompting.pool import Helpers
from router.prompting.reader import PromptReader
from router.prompting.turn import ReadTurn
from router.turns._native import Begun
from router.turns.config import TurnsConfig
from router.turns.ledger import Ledger, placed_of, reported_of, short_keys
from router.turns.parts import Why, why_of
from router.turns.why import BLOCK_TOKENS, GROUPS, Asked, End, First, Looked, Placed

log = logging.getLogger("router")

WAIT_S: Final = 0.25
"""That a first byte or an end waits for others, at most."""
WAITING_MAX: Final = 64
WAITING_TOKENS_MAX: Final = 200_000
"""So many of them, of prompts with so many tokens, are looked at at once: a millisecond or two."""


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
        self._core, self._proxy, self._helpers = core, proxy, helpers
        self._facts = IndexFacts(core, emptied, prompts.get)
        self._chunk_tokens = core.config.working_set.chunk_tokens
        self._waiting: list[tuple[Looked, Decision, float] | End] = []
        """First bytes and ends that nobody looked at yet, in their order."""
        self._waiting_tokens = 0
        """That they alone keep."""
        self._timer: asyncio.TimerHandle | None = None
        self._outlining: set[asyncio.Task[None]] = set()
        if config.enabled:
            proxy.on_first_byte.append(self._first_byte)
            proxy.on_end.append(self._ended)
        self.enabled, self.share = config.enabled, config.share

    def enter(self, exchange: Exchange, read: ReadTurn) -> None:
        """A request was placed, or waits for that: what it was made of is at hand now, and will be in no processor's
        cache later."""
        try:
            if self.enabled and read.parsed.kind != "other" and read.is_drawn(self.share):
                exchange.looked = self._looked(read, exchange) or read
        except Exception as error:  # noqa: BLE001  a boundary: the request goes on, of its miss nothing is known
            self._proxy.metrics.crashed("reasons", error)

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

    def explain(self, read: ReadTurn, route: RouteRequest, decision: Decision, now: float) -> dict[str, Any] | None:
        """Why a request would miss that is not sent."""
        if not self.enabled or route.token_ids is None:
            return None
        self.settle()
        asked, block = self._asked_now("", read, route), self._block(decision)
        facts = self._facts.about(asked)
        return shown(self.ledger.explain(asked, read.outliner(), decision, block, facts, now, time.time()))

    def note(
        self, name: str, read: ReadTurn, route: RouteRequest, decision: Decision, usage: ReportedUsage | None, said: int
    ) -> None:
        """A request that ended elsewhere, as it was priced at its arrival."""
        if not self.enabled or route.token_ids is None:
            return
        asked, now = self._asked_now(name, read, route), self._proxy.now()
        facts, block = self._facts.about(asked), self._block(decision)
        begun = self.ledger.begun(asked, read.outliner(), decision, block, facts, now, time.time())
        self.ledger.ended(begun, usage, said, now)
        self.ledger.tell()

    def _asked_now(self, name: str, read: ReadTurn, route: RouteRequest) -> Asked:
        ids = route.token_ids or ()
        keys = self._core.index.chunk_keys(ids, route.scope, self._chunk_tokens)
        asked = _asked(name, read, route, ids, keys)
        if route.session is not None or not self.ledger.wants_short(keys):
            return asked
        return (*asked[:7], self._facts.shorts(asked), *asked[8:])

    # Requests -----------------------------------------------------------------------------------------------------

    def _looked(self, read: ReadTurn, exchange: Exchange) -> Looked | None:
        """What will be asked about it, as soon as the core has its prompt."""
        route = exchange.route
        prompt = None if route is None else self._core.book.asked(route.request_id)
        if route is None or route.token_ids is None or prompt is None:
            return None
        name = exchange.trace_id.decode("latin-1")
        asked = _asked(name, read, route, route.token_ids, prompt.keys(self._chunk_tokens))
        is_part = read.outline is not None and read.outline.after > 0  # of its outline
        body = (exchange.request.pieces, read.parsed.kind) if is_part else None
        outline = read.outliner() if read.drawn is None else read.drawn(0) or _no_outline
        return [asked, outline, body, False, None]

    def _first_byte(self, exchange: Exchange) -> None:
        one, decision = exchange.looked, exchange.decision
        if one is None or decision is None or not exchange.in_core:
            return  # nobody looks at it, or it was priced and placed by another (router/shadow)
        if isinstance(one, ReadTurn):
            looked = self._looked(one, exchange)
            if looked is None:
                return
            one = exchange.looked = looked
        if one[3]:
            return
        one[3] = True
        asked: Asked = one[0]
        if not asked[4]:
            self._waiting_tokens += len(asked[1]) - asked[3]
        self._wait((one, decision, self._proxy.now()))

    def _ended(self, exchange: Exchange) -> None:
        one, exchange.looked = exchange.looked, None
        if one is None or isinstance(one, ReadTurn) or not one[3]:
            return
        usage, route, said = exchange.usage, exchange.route, 0
        if usage is not None and usage.completion_tokens is not None:
            said = usage.completion_tokens
        elif route is not None and route.stream:
            said = exchange.progress.reads
        reported, is_whole = reported_of(usage), exchange.outcome == "status_200"
        self._wait((one, reported, said, self._proxy.now(), is_whole, exchange.sampled))

    def _wait(self, one: tuple[Looked, Decision, float] | End) -> None:
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
        entries: list[First | End] = []  # where they went is told of many at once too
        for one in waiting:
            if len(one) == 3:
                looked, decision, first_s = one
                entries.append((looked, placed_of(decision, self._block(decision)), first_s))
            else:
                entries.append(one)
        self.ledger.book.settle(entries, self._facts, self._wall_s(), self._elsewhere, _log, self._failed)

    def _wall_s(self) -> float:
        """What the clock on the wall is ahead."""
        return time.time() - self._proxy.now()

    def _failed(self, error: Exception) -> None:
        self._proxy.metrics.crashed("reasons", error)

    def _elsewhere(self, one: Looked, asked: Asked, placed: Placed, first_s: float, body: Any) -> None:
        """The conversation was changed: its large body is looked at once more."""
        pieces, kind = body
        whole = self._helpers.outline(pieces, kind)
        task = asyncio.get_running_loop().create_task(self._begin_later(one, asked, placed, first_s, whole))
        self._outlining.add(task)
        task.add_done_callback(self._outlining.discard)

    async def _begin_later(
        self, one: Looked, asked: Asked, placed: Placed, first_s: float, outlined: Awaitable[Outline | None]
    ) -> None:
        try:
            made, book = await outlined or _no_outline, self.ledger.book
            book.begun_elsewhere(one, asked, placed, first_s, made, self._facts, self._wall_s(), _log)
        except Exception as error:  # noqa: BLE001  a boundary: it ends this request's reasons, and nothing else
            self._failed(error)

    # What the ledger wants to know ----------------------------------------------------------------------------------

    def _block(self, decision: Decision) -> int:
        worker = self._core.workers.get(decision.worker)
        return BLOCK_TOKENS if worker is None else worker.spec.block_size or BLOCK_TOKENS


class IndexFacts:
    """What the ledger wants to know of one prompt, asked of index, feed and tokenizer."""

    def __init__(
        self, core: RouterCore, emptied: Mapping[str, float], tokenizer: Callable[[str], Tokenizer | None]
    ) -> None:
        """`tokenizer`: of a model."""
        self._core, self._emptied, self._tokenizer = core, emptied, tokenizer
        self._asked: Asked | None = None

    def about(self, asked: Asked) -> IndexFacts:
        """These, from now on of that prompt."""
        self._asked = asked
        return self

    def shorts(self, asked: Asked) -> list[int]:
        """The keys of its first chunk."""
        chunk = self._core.config.working_set.chunk_tokens
        return short_keys(self._core.index, asked[1], asked[5], chunk)

    def gone(self, start: int, step: int) -> tuple[int, str, float] | None:
        if self._asked is None:
            return None
        found = self._core.index.gone(self._asked[1], self._asked[5], start, step)
        if found is None:
            return None
        end, holder, when_s = found
        workers = (worker.worker_id for worker in self._core.workers.values() if holder in worker.holders)
        return end, next(workers, "one that is known no more"), when_s

    def emptied(self, worker_id: str) -> float | None:
        return self._emptied.get(worker_id)

    def thinks(self, ids: list[int]) -> bool:
        tokenizer = None if self._asked is None else self._tokenizer(self._asked[5].model)
        if tokenizer is None:
            return False
        text = tokenizer.decode(ids, skip_special_tokens=False).lower()
        return "think" in text or "analysis" in text

    def guessed(self, worker_id: str) -> bool:
        worker = self._core.workers.get(worker_id)
        return worker is not None and worker.spec.cache_view is CacheView.HISTORY


def _asked(name: str, read: ReadTurn, route: RouteRequest, token_ids: Sequence[int], keys: Sequence[int]) -> Asked:
    ids = token_ids if isinstance(token_ids, array) else array(ID_TYPE, token_ids)
    begins: int | None = None
    if route.session is None:
        begins = read.begins()
    else:
        keys = ()  # it is not found by these
    return (
        name, ids, read.beginning, read.kept, read.stays, route.scope, keys, (), begins, route.session, route.parent,
        0, route.final,
    )  # fmt: skip


def _no_outline(after: int) -> Outline | None:
    return None


def _log(begun: Begun) -> None:
    fields = shown(why_of(begun))
    log.info("why %s", msgspec.json.encode(fields).decode(), extra={"fields": {"why": fields}})


def shown(why: Why) -> dict[str, Any]:
    """As JSON has it."""
    fields: dict[str, Any] = msgspec.to_builtins(why)
    for part, row in zip(why.parts, fields["parts"]):
        row |= {"tokens": part.tokens, "group": GROUPS.get(part.reason, "none")}
    return fields
