"""A seed becomes a scenario: the router's flags, its workers' traits, and what clients and operators do when.

Nothing here looks at what the program does: the answers that conversations go on with follow from the requests' ids."""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import dataclass, field
from typing import Any

from .reading import make_conversations
from .templates import TEMPLATES
from .workers import FAULTS, FAULTS_OF_STREAMS, make_answer, make_text

ADMIN_KEY = "admin-key-of-the-scenarios"
BURST_SEED_MIN, FRAGILE_SEED_MIN, READING_SEED_MIN = 1000, 2000, 3000
KEYS = ("key-alpha", "key-beta", "key-gamma")


@dataclass
class ClientRequest:
    """One request of a client, and how it behaves."""

    request_id: str
    at_s: float
    pieces: list[bytes]
    """What is written at once, one after the other."""
    pause_s: float = 0.01
    """Between two pieces."""
    leaves_after_s: float | None = None
    stops_reading: tuple[float, float] | None = None
    """(seconds after the request, for how long)."""
    connection: str = ""
    """Requests with the same name share a connection, one after the other; empty: a connection of its own."""


@dataclass
class Scenario:
    seed: int
    policy: str
    template: str
    flags: list[str]
    workers: list[dict[str, Any]]
    requests: list[ClientRequest]
    events: list[tuple[float, str, int]] = field(default_factory=list)
    """(when, what, number of the worker)."""
    end_s: float = 60.0


class Conversation:
    """A client's conversation in one API, which grows by a turn with each body."""

    def __init__(self, rng: random.Random, number: int, systems: list[str]) -> None:
        self._rng = rng
        self.api = rng.choices(
            ("chat", "completions", "messages", "responses", "previous"), (50, 12, 16, 12, 10)
        )[0]  # fmt: skip
        self.session = f"session-{number}" if rng.random() < 0.4 else None
        self.key = rng.choice(KEYS)
        self._system = rng.choice(systems) if rng.random() < 0.8 else None
        self._history: list[dict[str, Any]] = []
        self._text = make_text(rng, rng.randint(20, 120))
        self._has_tools = rng.random() < 0.15
        self._has_images = rng.random() < 0.08
        self._salt = f"salt-{number % 3}" if rng.random() < 0.1 else None
        self._model = rng.choices(("tiny", "tiny-lora", "alias"), (85, 7, 8))[0]
        self._previous_id: str | None = None

    @property
    def path(self) -> str:
        return {
            "chat": "/v1/chat/completions", "completions": "/v1/completions", "messages": "/v1/messages",
            "responses": "/v1/responses", "previous": "/v1/responses",
        }[self.api]  # fmt: skip

    def make_turn(self, request_id: str) -> dict[str, Any]:
        """Return the next body, and go on as if it had been answered."""
        rng = self._rng
        text = make_text(rng, rng.randint(3, 60))
        if rng.random() < 0.03:
            text = ""
        body: dict[str, Any] = {"model": self._model, "stream": rng.random() < 0.6}
        answer = "".join(make_answer(request_id))
        if self.api == "completions":
            self._text += text
            body["prompt"] = self._text
            self._text += answer
        elif self.api == "previous":
            body["input"] = text
            if self._previous_id is not None:
                body["previous_response_id"] = self._previous_id
            elif self._system:
                body["instructions"] = self._system
            self._previous_id = f"resp_{request_id}"
        else:
            self._add_user_turn(text)
            if self.api == "responses":
                body["input"] = list(self._history)
                if self._system:
                    body["instructions"] = self._system
            elif self.api == "messages":
                body["messages"] = list(self._history)
                body["max_tokens"] = 64
                if self._system:
                    body["system"] = self._system
            else:
                system = [{"role": "system", "content": self._system}] if self._system else []
                body["messages"] = [*system, *self._history]
            self._history.append({"role": "assistant", "content": answer})
        self._add_options(body)
        return body

    def _add_user_turn(self, text: str) -> None:
        rng, content = self._rng, text
        parts: list[dict[str, Any]] | None = None
        if self.api == "chat" and self._has_images and rng.random() < 0.5:
            image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
            parts = [{"type": "text", "text": text}, image]
        elif self.api in ("chat", "messages") and rng.random() < 0.1:
            parts = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]
        if self.api == "chat" and self._has_tools and self._history and rng.random() < 0.5:
            function = {"name": "look", "arguments": '{"x": 1}'}
            call = {"id": f"call_{len(self._history)}", "type": "function", "function": function}
            self._history[-1] = {"role": "assistant", "content": None, "tool_calls": [call]}
            self._history.append({"role": "tool", "tool_call_id": call["id"], "content": text})
            return
        self._history.append({"role": "user", "content": parts or content})

    def _add_options(self, body: dict[str, Any]) -> None:
        rng = self._rng
        if self._has_tools and self.api == "chat":
            parameters = {"type": "object", "properties": {"x": {"type": "integer"}}}
            body["tools"] = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
        if self._salt:
            body["cache_salt"] = self._salt
        if self.api in ("chat", "completions"):
            if rng.random() < 0.6:
                body["max_tokens"] = rng.choice((1, 16, 64, 400))
            if body["stream"] and rng.random() < 0.5:
                body["stream_options"] = {"include_usage": True}
            if rng.random() < 0.05:
                body["n"] = 2
        if rng.random() < 0.1:
            body["priority"] = rng.choice((-5, 0, 3))
        if rng.random() < 0.1:
            body["user"] = "someone"
        if rng.random() < 0.05:
            body["kv_transfer_params"] = {"remote_host": "10.0.0.1"}
        if rng.random() < 0.05:
            body["temperature"] = 0.5
        if rng.random() < 0.01:  # so large that it is read in another process
            body["metadata"] = {"padding": "x" * 70_000}


def make_reading_scenario(seed: int, policy: str, requests: int) -> Scenario:
    """A scenario for the ids that prompts become: reading.py."""
    rng = random.Random(f"reading {seed}")
    traits = {
        "seed": seed, "blocks": 400, "engine": "vllm", "events": True, "slowness": 0.05, "faults": 0.0,
        "fault_kinds": FAULTS, "tokens_max": 131_072,
    }  # fmt: skip
    templates = sorted(TEMPLATES)
    scenario = Scenario(
        seed, policy, templates[seed % len(templates)], ["--policy", policy], [dict(traits), dict(traits)], []
    )
    conversations = make_conversations(rng, alternates=scenario.template == "mistral")
    at_s = 1.0
    for i in range(requests):
        at_s += rng.choice((0.05, 0.4, 3.0)) + i * 1e-5
        conversation, request_id = rng.choice(conversations), f"s{seed}r{i}"
        body = conversation.make_body(request_id)
        head = f"POST {conversation.path} HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\n"
        head += f"X-Request-Id: {request_id}\r\nContent-Length: {len(body)}\r\n\r\n"
        data = head.encode() + body
        cut = rng.randrange(1, len(data))
        pieces = [data[:cut], data[cut:]] if rng.random() < 0.2 else [data]
        scenario.requests.append(ClientRequest(request_id, at_s, pieces))
    scenario.end_s = at_s + 20.0
    return scenario


def make_scenario(seed: int, policy: str, requests: int = 60) -> Scenario:
    """The scenario of a seed. Everything in it is drawn from the seed alone. Seeds from BURST_SEED_MIN on are of many
    requests at once, against bounds on what may be in flight; those from FRAGILE_SEED_MIN on of workers that die in the
    middle of answers, which others may complete; those from READING_SEED_MIN on of prompts that are hard to read."""
    if seed >= READING_SEED_MIN:
        return make_reading_scenario(seed, policy, requests)
    rng = random.Random(f"scenario {seed}")
    is_fragile = seed >= FRAGILE_SEED_MIN
    is_burst = BURST_SEED_MIN <= seed < FRAGILE_SEED_MIN
    worker_count = rng.randint(2, 5)
    engine = rng.choice(("vllm", "blockcast") if is_fragile else ("vllm", "vllm", "sglang", "blockcast"))
    faults = 0.6 if is_fragile else rng.choice((0.0, 0.1, 0.25))
    has_slow_worker = rng.random() < 0.3
    workers = [
        {
            "seed": seed, "blocks": rng.choice((60, 200, 600)), "engine": engine, "events": rng.random() < 0.9,
            "slowness": rng.choice((3.0, 1.0)) if has_slow_worker else 1.0, "faults": faults,
            "fault_kinds": FAULTS_OF_STREAMS if is_fragile else FAULTS,
        }
        for _ in range(worker_count)
    ]  # fmt: skip
    scenario = Scenario(
        seed=seed,
        policy=policy,
        template=rng.choice(("chatml", "chatml", "qwen3", "llama3", "gemma", "mistral")),
        flags=["--policy", policy, *(_make_burst_flags(rng) if is_burst else _make_flags(rng))],
        workers=workers,
        requests=[],
    )
    systems = [make_text(rng, rng.randint(40, 250)) for _ in range(3)]
    conversations = [Conversation(rng, number, systems) for number in range(max(3, requests // 6))]
    rate = rng.choice((60.0, 200.0) if is_burst else (2.0, 6.0, 20.0))
    at_s = 1.0
    free_s: dict[int, float] = {}
    has_keys = "--api-key" in scenario.flags
    for i in range(requests):
        at_s += round(rng.expovariate(rate), 4) + 0.000_1
        request_id = f"s{seed}r{i}"
        if rng.random() < 0.2:
            scenario.requests.append(_make_other_request(rng, request_id, at_s, has_keys))
            continue
        number = rng.randrange(len(conversations))
        if not is_burst:
            at_s = max(at_s, free_s.get(number, 0.0))
        free_s[number] = at_s + rng.choice((0.0, 0.5, 1.5))
        request = _make_turn(rng, conversations[number], request_id, at_s, has_keys)
        if is_burst and rng.random() < 0.3:
            deadline = rng.choice((b"100", b"400", b"1500"))
            line, _, rest = request.pieces[0].partition(b"\r\n")
            if rest:
                request.pieces[0] = line + b"\r\nx-blockcast-deadline-ms: " + deadline + b"\r\n" + rest
        scenario.requests.append(request)
    scenario.events = _make_events(rng, worker_count, at_s)
    scenario.end_s = at_s + 25.0
    return scenario


def _make_flags(rng: random.Random) -> list[str]:
    flags = ["--first-byte-timeout", "6", "--idle-timeout", "4", "--total-timeout", "40"]
    flags += ["--model-alias", "alias=tiny"]
    if rng.random() < 0.4:
        for key in KEYS:
            flags += ["--api-key", key]
        if rng.random() < 0.5:
            flags += ["--max-in-flight-by-key", str(rng.choice((2, 5)))]
        if rng.random() < 0.3:
            flags += ["--max-tokens-by-key", "900"]
        if rng.random() < 0.3:
            flags += ["--tenant-salts"]
        if rng.random() < 0.3:
            flags += ["--key-priority", "key-alpha=-10"]
    if rng.random() < 0.3:
        flags += ["--fair", "--max-in-flight", str(rng.choice((2, 4)))]
    if rng.random() < 0.2:
        flags += ["--no-continue-streams"]
    if rng.random() < 0.15:
        flags += ["--no-cache-headers"]
    if rng.random() < 0.3:
        flags += ["--session-header", "x-chat-id"]
    if rng.random() < 0.3:
        flags += ["--session-affinity"]
    if rng.random() < 0.3:
        flags += ["--pass-route", "/v1/files"]
    if rng.random() < 0.2:
        flags += ["--cors-origin", "https://app.example"]
    if rng.random() < 0.2:
        flags += ["--max-ttft", "2.5"]
    return flags


def _make_burst_flags(rng: random.Random) -> list[str]:
    """Flags with which not everything can be in flight at once."""
    flags = ["--first-byte-timeout", "30", "--model-alias", "alias=tiny"]
    for key in KEYS:
        flags += ["--api-key", key]
    kind = rng.randrange(4)
    if kind == 0:
        flags += ["--max-in-flight-by-key", str(rng.choice((2, 4, 8)))]
    elif kind == 1:
        flags += ["--max-tokens-by-key", str(rng.choice((1500, 4000)))]
    else:
        flags += ["--fair", "--max-in-flight", str(rng.choice((20, 40))), "--key-share", "key-beta=2.5"]
        if kind == 3:
            flags += ["--background-priority", "3", "--background-running", "1"]
    if rng.random() < 0.3:
        flags += ["--key-priority", "key-alpha=-10"]
    if rng.random() < 0.3:
        flags += ["--max-ttft", "1.5"]
    return flags


def _make_events(rng: random.Random, worker_count: int, end_s: float) -> list[tuple[float, str, int]]:
    """What happens to workers."""
    events: list[tuple[float, str, int]] = []
    if rng.random() < 0.4:
        number, at_s = rng.randrange(worker_count), rng.uniform(1.5, end_s)
        events += [(at_s, "die", number), (at_s + rng.choice((0.3, 5.0)), "come_back", number)]
    if rng.random() < 0.3:
        number, at_s = rng.randrange(worker_count), rng.uniform(1.5, end_s)
        events += [(at_s, "sicken", number), (at_s + 7.0, "recover", number)]
    if rng.random() < 0.3:
        events.append((rng.uniform(1.5, end_s), "clear_cache", rng.randrange(worker_count)))
    if rng.random() < 0.2:
        number, at_s = rng.randrange(worker_count), rng.uniform(1.5, end_s)
        events += [(at_s, "drain", number), (at_s + 3.0, "undrain", number)]
    return events


def _make_turn(
    rng: random.Random, conversation: Conversation, request_id: str, at_s: float, has_keys: bool
) -> ClientRequest:
    body = conversation.make_turn(request_id)
    headers = _make_headers(rng, request_id, conversation.key if has_keys else None)
    if conversation.session and rng.random() < 0.9:
        name = rng.choice(("x-chat-id", "x-session-id"))
        headers.append(f"{name}: {conversation.session}")
    encoded = _encode(rng, body)
    request = _make_request(rng, request_id, at_s, conversation.path, encoded, headers)
    if rng.random() < 0.05:
        request.leaves_after_s = rng.choice((0.0, 0.02, 0.3, 1.0))
    if rng.random() < 0.05:
        request.stops_reading = (rng.uniform(0.0, 0.3), rng.choice((0.5, 6.0)))
    return request


def _make_headers(rng: random.Random, request_id: str, key: str | None) -> list[str]:
    headers = ["Host: router", "Content-Type: application/json", f"X-Request-Id: {request_id}"]
    if key is not None and rng.random() < 0.97:
        headers.append(f"Authorization: Bearer {key}" if rng.random() < 0.8 else f"X-Api-Key: {key}")
    choices = (
        ("x-blockcast-priority", ("-3", "0", "5", "nonsense")), ("x-blockcast-deadline-ms", ("1", "300", "60000")),
        ("x-blockcast-ttft-ms", ("50", "5000")), ("x-blockcast-worker", ("w0", "w1", "w9")),
        ("x-blockcast-explain", ("1",)), ("accept", ("*/*", "text/event-stream")), ("x-custom", ("kept, as is",)),
        ("origin", ("https://app.example", "https://other.example")), ("connection", ("close", "keep-alive")),
        ("accept-encoding", ("gzip",)), ("traceparent", ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00",)),
        ("expect", ("100-continue",)),
    )  # fmt: skip
    for name, values in choices:
        if rng.random() < 0.06:
            headers.append(f"{name}: {rng.choice(values)}")
    return headers


def _encode(rng: random.Random, body: dict[str, Any]) -> bytes:
    """A body as one client or another writes it, sometimes wrongly."""
    kind = rng.random()
    if kind < 0.06:
        return _spoil(rng, body)
    if kind < 0.5:
        return json.dumps(body).encode()
    if kind < 0.8:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    if kind < 0.9:
        return json.dumps(body, indent=rng.choice((1, 2)), ensure_ascii=False).encode()
    if kind < 0.95:
        fields = list(body.items())
        rng.shuffle(fields)
        return json.dumps(dict(fields)).encode() + b"\n"
    return json.dumps(body).encode(rng.choice(("utf-16", "utf-8-sig", "utf-8")))


def _spoil(rng: random.Random, body: dict[str, Any]) -> bytes:
    encoded = json.dumps(body).encode()
    return rng.choice(
        (
            encoded[:-1],
            b"[" + encoded + b"]",
            encoded.replace(b'"model"', b'"model": "other", "model"', 1),
            encoded.replace(b'"tiny"', b'"unknown-model"'),
            encoded.replace(b'"stream": true', b'"stream": "yes"').replace(b'"stream": false', b'"stream": 1'),
            json.dumps({**body, "messages": "no list", "prompt": {"a": 1}}).encode(),
            json.dumps({"model": "tiny"}).encode(),
            encoded.replace(b"the", b"\xff\xfe"),
            b"[" * 600 + b"]" * 600,
            b"",
        )
    )


def _make_request(
    rng: random.Random, request_id: str, at_s: float, path: str, body: bytes, headers: list[str], method: str = "POST"
) -> ClientRequest:
    framing = rng.random()
    if framing < 0.05:
        coding = rng.choice(("gzip", "gzip", "deflate"))
        is_gzip = (coding == "gzip") is (rng.random() < 0.9)  # some say one and send the other
        packer = zlib.compressobj(0, zlib.DEFLATED, 31 if is_gzip else 15)  # stored: the same bytes in all versions
        body = packer.compress(body) + packer.flush()
        headers.append(f"Content-Encoding: {coding}")
    if 0.05 <= framing < 0.15 and len(body) > 4:
        cut = rng.randrange(1, len(body))
        chunks = [body[:cut], body[cut:]]
        payload = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
        headers.append("Transfer-Encoding: chunked")
    else:
        payload = body
        if body or method == "POST":
            headers.append(f"Content-Length: {len(body)}")
    version = "HTTP/1.0" if rng.random() < 0.02 else "HTTP/1.1"
    data = "\r\n".join([f"{method} {path} {version}", *headers]).encode("utf-8") + b"\r\n\r\n" + payload
    cuts = sorted(rng.randrange(1, len(data)) for _ in range(rng.choice((0, 0, 0, 1, 3))))
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)])]
    connection = f"c{rng.randrange(4)}" if rng.random() < 0.4 else ""
    return ClientRequest(request_id, at_s, pieces, pause_s=rng.choice((0.001, 0.05)), connection=connection)


def _make_other_request(rng: random.Random, request_id: str, at_s: float, has_keys: bool) -> ClientRequest:
    """Anything that is no turn of a conversation."""
    headers = _make_headers(rng, request_id, rng.choice(KEYS) if has_keys else None)
    text = make_text(rng, rng.randint(1, 40))
    messages = [{"role": "user", "content": text}]
    requests: tuple[tuple[str, str, object], ...] = (
        ("POST", "/v1/embeddings", {"model": "tiny", "input": text}),
        ("POST", "/v1/embeddings", {"model": "tiny", "input": [text, text[:9]]}),
        ("POST", "/tokenize", {"model": "tiny", "prompt": text}),
        ("POST", "/v1/messages/count_tokens", {"model": "tiny", "messages": messages}),
        ("POST", "/v1/completions", {"model": "tiny", "prompt": [text, text + "x"], "max_tokens": 4}),
        ("POST", "/v1/completions", {"model": "tiny", "prompt": [1, 2, 3, 4] * 9, "max_tokens": 4}),
        ("POST", "/v1/completions", {"model": "tiny", "prompt": text, "truncate_prompt_tokens": 5}),
        ("POST", "/v1/rerank", {"model": "tiny", "query": text, "documents": [text]}),
        ("POST", "/v1/files", {"purpose": "batch"}),
        ("GET", "/v1/files", None),
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/tiny", None),
        ("GET", "/health", None),
        ("GET", "/nowhere", None),
        ("POST", "/v1/nowhere", {"model": "tiny"}),
        ("PUT", "/v1/chat/completions", {"model": "tiny", "messages": messages}),
        ("OPTIONS", "/v1/chat/completions", None),
        ("POST", "/route", {"model": "tiny", "messages": messages}),
        ("POST", "/route?path=/v1/completions", {"model": "tiny", "prompt": text}),
        ("GET", "/v1/responses/resp_unknown", None),
        ("DELETE", "/v1/responses/resp_unknown", None),
    )  # fmt: skip
    method, path, body = rng.choice(requests)
    if path.startswith("/route") and rng.random() < 0.9:
        headers = [header for header in headers if not header.startswith(("Authorization", "Host"))]
        headers += ["Host: localhost", f"Authorization: Bearer {ADMIN_KEY}"]
    encoded = b"" if body is None else json.dumps(body).encode()
    request = _make_request(rng, request_id, at_s, path, encoded, headers, method)
    if path.startswith("/route"):
        request.connection = ""  # its answer is a part of its own
    return request
