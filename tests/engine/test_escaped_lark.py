"""Grammars of free texts, matched in the JSON strings that models write: what they take is what the client's takes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from call_formats import EXAMPLES
from llguidance import LLMatcher, LLTokenizer

from engine.grammar_compiler import GrammarVocabulary, read_added_tokens
from engine.protocol.params import ModelLimits
from engine.protocol.parsed_request import build_constraint, read_response
from engine.structured_output.constraint_check import check_constraint
from engine.structured_output.escaped_lark import DEFINITION_CHARS_MAX, UnsupportedGrammar, escape_grammar
from engine.structured_output.lark import write_lark
from engine.tiny.tokenizer import cached_tokenizer
from prompts import ChatRequest, RequestError, Tokenizer
from prompts.responses import convert_to_chat, make_client_tools, parse_responses_request

TOKENIZER = Tokenizer.load(cached_tokenizer(), with_fast_encoder=False)
WORDS = LLTokenizer(TOKENIZER.hf_tokenizer.to_str(), eos_token=list(TOKENIZER.eos_token_ids))
PATCH = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

// As a coding agent sends it, but for its names.
hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: (context | line)+ eof?
context: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
eof: "*** End of File" LF

%import common.LF
"""
GOOD = '*** Begin Patch\n*** Add File: a "b".py\n+x = "\\n" # \u00e9\n+\ty\n*** End Patch\n'
BAD = "*** Begin Patch\n*** Rename File: a\n*** End Patch\n"


def takes(lark: str, text: str) -> bool:
    matcher = LLMatcher(WORDS, lark, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(TOKENIZER.encode(text))
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def holds(definition: str, text: str) -> bool:
    """Whether a JSON string of the text matches the escaped grammar."""
    lark = f'%llguidance {{}}\nstart: "\\"" text "\\""\ntext: %lark {{\n{escape_grammar(definition)}\n}}\n'
    return takes(lark, json.dumps(text, ensure_ascii=False))


@pytest.mark.parametrize(
    "pattern",
    [
        r"(.+)", r".*", r"(.|\n)*", r"[a-z]*foo", r"(?:a|b){2,3}", r'"[^"\n]*"', r"\w+=\d+;", r"[^a\\]+", r"\\n",
        r"a?b??c",
        r"x{2}", r"x{1,}", r"[\n\t]+", r"(?i:ab)c", r"(a*b)+c", r"\u0431+[\u0430-\u044f]?",
        "[\u0430-\u044f]+", r"a\/b", r"(?P<n>a)|",
    ],
)  # fmt: skip
def test_a_regular_expression_takes_the_texts_that_it_takes_unescaped(pattern: str) -> None:
    texts = [
        "", "a", "ab", "abc", "ABc", "foo", "xfoofoo", "bab", '"q"', '"', "k=1;", "\\n", "\n", "\t\n", "a\nb", "xx",
        "b\u0431",
        "\u0431\u0430", "a/b", "a\\", "bc", "aabbc", "\u0431\u0431",
    ]  # fmt: skip
    for text in texts:
        assert holds(f"start: /{pattern}/", text) == bool(re.fullmatch(pattern, text)), (pattern, text)


@pytest.mark.parametrize("pattern", [r"(.*,)*.*", r".*foo.*bar.*", r"[^\n]*\n([+ -].*\n)*"])
def test_long_texts_are_taken_to_their_end(pattern: str) -> None:
    """With a terminal for each character, the matcher gave up after 67 and after 4,000 tokens."""
    text = {r"(.*,)*.*": "a,b," * 300, r".*foo.*bar.*": "x" * 4000 + "foobar"}.get(pattern, "head\n" + "+ line\n" * 400)
    assert holds(f"start: /{pattern}/", text)


def test_texts_ranges_imports_and_flags() -> None:
    grammar = (
        'start: "say\\t"i LETTER "a".."c" X?\nX: "\\u0431"\n%import common (LETTER, INT)\n%import common.WS -> SPACE'
    )
    assert holds(grammar, "SAY\tzb")
    assert holds(grammar, "say\tzc\u0431")
    assert not holds(grammar, "say\tzd")
    assert holds('start: /a.b/s "!" // "no" \n', "a\nb!")


@pytest.mark.parametrize(
    "definition",
    ["start: /^a/", r"start: /\bx/", "start: /(?=a)b/", "start: A\n%ignore / /", "start: X\n%import common.ODD",
     "start: /a/x",
     "start: /[b-a]/", 'start: "' + "x" * DEFINITION_CHARS_MAX + '"'],
)  # fmt: skip
def test_what_cannot_be_matched_is_told(definition: str) -> None:
    with pytest.raises(UnsupportedGrammar):
        escape_grammar(definition)


def tool(**form: Any) -> Any:
    return {"type": "custom", "name": "patch", "format": {"type": "grammar", **form}}


def constraint(form: Any, calls: str, choice: Any) -> str:
    request = parse_responses_request(json.dumps({"input": "x", "tools": [form], "tool_choice": choice}).encode())
    limits = ModelLimits(max_model_len=100, vocab_size=4096, call_format=calls)
    requested = build_constraint(
        ChatRequest(**convert_to_chat(request)), limits, grammar_tools=make_client_tools(request.list_tools())
    )
    assert requested is not None
    return write_lark(requested.decode(), read_added_tokens(TOKENIZER))


@pytest.mark.parametrize("calls", [name for name, example in EXAMPLES.items() if example.patch is not None])
def test_a_custom_tools_text_matches_its_grammar(calls: str) -> None:
    patch = EXAMPLES[calls].patch or ""
    for choice in ("required", "auto"):
        lark = constraint(tool(syntax="lark", definition=PATCH), calls, choice)
        assert takes(lark, patch % json.dumps(GOOD, ensure_ascii=False))
        assert not takes(lark, patch % json.dumps(BAD))
    lark = constraint(tool(syntax="regex", definition="[a-c]+\n?"), calls, "required")
    assert takes(lark, patch % '"abc\\n"')
    assert not takes(lark, patch % '"abd"')


def test_where_texts_stand_bare_a_regular_expression_is_kept_and_a_grammar_free() -> None:
    call = "<tool_call>\n<function=patch>\n<parameter=input>\n%s\n</parameter>\n</function>\n</tool_call>"
    assert takes(constraint(tool(syntax="lark", definition=PATCH), "qwen3_coder", "required"), call % "anything")
    assert takes(constraint(tool(syntax="regex", definition="[a-c]+"), "qwen3_coder", "required"), call % "abc")


def test_a_grammar_that_cannot_be_matched_is_refused_by_the_tools_name() -> None:
    body = {"input": "x", "tools": [tool(syntax="lark", definition="start: /^a/")]}
    limits = ModelLimits(max_model_len=2048, vocab_size=4096, call_format="hermes")
    requested = read_response(None, json.dumps(body).encode(), TOKENIZER, limits).constraint
    assert requested is not None
    with pytest.raises(RequestError, match=r"the grammar of the tool 'patch' cannot be matched: /\^a/"):
        check_constraint(GrammarVocabulary(TOKENIZER, TOKENIZER.vocab_size), requested)
