"""Several processes compute one model: the leader (rank 0) has its followers repeat each step on their part of it.

The leader is the process that has scheduler, cache and publisher. It starts the followers, sends them each step's plan
as a small message over a socket, and computes the same plan itself; within a step the ranks meet in all-reduce, and
where logits are put together.
Block tables and units mean the same on all ranks, since every rank's cache has the same shape. Only the leader samples.

A rank that fails cannot be made to catch up, so it ends the engine: `RunnerLostError`. A follower ends when its socket
closes, whatever the reason. One machine; gloo between CPUs, NCCL between GPUs.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from engine.config import EngineConfig
from engine.core import Runner
from engine.messages import FrameReader, encode_frame
from engine.models import Shard
from engine.parallel.plan_messages import PlanEncoder, PlanMessage
from engine.types import RunnerLostError, StepPlan, StepResult

LOOPBACK = "127.0.0.1"
COLLECTIVE_TIMEOUT_S = 300.0
"""Longest wait of one rank for another inside a step: kernels are compiled in a first one."""
GRACE_S = 5.0
"""Time for a process to end by itself, or for a step without its partner, before it is killed."""

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from engine.parallel.follower import main; sys.exit(main(*map(int, sys.argv[2:])))"
)

log = logging.getLogger("engine.ranks")


# leader -> follower
class LoadModel(msgspec.Struct, tag="load", array_like=True, frozen=True):
    """Load the model; answered by `RankLoaded` or `LoadFailed`."""

    config: EngineConfig
    folder: str


class StartRunner(msgspec.Struct, tag="start", array_like=True, frozen=True):
    """Make the runner and its cache; plans follow."""

    unit_count: int


LeaderMessage = LoadModel | StartRunner | PlanMessage


# follower -> leader
class RankLoaded(msgspec.Struct, tag="loaded", array_like=True, frozen=True):
    """The ranks meet (once), and size the cache together."""


class LoadFailed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    message: str


FollowerReply = RankLoaded | LoadFailed


def join_process_group(rank: int, size: int, store: TCPStore, device: torch.device) -> None:
    """Meet the other ranks; blocks until all are there."""
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        device_id=device if device.type == "cuda" else None,  # connects now, not in the first step
        store=store,
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )


def all_reduce_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks, on every rank; x is consumed."""
    x = x.contiguous()
    dist.all_reduce(x)
    return x


def gather_columns(x: torch.Tensor) -> torch.Tensor | None:
    """On rank 0: the [rows, n] of all ranks side by side, [rows, ranks * n]; elsewhere None."""
    x = x.contiguous()
    if dist.get_rank():
        dist.gather(x, dst=0)
        return None
    parts = x.new_empty(dist.get_world_size(), *x.shape)
    dist.gather(x, list(parts), dst=0)
    return parts.transpose(0, 1).reshape(x.shape[0], -1)


def all_reduce_min(count: int, device: torch.device) -> int:
    """The smallest of the ranks' numbers, on every rank; each waits for the others."""
    minimum = torch.tensor(count, dtype=torch.int64, device=device)
    dist.all_reduce(minimum, op=dist.ReduceOp.MIN)
    return int(minimum.item())


class _FollowerHandle:
    """The leader's side of one follower."""

    def __init__(self, rank: int, size: int, port: int) -> None:
        self.rank = rank
        self._sock, follower_sock = socket.socketpair()
        self._frame_reader = FrameReader()
        self._decoder: msgspec.msgpack.Decoder[FollowerReply] = msgspec.msgpack.Decoder(FollowerReply)
        with follower_sock:
            arguments = [str(number) for number in (follower_sock.fileno(), rank, size, port)]
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), *arguments],
                pass_fds=[follower_sock.fileno()],
                stdin=subprocess.DEVNULL,
            )

    def send(self, data: bytes) -> None:
        """Raises OSError if the follower is gone."""
        self._sock.sendall(data)

    def receive(self) -> FollowerReply:
        """Wait for its answer. Raises RunnerLostError if it ends instead."""
        while True:
            try:
                data = self._sock.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(GRACE_S)
                raise RunnerLostError(self.describe_exit())
            replies = [self._decoder.decode(payload) for payload in self._frame_reader.feed(data)]
            if replies:
                assert len(replies) == 1, replies
                return replies[0]

    def describe_exit(self) -> str:
        exit_status = self.process.poll()
        if exit_status is None:
            exit_event = "closed its socket"
        elif exit_status < 0:
            exit_event = f"was killed by {signal.Signals(-exit_status).name}"
        else:
            exit_event = f"ended with exit status {exit_status}"
        return f"tensor-parallel rank {self.rank} (process {self.process.pid}) {exit_event}"

    def close(self) -> None:
        self._sock.close()


class Leader:
    """Starts the followers and has them do what rank 0 does. `close` it; there can be one in a process at a time."""

    def __init__(self, size: int) -> None:
        assert size > 1, size
        self._rank_count = size
        listener = socket.create_server((LOOPBACK, 0))  # left to itself, the store listens on every interface
        port = listener.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._encoder = msgspec.msgpack.Encoder()
        self._plan_encoder = PlanEncoder()
        self._step_lock = threading.Lock()
        self._is_joined = False
        self._is_closing = False
        self._lost_reason: str | None = None
        self._followers: list[_FollowerHandle] = []
        for rank in range(1, size):
            self._followers.append(_FollowerHandle(rank, size, port))

    @property
    def shard(self) -> Shard:
        """Rank 0's part of a model."""
        return Shard(0, self._rank_count, all_reduce_sum, gather_columns)

    def load(self, config: EngineConfig, folder: Path) -> None:
        """Have the followers load a model, while the caller loads its own part."""
        self.broadcast(LoadModel(config, str(folder)))

    def await_loaded(self, device: torch.device) -> None:
        """Wait for the followers and meet them. Raises RunnerLostError, or ValueError with a follower's reason."""
        for follower in self._followers:
            reply = follower.receive()
            if isinstance(reply, LoadFailed):
                raise ValueError(f"tensor-parallel rank {follower.rank}: {reply.message}")
        if not self._is_joined:
            join_process_group(0, self._rank_count, self._store, device)
            self._is_joined = True

    def all_reduce_min(self, count: int, device: torch.device) -> int:
        """The smallest of the ranks' numbers. Raises RunnerLostError if one of them ends instead."""
        try:
            return all_reduce_min(count, device)
        except RuntimeError as error:
            raise self.make_lost_error(error) from error

    def make_leading_runner(self, runner: Runner, unit_count: int) -> LeadingRunner:
        """Have the followers make their runners. Returns a runner of all ranks. `runner`: that of rank 0."""
        self.broadcast(StartRunner(unit_count))
        self._plan_encoder = PlanEncoder()
        return LeadingRunner(self, runner)

    def broadcast(self, message: LeaderMessage) -> None:
        """Send it to every follower. Raises RunnerLostError."""
        data = encode_frame(self._encoder.encode(message))
        for follower in self._followers:
            try:
                follower.send(data)
            except OSError as error:
                raise self.make_lost_error(error) from error

    def step(self, plan: StepPlan, runner: Runner) -> StepResult:
        """Have all ranks compute a plan; the result of rank 0. Raises RunnerLostError if any of them fails."""
        with self._step_lock:
            self.broadcast(self._plan_encoder.encode(plan))
            try:
                return runner.execute(plan)
            except Exception as error:  # whatever it is, the ranks may now be at different places
                raise self.make_lost_error(error) from error

    def make_lost_error(self, error: Exception) -> RunnerLostError:
        """Why the ranks cannot go on: the end of one of them if that is what `error` comes from."""
        end_s = time.monotonic() + GRACE_S / 2
        while self._lost_reason is None and time.monotonic() < end_s:
            self._lost_reason = self._find_exit_reason()
            if self._lost_reason is None:
                time.sleep(0.02)
        if self._lost_reason is None:
            self._lost_reason = f"a step failed on rank 0 of {self._rank_count}, and the others cannot follow: {error}"
        return RunnerLostError(self._lost_reason)

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost`, from a thread, if a follower ends while no step notices it: idle, or blocked for good."""
        for follower in self._followers:
            threading.Thread(target=self._watch_follower, args=(follower, on_lost), daemon=True).start()

    def close(self) -> None:
        """End the followers; by force where they do not obey. Idempotent."""
        self._is_closing = True
        for follower in self._followers:
            follower.close()
        destroy_thread = None
        if self._is_joined and self._lost_reason is None:
            # Communicators of NCCL may end only together; should a rank be gone after all, nobody waits for long.
            destroy_thread = threading.Thread(target=dist.destroy_process_group, daemon=True)
            destroy_thread.start()
        for follower in self._followers:
            try:
                follower.process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                log.warning("tensor-parallel rank %d does not end and is killed", follower.rank)
                follower.process.kill()
                follower.process.wait()
        if destroy_thread is not None:
            destroy_thread.join(GRACE_S)
        elif self._is_joined and dist.get_backend() == "gloo":  # NCCL would wait for the lost
            dist.destroy_process_group()
        self._is_joined = False

    def _watch_follower(self, follower: _FollowerHandle, on_lost: Callable[[str], None]) -> None:
        follower.process.wait()
        has_step_lock = self._step_lock.acquire(timeout=GRACE_S)  # a step that fails says so itself
        if self._lost_reason is None and not self._is_closing:
            self._lost_reason = self._find_exit_reason() or follower.describe_exit()
            on_lost(self._lost_reason)
        if has_step_lock:
            self._step_lock.release()

    def _find_exit_reason(self) -> str | None:
        """Return the reason why a follower exited; one that was killed comes before one that failed after it."""
        exited = [(status, f) for f in self._followers if (status := f.process.poll()) is not None]
        return (
            min(exited, key=lambda status_and_follower: status_and_follower[0])[1].describe_exit() if exited else None
        )


class LeadingRunner:
    """The runner of all ranks, as the core sees it."""

    def __init__(self, leader: Leader, runner: Runner) -> None:
        self._leader = leader
        self._runner = runner

    def execute(self, plan: StepPlan) -> StepResult:
        return self._leader.step(plan, self._runner)
