"""Whatever a client asks for is refused by name, or can be sent to the core and leaves its neighbours' tokens alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import LLM, SamplingParams
from engine.core_messages import AddRequests, Command
from engine.execution.sampler import Sampler
from engine.protocol.generation import make_sample_requests
from engine.protocol.params import ModelLimits, check_params, make_sampling_params
from engine.types import Request, Sequence
from prompts import RequestError, parse_completion

LIMITS = ModelLimits(max_model_len=100, vocab_size=50)
EDGES = (
    -(10**30),
    -(2**63) - 1,
    -(2**63),
    -5,
    -1,
    0,
    1,
    2,
    20,
    21,
    49,
    50,
    128,
    129,
    2**31,
    2**32,
    2**63,
    2**64,
    10**30,
)
NUMBERS = st.sampled_from(EDGES) | st.integers() | st.floats() | st.booleans()
VALUES = st.one_of(
    st.none(), NUMBERS, st.text(max_size=3), st.just("x" * 5000), st.lists(NUMBERS, max_size=3),
    st.lists(st.text(max_size=2), max_size=70), st.dictionaries(NUMBERS | st.text(max_size=2), NUMBERS, max_size=3),
)  # fmt: skip
ASKED = st.dictionaries(st.sampled_from(SamplingParams.__struct_fields__), VALUES, max_size=4)


def arrives(params: SamplingParams, salt: str | None = None, priority: int = 0) -> None:
    """What the check let through is read by the core as it was sent."""
    request = Request(request_id="r", token_ids=[1], params=params, cache_salt=salt, priority=priority)
    message = AddRequests(make_sample_requests(request, "r", 0))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Command) == message


@settings(max_examples=examples(500))
@given(fields=ASKED)
def test_what_passes_can_be_sent(fields: dict[str, Any]) -> None:
    try:
        params = check_params(SamplingParams(**fields), LIMITS)
    except RequestError as refused:
        error = refused
    else:
        arrives(params)
        return
    assert error.param in SamplingParams.__struct_fields__
    assert error.message.startswith(error.param)


@settings(max_examples=examples(500))
@given(
    fields=st.dictionaries(
        st.sampled_from([*SamplingParams.__struct_fields__, "priority", "cache_salt", "truncate_prompt_tokens"]),
        VALUES, max_size=3,
    )
)  # fmt: skip
def test_a_body_that_passes_can_be_sent(fields: dict[str, Any]) -> None:
    try:
        data = msgspec.json.encode({"prompt": "x", **fields})
    except (TypeError, OverflowError, msgspec.ValidationError):
        return  # JSON has no such value
    try:
        body = parse_completion(data)
        params = make_sampling_params(body, LIMITS, 1)
    except RequestError:
        return
    arrives(params, body.cache_salt, body.priority or 0)


def test_the_number_that_ended_service_is_refused() -> None:
    with pytest.raises(RequestError, match="top_k"):
        parse_completion(b'{"prompt": [1], "n": 128, "top_k": %d}' % 10**30)


# ---------------------------------------------------------------- beside a victim

VICTIM = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=256, num_gpu_blocks_override=64, check_invariants=True) as llm:
        yield llm


@pytest.mark.parametrize(
    "prompt", [[-5, 3], [10**30], [2**63], [1.5], ["a"], [None], {"prompt_token_ids": [-1]}, {"prompt_token_ids": "ab"}]
)
def test_no_token_id_from_outside_reaches_the_device(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate([[1, 2], prompt], VICTIM, use_tqdm=False)
    assert not llm._core.has_work


@settings(max_examples=examples(60))
@given(data=st.data(), fields=ASKED)
def test_a_neighbour_keeps_its_tokens(llm: LLM, data: st.DataObject, fields: dict[str, Any]) -> None:
    vocab = llm.info.vocab_size
    ids = st.lists(st.integers(-2, 3) | st.integers(vocab - 2, 3 * vocab) | st.sampled_from(EDGES), max_size=3)
    fields = {"temperature": 0.5, **fields, **data.draw(st.fixed_dictionaries({}, optional={
        "stop_token_ids": ids, "logit_bias": ids.map(lambda ids: dict.fromkeys(ids, 100.0)), "min_tokens": st.just(3),
    }))}  # fmt: skip
    fields |= {"max_tokens": 4, "n": 1}
    victim_tokens = llm.generate([[5, 6, 7]], VICTIM, use_tqdm=False)[0].outputs[0].token_ids
    try:
        results = llm.generate([[9, 9], [5, 6, 7]], [SamplingParams(**fields), VICTIM], use_tqdm=False)
    except RequestError:
        assert not llm._core.has_work
        return
    assert results[1].outputs[0].token_ids == victim_tokens


def test_an_end_token_that_the_model_has_no_logit_of_is_passed_over() -> None:
    """generation_config.json may name one; forbidding it wrote into the row below."""
    logits = torch.zeros(2, 8)
    logits[1, 3] = 1.0
    params = [SamplingParams(temperature=0, min_tokens=4), VICTIM]
    rows = [Sequence(Request(request_id=str(i), token_ids=[1], params=p), [1], 1, 0.0) for i, p in enumerate(params)]
    sampler = Sampler(8, torch.device("cpu"), eos_token_ids=(11,))
    tokens, _ = sampler.sample(logits, sampler.prepare(sampler.make_batch(rows, [0, 1]), np.array([1, 1]), dict))
    assert tokens[1] == 3
