"""What constrained rows may draw: as the grammar says, in whatever company, however the answer came about."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from engine import LLM, SamplingParams, StructuredOutputsParams
from engine.execution.masks import Masks, TokenMasks
from engine.execution.sampler import Sampler
from engine.grammar_compiler import GrammarCompiler, GrammarError, GrammarVocabulary, check_grammar
from engine.tiny.model import PRESETS, cached_model
from engine.types import Constraint, Request, Sequence
from prompts import Tokenizer

CPU = torch.device("cpu")
TOKENIZER = Tokenizer.load(cached_model(PRESETS["tiny"]), with_fast_encoder=False)
EOS = TOKENIZER.eos_token_ids[0]
ENDS = set(TOKENIZER.eos_token_ids)
VOCAB = TOKENIZER.vocab_size + 40
"""Models have logits that no token belongs to."""
WORDS = GrammarVocabulary(TOKENIZER, VOCAB)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["cat", "dog", None]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "id": {"type": "string", "pattern": "^[a-f0-9]{4}$"},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " "},
}
LARKS = {
    "json": f"start: %json {json.dumps(SCHEMA)}",
    "any json": 'start: %json {"type": "object"}',
    "regex": "start: /[a-z]{1,3}(-[0-9]+)*/",
    "choice": 'start: "yes" | "no" | "yesterday"',
    "tags": f'start: free <[{TOKENIZER.token_to_id("<tool_call>")}]> "x"+ free\nfree: /(?s:.*)/',
}


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarCompiler]:
    new_grammars = GrammarCompiler(lambda: WORDS)
    yield new_grammars
    new_grammars.close()


@pytest.fixture
def masks(grammars: GrammarCompiler) -> Iterator[Masks]:
    new_masks = Masks(grammars, VOCAB, CPU, threads=1)
    yield new_masks
    new_masks.close()


def sequence(lark: str | None, answer: list[int] | None = None, name: str = "s", **params: Any) -> Sequence:
    reasoning_ids = {key: params.pop(key) for key in ("reasoning_start_token", "reasoning_end_token") if key in params}
    constraint = None if lark is None else Constraint(lark, "structured_outputs.grammar", **reasoning_ids)
    prompt = [1, 2, 3]
    request = Request(request_id=name, token_ids=prompt, params=SamplingParams(constraint=constraint, **params))
    return Sequence(request, [*prompt, *(answer or [])], len(prompt), 0.0)


def walk(lark: str, seed: int, length: int) -> list[int]:
    """A beginning of an answer, drawn."""
    matcher, rng, walked_tokens = WORDS.compile(lark), random.Random(seed), list[int]()
    while len(walked_tokens) < length and not matcher.is_stopped():
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        token = rng.choice([int(i) for i in bits.nonzero()[0] if i not in ENDS] or [EOS])
        assert matcher.consume_token(token)
        walked_tokens.append(token)
    return walked_tokens


def allowed_tokens(masks: Masks, seq: Sequence, row: int = 0, banned_tokens: list[int] | None = None) -> set[int]:
    """The tokens that are left of a row of logits."""
    logits = torch.zeros(1, VOCAB)
    requests = [masks.make_request(0, row, seq, len(seq.token_ids), banned_tokens or [])]
    return tokens_left_by(masks.submit(requests, dict).result(), masks, logits)[0]


def tokens_left_by(token_masks: TokenMasks, masks: Masks, logits: torch.Tensor) -> list[set[int]]:
    """Of each row."""
    masks.apply(logits, token_masks)
    return [set(row.isfinite().nonzero()[:, 0].tolist()) for row in logits]


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(LARKS)),
    seed=st.integers(0, 10**6),
    length=st.integers(0, 25),
    extra_tokens=st.integers(0, 4),
)
def test_what_is_left_is_what_the_matcher_takes(name: str, seed: int, length: int, extra_tokens: int) -> None:
    """Also for a row that has read a part before. Nothing is forced here: else only a text's usual tokens are left."""
    lark = '%llguidance {"no_forcing": true}\n' + LARKS[name]
    answer = walk(lark, seed, length + extra_tokens)
    grammars = GrammarCompiler(lambda: WORDS)
    masks = Masks(grammars, VOCAB, CPU, threads=1)
    try:
        seq = sequence(lark, answer[:length], max_tokens=1000)
        for cut in (length, len(answer)):
            seq.token_ids = [1, 2, 3, *answer[:cut]]
            matcher = WORDS.compile(lark)
            assert matcher.consume_tokens(answer[:cut])
            takes = {token for token in range(VOCAB) if matcher.validate_tokens([token])}
            takes |= ENDS if matcher.is_accepting() else set()
            assert allowed_tokens(masks, seq) == takes
    finally:
        masks.close()
        grammars.close()


def test_the_end_is_allowed_only_where_the_answer_is_whole_and_then_again_and_again(masks: Masks) -> None:
    yes = TOKENIZER.encode("yes")
    assert not ENDS & allowed_tokens(masks, sequence(LARKS["choice"]), row=0)
    assert allowed_tokens(masks, sequence(LARKS["choice"], yes), row=1) >= ENDS
    assert allowed_tokens(masks, sequence(LARKS["choice"], TOKENIZER.encode("no")), row=2) == ENDS
    assert allowed_tokens(masks, sequence(LARKS["choice"], [*yes, EOS]), row=3) == ENDS
    assert allowed_tokens(masks, sequence(LARKS["choice"], [*yes, EOS, EOS]), row=4) == ENDS


def test_min_tokens_bans_the_end_unless_nothing_else_is_left(masks: Masks) -> None:
    yes = TOKENIZER.encode("yes")
    assert not ENDS & allowed_tokens(masks, sequence(LARKS["choice"], yes), row=0, banned_tokens=list(ENDS))
    assert (
        allowed_tokens(masks, sequence(LARKS["choice"], TOKENIZER.encode("no")), row=1, banned_tokens=list(ENDS))
        == ENDS
    )


def test_a_thought_is_free(masks: Masks) -> None:
    end = TOKENIZER.token_to_id("</think>")
    assert end is not None
    seq = sequence(LARKS["choice"], TOKENIZER.encode("I think"), reasoning_end_token=end)
    assert allowed_tokens(masks, seq) == set(range(VOCAB))
    assert allowed_tokens(masks, seq, banned_tokens=list(ENDS)) == set(range(VOCAB)) - ENDS
    seq.token_ids += [end]
    first = allowed_tokens(masks, seq)
    assert first
    assert first < set(range(VOCAB))
    seq.token_ids += TOKENIZER.encode("no")
    assert allowed_tokens(masks, seq) == ENDS
    resumed_seq = sequence(LARKS["choice"], seq.token_ids[3:], reasoning_end_token=end)
    assert allowed_tokens(masks, resumed_seq, row=1) == ENDS


def test_a_thought_need_not_come(masks: Masks) -> None:
    begin, end = (TOKENIZER.token_to_id(mark) for mark in ("<think>", "</think>"))
    assert begin is not None
    first = allowed_tokens(masks, sequence(LARKS["choice"]), row=9)
    assert begin not in first
    seq = sequence(LARKS["choice"], reasoning_start_token=begin, reasoning_end_token=end)
    assert allowed_tokens(masks, seq) == first | {begin}
    seq.token_ids += TOKENIZER.encode("no")
    assert allowed_tokens(masks, seq) == ENDS
    begun_seq = sequence(LARKS["choice"], reasoning_start_token=begin, reasoning_end_token=end)
    assert allowed_tokens(masks, begun_seq, row=2, banned_tokens=list(ENDS)) == first | {begin}
    begun_seq.token_ids += [begin]
    assert allowed_tokens(masks, begun_seq, row=2, banned_tokens=list(ENDS)) == set(range(VOCAB)) - ENDS
    seq = sequence(LARKS["choice"], [begin], reasoning_start_token=begin, reasoning_end_token=end)
    assert allowed_tokens(masks, seq, row=1) == set(range(VOCAB))
    seq.token_ids += [5, 6, end or 0]
    assert allowed_tokens(masks, seq, row=1) == first


def test_an_answer_that_cannot_go_on_says_why_and_leaves_the_others_alone(masks: Masks) -> None:
    wrong = sequence(LARKS["choice"], TOKENIZER.encode("maybe"))
    right = sequence(LARKS["choice"])
    mask_requests = [masks.make_request(0, 0, wrong, len(wrong.token_ids), []), masks.make_request(1, 1, right, 3, [])]
    token_masks = masks.submit(mask_requests, dict).result()
    assert list(token_masks.failures) == [0]
    assert "does not match" in token_masks.failures[0]
    assert 0 < len(tokens_left_by(token_masks, masks, torch.zeros(2, VOCAB))[1]) < VOCAB


def test_several_threads_make_the_same_masks(grammars: GrammarCompiler) -> None:
    single_masks, threaded_masks = (Masks(grammars, VOCAB, CPU, threads=threads) for threads in (1, 3))
    rows = [sequence(lark, walk(lark, seed, 7)) for seed, lark in enumerate([*LARKS.values()] * 3)]
    bits = []
    for masks in (single_masks, threaded_masks):
        mask_requests = [masks.make_request(i, i, seq, len(seq.token_ids), []) for i, seq in enumerate(rows)]
        bits.append(masks.submit(mask_requests, dict).result().bits)
        masks.close()
    assert (bits[0] == bits[1]).all()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), constrained_rows=st.lists(st.booleans(), min_size=4, max_size=4))
def test_free_neighbours_draw_what_they_draw_without(seed: int, constrained_rows: list[bool]) -> None:
    grammars = GrammarCompiler(lambda: WORDS)
    masks = Masks(grammars, VOCAB, CPU, threads=1)
    params: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 0.8, "seed": 1}, {"temperature": 1.0, "top_p": 0.9, "seed": 2},
        {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.2, "logit_bias": {7: 2.0}, "min_tokens": 3},
    ]  # fmt: skip
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    draws = []
    try:
        for with_constraints in (False, True):
            sampler = Sampler(VOCAB, CPU, (EOS,), 0, masks=masks)
            rows = [
                sequence(LARKS["json"] if with_constraints and constrained_rows[i] else None, name=str(i), **params[i])
                for i in range(4)
            ]
            inputs = sampler.prepare(sampler.make_batch(rows, [0, 1, 2, 3]), np.array([3] * 4), dict)
            draws.append(sampler.sample(logits.clone(), inputs)[0].tolist())
            sampler.reset_rows([0, 1, 2, 3])
    finally:
        masks.close()
        grammars.close()
    for i in range(4):
        assert constrained_rows[i] or draws[0][i] == draws[1][i]
        assert not constrained_rows[i] or TOKENIZER.decode([draws[1][i]]).startswith("{")


def test_greedy_constrained_rows_take_the_likeliest_of_what_is_allowed_and_logprobs_are_the_models(
    masks: Masks,
) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    seq = sequence(LARKS["choice"], temperature=0.0, logprobs=1)
    allowed_ids = allowed_tokens(masks, seq)
    masks.reset_rows([0])
    sampler = Sampler(VOCAB, CPU, (EOS,), 0, masks=masks)
    inputs = sampler.prepare(sampler.make_batch([seq], [0]), np.array([3]), dict)
    tokens, logprobs = sampler.sample(logits, inputs)
    assert int(tokens[0]) == max(allowed_ids, key=lambda token: float(logits[0, token]))
    assert float(logprobs[1][0]) == pytest.approx(float(logits.log_softmax(-1)[0, int(tokens[0])]), abs=1e-5)


# In an engine ---------------------------------------------------------------------------------------------------------


def answers(requests: list[Request], **settings: Any) -> tuple[dict[str, list[int]], dict[str, str | None], LLM]:
    """Tokens and errors of requests that come together."""
    with LLM(max_model_len=512, **settings) as llm:
        core = llm._core
        for request in requests:
            core.add(request, 0.0)
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        errors: dict[str, str | None] = {}
        while core.has_work:
            for output in core.step(0.0):
                tokens[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    errors[output.request_id] = output.error
            core.check_invariants()
        return tokens, errors, llm


def requests(count: int = 10, **sampling: Any) -> list[Request]:
    """Constrained ones and free ones; all of them end."""
    prompt = TOKENIZER.encode("Tell me, in JSON, of a pet and of whatever else comes to your mind.")
    new_requests = []
    for i in range(count):
        constraint = Constraint(LARKS["json"], "response_format") if i % 2 else None
        params = SamplingParams(
            temperature=i % 3 / 2, seed=i, max_tokens=300 if constraint else 60, constraint=constraint, **sampling
        )
        new_requests.append(Request(request_id=str(i), token_ids=prompt[: 3 + i], params=params))
    return new_requests


def assert_valid(tokens: dict[str, list[int]]) -> None:
    for name, ids in tokens.items():
        if int(name) % 2:
            assert ids[-1] in ENDS, name
            jsonschema.validate(json.loads(TOKENIZER.decode(ids)), SCHEMA)


@pytest.mark.parametrize("overlap", [False, True])
def test_constrained_answers_parse_beside_free_ones(overlap: bool) -> None:
    tokens, errors, _ = answers(requests(), num_gpu_blocks_override=200, overlap="on" if overlap else "off")
    assert set(errors.values()) == {None}
    assert_valid(tokens)


def test_preempted_answers_parse() -> None:
    tokens, errors, llm = answers(requests(), num_gpu_blocks_override=20)
    assert llm._core.stats().totals.preemptions > 0
    assert set(errors.values()) == {None}
    assert_valid(tokens)


def test_an_answer_goes_on_where_another_engine_left_it() -> None:
    (request,) = requests(2)[1:]
    prompt, params = request.token_ids, request.params
    full_answer = answers([request], num_gpu_blocks_override=64)[0]["1"]
    for cut in (1, len(full_answer) // 2, len(full_answer) - 1):
        continuation = Request(
            request_id="1", token_ids=[*prompt, *full_answer[:cut]], params=params, resumed_output_len=cut
        )
        continued_answer = answers([continuation], num_gpu_blocks_override=64)[0]["1"]
        assert_valid({"1": full_answer[:cut] + continued_answer})


def test_an_answer_that_was_begun_otherwise_ends_with_an_error() -> None:
    right, wrong = requests(4)[1::2]
    wrong = Request(
        request_id="3", token_ids=[*wrong.token_ids, *TOKENIZER.encode("No")], params=wrong.params, resumed_output_len=1
    )
    tokens, errors, _ = answers([right, wrong], num_gpu_blocks_override=64)
    assert errors["1"] is None
    assert "does not match" in (errors["3"] or "")
    assert tokens["3"] == []
    assert_valid({"1": tokens["1"]})


class Panic(BaseException):
    """A panic of llguidance is no Exception."""


class PanickingMatcher:
    """A matcher that panics in one of its methods, at the third call."""

    def __init__(self, matcher: Any, method: str) -> None:
        self._matcher = matcher
        self._method = method
        self._calls_left = 2

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            self._calls_left -= 1
            if self._calls_left < 0:
                raise Panic("index out of bounds")
        return getattr(self._matcher, name)


class PanickingExecutor:
    """Makes several masks; panics as soon as one of the matchers does."""

    def __init__(self, threads: int) -> None:
        pass

    def unsafe_compute_mask_ptr(self, matchers: list[Any], pointer: int, row_bytes: int, rows: int) -> None:
        for matcher, row in matchers:
            matcher.unsafe_compute_mask_ptr(pointer + row * row_bytes, row_bytes)


@pytest.mark.parametrize("method", ["consume_token", "unsafe_compute_mask_ptr", "compute_bitmask", "deep_copy"])
@pytest.mark.parametrize(("model", "threads"), [("real", 1), ("real", 3), ("simulated", 1)])
def test_a_panic_of_the_grammar_library_ends_its_request_only(
    monkeypatch: pytest.MonkeyPatch, method: str, model: str, threads: int
) -> None:
    """It ended the engine."""
    bad_lark = LARKS["json"] + "\n// bad"
    make_matcher = GrammarCompiler.make_matcher

    def make_panicking_matcher(compiler: GrammarCompiler, lark: str) -> Any:
        matcher = make_matcher(compiler, lark)
        if lark != bad_lark:
            return matcher
        if method == "deep_copy":
            raise Panic("cannot copy")
        return PanickingMatcher(matcher, method)

    monkeypatch.setattr(GrammarCompiler, "make_matcher", make_panicking_matcher)
    monkeypatch.setattr("llguidance.LLExecutor", PanickingExecutor)
    monkeypatch.setattr("engine.execution.sizing.count_mask_threads", lambda config, device: threads)
    settings: dict[str, Any] = {"num_gpu_blocks_override": 64}
    if model == "simulated":
        settings = {"simulate": "h100:qwen3-0.6b", "time_scale": 0.01, "num_gpu_blocks_override": 64}
    expected_tokens, _, _ = answers(requests(4), **settings)
    params = msgspec.structs.replace(requests(2)[1].params, constraint=Constraint(bad_lark, "x"))
    bad = Request(request_id="bad", token_ids=[5, 6, 7], params=params)
    tokens, errors, _ = answers([bad, *requests(4)], **settings)
    bad_error = errors.pop("bad")
    is_called = (
        method == "deep_copy" or (method == "compute_bitmask") == (model == "simulated") or method == "consume_token"
    )
    assert (bad_error is not None and "Panic" in bad_error) == is_called
    assert set(errors.values()) == {None}
    tokens.pop("bad")
    assert tokens == expected_tokens


def test_a_grammar_that_does_not_compile_ends_its_request_only() -> None:
    bad = requests(2)[1]
    bad = Request(
        request_id="bad", token_ids=bad.token_ids, params=SamplingParams(constraint=Constraint("start: (", "x"))
    )
    tokens, errors, _ = answers([bad, *requests(2)], num_gpu_blocks_override=64)
    assert errors.pop("bad")
    assert set(errors.values()) == {None}
    assert tokens.pop("bad") == []
    assert_valid(tokens)


def test_a_request_that_waits_for_its_grammar_can_be_aborted() -> None:
    with LLM(max_model_len=512, num_gpu_blocks_override=64) as llm:
        request = requests(2)[1]
        llm._core.add(request, 0.0)
        assert llm._core.has_work
        assert llm._core.stats().waiting_requests == 1
        (output,) = llm._core.abort(["1"])
        assert output.finish_reason == "abort"
        assert not llm._core.has_work


# Grammars -----------------------------------------------------------------------------------------------------------


def test_a_grammar_is_compiled_once_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.grammar_compiler.GRAMMARS_MAX", 2)
    compiled_larks: list[str] = []

    class Counting(GrammarVocabulary):
        def compile(self, lark: str) -> LLMatcher:
            compiled_larks.append(lark)
            return WORDS.compile(lark)

    grammars = GrammarCompiler(partial(Counting, TOKENIZER, VOCAB))
    texts = [f'start: "{i}"' for i in range(3)]
    for text in [*texts, *texts[1:], texts[1]]:
        if (compiling := grammars.start_compiling(text)) is not None:
            compiling.result()
    assert compiled_larks == texts
    assert grammars.start_compiling(texts[1]) is None
    assert grammars.start_compiling(texts[0]) is not None
    grammars.make_matcher(texts[2])  # whether it is kept or not
    grammars.close()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("start: /(/", "regex"),
        ('start: %json {"not": {}}', "not"),
        ('start: %json {"enum": []}', "nsatisfiable"),
        ('start: %json {"$ref": "#"}', "^no text can match it$"),
        ("start: /(a{1000}){1000}/", "too many expressions constructed$"),
        ("root ::= (", "GBNF"),
    ],
)  # fmt: skip
def test_what_no_answer_can_be_asked_to_match(text: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.grammar_compiler.WALK_S_MAX", 60.0)  # a busy machine must not change the reason
    with pytest.raises(GrammarError, match=says):
        check_grammar(WORDS, text)


def test_gbnf_becomes_lark() -> None:
    assert "::=" not in check_grammar(WORDS, 'root ::= "a" [0-9]+')
    assert check_grammar(WORDS, 'start: "::="') == 'start: "::="'


def test_an_answer_that_max_tokens_cuts_says_so() -> None:
    """Whoever does what an answer says must know that it is not whole."""
    texts = StructuredOutputsParams(json={"type": "string"})
    params = [SamplingParams(max_tokens=40, seed=seed, structured_outputs=texts) for seed in range(12)]
    with LLM(max_model_len=512, num_gpu_blocks_override=256) as llm:
        outputs = [result.outputs[0] for result in llm.generate(["a"] * len(params), params, use_tqdm=False)]
    assert {result.finish_reason for result in outputs} == {"length", "stop"}, (
        "a random model ends a text: take other seeds"
    )
    for result in outputs:
        if result.finish_reason == "stop":
            assert isinstance(json.loads(result.text), str)
        else:
            assert len(result.token_ids) == 40
