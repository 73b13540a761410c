"""scikit-build-core, with a compiler from the registry where the machine has none. pyproject.toml's build backend.

Owns which compiler builds a wheel, and what is said where the build fails. `ziglang` carries clang, a C and C++ library
and what goes with them in one wheel; it is asked for only where CXX is not set and no C++ compiler is on the path.
"""

from __future__ import annotations

import os
import platform
import shutil
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scikit_build_core import build as backend

COMPILERS = ("c++", "g++", "clang++")
TOOLS = {"cc": "cc", "c++": "c++", "ar": "ar", "ranlib": "ranlib"}
HELP = """
blockcast: its C++ extensions could not be built; the lines above say why. A build needs the headers of this Python (on
Debian: python3-dev) and a C++17 compiler. Where none is on the path, one comes from the registry (the package ziglang,
Linux only); CC and CXX name another. With --no-build-isolation nothing is fetched: install ziglang or a compiler first.
"""


def has_compiler() -> bool:
    return bool(os.environ.get("CXX")) or any(shutil.which(name) for name in COMPILERS)


def _requires(base: list[str]) -> list[str]:
    return base if has_compiler() or sys.platform != "linux" else [*base, "ziglang>=0.13"]


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return _requires(backend.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return _requires(backend.get_requires_for_build_editable(config_settings))


def get_requires_for_build_sdist(config_settings: dict[str, Any] | None = None) -> list[str]:
    return backend.get_requires_for_build_sdist(config_settings)


def build_sdist(sdist_directory: str, config_settings: dict[str, Any] | None = None) -> str:
    return backend.build_sdist(sdist_directory, config_settings)


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    return _build(backend.build_wheel, wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    return _build(backend.build_editable, wheel_directory, config_settings, metadata_directory)


def _build(build: Callable[..., str], *arguments: object) -> str:
    try:
        with _compiler():
            return build(*arguments)
    except BaseException:
        print(HELP, file=sys.stderr)
        raise


@contextmanager
def _compiler() -> Iterator[None]:
    """CC, CXX and PATH name zig's tools within, if there is no compiler and zig is there.

    The binary itself is called: `python -m ziglang` is not found by what the build starts, as it looks for packages in
    its own environment. It is told its target, so that it builds for any processor and not for this one alone.
    """
    zig = find_spec("ziglang")
    if has_compiler() or zig is None or zig.origin is None:
        yield
        return
    binary = Path(zig.origin).with_name("zig")
    libc = "musl" if "musl" in (sysconfig.get_config_var("HOST_GNU_TYPE") or "") else "gnu"
    target = f"-target {platform.machine()}-linux-{libc}"
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="zig-") as folder:
        for tool, command in TOOLS.items():
            script = Path(folder, tool)
            options = f" {target}" if tool in ("cc", "c++") else ""
            script.write_text(f'#!/bin/sh\nexec "{binary}" {command}{options} "$@"\n')
            script.chmod(script.stat().st_mode | stat.S_IXUSR)
        path = os.pathsep.join((folder, before.get("PATH", os.defpath)))
        os.environ.update(
            CC=f"{folder}/cc", CXX=f"{folder}/c++", AR=f"{folder}/ar", RANLIB=f"{folder}/ranlib", PATH=path
        )
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)
