"""Loading checkpoints' tokenizers: ids equal to transformers', and one clear error for what cannot be loaded."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import pytest
from budget import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from prompts import ChatTemplate, RequestError, Tokenizer, TokenizerError, parse_chat, parse_completion, parse_routing

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{{ bos_token }}"
TEXTS = [
    "",
    " ",
    "Hello  world\n\n",
    "<|im_start|>user\nDon't panic: 1234 ﬁn é<|im_end|>\n<|im_start|>assistant\n",
    "text<|endoftext|><|endoftext|> 日本語 🙂 <think>x</think>",
]


@pytest.fixture
def checkpoint(tmp_path, make_tokenizer):
    """Write a checkpoint folder: `checkpoint(kind, config, **files)`."""

    def write(kind="qwen", config=None, **files):
        make_tokenizer(kind).save(str(tmp_path / "tokenizer.json"))
        base = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
        files = {"tokenizer_config": base | (config or {}), **files}
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
        return tmp_path

    return write


def same_ids(folder, texts=TEXTS):
    ours, hf_tokenizer = Tokenizer.load(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for text in texts:
        for special in (True, False):
            want = hf_tokenizer.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == want, (text, special)
            for skip in (True, False):
                assert ours.decode(want, skip_special_tokens=skip) == hf_tokenizer.decode(
                    want, skip_special_tokens=skip
                )
    return ours, hf_tokenizer


def test_every_kind_agrees_with_transformers(checkpoint, kind):
    same_ids(checkpoint(kind))


@pytest.mark.parametrize("flags", [{"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}])
@pytest.mark.parametrize("kind_", ["llama3", "metaspace_first", "word_piece"])
def test_bos_comes_from_the_post_processor_alone(checkpoint, kind_, flags):
    ours, _ = same_ids(checkpoint(kind_, {"bos_token": "<|endoftext|>", **flags}))
    has_bos, bos_token_id = kind_ == "llama3", ours.token_to_id("<|endoftext|>")
    assert (ours.encode("x")[0] == bos_token_id) == has_bos
    assert (ours.encode_completion(parse_completion(b'{"prompt": "x"}'))[0][0] == bos_token_id) == has_bos
    bare = parse_completion(b'{"prompt": "x", "add_special_tokens": false}')
    assert bos_token_id not in ours.encode_completion(bare)[0]


def test_tokens_that_only_the_config_names(checkpoint):
    decoder = {
        "9000": {"content": "<from_config>", "lstrip": False, "normalized": False, "rstrip": True, "special": True},
        "9001": {"content": "<plain>", "lstrip": False, "normalized": False, "rstrip": False, "special": False},
    }
    folder = checkpoint(
        config={"added_tokens_decoder": decoder, "pad_token": "<pad>", "additional_special_tokens": ["<extra>"]}
    )
    same_ids(folder, [*TEXTS, "a<from_config>  b<plain> c<pad><extra>d"])


def test_special_tokens_map(checkpoint):
    special = {"eos_token": {"content": "<stop>", "lstrip": True, "normalized": False, "rstrip": False}}
    folder = checkpoint(config={"eos_token": None}, special_tokens_map=special | {"unk_token": "<unk>"})
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    ours, hf_tokenizer = same_ids(folder, [*TEXTS, "a  <stop>b<unk>"])
    assert ours.eos_token_ids == (hf_tokenizer.eos_token_id,)


@pytest.mark.parametrize("kind_", ["qwen", "llama3", "metaspace_first", "unigram", "word_piece", "phi_rstrip"])
def test_chat_ids_equal_apply_chat_template(checkpoint, kind_):
    config = {"bos_token": "<|endoftext|>", "add_bos_token": True, "chat_template": TEMPLATE}
    folder = checkpoint(kind_, config)
    ours, hf_tokenizer = Tokenizer.load(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    messages = [{"role": r, "content": t} for r, t in zip(["system", "user", "assistant", "user", "tool"], TEXTS)]
    for count in range(1, len(messages) + 1):
        request = parse_chat(json.dumps({"messages": messages[:count]}).encode())
        want = hf_tokenizer.apply_chat_template(messages[:count], add_generation_prompt=True, return_dict=False)
        assert ours.encode_chat(request) == want
    with_special = parse_chat(json.dumps({"messages": messages, "add_special_tokens": True}).encode())
    assert ours.encode_chat(with_special) == hf_tokenizer.encode(ours.render_chat_text(with_special))


def test_where_the_chat_template_comes_from(checkpoint, tmp_path):
    templates = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    folder = checkpoint(config={"chat_template": templates}, chat_template={"chat_template": "from chat_template.json"})
    chat = [{"role": "user", "content": "x"}]
    assert Tokenizer.load(folder).chat_template.render(chat, tools=[]) == "T"
    (folder / "chat_template.jinja").write_text("from jinja")
    assert Tokenizer.load(folder).chat_template.render(chat) == "from jinja"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert Tokenizer.load(folder).chat_template.replace("rag").render(chat) == "R"
    assert PreTrainedTokenizerFast.from_pretrained(folder).get_chat_template("rag") == "R"
    assert Tokenizer.load(folder, chat_template="{{ 1 }}").chat_template.render(chat) == "1"
    (tmp_path / "mine.jinja").write_text("mine")
    assert Tokenizer.load(folder, chat_template=str(tmp_path / "mine.jinja")).chat_template.render(chat) == "mine"
    (folder / "chat_template.jinja").unlink()
    (folder / "additional_chat_templates" / "rag.jinja").unlink()
    checkpoint(chat_template={"chat_template": "from chat_template.json"})
    assert Tokenizer.load(folder).chat_template.render(chat) == "from chat_template.json"


def test_a_model_without_a_template_says_so(checkpoint):
    tokenizer = Tokenizer.load(checkpoint())
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.encode_chat(parse_chat(b'{"messages": [{"role": "user", "content": "x"}]}'))


def test_eos_ids_come_from_tokenizer_and_generation_config(checkpoint):
    folder = checkpoint(generation_config={"eos_token_id": [3, 5]}, config_={})
    own_eos_id = Tokenizer.load(folder).token_to_id("<|im_end|>")
    assert Tokenizer.load(folder).eos_token_ids == (own_eos_id, 3, 5)
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text('{"text_config": {"eos_token_id": 7}}')
    assert Tokenizer.load(folder).eos_token_ids == (own_eos_id, 7)


def test_prompt_forms(checkpoint):
    tokenizer = Tokenizer.load(checkpoint())
    first_ids, second_ids = tokenizer.encode("one"), tokenizer.encode("two")

    def ids(prompt):
        return tokenizer.encode_completion(parse_completion(json.dumps({"prompt": prompt}).encode()))

    assert ids("one") == [first_ids]
    assert ids(["one", "two"]) == [first_ids, second_ids]
    assert ids([5, 6]) == [[5, 6]]
    assert ids([[5], [6, 7]]) == [[5], [6, 7]]
    with pytest.raises(RequestError, match=r"prompt\[1\]: got \d+, expected a token id in"):
        ids([1, tokenizer.vocab_size])
    with pytest.raises(RequestError, match=r"prompt\[1\]\[0\]"):
        ids([[1], [10**6]])


def test_lookups_and_decoding(checkpoint):
    tokenizer = Tokenizer.load(checkpoint())
    assert tokenizer.id_to_token(tokenizer.token_to_id("<think>")) == "<think>"
    assert tokenizer.id_to_token(10**6) is None
    assert tokenizer.token_to_id("<think>") == tokenizer.vocab_size - 3
    assert tokenizer.token_to_id("<think>") not in tokenizer.special_ids
    assert tokenizer.token_to_id("<|im_end|>") in tokenizer.special_ids
    assert tokenizer.decode(tokenizer.encode("a🙂")[:-1]).endswith("\ufffd")
    assert tokenizer.decode([10**6]) == ""


def test_truncation_and_padding_in_the_file_are_off(checkpoint, make_tokenizer):
    folder = checkpoint()
    tok = make_tokenizer("qwen")
    tok.enable_truncation(4)
    tok.enable_padding(length=8)
    tok.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.load(folder)
    assert len(tokenizer.encode("a b c d e f g h i j")) > 8
    assert len(tokenizer.encode("a")) == 1


def test_without_the_fast_encoder_ids_are_the_same(checkpoint):
    folder = checkpoint()
    plain, fast = Tokenizer.load(folder, with_fast_encoder=False), Tokenizer.load(folder)
    assert plain._fast_tokenizer is None
    assert fast._fast_tokenizer is not None
    assert [plain.encode(t) for t in TEXTS] == [fast.encode(t) for t in TEXTS]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.model": ""}, "tokenizer.model but no tokenizer.json"),
        ({"x.gguf": ""}, "x.gguf but no tokenizer.json"),
        ({"tokenizer.json": "{"}, "tokenizer.json: "),
        ({"tokenizer.json": '{"model": {"type": "Nonesuch"}}'}, "tokenizer.json: "),
        ({"tokenizer.json": None, "tokenizer_config.json": "[1]"}, "tokenizer_config.json: expected a JSON object"),
        ({"tokenizer.json": None, "tokenizer_config.json": "{"}, "tokenizer_config.json: "),
        ({"tokenizer.json": None, "tokenizer_config.json": '{"chat_template": "{% if %}"}'}, "chat template, line 1"),
        ({"tokenizer.json": None, "tokenizer_config.json": '{"chat_template": 3}'}, "chat_template: got int"),
        ({"tokenizer.json": None, "tokenizer_config.json": '{"chat_template": [{"name": "x"}]}'}, "chat_template"),
        ({"tokenizer.json": None, "tokenizer_config.json": '{"added_tokens_decoder": {"x": 3}}'}, "added_tokens"),
        ({"tokenizer.json": None, "chat_template.jinja": b"\xff"}, "chat_template.jinja"),
        ({"tokenizer.json": None, "generation_config.json": "no"}, "generation_config.json"),
    ],
)
def test_what_cannot_be_loaded_is_one_clear_error(tmp_path, make_tokenizer, files, message):
    for name, content in files.items():
        if content is None:
            make_tokenizer("qwen").save(str(tmp_path / name))
        else:
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TokenizerError) as error_info:
        Tokenizer.load(tmp_path)
    assert message in str(error_info.value)
    assert str(tmp_path) in str(error_info.value)


def test_a_missing_folder_and_a_missing_template_file(checkpoint, tmp_path):
    with pytest.raises(TokenizerError, match="no such folder"):
        Tokenizer.load(tmp_path / "absent")
    with pytest.raises(TokenizerError, match="expected a template or a file with one"):
        Tokenizer.load(checkpoint(), chat_template="absent.jinja")


def test_a_lone_surrogate_is_the_clients_error(checkpoint):
    tokenizer = Tokenizer.load(checkpoint())
    with pytest.raises(RequestError, match="UTF-8"):
        tokenizer.encode("a\ud800b")


def test_encoding_releases_the_gil(checkpoint):
    """Another thread runs Python while a long text is encoded."""
    tokenizer = Tokenizer.load(checkpoint(), with_fast_encoder=False)
    text = "The quick brown fox jumps over the lazy dog. " * 20_000
    finished_event, ticks = threading.Event(), []

    def encode():
        tokenizer.encode(text)
        finished_event.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not finished_event.is_set():
        ticks.append(None)
        time.sleep(0)
    thread.join()
    assert len(ticks) > 100  # holding the GIL would allow a handful


def test_template_object_is_reachable(checkpoint):
    assert isinstance(Tokenizer.load(checkpoint(config={"chat_template": "x"})).chat_template, ChatTemplate)


@given(data=st.data())
@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_engine_and_router_get_identical_ids(both_sides, data):
    """Any body that the engine accepts gives the same ids through the router's lenient view."""
    text = st.text(st.sampled_from("ab <|im_end|>\n\u00e9\U0001f642{}'\""), max_size=12)
    part = st.builds(lambda t: {"type": "text", "text": t}, text)
    call = st.builds(lambda t: {"type": "function", "function": {"name": "f", "arguments": json.dumps({"a": t})}}, text)
    message = st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "tool"]),
            "content": text | st.lists(part, max_size=3),
        },
        optional={"tool_calls": st.lists(call, max_size=2), "reasoning_content": text, "name": text, "other": text},
    )
    body = data.draw(
        st.fixed_dictionaries(
            {"messages": st.lists(message, min_size=1, max_size=5)},
            optional={
                "tools": st.lists(st.builds(lambda t: {"type": "function", "function": {"name": "g" + t}}, text)),
                "add_generation_prompt": st.booleans(),
                "add_special_tokens": st.booleans(),
                "chat_template_kwargs": st.just({"enable_thinking": False}),
                "reasoning_effort": st.just("low"),
                "temperature": st.just(0.5),
            },
        )
    )
    engine_side, router_side = both_sides
    raw = json.dumps(body).encode()
    assert engine_side.encode_chat(parse_chat(raw)) == router_side.encode_chat(
        parse_routing("/v1/chat/completions", raw)
    )


@pytest.fixture
def both_sides(checkpoint):
    template_source = "{% for m in messages %}<|im_start|>{{ m | tojson }}<|im_end|>{% endfor %}"
    template = (
        template_source + "{{ tools | tojson }}{{ add_generation_prompt }}{{ enable_thinking }}{{ reasoning_effort }}"
    )
    folder = checkpoint("llama3", {"chat_template": template})
    return Tokenizer.load(folder, with_fast_encoder=False), Tokenizer.load(folder)


def test_prompts_import_neither_torch_nor_transformers():
    code = (
        "import sys, prompts; print(sorted({'torch', 'transformers', 'numpy', 'engine', 'router'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
