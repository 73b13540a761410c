"""Compile the router's byte path with mypyc: the same modules, from the same sources, in half the CPU time.

    python router/native/compile.py --out DIR

Called by CMake when a wheel is built. Editable installations are not compiled, so that edited sources count. Where
mypyc or a C compiler is missing, it says so and succeeds: the modules are then interpreted, with the same results.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MODULES = (
    "accounting",
    "choose",
    "core",
    "dashboard",
    "exchange",
    "held",
    "history",
    "http_headers",
    "http_request",
    "http_response",
    "http_server",
    "learn",
    "metrics",
    "pins",
    "policy",
    "progress",
    "proxy",
    "registry",
    "relay",
    "rewrite",
    "server",
    "sessions",
    "target",
    "tracker",
    "upstream",
    "usage",
    "watchdog",
    "working_set",
)
"""What runs for every request or chunk. Modules of msgspec structs are not among them: msgspec builds those in C."""


def compile_modules(out: Path) -> int:
    """Build the modules into `out`/router; how many were built."""
    try:
        from mypyc.build import mypycify
        from setuptools import Distribution
        from setuptools.errors import BaseError, CompileError
    except ImportError as error:
        print(f"router: not compiled, it will be interpreted: {error}")
        return 0
    work = Path(tempfile.mkdtemp(prefix="router-mypyc-"))
    try:
        left_out = shutil.ignore_patterns("native", "*.so", "*.pyd", "__pycache__")
        for package in ("router", "prompts", "events"):
            shutil.copytree(ROOT / package, work / package, ignore=left_out)
        os.chdir(work)
        files = [f"router/{name}.py" for name in MODULES]
        flags = ["--ignore-missing-imports", "--follow-imports=silent", f"--python-version=3.{sys.version_info[1]}"]
        extensions = mypycify([*flags, *files], opt_level="2", debug_level="0", group_name="router_compiled")
        distribution = Distribution({"name": "router-compiled", "ext_modules": extensions})
        command = distribution.get_command_obj("build_ext")
        command.build_lib = str(out.resolve())
        command.build_temp = str(work / "temp")
        command.ensure_finalized()
        command.run()
    except (SystemExit, BaseError, CompileError) as error:
        print(f"router: not compiled, it will be interpreted: {error}")
        return 0
    finally:
        os.chdir(ROOT)
        shutil.rmtree(work, ignore_errors=True)
    return len(list(out.rglob("*.so"))) + len(list(out.rglob("*.pyd")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    shutil.rmtree(out, ignore_errors=True)  # of an earlier build: what fails to compile must not be found there
    out.mkdir(parents=True)
    print(f"router: {compile_modules(out)} extension modules in {out}")


if __name__ == "__main__":
    main()
