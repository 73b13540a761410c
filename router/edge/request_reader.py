"""Read a client's request for the core: what its path, headers and body mean for routing.

The same for requests that are routed and for requests that `/route` explains.
"""

from __future__ import annotations

import re
from collections.abc import Coroutine
from functools import partial
from typing import Any, Final, Literal

import msgspec

from prompts.chat_completions import decode_json, make_nesting_error
from prompts.routing import API_KIND_BY_PATH, ApiKind, RoutingRequest
from prompts.worker_fields import CONTAINER_FIELDS, is_worker_field, without_worker_fields
from router.decide.core import RouterCore
from router.decide.messages import RouteRequest
from router.edge.request_context import RequestContext
from router.edge.routing_headers import ResolvedModel, RoutingHeaders, read_routing_headers
from router.edge.stored_responses import StoredResponses
from router.http.request import HttpRequest
from router.index.protocol import Scope
from router.prompting.body_fields import FieldSpans, apply_edits, locate_fields
from router.prompting.encode import CHARS_PER_TOKEN, PromptSize
from router.prompting.forms import is_form, read_form
from router.prompting.parsed_body import BodyToRead, ParsedBody, TokenizedPrompt
from router.prompting.prompt_reader import PromptReader
from router.prompting.sessions import Session, SessionNames, digest_opening
from router.tenancy.model_names import ModelNames

TOKENIZE_PATHS: Final = ("/tokenize", "/detokenize")
POOLING_PATHS: Final = ("/rerank", "/v2/rerank", "/score", "/pooling", "/classify", "/v2/embed")
UNVERSIONED_PATHS: Final = (*TOKENIZE_PATHS, *POOLING_PATHS)
"""Routes of vLLM outside of /v1 that are forwarded to workers."""
COUNTING_PATHS: Final = ("/v1/messages/count_tokens", *TOKENIZE_PATHS)
"""Routes with prompts that no model computes."""
JSON_PATHS: Final = frozenset((
    *COUNTING_PATHS, *POOLING_PATHS, "/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify", "/v1/moderations",
    "/v1/decisions", "/v1/systemone", "/v1/audio/speech", "/v1/images/generations",
))  # fmt: skip
"""Routes without a known prompt, but always with a JSON body."""
ID_BYTES: Final = 4
"""Bytes of a token id in memory."""
ESTIMATED_TOKENS_MAX: Final = 131_072
"""Largest estimate of a prompt's tokens where the context length of its model is unknown."""
_JSON_OBJECT_START = re.compile(rb"(?:\xef\xbb\xbf|\xff\xfe|(?:\0\0)?\xfe\xff)?[\0 \t\r\n]*\{")
"""Start of a JSON object in UTF-8, UTF-16 or UTF-32."""
_VALUE_DECODER = msgspec.json.Decoder()
_UNREAD_REQUEST = RoutingRequest(kind="other")


def is_worker_path(path: str) -> bool:
    """Return whether a path is of the workers' API, of which the router itself answers some, as the list of models."""
    return path.startswith("/v1/") or path in UNVERSIONED_PATHS


class RequestReader:
    """Reads HTTP requests: the model, the session, other wishes, and the prompt's tokens."""

    def __init__(
        self,
        core: RouterCore,
        prompt_reader: PromptReader,
        session_names: SessionNames | None = None,
        *,
        allowed_fields: frozenset[str] = frozenset(),
    ) -> None:
        """Make a reader of the requests that `core` will route; `prompt_reader` parses and tokenises their bodies.

        `session_names`: headers that name a client's session. `allowed_fields`: fields that direct a worker, such as
        `kv_transfer_params`, and may be set by clients.
        """
        self._core = core
        self._prompt_reader = prompt_reader
        self._session_names = session_names or SessionNames()
        self._allowed_fields = allowed_fields
        self.stored_responses = StoredResponses()
        self.model_names: ModelNames | None = None
        """Aliases, canaries and fallbacks of models; None if none are configured."""
        self.model_header: bytes | None = None
        """Header in which a gateway names the model, in place of the body; None if there is no gateway."""

    def begin_read(self, context: RequestContext, path: str | None) -> Coroutine[Any, Any, None] | None:
        """Parse and tokenise a request into `context.body`; if that takes long, return a coroutine that does it.

        So a short request needs no task of the event loop, and a long one does not block the loop. `path`: path of the
        API; None if the body tells the kind of request. Raises RequestError.
        """
        request, kind = context.request, _get_request_kind(context.request, path)
        body_format = _get_body_format(request, path) if kind == "other" else "json"
        if body_format is None:
            self._set_unread_body(context, _UNREAD_REQUEST)
            return None
        if body_format == "form":
            is_large = len(request.pieces) > 1
            if is_large:
                return self._read_form_in_thread(context)
            self._set_unread_body(context, *_read_form(request))
            return None
        has_canaries = self.model_names is not None and self.model_names.has_canaries
        find_model = partial(self._resolve_request, context)
        body_to_read = BodyToRead(request.pieces, kind, find_model, context.is_wanted, context.tenant, has_canaries)
        body = self._prompt_reader.begin_read(body_to_read)
        if not isinstance(body, ParsedBody):
            return _await_body(context, body)
        context.body = body
        return None

    async def read(self, context: RequestContext, path: str | None) -> None:
        """Read a request to `path` into `context.body`. Raises RequestError."""
        reading = self.begin_read(context, path)
        if reading is not None:
            await reading

    async def _read_form_in_thread(self, context: RequestContext) -> None:
        self._set_unread_body(context, *await self._prompt_reader.run_in_thread(partial(_read_form, context.request)))

    def _set_unread_body(
        self, context: RequestContext, body_request: RoutingRequest, spans: FieldSpans | None = None
    ) -> None:
        """Set the body of a request without a prompt."""
        self._resolve_request(context, body_request)
        context.body = ParsedBody(body_request, TokenizedPrompt(), spans=spans)

    def rewrite_body(self, context: RequestContext, fields: dict[str, object]) -> None:
        """Set `fields` in the body of a request, and remove fields that only routers may send to workers.

        For example, with `kv_transfer_params` a client could make a worker fetch KV from any address. The operator can
        allow some of these fields. A body that is neither JSON nor a form stays as it is. Raises RequestError if the
        body has a field twice.
        """
        request, body = context.request, context.body
        assert body is not None
        spans = body.spans
        if spans is None:
            needs_edit = bool(fields) or body.request.has_worker_fields
            if not needs_edit or _JSON_OBJECT_START.match(request.pieces[0]) is None:
                return
            spans = locate_fields(request.body)
        worker_fields = [name for name in spans.span_by_field if is_worker_field(name)]
        removed_fields = [name for name in worker_fields if name not in self._allowed_fields]
        new_fields = fields | self._clean_containers(request, spans)
        if new_fields or removed_fields:
            request.pieces = apply_edits(request.pieces, spans.make_edits(new_fields, removed_fields))
            body.fields = None

    def _clean_containers(self, request: HttpRequest, spans: FieldSpans) -> dict[str, object]:
        """Return the objects in a body that contained worker fields (as `extra_body` may), by name, without these."""
        cleaned_objects: dict[str, object] = {}
        for name in CONTAINER_FIELDS:
            if name in spans.span_by_field and name not in self._allowed_fields:
                value = request.body[slice(*spans.span_by_field[name])]
                cleaned_object = _strip_worker_fields(value, self._allowed_fields)
                if cleaned_object is not None:
                    cleaned_objects[name] = cleaned_object
        return cleaned_objects

    def _resolve_request(self, context: RequestContext, body_request: RoutingRequest) -> ResolvedModel:
        """Read the routing headers of a request, and return the model that it is for. Both are set in `context`.

        A header can name the model in place of the body. A configured alias stands for another name: the alias "chat"
        may mean "Qwen/Qwen3-8B". Raises RequestError for a malformed header.
        """
        headers = read_routing_headers(context.request, self._session_names, self.model_header)
        context.headers = headers
        storing_worker = self.stored_responses.find_worker(context.request, body_request.stored_response_id)
        if storing_worker is not None:
            headers.worker = storing_worker
        requested_name = headers.model or body_request.model
        name = requested_name
        if self.model_names is not None and requested_name is not None:
            name = self._resolve_alias(self.model_names, requested_name, body_request, headers)
        if name is None:
            name = self._core.registry.find_default_model(headers.worker)
        is_renamed = bool(requested_name) and name != body_request.model
        base, lora, tokens_max = name, None, None  # of a model that no worker serves, which the core refuses later
        served_model = self._core.resolve_model(name)
        if served_model is not None:
            base, lora, tokens_max = served_model.base, served_model.lora, served_model.max_model_len
        context.model = ResolvedModel(name, base, lora, tokens_max, is_renamed)
        return context.model

    def _resolve_alias(
        self, model_names: ModelNames, name: str, body_request: RoutingRequest, headers: RoutingHeaders
    ) -> str:
        registry = self._core.registry
        return model_names.resolve(
            name,
            lambda: make_conversation_name(SessionNames.make_session(headers.session, body_request), body_request),
            lambda model: registry.is_model_served(model, headers.worker),
        )  # fmt: skip

    def store_conversation(self, context: RequestContext) -> None:
        """Cache a prompt that was read and routed, so that the next turn computes only what new messages add.

        The cache entry already has the token ids. The index adds the digests of their KV blocks (`prepared_ids`).
        """
        body = context.body
        conversation = None if body is None else body.prompt.conversation
        if body is None or conversation is None:
            return
        assert context.model is not None
        conversation.model = context.model.base_model
        conversation.first_message_digest = body.digest_first_message()
        prompt_query = self._core.get_prompt_query(context.request_id)
        if prompt_query is None:
            conversation.prepared_prompt, conversation.prepared_prompt_bytes = None, 0
        else:
            # If the prompt was truncated, the index holds a copy of its ids besides those of the conversation.
            token_ids = body.prompt.token_ids
            copied_ids = () if token_ids is None or token_ids is conversation.token_ids else token_ids
            conversation.prepared_prompt = prompt_query.prepared_ids
            conversation.prepared_prompt_bytes = prompt_query.prepared_ids.memory_bytes + ID_BYTES * len(copied_ids)
        self._prompt_reader.conversations.cache.store(conversation, body.body)

    def build_route_request(self, context: RequestContext) -> RouteRequest:
        """Build the request that the core routes, from the parsed body and the routing headers of a client's request.

        Without token ids (an unknown tokenizer, media) the size of the prompt is estimated from its bytes. The scope
        says for which model, LoRA adapter and cache salt a cached prefix is valid.
        """
        body, headers, model = context.body, context.headers, context.model
        assert body is not None
        assert headers is not None
        assert model is not None
        body_request, token_ids = body.request, body.prompt.token_ids
        if body_request.echoes_chat and not self._core.registry.is_blockcast(model.name):
            token_ids = None  # other engines cannot reuse cached blocks for such a request
        size = body.prompt.size
        if token_ids is None or size is None or body.media is not None:
            size = _estimate_prompt_size(context.request, body, model, None if token_ids is None else size)
        session = SessionNames.make_session(headers.session, body_request)
        return RouteRequest(
            request_id=context.request_id,
            model=model.name,
            scope=Scope(model.base_model, body_request.cache_salt, model.lora),
            # The prompt.
            token_ids=token_ids,
            prompt_tokens=size.tokens,
            prompt_count=size.prompt_count,
            longest_prompt_tokens=size.longest_tokens if size.prompt_count > 1 else 0,
            is_counted=size.is_exact,
            media_conversation=None if body.media is None else body.media.conversation_digest,
            similar_prompt=None if body.continuation is None else body.continuation.conversation.prepared_prompt,
            # The answer.
            output_tokens_max=_get_output_tokens_max(body_request, size),
            output_tokens_min=_get_output_tokens_min(body_request, size, model.tokens_max),
            is_streaming=body_request.stream,
            # The client's wishes.
            priority=body_request.priority if headers.priority is None else headers.priority,
            worker=headers.worker,
            session=session.name,
            parent=session.parent_name,
            is_final=session.is_final,
            role=headers.role,
            deadline_s=None if headers.deadline_ms is None else context.started_at_s + headers.deadline_ms / 1000.0,
            ttft_s_max=None if headers.ttft_ms is None else headers.ttft_ms / 1000.0,
        )


async def _await_body(context: RequestContext, reading: Coroutine[Any, Any, ParsedBody]) -> None:
    context.body = await reading


def _estimate_prompt_size(
    request: HttpRequest, body: ParsedBody, model: ResolvedModel, counted_size: PromptSize | None
) -> PromptSize:
    """Estimate the size in tokens of a prompt that was not tokenised, or that has media, such as images.

    It is at most the context of the model. `counted_size`: size of the tokenised text beside the media; None if no text
    was tokenised. The estimate is at least that size.
    """
    tokens_max = model.tokens_max or ESTIMATED_TOKENS_MAX
    if body.media is None:
        body_bytes = 0 if request.path in COUNTING_PATHS else request.body_bytes  # of what a model reads
        tokens = min(max(1, body_bytes // CHARS_PER_TOKEN), tokens_max)
        return PromptSize(tokens, tokens)
    tokens = max(1, min(body.media.estimated_tokens, tokens_max))
    if counted_size is not None:
        tokens = max(tokens, counted_size.tokens)
    return PromptSize(tokens, tokens, is_exact=False)


def _get_output_tokens_max(request: RoutingRequest, size: PromptSize) -> int:
    """Return the most tokens that a request may generate. Requests that are no prompts, such as embeddings, have 1."""
    return 1 if request.kind == "other" else size.prompt_count * request.output_tokens_max


def _get_output_tokens_min(request: RoutingRequest, size: PromptSize, context_tokens_max: int | None) -> int:
    """Return the least tokens that a request generates, as far as the model's context has room after its prompt."""
    if context_tokens_max is None:
        return size.prompt_count * request.output_tokens_min
    return size.prompt_count * min(request.output_tokens_min, max(context_tokens_max - size.longest_tokens, 0))


def make_conversation_name(session: Session, request: RoutingRequest) -> str:
    """Return a name that a conversation has in all of its turns: its session's name, else a digest of its beginning."""
    return session.name or request.opening_digest or digest_opening(request)


def _get_request_kind(request: HttpRequest, path: str | None) -> ApiKind | None:
    """Return the kind of a request to this path; None if the body decides."""
    if path is None:
        return None
    return API_KIND_BY_PATH.get(path, "other") if request.method == "POST" else "other"


def _get_body_format(request: HttpRequest, path: str | None) -> Literal["json", "form"] | None:
    """Return the format in which the body of an unknown API is read: JSON if it may be an object; None: unread."""
    content_type = request.get_header(b"content-type")
    if is_form(content_type):
        return "form"
    if _JSON_OBJECT_START.match(request.pieces[0]) is not None:
        return "json"
    return "json" if request.body_bytes and path in JSON_PATHS else None


def _read_form(request: HttpRequest) -> tuple[RoutingRequest, FieldSpans]:
    return read_form(request.pieces, request.get_header(b"content-type") or b"")


def _strip_worker_fields(value: bytes, allowed_fields: frozenset[str]) -> Any:
    """Return a JSON object without the fields that clients may not set; None if it has none. Raises RequestError."""
    fields: Any = decode_json(_VALUE_DECODER, value)
    try:
        client_fields = without_worker_fields(fields, allowed_fields)
        return None if client_fields == fields else client_fields
    except RecursionError:
        raise make_nesting_error() from None
