"""Values and interface of the prefix index. No I/O, no clock, no algorithm.

The index that `make_index` makes answers with C++ objects that have the same fields. A **holder** is one publisher
stream: a worker, or one data-parallel rank of it. A **scope** separates prompts that can never share KV although their
token ids are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NewType, Protocol

HolderId = NewType("HolderId", int)
PinId = NewType("PinId", int)

GPU, CPU, STORAGE, REMOTE = "GPU", "CPU", "STORAGE", "REMOTE"
TIERS = (GPU, CPU, STORAGE, REMOTE)
"""Tiers of memory that hold blocks, fastest first. Foreign names are mapped (CPU_PINNED -> CPU, DISK -> STORAGE
...)."""

SILENT_AFTER_STORES = 8
"""Stored events of full attention after which a declared group without any event is ignored."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Properties besides the token ids that decide whether a cached block can be reused."""

    model: str
    salt: str | None = None
    lora: str | None = None
    media: tuple[tuple[int, str], ...] = ()
    """(absolute token position, content key) of images, audio ...: mixed into the prefix digest at their positions."""


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
    """Counts of the changes that one payload made to the index."""

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    parked: int = 0
    unknown_removals: int = 0
    unknown_copies: int = 0
    """Names stored without tokens that no event had spelt out: skipped."""
    unknown_events: int = 0
    refused: int = 0
    """Blocks of events that were read and go beyond a bound: names of one holder, block lengths."""
    malformed_events: int = 0
    """Events that could not be read; the others of the batch were applied."""
    malformed: list[str] = field(default_factory=list)
    """One message for each of the first of them."""


@dataclass(frozen=True, slots=True)
class IndexStats:
    holders: int
    entries: int
    """(holder, group, block) presences held."""
    parked: int
    pins: int
    memory_bytes: int


class PreparedPrompt(Protocol):
    """Token ids that several calls are about, as `PrefixIndex.prepare` made them. What one call computes of them, the
    next ones find."""

    def __len__(self) -> int: ...


class PromptMemory(Protocol):
    """Computed digests of a prompt, for others that begin like it. Never changed; the ids are borrowed."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, with 4 for each of the ids."""


class Tally(Protocol):
    """Number of running prompts for each key of `PrefixIndex.chunk_keys`.

    A key stands for all of the prompt before it, so the keys that a prompt shares with others are its first ones.
    """

    def enter(self, keys: Sequence[int], target: Tally, targets: Tally) -> int:
        """Count a prompt that begins to run on a target; return how many of its keys ran there before.

        `target`: tally of the prompts on that target. `targets`: number of targets for each key.
        """

    def leave(self, keys: Sequence[int], target: Tally, targets: Tally) -> int:
        """Count a prompt that ended; return how many of its keys still run on its target.

        Raises IndexError for a key that no prompt has.
        """

    def count(self, key: int) -> int:
        """Return how many prompts have a key."""

    def leading(self, keys: Sequence[int], least: int) -> int:
        """Return the number of leading keys that at least `least` prompts have."""

    def counts(self) -> dict[int, int]:
        """Return the number of prompts by key; for tests."""


class IngestTask(Protocol):
    """Payload that is applied to the index in slices."""

    @property
    def report(self) -> IngestReport:
        """Changes made so far."""

    def step(self) -> bool:
        """Apply the next slice, some milliseconds of work; return False where it was the last. KeyError as in
        PrefixIndex."""


class DumpTask(Protocol):
    """Dump of a holder's content, in slices."""

    def step(self) -> list[bytes] | None:
        """Return the payloads of the next slice, a few milliseconds of work; None behind the last.

        KeyError as in PrefixIndex, and where the holder has changed since the first slice.
        """


Tokens = Sequence[int] | bytes | PreparedPrompt
"""Prompt as an index takes it. Bytes: little-endian uint32, 4 bytes a token."""


class PrefixIndex(Protocol):
    """Every implementation passes tests/contracts/index_contract.py. Thread-safe: one writer thread, many readers.

    Methods that take a HolderId raise KeyError where it was never given out or is removed.
    """

    @property
    def seed(self) -> int:
        """Seed of the prefix digests: 64 bits, random per process unless given. Routers that exchange dumps share
        it."""

    def add_holder(self, name: str, model: str) -> HolderId: ...

    def remove_holder(self, holder: HolderId) -> None:
        """Forget the holder, what it announced and its pins."""

    def clear(self, holder: HolderId) -> None:
        """Forget everything the holder announced (restart, unrepaired gap). Pins and declared groups stay."""

    def declare_groups(self, holder: HolderId, groups: Sequence[Mapping[str, object]]) -> None:
        """Declare a holder's groups, as `GET /kv_cache/groups` lists them; replaces the last call's.

        Each is {group_idx, kind, block_size, sliding_window}. A declared group counts from the start: until it
        announces a checkpoint nothing is usable. One that stays silent while full attention has events is ignored after
        SILENT_AFTER_STORES of them.
        """

    def set_reannounces(self, holder: HolderId, reannounces: bool) -> None:
        """Set whether the holder repeats hits as stores (`kv_cache_report_mode=full`): presence is then a set, not a
        count.

        Not to be guessed from the stream: a repeated store and a second copy look the same there.
        """

    def ingest(self, holder: HolderId, payload: bytes, now_s: float = 0.0) -> IngestReport:
        """Decode one event-batch payload and apply it. A malformed event is reported and skipped, never raised; of a
        payload that cannot be read to its end nothing is applied. `now_s`: when what it removes left, for `gone`.

        What readers see is the state between two batches, or between two slices of a very large one.
        """

    def begin(self, holder: HolderId, payload: bytes, now_s: float = 0.0) -> IngestTask:
        """Ingest a payload in slices, so that the caller can do other work between them. Nothing is applied before
        `step`.

        Names are resolved over a slice as a whole; what a later slice spells out waits for it, as over batches.
        """

    def tally(self) -> Tally:
        """Make an empty tally."""

    def prepare(
        self, token_ids: Sequence[int] | bytes, like: PromptMemory | None = None, alike: int | None = None
    ) -> PreparedPrompt:
        """Prepare a prompt for several calls.

        The ids may be borrowed: they must not change meanwhile. `like`: of a prompt that may begin alike; as far as its
        ids are found to be the same, nothing is computed again. `alike`: how many of the first ones are, where the
        caller knows. Raises ValueError as `match` does.
        """

    def remember(self, prompt: PreparedPrompt) -> PromptMemory | None:
        """Return what calls have computed of a prompt so far; None where its ids were copied."""

    def shared(self, token_ids: Sequence[int], others: Sequence[int]) -> int:
        """Count the first ids that two prompts have in common."""

    def match(
        self, token_ids: Tokens, scope: Scope, order: Sequence[HolderId] | None = None, keep: int = 1
    ) -> list[Match]:
        """Return the usable prefix of every holder of `scope.model`; holders without a block of the prompt are left
        out.

        `order`: holders, the preferred first. Then only those of them that fewer than `keep` earlier ones reach or
        exceed in `pinned_tokens`, in that order. Raises ValueError for ids outside [0, 2^32), ragged bytes, `keep`
        0.
        """

    def chunk_keys(self, token_ids: Tokens, scope: Scope, chunk_tokens: int) -> list[int]:
        """Return the digests of the prefixes that end at each multiple of `chunk_tokens`, up to len - 1.

        The last token of a prompt is always computed. Equal for equal prefixes in one index, on any holder.
        """

    def pin(self, holder: HolderId, token_ids: Tokens, scope: Scope) -> PinId:
        """Count the prompt as resident on `holder` (up to where it will be able to resume) until unpinned.

        On a holder with state groups (or sliding windows announced sparsely) that is only the planned checkpoint, the
        last block boundary <= len(prompt) - 1.
        """

    def gone(self, token_ids: Tokens, scope: Scope, start: int, step: int) -> tuple[int, HolderId, float] | None:
        """Return the part of a prompt behind `start` that a holder lost: (its end, holder of its first block, time of
        loss).

        In blocks of `step` tokens. None where that block is not among those that left last; of windows nothing is
        remembered. A hint: of 262,144 blocks, two that hash alike keep the newer.
        """

    def unpin(self, pin: PinId) -> None:
        """End a pin. Nothing happens where it ended before or its holder was removed."""

    def stats(self) -> IndexStats: ...

    def groups(self, holder: HolderId) -> list[dict[str, object]]:
        """Return [{group_idx, kind, block_size, sliding_window, blocks, silent}] as learned from metadata and events.

        `blocks` counts names held, `silent` is True where the group is declared, has had no event and is ignored.
        """

    def held_tokens(self, holder: HolderId) -> int:
        """Return the tokens of the holder's blocks, of the group that holds most."""

    def begin_dump(self, holder: HolderId) -> DumpTask:
        """Begin a dump of a holder as payloads that `ingest` of an index with the same seed takes (snapshot for a
        peer).

        Digests, not tokens: an index with another seed reports them as malformed. Parked events are not in it.
        """
