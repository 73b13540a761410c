"""Blocks that move between two real engines: the same tokens as without a cache, the hits that are due, the events."""

from __future__ import annotations

import pytest
from transfer_peers import RECIPES, Engine, prompt

FAMILIES = list(RECIPES)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_that_a_peer_has_computed_is_not_computed_again(family: str) -> None:
    text = prompt(family, 202)
    with Engine(family, prefix_caching=False) as plain, Engine(family) as source, Engine(family) as consumer:
        expected = plain.answer("a", text)
        assert source.answer("a", text) == expected
        source.serve()
        assert consumer.answer("a", text, source.source) == expected
        source.pause()
        assert consumer.cached_tokens("a") == 200
        stats = consumer.transfers.stats
        assert sum(stats.failures.values()) == stats.missing_blocks == 0
        assert (stats.pulls, stats.pulled_blocks) == (1, source.transfers.stats.sent_blocks)
        assert stats.pulled_bytes == source.transfers.stats.sent_bytes > 0
        assert consumer.answer("b", text) == expected
        assert consumer.cached_tokens("b") == 200
