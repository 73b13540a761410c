"""What will be cached where because a prompt was sent there, before the engine says so and where it never does.

Three books are told of every prompt: the pins (until its events come), the histories (targets without events), the
working sets (what a cache of known size is needed for). Decides nothing.
"""

from __future__ import annotations

from router.decide.choose import AskedPrompt
from router.decide.config import CoreConfig
from router.decide.history import CHUNK_TOKENS, HistoryCache
from router.decide.pins import PinBook
from router.decide.target import Target
from router.decide.working_set import WorkingSets
from router.index.protocol import PrefixIndex


class Promised:
    """The books of one core. `histories` is the registry's: target name -> approximate cache."""

    def __init__(
        self, index: PrefixIndex, histories: dict[str, HistoryCache], working_sets: WorkingSets, config: CoreConfig
    ) -> None:
        self.pins = PinBook(index, config.pin_grace_s)
        self._histories = histories
        self._working_sets = working_sets
        self._chunk_tokens = config.working_set.chunk_tokens

    def sent(self, request_id: str, target: Target, prompt: AskedPrompt, now: float, *, cached_share: float) -> None:
        """A prompt of which `cached_share` (0 to 1) is cached there went to the target."""
        history = self._histories.get(target.name)
        if history is not None:
            history.insert(prompt.keys(CHUNK_TOKENS))
        else:
            self.pins.pin(request_id, target.holder, prompt.ids, prompt.scope)
        if self._working_sets.follows(target.name):
            keys = prompt.keys(self._chunk_tokens)
            self._working_sets.sent(target.name, keys, len(prompt.ids), now, cached_share=cached_share)

    def lost(self, target: Target) -> None:
        """Its worker died: nothing is cached there any more. Pins stay, as its requests are still to end."""
        self._working_sets.clear(target.name)
        history = self._histories.get(target.name)
        if history is not None:
            history.clear()
