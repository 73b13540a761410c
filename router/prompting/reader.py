"""Which tokenizer a model has here, and a request's prompt as token ids.

Owns loading (in threads: a vocabulary takes a second to read) and the choice between encoding at once, in a thread, or
by asking a worker. Where a prompt cannot be read, where the worker will have to refuse it, and where it will reuse
nothing of it, the answer is None: such a request is routed by load alone and the worker's own words reach the client.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Annotated

import msgspec

from prompts.errors import RequestError
from prompts.routing import RoutingRequest
from prompts.segments import CACHE_BYTES_DEFAULT, SegmentStats
from prompts.tokenizer import Tokenizer, TokenizerError
from router.prompting.remote import RemoteTokenizer

log = logging.getLogger("router")

INLINE_BYTES_MAX = 4096
"""Bodies up to this size are encoded on the event loop: handing them to a thread would cost more."""
CPU_SAMPLE = 16
"""One prompt in so many has its CPU time taken: reading that clock is a system call."""
CHARS_PER_TOKEN = 4.0
"""For estimates only."""

_TokenIds = list[Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]]


class PromptReader:
    """model -> tokenizer, and prompts -> token ids. One per process; reading is thread-safe."""

    def __init__(
        self,
        executor: Executor,
        *,
        override: str | None = None,
        chat_template: str | None = None,
        cache_bytes: int = CACHE_BYTES_DEFAULT,
    ) -> None:
        self._executor = executor
        self._cache_bytes = cache_bytes
        self.remote: RemoteTokenizer | None = None
        """Whom to ask for ids of models that have no tokenizer here; None asks nobody."""
        self._override = override
        """A folder given on the command line, used for every model."""
        self._chat_template = chat_template
        self._tokenizers: dict[str, Tokenizer] = {}
        self._loading: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._reads = 0
        self.cpu_s = 0.0
        """CPU time of rendering and encoding, estimated from a sample."""
        self.problems: dict[str, str] = {}
        """model -> why there is no tokenizer for it; shown by `/workers`."""

    def get(self, model: str) -> Tokenizer | None:
        return self._tokenizers.get(model)

    def cache_stats(self) -> dict[str, SegmentStats]:
        """model -> counters of its segment cache, where it has one."""
        found = {model: tokenizer.cache_stats() for model, tokenizer in self._tokenizers.items()}
        return {model: stats for model, stats in found.items() if stats is not None}

    async def learn(self, model: str, path: str | None, url: str) -> None:
        """Load the tokenizer of a base model: from the command line's folder, from where the worker at `url` has it,
        or else find out whether that worker can be asked."""
        folder = self._override or path
        if folder is not None and model not in self._tokenizers:
            task = self._loading.get((model, folder))
            if task is None:
                task = self._loading[model, folder] = asyncio.create_task(self._load(model, folder))
                task.add_done_callback(lambda _: self._loading.pop((model, folder), None))
            await asyncio.shield(task)
        if model in self._tokenizers:
            return
        if folder is None:
            self.problems[model] = "the worker names no local folder; give --tokenizer PATH"
        if self.remote is not None and await self.remote.learn(model, url):
            reason = self.problems[model].partition("; give")[0]
            self.problems[model] = f"{reason}; workers are asked (/tokenize), give --tokenizer PATH to save the way"

    def forget(self, url: str) -> None:
        """A worker is gone."""
        if self.remote is not None:
            self.remote.forget(url)

    def asks(self, model: str) -> bool:
        """Prompts of this base model are read by a worker (`ask`) and not here."""
        return self.remote is not None and model not in self._tokenizers and self.remote.knows(model)

    async def ask(self, parsed: RoutingRequest, model: str) -> tuple[Sequence[int] | None, float]:
        """`read` by a worker. Ids that the request brings itself are taken as they are."""
        ids, took_s = self.read(parsed, None)
        if ids is not None or self.remote is None:
            return ids, took_s
        ids, took_s = await self.remote.read(parsed, model)
        if ids and parsed.truncate_prompt_tokens is not None and parsed.truncate_prompt_tokens > 0:
            ids = ids[-parsed.truncate_prompt_tokens :]
        return ids or None, took_s

    async def _load(self, model: str, name: str) -> None:
        folder = checkpoint_folder(name)
        if folder is None:
            self.problems[model] = f"{name} is not a folder on this machine; give --tokenizer PATH"
            return
        loop = asyncio.get_running_loop()
        try:
            loaded = await loop.run_in_executor(
                self._executor,
                lambda: Tokenizer.load(folder, self._chat_template, cache_bytes=self._cache_bytes),
            )
        except TokenizerError as error:
            self.problems[model] = str(error)
            log.warning("no tokenizer for %s: %s", model, error)
            return
        self._tokenizers[model] = loaded
        self.problems.pop(model, None)
        log.info("tokenizer of %s read from %s", model, folder)

    def is_quick(self, body_bytes: int) -> bool:
        return body_bytes <= INLINE_BYTES_MAX

    def read(self, parsed: RoutingRequest, tokenizer: Tokenizer | None) -> tuple[Sequence[int] | None, float]:
        """(token ids of the prompt to route on or None, seconds it took). Thread-safe.

        Of several prompts the first is routed on; of a prompt with images, the text before the first.
        """
        self._reads += 1
        sampled = self._reads % CPU_SAMPLE == 0
        started_cpu = time.thread_time() if sampled else 0.0
        started = time.perf_counter()
        ids: Sequence[int] | None = None
        try:
            ids = self._ids(parsed, tokenizer)
        except RequestError as error:
            log.debug("prompt left to the worker to judge: %s", error.message)
        if ids is not None and parsed.truncate_prompt_tokens is not None and parsed.truncate_prompt_tokens > 0:
            ids = ids[-parsed.truncate_prompt_tokens :]
        took_s = time.perf_counter() - started
        if sampled:
            self.cpu_s += CPU_SAMPLE * (time.thread_time() - started_cpu)
        return ids or None, took_s

    def _ids(self, parsed: RoutingRequest, tokenizer: Tokenizer | None) -> Sequence[int] | None:
        if parsed.scores_prompt:
            return None
        if parsed.kind == "chat":
            if tokenizer is None or parsed.messages is None or tokenizer.chat_template is None:
                return None
            if parsed.chat_template is not None:
                return None  # a program of the client's: it could run for ever, and workers refuse it by default
            return tokenizer.chat_array(parsed)
        prompt = parsed.prompt
        if prompt is None:
            return None
        first = prompt if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt[0]
        if isinstance(first, str):
            return None if tokenizer is None else tokenizer.encode_array(first, parsed.add_special_tokens is not False)
        try:
            return msgspec.convert(first, _TokenIds)
        except msgspec.ValidationError as error:
            raise RequestError(f"prompt: {error}", param="prompt") from None

    def run(
        self, parsed: RoutingRequest, tokenizer: Tokenizer | None
    ) -> asyncio.Future[tuple[Sequence[int] | None, float]]:
        """`read` in a thread."""
        return asyncio.get_running_loop().run_in_executor(self._executor, self.read, parsed, tokenizer)


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


def estimate_tokens(body_bytes: int) -> int:
    """What a prompt that was not tokenised may come to."""
    return max(1, int(body_bytes / CHARS_PER_TOKEN))
