"""The process of a follower (ranks 1 and up), which computes the leader's plans on its part of the model.

It ends when its socket closes. The other end of the socket is `engine.parallel.leader.Leader`.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import sys
import traceback
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
from engine.parallel.leader import LOOPBACK
from engine.parallel.messages import (
    BlockParts,
    CopyBlocks,
    FollowerReply,
    LeaderMessage,
    LoadDone,
    LoadModel,
    PlanDecoder,
    PlanMessage,
    ReadBlocks,
    StartRunner,
    WriteBlocks,
)
from options.child_process import exit_when_closed

log = logging.getLogger("engine.follower")


class Follower:
    """A tensor-parallel rank other than rank 0, the leader: computes each step on its part of the model, as told."""

    def __init__(self, rank: int, size: int, connection: Connection, store_port: int) -> None:
        """Make the follower of a rank, of `size` ranks, that has loaded nothing.

        `connection`: to the leader. `store_port`: port of the leader's TCPStore, by which the ranks find each other.
        """
        self._shard = Shard(rank, size, all_reduce_sum, gather_columns)
        self._connection = connection
        self._store_port = store_port
        self._has_joined_group = False
        self._config = EngineConfig()
        self._rank_model: RankModel | None = None
        self._runner: ModelRunner | None = None
        self._plan_decoder = PlanDecoder()

    def run(self) -> None:
        """Execute the leader's messages in order, until the leader closes the socket.

        The first ones load the model, and make the runner and its cache. Then come the plans of steps.
        """
        decoder: msgspec.msgpack.Decoder[LeaderMessage] = msgspec.msgpack.Decoder(LeaderMessage)
        while True:
            try:
                payload = self._connection.recv_bytes()
            except (EOFError, ConnectionError):
                return
            message = decoder.decode(payload)
            if isinstance(message, LoadModel):
                self._load(message)
            elif isinstance(message, StartRunner):
                assert self._rank_model is not None
                self._runner = make_runner(self._config, self._rank_model, message.unit_count)
                self._runner.record_decode_steps(count_sequences_max(self._config))
                self._plan_decoder = PlanDecoder()
            else:
                assert self._runner is not None
                self._execute(message, self._runner)

    def _execute(self, message: PlanMessage | CopyBlocks | ReadBlocks | WriteBlocks, runner: ModelRunner) -> None:
        """Compute a step, or copy, read or write cache blocks. The reply to ReadBlocks is their contents."""
        block_copier = runner.pool.block_copier
        if isinstance(message, PlanMessage):
            runner.execute(self._plan_decoder.decode(message))
        elif isinstance(message, CopyBlocks):
            block_copier.execute(message.block_copies)
        elif isinstance(message, ReadBlocks):
            self._reply(BlockParts(bytes(block_copier.read_blocks(message.places))))
        else:
            block_copier.write_blocks(message.places, memoryview(bytearray(message.contents)))

    def _load(self, message: LoadModel) -> None:
        """Load this rank's part of the model, reply, and then size the cache by the smallest free memory of all ranks.

        The leader does the same, and sends the size. After any error of loading, the reply is the reason.
        """
        config = self._config = message.config
        rank_format = f"%(asctime)s %(levelname)s %(name)s (rank {self._shard.rank}): %(message)s"
        logging.basicConfig(level=config.log_level.upper(), format=rank_format)
        try:
            torch.set_num_threads(config.num_threads)
            device = select_rank_device(config, self._shard.rank)
            model, dtype = load_model(Path(message.folder), dtype=config.dtype, device=device, shard=self._shard)
            self._rank_model = resolve_rank_model(config, model, dtype, device)
        except Exception as error:  # noqa: BLE001 - the leader must get the reason
            if not isinstance(error, (ValueError, OSError)):
                traceback.print_exc()
            self._reply(LoadDone(str(error)))
            return
        self._reply(LoadDone(None))
        if not self._has_joined_group:
            store = TCPStore(LOOPBACK, self._store_port, self._shard.num_ranks, is_master=False)
            join_process_group(self._shard.rank, self._shard.num_ranks, store, device)
            self._has_joined_group = True
        size_cache(config, self._rank_model, all_reduce_min)

    def _reply(self, reply: FollowerReply) -> None:
        self._connection.send_bytes(msgspec.msgpack.encode(reply))

    def close(self) -> None:
        """Close the runner, and then leave the process group."""
        if self._runner is not None:
            self._runner.close()
        if self._has_joined_group:
            dist.destroy_process_group()


def main(fd: int, rank: int, size: int, port: int) -> int:
    """Run the process of a tensor-parallel rank until the leader, rank 0, closes the socket. Returns the exit status.

    `fd`: the socket. `size`: number of ranks. `port`: port of the leader's TCPStore, by which ranks find each other.
    """
    faulthandler.enable()
    connection = Connection(fd)
    exit_when_closed(fd)
    follower = Follower(rank, size, connection, port)
    try:
        follower.run()
    except Exception as error:  # noqa: BLE001 - the process ends, which the leader notices
        _exit_after_error(connection, error, f"rank {rank} of {size}")
    follower.close()
    return 0


def _exit_after_error(connection: Connection, error: Exception, rank_name: str) -> NoReturn:
    """Log the error, unless the leader's end caused it, and end the process.

    The process ends at once: threads of the process group may wait for other ranks, and would abort an orderly exit.
    """
    poll = select.poll()
    poll.register(connection, 0)  # poll reports the end of a connection in any case
    is_leader_gone = bool(poll.poll(0))
    if not is_leader_gone:
        log.error("%s fails: %s: %s", rank_name, type(error).__name__, error)
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(0 if is_leader_gone else 1)
