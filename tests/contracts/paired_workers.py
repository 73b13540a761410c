"""Workers that get both requests of a pair at once: SGLang's with a role, and vLLM's with a P2P tier.

SGLang's meet in a room. Its prefill worker answers when it has handed the KV over, and its decoding worker waits for
that; neither answers a request without a room. vLLM's decoding worker waits for the id of a transfer, and computes the
prompt itself where nobody knows the id. `waiting` has the requests that hold KV now, and `faults` the requests that
real workers would refuse, or that would break later ones.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

from nixl_workers import text_for, write

Script = Any
SGLANG_FIELDS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
_RANK_FIELDS = ("routed_dp_rank", "disagg_prefill_dp_rank")
_FORBIDDEN_PREFILL_FIELDS = ("stream_options", "min_tokens", "max_completion_tokens", "n", "stream")


class Pairs:
    """Meeting places of two requests, and what their workers did."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.waiting: Counter[str] = Counter()
        """"prefill" or "decode" -> requests that hold KV for another one now."""
        self.transfers = 0
        self.computed_alone = 0
        self.decode_joined: dict[str, asyncio.Event] = {}
        self.handed_over: dict[str, asyncio.Event] = {}
        self.bodies: dict[str, list[dict[str, Any]]] = {}
        """Name of the meeting place -> bodies without the fields of workers."""

    def _enter(self, place: str, body: dict[str, Any]) -> None:
        self.decode_joined.setdefault(place, asyncio.Event())
        self.handed_over.setdefault(place, asyncio.Event())
        self.bodies.setdefault(place, []).append(body)

    async def _wait(self, role: str, event: asyncio.Event, reader: asyncio.StreamReader) -> bool:
        """Hold KV until an event; return False if the router closed the connection first, which frees the KV."""
        self.waiting[role] += 1
        left, held = asyncio.ensure_future(reader.read(1)), asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait((left, held), return_when=asyncio.FIRST_COMPLETED)
            return held.done()
        finally:
            left.cancel()
            held.cancel()
            await asyncio.gather(left, held, return_exceptions=True)
            self.waiting[role] -= 1


class SGLangWorkers(Pairs):
    """The scripts of SGLang's prefill and decoding workers."""

    def __init__(self, host: str = "127.0.0.1", port: int = 8998) -> None:
        super().__init__()
        self._address = (host, port)

    async def prefill(self, request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Compute a prompt once the decoding worker has joined, and answer with a token that is nobody's."""
        body = self._join(request, writer)
        if body is None:
            return
        room = body["room"]
        if await self._wait("prefill", self.decode_joined[room], reader):
            self.handed_over[room].set()
            answer(writer, body, "prefill's own token")

    async def decode(self, request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a request when its KV has come."""
        body = self._join(request, writer)
        if body is None:
            return
        room = body["room"]
        self.decode_joined[room].set()
        if await self._wait("decode", self.handed_over[room], reader):
            self.transfers += 1
            answer(writer, body, text_for(body))

    def _join(self, request: Any, writer: asyncio.StreamWriter) -> dict[str, Any] | None:
        """Return the body, with the name of its room as `room`; None if the request was refused."""
        body = json.loads(request.body)
        fields = {name: body.pop(name, None) for name in (*SGLANG_FIELDS, *_RANK_FIELDS)}
        room = fields["bootstrap_room"]
        if room is None:
            self.faults.append("a request without a room")
            write(writer, b'{"error":"Disaggregated request received without boostrap room id"}', b"400 Bad Request")
            return None
        if (fields["bootstrap_host"], fields["bootstrap_port"]) != self._address or not 0 <= room < 2**63:
            self.faults.append(f"a meeting at {fields}")
        if body.get("messages") == []:
            write(writer, b'{"error":"no messages"}', b"400 Bad Request")
            return None
        self._enter(str(room), dict(body))
        if len(self.bodies[str(room)]) > 2:
            self.faults.append(f"room {room} for a third request")
        return body | {"room": str(room)}


class P2PWorkers(Pairs):
    """The scripts of vLLM's workers with a P2P tier at one address."""

    def __init__(self, host: str = "127.0.0.1", port: int = 5711) -> None:
        super().__init__()
        self._address = (host, port)
        self.unknown_id_waits_over = asyncio.Event()
        """Set when the 30 s are over that a worker waits for an id which nobody knows."""

    async def prefill(self, request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Compute a prompt once the decoding worker has asked for it; answer whole requests as any worker."""
        body = json.loads(request.body)
        params = body.pop("kv_transfer_params", None)
        if params is None:
            await self.decode(request, reader, writer)
            return
        limit = "max_output_tokens" if b"/v1/responses" in request.line else "max_tokens"
        if set(params) != {"remote_decoder"} or set(params["remote_decoder"]) != {"kv_request_id"}:
            self.faults.append(f"a prefill with {params}")
        if body.get(limit) != 1 or any(body.get(name) for name in _FORBIDDEN_PREFILL_FIELDS):
            self.faults.append(f"a prefill that generates: {body}")
        place = params["remote_decoder"]["kv_request_id"]
        self._enter(place, body)
        if await self._wait("prefill", self.decode_joined[place], reader):
            self.handed_over[place].set()
            answer(writer, body, "prefill's own token")

    async def decode(self, request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a decode, a pull or a whole request."""
        body = json.loads(request.body)
        params = body.pop("kv_transfer_params", None)
        source = (params or {}).get("remote_prefiller") or (params or {}).get("remote_kv_source")
        if source is None:
            if params is not None:
                self.faults.append(f"a decode with {params}")
            self.computed_alone += 1
            answer(writer, body, text_for(body))
            return
        if (source.get("remote_host"), source.get("remote_port")) != self._address:
            self.faults.append(f"later pulls fail after {source}")
        if "remote_prefiller" in (params or {}):
            place = source["kv_request_id"]
            self._enter(place, body)
            self.decode_joined[place].set()
            if not await self._wait("decode", self.handed_over[place], reader):
                return
        self.transfers += 1
        answer(writer, body, text_for(body))


def answer(writer: asyncio.StreamWriter, body: dict[str, Any], text: str) -> None:
    """Write a whole answer or a stream, with log probabilities and a tool call where the body asks for them."""
    choices = [{"index": index, "text": text} for index in range(body.get("n") or 1)]
    for choice in choices:
        if body.get("logprobs"):
            choice["logprobs"] = {"tokens": [text]}
        if body.get("tools"):
            choice["message"] = {"tool_calls": [{"function": {"name": text}}]}
    usage = {"prompt_tokens": 9, "completion_tokens": 1}
    if not body.get("stream"):
        write(writer, json.dumps({"choices": choices, "usage": usage}).encode())
        return
    event = b"data: " + json.dumps({"choices": choices, "usage": usage}).encode() + b"\n\n"
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    for content in (event, b"data: [DONE]\n\n"):
        writer.write(b"%x\r\n%b\r\n" % (len(content), content))
    writer.write(b"0\r\n\r\n")
