"""A follower's process (ranks 1 and up): the leader's plans, computed on this rank's part of the model.

No scheduler, no sampling, no events, no HTTP. Ends when its socket closes. The other end is
`engine.parallel.ranks.Leader`.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from engine.cache.spec import CacheSpec
from engine.config import EngineConfig
from engine.execution.runner import ModelRunner
from engine.execution.sizing import make_runner, rank_device, sequences_max, size_cache
from engine.messages import FrameReader, encode_frame
from engine.models import CausalLM, Shard
from engine.models.loader import load_model
from engine.parallel.plan_messages import PlanDecoder
from engine.parallel.ranks import (
    GRACE_S,
    LOOPBACK,
    FollowerReply,
    LeaderMessage,
    LoadFailed,
    LoadModel,
    RankLoaded,
    StartRunner,
    all_reduce_min,
    all_reduce_sum,
    gather_columns,
    join_process_group,
)

log = logging.getLogger("engine.follower")


class Follower:
    """One rank's model and runner."""

    def __init__(self, rank: int, size: int) -> None:
        self._shard = Shard(rank, size, all_reduce_sum, gather_columns)
        self._config = EngineConfig()
        self.device = torch.device("cpu")
        self._model: CausalLM | None = None
        self._spec: CacheSpec | None = None
        self._dtype = torch.float32
        self._runner: ModelRunner | None = None
        self._plan_decoder = PlanDecoder()

    def load(self, config: EngineConfig, folder: Path) -> RankLoaded:
        """Raises what loading raises."""
        torch.set_num_threads(config.num_threads)
        self._config = config
        self.device = rank_device(config, self._shard.rank)
        self._model, self._dtype = load_model(folder, dtype=config.dtype, device=self.device, shard=self._shard)
        self._spec = self._model.make_cache_spec(config.block_size, self._dtype)
        return RankLoaded()

    def size_cache(self) -> None:
        """With the other ranks; the leader says later what came of it."""
        assert self._model is not None
        assert self._spec is not None
        size_cache(
            self._config, self._model, self._spec, dtype=self._dtype, device=self.device, all_reduce_min=all_reduce_min
        )

    def execute(self, message: LeaderMessage) -> None:
        if isinstance(message, StartRunner):
            assert self._model is not None
            assert self._spec is not None
            self._runner = make_runner(
                self._config, self._model, self._spec, message.unit_count,
                dtype=self._dtype, device=self.device, max_model_len=message.max_model_len, eos_token_ids=(),
            )  # fmt: skip
            self._runner.record_decode_steps(sequences_max(self._config))
            self._plan_decoder = PlanDecoder()
        else:
            assert not isinstance(message, LoadModel)
            assert self._runner is not None
            self._runner.execute(self._plan_decoder.decode(message))

    def close(self) -> None:
        """Before the ranks part; see `ModelRunner`."""
        if self._runner is not None:
            self._runner.close()


def main(fd: int, rank: int, size: int, port: int) -> int:
    """The process's whole life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    sock = socket.socket(fileno=fd)
    _exit_when_closed(sock)
    follower = Follower(rank, size)
    is_joined = False
    try:
        for message in _receive_messages(sock):
            if not isinstance(message, LoadModel):
                follower.execute(message)
                continue
            level = message.config.log_level.upper()
            logging.basicConfig(level=level, format=f"%(asctime)s %(levelname)s %(name)s (rank {rank}): %(message)s")
            reply = _load(follower, message)
            sock.sendall(encode_frame(msgspec.msgpack.encode(reply)))
            if isinstance(reply, LoadFailed):
                continue
            if not is_joined:
                store = TCPStore(LOOPBACK, port, size, is_master=False)
                join_process_group(rank, size, store, follower.device)
                is_joined = True
            follower.size_cache()
    except Exception as error:  # noqa: BLE001 - the last frame of the process; the leader sees it end
        if _is_hung_up(sock):
            return 0  # the leader is gone, and with it the partner of whatever was under way
        log.error("rank %d of %d fails: %s: %s", rank, size, type(error).__name__, error)
        traceback.print_exc()
        return 1
    if is_joined:
        follower.close()
        dist.destroy_process_group()
    return 0


def _load(follower: Follower, message: LoadModel) -> FollowerReply:
    try:
        return follower.load(message.config, Path(message.folder))
    except Exception as error:  # noqa: BLE001 - whatever it is, the leader must hear why there is no model
        if not isinstance(error, (ValueError, OSError)):
            traceback.print_exc()
        return LoadFailed(str(error))


def _receive_messages(sock: socket.socket) -> Iterator[LeaderMessage]:
    """Until the leader closes the socket."""
    reader = FrameReader()
    decoder: msgspec.msgpack.Decoder[LeaderMessage] = msgspec.msgpack.Decoder(LeaderMessage)
    while True:
        try:
            data = sock.recv(1 << 20)
        except ConnectionError:
            return
        if not data:
            return
        for payload in reader.feed(data):
            yield decoder.decode(payload)


def _is_hung_up(sock: socket.socket, timeout_ms: int = 0) -> bool:
    poll = select.poll()
    poll.register(sock, 0)  # the end of a connection is reported unasked
    return bool(poll.poll(timeout_ms))


def _exit_when_closed(sock: socket.socket) -> None:
    """End this process soon after its socket is closed, even if it is blocked where a partner is gone."""

    def wait() -> None:
        while not _is_hung_up(sock, 60_000):
            pass
        time.sleep(GRACE_S)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
