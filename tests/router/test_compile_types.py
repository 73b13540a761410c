"""The sources that a wheel compiles must be sound where a wheel is built: without the libraries of the router."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_what_is_compiled_has_sound_types_where_no_library_is_installed(tmp_path: Path) -> None:
    """pip builds wheels in an environment that holds the build's own needs and nothing else."""
    where = ROOT / "scripts" / "compile_router.py"
    spec = importlib.util.spec_from_file_location("compile_router", where)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    files = module.modules()
    flags = ["--no-site-packages", "--ignore-missing-imports", "--follow-imports=silent"]
    config = tmp_path / "mypy.ini"  # the project's own configuration is not the build's
    config.write_text("[mypy]\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(tmp_path), *flags, *files]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
