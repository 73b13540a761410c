"""The demo of KV that moves: agents ask about long texts at workers with small caches, with and without pulls."""

from __future__ import annotations

import asyncio
import json
import secrets
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

from harness.conversations import make_conversations, run_agents, share_contexts
from harness.figures import percentile
from harness.load import StreamOutcome
from harness.programs import Cluster, read_metric, serve_engine

CONTEXT_TOKENS = 1200
QUESTION_TOKENS = 150
BLOCK_TOKENS = 16
SEED = 1
ENGINE_FLAGS = ("--dtype", "float32", "--max-num-batched-tokens", "256")
"""With float32 a greedy text does not depend on which requests are computed together. Engines move blocks between their
steps, so the steps are short."""
ROUTER_FLAGS = ("--log-requests", "1", "--log-json")
COLUMNS = {
    "prompt tokens": ("prompt_tokens", "{:,}"), "computed": ("computed_tokens", "{:,}"),
    "TTFT mean": ("ttft_mean_ms", "{:.0f} ms"), "TTFT p99": ("ttft_p99_ms", "{:.0f} ms"),
    "pulls": ("pulls", "{:,.0f}"), "their TTFT": ("pull_ttft", "{}"), "blocks moved": ("pulled_blocks", "{:,.0f}"),
    "equal texts": ("equal_texts", "{}"),
}  # fmt: skip


@dataclass
class MovingResult:
    """Outcomes of requests in all rounds with caches of one size, with or without pulls."""

    outcomes: list[StreamOutcome] = field(default_factory=list)
    different_texts: list[str] = field(default_factory=list)
    """Names of requests with another text than at the engine without a prefix cache."""
    pulls: float = 0
    pulled_blocks: float = 0
    pull_ttfts_ms: list[tuple[float, float]] = field(default_factory=list)
    """(predicted, measured) time to first token of each request that was to pull."""

    def add(self, outcomes: Mapping[str, StreamOutcome], expected: Mapping[str, StreamOutcome]) -> None:
        """Add the outcomes of one round. `expected`: those of the engine without a prefix cache, by the same names."""
        self.outcomes += outcomes.values()
        self.different_texts += [name for name, outcome in outcomes.items() if outcome.text != expected[name].text]

    def summarize(self) -> dict[str, float | str]:
        """Return the cells of the result's row in the table."""
        ttft_ms = [outcome.ttft_s * 1e3 for outcome in self.outcomes]
        return {
            "prompt_tokens": sum(outcome.prompt_tokens for outcome in self.outcomes),
            "computed_tokens": sum(outcome.prompt_tokens - outcome.cached_tokens for outcome in self.outcomes),
            "ttft_mean_ms": statistics.fmean(ttft_ms),
            "ttft_p99_ms": percentile(ttft_ms, 0.99),
            "pulls": self.pulls,
            "pulled_blocks": self.pulled_blocks,
            "pull_ttft": self._describe_pull_ttfts(),
            "equal_texts": f"{len(self.outcomes) - len(self.different_texts)} of {len(self.outcomes)}",
        }

    def _describe_pull_ttfts(self) -> str:
        """Return the mean predicted and the mean measured TTFT of the requests that were to pull."""
        if not self.pull_ttfts_ms:
            return "-"
        predicted_ms, measured_ms = map(statistics.fmean, zip(*self.pull_ttfts_ms))
        return f"{measured_ms:.0f} ms, predicted {predicted_ms:.0f} ms"


def read_pull_ttfts_ms(router_log: Path) -> list[tuple[float, float]]:
    """Return (predicted, measured) TTFT of each answered request that was to pull, from a router's log in JSON."""
    lines = [json.loads(line) for line in router_log.read_text().splitlines() if '"kv_transfer": "pull"' in line]
    answered = [line for line in lines if "first_byte_seconds" in line]
    return [(line["predicted_ttft_seconds"] * 1e3, line["first_byte_seconds"] * 1e3) for line in answered]


class MovingDemo:
    """Plays agents at one engine without a prefix cache, and then at fleets of workers with small caches."""

    def __init__(self, model: Path, log_dir: Path, worker_count: int, agent_count: int, question_count: int) -> None:
        """`question_count`: questions of an agent. It asks the first one, and then all the others at once."""
        self._model, self._log_dir, self._worker_count = model, log_dir, worker_count
        conversations = make_conversations(model, agent_count, question_count, CONTEXT_TOKENS, QUESTION_TOKENS)
        self._agents = share_contexts(conversations, SEED)
        self._key_file = log_dir / "fleet.key"
        self._key_file.write_text(secrets.token_hex(16))
        self._expected = self._play_without_cache()
        """Outcomes at the engine without a prefix cache, by the requests' names."""

    def _play_without_cache(self) -> dict[str, StreamOutcome]:
        click.echo("playing at one engine without a prefix cache")
        flags = ("--served-model-name", Cluster.model_name, "--port", "0", *ENGINE_FLAGS, "--no-enable-prefix-caching")
        with serve_engine(self._log_dir / "without-cache.log", str(self._model), *flags) as engine:
            return self._play(engine.await_line())

    def _play(self, url: str) -> dict[str, StreamOutcome]:
        return asyncio.run(run_agents(url, Cluster.model_name, self._agents, self._worker_count))

    def count_working_set(self) -> int:
        """Return how many tokens a cache has to hold so that no prompt is computed twice."""
        context_count = len({agent.context for agent in self._agents})
        own_tokens = sum(outcome.prompt_tokens - CONTEXT_TOKENS for outcome in self._expected.values())
        return context_count * CONTEXT_TOKENS + own_tokens

    def play_cache_size(self, share: int, rounds: int) -> tuple[MovingResult, MovingResult]:
        """Play without pulls and with pulls in turn, and return both results in this order.

        `share`: size of each worker's cache in percent of the working set.
        """
        without_pulls, with_pulls = MovingResult(), MovingResult()
        for _ in range(rounds):
            self._play_fleet(share, without_pulls)
            self._play_fleet(share, with_pulls, ("--kv-transfer-key-file", str(self._key_file)))
        return without_pulls, with_pulls

    def _play_fleet(self, share: int, result: MovingResult, router_flags: Sequence[str] = ()) -> None:
        """Play once at new workers and a new router, and add to the result. A router with the fleet's key pulls."""
        click.echo(f"playing with caches of {share} %, {'with' if router_flags else 'without'} pulls")
        transfer_flags = ("--kv-transfer", "0", "--kv-transfer-key-file", str(self._key_file))
        with Cluster(
            self._model,
            policy="kv",
            num_blocks=self.count_working_set() * share // 100 // BLOCK_TOKENS,
            log_dir=self._log_dir,
            worker_count=self._worker_count,
            engine_flags=(*ENGINE_FLAGS, *transfer_flags),
            router_flags=(*ROUTER_FLAGS, *router_flags),
        ) as cluster:
            result.add(self._play(cluster.url), self._expected)
            for url in cluster.worker_urls:
                result.pulls += read_metric(url, "engine:kv_transfer_pulls_total")
                result.pulled_blocks += read_metric(url, "engine:kv_transfer_pulled_blocks_total")
            result.pull_ttfts_ms += read_pull_ttfts_ms(cluster.router_log)


def play_moving(demo: MovingDemo, cache_shares: Sequence[int], rounds: int) -> dict[str, MovingResult]:
    """Play each cache size, and return the results by the names of their rows in the table."""
    click.echo(f"the prompts have {demo.count_working_set():,} different tokens")
    results: dict[str, MovingResult] = {}
    for share in cache_shares:
        without_pulls, with_pulls = demo.play_cache_size(share, rounds)
        results |= {f"{share} %, no pulls": without_pulls, f"{share} %, pulls": with_pulls}
    return results
