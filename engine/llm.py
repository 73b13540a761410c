"""Offline use: the engine in this process, prompts in, finished texts out, with the names and types of vLLM's `LLM`.

    from engine import LLM, SamplingParams
    outputs = LLM("folder/of/a/checkpoint").generate(["Hello"], SamplingParams(temperature=0, max_tokens=32))

Owns the forms of prompts, the progress bar and the results. Everything else is the server's code. Not thread-safe.
"""

from __future__ import annotations

import itertools
import operator
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from numbers import Integral
from typing import Any

import msgspec
from tqdm import tqdm

from engine.assembly import AssembledEngine, assemble, locate_model_files
from engine.config import EngineConfig
from engine.output.choice import Choice
from engine.output.detokenizer import DetokenizerFactory
from engine.protocol.generation import make_sample_requests
from engine.protocol.params import ModelLimits, check_params, check_prompt, fit_max_tokens
from engine.protocol.parsed_request import build_constraint
from engine.structured_output.constraint_check import check_constraint
from engine.types import Constraint, Request, SamplingParams, SequenceOutput, TokenLogprobs
from events.config import KVEventsConfig
from options import ConfigError, Schema, load_config
from prompts import ChatRequest, CompletionRequest, RequestError, Tokenizer, field_error
from prompts.chat_completions import Int64, Salt
from prompts.chat_rendering import render_chat
from prompts.chat_template import ChatTemplateError

PROMPT_KEYS = frozenset(("prompt", "prompt_token_ids", "cache_salt"))
Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's {"prompt": text} / {"prompt_token_ids": ids}, either with "cache_salt"."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """Logprob of one token at one position."""

    logprob: float
    rank: int
    decoded_token: str


Logprobs = dict[int, Logprob]
"""Token id -> logprob, at one position: of its own token and of the likeliest others."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of the answer to a prompt, with vLLM's field names."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[Logprobs] | None
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Answers to one prompt, one for each sample, with vLLM's field names."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    finished: bool = True


@dataclass(slots=True)
class _PromptJob:
    """A prompt while it is answered, with its requests, one for each of the `n` samples that the caller wants."""

    text: str | None
    """Text of the prompt; None if the caller gave token ids."""
    token_ids: list[int]
    salt: str | None = None
    """Prompts share cached blocks only with prompts of the same salt."""
    priority: int = 0
    request_id: str = ""
    requests: list[Request] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    """Answers to the requests so far, in the same order."""
    logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
    """Logprobs of each answer's tokens."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def is_done(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)


class LLM:
    """A loaded model that answers prompts in this process. Without `with`, `close` it or end the process."""

    def __init__(
        self,
        model: str | None = None,
        *,
        chat_template: str | None = None,
        kv_events_config: Mapping[str, Any] | KVEventsConfig | None = None,
        **settings: Any,
    ) -> None:
        """Load a model. `settings`: fields of EngineConfig, such as dtype, device, max_model_len and seed.

        Raises ConfigError, ModelError or TokenizerError, which are ValueErrors, and TypeError for unknown settings.
        """
        config = _make_config(model, kv_events_config, settings)
        if config.kv_transfer.port is not None:
            raise ConfigError("kv_transfer: only `engine serve` moves blocks, as peers may ask for them at any time")
        _, folder = locate_model_files(config)
        self._tokenizer = Tokenizer.load(config.tokenizer or folder, chat_template=chat_template)
        self._detokenizer_factory = DetokenizerFactory(self._tokenizer.hf_tokenizer)
        self._engine: AssembledEngine | None = assemble(config, self._tokenizer)
        self._core = self._engine.core
        self.info = self._engine.info
        self._limits = ModelLimits(
            max_model_len=self.info.max_model_len,
            vocab_size=self.info.vocab_size,
            default_sampling=self.info.default_sampling,
            constraint_refusal=self.info.no_constraint_reason,
        )
        self._request_numbers = itertools.count()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the engine and the sockets of its events. Idempotent."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the engine's defaults with those of the model (generation_config.json) over them."""
        return msgspec.convert(dict(self.info.default_sampling), SamplingParams)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache."""
        self._core.reset_prefix_cache()
        return True

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate text after every prompt, and return the results in the prompts' order.

        `sampling_params`: one for all prompts, or one for each. `use_tqdm`: whether to show a progress bar. `priority`:
        one number for each prompt; lower runs first. Raises RequestError before anything is computed.
        """
        jobs = [self._encode_prompt(prompt, index) for index, prompt in enumerate(_make_prompt_list(prompts))]
        params = self._check_params_of_prompts(sampling_params, len(jobs))
        if priority is not None:
            for job, job_priority in zip(jobs, _check_priorities(priority, len(jobs))):
                job.priority = job_priority
        return self._run(jobs, params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several (a list of such lists).

        The chat template turns a conversation into a prompt. The parameters have the names and defaults of vLLM. Raises
        RequestError.
        """
        is_one_conversation = bool(messages) and isinstance(messages[0], Mapping)
        conversations = [messages] if is_one_conversation else messages
        render = self._tokenizer.render_chat_text
        if chat_template is not None and self._tokenizer.chat_template is not None:
            try:
                render = partial(render_chat, self._tokenizer.chat_template.replace(chat_template))
            except ChatTemplateError as error:
                raise RequestError(str(error), param="chat_template") from error
        jobs: list[_PromptJob] = []
        for conversation in conversations:
            request = ChatRequest(
                messages=list(conversation),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            text = render(request)
            jobs.append(_PromptJob(text, self._tokenizer.encode(text, add_special_tokens=False)))
        params = self._check_params_of_prompts(sampling_params, len(jobs))
        return self._run(jobs, params, use_tqdm)

    def _encode_prompt(self, prompt: Prompt, prompt_index: int) -> _PromptJob:
        """Return a prompt in any form as token ids. Raises RequestError."""
        param = f"prompts[{prompt_index}]"
        if isinstance(prompt, str):
            return _PromptJob(prompt, self._tokenizer.encode(prompt))
        if not isinstance(prompt, Mapping):
            return _PromptJob(None, _check_token_ids(prompt, param))
        unknown_keys = [key for key, value in prompt.items() if key not in PROMPT_KEYS and value is not None]
        if unknown_keys:
            raise field_error(param, f"got the key {unknown_keys[0]}, expected {', '.join(sorted(PROMPT_KEYS))}")
        salt = _get_salt(prompt, prompt_index)
        if "prompt_token_ids" in prompt:
            return _PromptJob(prompt.get("prompt"), _check_token_ids(prompt["prompt_token_ids"], param), salt)
        if not isinstance(prompt.get("prompt"), str):
            raise field_error(param, "expected the key prompt or prompt_token_ids")
        return _PromptJob(prompt["prompt"], self._tokenizer.encode(prompt["prompt"]), salt)

    def _check_params_of_prompts(
        self, params: SamplingParams | Sequence[SamplingParams] | None, prompt_count: int
    ) -> list[SamplingParams]:
        """Return the checked sampling parameters of each prompt. Raises RequestError and ValueError."""
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [self._check_params(params)] * prompt_count
        if len(params) != prompt_count:
            raise ValueError(
                f"sampling_params: got {len(params)}, expected one, or one for each of {prompt_count} prompts"
            )
        return [self._check_params(prompt_params) for prompt_params in params]

    def _check_params(self, params: SamplingParams) -> SamplingParams:
        """Check sampling parameters, and compile their constraint. Raises RequestError."""
        params = check_params(params, self._limits)
        if params.structured_outputs is None:
            return params
        completion_request = CompletionRequest(prompt="", structured_outputs=params.structured_outputs)
        requested = build_constraint(completion_request, self._limits)
        assert requested is not None
        assert self._engine is not None
        assert self._engine.grammars is not None
        lark = check_constraint(self._engine.grammars.vocabulary, requested)
        constraint = Constraint(lark, requested.param)
        return msgspec.structs.replace(params, structured_outputs=None, constraint=constraint)

    def _run(self, jobs: list[_PromptJob], params: list[SamplingParams], use_tqdm: bool) -> list[RequestOutput]:
        """Run the engine until all prompts are answered, and return the results in the prompts' order.

        `params`: sampling parameters of each prompt. Each of its `n` samples is a request of its own. Raises
        RuntimeError after `close`.
        """
        if self._engine is None:
            raise RuntimeError("this LLM was closed")
        for prompt_index, (job, prompt_params) in enumerate(zip(jobs, params)):
            self._make_requests(job, prompt_params, prompt_index)
        job_and_choice_by_id = {
            request.request_id: (job, choice) for job in jobs for request, choice in zip(job.requests, job.choices)
        }
        progress = _ProgressBar(len(jobs), is_shown=use_tqdm)
        try:
            for job in jobs:
                for request in job.requests:
                    self._core.add(request, time.monotonic())
            with _defer_interrupts() as deliver_interrupt:
                while self._core.has_work:
                    for output in self._core.step(time.monotonic()):
                        job, choice = job_and_choice_by_id[output.request_id]
                        self._add_output(output, job, choice, progress)
                    deliver_interrupt()
        finally:
            progress.close()
            self._core.abort(list(job_and_choice_by_id))  # after an exception or Ctrl-C, requests still run
        return [self._make_output(job) for job in jobs]

    def _add_output(self, output: SequenceOutput, job: _PromptJob, choice: Choice, progress: _ProgressBar) -> None:
        """Add the output of a step to one answer of a prompt. Raises RuntimeError if the request has failed."""
        if output.error is not None:
            raise RuntimeError(f"{output.request_id}: {output.error}")
        choice_delta = choice.push(output)
        if choice_delta.should_abort:
            self._core.abort([output.request_id])
        job.logprobs[choice.index].extend(choice_delta.logprobs)
        if output.prompt_logprobs is not None and choice.index == 0:
            job.prompt_logprobs = output.prompt_logprobs
        progress.count_tokens(len(choice_delta.token_ids))
        if choice_delta.finish_reason is not None and job.is_done:
            progress.count_prompt(job)

    def _make_requests(self, job: _PromptJob, params: SamplingParams, prompt_index: int) -> None:
        """Make the engine's requests for a prompt, one for each of the `n` samples. Raises RequestError."""
        check_prompt(job.token_ids, self._limits, f"prompts[{prompt_index}]")
        job.request_id = str(next(self._request_numbers))
        request = Request(
            request_id=job.request_id,
            token_ids=job.token_ids,
            params=fit_max_tokens(params, self._limits, len(job.token_ids)),
            cache_salt=job.salt,
            priority=job.priority,
        )
        job.requests = make_sample_requests(request, job.request_id, 0)
        job.choices = [
            Choice(index, request.params, self._detokenizer_factory, keeps_text=True)
            for index, request in enumerate(job.requests)
        ]
        job.logprobs = [[] for _ in job.requests]

    def _make_output(self, job: _PromptJob) -> RequestOutput:
        """Return the result for a prompt whose answers are complete, in the form that vLLM's users know."""
        prompt_logprobs: list[Logprobs | None] | None = None
        if job.prompt_logprobs is not None:
            prompt_logprobs = [
                None if position is None else self._convert_logprobs(position) for position in job.prompt_logprobs
            ]
        return RequestOutput(
            request_id=job.request_id,
            prompt=job.text,
            prompt_token_ids=job.token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[self._make_completion(choice, logprobs) for choice, logprobs in zip(job.choices, job.logprobs)],
            num_cached_tokens=job.choices[0].cached_tokens,
        )

    def _make_completion(self, choice: Choice, positions: list[TokenLogprobs]) -> CompletionOutput:
        """Return one of the answers to a prompt, in the form that vLLM's users know."""
        logprobs = None
        cumulative_logprob = None
        if choice.params.logprobs is not None:
            logprobs = [self._convert_logprobs(position) for position in positions]
            cumulative_logprob = sum(position.logprob for position in positions)
        return CompletionOutput(
            index=choice.index,
            text=choice.text,
            token_ids=choice.token_ids,
            cumulative_logprob=cumulative_logprob,
            logprobs=logprobs,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )

    def _convert_logprobs(self, position: TokenLogprobs) -> Logprobs:
        """Return the logprobs of one position as vLLM's users know them: the position's own token comes first."""
        logprobs = {position.token_id: self._make_logprob(position.token_id, position.logprob, position.rank)}
        for rank, (token_id, logprob) in enumerate(position.top_logprobs, 1):
            logprobs[token_id] = self._make_logprob(token_id, logprob, rank)
        return logprobs

    def _make_logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        token_text = self._detokenizer_factory.token_bytes(token_id).decode("utf-8", "replace")
        return Logprob(logprob, rank, token_text)


class _ProgressBar:
    """Progress bar that looks like vLLM's: finished prompts, and tokens per second of input and output so far.

    A prompt's tokens count when its answers are complete, so the input speed is right only at the end.
    """

    def __init__(self, prompt_count: int, *, is_shown: bool) -> None:
        self._start_s = time.perf_counter()
        self._input_tokens = 0
        self._output_tokens = 0
        self._bar = tqdm(total=prompt_count, desc="Processed prompts", dynamic_ncols=True, disable=not is_shown)

    def count_tokens(self, count: int) -> None:
        self._output_tokens += count

    def count_prompt(self, job: _PromptJob) -> None:
        """Count a finished prompt, and show the bar anew."""
        self._input_tokens += len(job.token_ids)
        elapsed_s = max(time.perf_counter() - self._start_s, 1e-9)
        input_speed, output_speed = self._input_tokens / elapsed_s, self._output_tokens / elapsed_s
        speeds = f"input: {input_speed:.1f} toks/s, output: {output_speed:.1f} toks/s"
        self._bar.set_postfix_str(speeds, refresh=False)
        self._bar.update(1)

    def close(self) -> None:
        self._bar.close()


@contextmanager
def _defer_interrupts() -> Iterator[Callable[[], None]]:
    """Let Ctrl-C wait until the function that is yielded is called: half a step would leave the engine inconsistent."""
    if threading.current_thread() is not threading.main_thread():  # signals come to the main thread
        yield lambda: None
        return
    has_interrupt = False

    def note_interrupt(*_: object) -> None:
        nonlocal has_interrupt
        has_interrupt = True

    def deliver_interrupt() -> None:
        if has_interrupt:
            signal.signal(signal.SIGINT, earlier_handler)
            signal.raise_signal(signal.SIGINT)

    earlier_handler = signal.signal(signal.SIGINT, note_interrupt)
    try:
        yield deliver_interrupt
    finally:
        signal.signal(signal.SIGINT, earlier_handler)


def _make_config(
    model: str | None, kv_events: Mapping[str, Any] | KVEventsConfig | None, settings: dict[str, Any]
) -> EngineConfig:
    """Return the engine's configuration from the arguments of the class `LLM`. A setting of None means its default.

    Raises TypeError for unknown settings, and ConfigError for wrong values.
    """
    ignored_names = ("trust_remote_code", "disable_log_stats")  # vLLM has these; they have no effect here
    settings = {name: value for name, value in settings.items() if name not in ignored_names}
    setting_names = {item.name for item in fields(EngineConfig)} - {"model", "kv_events"}
    unknown_names = sorted(set(settings) - setting_names)
    if unknown_names:
        raise TypeError(
            f"LLM() got unknown settings: {', '.join(unknown_names)}; known are: {', '.join(sorted(setting_names))}"
        )
    if kv_events is None:
        events_config = KVEventsConfig()
    elif isinstance(kv_events, KVEventsConfig):
        events_config = kv_events
    else:
        json_text = msgspec.json.encode(kv_events).decode()
        events_config = KVEventsConfig.parse(json_text)  # which checks the JSON of --kv-events-config, too
    config_table = {name: value for name, value in settings.items() if value is not None}
    config: EngineConfig = load_config(Schema(EngineConfig, "engine"), table=config_table).config
    return replace(config, model=model, kv_events=events_config)


def _make_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts, from one prompt in any form or from several."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    items: list[Any] = list(_check_iterable(prompts))
    return [items] if items and isinstance(items[0], Integral) else items


def _check_token_ids(values: object, param: str) -> list[int]:
    """Return token ids as ints. Raises RequestError if they are not integers."""
    try:
        return list(map(operator.index, _check_iterable(values)))
    except TypeError:
        raise field_error(param, "expected token ids, which are integers") from None


def _get_salt(prompt: Mapping[str, Any], prompt_index: int) -> str | None:
    """Return the `cache_salt` of a prompt. Raises RequestError if it is not allowed."""
    try:
        return msgspec.convert(prompt.get("cache_salt"), Salt | None)
    except msgspec.ValidationError as error:
        raise RequestError(f"prompts[{prompt_index}].cache_salt: {error}", param="cache_salt") from None


def _check_iterable(value: object) -> Iterable[Any]:
    """Return `value`. Raises RequestError if it is not iterable."""
    if not isinstance(value, Iterable) or isinstance(value, bytes):
        raise field_error("prompts", f"got {type(value).__name__}, expected texts or token ids")
    return value


def _check_priorities(priorities: Sequence[int], prompt_count: int) -> list[int]:
    """Return the priority of each prompt as an int. Raises ValueError unless there is one for each prompt."""
    checked_priorities = msgspec.convert(priorities, list[Int64])
    if len(checked_priorities) != prompt_count:
        raise ValueError(
            f"priority: got {len(checked_priorities)} values, expected one for each of {prompt_count} prompts"
        )
    return checked_priorities
