"""Large bodies, read by worker processes (prompts/process_pool.py), so that no other request waits for them.

A process first finds the fields that routing needs, then it reads the prompt. The bodies that wait or are being read
have at most `waiting_mb`.
"""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import msgspec

from prompts.errors import RequestError
from prompts.process_pool import ProcessPool, WorkerProcess, WorkerProcessError
from prompts.routing import ApiKind, parse_body
from prompts.tokenizer import ID_TYPE, Checkpoint, Tokenizer, TokenizerError
from router.prompting.body_fields import locate_fields
from router.prompting.boundary_rendering import BoundaryRenderer
from router.prompting.config import PromptWorkerConfig
from router.prompting.conversation_cache import is_cacheable
from router.prompting.encode import is_within_bounds, read_large_request
from router.prompting.media import read_media
from router.prompting.parsed_body import BodyToRead, ParsedBody, TokenizedPrompt, tokenize_prompt
from router.prompting.sessions import digest_first_user_message, digest_opening
from router.prompting.template_trial import find_trial_problem

log = logging.getLogger("router")

TEMPLATE_TRIALS_MAX = 2
START_S_MAX = 30.0
"""Time for starting a process and finding the fields of a body, for loading a tokenizer, and for a template's trial."""


class ReadTask(msgspec.Struct):
    """Options by which a worker process tokenises the prompt of a body, sent after it has found the body's model."""

    checkpoint: Checkpoint | None = None
    """Files of the tokenizer; None if only token ids in the body are to be read."""
    tokens_max: int | None = None
    """Most tokens that the model takes; None if unknown."""
    remote_model: str | None = None
    """Model that engines tokenise for; the prompt then has the request to one."""
    keeps_messages_as_sent: bool = False
    """Whether the chat template gets messages as transformers gave them before version 5.23."""
    seconds_max: float | None = None
    """Time for reading the body, if less than `seconds_max` of the pool."""
    makes_cache_entry: bool = False
    """Whether to make a cache entry, by which the next turn of the conversation is read faster."""
    makes_outline: bool = True


class ReadResult(NamedTuple):
    """A body as a worker process has read it."""

    parsed_body: ParsedBody
    """The fields by which the request is routed, and the prompt, without ids if it could not be read."""
    is_overdue: bool = False
    """Whether the prompt is missing because reading took too long, or because the process died."""
    cpu_s: float = 0.0
    problem: str | None = None
    """Why the prompt could not be read; None if it was."""


class TemplateTrial(NamedTuple):
    """Result of trying a chat template in a worker process."""

    is_bounded: bool
    """Whether all renderings have kept to the limit on their CPU time."""
    problem: str | None
    """Why conversations must be rendered whole; None if they need not."""


class PromptWorkerPool:
    """The worker processes of one router."""

    def __init__(self, config: PromptWorkerConfig, *, chat_template: str | None) -> None:
        self.config = config
        setup = WorkerState, (chat_template,)
        self.processes = ProcessPool(setup, config.count, config.memory_mb << 20)
        self._tenant_bytes: Counter[str] = Counter()
        """Tenant -> bytes of its bodies that wait or are being read."""
        self.cpu_s = 0.0
        self.counts: Counter[str] = Counter()
        """Outcome -> bodies: read, unread, refused (malformed), full, full_for_tenant, failed."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the bodies that wait or are being read."""
        return self._tenant_bytes.total()

    async def read(self, body: BodyToRead, task: ReadTask) -> ReadResult:
        """Read a body in the next free process, by a task that does not depend on the body. Raises RequestError."""
        async with self.inspect(body) as inspected_body:
            return await inspected_body.read_prompt(task)

    @asynccontextmanager
    async def inspect(self, body: BodyToRead) -> AsyncIterator[InspectedBody]:
        """Have the next free process find the fields by which a body is routed. It has the body until the block ends.

        Raises RequestError for a body that is no JSON object, or that cannot be read now.
        """
        self._check_capacity(body.tenant, body.byte_count)
        self._add_waiting(body.tenant, body.byte_count)
        try:
            async with self.processes.acquire(body.tenant) as process:
                if not body.is_wanted():
                    raise _make_overload_error("the client left")
                yield InspectedBody(self, process, await self._inspect(process, body), body.byte_count)
        finally:
            self._add_waiting(body.tenant, -body.byte_count)

    async def _inspect(self, process: WorkerProcess, body: BodyToRead) -> ParsedBody:
        try:
            arguments = body.pieces, body.kind, body.needs_opening
            parsed_body: ParsedBody = await process.call(START_S_MAX, _inspect_body, *arguments)
            return parsed_body
        except RequestError:
            self.counts["refused"] += 1
            raise
        except WorkerProcessError as error:
            self.record_failure(body.byte_count, error)
            raise _make_overload_error("the body could not be read in time") from None

    def record_failure(self, body_bytes: int, error: WorkerProcessError) -> None:
        self.counts["failed"] += 1
        log.warning("a body of %d bytes could not be read: %s", body_bytes, error)

    async def try_template(self, folder: str, render_s_max: float) -> TemplateTrial:
        """Try a chat template in a process that can be killed. `render_s_max`: CPU time of one rendering.

        If the process dies or takes too long, which may be for want of memory or CPU, the trial is repeated once.
        """
        problem = ""
        for _ in range(TEMPLATE_TRIALS_MAX):
            try:
                async with self.processes.acquire() as process:
                    trial: TemplateTrial = await process.call(START_S_MAX, _try_template, folder, render_s_max)
                    return trial
            except (WorkerProcessError, RequestError) as error:
                problem = f"its trial failed: {error}"
                log.warning("the trial of the chat template in %s failed: %s", folder, error)
                if isinstance(error, RequestError):  # its files cannot be read
                    break
        return TemplateTrial(is_bounded=False, problem=problem)

    def _check_capacity(self, tenant: str, body_bytes: int) -> None:
        """Raise RequestError if a body has no room.

        A tenant with a body already must leave at least as much room free as all of its bodies then take.
        """
        bytes_max = self.config.waiting_mb << 20
        tenant_bytes = self._tenant_bytes[tenant]
        remaining_bytes = bytes_max - (self.waiting_bytes + body_bytes)
        if remaining_bytes < 0:
            self.counts["full"] += 1
            raise _make_overload_error("too many large bodies wait to be read")
        if tenant_bytes and tenant_bytes + body_bytes > remaining_bytes:
            self.counts["full_for_tenant"] += 1
            raise _make_overload_error("too many large bodies of this client wait to be read", status=429)

    def _add_waiting(self, tenant: str, size: int) -> None:
        self._tenant_bytes[tenant] += size
        if not self._tenant_bytes[tenant]:
            del self._tenant_bytes[tenant]

    def check_invariants(self) -> None:
        assert all(count > 0 for count in self._tenant_bytes.values())

    def close_idle(self, now: float) -> None:
        """End processes that were idle for `idle_s`. `now` is `time.monotonic()`."""
        self.processes.close_idle(now - self.config.idle_s)


class InspectedBody(NamedTuple):
    """A body in a worker process, which has found the fields by which it is routed."""

    pool: PromptWorkerPool
    process: WorkerProcess
    parsed_body: ParsedBody
    """The body without its prompt."""
    byte_count: int

    async def read_prompt(self, task: ReadTask) -> ReadResult:
        """Read the prompt, too. If the process fails, the result has none."""
        pool = self.pool
        seconds_max = min(pool.config.seconds_max, task.seconds_max or math.inf)
        try:
            await self.process.call(START_S_MAX, _load_tokenizer, task.checkpoint)
            result: ReadResult = await self.process.call(seconds_max, _run_task, task)
        except WorkerProcessError as error:
            pool.record_failure(self.byte_count, error)
            return ReadResult(self.parsed_body, is_overdue=True)
        pool.cpu_s += result.cpu_s
        pool.counts["read"] += 1
        if result.problem is not None:
            pool.counts["unread"] += 1
            log.debug("a large prompt left to the worker to judge: %s", result.problem)
        return result


def _make_overload_error(message: str, status: int = 503) -> RequestError:
    return RequestError(message, param=None, code="overloaded", status=status)


# In the process -------------------------------------------------------------------------------------------------------


class WorkerState:
    """Tokenizers of a worker process, and the body that it has inspected and is to read."""

    def __init__(self, chat_template: str | None) -> None:
        self.chat_template = chat_template
        self.tokenizers: dict[Checkpoint, Tokenizer | TokenizerError] = {}
        self.body = b""
        self.parsed_body: ParsedBody | None = None
        """The body without its prompt."""


def _try_template(state: WorkerState, folder: str, render_s_max: float) -> TemplateTrial:
    try:
        tokenizer = Tokenizer.load(folder, state.chat_template)
    except TokenizerError as error:
        raise RequestError(str(error), param=None) from error
    template = tokenizer.chat_template
    assert template is not None
    template.seconds_max = render_s_max
    problem = find_trial_problem(BoundaryRenderer(tokenizer))
    return TemplateTrial(template.is_bounded, problem)


def _inspect_body(
    state: WorkerState, pieces: Sequence[bytes], kind: ApiKind | None, needs_opening: bool = False
) -> ParsedBody:
    """Return what routing needs of a body, without a prompt, and keep the body for `_run_task`."""
    body = b"".join(pieces)
    request = read_large_request(body, kind)
    if needs_opening and is_within_bounds(body):
        with suppress(RequestError, ValueError, RecursionError, MemoryError):  # `_run_task` has the same error
            request = request.replace(opening_digest=digest_opening(parse_body(request.kind, body)))
    state.parsed_body = ParsedBody(request, TokenizedPrompt(), spans=locate_fields(body))
    state.body = body
    return state.parsed_body


def _load_tokenizer(state: WorkerState, checkpoint: Checkpoint | None) -> None:
    """Load a tokenizer, if it is not loaded, in place of an earlier one of the same folder."""
    if checkpoint is None or checkpoint in state.tokenizers:
        return
    try:
        tokenizer: Tokenizer | TokenizerError = Tokenizer.load(checkpoint.folder, state.chat_template)
    except TokenizerError as error:
        tokenizer = error
    others = {other: kept for other, kept in state.tokenizers.items() if other.folder != checkpoint.folder}
    state.tokenizers = {**others, checkpoint: tokenizer}


def _run_task(state: WorkerState, task: ReadTask) -> ReadResult:
    """Read the prompt of the body that `_inspect_body` has kept, and forget the body."""
    started_s = time.thread_time()
    body, parsed_body = state.body, state.parsed_body
    state.body, state.parsed_body = b"", None
    assert parsed_body is not None
    problem = None
    try:
        if parsed_body.request.kind != "other":
            _read_prompt(state, task, body, parsed_body)
    except (RequestError, TokenizerError, ValueError, RecursionError, MemoryError) as error:
        problem = f"{type(error).__name__}: {error}"[:300]
    return ReadResult(parsed_body, cpu_s=time.thread_time() - started_s, problem=problem)


def _read_prompt(state: WorkerState, task: ReadTask, body: bytes, parsed_body: ParsedBody) -> None:
    """Set the tokenised prompt of a body in `parsed_body`. Raises RequestError or TokenizerError if that fails."""
    tokenizer = state.tokenizers.get(task.checkpoint) if task.checkpoint else None
    if isinstance(tokenizer, TokenizerError):
        raise tokenizer
    if not is_within_bounds(body):
        raise RequestError("more values than are read here", param=None)
    request = parse_body(parsed_body.request.kind, body)
    renderer = None
    if tokenizer is not None and tokenizer.chat_template is not None:
        tokenizer.chat_template.keeps_messages_as_sent = task.keeps_messages_as_sent
        if task.makes_cache_entry and is_cacheable(request.kind, len(body)):
            renderer = BoundaryRenderer(tokenizer)
    prompt = tokenize_prompt(
        request, tokenizer, task.tokens_max, body=body, renderer=renderer, makes_outline=task.makes_outline,
        remote_model=task.remote_model,
    )  # fmt: skip
    if prompt.token_ids is not None and not isinstance(prompt.token_ids, array):
        prompt.token_ids = array(ID_TYPE, prompt.token_ids)  # smaller than a list when sent to the router
    parsed_body.media = read_media(request, body)
    parsed_body.first_message_digest = digest_first_user_message(request)
    parsed_body.prompt = prompt  # last, so that a prompt with ids has the other facts too
