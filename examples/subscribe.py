"""Keep the blocks that a worker holds, from its events: gaps are replayed, a restart begins anew.

An engine may hold a block twice, and on several media, so copies are counted.

python examples/subscribe.py http://127.0.0.1:8000      a worker: it is asked where its events are
"""

import contextlib
import sys
from collections import Counter

from events import BlockRemoved, BlockStored, Clear, Message, StreamSource, Subscriber, discover


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} URL, such as http://127.0.0.1:8001, of a worker")
    url = sys.argv[1]
    streams = [StreamSource(url, source.endpoint, source.replay_endpoint) for source in discover(url)]
    copies: Counter[tuple[int, str, int | bytes]] = Counter()  # (cache group, medium, block name) -> copies
    with Subscriber(streams) as subscriber:
        for item in subscriber:
            if not isinstance(item, Message):
                if isinstance(item.content, Clear):
                    copies.clear()
                print(f"{type(item.content).__name__}: {item.content}", flush=True)
                continue
            for event in item.decoded_batch.batch.events:
                if not isinstance(event, BlockStored | BlockRemoved):
                    copies.clear()
                    continue
                for name in event.block_hashes:
                    key = (event.group_idx or 0, event.medium or "GPU", name)
                    copies[key] += 1 if isinstance(event, BlockStored) else -1
                    if copies[key] <= 0:
                        del copies[key]
            print(f"batch {item.seq}: the worker holds {len(copies)} blocks", flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
