"""The router as a wheel holds it, compiled by mypyc, passes the tests that the sources pass.

Editable installations interpret the sources, so nothing else here runs what users run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPILE = ROOT / "scripts" / "compile_router.py"
TESTS = ("edge", "test_core.py", "test_policy.py", "test_returning.py")

RUN = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
sys.path.insert(0, HOME)
import prompts.segments, router.decide.core, router.edge.exchange, router.app.metrics_page
modules = (prompts.segments, router.decide.core, router.edge.exchange, router.app.metrics_page)
found = {module.__file__ for module in modules}
assert not [file for file in found if not file.startswith(HOME) or file.endswith(".py")], found
import pytest
# What earlier tests left to the garbage collector is looked at where the sources are tested.
ignored = "ignore::pytest.PytestUnraisableExceptionWarning"
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", ignored, *TESTS]))
"""

pytestmark = [pytest.mark.live, pytest.mark.begins_first, pytest.mark.timeout(900)]


def test_the_compiled_router_passes_the_tests_of_its_sources(tmp_path: Path) -> None:
    home = tmp_path / "home"
    rubbish = shutil.ignore_patterns("__pycache__")
    for name in ("router", "prompts", "events", "options", "engine"):
        shutil.copytree(ROOT / name, home / name, ignore=rubbish)
    for name in ("tests/router", "tests/prompts", "tests/contracts", "tests/golden", "docs", "scripts/harness"):
        shutil.copytree(ROOT / name, home / name, ignore=rubbish)
    shutil.copy(ROOT / "pyproject.toml", home)
    shutil.copy(ROOT / "tests" / "conftest.py", home / "tests")
    built = tmp_path / "built"
    command = [sys.executable, str(COMPILE), "--out", str(built), "--fast"]
    compiled = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert compiled.returncode == 0, compiled.stderr
    assert (built / "router").is_dir(), f"nothing was compiled:\n{compiled.stdout}{compiled.stderr}"
    shutil.copytree(built, home, dirs_exist_ok=True)
    tests = [f"tests/router/{name}" for name in TESTS]
    script = f"HOME = {str(home)!r}\nTESTS = {tests!r}\n{RUN}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=home)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
