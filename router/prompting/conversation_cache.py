"""Cache of conversations: hash of everything before a message boundary -> token ids of the prompt up to there.

Owns what is stored of a conversation, which are stored and how one is found;
router/prompting/conversation_reading.py reads what stands behind a boundary. Pure; of one event loop. Bounded in bytes,
least recently used first out. Entries cross between processes (router/prompting/prompt_worker_pool.py).
"""

from __future__ import annotations

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import xxhash

from prompts.body_digests import digests, digests_among
from prompts.routing import ApiKind, RoutingRequest
from prompts.schemas import Message
from router.prompting.placeholder_messages import RenderedPlaceholders

BODY_BYTES_MIN = 1024
"""Bytes of a body below which it is not worth caching."""
BODY_BYTES_MAX = 4 << 20
PLACES_MAX = 64
"""Boundaries stored under one digest."""
BOUNDARIES_MAX = 4
"""Boundaries of a conversation."""
LOCAL_FIELDS = 5
"""Number of fields of `CachedConversation`, its last, that do not cross to another process."""
_BOUNDARY_BYTES = 4000
"""Estimated bytes of a boundary, besides its rendered placeholders and messages as long as these."""
_DECODED_BYTES_A_BYTE = 4
"""Bytes that what was decoded takes, for each byte of a body."""


class Boundary(msgspec.Struct, frozen=True, eq=False):
    """A position between two messages of a body up to which the prompt is cached."""

    body_end: int
    """Bytes of the body before it."""
    bracket_count: int
    """Opening brackets and braces in the body before it."""
    message_count: int
    """Messages of the chat before it."""
    token_count: int
    """Token ids of the prompt before it."""
    char_count: int
    """Characters of the prompt's text before it."""
    rendered: RenderedPlaceholders
    """Placeholders for the messages before it."""
    starts_turn: bool
    """Whether the next message was the user's."""
    trailing_count: int
    """Number of messages after it in the body for which it was made."""


class CachedConversation(msgspec.Struct, eq=False):
    """A conversation as it was read. Not changed once it is in the cache."""

    kind: ApiKind
    messages_start: int
    """Where the body's array of messages begins."""
    template_digest: bytes
    """Digest of the template's inputs besides the messages of the array."""
    system_message_count: int
    """Messages of the chat that are not from the array: 1 if the body has a system text beside it."""
    opening_messages: list[Message]
    """The chat's messages up to the first that is not the system's."""
    message_fingerprints: bytes
    """Fingerprints of the messages up to the last boundary, as router/prompting/chat_outline.py has them."""
    tool_fingerprints: bytes
    """Fingerprints of the tools, which `template_digest` covers too."""
    options_digest: int
    boundaries: list[Boundary]
    """The furthest last."""
    token_ids: array[int]
    """Ids of the whole prompt, or up to the last boundary at the least."""
    end_bytes: int
    """Bytes of the body behind its messages, from the closing bracket on."""
    end_digest: int
    """Digest of those bytes."""
    bare_request: RoutingRequest | None
    """A chat without its messages; None for another kind."""
    keeps_messages_as_sent: bool
    """`ChatTemplate.keeps_messages_as_sent` when it was read."""
    model: str = ""
    """Whose tokenizer and template it was read with."""
    first_message_digest: int | None = None
    """Digest of what its user said first (router/prompting/sessions.py)."""
    prompt_memory: object = None
    """The index's memory of a prompt that this one begins; it stays in this process."""
    is_memory_exact: bool = False
    """Whether that prompt has exactly these ids."""
    prompt_memory_bytes: int = 0
    """Bytes of `prompt_memory` besides `token_ids`."""

    def __reduce__(self) -> tuple[Callable[..., CachedConversation], tuple[object, ...]]:
        """Without what stays in this process: what comes last, from `model` on."""
        return CachedConversation, msgspec.structs.astuple(self)[:-LOCAL_FIELDS]

    @property
    def memory_bytes(self) -> int:
        """Estimated memory of this entry."""
        size_bytes = self.token_ids.itemsize * len(self.token_ids)
        size_bytes += len(self.message_fingerprints) + len(self.tool_fingerprints) + self.prompt_memory_bytes + 1000
        size_bytes += sum([_BOUNDARY_BYTES + 2 * len(boundary.rendered.text) for boundary in self.boundaries])
        if self.bare_request is not None:
            size_bytes += _DECODED_BYTES_A_BYTE * (self.messages_start + self.end_bytes)
        return size_bytes + sum([len(str(message.get("content"))) for message in self.opening_messages])


class _Place(NamedTuple):
    """Where a boundary is found."""

    conversation: CachedConversation
    boundary: Boundary
    key: int
    """Digest of `prefix_bytes` bytes of the body."""
    prefix_bytes: int
    rest_digest: int
    """Digest of the bytes from there to the boundary."""


class ConversationCache:
    """The cache of one process."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._seed = secrets.randbits(64)
        self._places_by_key: dict[int, list[_Place]] = {}
        """Digest of a beginning -> boundaries behind it, the newest last. Digests are taken of eight lengths in each
        doubling, from BODY_BYTES_MIN on."""
        self._entries: OrderedDict[int, tuple[CachedConversation, int, list[_Place]]] = OrderedDict()
        """id -> conversation, its bytes and its places; least recently used first."""
        self.used_bytes = 0
        self.hits = self.misses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, kind: ApiKind, body: bytes, max_matches: int) -> list[tuple[CachedConversation, Boundary]]:
        """Find boundaries that the body has too, the furthest first."""
        places_by_key, view = self._places_by_key, memoryview(body)
        matches: list[tuple[CachedConversation, Boundary]] = []
        for key in digests_among(body, BODY_BYTES_MIN, self._seed, places_by_key, len(body)):
            places = places_by_key[key]
            if len(places) > 1:
                places = sorted(places, key=_get_body_end)
            hasher, position, found = xxhash.xxh3_64(seed=self._seed), places[0].prefix_bytes, []
            for conversation, boundary, _, _, rest_digest in places:
                body_end = boundary.body_end
                if body_end > len(body):
                    break
                hasher.update(view[position:body_end])
                position = body_end
                if conversation.kind == kind and hasher.intdigest() == rest_digest:
                    found.append((conversation, boundary))
            matches += reversed(found)
            if len(matches) >= max_matches:
                break
        return matches[:max_matches]

    def touch(self, conversation: CachedConversation) -> None:
        """Note that a conversation was of use."""
        if id(conversation) in self._entries:
            self._entries.move_to_end(id(conversation))

    def store(
        self, conversation: CachedConversation, body: bytes, predecessor: CachedConversation | None = None
    ) -> None:
        """Store the conversation of a body; it replaces `predecessor`, which it continues."""
        if predecessor is not None:
            self._drop(predecessor)
        size_bytes, places = conversation.memory_bytes, self._locate(conversation, body)
        if size_bytes > self.max_bytes // 4 or not places:
            return
        self._entries[id(conversation)] = conversation, size_bytes, places
        self.used_bytes += size_bytes
        for place in places:
            neighbours = self._places_by_key.setdefault(place.key, [])
            neighbours.append(place)
            if len(neighbours) > PLACES_MAX:
                self._drop(neighbours[0].conversation)
        while self.used_bytes > self.max_bytes:
            self._drop(next(iter(self._entries.values()))[0])

    def clear(self, model: str) -> None:
        """Drop the conversations of a model."""
        for conversation, _, _ in list(self._entries.values()):
            if conversation.model == model:
                self._drop(conversation)

    def _locate(self, conversation: CachedConversation, body: bytes) -> list[_Place]:
        view, places = memoryview(body), []
        keys = digests(body, BODY_BYTES_MIN, self._seed, conversation.boundaries[-1].body_end)
        for boundary in conversation.boundaries:
            if boundary.body_end >= BODY_BYTES_MIN:
                number = _count_prefixes(boundary.body_end) - 1
                prefix_bytes = _prefix_bytes(number)
                rest_digest = xxhash.xxh3_64_intdigest(view[prefix_bytes : boundary.body_end], self._seed)
                places.append(_Place(conversation, boundary, keys[number], prefix_bytes, rest_digest))
        return places

    def _drop(self, conversation: CachedConversation) -> None:
        entry = self._entries.pop(id(conversation), None)
        if entry is None:
            return
        _, size_bytes, places = entry
        self.used_bytes -= size_bytes
        for key in {place.key for place in places}:
            neighbours = self._places_by_key[key]
            neighbours[:] = [place for place in neighbours if place.conversation is not conversation]
            if not neighbours:
                del self._places_by_key[key]

    def check_invariants(self) -> None:
        """For tests: the sum is right and bounded; each boundary is found by its key, and nothing else is."""
        assert self.used_bytes == sum(size for _, size, _ in self._entries.values()) <= self.max_bytes
        expected: dict[int, set[int]] = {}
        for conversation, size, places in self._entries.values():
            assert size == conversation.memory_bytes
            for place in places:
                expected.setdefault(place.key, set()).add(id(place.boundary))
        assert {
            key: {id(place.boundary) for place in places} for key, places in self._places_by_key.items()
        } == expected
        assert all(len(places) <= PLACES_MAX for places in self._places_by_key.values())


def _get_body_end(place: _Place) -> int:
    return place.boundary.body_end


def _prefix_bytes(number: int) -> int:
    """Return the length of the beginning that the digest of this number covers."""
    return (BODY_BYTES_MIN << number // 8) * (8 + number % 8) // 8


def _count_prefixes(length: int) -> int:
    """Return how many digests a body of this length has, BODY_BYTES_MIN at least."""
    doublings = (length // BODY_BYTES_MIN).bit_length() - 1
    base = BODY_BYTES_MIN << doublings
    return 8 * doublings + (length - base) * 8 // base + 1
