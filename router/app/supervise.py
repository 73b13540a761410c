"""`--processes N`: a parent that holds the port, starts N equal processes and starts again those that die.

The parent serves nothing. It binds the port first, so that the number is known and taken before any child listens, and
forks before there is a thread or an event loop.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from options import ConfigError
from router.app.config import ProcessConfig
from router.app.siblings import Share
from router.app.system import naming

log = logging.getLogger("router")

RESTART_S_MIN: Final = 1.0
"""Between two starts of the same process."""


def supervise(config: ProcessConfig, count: int, run: Callable[[ProcessConfig], None]) -> int:
    """Run `count` processes until SIGTERM or SIGINT; the exit status. Raises OSError where the port is taken."""
    with naming("--host and --port", f"{config.host}:{config.port}"):
        holders = [hold_port(config.host, config.port)]
    admin = config.admin_address
    if admin is not None:
        with naming("--admin", config.admin or ""):
            holders.append(hold_port(*admin))
    port = holders[0].getsockname()[1]
    if config.hand_over is not None and Path(f"{config.hand_over}.{count}").exists():
        raise ConfigError(f"--hand-over {config.hand_over}: the router there has more than {count} processes")
    folder = Path(tempfile.mkdtemp(prefix="blockcast-router-"))
    children: dict[int, int] = {}
    started_s: dict[int, float] = {}
    stopping: list[int] = []

    def start(index: int) -> None:
        share = Share(index, count, folder)
        own = replace(
            config,
            port=port,
            admin=None if admin is None else f"{admin[0]}:{holders[1].getsockname()[1]}",
            share=share,
            announce=False,
            hand_over=None if config.hand_over is None else f"{config.hand_over}.{index}",
            seed=config.seed + index,
            peer_bind=share.load(index),
            peers=tuple(share.load(other) for other in share.others),
        )
        pid = os.fork()
        if pid == 0:
            for holder in holders:
                holder.close()
            status = 1
            try:
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, signal.SIG_DFL)
                run(own)
                status = 0
            except (OSError, ConfigError) as error:
                log.error("process %d: %s", index, error)
            except Exception:
                log.exception("process %d", index)
            finally:
                sys.stderr.flush()
                os._exit(status)
        children[pid] = index
        started_s[index] = time.monotonic()

    def stop(number: int, frame: object) -> None:
        stopping.append(number)
        for pid in children:
            os.kill(pid, signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    try:
        for index in range(count):
            start(index)
        _await_controls(folder, count, stopping)
        if not stopping:
            host = f"[{config.host}]" if ":" in config.host else config.host
            scheme = "https" if config.tls_cert is not None else "http"
            print(f"router listening on {scheme}://{host}:{port}", flush=True)
        while children:
            pid, status = os.wait()
            index = children.pop(pid)
            if stopping or (config.hand_over is not None and status == 0):
                continue  # or another router's process has taken over from it
            log.error("process %d ended with status %d and is started again", index, os.waitstatus_to_exitcode(status))
            time.sleep(max(0.0, started_s[index] + RESTART_S_MIN - time.monotonic()))
            if not stopping:
                start(index)
    finally:
        for holder in holders:
            holder.close()
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def hold_port(host: str, port: int) -> socket.socket:
    """A socket that is bound and never listens: connections go to those that listen beside it. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, port))
    except OSError:
        holder.close()
        raise
    return holder


def _await_controls(folder: Path, count: int, stopping: list[int]) -> None:
    """Until every process listens, or a signal came, or a minute passed."""
    end_s = time.monotonic() + 60.0
    while not stopping and time.monotonic() < end_s:
        if all((folder / f"control-{index}").exists() for index in range(count)):
            return
        time.sleep(0.02)
