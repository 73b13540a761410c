"""Claude Code, Codex and OpenCode, set up as docs/how-to/connect-coding-agents.md says, through a router to simulated
engines: they answer, and what the router predicts of each prompt is what the engine reports.

The programs are looked for in the folder AGENT_PROGRAMS, else on PATH; a test whose program is absent is skipped:

    npm install --prefix DIR @anthropic-ai/claude-code @openai/codex opencode-ai
    AGENT_PROGRAMS=DIR/node_modules/.bin scripts/test --long
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import Program, call, two_engines_and_a_router, wait_until

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "connect-coding-agents.md"
SPEC = {"prefill_s_per_token": 1e-6, "step_s": 0.001, "kv_tokens": 1 << 18, "max_model_len": 131072}
REQUEST = re.compile(
    r"request request_id=(\S+) .*outcome=(\S+) .*predicted_cached_tokens=(\d+) .*\bcached_tokens=(\d+)"
)
SAID = "Done with it."

pytestmark = [pytest.mark.live, pytest.mark.long]


def find_program(name: str) -> str | None:
    """Where a program is."""
    return shutil.which(name, path=os.environ.get("AGENT_PROGRAMS") or os.environ["PATH"])


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    if not any(map(find_program, ("claude", "codex", "opencode"))):
        pytest.skip("no agent is installed")
    folder = tmp_path_factory.mktemp("agents")
    (folder / "script.txt").write_text(SAID)
    spec = json.dumps({**SPEC, "script": str(folder / "script.txt")})
    engine = ("engine", "serve", "--port", "0", "--served-model-name", "m", "--simulate", spec)
    flags = ("--log-requests", "1", "--model-alias", "claude-*=m", "--set", "miss_reasons.share=1")
    with two_engines_and_a_router(folder, *engine, router_flags=flags) as (_, router):
        yield router


def find(pattern: str, router: Program) -> str:
    """The only text of the page that matches, with the router's address and the model's name."""
    (text,) = re.findall(pattern, PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return re.sub(r"\bMODEL\b", "m", str(text)).replace("http://127.0.0.1:8080", router.url)


class Agent:
    """One of the programs, with a home and a project of its own."""

    def __init__(self, name: str, folder: Path, router: Program) -> None:
        program_path = find_program(name)
        if program_path is None:
            pytest.skip(f"{name} is not installed")
        self._program, self._router = program_path, router
        self.home, self.project = folder / "home", folder / "project"
        self.home.mkdir()
        self.project.mkdir()
        path = f"{Path(program_path).parent}:{os.environ['PATH']}"
        self.environment = {"HOME": str(self.home), "PATH": path, "TERM": "dumb"}

    def run_prompt(self, *args: str) -> list[tuple[str, int]]:
        """Run the program once; of each request that it made, (why something was not cached, tokens cached)."""
        before = len(REQUEST.findall(self._router.log()))
        process = subprocess.run(
            [self._program, *args], cwd=self.project, env=self.environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert process.returncode == 0, process.stdout + process.stderr
        assert SAID in process.stdout, process.stdout + process.stderr
        requests = wait_until(lambda: REQUEST.findall(self._router.log())[before:], "a request is logged")
        for _, outcome, predicted_tokens, reported_tokens in requests:
            assert outcome == "status_200"
            assert predicted_tokens == reported_tokens
        reasons = [call(f"{self._router.url}/requests/{name}")[2]["reason"] for name, *_ in requests]
        return [(reason, int(reported_tokens)) for reason, (*_, reported_tokens) in zip(reasons, requests)]


def goes_on(requests: list[tuple[str, int]]) -> None:
    """The turn found the one before; a title beside it is no edit."""
    assert max(cached_tokens for _, cached_tokens in requests) > 1000
    assert {reason for reason, _ in requests} <= {"new_text", "new_session", "partial_block", "cached_elsewhere"}


@pytest.mark.parametrize("names_a_model", [True, False], ids=["named", "by-alias"])
def test_claude_code(router: Program, tmp_path: Path, names_a_model: bool) -> None:
    agent = Agent("claude", tmp_path, router)
    documented_settings = dict(
        word.split("=", 1) for word in shlex.split(find(r"^(ANTHROPIC_\S[^\n]*) claude$", router))
    )
    assert {"ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"} <= set(documented_settings)
    agent.environment |= {name: text for name, text in documented_settings.items() if names_a_model or text != "m"}
    agent.environment |= {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
    agent.run_prompt("-p", "Do it.")
    goes_on(agent.run_prompt("-c", "-p", "Do it again."))


def test_codex(router: Program, tmp_path: Path) -> None:
    agent = Agent("codex", tmp_path, router)
    (agent.home / ".codex").mkdir()
    (agent.home / ".codex" / "config.toml").write_text(find(r"^```toml\n(.*?)^```", router))
    agent.environment["BLOCKCAST_KEY"] = "KEY"
    agent.run_prompt("exec", "--skip-git-repo-check", "Do it.")
    goes_on(agent.run_prompt("exec", "resume", "--last", "--skip-git-repo-check", "Do it again."))


def test_opencode(router: Program, tmp_path: Path) -> None:
    agent = Agent("opencode", tmp_path, router)
    settings = json.loads(find(r"^```json\n(.*?)^```", router))
    (agent.project / "opencode.json").write_text(json.dumps({**settings, "autoupdate": False, "share": "disabled"}))
    agent.run_prompt("run", "Do it.")
    goes_on(agent.run_prompt("run", "-c", "Do it again."))
