"""A process that reads large bodies for the router: decodes, renders and encodes, so that nobody waits for it there.

Python's decoding holds the interpreter lock, so a thread would not do. The process is bounded in memory by the system
and in time by its parent (router/prompting/pool.py), which ends it and starts another. It speaks over one socket, one
request at a time:

    parent: Ask(path), body      helper: Told(envelope or error)
    parent: Order                helper: Done, payload
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import time
from array import array
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from prompts.errors import RequestError
from prompts.routing import Kind, parse_routing
from prompts.segments import ID_TYPE
from prompts.tokenizer import Tokenizer, TokenizerError
from router.prompting.encode import envelope, is_within_bounds, prompt_ids
from router.prompting.remote import request_body

NICE = 5
"""Who waits for a large prompt waits a little longer than everybody else."""


class Settings(msgspec.Struct):
    """What a helper is started with."""

    chat_template: str | None
    cache_bytes: int
    memory_bytes: int


class Order(msgspec.Struct):
    """What is to be made of the body that was just looked at."""

    kind: Kind
    folder: str | None = None
    """Where the tokenizer's files are; None: only ids that the body brings itself."""
    tokens_max: int | None = None
    asks: str | None = None
    """The model under which a worker is to be asked: the payload is that question instead of ids."""


class Told(msgspec.Struct):
    """What the body says, or why it is none."""

    fields: dict[str, Any] | None = None
    error: tuple[str, str | None, str | int | None, int] | None = None


class Done(msgspec.Struct):
    cpu_s: float
    is_question: bool = False
    """The payload is a body for a worker's `/tokenize`, else ids of 32 bits."""
    problem: str | None = None
    goes_on: bool = True
    """False: so much memory was needed that the next body gets a fresh process."""


def send(conn: BinaryIO, head: msgspec.Struct, payload: bytes = b"") -> None:
    data = msgspec.msgpack.encode(head)
    conn.write(len(data).to_bytes(4, "little") + len(payload).to_bytes(8, "little") + data)
    conn.write(payload)
    conn.flush()


def receive(conn: BinaryIO) -> tuple[bytes, bytes]:
    """(head, payload). Raises EOFError where the parent is gone."""
    lengths = conn.read(12)
    if len(lengths) < 12:
        raise EOFError
    head = conn.read(int.from_bytes(lengths[:4], "little"))
    return head, conn.read(int.from_bytes(lengths[4:], "little"))


class Helper:
    """The tokenizers of one process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tokenizers: dict[str, Tokenizer] = {}

    def look(self, body: bytes) -> Told:
        """What a body says of where it should go."""
        try:
            return Told(fields=envelope(body))
        except RequestError as error:
            return Told(error=(error.message, error.param, error.code, error.status))

    def read(self, order: Order, body: bytes) -> tuple[Done, bytes]:
        """Do as ordered."""
        started = time.thread_time()
        done, payload = Done(0.0), b""
        if order.kind == "other":
            return done, payload
        try:
            if not is_within_bounds(body):
                raise RequestError("more values than are read here", param=None)
            parsed = msgspec.structs.replace(parse_routing("", body), kind=order.kind)
            ids = prompt_ids(parsed, self._tokenizer(order.folder), order.tokens_max)
            question = request_body(parsed, order.asks) if ids is None and order.asks is not None else None
            if question is not None:
                done.is_question, payload = True, msgspec.json.encode(question)
            elif ids is not None:
                payload = ids.tobytes() if isinstance(ids, array) else array(ID_TYPE, ids).tobytes()
        except (RequestError, TokenizerError, ValueError, RecursionError, MemoryError) as error:
            done.problem = f"{type(error).__name__}: {error}"[:300]
        done.cpu_s = time.thread_time() - started
        done.goes_on = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < self._settings.memory_bytes // 2
        return done, payload

    def _tokenizer(self, folder: str | None) -> Tokenizer | None:
        if folder is None:
            return None
        found = self._tokenizers.get(folder)
        if found is None:
            settings = self._settings
            found = Tokenizer.load(Path(folder), settings.chat_template, cache_bytes=settings.cache_bytes)
            self._tokenizers[folder] = found
        return found


def main(descriptor: int) -> None:
    """Serve the parent at the other end of the socket until it goes."""
    with socket.socket(fileno=descriptor) as sock, sock.makefile("rwb", buffering=1 << 20) as stream:
        conn: Any = stream
        settings = msgspec.msgpack.decode(receive(conn)[0], type=Settings)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to hear
        resource.setrlimit(resource.RLIMIT_DATA, (settings.memory_bytes, settings.memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.nice(NICE)
        helper = Helper(settings)
        try:
            while True:
                _, body = receive(conn)
                told = helper.look(body)
                send(conn, told)
                if told.error is None:
                    order = msgspec.msgpack.decode(receive(conn)[0], type=Order)
                    send(conn, *helper.read(order, body))
        except (EOFError, ConnectionError):
            return


if __name__ == "__main__":
    main(int(sys.argv[1]))
