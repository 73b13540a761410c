"""The sources that a wheel compiles must be sound where a wheel is built: without the libraries of the router."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def compiled_files() -> list[str]:
    where = ROOT / "scripts" / "compile_router.py"
    spec = importlib.util.spec_from_file_location("compile_router", where)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    files: list[str] = module.modules()
    return files


def test_no_name_of_an_exception_has_two_types() -> None:
    """mypyc gives a name one type for the whole function: the second `except ... as error` raises TypeError."""
    found = []
    for file in compiled_files():
        for function in ast.walk(ast.parse((ROOT / file).read_text())):
            if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            kinds: dict[str, str] = {}
            for handler in ast.walk(function):
                if isinstance(handler, ast.ExceptHandler) and handler.name and handler.type is not None:
                    kind = ast.unparse(handler.type)
                    if kinds.setdefault(handler.name, kind) != kind:
                        found.append(f"{file}:{handler.lineno}: {handler.name} is {kinds[handler.name]} and {kind}")
    assert not found


def test_what_is_compiled_has_sound_types_where_no_library_is_installed(tmp_path: Path) -> None:
    """pip builds wheels in an environment that holds the build's own needs and nothing else."""
    files = compiled_files()
    flags = ["--no-site-packages", "--ignore-missing-imports", "--follow-imports=silent"]
    config = tmp_path / "mypy.ini"  # the project's own configuration is not the build's
    config.write_text("[mypy]\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(tmp_path), *flags, *files]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
