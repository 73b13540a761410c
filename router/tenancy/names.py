"""Which model a request is for: aliases, canaries, fallbacks.

Pure. A conversation falls on the same side every time, in every router, as only its name and the model's decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import xxhash

from router.tenancy.config import SharingConfig, pairs, shares

Parts = Sequence[tuple[str, float]]
_SPAN = float(1 << 64)


class ModelNames:
    """What names stand for."""

    def __init__(self, config: SharingConfig) -> None:
        aliases = pairs(config.model_aliases)
        self.aliases = {name: model for name, model in aliases.items() if "*" not in name}
        """Without patterns: the names that can be listed."""
        self._patterns = [
            _Pattern(name, model)
            for name, model in sorted(aliases.items(), key=lambda pair: -len(pair[0]))
            if "*" in name
        ]
        """The longest first, which is the most specific."""
        self._fallbacks = pairs(config.model_fallbacks)
        self._canaries = shares(config.model_canaries)
        self.renames = bool(aliases or self._fallbacks or self._canaries)
        self.splits = bool(self._canaries)

    def resolve(self, asked: str, conversation: Callable[[], str], serves: Callable[[str], bool]) -> str:
        """The model that is to answer. `serves`: whether somebody who may answer this takes requests for a model. Where
        nobody does, the name that was asked for, an alias aside: what is said of it is what the client knows."""
        model = self.aliases.get(asked) or self._match(asked, serves) or asked
        parts = self._canaries.get(model)
        if parts is not None:
            new = side(model, conversation(), parts)
            if new is not None and serves(new):
                return new
            if not serves(model):
                model = next((other for other, _ in parts if serves(other)), model)
        if model not in self._fallbacks or serves(model):
            return model
        other = model
        while (other := self._fallbacks.get(other, "")) and not serves(other):
            pass
        return other or model

    def _match(self, asked: str, serves: Callable[[str], bool]) -> str | None:
        """The model that a pattern names for a name that nobody serves."""
        found = next((pattern.model for pattern in self._patterns if pattern.matches(asked)), None)
        return None if found is None or serves(asked) else found


class _Pattern(NamedTuple):
    """An alias with one `*`, which stands for any text."""

    text: str
    model: str

    def matches(self, name: str) -> bool:
        begins, _, ends = self.text.partition("*")
        return len(name) >= len(begins) + len(ends) and name.startswith(begins) and name.endswith(ends)


def side(model: str, conversation: str, parts: Parts) -> str | None:
    """Which of the parts a conversation is in; None for the rest."""
    at = xxhash.xxh3_64_intdigest(f"canary\0{model}\0{conversation}".encode("utf-8", "surrogatepass")) / _SPAN
    for new, share in parts:
        if at < share:
            return new
        at -= share
    return None
