"""Build the tokenizer of the random models: byte-level BPE with ChatML's special tokens and a Qwen-style template.

The merges in data/tiny_merges.txt were trained once on this repository's text, so that ids do not change with the
sources. Merges are ordered, so a smaller vocabulary is a prefix of a larger one. Text in Unicode's form NFC
encodes and decodes without loss.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

MERGES_FILE = Path(__file__).parent / "data" / "tiny_merges.txt"
VOCAB_SIZE = 4096
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added tokens that decoded text shows, as in Qwen's vocabularies."""
_ADDED_TOKENS = (*SPECIAL_TOKENS, *PLAIN_TOKENS)
_BYTE_CHARS = sorted(pre_tokenizers.ByteLevel.alphabet())
_WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Words with their leading space, numbers of at most three digits, punctuation with the line breaks after it."""

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nYou may call these functions:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n\\nAnswer a call with <tool_call>{\"name\": ..., \"arguments\": ...}</tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role != 'system' or not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{\"name\": \"' + call.function.name + '\", \"arguments\": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""  # noqa: E501 - a template's lines are what they are


def build_tokenizer(vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Return the tokenizer with at most `vocab_size` ids. Raises ValueError if that is too few for the bytes."""
    vocab_size_min = len(_BYTE_CHARS) + len(_ADDED_TOKENS)
    if vocab_size < vocab_size_min:
        raise ValueError(f"vocab_size: got {vocab_size}, expected at least {vocab_size_min} (bytes and special tokens)")
    merge_lines = MERGES_FILE.read_text(encoding="utf-8").splitlines()[: vocab_size - vocab_size_min]
    tokenizer = _build_bpe([(a, b) for a, _, b in (line.partition(" ") for line in merge_lines)])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN_TOKENS])
    return tokenizer


def _build_bpe(merges: list[tuple[str, str]]) -> Tokenizer:
    """Return a byte-level BPE tokenizer without special tokens. `merges`: pairs of tokens to join, by priority."""
    tokens = [*_BYTE_CHARS, *(first + second for first, second in merges)]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_tokenizer(folder: Path, vocab_size: int, max_position: int) -> dict[str, int]:
    """Write the tokenizer of a random model in Hugging Face's files. Return the ids of its special tokens."""
    tokenizer = build_tokenizer(min(vocab_size, VOCAB_SIZE))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": max_position,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
    ids = tokenizer.get_vocab()
    return {token: ids[token] for token in SPECIAL_TOKENS}


def cached_tokenizer() -> Path:
    """Return a folder with the tokenizer alone, in the user's cache, written once."""

    def write(folder: Path) -> None:
        folder.mkdir()
        write_tokenizer(folder, VOCAB_SIZE, 1 << 20)

    return build_cached("tokenizer", json.dumps([VOCAB_SIZE, CHAT_TEMPLATE]), write)


def build_cached(name: str, cache_inputs: str, write: Callable[[Path], object]) -> Path:
    """Return a folder in the user's cache directory. If it is absent, `write` is called to create its files.

    `cache_inputs`: text of everything that the files depend on, so that other inputs give another folder. Several
    processes may call this at the same time.
    """
    cache_root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockcast" / "models"
    key = sha256(cache_inputs.encode() + MERGES_FILE.read_bytes()).hexdigest()[:12]
    folder = cache_root / f"{name}-{key}"
    if folder.is_dir():
        return folder
    cache_root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=cache_root))
    try:
        write(scratch / "made")
        try:
            (scratch / "made").rename(folder)
        except OSError:  # another process was first, and wrote the same bytes
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch)
    return folder
