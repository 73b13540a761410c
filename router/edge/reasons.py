"""The shell around router/turns: tells the ledger of first bytes and ends, asks index and feed what it wants to know.

Nothing here is on a decision's path: a request is looked at after its first byte was passed on, with others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Final

import msgspec

from prompts.tokenizer import Tokenizer
from router.counters import Metrics
from router.decide.core import RouterCore
from router.decide.messages import Decision, ReportedUsage, RouteRequest
from router.decide.workers import CacheView
from router.edge.exchange import Exchange
from router.edge.proxy import Proxy
from router.index.protocol import Scope
from router.prompting.outlined import Outline
from router.prompting.pool import Helpers
from router.prompting.reader import PromptReader
from router.prompting.turn import ReadTurn
from router.turns._native import Begun
from router.turns.config import TurnsConfig
from router.turns.ledger import Ledger, short_keys
from router.turns.parts import Why, why_of
from router.turns.why import BLOCK_TOKENS, GROUPS, Asked, Facts, Outliner

log = logging.getLogger("router")

WAIT_S: Final = 0.25
"""That a first byte or an end waits for others, at most."""
WAITING_MAX, WAITING_TOKENS_MAX = 64, 200_000
"""So many of them, of prompts with so many tokens, are looked at at once: a millisecond or two."""


class _Looked:
    """A request whose conversation is looked at: from its reading until what its end told was added up. Nothing is
    kept that holds its body, or those of its ids that are kept elsewhere."""

    __slots__ = (
        "asked", "begun", "decision", "end_s", "first_s", "is_looked_at", "is_over", "is_sampled", "is_whole", "pieces",
        "read", "said", "streams", "usage",
    )  # fmt: skip

    def __init__(self, read: ReadTurn) -> None:
        self.read: ReadTurn | None = read
        """Until its first byte was looked at."""
        self.asked: Asked | None = None
        self.decision: Decision | None = None
        """These from its first byte on."""
        self.pieces: Sequence[bytes] = ()
        """Its body, where it may have to be read again."""
        self.streams = False
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
        self._waiting_tokens = self._waiting_shorts = 0
        """That they hold themselves; first bytes of prompts without a chunk."""
        self._timer: asyncio.TimerHandle | None = None
        self._outlining: set[asyncio.Task[None]] = set()
        if config.enabled:
            proxy.on_first_byte.append(self._first_byte)
            proxy.on_end.append(self._ended)
        self.enabled, self.share = config.enabled, config.share

    def enter(self, request_id: str, read: ReadTurn) -> None:
        """A request was read and is about to be placed."""
        if self.enabled and read.parsed.kind != "other" and read.is_drawn(self.share):
            self._requests[request_id] = _Looked(read)

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
        asked = self._asked_now("", read, route, decision)
        why = self.ledger.explain(asked, read.outliner(), decision, self._facts(asked), now, time.time())
        return shown(why)

    def note(
        self, name: str, read: ReadTurn, route: RouteRequest, decision: Decision, usage: ReportedUsage | None, said: int
    ) -> None:
        """A request that ended elsewhere, as it was priced at its arrival."""
        if not self.enabled or route.token_ids is None:
            return
        asked, now = self._asked_now(name, read, route, decision), self._proxy.now()
        begun = self.ledger.begun(asked, read.outliner(), decision, self._facts(asked), now, time.time())
        self.ledger.ended(begun, usage, said, now)
        self.ledger.tell()

    def _asked_now(self, name: str, read: ReadTurn, route: RouteRequest, decision: Decision) -> Asked:
        index, ids = self._core.index, route.token_ids or ()
        keys = index.chunk_keys(ids, route.scope, self._core.config.working_set.chunk_tokens)
        return self._asked(name, read, route, ids, keys, decision)

    # Requests -----------------------------------------------------------------------------------------------------

    def _first_byte(self, exchange: Exchange) -> None:
        one, route, decision = self._requests.get(exchange.request_id), exchange.route, exchange.decision
        if one is None or route is None or decision is None or route.token_ids is None:
            return
        read, prompt = one.read, self._core.book.asked(route.request_id)
        if prompt is None or read is None or one.asked is not None:
            return
        keys = prompt.keys(self._core.config.working_set.chunk_tokens)
        name = exchange.trace_id.decode("latin-1")
        asked = one.asked = self._asked(name, read, route, route.token_ids, keys, decision)
        one.decision, one.first_s, one.streams = decision, self._proxy.now(), route.stream
        if read.outline is not None and read.outline.after:
            one.pieces = exchange.request.pieces
        if not asked[4]:
            self._waiting_tokens += len(asked[1])
        if not keys and route.session is None:
            self._waiting_shorts += 1
        self._wait(one)

    def _ended(self, exchange: Exchange) -> None:
        one = self._requests.pop(exchange.request_id, None)
        if one is None or one.asked is None:
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
        waiting, self._waiting, self._waiting_tokens, self._waiting_shorts = self._waiting, [], 0, 0
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
        read, asked, decision = one.read, one.asked, one.decision
        one.read = None
        if read is None or asked is None or decision is None:
            raise RuntimeError("a first byte that is looked at twice")
        facts = self._facts(asked)
        if one.pieces and not self.ledger.book.goes_on(asked):
            whole = self._helpers.outline(one.pieces, read.parsed.kind)
            later = self._begin_later(one, whole, asked, decision, facts, wall_s)
            task = asyncio.get_running_loop().create_task(later)
            self._outlining.add(task)
            task.add_done_callback(self._outlining.discard)
        else:
            at_s = one.first_s + wall_s
            one.begun = self.ledger.begun(asked, read.outliner(), decision, facts, one.first_s, at_s)
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
        self, name: str, read: ReadTurn, route: RouteRequest, token_ids: Sequence[int], keys: Sequence[int],
        decision: Decision,
    ) -> Asked:  # fmt: skip
        worker, core = self._core.workers.get(decision.worker), self._core
        block = worker.spec.block_size if worker is not None else None
        short: Sequence[int] = ()
        begins: int | None = None
        if route.session is None:
            begins = read.begins()
            if self._waiting_shorts or self.ledger.wants_short(keys):
                short = short_keys(core.index, token_ids, route.scope, core.config.working_set.chunk_tokens)
        else:
            keys = ()  # it is not found by these
        ids, beginning, kept, stays = read.ids(token_ids)
        sampled = sum([len(ids) for _, _, ids in read.spans]) if read.spans else 0
        return (
            name, ids, beginning, kept, stays, route.scope, keys, short, begins, route.session, route.parent,
            decision.worker, block or BLOCK_TOKENS, sampled, route.final,
        )  # fmt: skip

    def _facts(self, asked: Asked) -> IndexFacts:
        scope = asked[5]
        return IndexFacts(
            self._core, self._emptied, asked[1], asked[2], asked[3], asked[4], scope, self._prompts.get(scope.model)
        )


class IndexFacts:
    """What the ledger wants to know of one prompt, asked of index, feed and tokenizer."""

    __slots__ = ("_beginning", "_core", "_emptied", "_ids", "_kept", "_scope", "_stays", "_tokenizer")

    def __init__(
        self, core: RouterCore, emptied: Mapping[str, float], ids: array[int], beginning: array[int] | None, kept: int,
        stays: bool, scope: Scope, tokenizer: Tokenizer | None,
    ) -> None:  # fmt: skip
        """`ids` to `stays`: as ReadTurn.ids has them."""
        self._core, self._emptied, self._scope, self._tokenizer = core, emptied, scope, tokenizer
        self._ids, self._beginning, self._kept, self._stays = ids, beginning, kept, stays

    def gone(self, start: int, step: int) -> tuple[int, str, float] | None:
        ids, beginning = self._ids, self._beginning
        if beginning is not None and not self._stays:
            ids = beginning[: self._kept] + ids
        found = self._core.index.gone(ids, self._scope, start, step)
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


def shown(why: Why) -> dict[str, Any]:
    """As JSON has it."""
    fields: dict[str, Any] = msgspec.to_builtins(why)
    for part, row in zip(why.parts, fields["parts"]):
        row |= {"tokens": part.tokens, "group": GROUPS.get(part.reason, "none")}
    return fields
