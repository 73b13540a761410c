"""Mutants of the cache, each wrong in one place, that the lockstep with the naive model must catch: its proof."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from drawn_specs import group
from fake_device import EventChecker, resident_in
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from engine.cache.attention_windows import AttentionWindows
from engine.cache.blocks import Node
from engine.cache.device_tier import DeviceTier
from engine.cache.event_log import Action, EventLog
from engine.cache.host_tier import HostLoad, HostTier
from engine.cache.kv_cache import KVCache
from engine.cache.learned_eviction import LearnedEviction
from engine.cache.pool import UnitPool
from engine.cache.prefix_tree import PrefixTree
from engine.cache.sequence_blocks import UNREAD_BLOCK_ID, SequenceBlocks
from engine.cache.spec import CacheSpec
from engine.cache.state_checkpoints import StateCheckpoints
from engine.cache.step_log import PendingStep, StepLog
from engine.types import BlockKey, Chunk, Request, SamplingParams, Sequence, StepPlan
from events.hashing import unpack_token_ids

pytestmark = pytest.mark.long

_spec = importlib.util.spec_from_file_location("lockstep", Path(__file__).with_name("test_pool_lockstep.py"))
assert _spec is not None
assert _spec.loader is not None
lockstep = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(lockstep)

SEARCH = settings(
    max_examples=6000,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    print_blob=False,
)

Patch = pytest.MonkeyPatch


def eviction_without_cascade(patch: Patch) -> None:
    def evict(self: DeviceTier, block: Any) -> None:
        self._tree.event_log.record(Action.REMOVED, block.kind, block.node)
        block.node.children = {}
        self._unlink(block)
        self.pool.drop(block)

    patch.setattr(DeviceTier, "evict", evict)


def replace_record(patch: Patch, action: Action, other_action: Action | None) -> None:
    """Record another action instead of one, or nothing."""
    real = EventLog.record

    def record(self: EventLog, recorded_action: Action, kind: int, node: Node) -> None:
        if recorded_action is not action:
            real(self, recorded_action, kind, node)
        elif other_action is not None:
            real(self, other_action, kind, node)

    patch.setattr(EventLog, "record", record)


def eviction_unannounced(patch: Patch) -> None:
    replace_record(patch, Action.REMOVED, None)


def eviction_of_parents_first(patch: Patch) -> None:
    real = EventLog.drain

    def drain(self: EventLog) -> Any:
        for change in self._changes:
            if change.action is Action.STORED:
                blocks = list(change.blocks)
                change.blocks.clear()
                change.blocks.update(dict.fromkeys(reversed(blocks)))
        return real(self)

    patch.setattr(EventLog, "drain", drain)


def announced_when_reserved(patch: Patch) -> None:
    real = DeviceTier.attach

    def attach(self: DeviceTier, node: Node, block: Any) -> None:
        real(self, node, block)
        self._tree.event_log.record(Action.STORED, block.kind, node)

    patch.setattr(DeviceTier, "attach", attach)
    patch.setattr(DeviceTier, "commit", lambda self, block: setattr(block, "is_pending", False))


def merge_without_redirect(patch: Patch) -> None:
    def replace(self: SequenceBlocks, group: int, index: int, block: Any) -> Any:
        blocks = self.blocks_by_group[group]
        held_block, blocks[index] = blocks[index], block
        assert held_block is not None
        return held_block

    patch.setattr(SequenceBlocks, "replace", replace)


def merge_that_leaks_the_duplicate(patch: Patch) -> None:
    real = StepLog._commit_blocks

    def commit_blocks(self: StepLog, step: PendingStep) -> None:
        for seq_blocks, kind, index, identical_block in step.merges:
            seq_blocks.replace(kind, index, identical_block)
        step.merges.clear()
        real(self, step)

    patch.setattr(StepLog, "_commit_blocks", commit_blocks)


def compaction_that_copies_nothing(patch: Patch) -> None:
    real = KVCache.fill_plan

    def fill_plan(self: KVCache, plan: Any) -> None:
        real(self, plan)
        plan.block_copies = []

    patch.setattr(KVCache, "fill_plan", fill_plan)


def compaction_without_rewriting_tables(patch: Patch) -> None:
    real = KVCache._allocate

    def allocate(self: KVCache, kind: int) -> Any:
        tables = [(table, list(table)) for seq in self._blocks_by_sequence for table in seq.block_tables]
        block = real(self, kind)
        for table, old in tables:
            table[:] = old
        return block

    patch.setattr(KVCache, "_allocate", allocate)


def no_compaction(patch: Patch) -> None:
    patch.setattr(KVCache, "_allocate", lambda self, kind: self.pool.allocate(kind))


def capacity_off_by_one(patch: Patch) -> None:
    def can_allocate(self: Any, counts: Any) -> bool:
        return sum(-(-(a + b) // n) for a, b, n in zip(self._live_blocks, counts, self.blocks_per_unit)) < len(
            self.units
        )

    patch.setattr(UnitPool, "can_allocate", can_allocate)


def window_left_a_block_early(patch: Patch) -> None:
    real = KVCache._release_outside_windows

    def release_outside(self: KVCache, seq_blocks: SequenceBlocks, end: int) -> None:
        real(self, seq_blocks, end + self.block_size)

    patch.setattr(KVCache, "_release_outside_windows", release_outside)


def window_blocks_not_needed_for_a_hit(patch: Patch) -> None:
    patch.setattr(AttentionWindows, "cut_to_cached_windows", lambda self, count, has_block: count)


def state_not_needed_for_a_hit(patch: Patch) -> None:
    patch.setattr(
        AttentionWindows,
        "count_resumable_blocks",
        lambda self, count, has_block: self.cut_to_cached_windows(count, has_block),
    )


def checkpoint_of_the_block_before(patch: Patch) -> None:
    real = StateCheckpoints.reserve_checkpoint

    def reserve(self: StateCheckpoints, seq: Any, nodes: Any, start: int, end: int) -> None:
        if end % self._block_size == 0:
            real(self, seq, [nodes[0], *nodes[:-1]] if nodes else nodes, start, end)

    patch.setattr(StateCheckpoints, "reserve_checkpoint", reserve)


def checkpoint_unpinned_while_its_copy_is_allocated(patch: Patch) -> None:
    """Later the copy is planned, and steps do copies in the order of planning, before they write anything."""
    real = StateCheckpoints._resume_on_device

    def resume(self: StateCheckpoints, seq: Any, checkpoint: Any, *, has_room_for_copy: bool) -> None:
        allocate_state = self._allocate_state

        def allocate_unpinned() -> Any:
            self._pool.release(checkpoint)
            block = allocate_state()
            self._pool.acquire(checkpoint)
            return block

        if has_room_for_copy and checkpoint.ref_count == 0:
            self._allocate_state = allocate_unpinned  # type: ignore[method-assign]
        real(self, seq, checkpoint, has_room_for_copy=has_room_for_copy)
        self._allocate_state = allocate_state  # type: ignore[method-assign]

    patch.setattr(StateCheckpoints, "_resume_on_device", resume)


def failed_step_trusted(patch: Patch) -> None:
    patch.setattr(PrefixTree, "clear", lambda self: [])


def window_table_filler_released(patch: Patch) -> None:
    real = KVCache._release_outside_windows

    def release_outside(self: KVCache, seq_blocks: SequenceBlocks, end: int) -> None:
        real(self, seq_blocks, end)
        for table in seq_blocks.seq.block_tables:
            table[:] = [UNREAD_BLOCK_ID for _ in table]

    patch.setattr(KVCache, "_release_outside_windows", release_outside)


def hash_believed(patch: Patch) -> None:
    weak_hashes(patch)
    patch.setattr(BlockKey, "equals", lambda self, other: True)


def hash_believed_below_any_parent(patch: Patch) -> None:
    weak_hashes(patch)

    def find(self: PrefixTree, key: BlockKey, parent: Node | None) -> Node | None:
        node = self._node_by_hash.get(key.hash)
        return node if node is not None and node.key.equals(key) else None

    patch.setattr(PrefixTree, "find", find)


def one_hash_two_blocks(patch: Patch) -> None:
    weak_hashes(patch)

    def get_or_create(self: PrefixTree, key: BlockKey, parent: Node | None) -> Node:
        node = self.find(key, parent)
        if node is None:
            node = self._node_by_hash[key.hash] = Node(key, parent, self._no_blocks)
            if parent is not None:
                parent.children[node.hash] = node
        return node

    patch.setattr(PrefixTree, "get_or_create", get_or_create)


def weak_hashes(patch: Patch) -> None:
    """Two bits of hash: nearly everything collides."""

    def bad(parent: int | None, packed: bytes, size: int, *keys: object) -> list[int]:
        tokens = unpack_token_ids(packed)
        return [sum(tokens[i * size : (i + 1) * size]) % 4 for i in range(len(tokens) // size)]

    patch.setattr("engine.cache.block_hasher.hash_packed_blocks", bad)


def host_copy_never_made(patch: Patch) -> None:
    real = HostTier._store

    def store(self: HostTier, block: Any, node: Node) -> bool:
        before = len(self._block_copies)
        is_stored = real(self, block, node)
        del self._block_copies[before:]
        return is_stored

    patch.setattr(HostTier, "_store", store)


def host_copy_never_read(patch: Patch) -> None:
    patch.setattr(HostTier, "plan_load_copy", lambda self, load: None)


def host_moves_after_all_others(patch: Patch) -> None:
    real = KVCache.fill_plan

    def fill_plan(self: KVCache, plan: Any) -> None:
        real(self, plan)
        plan.block_copies.sort(key=lambda move: move.direction)

    patch.setattr(KVCache, "fill_plan", fill_plan)


def host_reads_before_writes(patch: Patch) -> None:
    real = KVCache.fill_plan

    def fill_plan(self: KVCache, plan: Any) -> None:
        real(self, plan)
        plan.block_copies.sort(key=lambda move: -move.direction)

    patch.setattr(KVCache, "fill_plan", fill_plan)


def host_block_not_held_while_it_is_read(patch: Patch) -> None:
    def pin(self: HostTier, node: Node, kind: int) -> Any:
        return node.host_blocks[kind]

    patch.setattr(HostTier, "pin", pin)
    patch.setattr(HostTier, "unpin", lambda self, host_block: None)


def host_eviction_without_cascade(patch: Patch) -> None:
    patch.setattr(HostTier, "evict", lambda self, block: self._drop(block))


def host_keeps_what_hung_from_what_is_lost(patch: Patch) -> None:
    real = HostTier.demote

    def demote(self: HostTier, block: Any, *, keep_on_host: bool) -> None:
        drop_subtree, self._drop_subtree = self._drop_subtree, lambda root: None  # type: ignore[method-assign]
        real(self, block, keep_on_host=keep_on_host)
        self._drop_subtree = drop_subtree  # type: ignore[method-assign]

    patch.setattr(HostTier, "demote", demote)


def host_copy_kept_beside_the_device(patch: Patch) -> None:
    patch.setattr(HostTier, "discard_duplicate", lambda self, block: None)


def host_eviction_unannounced(patch: Patch) -> None:
    replace_record(patch, Action.HOST_REMOVED, None)


def move_to_the_host_unannounced(patch: Patch) -> None:
    replace_record(patch, Action.DEMOTED, Action.REMOVED)


def host_block_leaked_by_a_failed_step(patch: Patch) -> None:
    real = StepLog.drop_steps

    def drop_steps(self: StepLog) -> None:
        unpin = HostTier.unpin
        HostTier.unpin = lambda self, host_block: None  # type: ignore[method-assign, assignment]
        real(self)
        HostTier.unpin = unpin  # type: ignore[method-assign]

    patch.setattr(StepLog, "drop_steps", drop_steps)


def checkpoint_leaked_by_a_failed_step(patch: Patch) -> None:
    patch.setattr(
        StateCheckpoints,
        "drop_pending",
        lambda self: [state.pending_checkpoint_by_end.clear() for state in self._state_by_sequence.values()],
    )


def loaded_block_announced_when_planned(patch: Patch) -> None:
    real = StepLog.begin_step

    def begin_step(self: StepLog) -> None:
        for item in self._planning_step.work:
            if isinstance(item, HostLoad):
                self._tree.event_log.record(Action.STORED, item.block.kind, item.host_block.node)  # type: ignore[arg-type]
        real(self)

    patch.setattr(StepLog, "begin_step", begin_step)


def state_resumed_on_nothing(patch: Patch) -> None:
    real = StateCheckpoints.create_state

    def create_state(self: StateCheckpoints, seq: Any, node: Any, **options: bool) -> Any:
        is_on_host = node is not None and not node.can_resume()
        return real(self, seq, None if is_on_host else node, **options)

    patch.setattr(StateCheckpoints, "create_state", create_state)


def state_gone_once_it_is_read(patch: Patch) -> None:
    def unpin(self: HostTier, host_block: Any) -> None:
        if host_block.ref_count == 1 and host_block.node is not None:
            self._unlink(host_block)
        self.pool.release(host_block)

    patch.setattr(HostTier, "unpin", unpin)


def host_windows_not_read(patch: Patch) -> None:
    patch.setattr(Node, "has_host_block", lambda self, kind: any(self.host_blocks))


def eviction_that_thinks_a_state_still_there(patch: Patch) -> None:
    patch.setattr(LearnedEviction, "requeue_state", lambda self, node: None)


MUTANTS: list[Callable[[Patch], None]] = [
    eviction_without_cascade,
    eviction_unannounced,
    eviction_of_parents_first,
    announced_when_reserved,
    merge_without_redirect,
    merge_that_leaks_the_duplicate,
    compaction_that_copies_nothing,
    compaction_without_rewriting_tables,
    no_compaction,
    capacity_off_by_one,
    window_left_a_block_early,
    window_blocks_not_needed_for_a_hit,
    window_table_filler_released,
    state_not_needed_for_a_hit,
    checkpoint_of_the_block_before,
    checkpoint_unpinned_while_its_copy_is_allocated,
    failed_step_trusted,
    hash_believed,
    hash_believed_below_any_parent,
    one_hash_two_blocks,
    host_copy_never_made,
    host_copy_never_read,
    host_moves_after_all_others,
    host_reads_before_writes,
    host_block_not_held_while_it_is_read,
    host_eviction_without_cascade,
    host_copy_kept_beside_the_device,
    host_eviction_unannounced,
    move_to_the_host_unannounced,
    host_block_leaked_by_a_failed_step,
    checkpoint_leaked_by_a_failed_step,
    loaded_block_announced_when_planned,
    state_resumed_on_nothing,
    state_gone_once_it_is_read,
    host_windows_not_read,
    eviction_that_thinks_a_state_still_there,
]


@pytest.fixture
def patch() -> Iterator[Patch]:
    with pytest.MonkeyPatch.context() as context:
        yield context


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_lockstep_catches(mutant: Callable[[Patch], None], patch: Patch) -> None:
    mutant(patch)
    machine = lockstep.CrampedMachine if "compaction" in mutant.__name__ else lockstep.PoolMachine
    if mutant is window_blocks_not_needed_for_a_hit:
        machine = lockstep.SlidingMachine
    if mutant is state_gone_once_it_is_read:
        machine = lockstep.RoomyMachine
    with pytest.raises((AssertionError, KeyError, IndexError, AttributeError)) as failure:
        run_state_machine_as_test(machine, settings=SEARCH)
    is_stale = isinstance(failure.value, AttributeError) and "NoneType" not in str(failure.value)
    assert not is_stale, f"the mutant names what no longer exists: {failure.value}"


def test_the_real_thing_survives_colliding_hashes(patch: Patch) -> None:
    weak_hashes(patch)
    run_state_machine_as_test(lockstep.PoolMachine, settings=settings(SEARCH, max_examples=100))


def what_hangs_from_what_is_lost() -> None:
    """A block that a failed step moved is lost; what hangs from it lies in host memory."""
    spec = CacheSpec(block_size=1, groups=(group(1),))
    cache, checker = KVCache(spec, 3, host_unit_count=4), EventChecker(1)
    for text in ([1, 2], [7, 8]):
        request = Request(request_id="r", token_ids=text, params=SamplingParams())
        seq = Sequence(request=request, token_ids=text, prompt_len=2, arrival_s=0.0)
        assert cache.admit(seq)
        assert cache.grow(seq, 2)
        plan = StepPlan(chunks=[Chunk(seq, 0, 2, True)])
        cache.register_full_blocks(seq, 2)
        cache.fill_plan(plan)
        cache.commit(plan.chunks)
        cache.release(seq)
        checker(cache.take_events() or [])
    first, second = list(cache.tree.nodes())[:2]
    assert second.parent is first
    assert (first.has_computed(0), second.has_computed(0), second.has_host_block(0)) == (True, False, True)
    block = first.blocks[0]
    assert block is not None
    cache.device_tier.evict(block, keep_on_host=False)
    checker(cache.take_events() or [])
    cache.check_invariants()
    assert second not in cache.tree
    assert set(checker.resident) == resident_in(cache)


def test_what_hangs_from_what_is_lost_is_lost_too(patch: Patch) -> None:
    """A history that the lockstep seldom finds."""
    what_hangs_from_what_is_lost()
    host_keeps_what_hung_from_what_is_lost(patch)
    with pytest.raises(AssertionError):
        what_hangs_from_what_is_lost()
