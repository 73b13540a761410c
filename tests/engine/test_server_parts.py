"""The pure parts of the server: frames, merged outputs, choices, parameters, histograms, the command line."""

from __future__ import annotations

import logging
import re
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from budget import examples
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.cli import parse_config, repeat_name_flag, serve_command
from engine.config import EngineConfig, is_loopback, make_default_kv_events
from engine.core_messages import FrameReader, encode_frame
from engine.http import server
from engine.http.metrics import Histogram
from engine.http.server import RequestLog
from engine.output.choice import Choice
from engine.output.detokenizer import DetokenizerFactory
from engine.process.client import merge_outputs
from engine.protocol.params import ModelLimits, make_sampling_params
from engine.types import FinishReason, SamplingParams, SequenceOutput, TokenLogprobs
from options import ConfigError
from options.entry import find_import_problem
from prompts import RequestError, parse_chat, parse_completion

ROOT = Path(__file__).resolve().parents[2]
LIMITS = ModelLimits(max_model_len=100, vocab_size=50, default_sampling={"temperature": 0.6, "top_k": 20})


def make_factory() -> DetokenizerFactory:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["abcabcabd ab cd 🙂 é"] * 5, trainer)
    return DetokenizerFactory(tokenizer)


FACTORY = make_factory()


# ---------------------------------------------------------------- frames and merging


@given(payloads=st.lists(st.binary(max_size=30)), cuts=st.lists(st.integers(1, 20)))
def test_frames_survive_any_cutting(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(encode_frame(payload) for payload in payloads)
    reader, frames = FrameReader(), []
    for cut in [*cuts, len(stream)]:
        piece, stream = stream[:cut], stream[cut:]
        frames += list(reader.feed(piece))
    assert frames == payloads


def split_outputs(ids: list[int], cuts: list[int], finish: FinishReason) -> list[SequenceOutput]:
    """As the core gives them: none is empty."""
    outputs, start = [], 0
    for cut in [*cuts, len(ids)]:
        end = min(len(ids), start + cut)
        if start == end:
            break
        scores = [TokenLogprobs.pack(token_id, -1.0, 1, []) for token_id in ids[start:end]]
        outputs.append(SequenceOutput(request_id="r", token_ids=ids[start:end], logprobs=scores))
        start = end
    outputs[0].cached_tokens = 3
    outputs[-1].finish_reason = finish
    return outputs


@given(ids=st.lists(st.integers(0, 9), min_size=1), cuts=st.lists(st.integers(1, 3), max_size=8))
def test_merged_outputs_say_the_same(ids: list[int], cuts: list[int]) -> None:
    outputs = split_outputs(ids, cuts, FinishReason.LENGTH)
    merged_output = outputs[0]
    for output in outputs[1:]:
        merged_output = merge_outputs(merged_output, output)
    assert merged_output.token_ids == ids
    assert [entry.token_id for entry in merged_output.logprobs or []] == ids
    assert (merged_output.cached_tokens, merged_output.finish_reason) == (3, FinishReason.LENGTH)


# ---------------------------------------------------------------- choices


@settings(max_examples=examples(300), deadline=None)
@given(
    ids=st.lists(st.integers(0, 280), min_size=1, max_size=25),
    cuts=st.lists(st.integers(1, 4), max_size=25),
    stops=st.lists(st.text("abcd é", min_size=1, max_size=3), max_size=2),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
    finish=st.sampled_from([FinishReason.LENGTH, FinishReason.STOP]),
)
def test_a_choice_does_not_depend_on_how_its_tokens_arrive(
    ids: list[int], cuts: list[int], stops: list[str], include: bool, min_tokens: int, finish: FinishReason
) -> None:
    params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include, min_tokens=min_tokens)

    def run(outputs: list[SequenceOutput]) -> tuple[Any, ...]:
        choice = Choice(0, params, FACTORY, keeps_text=True)
        for output in outputs:
            choice.push(output)
            if choice.finish_reason is not None:
                break
        return choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason, choice.completion_tokens

    one_by_one = run(split_outputs(ids, [1] * (len(ids) - 1), finish))
    assert run(split_outputs(ids, cuts, finish)) == one_by_one
    text, token_ids, reason, stop, count = one_by_one
    assert count == len(token_ids)
    if stop is None:
        assert reason == ("stop" if finish is FinishReason.STOP else "length")
        text_ids = ids[:-1] if finish is not FinishReason.LENGTH and not include else ids
        assert text == FACTORY._tokenizer.decode(text_ids)
        assert token_ids == ids
    else:
        assert stop in stops
        assert not include or text.endswith(stop)


def test_a_stop_token_is_counted_and_not_spoken() -> None:
    choice = Choice(0, SamplingParams(stop_token_ids=(5,)), FACTORY, keeps_text=True)
    piece = choice.push(
        SequenceOutput(request_id="r", token_ids=[70, 5], finish_reason=FinishReason.STOP, stop_token_id=5)
    )
    assert (piece.finish_reason, piece.stop_reason, choice.completion_tokens) == ("stop", 5, 2)
    assert choice.text == FACTORY._tokenizer.decode([70])


def test_a_stop_string_may_begin_within_min_tokens() -> None:
    ids = FACTORY._tokenizer.encode("xyz").ids
    assert len(ids) == 3
    choice = Choice(0, SamplingParams(stop=("yz",), min_tokens=2), FACTORY, keeps_text=True)
    choice.push(SequenceOutput(request_id="r", token_ids=ids))
    assert (choice.text, choice.stop_reason) == ("x", "yz")


# ---------------------------------------------------------------- parameters


def test_defaults_come_from_the_model_then_the_engine() -> None:
    params = make_sampling_params(parse_chat(b'{"messages": [{"role": "user", "content": "x"}]}'), LIMITS, 10)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 20, 90)
    params = make_sampling_params(parse_completion(b'{"prompt": "x", "top_k": -1, "temperature": 0}'), LIMITS, 10)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.0, 0, 16)
    params = make_sampling_params(parse_completion(b'{"prompt": "x"}'), LIMITS, 95)
    assert params.max_tokens == 5
    params = make_sampling_params(parse_completion(b'{"prompt": "x", "max_tokens": 91}'), LIMITS, 10)
    assert params.max_tokens == 90, "what fits, as vLLM answers"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": "x", "logprobs": 21}', "logprobs"),
        (b'{"prompt": "x", "logit_bias": {"50": 1}}', "logit_bias"),
        (b'{"prompt": "x", "min_tokens": 17}', "min_tokens"),
        (b'{"prompt": "x", "n": 2, "temperature": 0}', "n"),
        (b'{"prompt": "x", "stop": ["a"' + b', "a"' * 64 + b"]}", "stop"),
    ],
)
def test_what_the_model_cannot_do_is_named(body: bytes, param: str) -> None:
    with pytest.raises(RequestError) as error_info:
        make_sampling_params(parse_completion(body), LIMITS, 10)
    assert error_info.value.param == param
    assert error_info.value.status == 400


# ---------------------------------------------------------------- metrics


@given(values=st.lists(st.floats(0, 100, allow_nan=False)))
def test_histogram_buckets_are_prometheus_buckets(values: list[float]) -> None:
    histogram = Histogram((0.5, 1.0, 10.0))
    for value in values:
        histogram.observe(value)
    expected = [(str(bound), sum(v <= bound for v in values)) for bound in (0.5, 1.0, 10.0)]
    assert histogram.buckets() == [*expected, ("+Inf", len(values))]


# ---------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("given_args", "expected"),
    [
        ("serve M --served-model-name a b --port 1", "serve M --served-model-name a --served-model-name b --port 1"),
        ("serve --served-model-name a M", "serve --served-model-name a M"),
        ("serve M --port 1 --served-model-name a", "serve M --port 1 --served-model-name a"),
    ],
)
def test_vllms_way_to_give_several_names(given_args: str, expected: str) -> None:
    assert repeat_name_flag(given_args.split()) == expected.split()


def parse_args(*args: str) -> Any:
    context = serve_command.make_context("serve", list(args))
    config = parse_config(dict(context.params))
    return config.engine, config.server


def test_flags_become_configs() -> None:
    engine, server = parse_args(
        "M", "--dtype", "bfloat16", "--max-model-len", "64", "--no-enable-prefix-caching", "--api-key", "k", "--port",
        "0", "--max-queue", "0", "--kv-events-config", '{"enable_kv_cache_events": true, "topic": "t"}',
    )  # fmt: skip
    assert (engine.model, engine.dtype, engine.max_model_len) == ("M", "bfloat16", 64)
    assert not engine.enable_prefix_caching
    assert engine.kv_events.topic == "t"
    assert engine.kv_events.endpoint == "tcp://*:5557"
    assert (server.api_keys, server.port, server.max_queue) == (("k",), 0, 0)


def test_events_are_on_by_default_and_stay_on_the_apis_interface() -> None:
    assert make_default_kv_events("127.0.0.1").endpoint == "tcp://127.0.0.1:*"
    assert make_default_kv_events("0.0.0.0").endpoint == "tcp://*:*"
    assert make_default_kv_events("localhost").endpoint == "tcp://127.0.0.1:*"
    assert make_default_kv_events("127.0.0.2").endpoint == "tcp://127.0.0.2:*"
    assert make_default_kv_events("::1").endpoint == "tcp://[::1]:*"
    assert make_default_kv_events("::").replay_endpoint == "tcp://[::]:*"
    assert parse_args()[0].kv_events.is_enabled
    assert not parse_args("--kv-events-config", '{"enable_kv_cache_events": false}')[0].kv_events.is_enabled
    assert [is_loopback(host) for host in ("localhost", "::1", "127.0.0.9", "0.0.0.0", "gpu1")] == [True] * 3 + [
        False
    ] * 2


@pytest.mark.parametrize("field", ["max_model_len", "block_size", "max_num_seqs", "num_gpu_blocks_override"])
def test_sizes_are_positive(field: str) -> None:
    with pytest.raises(ConfigError, match=field.replace("_", "-")):
        EngineConfig(**{field: 0})


def test_a_shadowed_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_import_problem(("options", "events")) is None
    foreign = tmp_path / "events" / "__init__.py"
    foreign.parent.mkdir()
    foreign.write_text("")
    monkeypatch.setattr(sys, "meta_path", [BuiltinImporter, FrozenImporter, PathFinder])
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(ROOT)])
    monkeypatch.delitem(sys.modules, "events")
    problem = find_import_problem(("options", "events"))
    assert problem is not None
    assert str(foreign) in problem
    assert str(ROOT / "events") in problem


def test_a_package_that_a_module_without_a_spec_hides_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old tools make the module of a namespace package when Python starts, without saying where it is."""
    monkeypatch.setitem(sys.modules, "events", ModuleType("events"))
    problem = find_import_problem(("options", "events"))
    assert problem is not None
    assert problem.startswith("the package `events` cannot be imported: events.__spec__ is None; expected")


def test_a_package_that_another_distribution_overwrote_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place: same folder, same name, another's words. Every package of ours has the mark."""
    settings = (ROOT / "pyproject.toml").read_text()
    names = re.search(r"^wheel.packages = \[(.*)\]$", settings, re.MULTILINE)
    assert names is not None
    packages = tuple(name.strip(' "') for name in names[1].split(","))
    for package in packages:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text((ROOT / package / "__init__.py").read_text())
    monkeypatch.setattr("options.entry.__file__", str(tmp_path / "options" / "entry.py"))
    monkeypatch.setattr(sys, "meta_path", [BuiltinImporter, FrozenImporter, PathFinder])
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for package in packages:
        monkeypatch.delitem(sys.modules, package, raising=False)
    assert find_import_problem(packages) is None
    (tmp_path / "kernels" / "__init__.py").write_text("# Kernels from a hub.")
    problem = find_import_problem(packages)
    assert problem is not None
    assert f"the package `kernels` was overwritten: {tmp_path / 'kernels' / '__init__.py'} is another" in problem


# ---------------------------------------------------------------- the request log, models that are missing


@pytest.mark.parametrize(
    ("path", "status", "is_logged"),
    [
        ("/health", 200, False), ("/metrics", 200, False), ("/v1/models", 200, False), ("/health?probe=1", 200, False),
        ("/health", 503, True), ("/v1/chat/completions", 200, True), ("/tokenize", 200, True),
        ("/v1/models/a", 404, True),
    ],
)  # fmt: skip
def test_probes_that_succeed_stay_out_of_the_request_log(
    path: str, status: int, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    logger = RequestLog(logging.getLogger("engine.access"), "%r %s")
    logger.log(make_mocked_request("GET", path), web.Response(status=status), 0.1)
    assert [path in line for line in caplog.messages] == [True] * is_logged


def test_a_missing_model_is_told_before_a_process_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(server, "serve", lambda *_: pytest.fail("started"))
    for args, message in (
        (["nosuchmodel"], "MODEL 'nosuchmodel': no such folder"),
        (["nosuchmodel", "--simulate", "h100:llama-3.1-8b"], "MODEL 'nosuchmodel': no such folder"),
        ([str(tmp_path)], "has no config.json"),
        (["./a/b"], "no such folder"),
    ):
        result = CliRunner().invoke(serve_command, args)
        assert result.exit_code == 1, args
        assert message in result.output
        assert "Error: " in result.output
