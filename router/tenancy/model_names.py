"""Which model a request is for: aliases, canaries, fallbacks.

Pure. A conversation falls on the same side every time, in every router, as only its name and the model's decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import xxhash

from router.tenancy.config import TenancyConfig, parse_canaries, parse_pairs

CanaryShares = Sequence[tuple[str, float]]
_SPAN = float(1 << 64)


class ModelNames:
    """What names stand for."""

    def __init__(self, config: TenancyConfig) -> None:
        aliases = parse_pairs(config.model_aliases)
        self.aliases = {name: model for name, model in aliases.items() if "*" not in name}
        """Without patterns: the names that can be listed."""
        self._patterns = [
            _AliasPattern(name, model)
            for name, model in sorted(aliases.items(), key=lambda pair: -len(pair[0]))
            if "*" in name
        ]
        """The longest first, which is the most specific."""
        self._fallbacks = parse_pairs(config.model_fallbacks)
        self._canaries = parse_canaries(config.model_canaries)
        self.has_renames = bool(aliases or self._fallbacks or self._canaries)
        self.has_canaries = bool(self._canaries)

    def resolve(self, requested_model: str, conversation: Callable[[], str], is_served: Callable[[str], bool]) -> str:
        """The model that is to answer. `is_served`: whether somebody who may answer this takes requests for a model.
        Where nobody does, the name that was asked for, an alias aside: what is said of it is what the client knows."""
        model = self.aliases.get(requested_model) or self._match_pattern(requested_model, is_served) or requested_model
        canaries = self._canaries.get(model)
        if canaries is not None:
            canary = assign_canary(model, conversation(), canaries)
            if canary is not None and is_served(canary):
                return canary
            if not is_served(model):
                model = next((fallback for fallback, _ in canaries if is_served(fallback)), model)
        if model not in self._fallbacks or is_served(model):
            return model
        fallback = model
        while (fallback := self._fallbacks.get(fallback, "")) and not is_served(fallback):
            pass
        return fallback or model

    def _match_pattern(self, requested_model: str, is_served: Callable[[str], bool]) -> str | None:
        """The model that a pattern names for a name that nobody serves."""
        model = next((pattern.model for pattern in self._patterns if pattern.matches(requested_model)), None)
        return None if model is None or is_served(requested_model) else model


class _AliasPattern(NamedTuple):
    """An alias with one `*`, which stands for any text."""

    text: str
    model: str

    def matches(self, name: str) -> bool:
        begins, _, ends = self.text.partition("*")
        return len(name) >= len(begins) + len(ends) and name.startswith(begins) and name.endswith(ends)


def assign_canary(model: str, conversation: str, canaries: CanaryShares) -> str | None:
    """Which of the parts a conversation is in; None for the rest."""
    position = xxhash.xxh3_64_intdigest(f"canary\0{model}\0{conversation}".encode("utf-8", "surrogatepass")) / _SPAN
    for canary, share in canaries:
        if position < share:
            return canary
        position -= share
    return None
