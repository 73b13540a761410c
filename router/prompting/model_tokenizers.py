"""The tokenizers of the models that workers serve: loaded from folders on this machine, or asked of the workers."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Final, Protocol

import aiohttp
import msgspec

from prompts.chat_rendering import render_chat
from prompts.errors import RequestError
from prompts.routing import RoutingRequest, parse_routing
from prompts.tokenizer import Checkpoint, Tokenizer, TokenizerError, find_checkpoint
from router.http_client import FetchError, fetch
from router.prompting.boundary_rendering import BoundaryRenderer
from router.prompting.conversation_reader import ConversationReader
from router.prompting.encode import build_tokenize_request
from router.prompting.prompt_worker_pool import PromptWorkerPool

log = logging.getLogger("router")

TIMEOUTS_MAX: Final = 3
"""Timeouts of a template in a row after which its model's chats are not read any more."""
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


@dataclass(eq=False)
class LoadedTokenizer:
    """The tokenizer of a base model, and what has been found out about its chat template."""

    tokenizer: Tokenizer
    checkpoint: Checkpoint
    """Files that the tokenizer was loaded from, as they were then."""
    has_render_mode_of_worker: bool = False
    """Whether the template was switched to how a worker renders. Workers that differ later are logged."""
    timeout_count: int = 0
    """How many times in a row worker processes took too long to render the template."""

    @property
    def reads_chats(self) -> bool:
        """Whether chats are still read, and not routed by load alone, as the template took too long."""
        return self.timeout_count < TIMEOUTS_MAX


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

        `worker_pool`: processes that try each chat template first, because one may take forever; without a pool,
        templates are not tried. `conversations`: cache of tokenised conversations, which gets the templates that passed
        the trial. `override` (a folder) and `chat_template` replace the tokenizer and the template of every model.
        """
        self._executor = executor
        self._conversations = conversations
        self._worker_pool = worker_pool
        self._folder_override = override
        self._chat_template = chat_template
        self.remote: RemoteTokenizer | None = None
        """Asks workers for token ids if a model's tokenizer is not on this machine; None: they are not asked."""

        self.loaded_by_model: dict[str, LoadedTokenizer] = {}
        self.problems: dict[str, str] = {}
        """Model -> why there is no tokenizer for it, or why its chats are not read; shown by `/workers`."""
        self._load_tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        """(model, folder) -> task that is loading the tokenizer, so that each is loaded once."""

    def get(self, model: str) -> Tokenizer | None:
        """Return the tokenizer of a base model, if it is loaded."""
        loaded = self.loaded_by_model.get(model)
        return None if loaded is None else loaded.tokenizer

    def record_rendering(self, model: str, *, is_overdue: bool) -> None:
        """Record whether a worker process took too long to render a template, and report a problem at the limit."""
        loaded = self.loaded_by_model.get(model)
        if loaded is None:  # its files were replaced meanwhile
            return
        loaded.timeout_count = loaded.timeout_count + 1 if is_overdue else 0
        if loaded.timeout_count == TIMEOUTS_MAX:
            problem = "its chat template takes too long; chats are routed by load alone"
            self.problems[model] = problem
            log.warning("model %s: %s", model, problem)

    def is_remote(self, model: str) -> bool:
        """Whether prompts of a base model are tokenised by workers and not by this process."""
        return self.remote is not None and model not in self.loaded_by_model and self.remote.has_worker(model)

    def remove_worker(self, url: str) -> None:
        """Ask a worker that has left for no more token ids."""
        if self.remote is not None:
            self.remote.remove_worker(url)

    def is_replaced(self, model: str, checkpoint: Checkpoint) -> bool:
        """Whether a base model's tokenizer is of another checkpoint, and the command line did not name its folder."""
        loaded = self.loaded_by_model.get(model)
        return self._folder_override is None and loaded is not None and loaded.checkpoint != checkpoint

    def forget(self, model: str) -> None:
        """Drop a base model's tokenizer and the conversations that it has read, as its workers now have another one."""
        self.loaded_by_model.pop(model, None)
        self._conversations.forget(model)

    async def discover(self, model: str, path: str | None, worker: RemoteWorker) -> None:
        """Load the tokenizer of a base model, or else find out whether the worker can tokenise prompts for this router.

        `path`: folder in which the worker has the tokenizer; the folder of the command line takes precedence. If the
        tokenizer cannot be loaded here, the reason is stored in `problems`.
        """
        folder = self._folder_override or path
        if folder is not None and model not in self.loaded_by_model:
            await asyncio.shield(self._begin_load(model, folder))
        loaded = self.loaded_by_model.get(model)
        if loaded is not None:
            await self._detect_render_mode(model, loaded, worker)
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
        """Load a base model's tokenizer, and try its template. `name`: folder, or name in the Hugging Face cache."""
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
        self.loaded_by_model[model] = LoadedTokenizer(tokenizer, checkpoint)
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

    async def _detect_render_mode(self, model: str, loaded: LoadedTokenizer, worker: RemoteWorker) -> None:
        """Compare a chat's token ids with a worker's, to learn whether its transformers is older than version 5.23.

        From that version on, templates get messages without nulls, and reasoning under all its names. The first worker
        that does otherwise decides for all workers of the model.
        """
        template = loaded.tokenizer.chat_template
        if self.remote is None or not worker.url or template is None or not template.is_bounded:
            return
        request = parse_routing("/v1/chat/completions", _PROBE_CHAT)
        ids_as_sent, ids_changed = (_encode_probe(loaded.tokenizer, request, as_sent=mode) for mode in (True, False))
        if ids_as_sent is None or ids_changed is None or ids_as_sent == ids_changed:
            return  # with this template, both versions give the same ids
        tokenize_request = build_tokenize_request(request, model)
        assert tokenize_request is not None
        worker_ids = await self.remote.tokenize_at(worker, tokenize_request)
        router_ids = ids_as_sent if template.keeps_messages_as_sent else ids_changed
        if worker_ids is None or worker_ids == router_ids:
            return
        if worker_ids not in (ids_as_sent, ids_changed) or loaded.has_render_mode_of_worker:
            log.warning("worker %s renders chats with reasoning otherwise than this router", worker.url)
            return
        template.keeps_messages_as_sent = not template.keeps_messages_as_sent
        loaded.has_render_mode_of_worker = True
        log.info("chats of %s are rendered as transformers before 5.23 does, as %s does", model, worker.url)


def _encode_probe(tokenizer: Tokenizer, request: RoutingRequest, *, as_sent: bool) -> list[int] | None:
    """Return the token ids of the probe chat, with its messages kept as sent or not; None if that fails."""
    assert tokenizer.chat_template is not None
    template = copy.copy(tokenizer.chat_template)
    template.keeps_messages_as_sent = as_sent
    try:
        return tokenizer.encode(render_chat(template, request), add_special_tokens=False)
    except RequestError:
        return None
    finally:
        tokenizer.chat_template.is_bounded = template.is_bounded
