"""The shell around router/turns: tells the ledger of first bytes and ends, asks index and feed what it wants to know.

Nothing here is on a decision's path: a request is looked at after its first byte was passed on, with others.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

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
from router.turns.ledger import Ledger, short_keys
from router.turns.parts import Why, why_of
from router.turns.why import BLOCK_TOKENS, GROUPS, Asked, Outliner

log = logging.getLogger("router")

WAIT_S: Final = 0.25
"""That a first byte or an end waits for others, at most."""
WAITING_MAX: Final = 64
WAITING_TOKENS_MAX: Final = 200_000
"""So many of them, of prompts with so many tokens, are looked at at once: a millisecond or two."""


class _Looked:
    """A request whose conversation is looked at: from when it was placed until what its end told was added up. Nothing
    is kept that holds its body, its text, or those of its ids that are kept elsewhere."""

    __slots__ = (
        "asked", "begun", "decision", "end_s", "first_s", "is_looked_at", "is_over", "is_sampled", "is_whole", "kind",
        "outliner", "pieces", "read", "said", "streams", "usage",
    )  # fmt: skip

    def __init__(self, read: ReadTurn) -> None:
        self.read: ReadTurn | None = read
        """Until these are made of it."""
        self.asked: Asked | None = None
        self.outliner: Outliner | None = None
        self.kind = read.parsed.kind
        self.pieces: Sequence[bytes] = ()
        """Its body, where it may have to be read again."""
        self.streams = False
        self.decision: Decision | None = None
        """From its first byte on."""
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
        self._facts = IndexFacts(core, emptied, prompts.get)
        self._chunk_tokens = core.config.working_set.chunk_tokens
        self._requests: dict[str, _Looked] = {}
        """Those that have not ended."""
        self._waiting: list[_Looked] = []
        """First bytes and ends that nobody looked at yet, in their order."""
        self._waiting_tokens = 0
        """That they hold themselves."""
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
                one = _Looked(read)
                self._ask(one, exchange)
                self._requests[exchange.request_id] = one
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
        asked, block = self._shorts(self._asked_now("", read, route)), self._block(decision)
        facts = self._facts.about(asked)
        return shown(self.ledger.explain(asked, read.outliner(), decision, block, facts, now, time.time()))

    def note(
        self, name: str, read: ReadTurn, route: RouteRequest, decision: Decision, usage: ReportedUsage | None, said: int
    ) -> None:
        """A request that ended elsewhere, as it was priced at its arrival."""
        if not self.enabled or route.token_ids is None:
            return
        asked, now = self._shorts(self._asked_now(name, read, route)), self._proxy.now()
        facts, block = self._facts.about(asked), self._block(decision)
        begun = self.ledger.begun(asked, read.outliner(), decision, block, facts, now, time.time())
        self.ledger.ended(begun, usage, said, now)
        self.ledger.tell()

    def _asked_now(self, name: str, read: ReadTurn, route: RouteRequest) -> Asked:
        ids = route.token_ids or ()
        return _asked(name, read, route, ids, self._core.index.chunk_keys(ids, route.scope, self._chunk_tokens))

    # Requests -----------------------------------------------------------------------------------------------------

    def _ask(self, one: _Looked, exchange: Exchange) -> None:
        """What will be asked about it, as soon as the core has its prompt."""
        read, route = one.read, exchange.route
        if read is None or route is None or route.token_ids is None:
            return
        prompt = self._core.book.asked(route.request_id)
        if prompt is None:
            return
        keys, name = prompt.keys(self._chunk_tokens), exchange.trace_id.decode("latin-1")
        one.asked, one.streams = _asked(name, read, route, route.token_ids, keys), route.stream
        one.outliner, one.read = read.drawn(0) if read.drawn is not None else read.outliner(), None
        if read.outline is not None and read.outline.after:
            one.pieces = exchange.request.pieces

    def _first_byte(self, exchange: Exchange) -> None:
        one, decision = self._requests.get(exchange.request_id), exchange.decision
        if one is None or one.decision is not None or self._core.book.asked(exchange.request_id) is None:
            return  # nobody looks at it, it was, or it was priced and placed by another (router/shadow)
        if one.asked is None:
            self._ask(one, exchange)
        asked = one.asked
        if asked is None or decision is None:
            return
        one.decision, one.first_s = decision, self._proxy.now()
        if not asked[4]:
            self._waiting_tokens += len(asked[1])
        self._wait(one)

    def _ended(self, exchange: Exchange) -> None:
        one = self._requests.pop(exchange.request_id, None)
        if one is None or one.decision is None:
            return
        one.end_s, one.is_whole, one.usage = self._proxy.now(), exchange.outcome == "status_200", exchange.usage
        one.is_sampled = exchange.sampled
        said = None if one.usage is None else one.usage.completion_tokens
        one.said = said if said is not None else exchange.progress.reads if one.streams else 0
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
        asked, decision = one.asked, one.decision
        if asked is None or decision is None:
            raise RuntimeError("a first byte of a request that nobody placed")
        one.asked, asked = None, self._shorts(asked)
        if one.pieces and not self.ledger.book.goes_on(asked):
            whole = self._helpers.outline(one.pieces, one.kind)
            task = asyncio.get_running_loop().create_task(self._begin_later(one, whole, asked, decision, wall_s))
            self._outlining.add(task)
            task.add_done_callback(self._outlining.discard)
        else:
            self._know(one, one.outliner or _no_outline, asked, decision, wall_s)
        one.outliner, one.pieces = None, ()

    async def _begin_later(
        self, one: _Looked, outlined: Awaitable[Outline | None], asked: Asked, decision: Decision, wall_s: float
    ) -> None:
        """The conversation was changed: its large body is looked at once more, elsewhere."""
        try:
            self._know(one, await outlined or _no_outline, asked, decision, wall_s)
            if one.is_over and one.begun is not None:
                self._end(one, one.begun)
                self.ledger.tell()
        except Exception as error:  # noqa: BLE001  a boundary
            self._proxy.metrics.crashed("reasons", error)

    def _know(self, one: _Looked, outliner: Outliner, asked: Asked, decision: Decision, wall_s: float) -> None:
        facts, now = self._facts.about(asked), one.first_s
        one.begun = self.ledger.begun(asked, outliner, decision, self._block(decision), facts, now, now + wall_s)

    def _end(self, one: _Looked, begun: Begun) -> None:
        if not one.is_whole:
            return
        self.ledger.ended(begun, one.usage, one.said, one.end_s)
        if one.is_sampled:
            fields = shown(why_of(begun))
            log.info("why %s", msgspec.json.encode(fields).decode(), extra={"fields": {"why": fields}})

    # What the ledger wants to know ----------------------------------------------------------------------------------

    def _block(self, decision: Decision) -> int:
        worker = self._core.workers.get(decision.worker)
        return BLOCK_TOKENS if worker is None else worker.spec.block_size or BLOCK_TOKENS

    def _shorts(self, asked: Asked) -> Asked:
        """With the keys of its first chunk, where it may be found by them."""
        scope, keys = asked[5], asked[6]
        if asked[9] is not None or not self.ledger.wants_short(keys):
            return asked
        short = short_keys(self._core.index, _first_ids(asked, self._chunk_tokens + 1), scope, self._chunk_tokens)
        return (
            asked[0], asked[1], asked[2], asked[3], asked[4], scope, keys, short, asked[8], asked[9], asked[10],
            asked[11], asked[12],
        )  # fmt: skip


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

    def gone(self, start: int, step: int) -> tuple[int, str, float] | None:
        if self._asked is None:
            return None
        found = self._core.index.gone(_first_ids(self._asked, sys.maxsize), self._asked[5], start, step)
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
    ids, beginning, kept, stays = read.ids(token_ids)
    begins: int | None = None
    if route.session is None:
        begins = read.begins()
    else:
        keys = ()  # it is not found by these
    sampled = sum([len(ids) for _, _, ids in read.spans]) if read.spans else 0
    return (
        name, ids, beginning, kept, stays, route.scope, keys, (), begins, route.session, route.parent, sampled,
        route.final,
    )  # fmt: skip


def _first_ids(asked: Asked, most: int) -> array[int]:
    """Of its prompt, so many at most."""
    own, beginning, kept, stays = asked[1:5]
    if beginning is None or stays:
        return own if len(own) <= most else own[:most]
    return beginning[: min(kept, most)] + own[: max(most - kept, 0)]


def _no_outline(after: int) -> Outline | None:
    return None


def shown(why: Why) -> dict[str, Any]:
    """As JSON has it."""
    fields: dict[str, Any] = msgspec.to_builtins(why)
    for part, row in zip(why.parts, fields["parts"]):
        row |= {"tokens": part.tokens, "group": GROUPS.get(part.reason, "none")}
    return fields
