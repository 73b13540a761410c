"""Finds the nodes of a prompt's longest cached prefix.

A waiting request is looked up in every step. Its last result is kept, and only what changed since is looked up again.
Refuses to know which sequence holds which block.
"""

from __future__ import annotations

from engine.cache.block_hasher import BlockHasher
from engine.cache.blocks import BlockKey, Node
from engine.cache.prefix_tree import PrefixTree
from engine.types import Sequence


class PrefixMatcher:
    """Finds the cached prefix of each waiting sequence, and remembers it from step to step."""

    def __init__(self, block_size: int, hasher: BlockHasher, tree: PrefixTree) -> None:
        self._block_size = block_size
        self._hasher = hasher
        self._tree = tree
        self._nodes_by_sequence: dict[Sequence, list[Node]] = {}

    def list_keys(self, seq: Sequence) -> list[BlockKey]:
        """Return the keys of the blocks of `seq` that need not be computed if the cache has them.

        The last token must be computed in any case. If the request wants logprobs of its prompt, all tokens must.
        """
        if seq.request.params.prompt_logprobs is not None:
            return []
        block_count = (len(seq.token_ids) - 1) // self._block_size
        keys = self._hasher.block_keys(seq, block_count)
        return keys if len(keys) <= block_count else keys[:block_count]

    def match(self, seq: Sequence) -> list[Node]:
        """Return the nodes of the longest cached prefix of `seq`; blocks that planned steps compute count as cached.

        The list is valid until the next call for `seq`.
        """
        nodes = self._nodes_by_sequence.setdefault(seq, [])
        self._tree.extend_match(self.list_keys(seq), nodes)
        return nodes

    def forget(self, seq: Sequence) -> None:
        """Drop the result for `seq`, which waits no more."""
        self._nodes_by_sequence.pop(seq, None)
