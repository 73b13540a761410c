"""The random checkpoints: real files that transformers reads, seeded, varied, made once."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from engine.tiny import model as tiny_model
from engine.tiny.model import FAMILIES, PRESETS, Recipe, cached_model, make_model
from engine.tiny.tokenizer import CHAT_TEMPLATE, VOCAB_SIZE, build_tokenizer
from prompts import Tokenizer, parse_chat

LAYERS = {"nemotron_h": 8}
SCRIPT = Path(__file__).parents[2] / "scripts" / "make_tiny_model"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def recipe(family="qwen3", **fields):
    return Recipe(**({"family": family, "layers": LAYERS.get(family, 4), "vocab_size": 512} | fields))


def tensors_of(folder):
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_every_family_whole(tmp_path, family):
    folder = make_model(tmp_path / family, recipe(family))
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert AutoConfig.from_pretrained(folder).model_type == FAMILIES[family][0]
    tokenizer = Tokenizer.load(folder)
    request = parse_chat(b'{"messages": [{"role": "user", "content": "What is a cache? Explain it in a few words."}]}')
    ids = torch.tensor([tokenizer.encode_chat(request)])
    with torch.no_grad():
        logits = model(ids).logits[0]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    assert torch.isfinite(logits).all()
    assert 0.3 < logits.std() < 6
    assert logits.abs().max() < 40
    answer = out[0, ids.shape[1] :].tolist()
    assert len(set(answer)) > 2  # a network that repeats its input would hide wrong positions and stale caches
    other = ids.clone()
    other[0, 5] += 1
    with torch.no_grad():
        assert (model(other).logits[0, -1] - logits[-1]).abs().max() > 1e-3  # the far past matters


def test_norms_and_biases_are_not_trivial(tmp_path):
    tensors = tensors_of(make_model(tmp_path / "m", recipe("qwen2")))
    for name, tensor in tensors.items():
        assert tensor.float().std() > 0.01, name
    assert any(name.endswith("q_proj.bias") for name in tensors)


def test_bytes_depend_on_the_recipe_alone(tmp_path):
    torch.manual_seed(1)
    first_tensors = tensors_of(make_model(tmp_path / "1", recipe("nemotron_h")))
    torch.manual_seed(2)
    state = torch.random.get_rng_state()
    two = tensors_of(make_model(tmp_path / "2", recipe("nemotron_h")))
    assert torch.equal(torch.random.get_rng_state(), state)
    other = tensors_of(make_model(tmp_path / "3", recipe("nemotron_h", seed=1)))
    assert first_tensors.keys() == two.keys() == other.keys()
    assert all(torch.equal(first_tensors[name], two[name]) for name in first_tensors)
    assert not any(torch.equal(first_tensors[name], other[name]) for name in first_tensors)
    for name in ("tokenizer.json", "config.json", "generation_config.json", "tokenizer_config.json"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


@pytest.mark.parametrize("size", ["50KB", "200KB"])
def test_shards(tmp_path, size):
    whole_tensors = tensors_of(make_model(tmp_path / "whole", recipe()))
    folder = make_model(tmp_path / "parts", recipe(max_shard_size=size))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    assert len(files) > 1
    assert sorted(set(index["weight_map"].values())) == files
    parts = tensors_of(folder)
    assert parts.keys() == whole_tensors.keys() == index["weight_map"].keys()
    assert all(torch.equal(parts[name], whole_tensors[name]) for name in whole_tensors)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole_tensors.values())
    AutoModelForCausalLM.from_pretrained(folder)


def test_dtype_and_tying(tmp_path):
    for is_tied in (True, False):
        folder = make_model(tmp_path / str(is_tied), recipe(tie_embeddings=is_tied, dtype="bfloat16"))
        tensors = tensors_of(folder)
        assert ("lm_head.weight" in tensors) is not is_tied
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_every_preset_names_a_model_its_family_can_have():
    for name, preset in PRESETS.items():
        model_type, fields_of = FAMILIES[preset.family]
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields_of(preset)))
        count = sum(parameter.numel() for parameter in model.parameters())
        low, high = {"tiny": (1e5, 3e5), "0.4m": (3.5e5, 4.5e5), "demo": (1e7, 2e7), "0.6b-shape": (5.5e8, 6.5e8)}[name]
        assert low < count < high, (name, count)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"family": "gpt9"}, "family: got 'gpt9', expected one of qwen3"),
        ({"kv_heads": 3}, "kv_heads: got 3"),
        ({"layers": 0}, "layers: got 0"),
        ({"vocab_size": 100}, "vocab_size: got 100"),
    ],
)
def test_impossible_recipes_are_named(tmp_path, fields, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        make_model(tmp_path / "m", recipe(**fields))


def test_a_full_folder_is_left_alone(tmp_path):
    (tmp_path / "precious").write_text("x")
    with pytest.raises(ValueError, match="empty or absent"):
        make_model(tmp_path, recipe())
    assert [file.name for file in tmp_path.iterdir()] == ["precious"]


# -- the tokenizer


@given(st.text(max_size=60))
@settings(max_examples=examples(200), deadline=None)
def test_any_text_survives(text):
    import unicodedata

    tokenizer = TOKENIZERS[VOCAB_SIZE]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)


TOKENIZERS = {size: build_tokenizer(size) for size in (265, 1024, VOCAB_SIZE)}


def test_smaller_vocabularies_are_prefixes():
    for size, tokenizer in TOKENIZERS.items():
        assert tokenizer.get_vocab_size() == size
        assert max(tokenizer.get_vocab().values()) == size - 1
    text = "def encode(self, text: str) -> list[int]: the cache of the router"
    lengths = [len(TOKENIZERS[size].encode(text).ids) for size in TOKENIZERS]
    assert lengths[0] > lengths[1] > lengths[2]


def test_conversations_may_be_cut_and_the_tokenizer_equals_transformers(tmp_path):
    folder = make_model(tmp_path / "m", recipe(vocab_size=5000))
    our_tokenizer, hf_tokenizer = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert our_tokenizer.cut_tokens.texts >= {"<|im_start|>", "<|im_end|>"}
    assert our_tokenizer.vocab_size == VOCAB_SIZE  # the embedding has more rows, as those of real models do
    assert our_tokenizer.eos_token_ids == (
        our_tokenizer.token_to_id("<|im_end|>"),
        our_tokenizer.token_to_id("<|endoftext|>"),
    )
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}]
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "Hello <|im_end|> there"},
        {"role": "assistant", "content": "x", "tool_calls": calls},
        {"role": "tool", "content": "y"},
        {"role": "system", "content": "later"},
    ]
    for fields in ({}, {"tools": tools}):
        request = parse_chat(json.dumps({"messages": messages, **fields}).encode())
        want = hf_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **fields)
        assert our_tokenizer.encode_chat(request) == want
    assert our_tokenizer.chat_template.select_source() == CHAT_TEMPLATE


# -- the cache folder


def test_the_builtin_model_is_made_once_by_whoever_comes_first(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ThreadPoolExecutor(3) as pool:
        folders = set(pool.map(lambda _: cached_model(recipe(layers=1)), range(3)))
    assert len(folders) == 1
    assert [path.name for path in (tmp_path / "blockcast" / "models").iterdir()] == [folders.pop().name]
    monkeypatch.setattr(tiny_model, "make_model", lambda *_: pytest.fail("made again"))
    assert cached_model(recipe(layers=1)).is_dir()


def test_other_recipes_and_broken_attempts_do_not_collide(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cached_model(recipe(layers=1)) != cached_model(recipe(layers=1, seed=3))
    with pytest.raises(ValueError, match="kv_heads"):
        cached_model(recipe(kv_heads=3))
    assert len(list((tmp_path / "blockcast" / "models").iterdir())) == 2
    assert Tokenizer.load(cached_model(Recipe())).chat_template is not None


@pytest.mark.slow
def test_the_script(tmp_path):
    out = tmp_path / "m"
    args = ["--family", "llama", "--layers", "1", "--hidden-size", "32", "--head-dim", "8", "--max-shard-size", "50KB"]
    process = subprocess.run([sys.executable, SCRIPT, *args, str(out)], capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    assert json.loads((out / "config.json").read_text())["hidden_size"] == 32
    bad = subprocess.run([sys.executable, SCRIPT, "--heads", "3", str(out) + "2"], capture_output=True, timeout=120)
    assert bad.returncode == 1
    assert b"kv_heads: got 2, expected a divisor of heads (3)" in bad.stderr


def test_a_recipe_is_a_value():
    assert Recipe() == PRESETS["tiny"]
