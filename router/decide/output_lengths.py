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
KINDS_MAX: Final = 20_000
_MEMORY: Final = 64.0
"""Answers over which an average goes."""
_DOUBT: Final = 4.0
"""So many answers must be seen of a kind before they count as much as what is known of the more general kind."""
_STEP: Final = 10.0
"""An answer counts as at most so many times what was expected."""


Kind = tuple[str, int | str | None]


@dataclass(slots=True)
class _Average:
    count: float = 0.0
    mean: float = 0.0

    def add(self, tokens: float) -> None:
        self.count = self.count + 1.0 if self.count + 1.0 < _MEMORY else _MEMORY
        self.mean += (tokens - self.mean) / self.count

    def over(self, general: float) -> float:
        """The expectation, where `general` is that of the more general kind."""
        return (self.count * self.mean + _DOUBT * general) / (self.count + _DOUBT)


class OutputLengths:
    """Averages by kind of request; at most `KINDS_MAX` kinds, the longest unused forgotten."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[Kind, _Average] = OrderedDict()

    def expect(self, request: RouteRequest) -> float:
        """Tokens that will be generated: no fewer than the client asks for, and no more than it allows."""
        request.kinds = kinds = request.kinds or _kinds(request)
        tokens = self._mean(kinds)
        if request.output_min > tokens:
            tokens = float(min(request.output_min, TOKENS_MAX))
        if 0 < request.output_max < tokens:
            tokens = float(request.output_max)
        return tokens if tokens > 1.0 else 1.0

    def seen(self, request: RouteRequest, tokens: int) -> None:
        """So many were generated."""
        if tokens < 1:
            return
        kinds = request.kinds or _kinds(request)
        found, mean = [self._kinds.get(kind) for kind in kinds], TOKENS_PRIOR
        for known in found:
            if known is not None:
                mean = known.over(mean)
        counted, most = float(min(tokens, TOKENS_MAX)), _STEP * mean
        if counted > most:
            counted = most
        for kind, known in zip(kinds, found):
            if known is None:
                known = self._kinds[kind] = _Average()
            else:
                self._kinds.move_to_end(kind)
            known.add(counted)
        while len(self._kinds) > KINDS_MAX:
            self._kinds.popitem(last=False)

    def forget(self, request: RouteRequest) -> None:
        """Its session is over."""
        if request.session is not None:
            self._kinds.pop((request.model, request.session), None)

    def _mean(self, kinds: Sequence[Kind]) -> float:
        tokens = TOKENS_PRIOR
        for kind in kinds:
            known = self._kinds.get(kind)
            if known is not None:
                tokens = known.over(tokens)
        return tokens


def _kinds(request: RouteRequest) -> list[Kind]:
    """What a request is, from the general to the particular."""
    model, token_ids = request.model, request.token_ids
    kinds: list[Kind] = [(model, None)]
    if token_ids is not None and len(token_ids) >= PREFIX_TOKENS:
        first = token_ids[:PREFIX_TOKENS]
        ids = first if isinstance(first, array) else array("I", first)
        kinds.append((model, xxhash.xxh3_64_intdigest(ids)))
    for session in (request.parent, request.session):
        if session is not None:
            kinds.append((model, session))
    return kinds
