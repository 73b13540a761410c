"""Stored responses of this server, which clients may continue, read and delete."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from prompts import RequestError
from prompts.responses import get_response_id_of_item

STORED_MAX = 100_000
STORED_BYTES_MAX = 256 << 20


class _Output(msgspec.Struct):
    """The part of a response's JSON that items are read from."""

    output: list[dict[str, Any]]


_output_decoder = msgspec.json.Decoder(_Output)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A finished response, and the conversation up to it, both as JSON."""

    response: bytes
    messages: bytes
    """List of the rendered messages and the answer."""

    @property
    def size_bytes(self) -> int:
        return len(self.response) + len(self.messages)


class ResponseStore:
    """Finished responses by id, which a later request may continue. The least recently used ones are dropped.

    It holds at most STORED_MAX responses, of `bytes_max` bytes together.
    """

    def __init__(self, bytes_max: int = STORED_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self.used_bytes = 0

    def put(self, response: dict[str, Any], messages: bytes) -> None:
        """Store a response and its `messages`, and drop the least recently used ones to make room."""
        response_json = bytes(memoryview(msgspec.json.encode(response)))  # a copy without the encoder's spare room
        stored_response = StoredResponse(response_json, messages)
        self._responses[response["id"]] = stored_response
        self.used_bytes += stored_response.size_bytes
        while self._responses and (self.used_bytes > self._bytes_max or len(self._responses) > STORED_MAX):
            self._drop(next(iter(self._responses)))

    def get(self, name: str, param: str) -> StoredResponse:
        """Return the response `name`, which the field `param` refers to. Raises RequestError 404."""
        stored_response = self._responses.get(name)
        if stored_response is None:
            message = (
                f"{param}: no response {name[:256]!r} is stored here: it was never made, made with store: false, "
                "deleted, or newer ones took its place"
            )
            raise RequestError(message, param=param, code="response_not_found", status=404)
        self._responses.move_to_end(name)
        return stored_response

    async def get_items(self, param_by_item_id: Mapping[str, str]) -> dict[str, bytes]:
        """Return the JSON of output items of stored responses, by their ids.

        `param_by_item_id`: field of the request that refers to each item. Raises RequestError 404 for an unknown item.
        """
        item_ids_by_response: defaultdict[str, list[str]] = defaultdict(list)
        for item_id in param_by_item_id:
            item_ids_by_response[get_response_id_of_item(item_id)].append(item_id)
        json_by_item_id: dict[str, bytes] = {}
        for response_id, item_ids in item_ids_by_response.items():
            stored_response = self._responses.get(response_id)
            output = [] if stored_response is None else _output_decoder.decode(stored_response.response).output
            item_by_id = {item["id"]: item for item in output}
            for item_id in item_ids:
                if item_id not in item_by_id:
                    param = param_by_item_id[item_id]
                    message = f"{param}: no item {item_id[:256]!r} of a response that is stored here"
                    raise RequestError(message, param=param, code="item_not_found", status=404)
                json_by_item_id[item_id] = msgspec.json.encode(item_by_id[item_id])
            self._responses.move_to_end(response_id)
            await asyncio.sleep(0)  # decoding is slow, so other requests are served between responses
        return json_by_item_id

    def delete(self, name: str) -> None:
        """Delete the response `name`. Raises RequestError 404."""
        self.get(name, "response_id")
        self._drop(name)

    def _drop(self, name: str) -> None:
        self.used_bytes -= self._responses.pop(name).size_bytes

    def check_invariants(self) -> None:
        assert self.used_bytes == sum(stored_response.size_bytes for stored_response in self._responses.values())
        assert self.used_bytes <= self._bytes_max
