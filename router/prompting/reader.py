"""Which tokenizer a model has here, and a request's prompt as token ids.

Owns loading (in threads: a vocabulary takes a second to read) and the choice between encoding at once, in a thread, in
a helper process, or by asking a worker.
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
from prompts.routing import Kind, RoutingRequest, parse_routing
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
from router.prompting.encode import PromptSize, cut, further_tokens, measure, question, read_prompt
from router.prompting.prompt_worker_pool import PromptWorkerPool, ReadTask
from router.prompting.remote import RemoteTokenizer, RemoteWorker

log = logging.getLogger("router")

INLINE_BYTES_MAX = 8192
"""Bodies, or what is new of them, up to this size are encoded on the event loop: a thread would cost more."""
_REASONED = b"""{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning": "c",
"tool_calls": [{"type": "function", "function": {"name": "d", "arguments": "{}"}}]},
{"role": "user", "content": "e"}]}"""
"""A chat that versions of transformers can render in two ways."""
RENDER_S_MAX = 0.1
"""CPU time of a chat template on a body of 64 KiB, where others wait for it; most take a millisecond."""
APART_S_MAX = 1.0
"""The same in a helper process, where nobody else waits."""
OVERDUE_MAX = 3
"""Renderings that are ended, one after the other, before a template is given up."""
CPU_SAMPLE = 16
"""One prompt in so many has its CPU time taken: reading that clock is a system call."""

T = TypeVar("T")


class PromptRead(msgspec.Struct, eq=False):
    """A prompt."""

    ids: Sequence[int] | None
    """None where they cannot be had."""
    seconds: float
    """That reading it took."""
    known: CachedConversation | None = None
    """What is to be kept of it, for when it returns."""
    instead: CachedConversation | None = None
    """Of this one."""
    size: PromptSize | None = None
    """Of all prompts of the body; None where `ids` is."""


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
        self._overdue: dict[str, int] = {}
        """model -> renderings ended one after the other."""
        self._override = override
        """A folder given on the command line, used for every model."""
        self._chat_template = chat_template
        self._tokenizers: dict[str, Tokenizer] = {}
        self._loading: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._reads = 0
        self.cpu_s = 0.0
        """CPU time of rendering and encoding, estimated from a sample."""
        self.failed = 0
        """Prompts that raised what they should not."""
        self._folders: dict[str, str] = {}
        """model -> where its tokenizer was read from."""
        self._compared: set[str] = set()
        """Models of which a worker has shown that it renders another way than it was taken to."""
        self.problems: dict[str, str] = {}
        """model -> why there is no tokenizer for it; shown by `/workers`."""

    def get(self, model: str) -> Tokenizer | None:
        return self._tokenizers.get(model)

    def cache_stats(self) -> dict[str, SegmentStats]:
        """model -> counters of its segment cache, where it has one."""
        found = {model: tokenizer.cache_stats() for model, tokenizer in self._tokenizers.items()}
        return {model: stats for model, stats in found.items() if stats is not None}

    async def learn(self, model: str, path: str | None, worker: RemoteWorker) -> None:
        """Load the tokenizer of a base model: from the command line's folder, from where the worker has it,
        or else find out whether that worker can be asked."""
        folder = self._override or path
        if folder is not None and model not in self._tokenizers:
            task = self._loading.get((model, folder))
            if task is None:
                task = self._loading[model, folder] = asyncio.create_task(self._load(model, folder))
                task.add_done_callback(lambda _: self._loading.pop((model, folder), None))
            await asyncio.shield(task)
        if model in self._tokenizers:
            await self._compare(model, worker)
            return
        if folder is None:
            self.problems[model] = "the worker names no local folder; give --tokenizer PATH"
        if self.remote is not None and worker.url and await self.remote.learn(model, worker.url, keyed=worker.keyed):
            reason = self.problems[model].partition("; give")[0]
            self.problems[model] = f"{reason}; workers are asked (/tokenize), give --tokenizer PATH to save the way"

    async def _compare(self, model: str, worker: RemoteWorker) -> None:
        """Find out how the worker's version of transformers renders chats, where that makes a difference to this
        model's template: the newest way is taken for it until a worker shows the other."""
        tokenizer = self._tokenizers[model]
        template, parsed = tokenizer.chat_template, parse_routing("/v1/chat/completions", _REASONED)
        asked = question(parsed, model)
        if self.remote is None or template is None or asked is None or not worker.url:
            return
        found: dict[bool, Sequence[int]] = {}
        for way in (False, True):
            ids = await self._render(model, tokenizer, template, way)
            if ids is None:
                return
            found[way] = ids
        if found[True] == found[False]:
            return
        told = await self.remote.of(worker.url, asked, keyed=worker.keyed)
        as_sent = next((way for way, ids in found.items() if list(ids) == told), None)
        if told is None or as_sent == template.as_sent:
            return
        if as_sent is None or model in self._compared:
            log.warning("worker %s renders chats with reasoning otherwise than this router", worker.url)
            return
        template.as_sent = as_sent
        self._compared.add(model)
        log.info("chats of %s are rendered as transformers before 5.23 does, as %s does", model, worker.url)

    async def _render(
        self, model: str, tokenizer: Tokenizer, template: ChatTemplate, as_sent: bool
    ) -> Sequence[int] | None:
        """The ids of a chat that can be rendered in two ways, in one of them; None where that fails."""
        if not template.is_bounded:
            order = self.order(model, "chat", None)
            order.as_sent = as_sent
            return (await self.read_apart((_REASONED,), model, order)).ids
        like = copy.copy(template)
        like.as_sent = as_sent
        try:
            return tokenizer.encode(
                render_chat(like, parse_routing("/v1/chat/completions", _REASONED)), add_special_tokens=False
            )
        except RequestError:
            return None
        finally:
            template.is_bounded = like.is_bounded

    def renders_apart(self, model: str, parsed: RoutingRequest) -> bool:
        """Whether reading this prompt takes a chat template which is not bounded."""
        tokenizer = self._tokenizers.get(model)
        template = None if tokenizer is None else tokenizer.chat_template
        is_chat = parsed.kind == "chat" or parsed.source is not None
        return is_chat and template is not None and not template.is_bounded

    async def read_apart(
        self,
        body: Sequence[bytes],
        model: str,
        order: ReadTask,
        wanted: Callable[[], bool] = lambda: True,
        party: str = "",
    ) -> PromptRead:
        """`read` of a light body by a helper process, which ends a template that takes too long."""
        started, overdue = time.perf_counter(), self._overdue.get(model, 0)
        if self.worker_pool is None or overdue >= OVERDUE_MAX:
            return PromptRead(None, 0.0)
        order.seconds_max = APART_S_MAX
        try:
            _, _, made = await self.worker_pool.read(body, order.kind, lambda _: order, wanted, party)
        except RequestError as error:  # there is no room, or nobody waits any more
            log.debug("a prompt was not read: %s", error.message)
            return PromptRead(None, time.perf_counter() - started)
        self._overdue[model] = overdue = overdue + 1 if made.is_overdue else 0
        if overdue == OVERDUE_MAX:
            self.problems[model] = "its chat template takes too long; chats are routed by load alone"
            log.warning("model %s: %s", model, self.problems[model])
        ids = None if isinstance(made.result, bytes) else made.result
        return PromptRead(ids, time.perf_counter() - started, size=made.size)

    def forget(self, url: str) -> None:
        """A worker is gone."""
        if self.remote is not None:
            self.remote.forget(url)

    def asks(self, model: str) -> bool:
        """Prompts of this base model are read by a worker (`ask`) and not here."""
        return self.remote is not None and model not in self._tokenizers and self.remote.knows(model)

    async def ask(self, parsed: RoutingRequest, model: str, tokens_max: int | None) -> PromptRead:
        """`read` by a worker. Ids that the request brings itself are taken as they are."""
        read = self.read(parsed, None, tokens_max)
        if read.ids is not None or self.remote is None:
            return read
        ids, took_s = await self.remote.put(question(parsed, model), model)
        size = measure(ids, parsed, tokens_max, further_tokens(parsed, None))
        return PromptRead(cut(ids, parsed, tokens_max), took_s, size=size)

    async def _load(self, model: str, name: str) -> None:
        folder = checkpoint_folder(name)
        if folder is None:
            self.problems[model] = f"{name} is not a folder on this machine; give --tokenizer PATH"
            return
        loop = asyncio.get_running_loop()
        try:
            loaded = await loop.run_in_executor(
                self._executor,
                lambda: self._read_folder(folder),
            )
        except TokenizerError as error:
            self.problems[model] = str(error)
            log.warning("no tokenizer for %s: %s", model, error)
            return
        self._tokenizers[model], self._folders[model] = loaded, str(folder)
        self._overdue.pop(model, None)
        self.problems.pop(model, None)
        log.info("tokenizer of %s read from %s", model, folder)
        if loaded.chat_template is not None and not loaded.chat_template.is_bounded:
            log.info("chats of %s are rendered by helper processes: its template might take long", model)

    def _read_folder(self, folder: Path) -> Tokenizer:
        tokenizer = Tokenizer.load(folder, self._chat_template, cache_bytes=self._cache_bytes)
        if self._render_s_max is not None and tokenizer.chat_template is not None:
            tokenizer.chat_template.limit(self._render_s_max)
        return tokenizer

    def read(
        self, parsed: RoutingRequest, tokenizer: Tokenizer | None, tokens_max: int | None = None, body: bytes = b""
    ) -> PromptRead:
        """The ids to route on. `body`: what was parsed, to be known when it returns. Thread-safe; raises nothing."""

        def work() -> PromptRead:
            prompt = read_prompt(parsed, tokenizer, tokens_max)
            known = (
                cache_conversation(parsed, body, prompt, tokenizer) if is_cacheable(parsed.kind, len(body)) else None
            )
            further = further_tokens(parsed, tokenizer)
            size = measure(prompt.ids, parsed, tokens_max, further, is_exact=prompt.is_whole)
            return PromptRead(cut(prompt.ids, parsed, tokens_max), 0.0, known, size=size)

        found, took_s = self._timed(work)
        read = PromptRead(None, took_s) if found is None else found
        read.seconds = took_s
        return read

    def go_on(
        self, known: CachedConversation, mark: Checkpoint, body: bytes, tokenizer: Tokenizer, tokens_max: int | None
    ) -> tuple[SuffixResult, PromptRead] | None:
        """The same of a body with a known beginning, and what it asks for. None where the whole must be read."""

        def work() -> tuple[SuffixResult, PromptRead] | None:
            returned = extend(known, mark, body, tokenizer, tokens_max)
            if returned is None:
                return None
            parsed = returned.suffix.request
            ids, size = cut(returned.token_ids, parsed, tokens_max), measure(returned.token_ids, parsed, tokens_max)
            more, instead = (
                advance_conversation(returned, body, tokenizer),
                known if mark is known.checkpoints[-1] else None,
            )
            return returned, PromptRead(ids, 0.0, more, instead, size)

        found, took_s = self._timed(work)
        if found is not None:
            found[1].seconds = took_s
        return found

    def _timed(self, work: Callable[[], T]) -> tuple[T | None, float]:
        """(what it comes to, None where it raises; seconds it took)."""
        self._reads += 1
        sampled = self._reads % CPU_SAMPLE == 0
        started_cpu = time.thread_time() if sampled else 0.0
        started = time.perf_counter()
        found = None
        try:
            found = work()
        except RequestError as refused:
            log.debug("prompt left to the worker to judge: %s", refused.message)
        except Exception as error:  # noqa: BLE001  a client's text in a model's template: anything can come of it
            self.failed += 1
            log.debug("a prompt could not be read: %s: %s", type(error).__name__, error)
        took_s = time.perf_counter() - started
        if sampled:
            self.cpu_s += CPU_SAMPLE * (time.thread_time() - started_cpu)
        return found, took_s

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """In a thread."""
        return asyncio.get_running_loop().run_in_executor(self._executor, work)

    def order(self, model: str, kind: Kind, tokens_max: int | None) -> ReadTask:
        """What a helper is to make of a body for this base model."""
        asks = model if self.asks(model) else None
        tokenizer = self._tokenizers.get(model)
        template = tokenizer.chat_template if tokenizer is not None else None
        as_sent = template is not None and template.as_sent
        folder = self._folders.get(model)
        if kind != "completion" and self._overdue.get(model, 0) >= OVERDUE_MAX:
            folder = None
        return ReadTask(kind, folder, tokens_max, asks, as_sent)


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
