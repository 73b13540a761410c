"""Live batches of a stream that wait for earlier ones, and the digest by which a repeated batch is recognised."""

from __future__ import annotations

from xxhash import xxh3_64_intdigest


def digest_payload(payload: bytes) -> int:
    """Return the digest of a payload by which repetitions are recognised."""
    return xxh3_64_intdigest(payload)


class OutOfOrderBatches:
    """Buffer of live batches that arrived before earlier ones, and wait until those have been replayed.

    It holds at most `max_batches` of `max_bytes` in total. A batch that does not fit is dropped, and replayed too.
    """

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._payload_by_seq: dict[int, bytes] = {}
        self._used_bytes = 0
        self.highest_seq: int | None = None
        """Largest sequence number that has arrived, also if its batch was dropped."""

    def store(self, seq: int, payload: bytes) -> bool:
        """Store a batch, in place of one with the same number; return whether it fits."""
        self.highest_seq = seq if self.highest_seq is None else max(self.highest_seq, seq)
        self._used_bytes -= len(self._payload_by_seq.pop(seq, b""))
        is_full = len(self._payload_by_seq) >= self._max_batches
        if is_full or self._used_bytes + len(payload) > self._max_bytes:
            return False
        self._payload_by_seq[seq] = payload
        self._used_bytes += len(payload)
        return True

    def get(self, seq: int) -> bytes | None:
        return self._payload_by_seq.get(seq)

    def pop(self, seq: int) -> bytes:
        payload = self._payload_by_seq.pop(seq)
        self._used_bytes -= len(payload)
        return payload

    def list_seqs(self) -> list[int]:
        """List the sequence numbers of the waiting batches, in order."""
        return sorted(self._payload_by_seq)

    def list_newest_run(self) -> list[tuple[int, bytes]]:
        """List the consecutive batches that end with the newest; empty if the newest was dropped."""
        run: list[tuple[int, bytes]] = []
        seq = self.highest_seq
        while seq is not None and seq in self._payload_by_seq:
            run.append((seq, self._payload_by_seq[seq]))
            seq -= 1
        return run[::-1]

    def clear(self) -> None:
        self._payload_by_seq.clear()
        self._used_bytes = 0
        self.highest_seq = None

    def check_invariants(self) -> None:
        """Assert that the bytes are counted right and that the buffer is within its bounds. Tests call this."""
        assert self._used_bytes == sum(map(len, self._payload_by_seq.values()))
        assert len(self._payload_by_seq) <= self._max_batches
        if self._payload_by_seq:
            assert self.highest_seq is not None
            assert self.highest_seq >= max(self._payload_by_seq)

    def __bool__(self) -> bool:
        return bool(self._payload_by_seq)
