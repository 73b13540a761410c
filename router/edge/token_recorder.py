"""Record the token ids of a streamed answer, so that another worker can continue it, and remove ids not asked for.

Only complete server-sent events are forwarded, so that the recorded tokens are those that the client has. Keys are
found by patterns: a quotation mark in a JSON string is escaped, so generated text cannot look like one of them. Ids
stay the digits that came until a worker dies, as most answers are never continued.
"""

from __future__ import annotations

import re
from array import array
from typing import Annotated, Final

import msgspec

EVENT_BYTES_MAX: Final = 4 << 20
"""Longest event that is recorded. From a longer event on, bytes are forwarded as they come."""
ID_BYTES_MAX: Final = 8 << 20
"""Most bytes of the recorded ids of an answer. A longer answer is not continued."""
PLAIN_EVENT_BYTES_MAX: Final = 16 << 10
"""Longest event that is matched with the pattern of plain ones."""

_BLANK_LINE_PATTERN = re.compile(rb"\n\r?\n")
_BLANK_LINE_BYTES: Final = 3
_TEXT = rb'[^"\\]*(?:\\.[^"\\]*)*'
_PLAIN_EVENT_PATTERN = re.compile(
    rb'(data: \{"id":"[^"]*","object":"[^"]*","created":[0-9]*,"model":"[^"]*","choices":\[\{"index":0,(?:'
    rb'"text":"(%b)"|"delta":\{"content":"(%b)"\}|"delta":\{"reasoning(?:_content)?":"%b"(?:,"reasoning_content":"%b")?\})'
    rb'(?:,"logprobs":null)?(?:,"finish_reason":null)?(?:,"stop_reason":null)?)'
    rb'(?:,"prompt_token_ids":null)?,"token_ids":\[([1-9][0-9]{0,8}(?:,[1-9][0-9]{0,8})*)\](\}\](?:,"usage":null)?\}\n\n)'
    % (_TEXT, _TEXT, _TEXT, _TEXT)
)
"""Pattern of an event as vLLM and our engine send it for most tokens. Groups: all before the ids, the text of a
completion, of a chat, the ids, all behind them."""
_KEY = rb'"(prompt_)?token_ids" *: *(null|\[[0-9, ]*\])?'
_TOKEN_IDS_PATTERN = re.compile(rb"," + _KEY + rb"|(?<=[{,])" + _KEY + rb",?")
"""Pattern of a field with token ids, with the comma before it, or behind it where the field is the first one."""
_NO_IDS = (b"", b"null", b"[]")
_KEY_PREFIX_BYTES: Final = len(',,"prompt_')
"""Most bytes of such a field before `token_ids`."""
_FAILURE_PATTERN = re.compile(rb'data: ?\{"error"(?!.*"code" *: *4[0-9]{2}\b)', re.DOTALL)
"""Pattern of an event with a failure of the worker. vLLM reports errors of the request so too, with codes 4xx."""
_FINISH_REASON_PATTERN = re.compile(rb'"finish_reason" *: *"')
_DONE_PREFIXES = (b"data: [DONE]", b"data:[DONE]")
_PLAIN_DELTAS = (b'"delta":{}', b'"delta":{"content"', b'"delta":{"role"')
_token_ids_decoder = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]])


class TokenRecorder:
    """Records the tokens in the events of one streamed answer, so that another worker could continue it.

    The router asks workers to add token ids to their events. Clients that did not ask for them get none.
    """

    __slots__ = (
        "_is_passthrough", "_output_digits", "_pending", "_prompt_digits", "_removes_ids", "_search_start", "_text_end",
        "event_count", "has_finish_reason", "has_parsed_output", "has_worker_failed", "is_done", "is_unrecognized",
        "last_event",
    )  # fmt: skip

    def __init__(self, *, removes_ids: bool) -> None:
        """Make a recorder for one streamed answer. `removes_ids`: forward no token ids, as the client wants none."""
        # The events so far.
        self.event_count = 0
        self.last_event = b""
        """Last forwarded event with a choice."""
        self.is_unrecognized = False
        """Whether an event had output of an unknown kind, or text without token ids."""
        self.has_parsed_output = False
        """Whether an event had reasoning or a tool call."""
        self.has_finish_reason = False
        self.is_done = False
        """Whether the last event, [DONE], has come."""
        self.has_worker_failed = False
        """Whether an event reports that the worker failed."""

        # Token ids, as the decimal digits that came.
        self._removes_ids = removes_ids
        self._prompt_digits = b""
        """JSON list of the prompt's token ids; empty before they come."""
        self._output_digits = bytearray()
        """Token ids of the answer, each followed by a comma."""
        self._text_end = 0
        """Position in `_output_digits` after the last token with complete text: a token may be half a character."""

        # Bytes that are not forwarded yet.
        self._is_passthrough = False
        """Whether all bytes are forwarded as they come."""
        self._pending = bytearray()
        """An incomplete event, or the report of a failure and all bytes after it."""
        self._search_start = 0
        """Position in `_pending` before which no blank line begins."""

    @property
    def prompt_ids(self) -> array[int]:
        """Token ids of the prompt; none if the worker told none, or not as ids."""
        try:
            return _decode_ids(self._prompt_digits)
        except msgspec.MsgspecError:
            return array("I")

    @property
    def output_ids(self) -> array[int]:
        """Token ids of the answer."""
        return _decode_ids(b"[" + self._output_digits[:-1] + b"]")

    @property
    def output_token_count(self) -> int:
        """Number of `output_ids`."""
        return self._output_digits.count(b",")

    @property
    def text_token_count(self) -> int:
        """Number of leading `output_ids` with complete text."""
        return self._output_digits.count(b",", 0, self._text_end)

    def feed(self, content: bytes) -> bytes:
        """Record the tokens in the next bytes of a stream, and return the server-sent events that are complete now.

        The events are forwarded to the client. For example, the bytes `data: {"a": 1}\\n\\ndata: {"b` return the first
        event. The start of the second event is kept until its end comes.
        """
        if self._is_passthrough:
            return content
        plain_event = None if self._pending else _match_plain_event(content)
        if plain_event is not None:  # fast path: nearly always, the bytes are one event with one token
            return self._record_plain_event(plain_event)
        self._pending += content
        complete_events = b"" if self.has_worker_failed else self._take_complete_events()
        if len(self._pending) > EVENT_BYTES_MAX:
            self.is_unrecognized = True
            complete_events += self.stop_recording()
        return complete_events

    def _take_complete_events(self) -> bytes:
        """Remove the complete server-sent events from the pending bytes, record them, and return them for the client.

        A blank line ends each event. An event that reports the worker's failure stays pending with all bytes after it,
        because the client does not get it if another worker continues the answer.
        """
        complete_events = []
        event_start, search_start = 0, self._search_start
        while (blank_line := _BLANK_LINE_PATTERN.search(self._pending, search_start)) is not None:
            event_end = blank_line.end()
            event = bytes(self._pending[event_start:event_end])
            if _FAILURE_PATTERN.match(event) is not None:
                self.has_worker_failed = True
                break
            complete_events.append(self._record_event(event))
            event_start = event_end
            search_start = event_end
        del self._pending[:event_start]
        self._search_start = max(len(self._pending) - _BLANK_LINE_BYTES, 0)
        return b"".join(complete_events)

    def finish(self) -> bytes:
        """Return the bytes after the last complete event, as the answer has ended; none if they report a failure."""
        event = bytes(self._pending)
        if not event or self.has_worker_failed:
            return b""
        self.has_worker_failed = _FAILURE_PATTERN.match(event) is not None
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

    def rewind(self, *, drops_incomplete_text: bool) -> None:
        """Forget the pending bytes, and maybe tokens without complete text, as another worker continues the answer."""
        if drops_incomplete_text:
            del self._output_digits[self._text_end :]
        self._pending.clear()
        self._search_start = 0
        self.has_worker_failed = False

    def _record_event(self, event: bytes) -> bytes:
        """Record what one event adds to a streamed answer, and return the event as it is forwarded to the client.

        This is the event's token ids, whether it has text or a finish reason, or the end of the stream. For example,
        `data: {"choices":[{"delta":{"content":"Hi"},"token_ids":[5]}]}` has token 5 and text. It is forwarded without
        `"token_ids":[5]`, unless the client asked for the ids. To save time, an event is searched for the keys of these
        fields and not parsed. For bytes, `find` is faster than `in`.
        """
        plain_event = _match_plain_event(event)  # plain: token ids with text or reasoning, as most events are
        if plain_event is not None:
            return self._record_plain_event(plain_event)
        self.event_count += 1
        if event.find(b"data:") < 0 or event.find(b'"') < 0:  # a comment, or [DONE]
            self.is_done = self.is_done or event.startswith(_DONE_PREFIXES)
            return event
        old_digit_count = len(self._output_digits)
        forwarded_event = self._record_ids(event)
        has_ids = len(self._output_digits) > old_digit_count
        if _FINISH_REASON_PATTERN.search(forwarded_event) is not None:
            self.has_finish_reason = True
        self._record_text(forwarded_event, has_ids=has_ids)
        if forwarded_event.find(b'"choices":[{') >= 0:
            self.last_event = forwarded_event
        return forwarded_event

    def _record_ids(self, event: bytes) -> bytes:
        """Record the token ids in an event; return the event, without the ids if the client did not ask for them."""
        key_position = event.find(b'token_ids"')
        if key_position < 0:
            return event
        fields_start = max(key_position - _KEY_PREFIX_BYTES, 0)
        return event[:fields_start] + _TOKEN_IDS_PATTERN.sub(self._record_id_field, event[fields_start:])

    def _record_text(self, event: bytes, *, has_ids: bool) -> None:
        """Record whether an event of a streamed answer has text, and whether the answer can still be continued.

        It cannot be after text without token ids (`has_ids`), unless that is the last text, nor after unknown fields.
        """
        # A completion has its text in `text`. A chat has it in a delta, with reasoning, tool calls or unknown fields.
        text_key = b'"text":"'
        delta_position = event.find(b'"delta":{')
        if delta_position >= 0:
            text_key = b'"content":"'
            if event.find(b'"reasoning') >= 0 or event.find(b'"tool_calls":[{') >= 0:
                self.has_parsed_output = True
            elif not event.startswith(_PLAIN_DELTAS, delta_position):
                self.is_unrecognized = True
        key_position = event.find(text_key)
        text_start = key_position + len(text_key)
        first_character = event[text_start : text_start + 1]
        has_text = key_position >= 0 and first_character not in (b'"', b"")
        if has_text:
            self._text_end = len(self._output_digits)
            if not has_ids and not self.has_finish_reason:
                self.is_unrecognized = True

    def _record_plain_event(self, plain_event: re.Match[bytes]) -> bytes:
        """Do what `_record_event` does, in less than half of the time, for a match of `_PLAIN_EVENT_PATTERN`."""
        start, text, chat_text, ids, end = plain_event.groups()
        self.event_count += 1
        self._add_output_ids(ids)
        if text or chat_text:
            self._text_end = len(self._output_digits)
        elif text is None and chat_text is None:
            self.has_parsed_output = True
        self.last_event = start + end if self._removes_ids else plain_event.string
        return self.last_event

    def _record_id_field(self, match: re.Match[bytes]) -> bytes:
        """Record the token ids of a field, of the prompt or of the answer; return the bytes that replace the field."""
        is_prompt, ids = match[1] or match[3], match[2] or match[4] or b""
        try:
            if not is_prompt and _decode_ids(ids):
                self._add_output_ids(ids[1:-1])
        except msgspec.MsgspecError:
            ids = b""
        if not ids:
            self.is_unrecognized = True  # the answer cannot be continued
            return match[0]
        if is_prompt and self._prompt_digits in _NO_IDS:
            self._prompt_digits = ids
        return b"" if self._removes_ids else match[0]

    def _add_output_ids(self, digits: bytes) -> None:
        """Record token ids of the answer. `digits`: the ids, with commas between them."""
        if len(self._output_digits) + len(digits) < ID_BYTES_MAX:
            self._output_digits += digits + b","
        else:
            self.is_unrecognized = True


def _match_plain_event(event: bytes) -> re.Match[bytes] | None:
    """Return the match of an event that is plain and short: matching escapes takes 80 times their bytes."""
    return _PLAIN_EVENT_PATTERN.fullmatch(event) if len(event) <= PLAIN_EVENT_BYTES_MAX else None


def _decode_ids(ids: bytes) -> array[int]:
    """Return the token ids of a JSON list; none for null and no bytes. Raises MsgspecError for anything else."""
    return array("I", () if ids in _NO_IDS else _token_ids_decoder.decode(ids))
