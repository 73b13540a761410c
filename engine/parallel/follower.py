"""The process of a follower (ranks 1 and up), which computes the leader's plans on its part of the model.

It ends when its socket closes. The other end of the socket is `engine.parallel.ranks.Leader`.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from engine.config import EngineConfig
from engine.execution.runner import ModelRunner
from engine.execution.sizing import (
    RankModel,
    count_sequences_max,
    make_runner,
    resolve_rank_model,
    select_rank_device,
    size_cache,
)
from engine.models import Shard
from engine.models.loader import load_model
from engine.parallel.collectives import all_reduce_min, all_reduce_sum, gather_columns, join_process_group
from engine.parallel.messages import (
    BlockParts,
    CopyBlocks,
    FollowerReply,
    LeaderMessage,
    LoadFailed,
    LoadModel,
    PlanDecoder,
    RankLoaded,
    ReadBlocks,
    StartRunner,
    WriteBlocks,
)
from engine.parallel.ranks import LOOPBACK
from options.system import exit_when_closed

log = logging.getLogger("engine.follower")


class Follower:
    """A tensor-parallel rank other than rank 0, the leader: computes each step on its part of the model, as told.

    The leader's messages are executed in order: load the model, make the runner and its cache, then plans of steps.
    """

    def __init__(self, rank: int, size: int) -> None:
        """Make the follower of a rank, of `size` ranks, that has loaded nothing."""
        self.rank = rank
        self.device = torch.device("cpu")
        self._config = EngineConfig()
        self._shard = Shard(rank, size, all_reduce_sum, gather_columns)
        self._rank_model: RankModel | None = None
        self._runner: ModelRunner | None = None
        self._plan_decoder = PlanDecoder()

    def load(self, config: EngineConfig, folder: Path) -> RankLoaded:
        """Load this rank's part of the model in a checkpoint's folder, and return the reply to the leader.

        Raises ConfigError, ModelError, OSError, MemoryError.
        """
        torch.set_num_threads(config.num_threads)
        self._config = config
        self.device = select_rank_device(config, self._shard.rank)
        model, dtype = load_model(folder, dtype=config.dtype, device=self.device, shard=self._shard)
        self._rank_model = resolve_rank_model(config, model, dtype, self.device)
        return RankLoaded()

    def agree_on_cache_size(self) -> None:
        """Take part in sizing the cache by the smallest free memory of all ranks. The leader then sends the result."""
        assert self._rank_model is not None
        size_cache(self._config, self._rank_model, all_reduce_min)

    def execute(self, message: LeaderMessage) -> FollowerReply | None:
        """Execute a message of the leader: make the runner, compute a step, or read, write or copy cache blocks.

        Returns the reply to ReadBlocks; None for other messages. LoadModel is not among them: see `load`.
        """
        if isinstance(message, StartRunner):
            assert self._rank_model is not None
            self._runner = make_runner(self._config, self._rank_model, message.unit_count)
            self._runner.record_decode_steps(count_sequences_max(self._config))
            self._plan_decoder = PlanDecoder()
            return None
        assert not isinstance(message, LoadModel)
        assert self._runner is not None
        block_copier = self._runner.pool.block_copier
        if isinstance(message, ReadBlocks):
            return BlockParts(bytes(block_copier.read_blocks(message.places)))
        if isinstance(message, WriteBlocks):
            block_copier.write_blocks(message.places, memoryview(bytearray(message.contents)))
        elif isinstance(message, CopyBlocks):
            block_copier.execute(message.block_copies)
        else:  # PlanMessage: the sequences and tokens of one step
            self._runner.execute(self._plan_decoder.decode(message))
        return None

    def close(self) -> None:
        """Close the runner. Must be called before the process group is destroyed."""
        if self._runner is not None:
            self._runner.close()


def main(fd: int, rank: int, size: int, port: int) -> int:
    """Run the process of a tensor-parallel rank until the leader, rank 0, closes the socket. Returns the exit status.

    `fd`: the socket. `size`: number of ranks. `port`: port of the leader's TCPStore, by which ranks find each other.
    """
    faulthandler.enable()
    connection = Connection(fd)
    exit_when_closed(fd)
    follower = Follower(rank, size)
    try:
        has_joined_group = _execute_messages(connection, follower, size, port)
    except Exception as error:  # noqa: BLE001 - the process ends, which the leader notices
        _exit_after_error(connection, error, f"rank {rank} of {size}")
    if has_joined_group:
        follower.close()
        dist.destroy_process_group()
    return 0


def _execute_messages(connection: Connection, follower: Follower, group_size: int, store_port: int) -> bool:
    """Execute the messages of the leader, rank 0, and reply to them, until the leader closes the socket.

    After each load of a model, all `group_size` ranks agree on the size of the cache. For that, this rank joins their
    process group after the first load, through the leader's TCPStore at `store_port`. Returns whether it has joined.
    """
    has_joined_group = False
    for message in _receive_messages(connection):
        reply = _load(follower, message) if isinstance(message, LoadModel) else follower.execute(message)
        if reply is not None:
            connection.send_bytes(msgspec.msgpack.encode(reply))
        has_loaded_model = isinstance(reply, RankLoaded)
        if not has_loaded_model:
            continue
        if not has_joined_group:
            store = TCPStore(LOOPBACK, store_port, group_size, is_master=False)
            join_process_group(follower.rank, group_size, store, follower.device)
            has_joined_group = True
        follower.agree_on_cache_size()
    return has_joined_group


def _exit_after_error(connection: Connection, error: Exception, rank_name: str) -> NoReturn:
    """Log the error, unless the leader's end caused it, and end the process.

    The process ends at once: threads of the process group may wait for other ranks, and would abort an orderly exit.
    """
    is_leader_gone = _is_hung_up(connection)
    if not is_leader_gone:
        log.error("%s fails: %s: %s", rank_name, type(error).__name__, error)
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(0 if is_leader_gone else 1)


def _load(follower: Follower, message: LoadModel) -> FollowerReply:
    """Load the rank's part of the model. After any error, reply with the reason."""
    level = message.config.log_level.upper()
    rank_format = f"%(asctime)s %(levelname)s %(name)s (rank {follower.rank}): %(message)s"
    logging.basicConfig(level=level, format=rank_format)
    try:
        return follower.load(message.config, Path(message.folder))
    except Exception as error:  # noqa: BLE001 - the leader must get the reason
        if not isinstance(error, (ValueError, OSError)):
            traceback.print_exc()
        return LoadFailed(str(error))


def _receive_messages(connection: Connection) -> Iterator[LeaderMessage]:
    """Yield the leader's messages until the leader closes the socket."""
    decoder: msgspec.msgpack.Decoder[LeaderMessage] = msgspec.msgpack.Decoder(LeaderMessage)
    while True:
        try:
            payload = connection.recv_bytes()
        except (EOFError, ConnectionError):
            return
        yield decoder.decode(payload)


def _is_hung_up(connection: Connection) -> bool:
    poll = select.poll()
    poll.register(connection, 0)  # poll reports the end of a connection in any case
    return bool(poll.poll(0))
