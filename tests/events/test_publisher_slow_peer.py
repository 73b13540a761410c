"""A peer that reads its reply slowly: the publisher is never far ahead of it, so it sees each bit of progress."""

from __future__ import annotations

import time

import pytest
import zmq

from events import publisher as publisher_module
from events import replay_replies
from events.config import KVEventsConfig
from events.frames import SNAPSHOT_SEQ
from events.publisher import EventPublisher
from events.types import BlockStored


def test_a_reply_is_not_queued_far_ahead_of_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 messages were queued, and 500 read before the next: a reader that took 30 s for those lost its reply."""
    monkeypatch.setattr(replay_replies, "BLOCKS_PER_SNAPSHOT_CHUNK", 1)
    sent_count = 0
    advance = replay_replies.Reply.advance

    def count_and_advance(reply: replay_replies.Reply, now: float) -> None:
        nonlocal sent_count
        sent_count += 1
        advance(reply, now)

    monkeypatch.setattr(publisher_module.Reply, "advance", count_and_advance)
    config = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint="tcp://*:0", replay_endpoint="tcp://*:0"
    )
    publisher, context = EventPublisher(config), zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        tokens = list(range(100_000, 104_096))
        for i in range(900):
            publisher.publish(
                [BlockStored(block_hashes=[i + 1], parent_block_hash=None, token_ids=tokens, block_size=4096)]
            )
        while publisher._queue:
            time.sleep(0.01)
        dealer.rcvhwm, dealer.rcvbuf = 16, 4096
        endpoint = publisher.describe_source().replay_endpoint
        assert endpoint is not None
        dealer.connect(endpoint.replace("*", "127.0.0.1"))
        dealer.send_multipart([b"", SNAPSHOT_SEQ.to_bytes(8, "big")])
        last_count = -1
        while sent_count == 0 or last_count != sent_count:
            last_count = sent_count
            time.sleep(0.5)
        assert sent_count < 450
        for _ in range(902):  # the blocks, the last batch and the end
            dealer.recv_multipart()
    finally:
        dealer.close(0)
        context.term()
        publisher.close(0)
