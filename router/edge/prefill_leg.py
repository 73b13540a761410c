"""The prefill of a request at one worker, before another worker decodes: vLLM's connectors for NIXL and Mooncake.

The worker computes the prompt and one token, and keeps the KV for a while. The request to the decoding worker carries
parameters: with NIXL those of the prefill's answer, unchanged; with Mooncake the name that the router gave to the
transfer.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal, Protocol
from uuid import uuid4

import msgspec

from prompts.errors import RequestError
from prompts.kv_source import KV_PARAMS_FIELD
from router.decide.messages import Decision
from router.decide.workers import MOONCAKE, NO_TRANSFERS, TransferFacts
from router.edge.attempt import Attempt
from router.edge.proxy import RETRYABLE_STATUSES, Proxy
from router.edge.request_context import RequestContext
from router.edge.response_progress import RESPONSES_PATH
from router.edge.rewrite import Body, KVParams
from router.edge.upstream import UpstreamConnection
from router.http.headers import ProtocolError
from router.http.response import ResponseHead
from router.metrics import TransferOutcome
from router.prompting.fields import apply_edits, locate_fields

ANSWER_BYTES_MAX: Final = 4 << 20
"""Longest answer of a prefill; it has the ids of the prompt's blocks."""
SECONDS_MIN, PREDICTION_FACTOR = 5.0, 3.0
"""A prefill may take this multiple of the predicted time to the first token, and at least so many seconds."""
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


class _NixlParams(msgspec.Struct):
    """Fields without which vLLM's decoding process ends."""

    do_remote_prefill: Literal[True]
    remote_block_ids: list[Any]
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw


class PrefillOwner(Protocol):
    """Callbacks of the object that waits for a prefill."""

    def prefill_computed(self) -> None:
        """Have the other worker decode."""

    def prefill_failed(self, outcome: TransferOutcome, reason: str) -> None:
        """Have the other worker compute the prompt."""

    def crash(self, error: Exception) -> None:
        """End the request, because code that handles it raised `error`."""


class PrefillLeg:
    """One request to a worker that computes a prompt for another worker. Calls its owner once, unless closed."""

    def __init__(self, owner: PrefillOwner, proxy: Proxy, context: RequestContext, decision: Decision) -> None:
        assert decision.transfer is not None
        self._owner = owner
        self._proxy = proxy
        self._context = context
        self._source = decision.transfer.source
        self._rank = decision.transfer.rank
        worker = proxy.core.workers.get(self._source)
        self._facts = NO_TRANSFERS if worker is None else worker.spec.transfer
        self._transfer_id = uuid4().hex
        self._params: KVParams | None = None
        """Parameters for the decode; None until the prefill has ended."""
        self._lease_end_s = 0.0
        self.is_taken = False
        """Whether a decode was sent with the parameters."""
        self._path: bytes | None = None
        self._body: Body = ()
        self._content = bytearray()
        self._attempt = Attempt(self, proxy.pool, "POST")
        self._started_at_s = proxy.now()
        self._deadline_s = self._started_at_s + max(SECONDS_MIN, PREDICTION_FACTOR * decision.predicted_ttft_s)

    def start(self, body: Body, path: bytes | None) -> None:
        """Send the prefill of a request with this body. `path`: None: that of the client's request."""
        try:
            kv_params = make_prefill_params(self._facts, self._transfer_id)
            self._path, self._body = path, make_prefill_body(self._context.request.path, body, kv_params)
        except RequestError as error:
            self._fail("refused", str(error))
        else:
            self._start_attempt()

    def _start_attempt(self) -> None:
        target = self._proxy.workers.get_endpoint(self._source)
        if target is None:
            self._fail("unreachable", "the worker was removed")
        else:
            self._attempt.start(target)

    def is_fetch_lost(self, now: float) -> bool:
        """Whether the worker that computed the prompt is down or was removed while the KV may still be fetched."""
        if now > self._lease_end_s:
            return False
        worker = self._proxy.core.workers.get(self._source)
        return worker is None or worker.is_down

    @property
    def holds_kv(self) -> bool:
        """Whether the worker keeps KV of which no decoding worker knows."""
        return self._params is not None and not self.is_taken

    def take_params(self, now: float) -> KVParams | None:
        """Return the parameters for the decode; None if the KV may be gone."""
        if now > self._lease_end_s:
            return None
        self.is_taken = True
        return self._params

    def expire(self, now: float) -> None:
        """Give up a prefill that takes too long."""
        if self._params is None and now > self._deadline_s:
            self._fail("timeout", f"no answer within {now - self._started_at_s:.1f} s")

    def close(self) -> None:
        """Close the connection, which tells the worker to stop computing."""
        self._attempt.close()

    def _fail(self, outcome: TransferOutcome, reason: str) -> None:
        self.close()
        self._owner.prefill_failed(outcome, f"prefill at {self._source}: {reason}")

    # From the attempt ---------------------------------------------------------------------------------------------

    def attempt_connected(self, connection: UpstreamConnection) -> None:
        """Send the request."""
        endpoint, body = connection.target, self._body
        head = self._proxy.build_head(self._context, endpoint, self._source, self._rank, body, self._path)
        connection.send(head, body)

    def attempt_unconnected(self, error: Exception | None) -> None:
        self._fail("unreachable", "closed at once" if error is None else str(error) or "connect timed out")

    def attempt_answered(self, head: ResponseHead, data: bytes) -> None:
        """Read the first bytes of an answer."""
        self._attempt.head = head
        self.attempt_received(head, data)

    def attempt_received(self, head: ResponseHead, data: bytes) -> None:
        """Read bytes of an answer, and tell the owner when it is complete."""
        consumed_bytes = head.body.feed(data, self._content)
        if len(self._content) > ANSWER_BYTES_MAX:
            self._fail("bad_answer", f"an answer of more than {ANSWER_BYTES_MAX} bytes")
        elif head.body.is_complete:
            self._attempt.finish(self._proxy.now(), reusable=head.keep_alive and consumed_bytes == len(data))
            self._finish(head)

    def _finish(self, head: ResponseHead) -> None:
        """Tell the owner what the complete answer says."""
        if head.status != 200:
            is_refused = 400 <= head.status < 500 and head.status not in RETRYABLE_STATUSES
            self._fail("refused" if is_refused else "error", head.status_and_reason.decode("latin-1"))
            return
        try:
            self._params = make_decode_params(self._facts, self._transfer_id, bytes(self._content))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._fail("bad_answer", f"kv_transfer_params: {error}")
            return
        self._content, self._body = bytearray(), ()
        now = self._proxy.now()
        self._lease_end_s = now + LEASE_S
        self._proxy.metrics.transfers.prefill_s.get((self._source,)).observe(now - self._started_at_s)
        self._owner.prefill_computed()

    def attempt_lost(self, reason: str, *, is_stale: bool) -> None:
        """Repeat the request on a new connection where an idle one was closed; else fail."""
        head = self._attempt.head
        if is_stale:
            self._attempt = Attempt(self, self._proxy.pool, "POST", is_resend=True)
            self._start_attempt()
        elif head is None:
            self._fail("lost", reason)
        else:
            try:
                head.body.finish()
            except ProtocolError as error:
                self._fail("lost", f"{reason}: {error}")
            else:
                self._finish(head)

    def attempt_malformed(self, error: ProtocolError) -> None:
        self._fail("bad_answer", str(error))

    def crash(self, error: Exception) -> None:
        self._owner.crash(error)


def make_prefill_body(path: str, body: Body, kv_params: KVParams) -> Body:
    """Return the body by which vLLM computes the prompt of `body` and one token. `kv_params`: what it does with KV.

    Raises RequestError for several prompts or answers, of which only one could fetch the KV, and for a field that comes
    twice.
    """
    joined_body = b"".join(body)
    spans = locate_fields(joined_body)
    n_start, n_end = spans.span_by_field.get("n", (0, 0))
    has_several_answers = joined_body[n_start:n_end] not in (b"", b"1", b"null")
    if has_several_answers or _SEVERAL_PROMPTS_PATTERN.match(joined_body, *spans.span_by_field.get("prompt", (0, 0))):
        raise RequestError("the KV can be handed over for one prompt with one answer", param="n")
    limit_field = "max_output_tokens" if path == RESPONSES_PATH else "max_tokens"
    prefill_fields: dict[str, object] = {limit_field: 1, KV_PARAMS_FIELD: kv_params, "ignore_eos": True}
    if path == RESPONSES_PATH:
        prefill_fields["store"] = False
    removed_fields = [name for name in _OUTPUT_FIELDS if name in spans.span_by_field and name != limit_field]
    return apply_edits(body, spans.make_edits(prefill_fields, removed_fields))


def make_prefill_params(source: TransferFacts, transfer_id: str) -> KVParams:
    """Return the parameters of a prefill: have the source keep the KV for another worker."""
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    return params | {"transfer_id": transfer_id} if source.dialect == MOONCAKE else params


def make_decode_params(source: TransferFacts, transfer_id: str, prefill_answer: bytes) -> KVParams:
    """Return the parameters of a decode: where its worker fetches the KV.

    Raises msgspec.DecodeError where the answer of a NIXL worker has no parameters, or lacks a part of them.
    """
    if source.dialect == MOONCAKE:
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_bootstrap_addr": f"http://{source.address}",
            "remote_engine_id": source.engine_id,
        }
    params = msgspec.json.decode(prefill_answer, type=_PrefillAnswer).kv_transfer_params
    msgspec.json.decode(params, type=_NixlParams)
    return params.copy()
