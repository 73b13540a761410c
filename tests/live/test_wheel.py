"""The wheel as users install it: what it ships, and that its folder names get on with the libraries it stands on."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.long, pytest.mark.live]

WITHOUT_THE_CLONE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
sys.path.insert(0, WHEEL)
"""

USE_TRANSFORMERS = """
import engine, events, kernels, options, prompts, router, simulation
from pathlib import Path
modules = (engine, events, kernels, options, prompts, router, simulation)
homes = {Path(module.__file__).parent.parent for module in modules}
assert homes == {Path(WHEEL)}, homes
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
config = Qwen3Config(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                     intermediate_size=32, vocab_size=64)
model = AutoModelForCausalLM.from_config(config)
print(tuple(model(torch.arange(5)[None]).logits.shape))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without its C++ parts, which take minutes: names and files are looked at here."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    build_process = subprocess.run([*command, "-Cwheel.cmake=false", str(ROOT)], capture_output=True, text=True)
    assert build_process.returncode == 0, build_process.stderr
    return next(folder.glob("blockcast-*.whl"))


def test_the_wheel_ships_what_runs_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
    packages = {"engine", "events", "kernels", "options", "prompts", "router", "simulation"}
    assert packages <= {name.split("/")[0] for name in names}
    assert not [name for name in names if name.startswith(("tests/", "scripts/", "benchmarks/"))]
    assert "engine/tiny/data/tiny_merges.txt" in names
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))
    with zipfile.ZipFile(wheel) as content:
        entry_point_text = content.read(entry_points).decode()
    assert "engine = " in entry_point_text
    assert "router = " in entry_point_text


def test_transformers_works_beside_a_package_called_kernels(wheel: Path, tmp_path: Path) -> None:
    """transformers looks for a package `kernels` of a version range; ours must not be taken for it."""
    home = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(home), str(wheel)]
    assert subprocess.run(install, capture_output=True, text=True).returncode == 0
    script = f"WHEEL = {str(home)!r}\n" + WITHOUT_THE_CLONE + USE_TRANSFORMERS
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "(1, 5, 64)"


def test_the_router_runs_where_there_is_no_torch(tmp_path: Path) -> None:
    """Importing and starting the router touches neither torch nor transformers."""
    script = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None; sys.modules['numpy'] = None\n"
        "import router.app.process, router.app.cli\n"
        "from router.__main__ import main\n"
        "sys.argv = ['router', 'run', '--help']; main()"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 0, process.stderr
    assert "Send each request" in process.stdout


COMPILER = r"gcc|g\+\+|cc$|c\+\+|clang|cpp|ld$|ld\.|ar$|as$|ranlib|make$|ninja|cmake"


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_backend", ROOT / "scripts" / "build_backend.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delenv("CXX", raising=False)
    return module


def test_where_there_is_no_compiler_the_build_uses_the_registrys(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "ziglang>=0.13" not in backend._requires([])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "ziglang>=0.13" in backend._requires([])
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang" / "__init__.py").touch()
    zig = tmp_path / "ziglang" / "zig"
    zig.write_text('#!/bin/sh\necho "$@"\n')
    zig.chmod(0o755)
    monkeypatch.syspath_prepend(str(tmp_path))
    with backend._compiler():
        for variable, command in (("CC", "cc -target"), ("CXX", "c++ -target"), ("AR", "ar x"), ("RANLIB", "ranlib x")):
            output = subprocess.run([os.environ[variable], "x"], capture_output=True, text=True, check=True).stdout
            assert output.startswith(command), output
        assert shutil.which("c++") == os.environ["CXX"]
    assert "CXX" not in os.environ


def test_a_failed_build_says_what_to_do(backend: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> str:
        raise SystemExit(1)

    with pytest.raises(SystemExit):
        backend._build(fails)
    assert "C++17 compiler" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_wheel_is_built_where_there_is_no_compiler(tmp_path: Path) -> None:
    """All of it: the index, what finds words and the CPU kernels."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for folder in os.environ["PATH"].split(os.pathsep):
        for file in Path(folder).glob("*"):
            if not re.search(COMPILER, file.name) and not (tools / file.name).exists():
                (tools / file.name).symlink_to(file)
    environment = {**os.environ, "PATH": str(tools), "PYTHONPATH": "", "BLOCKCAST_KERNELS": "ON"}
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    build_process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert build_process.returncode == 0, build_process.stdout[-4000:] + build_process.stderr[-4000:]
    with zipfile.ZipFile(next(tmp_path.glob("blockcast-*.whl"))) as content:
        extensions = {name.rpartition(".cpython")[0] for name in content.namelist() if name.endswith(".so")}
    assert {"router/index/_native", "kernels/cpu/_native"} <= extensions


def test_an_engine_without_its_native_operations_serves_and_says_how_to_get_them(tmp_path: Path) -> None:
    """A wheel has them only where the build was asked for them (BLOCKCAST_KERNELS)."""
    script = (
        "import sys; sys.modules['kernels.cpu._native'] = None\n"
        "from engine import LLM, SamplingParams\n"
        "with LLM(num_gpu_blocks_override=64) as llm:\n"
        "    print(len(llm.generate('Hello', SamplingParams(max_tokens=5, ignore_eos=True))[0].outputs[0].token_ids))\n"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == "5"
    assert "BLOCKCAST_KERNELS=ON pip install" in process.stderr
