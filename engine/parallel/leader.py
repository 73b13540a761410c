"""Tensor parallelism: several processes compute one model, each on its part of the weights.

The leader (rank 0) is the process with scheduler, cache and publisher. It starts the followers, sends them each step's
plan as a small message over a socket, and computes the same plan itself. Every rank's cache has the same shape, so
block tables mean the same everywhere. Only the leader samples.

A rank that fails cannot catch up, so it ends the engine with RunnerLostError. A follower ends when its socket closes,
for whatever reason. One machine; gloo between CPUs, NCCL between GPUs.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from engine.config import EngineConfig
from engine.core import Runner
from engine.execution.block_copier import BlockCopier
from engine.models import Shard
from engine.parallel.collectives import all_reduce_min, all_reduce_sum, gather_columns, join_process_group
from engine.parallel.messages import (
    BlockParts,
    CopyBlocks,
    FollowerReply,
    LeaderMessage,
    LoadDone,
    LoadModel,
    PlanEncoder,
    ReadBlocks,
    StartRunner,
    WriteBlocks,
)
from engine.types import BlockCopy, BlockPlace, RunnerLostError, StepPlan, StepResult
from options.child_process import start_child

LOOPBACK = "127.0.0.1"
GRACE_S = 5.0
"""Time for a process to end, or for a step to fail after a rank is lost, before the process is killed."""

log = logging.getLogger("engine.ranks")


class _FollowerHandle:
    """The process of one tensor-parallel rank (a follower), and the connection to it, on the side of rank 0."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        """Start the process of `rank`, of `size` ranks. `port`: port of the TCPStore by which the ranks meet."""
        self.rank = rank
        self.process, sock = start_child("engine.parallel.follower", rank, size, port)
        self._connection = Connection(sock.detach())
        self._decoder: msgspec.msgpack.Decoder[FollowerReply] = msgspec.msgpack.Decoder(FollowerReply)

    def send(self, message: bytes) -> None:
        """Send an encoded message. Raises OSError if the follower has ended."""
        self._connection.send_bytes(message)

    def receive(self) -> FollowerReply:
        """Wait for the follower's reply, and return it. Raises RunnerLostError, with the reason, if it ends instead."""
        try:
            return self._decoder.decode(self._connection.recv_bytes())
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE_S)
            raise RunnerLostError(self.describe_exit()) from None

    def describe_exit(self) -> str:
        """Return how the process has ended, for an error message."""
        exit_status = self.process.poll()
        if exit_status is None:
            exit_event = "closed its socket"
        elif exit_status < 0:
            exit_event = f"was killed by {signal.Signals(-exit_status).name}"
        else:
            exit_event = f"ended with exit status {exit_status}"
        return f"tensor-parallel rank {self.rank} (process {self.process.pid}) {exit_event}"

    def close(self) -> None:
        self._connection.close()

    def end_process(self) -> None:
        """Wait for the process, which ends after `close`; kill it if it takes too long."""
        try:
            self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            log.warning("tensor-parallel rank %d does not end and is killed", self.rank)
            self.process.kill()
            self.process.wait()


class Leader:
    """Starts the followers, and makes them do what rank 0 does. Must be closed; one at a time in a process."""

    def __init__(self, size: int) -> None:
        """Start the processes of `size` - 1 followers, and the TCPStore by which the ranks find each other later."""
        assert size > 1, size
        self.rank_count = size
        self._encoder = msgspec.msgpack.Encoder()
        self._operation_lock = threading.Lock()
        self._has_joined_group = False
        self._is_closing = False
        self._lost_reason: str | None = None
        """Why the engine cannot go on; None while all ranks work."""

        listener = socket.create_server((LOOPBACK, 0))  # by default the store listens on every interface
        port = listener.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._followers: list[_FollowerHandle] = []
        for rank in range(1, size):
            self._followers.append(_FollowerHandle(rank, size, port))

    @property
    def shard(self) -> Shard:
        """Part of a model that rank 0 holds."""
        return Shard(0, self.rank_count, all_reduce_sum, gather_columns)

    def load(self, config: EngineConfig, folder: Path) -> None:
        """Have the followers load a model, while the caller loads its own part of it."""
        self.broadcast(LoadModel(config, str(folder)))

    def await_loaded(self, device: torch.device) -> None:
        """Wait until the followers have loaded, and join the process group. Raises RunnerLostError.

        Raises ValueError with a follower's reason if that could not load its part.
        """
        for follower in self._followers:
            reply = follower.receive()
            assert isinstance(reply, LoadDone), reply
            if reply.error is not None:
                raise ValueError(f"tensor-parallel rank {follower.rank}: {reply.error}")
        if not self._has_joined_group:
            join_process_group(0, self.rank_count, self._store, device)
            self._has_joined_group = True

    def all_reduce_min(self, count: int, device: torch.device) -> int:
        """Return the smallest number of all ranks. Raises RunnerLostError if a rank ends instead."""
        try:
            return all_reduce_min(count, device)
        except RuntimeError as error:
            raise self.make_lost_error(error) from error

    def make_leading_runner(self, runner: Runner, unit_count: int) -> LeadingRunner:
        """Have the followers make their runners. Returns a runner of all ranks. `runner`: computes rank 0's part."""
        self.broadcast(StartRunner(unit_count))
        return LeadingRunner(self, runner)

    def broadcast(self, message: LeaderMessage) -> None:
        """Send a message to every follower. Raises RunnerLostError."""
        self._send_all([self._encoder.encode(message)] * len(self._followers))

    def send_each(self, messages: Sequence[LeaderMessage]) -> None:
        """Send each follower its message, in the order of ranks. Raises RunnerLostError."""
        self._send_all([self._encoder.encode(message) for message in messages])

    def _send_all(self, encoded_messages: Sequence[bytes]) -> None:
        for follower, message in zip(self._followers, encoded_messages, strict=True):
            try:
                follower.send(message)
            except OSError as error:
                raise self.make_lost_error(error) from error

    def receive_block_parts(self) -> list[bytes]:
        """Wait for every follower's reply to `ReadBlocks`. Raises RunnerLostError."""
        parts: list[bytes] = []
        for follower in self._followers:
            reply = follower.receive()
            assert isinstance(reply, BlockParts), reply
            parts.append(reply.contents)
        return parts

    @contextlib.contextmanager
    def hold_ranks(self) -> Iterator[None]:
        """Let all ranks do one operation together, and no other one meanwhile.

        An error within it is raised as RunnerLostError, because the ranks may be at different points of the operation.
        """
        with self._operation_lock:
            try:
                yield
            except Exception as error:
                raise self.make_lost_error(error) from error

    def make_lost_error(self, error: Exception) -> RunnerLostError:
        """Return the error that ends the engine after an operation failed with `error`.

        If a follower has exited, its exit is the reason. The exit may be visible only later, so this waits a moment.
        """
        end_s = time.monotonic() + GRACE_S / 2
        while self._lost_reason is None and time.monotonic() < end_s:
            self._lost_reason = self._find_exit_reason()
            if self._lost_reason is None:
                time.sleep(0.02)
        if self._lost_reason is None:
            self._lost_reason = f"a step failed on rank 0 of {self.rank_count}, and the others cannot follow: {error}"
        return RunnerLostError(self._lost_reason)

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost`, from a thread, if a follower ends while no step runs, or while the step is stuck."""
        for follower in self._followers:
            threading.Thread(target=self._watch_follower, args=(follower, on_lost), daemon=True).start()

    def close(self) -> None:
        """End the follower processes, and leave the process group. May be called twice.

        A follower ends after its socket is closed, and is killed if that takes too long.
        """
        self._is_closing = True
        for follower in self._followers:
            follower.close()
        leave_thread: threading.Thread | None = None
        if self._has_joined_group and self._lost_reason is None:
            # With NCCL, no rank leaves the process group before all do, so this rank leaves while the followers end.
            # A thread does that, because it would wait forever for a follower that has died unnoticed.
            leave_thread = threading.Thread(target=dist.destroy_process_group, daemon=True)
            leave_thread.start()
        for follower in self._followers:
            follower.end_process()
        if leave_thread is not None:
            leave_thread.join(GRACE_S)
        elif self._has_joined_group and dist.get_backend() == "gloo":  # NCCL would wait for the lost rank
            dist.destroy_process_group()
        self._has_joined_group = False

    def _watch_follower(self, follower: _FollowerHandle, on_lost: Callable[[str], None]) -> None:
        """Wait until a follower ends, and report that unless the leader is closing, or an operation has reported it."""
        follower.process.wait()
        has_lock = self._operation_lock.acquire(timeout=GRACE_S)  # time for an operation to fail and report the end
        if self._lost_reason is None and not self._is_closing:
            self._lost_reason = self._find_exit_reason() or follower.describe_exit()
            on_lost(self._lost_reason)
        if has_lock:
            self._operation_lock.release()

    def _find_exit_reason(self) -> str | None:
        """Return how a follower exited; None if all run. A follower that was killed counts before one that failed."""
        exited_followers = [follower for follower in self._followers if follower.process.poll() is not None]
        if not exited_followers:
            return None
        return min(exited_followers, key=lambda follower: follower.process.returncode).describe_exit()


class LeadingRunner:
    """Computes the engine's steps on all tensor-parallel ranks together. Implements `engine.core.Runner`.

    The ranks other than this process, rank 0, get the plan of each step as a message, and compute it meanwhile.
    """

    def __init__(self, leader: Leader, runner: Runner) -> None:
        """Make a runner of all ranks. `leader`: sends messages to the others. `runner`: computes rank 0's part."""
        self._leader = leader
        self._runner = runner
        self._plan_encoder = PlanEncoder()

    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Return a function that computes a step on all ranks. It raises RunnerLostError if any rank fails."""
        return partial(self._execute, plan)

    def _execute(self, plan: StepPlan) -> StepResult:
        with self._leader.hold_ranks():
            self._leader.broadcast(self._plan_encoder.encode(plan))
            return self._runner.submit(plan)()


class RankedBlockMemory:
    """Reads, writes and copies cache blocks on all tensor-parallel ranks together. Implements `BlockMemory`.

    Each rank holds a part of every block. A block's content is the parts of all ranks, rank 0 first.
    """

    def __init__(self, leader: Leader, copier: BlockCopier) -> None:
        """Make the memory of all ranks. `leader`: sends messages to the others. `copier`: accesses rank 0's parts."""
        self._leader = leader
        self._copier = copier

    def get_block_bytes(self, kind: int) -> int:
        return self._copier.get_block_bytes(kind) * self._leader.rank_count

    def execute(self, block_copies: Sequence[BlockCopy]) -> None:
        if block_copies:
            with self._leader.hold_ranks():
                self._leader.broadcast(CopyBlocks(list(block_copies)))
                self._copier.execute(block_copies)

    def read_blocks(self, places: Sequence[BlockPlace]) -> memoryview:
        """Return the contents of blocks, one after another, put together from the parts of all ranks."""
        with self._leader.hold_ranks():
            self._leader.broadcast(ReadBlocks(list(places)))
            own_parts = self._copier.read_blocks(places)
            parts_by_rank = [own_parts, *(memoryview(parts) for parts in self._leader.receive_block_parts())]
        contents = bytearray()
        start = 0
        for place in places:
            end = start + self._copier.get_block_bytes(place.kind)
            for parts in parts_by_rank:
                contents += parts[start:end]
            start = end
        return memoryview(contents)

    def write_blocks(self, places: Sequence[BlockPlace], contents: memoryview) -> None:
        """Cut the contents of blocks into the parts of the ranks, and have each rank write its own."""
        parts_by_rank = [bytearray() for _ in range(self._leader.rank_count)]
        start = 0
        for place in places:
            part_bytes = self._copier.get_block_bytes(place.kind)
            for parts in parts_by_rank:
                parts += contents[start : start + part_bytes]
                start += part_bytes
        own_parts, *followers_parts = parts_by_rank
        with self._leader.hold_ranks():
            self._leader.send_each([WriteBlocks(list(places), bytes(parts)) for parts in followers_parts])
            self._copier.write_blocks(places, memoryview(own_parts))
