#!/usr/bin/env python3
"""How much of JSON Schema constrained answers follow: the JSON-Schema-Test-Suite, by keyword and by backend.

    pip download --no-deps --no-binary jsonschema jsonschema && tar xf jsonschema-*.tar.gz    # the suite is in there
    benchmarks/json_schema.py jsonschema-*/json/tests/draft2020-12 [--backend xgrammar] [--failures] [--json FILE]

A schema is supported where it is not refused with an error. Of a supported one every instance that the suite calls
valid must be accepted and every other one refused. JSON writes one value in many ways and a grammar takes some of them
(properties in the schema's order): accepted is a value of which it takes any writing, refused one of which it takes
none, among the orders of properties (120 at most) and the ways to write a whole number. xgrammar is measured where it
is installed; it ignores keywords that it does not know, so what vLLM refuses beforehand is refused for it, too.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _path  # noqa: F401
import click
from harness.figures import in_words, machine, write_json

from engine.api.constraint import AskedConstraint, json_schema
from engine.api.lark import write_lark
from engine.grammars import GrammarError, Words
from engine.tiny.tokenizer import cached_tokenizer
from prompts import RequestError, Tokenizer

WRITINGS_MAX = 120
Accepts = Callable[[str], bool]
Compile = Callable[[Any], Accepts]
"""Raises ValueError or RequestError for a schema that is not supported."""


def writings(value: Any) -> Iterator[str]:
    """The value as JSON, in some of the ways there are."""
    if isinstance(value, dict):
        for order in itertools.islice(itertools.permutations(value), WRITINGS_MAX):
            for parts in itertools.product(*(list(itertools.islice(writings(value[key]), 8)) for key in order)):
                yield "{" + ", ".join(f"{_text(key)}: {part}" for key, part in zip(order, parts)) + "}"
    elif isinstance(value, list):
        for parts in itertools.product(*(list(itertools.islice(writings(item), 8)) for item in value)):
            yield "[" + ", ".join(parts) + "]"
    else:
        yield _text(value)
        if isinstance(value, float) and value.is_integer() and abs(value) < 1e17:
            yield str(int(value))


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def accepts(takes: Accepts, value: Any) -> bool:
    return any(map(takes, itertools.islice(writings(value), WRITINGS_MAX)))


def llguidance() -> Compile:
    """As the engine does it."""
    tokenizer = Tokenizer.load(cached_tokenizer(), cache_bytes=0)
    words = Words(tokenizer, tokenizer.vocab_size)

    def compile_(schema: Any) -> Accepts:
        compiled = words.compile(write_lark(AskedConstraint("schema", json_schema(schema)), {}))
        compiled.compute_bitmask()
        if compiled.is_error():
            raise GrammarError(compiled.get_error())

        def takes(text: str) -> bool:
            matcher, ids = compiled.deep_copy(), words.tokens.greedy_tokenize(text)  # what encodes also normalises
            return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

        return takes

    return compile_


def xgrammar() -> Compile:
    import xgrammar as xgr

    tokenizer = Tokenizer.load(cached_tokenizer(), cache_bytes=0)
    vocabulary = [tokenizer.id_to_token(i) or "" for i in range(tokenizer.vocab_size)]
    info = xgr.TokenizerInfo(
        vocabulary, xgr.VocabType.BYTE_LEVEL, stop_token_ids=list(tokenizer.eos_token_ids)
    )  # fmt: skip
    compiler = xgr.GrammarCompiler(info)

    def compile_(schema: Any) -> Accepts:
        if isinstance(schema, bool) or _vllm_refuses(schema):
            raise ValueError("not supported")
        try:
            compiled = compiler.compile_json_schema(json.dumps(schema), strict_mode=False)
        except RuntimeError as error:
            raise ValueError(str(error)) from error

        def takes(text: str) -> bool:
            matcher = xgr.GrammarMatcher(compiled, terminate_without_stop_token=True)
            return matcher.accept_string(text) and matcher.is_terminated()

        return takes

    return compile_


def _vllm_refuses(schema: Any) -> bool:
    """What vLLM 0.32 lets no client ask of xgrammar."""
    if isinstance(schema, list):
        return any(map(_vllm_refuses, schema))
    if not isinstance(schema, dict):
        return False
    kind = schema.get("type")
    refused = {
        "array": {"uniqueItems", "contains", "minContains", "maxContains"},
        "object": {"patternProperties", "propertyNames"},
        "integer": {"multipleOf"},
        "number": {"multipleOf"},
    }
    return bool(refused.get(kind if isinstance(kind, str) else "", set()) & set(schema)) or any(
        map(_vllm_refuses, schema.values())
    )


BACKENDS = {"llguidance": llguidance, "xgrammar": xgrammar}


def measure(folder: Path, compile_: Compile) -> tuple[dict[str, Counter[str]], list[str]]:
    """(by keyword: how many schemas and instances of each kind, what went wrong)."""
    found: dict[str, Counter[str]] = {}
    wrong = []
    for file in sorted(folder.glob("*.json")):
        counts = found[file.stem] = Counter()
        for case in json.loads(file.read_text()):
            schema = case["schema"]
            counts["schemas"] += 1
            counts["instances"] += len(case["tests"])
            try:
                takes = compile_(schema)
            except (ValueError, RequestError) as error:
                counts["refused schemas"] += 1
                if "nsatisfiable" in str(error) and not any(test["valid"] for test in case["tests"]):
                    counts["empty schemas"] += 1  # nothing matches: that is said at once
                continue
            counts["supported"] += len(case["tests"])
            for test in case["tests"]:
                kind = "valid" if test["valid"] else "invalid"
                counts[kind] += 1
                if accepts(takes, test["data"]) == test["valid"]:
                    counts[f"{kind} right"] += 1
                else:
                    wrong.append(f"{file.stem}: {case['description']}: {test['description']} ({kind})")
    return found, wrong


def row(name: str, counts: Counter[str]) -> str:
    schemas = f"{counts['schemas'] - counts['refused schemas']}/{counts['schemas']}"
    valid, invalid = (f"{counts[f'{kind} right']}/{counts[kind]}" for kind in ("valid", "invalid"))
    return f"{name:24} {schemas:>10} {valid:>15} {invalid:>17}"


@click.command(help=__doc__)
@click.argument("suite", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--backend", "names", multiple=True, type=click.Choice([*BACKENDS]), help="[default: llguidance]")
@click.option("--failures", is_flag=True, help="Name every instance that is judged wrongly.")
@click.option("--json", "out", type=click.Path(path_type=Path))
def main(suite: Path, names: tuple[str, ...], failures: bool, out: Path | None) -> None:
    facts = machine("llguidance", "xgrammar")
    print(in_words(facts))
    report: dict[str, Any] = {"machine": facts}
    for name in names or ("llguidance",):
        found, wrong = measure(suite, BACKENDS[name]())
        total: Counter[str] = sum(found.values(), Counter())
        print(f"\n{name:24} {'schemas':>10} {'valid accepted':>15} {'invalid refused':>17}")
        for keyword, counts in found.items():
            print(row(keyword, counts))
        print(row("all", total))
        right = total["valid right"] + total["invalid right"]
        supported, share = total["supported"], total["supported"] / total["instances"]
        print(f"supported: {supported} of {total['instances']} instances ({share:.1%})")
        print(f"of these right: {right} ({right / supported:.1%})")
        if failures:
            print("\n".join(wrong))
        report[name] = {"keywords": {key: dict(value) for key, value in found.items()}, "wrong": wrong}
    if out is not None:
        write_json(out, report)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
