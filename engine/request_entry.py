"""A request inside the scheduler: its place in the order, and when it ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.types import FinishReason, Request, Sequence, SequenceOutput, TokenLogprobs


@dataclass(slots=True, eq=False)
class RequestEntry:
    """A request inside the scheduler, from its arrival to its last output."""

    seq: Sequence
    arrival_number: int
    """Number of requests that came before."""
    stop_token_ids: frozenset[int]
    """Token ids that end the answer."""
    length_max: int
    """Number of tokens, prompt and output together, at which the request ends."""
    eos_token_ids: frozenset[int] = frozenset()
    """Members of `stop_token_ids` that are the model's own. No output reports them as a `stop_token_id`."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    has_reported_prompt: bool = False
    """Whether the first output was made. It has `cached_tokens`, `queue_s` and the logprobs of the prompt."""
    has_ended: bool = False
    """Whether the request was aborted, has failed or is finished. Steps in flight may still compute tokens of it."""
    arrival_work: int = 0
    """Prompt tokens that the engine had computed when the request arrived: see `engine.prefill_queue`."""
    tokens_remaining: int = 0
    """Expected number of tokens to compute: see `engine.prefill_queue`."""
    sort_key: tuple[int, float, float, int] = (0, 0.0, 0.0, 0)
    """Place in the waiting queue, lowest first: priority, tokens that the request counts as, time and number of
    arrival."""

    @staticmethod
    def from_request(
        request: Request, now: float, arrival_number: int, eos_token_ids: frozenset[int], token_limit: int
    ) -> RequestEntry:
        """Make the scheduler's entry of a request that arrives at `now`, after `arrival_number` others.

        `eos_token_ids`: the model's tokens that end an answer, unless the request ignores them. `token_limit`: tokens
        of the longest possible sequence, prompt and answer together.
        """
        params = request.params
        # If another worker has begun the answer, the answer's first tokens are at the end of `token_ids`.
        prompt_len = len(request.token_ids) - request.resumed_output_len
        own_eos_ids = frozenset() if params.ignore_eos else eos_token_ids
        length_max = token_limit
        if params.max_tokens is not None:
            length_max = min(token_limit, prompt_len + params.max_tokens)
        return RequestEntry(
            seq=Sequence(request=request, token_ids=list(request.token_ids), prompt_len=prompt_len, arrival_s=now),
            arrival_number=arrival_number,
            stop_token_ids=own_eos_ids.union(params.stop_token_ids),
            length_max=length_max,
            eos_token_ids=own_eos_ids,
        )

    @property
    def request_id(self) -> str:
        return self.seq.request.request_id

    @property
    def arrival_order(self) -> tuple[int, float, int]:
        """Priority, time and number of arrival: the lowest is served first if nothing else is known."""
        return self.seq.request.priority, self.seq.arrival_s, self.arrival_number

    def __lt__(self, other: RequestEntry) -> bool:
        return self.arrival_order < other.arrival_order

    def add_prompt_results(self, output: SequenceOutput) -> None:
        """Add the cached tokens, the time in the queue and the prompt's logprobs to the request's first output."""
        self.has_reported_prompt = True
        output.cached_tokens = self.seq.cached_tokens
        output.queue_s = self.seq.start_s - self.seq.arrival_s
        if self.seq.request.params.prompt_logprobs is not None:
            output.prompt_logprobs = [None, *self.prompt_logprobs]

    def set_finish_reason(self, token_id: int, output: SequenceOutput) -> bool:
        """Return whether the last token, `token_id`, ends the request. If so, set the reason in `output`.

        A stop token that also reaches the length counts as a stop token.
        """
        if token_id in self.stop_token_ids and self.seq.output_len >= self.seq.request.params.min_tokens:
            output.finish_reason = FinishReason.STOP
            if token_id not in self.eos_token_ids:
                output.stop_token_id = token_id
        elif len(self.seq.token_ids) >= self.length_max:
            output.finish_reason = FinishReason.LENGTH
        return output.finish_reason is not None
