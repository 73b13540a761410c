#!/usr/bin/env python3
"""What a decode step costs the host, part by part, and what of it the device waits for, by sequences and context.

    benchmarks/step_host.py --shape qwen3-0.6b --json host.json                  # on a GPU
    benchmarks/step_host.py --device meta --device-ms 20 --json host.json        # a GPU's host work, without a GPU
    benchmarks/step_host.py --shape tiny --device cpu --cases 4x64 4x64p --rounds 5

A case is SEQUENCESxCONTEXT; with a `p` at its end all requests have penalties. Real scheduler, cache, runner and
sampler decode in one process. The requests of a case share their prompt (its blocks are in every table, in memory
once), so that 256 contexts of 32k fit: the host does not see the difference; the device's attention is faster than for
256 different ones. Their contexts differ by up to a block, so that in each step as many fill one. Exposed is, on a GPU,
the time between the end of a step's work on the device and the moment the next step's model begins there, by CUDA
events; on a CPU what of a step is neither the model nor a draw.

`--device meta` has tensors without data and an imagined device that takes `--device-ms` for a step, one after the
other. All that the host does for a recorded decode step on a GPU is done, but for the driver's part of launches and
copies; the parts are CPU time, exposed is a step's time less the device's. Operations whose shapes torch finds in
Python code (50 us a call, where a GPU's dispatch is C++) are dispatched on one element of a CPU tensor.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import _path  # noqa: F401
import torch
from device_timing import machine, synchronize
from harness.figures import write_json
from throughput import Engine, engine_arguments, pair
from throughput_shapes import SHAPES

from engine.cache.kv_cache import KVCache
from engine.core import EngineCore
from engine.execution import runner as runner_module
from engine.execution.decode_graphs import CudaCapture
from engine.scheduler import Scheduler, SchedulerConfig
from engine.types import Request, SamplingParams
from kernels.host_copies import start_copy_to_host

CASES = ("256x1024", "256x8192", "256x32768", "64x4096", "64x4096p", "256x1024p")
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
WARM_UP_STEPS = 6
MAX_LEN = 40960
"""Every shape is told that it was made for so many tokens."""


class Parts:
    """Seconds spent in some functions, each less what others of them took inside it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds: dict[str, float] = {}
        """Of the step under way."""
        self.steps: list[dict[str, float]] = []
        self._thread_state = threading.local()
        """On each thread: what was spent inside of each call under way."""

    def watch(self, name: str, owner: Any, attribute: str) -> None:
        """Replace a function by one that is timed."""
        setattr(owner, attribute, self.time_calls(name, getattr(owner, attribute)))

    def time_calls(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def call_timed(*args: Any, **kwargs: Any) -> Any:
            inner_times = self._thread_state.__dict__.setdefault("inside", [])
            inner_times.append(0.0)
            start = self._clock()
            try:
                return call(*args, **kwargs)
            finally:
                elapsed_s = self._clock() - start
                self.seconds[name] = self.seconds.get(name, 0.0) + elapsed_s - inner_times.pop()
                if inner_times:
                    inner_times[-1] += elapsed_s

        return call_timed

    def step(self) -> None:
        """A step is done."""
        self.steps.append(self.seconds)
        self.seconds = {}

    def medians_ms(self) -> dict[str, float]:
        names = {name for step in self.steps for name in step}
        return {name: 1e3 * statistics.median(step.get(name, 0.0) for step in self.steps) for name in names}


class DeviceGaps:
    """Where on the device's own clock a step's model begins, and where the work of a step has ended."""

    def __init__(self) -> None:
        self.begins: list[torch.cuda.Event] = []
        self.ends: list[torch.cuda.Event] = []

    def mark(self, events: list[torch.cuda.Event]) -> None:
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()  # type: ignore[no-untyped-call]

    def mark_before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def call_marked(*args: Any, **kwargs: Any) -> Any:
            if not torch.cuda.is_current_stream_capturing():
                self.mark(self.begins)
            return call(*args, **kwargs)

        return call_marked

    def exposed_ms(self) -> list[float]:
        """Of every step but the first; the device idles from one step's end to the next one's begin."""
        torch.cuda.synchronize()
        assert len(self.begins) == len(self.ends)
        return [max(0.0, end.elapsed_time(begin)) for end, begin in zip(self.ends, self.begins[1:])]

    def clear(self) -> None:
        self.begins.clear()
        self.ends.clear()


class Capture:
    """`CudaCapture` whose replays are marked."""

    def __init__(self, device: torch.device, gaps: DeviceGaps) -> None:
        self._capture, self._gaps = CudaCapture(device), gaps

    def __call__(self, run: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        replay, out = self._capture(run)
        return self._gaps.mark_before(replay), out


class ImaginaryDevice:
    """Computes nothing, a step after the other, each in `step_ms`; torch's `meta` device has shapes for it."""

    def __init__(self, step_ms: float) -> None:
        self._step_s = step_ms / 1e3
        self._free_s = 0.0

    def __call__(self, run: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        """As `CudaCapture`."""
        return self.begin, run()

    def begin(self) -> None:
        self._free_s = max(self._free_s, time.perf_counter()) + self._step_s

    def to_host(self, tensors: list[torch.Tensor]) -> Callable[[], list[list[Any]]]:
        """As that of `kernels.host_copies`: what waits until the device has done all that it was given until now.

        As CUDA waits for an event unless it is told otherwise: it asks again and again.
        """
        device_done_s = self._free_s

        def read() -> list[list[Any]]:
            while time.perf_counter() < device_done_s:
                pass
            return [torch.zeros(x.shape, dtype=x.dtype, device="cpu").tolist() for x in tensors]

        return read

    @staticmethod
    def kernels() -> Any:
        """A GPU's kernels that launch nothing."""
        from kernels.triton.backend import TritonKernels

        ops = TritonKernels.__new__(TritonKernels)
        ops.device, ops._processor_count = torch.device("meta"), 132
        ops.draw = lambda logits, draws: torch.empty(logits.shape[0], dtype=torch.int64, device="meta")  # type: ignore[method-assign]
        return ops


def dispatch_on_one_element() -> None:
    """What decode steps do on `meta` whose shapes are found by Python code."""
    scalar, scalar_out, scalar_index = torch.zeros(1), torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    square, empty = torch.zeros(1, 1), torch.empty
    select, copy, product = torch.index_select, torch.Tensor.index_copy_, torch.nn.functional.linear

    def index_select(source: torch.Tensor, dim: int, index: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        select(scalar, 0, scalar_index, out=scalar_out)
        return out

    def index_copy_(target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        copy(scalar, 0, scalar_index, scalar_out)
        return target

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        product(square, square)
        return empty(*x.shape[:-1], len(weight), dtype=x.dtype, device=x.device)

    torch.nn.functional.linear = linear  # type: ignore[assignment]
    torch.index_select = index_select  # type: ignore[assignment]
    torch.Tensor.index_copy_ = index_copy_  # type: ignore[method-assign, assignment]


class HostEngine(Engine):
    """With marks where a device begins and ends."""

    gaps = DeviceGaps()

    def __init__(self, options: argparse.Namespace) -> None:
        self.imaginary_device = ImaginaryDevice(options.device_ms) if options.device == "meta" else None
        super().__init__(options)
        if self.imaginary_device is not None:
            hidden = self.model.config.hidden_size
            self.model.forward = lambda token_ids, step, selected_tokens=None: torch.empty(  # type: ignore[method-assign]
                len(token_ids if selected_tokens is None else selected_tokens), hidden, dtype=self.dtype, device="meta"
            )
            empty = torch.empty
            torch.empty = lambda *size, pin_memory=False, **kind: empty(*size, **kind)  # type: ignore[assignment]
            torch.Tensor.pin_memory = lambda tensor: tensor  # type: ignore[method-assign, assignment]
            dispatch_on_one_element()
            runner_module.start_copy_to_host = self.imaginary_device.to_host

    def _kernels(self) -> Any:
        return super()._kernels() if self.imaginary_device is None else self.imaginary_device.kernels()

    def _draw_weights(self) -> None:
        if self.imaginary_device is None:
            super()._draw_weights()
        else:
            for weight in self.model.weights:
                weight.allocate(self.dtype, self.device)

    def _capture(self) -> Any:
        if self.imaginary_device is not None:
            return self.imaginary_device
        eager = self.device.type != "cuda" or self.options.enforce_eager
        return None if eager else Capture(self.device, self.gaps)


def watch(engine: HostEngine, core: EngineCore) -> Parts:
    """The parts of a step; what is not named is the step's own loop."""
    # An imaginary device waits for nothing but the CPU.
    clock = time.perf_counter if engine.imaginary_device is None else time.thread_time
    parts, runner, sampler = Parts(clock), engine.runner, engine.runner._sampler
    parts.watch("plan", core.scheduler, "schedule")
    parts.watch("apply", core.scheduler, "apply")
    parts.watch("events", core, "_publish_events")
    for tables in runner._tables:
        for name in ("update", "make_step_table"):
            parts.watch("tables", tables, name)
    for name in ("plan_attention", "refill_decode_plan", "plan_state", "refill_state_plan"):
        if hasattr(runner._ops, name):
            parts.watch("upload", runner._ops, name)
    parts.watch("sampling inputs", sampler, "prepare")
    for owner, name in (
        (sampler, "_adjust_logits"),
        (sampler._penalties, "prepare"),
        (sampler._penalties, "count_sampled"),
    ):
        parts.watch("penalties", owner, name)
    begin = runner_module.start_copy_to_host
    runner_module.start_copy_to_host = lambda tensors: parts.time_calls("read-back", begin(tensors))  # type: ignore[assignment]
    compute = [(runner.model, "forward"), (runner.model, "compute_logits"), (sampler, "_draw")]
    for owner, name in compute:
        parts.watch("model", owner, name)
    if runner._graphs is not None:
        parts.watch("launch", runner._graphs, "forward")
    submit = core._submit_step
    core._submit_step = lambda plan: parts.time_calls("launch", parts.time_calls("launch", submit)(plan))
    return parts


def requests(count: int, context: int, vocabulary: int, penalties: bool, block_size: int) -> list[Request]:
    """One that computes the shared prompt, then those that are measured."""
    rng = random.Random(0)
    prompt = [rng.randrange(1, vocabulary) for _ in range(context - 1)]
    penalty_params: dict[str, Any] = PENALTIES if penalties else {}
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=None, seed=1, **penalty_params)
    prompt_request = Request(request_id="first", token_ids=prompt, params=SamplingParams(max_tokens=1, ignore_eos=True))
    return [prompt_request] + [
        Request(request_id=str(i), token_ids=[*prompt, *[i % vocabulary] * (1 + i % block_size)], params=params)
        for i in range(count)
    ]


def measure(options: argparse.Namespace, case: str) -> dict[str, Any]:
    penalties, (count, context) = case.endswith("p"), pair(case.removesuffix("p"))
    tokens = context + count * (2 * options.rounds + WARM_UP_STEPS + 3 * options.block_size)  # timed, then watched
    options.decode, options.sequences = [(1, tokens)], 0
    options.max_len = context + 1024
    engine = HostEngine(options)
    cache = KVCache(engine.spec, engine.units, step_tokens_max=options.max_tokens)
    config = SchedulerConfig(
        max_num_seqs=max(count, 1), max_num_batched_tokens=options.max_tokens, max_model_len=engine.max_len
    )
    core = EngineCore(Scheduler(config, cache), engine.runner, lambda events: None, overlaps_steps=engine.overlap)
    context, vocabulary = min(context, engine.max_len - 512), engine.model.config.vocab_size
    prompt_request, *measured_requests = requests(count, context, vocabulary, penalties, options.block_size)
    core.add(prompt_request, 0.0)
    while core.has_work:
        core.step(0.0)
    for request in measured_requests:
        core.add(request, 0.0)
    while sum(len(output.token_ids) for output in core.step(0.0)) < count:
        pass
    cuda = engine.device.type == "cuda"
    if cuda:
        if engine.runner._graphs is None:
            engine.runner.model.forward = engine.gaps.mark_before(engine.runner.model.forward)  # type: ignore[method-assign]

        def mark_end_and_copy(tensors: list[torch.Tensor]) -> Callable[[], list[list[Any]]]:
            engine.gaps.mark(engine.gaps.ends)
            return start_copy_to_host(tensors)

        runner_module.start_copy_to_host = mark_end_and_copy
    for _ in range(WARM_UP_STEPS):
        core.step(0.0)
    synchronize(engine.device)
    gc.collect()
    gc.freeze()  # as the core's process does
    walls, exposed_ms = time_steps(engine, core, options.rounds)
    parts = watch(engine, core)
    watched_ms, _ = time_steps(engine, core, options.rounds, parts)
    gc.unfreeze()
    runner_module.start_copy_to_host = start_copy_to_host
    per_step = parts.medians_ms()
    host = {
        n: ms
        for n, ms in per_step.items()
        if n not in ("model", "read-back") or (n == "model" and engine.device.type != "cpu")
    }
    step_ms = statistics.median(walls)
    if engine.imaginary_device is not None:
        exposed_ms = [wall - options.device_ms for wall in walls]
    elif not cuda:
        exposed_ms = [statistics.median(watched_ms) - per_step["model"]]
    return {
        "case": case, "step_ms": step_ms, "exposed_ms": statistics.median(exposed_ms), "host_ms": sum(host.values()),
        "watched_step_ms": statistics.median(watched_ms), "parts_ms": per_step,
    }  # fmt: skip


def time_steps(
    engine: HostEngine,
    core: EngineCore,
    rounds: int,
    parts: Parts | None = None,
) -> tuple[list[float], list[float]]:
    """(milliseconds of each step, of each of the device's gaps)."""
    engine.gaps.clear()
    walls = []
    for _ in range(rounds):
        start = time.perf_counter()
        core.step(0.0)
        walls.append((time.perf_counter() - start) * 1e3)
        if parts is not None:
            parts.step()
    return walls, engine.gaps.exposed_ms() if engine.device.type == "cuda" else []


def parse() -> argparse.Namespace:
    parser = engine_arguments(__doc__, step_tokens=8192)
    parser.add_argument("--device-ms", type=float, default=20.0, help="what a step takes on `meta`")
    parser.add_argument("--rounds", type=int, default=20, help="steps that are timed")
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="NxCTX[p]")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    shape = SHAPES[options.shape]
    shape["max_position_embeddings"] = max(shape["max_position_embeddings"], MAX_LEN)
    options.input_max = options.output_max = 0
    report: dict[str, Any] = {"machine": machine(torch.device(options.device)), "shape": options.shape, "cases": []}
    print(json.dumps(report["machine"]))
    for case in options.cases:
        result = measure(options, case)
        report["cases"].append(result)
        write_json(options.json, report)
        parts = " ".join(f"{name} {ms:.2f}" for name, ms in sorted(result["parts_ms"].items(), key=lambda p: -p[1]))
        print(f"{case:<12} step {result['step_ms']:8.2f} ms, exposed {result['exposed_ms']:7.2f}, host "
              f"{result['host_ms']:6.2f}: {parts}", flush=True)  # fmt: skip
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
