"""Publish cache events without an engine: what a worker of your own would do, so that any subscriber can follow it.

python examples/publish_events.py tcp://*:5557 [tcp://*:5558]     events, and where missed ones are asked for
"""

import sys
import time

from events import BlockRemoved, BlockStored, EventPublisher, KVEventsConfig, hash_blocks

BLOCK_SIZE = 16


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} ENDPOINT [REPLAY_ENDPOINT], such as tcp://*:5557 tcp://*:5558")
    endpoint, *replay_endpoints = sys.argv[1:]
    config = KVEventsConfig(
        enable_kv_cache_events=True,
        endpoint=endpoint,
        replay_endpoint=replay_endpoints[0] if replay_endpoints else None,
    )
    publisher = EventPublisher(config)
    prompt = list(range(4 * BLOCK_SIZE))
    hashes = hash_blocks(None, prompt, BLOCK_SIZE)
    try:
        while True:
            publisher.publish([BlockStored(hashes, None, prompt, BLOCK_SIZE)])  # after None: the start of a prompt
            time.sleep(1.0)
            publisher.publish([BlockRemoved(hashes[::-1])])  # the deepest block first
            time.sleep(1.0)
    except KeyboardInterrupt:
        pass
    finally:
        publisher.close()


if __name__ == "__main__":
    main()
