"""What became of the last requests: each with the reasons why its prompt was not cached. Pure.

Owns the book of turns, the last answers to "why", and the sums by reason. Refuses to know sockets, workers' load and
how a prompt is read. Of most requests only the decision is kept: reasons that need no more are made of it when somebody
asks. A share of the conversations, and those that somebody asks for, are compared turn by turn.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from router.decide.messages import Decision, ReportedUsage
from router.index.protocol import PrefixIndex, Scope
from router.miss_reasons.attribution import (
    MissContext,
    PromptComparison,
    RemovedPrefix,
    attribute_misses,
    attribute_without_comparison,
)
from router.miss_reasons.config import MissReasonsConfig
from router.miss_reasons.explanation import MissExplanation
from router.miss_reasons.prompt_history import PreviousPrompt, PromptHistory
from router.prompting.outlined import Outline

SHORT_KEY_TOKENS: Final = 16
"""Between the keys of a prompt's first chunk, by which one that has no more is found."""


class Prompt:
    """A prompt that is compared: its answer has begun, or it is asked about."""

    def __init__(
        self,
        id: str,
        ids: array[int],
        scope: Scope,
        outline: Outline | None,
        session: str | None = None,
        parent: str | None = None,
        keys: Sequence[int] = (),
        short: Sequence[int] = (),
        begins: int | None = None,
        final: bool = False,
        unknown_before: bool = False,
    ) -> None:
        self.id = id
        """That the client knows the request by."""
        self.ids, self.scope, self.outline = ids, scope, outline
        self.session, self.parent, self.final = session, parent, final
        self.keys = keys
        """Digests of its chunks, where its session has no name."""
        self.short = short
        """Digests of its first chunk's beginnings, where its session has no name and it has no chunk, or others have
        none."""
        self.begins = begins
        """Digest of what its user said first, where its session has no name: conversations with one system prompt may
        have all their chunks in common."""
        self.unknown_before = unknown_before
        """Earlier prompts of its conversation may have been, and were not kept."""

    @property
    def found_by(self) -> list[int]:
        """Of which prompts it may be a continuation, the shortest first. Of prompts that merely begin alike the short
        ones tell too little: they are not looked for by these."""
        begins = () if self.begins is None else (self.begins,)
        return [*self.short, *self.keys, *begins]


class PlacedRequest:
    """A request from its first byte on, whose prompt is not compared."""

    __slots__ = ("_at", "_gone", "_now", "_reported", "_session", "decision", "id", "tokens")

    def __init__(
        self,
        id: str,
        session: str | None,
        tokens: int,
        decision: Decision,
        gone: RemovedPrefix | None,
        now: float,
        wall: float,
    ) -> None:
        self.id, self.tokens, self.decision = id, tokens, decision
        self._session, self._gone, self._now, self._at = session, gone, now, wall
        self._reported: int | None = None

    @property
    def why(self) -> MissExplanation:
        """The reasons that need only the decision and the index."""
        why = _new_explanation(self.id, self._session, self.tokens, self.decision, self._at)
        why.compared = False
        why.parts = attribute_without_comparison(self.tokens, self.decision, self._gone, self._now)
        why.sum_up()
        if self._reported is not None:
            why.settle(self.decision.terms.resident_tokens, self._reported)
        return why

    def settle(self, reported: int) -> None:
        """The worker said how much it reused."""
        self._reported = reported


class ComparedRequest:
    """A request from its first byte on, whose prompt was compared with the last one of its conversation."""

    __slots__ = ("decision", "final", "is_sampled", "past", "why")

    def __init__(
        self, why: MissExplanation, past: PreviousPrompt, decision: Decision, *, final: bool, is_sampled: bool
    ) -> None:
        self.why, self.past, self.decision, self.final = why, past, decision, final
        self.is_sampled = is_sampled
        """Counted by reason: its conversation is one of the share."""

    @property
    def id(self) -> str:
        return self.why.id

    @property
    def tokens(self) -> int:
        return self.why.prompt_tokens

    def settle(self, reported: int) -> None:
        """The worker said how much it reused."""
        self.why.settle(self.decision.terms.resident_tokens, reported)


AnalyzedRequest: TypeAlias = PlacedRequest | ComparedRequest


class MissAnalyzer:
    """One a process."""

    def __init__(
        self,
        config: MissReasonsConfig,
        shared: Callable[[array[int], array[int]], int],
        turns: Counter[str] | None = None,
        tokens: Counter[str] | None = None,
        sums: Counter[str] | None = None,
    ) -> None:
        """`shared`: how many tokens two prompts begin with alike."""
        self.book = PromptHistory(config.memory_mb << 20, config.ttl_s, shared)
        self._requests_max = config.requests_max
        self._requests: OrderedDict[str, AnalyzedRequest] = OrderedDict()
        """id -> the last request of that id, the oldest first."""
        self.turns: Counter[str] = Counter() if turns is None else turns
        """reason -> requests, of the share that is compared."""
        self.tokens: Counter[str] = Counter() if tokens is None else tokens
        """reason -> tokens that had to be computed, of the same."""
        self.sums: Counter[str] = Counter() if sums is None else sums
        """prompt, best, chosen, reported: tokens of all requests whose worker said what it reused."""

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, name: str) -> MissExplanation | None:
        """What is known of a request."""
        found = self._requests.get(name)
        return None if found is None else found.why

    def wants_short(self, keys: Sequence[int]) -> bool:
        """Whether a prompt without a session's name is to come with the digests of its first chunk's beginnings."""
        return not keys or self.book.shorts > 0

    def explain(
        self,
        prompt: Prompt,
        decision: Decision,
        block: int,
        gone: RemovedPrefix | None,
        facts: MissContext,
        now: float,
        wall: float,
    ) -> MissExplanation:
        """The same as `compared`, of a request that was not sent. Changes nothing."""
        return self._explained(prompt, self._turn(prompt, block), decision, gone, facts, now, wall)

    def placed(
        self,
        id: str,
        session: str | None,
        tokens: int,
        decision: Decision,
        gone: RemovedPrefix | None,
        now: float,
        wall: float,
    ) -> PlacedRequest:
        """Its answer has begun, and its prompt of so many tokens is not compared."""
        placed = PlacedRequest(id, session, tokens, decision, gone, now, wall)
        self._keep(placed)
        return placed

    def compared(
        self,
        prompt: Prompt,
        decision: Decision,
        block: int,
        gone: RemovedPrefix | None,
        facts: MissContext,
        now: float,
        wall: float,
        *,
        is_sampled: bool = True,
    ) -> ComparedRequest:
        """Its answer has begun: the prompt was computed, in blocks of so many tokens. Raises ValueError for a block
        without tokens."""
        if block < 1:
            raise ValueError(f"a block of {block} tokens: expected at least 1")
        self.book.expire(now)
        turn = self._turn(prompt, block)
        why = self._explained(prompt, turn, decision, gone, facts, now, wall)
        session = prompt.session
        keys: tuple[int, ...] = ()
        if session is None:
            keys = select_lookup_keys(prompt.keys) or tuple(prompt.short[-1:])
            keys += () if prompt.begins is None else (prompt.begins,)
        is_short = session is None and not prompt.keys
        past = PreviousPrompt(prompt.scope, prompt.ids, prompt.outline, decision.worker, now, session, keys, is_short)
        if len(prompt.ids) >= block:  # of less nothing can be cached
            self.book.put(past, instead=turn.past)
        begun = ComparedRequest(why, past, decision, final=prompt.final, is_sampled=is_sampled)
        self._keep(begun)
        return begun

    def ended(self, begun: AnalyzedRequest, usage: ReportedUsage | None, answer_tokens: int, now: float) -> None:
        """Its answer is whole, with so many tokens."""
        if usage is not None and usage.cached_tokens is not None:
            reported, decision, sums = max(usage.cached_tokens, 0), begun.decision, self.sums
            begun.settle(reported)
            sums["prompt"] += begun.tokens
            sums["best"] += (decision.most_cached or decision.terms).cached_tokens
            sums["chosen"] += decision.predicted_cached_tokens
            sums["reported"] += reported
        if isinstance(begun, PlacedRequest):
            return
        why, past = begun.why, begun.past
        past.answer_tokens, past.at_s = answer_tokens, now
        if begun.is_sampled:
            self.turns[why.reason] += 1
            for part in why.parts:
                self.tokens[part.reason] += part.tokens
        if begun.final and past.session is not None:
            self.book.forget(past.session)

    def _keep(self, begun: AnalyzedRequest) -> None:
        requests = self._requests
        requests.pop(begun.id, None)
        requests[begun.id] = begun
        if len(requests) > self._requests_max:
            requests.popitem(last=False)

    def _turn(self, prompt: Prompt, block: int) -> PromptComparison:
        """The prompt beside the one it goes on from."""
        ids, scope, session, book = prompt.ids, prompt.scope, prompt.session, self.book
        past = book.goes_on(ids, scope, session, prompt.found_by)
        turn = PromptComparison(len(ids), block, past)
        turn.outline, turn.unknown_before = prompt.outline, prompt.unknown_before
        if past is not None:
            turn.common = len(past.ids)
            return turn
        found = book.before(ids, scope, turn.outline, session, prompt.parent, prompt.keys)
        if found is not None:
            turn.past, turn.common = found
            turn.same_session = turn.past.session == session
            turn.differs = _scope_difference(turn.past.scope, scope)
        return turn

    @staticmethod
    def _explained(
        prompt: Prompt,
        turn: PromptComparison,
        decision: Decision,
        gone: RemovedPrefix | None,
        facts: MissContext,
        now: float,
        wall: float,
    ) -> MissExplanation:
        why = _new_explanation(prompt.id, prompt.session, turn.tokens, decision, wall)
        why.compared = turn.past is not None or not turn.unknown_before
        why.parts = attribute_misses(turn, decision, gone, facts, now)
        why.sum_up()
        return why


def short_keys(index: PrefixIndex, ids: Sequence[int], scope: Scope, chunk_tokens: int) -> list[int]:
    """The keys of a prompt's first chunk of so many tokens."""
    return index.chunk_keys(ids[: chunk_tokens + 1], scope, SHORT_KEY_TOKENS)


def select_lookup_keys(keys: Sequence[int]) -> tuple[int, ...]:
    """The chunks by which a prompt without a session's name is found again: its last, and those at powers of two."""
    count, found = len(keys), list[int]()
    while count:
        found.append(keys[count - 1])
        count //= 2
    found.reverse()
    return tuple(found)


def _new_explanation(id: str, session: str | None, tokens: int, decision: Decision, wall: float) -> MissExplanation:
    best = decision.most_cached or decision.terms
    return MissExplanation(
        id=id,
        at=wall,
        session=session,
        worker=decision.worker,
        prompt_tokens=tokens,
        best_tokens=best.cached_tokens,
        best_worker=best.worker,
        chosen_tokens=decision.predicted_cached_tokens,
        attempt=decision.attempt,
    )


def _scope_difference(old: Scope, new: Scope) -> str | None:
    if old.model != new.model:
        return "model"
    return "lora" if old.lora != new.lora else "salt" if old.salt != new.salt else None
