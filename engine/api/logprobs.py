"""Logprobs of the engine in the three forms that answers have: chat, completions, and vLLM's prompt_logprobs. Pure.

Every position becomes JSON once, when it arrives. An answer may have a million logprobs: as structs until its end they
took 400 bytes and 19 us each (2 slow cores), as JSON 60 bytes and a tenth of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from engine.api.detokenizer import DetokenizerFactory
from engine.api.response_types import CompletionLogprobs
from engine.types import TokenLogprobs

FLOOR = -9999.0
"""JSON has no minus infinity; OpenAI's and vLLM's stand-in for "impossible"."""
SLICE_POSITIONS = 64
"""Positions that are formatted at a time: some milliseconds."""
_encode = msgspec.json.encode


@dataclass(slots=True)
class PendingLogprobs:
    """The parallel lists of a completion's logprobs that no chunk has carried yet."""

    text_offset: list[int] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    top_logprobs: list[bytes] = field(default_factory=list)
    """JSON of each position."""
    next_offset: int = 0

    def take(self) -> CompletionLogprobs:
        """Return what is here, and begin anew behind it."""
        made = CompletionLogprobs(self.text_offset, self.token_logprobs, self.tokens, json_list(self.top_logprobs))
        self.text_offset, self.token_logprobs, self.tokens, self.top_logprobs = [], [], [], []
        return made


def json_list(items: list[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[%b]" % b",".join(items))


class LogprobFormatter:
    """Spells token ids. `as_token_ids`: as `token_id:N`, for clients that must tell every token apart."""

    def __init__(self, factory: DetokenizerFactory, as_token_ids: bool = False) -> None:
        self._factory = factory
        self._as_token_ids = as_token_ids
        self._strings: dict[int, bytes] = {}
        """Token id -> its text, as JSON."""
        self._bytes: dict[int, bytes] = {}
        """Token id -> its bytes, as JSON."""

    def spell(self, token_id: int) -> str:
        if self._as_token_ids:
            return f"token_id:{token_id}"
        return self._factory.token_bytes(token_id).decode("utf-8", "replace")

    def chat(self, position: TokenLogprobs) -> bytes:
        """JSON of OpenAI's chat form."""
        others = [b"%b}" % self._chat_entry(token_id, logprob) for token_id, logprob in position.top]
        own = self._chat_entry(position.token_id, position.logprob)
        return b'%b,"top_logprobs":[%b]}' % (own, b",".join(others))

    def completion(self, position: TokenLogprobs | None, token_id: int, scores: PendingLogprobs) -> None:
        """Add a position to `scores`. A prompt's first token has no logprob: None."""
        token = self.spell(token_id)
        scores.text_offset.append(scores.next_offset)
        scores.next_offset += len(token)
        scores.tokens.append(token)
        if position is None:
            scores.token_logprobs.append(None)
            scores.top_logprobs.append(b"null")
            return
        scores.token_logprobs.append(_at_least_floor(position.logprob))
        top = {self._string(token_id): _number(position.logprob)}
        top.update((self._string(other), _number(logprob)) for other, logprob in position.top)
        scores.top_logprobs.append(b"{%b}" % b",".join([b"%b:%b" % pair for pair in top.items()]))

    def prompt(self, position: TokenLogprobs | None) -> bytes:
        """JSON of vLLM's `prompt_logprobs`."""
        if position is None:
            return b"null"
        entries = {position.token_id: (position.logprob, position.rank)}
        entries.update((token_id, (logprob, rank)) for rank, (token_id, logprob) in enumerate(position.top, 1))
        made = [
            b'"%d":{"logprob":%b,"rank":%d,"decoded_token":%b}'
            % (token_id, _number(logprob), rank, self._string(token_id))
            for token_id, (logprob, rank) in entries.items()
        ]
        return b"{%b}" % b",".join(made)

    def _chat_entry(self, token_id: int, logprob: float) -> bytes:
        token_bytes = self._bytes.get(token_id)
        if token_bytes is None:
            token_bytes = self._bytes[token_id] = _encode(list(self._factory.token_bytes(token_id)))
        return b'{"token":%b,"logprob":%b,"bytes":%b' % (self._string(token_id), _number(logprob), token_bytes)

    def _string(self, token_id: int) -> bytes:
        string = self._strings.get(token_id)
        if string is None:
            string = self._strings[token_id] = _encode(self.spell(token_id))
        return string


def _number(logprob: float) -> bytes:
    return repr(_at_least_floor(logprob)).encode()


def _at_least_floor(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR
