"""Recorded decode steps: padding, refilled plans, the fallback. Recording itself is stood in for by running again."""

from __future__ import annotations

import gc
import os
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hand_driver import Driver

from engine.execution.decode_graphs import CudaCapture, DecodeGraphs
from engine.tiny.model import Recipe, cached_model
from kernels import select_kernels
from kernels.reference.backend import ReferenceKernels

pytestmark = pytest.mark.long

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton's interpreter: set TRITON_INTERPRET=1", allow_module_level=True)

CPU = torch.device("cpu")


class RunAgain:
    """Records by keeping the computation; a repetition writes the same result tensor, as a graph does."""

    def __init__(self) -> None:
        self.record_count = self.replay_count = self.reset_count = 0

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        self.record_count += 1
        out = torch.full_like(run(), float("nan"))

        def replay() -> None:
            self.replay_count += 1
            out.copy_(run())

        return replay, out

    def reset(self) -> None:
        self.reset_count += 1


def with_graphs(driver: Driver, capture: Callable) -> Driver:
    runner = driver.runner
    runner._graphs = DecodeGraphs(
        driver.model, runner._ops, kv=runner.pool.kv, states=runner._states, ropes=runner._ropes, blocks_max=64,
        capture=capture,
    )  # fmt: skip
    return driver


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_recorded_steps_give_the_same_tokens(family):
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    folder = cached_model(Recipe(family=family, layers=2 if family == "qwen3" else 3))
    capture = RunAgain()
    graphs = with_graphs(Driver(folder, kernels=select_kernels(CPU, "triton")), capture)
    plain = Driver(folder, kernels=ReferenceKernels(CPU))
    prompts = [[rng.randrange(2048) for _ in range(length)] for length in (16, 5, 3)]
    answers = []
    for driver in (graphs, plain):
        seqs = [driver.sequence(prompt, name=str(i)) for i, prompt in enumerate(prompts)]
        driver.step(*((seq, len(seq.token_ids)) for seq in seqs))
        for members in ([0, 1, 2], [2, 0], [1, 2, 0]):  # three pad to four; the order changes
            driver.step(*((seqs[i], len(seqs[i].token_ids)) for i in members))
        answers.append([seq.token_ids for seq in seqs])
    assert answers[0] == answers[1]
    assert (capture.record_count, capture.replay_count) == (2, 3)  # sizes 4 and 2; the prompts were computed as usual


def test_steps_are_recorded_again_after_the_pool_was_given_back() -> None:
    """The pool lies elsewhere then, and weights may: a step that was recorded before would read freed memory."""
    capture = RunAgain()
    driver = with_graphs(Driver(cached_model(Recipe()), kernels=select_kernels(CPU, "triton")), capture)
    tokens = []
    for name in ("before", "after"):
        seq = driver.sequence([1, 2, 3], name=name)
        driver.run(seq, 3)
        tokens.append(seq.token_ids)
        driver.runner.release_pool()
        driver.runner.pool.allocate()
    assert tokens[0] == tokens[1]
    assert (capture.record_count, capture.reset_count) == (2, 2)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory"), RuntimeError("CUDA error: operation not permitted when capturing")]
)
def test_what_cannot_be_recorded_is_computed_as_usual(error: RuntimeError, caplog: pytest.LogCaptureFixture) -> None:
    class Fails(RunAgain):
        def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
            raise error

    driver = with_graphs(Driver(cached_model(Recipe()), kernels=select_kernels(CPU, "triton")), Fails())
    plain = Driver(cached_model(Recipe()))
    tokens = []
    for d in (driver, plain):
        seq = d.sequence([1, 2, 3])
        d.run(seq, 3)
        tokens.append(seq.token_ids)
    assert tokens[0] == tokens[1]
    assert [str(error) in record.getMessage() for record in caplog.records] == [True]  # said once, not each step


class FakeCuda:
    """Streams and graphs as torch has them, without a device: what runs on which stream, and what is destroyed."""

    def __init__(self) -> None:
        self.current, self.stream_count, self.graphs = "main", 0, weakref.WeakSet[Any]()
        self.ran: list[tuple[str, bool]] = []
        """(stream, while recording) of each run."""
        self.recording = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = self

        class Stream:
            def __init__(self, device: torch.device) -> None:
                fake.stream_count += 1
                self.name = f"side {fake.stream_count}"

            def wait_stream(self, other: object) -> None: ...

        class Main(Stream):
            def __init__(self) -> None:
                self.name = "main"

        class CUDAGraph:
            def __init__(self) -> None:
                fake.graphs.add(self)

            def replay(self) -> None: ...

        @contextmanager
        def stream(new_stream: Stream) -> Iterator[None]:
            before, fake.current = fake.current, new_stream.name
            try:
                yield
            finally:
                fake.current = before

        class graph:
            """Which torch leaves on its stream if the recording has failed."""

            def __init__(self, graph: CUDAGraph, *, pool: object, stream: Stream, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local"
                self.stream = stream

            def __enter__(self) -> None:
                fake.current, fake.recording = self.stream.name, True

            def __exit__(self, kind: object, *_: object) -> None:
                fake.recording = False
                if kind is not None:
                    raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

        for name, part in {
            "Stream": Stream, "CUDAGraph": CUDAGraph, "stream": stream, "graph": graph,
            "graph_pool_handle": lambda: (0, 1), "current_stream": lambda device: Main(),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, part)

    def run(self) -> torch.Tensor:
        self.ran.append((self.current, self.recording))
        return torch.zeros(1)


def test_all_is_recorded_on_one_stream_which_is_left_also_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    fake.install(monkeypatch)
    capture = CudaCapture(torch.device("cuda"))
    capture(fake.run)

    def fails() -> torch.Tensor:
        if fake.recording:
            raise torch.OutOfMemoryError("no memory")
        return fake.run()

    with pytest.raises(RuntimeError, match="during capture"):
        capture(fails)
    assert fake.current == "main"
    capture(fake.run)
    assert fake.ran == [("side 1", recording) for recording in (False, True, False, False, True)]
    assert fake.stream_count == 1
    gc.collect()
    assert len(fake.graphs) == 3  # destroying the failed one would free what the others' products work in
    del capture
    gc.collect()
    assert len(fake.graphs) == 0


def test_recording_ahead():
    capture = RunAgain()
    driver = with_graphs(Driver(cached_model(Recipe()), kernels=select_kernels(CPU, "triton")), capture)
    driver.runner.record_decode_steps(3)
    assert capture.record_count == 3  # 4, 2 and 1
    seq = driver.sequence([1, 2, 3])
    driver.run(seq, 3)
    assert (capture.record_count, capture.replay_count) == (3, 2)
