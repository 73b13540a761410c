"""A conversation that returns: what is cached of it and what is new give the ids that the whole body has."""

from __future__ import annotations

import json
import random
from array import array
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from budget import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prompts import template_environment
from prompts.chat_template import ChatTemplate
from prompts.errors import RequestError
from prompts.routing import API_KIND_BY_PATH, ApiKind, RoutingRequest, parse_body
from prompts.tokenizer import Checkpoint, Tokenizer
from router.prompting.boundary_rendering import BoundaryRenderer
from router.prompting.continued_conversation import Continuation, cache_conversation
from router.prompting.conversation_cache import (
    BODY_BYTES_MIN,
    BOUNDARIES_MAX,
    PREFIX_LENGTHS,
    Boundary,
    CachedConversation,
    ConversationCache,
)
from router.prompting.conversation_reader import CHECK_BYTES_PER_S, ConversationReader
from router.prompting.encode import RenderedPrompt, read_prompt, truncate_prompt
from router.prompting.outline import Outline, fingerprint_messages, outline_chat
from router.prompting.parsed_body import TokenizedPrompt
from router.prompting.placeholder_messages import (
    FILLER,
    MESSAGES_MAX,
    PARTS_MAX,
    PIECES_MAX,
    PlaceholderMessages,
    RenderedPlaceholders,
    find_template_markers,
)
from router.prompting.prompt_worker_pool import ReadTask, WorkerState, _inspect_body, _run_task
from router.prompting.template_trial import find_trial_problem
from tests.prompts import chat_templates
from tests.router.conversation_bodies import (
    TEMPLATES,
    body_of,
    draw_agent_turn,
    draw_next_messages,
    fields_of,
    load_tokenizer,
    long_talk,
    message,
)

NO_PLACEHOLDERS = RenderedPlaceholders(PlaceholderMessages(), "", 0, False)
UNCUT = {"numbered"}
"""Templates whose conversations are always read whole."""


@pytest.fixture(scope="module", params=[name for name in TEMPLATES if name not in UNCUT])
def tokenizer(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATES[request.param])


class Turns:
    """Bodies read one after the other by a cache, each compared with a full read of it."""

    def __init__(self, tokenizer: Tokenizer, max_bytes: int = 1 << 20) -> None:
        self.renderer = BoundaryRenderer(tokenizer)
        self.reader = ConversationReader(max_bytes)
        self.reader.allow("", self.renderer)
        self.continuations: list[Continuation] = []

    def read(self, kind: ApiKind, body: bytes) -> Continuation | None:
        cache, tokenizer = self.reader.cache, self.renderer.tokenizer
        request = parse_body(kind, body)
        try:
            prompt = read_prompt(request, tokenizer)
        except RequestError:
            prompt = RenderedPrompt()
        matches = self.reader.cache.find(kind, body) if len(body) >= BODY_BYTES_MIN else []
        continuation = self.reader.read_continuation(matches, body) if matches else None
        if continuation is None:
            outline = outline_chat(request)
            conversation = cache_conversation(request, body, prompt, outline, self.renderer)
        else:
            self.continuations.append(continuation)
            check_same(continuation, request, prompt)
            conversation = continuation.cache_entry
        if conversation is not None:
            check_conversation(conversation, prompt)
            cache.store(conversation, body)
        cache.check_invariants()
        return continuation


def check_same(continuation: Continuation, request: RoutingRequest, prompt: RenderedPrompt) -> None:
    read = continuation.request
    if prompt.token_ids is not None:  # else a template refuses what it is not shown again, as the worker will
        assert list(truncate_prompt(continuation.token_ids, read, None) or ()) == list(
            truncate_prompt(prompt.token_ids, request, None) or ()
        )
    for name in RoutingRequest.__struct_fields__:
        if name not in ("messages", "source"):
            assert getattr(read, name) == getattr(request, name), name
    outline = continuation.outline()
    assert outline is None or outline == outline_chat(request)
    token_count, conversation = continuation.boundary.token_count, continuation.conversation
    assert continuation.token_ids[:token_count] == conversation.token_ids[:token_count]


def check_conversation(conversation: CachedConversation, prompt: RenderedPrompt) -> None:
    boundaries = conversation.boundaries
    if prompt.token_ids is not None:
        assert prompt.chat is not None
        assert prompt.chat.messages is not None
        for boundary in boundaries:
            assert list(conversation.token_ids[: boundary.token_count]) == list(
                prompt.token_ids[: boundary.token_count]
            )
            turn_starts = prompt.chat.messages[boundary.message_count].get("role") == "user"
            assert boundary.starts_turn == turn_starts or boundary is not boundaries[-1]
    assert 0 < len(boundaries) <= BOUNDARIES_MAX
    ends = [(boundary.body_end, boundary.message_count, boundary.token_count) for boundary in boundaries]
    assert ends == sorted(set(ends))


@settings(max_examples=examples(15), deadline=None)
@example(seed=10000086, kind="chat").via("a thought among too many marks of thoughts for a short placeholder")
@example(seed=5001732, kind="chat").via("the same in an answer between two questions")
@example(seed=9000025, kind="chat").via("a message far into the body is replaced by another one of the same length")
@example(seed=363, kind="chat").via(
    "behind the last cached message another role than before comes next, then a third time"
)
@example(seed=217098, kind="messages").via("the last message is a cached one of the assistant")
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["chat", "messages"]))
def test_what_returns_is_read_as_the_whole_is(tokenizer: Tokenizer, seed: int, kind: ApiKind) -> None:
    rng, turns = random.Random(seed), Turns(tokenizer)
    messages: list[Any] = [message(rng, kind, i) for i in range(rng.randint(1, 6))]
    fields = fields_of(rng, kind)
    for _ in range(12):
        turns.read(kind, body_of(rng, kind, messages, fields))
        messages = draw_next_messages(rng, kind, [m for m in messages if isinstance(m, dict) and m.get("content")])
        if rng.random() < 0.1:
            fields = fields_of(rng, kind)


@settings(max_examples=examples(15), deadline=None)
@example(seed=454411).via("an answer drops the thought of a call that has the kind of the last cached call")
@given(seed=st.integers(0, 2**32))
def test_agents_with_thoughts_and_tools_are_read_as_the_whole_is(tokenizer: Tokenizer, seed: int) -> None:
    """A request behind every question and every tool's result; conversations that share a beginning, and go back."""
    rng, turns = random.Random(seed), Turns(tokenizer, 4 << 20)
    system = [{"role": rng.choice(("system", "system", "developer")), "content": "Be brief. " * rng.randint(1, 50)}]
    shared = [*(system if rng.random() < 0.8 else []), *draw_agent_turn(rng, 0)]
    fields = fields_of(rng, "chat")
    for _ in range(2):
        messages = list(shared)
        for number in range(1, 4):
            if rng.random() < 0.2:
                messages = messages[: rng.randint(1, len(messages))]
            start = len(messages)
            messages += draw_agent_turn(rng, number)
            for end in range(start, len(messages)):
                if messages[end]["role"] in ("user", "tool") and rng.random() < 0.8:
                    turns.read("chat", json.dumps({"messages": messages[: end + 1], **fields}).encode())


@pytest.mark.parametrize("kind", ["chat", "messages"])
def test_every_turn_but_the_first_is_cached(tokenizer: Tokenizer, kind: ApiKind) -> None:
    """Also where the client marks the last turns, as coding agents do; nothing of the beginning is read again."""
    turns, talk = Turns(tokenizer, 64 << 20), long_talk(9)
    for turn in range(6):
        messages: list[Any] = [dict(m) for m in talk]
        if kind == "messages":
            for m in messages[-3::2]:
                m["content"] = [{"type": "text", "text": m["content"], "cache_control": {"type": "ephemeral"}}]
        body = json.dumps({"model": "m", "max_tokens": 5, "messages": messages}).encode()
        continuation = turns.read(kind, body)
        assert (continuation is None) == (turn == 0)
        if continuation is not None:
            assert len(body) - continuation.boundary.body_end < 22_000, "of bodies of up to 50,000 bytes"
            assert continuation.cache_entry is not None
        talk = [*talk, *long_talk(3, f"turn {turn} ")[1:]]
    assert len(turns.reader.cache) <= 2, "it is replaced, but for its first turn, of which more was cached"


def test_an_agent_reads_each_result_once(tokenizer: Tokenizer) -> None:
    """Also where its thoughts are shown only until the next question: that one is read from the last question on."""
    turns = Turns(tokenizer, 64 << 20)
    messages: list[Any] = [{"role": "system", "content": "Be brief. " * 100}, *long_talk(2)]
    rest_messages = []
    for number in range(3):
        messages.append({"role": "user", "content": f"Question {number}"})
        for step in range(6):
            continuation = turns.read("chat", json.dumps({"messages": messages}).encode())
            if continuation is not None:
                rest_messages.append(len(messages) - continuation.boundary.message_count)
            function = {"name": "look", "arguments": json.dumps({"at": step})}
            call = {"id": f"call{number:03}{step:02}", "type": "function", "function": function}
            messages.append(
                {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "Well. " * 20}
            )
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"Result {step}. " * 200})
        messages.append({"role": "assistant", "content": f"Answer {number}"})
    if not rest_messages:
        pytest.skip("the template takes no such conversation")
    assert sorted(rest_messages)[len(rest_messages) // 2] <= 3
    assert max(rest_messages) <= 15, "from the last question on"


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": %b, "messages": [{"role": "user", "content": "other"}]}',
        b'{"messages": %b, "n": 1,}', b'{"messages": %b', b'{"messages": %b}}', b'[{"messages": %b}]',
        b'{"x": {"messages": %b}}', b'{"messages": %b, "prompt_logprobs": 1}', b'{"messages": %b]}',
        b'{"messages": %b, "messages": []}', b'{"messages": %b, "add_special_tokens": true}',
        b'{"messages": %b, "chat_template": "x"}',
    ],
)  # fmt: skip
def test_bodies_that_mean_something_else_behind_the_same_beginning(tokenizer: Tokenizer, body: bytes) -> None:
    turns = Turns(tokenizer)
    turns.read("chat", b'{"messages": %b}' % json.dumps(long_talk(6)).encode())
    assert len(turns.reader.cache) == 1
    longer = body % json.dumps([*long_talk(6), *long_talk(1, "new ")]).encode()
    matches = turns.reader.cache.find("chat", longer)
    assert not matches or turns.reader.read_continuation(matches, longer) is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": %b, "messages": %b}', b'{"x": %b, "messages": %b}', b'{"x": {"messages": %b}, "messages": %b}',
    ],
)  # fmt: skip
def test_messages_that_the_body_has_twice_are_not_taken_for_each_other(tmp_path: Any, body: bytes) -> None:
    turns = Turns(load_tokenizer(tmp_path, None))
    for messages in (long_talk(6), [*long_talk(6), *long_talk(1, "new ")]):
        turns.read("chat", body % (json.dumps(messages).encode(), json.dumps(long_talk(6)).encode()))


# Templates ------------------------------------------------------------------------------------------------------------


def test_templates_are_tried_out(tmp_path: Any) -> None:
    for name, template in TEMPLATES.items():
        problem = find_trial_problem(BoundaryRenderer(load_tokenizer(tmp_path, template)))
        assert (problem is None) == (name not in UNCUT), (name, problem)


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages | length }}", "{{ loop.index0 }}", "{{ loop.revindex }}", "{{ messages[loop.index0 - 3].role }}",
        "{{ (messages | selectattr('role', 'equalto', 'tool') | list | length) }}",
    ],
)  # fmt: skip
def test_what_a_template_counts_is_right(tmp_path: Any, text: str) -> None:
    loop = "{% for message in messages %}{{ '<|im_start|>' + message.role + (message.content or '') }}TEXT{% endfor %}"
    turns, talk = Turns(load_tokenizer(tmp_path, loop.replace("TEXT", text))), long_talk(20)
    for end in range(1, 20, 2):
        turns.read("chat", json.dumps({"messages": talk[:end]}).encode())


def test_texts_that_a_template_looks_for() -> None:
    assert find_template_markers(chat_templates.QWEN3) == ("<tool_response>", "</think>", "<think>")
    assert find_template_markers("{{ 'a' in x }}{{ \"/no_think\" not in x }}{{ x.replace('abc', '') }}") == (
        "/no_think",
        "abc",
    )


def test_a_check_that_finds_a_difference_ends_the_caching(tokenizer: Tokenizer) -> None:
    turns, talk = Turns(tokenizer), long_talk(6)
    reader = turns.reader
    reader.allow("", turns.renderer)
    turns.read("chat", json.dumps({"messages": talk}).encode())
    body = json.dumps({"messages": [*talk, *long_talk(1, "new ")]}).encode()
    continuation = turns.read("chat", body)
    assert continuation is not None
    reader.compare("", continuation, continuation.token_ids)
    assert (reader.check_count, reader.difference_count, reader.get_renderer("")) == (1, 0, turns.renderer)
    reader.compare("", continuation, [*continuation.token_ids[:-1], 0])
    assert (reader.check_count, reader.difference_count, reader.get_renderer("")) == (2, 1, None)
    assert "differed" in reader.problems[""]
    assert len(reader.cache) == 0


def test_a_check_compares_what_a_worker_would_use_of_a_prompt(tokenizer: Tokenizer) -> None:
    turns = Turns(tokenizer)
    turns.read("chat", json.dumps({"messages": long_talk(6)}).encode())
    body = json.dumps({"messages": [*long_talk(6), *long_talk(1, "new ")], "truncate_prompt_tokens": 9}).encode()
    continuation = turns.read("chat", body)
    assert continuation is not None
    turns.reader.compare("", continuation, continuation.token_ids[-9:])
    assert turns.reader.difference_count == 0


def test_one_in_64_is_checked_within_a_number_of_bytes_a_second(tmp_path: Any) -> None:
    turns = Turns(load_tokenizer(tmp_path, chat_templates.CHATML))
    turns.read("chat", json.dumps({"messages": long_talk(6)}).encode())
    continuation = turns.read("chat", json.dumps({"messages": [*long_talk(6), *long_talk(1, "new ")]}).encode())
    assert continuation is not None
    reader = ConversationReader(1 << 20)
    for body_bytes, now, expected in ((CHECK_BYTES_PER_S // 2, 0.0, [64]), (CHECK_BYTES_PER_S, 0.4, []),
                                      (CHECK_BYTES_PER_S, 0.5, [1]), (0, 1.6, [1, 65])):  # fmt: skip
        checks = [i for i in range(1, 129) if reader.count_hit(continuation, body_bytes, now)]
        assert checks == expected, "a check that is due waits for its time"


def make_placeholders(messages: list[dict[str, Any]], markers: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    placeholders = PlaceholderMessages().extend(messages, markers)
    assert placeholders is not None
    return placeholders.messages


def test_placeholders_are_short_and_have_every_kind_of_message() -> None:
    rng, messages = random.Random(5), [{"role": "system", "content": "Be brief. " * 900}]
    for number in range(200):
        messages += draw_agent_turn(rng, number)
    first_placeholders = PlaceholderMessages().extend(messages[:500], ())
    assert first_placeholders is not None
    placeholders = first_placeholders.extend(messages[500:], ())
    assert placeholders is not None
    assert len(placeholders.messages) <= MESSAGES_MAX
    assert len(json.dumps(placeholders.messages)) < 10_000
    assert placeholders.messages[0]["role"] == "system"
    shapes = [{(m["role"], "tool_calls" in m, "reasoning_content" in m) for m in all} for all in
              (messages, placeholders.messages)]  # fmt: skip
    assert shapes[0] == shapes[1]
    assert [m["role"] for m in make_placeholders(long_talk(60))] == ["user", "assistant"]


def test_placeholders_keep_all_markers_of_a_text_and_what_is_between_them() -> None:
    markers = find_template_markers(chat_templates.QWEN3)
    (short,) = make_placeholders([{"role": "user", "content": " what is it\n" * 9 + "</think> so"}], markers)
    assert short["content"] == f" what is it\n wha{FILLER} it\n what is it\n</think> {FILLER}so"
    thoughts = "".join(f"<think>{thought}</think>" for thought in ("a thought", "", "\n \n"))
    (short,) = make_placeholders([{"role": "assistant", "content": thoughts}], markers)
    assert short["content"] == thoughts.replace("a thought", f"a th{FILLER}ought")
    many = {"role": "user", "content": "<think>" * PIECES_MAX}
    assert PlaceholderMessages().extend([many], markers) is None, "there is no boundary after such a message"


def test_an_empty_thought_is_another_kind_than_a_thought() -> None:
    markers = find_template_markers(chat_templates.QWEN3)
    question = {"role": "user", "content": "Why?"}
    for first, second in (("<think>x</think>a", "<think></think>a"), ("<think> </think>a", "<think></think>a"),
                          ("<think>x</think>a", "</think>x<think>a")):  # fmt: skip
        answers = [{"role": "assistant", "content": text} for text in (first, second)]
        assert len(make_placeholders([question, *answers], markers)) == 3
    contents = [[{"type": "text", "text": "part"}] * count for count in (2, 3, 90)]
    assert [len(make_placeholders([{"role": "user", "content": content}])[0]["content"]) for content in contents] == [
        2, 3, 3]  # fmt: skip
    mixed = [{"type": ("text", "image")[i % 2], "text": "part"} for i in range(PARTS_MAX + 1)]
    assert PlaceholderMessages().extend([{"role": "user", "content": mixed}], markers) is None


# The cache ------------------------------------------------------------------------------------------------------------


def make_conversation(*body_ends: int, token_count: int = 0) -> CachedConversation:
    """An entry with boundaries, of which nothing else is looked at."""
    boundaries = [Boundary(end, 0, 3, NO_PLACEHOLDERS, True, 1) for end in body_ends]
    ids = array("I", range(token_count))
    return CachedConversation("chat", 0, b"", {}, Outline(fingerprint_messages([])), boundaries, ids, None)


def test_the_cache_is_bounded() -> None:
    cache, bodies = ConversationCache(300_000), []
    for number in range(60):
        body = (b"%d " % (number // 20)) * 5000 + b"%d" % number
        conversation = make_conversation(len(body), token_count=2_500)
        bodies.append(body)
        cache.store(conversation, body)
        cache.check_invariants()
        assert cache.find("chat", body + b" and more")[0][:2] == (conversation, conversation.boundaries[0])
        assert cache.find("messages", body) == []
    assert 0 < len(cache) < 30
    assert cache.find("chat", bodies[0]) == []
    huge = make_conversation(90_000, token_count=90_000)
    cache.store(huge, b"x" * 90_000)
    assert cache.find("chat", b"x" * 90_000) == [], "one body must not empty it"
    assert set(API_KIND_BY_PATH.values()) >= {"chat", "messages"}


def test_many_conversations_with_one_long_beginning_are_told_apart() -> None:
    cache, shared = ConversationCache(16 << 20), b"the same instructions. " * 3000
    conversations = {}
    for number in range(50):
        body = shared + b"%d" % number * (number + 1)
        conversations[body] = make_conversation(len(body))
        cache.store(conversations[body], body)
    cache.check_invariants()
    for body, conversation in conversations.items():
        assert cache.find("chat", body + b"more")[0][0] is conversation


def test_the_furthest_boundary_is_found_first() -> None:
    """Two that differ between the last length that is digested and where they end; the third one began both."""
    cache, shared = ConversationCache(1 << 20), bytes(random.Random(3).randrange(65, 90) for _ in range(2048))
    for body in (shared[:1024], shared + b"a" * 100):
        cache.store(make_conversation(len(body)), body)
    for tail, ends in ((b"a", [2148, 1024]), (b"b", [1024])):
        matches = cache.find("chat", shared + tail * 200)
        assert [match.boundary.body_end for match in matches] == ends
    assert cache.find("messages", shared + b"a" * 200) == []
    many = make_conversation(*range(2000, 2000 + 20 * BOUNDARIES_MAX, 20))
    reader = ConversationReader(1 << 20)
    reader.cache.store(many, shared)
    assert len(reader.cache.find("chat", shared)) <= BOUNDARIES_MAX


def test_a_change_of_any_byte_before_a_boundary_is_found() -> None:
    """Also far into a body, where the keys are digests of a quarter of the bytes."""
    rng, cache = random.Random(4), ConversationCache(1 << 20)
    body = bytes(rng.randrange(65, 90) for _ in range(30_000))
    cache.store(make_conversation(20_000, 29_000), body)
    for _ in range(200):
        at = rng.randrange(20_000, 29_000)
        changed_body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        assert [match.boundary.body_end for match in cache.find("chat", changed_body)] == [20_000], at
    assert [match.boundary.body_end for match in cache.find("chat", body)] == [29_000, 20_000]


def read_in_process(task: ReadTask, body: bytes, tokenizer: Tokenizer) -> TokenizedPrompt:
    """The prompt of a chat as a worker process with a tokenizer reads it."""
    state = WorkerState(None)
    assert task.checkpoint is not None
    state.tokenizers[task.checkpoint] = tokenizer
    _inspect_body(state, (body,), "chat")
    return _run_task(state, task).parsed_body.prompt


def test_a_prompt_of_which_the_end_counts_is_not_cached(tokenizer: Tokenizer) -> None:
    for keep in (None, 50):
        fields = {} if keep is None else {"truncate_prompt_tokens": keep}
        body = json.dumps({"messages": long_talk(8), **fields}).encode()
        task = ReadTask(Checkpoint("folder"), makes_cache_entry=True)
        assert (read_in_process(task, body, tokenizer).conversation is None) == (keep is not None)


def test_a_conversation_without_an_outline_is_continued_without_one(tokenizer: Tokenizer) -> None:
    body, longer = (json.dumps({"messages": long_talk(turns)}).encode() for turns in (9, 11))
    task = ReadTask(Checkpoint("folder"), makes_cache_entry=True, makes_outline=False)
    prompt, reader = read_in_process(task, body, tokenizer), ConversationReader(1 << 20)
    assert prompt.outline is None
    assert prompt.conversation is not None
    reader.allow("", BoundaryRenderer(tokenizer))
    reader.cache.store(prompt.conversation, body)
    continuation = reader.read_continuation(reader.cache.find("chat", longer), longer)
    assert continuation is not None
    assert continuation.outline() is None
    assert continuation.cache_entry is None or continuation.cache_entry.outline is None


def test_digests_are_of_beginnings() -> None:
    assert sorted(set(PREFIX_LENGTHS)) == PREFIX_LENGTHS
    rng, cache = random.Random(2), ConversationCache(1 << 20)
    for size in (0, 1023, 1024, 5000, 70_000):
        body = rng.randbytes(size)
        digests = cache._digest_prefixes(body, size)
        lengths = PREFIX_LENGTHS[: len(digests)]
        assert lengths == [length for length in PREFIX_LENGTHS if length <= size]
        assert len(set(digests)) == len(digests)
        assert not digests or ConversationCache(1)._digest_prefixes(body, size)[0] != digests[0], "seeds are secret"
        for i, length in enumerate(lengths):
            assert cache._digest_prefixes(body[:length] + b"other", length) == digests[: i + 1]
            at = rng.randrange(length)
            changed_body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
            are_equal = [a == b for a, b in zip(cache._digest_prefixes(changed_body, size), digests)]
            assert are_equal == [other_length <= at for other_length in lengths], "whatever byte is another one"


def record_renders(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of messages of each rendering by a template."""
    renders: list[int] = []
    render = ChatTemplate.render

    def record(self: ChatTemplate, messages: Any, **variables: Any) -> str:
        renders.append(len(messages))
        return render(self, messages, **variables)

    monkeypatch.setattr(ChatTemplate, "render", record)
    return renders


def test_the_memo_is_used_and_forgets_a_day(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of turns that are a role and a text nothing is rendered by the template, until it would write another date."""
    template = "<|im_start|>{{ strftime_now('%Y-%m-%d') }}" + chat_templates.CHATML
    turns = Turns(load_tokenizer(tmp_path, template))
    talk = [{**message, "content": message["content"].strip()} for message in long_talk(16)]
    renders = record_renders(monkeypatch)
    for end in range(5, 16, 2):
        renders.clear()
        continuation = turns.read("chat", json.dumps({"messages": talk[:end]}).encode())
        assert (continuation is None) == (end == 5)
        if end > 9:
            assert renders == [end], "the full read that it is compared with"
    another_day = SimpleNamespace(now=lambda: datetime(2031, 2, 3))
    monkeypatch.setattr(template_environment, "datetime", another_day)
    assert turns.read("chat", json.dumps({"messages": talk}).encode()) is None


@pytest.mark.parametrize("content", ["message['content']", "message['content'] | trim"])
def test_the_memo_keeps_white_space_as_the_template_does(
    content: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts with the same white space at their edges share an entry, and others do not."""
    template = chat_templates.CHATML.replace("message['content']", f"({content})")
    turns, talk = Turns(load_tokenizer(tmp_path, template)), long_talk(6)
    for last_messages in ([], [{"role": "user", "content": "the boundary comes before this question"}]):
        turns.read("chat", json.dumps({"messages": [*talk, *last_messages]}).encode())
    renders = record_renders(monkeypatch)
    new_edges = [("", "\n"), ("", ""), (" ", "\n")]
    too_wide = ("", " " * 99)
    for number, (before, after) in enumerate([*new_edges, *new_edges, too_wide, too_wide]):
        question = {"role": "user", "content": f"{before}word {number}{after}"}
        renders.clear()
        continuation = turns.read("chat", json.dumps({"messages": [*talk, question]}).encode())
        assert continuation is not None
        is_known = len(new_edges) <= number < 2 * len(new_edges)
        assert (len(renders) == 1) == is_known, "the full read that it is compared with"
