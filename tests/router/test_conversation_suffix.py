"""A conversation that returns: its known beginning and its new end give what the whole body does."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.tiny.tokenizer import write_tokenizer
from prompts.bpe_encoder import digests
from prompts.chat_template import ChatTemplate
from prompts.routing import API_KIND_BY_PATH, ApiKind, RoutingRequest, parse_routing_of_kind
from prompts.tokenizer import Tokenizer
from router.prompting import conversation_suffix
from router.prompting.conversation_cache import (
    BODY_BYTES_MIN,
    RECENT_DIGESTS_MAX,
    CachedConversation,
    Checkpoint,
    ConversationCache,
)
from router.prompting.encode import read_prompt, truncate_prompt
from router.prompting.outline import outline_chat
from router.prompting.prompt_worker_pool import ReadTask, _read_body
from tests.prompts import chat_templates

NEIGHBOURS = """\
{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}
{%- set intro = messages[0].content if messages[0].role == 'system' else 'none' %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>' + message.content + '</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + ('!' if loop.index0 % 2 else '?') + intro | length | string + '\\n' }}
{{- message.content ~ ('(next: ' ~ loop.nextitem.role ~ ')' if not loop.last else '') + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""A message's text hangs on the messages beside it, on its place and on the first one."""


SLICED = """\
{%- set intro = '' %}
{%- if messages[0]['role'] == 'system' %}
{%- set intro = messages[0]['content'] | trim %}
{%- set messages = messages[1:] %}
{%- endif %}
{{- '<|im_start|>system\\n' ~ intro ~ (tools | tojson if tools else '') ~ '<|im_end|>\\n' }}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + ('!' if loop.index0 % 2 else '?') + (intro if loop.first else '') + '\\n' }}
{{- message.content | trim ~ '<|im_end|>' ~ ('' if loop.last else '\\n') }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""As Llama 3 and Gemma: `messages` becomes all but the first, where that is the system's."""


@pytest.fixture(scope="module", params=["tiny", "chatml", "neighbours", "sliced"])
def tokenizer(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 1024, 1 << 20)
    template = {"tiny": None, "chatml": chat_templates.CHATML, "neighbours": NEIGHBOURS, "sliced": SLICED}[
        request.param
    ]
    return Tokenizer.load(folder, template)


def read_whole_body(kind: ApiKind, body: bytes, tokenizer: Tokenizer) -> tuple[RoutingRequest, Any]:
    request = parse_routing_of_kind(kind, body)
    return request, read_prompt(request, tokenizer)


WORDS = (
    "one ",
    "two\n",
    "<|im_end|>\n",
    "<|im_start|>",
    "\u00e9\u00e8",
    "\U0001f600",
    '"\\',
    "{[",
    "]}",
    "  ",
    "<think>",
)


def text(rng: random.Random, size: int) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randint(0, size)))


def message(rng: random.Random, kind: ApiKind, place: int) -> dict[str, Any]:
    """Any kind of turn; some are long, so that what came before is worth knowing."""
    size = rng.choice((3, 30, 3000))
    role = rng.choice(
        ("user", "assistant", "user", "assistant", "system" if place == 0 or rng.random() < 0.1 else "user")
    )
    if kind == "messages":
        blocks: list[dict[str, Any]] = [{"type": "text", "text": text(rng, size) + "."}]
        if role == "assistant" and rng.random() < 0.5:
            blocks.append({"type": "tool_use", "id": f"t{place}", "name": "look", "input": {"at": text(rng, 3)}})
        if role == "user" and rng.random() < 0.5:
            blocks.insert(0, {"type": "tool_result", "tool_use_id": f"t{place}", "content": text(rng, size)})
        if rng.random() < 0.02:
            blocks.append({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}})
        return {"role": role, "content": rng.choice((blocks, text(rng, size) + "."))}
    if rng.random() < 0.2 and place:
        return {"role": "tool", "tool_call_id": "c", "content": text(rng, size)}
    chat_message: dict[str, Any] = {"role": "developer" if rng.random() < 0.01 else role, "content": text(rng, size)}
    if role == "assistant" and rng.random() < 0.3:
        function = {"name": "look", "arguments": json.dumps({"at": text(rng, 3)})}
        chat_message["tool_calls"] = [{"id": "c", "type": "function", "function": function}]
    if rng.random() < 0.02:
        chat_message["content"] = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    if rng.random() < 0.05:
        chat_message["reasoning_content"] = text(rng, 5)
    return chat_message


def body_of(rng: random.Random, kind: ApiKind, messages: list[Any], fields: dict[str, Any]) -> bytes:
    body_fields: dict[str, Any] = {"model": "m", "max_tokens": 5}
    body_fields |= {"messages": messages, **fields} if rng.random() < 0.9 else {**fields, "messages": messages}
    return json.dumps(body_fields, ensure_ascii=False, indent=rng.choice((None, None, None, 1))).encode()


def fields_of(rng: random.Random, kind: ApiKind) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if kind == "messages" and rng.random() < 0.7:
        fields["system"] = rng.choice(("Be brief.", [{"type": "text", "text": "Be very brief."}]))
    if rng.random() < 0.4:
        schema = {"type": "object", "properties": {"at": {"type": "string"}}}
        chat = {"type": "function", "function": {"name": "look", "parameters": schema}}
        fields["tools"] = [{"name": "look", "input_schema": schema} if kind == "messages" else chat]
    if kind == "chat" and rng.random() < 0.2:
        fields |= rng.choice(
            ({"add_generation_prompt": False}, {"continue_final_message": True}, {"reasoning_effort": "low"},
             {"chat_template_kwargs": {"blockcast_unrendered": [], "suffix_start": 3}}, {"truncate_prompt_tokens": 9})
        )  # fmt: skip
    return fields


def draw_next_messages(rng: random.Random, kind: ApiKind, messages: list[Any]) -> list[Any]:
    """The conversation as its client sends it next."""
    next_messages = list(messages)
    how = rng.random()
    if how < 0.1 and next_messages:
        del next_messages[rng.randrange(len(next_messages)) :]
    elif how < 0.2 and next_messages:
        at = rng.randrange(len(next_messages))
        next_messages[at] = message(rng, kind, at)
    elif how < 0.25 and len(next_messages) > 1:
        a, b = rng.sample(range(len(next_messages)), 2)
        next_messages[a], next_messages[b] = next_messages[b], next_messages[a]
    elif how < 0.3:
        next_messages.append(rng.choice((None, 3, "text", {}, {"role": "user"}, {"content": 5})))
        return next_messages
    return [*next_messages, *(message(rng, kind, len(next_messages) + i) for i in range(rng.randint(0, 4)))]


@settings(max_examples=15, deadline=None)
@example(seed=363, kind="chat").via(
    "behind the last known message another role than before comes next, then a third time"
)
@example(seed=217098, kind="messages").via("the last message is a known one of the assistant")
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["chat", "messages"]))
def test_what_returns_is_read_as_the_whole_is(tokenizer: Tokenizer, seed: int, kind: ApiKind) -> None:
    rng, table, extension_count = random.Random(seed), ConversationCache(1 << 20), 0
    messages: list[Any] = [message(rng, kind, i) for i in range(rng.randint(1, 6))]
    fields = fields_of(rng, kind)
    for _ in range(12):
        body = body_of(rng, kind, messages, fields)
        request, prompt = read_whole_body(kind, body, tokenizer)
        ids = truncate_prompt(prompt.token_ids, request, None)
        cached_prefix = table.find_longest_prefix(kind, body)
        suffix_result = (
            conversation_suffix.extend(*cached_prefix, body, tokenizer, None) if cached_prefix is not None else None
        )
        if suffix_result is None:
            conversation = conversation_suffix.cache_conversation(request, body, prompt, tokenizer)
            if conversation is not None:
                table.store(conversation)
        else:
            extension_count += 1
            check_same(suffix_result, request, ids)
            longer_conversation = conversation_suffix.advance_conversation(suffix_result, body, tokenizer)
            if longer_conversation is not None:
                check_conversation(longer_conversation, prompt)
                table.store(
                    longer_conversation,
                    suffix_result.conversation
                    if suffix_result.checkpoint is suffix_result.conversation.checkpoints[-1]
                    else None,
                )
        table.check_invariants()
        messages = draw_next_messages(rng, kind, [m for m in messages if isinstance(m, dict) and m.get("content")])
        if rng.random() < 0.1:
            fields = fields_of(rng, kind)


def check_same(suffix_result: conversation_suffix.SuffixResult, request: RoutingRequest, ids: Any) -> None:
    assert list(truncate_prompt(suffix_result.token_ids, suffix_result.request, None) or ()) == list(ids or ())
    for name in RoutingRequest.__struct_fields__:
        if name not in ("messages", "source"):
            assert getattr(suffix_result.request, name) == getattr(request, name), name
    assert suffix_result.outline() == (
        None if conversation_suffix._depends_on_template(suffix_result.suffix.request) else outline_chat(request)
    )
    assert (
        suffix_result.token_ids[: suffix_result.reused_tokens]
        == suffix_result.conversation.token_ids[: suffix_result.reused_tokens]
    )


def check_conversation(conversation: CachedConversation, prompt: Any) -> None:
    last_checkpoint = conversation.checkpoints[-1]
    assert list(conversation.token_ids[: last_checkpoint.token_count_max]) == list(
        prompt.token_ids[: last_checkpoint.token_count_max]
    )
    assert len(conversation.token_ids) >= last_checkpoint.token_count_max >= last_checkpoint.token_count
    assert [last_checkpoint.second_last_message, last_checkpoint.last_message] == prompt.chat.messages[
        last_checkpoint.message_count - 2 : last_checkpoint.message_count
    ]
    assert [checkpoint.body_end for checkpoint in conversation.checkpoints] == sorted(
        {checkpoint.body_end for checkpoint in conversation.checkpoints}
    )


def long_talk(turns: int, mark: str = "") -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": f"{mark}{i} " + "word and word. " * 200} for i in range(turns)]


@pytest.mark.parametrize("kind", ["chat", "messages"])
def test_every_turn_but_the_first_is_known(tokenizer: Tokenizer, kind: ApiKind) -> None:
    """Also where the client marks the last turns, as coding agents do; nothing of the beginning is decoded again."""
    table, talk, sizes = ConversationCache(64 << 20), long_talk(9), []
    for turn in range(6):
        messages: list[Any] = [dict(m) for m in talk]
        if kind == "messages":
            for m in messages[-3::2]:
                m["content"] = [{"type": "text", "text": m["content"], "cache_control": {"type": "ephemeral"}}]
        body = json.dumps({"model": "m", "max_tokens": 5, "messages": messages}).encode()
        request, prompt = read_whole_body(kind, body, tokenizer)
        cached_prefix = table.find_longest_prefix(kind, body)
        assert (cached_prefix is None) == (turn == 0)
        if cached_prefix is None:
            conversation = conversation_suffix.cache_conversation(request, body, prompt, tokenizer)
            assert conversation is not None
            table.store(conversation)
        else:
            suffix_result = conversation_suffix.extend(*cached_prefix, body, tokenizer, None)
            assert suffix_result is not None
            sizes.append(len(suffix_result.suffix.body_with_placeholder))
            assert (suffix_result.suffix.body_with_placeholder == b"") == (kind == "chat"), (
                "of a chat nothing but messages is read"
            )
            check_same(suffix_result, request, prompt.token_ids)
            longer_conversation = conversation_suffix.advance_conversation(suffix_result, body, tokenizer)
            assert longer_conversation is not None
            table.store(longer_conversation, cached_prefix[0])
        talk = [*talk, *long_talk(3, f"turn {turn} ")[1:]]
    assert max(sizes) < 22_000, "of bodies of up to 50,000 bytes"
    assert len(table) == 1


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
    talk = json.dumps(long_talk(6))
    plain = b'{"messages": %b}' % talk.encode()
    request, prompt = read_whole_body("chat", plain, tokenizer)
    conversation = conversation_suffix.cache_conversation(request, plain, prompt, tokenizer)
    assert conversation is not None
    table = ConversationCache(1 << 20)
    table.store(conversation)
    longer = body % json.dumps([*long_talk(6), *long_talk(1, "new ")]).encode()
    cached_prefix = table.find_longest_prefix("chat", longer)
    assert cached_prefix is None or conversation_suffix.extend(*cached_prefix, longer, tokenizer, None) is None


def test_only_templates_whose_text_can_be_cut_have_a_rest() -> None:
    loop_template = "{% for message in messages %}{{ message.content }}BODY{% endfor %}END"
    has_suffix: Any = lambda template: ChatTemplate(template).has_suffix_template(has_tools=False)  # noqa: E731
    assert has_suffix(loop_template)
    assert has_suffix("{% set all = messages[1:] if false else messages %}" + loop_template) is False
    for body in (
        "{{ messages[-1].role }}", "{{ messages | length }}", "{{ loop.index0 }}", "{{ loop.revindex }}",
        "{% set ns.x = 1 %}", "{% if loop.index > 3 %}{% break %}{% endif %}", "{{ messages[loop.index0 - 2] }}",
        "{{ strftime_now('%d') }}", "{{ loop.changed(message.role) }}", "{{ [1, 2] | random }}",
        "{% for x in messages %}{% endfor %}", "{% for x in message.y %}{{ messages[loop.index0 + 1] }}{% endfor %}",
    ):  # fmt: skip
        assert not has_suffix("{% set ns = namespace(x=0) %}" + loop_template.replace("BODY", body)), body
    for end in ("{{ messages[-1].role }}", "{{ strftime_now('%d') }}", "{% for m in messages %}{% endfor %}"):
        assert not has_suffix(loop_template.replace("END", end)), end
    slicing_prefix = "{% if messages[0].role == 'system' %}X{% set messages = messages[1:] %}{% endif %}"
    assert has_suffix(slicing_prefix + loop_template)
    assert has_suffix(chat_templates.GEMMA)
    for uncuttable_template in (
        slicing_prefix + loop_template.replace("BODY", "{{ messages[0].content }}"),
        slicing_prefix + loop_template.replace("END", "{{ messages[0] }}"),
        slicing_prefix + loop_template.replace("BODY", "{{ messages[loop.index0 + 1] }}"),
        loop_template + slicing_prefix,
        slicing_prefix + slicing_prefix + loop_template,
        slicing_prefix.replace("{% endif", "{{ messages[0] }}{% endif") + loop_template,
        "{% for x in y %}" + slicing_prefix + "{% endfor %}" + loop_template,
        "{% macro a() %}{{ messages[0] }}{% endmacro %}" + slicing_prefix + loop_template,
        slicing_prefix.replace("[1:]", "[2:]") + loop_template,
        "{% macro a() %}" + slicing_prefix + "{% endmacro %}" + loop_template,
        slicing_prefix.replace("[1:]", "") + loop_template,
    ):
        assert not has_suffix(uncuttable_template), uncuttable_template
    for template in ("QWEN3", "LLAMA3", "MISTRAL", "EXOTIC"):
        assert not has_suffix(getattr(chat_templates, template)), template


def test_the_table_is_bounded() -> None:
    table = ConversationCache(300_000)
    conversations = []
    for number in range(60):
        body = (b"%d " % (number // 20)) * 5000 + b"%d" % number
        conversation = CachedConversation(
            "chat",
            0,
            b"",
            0,
            [],
            b"",
            b"",
            0,
            [Checkpoint(len(body), 3, 0, 0, "", 0, 0, {}, {})],
            body,
            conversation_suffix.array("I"),
        )
        conversations.append(conversation)
        table.store(conversation)
        table.check_invariants()
        assert table.find_longest_prefix("chat", body + b" and more") == (conversation, conversation.checkpoints[0])
        assert table.find_longest_prefix("messages", body) is None
    assert 0 < len(table) < 30
    assert table.find_longest_prefix("chat", conversations[0].body) is None
    assert all(len(conversation.body) >= BODY_BYTES_MIN for conversation in conversations)
    huge = CachedConversation(
        "chat",
        0,
        b"",
        0,
        [],
        b"",
        b"",
        0,
        [Checkpoint(90_000, 3, 0, 0, "", 0, 0, {}, {})],
        b"x" * 90_000,
        conversation_suffix.array("I"),
    )
    table.store(huge)
    assert table.find_longest_prefix("chat", huge.body) is None, "one body must not empty it"
    assert set(API_KIND_BY_PATH.values()) >= {"chat", "messages"}


def test_a_beginning_that_others_have_further_is_found_behind_theirs() -> None:
    """Two that differ between the last length that is digested and where they end; the third one began both."""
    table, shared_prefix = ConversationCache(1 << 20), bytes(random.Random(3).randrange(65, 90) for _ in range(2048))
    for body in (shared_prefix[:1024], shared_prefix + b"a" * 100):
        checkpoint = Checkpoint(len(body), 3, 0, 0, "", 0, 0, {}, {})
        table.store(
            CachedConversation("chat", 0, b"", 0, [], b"", b"", 0, [checkpoint], body, conversation_suffix.array("I"))
        )
    for tail, length in ((b"a", 2148), (b"b", 1024)):
        cached_prefix = table.find_longest_prefix("chat", shared_prefix + tail * 200)
        assert cached_prefix is not None
        assert cached_prefix[1].body_end == length
    assert table.find_longest_prefix("messages", shared_prefix + b"a" * 200) is None


def test_a_short_body_is_worth_knowing_when_a_quarter_of_it_came_before() -> None:
    table, rng = ConversationCache(1 << 20), random.Random(1)
    texts = [rng.randbytes(6000) for _ in range(RECENT_DIGESTS_MAX // 16)]
    assert not table.is_recurring(texts[0])
    assert table.is_recurring(texts[0])
    assert table.is_recurring(texts[0][:2000] + b"other" * 1000)
    assert not table.is_recurring(texts[0][:1200] + b"others" * 900), "its system prompt is another's too"
    assert not table.is_recurring(texts[0][:1023] + texts[1])
    assert not any(table.is_recurring(text) for text in texts[2:])
    assert not table.is_recurring(texts[0]), "so long ago"
    table.check_invariants()


def test_a_prompt_of_which_the_end_counts_is_not_known(tokenizer: Tokenizer) -> None:
    for keep in (None, 50):
        fields = {} if keep is None else {"truncate_prompt_tokens": keep}
        body = json.dumps({"messages": long_talk(8), **fields}).encode()
        task = ReadTask("chat", "folder", None, None, False)
        task.is_cached = True
        read_result = _read_body(task, body, tokenizer)
        assert (read_result.conversation is None) == (keep is not None)


def test_digests_are_of_beginnings() -> None:
    rng = random.Random(2)
    for size in (0, 1023, 1024, 5000, 70_000):
        body = rng.randbytes(size)
        prefix_digests = digests(body, 1024, 7)
        lengths = [(1024 << i // 8) * (8 + i % 8) // 8 for i in range(len(prefix_digests))]
        assert all(length <= size for length in lengths)
        assert size < (1024 << len(prefix_digests) // 8) * (8 + len(prefix_digests) % 8) // 8
        assert len(set(prefix_digests)) == len(prefix_digests)
        assert digests(body, 1024, 8)[:1] != prefix_digests[:1] or not prefix_digests
        for i, length in enumerate(lengths):
            assert digests(body[:length] + b"other", 1024, 7)[: i + 1] == prefix_digests[: i + 1]
            assert digests(body, 1024, 7, length) == prefix_digests[: i + 1]
            at = rng.randrange(min(length, 8192))
            changed_body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
            are_equal = [a == b for a, b in zip(digests(changed_body, 1024, 7), prefix_digests)]
            assert are_equal == [size <= at for size in lengths], "whatever byte of it is another one"
