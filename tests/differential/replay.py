"""Run seeds and print what happened, one JSON line a seed: `replay.py POLICY SEED,SEED... [--lines] [--logs]
[--flags FLAG...]`, the last of which are further flags of `router run`.

Runs in a process of its own, because the clocks of `time` are replaced before anything else is imported. The code
under test is that of the environment which runs it."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import logging
import os
import sys


def main() -> None:
    virtual_loop = importlib.import_module(f"{__package__}.virtual_loop")
    clock = virtual_loop.VirtualClock()
    clock.install()
    other_program = os.environ.get("DIFFERENTIAL_PROGRAM")
    if other_program:
        spec = importlib.util.spec_from_file_location(f"{__package__}.program", other_program)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[f"{__package__}.program"] = module
        spec.loader.exec_module(module)
    if sys.argv[1].startswith("core_"):
        replay_core(sys.argv[1].removeprefix("core_"), list(map(int, sys.argv[2].split(","))))
        return
    scenario = importlib.import_module(f"{__package__}.scenario")
    traffic = importlib.import_module(f"{__package__}.traffic")
    policy, seeds = sys.argv[1], map(int, sys.argv[2].split(","))
    further_flags = sys.argv[sys.argv.index("--flags") + 1 :] if "--flags" in sys.argv else []
    if "--logs" not in sys.argv:
        logging.disable(logging.CRITICAL)
    for seed in seeds:
        seed_scenario = traffic.make_scenario(seed, policy)
        seed_scenario.flags += further_flags
        print_result(seed, scenario.run_scenario(clock, seed_scenario))


def replay_core(policy: str, seeds: list[int]) -> None:
    """Run histories of the core alone."""
    histories = importlib.import_module(f"{__package__}.core_histories")
    for seed in seeds:
        print_result(seed, histories.run_core_history(seed, policy))


def print_result(seed: int, lines: dict[str, list[str]]) -> None:
    digests = {part: digest(part_lines) for part, part_lines in lines.items()}
    result: dict[str, object] = {"seed": seed, "digests": digests}
    if "--lines" in sys.argv:
        result["lines"] = lines
    print(json.dumps(result), flush=True)


def digest(lines: list[str]) -> str:
    """Return a short digest of a part."""
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()[:12]


if __name__ == "__main__":
    main()
