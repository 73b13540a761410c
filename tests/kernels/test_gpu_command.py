"""benchmarks/gpu: a part that fails, hangs or dies costs itself alone, and what it had written is kept."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernels.backends import BACKENDS

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    loader = SourceFileLoader("benchmarks_gpu", str(SCRIPT))
    spec = importlib.util.spec_from_loader("benchmarks_gpu", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmarks_gpu"] = module  # its dataclass looks itself up
    loader.exec_module(module)
    return module


def python(gpu: ModuleType, name: str, code: str, limit_s: float = 30.0) -> dict:
    return gpu.Part(name, ["-c", f"import json, sys, time, os, pathlib; {code}"], limit_s)


REPORT = "pathlib.Path(sys.argv[1]).write_text(json.dumps({'steps': []}))"


def test_parts_end_alone(gpu: ModuleType, tmp_path: Path) -> None:
    late = python(gpu, "late", f"{REPORT}; time.sleep(60)")
    report = gpu.run(late, 1.5, tmp_path, True)
    assert report["error"] == "not done after 2 s"
    assert report["steps"] == []
    assert report["seconds"] < 20
    assert gpu.run(python(gpu, "dies", "os.abort()"), 30, tmp_path, True)["error"] == "exit status -6"
    fails = gpu.run(python(gpu, "fails", f"{REPORT}; sys.exit(1)"), 30, tmp_path, True)
    assert (fails["error"], fails["steps"]) == ("exit status 1", [])
    fine = gpu.run(python(gpu, "fine", REPORT), 30, tmp_path, True)
    assert "error" not in fine


def test_a_late_part_ends_its_servers(gpu: ModuleType, tmp_path: Path) -> None:
    """They are in sessions of their own, and would keep the GPU's memory."""
    pid_file = tmp_path / "server.pid"
    program = f"Program([sys.executable, '-c', 'import time; time.sleep(60)'], pathlib.Path({str(tmp_path / 'log')!r}))"
    script = [f"sys.path.insert(0, {str(SCRIPT.parents[1] / 'scripts')!r})", "from harness.programs import Program"]
    script += [f"server = {program}", f"pathlib.Path({str(pid_file)!r}).write_text(str(server.pid))"]
    late = python(gpu, "late", "; ".join(script) + "\nwith server: time.sleep(60)", 4.0)
    assert gpu.run(late, 4.0, tmp_path, True)["error"] == "not done after 4 s"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_reports_are_seen_while_they_grow(gpu: ModuleType, tmp_path: Path) -> None:
    """So that an end by force from outside loses nothing."""
    first = REPORT.replace("[]", "[1]")
    code = f"{first}; time.sleep(2.5); {REPORT.replace('[]', '[1, 2]')}; time.sleep(2.5)"
    seen: list[dict] = []
    gpu.run(python(gpu, "grows", code), 30, tmp_path, True, seen.append)
    assert [report["steps"] for report in seen] == [[1], [1, 2]]


def test_failures_are_shown_shortly(gpu: ModuleType, tmp_path: Path) -> None:
    lines = ["import engine.config", "engine.config.EngineConfig(dtype='none')"]
    (tmp_path / "fails.py").write_text("\n".join(lines))
    report = gpu.run(gpu.Part("fails", [str(tmp_path / "fails.py")], 60.0), 60, tmp_path, True)
    place, message = report["where"].splitlines()
    assert place.startswith("  engine/config.py:")
    assert "ConfigError: --dtype: got 'none'" in message
    assert "Traceback" in report["log_end"]
    lines = gpu.summary({"fails": report})
    assert lines[-2:] == ["-- fails", report["where"]]
    text = "tests/a.py:7: in test_x\n    assert f()\nE   assert 1 == 2\nE    +  where 1 = f()\nplain words\n"
    assert gpu.compact(text) == "  tests/a.py:7: in test_x\nE   assert 1 == 2\nE    +  where 1 = f()"
    assert gpu.compact("Killed\n") == "Killed"
    assert len(gpu.compact("E   x\n" * 9 + "\n".join(f"E   {i}" for i in range(9999)))) <= gpu.FAILURE_CHARS


def test_the_plan_fits_its_time(gpu: ModuleType) -> None:
    """That it works first, and what must be shown before the time can be up, whatever the others take."""
    names = [part.name for part in gpu.parts(smoke=False)]
    assert names[:4] == ["works", "qwen3-8b", "served", "tests"]
    assert {"kernels", "qwen3-0.6b", "qwen3.5-4b", "nemotron-h-8b", "host", "host-waits"} <= set(names)
    assert "flash-attn" in set(names) & set(BACKENDS)
    limits = [part.limit_s for part in gpu.parts(smoke=False)]
    assert sum(limits[:4]) <= gpu.SECONDS < 540


def test_every_part_has_something_to_run(gpu: ModuleType) -> None:
    """Files, options and names of kernels that are there."""
    sys.path.insert(0, str(SCRIPT.parent))
    from kernel_cases import Bench, Shape

    cases = [name for name, _ in Bench(Shape(), torch.device("meta"), torch.bfloat16).cases()]
    assert any(name.startswith("draw") for name in cases)
    for part in gpu.parts(smoke=False):
        for path in (Path(word) for word in part.command if word.startswith(str(SCRIPT.parent))):
            assert path.is_file()
        for path in (word for word in part.command if word.startswith("tests/")):
            assert (SCRIPT.parents[1] / path).exists()
        if "--only" in part.command:
            only = part.command[part.command.index("--only") + 1]
            assert any(only in name for name in cases)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_run(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--json", str(tmp_path / "gpu.json"), "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "no CUDA device: nothing is run" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_part_without_its_package_is_passed_over(gpu: ModuleType) -> None:
    part = gpu.borrowed("flash-attn", "prefill", "no_such_package")
    assert part.skipped == "not installed: no_such_package"
    assert gpu.borrowed("flash-attn", "prefill", "no_such_package", "torch").skipped is None
    (line,) = gpu.summary({"flash-attn": {"skipped_part": part.skipped, "seconds": 0.0}})
    assert line.split() == ["flash-attn", "passed", "over,", "not", "installed:", "no_such_package"]


def test_the_table(gpu: ModuleType) -> None:
    counts = gpu.test_counts("FAILED tests/x.py::test_a[1] - boom\n===\n1 failed, 97 passed, 2 skipped in 60.1s")
    step = {"step": "decode 1 x 1024", "time_ms": 5.0, "share": 0.65, "bound": "bandwidth"}
    step["kernels"] = [{"kernel": "gemv", "launches": 144, "us": 4100.0}]
    lines = gpu.summary(
        {
            "tests": counts | {"seconds": 61.0},
            "qwen3-8b": {"steps": [step], "copy_bytes_per_s": 4e12, "matrix_flops": 7e14},
            "kernels": {"error": "not done after 110 s", "results": [{"name": "rotate", "error": 1e-3}]},
        }
    )
    text = "\n".join(lines)
    assert "97 passed, 1 failed, 2 skipped" in text
    assert "FAILED tests/x.py::test_a[1]" in text
    assert "(aim 70%: MISSED)" in text
    assert "4100 us  144 x gemv" in text
    assert "1 kernels timed; largest error 1.0e-03 (rotate)" in text
    assert "ENDED: not done after 110 s" in text
