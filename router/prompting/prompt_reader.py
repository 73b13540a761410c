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
from typing import Any, TypeVar

import msgspec

from options.background_tasks import BackgroundTasks
from prompts.errors import RequestError
from prompts.routing import ApiKind, RoutingRequest, decode_fields, parse_body
from prompts.tokenizer import Tokenizer
from router.prompting.boundary_rendering import BoundaryRenderer
from router.prompting.continued_conversation import Continuation
from router.prompting.conversation_cache import BoundaryLocation
from router.prompting.conversation_reader import INLINE_BYTES_MAX, ConversationReader, is_worth_caching
from router.prompting.encode import is_light
from router.prompting.media import read_media
from router.prompting.model_tokenizers import ModelTokenizers
from router.prompting.parsed_body import BodyToRead, ParsedBody, PromptTarget, TokenizedPrompt, tokenize_prompt
from router.prompting.prompt_worker_pool import PromptWorkerPool, ReadTask

log = logging.getLogger("router")

WORKER_RENDER_S_MAX = 1.0
"""CPU time of a chat template in a worker process, where no other request waits for it."""

T = TypeVar("T")


def _may_take_long(request: RoutingRequest, tokenizer: Tokenizer | None) -> bool:
    """Whether a prompt must be rendered in a worker process, because its chat template took too long before."""
    template = None if tokenizer is None else tokenizer.chat_template
    is_chat = request.kind == "chat" or request.source is not None
    return is_chat and template is not None and not template.is_bounded


def _make_continued_body(continuation: Continuation, tokens_max: int | None, body: bytes) -> ParsedBody:
    """Return a body with a prompt of cached and new messages. `tokens_max`: most tokens that the model takes."""
    prompt = TokenizedPrompt(seconds=continuation.read_s, conversation=continuation.cache_entry)
    prompt.set_ids(continuation.token_ids, continuation.request, tokens_max)
    return ParsedBody(
        continuation.request,
        prompt,
        body=b"" if prompt.conversation is None else body,
        first_message_digest=continuation.conversation.first_message_digest,
        continuation=continuation,
    )


class PromptReader:
    """Reads the prompts of all requests to one router. For one event loop; only `tokenize` is thread-safe."""

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
        self.worker_pool = worker_pool
        self._executor = executor
        self._makes_outlines = makes_outlines

        self._check_tasks = BackgroundTasks()
        """Background tasks that read a body whole, to check a prompt that was continued from the cache."""
        self.cpu_s = 0.0
        """CPU time of rendering and encoding."""
        self.failure_count = 0
        """Prompts that raised an unexpected exception."""

    # Bodies -----------------------------------------------------------------------------------------------------------

    def begin_read(self, body_to_read: BodyToRead) -> ParsedBody | Coroutine[Any, Any, ParsedBody]:
        """Parse a body and tokenise its prompt at once, if that is quick; else return a coroutine that does it.

        If the body continues a cached conversation, only its new messages are read, unless the first messages are
        needed too (`needs_opening`). Raises RequestError for a malformed body.
        """
        kind = body_to_read.kind
        may_be_cached = kind is not None and self.conversations.may_have(kind, body_to_read.byte_count)
        if kind is None or not may_be_cached or body_to_read.needs_opening:
            return self._begin_whole_read(body_to_read)
        data = body_to_read.join()
        matches = self.conversations.cache.find(kind, data)
        if not matches:
            return self._begin_whole_read(body_to_read)
        new_bytes = len(data) - matches[0].boundary.body_end
        if new_bytes > INLINE_BYTES_MAX:
            return self._continue_in_thread(matches, data, body_to_read)
        continuation = self._continue(matches, data)
        return self._end_continued_read(continuation, data, body_to_read)

    def _begin_whole_read(self, body_to_read: BodyToRead) -> ParsedBody | Coroutine[Any, Any, ParsedBody]:
        """Read all of a body: at once if it is small, else by a coroutine."""
        body = body_to_read.pieces[0]
        if len(body_to_read.pieces) > 1 or not is_light(body):
            return self._read_large(body_to_read)
        fields = decode_fields(body)
        request = parse_body(body_to_read.kind or "other", body, fields)
        if body_to_read.kind is None:
            request = request.replace(kind="completion" if request.messages is None else "chat")
        target = body_to_read.find_target(request)
        parsed_body = ParsedBody(request, TokenizedPrompt(), fields=fields)
        if request.kind == "other":
            return parsed_body
        parsed_body.media = read_media(request, body)
        if self.tokenizers.is_remote(target.base_model):
            return self._await_prompt(parsed_body, self._tokenize_at_worker(request, target))
        tokenizer = self.tokenizers.get(target.base_model)
        if _may_take_long(request, tokenizer):
            return self._await_prompt(parsed_body, self._tokenize_in_process(request, target, body_to_read))
        return self._begin_tokenizing(parsed_body, body, tokenizer, target)

    def _begin_tokenizing(
        self, parsed_body: ParsedBody, body: bytes, tokenizer: Tokenizer | None, target: PromptTarget
    ) -> ParsedBody | Coroutine[Any, Any, ParsedBody]:
        """Set the prompt of a small body: at once, or by a coroutine that tokenises it in a thread if that takes long.

        If the conversation is worth caching, the prompt gets a cache entry, by which the next turn is read faster.
        """
        request = parsed_body.request
        renderer = None
        if is_worth_caching(request, len(body)):
            renderer = self.conversations.get_renderer(target.base_model)
        parsed_body.body = b"" if renderer is None else body
        tokenize = partial(self.tokenize, request, tokenizer, target.tokens_max, parsed_body.body, renderer)
        if tokenizer is not None and len(body) > INLINE_BYTES_MAX:
            return self._await_prompt(parsed_body, self.run_in_thread(tokenize))
        parsed_body.prompt = tokenize()
        return parsed_body

    async def _tokenize_at_worker(self, request: RoutingRequest, target: PromptTarget) -> TokenizedPrompt:
        """Tokenise the prompt of a small body by asking an engine, unless the body has token ids."""
        prompt = self.tokenize(request, None, target.tokens_max, remote_model=target.base_model)
        await self._ask_worker(prompt, request, target)
        return prompt

    @staticmethod
    async def _await_prompt(parsed_body: ParsedBody, prompt: Awaitable[TokenizedPrompt]) -> ParsedBody:
        parsed_body.prompt = await prompt
        return parsed_body

    async def _ask_worker(self, prompt: TokenizedPrompt, request: RoutingRequest, target: PromptTarget) -> None:
        """Set the token ids and the size of a prompt by asking a worker, if the prompt has a request to one."""
        remote = self.tokenizers.remote
        if prompt.tokenize_request is None or remote is None:
            return
        started_s = time.perf_counter()
        ids = await remote.tokenize(prompt.tokenize_request, target.base_model)
        prompt.set_ids(ids, request, target.tokens_max, prompt.further_lengths)
        prompt.seconds = time.perf_counter() - started_s

    async def _tokenize_in_process(
        self, request: RoutingRequest, target: PromptTarget, body_to_read: BodyToRead
    ) -> TokenizedPrompt:
        """Tokenise the prompt of a small body in a worker process, because its chat template may block this process.

        The prompt has no ids if the template takes too long, or did so too often before, or if the pool has no room.
        Raises nothing.
        """
        model = target.base_model
        prompt = TokenizedPrompt()
        loaded = self.tokenizers.loaded_by_model.get(model)
        if loaded is None or not loaded.reads_chats:
            return prompt
        started_s = time.perf_counter()
        task = self.make_task(model, request.kind, target.tokens_max)
        task.seconds_max = WORKER_RENDER_S_MAX
        try:
            result = await self.worker_pool.read(body_to_read, task)
            self.tokenizers.record_rendering(model, is_overdue=result.is_overdue)
            prompt = result.parsed_body.prompt
        except RequestError as error:  # too many bodies wait, or the client has left
            log.debug("a prompt was not read: %s", error.message)
        prompt.seconds = time.perf_counter() - started_s
        return prompt

    async def _read_large(self, body_to_read: BodyToRead) -> ParsedBody:
        """Read a large body in a worker process; if only an engine has the tokenizer, ask it for the token ids."""
        started_s = time.perf_counter()
        async with self.worker_pool.inspect(body_to_read) as inspected_body:
            request = inspected_body.parsed_body.request
            target = body_to_read.find_target(request)
            task = self.make_task(target.base_model, request.kind, target.tokens_max)
            task.makes_cache_entry = self.conversations.get_renderer(target.base_model) is not None
            parsed_body = (await inspected_body.read_prompt(task)).parsed_body
        await self._ask_worker(parsed_body.prompt, parsed_body.request, target)
        parsed_body.prompt.seconds = time.perf_counter() - started_s
        if parsed_body.prompt.conversation is not None:
            parsed_body.body = body_to_read.join()
        return parsed_body

    # Conversations that return ----------------------------------------------------------------------------------------

    def _continue(self, matches: Sequence[BoundaryLocation], body: bytes) -> Continuation | None:
        """Read only the new messages of a body; return None if the body must be read whole. Thread-safe."""
        continuation, read_s = self._run_timed(partial(self.conversations.read_continuation, matches, body))
        if continuation is not None:
            continuation.read_s = read_s
        return continuation

    async def _continue_in_thread(
        self, matches: Sequence[BoundaryLocation], body: bytes, body_to_read: BodyToRead
    ) -> ParsedBody:
        """Continue a cached conversation in a thread, else read the body whole."""
        continuation = await self.run_in_thread(partial(self._continue, matches, body))
        read = self._end_continued_read(continuation, body, body_to_read)
        del body  # it may be a copy, and the request may wait for a process
        return read if isinstance(read, ParsedBody) else await read

    def _end_continued_read(
        self, continuation: Continuation | None, body: bytes, body_to_read: BodyToRead
    ) -> ParsedBody | Coroutine[Any, Any, ParsedBody]:
        """Return the body of a conversation that was continued, or else begin to read the whole body.

        The whole body is read without a continuation, and if the cached conversation is of another model. A sample of
        continued prompts is compared with those of the whole bodies, in the background.
        """
        if continuation is None:
            return self._begin_whole_read(body_to_read)
        target = body_to_read.find_target(continuation.request)
        if target.base_model != continuation.conversation.model:
            return self._begin_whole_read(body_to_read)
        if self.conversations.count_hit(continuation, len(body), time.monotonic()):
            checked_body = msgspec.structs.replace(body_to_read, pieces=(body,), is_wanted=lambda: True, tenant="")
            self._check_tasks.start(self._check(continuation, checked_body))
        return _make_continued_body(continuation, target.tokens_max, body)

    async def _check(self, continuation: Continuation, body_to_read: BodyToRead) -> None:
        """Compare the token ids of a continued prompt with those of the whole body, which is read in the background."""
        model, kind = continuation.conversation.model, continuation.conversation.kind
        body = body_to_read.join()
        if is_light(body):
            tokenizer = self.tokenizers.get(model)
            prompt = await self.run_in_thread(lambda: self.tokenize(parse_body(kind, body), tokenizer))
        else:
            task = self.make_task(model, kind, None)
            try:
                prompt = (await self.worker_pool.read(body_to_read, task)).parsed_body.prompt
            except RequestError as error:  # too many bodies wait
                log.debug("a continued prompt was not checked: %s", error.message)
                return
        if prompt.token_ids is not None:
            self.conversations.compare(model, continuation, prompt.token_ids)

    # Work that is timed -----------------------------------------------------------------------------------------------

    def tokenize(
        self, request: RoutingRequest, tokenizer: Tokenizer | None, tokens_max: int | None = None, body: bytes = b"",
        renderer: BoundaryRenderer | None = None, remote_model: str | None = None,
    ) -> TokenizedPrompt:  # fmt: skip
        """Tokenise the prompt of a request for routing, and measure the time of that. Thread-safe.

        Raises nothing for a prompt that cannot be tokenised: the token ids are None, so that the request is routed
        without them, and the worker reports the error to the client. The parameters are those of `tokenize_prompt`.
        """
        # The template may have blocked for another chat while this request waited for its thread. Then this request
        # is routed without ids, and later ones are read in worker processes.
        if _may_take_long(request, tokenizer):
            return TokenizedPrompt()
        makes_outline = self._makes_outlines and renderer is not None
        work = partial(
            tokenize_prompt, request, tokenizer, tokens_max, body=body, renderer=renderer, makes_outline=makes_outline,
            remote_model=remote_model,
        )  # fmt: skip
        prompt, read_s = self._run_timed(work)
        prompt = prompt or TokenizedPrompt()
        prompt.seconds = read_s
        return prompt

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
        return asyncio.get_running_loop().run_in_executor(self._executor, work)

    def make_task(self, model: str, kind: ApiKind, tokens_max: int | None) -> ReadTask:
        """Return the task by which a worker process reads a body for a base model."""
        task = ReadTask(tokens_max=tokens_max, makes_outline=self._makes_outlines)
        task.remote_model = model if self.tokenizers.is_remote(model) else None
        loaded = self.tokenizers.loaded_by_model.get(model)
        if loaded is not None and (kind == "completion" or loaded.reads_chats):
            template = loaded.tokenizer.chat_template
            task.checkpoint = loaded.checkpoint
            task.keeps_messages_as_sent = template is not None and template.keeps_messages_as_sent
        return task

    def close(self) -> None:
        """Cancel the background checks of continued prompts."""
        self._check_tasks.cancel()
