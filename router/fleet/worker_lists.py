"""Lists of workers kept elsewhere: a file that operators write, or a host name that resolves to many addresses.

Each change is passed on as the whole list.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from options import ConfigError
from options.addresses import bracket_host, get_default_port
from router.fleet.worker_settings import WorkerSettings, derive_worker_id, parse_worker_flag
from router.host_names import HostNames

log = logging.getLogger("router")

NAME_HOSTS_MAX = 4096
"""Most workers of one host name."""
FILE_POLL_S = 1.0
"""Time between two looks at a file."""

WorkerListCallback = Callable[[list[WorkerSettings]], None]


def read_workers_file(path: Path) -> list[WorkerSettings]:
    """Read a file with one `--worker` value a line; `#` begins a comment. Raises ConfigError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--workers-file {path}: {error}") from error
    return _parse_workers_file(path, content)


def _parse_workers_file(path: Path, content: bytes) -> list[WorkerSettings]:
    """Return the workers in the content of a file. Raises ConfigError, which names `path` and the wrong line."""
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--workers-file {path}: {error}") from error
    settings_by_id: dict[str, WorkerSettings] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            settings = parse_worker_flag(text)
            if settings_by_id.setdefault(settings.worker_id, settings) != settings:
                raise ConfigError(f"worker {settings.worker_id} is given twice, with other settings")
        except ConfigError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
    return list(settings_by_id.values())


async def watch_file(path: Path, update: WorkerListCallback) -> None:
    """Call `update` with the workers of a file whenever it was written, until cancelled.

    A change counts once the file stays the same for FILE_POLL_S, because it may be half written before. A file that is
    missing or empty changes nothing, as a failed write may leave one. A comment alone is a list of no workers.
    """
    version = applied_version = (0, b"")
    while True:
        await asyncio.sleep(FILE_POLL_S)
        previous_version, version = version, _read_version(path)
        is_changing = version != previous_version
        if is_changing or version == applied_version:
            continue
        applied_version = version
        _, content = version
        try:
            if not content:
                read_workers_file(path)  # raises ConfigError with the reason if the file cannot be read
                raise ConfigError(f"{path} is empty, so its workers stay; a comment in it removes them")
            update(_parse_workers_file(path, content))
        except ConfigError as error:
            log.error("workers file not applied: %s", error)


def _read_version(path: Path) -> tuple[int, bytes]:
    """Return when a file was last written, in nanoseconds, and its content; 0 and empty if it cannot be read."""
    try:
        return path.stat().st_mtime_ns, path.read_bytes()
    except OSError:
        return 0, b""


async def watch_host_name(
    host_names: HostNames, template: WorkerSettings, every_s: float, update: WorkerListCallback
) -> None:
    """Resolve the host name of a worker's URL every `every_s` seconds, and call `update` with a worker per address.

    The workers differ from `template` in URL and id only: with two addresses, http://engines:8000 becomes
    http://10.0.0.1:8000 and http://10.0.0.2:8000. A failed resolution is logged and changes nothing.
    """
    parts = urlsplit(template.url)
    port = parts.port or get_default_port(parts.scheme)
    while True:
        try:
            address_infos = await host_names.look_up(parts.hostname or "", port)
        except (OSError, UnicodeError) as error:
            log.warning("%s: %s; its workers stay as they are", parts.hostname, error)
        else:
            addresses = sorted({str(socket_address[0]) for *_, socket_address in address_infos})
            if len(addresses) > NAME_HOSTS_MAX:
                message = "%s has %d addresses; the first %d are taken"
                log.warning(message, parts.hostname, len(addresses), NAME_HOSTS_MAX)
            urls = [_make_url(parts, address, port) for address in addresses[:NAME_HOSTS_MAX]]
            update([replace(template, url=url, worker_id=derive_worker_id(url)) for url in urls])
        await asyncio.sleep(every_s)


def _make_url(parts: SplitResult, address: str, port: int) -> str:
    """Return the URL of `parts` with an address in place of its host; IPv6 addresses get brackets."""
    return f"{parts.scheme}://{bracket_host(address)}:{port}{parts.path}"
