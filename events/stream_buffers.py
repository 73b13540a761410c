"""What one stream remembers of single batches: which bytes were applied, and what came before its turn.

Both are bounded. Refuses to know why anything is remembered or forgotten; that is stream.py's.
"""

from __future__ import annotations

from collections import OrderedDict

from xxhash import xxh3_64_intdigest


def digest_payload(payload: bytes) -> int:
    """What is remembered of an applied payload."""
    return xxh3_64_intdigest(payload)


class AppliedBatches:
    """seq -> digest of the newest batches applied."""

    def __init__(self, max_count: int) -> None:
        self._max_count = max_count
        self._digests: OrderedDict[int, int] = OrderedDict()

    def record(self, seq: int, digest: int) -> None:
        self._digests[seq] = digest
        while len(self._digests) > self._max_count:
            self._digests.popitem(last=False)

    def digest_of(self, seq: int) -> int | None:
        """None: never applied, or forgotten since."""
        return self._digests.get(seq)

    def clear(self) -> None:
        self._digests.clear()

    def check_invariants(self) -> None:
        """For tests."""
        assert len(self._digests) <= self._max_count


class OutOfOrderBatches:
    """Live batches that wait for the ones before them. What does not fit is dropped, and shows as a gap."""

    def __init__(self, max_frames: int, max_bytes: int) -> None:
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._payloads: dict[int, bytes] = {}
        self._used_bytes = 0
        self.highest_seq: int | None = None
        """The newest seq that came, dropped or not."""

    def store(self, seq: int, payload: bytes) -> bool:
        """False: it does not fit."""
        self.highest_seq = seq if self.highest_seq is None else max(self.highest_seq, seq)
        self._used_bytes -= len(self._payloads.pop(seq, b""))
        if len(self._payloads) >= self._max_frames or self._used_bytes + len(payload) > self._max_bytes:
            return False
        self._payloads[seq] = payload
        self._used_bytes += len(payload)
        return True

    def get(self, seq: int) -> bytes | None:
        return self._payloads.get(seq)

    def pop(self, seq: int) -> bytes:
        payload = self._payloads.pop(seq)
        self._used_bytes -= len(payload)
        return payload

    def seqs(self) -> list[int]:
        """What waits, in order."""
        return sorted(self._payloads)

    def newest_run(self) -> list[tuple[int, bytes]]:
        """The consecutive batches that end with the newest one that came; empty where that one was dropped."""
        run: list[tuple[int, bytes]] = []
        seq = self.highest_seq
        while seq is not None and (payload := self._payloads.get(seq)) is not None:
            run.append((seq, payload))
            seq -= 1
        return run[::-1]

    def clear(self) -> None:
        self._payloads.clear()
        self._used_bytes = 0
        self.highest_seq = None

    def check_invariants(self) -> None:
        """For tests."""
        assert self._used_bytes == sum(map(len, self._payloads.values()))
        assert len(self._payloads) <= self._max_frames
        assert not self._payloads or (self.highest_seq is not None and self.highest_seq >= max(self._payloads))

    def __bool__(self) -> bool:
        return bool(self._payloads)
