"""Lists of workers kept elsewhere: a file that operators write, or a host name that resolves to many addresses.

Each change is passed on as the whole list.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from options import ConfigError
from options.addresses import bracket_host, get_default_port
from router.fleet.worker_flag import WorkerFlag, derive_worker_id, parse_worker_flag

log = logging.getLogger("router")

NAME_HOSTS_MAX = 4096
"""Most workers of one host name."""
FILE_POLL_S = 1.0
"""Time between two looks at a file."""

WorkerListCallback = Callable[[list[WorkerFlag]], None]


def read_workers_file(path: Path) -> list[WorkerFlag]:
    """Read a file with one `--worker` value a line; `#` begins a comment. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--workers-file {path}: {error}") from error
    flags = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if text:
            try:
                flags.append(parse_worker_flag(text))
            except ConfigError as error:
                raise ConfigError(f"{path}:{number}: {error}") from error
    return flags


async def watch_file(path: Path, update: WorkerListCallback) -> None:
    """Call `update` with the workers of a file when it has changed and then stayed the same for FILE_POLL_S.

    Before that it may be half written. An unreadable file changes nothing.
    """
    signature: _FileSignature | None = None
    applied_signature = signature
    while True:
        await asyncio.sleep(FILE_POLL_S)
        previous_signature, signature = signature, _get_file_signature(path)
        is_changing = signature != previous_signature
        if is_changing or signature == applied_signature:
            continue
        applied_signature = signature
        try:
            update(read_workers_file(path))
        except ConfigError as error:
            log.error("workers file not applied: %s", error)


class _FileSignature(NamedTuple):
    """Facts about a file. A change of the file changes at least one of them."""

    modified_ns: int
    size_bytes: int
    inode: int


def _get_file_signature(path: Path) -> _FileSignature | None:
    """Return the signature of a file; None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return _FileSignature(status.st_mtime_ns, status.st_size, status.st_ino)


async def watch_host_name(template: WorkerFlag, every_s: float, update: WorkerListCallback) -> None:
    """Resolve the host name of a worker's URL every `every_s` seconds, and call `update` with a worker per address.

    The workers differ from `template` in URL and id only: with two addresses, http://engines:8000 becomes
    http://10.0.0.1:8000 and http://10.0.0.2:8000. A failed resolution is logged and changes nothing.
    """
    parts = urlsplit(template.url)
    port = parts.port or get_default_port(parts.scheme)
    while True:
        try:
            address_infos = await asyncio.get_running_loop().getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            log.warning("%s: %s; its workers stay as they are", parts.hostname, error)
        else:
            addresses = sorted({str(socket_address[0]) for *_, socket_address in address_infos})
            if len(addresses) > NAME_HOSTS_MAX:
                count, taken_count = len(addresses), NAME_HOSTS_MAX
                log.warning("%s has %d addresses; the first %d are taken", parts.hostname, count, taken_count)
            urls = [_make_url(parts, address, port) for address in addresses[:NAME_HOSTS_MAX]]
            update([replace(template, url=url, worker_id=derive_worker_id(url)) for url in urls])
        await asyncio.sleep(every_s)


def _make_url(parts: SplitResult, address: str, port: int) -> str:
    """Return the URL of `parts` with an address in place of its host; IPv6 addresses get brackets."""
    return f"{parts.scheme}://{bracket_host(address)}:{port}{parts.path}"
