"""Penalties and their counts on the device, against counts in plain Python, over several steps."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.execution import penalties as penalties_module
from engine.execution.penalties import Penalties, has_penalties, make_penalty_rows
from engine.types import Request, SamplingParams, Sequence

VOCAB = 300


def make_sequence(rng: random.Random, name: str) -> Sequence:
    params = SamplingParams(
        repetition_penalty=rng.choice((1.0, 0.7, 1.4)),
        presence_penalty=rng.choice((0.0, 0.8, -0.3)),
        frequency_penalty=rng.choice((0.0, 0.4)),
    )
    if not has_penalties(params):
        params = SamplingParams(presence_penalty=0.8)
    prompt, output = ([rng.randrange(VOCAB) for _ in range(rng.choice((0, 1, 7, 400)))] for _ in range(2))
    return Sequence(Request(request_id=name, token_ids=prompt, params=params), prompt + output, len(prompt), 0.0)


def penalise_one(logits: torch.Tensor, seq: Sequence) -> torch.Tensor:
    """The logits of one row after its penalties, token by token."""
    params, values = seq.request.params, logits.double().tolist()
    for token in set(seq.token_ids):
        values[token] *= 1 / params.repetition_penalty if values[token] > 0 else params.repetition_penalty
    for token, count in Counter(seq.token_ids[seq.prompt_len :]).items():
        values[token] -= params.frequency_penalty * count + params.presence_penalty
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("all_rows", [True, False])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("seed", range(5))
def test_steps_of_penalised_rows(device: str, all_rows: bool, seed: int) -> None:
    """Rows change hands, a failed step loses all counts, and each step counts the drawn tokens."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    penalties, count = Penalties(16, VOCAB, torch.device(device)), 5
    seq_by_row: dict[int, Sequence] = {}
    for step_number in range(12):
        left_rows = [row for row in seq_by_row if rng.random() < 0.3]
        for row in left_rows:
            del seq_by_row[row]
        free_rows = rng.sample(sorted(set(range(16)) - set(seq_by_row)), count - len(seq_by_row))
        seq_by_row |= {row: make_sequence(rng, f"{step_number}-{row}") for row in free_rows}
        penalties.reset_rows(list(range(16)) if step_number == 9 else free_rows)
        rows, sequences = list(seq_by_row), list(seq_by_row.values())
        logits = torch.randn(count if all_rows else 8, VOCAB)
        logits_rows = list(range(count)) if all_rows else rng.sample(range(8), count)
        batch_sequences = [
            Sequence(Request(request_id="plain", token_ids=[1], params=SamplingParams()), [1], 1, 0.0)
        ] * len(logits)
        table_rows = [-1] * len(logits)
        for logits_row, row, seq in zip(logits_rows, rows, sequences, strict=True):
            batch_sequences[logits_row], table_rows[logits_row] = seq, row
        batch = make_penalty_rows(batch_sequences, table_rows, torch.device(device))
        assert batch is not None
        step = penalties.prepare(batch)
        expected = logits.double()
        for row, seq in zip(logits_rows, sequences, strict=True):
            expected[row] = penalise_one(logits[row], seq)
        device_logits = logits.to(device)
        penalties.apply(device_logits, step)
        torch.testing.assert_close(device_logits.cpu().double(), expected, rtol=1e-5, atol=1e-5)
        drawn = torch.randint(VOCAB, (len(logits),))
        for row, seq in zip(logits_rows, sequences, strict=True):
            if seq.token_ids and rng.random() < 0.5:
                drawn[row] = rng.choice(seq.token_ids)
            seq.token_ids.append(int(drawn[row]))
        penalties.count_sampled(drawn.to(device), step)


def test_one_long_row_takes_no_room_in_rows_that_were_never_used() -> None:
    penalties, prompt = Penalties(2048, 50_000, torch.device("cpu")), list(range(10_000))
    params = SamplingParams(repetition_penalty=1.1)
    seq = Sequence(Request(request_id="a", token_ids=prompt, params=params), prompt, len(prompt), 0.0)
    batch = make_penalty_rows([seq], [2], torch.device("cpu"))
    assert batch is not None
    penalties.apply(torch.zeros(1, 10_000), penalties.prepare(batch))
    assert penalties._token_ids.nbytes + penalties._output_counts.nbytes <= 4 * 20_000 * 12


class LargestTensor(TorchDispatchMode):
    """Records the most elements of any new tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        old_memory = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in old_memory:
            self.elements = max(self.elements, result.numel())
        return result


def test_a_long_row_beside_many_takes_a_bounded_part_of_the_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt of 100,000 distinct tokens beside 2,047 other sequences took 10 GB in each step."""
    monkeypatch.setattr(penalties_module, "MAX_ENTRIES_AT_ONCE", 20_000, raising=False)
    rows, vocab = 64, 10_000
    penalties = Penalties(rows, vocab, torch.device("cpu"))
    params, rng = SamplingParams(repetition_penalty=1.1, frequency_penalty=0.1), random.Random(1)
    prompts = [rng.sample(range(vocab), 5000 if row == 7 else 5) for row in range(rows)]
    sequences = [Sequence(Request(request_id="a", token_ids=p, params=params), list(p), len(p), 0.0) for p in prompts]
    batch = make_penalty_rows(sequences, list(range(rows)), torch.device("cpu"))
    assert batch is not None
    for _ in range(3):
        step, logits = penalties.prepare(batch), torch.randn(rows, vocab)
        expected = torch.stack([penalise_one(row, seq) for row, seq in zip(logits, sequences)])
        penalties._enlarge_tables(rows, step.width)
        drawn = torch.randint(vocab, (rows,))
        with LargestTensor() as largest:
            penalties.apply(logits, step)
            penalties.count_sampled(drawn, step)
        assert largest.elements <= 20_000
        torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)
        for token, seq in zip(drawn.tolist(), sequences, strict=True):
            seq.token_ids.append(token)


def test_a_long_answer_takes_no_more_room_than_the_vocabulary() -> None:
    """Each step may add a token, as far as the host knows."""
    penalties, prompt = Penalties(1, 300, torch.device("cpu")), list(range(299))
    params = SamplingParams(repetition_penalty=1.1, frequency_penalty=0.1)
    seq = Sequence(Request(request_id="a", token_ids=prompt, params=params), list(prompt), len(prompt), 0.0)
    batch = make_penalty_rows([seq], [0], torch.device("cpu"))
    assert batch is not None
    for token in [299, 299, 0, 7] * 2:
        step, logits = penalties.prepare(batch), torch.ones(1, 300)
        penalties.apply(logits, step)
        torch.testing.assert_close(logits[0].double(), penalise_one(torch.ones(300), seq), rtol=1e-5, atol=1e-5)
        penalties.count_sampled(torch.tensor([token]), step)
        seq.token_ids.append(token)
    assert penalties._token_ids.shape == (1, 300)


def test_a_table_that_grows_with_its_answers_is_no_wider_than_the_longest_context() -> None:
    """The memory that is measured at the start is that of the longest context; growth by a quarter took more."""
    penalties, prompt = Penalties(1, 10_000, torch.device("cpu"), length_max=1100), list(range(1000))
    params = SamplingParams(repetition_penalty=1.1)
    seq = Sequence(Request(request_id="a", token_ids=prompt, params=params), list(prompt), len(prompt), 0.0)
    batch = make_penalty_rows([seq], [0], torch.device("cpu"))
    assert batch is not None
    for token in range(1000, 1100):
        step = penalties.prepare(batch)
        penalties.apply(torch.ones(1, 10_000), step)
        penalties.count_sampled(torch.tensor([token]), step)
    assert penalties._token_ids.shape == (1, 1101)
