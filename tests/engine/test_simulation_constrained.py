"""A simulated engine says what a grammar allows, and comes to an end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from engine.api.lark import constraint_of
from engine.api.params import ModelLimits
from engine.grammars import Grammars, Words
from engine.simulation.constrained import ConstrainedAnswers
from engine.simulation.executor import some_words
from engine.simulation.runner import Answers
from engine.tiny.tokenizer import cached_tokenizer
from engine.types import Constraint, Request, SamplingParams, Sequence
from prompts import Tokenizer, parse_chat

TOKENIZER = Tokenizer.load(cached_tokenizer())
EOS = TOKENIZER.eos_token_ids[0]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "count": {"type": "integer", "minimum": 3},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2},
        "kind": {"enum": ["aa", "bb"]},
        "of": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
        "free": {},
    },
    "required": ["name", "count", "tags", "kind", "of", "free"],
}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(lambda: Words(TOKENIZER, TOKENIZER.vocab_size))
    yield made
    made.close()


def say(grammars: Grammars, constraint: Constraint, length: int | None = None, tokens: int = 200) -> str:
    """The whole answer; fails where it does not end."""
    answers = ConstrainedAnswers(grammars, TOKENIZER, EOS, length)
    free = Answers(some_words(TOKENIZER), EOS, length)
    request = Request(request_id="r", token_ids=[5, 6], params=SamplingParams(constraint=constraint))
    seq = Sequence(request=request, token_ids=[5, 6], prompt_len=2, arrival_s=0.0)
    for _ in range(tokens):
        token = answers.next(seq, free.next)
        assert isinstance(token, int), token
        if token == EOS:
            return TOKENIZER.decode(seq.token_ids[2:], skip_special_tokens=False)
        seq.token_ids.append(token)
    raise AssertionError(f"no end: {TOKENIZER.decode(seq.token_ids[2:], skip_special_tokens=False)}")


def asked(**fields: Any) -> Constraint:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    limits = ModelLimits(max_model_len=4096, vocab_size=TOKENIZER.vocab_size, calls="hermes")
    made = constraint_of(parse_chat(json.dumps(body).encode()), TOKENIZER, limits)
    assert made is not None
    return made


@pytest.mark.parametrize("length", [None, 3, 50])
def test_a_schema_is_satisfied_with_words(grammars: Grammars, length: int | None) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    told = json.loads(say(grammars, asked(response_format=form), length))
    assert set(told) == set(SCHEMA["required"])
    assert re.fullmatch(r" [a-z]+", told["name"])
    assert (len(told["tags"]), told["kind"] in ("aa", "bb"), told["count"] >= 3) == (2, True, True)


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [({"choice": ["yes", "no"]}, "yes|no"), ({"regex": "[a-z]{40}"}, "[a-z]{40}"), ({"regex": "(ab)+c"}, "(ab)+c")],
)
def test_patterns_and_choices(grammars: Grammars, outputs: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, say(grammars, asked(structured_outputs=outputs)))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_forced_call_is_made_and_an_optional_one_is_words(grammars: Grammars, choice: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": SCHEMA}}]
    said = say(grammars, asked(tools=tools, tool_choice=choice))
    call = json.loads(said[said.index("{") : said.rindex("}") + 1])
    assert set(call.get("arguments", call)) == set(SCHEMA["required"])
    assert re.fullmatch(r"( [a-z]+)+", say(grammars, asked(tools=tools)))


def test_an_open_thought_is_ended_first(grammars: Grammars) -> None:
    end = TOKENIZER.hf.encode(" x", add_special_tokens=False).ids[0]
    form = asked(structured_outputs={"choice": ["yes"]})
    closed = say(grammars, Constraint(lark=form.lark, param="", after=end))
    assert closed == TOKENIZER.decode([end], skip_special_tokens=False) + "yes"


def test_a_preempted_answer_goes_on_as_it_was(grammars: Grammars) -> None:
    """A matcher that was dropped meanwhile reads what was said again."""
    constraint = asked(structured_outputs={"regex": "(abc ){20}d"})
    answers, free = ConstrainedAnswers(grammars, TOKENIZER, EOS, None), Answers(some_words(TOKENIZER), EOS, None)
    request = Request(request_id="r", token_ids=[5], params=SamplingParams(constraint=constraint))
    seq = Sequence(request=request, token_ids=[5], prompt_len=1, arrival_s=0.0)
    while (token := answers.next(seq, free.next)) != EOS:
        assert isinstance(token, int)
        seq.token_ids.append(token)
        answers._followers.clear()
    assert TOKENIZER.decode(seq.token_ids[1:], skip_special_tokens=False) == "abc " * 20 + "d"
