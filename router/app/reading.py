"""A client's request as the core is asked about it: one reading, for what is routed and for what `/route` explains.

Owns what path, headers and body mean for routing. Refuses to know who asks and what becomes of the answer.
"""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Literal, cast

import msgspec

from prompts.anthropic import CountRequest
from prompts.errors import bad_value
from prompts.routing import KINDS, Kind, RoutingRequest, read_routing
from prompts.segments import ID_TYPE
from prompts.tokenizer import Tokenizer
from prompts.worker_fields import CONTAINER_FIELDS, is_worker_field, without_worker_fields
from router.decide.core import RouterCore
from router.decide.messages import RouteRequest
from router.edge.stored import StoredResponses
from router.http.request import HttpRequest
from router.index.protocol import PromptMemory, Scope
from router.prompting.conversation_cache import BODY_BYTES_MIN, CachedConversation, Checkpoint, ConversationCache
from router.prompting.conversation_suffix import SuffixResult, has_enough_messages, is_cacheable
from router.prompting.encode import (
    CHARS_PER_TOKEN,
    NAME_BYTES_MAX,
    PromptSize,
    is_light,
    measure_prompts,
    truncate_prompt,
)
from router.prompting.fields import FieldSpans, find_fields, splice
from router.prompting.forms import is_form, read_form
from router.prompting.media import MediaPrompt, read_media
from router.prompting.prompt_worker_pool import PromptWorkerPool, ReadTask
from router.prompting.reader import INLINE_BYTES_MAX, PromptReader, TokenizedPrompt
from router.prompting.sessions import Names, Session, SessionNames
from router.prompting.turn import ReadTurn
from router.tenancy.names import ModelNames

TOKENIZE: Final = ("/tokenize", "/detokenize")
"""Routes of vLLM outside of /v1 that clients ask workers."""
COUNTING: Final = ("/v1/messages/count_tokens", *TOKENIZE)
"""Routes whose prompts no model reads."""
JSON_PATHS: Final = frozenset(
    (
        *COUNTING,
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
        "/v1/classify",
        "/v1/moderations",
        "/v1/audio/speech",
        "/v1/images/generations",
    )
)
"""Routes besides those of prompts whose bodies are JSON, and nothing else."""
BEGINNING: Final = 256
"""Characters, or ids, of a prompt that tell it from others."""
ESTIMATE_MAX: Final = 131_072
"""Tokens, of a prompt for a model that does not tell how many it takes."""
_IS_JSON = re.compile(rb"(?:\xef\xbb\xbf|\xff\xfe|\xfe\xff)?[\0 \t\r\n]*\{")
"""An object in any encoding of JSON that a worker may read."""
_NOTHING_READ, _ANY_CHAT = RoutingRequest(kind="other"), RoutingRequest(kind="chat")


def is_for_workers(path: str) -> bool:
    """Whether a path is a client's to a worker, and none of the router's own (but for the list of models)."""
    return path.startswith("/v1/") or path in TOKENIZE


class HeadFields:
    """What the headers of a request ask for."""

    __slots__ = ("deadline_ms", "explains", "model", "priority", "role", "session", "ttft_ms", "worker")

    def __init__(self, request: HttpRequest, names: SessionNames, model_header: bytes | None) -> None:
        """Raises RequestError naming the header that cannot be read."""
        model = None if model_header is None else request.header(model_header)
        self.model = model[:NAME_BYTES_MAX].decode("utf-8", "replace") if model else None
        self.priority = _integer(request, b"x-blockcast-priority", -(2**31), 2**31 - 1)
        self.deadline_ms = _integer(request, b"x-blockcast-deadline-ms", 1, 86_400_000)
        self.ttft_ms = _integer(request, b"x-blockcast-ttft-ms", 1, 86_400_000)
        self.worker = _text(request.header(b"x-blockcast-worker"))
        self.role = _text(request.header(b"x-blockcast-role"))
        self.explains = _integer(request, b"x-blockcast-explain", 0, 1) == 1
        self.session: Names = names.told(request.headers)


class Asked(ReadTurn):
    """What a request asks for."""

    __slots__ = (
        "alike",
        "base",
        "body_bytes",
        "deadline_ms",
        "is_renamed",
        "like",
        "lora",
        "media",
        "model",
        "priority",
        "role",
        "spans",
        "tokens_max",
        "ttft_ms",
        "worker",
    )  # fmt: skip

    def __init__(
        self, request: HttpRequest, parsed: RoutingRequest, said: HeadFields, holder: str | None,
        model: str, base: str, lora: str | None, tokens_max: int | None,
    ) -> None:  # fmt: skip
        """`holder`: the worker that alone can answer."""
        super().__init__(parsed, SessionNames.of(said.session, parsed))
        self.explains = said.explains
        self.like: PromptMemory | None = None
        """Of a prompt that its known beginning begins."""
        self.alike: int | None = None
        """Tokens that both are known to begin with."""
        self.media: MediaPrompt | None = None
        """What it is, where it has images or other media."""
        self.spans: FieldSpans | None = None
        """Where its body's fields are, if that was found out."""
        self.model = model
        self.is_renamed = model != parsed.model and bool(said.model or parsed.model)
        """The body names another model, or none where a gateway names one."""
        self.base = base
        self.lora = lora
        self.tokens_max = tokens_max
        """What the model takes, where that is known."""
        self.body_bytes = 0 if request.path in COUNTING else request.body_bytes
        """Of what a model reads."""
        self.priority = parsed.priority if said.priority is None else said.priority
        self.deadline_ms = said.deadline_ms
        """How long the router may hold the request."""
        self.ttft_ms = said.ttft_ms
        """By when its first token must be predicted."""
        self.worker = holder or said.worker
        self.role = said.role


class RequestReading:
    """From HTTP to the core's words, in two steps: what is asked for, then the prompt's tokens."""

    def __init__(
        self,
        core: RouterCore,
        prompts: PromptReader,
        worker_pool: PromptWorkerPool,
        names: SessionNames | None = None,
        known: ConversationCache | None = None,
    ) -> None:
        self._core = core
        self._prompts = prompts
        self.worker_pool = worker_pool
        self._names = names or SessionNames()
        self.known = ConversationCache(0) if known is None else known
        self.stored = StoredResponses()
        self.names: ModelNames | None = None
        """What models' names stand for, where any stands for another one."""
        self.passed_fields: frozenset[str] = frozenset()
        """Fields of prompts/worker_fields.py that clients may set."""
        self.model_header: bytes | None = None
        """A header whose model counts instead of the body's: a gateway's."""
        self._scopes: dict[tuple[str, str | None], Scope] = {}

    def is_light(self, request: HttpRequest, path: str | None) -> bool:
        """Whether it can be read here: by `asked` and `tokens`. If not, `read` has it read elsewhere."""
        format = _format(request, path)
        return format is None or (len(request.pieces) == 1 and (format == "form" or is_light(request.body)))

    def asked(self, request: HttpRequest, path: str | None = None) -> Asked:
        """What a request sent to `path` (None: told by its body) asks for. Raises RequestError."""
        kind, format = _kind(request, path), _format(request, path)
        if format == "form":
            return self._asked_by_form(request, *_read_form(request))
        parsed = read_routing(kind or "other", request.body) if format == "json" else _NOTHING_READ
        if kind is None:
            parsed = parsed.replaced(kind="completion" if parsed.messages is None else "chat")
        asked = self._asked(request, parsed)
        if parsed.kind != "other":
            asked.media = read_media(parsed, request.body)
        return asked

    def _asked_by_form(self, request: HttpRequest, parsed: RoutingRequest, spans: FieldSpans) -> Asked:
        asked = self._asked(request, parsed)
        asked.spans = spans
        return asked

    def amend(self, request: HttpRequest, asked: Asked, fields: dict[str, object]) -> None:
        """Give fields of the body other values, and take out those that are not the client's to set. What is neither
        JSON nor a form stays. Raises RequestError where the body holds a field twice."""
        if asked.spans is None:
            if not (fields or asked.parsed.has_worker_fields) or _IS_JSON.match(request.pieces[0]) is None:
                return
            asked.spans = find_fields(request.body)
        spans, passed = asked.spans, self.passed_fields
        dropped = [name for name in spans.values if is_worker_field(name) and name not in passed]
        for name in CONTAINER_FIELDS:
            if name in spans.values and name not in passed:
                kept = _strip(request.body[slice(*spans.values[name])], passed)
                if kept is not None:
                    fields[name] = kept
        if fields or dropped:
            request.pieces = splice(request.pieces, spans.edits(fields, dropped))

    def _asked(self, request: HttpRequest, parsed: RoutingRequest) -> Asked:
        holder = self.stored.holder(request, parsed.stored)
        said = HeadFields(request, self._names, self.model_header)
        name = said.model or parsed.model
        if self.names is not None and name is not None:
            name = self._renamed(self.names, name, parsed, said, holder)
        model, base, lora, tokens_max = self._model(name)
        return Asked(request, parsed, said, holder, model, base, lora, tokens_max)

    def _renamed(
        self, names: ModelNames, name: str, parsed: RoutingRequest, said: HeadFields, holder: str | None
    ) -> str:
        worker, registry = holder or said.worker, self._core.registry
        return names.resolve(
            name, lambda: conversation(SessionNames.of(said.session, parsed), parsed),
            lambda model: registry.serves(model, worker),
        )  # fmt: skip

    def tokens(
        self, asked: Asked, request: HttpRequest, wanted: Callable[[], bool] = lambda: True, party: str = ""
    ) -> TokenizedPrompt | asyncio.Future[TokenizedPrompt]:
        """The prompt's token ids: at once where that is quick, else later. `party`: whose request it is."""
        prompts, base = self._prompts, asked.base
        if asked.parsed.kind == "other":
            return TokenizedPrompt(None, 0.0)
        if prompts.uses_remote_tokenizer(base):
            return asyncio.ensure_future(prompts.read_remotely(asked.parsed, base, asked.tokens_max))
        tokenizer, tokens_max = prompts.tokenizer_of(base), asked.tokens_max
        if prompts.needs_worker_process(base, asked.parsed):
            order = prompts.make_task(base, asked.parsed.kind, tokens_max)
            return asyncio.ensure_future(prompts.read_in_worker(request.pieces, base, order, wanted, party))
        if tokenizer is None or asked.body_bytes <= INLINE_BYTES_MAX:
            body = request.body if self._comes_back(request, asked.parsed) else b""
            return prompts.read(asked.parsed, tokenizer, tokens_max, body)
        body = request.body if self.known.max_bytes else b""
        return prompts.run_in_thread(lambda: prompts.read(asked.parsed, tokenizer, tokens_max, body))

    async def read(
        self, request: HttpRequest, path: str | None, wanted: Callable[[], bool] = lambda: True, party: str = ""
    ) -> tuple[Asked, TokenizedPrompt]:
        """What a request of `party` asks for and its tokens, wherever they are best read. Raises RequestError."""
        if self.is_light(request, path):
            asked = self.asked(request, path)
            tokens = self.tokens(asked, request, wanted, party)
            return asked, tokens if isinstance(tokens, TokenizedPrompt) else await tokens
        if _format(request, path) == "form":
            form = await self._prompts.run_in_thread(partial(_read_form, request))
            return self._asked_by_form(request, *form), TokenizedPrompt(None, 0.0)

        def order(parsed: RoutingRequest) -> ReadTask:
            said = self._asked(request, parsed)
            base, tokens_max = said.base, said.tokens_max
            made = self._prompts.make_task(base, parsed.kind, tokens_max)
            made.is_cached = self.known.max_bytes > 0 and not self._prompts.needs_worker_process(base, parsed)
            return made

        started = time.perf_counter()
        parsed, spans, made = await self.worker_pool.read(request.pieces, _kind(request, path), order, wanted, party)
        asked = self._asked(request, parsed)
        asked.spans, asked.media = spans, made.media
        asked.pieces, asked.begins = request.pieces, made.first_message_digest
        ids: Sequence[int] | None
        if isinstance(made.result, bytes):
            remote = self._prompts.remote
            ids = None if remote is None else (await remote.put(made.result, asked.base))[0]
            size = measure_prompts(ids, parsed, asked.tokens_max, made.further_tokens)
            ids = truncate_prompt(ids, parsed, asked.tokens_max)
        else:
            ids, size = made.result, made.size
        if made.conversation is not None and ids is not None:
            made.conversation.body, made.conversation.token_ids = (
                request.body,
                array(ID_TYPE, ids[: made.conversation.checkpoints[-1].token_count_max]),
            )
        return asked, TokenizedPrompt(ids, time.perf_counter() - started, made.conversation, size=size)

    # Conversations that return ----------------------------------------------------------------------------------------

    def recognise(self, request: HttpRequest, path: str | None) -> tuple[CachedConversation, Checkpoint] | None:
        """The known beginning of its body."""
        if request.body_bytes < BODY_BYTES_MIN or not self.known.max_bytes:
            return None
        kind = _kind(request, path)
        return (
            self.known.find_longest_prefix(kind, request.body)
            if kind and is_cacheable(kind, request.body_bytes)
            else None
        )

    def _comes_back(self, request: HttpRequest, parsed: RoutingRequest) -> bool:
        """Whether a short body of which nothing is known is worth knowing: a short one costs little to read again."""
        size = request.body_bytes
        if not self.known.max_bytes or size > INLINE_BYTES_MAX or not is_cacheable(parsed.kind, size):
            return False
        return self.known.is_recurring(request.body) and has_enough_messages(parsed)

    def go_on(
        self, request: HttpRequest, found: tuple[CachedConversation, Checkpoint]
    ) -> tuple[Asked, TokenizedPrompt] | None:
        """What a request with this known beginning asks for, and its tokens. None where the whole must be read. Raises
        RequestError."""
        known, mark = found
        by = self._read_by(known)
        if by is None:
            return None
        return self._went_on(request, known, self._prompts.read_suffix(known, mark, request.body, by[0], by[1]))

    async def go_on_later(
        self,
        request: HttpRequest,
        path: str,
        found: tuple[CachedConversation, Checkpoint],
        wanted: Callable[[], bool],
        party: str = "",
    ) -> tuple[Asked, TokenizedPrompt]:
        """The same in a thread; or as any other body."""
        known, mark = found
        by, went_on = self._read_by(known), None
        if by is not None:
            work = partial(self._prompts.read_suffix, known, mark, request.body, by[0], by[1])
            went_on = self._went_on(request, known, await self._prompts.run_in_thread(work))
        return went_on or await self.read(request, path, wanted, party)

    def _read_by(self, known: CachedConversation) -> tuple[Tokenizer, int | None] | None:
        """The tokenizer of its model, and how many tokens that takes; None where nobody serves it here."""
        tokenizer, served = self._prompts.tokenizer_of(known.model), self._core.resolve_model(known.model)
        if tokenizer is None or served is None or self._prompts.needs_worker_process(known.model, _ANY_CHAT):
            return None
        return tokenizer, served.max_model_len

    def _went_on(
        self, request: HttpRequest, known: CachedConversation, found: tuple[SuffixResult, TokenizedPrompt] | None
    ) -> tuple[Asked, TokenizedPrompt] | None:
        if found is None:
            return None
        returned, read = found
        if self.names is not None and self.names.splits:
            return None  # which conversation it is may stand in what was not read
        asked = self._asked(request, returned.request)
        served = self._core.resolve_model(known.model)
        if asked.base != known.model or served is None or asked.tokens_max != served.max_model_len:
            return None
        asked.outliner = returned.outline
        asked.known = known
        if read.token_ids is returned.token_ids:
            asked.alike = returned.reused_tokens if known.is_memory_exact else None
        asked.like = cast("PromptMemory | None", known.prompt_memory)
        return asked, read

    def keep(self, asked: Asked, read: TokenizedPrompt, route: RouteRequest) -> None:
        """A prompt was read, and the core was asked: its beginning may come back."""
        known = read.conversation
        if known is None:
            return
        known.model, known.first_message_digest = asked.base, asked.beginning()
        is_own = route.token_ids is known.token_ids
        prompt = self._core.cache_state.query_of(route.request_id)
        memory = None if prompt is None else self._core.index.remember(prompt.ids)
        if memory is not None:
            shared = known.token_ids.itemsize * len(known.token_ids) if is_own else 0
            known.prompt_memory, known.prompt_memory_bytes, known.is_memory_exact = (
                memory,
                memory.nbytes - shared,
                is_own,
            )
        self.known.store(known, read.predecessor)

    def route_request(self, asked: Asked, read: TokenizedPrompt, request_id: str, started_s: float) -> RouteRequest:
        """What the core is asked."""
        parsed, token_ids, size = asked.parsed, read.token_ids, read.size
        if parsed.echoes_chat and not self._core.registry.is_ours(asked.model):
            token_ids = None  # nothing of it will be reused
        if token_ids is None or size is None:
            estimate = self._estimate(asked)
            size = PromptSize(estimate, estimate)
        home = None
        if asked.media is not None:
            home = asked.media.conversation
            counted = 0 if token_ids is None else size.tokens
            size = _with_media(counted, asked.media.tokens, asked.tokens_max)
        room = parsed.output_min if asked.tokens_max is None else max(asked.tokens_max - size.longest_tokens, 0)
        return RouteRequest(
            request_id=request_id,
            model=asked.model,
            scope=self._scope(asked.base, parsed.cache_salt, asked.lora),
            token_ids=token_ids,
            prompt_tokens=size.tokens,
            prompt_count=size.prompt_count,
            longest_prompt_tokens=size.longest_tokens if size.prompt_count > 1 else 0,
            is_counted=size.is_exact,
            media_conversation=home,
            similar_prompt=asked.like,
            common_tokens=asked.alike,
            output_tokens_max=1
            if parsed.kind == "other"
            else size.prompt_count * parsed.output_max,  # of others, what is computed is the prompt
            output_tokens_min=size.prompt_count * min(parsed.output_min, room),
            stream=parsed.stream,
            priority=asked.priority,
            worker=asked.worker,
            session=asked.session.name,
            parent=asked.session.parent,
            is_final=asked.session.final,
            role=asked.role,
            deadline_s=None if asked.deadline_ms is None else started_s + asked.deadline_ms / 1000.0,
            ttft_s_max=None if asked.ttft_ms is None else asked.ttft_ms / 1000.0,
        )

    def _estimate(self, asked: Asked) -> int:
        """What a prompt that was not tokenised may come to: never more than its model takes, or an image in a body
        would price its worker out."""
        return min(max(1, asked.body_bytes // CHARS_PER_TOKEN), asked.tokens_max or ESTIMATE_MAX)

    def _model(self, name: str | None) -> tuple[str, str, str | None, int | None]:
        """(name, base model, LoRA, how many tokens it takes) of what the client asked for; without a name, the first
        model there is."""
        if name is None:
            name = next((model for worker in self._core.workers.values() for model in worker.models), "")
        served = self._core.resolve_model(name)
        return (name, name, None, None) if served is None else (name, served.base, served.lora, served.max_model_len)

    def _scope(self, base: str, salt: str | None, lora: str | None) -> Scope:
        """Without a salt, the same object for every request of a model that somebody serves."""
        if salt is not None:
            return Scope(base, salt, lora)
        known = self._scopes.get((base, lora))
        if known is None:
            known = Scope(base, None, lora)
            if self._core.resolve_model(lora or base) is not None:
                self._scopes[base, lora] = known
        return known


def _with_media(counted: int, tokens: int, tokens_max: int | None) -> PromptSize:
    """A prompt's size, estimated with its media: no more than its model takes, and no less than what was counted."""
    tokens = max(counted, 1, min(tokens, tokens_max or ESTIMATE_MAX))
    return PromptSize(tokens, tokens, is_exact=False)


def conversation(session: Session, parsed: RoutingRequest) -> str:
    """What tells a conversation from others in all of its turns: its name, else how it begins."""
    if session.name is not None:
        return session.name
    source, messages = parsed.source, parsed.messages
    begins: object = parsed.prompt[:BEGINNING] if isinstance(parsed.prompt, (str, list)) else None
    if messages:
        first = next((i for i, message in enumerate(messages) if message.get("role") == "user"), 0)
        begins = messages[: first + 1]
    elif isinstance(source, CountRequest):
        begins = source.system, source.messages[:1]
    elif source is not None:
        begins = source.instructions, source.input if isinstance(source.input, str) else source.input[:1]
    return msgspec.json.encode(begins).decode()


def _kind(request: HttpRequest, path: str | None) -> Kind | None:
    """What a request to this path is; None where the body tells."""
    if path is None:
        return None
    return KINDS.get(path, "other") if request.method == "POST" else "other"


def _format(request: HttpRequest, path: str | None) -> Literal["json", "form"] | None:
    """How the body of a request to this path is read; None: not at all. What a worker might take for JSON is JSON."""
    if _kind(request, path) != "other":
        return "json"
    content_type = request.header(b"content-type")
    if is_form(content_type):
        return "form"
    if _IS_JSON.match(request.pieces[0]) is not None:
        return "json"
    return "json" if request.body_bytes and path in JSON_PATHS else None


def _read_form(request: HttpRequest) -> tuple[RoutingRequest, FieldSpans]:
    return read_form(request.pieces, request.header(b"content-type") or b"")


def _strip(value: bytes, passed: frozenset[str]) -> Any:
    """An object of a body, or a form's text of one, without the fields that are not the client's; None where it has
    none of those."""
    try:
        told = msgspec.json.decode(value)
    except msgspec.DecodeError:
        return None
    kept = without_worker_fields(told, passed)
    return None if kept == told else kept


def _integer(request: HttpRequest, name: bytes, low: int, high: int) -> int | None:
    value = request.header(name)
    if value is None:
        return None
    if re.fullmatch(rb"-?[0-9]{1,10}", value) is None or not low <= int(value) <= high:
        raise bad_value(name.decode(), value.decode("latin-1"), f"an integer from {low} to {high}")
    return int(value)


def _text(value: bytes | None) -> str | None:
    return value.decode("latin-1") if value else None
