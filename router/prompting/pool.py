"""Large bodies, read by processes of their own (prompts/worker_pool.py), so that nobody waits for them here.

Owns how many wait and for how long, and what is done in such a process: first it says where a body should go, then it
is told what to make of it. Invariant: `waiting_bytes` is the sum of the bodies that are waited for, at most
`waiting_mb`.
"""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from prompts.errors import RequestError
from prompts.routing import Kind, RoutingRequest, read_routing
from prompts.segments import ID_TYPE
from prompts.tokenizer import Tokenizer, TokenizerError
from prompts.worker_pool import WorkerPool, WorkerProcess, WorkerProcessError
from router.prompting.chat_outline import Outline
from router.prompting.config import PoolConfig
from router.prompting.conversation_cache import CachedConversation
from router.prompting.conversation_suffix import cache_conversation, is_cacheable
from router.prompting.encode import (
    PromptSize,
    cut,
    envelope,
    further_tokens,
    is_within_bounds,
    measure,
    question,
    read_prompt,
)
from router.prompting.fields import FieldSpans, find_fields
from router.prompting.media import MediaPrompt, read_media
from router.prompting.outline import outline_chat
from router.prompting.turn import digest_beginning

log = logging.getLogger("router")

START_S_MAX = 30.0
"""For starting a process, and for loading a vocabulary."""


class Order(msgspec.Struct):
    """What is to be made of the body that was just looked at."""

    kind: Kind
    folder: str | None = None
    """Where the tokenizer's files are; None: only ids that the body brings itself."""
    tokens_max: int | None = None
    asks: str | None = None
    """The model under which a worker is to be asked: made is that question instead of ids."""
    as_sent: bool = False
    """ChatTemplate.as_sent"""
    seconds_max: float | None = None
    """For making it, where that is less than a body may take."""
    learns: bool = False
    """Whether its beginning is to be known (router/prompting/conversation_suffix.py)."""


class Made(NamedTuple):
    """What was made of a body."""

    result: array[int] | bytes | None = None
    """Ids, or a question for a worker."""
    begins: int | None = None
    """Digest of what its user said first (router/prompting/turn.py)."""
    known: CachedConversation | None = None
    """What is to be kept of it, but for its body and its ids, which are here and there."""
    size: PromptSize | None = None
    """Of its prompts; None where a worker is to be asked for the ids of the first."""
    further: Sequence[int] = ()
    """Tokens of each prompt behind the first."""
    media: MediaPrompt | None = None
    """What it is, where it has images or other media."""
    is_overdue: bool = False
    """It was not made in time."""


class Helpers:
    """`await read(...)` reads one body."""

    def __init__(self, config: PoolConfig, *, chat_template: str | None, cache_bytes: int) -> None:
        self._config = config
        setup = _Shelf, (chat_template, cache_bytes)
        self.processes = WorkerPool(setup, config.count, config.memory_mb << 20)
        self.waiting_bytes = 0
        self._parties: dict[str, int] = {}
        """party -> bytes of its bodies that wait or are being read."""
        self.cpu_s = 0.0
        self.counts: Counter[str] = Counter()
        """outcome -> bodies: read, refused (no JSON), full, full_for_party, failed."""

    async def read(
        self,
        body: Sequence[bytes],
        kind: Kind | None,
        order: Callable[[RoutingRequest], Order],
        wanted: Callable[[], bool],
        party: str = "",
    ) -> tuple[RoutingRequest, FieldSpans, Made]:
        """(what a body, in pieces, asks for; its fields' places; what was made of it). `kind`: of its path; None where
        the body tells. `order` says what to make of it, `wanted` whether its client is there. Neither may raise.
        `party`: whose it is. Raises RequestError for a body that is none, or that cannot be read now."""
        size = sum(map(len, body))
        self._check_room(party, size)
        looked: list[tuple[RoutingRequest, FieldSpans]] = []

        async def work(process: WorkerProcess) -> Made:
            if not wanted():
                raise _not_now("the client left")
            looked.append(await self._look(process, body, kind))
            return await self._make(process, order(looked[0][0]))

        made = Made()
        self._wait(party, size)
        try:
            made = await self.processes.use(body[0], work, party)
        except WorkerProcessError as error:
            self.counts["failed"] += 1
            log.warning("a body of %d bytes could not be read: %s", size, error)
            if not looked:
                raise _not_now("the body could not be read in time") from None
            made = Made(is_overdue=True)
        finally:
            self._wait(party, -size)
        return *looked[0], made

    def _check_room(self, party: str, size: int) -> None:
        """Raises RequestError. Behind its first body, a party may have as much waiting as it leaves free for others."""
        most, mine = self._config.waiting_mb << 20, self._parties.get(party, 0)
        if self.waiting_bytes + size > most:
            self.counts["full"] += 1
            raise _not_now("too many large bodies wait to be read")
        if mine and mine + size > most - (self.waiting_bytes + size):
            self.counts["full_for_party"] += 1
            raise _not_now("too many large bodies of this client wait to be read", status=429)

    def _wait(self, party: str, size: int) -> None:
        self.waiting_bytes += size
        self._parties[party] = self._parties.get(party, 0) + size
        if not self._parties[party]:
            del self._parties[party]

    def check_invariants(self) -> None:
        assert self.waiting_bytes == sum(self._parties.values())
        assert all(count > 0 for count in self._parties.values())

    async def outline(self, body: Sequence[bytes], kind: Kind) -> Outline | None:
        """Of a whole chat that was read before; None where that fails."""
        try:
            found: Outline | None = await self.processes.use(
                body[0], lambda process: process.call(self._config.seconds_max, _outline, body, kind)
            )
        except (WorkerProcessError, RequestError):
            return None
        return found

    def close_idle(self, now: float) -> None:
        """End processes that had nothing to do for a while. `now`: of `time.monotonic`."""
        self.processes.close_idle(now - self._config.idle_s)

    async def _look(
        self, process: WorkerProcess, body: Sequence[bytes], kind: Kind | None
    ) -> tuple[RoutingRequest, FieldSpans]:
        try:
            fields, spans = await process.call(START_S_MAX, _look, body)
        except RequestError:
            self.counts["refused"] += 1
            raise
        chats = fields.pop("chats")
        return RoutingRequest(kind=kind or ("chat" if chats else "completion"), **fields), spans

    async def _make(self, process: WorkerProcess, order: Order) -> Made:
        await process.call(START_S_MAX, _load, order.folder)
        made: Made
        seconds_max = min(self._config.seconds_max, order.seconds_max or math.inf)
        cpu_s, made, problem = await process.call(seconds_max, _make, order)
        self.cpu_s += cpu_s
        self.counts["read"] += 1
        if problem is not None:
            self.counts["unread"] += 1
            log.debug("a large prompt left to the worker to judge: %s", problem)
        return made


def _not_now(message: str, status: int = 503) -> RequestError:
    return RequestError(message, param=None, code="overloaded", status=status)


# In the process -------------------------------------------------------------------------------------------------------


class _Shelf:
    """What a process keeps: tokenizers, and the body that it was given last."""

    def __init__(self, chat_template: str | None, cache_bytes: int) -> None:
        self.chat_template = chat_template
        self.cache_bytes = cache_bytes
        self.tokenizers: dict[str, Tokenizer | TokenizerError] = {}
        self.body = b""


def _look(shelf: _Shelf, pieces: Sequence[bytes]) -> tuple[dict[str, Any], FieldSpans]:
    """(what a body says of where it should go, where its fields are)."""
    body = b"".join(pieces)
    fields, spans = envelope(body), find_fields(body)
    shelf.body = body
    return fields, spans


def _load(shelf: _Shelf, folder: str | None) -> None:
    if folder is None or folder in shelf.tokenizers:
        return
    try:
        found = Tokenizer.load(Path(folder), shelf.chat_template, cache_bytes=shelf.cache_bytes)
    except TokenizerError as error:
        shelf.tokenizers[folder] = error
    else:
        shelf.tokenizers[folder] = found


def _make(shelf: _Shelf, order: Order) -> tuple[float, Made, str | None]:
    """(CPU seconds, what was ordered, why not)."""
    started, made, problem = time.thread_time(), Made(), None
    body, shelf.body = shelf.body, b""
    try:
        if order.kind != "other":
            made = _made(order, body, shelf.tokenizers.get(order.folder or ""))
    except (RequestError, TokenizerError, ValueError, RecursionError, MemoryError) as error:
        problem = f"{type(error).__name__}: {error}"[:300]
    return time.thread_time() - started, made, problem


def _outline(shelf: _Shelf, pieces: Sequence[bytes], kind: Kind) -> Outline | None:
    return outline_chat(read_routing(kind, b"".join(pieces)))


def _made(order: Order, body: bytes, tokenizer: Tokenizer | TokenizerError | None) -> Made:
    if isinstance(tokenizer, TokenizerError):
        raise tokenizer
    if not is_within_bounds(body):
        raise RequestError("more values than are read here", param=None)
    parsed = read_routing(order.kind, body)
    if tokenizer is not None and tokenizer.chat_template is not None:
        tokenizer.chat_template.as_sent = order.as_sent
    prompt = read_prompt(parsed, tokenizer, order.tokens_max)
    ids, further = cut(prompt.ids, parsed, order.tokens_max), further_tokens(parsed, tokenizer)
    if not ids:
        asked = None if order.asks is None else question(parsed, order.asks)
        return Made(asked, digest_beginning(parsed), further=further, media=read_media(parsed, body))
    size = measure(prompt.ids, parsed, order.tokens_max, further, is_exact=prompt.is_whole)
    may = order.learns and is_cacheable(parsed.kind, len(body)) and ids is prompt.ids
    known = cache_conversation(parsed, body, prompt, tokenizer) if may else None
    if known is not None:
        known.body, known.token_ids = b"", array(ID_TYPE)
    media = read_media(parsed, body)
    found = ids if isinstance(ids, array) else array(ID_TYPE, ids)
    return Made(found, digest_beginning(parsed), known, size, further, media)
