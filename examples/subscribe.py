"""Keep the set of blocks that a worker holds, from its events: gaps are replayed, a restart begins anew.

python examples/subscribe.py http://127.0.0.1:8000      a worker: it is asked where its events are
"""

import contextlib
import sys

from events import BlockRemoved, BlockStored, Clear, Message, StreamSource, Subscriber, discover


def main() -> None:
    url = sys.argv[1]
    streams = [StreamSource(url, source.endpoint, source.replay_endpoint) for source in discover(url)]
    resident_blocks: set[int | bytes] = set()
    with Subscriber(streams) as subscriber:
        for item in subscriber:
            if not isinstance(item, Message):
                if isinstance(item.content, Clear):
                    resident_blocks.clear()
                print(f"{type(item.content).__name__}: {item.content}", flush=True)
                continue
            for event in item.decoded_batch.batch.events:
                if isinstance(event, BlockStored):
                    resident_blocks.update(event.block_hashes)
                elif isinstance(event, BlockRemoved):
                    resident_blocks.difference_update(event.block_hashes)
                else:
                    resident_blocks.clear()
            print(f"batch {item.seq}: the worker holds {len(resident_blocks)} blocks", flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
