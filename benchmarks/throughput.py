#!/usr/bin/env python3
"""The engine without its server: tokens a second of nano-vllm's workload, and steps against what the machine allows.

    benchmarks/throughput.py --shape qwen3-8b --json 8b.json          # on a GPU
    benchmarks/throughput.py --shape tiny --device cpu --sequences 4 --input-max 60 --output-max 20 \\
        --decode 1x20 2x40 --prefill 64                                 # that it runs, anywhere

The workload is nano-vllm's bench.py: seed 0, 256 sequences, prompts and outputs of 100 to 1,024 random tokens, all sent
at once, temperature 0.6, end of sequence ignored. It runs through scheduler, cache, runner and sampler, in one process
without HTTP; before it all decode steps are recorded, and a pass over a few of the sequences warms up the rest. Weights
are random and made on the device. Before it, single steps are timed through the runner, sampling and the way back to
the host included: decode against weights plus KV bytes over the measured copy rate, prefill against its operations over
the measured matrix rate.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import _path  # noqa: F401
import torch
from device_timing import copy_rate, kernel_times, machine, matrix_rate, synchronize
from harness.figures import write_json
from throughput_shapes import SHAPES

from engine.cache.kv_cache import KVCache
from engine.core import EngineCore
from engine.execution.decode_graphs import CudaCapture
from engine.execution.device_pool import DevicePool, compute_unit_stride
from engine.execution.runner import ModelRunner, RunnerConfig
from engine.models import HfConfig, build_model
from engine.scheduler import Scheduler, SchedulerConfig
from engine.types import BlockId, Chunk, Request, SamplingParams, Sequence, StepPlan, UnitId
from kernels import Kernels, select_kernels

STATE_UNITS = 2
"""Units of state a sequence of the workload may hold: its own and a checkpoint."""


class Engine:
    """One shape on one device, with a cache of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.dtype = getattr(torch, options.dtype)
        self.overlap = options.overlap
        self.model = build_model(HfConfig(SHAPES[options.shape], options.shape))
        self._draw_weights()
        self.spec = self.model.make_cache_spec(options.block_size, self.dtype)
        self.max_len = min(self.model.config.max_positions, options.max_len)
        self.units = self._unit_count()
        self.runner = ModelRunner(
            self.model,
            DevicePool(self.spec, self.units, device=self.device, dtype=self.dtype),
            RunnerConfig(max_model_len=self.max_len, max_num_seqs=512, overlaps_steps=self.overlap),
            kernels=self._kernels(),
            capture=self._capture(),
        )
        self.runner.pool.buffer.zero_()
        self.kernels: list[dict[str, Any]] = []
        """Of the last timed step."""

    def _draw_weights(self) -> None:
        """Small random numbers: what is timed does not depend on them."""
        generator = torch.Generator(self.device).manual_seed(0)
        for weight in self.model.weights:
            tensor = weight.allocate(self.dtype, self.device)
            if tensor.dim() == 1:
                tensor.fill_(1.0)
            else:
                tensor.normal_(0.0, 0.02, generator=generator)
            weight.pack()

    def _kernels(self) -> Kernels:
        return select_kernels(self.device, self.options.backend)

    def _capture(self) -> CudaCapture | None:
        return None if self.device.type != "cuda" or self.options.enforce_eager else CudaCapture(self.device)

    def _unit_count(self) -> int:
        """As much as the workload and the timed steps can use, as far as there is memory for it."""
        options = self.options
        tokens = max(
            options.sequences * (options.input_max + options.output_max),
            max((n * c for n, c in options.decode), default=0),
        )
        unit_count = sum(
            -(-tokens // (options.block_size * self.spec.blocks_per_unit(g))) for g in range(len(self.spec.groups))
        )
        unit_count += options.sequences * (1 + STATE_UNITS) + 64
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            unit_count = min(unit_count, int(0.8 * free) // compute_unit_stride(self.spec))
        return unit_count

    @property
    def weight_bytes(self) -> int:
        """What a decode step must read of the weights: all but the rows of the embedding that are only looked up."""
        total = sum(_elements(w.shape) for w in self.model.weights) * self.dtype.itemsize
        if self.model.vocabulary.head is self.model.vocabulary.embedding:
            return total
        return total - _elements(self.model.vocabulary.embedding.shape) * self.dtype.itemsize

    def kv_bytes(self, tokens: int) -> int:
        """K and V of so many tokens of context in all attention layers."""
        return sum(
            2 * len(g.layer_indices) * g.num_kv_heads * g.head_dim * g.dtype_bytes * tokens for g in self.spec.groups
        )

    def matrix_operations(self, tokens: int, sampled_tokens: int) -> float:
        """Of the weight matrices and of causal attention, for one prompt from nothing."""
        in_body = self.weight_bytes / self.dtype.itemsize - _elements(self.model.vocabulary.head.shape)
        attention = sum(
            4 * a.config.num_heads * a.config.head_dim * tokens * tokens / 2 for _, a in self.model.attention_layers
        )
        return 2.0 * in_body * tokens + attention + 2.0 * _elements(self.model.vocabulary.head.shape) * sampled_tokens

    def sequences(self, count: int, length: int, computed_tokens: int) -> list[Sequence]:
        """Sequences of random tokens with blocks for 64 tokens more; the first `computed_tokens` count as computed."""
        rng, next_unit, sequences = random.Random(0), 0, []
        params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
        for i in range(count):
            tokens = [rng.randrange(1, self.model.config.vocab_size) for _ in range(length)]
            seq = Sequence(
                Request(request_id=str(i), token_ids=tokens, params=params), tokens, length, 0.0, computed_tokens
            )
            for group in range(len(self.spec.groups)):
                per_unit, table = self.spec.blocks_per_unit(group), []
                while len(table) * self.options.block_size < length + 64:
                    table += [BlockId(next_unit * per_unit + sub) for sub in range(per_unit)]
                    next_unit += 1
                seq.block_tables.append(table)
            if self.spec.state is not None:
                seq.state_unit, next_unit = UnitId(next_unit), next_unit + 1
            sequences.append(seq)
        if next_unit > self.units:
            raise ValueError(f"{count} sequences of {length} tokens need {next_unit} units, there are {self.units}")
        return sequences

    def time_step(self, seqs: list[Sequence], rounds: int, advance: bool) -> float:
        """Median seconds of a step over all tokens of the sequences that are not computed; decode goes on by one."""
        samples = []
        for i in range(rounds + 2):
            chunks = [Chunk(seq, seq.computed_tokens, len(seq.token_ids), should_sample=True) for seq in seqs]
            synchronize(self.device)
            start = time.perf_counter()
            result = self.runner.execute(StepPlan(chunks))
            if i >= 2:  # the first steps compile and record
                samples.append(time.perf_counter() - start)
            if i == 1:
                self.kernels = self._profile_kernels(StepPlan(chunks))
            if advance:
                for seq, token in zip(seqs, result.sampled_tokens, strict=True):
                    assert token is not None
                    seq.computed_tokens += 1
                    seq.token_ids.append(token)
        return statistics.median(samples)

    def _profile_kernels(self, plan: StepPlan) -> list[dict[str, Any]]:
        """What a step spends its time on, on a GPU: the same step once more, which changes nothing but states."""
        if self.device.type != "cuda":
            return []
        try:
            return kernel_times(lambda: self.runner.execute(plan), self.device)
        except RuntimeError as error:  # the machine may allow no profiler
            return [{"kernel": f"{type(error).__name__}: {error}"[:200], "launches": 0, "us": 0.0}]

    def decode_graph_counts(self) -> dict[str, int]:
        """Sizes of decode steps that are recorded, and that could not be."""
        steps = {} if self.runner._graphs is None else self.runner._graphs._steps_by_size
        return {
            "recorded": sum(r is not None for r in steps.values()),
            "failed": sum(r is None for r in steps.values()),
        }


def _elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def timed_steps(engine: Engine, rates: tuple[float, float]) -> Iterator[dict[str, Any]]:
    options = engine.options
    for count, context in options.decode:
        seqs = engine.sequences(count, context, context - 1)
        seconds = engine.time_step(seqs, 20, advance=True)
        moved_bytes = engine.weight_bytes + count * engine.kv_bytes(context)
        if engine.spec.state is not None:
            moved_bytes += 2 * count * engine.spec.state.state_bytes
        yield {
            "step": f"decode {count} x {context}", "time_ms": seconds * 1e3, "tokens_per_s": count / seconds,
            "bound": "bandwidth", "share": moved_bytes / seconds / rates[0], "kernels": engine.kernels,
        }  # fmt: skip
    for length in options.prefill:
        seconds = engine.time_step(engine.sequences(1, length, 0), 5, advance=False)
        yield {
            "step": f"prefill {length}", "time_ms": seconds * 1e3, "tokens_per_s": length / seconds,
            "bound": "matrix rate", "share": engine.matrix_operations(length, 1) / seconds / rates[1],
            "kernels": engine.kernels,
        }  # fmt: skip


def workload(engine: Engine, sequences: int) -> dict[str, Any]:
    """nano-vllm's: the same calls of `random` in the same order, so the same lengths."""
    options = engine.options
    rng = random.Random(0)
    prompts = [
        [rng.randint(0, 10000) for _ in range(rng.randint(options.input_min, options.input_max))]
        for _ in range(options.sequences)
    ]
    outputs = [rng.randint(options.output_min, options.output_max) for _ in range(options.sequences)]
    vocabulary = engine.model.config.vocab_size
    cache = KVCache(engine.spec, engine.units, step_tokens_max=options.max_tokens)
    config = SchedulerConfig(
        max_num_seqs=min(512, options.max_tokens),
        max_num_batched_tokens=options.max_tokens,
        max_model_len=engine.max_len,
    )
    core = EngineCore(Scheduler(config, cache), engine.runner, lambda events: None, overlaps_steps=engine.overlap)
    for i in range(sequences):
        params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=outputs[i])
        core.add(Request(request_id=str(i), token_ids=[t % vocabulary for t in prompts[i]], params=params), 0.0)
    output_count = steps = 0
    runner_s = 0.0

    def time_call(call: Callable[..., Any], *args: Any) -> Any:
        nonlocal runner_s
        start = time.perf_counter()
        result = call(*args)
        runner_s += time.perf_counter() - start
        return result

    submit = core._submit_step
    core._submit_step = lambda plan: partial(time_call, time_call(submit, plan))
    synchronize(engine.device)
    start = time.perf_counter()
    while core.has_work:
        output_count += sum(len(output.token_ids) for output in core.step(time.perf_counter()))
        steps += 1
    seconds = time.perf_counter() - start
    if output_count != sum(outputs[:sequences]):
        raise RuntimeError(f"{output_count} tokens came out, {sum(outputs[:sequences])} were asked for")
    return {
        "sequences": sequences, "prompt_tokens": sum(map(len, prompts[:sequences])), "output_tokens": output_count,
        "seconds": seconds, "output_tokens_per_s": output_count / seconds, "steps": steps,
        "share_in_runner": runner_s / seconds, "preemptions": core.stats().totals.preemptions,
    }  # fmt: skip


def pair(text: str) -> tuple[int, int]:
    count, _, context = text.partition("x")
    return int(count), int(context)


def engine_arguments(doc: str | None, *, step_tokens: int) -> argparse.ArgumentParser:
    """What `Engine` is made of, as arguments; benchmarks add their own."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=step_tokens, help="tokens of a step")
    parser.add_argument("--enforce-eager", action="store_true", help="no recorded decode steps")
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=False, help="as of engine serve")
    return parser


def parse() -> argparse.Namespace:
    parser = engine_arguments(__doc__, step_tokens=16384)
    parser.add_argument("--max-len", type=int, default=16384, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=256, help="0: only the timed steps")
    for name, value in (("input-min", 100), ("input-max", 1024), ("output-min", 100), ("output-max", 1024)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--decode", type=pair, nargs="*", default=[(1, 1024), (1, 8192), (256, 1024)], metavar="NxCTX")
    parser.add_argument("--prefill", type=int, nargs="*", default=[1024, 8192])
    options = parser.parse_args()
    options.input_min = min(options.input_min, options.input_max)
    options.output_min = min(options.output_min, options.output_max)
    options.decode = [(n, c) for n, c in options.decode if c < options.max_len]
    return options


def main() -> None:
    options = parse()
    device, small = torch.device(options.device), options.device == "cpu"
    if small:
        torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    rates = (copy_rate(device, 64 if small else 2048), matrix_rate(device, 512 if small else 8192, dtype))
    if not small:
        torch.cuda.empty_cache()  # of the buffers that were copied
    start = time.perf_counter()
    engine = Engine(options)
    synchronize(device)
    report: dict[str, Any] = {
        "machine": machine(device), "shape": options.shape, "dtype": options.dtype, "backend": engine.runner._ops.name,
        "copy_bytes_per_s": rates[0], "matrix_flops": rates[1], "weight_bytes": engine.weight_bytes,
        "setup_s": time.perf_counter() - start, "units": engine.units,
    }  # fmt: skip

    def save() -> None:  # after each part, so that an end by force loses only one
        write_json(options.json, report)

    report["steps"] = []
    save()
    for step in timed_steps(engine, rates):
        report["steps"].append(step)
        save()
    if options.sequences:
        start = time.perf_counter()
        engine.runner.record_decode_steps(options.sequences)
        report["decode_steps"] = engine.decode_graph_counts()
        report["record_s"] = time.perf_counter() - start
        save()
        workload(engine, min(options.sequences, 8))
        report["warm_up_s"] = time.perf_counter() - start
        save()
        report["workload"] = workload(engine, options.sequences)
        save()
    print(json.dumps(report["machine"]))
    print(f"{options.shape}, {options.dtype}, {report['backend']}: weights {engine.weight_bytes / 1e9:.2f} GB, "
          f"copy {rates[0] / 1e9:.0f} GB/s, matrix {rates[1] / 1e12:.1f} TFLOP/s")  # fmt: skip
    for step in report["steps"]:
        print(f"{step['step']:<24}{step['time_ms']:>10.2f} ms{step['tokens_per_s']:>12.0f} tok/s"
              f"{step['share']:>7.0%} of the {step['bound']}")  # fmt: skip
    if options.sequences:
        w = report["workload"]
        print(f"{w['sequences']} sequences: {w['output_tokens_per_s']:.0f} output tok/s ({w['output_tokens']} in "
              f"{w['seconds']:.1f} s, {w['steps']} steps, {w['share_in_runner']:.0%} in the runner)")  # fmt: skip


if __name__ == "__main__":
    main()
