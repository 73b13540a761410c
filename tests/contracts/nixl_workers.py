"""Workers that hold vLLM's NIXL connector to its rules, as real workers of vLLM 0.32 were seen to behave.

A prefill is a body with `do_remote_decode`. Its worker keeps the KV for 30 s and answers with parameters. A decode is
a body with these parameters, unchanged. A decode that comes later gives other text without an error, and one with
parameters that nobody gave ends a real worker's process: `faults` has both. A decode that is sent frees the KV, also
where its client has left.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable
from typing import Any

LEASE_S = 30.0
_PREFILL_FIELDS_FORBIDDEN = ("stream_options", "min_tokens", "max_completion_tokens", "n")


class NixlWorkers:
    """The scripts of prefill and decode workers, and the KV that prefill workers keep."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.lease_ends: dict[str, float] = {}
        """Name of a prefill -> time until which its KV is kept."""
        self.params_by_request: dict[str, dict[str, Any]] = {}
        self.faults: list[str] = []
        """Requests of which real workers would have died, or that they would have answered wrongly."""
        self.transfers = 0
        self.computed_alone = 0

    @property
    def pinned(self) -> list[str]:
        """Names of the prefills of which the KV is kept now."""
        return [name for name, end_s in self.lease_ends.items() if end_s > self._now()]

    async def prefill(self, request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a prefill, and whole requests as any worker."""
        body = json.loads(request.body)
        if "kv_transfer_params" not in body:
            await self.decode(request, reader, writer)
            return
        problem = self._find_prefill_fault(request, body)
        if problem is not None:
            self.faults.append(problem)
            write(writer, b'{"error":{}}', b"400 Bad Request")
            return
        name = f"cmpl-{len(self.params_by_request)}"
        params = {
            "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2, 3]],
            "remote_engine_id": "58866903-d2d4", "remote_request_id": name, "remote_host": "127.0.0.1",
            "remote_port": 5651, "tp_size": 1, "remote_blocks_expiry_time": None,
        }  # fmt: skip
        self.params_by_request[name], self.lease_ends[name] = params, self._now() + LEASE_S
        answer = {"choices": [{"text": "?"}], "usage": {"prompt_tokens": 9}, "kv_transfer_params": params}
        write(writer, json.dumps(answer).encode())

    @staticmethod
    def _find_prefill_fault(request: Any, body: dict[str, Any]) -> str | None:
        limit = "max_output_tokens" if b"/v1/responses" in request.line else "max_tokens"
        if body["kv_transfer_params"] != {"do_remote_decode": True, "do_remote_prefill": False}:
            return f"a prefill with {body['kv_transfer_params']}"
        if body.get(limit) != 1 or body.get("stream"):
            return f"a prefill that generates: {body}"
        forbidden = [name for name in _PREFILL_FIELDS_FORBIDDEN if name in body]
        return f"a prefill with {forbidden}" if forbidden else None

    async def decode(self, request: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a decode, or a whole request."""
        body = json.loads(request.body)
        params, text = body.pop("kv_transfer_params", None), text_for(body)
        if params is None:
            self.computed_alone += 1
        else:
            name = params.get("remote_request_id", "")
            if params != self.params_by_request.get(name):
                self.faults.append(f"the engine dies of {params}")
            elif self.lease_ends.pop(name, 0.0) <= self._now():
                text = "poisoned"
                self.faults.append(f"a decode of {name} after its lease")
            self.transfers += 1
        if body.get("stream"):
            event = b'data: {"choices":[{"text":"%b"}]}\n\ndata: [DONE]\n\n' % text.encode()
            write(writer, event, content_type=b"text/event-stream")
        else:
            usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 5}}
            write(writer, json.dumps({"choices": [{"text": text}], "usage": usage}).encode())


def text_for(body: dict[str, Any]) -> str:
    """Return the text of the model, which does not depend on the worker that computes the prompt."""
    prompt = body.get("messages") or body.get("prompt") or body.get("input")
    return f"text {zlib.crc32(json.dumps(prompt).encode())}"


def write(
    writer: asyncio.StreamWriter,
    body: bytes,
    status: bytes = b"200 OK",
    content_type: bytes = b"application/json",
) -> None:
    """Write one complete answer."""
    head = b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (status, content_type, len(body))
    writer.write(head + body)
