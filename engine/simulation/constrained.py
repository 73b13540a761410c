"""Answers of a simulated engine that must match a grammar: a few words where text is free, and the end soon."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from engine.grammars import Grammars, story
from engine.types import Sequence
from prompts import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

ENDINGS = ('"', "}", "]", ",")
"""What ends a part of JSON, strings first, as brackets may stand in them: said where the grammar lets it."""
TAG_END = "\n</parameter>\n"
"""What ends an argument that stands without quotation marks: in it all of these may stand."""
FREE_TOKENS = 12
"""Tokens of an answer that could end at any time, where the simulation names no length."""
CANDIDATES_MAX = 64
FOLLOWERS_MAX = 4096


@dataclass(slots=True)
class _MatcherState:
    """A matcher, and how much of its answer it has read."""

    matcher: LLMatcher
    read: int = 0
    forced: list[int] = field(default_factory=list)
    """What must follow, as the tokenizer writes it, so that the next prompt is a prefix hit; the next token last."""


class ConstrainedAnswers:
    """Chooses tokens that a grammar allows. The same prompt and grammar give the same answer."""

    def __init__(self, grammars: Grammars, tokenizer: Tokenizer, eos_token_id: int, length: int | None) -> None:
        self._grammars = grammars
        self._tokenizer = tokenizer
        self._eos = eos_token_id
        self._length = FREE_TOKENS if length is None else length
        self._tag_end = tokenizer.hf.encode(TAG_END, add_special_tokens=False).ids
        self._order: list[int] | None = None
        self._followers: OrderedDict[str, _MatcherState] = OrderedDict()

    def next(self, seq: Sequence, word: Callable[[Sequence], int]) -> int | str:
        """Return the token after the last of `seq`, or why none can follow. `word`: what a free answer would say."""
        constraint = seq.request.params.constraint
        assert constraint is not None
        said = seq.token_ids[seq.prompt_len :]
        if (
            constraint.reasoning_end_token is not None and constraint.reasoning_start_token is None
        ):  # a thought has begun: end it
            if constraint.reasoning_end_token not in said:
                return constraint.reasoning_end_token
            said = said[said.index(constraint.reasoning_end_token) + 1 :]
        follower = self._follower(seq.request.request_id, constraint.lark, said)
        if follower.forced:
            return follower.forced[-1]
        matcher = follower.matcher
        mask: bytes = matcher.compute_bitmask()
        if matcher.is_error():
            return story(matcher)

        follower.forced = matcher.compute_ff_tokens()[::-1]
        if follower.forced:
            return follower.forced[-1]

        def allowed(token: int) -> bool:
            return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)

        wanted = word(seq)
        speaks = allowed(wanted) and wanted != self._eos
        if allowed(self._eos) and (not speaks or len(said) + 1 >= self._length):
            return self._eos
        if "</parameter>" in constraint.lark:
            ending = self._tag_ending(said)
            if ending is not None and not allowed(self._eos) and allowed(ending):
                return ending
        if speaks and (allowed(self._eos) or not said or not self._is_word(said[-1])):
            return wanted
        candidates = list(islice(filter(allowed, self._tokens()), CANDIDATES_MAX))
        if not candidates:
            return self._eos
        if self._tokenizer.hf.decode([candidates[0]]) in ENDINGS:
            return candidates[0]
        return min(candidates, key=Counter(said).__getitem__)  # others than before: a repetition ends

    def _follower(self, name: str, lark: str, said: list[int]) -> _MatcherState:
        follower = self._followers.pop(name, None)
        if follower is None or follower.read > len(said):
            follower = _MatcherState(self._grammars.matcher(lark))
        for token in said[follower.read :]:
            if follower.forced and follower.forced.pop() != token:
                follower.forced.clear()
            if follower.matcher.is_stopped() or not follower.matcher.consume_token(token):
                break
        follower.read = len(said)
        self._followers[name] = follower
        while len(self._followers) > FOLLOWERS_MAX:
            self._followers.popitem(last=False)
        return follower

    def _tag_ending(self, said: list[int]) -> int | None:
        """The next token of TAG_END, where the end of a value may stand before it."""
        for done, token in reversed(list(enumerate(self._tag_end))):
            before = len(said) - done - 1
            if before >= 0 and said[before + 1 :] == self._tag_end[:done] and self._is_value(said[before]):
                return token
        return None

    def _is_value(self, token: int) -> bool:
        end = self._tokenizer.hf.decode([token])[-1:]
        return end.isalnum() or end in ENDINGS[:3]

    def _is_word(self, token: int) -> bool:
        return self._tokenizer.hf.decode([token]).strip().isalpha()

    def _tokens(self) -> list[int]:
        """All ids, those that are said first where several may be."""
        if self._order is None:
            texts = [
                self._tokenizer.hf.decode([i], skip_special_tokens=False) for i in range(self._grammars.words.count)
            ]

            def place(token: int) -> tuple[int, int]:
                text = texts[token]
                if text in ENDINGS:
                    return 0, ENDINGS.index(text)
                return (1, token) if text.isalnum() else (3, token) if not text or text.isspace() else (2, token)

            self._order = sorted(range(len(texts)), key=place)
        return self._order
