"""Cache of conversations that may return, found by the first bytes of their bodies. Pure; of one event loop.

Owns what is stored of a conversation, which are stored and how one is found; router/prompting/conversation_suffix.py
reads the suffix behind a cached prefix. A prefix is looked up by a digest of its bytes, then compared in full. Bounded
in bytes, least recently used first out. Entries cross between processes (router/prompting/prompt_worker_pool.py).
"""

from __future__ import annotations

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from prompts.bpe_encoder import begin_alike, digests, digests_among
from prompts.routing import ApiKind, RoutingRequest
from prompts.schemas import Message

BODY_BYTES_MIN = 1024
"""Bytes of a body below which it is not worth caching."""
BODY_BYTES_MAX = 4 << 20
CANDIDATES_MAX = 8
"""Conversations stored under one digest of a prefix."""
CHECKPOINTS_MAX = 4
RECENT_DIGESTS_MAX = 65_536
"""Digests remembered of bodies that are not cached."""
_Key = int
"""Digest of a prefix: eight lengths in each doubling, from LENGTH_MIN on."""

LOCAL_FIELDS = 4
"""Number of fields of `CachedConversation`, its last, that do not cross to another process."""
_CHECKPOINT_BYTES = 1000
_DECODED_BYTES_A_BYTE = 4
"""Bytes that what was decoded takes, for each byte of a body."""


class Checkpoint(msgspec.Struct, frozen=True, eq=False):
    """A position between two messages of a body up to which it may be reused."""

    body_end: int
    """Bytes of the body before the checkpoint."""
    message_count: int
    """Messages of the chat before the checkpoint."""
    token_count: int
    """Token ids of the text before `last_message`."""
    char_count: int
    """Of that text."""
    tail_text: str
    """Text of `last_message`, up to the first position where any text is cut into segments."""
    tail_token_count: int
    """Token ids of `tail_text`."""
    object_count: int
    """Brackets in the body before the checkpoint."""
    second_last_message: Message
    last_message: Message
    """The two messages before it, as the chat has them."""

    @property
    def token_count_max(self) -> int:
        return self.token_count + self.tail_token_count

    def without_tail(self) -> Checkpoint:
        """The same, where its ids are not among those of a prompt."""
        return msgspec.structs.replace(self, tail_text="", tail_token_count=0)


class CachedConversation(msgspec.Struct, eq=False):
    """A conversation's body and what was read of it. Not changed once it is in the cache."""

    kind: ApiKind
    messages_start: int
    """Where the body's array of messages begins."""
    template_digest: bytes
    """Digest of the template's inputs besides the messages."""
    system_messages: int
    """Messages of the chat that are not from the array: 1 where there is a system text."""
    opening_messages: list[Message]
    """The chat's messages up to the first that is not the system's."""
    message_fingerprints: bytes
    """Fingerprints of the messages up to the last checkpoint, as router/prompting/chat_outline.py has them."""
    tool_fingerprints: bytes
    """Fingerprints of the tools, which `template_digest` covers too."""
    options_digest: int
    checkpoints: list[Checkpoint]
    """The furthest last."""
    body: bytes
    token_ids: array[int]
    """Ids of the whole prompt, or up to the tail of its last checkpoint at the least."""
    messages_end: int = 0
    """Where the body's array of messages ends."""
    bare_request: RoutingRequest | None = None
    """A chat without its messages; None for another kind."""
    as_sent: bool = False
    """How its template was given messages."""
    volatile_messages: int = 1
    """Messages at the end of a body that are not reused, as they may change."""
    model: str = ""
    """Whose tokenizer and template it was read with."""
    first_message_digest: int | None = None
    """Digest of what its user said first (router/prompting/conversation_turn.py)."""
    prompt_memory: object = None
    """The index's memory of a prompt that this one begins; it stays in this process."""
    is_memory_exact: bool = False
    """Whether that prompt has exactly these ids."""
    prompt_memory_bytes: int = 0
    """Bytes of `prompt_memory` besides `token_ids`."""

    def __reduce__(self) -> tuple[Callable[..., CachedConversation], tuple[object, ...]]:
        """Without what stays in this process: what comes last, from `first_message_digest` on."""
        return CachedConversation, msgspec.structs.astuple(self)[:-LOCAL_FIELDS]

    @property
    def memory_bytes(self) -> int:
        """Estimated memory of this entry."""
        size_bytes = (
            len(self.body)
            + self.token_ids.itemsize * len(self.token_ids)
            + len(self.message_fingerprints)
            + len(self.tool_fingerprints)
        )
        size_bytes += _CHECKPOINT_BYTES * len(self.checkpoints) + sum(
            [len(checkpoint.tail_text) for checkpoint in self.checkpoints]
        )
        if self.bare_request is not None:
            size_bytes += _DECODED_BYTES_A_BYTE * (self.messages_start + len(self.body) - self.messages_end)
        return (
            size_bytes
            + self.prompt_memory_bytes
            + 1000
            + sum([len(str(message.get("content"))) for message in self.opening_messages])
        )


class ConversationCache:
    """The cache of one process."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._seed = secrets.randbits(64)
        self._by_digest: dict[_Key, list[CachedConversation]] = {}
        """Digest of a prefix -> conversations that have it, the newest at the end."""
        self._entries: OrderedDict[int, tuple[CachedConversation, int, set[_Key]]] = OrderedDict()
        """id -> conversation, its bytes, its keys in `_by_digest`; least recently used first."""
        self._recent_digests: set[_Key] = set()
        self._older_digests: set[_Key] = set()
        """Digests of bodies that might come back. When there are too many, the older ones are forgotten."""
        self.used_bytes = 0
        self.hits = self.misses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find_longest_prefix(self, kind: ApiKind, body: bytes) -> tuple[CachedConversation, Checkpoint] | None:
        """Return the conversation with which the body begins, and the furthest checkpoint that both share."""
        by_digest = self._by_digest
        for keys_max in (1, len(body)):  # the first is it, nearly always
            keys = digests_among(body, BODY_BYTES_MIN, self._seed, by_digest, keys_max)
            for key in keys[keys_max > 1 :]:
                for conversation in reversed(by_digest[key]):
                    for checkpoint in reversed(conversation.checkpoints):
                        if conversation.kind == kind and begin_alike(body, conversation.body, checkpoint.body_end):
                            self._entries.move_to_end(id(conversation))
                            self.hits += 1
                            return conversation, checkpoint
            if not keys:
                break
        self.misses += 1
        return None

    def is_recurring(self, body: bytes) -> bool:
        """Whether a quarter of the body began an earlier body that was asked about here."""
        prefix_digests = self._prefix_digests(body)
        longest_index = len(prefix_digests) - 1
        while (
            longest_index >= 0
            and prefix_digests[longest_index] not in self._recent_digests
            and prefix_digests[longest_index] not in self._older_digests
        ):
            longest_index -= 1
        if len(self._recent_digests) + len(prefix_digests) > RECENT_DIGESTS_MAX // 2:
            self._older_digests, self._recent_digests = self._recent_digests, set()
        self._recent_digests.update(prefix_digests)
        return longest_index >= 0 and 4 * _prefix_bytes(longest_index) >= len(body)

    def _prefix_digests(self, body: bytes, end: int = BODY_BYTES_MAX) -> list[_Key]:
        return digests(body, BODY_BYTES_MIN, self._seed, end)

    def _keys_of(self, conversation: CachedConversation) -> set[_Key]:
        """Return the keys under which each of its checkpoints is found."""
        keys_of_checkpoints = [
            self._prefix_digests(conversation.body, checkpoint.body_end) for checkpoint in conversation.checkpoints
        ]
        return {keys[-1] for keys in keys_of_checkpoints if keys}

    def store(self, conversation: CachedConversation, predecessor: CachedConversation | None = None) -> None:
        """Store a conversation; it replaces `predecessor`, which it continues."""
        if predecessor is not None:
            self._drop(predecessor)
        size_bytes, keys = conversation.memory_bytes, self._keys_of(conversation)
        if size_bytes > self.max_bytes // 4 or not keys:
            return
        self._entries[id(conversation)] = conversation, size_bytes, keys
        self.used_bytes += size_bytes
        for key in keys:
            candidates = self._by_digest.setdefault(key, [])
            candidates.append(conversation)
            if len(candidates) > CANDIDATES_MAX:
                self._drop(candidates[0])
        while self.used_bytes > self.max_bytes:
            self._drop(next(iter(self._entries.values()))[0])

    def _drop(self, conversation: CachedConversation) -> None:
        entry = self._entries.pop(id(conversation), None)
        if entry is None:
            return
        _, size_bytes, keys = entry
        self.used_bytes -= size_bytes
        for key in keys:
            candidates = self._by_digest[key]
            candidates[:] = [candidate for candidate in candidates if candidate is not conversation]
            if not candidates:
                del self._by_digest[key]

    def check_invariants(self) -> None:
        """For tests: the sum is right and bounded; each entry is found by each of its keys, and nothing else is."""
        assert self.used_bytes == sum(size for _, size, _ in self._entries.values()) <= self.max_bytes
        expected: dict[_Key, set[int]] = {}
        for conversation, size, keys in self._entries.values():
            assert (size, keys) == (conversation.memory_bytes, self._keys_of(conversation))
            for key in keys:
                expected.setdefault(key, set()).add(id(conversation))
        assert {
            key: {id(conversation) for conversation in candidates} for key, candidates in self._by_digest.items()
        } == expected
        assert all(len(candidates) <= CANDIDATES_MAX for candidates in self._by_digest.values())
        assert len(self._recent_digests) + len(self._older_digests) <= RECENT_DIGESTS_MAX


def _prefix_bytes(number: int) -> int:
    """Return the length of the prefix that the digest of this number covers."""
    return (BODY_BYTES_MIN << number // 8) * (8 + number % 8) // 8
