"""Cache of conversations: hash of a body before a message boundary -> token ids of the prompt up to there.

For one event loop, without I/O. Bounded in bytes; the least recently used conversation is dropped first.
"""

from __future__ import annotations

import secrets
from array import array
from bisect import bisect_right
from collections import OrderedDict
from itertools import chain, pairwise
from typing import Any, Final, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from prompts.chat_completions import Message
from prompts.routing import ApiKind, RoutingRequest
from router.prompting.outline import Outline
from router.prompting.placeholder_messages import RenderedPlaceholders

BODY_BYTES_MIN = 1024
"""Smaller bodies are not cached."""
BODY_BYTES_MAX = 4 << 20
LOCATIONS_MAX = 64
"""Most boundaries stored under one digest."""
KEYS_MAX = 8
"""Most prefixes of a body after which boundaries are compared with it."""
PREFIX_LENGTHS: Final = [
    (BODY_BYTES_MIN << doublings) * (8 + eighths) // 8
    for doublings in range((BODY_BYTES_MAX // BODY_BYTES_MIN).bit_length())
    for eighths in range(8)
]
"""Lengths of the prefixes of bodies under whose digests boundaries are stored: eight for each doubling."""
_PREFIX_PARTS: Final = [slice(start, end) for start, end in pairwise([0, *PREFIX_LENGTHS])]
"""The part of each prefix that the next shorter one lacks."""
BOUNDARIES_MAX = 4
"""Most boundaries of a conversation, and most that are tried for one body."""
_ENTRY_BYTES = 1000
"""Estimated bytes of an entry, besides its contents."""
_BOUNDARY_BYTES = 4000
"""Estimated bytes of a boundary, besides its rendered placeholders and messages as long as these."""
_DECODED_BYTES_PER_BYTE = 4
"""Memory of decoded JSON for each of its bytes."""


def is_cacheable(kind: ApiKind, body_bytes: int) -> bool:
    """Return whether the conversation of a body of this size may be cached."""
    return kind in ("chat", "messages") and BODY_BYTES_MIN <= body_bytes <= BODY_BYTES_MAX


class Boundary(msgspec.Struct, frozen=True, eq=False):
    """A place between two messages of a request body, at which the token ids of its prompt can be cut too.

    For example, `{"messages": [A, B, C], ...}` has a boundary after B. A later body with the same bytes up to there has
    the same first `token_count` token ids.
    """

    body_end: int
    """Bytes of the body before the boundary."""
    message_count: int
    """Messages of the chat before the boundary."""
    token_count: int
    """Token ids of the prompt before the boundary."""
    placeholders: RenderedPlaceholders
    """Short messages that are rendered in place of those before the boundary, when new messages are."""
    starts_turn: bool
    """Whether the message after the boundary was the user's."""
    trailing_count: int
    """Messages of the body after the boundary, when it was made."""


class OtherFields(msgspec.Struct, frozen=True, eq=False):
    """Fields of an OpenAI chat's body besides its messages, such as tools. If they come again, they are not parsed."""

    request: RoutingRequest
    """The request without its messages."""
    end_json: bytes
    """The body after its messages, such as `], "stream": true}`."""
    keeps_messages_as_sent: bool
    """Whether the template got the messages as the client sent them, and not as newer transformers change them."""


class CachedConversation(msgspec.Struct, eq=False):
    """Cached token ids of a conversation's last prompt, with boundaries up to which later requests can use them.

    A boundary is a place between two messages. If a later body is equal up to a boundary, and gives the chat template
    the same other inputs, only its messages after the boundary are tokenised. Not changed once it is in the cache.
    """

    kind: ApiKind
    messages_start: int
    """Offset in the body of its array of messages."""
    inputs_digest: bytes
    """Digest of the template's inputs besides the messages in the body's array, such as tools and options."""
    first_message: Message
    """First message of the chat. If it is a system message, templates may write it after later messages."""
    outline: Outline | None
    """Fingerprints of the messages up to the last boundary, and of the tools; None if nobody compares prompts."""
    boundaries: list[Boundary]
    """In the order of their offsets."""
    token_ids: array[int]
    """Token ids of the prompt, at least up to the last boundary."""
    other_fields: OtherFields | None
    """None if the body is not in OpenAI's format."""
    model: str = ""
    """Base model whose tokenizer and template read the conversation."""
    first_message_digest: int | None = None
    """Digest of the first user message, which names a conversation without another name."""
    prepared_prompt: Any = None
    """Token ids with the digests of their KV blocks, as the router's index keeps them; None if it did not read them."""
    prepared_prompt_bytes: int = 0
    """Memory of `prepared_prompt` besides `token_ids`."""
    replaced_entry: CachedConversation | None = None
    """Entry of an earlier turn, whose place this one takes when it is stored; None if both stay."""

    @property
    def memory_bytes(self) -> int:
        size_bytes = _ENTRY_BYTES + self.token_ids.itemsize * len(self.token_ids) + self.prepared_prompt_bytes
        if self.outline is not None:
            size_bytes += self.outline.memory_bytes
        size_bytes += sum([_BOUNDARY_BYTES + 2 * len(boundary.placeholders.text) for boundary in self.boundaries])
        if self.other_fields is not None:
            end_bytes = len(self.other_fields.end_json)
            size_bytes += end_bytes + _DECODED_BYTES_PER_BYTE * (self.messages_start + end_bytes)
        return size_bytes + len(str(self.first_message.get("content")))

    def outline_with(self, boundary: Boundary, new_messages: list[Message]) -> Outline | None:
        """Return the fingerprints of the messages before a boundary, and of new ones; None without an `outline`."""
        return None if self.outline is None else self.outline.replace_end(boundary.message_count, new_messages)

    def extend(
        self, boundary: Boundary, next_boundary: Boundary, new_messages: list[Message], token_ids: array[int],
        other_fields: OtherFields | None,
    ) -> CachedConversation:  # fmt: skip
        """Return the entry of a later turn, which has `new_messages` after `boundary`, and `next_boundary` among them.

        For example, an entry has boundaries after 2 and 4 messages, and the later turn continues it after 4, with 5
        more. Then its entry has boundaries after 2, 4 and, say, 8 messages. `token_ids`: those of the whole prompt.
        """
        boundaries = [earlier for earlier in self.boundaries if earlier.body_end <= boundary.body_end]
        while len(boundaries) >= BOUNDARIES_MAX:
            _drop_boundary(boundaries)
        outlined_messages = new_messages[: next_boundary.message_count - boundary.message_count]
        return msgspec.structs.replace(
            self,
            outline=self.outline_with(boundary, outlined_messages),
            boundaries=[*boundaries, next_boundary],
            token_ids=token_ids,
            other_fields=other_fields,
            # If the turns part before the last boundary, the earlier entry may be continued there once more.
            replaced_entry=self if boundary is self.boundaries[-1] else None,
        )


def _drop_boundary(boundaries: list[Boundary]) -> None:
    """Drop the first boundary, or the second one if the first is the last that is before a user's message.

    Some templates rewrite the messages since the user's last one once the user sends another. The conversation can then
    be continued only from the boundary before them.
    """
    is_first_needed = boundaries[0].starts_turn and not any(boundary.starts_turn for boundary in boundaries[1:])
    boundaries.pop(1 if is_first_needed else 0)


class BoundaryLocation(NamedTuple):
    """A boundary of a cached conversation, and the digests by which it is found."""

    conversation: CachedConversation
    boundary: Boundary
    key: int
    """Digest of the longest prefix of the body that has a length in PREFIX_LENGTHS and ends before the boundary."""
    digest: int
    """Digest of the bytes between that prefix and the boundary."""


class ConversationCache:
    """Cached conversations of one process, found by the first bytes of a body; the least recently used is dropped.

    Digests of a body up to every boundary would cost too much. So a boundary is stored under the digest of the longest
    prefix before it that has a length in PREFIX_LENGTHS. The bytes after that prefix are compared by a second digest.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._seed = secrets.randbits(64)
        self._locations_by_key: dict[int, list[BoundaryLocation]] = {}
        """Digest of the start of a body -> boundaries after it, the newest last."""
        self._locations_by_conversation: OrderedDict[CachedConversation, list[BoundaryLocation]] = OrderedDict()
        """Conversation -> its boundaries, the least recently used first."""
        self.used_bytes = 0
        self.hits = self.misses = 0
        """Bodies that continued a conversation, and look-ups that found none."""

    def __len__(self) -> int:
        return len(self._locations_by_conversation)

    def find(self, kind: ApiKind, body: bytes) -> list[BoundaryLocation]:
        """Find the cached conversations that a body continues: return boundaries up to which both bodies are equal.

        A boundary is a place between two messages. At most BOUNDARIES_MAX are returned, the furthest first.
        """
        matches: list[BoundaryLocation] = []
        keys = self._digest_prefixes(body, len(body))
        cached_prefixes = [index for index in reversed(range(len(keys))) if keys[index] in self._locations_by_key]
        for prefix_index in cached_prefixes[:KEYS_MAX]:
            candidates = self._locations_by_key[keys[prefix_index]]
            matches += self._find_equal(candidates, kind, body, PREFIX_LENGTHS[prefix_index])
            if len(matches) >= BOUNDARIES_MAX:
                break
        self.misses += not matches
        return matches[:BOUNDARIES_MAX]

    def _find_equal(
        self, candidates: list[BoundaryLocation], kind: ApiKind, body: bytes, prefix_length: int
    ) -> list[BoundaryLocation]:
        """Return the candidates up to which a body is equal to the cached one, the furthest and newest first.

        The bodies are already known to have an equal prefix. The bytes between it and the boundary are compared here.
        """
        equal_locations = [
            location
            for location in reversed(candidates)
            if location.conversation.kind == kind
            and location.digest == self._digest_range(body, prefix_length, location.boundary.body_end)
        ]
        return sorted(equal_locations, key=lambda location: location.boundary.body_end, reverse=True)

    def _digest_prefixes(self, body: bytes, end: int) -> list[int]:
        """Return the digests of the prefixes of a body up to `end`, one for each of the PREFIX_LENGTHS.

        Each digest is made of the bytes after the next shorter prefix, with that prefix's digest as the seed.
        """
        view, digest, parts = memoryview(body), self._seed, _PREFIX_PARTS[: bisect_right(PREFIX_LENGTHS, end)]
        return [digest := xxh3_64_intdigest(view[part], digest) for part in parts]

    def _digest_range(self, body: bytes, start: int, end: int) -> int:
        return xxh3_64_intdigest(memoryview(body)[start:end], self._seed)

    def record_hit(self, conversation: CachedConversation) -> None:
        """Count a use of a conversation, and make it the most recently used one."""
        self.hits += 1
        if conversation in self._locations_by_conversation:
            self._locations_by_conversation.move_to_end(conversation)

    def store(self, conversation: CachedConversation, body: bytes) -> None:
        """Store the conversation that was read from a body, in place of its `replaced_entry`.

        A conversation of more than a quarter of the cache is not stored. If the cache is full, the least recently used
        conversations are dropped; if too many boundaries share a key, the conversation of the oldest.
        """
        if conversation.replaced_entry is not None:
            self._drop(conversation.replaced_entry)
            conversation.replaced_entry = None
        size_bytes = conversation.memory_bytes
        locations = self._locate(conversation, body)
        if size_bytes > self.max_bytes // 4 or not locations:
            return
        self._locations_by_conversation[conversation] = locations
        self.used_bytes += size_bytes
        for location in locations:
            locations_of_key = self._locations_by_key.setdefault(location.key, [])
            locations_of_key.append(location)
            if len(locations_of_key) > LOCATIONS_MAX:
                self._drop(locations_of_key[0].conversation)
        while self.used_bytes > self.max_bytes:
            self._drop(next(iter(self._locations_by_conversation)))

    def clear(self, model: str) -> None:
        for conversation in list(self._locations_by_conversation):
            if conversation.model == model:
                self._drop(conversation)

    def _locate(self, conversation: CachedConversation, body: bytes) -> list[BoundaryLocation]:
        """Return the boundaries of a conversation with the digests under which a look-up finds them."""
        keys = self._digest_prefixes(body, conversation.boundaries[-1].body_end)
        locations = []
        for boundary in conversation.boundaries:
            prefix_index = bisect_right(PREFIX_LENGTHS, boundary.body_end) - 1
            if prefix_index >= 0:
                digest = self._digest_range(body, PREFIX_LENGTHS[prefix_index], boundary.body_end)
                locations.append(BoundaryLocation(conversation, boundary, keys[prefix_index], digest))
        return locations

    def _drop(self, conversation: CachedConversation) -> None:
        """Forget a conversation with its boundaries, if it is in the cache."""
        locations = self._locations_by_conversation.pop(conversation, None)
        if locations is None:
            return
        self.used_bytes -= conversation.memory_bytes
        for key in {location.key for location in locations}:
            locations_of_key = self._locations_by_key[key]
            locations_of_key[:] = [other for other in locations_of_key if other.conversation is not conversation]
            if not locations_of_key:
                del self._locations_by_key[key]

    def check_invariants(self) -> None:
        """Assert that the bytes are their sum and bounded, and that exactly the boundaries of entries have keys."""
        conversations = self._locations_by_conversation
        assert self.used_bytes == sum(conversation.memory_bytes for conversation in conversations) <= self.max_bytes
        expected_ids: dict[int, set[int]] = {}
        for location in chain(*conversations.values()):
            expected_ids.setdefault(location.key, set()).add(id(location.boundary))
        assert expected_ids == {
            key: {id(location.boundary) for location in locations} for key, locations in self._locations_by_key.items()
        }
        assert all(len(locations) <= LOCATIONS_MAX for locations in self._locations_by_key.values())
