"""Record the token ids of a streamed answer, so that another worker can continue it, and remove ids not asked for.

Only complete server-sent events are forwarded, so that the recorded tokens are those that the client has. Keys are
found by patterns: a quotation mark in a JSON string is escaped, so generated text cannot look like one of them.
"""

from __future__ import annotations

import re
from array import array
from typing import Annotated, Final

import msgspec

EVENT_BYTES_MAX: Final = 4 << 20
"""Longest event. From a longer one on, bytes are forwarded as they come, and nothing is recorded."""
IDS_MAX: Final = 2 << 20
"""Most recorded ids of an answer, and of its prompt. A longer answer is not continued."""

_BLANK_LINE_PATTERN = re.compile(rb"\n\r?\n")
_BLANK_LINE_BYTES: Final = 3
_KEY = rb'"(prompt_)?token_ids" *: *(null|\[[0-9, ]*\])?'
_TOKEN_IDS_PATTERN = re.compile(rb"," + _KEY + rb"|(?<=[{,])" + _KEY + rb",?")
"""Pattern of a field with token ids, with the comma before it, or behind it where the field is the first one."""
_BEFORE_KEY: Final = len(',,"prompt_')
_FAILURE_PREFIXES = (b'data: {"error"', b'data:{"error"')
_FINISH_REASON_PATTERN = re.compile(rb'"finish_reason" *: *"')
_DONE_PREFIXES = (b"data: [DONE]", b"data:[DONE]")
_PLAIN_DELTAS = (b'"delta":{}', b'"delta":{"content"', b'"delta":{"role"')
_token_ids_decoder = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]])


class TokenRecorder:
    """Records the tokens in the events of one streamed answer, so that another worker could continue it.

    The router asks workers to add token ids to their events. Clients that did not ask for them get none.
    """

    __slots__ = (
        "_is_passthrough", "_pending", "_removes_ids", "_search_start", "event_count", "has_finish_reason",
        "has_parsed_output", "has_worker_failed", "is_done", "is_unrecognized", "last_event", "output_ids",
        "prompt_ids", "text_token_count",
    )  # fmt: skip

    def __init__(self, removes_ids: bool) -> None:
        """`removes_ids`: remove token ids from the forwarded events, as the client did not ask for them."""
        self.prompt_ids = array("I")
        self.output_ids = array("I")
        self.text_token_count = 0
        """Number of leading `output_ids` with complete text: a token may be half a character."""
        self.last_event = b""
        """Last forwarded event with a choice."""
        self.event_count = 0
        self.is_unrecognized = False
        """Whether an event had output of an unknown kind, or text without token ids."""
        self.has_parsed_output = False
        """Whether an event had reasoning or a tool call."""
        self.has_finish_reason = False
        self.is_done = False
        """Whether the last event, [DONE], has come."""
        self.has_worker_failed = False
        """Whether an event reports that the worker failed."""
        self._removes_ids = removes_ids
        self._is_passthrough = False
        """Whether all bytes are forwarded as they come."""
        self._pending = bytearray()
        """Bytes that are not forwarded yet: an incomplete event, or the report of a failure and all after it."""
        self._search_start = 0
        """Position in `_pending` before which no blank line begins."""

    def feed(self, content: bytes) -> bytes:
        """Take the next bytes of a stream of events, and return the events that are complete now, to be forwarded.

        For example, the bytes `data: {"a": 1}\\n\\ndata: {"b` return the first event. The start of the second event
        is kept until its end comes.
        """
        if self._is_passthrough:
            return content
        if not self._pending and _is_single_event(content):  # as nearly always
            return self._record_event(content)
        self._pending += content
        complete_events = b"" if self.has_worker_failed else self._take_complete_events()
        if len(self._pending) > EVENT_BYTES_MAX:
            self.is_unrecognized = True
            complete_events += self.stop_recording()
        return complete_events

    def _take_complete_events(self) -> bytes:
        """Take the complete events out of the pending bytes; return these events as they are forwarded.

        An event that reports the worker's failure stays pending with all bytes after it. The client does not get them
        if another worker continues the answer.
        """
        pending, complete_events, event_start = self._pending, [], 0
        if _BLANK_LINE_PATTERN.search(pending, self._search_start):
            for blank_line in _BLANK_LINE_PATTERN.finditer(bytes(pending)):
                event = bytes(pending[event_start : blank_line.end()])
                if event.startswith(_FAILURE_PREFIXES):
                    self.has_worker_failed = True
                    break
                complete_events.append(self._record_event(event))
                event_start = blank_line.end()
            del pending[:event_start]
        self._search_start = max(len(pending) - _BLANK_LINE_BYTES, 0)
        return b"".join(complete_events)

    def finish(self) -> bytes:
        """Return the bytes after the last complete event as an event too, because the answer has ended.

        Return no bytes if they report the worker's failure, which is held back.
        """
        event = bytes(self._pending)
        if not event or self.has_worker_failed:
            return b""
        self.has_worker_failed = event.startswith(_FAILURE_PREFIXES)
        if self.has_worker_failed:
            return b""
        self._pending.clear()
        return self._record_event(event)

    def stop_recording(self) -> bytes:
        """Return the pending bytes, and forward all later bytes as they come."""
        self._is_passthrough = True
        self.has_worker_failed = False
        pending, self._pending = bytes(self._pending), bytearray()
        return pending

    @property
    def is_truncated(self) -> bool:
        """Whether an answer that ends now is incomplete. False if its events are not understood."""
        return self.event_count > 0 and not (
            self.is_unrecognized or self.has_finish_reason or self.is_done or self._is_passthrough
        )

    def rewind(self, drops_incomplete_text: bool) -> None:
        """Forget the pending bytes, as another worker continues the answer.

        `drops_incomplete_text`: forget tokens without complete text, too.
        """
        if drops_incomplete_text:
            del self.output_ids[self.text_token_count :]
        self._pending.clear()
        self._search_start = 0
        self.has_worker_failed = False

    def _record_event(self, event: bytes) -> bytes:
        """Record the tokens of an event and how far the answer is; return the event as it is forwarded.

        For example, `data: {"choices":[{"delta":{"content":"Hi"},"token_ids":[5]}]}` has token 5, and is forwarded
        without `"token_ids":[5]` unless the client asked for it. Events are searched for a few keys and not parsed,
        because each token comes in one; by `find`, because `in` raises and catches an exception for bytes.
        """
        self.event_count += 1
        if event.find(b'"') < 0:
            self.is_done = self.is_done or event.startswith(_DONE_PREFIXES)
            return event  # a comment, or [DONE]
        old_token_count = len(self.output_ids)
        position = event.find(b'token_ids"')
        if position >= 0:
            position = max(position - _BEFORE_KEY, 0)
            event = event[:position] + _TOKEN_IDS_PATTERN.sub(self._record_ids, event[position:])
        if _FINISH_REASON_PATTERN.search(event) is not None:
            self.has_finish_reason = True
        # A chat has its text in a delta, which may also have reasoning, calls of tools or what is not known.
        delta_position, text_key = event.find(b'"delta":{'), b'"text":"'
        if delta_position >= 0:
            text_key = b'"content":"'
            if event.find(b'"reasoning') >= 0 or event.find(b'"tool_calls":[{') >= 0:
                self.has_parsed_output = True
            elif not event.startswith(_PLAIN_DELTAS, delta_position):
                self.is_unrecognized = True
        text_start = event.find(text_key) + len(text_key)
        if text_start >= len(text_key) and event[text_start : text_start + 1] not in (b'"', b""):
            self.text_token_count = len(self.output_ids)
            if self.text_token_count == old_token_count and not self.has_finish_reason:
                self.is_unrecognized = True
        if event.find(b'"choices":[{') >= 0:
            self.last_event = event
        return event

    def _record_ids(self, match: re.Match[bytes]) -> bytes:
        """Record the token ids of a field, of the prompt or of the answer; return the bytes that replace the field."""
        value = match[2] or match[4]
        try:
            token_ids = [] if value == b"null" else _token_ids_decoder.decode(value or b"")
        except msgspec.MsgspecError:
            self.is_unrecognized = True  # the answer cannot be continued
            return match[0]
        if len(self.output_ids) + len(token_ids) > IDS_MAX:
            self.is_unrecognized = True
        elif not (match[1] or match[3]):
            self.output_ids.extend(token_ids)
        elif not self.prompt_ids:
            self.prompt_ids = array("I", token_ids)
        return b"" if self._removes_ids else match[0]


def _is_single_event(content: bytes) -> bool:
    """Return whether the bytes are one event of one line that reports no failure."""
    return (
        0 < content.find(b"\n") == len(content) - 2 and content[-1] == 10 and not content.startswith(_FAILURE_PREFIXES)
    )
