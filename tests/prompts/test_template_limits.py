"""Templates that are rendered where others wait: proven to end, interrupted where they do not, and equal to the plain
ones. What is not proven is refused here, and left to a process with a deadline."""

from __future__ import annotations

import pytest

from prompts.chat_template import TEMPLATE_CHARS_MAX, ChatTemplate, ChatTemplateError, _make_environment
from prompts.errors import RequestError
from prompts.template_limits import TEXT_CHARS_MAX, add_limits
from tests.prompts.chat_templates import ALL

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
MANY = "{% for i in range(99999) %}"
END = "{% endfor %}"


def limited_template(source: str, seconds: float = 0.05) -> ChatTemplate:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    template.set_time_limit(seconds)
    return template


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"exotic"}))
def test_usual_templates_are_bounded_and_write_the_same(name: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    ours, plain = limited_template(ALL[name]), ChatTemplate(ALL[name], {"bos_token": "<s>", "eos_token": "</s>"})
    assert ours.is_bounded
    for tool_list in (None, tools):
        for generation in (False, True):
            arguments = {"tools": tool_list, "add_generation_prompt": generation}
            assert ours.render(MESSAGES, **arguments) == plain.render(MESSAGES, **arguments)  # type: ignore[arg-type]
    assert ours.needs_system_first() == plain.needs_system_first()


@pytest.mark.parametrize(
    "source",
    [
        MANY * 3 + END * 3,
        "{% for m in messages %}{{ m.content }}{% endfor %}" + MANY * 3 + "{% set x = i %}" + END * 3,
        MANY + "{% for m in range(99999) if m == -1 %}{{ m }}{% endfor %}" + END,
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
        "{% macro f(n) %}" + MANY * 2 + END * 2 + "{% endmacro %}{% set a %}{{ f(1) }}{% endset %}",
    ],
)
def test_what_does_not_end_is_interrupted_and_not_rendered_again(source: str) -> None:
    template = limited_template(source)
    assert template.is_bounded
    with pytest.raises(RequestError, match="takes too long"):
        template.render(MESSAGES)
    with pytest.raises(RequestError, match="may take too long"):
        template.render(MESSAGES)


@pytest.mark.parametrize(
    "step",
    [
        "{% set ns.x = ns.x ~ ns.x %}",
        "{% set ns.x = ns.x + ns.x + ns.x %}",
        "{% set ns.x = ns.x | tojson | tojson %}",
        "{% set ns.x = ns.x.replace('a', 'aa') %}",
        "{% set ns.x = ns.x | replace('a', 'aaa') %}",
        "{% set ns.x = [ns.x, ns.x] | join('-') %}",
        "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}",
        "{% set ns.y = ns.y + ns.y %}",
    ],
)
def test_what_grows_is_refused_before_it_is_large(step: str) -> None:
    template = limited_template(
        "{% set ns = namespace(x='a\"', y=messages) %}{% for i in range(900) %}" + step + END, 60.0
    )
    with pytest.raises(RequestError, match="too much"):
        template.render(MESSAGES)
    assert not template.is_bounded
    assert TEXT_CHARS_MAX < 1 << 20


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 999999999 }}",
        "{{ 10 ** 10 ** 9 }}",
        "{% if 'a' * 999999999 %}{% endif %}",
        "{% set x = 10 ** 10 ** 9 %}",
        "{{ messages[0].content.center(999999999) }}",
        "{{ messages[0].content['center'](999999999) }}",
        "{{ messages[0].content.ljust(9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ messages[0].content % 1 }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ lipsum(99999) }}",
        "{{ messages | map('center', 999999) | list }}",
        "{{ messages[0].content | indent(99999999) }}",
        "{{ messages[0].content | center(99999999) }}",
        "{{ messages | groupby('role') }}",
        "{{ messages | tojson(indent=999999) }}",
        "{{ messages[0].content.replace('', messages[0].content) }}",
        "{% set f = messages[0].content['cen' ~ 'ter'] %}{{ f(99999) }}",
        "{% set ns = namespace(split=messages[0].content['cen' ~ 'ter']) %}{{ ns.split(99999) }}",
        "{{ {'split': messages[0].content['cen' ~ 'ter']}.split(99999) }}",
        "{{ dict([['split', messages[0].content['cen' ~ 'ter']]]).split(99999) }}",
        "{% for m in messages recursive %}{{ loop([m, m]) }}{% endfor %}",
        "{% set a = [1] %}{% set b = [a, a] %}{% set c = [b, b] %}{{ c }}",
        "{% set ns = namespace(a=[1]) %}" + MANY + "{% set ns.a = [ns.a, ns.a] %}" + END,
        "{% macro f(l) %}{{ f([l, l]) }}{% endmacro %}{{ f(1) }}",
        "{% for x in [[1, 1], 1] %}{% set b = [[loop.previtem]] %}{% set c = [b] %}{% endfor %}",
        "{% for x in [[1, 1], 1] %}{% set b = [loop.previtem, loop.previtem] %}{% endfor %}",
        "{% include 'x' %}",
        "{{ strftime_now(messages[0].content) }}",
        "{{ " + " ~ ".join(["messages[0].content"] * 40) + " }}",
    ],
)
def test_what_is_not_proven_is_not_rendered_here(source: str) -> None:
    assert add_limits(_make_environment().parse(source)) is None
    template = limited_template(source)
    assert not template.is_bounded
    with pytest.raises(RequestError, match="too long"):
        template.render(MESSAGES)
    with pytest.raises(RequestError, match="too long"):
        template.needs_system_first()


def test_what_cannot_be_read_says_so() -> None:
    with pytest.raises(ChatTemplateError, match=f"at most {TEMPLATE_CHARS_MAX}"):
        ChatTemplate("a" * (TEMPLATE_CHARS_MAX + 1))
    with pytest.raises(ChatTemplateError, match="autoescape"):
        ChatTemplate("{% autoescape 'a' * 999999999 %}{% endautoescape %}")
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ " + "(" * 50_000)
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{% for a in messages %}" * 30 + END * 30)


def test_a_client_s_own_template_is_bounded_too() -> None:
    template = limited_template(ALL["chatml"])
    with pytest.raises(RequestError, match="too long"):
        template.render(MESSAGES, chat_template="{{ 'a' * 999999999 }}")
    assert template.render(MESSAGES, chat_template="{{ messages | length }}") == "3"
    assert template.is_bounded


@pytest.mark.parametrize(
    ("body", "is_bounded"),
    [
        ("{% set ns = namespace(index=0) %}{% set ns.index = ns.index + 1 %}{{ ns.index % 2 }}", True),
        ("{% set ns = namespace(index='%9999999d') %}{{ ns.index % 2 }}", False),
        ("{% set ns = namespace(index=0) %}{% set ns.index = messages[0].content %}{{ ns.index % 2 }}", False),
        ("{% set ns = namespace(index=0) %}{% set ns.index %}%999999999d{% endset %}{{ ns.index % 2 }}", False),
        ("{% set ns = namespace(index=0) %}{{ 'abc'.index('b') }}", False),
        ("{% set ns = namespace(keys=0) %}{{ messages[0].keys() }}", False),
        ("{% set ns = namespace(index=0) %}{% for ns in messages %}{{ ns.index % 2 }}{% endfor %}", False),
    ],
)
def test_namespaces_may_count_under_the_name_of_a_method_that_is_not_called(body: str, is_bounded: bool) -> None:
    assert limited_template(body).is_bounded is is_bounded
