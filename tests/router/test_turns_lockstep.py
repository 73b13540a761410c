"""The native book of turns against its naive model, on conversations that nobody would have."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from reference.turns.ledger import AskedTurn
from reference.turns.lockstep import BothLedgers
from reference.turns.why import check_adds_up

from router.decide.messages import Decision, ReportedUsage, Terms
from router.index import make_index
from router.index.protocol import Scope
from router.prompting.outlined import Outline
from router.turns._native import REASONS
from router.turns.config import TurnsConfig
from router.turns.ledger import Ledger
from router.turns.why import Asked

INDEX = make_index(seed=3)
BLOCK, CHUNK = 4, 16
SCOPES = (Scope("m"), Scope("m", "salt"), Scope("m", None, "lora"), Scope("n"), Scope("m", media=((3, "picture"),)))
SESSIONS = (None, None, "one", "two", "half \ud83d of a pair")
KINDS = (0, 1, 2, 3, 1 | 16, 2 | 8, 2 | 32, 2 | 8 | 32)
MESSAGE_TOKENS = 5


@dataclass
class SomeFacts:
    """Whatever an index might say."""

    end: int | None = None
    emptied_s: float | None = None
    is_guessed: bool = False
    is_thought: bool = False

    def gone(self, start: int, step: int) -> tuple[int, str, float] | None:
        return None if self.end is None else (start + self.end, "a", 0.5)

    def emptied(self, worker_id: str) -> float | None:
        return self.emptied_s

    def guessed(self, worker_id: str) -> bool:
        return self.is_guessed

    def thinks(self, ids: list[int]) -> bool:
        return self.is_thought


@dataclass
class Talk:
    """A prompt of few different tokens, and messages of few different digests: all that can collide does."""

    ids: list[int] = field(default_factory=list)
    words: list[tuple[int, int, int, int, int]] = field(default_factory=list)

    def outline(self, after: int, tools: list[int], flags: int, base: bytes | None = None) -> Outline | None:
        """`base`: some of its first messages are kept there, and it is told whole."""
        if after > len(self.words):
            return None
        if base is not None:
            numbers = array("I", [word for message in self.words for word in message]).tobytes()
            kept = next((i for i in range(len(base) // 20, -1, -1) if numbers.startswith(base[: 20 * i])), 0)
            return Outline(0, numbers[20 * kept :], array("I", tools).tobytes(), flags, base, kept)
        flat = array("I", [word for message in self.words[after:] for word in message])
        return Outline(after, flat.tobytes(), array("I", [] if after else tools).tobytes(), flags)


def message(rng: random.Random) -> tuple[int, int, int, int, int]:
    """Sent alike, they are alike; system prompts often are, others now and then."""
    kind = rng.choice(KINDS)
    sent = rng.randrange(12 if kind == 0 or rng.random() < 0.4 else 10**6)
    return sent, sent // 2, sent // 3, kind, 1 + 9 * (sent % 5)


def nearly(rng: random.Random, one: tuple[int, int, int, int, int]) -> tuple[int, int, int, int, int]:
    """Sent otherwise, and perhaps the same where it counts."""
    sent = one[0] + rng.choice([-1, 1]) if one[0] else 1
    return sent, sent // 2, sent // 3, one[3], 1 + 9 * (sent % 5)


def changed(rng: random.Random, talk: Talk) -> Talk:
    """Mostly it goes on; or it is cut, edited, rendered otherwise."""
    how = rng.choice(["on", "on", "on", "same", "cut", "edit", "edit", "rendered", "tail", "new", "new", "fork"])
    if how == "new" or len(talk.ids) > 300:
        talk = Talk()
    ids, words = list(talk.ids), list(talk.words)
    if how == "fork":  # another conversation with the same system prompt
        ids, words = ids[: CHUNK + 2], [(*one[:3], 0, one[4]) for one in words[:1]]
    if ids and how in ("cut", "edit", "rendered", "tail"):
        at = len(ids) - rng.randrange(1, min(len(ids), 40) + 1) if how == "tail" else rng.randrange(len(ids))
        ids = ids[:at] if how == "cut" else [*ids[:at], 9, *ids[at + 1 :]]
        if words and how in ("cut", "edit"):
            place = min(at // MESSAGE_TOKENS, len(words) - 1)
            other = nearly(rng, words[place]) if rng.random() < 0.4 else message(rng)
            words = words[:place] if how == "cut" else [*words[:place], other, *words[place + 1 :]]
    if how == "edit" and words and rng.random() < 0.5:  # that a template drops, or does not
        words[rng.randrange(len(words))] = message(rng)
    for _ in range(0 if how == "same" else rng.randrange(1, 4)):
        words.append(message(rng))
        ids += rng.choices(range(2), k=MESSAGE_TOKENS)
    return Talk(ids, words)


def decision(rng: random.Random, tokens: int) -> Decision:
    def terms(worker: str, cached: int) -> Terms:
        return Terms(worker, cached, rng.randrange(tokens + 1), 0, 0, 0, 1, 0, 0, 0, 0, 0, rng.random(), 0)

    cached = rng.choice([0, rng.randrange(tokens // BLOCK + 1)]) * BLOCK
    own = terms(rng.choice("ab"), cached)
    found = Decision("r", own.worker, None, rng.randrange(2), tokens, cached, 0.0, own, 0.0)
    if rng.random() < 0.2:
        found.best = terms("c", cached + BLOCK * rng.randrange(1, 6))
    return found


def some_facts(rng: random.Random, now: float) -> SomeFacts:
    gone, emptied_s = rng.randrange(1, 40), now - rng.randrange(20)
    return SomeFacts(
        gone if rng.random() < 0.2 else None, emptied_s if rng.random() < 0.2 else None,
        rng.random() < 0.1, rng.random() < 0.3,
    )  # fmt: skip


class World:
    """Conversations side by side, and both ledgers told of them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.now, self.named = rng, 0.0, rng.random() < 0.5
        config, waits = TurnsConfig(memory_mb=1, keep_s=30.0, requests_max=6), rng.random() < 0.5
        self.ledgers = BothLedgers(config, INDEX.shared, waits=waits)
        self.talks: list[tuple[Talk, str | None]] = [(Talk(), None)]
        self.begun: list[tuple[Any, int]] = []
        self.reasons: set[str] = set()
        self.bases = [b""]
        """Messages that are kept anyway."""
        self.stock = [array("I"), array("I", [0, 1] * 40)]
        """What somebody else keeps, of which prompts may have beginnings."""

    def beginning(self, ids: array[int]) -> tuple[array[int] | None, int, bool]:
        """(what is kept anyway, how many of it the prompt begins with, whether that is kept anyway too)."""
        rng, most = self.rng, 0
        base = rng.choice([None, max(self.stock, key=lambda one: INDEX.shared(one, ids)), rng.choice(self.stock)])
        if base is not None:
            shared = INDEX.shared(base, ids)
            most = rng.choice([shared, shared, rng.randrange(shared + 1)])
        stays = rng.random() < 0.4
        if stays or rng.random() < 0.1:
            self.stock = [*self.stock[-5:], ids if stays else ids[: rng.randrange(len(ids) + 1)]]
        return base, most, stays

    def ask(self, number: int) -> None:
        rng, ledgers = self.rng, self.ledgers
        before, session = rng.choice(self.talks[-6:])
        talk = changed(rng, before)
        if rng.random() < 0.3:
            session = rng.choice(SESSIONS if self.named else SESSIONS[:1])
        self.talks.append((talk, session))
        scope = SCOPES[0] if rng.random() < 0.85 else rng.choice(SCOPES)
        tools, flags = rng.choices([[], [1, 1]], [8, 1])[0], rng.choices([0, 7], [8, 1])[0]
        is_chat, ids = rng.random() < 0.85, array("I", talk.ids)
        keys, short = INDEX.chunk_keys(ids, scope, CHUNK), list[int]()
        if session is None and ledgers.wants_short(keys):
            short = INDEX.chunk_keys(ids[: CHUNK + 1], scope, BLOCK)
        base, placed = rng.choice([None, *self.bases]), decision(rng, len(ids))
        asked = AskedTurn(
            f"r{number}" if self.ledgers.waits else f"r{rng.choice([number, rng.randrange(9)])}", ids, scope, keys,
            lambda after: talk.outline(after, tools, flags, base) if is_chat else None, placed.worker, BLOCK,
            session, rng.choice(SESSIONS), rng.random() < 0.05, number, short,
            talk.words[0][0] if session is None and talk.words else None, *self.beginning(ids),
        )  # fmt: skip
        if rng.random() < 0.4:
            found = talk.outline(0, tools, flags)
            self.bases = [*self.bases[-3:], b"" if found is None else found.messages]
        facts = some_facts(rng, self.now)
        check_adds_up(ledgers.explain(asked, placed, facts, self.now, 1.0))
        self.begun.append((ledgers.begun(asked, placed, facts, self.now, 1.0), len(ids)))

    def end(self) -> None:
        rng = self.rng
        one, tokens = self.begun.pop(rng.randrange(len(self.begun)))
        usage = ReportedUsage(tokens, rng.choice([None, rng.randrange(tokens + 3)]), None)
        self.ledgers.ended(one, rng.choice([None, usage]), rng.randrange(20), self.now)
        why = self.ledgers.why(one)
        check_adds_up(why)
        self.reasons |= {part.reason for part in why.parts}


def test_both_say_the_same() -> None:
    seen: set[str] = set()
    for seed in (*range(40), random.randrange(2**32)):
        world = World(random.Random(seed))
        for number in range(80):
            print("seed", seed, "request", number)  # shown where it fails
            world.now += world.rng.choices([0.0, 1.0, 6.0, 30.0], [4, 8, 2, 1])[0]
            world.ask(number)
            while world.begun and world.rng.random() < 0.5:
                world.end()
        seen |= world.reasons
    assert seen == set(REASONS), "every reason was given"


def test_prompts_beyond_its_memory_leave_in_their_order() -> None:
    ledgers = BothLedgers(TurnsConfig(memory_mb=1), INDEX.shared)
    for number in range(40):
        ids = array("I", range(number * 100_000, number * 100_000 + 20_000 + 1_000 * (number % 7)))
        keys = INDEX.chunk_keys(ids, SCOPES[0], 512)
        asked = AskedTurn(f"r{number}", ids, SCOPES[0], keys, lambda _: None, "a", BLOCK,
                          f"s{number % 9}" if number % 2 else None)  # fmt: skip
        own = Terms("a", 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0)
        ledgers.begun(asked, Decision("r", "a", None, 0, len(ids), 0, 0.0, own, 0.0), SomeFacts(), 1.0 + number, 0.0)
    sizes = [ledgers.native.book.prompts, len(ledgers.naive.book)]
    assert 5 < sizes[0] < 20
    assert all(a == b for a, b in pairwise(sizes))


def plain(ids: Any, base: Any = None, kept: int = 0, *, session: str | None = None) -> Asked:
    begins = None if session else 1
    return "r", ids, base, kept, False, SCOPES[0], [], [], begins, session, None, 0, False


def say(ledger: Ledger, asked: Asked, outline: Any = lambda _: None, *, block: int = 1) -> None:
    own = Terms("a", 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0)
    placed = Decision("r", "a", None, 0, 3, 0, 0.0, own, 0.0)
    ledger.begun(asked, outline, placed, block, SomeFacts(), 0.0, 0.0)


@pytest.mark.parametrize("ids", [[1, 2], array("d", [1.0]), array("Q", [1]), b"12345", None])
def test_what_is_no_array_of_ids_is_refused(ids: Any) -> None:
    ledger = Ledger(TurnsConfig())
    with pytest.raises((TypeError, BufferError)):
        say(ledger, plain(ids))
    if ids is not None:
        with pytest.raises((TypeError, BufferError)):
            say(ledger, plain(array("I", [1, 2]), ids, 1))
    with pytest.raises(ValueError, match="block"):
        say(ledger, plain(array("I")), block=0)
    with pytest.raises(TypeError, match="tuple"):
        say(ledger, plain(array("I"))[1:])  # type: ignore[arg-type]
    assert len(ledger) == ledger.book.prompts == 0


@pytest.mark.parametrize("kept", [-1, 3, 2**40])
def test_no_more_is_shared_than_there_is(kept: int) -> None:
    ledger, short, long = Ledger(TurnsConfig()), array("I", [1, 2]), array("I", [1, 2, 3])
    for ids, base, stays in ((long, short, False), (short, long, True), (long, short, True), (short, long, False)):
        asked = plain(ids, base, kept)
        with pytest.raises(ValueError, match="kept"):
            say(ledger, (*asked[:4], stays, *asked[5:]))
    assert len(ledger) == ledger.book.prompts == 0


def test_what_prompts_share_is_kept_and_counted_once() -> None:
    """And lent: while a prompt is kept, nobody can change it."""
    ledger, base, own = Ledger(TurnsConfig()), array("I", range(1000)), 0
    for number in range(4):
        say(ledger, plain(base[:900] + array("I", [7] * number), base, 900, session=f"session {number}"))
        own += 600 + 4 * number
        assert ledger.book.used_bytes == 4 * 1000 + own
    with pytest.raises(BufferError):
        base.append(1)
    for number in range(4):
        say(ledger, plain(array("I", [5]), session=f"session {number}"))  # it goes on otherwise
        own += 4 - 4 * number
        assert ledger.book.used_bytes == 4 * 1000 * (number < 3) + own
    base.append(1)


def test_what_an_outline_raises_ends_its_own_request_only() -> None:
    ledger = Ledger(TurnsConfig())

    def raises(after: int) -> Outline | None:
        raise KeyError(after)

    asked = plain(array("I", [1, 2, 3]))
    with pytest.raises(KeyError):
        say(ledger, asked, raises)
    assert len(ledger) == ledger.book.prompts == 0
    say(ledger, asked)
    assert len(ledger) == ledger.book.prompts == 1
