"""Read a client's request for the core: the same for requests that are routed and for those that `/route` explains.

Owns what path, headers and body mean for routing. Refuses to know who asks and what becomes of the response.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, Literal, NamedTuple, cast

import msgspec

from prompts.anthropic import CountRequest
from prompts.errors import bad_value
from prompts.routing import API_KIND_BY_PATH, ApiKind, RoutingRequest
from prompts.worker_fields import CONTAINER_FIELDS, is_worker_field, without_worker_fields
from router.decide.core import RouterCore
from router.decide.messages import RouteRequest
from router.edge.stored_responses import StoredResponses
from router.http.request import HttpRequest
from router.index.protocol import PromptMemory, Scope
from router.prompting.conversation_turn import ConversationTurn
from router.prompting.encode import CHARS_PER_TOKEN, NAME_BYTES_MAX, PromptSize
from router.prompting.fields import FieldSpans, locate_fields, splice
from router.prompting.forms import is_form, read_form
from router.prompting.media import MediaPrompt
from router.prompting.prompt_worker_pool import PromptWorkerPool
from router.prompting.reader import PromptReader, ReadBody, TokenizedPrompt
from router.prompting.sessions import NamesByMeaning, Session, SessionNames
from router.tenancy.model_names import ModelNames

TOKENIZE_PATHS: Final = ("/tokenize", "/detokenize")
"""Routes of vLLM outside of /v1 that clients ask workers."""
COUNTING_PATHS: Final = ("/v1/messages/count_tokens", *TOKENIZE_PATHS)
"""Routes whose prompts no model reads."""
JSON_PATHS: Final = frozenset(
    (
        *COUNTING_PATHS,
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
OPENING_ITEMS: Final = 256
"""Characters, or ids, of a prompt that tell it from others."""
ESTIMATED_TOKENS_MAX: Final = 131_072
"""Tokens, of a prompt for a model that does not tell how many it takes."""
_JSON_OBJECT_START = re.compile(rb"(?:\xef\xbb\xbf|\xff\xfe|\xfe\xff)?[\0 \t\r\n]*\{")
"""An object in any encoding of JSON that a worker may read."""
_UNREAD_REQUEST = RoutingRequest(kind="other")


def is_worker_path(path: str) -> bool:
    """Whether a path is a client's to a worker, and none of the router's own (but for the list of models)."""
    return path.startswith("/v1/") or path in TOKENIZE_PATHS


class RoutingHeaders:
    """What the headers of a request ask for."""

    __slots__ = ("deadline_ms", "model", "priority", "role", "session", "ttft_ms", "wants_explanation", "worker")

    def __init__(self, request: HttpRequest, names: SessionNames, model_header: bytes | None) -> None:
        """Raises RequestError naming the header that cannot be read."""
        model = None if model_header is None else request.header(model_header)
        self.model = model[:NAME_BYTES_MAX].decode("utf-8", "replace") if model else None
        self.priority = _parse_integer_header(request, b"x-blockcast-priority", -(2**31), 2**31 - 1)
        self.deadline_ms = _parse_integer_header(request, b"x-blockcast-deadline-ms", 1, 86_400_000)
        self.ttft_ms = _parse_integer_header(request, b"x-blockcast-ttft-ms", 1, 86_400_000)
        self.worker = _decode_header(request.header(b"x-blockcast-worker"))
        self.role = _decode_header(request.header(b"x-blockcast-role"))
        self.wants_explanation = _parse_integer_header(request, b"x-blockcast-explain", 0, 1) == 1
        self.session: NamesByMeaning = names.read_headers(request.headers.get)


class ResolvedModel(NamedTuple):
    """The model that a request names, as workers serve it."""

    name: str
    base_model: str
    """Its base model."""
    lora: str | None = None
    tokens_max: int | None = None
    """Tokens that it takes, where that is known."""


class RequestIntent(ConversationTurn):
    """What a request asks for."""

    __slots__ = (
        "base_model",
        "body_bytes",
        "body_to_cache",
        "common_tokens",
        "deadline_ms",
        "field_spans",
        "is_renamed",
        "lora",
        "media",
        "model",
        "priority",
        "role",
        "similar_prompt",
        "tokens_max",
        "ttft_ms",
        "worker",
    )  # fmt: skip

    def __init__(
        self, request: HttpRequest, body_request: RoutingRequest, headers: RoutingHeaders, holding_worker: str | None,
        model: ResolvedModel,
    ) -> None:  # fmt: skip
        """`holding_worker`: the worker that alone can answer."""
        super().__init__(body_request, SessionNames.session_of(headers.session, body_request))
        self.wants_explanation = headers.wants_explanation
        self.similar_prompt: PromptMemory | None = None
        """The index's memory of an earlier prompt with the same cached prefix."""
        self.common_tokens: int | None = None
        """Number of tokens with which both prompts begin."""
        self.body_to_cache = b""
        """The body as it came, where its conversation is to be cached."""
        self.media: MediaPrompt | None = None
        """Its conversation and size, where it has images or other media."""
        self.field_spans: FieldSpans | None = None
        """Spans of its body's fields, once they were located."""
        self.model = model.name
        self.is_renamed = model.name != body_request.model and bool(headers.model or body_request.model)
        """The body names another model, or none where a gateway names one."""
        self.base_model = model.base_model
        self.lora = model.lora
        self.tokens_max = model.tokens_max
        """What the model takes, where that is known."""
        self.body_bytes = 0 if request.path in COUNTING_PATHS else request.body_bytes
        """Of what a model reads."""
        self.priority = body_request.priority if headers.priority is None else headers.priority
        self.deadline_ms = headers.deadline_ms
        """How long the router may hold the request."""
        self.ttft_ms = headers.ttft_ms
        """By when its first token must be predicted."""
        self.worker = holding_worker or headers.worker
        self.role = headers.role


ReadRequest = tuple[RequestIntent, TokenizedPrompt]


class RequestReader:
    """Reads HTTP requests: what is asked for, and the prompt's tokens."""

    def __init__(
        self,
        core: RouterCore,
        prompts: PromptReader,
        worker_pool: PromptWorkerPool,
        names: SessionNames | None = None,
    ) -> None:
        self._core = core
        self._prompt_reader = prompts
        self.worker_pool = worker_pool
        self._session_names = names or SessionNames()
        self.stored_responses = StoredResponses()
        self.model_names: ModelNames | None = None
        """What models' names stand for, where any stands for another one."""
        self.allowed_fields: frozenset[str] = frozenset()
        """Fields of prompts/worker_fields.py that clients may set."""
        self.model_header: bytes | None = None
        """A header whose model counts instead of the body's: a gateway's."""
        self._scope_by_model: dict[tuple[str, str | None], Scope] = {}

    def begin_read(
        self, request: HttpRequest, path: str | None, is_wanted: Callable[[], bool] = lambda: True, tenant: str = ""
    ) -> ReadRequest | Coroutine[Any, Any, ReadRequest]:
        """Read what a request sent to `path` (None: its body decides) asks for, and its prompt's tokens: at once where
        that is quick, else what is returned is to be awaited. Raises RequestError."""
        body_format = _get_body_format(request, path)
        if body_format is None:
            return self._make_intent(request, _UNREAD_REQUEST), TokenizedPrompt(None, 0.0)
        if body_format == "form":
            return self._read_form_in_thread(request) if len(request.pieces) > 1 else self._read_form(request)
        may_continue = self.model_names is None or not self.model_names.has_canaries
        read = self._prompt_reader.begin_read(
            request, _get_request_kind(request, path), partial(self._make_intent, request), is_wanted, tenant,
            may_continue=may_continue,
        )  # fmt: skip
        return self._finish_read(request, read) if isinstance(read, ReadBody) else self._await_read(request, read)

    async def read(
        self, request: HttpRequest, path: str | None, is_wanted: Callable[[], bool] = lambda: True, tenant: str = ""
    ) -> ReadRequest:
        """`begin_read`, awaited."""
        read = self.begin_read(request, path, is_wanted, tenant)
        return read if isinstance(read, tuple) else await read

    async def _await_read(
        self, request: HttpRequest, read: Coroutine[Any, Any, ReadBody[RequestIntent]]
    ) -> ReadRequest:
        return self._finish_read(request, await read)

    @staticmethod
    def _finish_read(request: HttpRequest, read: ReadBody[RequestIntent]) -> ReadRequest:
        intent, continuation = read.target, read.continuation
        intent.media, intent.first_message_digest = read.media, read.first_message_digest
        if read.spans is not None:
            intent.field_spans, intent.pieces = read.spans, request.pieces
        if continuation is not None:
            conversation = continuation.conversation
            intent.fingerprinter, intent.cached_conversation = continuation.outline, conversation
            intent.similar_prompt = cast("PromptMemory | None", conversation.prompt_memory)
            if conversation.is_memory_exact and read.prompt.token_ids is continuation.token_ids:
                intent.common_tokens = continuation.boundary.token_count
        intent.body_to_cache = read.body
        return intent, read.prompt

    def _read_form(self, request: HttpRequest) -> ReadRequest:
        return self._make_form_intent(request, *_read_form(request)), TokenizedPrompt(None, 0.0)

    async def _read_form_in_thread(self, request: HttpRequest) -> ReadRequest:
        form_fields = await self._prompt_reader.run_in_thread(partial(_read_form, request))
        return self._make_form_intent(request, *form_fields), TokenizedPrompt(None, 0.0)

    def _make_form_intent(self, request: HttpRequest, body_request: RoutingRequest, spans: FieldSpans) -> RequestIntent:
        intent = self._make_intent(request, body_request)
        intent.field_spans = spans
        return intent

    def rewrite_body(self, request: HttpRequest, intent: RequestIntent, fields: dict[str, object]) -> None:
        """Give fields of the body other values, and take out those that are not the client's to set. What is neither
        JSON nor a form stays. Raises RequestError where the body holds a field twice."""
        if intent.field_spans is None:
            if (
                not (fields or intent.body_request.has_worker_fields)
                or _JSON_OBJECT_START.match(request.pieces[0]) is None
            ):
                return
            intent.field_spans = locate_fields(request.body)
        spans, allowed_fields = intent.field_spans, self.allowed_fields
        removed_fields = [name for name in spans.spans if is_worker_field(name) and name not in allowed_fields]
        for name in CONTAINER_FIELDS:
            if name in spans.spans and name not in allowed_fields:
                client_value = _strip_worker_fields(request.body[slice(*spans.spans[name])], allowed_fields)
                if client_value is not None:
                    fields[name] = client_value
        if fields or removed_fields:
            request.pieces = splice(request.pieces, spans.edits(fields, removed_fields))

    def _make_intent(self, request: HttpRequest, body_request: RoutingRequest) -> RequestIntent:
        holding_worker = self.stored_responses.find_worker(request, body_request.stored_response_id)
        headers = RoutingHeaders(request, self._session_names, self.model_header)
        name = headers.model or body_request.model
        if self.model_names is not None and name is not None:
            name = self._resolve_alias(self.model_names, name, body_request, headers, holding_worker)
        return RequestIntent(request, body_request, headers, holding_worker, self._resolve_model(name))

    def _resolve_alias(
        self,
        model_names: ModelNames,
        name: str,
        body_request: RoutingRequest,
        headers: RoutingHeaders,
        holding_worker: str | None,
    ) -> str:
        worker, registry = holding_worker or headers.worker, self._core.registry
        return model_names.resolve(
            name, lambda: make_conversation_name(SessionNames.session_of(headers.session, body_request), body_request),
            lambda model: registry.is_model_served(model, worker),
        )  # fmt: skip

    def store_conversation(self, intent: RequestIntent, tokenized_prompt: TokenizedPrompt, route: RouteRequest) -> None:
        """Cache the conversation of a prompt that was read and routed."""
        conversation = tokenized_prompt.conversation
        if conversation is None:
            return
        conversation.model, conversation.first_message_digest = intent.base_model, intent.digest_first_message()
        shares_token_ids = route.token_ids is conversation.token_ids
        prompt_query = self._core.cache_state.get_query(route.request_id)
        memory = None if prompt_query is None else self._core.index.remember(prompt_query.prepared_ids)
        if memory is not None:
            shared_bytes = conversation.token_ids.itemsize * len(conversation.token_ids) if shares_token_ids else 0
            conversation.prompt_memory = memory
            conversation.prompt_memory_bytes = memory.nbytes - shared_bytes
            conversation.is_memory_exact = shares_token_ids
        self._prompt_reader.conversations.cache.store(conversation, intent.body_to_cache, tokenized_prompt.predecessor)

    def build_route_request(
        self, intent: RequestIntent, tokenized_prompt: TokenizedPrompt, request_id: str, started_s: float
    ) -> RouteRequest:
        """Build the core's request."""
        body_request, token_ids, size = intent.body_request, tokenized_prompt.token_ids, tokenized_prompt.size
        if body_request.echoes_chat and not self._core.registry.is_blockcast(intent.model):
            token_ids = None  # nothing of it will be reused
        if token_ids is None or size is None:
            estimate = self._estimate_tokens(intent)
            size = PromptSize(estimate, estimate)
        media_conversation = None
        if intent.media is not None:
            media_conversation = intent.media.conversation_digest
            counted_tokens = 0 if token_ids is None else size.tokens
            size = _estimate_size_with_media(counted_tokens, intent.media.tokens, intent.tokens_max)
        output_room = (
            body_request.output_tokens_min
            if intent.tokens_max is None
            else max(intent.tokens_max - size.longest_tokens, 0)
        )
        return RouteRequest(
            request_id=request_id,
            model=intent.model,
            scope=self._get_scope(intent.base_model, body_request.cache_salt, intent.lora),
            token_ids=token_ids,
            prompt_tokens=size.tokens,
            prompt_count=size.prompt_count,
            longest_prompt_tokens=size.longest_tokens if size.prompt_count > 1 else 0,
            is_counted=size.is_exact,
            media_conversation=media_conversation,
            similar_prompt=intent.similar_prompt,
            common_tokens=intent.common_tokens,
            output_tokens_max=1
            if body_request.kind == "other"
            else size.prompt_count * body_request.output_tokens_max,  # of others, what is computed is the prompt
            output_tokens_min=size.prompt_count * min(body_request.output_tokens_min, output_room),
            is_streaming=body_request.stream,
            priority=intent.priority,
            worker=intent.worker,
            session=intent.session.name,
            parent=intent.session.parent,
            is_final=intent.session.is_final,
            role=intent.role,
            deadline_s=None if intent.deadline_ms is None else started_s + intent.deadline_ms / 1000.0,
            ttft_s_max=None if intent.ttft_ms is None else intent.ttft_ms / 1000.0,
        )

    def _estimate_tokens(self, intent: RequestIntent) -> int:
        """Estimate the tokens of a prompt that was not tokenised: at most what its model takes, or an image in a body
        would price its worker out."""
        return min(max(1, intent.body_bytes // CHARS_PER_TOKEN), intent.tokens_max or ESTIMATED_TOKENS_MAX)

    def _resolve_model(self, name: str | None) -> ResolvedModel:
        """Resolve the name of a model; without a name, the first model there is."""
        if name is None:
            name = next((model for worker in self._core.workers.values() for model in worker.models), "")
        served_model = self._core.resolve_model(name)
        if served_model is None:
            return ResolvedModel(name, name)
        return ResolvedModel(name, served_model.base, served_model.lora, served_model.max_model_len)

    def _get_scope(self, base: str, salt: str | None, lora: str | None) -> Scope:
        """Return the scope of a prompt. Without a salt it is one object for all requests of a model that is served."""
        if salt is not None:
            return Scope(base, salt, lora)
        scope = self._scope_by_model.get((base, lora))
        if scope is None:
            scope = Scope(base, None, lora)
            if self._core.resolve_model(lora or base) is not None:
                self._scope_by_model[base, lora] = scope
        return scope


def _estimate_size_with_media(counted_tokens: int, tokens: int, tokens_max: int | None) -> PromptSize:
    """A prompt's size, estimated with its media: no more than its model takes, and no less than what was counted."""
    tokens = max(counted_tokens, 1, min(tokens, tokens_max or ESTIMATED_TOKENS_MAX))
    return PromptSize(tokens, tokens, is_exact=False)


def make_conversation_name(session: Session, request: RoutingRequest) -> str:
    """Return a name that a conversation has in all of its turns: its session's name, else its opening as JSON."""
    if session.name is not None:
        return session.name
    source, messages = request.source, request.messages
    opening: object = request.prompt[:OPENING_ITEMS] if isinstance(request.prompt, (str, list)) else None
    if messages:
        first = next((i for i, message in enumerate(messages) if message.get("role") == "user"), 0)
        opening = messages[: first + 1]
    elif isinstance(source, CountRequest):
        opening = source.system, source.messages[:1]
    elif source is not None:
        opening = source.instructions, source.input if isinstance(source.input, str) else source.input[:1]
    return msgspec.json.encode(opening).decode()


def _get_request_kind(request: HttpRequest, path: str | None) -> ApiKind | None:
    """Return the kind of a request to this path; None where the body decides."""
    if path is None:
        return None
    return API_KIND_BY_PATH.get(path, "other") if request.method == "POST" else "other"


def _get_body_format(request: HttpRequest, path: str | None) -> Literal["json", "form"] | None:
    """How the body of a request to this path is read; None: not at all. What a worker might take for JSON is JSON."""
    if _get_request_kind(request, path) != "other":
        return "json"
    content_type = request.header(b"content-type")
    if is_form(content_type):
        return "form"
    if _JSON_OBJECT_START.match(request.pieces[0]) is not None:
        return "json"
    return "json" if request.body_bytes and path in JSON_PATHS else None


def _read_form(request: HttpRequest) -> tuple[RoutingRequest, FieldSpans]:
    return read_form(request.pieces, request.header(b"content-type") or b"")


def _strip_worker_fields(value: bytes, allowed_fields: frozenset[str]) -> Any:
    """An object of a body, or a form's text of one, without the fields that are not the client's; None where it has
    none of those."""
    try:
        fields = msgspec.json.decode(value)
    except msgspec.DecodeError:
        return None
    client_fields = without_worker_fields(fields, allowed_fields)
    return None if client_fields == fields else client_fields


def _parse_integer_header(request: HttpRequest, name: bytes, low: int, high: int) -> int | None:
    value = request.header(name)
    if value is None:
        return None
    if re.fullmatch(rb"-?[0-9]{1,10}", value) is None or not low <= int(value) <= high:
        raise bad_value(name.decode(), value.decode("latin-1"), f"an integer from {low} to {high}")
    return int(value)


def _decode_header(value: bytes | None) -> str | None:
    return value.decode("latin-1") if value else None
