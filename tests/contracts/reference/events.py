"""How to read one event: is it well-formed and dense, which tier is it about, what besides tokens tells prompts apart.

Owns the conventions of vLLM and SGLang for tiers, LoRA names, salts and media keys. Refuses to know names and holders.
"""

from __future__ import annotations

from typing import Any

from events.types import AllBlocksCleared, BlockRemoved, BlockStored, Event
from router.index.protocol import CPU, GPU, REMOTE, STORAGE, TIERS

BLOCK_SIZE_MAX = (1 << 24) - 1
TOKEN_ID_END = 1 << 32
INT64_END = 1 << 63

_TIER_OF_MEDIUM = {
    None: GPU,
    "GPU": GPU,
    "CPU": CPU,
    "CPU_PINNED": CPU,
    "DISK": STORAGE,
    "STORAGE": STORAGE,
    "EXTERNAL": REMOTE,
    "REMOTE": REMOTE,
}
_SIGNED: dict[type, tuple[str, ...]] = {
    BlockStored: ("lora_id", "group_idx", "kv_cache_spec_sliding_window"),
    BlockRemoved: ("group_idx",),
}


def check_event(event: Event) -> str | None:
    """Why the event cannot be applied, naming field, value and expectation; None where it can."""
    if isinstance(event, AllBlocksCleared):
        return None
    if isinstance(event, BlockRemoved) and event.remaining_copy_counts is not None:
        counts = event.remaining_copy_counts
        if len(counts) != len(event.block_hashes) or any(count < 0 for count in counts):
            return f"BlockRemoved.remaining_copy_counts is {counts}: expected one count of 0 or more for each name"
    for field in _SIGNED[type(event)]:
        value = getattr(event, field)
        if value is not None and value >= INT64_END:
            return f"{type(event).__name__}.{field} is {value}: expected less than 2^63"
    if not isinstance(event, BlockStored):
        return None
    bare = is_bare(event)
    if not (0 < event.block_size <= BLOCK_SIZE_MAX or (bare and event.block_size == 0)):
        return f"BlockStored.block_size is {event.block_size}: expected 1..{BLOCK_SIZE_MAX}"
    if not bare and len(event.block_hashes) * event.block_size > len(event.token_ids):
        return (
            f"BlockStored.token_ids has {len(event.token_ids)} ids: expected at least block_hashes x block_size = "
            f"{len(event.block_hashes)} x {event.block_size}"
        )
    for name, ids in (("token_ids", event.token_ids), ("skipped_token_ids", event.skipped_token_ids or ())):
        for index, token in enumerate(ids):
            if not 0 <= token < TOKEN_ID_END:
                return f"BlockStored.{name}[{index}] is {token}: expected 0 <= id < 2^32"
    return None


def skipped_of(event: BlockStored) -> list[int]:
    """Tokens between an ancestor and the run's parent; none where they alone do not say what stood there."""
    return [] if any(event.skipped_extra_keys or ()) else event.skipped_token_ids or []


def is_bare(event: BlockStored) -> bool:
    """Names only: copies of blocks that somebody has spelt out (vLLM's offloading)."""
    return not event.token_ids


def is_dense(event: BlockStored) -> bool:
    """Hash i belongs to tokens [i * block_size, (i + 1) * block_size)."""
    whole = len(event.token_ids) == len(event.block_hashes) * event.block_size
    return whole and bool(event.block_hashes) and not is_bare(event)


def tier_index(medium: str | None) -> int:
    """Index into TIERS. A medium nobody has heard of counts as the slowest."""
    return TIERS.index(_TIER_OF_MEDIUM.get(medium if medium is None else medium.upper(), REMOTE))


def lora_of(event: BlockStored) -> str | None:
    """The adapter's name; engines that send only a number get a name that no request can have."""
    if event.lora_name:
        return event.lora_name
    return f"\0lora_id {event.lora_id}" if event.lora_id else None


def _extra_keys(event: BlockStored, index: int) -> list[Any]:
    """Extra keys of block `index` without the LoRA name, which vLLM repeats on every block."""
    keys: list[Any] = []
    if event.extra_keys is not None and index < len(event.extra_keys):
        keys = list(event.extra_keys[index] or ())
    if event.lora_name and event.lora_name in keys:
        keys.remove(event.lora_name)
    if event.mm_keys is not None and index < len(event.mm_keys):
        keys += [None] * len(event.mm_keys[index] or ())
    return keys


def salt_of_first(event: BlockStored) -> str | None:
    """vLLM puts the salt behind the media keys of a prompt's first block: the last plain text."""
    texts = [key for key in _extra_keys(event, 0) if isinstance(key, str)]
    return texts[-1] if texts else None


def is_opaque(event: BlockStored, index: int, start: int) -> bool:
    """Whether block `index`, whose first token stands at `start`, has a key besides LoRA name and salt.

    Such a block, of media mostly, matches no prompt, which costs a miss and never a false hit.
    """
    keys = _extra_keys(event, index)
    if start == 0 and index == 0 and event.cache_salt is None and salt_of_first(event) is not None:
        return len(keys) > 1
    return bool(keys)
