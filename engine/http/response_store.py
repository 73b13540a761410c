"""Responses that clients may go on from, show or delete: those that were made here and are stored.

Owns them, within `STORED_BYTES_MAX`: those that were not used for the longest go first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from engine.api.responses import ResponseObject
from prompts import RequestError
from prompts.responses import response_of

STORED_MAX = 100_000
STORED_BYTES_MAX = 256 << 20


@dataclass(slots=True)
class StoredResponse:
    response: ResponseObject
    messages: bytes
    """With what was said, as JSON."""
    size: int = 0


class ResponseStore:
    """Of one server."""

    def __init__(self, bytes_max: int = STORED_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self.bytes = 0

    def put(self, stored: StoredResponse) -> None:
        """Keep it; what was not used for the longest makes room."""
        stored.size = len(stored.messages) + len(msgspec.json.encode(stored.response))
        self._stored[stored.response.id] = stored
        self.bytes += stored.size
        while self._stored and (self.bytes > self._bytes_max or len(self._stored) > STORED_MAX):
            self._drop(next(iter(self._stored)))

    def get(self, name: str, param: str) -> StoredResponse:
        """Raises RequestError 404."""
        found = self._stored.get(name)
        if found is None:
            message = (
                f"{param}: no response {name[:256]!r} is stored here: it was never made, made with store: false, "
                "deleted, or newer ones took its place"
            )
            raise RequestError(message, param=param, code="response_not_found", status=404)
        self._stored.move_to_end(name)
        return found

    def item(self, name: str, param: str) -> bytes:
        """Return an item of a stored response, as JSON. Raises RequestError 404."""
        found = self._stored.get(response_of(name))
        item = None if found is None else next((item for item in found.response.output if item.id == name), None)
        if item is None:
            message = f"{param}: no item {name[:256]!r} of a response that is stored here"
            raise RequestError(message, param=param, code="item_not_found", status=404)
        self._stored.move_to_end(response_of(name))
        return msgspec.json.encode(item)

    def delete(self, name: str) -> None:
        """Raises RequestError 404."""
        self.get(name, "response_id")
        self._drop(name)

    def _drop(self, name: str) -> None:
        self.bytes -= self._stored.pop(name).size

    def check_invariants(self) -> None:
        assert self.bytes == sum(stored.size for stored in self._stored.values())
        assert self.bytes <= self._bytes_max
