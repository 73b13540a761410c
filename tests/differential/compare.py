"""Compare what the router does with what it did: with another checkout, or with the recorded digests.

python -m tests.differential.compare --old PATH --seeds 0-99        both sides run; prints the first difference
python -m tests.differential.compare --seeds 0-39                   against tests/differential/recorded
python -m tests.differential.compare --record decisions,metrics     records these parts anew, and no other
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).parent / "recorded"
RECORDED_SEEDS = {
    "least_requests": [*range(40), *range(1000, 1010), *range(2000, 2010), *range(3000, 3012)],
    "round_robin": [*range(10)],
    "kv": [*range(20), *range(1000, 1007), *range(2000, 2005), *range(3000, 3003)],
    "core_least_requests": [*range(40)],
    "core_kv": [*range(40)],
}
"""Policy -> seeds whose digests are recorded. `core_POLICY`: histories of the core alone."""
POLICIES = tuple(RECORDED_SEEDS)
CONTEXT_LINES = 4
PROGRAM_VARIABLE = "DIFFERENTIAL_PROGRAM"
"""Environment variable that names the file to use for program.py."""
_RUN = "import sys; sys.path.insert(0, sys.argv.pop(1)); from differential.replay import main; main()"


def iter_results(
    checkout: Path, policy: str, seeds: Sequence[int], *arguments: str, program: Path | None = None
) -> Iterator[dict[str, Any]]:
    """Run seeds on the code of a checkout and yield a result a seed. `program`: another program.py. Raises
    RuntimeError where the run fails."""
    python = checkout / ".venv/bin/python"
    command = [
        str(python) if python.exists() else sys.executable, "-c", _RUN, str(ROOT / "tests"),
        policy, ",".join(map(str, seeds)), *arguments,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONHASHSEED": "0"}
    if program is not None:
        environment[PROGRAM_VARIABLE] = str(program)
    process = subprocess.Popen(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode:
        raise RuntimeError(f"the replay of {policy} on {checkout} ended with {process.returncode}")


def find_difference(old: Sequence[str], new: Sequence[str]) -> int | None:
    """Return the place of the first line that differs."""
    for i, (old_line, new_line) in enumerate(zip(old, new)):
        if old_line != new_line:
            return i
    return None if len(old) == len(new) else min(len(old), len(new))


def describe_difference(part: str, old: Sequence[str], new: Sequence[str]) -> str:
    """Show the first line that differs, with what is before and behind it on both sides."""
    place = find_difference(old, new)
    assert place is not None
    context = [f"    {line[:300]}" for line in old[max(0, place - CONTEXT_LINES) : place]]
    sides = [
        f"  {side} {line[:1000]}"
        for side, lines in (("-", old), ("+", new))
        for line in lines[place : place + CONTEXT_LINES]
    ]
    return "\n".join([f"{part}, line {place} (- old, + new):", *context, *sides])


def compare_checkouts(old: Path, seeds_by_policy: dict[str, list[int]], old_program: Path | None = None) -> int:
    """Run both sides, print every differing seed's parts and the first difference of the first; return the number."""
    differing = 0
    counts: Counter[str] = Counter()
    for policy, seeds in seeds_by_policy.items():
        old_results = iter_results(old, policy, seeds, "--lines", program=old_program)
        pairs = zip(old_results, iter_results(ROOT, policy, seeds, "--lines"))
        shown: set[str] = set()
        for old_result, new_result in pairs:
            parts = [
                part for part in new_result["digests"] if old_result["digests"][part] != new_result["digests"][part]
            ]
            if not parts:
                continue
            differing += 1
            counts.update(parts)
            print(f"{policy} seed {new_result['seed']}: {', '.join(parts)} differ", flush=True)
            for part in parts:
                if part not in shown:
                    shown.add(part)
                    print(describe_difference(part, old_result["lines"][part], new_result["lines"][part]), flush=True)
    parts_text = ", ".join(f"{part} {count}" for part, count in counts.items()) or "none"
    runs = sum(map(len, seeds_by_policy.values()))
    print(f"{runs} runs of seeds: {differing} differ (parts: {parts_text})")
    return differing


def read_recorded(policy: str) -> dict[str, dict[str, str]]:
    """Return seed -> part -> digest."""
    path = RECORDED / f"{policy}.json"
    recorded: dict[str, dict[str, str]] = json.loads(path.read_text()) if path.exists() else {}
    return recorded


def find_changes(policy: str, seeds: Sequence[int], *flags: str) -> dict[int, list[str]]:
    """Return the seeds whose digests are not the recorded ones, and which parts differ. `flags`: further ones of the
    router."""
    recorded, parts_by_seed = read_recorded(policy), {}
    for result in iter_results(ROOT, policy, seeds, "--flags", *flags):
        expected = recorded[str(result["seed"])]
        parts = [part for part, digest in result["digests"].items() if expected[part] != digest]
        if parts:
            parts_by_seed[result["seed"]] = parts
    return parts_by_seed


def record(seeds_by_policy: dict[str, list[int]], parts: Sequence[str]) -> None:
    """Write the digests of some parts anew and leave the others as they are."""
    for policy, seeds in seeds_by_policy.items():
        recorded = read_recorded(policy)
        changed: Counter[str] = Counter()
        other: Counter[str] = Counter()
        for result in iter_results(ROOT, policy, seeds):
            digests = recorded.setdefault(str(result["seed"]), {})
            for part, digest in result["digests"].items():
                is_chosen = part in parts or "all" in parts
                (changed if is_chosen else other)[part] += digests.get(part) != digest
                if is_chosen:
                    digests[part] = digest
        lines = [f'"{seed}": {json.dumps(recorded[seed])}' for seed in sorted(recorded, key=int)]
        RECORDED.mkdir(exist_ok=True)
        (RECORDED / f"{policy}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print(f"{policy}: seeds recorded anew: {dict(changed)}; still not as recorded: {dict(+other)}", flush=True)


def read_seeds(text: str) -> list[int]:
    """Read `0-14,1000-1007,2000`."""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    return seeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="an older checkout, with its own .venv")
    parser.add_argument("--old-program", type=Path, help="program.py for the old side; by default its own, or this one")
    parser.add_argument(
        "--seeds", type=read_seeds, help="FIRST-LAST, or several of these; the recorded ones by default"
    )
    parser.add_argument("--policy", action="append", choices=POLICIES, help="may be repeated; all by default")
    parser.add_argument("--record", help="parts, separated by commas, or `all`")
    arguments = parser.parse_args()
    seeds_by_policy = {policy: arguments.seeds or RECORDED_SEEDS[policy] for policy in arguments.policy or POLICIES}
    if arguments.record:
        record(seeds_by_policy, arguments.record.split(","))
    elif arguments.old:
        old = arguments.old.resolve()
        own_program = old / "tests/differential/program.py"
        old_program = arguments.old_program or (own_program if own_program.exists() else None)
        sys.exit(compare_checkouts(old, seeds_by_policy, old_program) > 0)
    else:
        changes = [
            f"{policy} seed {seed}: {', '.join(parts)}"
            for policy, seeds in seeds_by_policy.items()
            for seed, parts in find_changes(policy, [s for s in seeds if s in RECORDED_SEEDS[policy]]).items()
        ]
        print("\n".join(changes) or "as recorded")
        sys.exit(bool(changes))


if __name__ == "__main__":
    main()
