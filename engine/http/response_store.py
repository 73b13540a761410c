"""Responses that clients may go on from, show or delete: those that were made here and are stored.

Owns them, within `STORED_BYTES_MAX`: those that were not used for the longest go first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from engine.protocol.responses import ResponseObject
from prompts import RequestError
from prompts.responses import get_response_id_of_item

STORED_MAX = 100_000
STORED_BYTES_MAX = 256 << 20


@dataclass(slots=True)
class StoredResponse:
    response: ResponseObject
    messages: bytes
    """With what was said, as JSON."""
    size: int = 0


class ResponseStore:
    """Stored responses of one server, the ones used last."""

    def __init__(self, bytes_max: int = STORED_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.used_bytes = 0

    def put(self, stored_response: StoredResponse) -> None:
        """Keep it; what was not used for the longest makes room."""
        stored_response.size = len(stored_response.messages) + len(msgspec.json.encode(stored_response.response))
        self._responses[stored_response.response.id] = stored_response
        self.used_bytes += stored_response.size
        while self._responses and (self.used_bytes > self._bytes_max or len(self._responses) > STORED_MAX):
            self._drop(next(iter(self._responses)))

    def get(self, name: str, param: str) -> StoredResponse:
        """Raises RequestError 404."""
        stored_response = self._responses.get(name)
        if stored_response is None:
            message = (
                f"{param}: no response {name[:256]!r} is stored here: it was never made, made with store: false, "
                "deleted, or newer ones took its place"
            )
            raise RequestError(message, param=param, code="response_not_found", status=404)
        self._responses.move_to_end(name)
        return stored_response

    def get_item(self, name: str, param: str) -> bytes:
        """Return an item of a stored response, as JSON. Raises RequestError 404."""
        stored_response = self._responses.get(get_response_id_of_item(name))
        item = (
            None
            if stored_response is None
            else next((item for item in stored_response.response.output if item.id == name), None)
        )
        if item is None:
            message = f"{param}: no item {name[:256]!r} of a response that is stored here"
            raise RequestError(message, param=param, code="item_not_found", status=404)
        self._responses.move_to_end(get_response_id_of_item(name))
        return msgspec.json.encode(item)

    def delete(self, name: str) -> None:
        """Raises RequestError 404."""
        self.get(name, "response_id")
        self._drop(name)

    def _drop(self, name: str) -> None:
        self.used_bytes -= self._responses.pop(name).size

    def check_invariants(self) -> None:
        assert self.used_bytes == sum(stored_response.size for stored_response in self._responses.values())
        assert self.used_bytes <= self._bytes_max
