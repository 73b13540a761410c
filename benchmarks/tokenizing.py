"""What the segment cache saves: a long conversation plus one new turn, encoded in full and through the cache.

    python benchmarks/tokenizing.py [--tokens 30000] [--model DIR] [--json FILE]

Every round adds a new turn that was never seen, so a round costs what a real next request costs: the whole text is cut,
looked up and joined, and the new turn is encoded. Ids are compared in every round. Rendering the chat template is
measured apart, because both ways pay it. Without --model, the built-in tokenizer is used.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import _path  # noqa: F401
import click
from harness.figures import in_words, machine, write_json
from harness.talks import Message, question, repo_text, talk

from prompts import RoutingRequest, Tokenizer


def conversation(tokenizer: Tokenizer, token_count: int) -> list[Message]:
    """Turns of real text (this repository's), about `token_count` tokens of prompt in all."""
    text, characters = repo_text(), 4 * token_count
    drawn = "".join(message["content"] for message in talk(random.Random(7), text, characters))
    tokens = len(tokenizer.encode(drawn, add_special_tokens=False))
    return talk(random.Random(7), text, characters * token_count // tokens)


def timed(tokenizer: Tokenizer, text: str) -> tuple[float, list[int]]:
    start = time.perf_counter()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return time.perf_counter() - start, ids


def measure(cached: Tokenizer, plain: Tokenizer, token_count: int, rounds: int) -> dict[str, object]:
    messages = conversation(plain, token_count)
    full_s: list[float] = []
    cached_s: list[float] = []
    render_s: list[float] = []
    identical = True
    total = 0
    for number in range(-2, rounds):  # two rounds to warm up; in them the conversation enters the cache
        request = RoutingRequest(kind="chat", messages=[*messages, question(number + 2)])
        start = time.perf_counter()
        text = cached.chat_text(request)
        render = time.perf_counter() - start
        full, want = timed(plain, text)
        fast, got = timed(cached, text)
        identical = identical and want == got
        total = len(want)
        if number >= 0:
            full_s.append(full)
            cached_s.append(fast)
            render_s.append(render)
    return {
        "tokens": total,
        "characters": len(text),
        "turns": len(messages) + 1,
        "rounds": rounds,
        "identical_ids": identical,
        "full_ms": statistics.median(full_s) * 1e3,
        "cached_ms": statistics.median(cached_s) * 1e3,
        "cached_worst_ms": max(cached_s) * 1e3,
        "render_ms": statistics.median(render_s) * 1e3,
        "speedup": statistics.median(full_s) / statistics.median(cached_s),
    }


@click.command()
@click.option("--tokens", default=30_000, show_default=True, help="Length of the conversation.")
@click.option("--rounds", default=30, show_default=True)
@click.option("--model", type=click.Path(path_type=Path, exists=True), help="A checkpoint's folder.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures to this file.")
def main(tokens: int, rounds: int, model: Path | None, json_file: Path | None) -> None:
    """Time a full encode against the segment cache."""
    with tempfile.TemporaryDirectory() as scratch:
        if model is None:
            from engine.tiny.tokenizer import VOCAB_SIZE, write_tokenizer

            write_tokenizer(Path(scratch), VOCAB_SIZE, max_position=2**20)
        folder = model or Path(scratch)
        cached, plain = Tokenizer.load(folder), Tokenizer.load(folder, cache_bytes=0)
    if cached.no_cache_reason is not None:
        raise click.ClickException(f"this tokenizer has no segment cache: {cached.no_cache_reason}")
    result = measure(cached, plain, tokens, rounds)
    named = str(model) if model else f"built-in ({plain.vocab_size} ids)"
    report = {"machine": {**machine("tokenizers"), "tokenizer": named}, **result}
    click.echo(in_words(report["machine"]))
    click.echo(f"{result['turns']} turns, {result['tokens']} tokens, medians of {rounds} rounds, one thread")
    click.echo(f"full encode     {result['full_ms']:8.2f} ms")
    ratio = f"{result['speedup']:.0f} x, worst {result['cached_worst_ms']:.2f} ms"
    click.echo(f"segment cache   {result['cached_ms']:8.2f} ms   {ratio}")
    click.echo(f"chat template   {result['render_ms']:8.2f} ms   (paid by both)")
    click.echo(f"ids identical   {result['identical_ids']}")
    write_json(json_file, report)
    if not result["identical_ids"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
