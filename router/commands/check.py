"""`router check`: find what would keep predictions for a worker from being exact.

Each step asks the worker something, and ends in a Finding that says what is wrong and what to do. A step that needs the
result of a failed one is left out. One prompt of random words is sent up to four times, and for an adapter a second one
that begins elsewhere; each is answered with one token. The words are random, so that none of them is cached before.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec
import zmq

from events import BlockStored, EventFeed, Message, Origin, StartMode, StreamConfig, StreamSource, Subscriber
from events.sources import EventSource
from events.types import DecodeError
from prompts.routing import RoutingRequest, parse_routing
from prompts.tokenizer import Tokenizer
from router.decide.watchdog import UNREACHABLE_HINT
from router.decide.workers import ServedModel
from router.edge.forwarded_heads import RANK_HEADER
from router.fleet.prober import EVENTS_FLAG, Prober, WorkerFacts, is_key_refused, suggest_remedy
from router.fleet.worker_settings import WorkerSettings
from router.http_client import FetchError, fetch, make_key_headers, open_session
from router.prompting.conversation_reader import ConversationReader
from router.prompting.encode import build_tokenize_request
from router.prompting.model_tokenizers import ModelTokenizers
from router.prompting.parsed_body import tokenize_prompt

EVENTS_TIMEOUT_S = 3.0
"""Longest wait for the events of an answered request, or for a replay."""
MAX_ANSWER_S = 120.0
MAX_ANSWER_BYTES = 4 << 20
BOUND_PREFIX = "bound "
"""Beginning of the names of streams for which the worker connects to an address where the check listens."""
PROMPT_BLOCK_COUNT = 4
"""Length of the prompt in blocks of the worker, plus a part of one more."""
SAMPLE_PROMPT = "Read  alike: naïve ☃ 1234\n\t end"
SAMPLE_MESSAGES = [
    {"role": "system", "content": "You check things."},
    {"role": "user", "content": "Is this  read alike?\n"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{\"at\": \"é\"}"}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "It is."},
    {"role": "user", "content": "And now?"},
]  # fmt: skip
SAMPLE_TOOLS = [{"type": "function", "function": {
    "name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}}]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one step."""

    step: str
    is_ok: bool | None
    """Whether all is well; None: nothing could be found out."""
    text: str


class CompletionResult(NamedTuple):
    """Answer to one request of the check."""

    finding: Finding
    cached_tokens: int | None
    """Cached tokens of the prompt, as the worker reports them; None if it reports none."""


_Store = tuple[Message, BlockStored]
"""An event by which a worker announced the first blocks of a prompt, and the message that brought it."""


class WorkerCheck:
    """Checks whether a router can use one worker: its address, tokenizer, template, events and reports of usage.

    It sends the worker a few short requests. `run` runs all steps and yields the finding of each.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        session: aiohttp.ClientSession,
        tokenizers: ModelTokenizers,
        headers: dict[str, str],
    ) -> None:
        self._settings = settings
        self._session = session
        self._tokenizers = tokenizers
        self._headers = headers if settings.sends_api_key else {}
        self._prober = Prober(session, headers=headers)
        self._facts: WorkerFacts
        """Result of the first step."""
        self._model = ServedModel("", "")
        """Base model that the requests are for."""
        self._messages: list[Message] = []
        """Messages that came from the worker's event sockets since the first request."""
        self._salt = f"check-{random.SystemRandom().getrandbits(64):x}"

    async def run(self) -> AsyncIterator[Finding]:
        """Check the worker step by step, and yield the finding of each step. Ends early if no worker answers."""
        address_finding = await self._check_address()
        yield address_finding
        if not address_finding.is_ok:
            return
        await self._tokenizers.discover(self._model.base, self._facts.roots.get(self._model.base), self._settings)
        yield await self._compare_tokens("tokenizer", "/v1/completions", {"prompt": SAMPLE_PROMPT})
        yield await self._compare_tokens(
            "template", "/v1/chat/completions", {"messages": SAMPLE_MESSAGES, "tools": SAMPLE_TOOLS}
        )
        if not self._facts.sources:
            yield self._report_no_source()
        prompt_ids = await self._make_prompt()
        async for finding in self._check_requests(prompt_ids):
            yield finding
        if self._facts.sources and self._find_stores(prompt_ids):
            yield await self._check_replay()

    async def _check_address(self) -> Finding:
        """Ask the worker what it is and which models it serves, and report whether that worked."""
        if await self._is_router():
            text = "is a router, which publishes no events of its own: name the workers behind it, one by one"
            return Finding("address", False, f"{self._settings.url} {text}")
        try:
            self._facts = await self._prober.probe(self._settings)
        except (FetchError, DecodeError) as error:
            step = "key" if is_key_refused(str(error)) else "address"
            return Finding(step, False, f"{error}: {suggest_remedy(self._settings, str(error))}")
        models = self._facts.spec.models
        base_models = [model for model in models if model.lora is None]
        self._model = (base_models or models)[0]  # a worker may list adapters only
        names = ", ".join(model.name for model in models)
        engine_text = f" ({self._facts.spec.engine})" if self._facts.spec.engine else ""
        return Finding("address", True, f"serves {names}{engine_text}")

    async def _check_requests(self, prompt_ids: Sequence[int]) -> AsyncIterator[Finding]:
        """Send a prompt again and again; check the cache events and cached tokens that the worker reports.

        The prompt is sent twice, then with a cache salt, then for a LoRA adapter. Where nothing listens at an address
        for events, the check listens there itself, because the worker may be set up to connect to it. If the first
        request is not answered as it should be, no other is sent.
        """
        listening_sources = [source for source in self._facts.sources if await self._is_listening(source)]
        silent_sources = [source for source in self._facts.sources if source not in listening_sources]
        with Subscriber(self._make_stream_sources(listening_sources, StartMode.LIVE)) as subscriber:
            _bind_endpoints(subscriber.feed, silent_sources)
            await asyncio.sleep(0.5)  # a subscription takes a moment
            first_finding, _ = await self._request_completion("request", {"prompt": prompt_ids})
            yield first_finding
            if not first_finding.is_ok:
                return
            stores = await self._receive_stores(subscriber, prompt_ids)
            if self._facts.sources:
                for finding in self._check_events(stores, silent_sources):
                    yield finding
            yield await self._check_cached_tokens(prompt_ids, stores)
            yield await self._check_salt(prompt_ids)
            adapter = next((model for model in self._facts.spec.models if model.lora is not None), None)
            if adapter is not None:
                yield await self._check_adapter(adapter.name, prompt_ids, subscriber)

    async def _is_router(self) -> bool:
        """Return whether the address is a router of ours, told by its /health."""
        try:
            _, answer = await fetch(
                self._session, self._settings.url + "/health", seconds=MAX_ANSWER_S, bytes_max=MAX_ANSWER_BYTES
            )
            health = json.loads(answer or b"null")
        except (FetchError, ValueError, RecursionError):
            return False
        return isinstance(health, dict) and "workers_up" in health

    async def _compare_tokens(self, step: str, path: str, fields: dict[str, Any]) -> Finding:
        """Check that the router encodes a sample request to the same token ids as the worker's `/tokenize`.

        The router finds cached prompts by their token ids, so with other ids it would never find any. `step`:
        "tokenizer" or "template", the name of the finding. `path` and `fields`: route and body of the request.
        """
        request = parse_routing(path, msgspec.json.encode({"model": self._model.name, **fields}))
        tokenize_request = build_tokenize_request(request, self._model.name)
        assert tokenize_request is not None
        answer = await self._post("/tokenize", tokenize_request)
        worker_ids = _get_token_ids(answer)
        tokenizer = self._tokenizers.get(self._model.base)
        if tokenizer is None:
            reason = self._tokenizers.problems.get(self._model.base, "there is none here")
            has_fallback = worker_ids is not None  # the router will ask the worker for token ids
            return Finding(step, None if has_fallback else False, reason)
        if worker_ids is None:
            return Finding(step, None, f"cannot be compared: /tokenize says {_format_error(answer)}")
        router_ids = _tokenize(request, tokenizer)
        if router_ids is None:
            return Finding(step, False, "the router cannot read this prompt: such requests are routed by load alone")
        if list(router_ids) == worker_ids:
            return Finding(step, True, f"{len(router_ids)} tokens, the same here and there")
        position = _count_common_tokens(router_ids, worker_ids)
        option = "--tokenizer" if step == "tokenizer" else "--chat-template (or --tokenizer)"
        text = f"read otherwise from token {position} on ({len(router_ids)} tokens here, {len(worker_ids)} there)"
        return Finding(step, False, f"{text}: give the router the worker's, {option}")

    def _report_no_source(self) -> Finding:
        if self._settings.no_events:
            return Finding("events", None, "switched off for this worker (events=none): its cache is guessed")
        host = urlsplit(self._settings.url).hostname
        text = f"the worker publishes none: it offers no /kv_event_sources and nobody listens on {host}:5557"
        return Finding("events", False, f"{text}. vLLM: {EVENTS_FLAG}; on another port say events=tcp://HOST:PORT")

    async def _make_prompt(self) -> list[int]:
        """Return the token ids of random words; ids that any model has if nobody can encode the words."""
        block_size = self._facts.spec.block_size or 16
        prompt_tokens = min(
            PROMPT_BLOCK_COUNT * block_size + block_size // 2, (self._model.max_model_len or 1 << 20) - 8
        )
        random_source = random.SystemRandom()
        text = " ".join(f"{random_source.getrandbits(40):x}" for _ in range(prompt_tokens))  # more tokens than needed
        request = parse_routing("/v1/completions", msgspec.json.encode({"prompt": text}))
        prompt_ids = _tokenize(request, self._tokenizers.get(self._model.base))
        if prompt_ids is None:
            answer = await self._post("/tokenize", msgspec.json.encode({"model": self._model.name, "prompt": text}))
            prompt_ids = _get_token_ids(answer) or [random_source.randrange(100, 200) for _ in range(prompt_tokens)]
        return list(prompt_ids[:prompt_tokens])

    async def _is_listening(self, source: EventSource) -> bool:
        """Return whether the address of a source accepts connections; only TCP addresses can be tried."""
        parts = urlsplit(source.endpoint)
        return parts.scheme != "tcp" or bool(await self._prober.is_listening(parts.hostname or "", parts.port or 0))

    def _make_stream_sources(self, sources: Sequence[EventSource], join: StartMode) -> list[StreamSource]:
        """Return the sources to follow, with all topics, so that a wrong topic is seen."""
        config = StreamConfig(start_mode=join)
        return [
            StreamSource(str(source.data_parallel_rank), source.endpoint, source.replay_endpoint, None, config)
            for source in sources
        ]

    async def _receive_stores(self, subscriber: Subscriber, prompt_ids: Sequence[int]) -> list[_Store]:
        """Receive messages until one announces the prompt's blocks, or for EVENTS_TIMEOUT_S; return `_find_stores`."""
        deadline_s = time.monotonic() + (EVENTS_TIMEOUT_S if self._facts.sources else 0.0)
        while time.monotonic() < deadline_s and not self._find_stores(prompt_ids):
            item = await asyncio.to_thread(subscriber.get, 0.1)
            if isinstance(item, Message):
                self._messages.append(item)
        return self._find_stores(prompt_ids)

    def _find_stores(self, prompt_ids: Sequence[int]) -> list[_Store]:
        """Return the events by which the worker announced the first blocks of a prompt, each with its message."""
        stores = []
        for message in self._messages:
            for event in message.decoded_batch.batch.events:
                if isinstance(event, BlockStored) and event.parent_block_hash is None and event.token_ids:
                    prompt_beginning = list(prompt_ids[: len(event.token_ids)])
                    if prompt_beginning == event.token_ids[: len(prompt_ids)]:
                        stores.append((message, event))
        return stores

    def _check_events(self, stores: Sequence[_Store], silent_sources: Sequence[EventSource]) -> list[Finding]:
        """Report whether the worker's cache events announced the prompt's blocks, as a router needs to find them again.

        Also report what in the events differs from the worker's description of its streams, such as the block size.
        `stores`: these events. `silent_sources`: described addresses of events at which nothing listens, so that this
        check listens there.
        """
        came_to_own_address = any(message.stream_id.startswith(BOUND_PREFIX) for message in self._messages)
        if came_to_own_address:
            text = f"the worker connects to {silent_sources[0].endpoint} instead of listening there"
            return [Finding("events", False, f"{text}: say tcp://*:5557 there, or let the router bind, --bind-events")]
        if not stores:
            return [self._report_silence(silent_sources)]
        first_message, events = stores[0][0], [event for _, event in stores]
        block_count = sum(len(event.block_hashes) for event in events)
        findings = [Finding("events", True, f"{block_count} blocks announced")]
        for source in self._facts.sources:
            is_source_of_events = str(source.data_parallel_rank) == first_message.stream_id
            if is_source_of_events:
                block_size = source.block_size or self._facts.spec.block_size
                findings += _find_contradictions(source, block_size, first_message, events)
        return findings

    def _report_silence(self, silent_sources: Sequence[EventSource]) -> Finding:
        """Report why no event announced the prompt's blocks, as far as it can be seen from here."""
        if len(silent_sources) == len(self._facts.sources):
            text = f"nobody listens at {silent_sources[0].endpoint}"
            return Finding("events", False, f"{text}: {UNREACHABLE_HINT}")
        endpoints = ", ".join(source.endpoint for source in self._facts.sources)
        if self._messages:
            text = f"{endpoints} announces other prompts than this one: it is another worker's address"
            return Finding("events", False, text)
        text = f"a request was answered and {endpoints} said nothing for {EVENTS_TIMEOUT_S:g} s"
        return Finding("events", False, f"{text}: is prefix caching on, and is it this worker's address?")

    async def _check_replay(self) -> Finding:
        """Report whether the worker sends earlier events again, which a router needs at its start and after losses."""
        sources = [source for source in self._facts.sources if source.replay_endpoint]
        if not sources:
            text = "not offered: lost events cannot be asked for again, and who starts later knows nothing of the cache"
            return Finding("replay", False, f'{text}; vLLM: "replay_endpoint": "tcp://*:5558"')
        deadline = time.monotonic() + EVENTS_TIMEOUT_S
        with Subscriber(self._make_stream_sources(sources, StartMode.RING)) as subscriber:
            while time.monotonic() < deadline:
                item = await asyncio.to_thread(subscriber.get, 0.1)
                if isinstance(item, Message) and item.origin is not Origin.LIVE:
                    return Finding("replay", True, f"answered by {sources[0].replay_endpoint}")
        text = f"{sources[0].replay_endpoint} does not answer: lost events cannot be asked for again"
        return Finding("replay", False, text)

    async def _check_cached_tokens(self, prompt_ids: Sequence[int], stores: Sequence[_Store]) -> Finding:
        """Send the prompt again, and compare the cached tokens that the worker reports with a router's prediction.

        The finding fails if the numbers differ, or if the worker reports none. Where a router makes no prediction, the
        finding shows the reported number. `stores`: events that announced the prompt's blocks.
        """
        answer, reported_tokens = await self._request_completion("again", {"prompt": prompt_ids})
        if not answer.is_ok:
            return answer
        if reported_tokens is None:
            text = "the worker does not say how much was cached, so predictions cannot be checked"
            return Finding("reports", is_ok=False, text=f"{text}; vLLM: --enable-prompt-tokens-details")
        if reported_tokens == 0:
            text = "a repeated prompt was computed again: prefix caching is off, or the cache too small"
            return Finding("cached", is_ok=False, text=text)
        predicted_tokens = self._predict_cached_tokens(prompt_ids, stores)
        if predicted_tokens is None:
            text = f"{reported_tokens} of {len(prompt_ids)} tokens of a repeated prompt"
            return Finding("cached", is_ok=True, text=text)
        text = f"{predicted_tokens} tokens predicted for a repeated prompt, {reported_tokens} reported"
        return Finding("cached", is_ok=reported_tokens == predicted_tokens, text=text)

    def _predict_cached_tokens(self, prompt_ids: Sequence[int], stores: Sequence[_Store]) -> int | None:
        """Return the tokens in the prompt's full blocks: the worker should have these cached after the first request.

        Return None if no event announced the blocks, or for a hybrid model, which has several groups of blocks.
        """
        events = [event for message in self._messages for event in message.decoded_batch.batch.events]
        has_several_groups = any(isinstance(event, BlockStored) and event.group_idx for event in events)
        if not stores or has_several_groups:
            return None
        _, first_event = stores[0]
        reusable_tokens = len(prompt_ids) - 1  # the last token is always computed
        return reusable_tokens // first_event.block_size * first_event.block_size

    async def _check_salt(self, prompt_ids: Sequence[int]) -> Finding:
        """Report whether prompts with another `cache_salt` share no blocks, so that tenants can be kept apart."""
        body = {"prompt": prompt_ids, "cache_salt": self._salt}
        finding, cached_tokens = await self._request_completion("salt", body)
        if not finding.is_ok:
            return Finding("salt", None, f"not taken: {finding.text}")
        if cached_tokens:
            text = "a prompt with another `cache_salt` was answered from the cache: tenants share one"
            return Finding("salt", False, f"{text}, and hits are predicted too low")
        return Finding("salt", True, "a prompt with a `cache_salt` of its own shares nothing")

    async def _check_adapter(self, name: str, prompt_ids: Sequence[int], subscriber: Subscriber) -> Finding:
        """Report whether the worker tells cached blocks of a LoRA adapter from those of its base model.

        The prompt, which the base model has cached, must not be found in the cache. The events of a second prompt must
        name the adapter. `name`: model name of the adapter.
        """
        finding, cached_tokens = await self._request_completion("LoRA", {"prompt": prompt_ids, "model": name})
        if not finding.is_ok:
            return finding
        rotated_ids = [*prompt_ids[1:], prompt_ids[0]]
        await self._request_completion("LoRA", {"prompt": rotated_ids, "model": name})
        stores = await self._receive_stores(subscriber, rotated_ids)
        if cached_tokens or not all(_belongs_to_adapter(event, name) for _, event in stores):
            return Finding("LoRA", False, f"blocks of {name} pass for the base model's: their hits are mistaken")
        if self._facts.sources and not stores:
            return Finding("LoRA", False, f"blocks of {name} are not announced")
        return Finding("LoRA", True, f"blocks of {name} are told from the base model's")

    async def _request_completion(self, step: str, fields: dict[str, Any]) -> CompletionResult:
        """Request a completion of one token. `fields`: further fields of the body, such as the prompt's token ids."""
        body = {"model": self._model.name, "max_tokens": 1, "temperature": 0, **fields}
        answer = await self._post("/v1/completions", msgspec.json.encode(body))
        usage = answer.get("usage")
        if not isinstance(usage, dict):
            error = _format_error(answer)
            if error.startswith("404"):
                text = "there is no /v1/completions, as with models for embeddings: all is routed by load"
                return CompletionResult(Finding(step, None, text), None)
            return CompletionResult(Finding(step, False, f"/v1/completions says {error}"), None)
        sent_tokens, counted_tokens = len(fields["prompt"]), usage.get("prompt_tokens")
        finding = Finding(step, True, f"answered, {counted_tokens} prompt tokens")
        if counted_tokens != sent_tokens:
            finding = Finding(step, False, f"{sent_tokens} token ids were sent, the worker counts {counted_tokens}")
        return CompletionResult(finding, _get_cached_tokens(usage))

    async def _post(self, path: str, body: bytes) -> dict[str, Any]:
        """Send a POST; return the JSON answer, or {"error": reason}."""
        headers = {**self._headers, "Content-Type": "application/json"}
        if len(self._facts.sources) > 1:  # data-parallel ranks, each with a cache of its own
            headers[RANK_HEADER] = str(self._facts.sources[0].data_parallel_rank)
        try:
            status, answer = await fetch(
                self._session, self._settings.url + path, method="POST", headers=headers, data=body,
                seconds=MAX_ANSWER_S, bytes_max=MAX_ANSWER_BYTES,
            )  # fmt: skip
            content = json.loads(answer)
        except (FetchError, ValueError, RecursionError) as error:
            return {"error": str(error)}
        if isinstance(content, dict) and status == 200:
            return content
        return {"error": f"{status}: {_format_error(content)}"}


def _find_contradictions(
    source: EventSource, described_block_size: int | None, message: Message, events: Sequence[BlockStored]
) -> Iterator[Finding]:
    """Compare the cache events of one prompt with the worker's description of its event stream.

    Yield a failed finding for each of these that differs: the topic of the messages, the tokens a block, and the
    data-parallel rank. `source`: the description; it may leave the topic out. `events`: the events that announced the
    prompt's blocks. `message`: the message that brought the first of them.
    """
    topic = message.topic.decode("utf-8", "replace")
    if source.topic and topic != source.topic:
        text = f"events have topic {topic!r}, not {source.topic!r} as described: correct topic= of the worker"
        yield Finding("topic", is_ok=False, text=text)
    # A hybrid model has a block size for each group of layers (`group_idx`), but its worker describes only one size.
    has_one_size = events[0].group_idx is None
    announced_sizes = {event.block_size for event in events}
    if has_one_size and described_block_size is not None and described_block_size not in announced_sizes:
        text = f"the worker says {described_block_size} tokens a block, its events {events[0].block_size}"
        yield Finding("block size", is_ok=False, text=text)
    rank = message.decoded_batch.batch.data_parallel_rank
    if rank is not None and rank != source.data_parallel_rank:
        text = f"events of {source.endpoint} are of data-parallel rank {rank}, not of {source.data_parallel_rank}"
        yield Finding("rank", is_ok=False, text=f"{text}: the addresses are in the wrong order")


def _bind_endpoints(feed: EventFeed, silent_sources: Sequence[EventSource]) -> None:
    """Listen at addresses where nobody does, as the worker may connect there. Only this machine's can be bound."""

    def make_source(topic: str | None) -> StreamSource:
        return StreamSource(f"{BOUND_PREFIX}{topic}", "", None, topic, StreamConfig(start_mode=StartMode.LIVE))

    for source in silent_sources:
        with suppress(zmq.ZMQError):
            feed.bind(source.endpoint, make_source)


def _tokenize(request: RoutingRequest, tokenizer: Tokenizer | None) -> Sequence[int] | None:
    """Return the token ids of a prompt as the router reads it; None if it cannot be read."""
    try:
        return tokenize_prompt(request, tokenizer).token_ids
    except Exception:  # noqa: BLE001  a model's tokenizer or template may raise anything
        return None


def _count_common_tokens(ids: Sequence[int], other_ids: Sequence[int]) -> int:
    differing_positions = (i for i, (token_id, other_id) in enumerate(zip(ids, other_ids)) if token_id != other_id)
    return next(differing_positions, min(len(ids), len(other_ids)))


def _get_token_ids(answer: dict[str, Any]) -> list[int] | None:
    token_ids = answer.get("tokens")
    return token_ids if isinstance(token_ids, list) else None


def _get_cached_tokens(usage: dict[str, Any]) -> int | None:
    details = usage.get("prompt_tokens_details")
    cached_tokens = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached_tokens if isinstance(cached_tokens, int) else None


def _belongs_to_adapter(event: BlockStored, name: str) -> bool:
    return (
        event.lora_name == name
        or event.lora_id is not None
        or any(name in keys for keys in event.extra_keys or () if keys)
    )


def _format_error(answer: object) -> str:
    text = answer.get("error", answer) if isinstance(answer, dict) else answer
    if isinstance(text, dict):
        text = text.get("message", text)
    return str(text)[:200]


async def check_workers(
    workers: Sequence[WorkerSettings],
    *,
    key: str | None = None,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[tuple[str, Finding]]:
    """Check workers one after the other, and yield each finding with the worker's id.

    `key` (API key of the workers), `tokenizer`, `chat_template` and `tls`: as a router would have them.
    """
    with ThreadPoolExecutor(1) as executor:
        tokenizers = ModelTokenizers(
            executor, ConversationReader(0), None, override=tokenizer, chat_template=chat_template
        )
        async with open_session(tls) as session:
            for settings in workers:
                async for finding in WorkerCheck(settings, session, tokenizers, make_key_headers(key)).run():
                    yield settings.worker_id, finding
