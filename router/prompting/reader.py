"""The prompt of a request as token ids, by the tokenizer of its model.

`begin_read` hides whether a body is read at once, in a thread, in a worker process, or by an engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from prompts.errors import RequestError
from prompts.routing import ApiKind, RoutingRequest, parse_body, parse_routing_of_kind
from prompts.tokenizer import Tokenizer
from router.prompting.boundary_rendering import BoundaryRenderer
from router.prompting.conversation_cache import BoundaryLocation
from router.prompting.conversation_reader import INLINE_BYTES_MAX, ConversationReader, is_worth_caching
from router.prompting.conversation_reading import Continuation, cache_conversation
from router.prompting.encode import (
    CHARS_PER_TOKEN_MAX,
    TOKENS_MAX,
    RenderedPrompt,
    build_tokenize_request,
    count_further_tokens,
    is_light,
    measure_prompts,
    truncate_prompt,
)
from router.prompting.media import read_media
from router.prompting.model_tokenizers import ModelTokenizers
from router.prompting.outline import outline_chat
from router.prompting.parsed_body import ParsedBody, RequestBody, Target, TokenizedPrompt, tokenize_prompt
from router.prompting.prompt_worker_pool import PromptWorkerPool, ReadTask

log = logging.getLogger("router")

WORKER_RENDER_S_MAX = 1.0
"""CPU time of a chat template in a worker process, where no other request waits for it."""
TIMEOUTS_MAX = 3
"""Timeouts of a template in a row after which its model's chats are not read any more."""

T = TypeVar("T")


def _always() -> bool:
    return True


def _may_take_long(request: RoutingRequest, tokenizer: Tokenizer | None) -> bool:
    """Whether a prompt must be rendered in a worker process, because its chat template took too long before."""
    template = None if tokenizer is None else tokenizer.chat_template
    is_chat = request.kind == "chat" or request.source is not None
    return is_chat and template is not None and not template.is_bounded


class _BodyToRead(msgspec.Struct, Generic[Target], frozen=True, eq=False):
    """A body that is to be read, with the arguments of `PromptReader.begin_read`."""

    body: RequestBody
    kind: ApiKind | None
    make_target: Callable[[RoutingRequest], Target]
    is_wanted: Callable[[], bool]
    tenant: str


class PromptReader:
    """Reads the prompts of all requests to one router. Thread-safe, but tokenizers are loaded on the event loop."""

    def __init__(
        self,
        tokenizers: ModelTokenizers,
        conversations: ConversationReader,
        executor: Executor,
        worker_pool: PromptWorkerPool,
        *,
        makes_outlines: bool = True,
    ) -> None:
        """Make a reader that finds the tokenizers of models in `tokenizers` and cached prompts in `conversations`.

        `executor`: threads for work that would block the event loop. `worker_pool`: processes that read large bodies,
        and render templates that may take long. `makes_outlines`: whether messages are fingerprinted, so that the
        prompts of a conversation can be compared.
        """
        self.tokenizers = tokenizers
        self.conversations = conversations
        self._executor = executor
        self.worker_pool = worker_pool
        self._makes_outlines = makes_outlines
        self._check_tasks: set[asyncio.Task[None]] = set()
        """Background tasks that compare a continued prompt with the same body read whole."""
        self._timeouts: dict[str, int] = {}
        """Model -> timeouts of its template in a row."""
        self.cpu_s = 0.0
        """CPU time of rendering and encoding."""
        self.failure_count = 0
        """Prompts that raised an unexpected exception."""

    async def read_in_worker(
        self,
        body: Sequence[bytes],
        model: str,
        task: ReadTask,
        is_wanted: Callable[[], bool] = _always,
        tenant: str = "",
    ) -> TokenizedPrompt:
        """Tokenise the prompt of a body in a worker process, because its template may take too long for this one.

        The token ids are None if the template takes too long, or did so TIMEOUTS_MAX times in a row, if the pool has no
        room, or if the task only builds the request by which a worker tokenises. Raises nothing.
        """
        timeout_count = self._timeouts.get(model, 0)
        if timeout_count >= TIMEOUTS_MAX:
            return TokenizedPrompt()
        started_s = time.perf_counter()
        task.seconds_max = WORKER_RENDER_S_MAX
        try:
            outcome = await self.worker_pool.read(body, task.kind, lambda request: task, is_wanted, tenant)
        except RequestError as error:  # too many bodies wait, or the client has left
            log.debug("a prompt was not read: %s", error.message)
            return TokenizedPrompt(None, time.perf_counter() - started_s)
        self._set_timeout_count(model, timeout_count + 1 if outcome.result.is_overdue else 0)
        prompt = outcome.result.prompt
        prompt.seconds = time.perf_counter() - started_s
        return prompt

    def _set_timeout_count(self, model: str, timeout_count: int) -> None:
        """Store how many times in a row a model's template took too long, and report a problem at the limit."""
        self._timeouts[model] = timeout_count
        if timeout_count == TIMEOUTS_MAX:
            problem = "its chat template takes too long; chats are routed by load alone"
            self.tokenizers.problems[model] = problem
            log.warning("model %s: %s", model, problem)

    async def _ask_worker(
        self, tokenize_request: bytes | None, request: RoutingRequest, target: Target, further_tokens: Sequence[int]
    ) -> TokenizedPrompt:
        """Have a worker tokenise a prompt. `further_tokens`: tokens of each prompt of the body after the first."""
        started_s, remote, tokens_max = time.perf_counter(), self.tokenizers.remote, target.tokens_max
        ids = None if remote is None else await remote.tokenize(tokenize_request, target.base_model)
        size = measure_prompts(ids, request, tokens_max, further_tokens)
        return TokenizedPrompt(truncate_prompt(ids, request, tokens_max), time.perf_counter() - started_s, size=size)

    def tokenize(
        self, request: RoutingRequest, tokenizer: Tokenizer | None, tokens_max: int | None = None, body: bytes = b"",
        renderer: BoundaryRenderer | None = None,
    ) -> TokenizedPrompt:  # fmt: skip
        """Tokenise the prompt of a request for routing. For any thread.

        With a `body` and the `renderer` of its model, also make the entry by which the conversation cache finds the
        next turn. `tokens_max`: most tokens that the model takes; a longer prompt is truncated. Nothing is raised for a
        prompt that cannot be tokenised: the token ids are None, and the worker reports the error to the client.
        """
        if _may_take_long(request, tokenizer):  # since another chat, while this one waited for its thread
            return TokenizedPrompt()
        result, read_s = self._run_timed(partial(tokenize_prompt, request, tokenizer, tokens_max))
        if result is None:
            return TokenizedPrompt(None, read_s)
        tokenized, rendered = result
        tokenized.seconds = read_s
        if renderer is not None and body:
            add_entry = partial(self._add_cache_entry, tokenized, request, body, rendered, renderer)
            _, entry_s = self._run_timed(add_entry)
            tokenized.seconds += entry_s
        return tokenized

    def _add_cache_entry(
        self,
        tokenized: TokenizedPrompt,
        request: RoutingRequest,
        body: bytes,
        rendered: RenderedPrompt,
        renderer: BoundaryRenderer,
    ) -> None:
        """Add to a prompt the outline of its messages, and the entry by which the next turn is continued."""
        tokenized.outline = outline_chat(request) if self._makes_outlines else None
        tokenized.conversation = cache_conversation(request, body, rendered, tokenized.outline, renderer)

    # Bodies -----------------------------------------------------------------------------------------------------------

    def begin_read(
        self, body: RequestBody, kind: ApiKind | None, make_target: Callable[[RoutingRequest], Target],
        is_wanted: Callable[[], bool] = _always, tenant: str = "", *, may_continue: bool = True,
    ) -> ParsedBody[Target] | Coroutine[Any, Any, ParsedBody[Target]]:  # fmt: skip
        """Read a body at once and return it, if that is quick; else return a coroutine that reads it.

        `kind` is the API of the body's path, None if the body decides. `make_target` chooses the model of the request.
        `is_wanted` tells whether the client is still connected. `may_continue` allows a cached conversation to be used.
        Raises RequestError for a malformed body.
        """
        body_to_read = _BodyToRead(body, kind, make_target, is_wanted, tenant)
        if not may_continue or kind is None or not self.conversations.may_have(kind, body.body_bytes):
            return self._begin_whole_read(body_to_read)
        data = body.body
        matches = self.conversations.find(kind, data)
        if not matches:
            return self._begin_whole_read(body_to_read)
        if len(data) - matches[0].boundary.body_end > INLINE_BYTES_MAX:
            return self._continue_in_thread(matches, data, body_to_read)
        read = self._finish_continuation(*self._continue(matches, data), data, make_target)
        return read or self._begin_whole_read(body_to_read)

    def _begin_whole_read(
        self, body_to_read: _BodyToRead[Target]
    ) -> ParsedBody[Target] | Coroutine[Any, Any, ParsedBody[Target]]:
        """Read a body without the conversation cache: at once if that is quick, else by a coroutine.

        The coroutine reads it in a thread, in a worker process, or with the help of a worker, which has the tokenizer.
        """
        pieces = body_to_read.body.pieces
        if len(pieces) > 1 or not is_light(pieces[0]):
            return self._read_large(body_to_read)
        data = pieces[0]
        request, fields = parse_body(body_to_read.kind or "other", data)
        if body_to_read.kind is None:
            request = request.replace(kind="completion" if request.messages is None else "chat")
        target = body_to_read.make_target(request)
        read = ParsedBody(request, target, TokenizedPrompt(), fields=fields)
        if request.kind == "other":
            return read
        read.media = read_media(request, data)
        if self.tokenizers.is_remote(target.base_model):
            return self._begin_remote_read(read)
        tokenizer = self.tokenizers.get(target.base_model)
        if _may_take_long(request, tokenizer):
            task = self.make_task(target.base_model, request.kind, target.tokens_max)
            is_wanted, tenant = body_to_read.is_wanted, body_to_read.tenant
            return self._await_prompt(read, self.read_in_worker(pieces, target.base_model, task, is_wanted, tenant))
        renderer = self.conversations.get_renderer(target.base_model)
        if renderer is not None and is_worth_caching(request, len(data)):
            read.body = data
        tokenize = partial(self.tokenize, request, tokenizer, target.tokens_max, read.body, renderer)
        if tokenizer is not None and len(data) > INLINE_BYTES_MAX:
            return self._await_prompt(read, self.run_in_thread(tokenize))
        read.prompt = tokenize()
        return read

    def _begin_remote_read(
        self, read: ParsedBody[Target]
    ) -> ParsedBody[Target] | Coroutine[Any, Any, ParsedBody[Target]]:
        """Complete a body for a model without a tokenizer here: ask a worker, unless the body has token ids."""
        request, target = read.request, read.target
        read.prompt = self.tokenize(request, None, target.tokens_max)
        if read.prompt.token_ids is not None:
            return read
        tokenize_request = build_tokenize_request(request, target.base_model)
        further_tokens = count_further_tokens(request, None)
        return self._await_prompt(read, self._ask_worker(tokenize_request, request, target, further_tokens))

    @staticmethod
    async def _await_prompt(read: ParsedBody[Target], prompt: Awaitable[TokenizedPrompt]) -> ParsedBody[Target]:
        read.prompt = await prompt
        return read

    async def _read_large(self, body_to_read: _BodyToRead[Target]) -> ParsedBody[Target]:
        """Read a large body in a worker process; if a worker has the tokenizer, let it tokenise the prompt."""
        body, make_target = body_to_read.body, body_to_read.make_target
        targets: list[Target] = []

        def make_task(request: RoutingRequest) -> ReadTask:
            target = make_target(request)
            targets.append(target)
            task = self.make_task(target.base_model, request.kind, target.tokens_max)
            task.is_cached = self.conversations.get_renderer(target.base_model) is not None
            return task

        started_s = time.perf_counter()
        request, spans, result = await self.worker_pool.read(
            body.pieces, body_to_read.kind, make_task, body_to_read.is_wanted, body_to_read.tenant
        )
        target = targets[-1] if targets else make_target(request)
        prompt = result.prompt
        if result.tokenize_request is not None:
            outline = prompt.outline
            prompt = await self._ask_worker(result.tokenize_request, request, target, result.further_tokens)
            prompt.outline = outline
        prompt.seconds = time.perf_counter() - started_s
        return ParsedBody(
            request=request,
            target=target,
            prompt=prompt,
            body=b"" if prompt.conversation is None else body.body,
            media=result.media,
            spans=spans,
            first_message_digest=result.first_message_digest,
        )

    def close(self) -> None:
        """Cancel the background checks of continued prompts."""
        for task in self._check_tasks:
            task.cancel()

    # Conversations that return ----------------------------------------------------------------------------------------

    def _continue(self, matches: Sequence[BoundaryLocation], body: bytes) -> tuple[Continuation | None, float]:
        """Read a body from a boundary of a cached conversation on; return the prompt and the seconds that it took.

        The prompt is None if the body must be read whole. For any thread.
        """
        return self._run_timed(partial(self.conversations.read_continuation, matches, body))

    async def _continue_in_thread(
        self, matches: Sequence[BoundaryLocation], body: bytes, body_to_read: _BodyToRead[Target]
    ) -> ParsedBody[Target]:
        """Continue a cached conversation in a thread, else read the body whole."""
        continuation, read_s = await self.run_in_thread(partial(self._continue, matches, body))
        read = self._finish_continuation(continuation, read_s, body, body_to_read.make_target)
        if read is not None:
            return read
        whole = self._begin_whole_read(body_to_read)
        return whole if isinstance(whole, ParsedBody) else await whole

    def _finish_continuation(
        self,
        continuation: Continuation | None,
        read_s: float,
        body: bytes,
        make_target: Callable[[RoutingRequest], Target],
    ) -> ParsedBody[Target] | None:
        """Return a body as it was read from the end of its cached messages on.

        Return None if the body must be read whole: there is no continuation, its prompt is too long, or the client now
        asks for another model. Now and then it is also read whole in the background, to check that the ids are equal.
        """
        if continuation is None:
            return None
        request, conversation = continuation.tail.request, continuation.conversation
        target = make_target(request)
        tokens_max, token_ids = target.tokens_max, continuation.token_ids
        # With more characters than this, even the longest possible tokens would be more than the model takes.
        is_too_long = continuation.char_count > ((tokens_max or TOKENS_MAX) + 1) * CHARS_PER_TOKEN_MAX
        if target.base_model != conversation.model or is_too_long:
            return None
        if self.conversations.count_hit(continuation, len(body), time.monotonic()):
            self._start_check(continuation, body)
        prompt = TokenizedPrompt(
            token_ids=truncate_prompt(token_ids, request, tokens_max),
            seconds=read_s,
            conversation=continuation.successor,
            size=measure_prompts(token_ids, request, tokens_max),
        )
        return ParsedBody(
            request,
            target,
            prompt,
            b"" if continuation.successor is None else body,
            first_message_digest=conversation.first_message_digest,
            continuation=continuation,
        )

    def _start_check(self, continuation: Continuation, body: bytes) -> None:
        """Start a task that reads a body whole and compares its ids with those of the continued conversation."""
        task = asyncio.get_running_loop().create_task(self._check(continuation, body))
        self._check_tasks.add(task)
        task.add_done_callback(self._check_tasks.discard)

    async def _check(self, continuation: Continuation, body: bytes) -> None:
        """Read the whole body in a thread or a worker process, and compare the ids with those of the continuation."""
        model, kind = continuation.conversation.model, continuation.conversation.kind
        token_ids: Sequence[int] | None = None
        if is_light(body):
            tokenizer = self.tokenizers.get(model)
            prompt = await self.run_in_thread(lambda: self.tokenize(parse_routing_of_kind(kind, body), tokenizer))
            token_ids = prompt.token_ids
        else:
            task = self.make_task(model, kind, None)
            try:
                outcome = await self.worker_pool.read((body,), kind, lambda _: task, _always)
            except RequestError as error:  # too many bodies wait
                log.debug("a continued prompt was not checked: %s", error.message)
                return
            token_ids = outcome.result.prompt.token_ids
        if token_ids is not None:
            self.conversations.compare(model, continuation, token_ids)

    def _run_timed(self, work: Callable[[], T]) -> tuple[T | None, float]:
        """Return the result of `work`, or None if it raises, and the seconds that it took. Exceptions are logged."""
        started_s, cpu_started_s = time.perf_counter(), time.thread_time()
        result = None
        try:
            result = work()
        except RequestError as refused:
            log.debug("prompt left to the worker to judge: %s", refused.message)
        except Exception as error:  # noqa: BLE001  a client's text in a model's template may raise anything
            self.failure_count += 1
            log.debug("a prompt could not be read: %s: %s", type(error).__name__, error)
        self.cpu_s += time.thread_time() - cpu_started_s
        return result, time.perf_counter() - started_s

    def run_in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run a function in a thread."""
        return asyncio.get_running_loop().run_in_executor(self._executor, work)

    def make_task(self, model: str, kind: ApiKind, tokens_max: int | None) -> ReadTask:
        """Return the task by which a worker process reads a body for a base model."""
        remote_model = model if self.tokenizers.is_remote(model) else None
        template = self.tokenizers.get_template(model)
        as_sent = template is not None and template.keeps_messages_as_sent
        folder = self.tokenizers.folder_by_model.get(model)
        if kind != "completion" and self._timeouts.get(model, 0) >= TIMEOUTS_MAX:
            folder = None
        return ReadTask(kind, folder, tokens_max, remote_model, as_sent, is_outlined=self._makes_outlines)
