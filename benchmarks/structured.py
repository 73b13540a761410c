#!/usr/bin/env python3
"""What it costs to make answers match a schema: tokens a second and the first token, beside free answers.

    benchmarks/structured.py [--users 16] [--tokens 96] [--rounds 5] [--hidden 64] [--peer NAME=URL] [--json FILE]

One random model with a vocabulary of 128,000 tokens, whose tokenizer is trained on Python's standard library (half a
minute, once; kept in the user's cache folder). Clients of an `engine serve`, and of each `--peer`, a server with the
same model, ask for answers of `--tokens` tokens, `--users` at a time, free and constrained (a list of objects without
end) by turns: tokens a second after the first token of the last answer, and the time to the first token of one request
(a prompt of 16 tokens). The model's folders are printed first:

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
from pathlib import Path
from typing import Any

import _path  # noqa: F401
from harness.figures import in_words, machine, write_json
from harness.load import Client, completion, post
from harness.programs import call, serve_engine
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HfTokenizer

from engine.tiny.model import Recipe, cached_model
from engine.tiny.tokenizer import PLAIN_TOKENS, SPECIAL_TOKENS, cached_tokenizer, made_once

VOCAB_SIZE = 128_000
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
ENDLESS = {"type": "array", "items": PERSON, "minItems": 1000}


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


def measure(options: argparse.Namespace, model: Path, folder: Path) -> dict[str, dict[str, float]]:
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
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    facts = machine("llguidance", "torch")
    print(in_words(facts))
    report: dict[str, Any] = {"machine": facts, "options": {**vars(options), "json": None}}
    model, folder = model_of(options.hidden), large_tokenizer()
    print(f"model {model}, tokenizer {folder}", flush=True)
    report["http"] = measure(options, model, folder)
    for name, row in report["http"].items():
        share = row["constrained, tokens/s"] / row["free, tokens/s"]
        print(f"{name:12}", in_words({k: f"{v:.1f}" for k, v in row.items()}), f"({share:.1%})")
    write_json(options.json, report)


if __name__ == "__main__":
    main()
