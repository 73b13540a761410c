"""What this model has said, so that conversations go on from the ids that were sampled (prompts/sampled.py).

Owns the book of one server: answers are noted before their clients have their ends, prompts of chats are mended, and
routers follow what is noted (`GET /sampled`). Knows nothing of how prompts are read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec
from aiohttp import web

from engine.api.generation import Generation
from engine.api.params import ModelLimits
from engine.api.reading import Reading
from prompts import ChatRequest, Tokenizer
from prompts.sampled import Note, SampledBook, apply_spans, sampled_call, sampled_ids

AT_ONCE_TOKENS = 2048
"""Longer answers are encoded in a thread."""
FOLLOW_MAX = 4096
"""Notes that a follower may be behind; it begins anew after that."""
DUMP_BYTES = 64 << 10
BEAT_S = 10.0
"""A follower hears something so often."""
_UNHEARD_S = 30.0


class SampledAnswers:
    """Of one server."""

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits, bytes_max: int, *, arguments: bool) -> None:
        """`bytes_max`: of the book; 0: nothing is remembered. `arguments`: those of calls too."""
        self._tokenizer = tokenizer
        self._limits = limits
        self._remembers = bytes_max > 0
        self._arguments = arguments and self._remembers
        self.book = SampledBook(tokenizer.cut_ids, bytes_max)
        self._followers: set[asyncio.Queue[Note | None]] = set()
        if self._arguments:
            tokenizer.generated = self.book.get

    def mend(self, reading: Reading) -> Reading:
        """With the ids that were sampled in place of the encoder's: those that a router has priced, else those that are
        known here. A prompt that would become too long stays as it is. Raises RequestError."""
        body, (ids, *others) = reading.body, reading.prompts
        if others or not isinstance(body, ChatRequest) or reading.is_given:
            return reading
        if reading.spans is not None:
            made = apply_spans(ids, reading.spans, self._limits.vocab_size)
        else:
            made = self.mended(ids)
        if made is ids or len(made) >= self._limits.max_model_len > len(ids):
            return reading
        return msgspec.structs.replace(reading, prompts=[made])

    def mended(self, ids: list[int]) -> list[int]:
        """A chat's prompt with the ids that are known here."""
        found = self.book.mend(ids)
        return ids if found is None else found.ids.tolist()

    async def note(self, generation: Generation) -> None:
        """Remember the answers of a chat, which are complete."""
        if not self._remembers or not isinstance(generation.body, ChatRequest):
            return
        for choice in generation.choices:
            if choice.finish_reason not in ("stop", "length", "tool_calls"):
                continue
            notes: list[Note | None] = []
            if not isinstance(choice.stop_reason, str):  # a stop string cut the text off, maybe inside of a token
                prompt, said = generation.prompt_of(choice), choice.said
                if len(said) <= AT_ONCE_TOKENS:
                    notes += sampled_ids(self._tokenizer, prompt, said)
                else:
                    loop = asyncio.get_running_loop()
                    notes += await loop.run_in_executor(None, sampled_ids, self._tokenizer, prompt, said)
            if self._arguments:
                notes += [sampled_call(call.id, call.arguments) for call in choice.calls if call.id is not None]
            self._add(note for note in notes if note is not None)

    def _add(self, notes: Iterable[Note]) -> None:
        for note in notes:
            if self.book.add(note):
                for queue in list(self._followers):
                    if queue.full():
                        self._followers.discard(queue)  # it begins anew
                        queue.get_nowait()
                        queue.put_nowait(None)
                    else:
                        queue.put_nowait(note)

    def close(self) -> None:
        """End the followers' streams."""
        for queue in self._followers:
            while not queue.empty():
                queue.get_nowait()
            queue.put_nowait(None)
        self._followers.clear()

    async def follow(self, request: web.Request) -> web.StreamResponse:
        """All notes, one a line, then an empty line; with `?follow=1` those that come, and empty lines in between."""
        queue: asyncio.Queue[Note | None] = asyncio.Queue(FOLLOW_MAX)
        coming: asyncio.Future[Note | None] | None = None
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        self._followers.add(queue)
        try:
            lines = b""
            for note in self.book.notes():
                lines += _line(note)
                if len(lines) > DUMP_BYTES:
                    await asyncio.wait_for(response.write(lines), _UNHEARD_S)
                    lines = b""
            await asyncio.wait_for(response.write(lines + b"\n"), _UNHEARD_S)
            while request.query.get("follow") == "1":
                coming = coming or asyncio.ensure_future(queue.get())
                await asyncio.wait({coming}, timeout=BEAT_S)
                told, line = None, b"\n"
                if coming.done():
                    told, coming = coming.result(), None
                    if told is None:
                        break
                    line = _line(told)
                await asyncio.wait_for(response.write(line), _UNHEARD_S)
        except asyncio.TimeoutError:
            raise ConnectionResetError("the follower does not read") from None
        finally:
            self._followers.discard(queue)
            if coming is not None:
                coming.cancel()
        return response


def _line(note: Note) -> bytes:
    return msgspec.json.encode(note) + b"\n"
