"""Chats that are put together from what was rendered before, against the template itself."""

from __future__ import annotations

from typing import Any

import pytest
from budget import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.tiny.tokenizer import CHAT_TEMPLATE
from prompts import ChatTemplate, parse_routing
from prompts.chat_rendering import BILLING_LINE, render_chat
from prompts.chat_template import _make_environment
from prompts.errors import RequestError
from prompts.rendered_text_cache import MESSAGES_MAX, SKELETONS_MAX, RenderedTextCache
from prompts.template_analysis import find_copy_conditions
from tests.prompts import chat_templates

BODY = "{% for message in messages %}<{{ message.role }}>BODY{% endfor %}{% if add_generation_prompt %}END{% endif %}"
COPYING = {
    "once": "{{ message.content }}",
    "joined": "{{ 'a' + message.content ~ 'b' }}",
    "trimmed": "{{ message.content | trim }}",
    "left": "{{ message['content'].lstrip() }}|{{ message.content.rstrip() }}",
    "beside": "{{ message.content | trim ~ message.content }}{{ message.content ~ message.content.strip() }}",
    "lines": r"{{ message.content.strip('\n') }}{{ message.get('content') }}",
    "mixed edges": "{{ message.content.strip().lstrip('<') }}",
    "kept": "{% set text = message.content %}{{ text }}",
    "block": "{% set text %}{{ message.content }}{% endset %}{{ text }}",
    "other": "{{ message.content or 'none' }}{{ message.name or 'none' }}",
    "asked": "{% if '</think>' in message.content %}{{ message.content.split('</think>')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}",
    "equal": "{{ 'x' if message.content == 'STOP' else message.content }}",
    "begins": "{{ message.content | upper if message.content.startswith(('<a>', '<b>')) else message.content }}",
    "neighbour": "{{ loop.previtem.content if loop.previtem }}{{ messages[loop.index0].content }}",
    "last": "{{ messages[-1].content if loop.last else message.content }}",
    "parts": "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for p in message.content %}{{ p.text | trim }}{{ p.type }}{% endfor %}{{ message.content[0].text }}{% endif %}",
    "macro": "{% macro say(text, end='.') %}[{{ text }}{{ end }}]{% endmacro %}{{ say(message.content) }}",
    "marked": "{% generation %}{{ message.content }}{% endgeneration %}",
    "blank": "{% if message.content | trim %}{{ message.content }}{% else %}nothing{% endif %}",
    "again": "{% set x = x | default('') %}{{ x }}{% set x = message.content %}",
    "space": "{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ message.content }}",
    "tools": "{% for call in message.tool_calls %}{{ call | tojson }}{% endfor %}{{ message.content }}",
    "roles": "{{ (messages | selectattr('role', 'equalto', 'user') | list | length) }}{{ message.content }}",
    "keys": "{{ 'tool_calls' in message }}{{ message.content }}",
}
OTHERWISE = (
    "{{ message.content | length }}",
    "{{ message.content[0] }}",
    "{{ message.content[1:] }}",
    "{{ message.content | upper }}",
    "{{ message.content * 2 }}",
    "{{ message.content.split('x') }}",
    "{{ (message.content + 'x') | trim }}",
    "{{ message | tojson }}",
    "{{ messages }}",
    "{{ messages == [] }}",
    "{{ message.items() | list }}",
    "{{ [message.content] }}",
    "{{ message.content > 'm' }}",
    "{{ message.content == message.role }}",
    "{{ message.content in 'abc' }}",
    "{{ message.content is in(['a']) }}",
    "{{ 'a' if 'b' in (message.content + 'b') }}",
    "{{ {'a': 1}[message.content] }}",
    "{{ '%.3s' | format(message.content) }}",
    "{{ raise_exception(message.content) }}",
    "{{ [1, 2] | random }}{{ message.content }}",
    "{{ strftime_now('%d') }}{{ message.content }}",
    "{% for char in message.content %}{{ char }}{% endfor %}",
    "{% set ns = namespace(x='') %}{% set ns.x = message.content %}{{ ns.x }}",
    "{% macro say(text) %}{{ text | length }}{% endmacro %}{{ say(message.content) }}",
    "{% macro say() %}{{ messages[0].content }}{% endmacro %}{% set f = say %}{{ f() | length }}",
    "{% set x = message %}{{ x['content'] | length }}",
    "{% set x %}{{ message.content }}{% endset %}{{ x | length }}",
    "{% filter upper %}{{ message.content }}{% endfilter %}",
)
TEMPLATES = {name: BODY.replace("BODY", body) for name, body in COPYING.items()}
TEMPLATES |= {name: chat_templates.ALL[name] for name in ("chatml", "qwen3", "mistral", "gemma", "exotic")}
TEMPLATES["tiny"] = CHAT_TEMPLATE
PIECES = st.sampled_from(
    ["a", " ", "\n", "\x1e", "\x1f", "</think>", "<think>", "STOP", "<a>", "<", "\u00e9", "x0x", "{{",
     "<tool_response>", "some text", "\u00a0", "\t", "\\", "'"]
)  # fmt: skip
BARE = parse_routing("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}]}')
CONTENT = st.lists(PIECES, min_size=0, max_size=4).map("".join)
CHATS = st.lists(
    st.tuples(st.sampled_from(["system", "user", "user", "assistant", "tool"]), CONTENT), min_size=1, max_size=4
)


def render_prompt(template: ChatTemplate, messages: list[dict[str, Any]], generation: bool, *, plain: bool) -> str:
    """By the template alone, or as prompts are."""
    if not plain:
        return render_chat(template, BARE.replace(messages=messages, add_generation_prompt=generation))
    if template.find_content_format() == "parts":
        messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    return template.render(messages, add_generation_prompt=generation)


@pytest.mark.parametrize("name", TEMPLATES)
@given(chats=st.lists(CHATS, min_size=1, max_size=4), generation=st.booleans())
@settings(max_examples=examples(60), deadline=None)
@example(chats=[[("user", "a")], [("user", " a ")], [("user", "\n")], [("user", "")]], generation=True)
@example(chats=[[("user", "a"), ("assistant", "b")], [("user", "</think>"), ("assistant", "STOP")]], generation=False)
def test_a_chat_is_what_the_template_makes_of_it(
    name: str, chats: list[list[tuple[str, str]]], generation: bool
) -> None:
    template = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"})
    for chat in [*chats, *chats]:
        messages = [{"role": role, "content": content} for role, content in chat]
        results = []
        for plain in (True, False):
            try:
                results.append(render_prompt(template, messages, generation, plain=plain))
            except RequestError as error:
                results.append(error.message)
        assert results[0] == results[1], name


def test_a_billing_line_is_dropped_where_the_skeleton_is_kept() -> None:
    template = ChatTemplate(CHAT_TEMPLATE, {"bos_token": "<s>", "eos_token": "</s>"})
    chats = [[{"role": "system", "content": text}, {"role": "user", "content": "a"}]
             for text in ("b", "b", f"{BILLING_LINE}: 1\nb")]  # fmt: skip
    assert len({render_prompt(template, chat, True, plain=False) for chat in chats}) == 1


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_that_copy_are_known_and_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"})
    text_cache = template.get_rendered_text_cache(has_tools=False)
    assert text_cache is not None
    chat = [{"role": role, "content": f"{role} says"} for role in ("system", "user", "assistant", "user")]
    render_prompt(template, chat, True, plain=False)
    other = [{**message, "content": message["content"] + " more"} for message in chat]
    want = render_prompt(template, other, True, plain=True)
    monkeypatch.setattr(template, "render", None)
    assert render_prompt(template, other, True, plain=False) == want


@pytest.mark.parametrize("body", OTHERWISE)
def test_what_else_is_done_with_a_text_is_a_doubt(body: str) -> None:
    assert find_copy_conditions(_make_environment().parse(BODY.replace("BODY", body))) is None


def test_a_wrong_analysis_is_found_when_the_skeleton_is_made() -> None:
    """The template writes one text otherwise than all others."""

    def render(messages: list[dict[str, Any]]) -> str:
        return "".join("!" if m["content"] == "odd" else m["content"] for m in messages)

    text_cache = RenderedTextCache((), "")
    for text in ("odd", "even"):
        chat = [{"role": "user", "content": text}]
        key = text_cache.make_key(chat)
        assert key is not None
        assert text_cache.render_with_skeleton(key, chat, render) == render(chat)


def test_what_is_kept_is_bounded() -> None:
    text_cache, calls = RenderedTextCache((), ""), []

    def render(messages: list[dict[str, Any]]) -> str:
        calls.append(len(messages))
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)

    for number in range(3 * SKELETONS_MAX):
        chat = [{"role": f"r{number}", "content": "text"}]
        key = text_cache.make_key(chat, number)
        assert key is not None
        assert text_cache.render_with_skeleton(key, chat, render) == f"<r{number}>text"
        assert 0 < len(text_cache._skeletons) <= SKELETONS_MAX
    before = len(calls)
    text_cache.render_with_skeleton(key, chat, render)
    assert len(calls) == before
    long_chat = [{"role": "user", "content": "text"}] * (MESSAGES_MAX + 1)
    assert text_cache.make_key(long_chat) is None
    assert text_cache.make_key([{"role": "x" * 99, "content": "text"}]) is None
    assert text_cache.make_key([{"role": "user", "content": "text", "name": "a"}]) is None
