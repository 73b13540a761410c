"""What became of the last requests: each with the reasons why its prompt was not cached. Pure.

Owns the book of turns, the last answers to "why", and the sums by reason. Refuses to know sockets, workers' load and
how a prompt is read.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence

from router.decide.messages import Decision, ReportedUsage
from router.index.protocol import Scope
from router.prompting.outlined import Outline
from router.turns.config import TurnsConfig
from router.turns.parts import Why
from router.turns.why import Facts

from .book import Past, TurnBook, marks
from .differences import extended
from .why import Turn, parts_of, settle, tell


class AskedTurn:
    """A prompt whose answer has begun, or that is asked about."""

    def __init__(
        self,
        id: str,
        ids: array[int],
        scope: Scope,
        keys: Sequence[int],
        outline: Callable[[int], Outline | None],
        target: str,
        block: int,
        session: str | None = None,
        parent: str | None = None,
        final: bool = False,
        sampled_tokens: int = 0,
        short: Sequence[int] = (),
        begins: int | None = None,
        base: array[int] | None = None,
        kept: int = 0,
        stays: bool = False,
    ) -> None:
        self.id = id
        """That the client knows the request by."""
        self.ids, self.scope = ids, scope
        self.base, self.kept, self.stays = base, kept, stays
        """`ids` begins with so many of `base`'s, which somebody else keeps anyway; or all of its own."""
        self.keys = keys
        """Digests of its chunks."""
        self.outline = outline
        """Of its messages from that one on; None where it is no chat, or that part is not known."""
        self.target = target
        self.block = block
        """Tokens of its worker's blocks."""
        self.session, self.parent, self.final = session, parent, final
        self.sampled_tokens = sampled_tokens
        """Of `ids`: as they were sampled, where the encoder would choose others."""
        self.short = short
        """Digests of its first chunk's beginnings, where its session has no name and it has no chunk, or others have
        none."""
        self.begins = begins
        """Digest of what its user said first, where its session has no name: conversations with one system prompt may
        have all their chunks in common."""

    @property
    def found_by(self) -> list[int]:
        """Of which prompts it may be a continuation, the shortest first. Of prompts that merely begin alike the short
        ones tell too little: they are not looked for by these."""
        begins = () if self.begins is None else (self.begins,)
        return [*self.short, *self.keys, *begins]


class BegunTurn:
    """A request between its first byte and its end."""

    def __init__(self, why: Why, past: Past, decision: Decision, final: bool) -> None:
        self.why, self.past, self.decision, self.final = why, past, decision, final


class Ledger:
    """One a process."""

    def __init__(
        self,
        config: TurnsConfig,
        shared: Callable[[array[int], array[int]], int],
        turns: Counter[str] | None = None,
        tokens: Counter[str] | None = None,
        sums: Counter[str] | None = None,
    ) -> None:
        self.book = TurnBook(config.memory_mb << 20, config.keep_s, shared)
        self._whys: deque[Why] = deque(maxlen=config.requests_max)
        """The last ones."""
        self.turns: Counter[str] = Counter() if turns is None else turns
        """reason -> requests."""
        self.tokens: Counter[str] = Counter() if tokens is None else tokens
        """reason -> tokens that had to be computed."""
        self.sums: Counter[str] = Counter() if sums is None else sums
        """prompt, best, chosen, reported: tokens of the requests whose worker said what it reused."""

    def __len__(self) -> int:
        return len(self._whys)

    def get(self, name: str) -> Why | None:
        """What is known of a request."""
        return next((why for why in reversed(self._whys) if why.id == name), None)

    def explain(self, asked: AskedTurn, decision: Decision, facts: Facts, now: float, wall: float) -> Why:
        """The same as `begun`, of a request that was not sent. Changes nothing."""
        return self._why(asked, self._turn(asked), decision, facts, now, wall)

    def wants_short(self, keys: Sequence[int]) -> bool:
        """Whether a prompt without a session's name is to come with the digests of its first chunk's beginnings."""
        return not keys or self.book.shorts > 0

    def parts_ways(self, asked: AskedTurn) -> bool:
        """Whether its conversation goes on otherwise than it was: then the outline of the whole is wanted."""
        return self.book.goes_on(asked.ids, asked.scope, asked.session, asked.found_by) is None

    def begun(self, asked: AskedTurn, decision: Decision, facts: Facts, now: float, wall: float) -> BegunTurn:
        """Its answer has begun: the prompt was computed."""
        self.book.expire(now)
        turn = self._turn(asked)
        why = self._why(asked, turn, decision, facts, now, wall)
        outline, session = turn.outline, asked.session
        keys: tuple[int, ...] = ()
        if session is None:
            keys = marks(asked.keys) or tuple(asked.short[-1:])
            keys += () if asked.begins is None else (asked.begins,)
        is_short = session is None and not asked.keys
        base, kept = (None, 0) if asked.stays else (asked.base, asked.kept)
        past = Past(asked.scope, asked.ids, outline, asked.target, now, session, keys, is_short, base, kept)
        if len(asked.ids) >= asked.block:  # of less nothing can be cached
            self.book.put(past, instead=turn.past)
        self._whys.append(why)
        return BegunTurn(why, past, decision, asked.final)

    def ended(self, begun: BegunTurn, usage: ReportedUsage | None, answer_tokens: int, now: float) -> None:
        """Its answer is whole, with so many tokens."""
        why, past = begun.why, begun.past
        past.answer_tokens, past.at_s = answer_tokens, now
        settle(why, begun.decision.terms, usage.cached_tokens if usage is not None else None)
        tell(why)
        self.turns[why.reason] += 1
        for part in why.parts:
            self.tokens[part.reason] += part.tokens
        if why.reported_tokens is not None:
            self.sums["prompt"] += why.prompt_tokens
            self.sums["best"] += why.best_tokens
            self.sums["chosen"] += why.chosen_tokens
            self.sums["reported"] += why.reported_tokens
        if begun.final and past.session is not None:
            self.book.forget(past.session)

    def _turn(self, asked: AskedTurn) -> Turn:
        """The prompt beside the one it goes on from."""
        ids, scope, session, book = asked.ids, asked.scope, asked.session, self.book
        past = book.goes_on(ids, scope, session, asked.found_by)
        turn = Turn(len(ids), asked.block, past)
        if past is not None:
            turn.common = len(past.ids)
            turn.outline = self._extended(past, asked.outline)
            return turn
        turn.outline = asked.outline(0)
        found = book.before(ids, scope, turn.outline, session, asked.parent, asked.keys)
        if found is not None:
            turn.past, turn.common = found
            turn.same_session = turn.past.session == session
            turn.differs = _differs(turn.past.scope, scope)
        return turn

    @staticmethod
    def _extended(past: Past, outline: Callable[[int], Outline | None]) -> Outline | None:
        new = None if past.outline is None else outline(past.outline.total)
        return outline(0) if new is None or past.outline is None else extended(past.outline, new)

    @staticmethod
    def _why(asked: AskedTurn, turn: Turn, decision: Decision, facts: Facts, now: float, wall: float) -> Why:
        best = decision.best or decision.terms
        why = Why(
            id=asked.id,
            at=wall,
            session=asked.session,
            worker=decision.worker,
            prompt_tokens=turn.tokens,
            best_tokens=best.cached_tokens,
            best_worker=best.worker,
            chosen_tokens=decision.predicted_cached_tokens,
            parts=parts_of(turn, decision, facts, now),
            attempt=decision.attempt,
            sampled_tokens=asked.sampled_tokens,
        )
        tell(why)
        return why


def _differs(old: Scope, new: Scope) -> str | None:
    if old.model != new.model:
        return "model"
    return "lora" if old.lora != new.lora else "salt" if old.salt != new.salt else None
