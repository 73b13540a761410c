"""How long an answer will be, from the answers before it: of the same session, of the one that started it, of the same
prompt beginning, of the model. Pure.

What a client allows (`max_tokens`) is a bound and nothing more: most who allow 32,000 tokens get 300. What an engine
reports is not taken at its word either: one absurd figure moves an average by a bounded step.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from router.decide.messages import RouteRequest

TOKENS_PRIOR: Final = 256.0
"""Expected of a model that has answered nothing yet."""
TOKENS_MAX: Final = 131_072
"""No answer counts as longer."""
PREFIX_TOKENS: Final = 256
"""Prompts that begin with the same so many tokens are of a kind: one system prompt, one tool."""
LENGTH_KEYS_MAX: Final = 20_000
_ANSWERS_AVERAGED: Final = 64.0
"""Answers over which an average goes."""
_PRIOR_ANSWERS: Final = 4.0
"""So many answers must be seen of a kind before they count as much as what is known of the more general kind."""
_GROWTH_MAX: Final = 10.0
"""An answer counts as at most so many times what was expected."""


LengthKey = tuple[str, int | str | None]


@dataclass(slots=True)
class _Average:
    count: float = 0.0
    mean: float = 0.0

    def add(self, tokens: float) -> None:
        self.count = self.count + 1.0 if self.count + 1.0 < _ANSWERS_AVERAGED else _ANSWERS_AVERAGED
        self.mean += (tokens - self.mean) / self.count

    def blend_with(self, general: float) -> float:
        """The expectation, where `general` is that of the more general kind."""
        return (self.count * self.mean + _PRIOR_ANSWERS * general) / (self.count + _PRIOR_ANSWERS)


class OutputLengths:
    """Average output lengths by kind of request.

    At most `LENGTH_KEYS_MAX` kinds are stored; the longest unused one is forgotten first.
    """

    def __init__(self) -> None:
        self._averages: OrderedDict[LengthKey, _Average] = OrderedDict()

    def expect(self, request: RouteRequest) -> float:
        """Tokens that will be generated: no fewer than the client asks for, and no more than it allows."""
        request.length_keys = keys = request.length_keys or _length_keys(request)
        tokens = self._expected_tokens(keys)
        if request.output_tokens_min > tokens:
            tokens = float(min(request.output_tokens_min, TOKENS_MAX))
        if 0 < request.output_tokens_max < tokens:
            tokens = float(request.output_tokens_max)
        return tokens if tokens > 1.0 else 1.0

    def record(self, request: RouteRequest, tokens: int) -> None:
        """So many were generated."""
        if tokens < 1:
            return
        keys = request.length_keys or _length_keys(request)
        averages, mean = [self._averages.get(key) for key in keys], TOKENS_PRIOR
        for average in averages:
            if average is not None:
                mean = average.blend_with(mean)
        capped_tokens, tokens_max = float(min(tokens, TOKENS_MAX)), _GROWTH_MAX * mean
        if capped_tokens > tokens_max:
            capped_tokens = tokens_max
        for key, average in zip(keys, averages):
            if average is None:
                average = self._averages[key] = _Average()
            else:
                self._averages.move_to_end(key)
            average.add(capped_tokens)
        while len(self._averages) > LENGTH_KEYS_MAX:
            self._averages.popitem(last=False)

    def forget_session(self, request: RouteRequest) -> None:
        """Its session is over."""
        if request.session is not None:
            self._averages.pop((request.model, request.session), None)

    def _expected_tokens(self, keys: Sequence[LengthKey]) -> float:
        tokens = TOKENS_PRIOR
        for key in keys:
            average = self._averages.get(key)
            if average is not None:
                tokens = average.blend_with(tokens)
        return tokens


def _length_keys(request: RouteRequest) -> list[LengthKey]:
    """What a request is, from the general to the particular."""
    model, token_ids = request.model, request.token_ids
    keys: list[LengthKey] = [(model, None)]
    if token_ids is not None and len(token_ids) >= PREFIX_TOKENS:
        first = token_ids[:PREFIX_TOKENS]
        ids = first if isinstance(first, array) else array("I", first)
        keys.append((model, xxhash.xxh3_64_intdigest(ids)))
    for session in (request.parent, request.session):
        if session is not None:
            keys.append((model, session))
    return keys
