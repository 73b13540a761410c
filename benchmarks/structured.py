#!/usr/bin/env python3
"""What it costs to make answers match: masks by backend, tokens a second beside free answers, time to first token.

    benchmarks/structured.py [--users 16] [--tokens 96] [--rounds 5] [--hidden 64] [--parts masks decode ttft whole]
        [--peer NAME=URL] [--json FILE]

One random model with a vocabulary of 128,000 tokens, whose tokenizer is trained on Python's standard library (half a
minute, once; kept in the user's cache folder). In one process without HTTP, but for the last:

masks   the time of a mask and of compiling a schema, along a document that the schema allows: llguidance as the engine
        uses it, and xgrammar where it is installed. One thread.
decode  `--users` answers at a time, free and constrained (a list of objects without end) in turns: tokens a second
        after the first token of the last one; plain sampling, temperature 1, end of sequence ignored.
ttft    one request with a prompt of 64 tokens: free, with a schema that is new to the core, with one it has seen.
whole   `--users` answers that must match schemas, up to 512 tokens each: how many are whole and valid. A random model
        has no reason to end a text or a number, so schemas with bounds and without are told apart.
http    decode and ttft (a prompt of 16 tokens) as clients of `engine serve` see them, and of each `--peer`, a server
        with the same model, by turns. Its folders are printed first:
        vllm serve MODEL --tokenizer TOKENIZER --max-model-len 2048 --no-enable-prefix-caching
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _path  # noqa: F401
import jsonschema
from harness.figures import in_words, machine, write_json
from harness.load import Client, completion, post
from harness.programs import call, serve_engine
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HfTokenizer

from engine import LLM, SamplingParams
from engine.api.constraint import AskedConstraint, json_schema
from engine.api.lark import write_lark
from engine.grammars import Words
from engine.tiny.model import Recipe, cached_model
from engine.tiny.tokenizer import PLAIN_TOKENS, SPECIAL_TOKENS, cached_tokenizer, made_once
from engine.types import Constraint, Request
from prompts import Tokenizer

VOCAB_SIZE = 128_000
WHOLE_TOKENS = 512
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
        },
    },
    "required": ["name", "age", "tags", "address"],
}
DOCUMENT = {
    "name": "Hans Müller", "age": 42, "tags": ["one", "two three four"],
    "address": {"street": "Main street 12, next door to the shop", "zip": "12345"},
}  # fmt: skip
ENDLESS = {"type": "array", "items": PERSON, "minItems": 1000}
WHOLE: dict[str, Any] = {
    "bounded": {
        "type": "object",
        "properties": {
            "kind": {"enum": ["cat", "dog", "bird"]},
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 30},
            "tame": {"type": "boolean"},
            "colours": {"type": "array", "items": {"enum": ["black", "white", "red"]}, "maxItems": 3},
        },
        "required": ["kind", "name", "age", "tame", "colours"],
        "additionalProperties": False,
    },
    "one text": {
        "type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"],
        "additionalProperties": False,
    },
    "numbers": {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "number"}}, "required": ["a", "b"],
        "additionalProperties": False,
    },
    "person": PERSON | {"additionalProperties": False},
}  # fmt: skip


def large_tokenizer() -> Path:
    """A folder with byte-level BPE of VOCAB_SIZE tokens."""

    def write(folder: Path) -> None:
        files = [p for p in Path(sysconfig.get_path("stdlib")).rglob("*.py") if "site-packages" not in p.parts]
        hf = HfTokenizer(models.BPE())
        words = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
        hf.pre_tokenizer = pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        hf.decoder = decoders.ByteLevel()
        added = [*SPECIAL_TOKENS, *PLAIN_TOKENS]
        trainer = trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE - len(added), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            min_frequency=1, show_progress=False,
        )  # fmt: skip
        hf.train_from_iterator((file.read_text(errors="replace") for file in files), trainer)
        hf.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
        hf.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN_TOKENS])
        shutil.copytree(cached_tokenizer(), folder)
        hf.save(str(folder / "tokenizer.json"))

    return made_once("benchmark-tokenizer", f"{VOCAB_SIZE} {WORDS} {sysconfig.get_python_version()}", write)


def model_of(hidden: int) -> Path:
    return cached_model(
        Recipe(
            vocab_size=VOCAB_SIZE, hidden_size=hidden, intermediate_size=2 * hidden, heads=2, kv_heads=1, head_dim=32
        )
    )


def lark(schema: Any) -> str:
    return write_lark(AskedConstraint("schema", json_schema(schema)), {})


# Masks ----------------------------------------------------------------------------------------------------------------


def llguidance_masks(tokenizer: Tokenizer, text: str) -> dict[str, Any]:
    begin_s = time.perf_counter()
    words = Words(tokenizer, tokenizer.vocab_size)
    words_s = time.perf_counter() - begin_s
    ids = tokenizer.encode(text)

    def walk() -> tuple[float, list[float]]:
        begin_s = time.perf_counter()
        matcher = words.compile(lark(PERSON))
        compiled_s, masks_s = time.perf_counter() - begin_s, []
        for token in ids:
            begin_s = time.perf_counter()
            matcher.compute_bitmask()
            assert matcher.consume_token(token)
            masks_s.append(time.perf_counter() - begin_s)
        return compiled_s, masks_s

    return {"vocabulary_s": words_s, **_of_walks(walk)}


def xgrammar_masks(tokenizer: Tokenizer, text: str) -> dict[str, Any] | None:
    try:
        import xgrammar as xgr
    except ImportError:
        return None
    vocabulary = [tokenizer.id_to_token(i) or "" for i in range(tokenizer.vocab_size)]
    begin_s = time.perf_counter()
    info = xgr.TokenizerInfo(vocabulary, xgr.VocabType.BYTE_LEVEL, stop_token_ids=list(tokenizer.eos_token_ids))
    words_s = time.perf_counter() - begin_s
    ids, bits = tokenizer.encode(text), xgr.allocate_token_bitmask(1, tokenizer.vocab_size)

    def walk() -> tuple[float, list[float]]:
        compiler = xgr.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        begin_s = time.perf_counter()
        compiled = compiler.compile_json_schema(json.dumps(PERSON), strict_mode=False)
        matcher = xgr.GrammarMatcher(compiled)
        compiled_s, masks_s = time.perf_counter() - begin_s, []
        for token in ids:
            begin_s = time.perf_counter()
            matcher.fill_next_token_bitmask(bits)
            assert matcher.accept_token(token)
            masks_s.append(time.perf_counter() - begin_s)
        return compiled_s, masks_s

    return {"vocabulary_s": words_s, **_of_walks(walk)}


def _of_walks(walk: Callable[[], tuple[float, list[float]]]) -> dict[str, float]:
    walks = [walk() for _ in range(5)]
    masks_s = [one for _, masks_s in walks for one in masks_s]
    return {
        "compile_ms": 1e3 * statistics.median(compiled_s for compiled_s, _ in walks),
        "mask_us_mean": 1e6 * statistics.mean(masks_s),
        "mask_us_p50": 1e6 * statistics.median(masks_s),
        "mask_us_p99": 1e6 * sorted(masks_s)[int(0.99 * len(masks_s))],
        "first_mask_ms": 1e3 * statistics.median(masks_s[0] for _, masks_s in walks),
    }


# The engine -----------------------------------------------------------------------------------------------------------


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        model, folder = model_of(options.hidden), large_tokenizer()
        self.llm = LLM(str(model), tokenizer=str(folder), max_model_len=2048, num_gpu_blocks_override=4096,
                       num_threads=options.threads, enable_prefix_caching=False)  # fmt: skip
        self.tokenizer = self.llm.get_tokenizer()
        self._names = 0

    def request(self, schema: Any, prompt_len: int, **params: Any) -> Request:
        self._names += 1
        rng = random.Random(self._names)
        constraint = None if schema is None else Constraint(lark(schema), "schema")
        return Request(
            request_id=str(self._names),
            token_ids=[rng.randrange(1000) for _ in range(prompt_len)],
            params=SamplingParams(constraint=constraint, seed=self._names, **params),
        )

    def run(self, requests: list[Request]) -> tuple[dict[str, list[int]], float, float]:
        """(tokens, seconds to the first token of all, tokens a second from there on)."""
        core, tokens = self.llm._core, {request.request_id: list[int]() for request in requests}
        begin_s = time.perf_counter()
        first_s, before = 0.0, 0
        for request in requests:
            core.add(request, 0.0)
        while core.has_work:
            for output in core.step(0.0):
                assert output.error is None, output.error
                tokens[output.request_id] += output.token_ids
            if not first_s and all(tokens.values()):
                first_s, before = time.perf_counter(), sum(map(len, tokens.values()))
        rest_s = time.perf_counter() - first_s
        return tokens, first_s - begin_s, (sum(map(len, tokens.values())) - before) / rest_s if rest_s > 0 else 0.0

    def decode(self) -> dict[str, Any]:
        found: dict[str, list[float]] = {"free": [], "constrained": []}
        for round_ in range(self.options.rounds + 1):
            for name, schema in (("free", None), ("constrained", ENDLESS)):
                asked = [
                    self.request(schema, 16, max_tokens=self.options.tokens, ignore_eos=True)
                    for _ in range(self.options.users)
                ]
                _, _, rate = self.run(asked)
                if round_:  # the first one warms up
                    found[name].append(rate)
        rates = {name: statistics.median(rates) for name, rates in found.items()}
        return {**rates, "share": rates["constrained"] / rates["free"], "rounds": found}

    def ttft(self) -> dict[str, float]:
        def first_ms(schema: Any) -> float:
            return 1e3 * self.run([self.request(schema, 64, max_tokens=1)])[1]

        count = 4 * self.options.rounds
        first_ms(None)
        first_ms(PERSON)
        free, seen, new = [], [], []
        for i in range(count):
            free.append(first_ms(None))
            seen.append(first_ms(PERSON))
            new.append(first_ms({**PERSON, "title": str(i), "properties": {f"p{i}": {"type": "string"}}}))
        return {
            "free_ms": statistics.median(free),
            "seen_ms": statistics.median(seen),
            "new_ms": statistics.median(new),
        }

    def whole(self) -> dict[str, dict[str, int]]:
        found = {}
        for name, schema in WHOLE.items():
            asked = [self.request(schema, 16, max_tokens=WHOLE_TOKENS) for _ in range(4 * self.options.users)]
            tokens = self.run(asked)[0]
            valid = 0
            for ids in tokens.values():
                try:
                    jsonschema.validate(json.loads(self.tokenizer.decode(ids)), schema)
                    valid += 1
                except (ValueError, jsonschema.ValidationError):
                    assert len(ids) == WHOLE_TOKENS, "an answer that ended is not valid"
            found[name] = {"answers": len(asked), "valid": valid}
        return found


# Servers --------------------------------------------------------------------------------------------------------------


async def burst(url: str, model: str, users: int, tokens: int, schema: Any) -> tuple[float, float]:
    """(median ms to the first token, tokens a second from the last one's first token on)."""
    more = {} if schema is None else {"structured_outputs": {"json": schema}}
    bodies = [
        completion(model, [random.randrange(1000) for _ in range(16)], tokens, temperature=1.0, return_token_ids=True,
                   **more)
        for _ in range(users)
    ]  # fmt: skip
    async with Client(url) as client:
        answers = await asyncio.gather(*(client.ask(post("/v1/completions", body)) for body in bodies))
    times = []
    for answer in answers:
        events = [(at_s, json.loads(data)) for at_s, data in answer.checked().events()]
        times.append([at_s for at_s, event in events for choice in event["choices"] for _ in choice["token_ids"] or ()])
        assert len(times[-1]) == tokens, f"{url}: {len(times[-1])} tokens of {tokens}"
    begin_s, end_s = max(some[0] for some in times), max(some[-1] for some in times)
    first_ms = [1e3 * (some[0] - answer.sent_s) for some, answer in zip(times, answers)]
    rest = sum(at_s > begin_s for some in times for at_s in some)
    return statistics.median(first_ms), rest / (end_s - begin_s) if rest else 0.0


def over_http(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    model, folder = model_of(options.hidden), large_tokenizer()
    peers = dict(peer.split("=", 1) for peer in options.peer)
    flags = ("--tokenizer", str(folder), "--max-model-len", "2048", "--no-enable-prefix-caching", "--port", "0",
             "--num-threads", str(options.threads), "--num-gpu-blocks-override", "4096")  # fmt: skip
    found: dict[str, dict[str, list[float]]] = {}
    with serve_engine(Path(tempfile.mkdtemp(prefix="structured-")) / "engine.log", str(model), *flags) as engine:
        urls = {"ours": engine.await_line(), **peers}
        names = {name: call(f"{url}/v1/models")[1]["data"][0]["id"] for name, url in urls.items()}
        for round_ in range(options.rounds + 1):
            for name, url in urls.items():
                for kind, schema in (("free", None), ("constrained", ENDLESS)):
                    for users, tokens, figure in ((options.users, options.tokens, "tokens/s"), (1, 2, "ttft ms")):
                        first_ms, rate = asyncio.run(burst(url, names[name], users, tokens, schema))
                        rows = found.setdefault(name, {}).setdefault(f"{kind}, {figure}", [])
                        rows += [first_ms if users == 1 else rate] * bool(round_)  # the first one warms up
    return {name: {kind: statistics.median(rows) for kind, rows in row.items()} for name, row in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=64, help="size of the model's states: what a step computes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--parts", nargs="+", default=["masks", "decode", "ttft", "whole"])
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    facts = machine("llguidance", "xgrammar", "torch")
    print(in_words(facts))
    report: dict[str, Any] = {"machine": facts, "options": {**vars(options), "json": None}}
    if "masks" in options.parts:
        tokenizer = Tokenizer.load(large_tokenizer(), cache_bytes=0)
        text = json.dumps(DOCUMENT, ensure_ascii=False)
        report["masks"] = {"llguidance": llguidance_masks(tokenizer, text), "xgrammar": xgrammar_masks(tokenizer, text)}
        for name, row in report["masks"].items():
            print(f"{name:12}", "not installed" if row is None else in_words({k: f"{v:.2f}" for k, v in row.items()}))
    if "http" in options.parts:
        print(f"model {model_of(options.hidden)}, tokenizer {large_tokenizer()}", flush=True)
        report["http"] = over_http(options)
        for name, row in report["http"].items():
            share = row["constrained, tokens/s"] / row["free, tokens/s"]
            print(f"{name:12}", in_words({k: f"{v:.1f}" for k, v in row.items()}), f"({share:.1%})")
    if {"decode", "ttft", "whole"} & set(options.parts):
        bench = Bench(options)
    if "decode" in options.parts:
        row = report["decode"] = bench.decode()
        print(f"decode, {options.users} users: {row['free']:.0f} tokens/s free, {row['constrained']:.0f} constrained "
              f"({row['share']:.1%})")  # fmt: skip
    if "ttft" in options.parts:
        row = report["ttft"] = bench.ttft()
        print(
            f"ttft: {row['free_ms']:.2f} ms free, {row['seen_ms']:.2f} of a schema seen before, {row['new_ms']:.2f} new"
        )
    if "whole" in options.parts:
        report["whole"] = bench.whole()
        for name, counts in report["whole"].items():
            share = counts["valid"] / counts["answers"]
            print(f"whole in {WHOLE_TOKENS} tokens, {name:9} {counts['valid']}/{counts['answers']} ({share:.0%})")
    if options.json is not None:
        write_json(options.json, report)


if __name__ == "__main__":
    main()
