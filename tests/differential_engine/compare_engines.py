#!/usr/bin/env python3
"""Play seeded histories on two versions of the engine, each in a process of its own, and print the first difference.

    tests/differential_engine/compare_engines.py OLD_CHECKOUT [--first 0] [--count 5000]
    tests/differential_engine/compare_engines.py OLD_CHECKOUT --record

A checkout is a folder with the project's source. The new version is this checkout. `--record` writes `digests.txt`
from the old one: the test beside this file holds the engine to it. Record it anew only after a change that is meant.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
DIGESTS = FOLDER / "digests.txt"
HISTORY_COUNT = 5000
SEEDS_PER_DIGEST = 25
CONTEXT_LINES = 6


def combine_digests(digests: list[str]) -> str:
    """Return one digest for those of several histories."""
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16]


def start_player(root: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a process that plays histories on the engine of a checkout."""
    environment = os.environ | {"PYTHONPATH": f"{root}:{root / 'tests' / 'engine'}:{FOLDER}", "PYTHONHASHSEED": "0"}
    command = [sys.executable, str(FOLDER / "compare_engines.py"), str(root), *arguments]
    return subprocess.Popen(command, env=environment, cwd=root, stdout=subprocess.PIPE, text=True)


def run_player(root: Path, *arguments: str) -> str:
    process = start_player(root, *arguments)
    output, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{root}: the process that plays histories ended with {process.returncode}")
    return output


def play(root: Path, first: int, count: int, *, prints_lines: bool) -> None:
    """Print the digest of each history, or all lines of one. This is the process of one version."""
    import engine

    if not Path(engine.__file__ or "").is_relative_to(root):
        raise SystemExit(f"{root}: its engine is not the one that is imported, which is {engine.__file__}")
    from engine_history import compute_digest, play_history

    for seed in range(first, first + count):
        try:
            lines = play_history(seed)
        except Exception as error:  # noqa: BLE001 - the other version may have the same fault: it is part of the digest
            lines = [f"seed {seed} ends with {type(error).__name__}: {error}"]
        print("\n".join(lines) if prints_lines else compute_digest(lines), flush=True)


def print_difference(old: Path, seed: int) -> None:
    arguments = ("--play", "--first", str(seed), "--lines")
    old_lines, new_lines = run_player(old, *arguments).splitlines(), run_player(ROOT, *arguments).splitlines()
    for number, (old_line, new_line) in enumerate(zip_longest(old_lines, new_lines)):
        if old_line != new_line:
            for line in old_lines[max(0, number - CONTEXT_LINES) : number]:
                print(f"      {line}")
            print(f"old   {old_line}\nnew   {new_line}")
            return
    print("the lines are the same this time: something is drawn that the seed does not decide")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", type=Path, metavar="OLD_CHECKOUT")
    parser.add_argument("--first", type=int, default=0, help="first seed (default: 0)")
    parser.add_argument("--count", type=int, default=HISTORY_COUNT, help=f"number of seeds (default: {HISTORY_COUNT})")
    parser.add_argument("--record", action="store_true", help="write digests.txt from the old version")
    parser.add_argument("--play", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--lines", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    old = options.old.resolve()
    if options.play:
        play(old, options.first, 1 if options.lines else options.count, prints_lines=options.lines)
        return 0
    if options.record:
        digests = run_player(old, "--play", "--count", str(options.count)).split()
        rows = [digests[at : at + SEEDS_PER_DIGEST] for at in range(0, len(digests), SEEDS_PER_DIGEST)]
        DIGESTS.write_text("".join(f"{i * SEEDS_PER_DIGEST} {combine_digests(row)}\n" for i, row in enumerate(rows)))
        return 0
    arguments = ("--play", "--first", str(options.first), "--count", str(options.count))
    players = [start_player(root, *arguments) for root in (old, ROOT)]
    outputs = [player.stdout for player in players]
    assert outputs[0] is not None
    assert outputs[1] is not None
    compared_count = 0
    for seed, (old_digest, new_digest) in enumerate(zip(*outputs), options.first):
        compared_count += 1
        if old_digest != new_digest:
            for player in players:
                player.kill()
                player.wait()
            print(f"seed {seed} differs")
            print_difference(old, seed)
            return 1
    codes = [player.wait() for player in players]
    print(f"{compared_count} histories, the same in both")
    return 0 if compared_count == options.count and codes == [0, 0] else 1


if __name__ == "__main__":
    sys.exit(main())
