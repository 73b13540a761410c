"""The last prompts of conversations, as token ids and digests without text. No I/O.

Finds the earlier prompt that a new one continues: by the name of its session or of the parent session, or else by a
common beginning. Invariants: `used_bytes` is the sum of the prompts' sizes and at most `bytes_max`; every prompt is
found by its session or by each of its keys; the oldest prompt is dropped first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from router.index.protocol import Scope
from router.miss_reasons.differences import is_dialogue, is_side_request, select_message_digests, unpack_words
from router.prompting.chat_outline import FINGERPRINT_FIELDS, Outline

BRANCHES_MAX: Final = 4
"""Most conversations under one session's name: agents make requests for titles and summaries in between."""
PROMPT_BYTES: Final = 600
"""Memory of a prompt besides its ids and outline."""
OUTLINE_BYTES: Final = 256
"""Memory of an outline besides its numbers."""
_SHARED_RATIO_MIN: Final = 0.5
"""Share of the shorter of two prompts without messages that both begin with, if they are of one conversation."""


class PreviousPrompt:
    """A prompt that was computed by the target `worker`.

    `keys`: digests by which it is found, where its session has no name. `is_short`: it is shorter than a chunk.
    """

    def __init__(
        self,
        scope: Scope,
        token_ids: array[int],
        outline: Outline | None,
        worker: str,
        computed_s: float,
        session: str | None,
        keys: tuple[int, ...],
        is_short: bool = False,
    ) -> None:
        self.scope = scope
        self.token_ids = token_ids
        self.outline = outline
        self.worker = worker
        self.computed_s = computed_s
        self.session, self.keys, self.is_short = session, keys, is_short
        self.answer_tokens = 0
        """Tokens of the answer; 0 until they are known."""
        self.size_bytes = PROMPT_BYTES + 4 * len(token_ids)
        if outline is not None:
            self.size_bytes += OUTLINE_BYTES + len(outline.messages) + len(outline.tools)

    @property
    def message_count(self) -> int:
        """Number of messages; 0 without an outline."""
        return 0 if self.outline is None else self.outline.message_count

    @property
    def cacheable_tokens(self) -> int:
        """Tokens of prompt and answer that can be cached: the last one was never computed."""
        return len(self.token_ids) + max(self.answer_tokens - 1, 0)


class PromptHistory:
    """Last prompts of the conversations of a process."""

    def __init__(
        self, bytes_max: int, ttl_s: float, count_common_tokens: Callable[[array[int], array[int]], int]
    ) -> None:
        """`count_common_tokens` returns the length of the common beginning of two prompts."""
        self._bytes_max, self._ttl_s, self._count_common_tokens = bytes_max, ttl_s, count_common_tokens
        self._prompts: OrderedDict[int, PreviousPrompt] = OrderedDict()
        """Python id of a prompt -> prompt, the oldest first."""
        self._by_session: dict[str, list[PreviousPrompt]] = {}
        """Session name -> its prompts, the newest first."""
        self._by_key: dict[int, PreviousPrompt] = {}
        self.used_bytes = 0
        self.short_prompts = 0
        """Number of prompts without a whole chunk: if there are none, short keys need not be computed."""

    def __len__(self) -> int:
        return len(self._prompts)

    def find_continued(
        self, token_ids: array[int], scope: Scope, session: str | None, keys: Sequence[int]
    ) -> PreviousPrompt | None:
        """Return a prompt of which all tokens are the beginning of this one. Cheap, and usually found."""
        for prompt in self._candidates(session, None, keys):
            if prompt.scope == scope and self._starts_with(token_ids, prompt.token_ids):
                return prompt
        return None

    def find_previous(
        self,
        token_ids: array[int],
        outline: Outline | None,
        session: str | None,
        parent: str | None,
        keys: Sequence[int],
    ) -> tuple[PreviousPrompt, int] | None:
        """Return the prompt that this one most likely continues, and the length of their common beginning."""
        candidates = self._candidates(session, parent, keys)
        if outline is not None:
            candidates = [
                prompt
                for prompt in candidates
                if prompt.outline is None or not is_side_request(prompt.outline, outline)
            ]
        # As usual, there is nothing to compare.
        if len(candidates) == 1 and _share_message(outline, candidates[0], session):
            return candidates[0], self._count_common_tokens(candidates[0].token_ids, token_ids)
        best_score, best_match = (-1, -1), None
        digests = (
            set(select_message_digests(outline, without_system=session is None))
            if outline is not None and candidates
            else None
        )
        for prompt in candidates:
            common_tokens = self._count_common_tokens(prompt.token_ids, token_ids)
            similarity = _similarity(prompt, digests, common_tokens, len(token_ids))
            if similarity is not None and (similarity, common_tokens) > best_score:
                best_score, best_match = (similarity, common_tokens), (prompt, common_tokens)
        return best_match

    def _starts_with(self, token_ids: array[int], prefix: array[int]) -> bool:
        count = len(prefix)
        return (
            0 < count <= len(token_ids)
            and token_ids[count - 1] == prefix[count - 1]
            and self._count_common_tokens(prefix, token_ids) == count
        )

    def add(self, prompt: PreviousPrompt, replaces: PreviousPrompt | None = None) -> None:
        """Add a prompt that was computed. `replaces`: the prompt that it continues, which is dropped."""
        if replaces is not None and replaces.session == prompt.session:
            self._drop(replaces)
        if prompt.size_bytes > self._bytes_max:
            return
        self._prompts[id(prompt)] = prompt
        self.used_bytes += prompt.size_bytes
        self.short_prompts += prompt.is_short
        for key in prompt.keys:
            self._by_key[key] = prompt
        if prompt.session is not None:
            branches = self._by_session.setdefault(prompt.session, [])
            branches.insert(0, prompt)
            for excess in branches[BRANCHES_MAX:]:
                self._drop(excess)
        while self.used_bytes > self._bytes_max:
            self._drop(next(iter(self._prompts.values())))

    def forget_session(self, session: str) -> None:
        """Drop the prompts of a session that has ended."""
        for prompt in list(self._by_session.get(session, ())):
            self._drop(prompt)

    def expire(self, now: float) -> None:
        """Drop prompts older than `ttl_s`."""
        while self._prompts:
            prompt = next(iter(self._prompts.values()))
            if now - prompt.computed_s < self._ttl_s:
                return
            self._drop(prompt)

    def _candidates(self, session: str | None, parent: str | None, keys: Sequence[int]) -> list[PreviousPrompt]:
        if session is None:
            candidates, by_key = list[PreviousPrompt](), self._by_key
            for i in range(len(keys) - 1, -1, -1):  # the longest prefix first
                prompt = by_key.get(keys[i])
                if prompt is not None and prompt not in candidates:
                    candidates.append(prompt)
                    if len(candidates) == BRANCHES_MAX:
                        break
            return candidates
        return self._by_session.get(session) or (self._by_session.get(parent, []) if parent is not None else [])

    def _drop(self, prompt: PreviousPrompt) -> None:
        if self._prompts.pop(id(prompt), None) is None:
            return
        self.used_bytes -= prompt.size_bytes
        self.short_prompts -= prompt.is_short
        for key in prompt.keys:
            if self._by_key.get(key) is prompt:
                del self._by_key[key]
        if prompt.session is not None:
            branches = self._by_session[prompt.session]
            branches.remove(prompt)
            if not branches:
                del self._by_session[prompt.session]

    def check_invariants(self) -> None:
        assert self.used_bytes == sum(prompt.size_bytes for prompt in self._prompts.values()) <= self._bytes_max
        assert self.short_prompts == sum(prompt.is_short for prompt in self._prompts.values())
        session_prompts = [prompt for branches in self._by_session.values() for prompt in branches]
        assert {id(prompt) for prompt in session_prompts} == {
            i for i, prompt in self._prompts.items() if prompt.session is not None
        }
        assert all(0 < len(branches) <= BRANCHES_MAX for branches in self._by_session.values())
        assert {id(prompt) for prompt in self._by_key.values()} <= set(self._prompts)


def _share_message(outline: Outline | None, previous: PreviousPrompt, session: str | None) -> bool:
    """Return whether both prompts have the same message at the same place, so that `_similarity` is above 0."""
    if outline is None or previous.outline is None:
        return False
    new_words, old_words = unpack_words(outline), unpack_words(previous.outline)
    for offset in range(0, min(len(new_words), len(old_words)), FINGERPRINT_FIELDS):
        if new_words[offset + 2] == old_words[offset + 2] and (
            (session is not None or is_dialogue(new_words[offset + 3]))
            and (previous.session is not None or is_dialogue(old_words[offset + 3]))
        ):
            return True
    return False


def _similarity(
    previous: PreviousPrompt, digests: set[int] | None, common_tokens: int, prompt_tokens: int
) -> int | None:
    """Return how much an earlier prompt has in common with the new one; None for too little.

    `digests`: digests of the new prompt's messages; None if it has none.
    """
    if digests is not None and previous.outline is not None:
        return (
            len(digests.intersection(select_message_digests(previous.outline, without_system=previous.session is None)))
            or None
        )
    return (
        common_tokens
        if previous.session is not None
        or common_tokens >= _SHARED_RATIO_MIN * min(len(previous.token_ids), prompt_tokens)
        else None
    )
