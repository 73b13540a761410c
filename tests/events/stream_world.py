"""One publisher, one follower around StreamState, and a wire between them that loses, repeats and reorders.

The publisher is the naive model: a set that toggles. The follower keeps the set it is told and checks the order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from events import (
    Apply,
    Clear,
    Instruction,
    RequestReplay,
    RequestSnapshot,
    StreamConfig,
    StreamState,
)
from events.frames import SNAPSHOT_SEQ


@dataclass
class Publisher:
    """A model producer: a set that toggles, its ring, and whether it serves snapshots (ours does, vLLM does not)."""

    epoch: int
    ring_size: int
    snapshots: bool
    resident: set[int] = field(default_factory=set)
    batches: list[bytes] = field(default_factory=list)

    def toggle(self, key: int) -> tuple[int, bytes]:
        op = "-" if key in self.resident else "+"
        self.resident ^= {key}
        self.batches.append(f"{self.epoch}:{len(self.batches)}:{op}{key}".encode())
        return len(self.batches) - 1, self.batches[-1]

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        first = max(start, len(self.batches) - self.ring_size, 0)
        return [(seq, self.batches[seq]) for seq in range(first, len(self.batches))]

    def snapshot(self) -> list[tuple[int, bytes]]:
        if not self.snapshots:
            return []
        keys = ",".join(f"+{key}" for key in sorted(self.resident))
        chunks = [(SNAPSHOT_SEQ, f"{self.epoch}:s:{keys}".encode())]
        return [*chunks, (len(self.batches) - 1, self.batches[-1])] if self.batches else chunks


class Follower:
    """A subscriber around StreamState: keeps the set, checks what it is told to apply."""

    def __init__(self, config: StreamConfig) -> None:
        self.stream = StreamState(config)
        self.resident: set[int] = set()
        self.request: RequestReplay | RequestSnapshot | None = None
        self.applied_payloads: list[tuple[int | None, bytes]] = []
        self.notices: list[Instruction] = []
        self.clear_count = self.request_count = 0

    def perform(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Apply):
                self._apply(instruction)
            elif isinstance(instruction, Clear):
                self.clear_count += 1
                self.resident.clear()
                self.applied_payloads.clear()
            elif isinstance(instruction, RequestReplay | RequestSnapshot):
                self.request_count += 1
                self.request = instruction
            else:
                self.notices.append(instruction)
        self.stream.check_invariants()

    def _apply(self, apply: Apply) -> None:
        epoch, _, change = apply.payload.decode().split(":")
        if not change:
            return  # the snapshot of a publisher that has published nothing
        for seq, payload in self.applied_payloads:
            assert payload.decode().split(":")[0] == epoch, "two processes mixed without a Clear"
            if apply.seq is not None and seq is not None:
                assert apply.seq > seq
        if self.applied_payloads and self.applied_payloads[-1][0] is not None:
            assert apply.seq == self.applied_payloads[-1][0] + 1, "a hole without a Clear"
        self.applied_payloads.append((apply.seq, apply.payload))
        for block in filter(None, change.split(",")):
            if block[0] == "+":
                self.resident.add(int(block[1:]))
            else:
                self.resident.discard(int(block[1:]))


class World:
    """One publisher, one follower, and a wire between them."""

    def __init__(self, config: StreamConfig, ring_size: int, snapshots: bool) -> None:
        self.config = config
        self.ring_size, self.snapshots = ring_size, snapshots
        self.now = 0.0
        self.publisher = Publisher(0, ring_size, snapshots)
        self.follower = Follower(config)
        self.wire: list[tuple[int, bytes]] = []
        self.replies: tuple[int, list[tuple[int, bytes] | None]] | None = None

    def connect(self) -> None:
        self.wire.clear()
        self.replies = None
        self.follower.perform(self.follower.stream.on_connected(self.now))

    def restart(self) -> None:
        """Another process; the connection breaks and comes back later (`connect`)."""
        self.publisher = Publisher(self.publisher.epoch + 1, self.ring_size, self.snapshots)
        self.wire.clear()
        self.replies = None
        self.follower.perform(self.follower.stream.on_disconnected())

    def serve(self) -> None:
        """The publisher reads the follower's request, if there is one."""
        request, self.follower.request = self.follower.request, None
        if request is None or not self.config.can_recover:
            return
        if isinstance(request, RequestReplay):
            answer = self.publisher.replay(request.start_seq)
        else:
            answer = self.publisher.snapshot()
        self.replies = (request.request_id, [*answer, None])

    def deliver_reply(self) -> None:
        if self.replies is None:
            return
        request_id, messages = self.replies
        message = messages.pop(0)
        if message is None:
            self.replies = None
            self.follower.perform(self.follower.stream.on_reply_end(request_id, self.now))
        else:
            self.follower.perform(self.follower.stream.on_reply(request_id, *message, self.now))

    def answer(self) -> None:
        self.serve()
        while self.replies is not None:
            self.deliver_reply()

    def deliver(self, index: int = 0, keep: bool = False) -> None:
        if self.wire:
            seq, payload = self.wire[index % len(self.wire)]
            if not keep:
                del self.wire[index % len(self.wire)]
            self.follower.perform(self.follower.stream.on_live_batch(seq, payload, self.now))

    def run_until_quiet(self) -> None:
        """No more faults: deliver everything, answer everything, let time pass."""
        if not self.follower.stream.is_online:
            self.connect()
        for _ in range(200):
            while self.wire:
                self.deliver()
            self.answer()
            self.now += 0.5
            self.follower.perform(self.follower.stream.on_tick(self.now))
