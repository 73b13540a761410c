"""Which tokenizer a model has here, and a request's prompt as token ids.

Owns loading (in threads: a vocabulary takes a second to read) and the choice between encoding at once, in a thread, in
a worker process, or by an engine.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TypeVar

import msgspec

from prompts.chat_rendering import render_chat
from prompts.chat_template import ChatTemplate
from prompts.errors import RequestError
from prompts.routing import ApiKind, RoutingRequest, parse_routing
from prompts.segments import CACHE_BYTES_DEFAULT, SegmentStats
from prompts.tokenizer import Tokenizer, TokenizerError
from router.prompting.conversation_cache import CachedConversation, Checkpoint
from router.prompting.conversation_suffix import (
    SuffixResult,
    advance_conversation,
    cache_conversation,
    extend,
    is_cacheable,
)
from router.prompting.encode import (
    PromptSize,
    build_tokenize_request,
    count_further_tokens,
    measure_prompts,
    read_prompt,
    truncate_prompt,
)
from router.prompting.prompt_worker_pool import PromptWorkerPool, ReadTask
from router.prompting.remote import RemoteTokenizer, RemoteWorker

log = logging.getLogger("router")

INLINE_BYTES_MAX = 8192
"""Bodies, or what is new of them, up to this size are encoded on the event loop: a thread would cost more."""
_PROBE_CHAT = b"""{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning":
"c", "tool_calls": [{"type": "function", "function": {"name": "d", "arguments": "{}"}}]},
{"role": "user", "content": "e"}]}"""
"""A chat that versions of transformers can render in two ways."""
RENDER_S_MAX = 0.1
"""CPU time of a chat template on a body of 64 KiB, where others wait for it; most take a millisecond."""
WORKER_RENDER_S_MAX = 1.0
"""The same in a helper process, where nobody else waits."""
TIMEOUTS_MAX = 3
"""Renderings that are ended, one after the other, before a template is given up."""
CPU_SAMPLE = 16
"""One prompt in so many has its CPU time taken: reading that clock is a system call."""

T = TypeVar("T")


class TokenizedPrompt(msgspec.Struct, eq=False):
    """A tokenised prompt."""

    token_ids: Sequence[int] | None
    """Ids of the prompt; None where they cannot be had."""
    seconds: float
    """Time that reading the prompt took."""
    conversation: CachedConversation | None = None
    """The conversation to be cached, for when it returns."""
    predecessor: CachedConversation | None = None
    """The cached conversation that it replaces."""
    size: PromptSize | None = None
    """Size of all prompts of the body; None where `token_ids` is."""


class PromptReader:
    """model -> tokenizer, and prompts -> token ids. One per process; reading is thread-safe."""

    def __init__(
        self,
        executor: Executor,
        *,
        override: str | None = None,
        chat_template: str | None = None,
        cache_bytes: int = CACHE_BYTES_DEFAULT,
        render_s_max: float | None = RENDER_S_MAX,
    ) -> None:
        """`render_s_max`: for a chat template here; None where nobody waits for it."""
        self._executor = executor
        self._render_s_max = render_s_max
        self._cache_bytes = cache_bytes
        self.remote: RemoteTokenizer | None = None
        """Whom to ask for ids of models that have no tokenizer here; None asks nobody."""
        self.worker_pool: PromptWorkerPool | None = None
        """Processes that render templates which are not bounded."""
        self._timeouts: dict[str, int] = {}
        """model -> renderings ended one after the other."""
        self._folder_override = override
        """A folder given on the command line, used for every model."""
        self._chat_template = chat_template
        self._tokenizers: dict[str, Tokenizer] = {}
        self._loading: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._reads = 0
        self.cpu_s = 0.0
        """CPU time of rendering and encoding, estimated from a sample."""
        self.failure_count = 0
        """Prompts that raised what they should not."""
        self._folders: dict[str, str] = {}
        """model -> where its tokenizer was read from."""
        self._compared_models: set[str] = set()
        """Models of which a worker has shown that it renders another way than it was taken to."""
        self.problems: dict[str, str] = {}
        """model -> why there is no tokenizer for it; shown by `/workers`."""

    def tokenizer_of(self, model: str) -> Tokenizer | None:
        return self._tokenizers.get(model)

    def cache_stats(self) -> dict[str, SegmentStats]:
        """model -> counters of its segment cache, where it has one."""
        stats_by_model = {model: tokenizer.cache_stats() for model, tokenizer in self._tokenizers.items()}
        return {model: stats for model, stats in stats_by_model.items() if stats is not None}

    async def discover_tokenizer(self, model: str, path: str | None, worker: RemoteWorker) -> None:
        """Load the tokenizer of a base model: from the command line's folder, from where the worker has it,
        or else find out whether that worker can be asked."""
        folder = self._folder_override or path
        if folder is not None and model not in self._tokenizers:
            task = self._loading.get((model, folder))
            if task is None:
                task = self._loading[model, folder] = asyncio.create_task(self._load(model, folder))
                task.add_done_callback(lambda _: self._loading.pop((model, folder), None))
            await asyncio.shield(task)
        if model in self._tokenizers:
            await self._detect_render_mode(model, worker)
            return
        if folder is None:
            self.problems[model] = "the worker names no local folder; give --tokenizer PATH"
        if (
            self.remote is not None
            and worker.url
            and await self.remote.probe(model, worker.url, sends_api_key=worker.sends_api_key)
        ):
            reason = self.problems[model].partition("; give")[0]
            self.problems[model] = f"{reason}; workers are asked (/tokenize), give --tokenizer PATH to save the way"

    async def _detect_render_mode(self, model: str, worker: RemoteWorker) -> None:
        """Find out how the worker's version of transformers renders chats, where that makes a difference to this
        model's template: the newest way is taken for it until a worker shows the other."""
        tokenizer = self._tokenizers[model]
        template, request = tokenizer.chat_template, parse_routing("/v1/chat/completions", _PROBE_CHAT)
        tokenize_request = build_tokenize_request(request, model)
        if self.remote is None or template is None or tokenize_request is None or not worker.url:
            return
        ids_by_mode: dict[bool, Sequence[int]] = {}
        for mode in (False, True):
            ids = await self._render_probe(model, tokenizer, template, mode)
            if ids is None:
                return
            ids_by_mode[mode] = ids
        if ids_by_mode[True] == ids_by_mode[False]:
            return
        worker_ids = await self.remote.tokenize_at(worker.url, tokenize_request, sends_api_key=worker.sends_api_key)
        as_sent = next((mode for mode, ids in ids_by_mode.items() if list(ids) == worker_ids), None)
        if worker_ids is None or as_sent == template.keeps_messages_as_sent:
            return
        if as_sent is None or model in self._compared_models:
            log.warning("worker %s renders chats with reasoning otherwise than this router", worker.url)
            return
        template.keeps_messages_as_sent = as_sent
        self._compared_models.add(model)
        log.info("chats of %s are rendered as transformers before 5.23 does, as %s does", model, worker.url)

    async def _render_probe(
        self, model: str, tokenizer: Tokenizer, template: ChatTemplate, as_sent: bool
    ) -> Sequence[int] | None:
        """The ids of a chat that can be rendered in two ways, in one of them; None where that fails."""
        if not template.is_bounded:
            task = self.make_task(model, "chat", None)
            task.as_sent = as_sent
            return (await self.read_in_worker((_PROBE_CHAT,), model, task)).token_ids
        template_copy = copy.copy(template)
        template_copy.keeps_messages_as_sent = as_sent
        try:
            return tokenizer.encode(
                render_chat(template_copy, parse_routing("/v1/chat/completions", _PROBE_CHAT)), add_special_tokens=False
            )
        except RequestError:
            return None
        finally:
            template.is_bounded = template_copy.is_bounded

    def needs_worker_process(self, model: str, request: RoutingRequest) -> bool:
        """Whether reading this prompt takes a chat template which is not bounded."""
        tokenizer = self._tokenizers.get(model)
        template = None if tokenizer is None else tokenizer.chat_template
        is_chat = request.kind == "chat" or request.source is not None
        return is_chat and template is not None and not template.is_bounded

    async def read_in_worker(
        self,
        body: Sequence[bytes],
        model: str,
        task: ReadTask,
        is_wanted: Callable[[], bool] = lambda: True,
        tenant: str = "",
    ) -> TokenizedPrompt:
        """Read a light body in a worker process, which ends a template that takes too long."""
        started_s, timeouts = time.perf_counter(), self._timeouts.get(model, 0)
        if self.worker_pool is None or timeouts >= TIMEOUTS_MAX:
            return TokenizedPrompt(None, 0.0)
        task.seconds_max = WORKER_RENDER_S_MAX
        try:
            _, _, result = await self.worker_pool.read(body, task.kind, lambda _: task, is_wanted, tenant)
        except RequestError as error:  # there is no room, or nobody waits any more
            log.debug("a prompt was not read: %s", error.message)
            return TokenizedPrompt(None, time.perf_counter() - started_s)
        self._timeouts[model] = timeouts = timeouts + 1 if result.is_overdue else 0
        if timeouts == TIMEOUTS_MAX:
            self.problems[model] = "its chat template takes too long; chats are routed by load alone"
            log.warning("model %s: %s", model, self.problems[model])
        ids = None if isinstance(result.result, bytes) else result.result
        return TokenizedPrompt(ids, time.perf_counter() - started_s, size=result.size)

    def forget_worker(self, url: str) -> None:
        """A worker is gone."""
        if self.remote is not None:
            self.remote.forget(url)

    def uses_remote_tokenizer(self, model: str) -> bool:
        """Whether prompts of this base model are read by an engine (`read_remotely`) and not here."""
        return self.remote is not None and model not in self._tokenizers and self.remote.has_worker(model)

    async def read_remotely(self, request: RoutingRequest, model: str, tokens_max: int | None) -> TokenizedPrompt:
        """Have an engine tokenise a prompt. Ids that the request brings itself are taken as they are."""
        read = self.read(request, None, tokens_max)
        if read.token_ids is not None or self.remote is None:
            return read
        ids, took_s = await self.remote.tokenize(build_tokenize_request(request, model), model)
        size = measure_prompts(ids, request, tokens_max, count_further_tokens(request, None))
        return TokenizedPrompt(truncate_prompt(ids, request, tokens_max), took_s, size=size)

    async def _load(self, model: str, name: str) -> None:
        folder = checkpoint_folder(name)
        if folder is None:
            self.problems[model] = f"{name} is not a folder on this machine; give --tokenizer PATH"
            return
        loop = asyncio.get_running_loop()
        try:
            tokenizer = await loop.run_in_executor(
                self._executor,
                lambda: self._read_folder(folder),
            )
        except TokenizerError as error:
            self.problems[model] = str(error)
            log.warning("no tokenizer for %s: %s", model, error)
            return
        self._tokenizers[model], self._folders[model] = tokenizer, str(folder)
        self._timeouts.pop(model, None)
        self.problems.pop(model, None)
        log.info("tokenizer of %s read from %s", model, folder)
        if tokenizer.chat_template is not None and not tokenizer.chat_template.is_bounded:
            log.info("chats of %s are rendered by worker processes: its template might take long", model)

    def _read_folder(self, folder: Path) -> Tokenizer:
        tokenizer = Tokenizer.load(folder, self._chat_template, cache_bytes=self._cache_bytes)
        if self._render_s_max is not None and tokenizer.chat_template is not None:
            tokenizer.chat_template.set_time_limit(self._render_s_max)
        return tokenizer

    def read(
        self, request: RoutingRequest, tokenizer: Tokenizer | None, tokens_max: int | None = None, body: bytes = b""
    ) -> TokenizedPrompt:
        """Tokenise the prompt to route on. `body`: to be cached for when it returns. Thread-safe; raises nothing."""

        def work() -> TokenizedPrompt:
            prompt = read_prompt(request, tokenizer, tokens_max)
            conversation = (
                cache_conversation(request, body, prompt, tokenizer) if is_cacheable(request.kind, len(body)) else None
            )
            further_tokens = count_further_tokens(request, tokenizer)
            size = measure_prompts(prompt.token_ids, request, tokens_max, further_tokens, is_exact=prompt.is_whole)
            return TokenizedPrompt(truncate_prompt(prompt.token_ids, request, tokens_max), 0.0, conversation, size=size)

        tokens, took_s = self._run_timed(work)
        read = TokenizedPrompt(None, took_s) if tokens is None else tokens
        read.seconds = took_s
        return read

    def read_suffix(
        self,
        conversation: CachedConversation,
        checkpoint: Checkpoint,
        body: bytes,
        tokenizer: Tokenizer,
        tokens_max: int | None,
    ) -> tuple[SuffixResult, TokenizedPrompt] | None:
        """Read the suffix of a body with a cached prefix. None where the whole body must be read."""

        def work() -> tuple[SuffixResult, TokenizedPrompt] | None:
            result = extend(conversation, checkpoint, body, tokenizer, tokens_max)
            if result is None:
                return None
            request = result.suffix.request
            ids = truncate_prompt(result.token_ids, request, tokens_max)
            size = measure_prompts(result.token_ids, request, tokens_max)
            successor = advance_conversation(result, body, tokenizer)
            predecessor = conversation if checkpoint is conversation.checkpoints[-1] else None
            return result, TokenizedPrompt(ids, 0.0, successor, predecessor, size)

        suffix, took_s = self._run_timed(work)
        if suffix is not None:
            suffix[1].seconds = took_s
        return suffix

    def _run_timed(self, work: Callable[[], T]) -> tuple[T | None, float]:
        """Return the result of `work`, None where it raises, and the seconds that it took."""
        self._reads += 1
        is_sampled = self._reads % CPU_SAMPLE == 0
        cpu_started_s = time.thread_time() if is_sampled else 0.0
        started_s = time.perf_counter()
        result = None
        try:
            result = work()
        except RequestError as refused:
            log.debug("prompt left to the worker to judge: %s", refused.message)
        except Exception as error:  # noqa: BLE001  a client's text in a model's template: anything can come of it
            self.failure_count += 1
            log.debug("a prompt could not be read: %s: %s", type(error).__name__, error)
        took_s = time.perf_counter() - started_s
        if is_sampled:
            self.cpu_s += CPU_SAMPLE * (time.thread_time() - cpu_started_s)
        return result, took_s

    def run_in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run `work` in a thread."""
        return asyncio.get_running_loop().run_in_executor(self._executor, work)

    def make_task(self, model: str, kind: ApiKind, tokens_max: int | None) -> ReadTask:
        """Return how a worker process is to read a body for this base model."""
        remote_model = model if self.uses_remote_tokenizer(model) else None
        tokenizer = self._tokenizers.get(model)
        template = tokenizer.chat_template if tokenizer is not None else None
        as_sent = template is not None and template.keeps_messages_as_sent
        folder = self._folders.get(model)
        if kind != "completion" and self._timeouts.get(model, 0) >= TIMEOUTS_MAX:
            folder = None
        return ReadTask(kind, folder, tokens_max, remote_model, as_sent)


def checkpoint_folder(name: str) -> Path | None:
    """Where the files of a checkpoint are on this machine: a folder, or a name in the Hugging Face cache."""
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return path
    except (OSError, RuntimeError, ValueError):  # a name too long, a home of nobody, a zero byte
        return None
    home = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface")) / "hub"
    repository = Path(home).expanduser() / f"models--{name.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    snapshot = repository / "snapshots" / revision
    return snapshot if snapshot.is_dir() else None
