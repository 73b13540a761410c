"""The tokenizers of the models that workers serve: loaded from folders on this machine, or asked of the workers."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from itertools import count
from typing import Annotated, Final, Protocol

import aiohttp
import msgspec

from prompts.chat_rendering import render_chat
from prompts.chat_template import ChatTemplate
from prompts.errors import RequestError
from prompts.routing import RoutingRequest, parse_routing
from prompts.tokenizer import Checkpoint, Tokenizer, TokenizerError, find_checkpoint
from router.http_client import FetchError, fetch
from router.prompting.boundary_rendering import BoundaryRenderer
from router.prompting.conversation_reader import ConversationReader
from router.prompting.encode import build_tokenize_request
from router.prompting.prompt_worker_pool import PromptWorkerPool

log = logging.getLogger("router")

RENDER_S_MAX: Final = 0.1
"""CPU time of a chat template in this process, where other requests wait for it; most take a millisecond."""
_PROBE_CHAT: Final = b"""{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b",
"reasoning": "c", "tool_calls": [{"type": "function", "function": {"name": "d", "arguments": "{}"}}]},
{"role": "user", "content": "e"}]}"""
"""A chat that versions of transformers render in two ways: 5.23 and later change messages, older ones keep them."""


RESPONSE_S_MAX = 2.0
RESPONSE_BYTES_MAX = 16 << 20
"""A million ids of ten digits and more."""
RESPONSE_BYTES_PER_BYTE = 16
"""Bytes of a response for each byte of a request: a prompt has no more tokens than bytes, besides its template's."""
TEMPLATE_BYTES = 1 << 16
"""Bytes of a prompt that a template may add."""


class _TokenizeResponse(msgspec.Struct):
    tokens: list[Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]]


class RemoteWorker(Protocol):
    """A worker that may be asked for token ids."""

    @property
    def worker_id(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def sends_api_key(self) -> bool:
        """Whether requests to this worker may have the workers' API key."""


class RemoteTokenizer:
    """Asks workers for the token ids of prompts: `POST /tokenize`, as vLLM and our engine answer it.

    That costs a round trip with the whole prompt, and the worker tokenises the prompt twice. So it is the last resort
    before routing by load alone. It is bounded in time and memory, and a failure of a worker never raises.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        headers: dict[str, str] | None = None,
        *,
        is_serving: Callable[[RemoteWorker, str], bool] = lambda worker, model: True,
    ) -> None:
        """`headers`: sent to workers that may have the workers' API key.

        `is_serving`: whether a worker is up and serves a base model now; others are not asked.
        """
        self._session = session
        self._headers = headers or {}
        self._is_serving = is_serving
        self._workers_by_model: dict[str, dict[str, RemoteWorker]] = {}
        """Base model -> URL -> worker that answered a request for token ids."""
        self._round_robin = count()

    def has_worker(self, model: str) -> bool:
        """Whether a worker tokenises for a base model."""
        return bool(self._workers_by_model.get(model))

    async def probe(self, model: str, worker: RemoteWorker) -> bool:
        """Find out whether a worker tokenises for a base model."""
        token_ids = await self.tokenize_at(worker, msgspec.json.encode({"model": model, "prompt": "a"}))
        workers = self._workers_by_model.setdefault(model, {})
        if token_ids or worker.url in workers:
            workers[worker.url] = worker
        return bool(token_ids)

    async def tokenize(self, request_body: bytes, model: str) -> Sequence[int] | None:
        """Return the token ids for a body of `build_tokenize_request` from the next worker that serves a base model."""
        workers = [*self._workers_by_model.get(model, {}).values()]
        for _ in workers:
            worker = workers[next(self._round_robin) % len(workers)]
            if self._is_serving(worker, model):
                return await self.tokenize_at(worker, request_body)
        return None

    def remove_worker(self, url: str) -> None:
        """Ask this worker no more."""
        for workers in self._workers_by_model.values():
            workers.pop(url, None)

    async def tokenize_at(self, worker: RemoteWorker, request_body: bytes) -> list[int] | None:
        """Send a `/tokenize` request to a worker; return the token ids, or None for any failure of the worker."""
        key_headers = self._headers if worker.sends_api_key else {}
        expected_bytes_max = RESPONSE_BYTES_PER_BYTE * (len(request_body) + TEMPLATE_BYTES)
        try:
            status, response_body = await fetch(
                self._session,
                f"{worker.url}/tokenize",
                method="POST",
                headers={**key_headers, "Content-Type": "application/json"},
                data=request_body,
                seconds=RESPONSE_S_MAX,
                bytes_max=min(RESPONSE_BYTES_MAX, expected_bytes_max),
            )
            if status != 200:
                return None
            return msgspec.json.decode(response_body, type=_TokenizeResponse).tokens
        except (FetchError, ValueError, RecursionError) as error:
            log.debug("%s/tokenize: %s", worker.url, error)
            return None


class ModelTokenizers:
    """Tokenizers by base model. Loads them in threads, as a large vocabulary takes a second."""

    def __init__(
        self,
        executor: Executor,
        conversations: ConversationReader,
        worker_pool: PromptWorkerPool | None,
        *,
        override: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        """Make an empty collection; `discover` loads tokenizers into it, in threads of `executor`.

        `conversations`: cache that is told which chat templates it may use. `worker_pool`: processes that try each
        template first; without a pool, templates are not tried and have no time limit. `override`: folder of every
        model's tokenizer. `chat_template`: replaces every model's template.
        """
        self._executor = executor
        self._conversations = conversations
        self._worker_pool = worker_pool
        self._folder_override = override
        self._chat_template = chat_template
        self.remote: RemoteTokenizer | None = None
        """Asks workers for token ids if the tokenizer of a model is not on this machine."""

        self.tokenizer_by_model: dict[str, Tokenizer] = {}
        self.checkpoint_by_model: dict[str, Checkpoint] = {}
        """Files that the tokenizers were loaded from, as they were then."""
        self.problems: dict[str, str] = {}
        """Model -> why there is no tokenizer for it, or why its chats are not read; shown by `/workers`."""
        self._load_tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        """(model, folder) -> task that loads the tokenizer."""
        self._compared_models: set[str] = set()
        """Models with a template that was switched to how a worker renders. Workers that differ later are logged."""

    def get(self, model: str) -> Tokenizer | None:
        """Return the tokenizer of a base model, if it is loaded."""
        return self.tokenizer_by_model.get(model)

    def get_template(self, model: str) -> ChatTemplate | None:
        """Return the chat template of a base model, if its tokenizer is loaded and has one."""
        tokenizer = self.tokenizer_by_model.get(model)
        return None if tokenizer is None else tokenizer.chat_template

    def is_remote(self, model: str) -> bool:
        """Whether prompts of a base model are tokenised by workers and not by this process."""
        return self.remote is not None and model not in self.tokenizer_by_model and self.remote.has_worker(model)

    def remove_worker(self, url: str) -> None:
        """Ask a worker that has left for no more token ids."""
        if self.remote is not None:
            self.remote.remove_worker(url)

    def is_replaced(self, model: str, checkpoint: Checkpoint) -> bool:
        """Whether a base model's tokenizer is of another checkpoint, and the command line did not name its folder."""
        loaded = self.checkpoint_by_model.get(model)
        return self._folder_override is None and loaded is not None and loaded != checkpoint

    def forget(self, model: str) -> None:
        """Drop a base model's tokenizer and the conversations that it has read, as its workers now have another one."""
        self.tokenizer_by_model.pop(model, None)
        self.checkpoint_by_model.pop(model, None)
        self._compared_models.discard(model)
        self._conversations.forget(model)

    async def discover(self, model: str, path: str | None, worker: RemoteWorker) -> None:
        """Load the tokenizer of a base model, or else find out whether the worker can tokenise prompts for this router.

        `path`: folder in which the worker has the tokenizer; the folder of the command line takes precedence. If the
        tokenizer cannot be loaded here, the reason is stored in `problems`.
        """
        folder = self._folder_override or path
        if folder is not None and model not in self.tokenizer_by_model:
            await asyncio.shield(self._begin_load(model, folder))
        if model in self.tokenizer_by_model:
            await self._detect_render_mode(model, worker)
            return
        if folder is None:
            self.problems[model] = "the worker names no local folder; give --tokenizer PATH"
        if self.remote is not None and worker.url and await self.remote.probe(model, worker):
            reason = self.problems[model].partition("; give")[0]
            self.problems[model] = f"{reason}; workers are asked (/tokenize), give --tokenizer PATH to save the way"

    def _begin_load(self, model: str, folder: str) -> asyncio.Task[None]:
        """Return the task that loads a tokenizer; start it if there is none."""
        task = self._load_tasks.get((model, folder))
        if task is None:
            task = asyncio.create_task(self._load(model, folder))
            self._load_tasks[model, folder] = task
            task.add_done_callback(lambda _: self._load_tasks.pop((model, folder), None))
        return task

    async def _load(self, model: str, name: str) -> None:
        """Load the tokenizer of a base model in a thread, and try its chat template in a worker process.

        `name` is a folder, or a name in the Hugging Face cache. The reason of a failure is stored in `problems`.
        """
        checkpoint = find_checkpoint(name)
        if checkpoint is None:
            self.problems[model] = f"{name} is not a folder on this machine; give --tokenizer PATH"
            return
        loop = asyncio.get_running_loop()
        try:
            tokenizer = await loop.run_in_executor(
                self._executor, Tokenizer.load, checkpoint.folder, self._chat_template
            )
        except TokenizerError as error:
            self.problems[model] = str(error)
            log.warning("no tokenizer for %s: %s", model, error)
            return
        await self._try_template(model, tokenizer, checkpoint.folder)
        self.tokenizer_by_model[model] = tokenizer
        self.checkpoint_by_model[model] = checkpoint
        self.problems.pop(model, None)
        log.info("tokenizer of %s read from %s", model, checkpoint.folder)

    async def _try_template(self, model: str, tokenizer: Tokenizer, folder: str) -> None:
        """Try a model's chat template in a worker process, to decide where chats are rendered and if they are cached.

        A template that exceeds its time limit is rendered by worker processes from now on. Conversations are cached if
        continuing from cached token ids gave the same ids in the trial as reading whole prompts.
        """
        template = tokenizer.chat_template
        if self._worker_pool is None or template is None:
            return
        template.seconds_max = RENDER_S_MAX
        trial = await self._worker_pool.try_template(folder, RENDER_S_MAX)
        template.is_bounded = trial.is_bounded
        if not trial.is_bounded:
            log.info("chats of %s are rendered by worker processes: its template might take long", model)
            return
        if self._conversations.cache.max_bytes == 0:
            return
        if trial.problem is None:
            self._conversations.allow(model, BoundaryRenderer(tokenizer))
        else:
            self._conversations.forbid(model, trial.problem)
            log.info("conversations of %s are read whole: %s", model, trial.problem)

    async def _detect_render_mode(self, model: str, worker: RemoteWorker) -> None:
        """Compare a chat's token ids with a worker's, to learn whether its transformers is older than version 5.23.

        From that version on, templates get messages without nulls, and reasoning under all its names. The first worker
        that does otherwise decides for all workers of the model.
        """
        template = self.get_template(model)
        request = parse_routing("/v1/chat/completions", _PROBE_CHAT)
        tokenize_request = build_tokenize_request(request, model)
        if self.remote is None or template is None or tokenize_request is None:
            return
        if not worker.url or not template.is_bounded:
            return
        new_ids = self._encode_probe(model, template, request, as_sent=False)
        old_ids = self._encode_probe(model, template, request, as_sent=True)
        if new_ids is None or old_ids is None or new_ids == old_ids:
            return  # with this template, both versions give the same ids
        worker_ids = await self.remote.tokenize_at(worker, tokenize_request)
        router_ids = old_ids if template.keeps_messages_as_sent else new_ids
        if worker_ids is None or worker_ids == router_ids:
            return
        if worker_ids not in (old_ids, new_ids) or model in self._compared_models:
            log.warning("worker %s renders chats with reasoning otherwise than this router", worker.url)
            return
        template.keeps_messages_as_sent = worker_ids == old_ids
        self._compared_models.add(model)
        log.info("chats of %s are rendered as transformers before 5.23 does, as %s does", model, worker.url)

    def _encode_probe(
        self, model: str, template: ChatTemplate, request: RoutingRequest, *, as_sent: bool
    ) -> list[int] | None:
        """Return the token ids of the probe chat, with its messages kept as sent or not; None if that fails."""
        template_copy = copy.copy(template)
        template_copy.keeps_messages_as_sent = as_sent
        try:
            text = render_chat(template_copy, request)
            return self.tokenizer_by_model[model].encode(text, add_special_tokens=False)
        except RequestError:
            return None
        finally:
            template.is_bounded = template_copy.is_bounded
