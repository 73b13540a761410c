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
from prompts.routing import KINDS, Kind, RoutingRequest, read_routing
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


def whole(kind: Kind, body: bytes, tokenizer: Tokenizer) -> tuple[RoutingRequest, Any]:
    parsed = read_routing(kind, body)
    return parsed, read_prompt(parsed, tokenizer)


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


def message(rng: random.Random, kind: Kind, place: int) -> dict[str, Any]:
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
    made: dict[str, Any] = {"role": "developer" if rng.random() < 0.01 else role, "content": text(rng, size)}
    if role == "assistant" and rng.random() < 0.3:
        function = {"name": "look", "arguments": json.dumps({"at": text(rng, 3)})}
        made["tool_calls"] = [{"id": "c", "type": "function", "function": function}]
    if rng.random() < 0.02:
        made["content"] = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    if rng.random() < 0.05:
        made["reasoning_content"] = text(rng, 5)
    return made


def body_of(rng: random.Random, kind: Kind, messages: list[Any], fields: dict[str, Any]) -> bytes:
    made: dict[str, Any] = {"model": "m", "max_tokens": 5}
    made |= {"messages": messages, **fields} if rng.random() < 0.9 else {**fields, "messages": messages}
    return json.dumps(made, ensure_ascii=False, indent=rng.choice((None, None, None, 1))).encode()


def fields_of(rng: random.Random, kind: Kind) -> dict[str, Any]:
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


def changed(rng: random.Random, kind: Kind, messages: list[Any]) -> list[Any]:
    """The conversation as its client sends it next."""
    made = list(messages)
    how = rng.random()
    if how < 0.1 and made:
        del made[rng.randrange(len(made)) :]
    elif how < 0.2 and made:
        at = rng.randrange(len(made))
        made[at] = message(rng, kind, at)
    elif how < 0.25 and len(made) > 1:
        a, b = rng.sample(range(len(made)), 2)
        made[a], made[b] = made[b], made[a]
    elif how < 0.3:
        made.append(rng.choice((None, 3, "text", {}, {"role": "user"}, {"content": 5})))
        return made
    return [*made, *(message(rng, kind, len(made) + i) for i in range(rng.randint(0, 4)))]


@settings(max_examples=15, deadline=None)
@example(seed=363, kind="chat").via(
    "behind the last known message another role than before comes next, then a third time"
)
@example(seed=217098, kind="messages").via("the last message is a known one of the assistant")
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["chat", "messages"]))
def test_what_returns_is_read_as_the_whole_is(tokenizer: Tokenizer, seed: int, kind: Kind) -> None:
    rng, table, went_on = random.Random(seed), ConversationCache(1 << 20), 0
    messages: list[Any] = [message(rng, kind, i) for i in range(rng.randint(1, 6))]
    fields = fields_of(rng, kind)
    for _ in range(12):
        body = body_of(rng, kind, messages, fields)
        parsed, prompt = whole(kind, body, tokenizer)
        ids = truncate_prompt(prompt.token_ids, parsed, None)
        found = table.find_longest_prefix(kind, body)
        returned = conversation_suffix.extend(*found, body, tokenizer, None) if found is not None else None
        if returned is None:
            known = conversation_suffix.cache_conversation(parsed, body, prompt, tokenizer)
            if known is not None:
                table.store(known)
        else:
            went_on += 1
            check_same(returned, parsed, ids)
            more = conversation_suffix.advance_conversation(returned, body, tokenizer)
            if more is not None:
                check_known(more, prompt)
                table.store(
                    more,
                    returned.conversation if returned.checkpoint is returned.conversation.checkpoints[-1] else None,
                )
        table.check_invariants()
        messages = changed(rng, kind, [m for m in messages if isinstance(m, dict) and m.get("content")])
        if rng.random() < 0.1:
            fields = fields_of(rng, kind)


def check_same(returned: conversation_suffix.SuffixResult, parsed: RoutingRequest, ids: Any) -> None:
    assert list(truncate_prompt(returned.token_ids, returned.request, None) or ()) == list(ids or ())
    for name in RoutingRequest.__struct_fields__:
        if name not in ("messages", "source"):
            assert getattr(returned.request, name) == getattr(parsed, name), name
    assert returned.outline() == (
        None if conversation_suffix._depends_on_template(returned.suffix.request) else outline_chat(parsed)
    )
    assert returned.token_ids[: returned.reused_tokens] == returned.conversation.token_ids[: returned.reused_tokens]


def check_known(known: CachedConversation, prompt: Any) -> None:
    mark = known.checkpoints[-1]
    assert list(known.token_ids[: mark.token_count_max]) == list(prompt.token_ids[: mark.token_count_max])
    assert len(known.token_ids) >= mark.token_count_max >= mark.token_count
    assert [mark.second_last_message, mark.last_message] == prompt.chat.messages[
        mark.message_count - 2 : mark.message_count
    ]
    assert [one.body_end for one in known.checkpoints] == sorted({one.body_end for one in known.checkpoints})


def long_talk(turns: int, mark: str = "") -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": f"{mark}{i} " + "word and word. " * 200} for i in range(turns)]


@pytest.mark.parametrize("kind", ["chat", "messages"])
def test_every_turn_but_the_first_is_known(tokenizer: Tokenizer, kind: Kind) -> None:
    """Also where the client marks the last turns, as coding agents do; nothing of the beginning is decoded again."""
    table, talk, sizes = ConversationCache(64 << 20), long_talk(9), []
    for turn in range(6):
        shown: list[Any] = [dict(m) for m in talk]
        if kind == "messages":
            for m in shown[-3::2]:
                m["content"] = [{"type": "text", "text": m["content"], "cache_control": {"type": "ephemeral"}}]
        body = json.dumps({"model": "m", "max_tokens": 5, "messages": shown}).encode()
        parsed, prompt = whole(kind, body, tokenizer)
        found = table.find_longest_prefix(kind, body)
        assert (found is None) == (turn == 0)
        if found is None:
            known = conversation_suffix.cache_conversation(parsed, body, prompt, tokenizer)
            assert known is not None
            table.store(known)
        else:
            returned = conversation_suffix.extend(*found, body, tokenizer, None)
            assert returned is not None
            sizes.append(len(returned.suffix.body_with_placeholder))
            assert (returned.suffix.body_with_placeholder == b"") == (kind == "chat"), (
                "of a chat nothing but messages is read"
            )
            check_same(returned, parsed, prompt.token_ids)
            more = conversation_suffix.advance_conversation(returned, body, tokenizer)
            assert more is not None
            table.store(more, found[0])
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
    parsed, prompt = whole("chat", plain, tokenizer)
    known = conversation_suffix.cache_conversation(parsed, plain, prompt, tokenizer)
    assert known is not None
    table = ConversationCache(1 << 20)
    table.store(known)
    longer = body % json.dumps([*long_talk(6), *long_talk(1, "new ")]).encode()
    found = table.find_longest_prefix("chat", longer)
    assert found is None or conversation_suffix.extend(*found, longer, tokenizer, None) is None


def test_only_templates_whose_text_can_be_cut_have_a_rest() -> None:
    whole = "{% for message in messages %}{{ message.content }}BODY{% endfor %}END"
    has: Any = lambda template: ChatTemplate(template).has_suffix_template(has_tools=False)  # noqa: E731
    assert has(whole)
    assert has("{% set all = messages[1:] if false else messages %}" + whole) is False
    for body in (
        "{{ messages[-1].role }}", "{{ messages | length }}", "{{ loop.index0 }}", "{{ loop.revindex }}",
        "{% set ns.x = 1 %}", "{% if loop.index > 3 %}{% break %}{% endif %}", "{{ messages[loop.index0 - 2] }}",
        "{{ strftime_now('%d') }}", "{{ loop.changed(message.role) }}", "{{ [1, 2] | random }}",
        "{% for x in messages %}{% endfor %}", "{% for x in message.y %}{{ messages[loop.index0 + 1] }}{% endfor %}",
    ):  # fmt: skip
        assert not has("{% set ns = namespace(x=0) %}" + whole.replace("BODY", body)), body
    for end in ("{{ messages[-1].role }}", "{{ strftime_now('%d') }}", "{% for m in messages %}{% endfor %}"):
        assert not has(whole.replace("END", end)), end
    sliced = "{% if messages[0].role == 'system' %}X{% set messages = messages[1:] %}{% endif %}"
    assert has(sliced + whole)
    assert has(chat_templates.GEMMA)
    for changed in (
        sliced + whole.replace("BODY", "{{ messages[0].content }}"), sliced + whole.replace("END", "{{ messages[0] }}"),
        sliced + whole.replace("BODY", "{{ messages[loop.index0 + 1] }}"), whole + sliced, sliced + sliced + whole,
        sliced.replace("{% endif", "{{ messages[0] }}{% endif") + whole,
        "{% for x in y %}" + sliced + "{% endfor %}" + whole,
        "{% macro a() %}{{ messages[0] }}{% endmacro %}" + sliced + whole, sliced.replace("[1:]", "[2:]") + whole,
        "{% macro a() %}" + sliced + "{% endmacro %}" + whole, sliced.replace("[1:]", "") + whole,
    ):  # fmt: skip
        assert not has(changed), changed
    for template in ("QWEN3", "LLAMA3", "MISTRAL", "EXOTIC"):
        assert not has(getattr(chat_templates, template)), template


def test_the_table_is_bounded() -> None:
    table = ConversationCache(300_000)
    made = []
    for number in range(60):
        body = (b"%d " % (number // 20)) * 5000 + b"%d" % number
        known = CachedConversation(
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
        made.append(known)
        table.store(known)
        table.check_invariants()
        assert table.find_longest_prefix("chat", body + b" and more") == (known, known.checkpoints[0])
        assert table.find_longest_prefix("messages", body) is None
    assert 0 < len(table) < 30
    assert table.find_longest_prefix("chat", made[0].body) is None
    assert all(len(known.body) >= BODY_BYTES_MIN for known in made)
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
    assert set(KINDS.values()) >= {"chat", "messages"}


def test_a_beginning_that_others_have_further_is_found_behind_theirs() -> None:
    """Two that differ between the last length that is digested and where they end; the third one began both."""
    table, shared = ConversationCache(1 << 20), bytes(random.Random(3).randrange(65, 90) for _ in range(2048))
    for body in (shared[:1024], shared + b"a" * 100):
        mark = Checkpoint(len(body), 3, 0, 0, "", 0, 0, {}, {})
        table.store(
            CachedConversation("chat", 0, b"", 0, [], b"", b"", 0, [mark], body, conversation_suffix.array("I"))
        )
    for tail, length in ((b"a", 2148), (b"b", 1024)):
        found = table.find_longest_prefix("chat", shared + tail * 200)
        assert found is not None
        assert found[1].body_end == length
    assert table.find_longest_prefix("messages", shared + b"a" * 200) is None


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
        order = ReadTask("chat", "folder", None, None, False)
        order.is_cached = True
        made = _read_body(order, body, tokenizer)
        assert (made.conversation is None) == (keep is not None)


def test_digests_are_of_beginnings() -> None:
    rng = random.Random(2)
    for size in (0, 1023, 1024, 5000, 70_000):
        body = rng.randbytes(size)
        found = digests(body, 1024, 7)
        lengths = [(1024 << i // 8) * (8 + i % 8) // 8 for i in range(len(found))]
        assert all(length <= size for length in lengths)
        assert size < (1024 << len(found) // 8) * (8 + len(found) % 8) // 8
        assert len(set(found)) == len(found)
        assert digests(body, 1024, 8)[:1] != found[:1] or not found
        for i, length in enumerate(lengths):
            assert digests(body[:length] + b"other", 1024, 7)[: i + 1] == found[: i + 1]
            assert digests(body, 1024, 7, length) == found[: i + 1]
            at = rng.randrange(min(length, 8192))
            changed = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
            same = [a == b for a, b in zip(digests(changed, 1024, 7), found)]
            assert same == [size <= at for size in lengths], "whatever byte of it is another one"
