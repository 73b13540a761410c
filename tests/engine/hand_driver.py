"""Drives a ModelRunner with hand-made plans, and checks it against HF transformers on the same checkpoint.

Blocks are handed out in random order from a poisoned pool, so that a read outside of what a plan wrote shows as NaN.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from engine.execution.decode_graphs import Capture
from engine.execution.device_pool import DevicePool
from engine.execution.runner import ModelRunner, RunnerConfig
from engine.models.loader import load_model
from engine.types import BlockId, Chunk, Request, SamplingParams, Sequence, StepPlan, StepResult, UnitId
from kernels import Kernels

torch.set_num_threads(1)  # tests run beside others; tiny models gain nothing from more

TOLERANCE = 1e-4


class Driver:
    """A runner over a pool of its own, and the hidden states of its last step."""

    def __init__(
        self,
        folder: Path,
        *,
        block_size: int = 16,
        num_units: int = 256,
        seed: int = 0,
        dtype: str = "float32",
        kernels: Kernels | None = None,
        device: torch.device | str = "cpu",
        capture: Capture | None = None,
        all_rows: bool = True,
    ) -> None:
        """`all_rows`: compute hidden states of all positions, not only of those that a token is drawn from."""
        self.rng = random.Random(seed)
        device = torch.device(device)
        self.model, model_dtype = load_model(folder, dtype=dtype, device=device)
        self.spec = self.model.make_cache_spec(block_size, model_dtype)
        self.runner = ModelRunner(
            self.model,
            DevicePool(self.spec, num_units, device=device, dtype=model_dtype),
            RunnerConfig(max_model_len=1024),
            kernels=kernels,
            capture=capture,
        )
        self.runner.pool.buffer.fill_(0xFF)  # NaN in every float dtype
        self.free_units = self.rng.sample(range(num_units), num_units)
        self.free_blocks: list[list[int]] = [[] for _ in self.spec.groups]
        self.hidden_states: list[torch.Tensor] = []
        forward = self.runner._forward

        def recording(step: Any) -> torch.Tensor:
            hidden_states = forward(replace(step, selected=step.selected._replace(indices=None)) if all_rows else step)
            starts = step.batch.query_starts if all_rows else step.selected.starts
            self.hidden_states = [hidden_states[starts[i] : starts[i + 1]].clone() for i in range(len(step.chunks))]
            self.forwarded_chunks = step.chunks
            indices = step.selected.indices
            return hidden_states[indices] if all_rows and indices is not None else hidden_states

        self.runner._forward = recording  # type: ignore[assignment, method-assign]

    def sequence(self, token_ids: list[int], params: SamplingParams | None = None, name: str = "r") -> Sequence:
        request = Request(request_id=name, token_ids=token_ids, params=params or SamplingParams(temperature=0.0))
        seq = Sequence(request, list(token_ids), len(token_ids), 0.0, block_tables=[[] for _ in self.spec.groups])
        if self.spec.state is not None:
            seq.state_unit = UnitId(self.free_units.pop())
        return seq

    def grow(self, seq: Sequence, end: int) -> None:
        """Give the sequence blocks for the positions [0, end)."""
        for group, table in enumerate(seq.block_tables):
            while len(table) * self.spec.block_size < end:
                if not self.free_blocks[group]:
                    per_unit = self.spec.blocks_per_unit(group)
                    unit = self.free_units.pop()
                    self.free_blocks[group] = [unit * per_unit + sub for sub in range(per_unit)]
                table.append(BlockId(self.free_blocks[group].pop()))

    def step(self, *parts: tuple[Sequence, int], **copies: list) -> StepResult:
        """One step that computes up to position `end` of each (sequence, end); sampled tokens are appended."""
        chunks = []
        for seq, end in parts:
            self.grow(seq, end)
            chunks.append(Chunk(seq, seq.computed_tokens, end, should_sample=end == len(seq.token_ids)))
        resets = [c.seq.state_unit for c in chunks if c.seq.state_unit is not None and c.start == 0]
        result = self.runner.execute(StepPlan(chunks, state_resets=resets, **copies))
        for chunk, token in zip(chunks, result.sampled_tokens, strict=True):
            chunk.seq.computed_tokens = chunk.end
            assert (token is not None) == chunk.should_sample
            if token is not None:
                chunk.seq.token_ids.append(token)
        return result

    def logits_of(self, seq: Sequence) -> torch.Tensor:
        """Logits of the positions the last step computed for the sequence: [tokens, vocab]."""
        at = next(i for i, chunk in enumerate(self.forwarded_chunks) if chunk.seq is seq)
        return self.model.compute_logits(self.hidden_states[at]).float()

    def run(self, seq: Sequence, output_tokens: int, cuts: Iterator[int] | None = None) -> torch.Tensor:
        """Prefill in chunks that end at `cuts`, then decode; logits of every position computed."""
        parts = []
        end = seq.prompt_len + output_tokens - 1
        while seq.computed_tokens < end:
            stop_at = next(cuts, len(seq.token_ids)) if cuts is not None else len(seq.token_ids)
            stop_at = min(max(stop_at, seq.computed_tokens + 1), len(seq.token_ids))
            self.step((seq, stop_at))
            parts.append(self.logits_of(seq))
        return torch.cat(parts)


class Oracle:
    """HF transformers on the same checkpoint, fp32, eager attention, the whole context at once.

    Gated delta nets run token by token. The chunked rule of transformers takes running sums of the log decays in fp32
    and then small differences of them, which costs it up to 1e-4 of a logit.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._module = sys.modules[type(self.model).__module__]

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[tokens, vocab] of every position."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            if hasattr(self._module, "torch_chunk_gated_delta_rule"):
                rule = self._module.torch_recurrent_gated_delta_rule
                stack.enter_context(patch.object(self._module, "torch_chunk_gated_delta_rule", rule))
            return self.model(torch.tensor([token_ids]), use_cache=False).logits[0]

    def check(self, seq: Sequence, logits: torch.Tensor, first: int = 0) -> None:
        """The logits of positions [first, ..) agree, and the sequence's outputs are the greedy ones."""
        expected = self.logits(seq.token_ids)[first : first + len(logits)]
        assert not logits.isnan().any()
        worst = (logits - expected).abs().max().item()
        assert worst < TOLERANCE, f"logits differ by {worst}"
        for position in range(max(seq.prompt_len, first + 1), len(seq.token_ids)):
            row = expected[position - 1 - first]  # the greedy token, or its equal within rounding
            assert row.max() - row[seq.token_ids[position]] < TOLERANCE, f"token at {position}"


def random_cuts(rng: random.Random, length: int) -> Iterator[int]:
    """Increasing random positions in (0, length]."""
    at = 0
    while at < length:
        at = min(length, at + rng.choice((1, 2, 3, 5, 7, 16, 17, 31, 64)))
        yield at
