#!/usr/bin/env python3
"""Whether the engine works on a GPU at all, in about a minute: each kernel, then small models, eager and recorded.

    benchmarks/gpu_check.py --json check.json
    TRITON_INTERPRET=1 benchmarks/gpu_check.py --device cpu --tiny     # that it runs, anywhere

Kernels run at the shapes of real models, on few tokens, and are held against the torch reference; each is also recorded
and replayed. The models go through the whole engine (measured step, sized cache, recorded decode steps, scheduler,
sampling) and must give the tokens of the CPU's reference. A check that fails hides no other; its traceback is kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
# This folder last: it has files named like packages of ours and modules of the standard library.
sys.path[:] = [str(_HERE.parent), *(p for p in sys.path if Path(p or ".").resolve() != _HERE), str(_HERE)]

import torch  # noqa: E402
from device_timing import captured, copy_rate, machine  # noqa: E402
from kernel_cases import TINY, Bench, Prepared, Shape, expected  # noqa: E402

from engine.llm import LLM  # noqa: E402
from engine.tiny.model import Recipe, cached_model  # noqa: E402
from engine.types import SamplingParams  # noqa: E402
from kernels import Kernels, select  # noqa: E402

FEW = Shape(
    decode=((1, 700), (3, 300)), prefill=((1, 200, 0), (2, 40, 100)), rows=(1, 5, 130), experts=(16, 8, 2048, 768)
)
"""Sizes of real models, so that the next benchmarks find their kernels compiled; few tokens."""
ERROR_MAX = 2e-2
"""Of bf16 results, relative: the contract's tests are stricter."""
FAMILIES = {
    "qwen3": Recipe(),
    "qwen3_5": Recipe(family="qwen3_5", layers=3),
    "nemotron_h": Recipe(family="nemotron_h", layers=4),
}
Check = Callable[[], str]
"""What to say if it is right; raises if it is not."""


def kernel_checks(device: torch.device, shape: Shape) -> Iterator[tuple[str, Check]]:
    ops = select(device, "triton")
    for name, make in Bench(shape, device, torch.bfloat16).cases():
        if "(torch)" not in name:
            yield name, partial(kernel_is_right, ops, make, name.startswith("draw"))


def kernel_is_right(ops: Kernels, make: Callable[[Kernels], Prepared], draws: bool) -> str:
    right = expected(make, ops.device)
    torch.manual_seed(0)
    prepared = make(ops)
    found = prepared.call().double()
    if draws:  # tokens: all but those that rounding decides
        error = (found != right).double().mean().item()
    else:
        error = ((found - right).norm() / right.norm()).item()
    if not error <= ERROR_MAX:  # nor NaN
        raise AssertionError(f"error {error:.1e}")
    if ops.device.type == "cuda":
        captured(prepared.call)()
        torch.cuda.synchronize()
    return f"error {error:.1e}"


def model_checks(device: torch.device, families: list[str]) -> Iterator[tuple[str, Check]]:
    for family in families:
        folder = cached_model(FAMILIES[family])
        prompts = [[(7 * i * i + 13 * n) % 2000 + 1 for i in range(length)] for n, length in enumerate((30, 1, 70, 16))]
        exact = tokens_of(folder, prompts, device="cpu", attention_backend="reference", dtype="float32")
        settings = {"device": str(device), "attention_backend": "triton"}
        for eager in (True, False):
            name = f"{family}, {'eager' if eager else 'recorded'}"
            yield name, partial(same_tokens, exact, folder, prompts, dtype="float32", enforce_eager=eager, **settings)
        if family == "qwen3":
            yield f"{family}, bf16, drawn twice", partial(same_draws, folder, prompts, dtype="bfloat16", **settings)


def tokens_of(folder: Path, prompts: list[list[int]], temperature: float = 0.0, **settings: Any) -> list[list[int]]:
    params = SamplingParams(temperature=temperature, seed=1, top_p=0.95, max_tokens=12, ignore_eos=True)
    with LLM(str(folder), max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256, **settings) as llm:
        answers = llm.generate(prompts, params, use_tqdm=False)
    if settings["device"] != "cpu":
        del llm
        torch.cuda.empty_cache()
    return [answer.outputs[0].token_ids for answer in answers]


def same_tokens(exact: list[list[int]], folder: Path, prompts: list[list[int]], **settings: Any) -> str:
    found = tokens_of(folder, prompts, **settings)
    if found != exact:
        raise AssertionError(f"tokens {found}, the reference's are {exact}")
    return f"{sum(map(len, found))} tokens"


def same_draws(folder: Path, prompts: list[list[int]], **settings: Any) -> str:
    once, again = (tokens_of(folder, prompts, temperature=0.8, **settings) for _ in range(2))
    if once != again:
        raise AssertionError(f"one seed, but {once} and {again}")
    return f"{sum(map(len, once))} tokens"


def run(checks: Iterator[tuple[str, Check]], save: Callable[[str, dict[str, Any]], None]) -> None:
    """All of them, unless one has left the device unusable for this process."""
    for name, check in checks:
        start = time.perf_counter()
        entry: dict[str, Any]
        try:
            entry = {"said": check()}
        except Exception as error:  # noqa: BLE001 - whatever it is, the other checks go on
            entry = {"error": f"{type(error).__name__}: {error}"[:400], "traceback": traceback.format_exc()[-4000:]}
        entry["seconds"] = round(time.perf_counter() - start, 2)
        print(f"{name:<40} {entry.get('said', '')}{entry.get('error', '')}, {entry['seconds']} s", flush=True)
        save(name, entry)
        if "error" in entry and torch.cuda.is_available():
            torch.cuda.synchronize()  # raises now what would fail in every later check


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results there, after each check")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, one model")
    options = parser.parse_args()
    device = torch.device(options.device)
    checks: dict[str, Any] = {}
    failures: dict[str, str] = {}
    report: dict[str, Any] = {"checks": checks, "failures": failures}

    def save(name: str, entry: dict[str, Any]) -> None:
        checks[name] = entry
        if "error" in entry:
            failures[name] = entry["error"]
        if options.json:
            options.json.write_text(json.dumps(report, indent=1))

    start = time.perf_counter()
    report["machine"] = machine(device)
    run(iter([("copy", lambda: f"{copy_rate(device, 8 if options.tiny else 512) / 1e9:.0f} GB/s")]), save)
    with torch.inference_mode():
        run(kernel_checks(device, TINY if options.tiny else FEW), save)
    run(model_checks(device, ["qwen3"] if options.tiny else list(FAMILIES)), save)
    print(json.dumps(report["machine"]))
    print(f"{len(checks) - len(failures)} right, {len(failures)} wrong, in {time.perf_counter() - start:.0f} s")
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
