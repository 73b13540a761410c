"""Simulated workers: HTTP in, HTTP and cache events out, at times and with faults that follow from a seed.

Written without a line of the program: prompts are rendered by Jinja and encoded by `tokenizers`, blocks are hashed
here, events are packed by msgpack. What happens to a request depends on its id and attempt, never on the worker that
gets it, so that placements may differ while bytes stay."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jinja2
import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .virtual_loop import VirtualLoop

BLOCK_TOKENS = 16
TOKENS_MAX = 4096
STEP_S = 0.012
PREFILL_S_PER_TOKEN = 2e-4
WORDS = [
    "the",
    "cache",
    "of",
    "a",
    "worker",
    "holds",
    "prefix",
    "blocks",
    "and",
    "router",
    "sends",
    "each",
    "request",
    "where",
    "most",
    "is",
    "found",
    "naïve",
    "Œuvre",
    "日本",
    "語",
    "🙂",
    "don't",
    "12",
    "345",
    "def",
    "return",
    "None;",
    "{}[]\n\t",
    '"quoted"',
    "<b>",
    "\\slash",
    "élan",
    "über",
    "Ω≈ç",
]
MERGES = [
    "t h",
    "th e",
    "Ġ a",
    "o r",
    "i n",
    "r e",
    "Ġ th",
    "Ġth e",
    "e r",
    "Ġ o",
    "a c",
    "h e",
    "Ġo f",
    "Ġ w",
    "Ġ b",
    "Ġ c",
    "q u",
    "e s",
    "s t",
    "l o",
    "c k",
]


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE with a few merges, the same on every machine."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *("".join(merge) for merge in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in specials])
    return tokenizer


def make_text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def make_answer(request_id: str) -> list[str]:
    """The pieces of the answer that any worker gives to this request."""
    rng = random.Random(f"answer {request_id}")
    return [make_text(rng, rng.randint(1, 3)) + " " for _ in range(rng.randint(1, 8))]


class ReferenceTokenizer:
    """Prompts of bodies as token ids, for what simulated workers cache. Only plain texts are read as models would."""

    def __init__(self, template: str) -> None:
        self._tokenizer = make_tokenizer()
        environment = jinja2.Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )  # as transformers does
        self._template = environment.from_string(re.sub(r"{% (end)?generation %}", "", template))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def read_prompt(self, path: str, body: dict[str, Any]) -> list[int]:
        prompt = body.get("prompt", body.get("input") if path == "/v1/embeddings" else None)
        if isinstance(prompt, list):
            return [i for i in prompt if isinstance(i, int)] or self.encode("".join(map(str, prompt)))
        if isinstance(prompt, str):
            return self.encode(prompt)
        messages = [_flatten(message) for message in body.get("messages") or []]
        if body.get("system"):
            messages = [_flatten({"role": "system", "content": body["system"]}), *messages]
        if path == "/v1/responses":
            turns = body.get("input") or []
            turns = [{"role": "user", "content": turns}] if isinstance(turns, str) else turns
            messages = [_flatten(message) for message in turns]
            if body.get("instructions"):
                messages = [{"role": "system", "content": body["instructions"]}, *messages]
        try:
            text = self._template.render(
                messages=messages,
                tools=body.get("tools"),
                add_generation_prompt=True,
                bos_token="<|endoftext|>",
                eos_token="<|im_end|>",
            )
        except Exception:  # noqa: BLE001  a template may refuse anything; this worker then caches nothing of use
            text = json.dumps(messages)
        return self.encode(text)


def _flatten(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        return {"role": "user", "content": str(message)}
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text") or "" for part in content if isinstance(part, dict))
    return {**message, "role": message.get("role", "user"), "content": content if isinstance(content, str) else ""}


class BlockCache:
    """Blocks in the order of their last use; what it stores and removes goes out as events."""

    def __init__(self, blocks_max: int, publish: Callable[[list[dict[str, Any]]], None]) -> None:
        self._blocks_max = blocks_max
        self._publish = publish
        self._blocks: OrderedDict[int, None] = OrderedDict()

    @property
    def usage(self) -> float:
        return len(self._blocks) / self._blocks_max

    def count_cached(self, token_ids: Sequence[int], salt: str | None) -> int:
        """Tokens of the prompt that are cached; always at least one is computed."""
        blocks = 0
        for name, _, _ in _iter_blocks(token_ids, salt):
            if name not in self._blocks:
                break
            blocks += 1
        return min(blocks * BLOCK_TOKENS, max(0, len(token_ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS)

    def store(self, token_ids: Sequence[int], salt: str | None) -> None:
        """Hold these ids, make room, and publish both."""
        events: list[dict[str, Any]] = []
        for name, parent, block_ids in list(_iter_blocks(token_ids, salt))[: self._blocks_max]:
            if name in self._blocks:
                self._blocks.move_to_end(name)
                continue
            self._blocks[name] = None
            event = {
                "type": "BlockStored", "block_hashes": [name], "parent_block_hash": parent, "token_ids": block_ids,
                "block_size": BLOCK_TOKENS, "lora_id": None, "medium": "GPU", "lora_name": None,
            }  # fmt: skip
            if salt and parent is None:
                event["extra_keys"] = [[salt]]
            events.append(event)
        removed = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._blocks_max)]
        if removed:
            events.append({"type": "BlockRemoved", "block_hashes": removed, "medium": "GPU"})
        if events:
            self._publish(events)

    def clear(self) -> None:
        self._blocks.clear()
        self._publish([{"type": "AllBlocksCleared"}])


def _iter_blocks(token_ids: Sequence[int], salt: str | None) -> Any:
    """Yield (name, name of the parent, ids) of each whole block."""
    parent: int | None = None
    for start in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block_ids = list(token_ids[start : start + BLOCK_TOKENS])
        digest = hashlib.sha256(f"{parent} {salt} {block_ids}".encode()).digest()
        name = int.from_bytes(digest[:8], "little")
        yield name, parent, block_ids
        parent = name


class WorkerRequest:
    """One request as a worker got it."""

    def __init__(self, head: bytes, body: bytes) -> None:
        self.head, self.body = head, body
        line, *lines = head[:-4].split(b"\r\n")
        self.method, self.path, _ = line.decode("latin-1").split(" ", 2)
        self.path = self.path.partition("?")[0]
        pairs = [header.partition(b":") for header in lines]
        self.headers = {name.lower(): value.strip() for name, _, value in pairs}

    def read_body(self) -> dict[str, Any]:
        try:
            body = json.loads(self.body)
        except ValueError:
            return {}
        return body if isinstance(body, dict) else {}


class WorkerConnection(asyncio.Protocol):
    """A connection that the router made; requests on it are answered one after the other."""

    def __init__(self, worker: SimulatedWorker) -> None:
        self._worker = worker
        self._buffer = b""
        self.transport: Any = None
        self.request_number = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._worker.connections.append(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._worker.connections.remove(self)
        self.request_number += 1  # what is still planned for the last one is dropped

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while True:
            head, separator, rest = self._buffer.partition(b"\r\n\r\n")
            if not separator:
                return
            request = WorkerRequest(head + separator, b"")
            length = int(request.headers.get(b"content-length", b"0"))
            if len(rest) < length:
                return
            request.body, self._buffer = rest[:length], rest[length:]
            self.request_number += 1
            self._worker.answer(self, request)

    def eof_received(self) -> bool:
        return False

    def write_if_current(self, number: int, data: bytes) -> None:
        if number == self.request_number and not self.transport.is_closing():
            self.transport.write(data)


class SimulatedWorker:
    """One worker. `on_request` is told each request of clients and returns its attempt's number."""

    def __init__(
        self,
        loop: VirtualLoop,
        number: int,
        traits: dict[str, Any],
        tokenizer: ReferenceTokenizer,
        on_request: Callable[[str, WorkerRequest], tuple[str, int]],
        on_batch: Callable[[str, int, bytes], None],
    ) -> None:
        self._loop = loop
        self.name = f"w{number}"
        self._traits = traits
        self._tokenizer = tokenizer
        self._on_request = on_request
        self._on_batch = on_batch
        self.port = loop.network.make_port()
        self.endpoint = f"tcp://127.0.0.1:{5600 + 10 * number}"
        self.is_up = True
        self.is_healthy = True
        self.batches: list[bytes] = []
        self.connections: list[WorkerConnection] = []
        self._free_s = 0.0
        self._starts = 0
        self._running = 0
        self._tokens_max: int = traits.get("tokens_max", TOKENS_MAX)
        self._cache = BlockCache(traits["blocks"], self._publish)
        loop.network.servers[self.port] = lambda: WorkerConnection(self)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # Life

    def die(self) -> None:
        """Reset every connection and accept no other."""
        self.is_up = False
        self._loop.network.servers.pop(self.port, None)
        for connection in list(self.connections):
            connection.transport.reset()

    def come_back(self) -> None:
        """Start again with an empty cache."""
        self.is_up = True
        self._starts += 1
        self._free_s, self._running, self.batches = 0.0, 0, []
        self._cache = BlockCache(self._traits["blocks"], self._publish)
        self._loop.network.servers[self.port] = lambda: WorkerConnection(self)

    def clear_cache(self) -> None:
        self._cache.clear()

    def _publish(self, events: list[dict[str, Any]]) -> None:
        payload = msgspec.msgpack.encode([self._loop.time(), events, 0])
        self.batches.append(payload)
        self._on_batch(self.endpoint, len(self.batches) - 1, payload)

    # Answers

    def answer(self, connection: WorkerConnection, request: WorkerRequest) -> None:
        page = self._make_page(request)
        if page is not None:
            status, body = page
            connection.transport.write(_make_response(status, body))
            return
        request_id, attempt = self._on_request(self.name, request)
        rng = random.Random(f"{self._traits['seed']} {request_id} {attempt}")
        _Answer(self, connection, request, request_id, rng, is_retried=attempt > 1).begin()

    def _make_page(self, request: WorkerRequest) -> tuple[int, bytes] | None:
        """Return what the router itself asks for."""
        if request.method != "GET":
            return None
        path, traits = request.path, self._traits
        if path == "/health":
            return (200, b"") if self.is_healthy else (503, b"")
        if path == "/v1/models":
            card = {
                "id": "tiny", "object": "model", "root": traits["folder"], "max_model_len": self._tokens_max,
                "owned_by": traits["engine"],
            }  # fmt: skip
            cards = [card, {**card, "id": "tiny-lora", "root": "/lora", "parent": "tiny"}]
            return 200, json.dumps({"object": "list", "data": cards}).encode()
        if path == "/kv_event_sources" and traits["events"]:
            source = {
                "endpoint": self.endpoint, "replay_endpoint": self.endpoint[:-1] + "1", "data_parallel_rank": 0,
                "epoch": f"{self.name}.{self._starts}",
            }  # fmt: skip
            return 200, json.dumps({"0": source}).encode()
        if path == "/metrics":
            lines = [
                f'vllm:cache_config_info{{num_gpu_blocks="{traits["blocks"]}",block_size="{BLOCK_TOKENS}"}} 1',
                f"vllm:num_requests_running {self._running}",
                "vllm:num_requests_waiting 0",
                f"vllm:kv_cache_usage_perc {self._cache.usage:.4f}",
            ]
            return 200, "\n".join(lines).encode() + b"\n"
        if path.startswith("/v1/"):
            return None
        return 404, b'{"detail":"Not Found"}'


def _pack(value: object) -> str:
    """JSON as engines write it."""
    return json.dumps(value, separators=(",", ":"))


def _make_response(status: int, body: bytes, headers: str = "") -> bytes:
    reasons = {200: "OK", 400: "Bad Request", 404: "Not Found", 429: "Too Many Requests", 500: "Internal Server Error"}
    head = f"HTTP/1.1 {status} {reasons.get(status, 'Unavailable')}\r\ncontent-type: application/json\r\n{headers}"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body


class _Answer:
    """The course of one answer."""

    def __init__(
        self, worker: SimulatedWorker, connection: WorkerConnection, request: WorkerRequest, request_id: str,
        rng: random.Random, *, is_retried: bool,
    ) -> None:  # fmt: skip
        self._worker, self._connection, self._request, self._rng = worker, connection, request, rng
        self._request_id = request_id
        self._number = connection.request_number
        self._is_retried = is_retried
        self._body = request.read_body()
        self._pieces = make_answer(request_id)
        self._starts = worker._starts

    def begin(self) -> None:
        faults = self._worker._traits["faults"] / (4 if self._is_retried else 1)
        fault = self._rng.choice(self._worker._traits["fault_kinds"]) if self._rng.random() < faults else None
        if fault in BEFORE_HEAD:
            self._after(self._rng.uniform(0.001, 0.2), partial(self._fail, fault))
            return
        worker, loop = self._worker, self._worker._loop
        self._token_ids = worker._tokenizer.read_prompt(self._request.path, self._body)
        self._token_ids = self._token_ids[: worker._tokens_max]
        self._skip_answered()
        salt = self._body.get("cache_salt")
        self._salt = salt if isinstance(salt, str) else None
        self._cached = worker._cache.count_cached(self._token_ids, self._salt)
        uncached = max(1, len(self._token_ids) - self._cached)
        begin_s = max(loop.time(), worker._free_s)
        worker._free_s = begin_s + uncached * PREFILL_S_PER_TOKEN * worker._traits["slowness"]
        worker._running += 1
        jitter_s = self._rng.randint(1, 999) * 1e-6
        first_s = worker._free_s - loop.time() + STEP_S + jitter_s
        self._after(first_s - STEP_S / 2, partial(worker._cache.store, self._token_ids, self._salt))
        step_s = STEP_S * worker._traits["slowness"] * (1 + 0.1 * worker._running) * self._rng.choice((1, 1, 4))
        is_stream = bool(self._body.get("stream")) and self._request.path in STREAMS
        end_s = self._stream(first_s, step_s, fault) if is_stream else self._whole(first_s, step_s, fault)
        self._after(end_s, self._end)

    def _skip_answered(self) -> None:
        """Leave out what another worker has answered, where this one is asked to go on with its ids."""
        encode, prompt = self._worker._tokenizer.encode, self._body.get("prompt_token_ids", self._body.get("prompt"))
        answer_ids = encode("".join(self._pieces))
        if not isinstance(prompt, list) or not self._is_retried:
            return
        self._token_ids = [i for i in prompt if isinstance(i, int)]
        answered = next((k for k in range(len(answer_ids), 0, -1) if self._token_ids[-k:] == answer_ids[:k]), 0)
        rest = self._worker._tokenizer.decode(answer_ids[answered:])
        self._pieces = [rest[i : i + 9] for i in range(0, len(rest), 9)] or [""]

    def _end(self) -> None:
        self._worker._running -= 1

    def _after(self, seconds: float, action: Callable[[], object]) -> None:
        def act() -> None:
            if self._worker.is_up and self._worker._starts == self._starts:
                action()

        self._worker._loop.call_later(seconds, act)

    def _write(self, data: bytes) -> None:
        self._connection.write_if_current(self._number, data)

    def _fail(self, fault: str) -> None:
        transport = self._connection.transport
        if self._number != self._connection.request_number:
            return
        if fault == "reset":
            transport.reset()
        elif fault == "close":
            transport.close()
        elif fault == "garbage":
            transport.write(b"SMTP ready\r\n\r\n")
        elif fault != "silence":
            error = json.dumps({"error": {"message": f"made up {fault}", "code": int(fault)}}).encode()
            headers = "retry-after: 1\r\n" if fault in ("429", "503") else ""
            transport.write(_make_response(int(fault), error, headers))

    def _usage(self) -> dict[str, Any]:
        prompt, completion = len(self._token_ids), 3 * len(self._pieces)
        return {
            "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }  # fmt: skip

    def _whole(self, first_s: float, step_s: float, fault: str | None) -> float:
        """An answer in one body, in up to three writes."""
        text, usage, path = "".join(self._pieces), self._usage(), self._request.path
        answer: dict[str, Any]
        if path == "/v1/messages":
            answer = {
                "id": f"msg_{self._request_id}", "type": "message", "role": "assistant",
                "content": [{"type": "text", "text": text}], "stop_reason": "end_turn",
                "usage": {
                    "input_tokens": usage["prompt_tokens"] - self._cached, "output_tokens": usage["completion_tokens"],
                    "cache_read_input_tokens": self._cached,
                },
            }  # fmt: skip
        elif path == "/v1/responses":
            answer = {
                "id": f"resp_{self._request_id}", "object": "response", "status": "completed",
                "output": [
                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
                ],
                "usage": {
                    "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
                    "input_tokens_details": {"cached_tokens": self._cached}, "total_tokens": usage["total_tokens"],
                },
            }  # fmt: skip
        elif path in ("/v1/messages/count_tokens", "/tokenize"):
            answer = {"input_tokens": usage["prompt_tokens"], "count": usage["prompt_tokens"]}
        elif path == "/v1/embeddings":
            answer = {"object": "list", "data": [{"embedding": [0.5], "index": 0}], "usage": usage}
        else:
            kind = "text" if path == "/v1/completions" else "message"
            value = text if kind == "text" else {"role": "assistant", "content": text}
            answer = {
                "id": f"chatcmpl-{self._request_id}", "object": "x", "model": self._body.get("model"),
                "choices": [{"index": 0, kind: value, "finish_reason": "stop"}], "usage": usage,
            }  # fmt: skip
        response = _make_response(200, _pack(answer).encode(), "x-engine: simulated\r\n")
        end_s = first_s + step_s * len(self._pieces)
        cuts = sorted(self._rng.randrange(1, len(response)) for _ in range(self._rng.choice((0, 0, 1, 2))))
        parts = [response[a:b] for a, b in zip([0, *cuts], [*cuts, len(response)])]
        if fault is not None:
            parts = parts[:-1]
        for i, part in enumerate(parts):
            self._after(end_s + 0.003 * i, partial(self._write, part))
        end_s += 0.003 * len(parts)
        if fault == "cut":
            self._after(end_s, partial(self._fail, "reset"))
        return end_s

    def _stream(self, first_s: float, step_s: float, fault: str | None) -> float:
        """An answer in server-sent events."""
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        events = self._make_events()
        if fault is not None:
            events = events[: self._rng.randrange(len(events))]
        for i, event in enumerate(events):
            data = (head if i == 0 else b"") + b"%x\r\n%b\r\n" % (len(event), event)
            at_s = first_s + step_s * i
            if self._rng.random() < 0.1:  # a chunk in two reads
                cut = self._rng.randrange(1, len(data))
                self._after(at_s, partial(self._write, data[:cut]))
                self._after(at_s + 0.002, partial(self._write, data[cut:]))
            else:
                self._after(at_s, partial(self._write, data))
        end_s = first_s + step_s * len(events) + 0.004
        if fault is None:
            self._after(end_s, partial(self._write, b"0\r\n\r\n"))
        elif fault == "cut":
            self._after(end_s, partial(self._fail, "reset"))
        return end_s

    def _make_events(self) -> list[bytes]:
        path, usage = self._request.path, self._usage()
        events: list[tuple[str, dict[str, Any]]] = []
        if path == "/v1/messages":
            counts = {"input_tokens": usage["prompt_tokens"] - self._cached, "cache_read_input_tokens": self._cached}
            start = {"id": f"msg_{self._request_id}", "type": "message", "role": "assistant", "usage": counts}
            events.append(("message_start", {"type": "message_start", "message": start}))
            for piece in self._pieces:
                delta = {"type": "text_delta", "text": piece}
                events.append(("content_block_delta", {"type": "content_block_delta", "index": 0, "delta": delta}))
            end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}}
            events += [("message_delta", end), ("message_stop", {"type": "message_stop"})]
        elif path == "/v1/responses":
            response = {"id": f"resp_{self._request_id}", "object": "response", "status": "in_progress"}
            events.append(("response.created", {"type": "response.created", "response": response}))
            for piece in self._pieces:
                event = {"type": "response.output_text.delta", "delta": piece}
                events.append(("response.output_text.delta", event))
            counts = {
                "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
                "input_tokens_details": {"cached_tokens": self._cached},
            }  # fmt: skip
            done = {**response, "status": "completed", "usage": counts}
            events.append(("response.completed", {"type": "response.completed", "response": done}))
        else:
            base = {"id": f"chatcmpl-{self._request_id}", "object": "chunk", "model": self._body.get("model")}
            tells_ids = bool(self._body.get("return_token_ids")) and self._worker._traits["engine"] != "sglang"
            for i, piece in enumerate(self._pieces):
                delta: dict[str, Any] = {"text": piece} if path == "/v1/completions" else {"delta": {"content": piece}}
                if tells_ids:
                    delta["token_ids"] = self._worker._tokenizer.encode(piece)
                finish = "stop" if i == len(self._pieces) - 1 else None
                ids = {"prompt_token_ids": self._token_ids} if tells_ids and i == 0 else {}
                events.append(("", {**base, **ids, "choices": [{"index": 0, **delta, "finish_reason": finish}]}))
            options = self._body.get("stream_options")
            if isinstance(options, dict) and options.get("include_usage"):
                events.append(("", {**base, "choices": [], "usage": usage}))
        lines = [(f"event: {name}\n" if name else "") + f"data: {_pack(data)}\n\n" for name, data in events]
        if not events[0][0]:
            lines.append("data: [DONE]\n\n")
        return [line.encode() for line in lines]


BEFORE_HEAD = ("reset", "close", "garbage", "silence", "500", "502", "503", "429", "400")
FAULTS = (*BEFORE_HEAD, "cut", "cut", "cut", "stall")
FAULTS_OF_STREAMS = ("cut", "cut", "cut", "stall")
STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
