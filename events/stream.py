"""State machine that follows one publisher stream exactly: which batches to apply, to request again, or to clear.

It is sans-IO: stimuli are method calls with the time as an argument, which return lists of instructions. `feed.py`
performs them; simulations do without sockets. The meaning of a payload is not read here.

Invariants. Between two `Clear`s the applied payloads are a snapshot after batch S followed by S + 1, S + 2 ... of one
publisher process, or a run of consecutive batches if there is no snapshot. At most one request is outstanding; a new
one replaces it. Buffers are bounded, and a batch that does not fit becomes a gap that is repaired.

    phase     leaves when                                             to
    LIVE      a gap, a reconnect, a doubtful frame, silence           REPAIR
    REPAIR    replayed from the last seen batch, bytes equal          LIVE
              the last seen batch is other bytes or gone              SNAPSHOT (after Clear)
    SNAPSHOT  chunks and S came                                       LIVE
              the publisher has none                                  REBUILD
    REBUILD   the whole ring was replayed                             LIVE
    any       nobody answers                                          LIVE, empty, with what comes

With StartMode.SNAPSHOT the last one asks again later; with others, REBUILD takes the place of SNAPSHOT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from events.frames import SNAPSHOT_SEQ
from events.stream_buffers import OutOfOrderBatches, digest_payload
from events.stream_types import (
    Apply,
    Clear,
    DuplicateBatch,
    Gap,
    Instruction,
    MalformedMessage,
    Origin,
    PublisherRestarted,
    RequestReplay,
    RequestSnapshot,
    StartMode,
    StreamConfig,
    StreamPhase,
    StreamPosition,
)
from options.bounded_dict import BoundedDict

NO_REPLAY = "the publisher offers no replay"
NO_SNAPSHOT = "the publisher has no snapshot now"


@dataclass(slots=True)
class _PendingRequest:
    """The request for a replay or a snapshot that was sent last."""

    id: int = 0
    deadline: float | None = None
    """Time at which the request counts as failed; None if no reply is awaited."""
    attempt_count: int = 0
    """Requests in a row that failed in this phase, or brought a gap."""


@dataclass(slots=True)
class _RepairProgress:
    """State of phase REPAIR, in which a replay of the last applied batch and those after it is received."""

    awaits_last_batch: bool = False
    """Whether the replay has yet to bring the last applied batch, its first one."""
    is_tail_check: bool = False
    """Whether the stream only was silent, so that no batch is known to be missing."""


@dataclass(slots=True)
class _SnapshotProgress:
    """Messages that were received of a snapshot, in phase SNAPSHOT."""

    chunk_count: int = 0
    batch_count: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether the snapshot ended with its one batch. A publisher without a batch so far sends chunks alone."""
        return self.batch_count == 1 or (self.batch_count == 0 and self.chunk_count > 0)


class StreamState:
    """Decides what to do with each batch and reply of one stream, and what to request again.

    The methods `on_...` are the stimuli, the first of which is `on_connected`. Each returns instructions, to be
    performed in order.
    """

    def __init__(self, config: StreamConfig | None = None, resume_position: StreamPosition | None = None) -> None:
        """Begin without history, or after the last batch that the subscriber applied before its own restart.

        The stream is LIVE until batches may be missing. REPAIR replays those after the last applied batch, SNAPSHOT
        fetches the whole state, and REBUILD replays all batches that the publisher still has.
        """
        self.config = config or StreamConfig()
        self.phase = StreamPhase.LIVE
        self.is_online = False
        """Whether the subscriber is connected to the publisher."""
        self.unreported_drop_count = 0
        """Messages that were lost because too many waited, since the feed last reported them."""

        # Batches that were applied, or wait until they can be.
        self._publisher_id = b""
        self._next_seq: int | None = None
        """Number of the next batch to apply; None if no batch is known."""
        self._digest_by_applied_seq: BoundedDict[int, int] = BoundedDict(self.config.max_recent_batches)
        """Digests of the newest applied batches, by which a batch that comes again is recognised."""
        self._has_applied_state = resume_position is not None
        """Whether something was applied since the last Clear."""
        if resume_position is not None:
            self._next_seq = resume_position.seq + 1
            self._digest_by_applied_seq[resume_position.seq] = resume_position.payload_digest
        self._early_batches = OutOfOrderBatches(self.config.max_early_batches, self.config.max_early_bytes)
        """Live batches that came before earlier ones, which are requested."""

        # Recovery of missing batches.
        self._request = _PendingRequest()
        self._repair = _RepairProgress()
        self._snapshot = _SnapshotProgress()
        self._restart_attempt_count = 0
        """Calls of `_start_over` since the stream was last LIVE or connected."""

        # When a LIVE stream requests something of its own accord.
        self._snapshot_retry_at: float | None = None
        """Time to request a snapshot again because recovery failed; None if none is planned."""
        self._silence_began_at: float | None = None
        """Time of the last live batch, recovery or failed check; None if the silence since then needs no check."""

    @property
    def position(self) -> StreamPosition | None:
        """The last applied batch, to be passed as `resume_position`; None if it, or its digest, is unknown."""
        if self._next_seq is None:
            return None
        last_digest = self._digest_by_applied_seq.get(self._next_seq - 1)
        return None if last_digest is None else StreamPosition(self._next_seq - 1, last_digest)

    def on_connected(self, now: float) -> list[Instruction]:
        """Handle a new connection, before its first message."""
        self.is_online = True
        self._early_batches.clear()
        self._request.attempt_count = 0
        self._restart_attempt_count = 0
        if self.phase in (StreamPhase.SNAPSHOT, StreamPhase.REBUILD):
            return self._start_over("reconnected while joining", now)
        if self._next_seq is not None:
            return self._start_repair(now)
        # The first connection, or no batch came on the earlier ones.
        return [] if self.config.start_mode is StartMode.LIVE else self._start_over("connected", now)

    def on_disconnected(self) -> list[Instruction]:
        """Handle the loss of the connection. Applied batches stay, because the publisher may come back."""
        self.is_online = False
        self._request.deadline = None
        return []

    def on_live_batch(self, seq: int, payload: bytes, now: float, publisher_id: bytes = b"") -> list[Instruction]:
        """Return what to do about a live batch with sequence number `seq`: apply it if it is the next one.

        After a gap, the batch is stored, and a replay of the missing ones is requested. An old number is a repetition,
        or a sign that the publisher has restarted. `publisher_id` changes with a restart; empty if it is unknown.
        """
        if not self.is_online:
            return []  # sent before the next connection; replay brings the batch again
        if seq >= SNAPSHOT_SEQ:
            return [MalformedMessage(f"live message with the reserved seq {seq}")]
        self._silence_began_at = now
        has_restarted = self._record_publisher(publisher_id)
        if has_restarted:
            return self._handle_restart("the publisher has another id", now, seq, payload)
        if self._next_seq is not None and seq < self._next_seq:
            return self._handle_old_batch(seq, payload, now)
        if self.phase is not StreamPhase.LIVE:
            return self._handle_early_batch(seq, payload, now)
        if self._next_seq is None or seq == self._next_seq:
            return [self._apply(seq, payload, Origin.LIVE)]
        self._store_early(seq, payload)
        return [Gap(self._next_seq, seq), *self._start_repair(now)]

    def _handle_early_batch(self, seq: int, payload: bytes, now: float) -> list[Instruction]:
        """Store a live batch until the pending request has brought the batches before it.

        If another batch with this number is stored already, the publisher has restarted and numbers anew.
        """
        early_payload = self._early_batches.get(seq)
        if early_payload is None:
            self._store_early(seq, payload)
            return []
        if early_payload == payload:
            return [DuplicateBatch(seq)]
        return self._handle_restart(f"two different batches with seq {seq}", now, seq, payload)

    def on_reply(
        self, request_id: int, seq: int, payload: bytes, now: float, publisher_id: bytes = b""
    ) -> list[Instruction]:
        """Handle a message of a reply, other than its end marker: a batch, or a chunk of a snapshot.

        `request_id`: request that it answers. A reply to an earlier request than the pending one is ignored.
        """
        if not self._is_pending(request_id):
            return []
        has_restarted = self._record_publisher(publisher_id)
        if has_restarted:
            return self._handle_restart("the publisher has another id", now)
        self._request.deadline = now + self.config.request_timeout_s
        if self.phase is StreamPhase.SNAPSHOT:
            return self._handle_snapshot_reply(seq, payload)
        if seq >= SNAPSHOT_SEQ:
            return []
        if self.phase is StreamPhase.REBUILD:
            return self._handle_rebuild_reply(seq, payload, now)
        return self._handle_repair_reply(seq, payload, now)

    def on_reply_end(self, request_id: int, now: float) -> list[Instruction]:
        """Handle the end of a reply: go live if the reply brought all that was missing, else start over."""
        if not self._is_pending(request_id):
            return []
        self._request.deadline = None
        if self.phase is StreamPhase.SNAPSHOT and not self._snapshot.is_complete:
            return self._start_rebuild("no snapshot", now)
        if self.phase is StreamPhase.REPAIR and self._repair.awaits_last_batch and not self._repair.is_tail_check:
            assert self._next_seq is not None
            return self._handle_restart(f"the publisher does not know seq {self._next_seq - 1}", now)
        if self.phase is not StreamPhase.REPAIR and self._next_seq is None:
            self._next_seq = 0  # the publisher has published nothing yet
        return self._finish_reply(now)

    def on_snapshot(
        self, request_id: int, last_seq: int | None, publisher_id: bytes, chunks: Sequence[bytes], now: float
    ) -> list[Instruction]:
        """Apply a snapshot, the blocks that are cached after batch `last_seq`, and go live.

        It is the answer of a socket that sends snapshots only. `last_seq` is None if there is no snapshot now.
        """
        if not self._is_pending(request_id) or self.phase is not StreamPhase.SNAPSHOT:
            return []
        if last_seq is None:
            return self.on_request_failed(request_id, now, NO_SNAPSHOT)
        has_restarted = self._record_publisher(publisher_id)
        if has_restarted:
            return self._handle_restart("the publisher has another id", now)
        self._request.deadline = None
        self._next_seq = last_seq + 1
        self._has_applied_state = True
        instructions: list[Instruction] = [Apply(None, chunk, Origin.SNAPSHOT) for chunk in chunks]
        return instructions + self._finish_reply(now)

    def _record_publisher(self, publisher_id: bytes) -> bool:
        """Store the publisher id of a message; return whether the message before came from another process."""
        previous_id = self._publisher_id
        self._publisher_id = publisher_id or previous_id
        return bool(previous_id) and self._publisher_id != previous_id

    def on_request_failed(self, request_id: int, now: float, reason: str = "no answer") -> list[Instruction]:
        """Handle a request that got no complete reply: request again, until `max_attempts` in a row have failed.

        After that, a replay is given up, and a snapshot is replaced by a replay of all batches that are left.
        """
        if not self._is_pending(request_id):
            return []
        self._request.deadline = None
        self._request.attempt_count += 1
        if self.phase is StreamPhase.SNAPSHOT:
            return self._handle_failed_snapshot(reason, now)
        if self.phase is StreamPhase.REPAIR and self._repair.is_tail_check:
            instructions = self._finish_reply(now)
            self._silence_began_at = now  # unknown whether batches are missing: check after the next silence
            return instructions
        if self._request.attempt_count >= self.config.max_attempts:
            return self._give_up(reason, now)
        if self.phase is StreamPhase.REPAIR:
            return self._start_repair(now)
        return self._start_rebuild(reason, now)

    def _handle_failed_snapshot(self, reason: str, now: float) -> list[Instruction]:
        """Request a snapshot again; after `max_attempts`, request a replay for now, and a snapshot later."""
        if self._request.attempt_count < self.config.max_attempts:
            return self._start_snapshot(reason, now)
        self._request.attempt_count = 0
        self._snapshot_retry_at = now + self.config.snapshot_retry_s
        return self._start_rebuild(reason, now)

    def on_tick(self, now: float) -> list[Instruction]:
        """Handle a late reply, a snapshot that is to be requested again, or a publisher that sends nothing.

        Must be called a few times a second.
        """
        if not self.is_online:
            return []
        if self._request.deadline is not None:
            if now < self._request.deadline:
                return []
            return self.on_request_failed(self._request.id, now, f"no answer in {self.config.request_timeout_s:g} s")
        if self._snapshot_retry_at is not None and now >= self._snapshot_retry_at:
            return self._start_over("asking for a snapshot again", now)
        return self._check_tail(now)

    def _check_tail(self, now: float) -> list[Instruction]:
        """Ask for the batches after the last applied one if the stream has been silent for `tail_check_s`.

        They may have been lost, and no later batch shows the gap.
        """
        is_silent = self._silence_began_at is not None and now - self._silence_began_at >= self.config.tail_check_s
        can_check = self.phase is StreamPhase.LIVE and self._next_seq is not None and self.config.can_replay
        if not (is_silent and can_check):
            return []
        self._silence_began_at = None
        instructions = self._start_repair(now)
        self._repair.is_tail_check = True
        return instructions

    def _handle_repair_reply(self, seq: int, payload: bytes, now: float) -> list[Instruction]:
        """Handle a batch of a replay that fills a gap: the last applied batch comes first, then the missing ones."""
        assert self._next_seq is not None
        if self._repair.awaits_last_batch:
            return self._compare_last_batch(seq, payload, now)
        if seq < self._next_seq:  # the publisher may send earlier batches than requested
            return []
        if seq > self._next_seq:
            return self._request_again(f"replay jumps from seq {self._next_seq} to {seq}", now)
        self._request.attempt_count = 0
        return [self._apply(seq, payload, Origin.REPLAY)]

    def _compare_last_batch(self, seq: int, payload: bytes, now: float) -> list[Instruction]:
        """Check that a replay begins with the batch that was applied last, which shows that no batch is lost.

        If its bytes differ, the publisher has restarted and counts anew. If the replay begins later, batches are lost.
        In both cases the stream starts over.
        """
        assert self._next_seq is not None
        last_seq = self._next_seq - 1
        if seq < last_seq:
            return []
        if seq > last_seq:
            reason = f"replay begins at seq {seq}, seq {last_seq} is no longer kept"
            return self._start_over(reason, now)
        is_same_batch = self._digest_by_applied_seq.get(seq) == digest_payload(payload)
        if not is_same_batch:
            return self._handle_restart(f"seq {seq} is another batch than before", now)
        self._repair.awaits_last_batch = False
        return []

    def _handle_rebuild_reply(self, seq: int, payload: bytes, now: float) -> list[Instruction]:
        """Apply a batch of a replay of all batches that the publisher keeps; the first may have any number."""
        if self._next_seq is None or seq == self._next_seq:
            return [self._apply(seq, payload, Origin.REPLAY)]
        if seq < self._next_seq:
            return []
        return self._request_again(f"replay jumps from seq {self._next_seq} to {seq}", now)

    def _request_again(self, problem: str, now: float) -> list[Instruction]:
        """Request batches that a reply did not bring, or start over after `max_attempts` such requests in a row."""
        self._request.attempt_count += 1
        if self._request.attempt_count > self.config.max_attempts:
            return self._start_over(problem, now)
        return self._start_repair(now)

    def _handle_snapshot_reply(self, seq: int, payload: bytes) -> list[Instruction]:
        """Apply a chunk of a snapshot, or note the batch that ends it: the state of the chunks includes that batch."""
        if seq == SNAPSHOT_SEQ and self._snapshot.batch_count == 0:
            self._snapshot.chunk_count += 1
            self._has_applied_state = True
            return [Apply(None, payload, Origin.SNAPSHOT)]
        self._snapshot.batch_count += 1
        self._next_seq = seq + 1
        self._digest_by_applied_seq[seq] = digest_payload(payload)
        return []

    def _start_repair(self, now: float) -> list[Instruction]:
        """Request the batches after the last applied one, because some may be missing.

        The last applied batch is requested too: if it has other bytes now, the publisher has restarted. If the
        publisher replays no batches, start over with a snapshot, or give up if it has none.
        """
        self._repair.is_tail_check = False
        if self._next_seq is None:
            self.phase = StreamPhase.LIVE
            return []
        if not self.config.can_replay and self.config.has_snapshots:
            return self._start_over(NO_REPLAY, now)
        if not self.config.can_replay:
            return self._give_up(NO_REPLAY, now)
        self.phase = StreamPhase.REPAIR
        last_seq = self._next_seq - 1
        # The last batch shows whether this is the same process. After a vLLM snapshot there is no digest of it to
        # compare with, but a publisher id.
        has_digest = self._digest_by_applied_seq.get(last_seq) is not None
        self._repair.awaits_last_batch = last_seq >= 0 and (has_digest or not self._publisher_id)
        return [RequestReplay(self._begin_request(now), start_seq=max(0, last_seq))]

    def _start_over(self, reason: str, now: float) -> list[Instruction]:
        """Clear the stream, and request a snapshot or a replay of the ring; give up after `max_attempts` in a row."""
        self._restart_attempt_count += 1
        self._snapshot_retry_at = None
        if not self.config.can_recover or self._restart_attempt_count > self.config.max_attempts:
            return self._give_up(reason, now)
        self._request.attempt_count = 0
        wants_snapshot = self.config.start_mode is StartMode.SNAPSHOT or not self.config.can_replay
        return self._start_snapshot(reason, now) if wants_snapshot else self._start_rebuild(reason, now)

    def _start_snapshot(self, reason: str, now: float) -> list[Instruction]:
        """Clear the stream and request a snapshot."""
        self.phase = StreamPhase.SNAPSHOT
        self._snapshot = _SnapshotProgress()
        return [*self._clear(reason), RequestSnapshot(self._begin_request(now))]

    def _start_rebuild(self, reason: str, now: float) -> list[Instruction]:
        """Clear the stream and request all batches that the publisher still has."""
        if not self.config.can_replay:
            return self._give_up(reason, now)
        self.phase = StreamPhase.REBUILD
        return [*self._clear(reason), RequestReplay(self._begin_request(now), 0)]

    def _is_pending(self, request_id: int) -> bool:
        return self._request.deadline is not None and request_id == self._request.id

    def _begin_request(self, now: float) -> int:
        """Begin a request in place of the last one, and return its id."""
        self._request.id += 1
        self._request.deadline = now + self.config.request_timeout_s
        return self._request.id

    def _finish_reply(self, now: float) -> list[Instruction]:
        """Apply the live batches that arrived before a reply ended, and go live; request again what is missing.

        For example, the reply ended with batch 6, and live batches 6, 7 and 9 had arrived. Batch 7 is applied, and 8 is
        requested again. Batch 6 is a repetition; if its bytes differ, the publisher has restarted and numbers anew.
        """
        instructions: list[Instruction] = []
        for seq in self._early_batches.list_seqs():
            assert self._next_seq is not None
            if seq > self._next_seq:
                break  # a batch before this one is missing
            payload = self._early_batches.pop(seq)
            if seq == self._next_seq:
                instructions.append(self._apply(seq, payload, Origin.LIVE))
            elif self._was_other_batch_applied(seq, payload):
                reason = f"seq {seq} is another batch than before"
                return [*instructions, *self._handle_restart(reason, now, seq, payload)]
            else:
                instructions.append(DuplicateBatch(seq))

        highest_seq = self._early_batches.highest_seq  # also of a batch that did not fit, so that it is not stored
        is_batch_missing = highest_seq is not None and self._next_seq is not None and highest_seq >= self._next_seq
        if is_batch_missing:
            return [*instructions, *self._request_again(f"replay never brings seq {self._next_seq}", now)]
        is_tail_check = self.phase is StreamPhase.REPAIR and self._repair.is_tail_check
        if not is_tail_check:  # a check after a silence is no sign of the publisher, so the silence goes on
            self._silence_began_at = now
        self._enter_live()
        return instructions

    def _handle_restart(
        self, reason: str, now: float, seq: int | None = None, payload: bytes = b""
    ) -> list[Instruction]:
        """Clear the stream and start over after a restart of the publisher, with its batch (seq, payload), if known."""
        self._early_batches.clear()
        if seq is not None:
            self._store_early(seq, payload)
        return [PublisherRestarted(reason), *self._start_over(reason, now)]

    def _give_up(self, reason: str, now: float) -> list[Instruction]:
        """Clear the stream and continue with the newest consecutive batches, because missing ones are unavailable."""
        instructions = self._clear(reason)
        self._request.deadline = None
        newest_batches = self._early_batches.list_newest_run()
        instructions += [self._apply(seq, payload, Origin.LIVE) for seq, payload in newest_batches]
        if not newest_batches and self._early_batches.highest_seq is not None:
            self._next_seq = self._early_batches.highest_seq + 1
        self._silence_began_at = now
        self._enter_live()
        if self.config.can_recover and self.config.start_mode is StartMode.SNAPSHOT:
            self._snapshot_retry_at = now + self.config.snapshot_retry_s
        return instructions

    def _enter_live(self) -> None:
        """Go on with the batches of the subscription, as they come; nothing is requested or awaited any more."""
        self._early_batches.clear()
        self.phase = StreamPhase.LIVE
        self._request.deadline = None
        self._request.attempt_count = 0
        self._restart_attempt_count = 0
        self._repair = _RepairProgress()

    def _handle_old_batch(self, seq: int, payload: bytes, now: float) -> list[Instruction]:
        """Handle a live batch with an old number: a repetition, or the first batch of a restarted publisher."""
        if self._was_other_batch_applied(seq, payload):
            return self._handle_restart(f"seq {seq} is another batch than before", now, seq, payload)
        if seq in self._digest_by_applied_seq:
            return [DuplicateBatch(seq)]
        self._store_early(seq, payload)  # too old for its digest: a replay shows whether it is a repetition
        return self._start_repair(now) if self.phase is StreamPhase.LIVE else []

    def _was_other_batch_applied(self, seq: int, payload: bytes) -> bool:
        """Return whether a batch with this number, but other bytes, was applied: then the publisher has restarted."""
        applied_digest = self._digest_by_applied_seq.get(seq)
        return applied_digest is not None and applied_digest != digest_payload(payload)

    def _apply(self, seq: int, payload: bytes, origin: Origin) -> Apply:
        """Advance the position by batch `seq`, the next one, and return the instruction to apply it."""
        assert self._next_seq is None or seq == self._next_seq, (self._next_seq, seq)
        self._next_seq = seq + 1
        self._has_applied_state = True
        self._digest_by_applied_seq[seq] = digest_payload(payload)
        return Apply(seq, payload, origin)

    def _clear(self, reason: str) -> list[Instruction]:
        """Forget the position in the stream; return a Clear if anything was applied that the caller has to forget."""
        self._next_seq = None
        self._digest_by_applied_seq.clear()
        if not self._has_applied_state:
            return []
        self._has_applied_state = False
        return [Clear(reason)]

    def _store_early(self, seq: int, payload: bytes) -> None:
        if not self._early_batches.store(seq, payload):
            self.unreported_drop_count += 1

    def check_invariants(self) -> None:
        """Raise AssertionError if the state contradicts itself, for tests."""
        self._early_batches.check_invariants()
        assert len(self._digest_by_applied_seq) <= self.config.max_recent_batches
        if self.phase is StreamPhase.LIVE:
            assert not self._early_batches
            assert self._request.deadline is None
        elif self.is_online:
            assert self._request.deadline is not None
