"""Templates that are rendered where others wait: interrupted where they do not end, and equal to the plain ones. What
may take long is refused here, and left to a process with a deadline."""

from __future__ import annotations

import tracemalloc

import pytest

from prompts.chat_template import TEMPLATE_CHARS_MAX, ChatTemplate, ChatTemplateError
from prompts.errors import RequestError
from prompts.template_limits import TEXT_CHARS_MAX
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
    assert not limited_template(source).is_bounded, "the sample shows it"
    template = limited_template("{% if messages | length == 3 %}" + source + "{% endif %}")
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
    loop = "{% for i in range(900 if messages | length == 3 else 0) %}"
    template = limited_template("{% set ns = namespace(x='a\"', y=messages) %}" + loop + step + END, 60.0)
    assert template.is_bounded
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
        "{% set ns = namespace(x=9) %}" + MANY + "{% set ns.x = ns.x * ns.x %}" + END,
        "{{ messages[0].content.center(999999999) }}",
        "{{ messages[0].content['center'](999999999) }}",
        "{{ messages[0].content.ljust(9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ messages[0].content % 1 }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{0:999999999}'.format_map({'0': 1}) }}",
        "{{ lipsum(99999) }}",
        "{{ cycler('a') }}",
        "{{ messages | map('center', 999999) | list }}",
        "{{ messages | map('replace', 'a', 'aaaa') | list }}",
        "{{ messages[0].content | indent(99999999) }}",
        "{{ messages[0].content | indent(width=99999999) }}",
        "{{ messages[0].content | center(99999999) }}",
        "{% if messages | length > 99 %}{{ messages | groupby('role') }}{% endif %}",
        "{{ messages | tojson(indent=999999) }}",
        "{{ messages[0].content.replace('', messages[0].content | string + '-' + END) }}".replace(
            "END", repr("x" * 99)
        ),
        "{{ ('x' + 'y' | replace('y', END)).join(['a', 'b']) }}".replace("END", repr("x" * 64)),
        "{{ messages | map('tojson') | join(END) }}".replace("END", repr("x" * 65)),
        "{{ messages | selectattr('role', 'in', END) | list }}".replace("END", repr("user " * 20)),
        "{% set f = messages[0].content['cen' ~ 'ter'] %}{{ f(99999) }}",
        "{% set ns = namespace(split=messages[0].content['cen' ~ 'ter']) %}{{ ns.split(99999) }}",
        "{{ {'split': messages[0].content['cen' ~ 'ter']}.split(99999) }}",
        "{{ dict.fromkeys('abc') }}",
        "{% for m in messages recursive %}{{ loop([m, m]) }}{% endfor %}",
        "{% set ns = namespace(a=[1]) %}" + MANY + "{% set ns.a = [ns.a, ns.a] %}" + END,
        "{% set ns = namespace(a=[1]) %}" + MANY + "{% set ns.a = dict(a=ns.a, b=ns.a) %}" + END,
        "{% set ns = namespace(a=[1]) %}" + MANY + "{% set ns.a = (ns.a, ns.a) %}" + END,
        "{% set ns = namespace(a=1) %}" + MANY + "{% set ns.a = namespace(a=ns.a, b=ns.a) %}" + END,
        "{% set ns = namespace(a=1) %}{% set ns.a = [ns, ns] %}",
        "{% set ns = namespace(a=1) %}{% set ns.a, x = ns, 1 %}",
        "{% macro f(l) %}{{ f([l, l]) }}{% endmacro %}{{ f(1) }}",
        "{% macro f() %}{{ f(varargs, varargs) }}{{ varargs }}{% endmacro %}{{ f(1) }}",
        r"{% macro f(x) %}{{ f([x] | string) }}{% endmacro %}{{ f('\\') }}",
        "{{ range(99999)" + "| map('string') | map('tojson')" * 30 + " | list | length }}",
        "{% include 'x' %}",
        "{% import 'x' as x %}",
        "{% extends 'x' %}",
        "{% block x %}{% endblock %}",
        "{% autoescape true %}{{ messages[0].content }}{% endautoescape %}",
        "{{ strftime_now('%9999999Y') }}",
        "{{ strftime_now('%Y' ~ END) }}".replace("END", repr("%Y" * 40)),
        "{{ " + " ~ ".join(["messages[0].content"] * 40) + " }}",
        "{{ range(99999) | map('string') | join(messages[0].role) * 2 }}",
    ],
)
def test_what_may_take_long_is_not_rendered_here(source: str) -> None:
    template = limited_template(source)
    assert not template.is_bounded
    with pytest.raises(RequestError, match="too long"):
        template.render(MESSAGES)
    with pytest.raises(RequestError, match="too long"):
        template.needs_system_first()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[5 * 1 - 5].content.replace('a', 'b') }}", "b"),
        ("{% set a = [1] %}{% set b = [a, a] %}{% set c = [b, b] %}{{ c }}", "[[[1], [1]], [[1], [1]]]"),
        ("{{ {'split': 7}['split'] }} {{ dict([['split', 8]])['split'] }}", "7 8"),
        (
            "{% for x in [[1], 1] %}{% set b = [[loop.previtem]] %}{{ loop.cycle('a', 'b') }}{% endfor %}",
            "ab",
        ),
        ("{% set ns = namespace(index=0) %}{% set ns.index = ns.index + 1 %}{{ ns.index % 2 }}", "1"),
        ("{% set ns = namespace(index=0) %}{{ 'abc'.index('b') }}{% for ns in messages %}{% endfor %}", "1"),
        ("{% macro f() %}[{{ caller() }}]{% endmacro %}{% call f() %}x{% endcall %}", "[x]"),
        (
            "{% for m in messages %}{% set ns = namespace(n=1) %}{% set o = namespace(n=2) %}{{ ns.n }}{% endfor %}",
            "111",
        ),
        (
            "{% filter upper %}a{% endfilter %}{{ messages | map(attribute='role') | join(', ') }}",
            "Auser, assistant, user",
        ),
        (
            "{% generation %}x{% endgeneration %}{{ messages | selectattr('role', 'equalto', 'user') | list | count }}",
            "x2",
        ),
    ],
)
def test_what_is_fast_is_rendered_here(source: str, text: str) -> None:
    template = limited_template(source)
    assert template.is_bounded
    assert template.render(MESSAGES) == ChatTemplate(source).render(MESSAGES) == text


def test_what_a_client_can_send_ends_no_limits() -> None:
    """A call of what is not defined, or is not a function, is an error of this request alone."""
    template = limited_template(
        "{{ messages[0].content.strip() }}{{ messages[0].name.strip() }}{{ messages[0].role() }}"
    )
    for message in ({"role": "user", "content": None}, {"role": "user", "content": 7}, MESSAGES[0], {"content": "a"}):
        with pytest.raises(RequestError):
            template.render([message])
        assert template.is_bounded
    arguments = {"numbers": list(range(20_000)), "deep": [[[[["a"]]]]]}
    call = {"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]}
    kept = limited_template("{% set ns = namespace(m=messages) %}{% set all = ns.m + [1] %}{{ all | tojson | length }}")
    assert int(kept.render([call])) > 100_000
    assert kept.is_bounded


LONG = "{% set a='0123456789abcde ' %}" + "{% set a = a ~ a %}" * 13
"""Makes a text of 131,072 characters."""


@pytest.mark.parametrize(
    "source",
    [
        MANY + "{{ a ~ i }}" + END,
        "{{ a | upper }}" * 2000,
        "{% macro m() %}" + "{{ a }}" * 30 + "{% endmacro %}{{ m() | join('" + "\U0001f600" * 64 + "') }}",
        "{% macro m() %}" + "{{ a }}" * 30 + "{% endmacro %}{{ m().replace('0', '00') }}",
        "{{ a | list | tojson(indent='" + " " * 64 + "') }}",
        "{{ strftime_now(format='%9000d') }}",
        "{% set x = a | list | map('lower') | map('lower') | map('lower') | map('lower') | list %}" * 20,
    ],
)
def test_output_filters_and_macros_are_bounded_in_memory_and_time(source: str) -> None:
    template = limited_template("{% if messages | length == 3 %}" + LONG + source + "{% endif %}")
    assert template.is_bounded
    tracemalloc.start()
    try:
        with pytest.raises(RequestError):
            template.render(MESSAGES)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()
    assert not template.is_bounded


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
    with pytest.raises(RequestError, match="too long"):
        template.render(MESSAGES, chat_template=MANY * 3 + END * 3)
    assert template.render(MESSAGES, chat_template="{{ messages | length }}") == "3"
    assert template.is_bounded
