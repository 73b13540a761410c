"""Rendering against transformers' apply_chat_template, and vLLM's rules for what a template is given."""

from __future__ import annotations

import json
import re

import jinja2
import pytest
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.compiler import CodeGenerator

from prompts import ChatTemplate, ChatTemplateError, RequestError, parse_chat, parse_routing
from prompts.chat_rendering import render_chat
from prompts.chat_template import _add_reasoning_names
from prompts.template_environment import TemplateEnvironment, make_environment, read_clock
from tests.prompts import chat_templates

ALL = chat_templates.ALL
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a <place> & time's",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Zürich", "東京"]}}},
    },
}
CALL = {"type": "function", "id": "c1", "function": {"name": "get_weather", "arguments": {"city": "Zürich", "n": 1.5}}}


@pytest.fixture(scope="module")
def hf_render():
    """transformers' own rendering, on a tokenizer that has nothing but special tokens.

    Since 5.23 it leaves nulls out and gives an assistant's reasoning under all its names; for an older one (the newest
    for Python 3.10 is 5.20) the messages are made so here, and all the rest is still its own.
    """
    import transformers
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    older = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)

    backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<pad>": 2, "<unk>": 3}, unk_token="<unk>"))
    tok = PreTrainedTokenizerFast(tokenizer_object=backend, **VARIABLES)

    def render(source, messages, **kwargs):
        if older:
            fields = [{name: value for name, value in message.items() if value is not None} for message in messages]
            messages = [_add_reasoning_names(message) for message in fields]
        return tok.apply_chat_template(messages, chat_template=source, tokenize=False, **kwargs)

    return render


def agree(hf_render, source, messages, **kwargs):
    """Both render the same text, or both refuse."""
    template = ChatTemplate(source, VARIABLES)
    try:
        want = hf_render(source, messages, **kwargs)
    except (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError):
        with pytest.raises(RequestError):
            template.render(messages, **kwargs)
        return None
    assert template.render(messages, **kwargs) == want
    return want


CONVERSATIONS = {
    "one": [{"role": "user", "content": "Hi"}],
    "system": [{"role": "system", "content": " Be terse. "}, {"role": "user", "content": "Hi <b>you</b> & 'me'\n"}],
    "turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhmm\n</think>\n\nb  "},
        {"role": "user", "content": "  c  "},
        {"role": "assistant", "content": "d", "reasoning_content": "why\n"},
    ],
    "not alternating": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    "tools": [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"t": 3}', "tool_call_id": "c1"},
        {"role": "tool", "content": "cold"},
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": " x "}, {"type": "text", "text": "y"}]}],
    "stops": [{"role": "user", "content": "1"}, {"role": "user", "content": "STOP"}, {"role": "user", "content": "3"}],
    "older reasoning names": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "thinking": "t"}],
}


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", ALL)
def test_equals_transformers(hf_render, name, conversation):
    messages = CONVERSATIONS[conversation]
    for generation in (False, True):
        agree(hf_render, ALL[name], messages, add_generation_prompt=generation)
        agree(hf_render, ALL[name], messages, add_generation_prompt=generation, tools=[TOOL, TOOL])
    documents = [{"title": "T", "text": "one"}, {"text": "two"}]
    agree(hf_render, ALL[name], messages, documents=documents, extra="é<", enable_thinking=False, bos_token="<other>")
    agree(hf_render, ALL[name], messages, enable_thinking=False, add_generation_prompt=True, date_string="1 May 2025")
    if not messages[-1].get("tool_calls"):  # transformers drops them: below
        agree(hf_render, ALL[name], messages, continue_final_message=True)


@pytest.mark.parametrize("ending", ["", " ", "\n\n", "  x", "tail \n"])
@pytest.mark.parametrize("name", ALL)
def test_continue_final_message_equals_transformers(hf_render, name, ending):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The answer" + ending}]
    want = agree(hf_render, ALL[name], messages, continue_final_message=True)
    assert want is not None
    assert want.endswith(("The answer" + ending, "The answer", "The answer  x", "The answertail"))


@pytest.mark.parametrize("content", ["", None, "So: "])
@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_a_continued_message_keeps_its_calls(name, content):
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content, "tool_calls": [call]}]
    template = ChatTemplate(ALL[name], VARIABLES)
    full_text = template.render(messages)
    continued_text = template.render(messages, continue_final_message=True)
    assert '"Rome"' in continued_text
    assert full_text.startswith(continued_text)
    assert full_text.removeprefix(continued_text).strip() in ("<|im_end|>", "<|eot_id|>")


def test_a_message_with_calls_that_ends_otherwise_is_not_continued():
    source = "{% for m in messages %}{{ m.content }}{{ '<a>' if m.tool_calls else '<b>' }}{% endfor %}"
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    with pytest.raises(RequestError, match="tool_calls") as error_info:
        ChatTemplate(source).render(
            [{"role": "assistant", "content": "x", "tool_calls": [call]}], continue_final_message=True
        )
    assert error_info.value.param == "continue_final_message"


_content = st.text(alphabet=st.sampled_from("ab \n\t<|>&'\"{}%#é日🙂"), max_size=12)
_messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": _content},
                          optional={"reasoning_content": _content, "name": _content}), min_size=1, max_size=6,
)  # fmt: skip


@given(messages=_messages, name=st.sampled_from(sorted(ALL)), generation=st.booleans(), is_continued=st.booleans())
@settings(max_examples=examples(300), deadline=None)
def test_random_chats_equal_transformers(hf_render, messages, name, generation, is_continued):
    agree(hf_render, ALL[name], messages, add_generation_prompt=generation, continue_final_message=is_continued)


def test_named_templates_follow_transformers():
    template = ChatTemplate({"default": "plain", "tool_use": "with tools", "rag": "{{ documents | length }}"})
    chat = [{"role": "user", "content": "x"}]
    assert template.render(chat) == "plain"
    assert template.render(chat, tools=[TOOL]) == "with tools"
    assert template.replace("rag").render(chat, documents=[{"text": "a"}]) == "1"
    assert template.replace("{{ 1 + 1 }}").render(chat) == "2"
    with pytest.raises(RequestError, match="several chat templates"):
        ChatTemplate({"rag": "x"}).render(chat)


@pytest.mark.parametrize("name", ALL)
def test_content_format(name):
    want = "parts" if name in chat_templates.LOOPS_OVER_PARTS else "string"
    assert ChatTemplate(ALL[name]).find_content_format() == want


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% set content = m['content'] %}{% for p in content %}{{ p }}{% endfor %}{% endfor %}",
        "{% set ms = messages[1:] %}{% for m in ms %}{% for p in m['content'] | list %}{{ p }}{% endfor %}{% endfor %}",
        "{% macro text(c) %}{% for p in c %}{{ p }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ text(m.content) }}{% endfor %}",
        "{% macro text(i, c) %}{% for p in c %}{{ p }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ text(1, c=m.content) }}{% endfor %}",
        "{% set ns = namespace(turns=messages) %}"
        "{% for m in ns.turns %}{% for p in m.content %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(i=0) %}{% set ns.turns = messages %}"
        "{% for m in ns.turns %}{% for p in m.content %}{% endfor %}{% endfor %}",
    ],
)
def test_content_format_follows_names(source):
    assert ChatTemplate(source).find_content_format() == "parts"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% set c = m['content'] %}{% for p in c %}{{ p.text }}{% endfor %}{% endfor %}",
        "{% for p in messages[0].content %}{{ p.text }}{% endfor %}",
        "{% set m = messages[0] %}{% for p in m.content %}{{ p.text }}{% endfor %}",
        "{% macro text(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}{{ text(system) }}",
        "{% for m in messages %}{% for word in m.text %}{{ word }}{% endfor %}{% endfor %}",
    ],
)
def test_content_format_follows_no_more_names_than_vllm(source):
    assert ChatTemplate(source).find_content_format() == "string"


def chat(messages, **fields):
    return parse_chat(json.dumps({"messages": messages, **fields}).encode())


def test_parts_are_joined_for_string_templates_and_wrapped_for_part_templates():
    source = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
    looping_source = source + "{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}"
    parts = [{"type": "text", "text": "a"}, "b", {"type": "refusal", "refusal": "no"}]
    request = chat([{"role": "user", "content": parts}, {"role": "user", "content": "c"}])
    assert render_chat(ChatTemplate(source), request) == '"a\\nb\\nno""c"'
    wrapped_parts = [{"type": "text", "text": text} for text in "abc"]
    wrapped_parts[2]["text"] = "no"
    want = json.dumps(wrapped_parts) + '[{"type": "text", "text": "c"}]'
    assert render_chat(ChatTemplate(looping_source), request) == want


def test_tool_arguments_are_read_and_tools_completed():
    source = (
        "{{ messages[0].tool_calls[0].function.arguments | tojson }} {{ tools | tojson }} {{ messages[0] | length }}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"é": [1]}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "unknown": 1}
    request = chat([message], tools=[{"function": {"name": "f", "strict": True}, "type": "function"}])
    tools = '[{"type": "function", "function": {"name": "f", "description": null, "parameters": null, "strict": true}}]'
    assert render_chat(ChatTemplate(source), request) == f'{{"é": [1]}} {tools} 3'


def test_generation_prompt_defaults_to_true_unless_the_last_message_is_continued():
    template = ChatTemplate(ALL["chatml"])
    assert render_chat(template, chat([{"role": "user", "content": "a"}])).endswith("<|im_start|>assistant\n")
    continued_messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The"}]
    request = chat(continued_messages, continue_final_message=True, add_generation_prompt=False)
    assert render_chat(template, request).endswith("<|im_start|>assistant\nThe")
    off = chat([{"role": "user", "content": "a"}], add_generation_prompt=False)
    assert render_chat(template, off).endswith("a<|im_end|>\n")


def test_the_text_ends_before_reasoning_that_is_an_embedding():
    source = "{% for m in messages %}{% if m.reasoning %}<think>{{ m.reasoning + '</think>' }}{% endif %}{% endfor %}"
    embedding = {"type": "prompt_embeds", "data": "AAAA"}
    request = chat([{"role": "assistant", "content": "a", "reasoning": embedding}, {"role": "user", "content": "b"}])
    assert render_chat(ChatTemplate(source), request) == "<think>"


def test_template_kwargs_and_reasoning_effort_reach_the_template():
    template = ChatTemplate("{{ reasoning_effort }} {{ x }} {{ add_generation_prompt }}")
    kwargs = {"x": 3, "messages": [], "add_generation_prompt": False, "reasoning_effort": "high", "self": 1}
    request = chat([{"role": "user"}], reasoning_effort="low", chat_template_kwargs=kwargs)
    assert render_chat(template, request) == "low 3 True"


@pytest.mark.parametrize(
    ("effort", "kwargs", "thinks"),
    [(None, {}, ""), ("low", {}, "True"), ("none", {}, "False"), ("none", {"enable_thinking": True}, "True")],
)
def test_an_effort_switches_thinking_as_in_vllm(effort, kwargs, thinks):
    """Unless the request says itself whether the model is to think."""
    request = chat([{"role": "user"}], reasoning_effort=effort, chat_template_kwargs=kwargs)
    assert render_chat(ChatTemplate("{{ enable_thinking }}"), request) == thinks


@pytest.mark.parametrize("name", ["chatml", "gemma"])
def test_the_text_before_the_first_image_is_kept(name):
    template = ChatTemplate(ALL[name], VARIABLES)
    image = {"type": "image_url", "image_url": {"url": "http://x/y.png"}}
    content = [{"type": "text", "text": "look at"}, image, {"type": "text", "text": "this"}]
    body = {"messages": [{"role": "user", "content": "first"}, {"role": "user", "content": content}]}
    request = parse_routing("/v1/chat/completions", json.dumps(body).encode())
    assert request.has_media
    text = render_chat(template, request)
    assert "first" in text
    assert text.rstrip("\n").endswith("look at")


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no such role') }}",
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ undefined_name.field }}",
        "{% include 'x' %}",
        "{{ messages[0] + 1 }}",
        "{% set ns = namespace(_x=1) %}{{ ns._x }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    ],
)
def test_a_failing_template_is_the_clients_error(source):
    with pytest.raises(RequestError) as error_info:
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
    assert error_info.value.status == 400


def test_a_template_that_does_not_compile_names_the_line():
    with pytest.raises(ChatTemplateError, match="line 2"):
        ChatTemplate("ok\n{% for %}")
    with pytest.raises(ChatTemplateError, match="line 1"):
        ChatTemplate("x").replace("{% if %}")


def test_a_number_of_thousands_of_digits_does_not_compile() -> None:
    with pytest.raises(ChatTemplateError, match="digits"):
        ChatTemplate("{{ " + "9" * 6000 + " }}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{% endfor %}",
        "{% for m in messages %}{{ m['items'] }}{{ m.items() | list }}{{ m.get('role') }}{{ m['keys'] }}{% endfor %}",
        "{% for m in messages %}{{ m.gone is defined }}{{ m['gone'] is none }}{{ m.gone }}{{ m.role }}{% endfor %}",
        "{% for m in messages %}{{ loop.nextitem is defined }}{{ loop.cycle('a', 'b') }}{% endfor %}",
        "{% for m in messages %}{% if loop.last %}{{ loop.previtem.role }}{% endif %}{% endfor %}",
        "{% for m in messages %}{{ loop.previtem.role }}{% endfor %}",
        "{% set loop = messages[0] %}{{ loop.first }}{{ loop['role'] }}{{ loop.length is defined }}",
        "{% set ns = namespace(role='x') %}{{ ns.role }}{{ ns['role'] }}{{ gone is defined }}{{ 'a'.role is defined }}",
        "{% for m in messages %}{{ m.__class__ }}{% endfor %}",
        "{% for m in messages %}{{ m['__class__'] }}{% endfor %}",
        "{{ gone.role }}",
        "{% set text = 'abc' %}{{ text.role is defined }}{{ text['upper'] is defined }}{{ text.upper() }}",
    ],
)
def test_what_is_written_short_means_the_same(source):
    def render_with(generator):
        environment = make_environment()
        environment.code_generator_class = generator
        messages = [{"role": "user", "first": "F", "items": 3}, {"role": "tool", "keys": None, "length": 9}]
        try:
            text = environment.from_string(source).render(messages=messages)
            return re.sub(r"0x[0-9a-f]+", "0x", text)  # a method's text holds where it lies
        except jinja2.TemplateError as error:
            return type(error), str(error)

    short = TemplateEnvironment.code_generator_class
    assert short is not CodeGenerator
    assert render_with(short) == render_with(CodeGenerator)


def test_a_template_may_ask_for_the_time_in_an_empty_format() -> None:
    source = "{{ strftime_now('') }}{{ strftime_now(\"\") }}"
    assert read_clock(source) == ("", "")
    assert ChatTemplate(source).render([{"role": "user", "content": "x"}]) == ""
