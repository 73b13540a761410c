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

_BLANK_LINE_PATTERN = re.compile(rb"\n\r?\n")
_BLANK_LINE_BYTES: Final = 3
_KEY = rb'"(prompt_)?token_ids" *: *(null|\[[0-9, ]*\])?'
_TOKEN_IDS_PATTERN = re.compile(rb"," + _KEY + rb"|(?<=[{,])" + _KEY + rb",?")
"""With the comma before the key, or where it is the first one, the comma behind its value."""
_BEFORE_KEY: Final = len(',,"prompt_')
_FAILURE_PREFIXES = (b'data: {"error"', b'data:{"error"')
_FINISH_REASON_PATTERN = re.compile(rb'"finish_reason" *: *"')
_DONE_PREFIXES = (b"data: [DONE]", b"data:[DONE]")
_PLAIN_DELTAS = (b"}", b'"content"', b'"role"')
_token_ids_decoder = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]])


class TokenRecorder:
    """Of one answer, whose content is given to `feed`."""

    __slots__ = (
        "_is_passthrough",
        "_pending",
        "_removes_ids",
        "_search_start",
        "event_count",
        "has_finish_reason",
        "has_parsed_output",
        "has_worker_failed",
        "is_done",
        "is_unrecognized",
        "last_event",
        "output_ids",
        "prompt_ids",
        "text_token_count",
    )  # fmt: skip

    def __init__(self, removes_ids: bool) -> None:
        """`removes_ids`: token ids are taken out of what is passed on."""
        self.prompt_ids = array("I")
        self.output_ids = array("I")
        self.text_token_count = 0
        """Tokens of `output_ids` when text last came with them."""
        self.last_event = b""
        """The last event with a choice, as it was passed on."""
        self.event_count = 0
        """Events passed on."""
        self.is_unrecognized = False
        """What is neither text, thought nor call was told, or text without its ids."""
        self.has_parsed_output = False
        """A thought or a tool's call was told."""
        self.has_finish_reason = False
        """A finish reason has come."""
        self.is_done = False
        """The stream's last event, [DONE], has come."""
        self.has_worker_failed = False
        """An event says that the worker failed."""
        self._removes_ids = removes_ids
        self._is_passthrough = False
        """Everything is passed on as it comes."""
        self._pending = bytearray()
        """Of an event that has not ended."""
        self._search_start = 0
        """No blank line of `_pending` begins before."""

    def feed(self, content: bytes) -> bytes:
        """Take the next bytes of the content; return the whole events that may be passed on."""
        if self._is_passthrough:
            return content
        if not self._pending and _is_single_event(content):  # as nearly always
            return self._record_event(content)
        pending = self._pending
        pending += content
        complete_events, event_start = [], 0
        if not self.has_worker_failed and _BLANK_LINE_PATTERN.search(pending, self._search_start):
            for blank_line in _BLANK_LINE_PATTERN.finditer(bytes(pending)):
                event = bytes(pending[event_start : blank_line.end()])
                if event.startswith(_FAILURE_PREFIXES):
                    self.has_worker_failed = True
                    break
                complete_events.append(self._record_event(event))
                event_start = blank_line.end()
            del pending[:event_start]
        self._search_start = max(len(pending) - _BLANK_LINE_BYTES, 0)
        if len(pending) > EVENT_BYTES_MAX:
            self.is_unrecognized = True
            complete_events.append(self.release_failure_event())
        return b"".join(complete_events)

    def finish(self) -> bytes:
        """The answer is complete: return what came behind the last blank line, as an event."""
        event = bytes(self._pending)
        if not event or self.has_worker_failed:
            return b""
        self.has_worker_failed = event.startswith(_FAILURE_PREFIXES)
        if self.has_worker_failed:
            return b""
        self._pending.clear()
        return self._record_event(event)

    def release_failure_event(self) -> bytes:
        """Return an event that says that the worker failed, and what follows it: kept back until now."""
        self._is_passthrough = True
        self.has_worker_failed = False
        pending, self._pending = bytes(self._pending), bytearray()
        return pending

    @property
    def is_truncated(self) -> bool:
        """Whether an answer that ends now lacks its end. False where its events are not understood."""
        return self.event_count > 0 and not (
            self.is_unrecognized or self.has_finish_reason or self.is_done or self._is_passthrough
        )

    def rewind(self, drops_incomplete_text: bool) -> None:
        """Another worker goes on: forget the event that never ended, and if `drops_incomplete_text` tokens whose
        text is incomplete."""
        if drops_incomplete_text:
            del self.output_ids[self.text_token_count :]
        self._pending.clear()
        self._search_start = 0
        self.has_worker_failed = False

    def _record_event(self, event: bytes) -> bytes:
        """Note what an event says; return what is passed on of it."""
        self.event_count += 1
        if b'"' not in event:
            self.is_done = self.is_done or event.startswith(_DONE_PREFIXES)
            return event  # a comment, or [DONE]
        old_token_count = len(self.output_ids)
        position = event.find(b'token_ids"')
        if position >= 0:
            position = max(position - _BEFORE_KEY, 0)
            event = event[:position] + _TOKEN_IDS_PATTERN.sub(self._record_ids, event[position:])
        delta_position, text_key = event.find(b'"delta":{'), b'"text":"'
        if delta_position >= 0:
            text_key = b'"content":"'
            if b'"reasoning' in event or b'"tool_calls":[{' in event:
                self.has_parsed_output = True
            elif not event.startswith(_PLAIN_DELTAS, delta_position + 9):
                self.is_unrecognized = True
        if _FINISH_REASON_PATTERN.search(event) is not None:
            self.has_finish_reason = True
        position = event.find(text_key)
        if position >= 0 and event[position + len(text_key) : position + len(text_key) + 1] not in (b'"', b""):
            self.text_token_count = len(self.output_ids)
            if self.text_token_count == old_token_count and not self.has_finish_reason:
                self.is_unrecognized = True
        if b'"choices":[{' in event:
            self.last_event = event
        return event

    def _record_ids(self, match: re.Match[bytes]) -> bytes:
        """Note ids; return what is left of them in the event."""
        value = match[2] or match[4]
        try:
            token_ids = [] if value == b"null" else _token_ids_decoder.decode(value or b"")
        except msgspec.MsgspecError:
            self.is_unrecognized = True  # not what was asked for: no worker goes on from here
            return match[0]
        if len(self.output_ids) + len(token_ids) > IDS_MAX:
            self.is_unrecognized = True
        elif not (match[1] or match[3]):
            self.output_ids.extend(token_ids)
        elif not self.prompt_ids:
            self.prompt_ids = array("I", token_ids)
        return b"" if self._removes_ids else match[0]


def _is_single_event(content: bytes) -> bool:
    """Whether an event of one line that says of no failure is all there is."""
    return (
        0 < content.find(b"\n") == len(content) - 2 and content[-1] == 10 and not content.startswith(_FAILURE_PREFIXES)
    )
