"""Choice of a request's model by aliases, canaries and fallbacks. No I/O.

A conversation gets the same canary every time and in every router, as only its key and the model's name decide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import xxhash

from router.tenancy.config import TenancyConfig, parse_canaries, parse_rules

CanaryShares = Sequence[tuple[str, float]]
_HASH_RANGE = float(1 << 64)


class ModelNames:
    """Resolves the model that a request names to the model that serves it, by rules for aliases, canaries, fallbacks.

    An alias is another name of a model. A canary serves a share of a model's conversations. A fallback serves the
    requests for a model while no worker of it is up.
    """

    def __init__(self, config: TenancyConfig) -> None:
        alias_rules = parse_rules(config.model_aliases)  # alias -> model
        self.model_by_alias = {name: model for name, model in alias_rules.items() if "*" not in name}
        """Models by alias, for aliases without `*`, which can be listed."""
        names_with_star = sorted((name for name in alias_rules if "*" in name), key=len, reverse=True)
        self._model_by_pattern = {_compile_alias(name): alias_rules[name] for name in names_with_star}
        """Models by alias, for aliases with `*`, the longest first, because it is the most specific."""
        self._fallback_by_model = parse_rules(config.model_fallbacks)
        self._canaries_by_model = parse_canaries(config.model_canaries)
        self.has_renames = bool(alias_rules or self._fallback_by_model or self._canaries_by_model)
        self.has_canaries = bool(self._canaries_by_model)

    def resolve(
        self, requested_model: str, get_conversation_key: Callable[[], str], is_served: Callable[[str], bool]
    ) -> str:
        """Return the model that should answer a request for `requested_model`.

        `get_conversation_key`: returns the conversation's key, which selects a canary. `is_served`: returns whether a
        worker can answer this request with a model. If no rule leads to a served model, the result is the alias's model
        or the requested name, for the error message.
        """
        model = self._resolve_alias(requested_model, is_served)
        canary_shares = self._canaries_by_model.get(model)
        if canary_shares is not None:
            canary = assign_canary(model, get_conversation_key(), canary_shares)
            if canary is not None and is_served(canary):
                return canary
            if not is_served(model):  # any canary that is served is better than an error
                model = next((canary for canary, _ in canary_shares if is_served(canary)), model)
        return self._find_served_fallback(model, is_served) or model

    def _resolve_alias(self, requested_model: str, is_served: Callable[[str], bool]) -> str:
        """Return the model that an alias stands for. A served name is an alias only if it is listed without `*`."""
        model = self.model_by_alias.get(requested_model)
        if model is not None:
            return model
        for pattern, model in self._model_by_pattern.items():
            if pattern.fullmatch(requested_model):
                return requested_model if is_served(requested_model) else model
        return requested_model

    def _find_served_fallback(self, model: str, is_served: Callable[[str], bool]) -> str | None:
        """Return the first served one of a model, its fallback, the fallback's fallback, and so on; None for none."""
        candidate: str | None = model
        while candidate is not None and not is_served(candidate):
            candidate = self._fallback_by_model.get(candidate)
        return candidate


def _compile_alias(name: str) -> re.Pattern[str]:
    """Return the pattern of the names that an alias matches: its `*` stands for any text."""
    return re.compile(re.escape(name).replace(r"\*", ".*"), re.DOTALL)


def assign_canary(model: str, conversation_key: str, canaries: CanaryShares) -> str | None:
    """Return the canary of a conversation; None if the conversation stays with the model."""
    hashed_text = f"canary\0{model}\0{conversation_key}".encode("utf-8", "surrogatepass")
    position = xxhash.xxh3_64_intdigest(hashed_text) / _HASH_RANGE  # from 0 to 1, evenly distributed
    for canary, share in canaries:
        if position < share:
            return canary
        position -= share
    return None
