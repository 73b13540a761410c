"""How much of a prompt the cache knows: the nodes of its longest known prefix, looked up again while it waits.

A request that waits is asked for in every step. What was found for it is kept, and only what changed since is looked
at. Refuses to know who holds which block.
"""

from __future__ import annotations

from engine.cache.attention_windows import AttentionWindows
from engine.cache.block_hasher import BlockHasher
from engine.cache.blocks import BlockKey, Node
from engine.cache.prefix_tree import PrefixTree
from engine.types import Sequence


class PrefixMatcher:
    """The known prefixes of sequences that wait."""

    def __init__(self, block_size: int, hasher: BlockHasher, tree: PrefixTree, windows: AttentionWindows) -> None:
        self._block_size = block_size
        self._hasher = hasher
        self._tree = tree
        self._windows = windows
        self._nodes_by_sequence: dict[Sequence, list[Node]] = {}

    def list_keys(self, seq: Sequence) -> list[BlockKey]:
        """Names of the blocks of `seq` that need not be computed if the cache has them.

        At least one token is left to compute, and all of them where the logprobs of the prompt are wanted.
        """
        if seq.request.params.prompt_logprobs is not None:
            return []
        block_count = (len(seq.token_ids) - 1) // self._block_size
        keys = self._hasher.block_keys(seq, block_count)
        return keys if len(keys) <= block_count else keys[:block_count]

    def match(self, seq: Sequence) -> list[Node]:
        """The nodes of the longest known prefix of `seq`, with those that the step being planned will compute.

        The list is good until the next call for `seq`.
        """
        nodes = self._nodes_by_sequence.setdefault(seq, [])
        self._tree.extend_match(self.list_keys(seq), nodes)
        return nodes

    def count_resumable_blocks(self, seq: Sequence) -> int:
        """Leading blocks of `seq` after which it can resume."""
        return self._windows.count_resumable_nodes(self.match(seq))

    def forget(self, seq: Sequence) -> None:
        """`seq` waits no more."""
        self._nodes_by_sequence.pop(seq, None)
