"""Expected lengths of answers, averaged over earlier answers of similar requests. No I/O.

Similar requests have the same session, parent session, beginning of the prompt, or model. A client's `max_tokens` is
only a bound: most answers with 32,000 allowed tokens have 300. One absurd length that an engine reports moves an
average by a bounded step.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from options.bounded_dict import BoundedDict
from router.decide.messages import RouteRequest

TOKENS_PRIOR: Final = 256.0
"""Expected length before a model's first answer."""
TOKENS_MAX: Final = 131_072
"""Length above which answers count as this long."""
PREFIX_TOKENS: Final = 256
"""Prompts with this many first tokens in common are similar: they have one system prompt or tool."""
LENGTH_KEYS_MAX: Final = 20_000
_ANSWERS_AVERAGED: Final = 64.0
"""Answers over which a length is averaged."""
_PRIOR_ANSWERS: Final = 4.0
"""Number of answers that the average of the more general group counts as."""
_GROWTH_MAX: Final = 10.0
"""An answer counts as at most this many times its expected length."""


LengthKey = tuple[str, int | str | None]


@dataclass(slots=True)
class _Average:
    count: float = 0.0
    mean: float = 0.0


class OutputLengths:
    """Average lengths of earlier answers, from which the length of a new answer is estimated.

    There is an average for each group of similar requests: those of one session, of one parent session, with one
    beginning of the prompt, or for one model. If there are over `LENGTH_KEYS_MAX` groups, the one whose last answer is
    the oldest is dropped.
    """

    def __init__(self) -> None:
        self._averages: BoundedDict[LengthKey, _Average] = BoundedDict(LENGTH_KEYS_MAX)

    def estimate_length(self, request: RouteRequest) -> float:
        """Return the expected number of output tokens, at least 1 and within the bounds that the client sets."""
        tokens = self._blend_averages(_list_groups(request))
        if request.output_tokens_min > tokens:
            tokens = float(min(request.output_tokens_min, TOKENS_MAX))
        if 0 < request.output_tokens_max < tokens:
            tokens = float(request.output_tokens_max)
        return tokens if tokens > 1.0 else 1.0

    def record_length(self, request: RouteRequest, tokens: int) -> None:
        """Add the length of an answer to the averages of the groups that its request belongs to.

        A length is capped at `_GROWTH_MAX` times the expected one, so that a wrong report cannot spoil an average. An
        average is over about the last `_ANSWERS_AVERAGED` answers.
        """
        if tokens < 1:
            return
        groups = _list_groups(request)
        growth_limit = _GROWTH_MAX * self._blend_averages(groups)
        capped_tokens = min(float(tokens), float(TOKENS_MAX), growth_limit)
        for group in groups:
            average = self._averages.get(group) or _Average()
            self._averages[group] = average  # which makes it the newest
            average.count = min(average.count + 1.0, _ANSWERS_AVERAGED)
            average.mean += (capped_tokens - average.mean) / average.count

    def forget_session(self, request: RouteRequest) -> None:
        """Forget the average of a request's session."""
        if request.session is not None:
            self._averages.pop((request.model, request.session), None)

    def _blend_averages(self, groups: Sequence[LengthKey]) -> float:
        """Return the expected length from the averages of these groups, the most general first.

        The estimate from more general groups counts as _PRIOR_ANSWERS answers of the next group.
        """
        tokens = TOKENS_PRIOR
        for group in groups:
            average = self._averages.get(group)
            if average is not None:
                count = average.count
                tokens = (count * average.mean + _PRIOR_ANSWERS * tokens) / (count + _PRIOR_ANSWERS)
        return tokens


def _list_groups(request: RouteRequest) -> list[LengthKey]:
    """Return the groups that a request belongs to, the most general first."""
    model = request.model
    token_ids = request.token_ids
    keys: list[LengthKey] = [(model, None)]
    if token_ids is not None and len(token_ids) >= PREFIX_TOKENS:
        prefix = token_ids[:PREFIX_TOKENS]
        prefix_array = prefix if isinstance(prefix, array) else array("I", prefix)
        keys.append((model, xxhash.xxh3_64_intdigest(prefix_array)))
    for session in (request.parent, request.session):
        if session is not None:
            keys.append((model, session))
    return keys
