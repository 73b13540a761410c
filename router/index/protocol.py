"""Values and interface of the prefix index. No I/O, no clock, no algorithm.

The index of `make_index` returns C++ objects with the same fields. A **holder** is one publisher stream: a worker, or
one data-parallel rank of it. A **scope** separates prompts that cannot share KV although their token ids are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NewType, Protocol, TypedDict

import msgspec

HolderId = NewType("HolderId", int)
PinId = NewType("PinId", int)

GPU, CPU, STORAGE, REMOTE = "GPU", "CPU", "STORAGE", "REMOTE"
TIERS = (GPU, CPU, STORAGE, REMOTE)
"""Tiers of memory that hold blocks, fastest first. Foreign names are mapped (CPU_PINNED -> CPU, DISK -> STORAGE
...)."""

SILENT_AFTER_STORES = 8
"""Stored events of full attention after which a declared group without any event is ignored."""


def make_block_group(block_size: int) -> dict[str, object]:
    """Return the group to declare for a holder of which only the block length is known.

    It counts until events name groups.
    """
    return {"group_idx": None, "kind": "full_attention", "block_size": block_size}


class Scope(msgspec.Struct, frozen=True, gc=False):
    """Properties of a prompt besides its token ids that decide whether a cached block can be reused."""

    model: str
    salt: str | None = None
    lora: str | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """Cached prefix of a prompt on one holder. Token counts are block boundaries <= len(prompt) - 1."""

    holder: HolderId
    tokens: int
    """Usable prefix: the largest p at which every announced group can resume, over all tiers."""
    gpu_tokens: int
    """The part of `tokens` that needs no load from a slower tier: the usable prefix counting GPU blocks only."""
    tier_tokens: tuple[int, ...] = (0, 0, 0, 0)
    """Tokens of [0, tokens) by the fastest tier that holds them, in the order of TIERS."""
    pinned_tokens: int = 0
    """Usable prefix when blocks promised by pins (requests in flight) count as resident. Always >= `tokens`."""


@dataclass(slots=True)
class IngestReport:
    """Counts of the changes that one batch of cache events made to the index."""

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    parked: int = 0
    """Stored blocks that wait for the event of their parent block."""
    unknown_removals: int = 0
    """Removed blocks that the index does not have."""
    unknown_copies: int = 0
    """Blocks stored by name only, for which no earlier event had tokens: skipped."""
    unknown_events: int = 0
    """Events of a type that the router does not know."""
    refused: int = 0
    """Blocks that exceed a limit of the index, such as the length of a block."""
    malformed_events: int = 0
    """Events that could not be read; the others of the batch were applied."""
    malformed: list[str] = field(default_factory=list)
    """Why events could not be read, for the first few."""


@dataclass(frozen=True, slots=True)
class IndexStats:
    holders: int
    entries: int
    """(holder, group, block) presences held."""
    parked: int
    pins: int
    memory_bytes: int


class PreparedPrompt(Protocol):
    """Prompt for several calls, made by `PrefixIndex.prepare`. Later calls reuse what earlier ones computed."""

    @property
    def memory_bytes(self) -> int:
        """Memory of the digests, and of the token ids if they were copied."""

    def __len__(self) -> int: ...


class IngestTask(Protocol):
    """Payload that is applied to the index in slices."""

    @property
    def report(self) -> IngestReport:
        """Changes made so far."""

    def step(self) -> bool:
        """Apply the next slice, some milliseconds of work; return whether more follow. Raises KeyError."""


Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class DumpPart(TypedDict):
    """Blocks of a holder in one group on one tier, with digests in place of tokens, for an index with the same seed."""

    fingerprint: Count
    """Identifies the seed."""
    group_idx: Int64 | None
    kind: str | None
    block_size: Count | None
    sliding_window: Count | None
    announced: bool
    """Whether the group has sent events."""
    sparse: bool
    """Whether the group keeps some of its blocks only."""
    tier: Annotated[int, msgspec.Meta(ge=0, lt=len(TIERS))]
    rows: bytes
    """Five unsigned 64-bit numbers a block: name, digest and length of the prefix, tokens in the block, copies."""


class DumpTask(Protocol):
    """Dump of a holder's content, in slices."""

    def step(self) -> list[DumpPart] | None:
        """Return the parts of the next slice, a few milliseconds of work; None after the last.

        Raises KeyError as PrefixIndex, and if the holder has changed since the first slice.
        """


Tokens = Sequence[int] | bytes | PreparedPrompt
"""Token ids of a prompt. Bytes are little-endian uint32, 4 bytes a token."""


class PrefixIndex(Protocol):
    """Every implementation passes tests/contracts/index_contract.py. Any thread may call; writers take turns.

    Methods that take a HolderId raise KeyError for an unknown or removed holder.
    """

    @property
    def seed(self) -> int:
        """Seed of the prefix digests, 64 bits. Routers that exchange dumps have the same seed."""

    def add_holder(self, model: str) -> HolderId: ...

    def remove_holder(self, holder: HolderId) -> None:
        """Forget a holder, its blocks and its pins."""

    def clear(self, holder: HolderId) -> None:
        """Forget the blocks of a holder after a restart or a gap. Pins and declared groups stay."""

    def declare_groups(self, holder: HolderId, groups: Sequence[Mapping[str, object]]) -> None:
        """Declare a holder's groups, as `GET /kv_cache/groups` lists them; replaces the last call's.

        Each is {group_idx, kind, block_size, sliding_window}. Nothing is usable until every declared group has
        announced a checkpoint. A group without events is ignored after SILENT_AFTER_STORES stores of full attention.
        """

    def set_reannounces(self, holder: HolderId, reannounces: bool) -> None:
        """Set whether a holder repeats hits as stores (`kv_cache_report_mode=full`).

        Repeated stores of a block then count once. A stream does not show whether a store is a repetition or a second
        copy.
        """

    def ingest(self, holder: HolderId, payload: bytes, now_s: float = 0.0) -> IngestReport:
        """Decode the payload of an event batch and apply it.

        A malformed event is reported and skipped. A payload that cannot be read to its end is not applied at all.
        `now_s`: time of the removals, for `find_lost_blocks`. Readers see the state between two batches, or between
        two slices of a very large one.
        """

    def begin_ingest(self, holder: HolderId, payload: bytes, now_s: float = 0.0) -> IngestTask:
        """Return a task that applies a payload in slices, so that the caller can do other work between them.

        Names of blocks are resolved within a slice; a block that a later slice spells out waits for that slice.
        """

    def prepare(self, token_ids: Sequence[int] | bytes, similar: PreparedPrompt | None = None) -> PreparedPrompt:
        """Prepare a prompt for several calls. The token ids may be borrowed and must not change meanwhile.

        `similar`: a prompt that may begin with the same tokens. Their digests are taken from it, not computed again.
        Raises ValueError as `match` does.
        """

    def count_common_tokens(self, token_ids: Sequence[int], others: Sequence[int]) -> int:
        """Count the first token ids that two prompts have in common."""

    def match(
        self, token_ids: Tokens, scope: Scope, order: Sequence[HolderId] | None = None, max_rivals: int = 1
    ) -> list[Match]:
        """Return the usable prefixes of a prompt, for the holders of `scope.model` that have a block of it.

        `order`: holders, the preferred first. The result then has only the holders that fewer than `max_rivals` earlier
        ones reach or exceed in `pinned_tokens`, in that order. Raises ValueError for token ids outside [0, 2^32), for
        bytes that are no multiple of 4, and for `max_rivals` 0.
        """

    def chunk_keys(self, token_ids: Tokens, scope: Scope, chunk_tokens: int) -> list[int]:
        """Return the digests of the prefixes that end at multiples of `chunk_tokens`, without the last token.

        Equal prefixes have equal digests in one index.
        """

    def pin(self, holder: HolderId, token_ids: Tokens, scope: Scope) -> PinId:
        """Count a prompt as cached on a holder until it is unpinned, up to where the holder will be able to resume.

        A holder with state groups, or with sparse sliding windows, resumes only at the last block boundary at or before
        len(prompt) - 1.
        """

    def find_lost_blocks(
        self, token_ids: Tokens, scope: Scope, start: int, step: int
    ) -> tuple[int, HolderId, float] | None:
        """Return the end of the part of a prompt after `start` that was lost lately, the holder and the time.

        Blocks have `step` tokens; holder and time are those of the first block. None if that block was not lost
        lately, or is of a sliding window. The answer is a hint: 262,144 losses are stored by a hash, and a collision
        overwrites the older one.
        """

    def unpin(self, pin: PinId) -> None:
        """End a pin. Nothing happens where the pin has ended or its holder was removed."""

    def stats(self) -> IndexStats: ...

    def groups(self, holder: HolderId) -> list[dict[str, object]]:
        """Return [{group_idx, kind, block_size, sliding_window, blocks, silent}] from metadata and events.

        `blocks`: number of cached blocks. `silent`: the group is declared, had no event and is ignored.
        """

    def held_tokens(self, holder: HolderId) -> int:
        """Return the tokens of a holder's blocks, in its group with the most tokens."""

    def begin_dump(self, holder: HolderId) -> DumpTask:
        """Begin a dump of a holder, for `load` of another index with the same seed. Parked events are left out."""

    def load(self, holder: HolderId, part: DumpPart) -> IngestReport:
        """Add a part of a dump. One that has another seed, or impossible numbers, is reported as malformed."""
