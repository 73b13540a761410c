"""Mutants of overlapping steps, each wrong in one place, that the core's state machine must catch: its proof."""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_device import Bench
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from engine.active_requests import ActiveRequests
from engine.cache.state_checkpoints import StateCheckpoints
from engine.cache.step_log import StepLog
from engine.execution.block_tables import BlockTables, RowAllocator
from engine.scheduler import Scheduler

pytestmark = pytest.mark.long

_spec = importlib.util.spec_from_file_location("machine", Path(__file__).with_name("test_scheduler_machine.py"))
assert _spec is not None
assert _spec.loader is not None
machine = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(machine)

SEARCH = settings(
    max_examples=400, stateful_step_count=30, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
    report_multiple_bugs=False, print_blob=False,
)  # fmt: skip

Patch = pytest.MonkeyPatch


def ended_sequences_go_at_once(patch: Patch) -> None:
    patch.setattr(ActiveRequests, "_remove_after_steps", lambda self, entry: self.remove(entry))


def a_table_that_merged_is_not_sent_again(patch: Patch) -> None:
    real = StepLog._commit_blocks

    def commit_blocks(self: StepLog, step: Any) -> None:
        versions = [(merge.seq_blocks.seq, merge.seq_blocks.seq.table_version) for merge in step.merges]
        real(self, step)
        for seq, table_version in versions:
            seq.table_version = table_version

    patch.setattr(StepLog, "_commit_blocks", commit_blocks)


def a_row_is_another_ones(patch: Patch) -> None:
    real = RowAllocator.assign
    patch.setattr(RowAllocator, "assign", lambda self, sequences: (real(self, sequences)[0], []))


def tables_are_written_up_to_the_token_before(patch: Patch) -> None:
    real = BlockTables.update
    patch.setattr(BlockTables, "update", lambda self, chunks, ends, *rest: real(self, chunks, ends - 1, *rest))


def a_plan_is_out_until_the_next_is_applied(patch: Patch) -> None:
    real = Scheduler.apply

    def apply(self: Scheduler, plan: Any, result: Any) -> Any:
        self._requests.steps_in_flight = deque(self._steps_in_flight)
        outputs = real(self, plan, result)
        self._requests.steps_in_flight = self._steps_in_flight
        return outputs

    patch.setattr(Scheduler, "apply", apply)


def what_came_after_a_failure_is_kept(patch: Patch) -> None:
    real = StepLog.drop_steps

    def drop_steps(self: StepLog) -> None:
        if len(self._steps_in_flight) > 1:
            self._steps_in_flight.popleft()
        else:
            real(self)

    patch.setattr(StepLog, "drop_steps", drop_steps)


def one_checkpoint_at_a_time(patch: Patch) -> None:
    real = StateCheckpoints.save_checkpoint

    def save_checkpoint(self: StateCheckpoints, seq: Any, node: Any, end: int) -> None:
        self._state_by_sequence[seq].pending_checkpoint_by_end.clear()
        real(self, seq, node, end)

    patch.setattr(StateCheckpoints, "save_checkpoint", save_checkpoint)


def a_state_is_resumed_from_in_the_step_that_takes_it(patch: Patch) -> None:
    real = StateCheckpoints.reserve_checkpoint

    def reserve(self: StateCheckpoints, seq: Any, nodes: Any, start: int, end: int) -> None:
        real(self, seq, nodes, start, end)
        for block in self._state_by_sequence[seq].pending_checkpoint_by_end.values():
            block.is_in_flight = True

    patch.setattr(StateCheckpoints, "reserve_checkpoint", reserve)


def the_length_is_not_foreseen(patch: Patch) -> None:
    real = Scheduler.add

    def add(self: Scheduler, request: Any, now: float) -> None:
        real(self, request, now)
        entry = self._requests._entry_by_id[request.request_id]
        entry.length_max += 1

    patch.setattr(Scheduler, "add", add)


MUTANTS: list[Callable[[Patch], None]] = [
    ended_sequences_go_at_once,
    a_table_that_merged_is_not_sent_again,
    a_row_is_another_ones,
    tables_are_written_up_to_the_token_before,
    a_plan_is_out_until_the_next_is_applied,
    what_came_after_a_failure_is_kept,
    one_checkpoint_at_a_time,
    a_state_is_resumed_from_in_the_step_that_takes_it,
    the_length_is_not_foreseen,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_machine_catches(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    overlapping = Bench.__init__
    monkeypatch.setattr(Bench, "__init__", lambda self, *args, overlap: overlapping(self, *args, overlap=True))
    with pytest.raises((AssertionError, KeyError, IndexError, AttributeError, ValueError)) as failure:
        run_state_machine_as_test(machine.CoreMachine, settings=SEARCH)
    is_stale = isinstance(failure.value, AttributeError) and "NoneType" not in str(failure.value)
    assert not is_stale, f"the mutant names what no longer exists: {failure.value}"
