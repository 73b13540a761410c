"""The last prompts of conversations: token ids and digests, no text. Pure.

Owns which earlier prompt a new one goes on from: by the session's name, by its parent's, or, where a client names none,
by the prompts that begin alike. Invariants: `used_bytes` is the sum of what the prompts take, at most `bytes_max`;
every prompt is found from each of its names; the oldest goes first, and none stays longer than `keep_s`.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from router.index.protocol import Scope
from router.miss_reasons.differences import is_dialogue, is_side_request, message_digests, unpack_words
from router.prompting.outlined import WORDS, Outline

BRANCHES_MAX: Final = 4
"""Conversations that go on under one session's name: agents ask for titles and summaries in between."""
PROMPT_BYTES: Final = 600
"""Of a prompt, besides ids and outline."""
OUTLINE_BYTES: Final = 256
"""Of an outline, besides its numbers."""
_SHARED_RATIO_MIN: Final = 0.5
"""Two prompts without messages are one conversation's where they share so much of the shorter one."""


class PreviousPrompt:
    """A prompt that was computed, by the target `worker`. `keys`: chunks by which it is found where its session has no
    name; `is_short`: it has none, and its key is that of a beginning of its first chunk."""

    def __init__(
        self,
        scope: Scope,
        ids: array[int],
        outline: Outline | None,
        worker: str,
        at_s: float,
        session: str | None,
        keys: tuple[int, ...],
        is_short: bool = False,
    ) -> None:
        self.scope, self.ids, self.outline, self.worker, self.at_s = scope, ids, outline, worker, at_s
        self.session, self.keys, self.is_short = session, keys, is_short
        self.answer_tokens = 0
        """Generated, once that is known."""
        self.bytes = PROMPT_BYTES + 4 * len(ids)
        if outline is not None:
            self.bytes += OUTLINE_BYTES + len(outline.messages) + len(outline.tools)

    @property
    def messages(self) -> int:
        """How many it had."""
        return 0 if self.outline is None else self.outline.total

    @property
    def known_tokens(self) -> int:
        """Of prompt and answer, what a cache can hold: the last token was never computed."""
        return len(self.ids) + max(self.answer_tokens - 1, 0)


class PromptHistory:
    """One a process."""

    def __init__(self, bytes_max: int, keep_s: float, shared: Callable[[array[int], array[int]], int]) -> None:
        """`shared`: how many tokens two prompts begin with alike."""
        self._bytes_max, self._keep_s, self._shared = bytes_max, keep_s, shared
        self._pasts: OrderedDict[int, PreviousPrompt] = OrderedDict()
        """id -> prompt, the longest unused first."""
        self._sessions: dict[str, list[PreviousPrompt]] = {}
        """The last first."""
        self._keys: dict[int, PreviousPrompt] = {}
        self.used_bytes = 0
        self.shorts = 0
        """Prompts that are found by beginnings of a chunk: where there are none, nobody need ask for these."""

    def __len__(self) -> int:
        return len(self._pasts)

    def goes_on(self, ids: array[int], scope: Scope, session: str | None, keys: Sequence[int]) -> PreviousPrompt | None:
        """The prompt of which this one is a continuation, every token of it. Cheap, and usually all there is to ask."""
        for past in self._candidates(session, None, keys):
            if past.scope == scope and self._begins(ids, past.ids):
                return past
        return None

    def before(
        self,
        ids: array[int],
        scope: Scope,
        outline: Outline | None,
        session: str | None,
        parent: str | None,
        keys: Sequence[int],
    ) -> tuple[PreviousPrompt, int] | None:
        """(the prompt that this one most likely goes on from, tokens that both begin with); None for what is new."""
        candidates = self._candidates(session, parent, keys)
        if outline is not None:
            candidates = [
                past for past in candidates if past.outline is None or not is_side_request(past.outline, outline)
            ]
        if len(candidates) == 1 and _share_message(outline, candidates[0], session):  # as usual: it need not be counted
            return candidates[0], self._shared(candidates[0].ids, ids)
        best, found = (-1, -1), None
        own = set(message_digests(outline, said=session is None)) if outline is not None and candidates else None
        for past in candidates:
            common = self._shared(past.ids, ids)
            likeness = _similarity(past, own, common, len(ids))
            if likeness is not None and (likeness, common) > best:
                best, found = (likeness, common), (past, common)
        return found

    def _begins(self, ids: array[int], past: array[int]) -> bool:
        count = len(past)
        return 0 < count <= len(ids) and ids[count - 1] == past[count - 1] and self._shared(past, ids) == count

    def put(self, past: PreviousPrompt, instead: PreviousPrompt | None = None) -> None:
        """It was computed; `instead` of the one it goes on from."""
        if instead is not None and instead.session == past.session:
            self._drop(instead)
        if past.bytes > self._bytes_max:
            return
        self._pasts[id(past)] = past
        self.used_bytes += past.bytes
        self.shorts += past.is_short
        for key in past.keys:
            self._keys[key] = past
        if past.session is not None:
            branches = self._sessions.setdefault(past.session, [])
            branches.insert(0, past)
            for old in branches[BRANCHES_MAX:]:
                self._drop(old)
        while self.used_bytes > self._bytes_max:
            self._drop(next(iter(self._pasts.values())))

    def forget(self, session: str) -> None:
        """It is over."""
        for past in list(self._sessions.get(session, ())):
            self._drop(past)

    def expire(self, now: float) -> None:
        """Forget what is too old."""
        while self._pasts:
            past = next(iter(self._pasts.values()))
            if now - past.at_s < self._keep_s:
                return
            self._drop(past)

    def _candidates(self, session: str | None, parent: str | None, keys: Sequence[int]) -> list[PreviousPrompt]:
        if session is None:
            found, known = list[PreviousPrompt](), self._keys
            for place in range(len(keys) - 1, -1, -1):  # the longest common beginning first
                past = known.get(keys[place])
                if past is not None and past not in found:
                    found.append(past)
                    if len(found) == BRANCHES_MAX:
                        break
            return found
        return self._sessions.get(session) or (self._sessions.get(parent, []) if parent is not None else [])

    def _drop(self, past: PreviousPrompt) -> None:
        if self._pasts.pop(id(past), None) is None:
            return
        self.used_bytes -= past.bytes
        self.shorts -= past.is_short
        for key in past.keys:
            if self._keys.get(key) is past:
                del self._keys[key]
        if past.session is not None:
            branches = self._sessions[past.session]
            branches.remove(past)
            if not branches:
                del self._sessions[past.session]

    def check_invariants(self) -> None:
        assert self.used_bytes == sum(past.bytes for past in self._pasts.values()) <= self._bytes_max
        assert self.shorts == sum(past.is_short for past in self._pasts.values())
        named = [past for branches in self._sessions.values() for past in branches]
        assert {id(past) for past in named} == {i for i, past in self._pasts.items() if past.session is not None}
        assert all(0 < len(branches) <= BRANCHES_MAX for branches in self._sessions.values())
        assert {id(past) for past in self._keys.values()} <= set(self._pasts)


def _share_message(outline: Outline | None, past: PreviousPrompt, session: str | None) -> bool:
    """Whether a message, at its place, is the same in both: then `_likeness` finds one."""
    if outline is None or past.outline is None:
        return False
    own, old = unpack_words(outline), unpack_words(past.outline)
    for at in range(0, min(len(own), len(old)), WORDS):
        if own[at + 2] == old[at + 2] and (
            (session is not None or is_dialogue(own[at + 3])) and (past.session is not None or is_dialogue(old[at + 3]))
        ):
            return True
    return False


def _similarity(past: PreviousPrompt, own: set[int] | None, common: int, tokens: int) -> int | None:
    """`own`: the messages of the prompt that it may have come before."""
    if own is not None and past.outline is not None:
        return len(own.intersection(message_digests(past.outline, said=past.session is None))) or None
    return common if past.session is not None or common >= _SHARED_RATIO_MIN * min(len(past.ids), tokens) else None
