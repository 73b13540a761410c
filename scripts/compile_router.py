"""Compile the router's byte path with mypyc: the same modules, from the same sources, in half the CPU time.

    python scripts/compile_router.py --out DIR [--fast]

Called by CMake when a wheel is built. Editable installations are not compiled, so that edited sources count. Where
mypyc or a C compiler is missing, it says so and succeeds: the modules are then interpreted, with the same results.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("http", "sharing", "decide", "edge", "picker", "app", "prompting", "turns")
"""What runs for every request or chunk."""
PROMPTS = ("messages", "prefixes", "routing", "segments", "skeletons", "tokenizer")
"""Of `prompts`, which the engine has too: what runs for every prompt."""
RARE = """#include <CPy.h>
#define RARE(name) extern __typeof__(name) name __attribute__((cold))
RARE(CPy_AddTraceback);
RARE(CPy_TypeError);
RARE(CPy_TypeErrorTraceback);
RARE(CPy_AttributeError);
RARE(CPyError_OutOfMemory);
RARE(CPy_DecRef);
"""
"""What mypyc calls where something was raised. The compiler then puts these ways, a quarter of the code, apart from
those that are gone: less of the processor's cache for instructions is taken by what does not run."""
NOT_COMPILED = re.compile(r"\((?:msgspec\.)?Struct\b|^import click$|\bAsync(?:Iterator|Generator)\[", re.MULTILINE)


def modules() -> list[str]:
    """The files to compile: what reads prompts, and all of these rooms but msgspec structs, which msgspec builds in C,
    the command line, asynchronous generators, which mypyc does not know, and configurations, whose annotations are read
    (router/*/config.py; mypyc keeps none). A dataclass's constructor stays interpreted (0.85 us, not 0.06): what is
    made for every request has one of its own, or is a struct."""
    files = [ROOT / "router" / "counters.py", *(ROOT / "prompts" / f"{name}.py" for name in PROMPTS)]
    files += [file for room in ROOMS for file in sorted((ROOT / "router" / room).glob("*.py"))]
    files = [file for file in files if file.name != "config.py" and not NOT_COMPILED.search(file.read_text())]
    return [str(file.relative_to(ROOT)) for file in files]


def compile_modules(out: Path, *, optimise: str = "2") -> int:
    """Build the modules into `out`/router and `out`/prompts; how many were built."""
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
        for package in ("router", "prompts", "events", "options"):
            shutil.copytree(ROOT / package, work / package, ignore=left_out)
        os.chdir(work)
        # Without site packages: what is installed where a wheel is built must not change what is built.
        flags = ["--no-site-packages", "--ignore-missing-imports", "--follow-imports=silent"]
        flags.append(f"--python-version=3.{sys.version_info[1]}")
        extensions = mypycify([*flags, *modules()], opt_level=optimise, debug_level="0", group_name="router_compiled")
        if sys.platform != "win32":  # it reads the one large file again and again: five sixths of the compiler's time
            (work / "rare.h").write_text(RARE)
            for extension in extensions:
                extension.extra_compile_args = [*extension.extra_compile_args, "-Wno-misleading-indentation"]
                # What holds the code; the others only lead there, and do not know mypyc's headers.
                if extension.include_dirs:
                    # Hidden: calls between the modules go by no table, and what is short is put where it is called.
                    extension.extra_compile_args += ["-fvisibility=hidden", "-include", str(work / "rare.h")]
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
    parser.add_argument("--fast", action="store_true", help="Without optimisation: for tests.")
    arguments = parser.parse_args()
    out = arguments.out
    shutil.rmtree(out, ignore_errors=True)  # of an earlier build: what fails to compile must not be found there
    out.mkdir(parents=True)
    made = compile_modules(out, optimise="0" if arguments.fast else "2")
    print(f"router: {made} extension modules in {out}")


if __name__ == "__main__":
    main()
