"""Answers as they were sampled: what is put back is the same text, only where it was said, and is what was said."""

from __future__ import annotations

import random
from functools import cache

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tiny.tokenizer import cached_tokenizer
from prompts import RequestError, Tokenizer, parse_chat
from prompts.sampled import (
    SampledBook,
    SampledCall,
    SampledIds,
    apply_spans,
    as_generated,
    sampled_call,
    sampled_ids,
    spans_in,
    with_spans,
)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(cached_tokenizer())


def split_otherwise(text: str, rng: random.Random) -> list[int]:
    """Ids of the text that the encoder would hardly choose: it is cut in odd places."""
    ids: list[int] = []
    while text:
        cut = rng.randint(1, 5)
        ids += tokenizer().encode(text[:cut], False)
        text = text[cut:]
    return ids


class Talk:
    """A conversation with an engine: what is told to whom, and the ids that the engine computes."""

    def __init__(self, book: SampledBook) -> None:
        self.book = book
        self.text = ""

    def turn(self, user: str, answer: str, rng: random.Random) -> tuple[list[int], list[int]]:
        """(the prompt's ids as computed, those of prompt and answer)."""
        self.text += f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
        encoded = tokenizer().encode(self.text, False)
        found = self.book.mend(encoded)
        prompt = encoded if found is None else found.ids.tolist()
        assert tokenizer().decode(prompt, skip_special_tokens=False) == self.text
        if found is not None:
            assert apply_spans(encoded, found.spans, tokenizer().vocab_size) == prompt
        said = split_otherwise(answer, rng)
        for note in sampled_ids(tokenizer(), prompt, said):
            self.book.add(note)
        self.text += f"{answer}<|im_end|>\n"
        return prompt, prompt + said


words = st.lists(
    st.sampled_from(["Hello", " there", "\n", "\n\n", "  ", "é", "🙂", "\n<tool_call>\n", "</tool_call>", "1234", "x"]),
    min_size=1,
    max_size=12,
).map("".join)


@given(turns=st.lists(st.tuples(words, words), min_size=1, max_size=6), seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_each_turn_begins_with_all_that_the_last_one_computed(turns: list[tuple[str, str]], seed: int) -> None:
    rng, book = random.Random(seed), SampledBook(tokenizer().cut_ids, 1 << 20)
    talk, computed = Talk(book), list[int]()
    for user, answer in turns:
        prompt, now = talk.turn(user, answer, rng)
        assert prompt[: len(computed)] == computed
        computed = now
        book.check_invariants()


@given(turns=st.lists(st.tuples(words, words), min_size=1, max_size=8), seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_a_small_book_forgets_and_stays_whole(turns: list[tuple[str, str]], seed: int) -> None:
    rng, book = random.Random(seed), SampledBook(tokenizer().cut_ids, 8_000)
    talks = [Talk(book) for _ in range(3)]
    for user, answer in turns:
        rng.choice(talks).turn(user, answer, rng)
        book.check_invariants()


def noted(answer: str, said: list[str], prompt: str = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"):
    """(book, text of the prompt, ids that were sampled) after one answer in these pieces."""
    assert "".join(said) == answer
    ids = [i for piece in said for i in tokenizer().encode(piece, False)]
    assert ids != tokenizer().encode(answer, False)
    book = SampledBook(tokenizer().cut_ids, 1 << 20)
    for note in sampled_ids(tokenizer(), tokenizer().encode(prompt, False), ids):
        assert [book.add(note), book.add(note)] == [True, False]
    return book, prompt, ids


def test_only_the_same_text_in_the_same_place_is_put_back() -> None:
    book, prompt, _ = noted("Hello there", ["Hello", " t", "here"])
    encode = tokenizer().encode
    assert book.mend(encode(prompt + "Hello there<|im_end|>\n", False)) is not None
    for other in (
        prompt + "Hello there ",
        prompt + "Hello there, you<|im_end|>",
        prompt + " Hello there<|im_end|>",
        prompt.replace("Q", "R") + "Hello there<|im_end|>",
        "<|im_start|>system\nS<|im_end|>\n" + prompt + "Hello there<|im_end|>",
        "<|im_start|>user\nHello there<|im_end|>",
        prompt,
        "",
    ):
        assert book.mend(encode(other, False)) is None, other
    assert book.mended_tokens > 0


def test_what_the_encoder_merges_with_the_template_is_put_back_too() -> None:
    book, prompt, ids = noted("\n\nHello", ["\n", "\nHello"])
    assert tokenizer().encode(prompt, False) != tokenizer().encode(prompt + "\n\nHello", False)[: len(prompt)]
    found = book.mend(tokenizer().encode(prompt + "\n\nHello<|im_end|>", False))
    assert found is not None
    assert found.ids.tolist() == tokenizer().encode(prompt, False) + ids + tokenizer().encode("<|im_end|>", False)


def test_an_answer_that_the_encoder_would_write_alike_is_not_kept() -> None:
    prompt = tokenizer().encode("<|im_start|>assistant\n", False)
    assert sampled_ids(tokenizer(), prompt, tokenizer().encode("Hello there", False)) == []
    assert sampled_ids(tokenizer(), prompt, []) == []
    assert sampled_ids(tokenizer(), tokenizer().encode("no marks at all", False), [5, 6, 7]) == []


def test_hidden_special_tokens_are_put_back_where_the_text_has_none() -> None:
    encode = tokenizer().encode
    prompt = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    said = encode("Hel<|endoftext|>lo", False)
    book = SampledBook(tokenizer().cut_ids, 1 << 20)
    for note in sampled_ids(tokenizer(), encode(prompt, False), said):
        book.add(note)
    found = book.mend(encode(prompt + "Hello<|im_end|>\n", False))
    assert found is not None
    assert found.ids.tolist() == encode(prompt, False) + said + encode("<|im_end|>\n", False)


def test_of_two_answers_with_one_text_the_last_one_counts() -> None:
    book, prompt, _ = noted("Hello there", ["Hello", " t", "here"])
    other = [i for piece in ("Hello", " the", "re") for i in tokenizer().encode(piece, False)]
    for note in sampled_ids(tokenizer(), tokenizer().encode(prompt, False), other):
        assert book.add(note)
    found = book.mend(tokenizer().encode(prompt + "Hello there<|im_end|>", False))
    assert found is not None
    assert found.spans[0][2][-len(other) :] == other
    book.check_invariants()


def test_a_prompt_of_marks_alone_costs_little() -> None:
    """A book is looked into at a bounded number of places."""
    book, _, _ = noted("Hello there", ["Hello", " t", "here"])
    marks = tokenizer().encode("<|im_start|>", False) * 50_000
    for start in range(8000):
        book.add(SampledIds(start, 0, b"\0\0\0\0" * 3, b"\0\0\0\0" * 4))
    assert book.mend(marks) is None


@pytest.mark.parametrize(
    ("generated", "sent", "same"),
    [
        ('{"b":1,"a":[1,2]}', '{"a": [1, 2], "b": 1}', True),
        ('{"b": 1.0}', '{"b": 1}', True),
        ('{"b":true}', '{"b": 1}', False),
        ('{"b": {"y":1,"x":2}}', '{"b": {"x": 2, "y": 1}}', True),
        ('{"b":[2, 1]}', '{"b": [1, 2]}', False),
        ('{"b":1}', '{"b": 1, "c": 2}', False),
        ('{"e": "\\u00e9"}', '{"e": "é"}', True),
    ],
)
def test_arguments_are_rendered_as_they_were_generated(generated: str, sent: str, same: bool) -> None:
    book = SampledBook(tokenizer().cut_ids, 1 << 20)
    note = sampled_call("call-1", generated)
    assert isinstance(note, SampledCall)
    assert book.add(note)
    fresh = Tokenizer.load(cached_tokenizer())

    def text(call_id: str) -> str:
        call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": sent}}
        messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        return fresh.chat_text(parse_chat(msgspec.json.encode({"model": "m", "messages": messages})))

    without = text("call-1")
    fresh.generated = book.get
    assert (generated in text("call-1")) == same
    assert text("another") == without
    assert book.mended_calls >= 1


def test_calls_that_no_client_can_write_otherwise_are_not_kept() -> None:
    assert sampled_call("c", "{}") is None
    assert sampled_call("c", '{"a": "b"}') is None
    assert sampled_call("c", '{"a":"b"}') is not None
    assert sampled_call("c", '{"a": "b", "c": 1}') is not None
    assert sampled_call("c", '{"a": ') is None
    assert sampled_call("c", "[1]") is None
    assert as_generated({"a": 1}, None) == {"a": 1}


def test_calls_are_found_in_bodies_in_pieces() -> None:
    book = SampledBook(frozenset(), 1 << 20)
    names = [f"chatcmpl-tool-{number:032x}" for number in range(50)]
    for name in names[::2]:
        book.add(SampledCall(name, '{"a":1}'))
    body = b"".join(b'{"id": "%s"}, chatcmpl-tool-' % name.encode() for name in names)
    for size in (1, 7, 100, len(body)):
        pieces = [body[at : at + size] for at in range(0, len(body), size)]
        assert book.calls_in(pieces) == dict.fromkeys(names[::2], '{"a":1}')


def test_spans_that_do_not_fit_are_refused_by_name() -> None:
    for spans in (
        [(2, 9, [])],
        [(2, 1, []), (1, 1, [])],
        [(-1, 1, [])],
        [(0, -1, [])],
        [(0, 1, [100])],
        [(0, 1, [-1])],
    ):
        with pytest.raises(RequestError, match="prompt_token_spans"):
            apply_spans([1, 2, 3], spans, 100)
    for body in (
        b'{"prompt_token_spans":[[1]],"a":1}',
        b'{"prompt_token_spans":7}',
        b'{"prompt_token_spans":[[0,0,[1.5]]]}',
    ):
        with pytest.raises(RequestError, match="prompt_token_spans"):
            spans_in(body)
    assert spans_in(b'{"messages": []}') is None
    body = with_spans(b' \n{"messages": [], "model": "m"}', [(1, 2, [3, 4])])
    assert spans_in(body) == [(1, 2, [3, 4])]


@pytest.mark.parametrize(
    ("encoded", "sampled"),
    [
        (b"", b""),
        (b"\0\0\0", b"\0\0\0"),
        ("cut", b"\0\0\0"),
        ("cut and more", "another"),
        ("another", "another"),
    ],
)
def test_a_note_that_no_sound_worker_writes_is_not_remembered(encoded: bytes | str, sampled: bytes | str) -> None:
    """Its ids would raise where a prompt is mended, or be one more to look for in each."""
    cut = next(iter(tokenizer().cut_ids)).to_bytes(4, "little")
    other = next(i for i in range(9999) if i not in tokenizer().cut_ids).to_bytes(4, "little")
    ids = {"cut": cut, "cut and more": cut + other, "another": other}
    book = SampledBook(tokenizer().cut_ids, 1 << 20)
    assert book.add(SampledIds(0, 0, cut + other, cut + other + other)), "a sound one is"
    given = [ids[value] if isinstance(value, str) else value for value in (encoded, sampled)]
    assert not book.add(SampledIds(0, 0, *given))
    assert len(book) == 1
