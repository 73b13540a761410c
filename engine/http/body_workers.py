"""Parse bodies where they delay nobody: short ones at once, longer ones in a thread, long ones in another process.

A client decides by its body how much time and memory parsing, rendering and encoding take (prompts/process_pool.py).
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any, TypeVar

from engine.grammar_compiler import GrammarVocabulary
from engine.protocol.params import ModelLimits
from engine.structured_output.constraint import EncodedConstraint
from engine.structured_output.constraint_check import check_constraint
from engine.types import Constraint
from prompts import RequestError, Tokenizer, field_error
from prompts.chat_template import TemplateLimitError
from prompts.process_pool import ProcessPool, WorkerProcessError

T = TypeVar("T")
BodyParser = Callable[[bytes, Tokenizer, ModelLimits], T]
"""A module-level function of (body, tokenizer, limits). Its result is sent between processes, so it must be small."""

INLINE_BYTES_MAX = 4096
"""Bodies up to this size are parsed on the event loop, where a thread would cost more than it frees."""
THREAD_BYTES_MAX = 64 << 10
"""Bodies up to this size are parsed in a thread. Parsing holds the interpreter for some milliseconds at most."""
RENDER_S_MAX = 0.02
"""Maximum CPU time of the chat template on the event loop or in a thread. A body that needs more is parsed in a
process. Bodies of 4 KB take 3 ms at most, and those of 64 KB up to 5 ms unless they have hundreds of messages."""
PROCESS_COUNT = 2
READ_S_MAX = 30.0
MEMORY_BYTES_MAX = 4 << 30
"""Most memory of a process that parses bodies."""
GRAMMAR_CPU_S_MAX = 2
"""CPU time of the process that checks a grammar."""
GRAMMAR_S_MAX = 60.0
"""Time for a grammar's check and the start of its process, on a busy machine."""
GRAMMAR_BYTES_MAX = 1 << 30
GRAMMAR_STACK_BYTES_MAX = 1 << 20
"""Stack of the checking process, smaller than any stack of the core: a grammar that is too deep fails there first."""
CHECKED_GRAMMARS_MAX = 4096
"""Most grammars whose check is remembered."""
CHECKED_BYTES_MAX = 64 << 20
"""Most bytes of these grammars together."""

log = logging.getLogger("engine.server")


class BodyReader:
    """Parses bodies with one tokenizer: short ones at once, others in a thread or a process. Must be closed."""

    def __init__(self, tokenizer: Tokenizer, limits: ModelLimits, folder: str, chat_template: str | None) -> None:
        """`folder`, `chat_template`: sources of `tokenizer`, from which the processes load their own one."""
        self._tokenizer = tokenizer
        if tokenizer.chat_template is not None:
            tokenizer.chat_template.seconds_max = RENDER_S_MAX
        self._limits = limits
        self._thread_pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="read")
        self._process_pool = ProcessPool(
            (_load_tokenizer, (folder, chat_template, limits)), PROCESS_COUNT, MEMORY_BYTES_MAX
        )
        self._compiler_pool = ProcessPool((_load_vocabulary, (folder, limits.vocab_size)), 1, GRAMMAR_BYTES_MAX)
        self._checked_grammars: OrderedDict[bytes, bytes] = OrderedDict()
        """Digest of a format -> UTF-8 of its checked grammar, in the form that the core compiles."""
        self._checked_bytes = 0

    async def read(self, parse: BodyParser[T], data: bytes, *, extra_bytes: int = 0, tenant: str = "") -> T:
        """Parse a request body: a short one at once, a longer one in a thread, a long or slow one in another process.

        Raises RequestError for an invalid body, or one that takes too much time or memory. `extra_bytes`: size of the
        other inputs of `parse`. `tenant`: client, which takes turns with other clients.
        """
        size_bytes = len(data) + extra_bytes
        if size_bytes <= THREAD_BYTES_MAX:
            try:
                if size_bytes <= INLINE_BYTES_MAX:
                    return parse(data, self._tokenizer, self._limits)
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._thread_pool, parse, data, self._tokenizer, self._limits)
            except TemplateLimitError as error:
                log.warning("a body of %d bytes is parsed in a process: %s", size_bytes, error.message)
        return await finish_uncancelled(self._read_in_process(parse, data, tenant))

    async def _read_in_process(self, parse: BodyParser[T], data: bytes, tenant: str) -> T:
        """Parse a body in another process, which is ended if it takes too much time or memory. Raises RequestError."""
        try:
            async with self._process_pool.acquire(tenant) as process:
                result: T = await process.call(READ_S_MAX, _parse_body, parse, data)
                return result
        except WorkerProcessError as error:
            log.warning("a body of %d bytes could not be read: %s", len(data), error)
            raise RequestError("the body takes more time or memory to read than it may") from error

    async def check(self, requested: EncodedConstraint, tenant: str = "") -> Constraint:
        """Return the checked grammar of a requested format. Raises RequestError if it does not compile, or not in time.

        `tenant`: client, which takes turns with other clients.
        """
        digest = blake2b(requested.format_json, digest_size=16).digest()
        lark = self._checked_grammars.get(digest)
        if lark is None:
            lark = (await finish_uncancelled(self._check_in_process(requested, tenant))).encode()
            self._remember_check(digest, lark)
        else:
            self._checked_grammars.move_to_end(digest)
        start_token, end_token = requested.reasoning_start_token, requested.reasoning_end_token
        return Constraint(lark.decode(), requested.param, start_token, end_token)

    def _remember_check(self, digest: bytes, lark: bytes) -> None:
        """Remember a checked grammar, and forget those that were used longest ago to make room."""
        self._checked_bytes += len(lark) - len(self._checked_grammars.pop(digest, b""))
        self._checked_grammars[digest] = lark
        while len(self._checked_grammars) > CHECKED_GRAMMARS_MAX or self._checked_bytes > CHECKED_BYTES_MAX:
            _, oldest_lark = self._checked_grammars.popitem(last=False)
            self._checked_bytes -= len(oldest_lark)

    async def _check_in_process(self, requested: EncodedConstraint, tenant: str) -> str:
        """Write and compile the grammar of a structured output in another process, with limits on time and memory.

        Returns the checked grammar. Raises RequestError if the format is invalid or too expensive.
        """
        try:
            async with self._compiler_pool.acquire(tenant) as process:
                lark: str = await process.call(GRAMMAR_S_MAX, _check_with_time_limit, requested)
                return lark
        except WorkerProcessError as error:
            log.warning("the grammar of %s could not be compiled: %s", requested.param, error)
            raise field_error(requested.param, "takes more time or memory to compile than it may") from error

    def close(self) -> None:
        self._process_pool.close()
        self._compiler_pool.close()
        self._thread_pool.shutdown(wait=False, cancel_futures=True)


async def finish_uncancelled(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which goes on if its waiter is cancelled because the client leaves.

    A process that parses a body, for example, finishes it in any case, and `work` gives the process back to the pool.
    """
    task = asyncio.ensure_future(work)
    # Nobody may be left to take the error of the task. Taking it here keeps asyncio from logging it.
    task.add_done_callback(lambda finished_task: finished_task.cancelled() or finished_task.exception())
    return await asyncio.shield(task)


# In the process -------------------------------------------------------------------------------------------------------


def _load_tokenizer(folder: str, chat_template: str | None, limits: ModelLimits) -> tuple[Tokenizer, ModelLimits]:
    return Tokenizer.load(folder, chat_template=chat_template), limits


def _load_vocabulary(folder: str, vocab_size: int) -> GrammarVocabulary:
    resource.setrlimit(resource.RLIMIT_STACK, (GRAMMAR_STACK_BYTES_MAX, GRAMMAR_STACK_BYTES_MAX))
    return GrammarVocabulary(Tokenizer.load(folder, with_fast_encoder=False), vocab_size)


def _check_with_time_limit(vocabulary: GrammarVocabulary, requested: EncodedConstraint) -> str:
    signal.setitimer(signal.ITIMER_PROF, GRAMMAR_CPU_S_MAX)  # its signal has no handler and ends the process
    try:
        return check_constraint(vocabulary, requested)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _parse_body(tokenizer_and_limits: tuple[Tokenizer, ModelLimits], parse: BodyParser[T], data: bytes) -> T:
    return parse(data, *tokenizer_and_limits)
