"""Templates that are rendered where others wait: interrupted if they do not end, and not rendered there again."""

from __future__ import annotations

import pytest

from prompts.chat_template import TEMPLATE_CHARS_MAX, ChatTemplate, ChatTemplateError
from prompts.errors import RequestError
from tests.prompts.chat_templates import ALL

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
MANY = "{% for i in range(99999) %}"
END = "{% endfor %}"


def limited_template(source: str, seconds: float = 0.05) -> ChatTemplate:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    template.seconds_max = seconds
    return template


@pytest.mark.parametrize("name", sorted(ALL))
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
        "".join(f"{{% block b{i} %}}" + f"{{{{ self.b{i + 1}() }}}}" * 2 + "{% endblock %}" for i in range(40))
        + "{% block b40 %}{% endblock %}",
    ],
)
def test_what_does_not_end_is_interrupted(source: str) -> None:
    template = limited_template("{% if messages | length == 3 %}" + source + "{% endif %}")
    assert template.is_bounded
    with pytest.raises(RequestError, match="takes too long"):
        template.render(MESSAGES)
    assert not template.is_bounded


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 999999999 }}",
        "{{ 999999999 * messages }}",
        "{{ ('a'.encode() * 999999999) | length }}",
        "{{ 10 ** 999999999 }}",
        "{% set x = 10 ** 999999999 %}",
        "{% set x = 9 ** 64 ** 64 ** 64 ** 64 %}",
        "{% set x = 9 ** 64 %}" + "{% set x = x * x %}" * 30,
    ],
)
def test_a_single_operation_that_takes_minutes_is_refused(source: str) -> None:
    template = limited_template("{% if messages | length == 3 %}" + source + "{% endif %}")
    assert template.is_bounded
    with pytest.raises(RequestError, match="too long"):
        template.render(MESSAGES)
    assert not template.is_bounded


@pytest.mark.parametrize(
    "source", ["{{ range(99999) | map('center', 3) | map('length') | sum }}", "{{ '%9999999d' % 1 }}"]
)
def test_one_operation_that_took_long_is_noticed(source: str) -> None:
    """It cannot be interrupted, and constant expressions are not computed when the template is read."""
    template = limited_template(source, 1e-9)
    with pytest.raises(RequestError, match="takes too long"):
        template.render(MESSAGES)
    assert not template.is_bounded


def test_a_text_multiplied_by_a_text_is_an_error_of_this_request_alone() -> None:
    template = limited_template("{{ messages[0].content * messages[0].content }}", 60.0)
    with pytest.raises(RequestError, match="TypeError: can't multiply"):
        template.render([{"role": "user", "content": "a" * 10_000}])
    assert template.is_bounded


@pytest.mark.parametrize(
    "source", ["{{ cycler() }}", "{% for k in messages[0] %}{{ dict.update(messages[0], {k ~ 'x': 1}) }}{% endfor %}"]
)
def test_whatever_a_template_raises_is_an_error_of_the_request(source: str) -> None:
    with pytest.raises(RequestError, match="RuntimeError"):
        ChatTemplate(source).render([{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    "step",
    ["{% set ns.x = ns.x ~ ns.x %}", "{% set ns.x = ns.x | tojson | tojson %}", "{% set ns.y = ns.y + ns.y %}"],
)
def test_what_grows_in_a_loop_is_interrupted(step: str) -> None:
    loop = "{% for i in range(900 if messages | length == 3 else 0) %}"
    template = limited_template("{% set ns = namespace(x='a\"', y=messages) %}" + loop + step + END, 0.01)
    assert template.is_bounded
    with pytest.raises(RequestError, match="too long"):
        template.render(MESSAGES)
    assert not template.is_bounded


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'ab' * 2 }}{{ 2 * [1] }}{{ 2 ** 10 }}{{ 3 * 4 }}", "abab[1, 1]102412"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% else %}none{% endfor %}", "ac"),
        (
            "{% for m in messages recursive %}{{ m if m is string else loop([m.role]) }}{% endfor %}",
            "userassistantuser",
        ),
        ("{% macro f() %}[{{ caller() }}]{% endmacro %}{% call f() %}x{% endcall %}", "[x]"),
        (
            "{% generation %}x{% endgeneration %}{{ messages | selectattr('role', 'equalto', 'user') | list | count }}",
            "x2",
        ),
    ],
)
def test_checks_of_the_clock_change_no_text(source: str, text: str) -> None:
    template = limited_template(source, 60.0)
    assert template.render(MESSAGES) == text
    assert template.is_bounded


def test_what_a_client_can_send_ends_no_limits() -> None:
    """A call of what is not defined, or is not a function, is an error of this request alone."""
    template = limited_template(
        "{{ messages[0].content.strip() }}{{ messages[0].name.strip() }}{{ messages[0].role() }}"
    )
    for message in ({"role": "user", "content": None}, {"role": "user", "content": 7}, MESSAGES[0], {"content": "a"}):
        with pytest.raises(RequestError):
            template.render([message])
        assert template.is_bounded


def test_what_cannot_be_read_says_so() -> None:
    with pytest.raises(ChatTemplateError, match=f"at most {TEMPLATE_CHARS_MAX}"):
        ChatTemplate("a" * (TEMPLATE_CHARS_MAX + 1))
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ " + "(" * 50_000)
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{% for a in messages %}" * 30 + END * 30)
