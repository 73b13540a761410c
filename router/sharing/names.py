"""Which model a request is for: aliases, canaries, fallbacks.

Pure. A conversation falls on the same side every time, in every router, as only its name and the model's decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import xxhash

from router.sharing.config import SharingConfig, pairs, shares

Parts = Sequence[tuple[str, float]]
_SPAN = float(1 << 64)


class ModelNames:
    """What names stand for."""

    def __init__(self, config: SharingConfig) -> None:
        self.aliases = pairs(config.model_aliases)
        self._fallbacks = pairs(config.model_fallbacks)
        self._canaries = shares(config.model_canaries)
        self.renames = bool(self.aliases or self._fallbacks or self._canaries)
        self.splits = bool(self._canaries)

    def resolve(self, asked: str, conversation: Callable[[], str], serves: Callable[[str], bool]) -> str:
        """The model that is to answer. `serves`: whether somebody who may answer this takes requests for a model. Where
        nobody does, the name that was asked for, an alias aside: what is said of it is what the client knows."""
        model = self.aliases.get(asked, asked)
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


def side(model: str, conversation: str, parts: Parts) -> str | None:
    """Which of the parts a conversation is in; None for the rest."""
    at = xxhash.xxh3_64_intdigest(f"canary\0{model}\0{conversation}".encode("utf-8", "surrogatepass")) / _SPAN
    for new, share in parts:
        if at < share:
            return new
        at -= share
    return None
