"""The offline engine: forms of prompts, shapes of results, agreement with itself across batches."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from typing import Any

import numpy
import pytest

from engine import LLM, SamplingParams, StructuredOutputsParams
from options import ConfigError
from prompts import RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=512, num_gpu_blocks_override=256) as llm:
        yield llm


def test_results_come_in_the_prompts_order_and_do_not_depend_on_the_batch(llm: LLM) -> None:
    prompts = [f"prompt number {i} " * (i + 1) for i in range(6)]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    single_results = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts]
    assert [result.prompt for result in together] == prompts
    assert [result.outputs[0].token_ids for result in together] == [
        result.outputs[0].token_ids for result in single_results
    ]
    assert single_results[5].num_cached_tokens > 0


def test_all_forms_of_one_prompt(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("the same prompt")
    forms: list[Any] = [
        "the same prompt", ids, [ids], {"prompt": "the same prompt"}, [{"prompt_token_ids": ids}], numpy.array(ids),
        {"prompt": "the same prompt", "multi_modal_data": None},
    ]  # fmt: skip
    texts = {llm.generate(form, GREEDY, use_tqdm=False)[0].outputs[0].text for form in forms}
    assert len(texts) == 1


def test_samples_seeds_and_logprobs(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    first = llm.generate("sample me", params, use_tqdm=False)[0]
    second = llm.generate("sample me", params, use_tqdm=False)[0]
    assert [sample.token_ids for sample in first.outputs] == [sample.token_ids for sample in second.outputs]
    assert len({tuple(sample.token_ids) for sample in first.outputs}) == 3
    for output in first.outputs:
        assert output.logprobs is not None
        assert output.cumulative_logprob is not None
        assert len(output.logprobs) == 6
        assert all(token_id in entry for token_id, entry in zip(output.token_ids, output.logprobs))
        assert output.finish_reason == "length"
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == len(first.prompt_token_ids)
    assert first.prompt_logprobs[0] is None


def test_a_stop_string_ends_the_text(llm: LLM) -> None:
    full_text = llm.generate("stop me", GREEDY, use_tqdm=False)[0].outputs[0].text
    stop: Any = full_text[4:8]  # a plain string, as users write it
    output = llm.generate("stop me", SamplingParams(temperature=0, max_tokens=12, stop=stop), use_tqdm=False)[0]
    assert output.outputs[0].text == full_text[: full_text.index(stop)]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == stop
    assert not llm._core.has_work


def test_chat_is_the_template_rendered(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (chat_result,) = llm.chat(messages, GREEDY)
    assert "Processed prompts" in capsys.readouterr().err
    two = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert [result.outputs[0].text for result in two] == [chat_result.outputs[0].text] * 2
    assert chat_result.prompt is not None
    assert "hello" in chat_result.prompt
    (other_result,) = llm.chat(messages, GREEDY, use_tqdm=False, chat_template="said: {{ messages[0].content }}")
    assert other_result.prompt == "said: hello"
    with pytest.raises(RequestError, match="chat template"):
        llm.chat(messages, GREEDY, chat_template="{% if %}")


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ([1, 2, 3] * 200, GREEDY, "600 tokens"),
        ("x", SamplingParams(temperature=-1), "temperature"),
        ("x", SamplingParams(top_p=0), "top_p"),
        ("x", SamplingParams(stop=("",)), "stop"),
        ("x", SamplingParams(logit_bias={10**9: 1.0}), "logit_bias"),
        ([], GREEDY, ""),
        ([[]], GREEDY, "no tokens"),
        (b"bytes", GREEDY, "got bytes"),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, GREEDY, "multi_modal_data"),
    ],
)
def test_wrong_input_is_named_and_leaves_nothing(llm: LLM, prompt: Any, params: SamplingParams, says: str) -> None:
    if prompt == []:
        assert llm.generate(prompt, params, use_tqdm=False) == []
        return
    with pytest.raises(RequestError, match=says):
        llm.generate(["fine", prompt] if prompt != [[]] else prompt, params, use_tqdm=False)
    assert not llm._core.has_work


def test_ctrl_c_ends_the_call_and_not_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook the kernel goes on, with the model that was loaded."""
    expected = llm.generate("the next prompt", GREEDY, use_tqdm=False)[0].outputs[0].text
    apply, handler = llm._core.scheduler.apply, signal.default_int_handler

    def interrupt_then_apply(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return apply(*arguments)

    earlier_handler = signal.signal(signal.SIGINT, handler)  # a job in the background ignores the signal
    try:
        with monkeypatch.context() as patch:
            patch.setattr(llm._core.scheduler, "apply", interrupt_then_apply)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["interrupted"] * 3, GREEDY, use_tqdm=False)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, earlier_handler)
    assert not llm._core.has_work
    assert llm.generate("the next prompt", GREEDY, use_tqdm=False)[0].outputs[0].text == expected


def test_a_closed_engine_says_so() -> None:
    llm = LLM(max_model_len=64)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("x", GREEDY, use_tqdm=False)


def test_blocks_do_not_move_without_a_server() -> None:
    with pytest.raises(ConfigError, match="only `engine serve` moves blocks"):
        LLM(kv_transfer={"port": 0})


def test_unknown_settings_are_named() -> None:
    with pytest.raises(TypeError, match="max_model_length"):
        LLM(max_model_length=5)


def test_answers_match_what_is_asked_for(llm: LLM) -> None:
    fields = {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 9}}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    formats: list[Any] = [
        StructuredOutputsParams(json=schema),
        {"regex": "[a-c]{3}-[0-9]{2}"},
        StructuredOutputsParams(choice=["yes", "no"]),
        StructuredOutputsParams(grammar='root ::= "x" [0-9] "x"'),
        None,
    ]
    params = [SamplingParams(max_tokens=100, seed=7, structured_outputs=item) for item in formats]
    texts = [item.outputs[0].text for item in llm.generate(["a pet"] * len(formats), params, use_tqdm=False)]
    assert json.loads(texts[0])["kind"] in ("cat", "dog")
    assert re.fullmatch("[a-c]{3}-[0-9]{2}", texts[1])
    assert texts[2] in ("yes", "no")
    assert re.fullmatch("x[0-9]x", texts[3])
    assert texts[4] not in texts[:4]


@pytest.mark.parametrize("wrong", [{"regex": "("}, {"json": {"type": "nothing"}}, {"regex": "a", "choice": ["b"]}, {}])
def test_what_cannot_be_matched_is_refused_before_anything_is_computed(llm: LLM, wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="structured_outputs"):
        llm.generate("a", SamplingParams(structured_outputs=StructuredOutputsParams(**wrong)), use_tqdm=False)
