"""Whole steps on a device without data: nothing waits for it, nothing from the host gets in but by pinned memory.

The device is torch's `meta`: its tensors have shapes and dtypes, and asking them for data is an error. Kernels are not
launched, only what they are given is looked at. A guard sees every operation: one that makes the host wait for the
device fails, one that mixes devices, and a copy to the device that is not from pinned memory or that the host waits
for; while a decode step is recorded, any copy from the host.
"""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.execution import runner as runner_module
from engine.execution.device_pool import DevicePool
from engine.execution.runner import ModelRunner, RunnerConfig
from engine.models import HfConfig, Shard, build_model
from engine.tiny.model import Recipe, cached_model
from engine.types import BlockCopy, BlockId, Chunk, Request, SamplingParams, Sequence, StepPlan, UnitId
from kernels.host_copies import copy_to_device, upload
from kernels.triton.backend import TritonKernels

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton's interpreter: set TRITON_INTERPRET=1", allow_module_level=True)

from triton.runtime.interpreter import InterpretedFunction

DEVICE = torch.device("meta")
aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense, aten.item, aten.nonzero, aten.masked_select, aten.unique_dim, aten._unique2,
    aten.unique_consecutive, aten.is_nonzero, aten.equal, aten.bincount,
}  # fmt: skip
RECIPES = {
    "llama": Recipe(family="llama", tie_embeddings=False),
    "qwen2": Recipe(family="qwen2"),
    "qwen3": Recipe(),
    "mistral": Recipe(family="mistral"),
    "granite": Recipe(family="granite"),
    "gemma3": Recipe(family="gemma3_text", layers=3),
    "qwen3_moe": Recipe(family="qwen3_moe"),
    "qwen3_5": Recipe(family="qwen3_5", layers=3),
    "granitemoehybrid": Recipe(family="granitemoehybrid", layers=3),
    "bamba": Recipe(family="bamba", layers=3),
    "nemotron_h": Recipe(family="nemotron_h", layers=4),
    "lfm2": Recipe(family="lfm2", layers=3),
}


class HostWaits(AssertionError):
    pass


class HostData(TorchFunctionMode):
    """Sees what Python lists become tensors of the device: that is a copy which the host waits for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        makes_tensor = func in (torch.tensor, torch.as_tensor, torch.asarray)
        if makes_tensor and torch.device(kwargs.get("device") or "cpu").type == DEVICE.type:
            raise HostWaits(f"{func.__name__} from the host's data")
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and on_device(args[0]):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, (list, np.ndarray)) for i in index):
                raise HostWaits("an index from the host's data")
        return func(*args, **kwargs)


class Guard(TorchDispatchMode):
    """Fails what would wait; plays the pinned memory of a machine that has none."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned_tensors: dict[int, torch.Tensor] = {}
        """By storage; kept, so that no address is used twice."""
        self.recording = False
        self.uploads = 0
        self.calls = HostData()

    def __enter__(self) -> Guard:
        self.calls.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.calls.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        device_tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if on_device(x)]
        if packet is aten.is_pinned:
            return args[0].untyped_storage()._cdata in self.pinned_tensors
        if packet is aten._pin_memory or (packet is aten.empty and kwargs.get("pin_memory")):
            return self.pin(args, kwargs)
        if packet in WAITS and device_tensors:
            raise HostWaits(f"{func}: the host waits for the device")
        if packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    raise HostWaits(f"{func} with a mask: the host waits for the number of places")
                assert index is None or on_device(index) == on_device(args[0]), f"{func}: an index on another device"
        if packet is aten.repeat_interleave and device_tensors and kwargs.get("output_size") is None:
            raise HostWaits(f"{func}: the host waits for the size of the result")
        if packet is aten._to_copy and isinstance(args[0], torch.Tensor):
            self.check_copy(func, kwargs.get("device", args[0].device), args[0], kwargs.get("non_blocking", False))
        elif packet is aten.copy_:
            self.check_copy(
                func, args[0].device, args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            )
        elif device_tensors:
            tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            assert all(on_device(x) or x.dim() == 0 for x in tensors), f"{func}: tensors of two devices"
        return func(*args, **kwargs)

    def pin(self, args: Any, kwargs: Any) -> torch.Tensor:
        assert not self.recording, "pinned memory is allocated in a recorded step"
        new_tensor = (
            args[0].clone() if isinstance(args[0], torch.Tensor) else torch.empty(args[0], dtype=kwargs["dtype"])
        )
        self.pinned_tensors[new_tensor.untyped_storage()._cdata] = new_tensor
        return new_tensor

    def check_copy(self, func: Any, target: torch.device, source: torch.Tensor, non_blocking: bool) -> None:
        if target.type == source.device.type:
            return
        if target.type == "cpu":
            raise HostWaits(f"{func}: a copy to the host")
        assert not self.recording, f"{func}: a copy from the host in a recorded step"
        self.uploads += 1
        if not non_blocking:
            raise HostWaits(f"{func}: a copy to the device that the host waits for")
        if source.untyped_storage()._cdata not in self.pinned_tensors:
            raise HostWaits(f"{func}: a copy to the device from memory that is not pinned")


def on_device(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == DEVICE.type


def look_only(self: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Instead of a launch: all tensors are on the device, all parameters are there."""
    bound = dict(zip(self.arg_names, args)) | {k: v for k, v in kwargs.items() if k not in ("num_warps", "num_stages")}
    assert set(bound) == set(self.arg_names), (self.fn.__name__, set(bound) ^ set(self.arg_names))
    for name, value in bound.items():
        if isinstance(value, torch.Tensor):
            assert on_device(value), f"{self.fn.__name__}: {name} is on {value.device}"
    assert all(isinstance(n, int) for n in grid)
    LAUNCHED.add(self.fn.__name__)


LAUNCHED: set[str] = set()


def read(tensors: list[torch.Tensor]) -> list[list[Any]]:
    return [torch.ones(x.shape, dtype=x.dtype, device="cpu").tolist() for x in tensors]


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Guard:
    monkeypatch.setattr(InterpretedFunction, "run", look_only)
    monkeypatch.setattr(runner_module, "start_copy_to_host", lambda tensors: partial(read, tensors))
    LAUNCHED.clear()
    return Guard()


def device_kernels() -> TritonKernels:
    """As on an H200."""
    ops = TritonKernels.__new__(TritonKernels)
    ops.device, ops._processor_count = DEVICE, 132
    return ops


def device_runner(family: str, capture: Any, shard: Shard) -> ModelRunner:
    """On weights without data."""
    model = build_model(HfConfig.read(cached_model(RECIPES[family])), shard)
    for weight in model.weights:
        weight.allocate(torch.bfloat16, DEVICE)
    spec = model.make_cache_spec(16, torch.bfloat16)
    return ModelRunner(
        model,
        DevicePool(spec, 400, device=DEVICE, dtype=torch.bfloat16),
        RunnerConfig(max_model_len=512, eos_token_ids=(2,), overlaps_steps=shard.num_ranks == 1),
        kernels=device_kernels(),
        capture=capture,
    )


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_p=0.9, seed=3),
    SamplingParams(top_k=5, min_p=0.1, logprobs=3),
    SamplingParams(
        repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.2, logit_bias={4: 1.0, 7: -2.0},
        min_tokens=20, stop_token_ids=(5,),
    ),
]  # fmt: skip


class Hand:
    """Makes sequences and plans for a runner."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.next_unit = runner, 0

    def unit(self) -> int:
        self.next_unit += 1
        return self.next_unit - 1

    def sequence(self, length: int, params: SamplingParams) -> Sequence:
        spec, tokens = self.runner.pool.spec, [random.randrange(1, 2000) for _ in range(length)]
        seq = Sequence(Request(request_id=str(self.next_unit), token_ids=tokens, params=params), tokens, length, 0.0)
        for group in range(len(spec.groups)):
            per_unit, table = spec.blocks_per_unit(group), list[BlockId]()
            while len(table) * 16 < length + 40:
                at = self.unit()
                table += [BlockId(at * per_unit + sub) for sub in range(per_unit)]
            seq.block_tables.append(table)
        if spec.state is not None:
            seq.state_unit = UnitId(self.unit())
        return seq

    def step(self, *parts: tuple[Sequence, int], **copies: Any) -> None:
        chunks = [Chunk(seq, seq.computed_tokens, end, should_sample=end == len(seq.token_ids)) for seq, end in parts]
        resets = [c.seq.state_unit for c in chunks if c.seq.state_unit is not None and c.start == 0]
        # Inference mode would hand composite operations to the guard whole, and show it nothing of what they do.
        submit = inspect.unwrap(ModelRunner.submit)
        result = submit(self.runner, StepPlan(chunks, state_resets=resets, **copies))()
        for chunk, token in zip(chunks, result.sampled_tokens, strict=True):
            chunk.seq.computed_tokens = chunk.end
            assert (token is not None) == (chunk.should_sample and self.runner.model.samples_tokens)
            if chunk.should_sample:
                chunk.seq.token_ids.append(1)

    def run_overlapped(self, seqs: list[Sequence], count: int) -> None:
        """Steps that each decode all of them, begun before the result of the one before is read."""
        submit, reads = inspect.unwrap(ModelRunner.submit), []
        for i in range(count):
            chunks = [
                Chunk(seq, seq.computed_tokens, seq.computed_tokens + 1, should_sample=True, token_on_device=i > 0)
                for seq in seqs
            ]
            reads.append(submit(self.runner, StepPlan(chunks)))
            for chunk in chunks:
                chunk.seq.computed_tokens = chunk.end
        for read in reads:
            assert read().sampled_tokens == [1] * len(seqs)
            for seq in seqs:
                seq.token_ids.append(1)


class Recorder:
    """Stands in for DEVICE graphs: what is recorded must be free of copies from the host."""

    def __init__(self, guard: Guard) -> None:
        self.guard, self.record_count, self.replay_count = guard, 0, 0

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        self.record_count += 1
        run()
        self.guard.recording = True
        out = run()
        self.guard.recording = False

        def replay() -> None:
            self.replay_count += 1

        return replay, out


def all_reduce_sum(x: torch.Tensor) -> torch.Tensor:
    return x


SHARDS = {
    "one rank": Shard(),
    "rank 0 of 2": Shard(0, 2, all_reduce_sum, lambda x: torch.cat((x, x), 1)),
    "rank 1 of 2": Shard(1, 2, all_reduce_sum, lambda x: None),
}


@pytest.mark.parametrize("rank", list(SHARDS))
@pytest.mark.parametrize("family", list(RECIPES))
def test_nothing_in_a_step_waits_for_the_device(guard: Guard, family: str, rank: str) -> None:
    capture = Recorder(guard)
    runner = device_runner(family, capture, SHARDS[rank])
    with guard, torch.no_grad():
        hand = Hand(runner)
        seqs = [hand.sequence(length, params) for length, params in zip((40, 1, 70, 16), PARAMS, strict=True)]
        prompt_logprobs = hand.sequence(20, SamplingParams(temperature=0.0, prompt_logprobs=2))
        hand.step((seqs[0], 40), (seqs[1], 1), (seqs[2], 33), (prompt_logprobs, 20))  # prompts, one cut short
        hand.step((seqs[0], 41), (seqs[2], 70), (seqs[3], 16))  # a decode beside prompts
        for members in (seqs, seqs[:3], seqs):  # recorded: four, three padded to four
            hand.step(*((seq, len(seq.token_ids)) for seq in members))
        if runner._last_tokens is not None:
            hand.run_overlapped(seqs, 3)
        copies: dict[str, Any] = {"block_copies": [BlockCopy(0, BlockId(0), BlockId(1))]}
        if runner.pool.spec.state is not None:
            state_kind = runner.pool.spec.state_kind
            copies["block_copies"].append(BlockCopy(state_kind, BlockId(3), BlockId(4)))
            copies["state_checkpoints"] = [BlockCopy(state_kind, BlockId(4), BlockId(3))]
        hand.step((seqs[0], len(seqs[0].token_ids)), **copies)
    assert (capture.record_count, capture.replay_count) == (2, 4 + 3 * (runner._last_tokens is not None))
    assert guard.uploads > 0
    assert {"store_kv", "decode_attention", "prefill_attention", "norm_rows"} <= LAUNCHED
    assert ("draw_rows" in LAUNCHED) == runner.model.samples_tokens


X = torch.empty(4, 5, device=DEVICE)
MASK = torch.empty(4, dtype=torch.bool, device=DEVICE)


@pytest.mark.parametrize(
    "wait",
    [
        lambda: X.sum().item(),
        lambda: X.tolist(),
        lambda: X.cpu(),
        lambda: bool((X > 0).all()),
        lambda: X[MASK],
        lambda: X.masked_select(X > 0),
        lambda: X.__setitem__(MASK, 0.0),
        lambda: MASK.nonzero(),
        lambda: X[[0, 2]],
        lambda: X[torch.tensor([0, 2])],
        lambda: X.index_select(0, torch.tensor([1])),
        lambda: X + torch.zeros(4, 5),
        lambda: X.copy_(torch.zeros(4, 5)),
        lambda: X.copy_(torch.zeros(4, 5), non_blocking=True),
        lambda: torch.zeros(3).to(DEVICE),
        lambda: torch.zeros(3).to(DEVICE, non_blocking=True),
        lambda: torch.zeros(3).pin_memory().to(DEVICE),
        lambda: torch.tensor([1, 2], device=DEVICE),
        lambda: torch.tensor([1, 2]).to(X),
        lambda: X.repeat_interleave(torch.empty(4, dtype=torch.int64, device=DEVICE), 0),
        lambda: X.unique(),
    ],
)
def test_the_guard_sees_what_waits(guard: Guard, wait: Callable[[], object]) -> None:
    with guard, torch.no_grad(), pytest.raises((HostWaits, AssertionError, RuntimeError, NotImplementedError)):
        wait()


def test_the_guard_lets_pass_what_does_not_wait(guard: Guard) -> None:
    with guard, torch.no_grad():
        rows = copy_to_device(np.array([1, 2]), DEVICE)
        (ints,) = upload([np.array([3, 4, 5])], DEVICE)
        assert (rows.device, ints.device, ints.shape) == (DEVICE, DEVICE, (3,))
        X.index_select(0, rows)
        X[rows] = 0.0
        assert (X * torch.tensor(2.0)).shape == X.shape  # a number
        X.topk(2).values.softmax(-1).cumsum(-1).argmax(-1)
        guard.recording = True
        with pytest.raises(AssertionError, match="recorded"):
            copy_to_device(np.array([1, 2]), DEVICE)
