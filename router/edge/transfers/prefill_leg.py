"""The prefill of a request at one worker, for another worker that answers the request.

The worker computes the prompt and one token, and hands its KV over. What both workers are told, and whether the decode
waits for the prefill's answer, is in router/edge/transfers/dialects.py.
"""

from __future__ import annotations

import re
from typing import Final, Protocol

import msgspec

from prompts.errors import RequestError
from router.decide.messages import Decision, FailureKind
from router.edge.proxy import RETRYABLE_STATUSES, Proxy
from router.edge.request_context import PrefillTimes, RequestContext
from router.edge.response_progress import RESPONSES_PATH, find_usage
from router.edge.transfers.dialects import Fields, Handover
from router.edge.upstream import UpstreamConnection, is_local_error
from router.http.headers import ProtocolError
from router.http.response import ResponseHead
from router.metrics import TransferOutcome
from router.prompting.body_fields import Body, FieldSpans, add_fields, apply_edits, locate_fields

ANSWER_BYTES_MAX: Final = 4 << 20
"""Longest answer of a prefill that is read; it has the ids of the prompt's blocks."""
SECONDS_MIN, PREDICTION_FACTOR = 5.0, 3.0
"""A prefill may take this multiple of the predicted time to the first token, and at least so many seconds."""
PAIR_SECONDS_MIN: Final = 60.0
"""Least seconds of a prefill if the other worker computes no prompt: SGLang's prefill waits until that worker has
memory for the KV, and with another pair the work would be lost."""
LEASE_S: Final = 20.0
"""Seconds after a prefill in which its KV may be fetched. vLLM keeps the KV for 30 s (`kv_lease_duration`). Later it
gives other KV without an error, so a third is left as a margin."""
_OUTPUT_FIELDS: Final = (
    "stream", "stream_options", "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n",
    "stop", "stop_token_ids", "logit_bias", "echo", "logprobs", "top_logprobs", "return_token_ids", "background",
)  # fmt: skip
"""Fields that say how much of an answer is generated and how it is sent."""
_SEVERAL_PROMPTS_PATTERN = re.compile(rb'\[\s*["\[]')
"""Start of a list of texts, or of lists of token ids."""


class PrefillOwner(Protocol):
    """The exchange of a request, which waits for the prefill."""

    context: RequestContext

    def on_prefill_computed(self) -> None:
        """Have the other worker decode."""

    def on_prefill_failed(self, outcome: TransferOutcome, reason: str, *, may_be_crash: bool = False) -> None:
        """Have the other worker compute the prompt. `may_be_crash`: the request may have crashed the first one."""

    def crash(self, error: Exception) -> None:
        """End the request, because code that handles it raised `error`."""


class PrefillLeg:
    """One request to a worker (the source) that computes a prompt, so that another worker can fetch its KV and decode.

    Unless it is closed before, it calls `on_prefill_computed` or `on_prefill_failed` of its exchange, or both: the
    worker may go down after the prefill, before its KV was fetched.
    """

    def __init__(self, exchange: PrefillOwner, proxy: Proxy, decision: Decision, handover: Handover) -> None:
        """Prepare the prefill, which `start` begins. `decision` names the decode's worker, `handover` the source."""
        self._exchange = exchange
        self._proxy = proxy
        self._context = exchange.context
        self._decision = decision
        self.handover = handover
        self._source = handover.source.worker_id
        self.times = PrefillTimes(self._source, proxy.now())
        self._original_body, self._path = _get_original_request(exchange.context)
        """Body without the fields about KV, and path of the requests to both workers; None: the client's path."""

        # The request to the source, and its answer.
        self._body: Body = ()
        self._connection: UpstreamConnection | None = None
        """Connection to the source; None before the request is sent, and after its answer."""
        self._content = bytearray()
        """Body of the answer."""
        self._refusal = ""
        """Why the source refuses the request, if the decode's worker is expected to refuse it too."""
        seconds_min = PAIR_SECONDS_MIN if self.needs_partner else SECONDS_MIN
        self._deadline_s = self.times.started_at_s + max(seconds_min, PREDICTION_FACTOR * decision.predicted_ttft_s)
        """Time until which an answer is awaited: the source's, or after its refusal the one of the decode's worker."""

        # The request to the decode's worker, which fetches the KV.
        self._decode_fields: Fields | None = None
        """Fields in its body by which the worker fetches the KV; None until they are known."""
        self.is_decode_sent = False

    @property
    def needs_partner(self) -> bool:
        """Whether the decode's worker cannot compute the prompt itself, so that a failed prefill fails the request."""
        return self.handover.source.transfer.needs_partner

    def start(self) -> None:
        """Have the source compute the prompt: send it the request, usually for one token, with fields about the KV."""
        kv_fields = self.handover.make_prefill_fields()
        try:
            if self.handover.shortens_prefill:
                self._body = make_prefill_body(self._context.request.path, self._original_body, kv_fields)
            else:
                self._body = add_fields(self._original_body, kv_fields)
        except RequestError as error:
            self._fail("refused", str(error))
            return
        if self.handover.is_concurrent:
            self._decode_fields = self.handover.make_decode_fields(b"")
        self._start_attempt()

    def _start_attempt(self, *, is_resend: bool = False) -> None:
        target = self._proxy.workers.get_endpoint(self._source)
        if target is None:
            self._fail("unreachable", "the worker was removed")
        else:
            self._connection = self._proxy.pool.acquire(target, is_new=is_resend)
            self._connection.begin_request(self, "POST")

    @property
    def is_computed(self) -> bool:
        """Whether the prefill has ended well."""
        return self.times.ended_at_s is not None

    def _is_kv_expired(self, now: float) -> bool:
        """Return whether the source may have freed the KV that it computed."""
        return self.times.ended_at_s is not None and now > self.times.ended_at_s + LEASE_S

    def take_decode_fields(self, now: float) -> Fields | None:
        """Return the fields for a decode that is sent now; None if the KV may be gone."""
        if self._is_kv_expired(now):
            return None
        self.is_decode_sent = True
        return self._decode_fields

    def expire(self, now: float) -> None:
        """Give up a prefill that takes too long, or KV of a source that went down. Call it until the decode answers."""
        source = self._proxy.core.workers.get(self._source)
        is_source_down = source is None or source.is_down
        if not self.is_computed and now > self._deadline_s:
            late_reason = f"no answer within {now - self.times.started_at_s:.1f} s"
            self._fail("refused" if self._refusal else "timeout", self._refusal or late_reason)
        elif self.is_decode_sent and is_source_down and not self._is_kv_expired(now):
            self._fail("lost", "the worker went down, and its KV may not have been fetched")

    def close(self) -> None:
        """End the prefill: close the connection, so that the worker stops computing, and free KV that nobody fetches.

        A worker keeps computed KV for a while unless it is fetched, so the decode's worker is asked for one token.
        """
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        if not self.is_computed or self.is_decode_sent:
            return
        proxy, decision = self._proxy, self._decision
        endpoint, fields = proxy.workers.get_endpoint(decision.worker), self.take_decode_fields(proxy.now())
        if endpoint is None or fields is None:
            return  # the KV is freed when its lease ends
        body = make_prefill_body(self._context.request.path, self._original_body, fields)
        head = proxy.build_head(self._context, endpoint, decision.worker, decision.rank, body, self._path)
        proxy.pool.send_unanswered(endpoint, head, body)

    def _fail(self, outcome: TransferOutcome, reason: str, *, may_be_crash: bool = False) -> None:
        self.close()
        reason = f"prefill at {self._source}: {reason}"
        self._exchange.on_prefill_failed(outcome, reason, may_be_crash=may_be_crash)

    # From the attempt ---------------------------------------------------------------------------------------------

    def on_attempt_connected(self, connection: UpstreamConnection) -> None:
        """Send the request."""
        rank, body, path = self.handover.rank, self._body, self._path
        head = self._proxy.build_head(self._context, connection.target, self._source, rank, body, path)
        connection.send(head, body)

    def on_attempt_connect_failed(self, error: Exception | None) -> None:
        reason = "closed at once" if error is None else str(error) or "connect timed out"
        self._fail("local" if is_local_error(error) else "unreachable", reason)

    def on_attempt_head(self, head: ResponseHead, data: bytes) -> None:
        """Read the first bytes of an answer."""
        self.on_attempt_body(head, data)

    def on_attempt_body(self, head: ResponseHead, data: bytes) -> None:
        """Read bytes of an answer, and tell the exchange when it is complete."""
        content, surplus = head.body.feed(data)
        if not self.handover.is_concurrent:  # else the answer says nothing about the KV
            self._content += content
        if len(self._content) > ANSWER_BYTES_MAX:
            self._fail("bad_answer", f"an answer of more than {ANSWER_BYTES_MAX} bytes")
        elif head.body.is_complete:
            assert self._connection is not None
            self._connection.finish(self._proxy.now(), reusable=head.keep_alive and not surplus)
            self._connection = None
            self._finish(head)

    def _finish(self, head: ResponseHead) -> None:
        """Read the complete answer of the prefill's worker, and report that the prompt is computed, or why not."""
        if head.status != 200:
            self._handle_error(head)
            return
        if not self.handover.is_concurrent:  # the answer says where the KV is
            try:
                self._decode_fields = self.handover.make_decode_fields(bytes(self._content))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                self._fail("bad_answer", f"kv_transfer_params: {error}")
                return
        usage = find_usage(bytes(self._content))
        self.times.cached_tokens = None if usage is None else usage.cached_tokens
        self._content, self._body = bytearray(), ()  # to free their memory
        now = self.times.ended_at_s = self._proxy.now()
        duration_histogram = self._proxy.metrics.transfers.prefill_s.get((self._source,))
        duration_histogram.observe(now - self.times.started_at_s)
        self._exchange.on_prefill_computed()

    def _handle_error(self, head: ResponseHead) -> None:
        """Fail the prefill after an error status, unless the decode's worker will refuse the request as well.

        Both workers of SGLang get the request at once. The client is to get the decode's refusal, which comes soon.
        """
        reason = head.status_and_reason.decode("latin-1")
        is_refused = 400 <= head.status < 500 and head.status not in RETRYABLE_STATUSES
        if is_refused and self.needs_partner:
            self._refusal, self._deadline_s = reason, self._proxy.now() + SECONDS_MIN
        else:
            may_be_crash = RETRYABLE_STATUSES.get(head.status) is FailureKind.INTERNAL
            self._fail("refused" if is_refused else "error", reason, may_be_crash=may_be_crash)

    def on_attempt_lost(self, reason: str, *, is_stale: bool) -> None:
        """Handle the end of the connection to the prefill's worker: resend the request, complete the answer, or fail.

        `is_stale`: whether a kept-alive connection was closed before the first byte of the answer.
        """
        connection, self._connection = self._connection, None
        assert connection is not None
        head = connection.head
        if is_stale:
            self._start_attempt(is_resend=True)
            return
        if head is None:
            self._fail("lost", reason, may_be_crash=True)
            return
        try:
            head.body.finish()  # raises unless the body may end with the connection
        except ProtocolError as error:
            self._fail("lost", f"{reason}: {error}", may_be_crash=True)
        else:
            self._finish(head)

    def on_attempt_malformed(self, error: ProtocolError) -> None:
        self._fail("bad_answer", str(error))

    def crash(self, error: Exception) -> None:
        self._exchange.crash(error)


def _get_original_request(context: RequestContext) -> tuple[Body, bytes | None]:
    """Return body and path of the client's request; of the one for the rest of an answer that another worker began."""
    continuation = context.continuation
    if continuation is None or continuation.continuation_body is None:
        return context.request.pieces, None
    return (continuation.continuation_body,), continuation.path


def _has_several_answers(body: bytes, spans: FieldSpans) -> bool:
    """Return whether a body asks for several answers to a prompt, or has several prompts."""
    missing_field = (0, 0)
    answer_count = body[slice(*spans.span_by_field.get("n", missing_field))]
    prompt_span = spans.span_by_field.get("prompt", missing_field)
    return answer_count not in (b"", b"1", b"null") or _SEVERAL_PROMPTS_PATTERN.match(body, *prompt_span) is not None


def make_prefill_body(path: str, body: Body, fields: Fields) -> Body:
    """Return the body of a request for one token, with which vLLM only computes the prompt of `body`.

    For example, `{"prompt": "Hi", "max_tokens": 500, "stream": true}` becomes `{"prompt": "Hi", "max_tokens": 1}` with
    `ignore_eos` and `fields`, which tell vLLM whether to send or to fetch the KV cache. `path`: path of the API. Raises
    RequestError for several prompts or answers, and for a field that comes twice.
    """
    joined_body = b"".join(body)
    spans = locate_fields(joined_body)
    if _has_several_answers(joined_body, spans):
        raise RequestError("the KV can be handed over for one prompt with one answer", param="n")
    is_responses_api = path == RESPONSES_PATH
    limit_field = "max_output_tokens" if is_responses_api else "max_tokens"
    prefill_fields: dict[str, object] = {limit_field: 1, "ignore_eos": True, **fields}
    if is_responses_api:
        prefill_fields["store"] = False
    removed_fields = [name for name in _OUTPUT_FIELDS if name in spans.span_by_field and name != limit_field]
    return apply_edits(body, spans.make_edits(prefill_fields, removed_fields))
