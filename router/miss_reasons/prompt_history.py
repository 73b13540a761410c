"""The last prompts of conversations, as token ids and digests without text. No I/O.

Finds the earlier prompt that a new one continues: by the name of its session or of the parent session, or else by a
common beginning. Invariants: `used_bytes` is the sum of the prompts' sizes and at most `bytes_max`; every prompt is
found by its session, or by those of its keys that no later prompt has; the oldest prompt is dropped first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from typing import Final

from router.decide.messages import RouteRequest
from router.miss_reasons.differences import SYSTEM, is_side_request
from router.prompting.outline import ROLE_BITS, Outline

BRANCHES_MAX: Final = 4
"""Most conversations under one session's name: agents make requests for titles and summaries in between."""
PROMPT_BYTES: Final = 1_100
"""Memory of a prompt besides its ids, keys and outline."""
KEY_BYTES: Final = 40
_SHARED_RATIO_MIN: Final = 0.5
"""Share of the shorter of two prompts without messages that both begin with, if they are of one conversation."""


@dataclass(eq=False)
class AnalyzedPrompt:
    """A prompt that is compared with the last one of its conversation, and is then stored as the last one itself."""

    request_id: str
    """Id by which the client knows the request."""
    route: RouteRequest
    """The request, with its scope and session."""
    token_ids: array[int]
    outline: Outline | None
    """Digests of the messages; None for a prompt that is no chat."""
    chunk_keys: Sequence[int] = ()
    """Digest of the prompt up to the end of each chunk; empty if a session's name identifies the conversation."""
    opening_key: int | None = None
    """Digest of the first message of the user; None if a session's name identifies the conversation.

    It distinguishes conversations with a long common system prompt, which have equal `chunk_keys`.
    """
    is_history_incomplete: bool = False
    """Whether the conversation may have had earlier prompts that were not stored."""
    is_sampled: bool = True
    """Whether the metrics count the request by reason, as its conversation belongs to the sampled share."""
    worker: str = ""
    """Target that has computed the prompt; empty until the prompt is stored."""
    computed_s: float = 0.0
    answer_tokens: int = 0
    """Tokens of the answer; 0 until they are known."""

    @property
    def session(self) -> str | None:
        """Name of the session; None if it has none."""
        return self.route.session

    @property
    def storage_keys(self) -> list[int]:
        """Digests by which later prompts find this one; none if its session has a name, which finds it.

        A digest covers a beginning of the prompt. Of 8 chunks those of 1, 2, 4 and 8 are taken, so that a prompt that
        was edited in the middle is still found by a shorter beginning.
        """
        if self.session is not None:
            return []
        chunk_counts = [len(self.chunk_keys)]
        while chunk_counts[-1]:
            chunk_counts.append(chunk_counts[-1] // 2)
        keys = [self.chunk_keys[count - 1] for count in reversed(chunk_counts) if count]
        return keys if self.opening_key is None else [*keys, self.opening_key]

    @property
    def size_bytes(self) -> int:
        size_bytes = PROMPT_BYTES + KEY_BYTES * len(self.chunk_keys) + 4 * len(self.token_ids)
        if self.outline is not None:
            size_bytes += self.outline.memory_bytes
        return size_bytes

    @property
    def message_count(self) -> int:
        """Number of messages; 0 without an outline."""
        return 0 if self.outline is None else self.outline.message_count

    @property
    def distinctive_digests(self) -> set[int]:
        """Content digests of the messages by which conversations are told apart; none without an outline.

        Without a session's name these are not those of system prompts, which many conversations share.
        """
        if self.outline is None:
            return set()
        messages = self.outline.messages
        if self.session is not None:
            return set(messages.content_digests)
        return {digest for digest, kind in zip(messages.content_digests, messages.kinds) if kind & ROLE_BITS != SYSTEM}

    @property
    def cacheable_tokens(self) -> int:
        """Tokens of prompt and answer that can be cached: the last one was never computed."""
        return len(self.token_ids) + max(self.answer_tokens - 1, 0)


@dataclass(frozen=True)
class PromptMatch:
    """A new prompt, and an earlier one that the new one most likely continues."""

    previous: AnalyzedPrompt
    prompt: AnalyzedPrompt
    common_tokens: int
    """Tokens with which both prompts begin."""

    @property
    def is_continuation(self) -> bool:
        """Whether the new prompt begins with the whole earlier one."""
        return self.common_tokens == len(self.previous.token_ids)

    @property
    def repeated_tokens(self) -> int:
        """Tokens of the earlier prompt and of its answer with which the new prompt begins, as far as is known."""
        return self.previous.cacheable_tokens if self.is_continuation else self.common_tokens

    @property
    def is_same_session(self) -> bool:
        """Whether both are of the same session; False if the earlier prompt is of the parent session."""
        return self.previous.session == self.prompt.session

    @property
    def scope_difference(self) -> str | None:
        """Field in which the prompts differ (model, lora, salt), so that they share no cached blocks; None: in none."""
        old, new = self.previous.route.scope, self.prompt.route.scope
        return next((name for name in ("model", "lora", "salt") if getattr(old, name) != getattr(new, name)), None)

    def count_common(self, prompt_digests: Set[int]) -> int:
        """Return the number of common messages if both prompts are chats, else of common tokens.

        `prompt_digests`: `distinctive_digests` of the new prompt, which are computed once for all earlier ones.
        """
        if self.previous.outline is None or self.prompt.outline is None:
            return self.common_tokens
        return len(self.previous.distinctive_digests & prompt_digests)

    def is_same_conversation(self, common_count: int) -> bool:
        """Return whether both are of one conversation. `common_count`: result of `count_common`.

        Chats need a common message, other prompts a session or a common beginning. An agent's request for a title or a
        summary is not part of the conversation, though it has the session's name.
        """
        old, new = self.previous.outline, self.prompt.outline
        if old is not None and new is not None:
            return common_count > 0 and not is_side_request(old, new)
        shorter_prompt_tokens = min(len(self.previous.token_ids), len(self.prompt.token_ids))
        return self.previous.session is not None or self.common_tokens >= _SHARED_RATIO_MIN * shorter_prompt_tokens


class PromptHistory:
    """Last prompts of the conversations of a process."""

    def __init__(
        self, bytes_max: int, ttl_s: float, count_common_tokens: Callable[[array[int], array[int]], int]
    ) -> None:
        """`count_common_tokens` returns the length of the common beginning of two prompts."""
        self._bytes_max = bytes_max
        self._ttl_s = ttl_s
        self._count_common_tokens = count_common_tokens
        self._prompts: OrderedDict[AnalyzedPrompt, None] = OrderedDict()
        """All prompts, the oldest first."""
        self._prompts_by_session: dict[str, list[AnalyzedPrompt]] = {}
        """Prompts of each named session, the newest first."""
        self._prompt_by_key: dict[int, AnalyzedPrompt] = {}
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def find_match(self, prompt: AnalyzedPrompt) -> PromptMatch | None:
        """Return the stored prompt that a new one continues; None if its conversation is unknown."""
        return self._find_stored_prefix(prompt) or self._find_similar(prompt)

    def _find_stored_prefix(self, prompt: AnalyzedPrompt) -> PromptMatch | None:
        """Return a stored prompt of the same conversation and model that is a prefix of the new prompt, or None.

        Without a session's name, stored prompts are found by digests of their beginnings, the longest first.
        """
        if prompt.session is not None:
            candidates = self._prompts_by_session.get(prompt.session, [])
        else:
            opening_keys = [] if prompt.opening_key is None else [prompt.opening_key]
            candidates = self._find_by_keys([*opening_keys, *reversed(prompt.chunk_keys)])
        matches = (self._match(candidate, prompt) for candidate in candidates)
        return next((match for match in matches if match.is_continuation and match.scope_difference is None), None)

    def _find_similar(self, prompt: AnalyzedPrompt) -> PromptMatch | None:
        """Return the stored prompt of a conversation that has most in common with its new prompt, or None."""
        candidates = self._find_similar_candidates(prompt)
        prompt_digests = prompt.distinctive_digests if candidates else set[int]()
        best_match, most_common = None, (-1, -1)
        for match in (self._match(candidate, prompt) for candidate in candidates):
            common_count = match.count_common(prompt_digests)
            if match.is_same_conversation(common_count) and (common_count, match.common_tokens) > most_common:
                best_match, most_common = match, (common_count, match.common_tokens)
        return best_match

    def _match(self, previous: AnalyzedPrompt, prompt: AnalyzedPrompt) -> PromptMatch:
        return PromptMatch(previous, prompt, self._count_common_tokens(previous.token_ids, prompt.token_ids))

    def _find_similar_candidates(self, prompt: AnalyzedPrompt) -> list[AnalyzedPrompt]:
        """Return the prompts of a session, or else of its parent session; without a name, those that begin alike."""
        session, parent = prompt.session, prompt.route.parent
        if session is None:
            return self._find_by_keys(reversed(prompt.chunk_keys))
        candidates = self._prompts_by_session.get(session, [])
        return candidates or ([] if parent is None else self._prompts_by_session.get(parent, []))

    def _find_by_keys(self, keys: Iterable[int]) -> list[AnalyzedPrompt]:
        """Return the first BRANCHES_MAX prompts that have one of the keys, in the order of the keys."""
        prompts = (self._prompt_by_key[key] for key in keys if key in self._prompt_by_key)
        return list(islice(dict.fromkeys(prompts), BRANCHES_MAX))

    def add(self, prompt: AnalyzedPrompt, replaces: AnalyzedPrompt | None = None) -> None:
        """Store a prompt that later ones can find, in place of `replaces`. If there is no room, drop the oldest."""
        if replaces is not None and replaces.session == prompt.session:
            self._drop(replaces)
        can_be_found = prompt.session is not None or prompt.storage_keys
        if not can_be_found or prompt.size_bytes > self._bytes_max:
            return
        self._prompts[prompt] = None
        self.used_bytes += prompt.size_bytes
        for key in prompt.storage_keys:
            self._prompt_by_key[key] = prompt
        if prompt.session is not None:
            branches = self._prompts_by_session.setdefault(prompt.session, [])
            branches.insert(0, prompt)
            for excess in branches[BRANCHES_MAX:]:
                self._drop(excess)
        while self.used_bytes > self._bytes_max:
            self._drop(next(iter(self._prompts)))

    def forget_session(self, session: str) -> None:
        """Drop the prompts of a session that has ended."""
        for prompt in list(self._prompts_by_session.get(session, ())):
            self._drop(prompt)

    def expire(self, now: float) -> None:
        """Drop prompts older than `ttl_s`."""
        while self._prompts:
            oldest = next(iter(self._prompts))
            if now - oldest.computed_s < self._ttl_s:
                return
            self._drop(oldest)

    def _drop(self, prompt: AnalyzedPrompt) -> None:
        """Remove a prompt from every index; do nothing if it was removed before."""
        if prompt not in self._prompts:
            return
        del self._prompts[prompt]
        self.used_bytes -= prompt.size_bytes
        for key in prompt.storage_keys:
            if self._prompt_by_key.get(key) is prompt:
                del self._prompt_by_key[key]
        if prompt.session is not None:
            branches = self._prompts_by_session[prompt.session]
            branches.remove(prompt)
            if not branches:
                del self._prompts_by_session[prompt.session]

    def check_invariants(self) -> None:
        assert self.used_bytes == sum(prompt.size_bytes for prompt in self._prompts) <= self._bytes_max
        named_prompts = {prompt for prompt in self._prompts if prompt.session is not None}
        assert {prompt for branches in self._prompts_by_session.values() for prompt in branches} == named_prompts
        assert all(0 < len(branches) <= BRANCHES_MAX for branches in self._prompts_by_session.values())
        assert set(self._prompt_by_key.values()) <= self._prompts.keys()
