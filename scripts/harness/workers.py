"""A scripted worker: an OpenAI-like HTTP server and a KV event publisher, both made by hand.

Nothing of ours encodes, sends or replays here: sequence numbers and the replay protocol are written out, so that a
router is judged against the wire and not against our reading of it. A worker does what it is told, also what no sound
publisher does.
"""

from __future__ import annotations

import asyncio
import json
import struct
import threading
import time
from typing import Any

import zmq
from msgspec.msgpack import encode as pack

from harness.upstream import NOT_FOUND, Steps, Upstream, complete_response, model_card

BLOCK = 16
END_SEQ = 2**64 - 1
SNAPSHOT_SEQ = 2**64 - 2
BIND_S_MAX = 5.0


def block_stored(
    block_hashes: list[Any],
    tokens: list[int],
    parent: Any = None,
    *,
    size: int = BLOCK,
    medium: str = "GPU",
    **extra_fields: Any,
) -> dict[str, Any]:
    """A BlockStored event as vLLM writes it since June 2026."""
    required_fields = {
        "type": "BlockStored",
        "block_hashes": block_hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
    }
    return {**required_fields, "block_size": size, "lora_id": None, "medium": medium, "lora_name": None, **extra_fields}


def block_removed(block_hashes: list[Any], medium: str = "GPU", **extra_fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": block_hashes, "medium": medium, **extra_fields}


class Publisher:
    """The event side of a worker. `publish` sends one batch; the ring answers replay as vLLM's does."""

    def __init__(self, *, topic: str = "", has_replay: bool = True, replies_with_topic: bool = True) -> None:
        self.topic = topic.encode()
        self.replies_with_topic = replies_with_topic
        self._has_replay = has_replay
        self._context = zmq.Context()
        self._lock = threading.Lock()
        self.port = self.replay_port = 0
        self.open()

    def open(self) -> None:
        """A publisher's new life: seq 0, an empty ring, the addresses of before."""
        self.seq = 0
        self.replay_buffer: list[tuple[int, bytes]] = []
        self.snapshot: list[bytes] | None = None
        """Chunks of the resident set; None: the publisher has no snapshots, as vLLM's."""
        self._has_subscriber = False
        # An XPUB is a PUB that says when somebody has subscribed.
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.linger = 0
        self.port = _bind(self._pub, self.port)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if self._has_replay:
            router = self._context.socket(zmq.ROUTER)
            router.linger = 0
            self.replay_port = _bind(router, self.replay_port)
            self._thread = threading.Thread(target=self._serve_replays, args=(router, self._stop), daemon=True)
            self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def replay_endpoint(self) -> str | None:
        return f"tcp://127.0.0.1:{self.replay_port}" if self._has_replay else None

    def await_subscriber(self, seconds: float = 20.0) -> bool:
        """Whether somebody has subscribed."""
        end_s = time.monotonic() + seconds
        while not self._has_subscriber and time.monotonic() < end_s:
            if self._pub.poll(50):
                self._has_subscriber = self._pub.recv()[:1] == b"\x01"
        return self._has_subscriber

    def publish(self, *events: Any, drop: bool = False, payload: bytes | None = None) -> None:
        """Send a batch, or (`drop`) only keep it for replay, as if the network had dropped it."""
        if payload is None:
            payload = pack([time.time(), list(events), None])
        with self._lock:
            self.replay_buffer.append((self.seq, payload))
        if not drop:
            self._pub.send_multipart([self.topic, struct.pack(">Q", self.seq), payload])
        self.seq += 1

    def resend_last(self) -> None:
        """Send the last batch once more, under the seq it had."""
        seq, payload = self.replay_buffer[-1]
        self._pub.send_multipart([self.topic, struct.pack(">Q", seq), payload])

    def drop_oldest(self, batches: int) -> None:
        """The ring forgets its oldest batches."""
        with self._lock:
            del self.replay_buffer[:batches]

    def restart(self) -> None:
        """The process ends and another takes its addresses."""
        self.close_sockets()
        self.open()

    def close_sockets(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._pub.close(0)

    def close_context(self) -> None:
        """After `close_sockets`."""
        self._context.term()

    def _serve_replays(self, router: zmq.Socket[bytes], stop: threading.Event) -> None:
        while not stop.is_set():
            if not router.poll(20):
                continue
            identity, _, start_raw = router.recv_multipart()
            (start,) = struct.unpack(">Q", start_raw)
            with self._lock:
                ring, snapshot = list(self.replay_buffer), self.snapshot
            replies = [(seq, payload) for seq, payload in ring if seq >= start]
            if start == SNAPSHOT_SEQ and snapshot is not None:
                replies = [(SNAPSHOT_SEQ, chunk) for chunk in snapshot] + ring[-1:]
            for seq, payload in [*replies, (END_SEQ, b"")]:
                topic = [self.topic] if self.replies_with_topic else []
                router.send_multipart([identity, b"", *topic, struct.pack(">Q", seq), payload])
        router.close(0)


def _bind(socket: zmq.Socket[bytes], port: int) -> int:
    """Bind to a port, the one from before if there is one (which may take a moment to be free)."""
    if port == 0:
        return socket.bind_to_random_port("tcp://127.0.0.1")
    end_s = time.monotonic() + BIND_S_MAX
    while True:
        try:
            socket.bind(f"tcp://127.0.0.1:{port}")
            return port
        except zmq.ZMQError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.02)


class ScriptedWorker:
    """HTTP on one port, events on two more. Remembers which prompts it was asked to complete."""

    def __init__(self, model: str, publisher: Publisher, *, block_size: int = 16) -> None:
        self.model, self.publisher, self.block_size = model, publisher, block_size
        self.lora: str | None = None
        self.completion_bodies: list[dict[str, Any]] = []
        """Bodies of the completions, in the order they came."""
        self.request_lines: list[str] = []
        """Every method and path that anybody asked for."""
        self.port = 0
        self._serve()

    def _serve(self) -> None:
        """Serve HTTP on a loop of its own until `kill`."""
        ready = threading.Event()

        async def run() -> None:
            self._loop, self._stop_event = asyncio.get_running_loop(), asyncio.Event()
            async with _WorkerHttpServer(self) as http:
                self.port = http.port
                ready.set()
                await self._stop_event.wait()

        self._thread = threading.Thread(target=asyncio.run, args=(run(),), daemon=True)
        self._thread.start()
        if not ready.wait(BIND_S_MAX):
            raise RuntimeError(f"nothing listens on {self.port}")
        self._alive = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """The process is gone: nobody listens, open connections end."""
        self._alive = False
        self._loop.call_soon_threadsafe(self._stop_event.set)
        self._thread.join()
        self.publisher.close_sockets()

    def restart(self) -> None:
        """A new process on the old addresses; its cache is empty and its seq 0."""
        self.publisher.open()
        self._serve()

    def close(self) -> None:
        if self._alive:
            self.kill()
        self.publisher.close_context()

    def get_response(self, path: str) -> Any:
        """What GET `path` answers; None: 404."""
        if path in ("/health", "/ping", "/health_generate"):
            return {}
        if path == "/v1/models":
            cards = [model_card(self.model, parent=None)]
            if self.lora is not None:
                cards.append(model_card(self.lora, parent=self.model))
            return {"object": "list", "data": cards}
        if path == "/kv_event_sources":
            addresses = {"endpoint": self.publisher.endpoint, "replay_endpoint": self.publisher.replay_endpoint}
            bounds = {"buffer_steps": 10000, "hwm": 100000, "max_queue_size": 100000}
            config = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": self.publisher.topic.decode()}
            return {"0": {**config, **addresses, **bounds}}
        if path in ("/server_info", "/get_server_info", "/get_model_info"):
            sizes = {"kv_block_size": self.block_size, "effective_attention_block_size": self.block_size}
            return {"model_path": self.model, "instance_id": self.url, **sizes}
        return None

    def post_response(self, path: str, body: dict[str, Any]) -> Any:
        """What POST `path` answers; None: 404. A text prompt is token ids in decimal, so no tokenizer is needed."""
        prompt = body.get("prompt")
        if prompt is None:
            prompt = " ".join(str(message.get("content", "")) for message in body.get("messages", []))
        ids = prompt if isinstance(prompt, list) else [int(word) for word in prompt.split() if word.isdigit()]
        if path == "/tokenize":
            return {"count": len(ids), "max_model_len": 8192, "tokens": ids, "token_strs": None}
        if path.endswith("/render"):
            return [{"token_ids": ids, "request_id": "render", "model": body.get("model")}]
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return None
        self.completion_bodies.append(body)
        choice = {"index": 0, "text": " x", "message": {"role": "assistant", "content": "x"}, "finish_reason": "length"}
        usage = {"prompt_tokens": len(ids), "completion_tokens": 1, "total_tokens": len(ids) + 1}
        return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body.get("model"),
                "choices": [choice], "usage": usage}  # fmt: skip


class _WorkerHttpServer(Upstream):
    """The HTTP side of a worker."""

    def __init__(self, owner: ScriptedWorker) -> None:
        super().__init__({}, port=owner.port)
        self._worker = owner

    def response_steps(self, method: str, path: str, body: bytes) -> Steps:
        self._worker.request_lines.append(f"{method} {path}")
        response = (
            self._worker.get_response(path)
            if method == "GET"
            else self._worker.post_response(path, json.loads(body or b"{}"))
        )
        return NOT_FOUND if response is None else (complete_response(json.dumps(response).encode()),)
