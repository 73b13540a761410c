"""Token ids of one streamed answer: noted as they pass, and taken out where only the router asked for them.

Owns what must be known to let another worker go on when this one dies. Passes on whole server-sent events only, so that
what the client has seen is what was noted. Refuses to know HTTP, and of JSON all but a few keys: a quotation mark in a
JSON string is escaped, so no generated text can look like one of them.
"""

from __future__ import annotations

import re
from array import array
from typing import Annotated, Final

import msgspec

EVENT_BYTES_MAX: Final = 4 << 20
"""An event that has not ended by then is passed on as it comes, and nothing is noted any more."""
IDS_MAX: Final = 2 << 20
"""Ids noted of an answer, and of its prompt; no worker goes on with a longer one."""

_BLANK_LINE = re.compile(rb"\n\r?\n")
_BLANK_LINE_BYTES: Final = 3
_KEY = rb'"(prompt_)?token_ids" *: *(null|\[[0-9, ]*\])?'
_IDS = re.compile(rb"," + _KEY + rb"|(?<=[{,])" + _KEY + rb",?")
"""With the comma before the key, or where it is the first one, the comma behind its value."""
_BEFORE_KEY: Final = len(',,"prompt_')
_FAILURE = (b'data: {"error"', b'data:{"error"')
_FINISH = re.compile(rb'"finish_reason" *: *"')
_DONE = (b"data: [DONE]", b"data:[DONE]")
_PLAIN_DELTAS = (b"}", b'"content"', b'"role"')
_list_of_ids = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]])


class Tokens:
    """Of one answer, whose content is given to `feed`."""

    __slots__ = (
        "_hide", "_passes", "_pending", "_searched", "answer", "done", "events", "failed", "finished", "last", "odd",
        "parsed", "prompt", "spoken",
    )  # fmt: skip

    def __init__(self, hide: bool) -> None:
        """`hide`: token ids are taken out of what is passed on."""
        self.prompt = array("I")
        self.answer = array("I")
        self.spoken = 0
        """Tokens of `answer` when text last came with them."""
        self.last = b""
        """The last event with a choice, as it was passed on."""
        self.events = 0
        """Events passed on."""
        self.odd = False
        """What is neither text, thought nor call was told, or text without its ids."""
        self.parsed = False
        """A thought or a tool's call was told."""
        self.finished = False
        """A finish reason has come."""
        self.done = False
        """The stream's last event, [DONE], has come."""
        self.failed = False
        """An event says that the worker failed."""
        self._hide = hide
        self._passes = False
        """Everything is passed on as it comes."""
        self._pending = bytearray()
        """Of an event that has not ended."""
        self._searched = 0
        """No blank line of `_pending` begins before."""

    def feed(self, content: bytes) -> bytes:
        """Take the next bytes of the content; return the whole events that may be passed on."""
        if self._passes:
            return content
        if not self._pending and _is_one_event(content):  # as nearly always
            return self._event(content)
        pending = self._pending
        pending += content
        passed, taken = [], 0
        if not self.failed and _BLANK_LINE.search(pending, self._searched):
            for blank_line in _BLANK_LINE.finditer(bytes(pending)):
                event = bytes(pending[taken : blank_line.end()])
                if event.startswith(_FAILURE):
                    self.failed = True
                    break
                passed.append(self._event(event))
                taken = blank_line.end()
            del pending[:taken]
        self._searched = max(len(pending) - _BLANK_LINE_BYTES, 0)
        if len(pending) > EVENT_BYTES_MAX:
            self.odd = True
            passed.append(self.release())
        return b"".join(passed)

    def finish(self) -> bytes:
        """The answer is complete: return what came behind the last blank line, as an event."""
        event = bytes(self._pending)
        if not event or self.failed:
            return b""
        self.failed = event.startswith(_FAILURE)
        if self.failed:
            return b""
        self._pending.clear()
        return self._event(event)

    def release(self) -> bytes:
        """Return an event that says that the worker failed, and what follows it: kept back until now."""
        self._passes = True
        self.failed = False
        held, self._pending = bytes(self._pending), bytearray()
        return held

    @property
    def is_truncated(self) -> bool:
        """Whether an answer that ends now lacks its end. False where its events are not understood."""
        return self.events > 0 and not (self.odd or self.finished or self.done or self._passes)

    def rewind(self, exact: bool) -> None:
        """Another worker goes on: forget the event that never ended, and if `exact` tokens whose text is incomplete."""
        if exact:
            del self.answer[self.spoken :]
        self._pending.clear()
        self._searched = 0
        self.failed = False

    def _event(self, event: bytes) -> bytes:
        """Note what an event says; return what is passed on of it."""
        self.events += 1
        if b'"' not in event:
            self.done = self.done or event.startswith(_DONE)
            return event  # a comment, or [DONE]
        before = len(self.answer)
        at = event.find(b'token_ids"')
        if at >= 0:
            at = max(at - _BEFORE_KEY, 0)
            event = event[:at] + _IDS.sub(self._take, event[at:])
        delta, text = event.find(b'"delta":{'), b'"text":"'
        if delta >= 0:
            text = b'"content":"'
            if b'"reasoning' in event or b'"tool_calls":[{' in event:
                self.parsed = True
            elif not event.startswith(_PLAIN_DELTAS, delta + 9):
                self.odd = True
        if _FINISH.search(event) is not None:
            self.finished = True
        at = event.find(text)
        if at >= 0 and event[at + len(text) : at + len(text) + 1] not in (b'"', b""):
            self.spoken = len(self.answer)
            if self.spoken == before and not self.finished:
                self.odd = True
        if b'"choices":[{' in event:
            self.last = event
        return event

    def _take(self, found: re.Match[bytes]) -> bytes:
        """Note ids; return what is left of them in the event."""
        value = found[2] or found[4]
        try:
            ids = [] if value == b"null" else _list_of_ids.decode(value or b"")
        except msgspec.MsgspecError:
            self.odd = True  # not what was asked for: no worker goes on from here
            return found[0]
        if len(self.answer) + len(ids) > IDS_MAX:
            self.odd = True
        elif not (found[1] or found[3]):
            self.answer.extend(ids)
        elif not self.prompt:
            self.prompt = array("I", ids)
        return b"" if self._hide else found[0]


def _is_one_event(content: bytes) -> bool:
    """Whether an event of one line that says of no failure is all there is."""
    return 0 < content.find(b"\n") == len(content) - 2 and content[-1] == 10 and not content.startswith(_FAILURE)
