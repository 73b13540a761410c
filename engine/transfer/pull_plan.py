"""Pulls, and the choice of their blocks: those that the cache lacks of the longest prefix from which it can resume."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from engine.cache.attention_windows import AttentionWindows
from engine.cache.blocks import Node
from engine.cache.spec import FULL_KIND
from engine.transfer.messages import SentBlock
from engine.types import BlockKey, KVSource


class PullItem(NamedTuple):
    """A block that a pull moves: its place among the blocks of the prompt, and its kind."""

    block_index: int
    kind: int


@dataclass(slots=True, eq=False)
class Pull:
    """State of a pull: one prompt's KV blocks are fetched from another engine, while one or more requests wait.

    The thread of the network fetches the blocks. The thread of the step loop stores them in the cache.
    """

    source: KVSource
    """Engine that has the blocks."""
    keys: list[BlockKey]
    """Keys of the prompt's blocks that are worth pulling, from the first block on."""
    is_abandoned: bool = False
    """Whether nothing more is stored, because no request waits, or the cache was reset."""

    # Only the thread of the step loop uses these.
    end: Future[None] = field(init=False)
    """Done when the requests need not wait any more: the pull has ended, or was cancelled."""
    waiting_count: int = 0
    """Number of requests that wait."""
    nodes: list[Node] = field(default_factory=list)
    """Nodes of the prefix tree for the prompt's leading cached blocks."""
    is_stored: bool = False
    """Whether the last blocks are stored, so that the pull ends at once."""

    @property
    def id(self) -> tuple[KVSource, int]:
        """Source and hash of the last block, which are equal for requests that can share the pull."""
        return self.source, self.keys[-1].hash

    def describe_block(self, item: PullItem) -> SentBlock:
        """Return the description with which a source sends a block of the prompt."""
        index = item.block_index
        parent_hash = self.keys[index - 1].hash if index else None
        return SentBlock.describe(self.keys[index], parent_hash, item.kind)

    def has_stored(self, item: PullItem) -> bool:
        """Return whether the cache has a block of the prompt now."""
        return item.block_index < len(self.nodes) and self.nodes[item.block_index].has_computed(item.kind)


def count_resumable_blocks(masks: Sequence[int], windows: AttentionWindows) -> int:
    """Return after how many leading blocks of a prompt a sequence can resume.

    `masks[i]` has bit k set if the block of kind k is cached at index i.
    """

    def has_block(kind: int, index: int) -> bool:
        return bool(masks[index] >> kind & 1)

    end = next((index for index in range(len(masks)) if not has_block(FULL_KIND, index)), len(masks))
    return windows.count_resumable_blocks(end, has_block)


def choose_blocks_to_pull(
    local_masks: Sequence[int], remote_masks: Sequence[int], kind_count: int, windows: AttentionWindows
) -> list[PullItem]:
    """Return the blocks of a prompt to fetch from another engine, so that as much as possible need not be computed.

    Bit k of mask i says whether a side has the prompt's block i for kind k: full attention, a sliding window, or a
    recurrent state. For example, with one kind, the local masks [1] and the remote masks [1, 1, 1], blocks 1 and 2 are
    fetched. The list is empty if the local blocks suffice; blocks come after the blocks that they need.
    """
    masks = list(zip_longest(local_masks, remote_masks, fillvalue=0))
    end = count_resumable_blocks([local_mask | remote_mask for local_mask, remote_mask in masks], windows)
    if end <= count_resumable_blocks(local_masks, windows):
        return []
    items: list[PullItem] = []
    for kind in range(kind_count):
        for index in range(windows.find_first_index_to_resume(kind, end), end):
            local_mask, _ = masks[index]
            is_local = local_mask >> kind & 1
            if not is_local:
                items.append(PullItem(index, kind))
    return items


def split_into_batches(
    items: Sequence[PullItem], bytes_by_kind: Sequence[int], batch_bytes_max: int, batch_items_max: int
) -> Iterator[list[PullItem]]:
    """Split the blocks to fetch into consecutive batches, within a limit on the bytes and on the number of blocks.

    `bytes_by_kind`: size of a block by its kind. A block larger than `batch_bytes_max` gets a batch of its own.
    """
    batch: list[PullItem] = []
    batch_bytes = 0
    for item in items:
        item_bytes = bytes_by_kind[item.kind]
        is_full = batch_bytes + item_bytes > batch_bytes_max or len(batch) == batch_items_max
        if batch and is_full:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(item)
        batch_bytes += item_bytes
    if batch:
        yield batch
