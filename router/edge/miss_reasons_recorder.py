"""Connect router/miss_reasons with the proxy: record requests at their first output and at their end.

Decides which requests are compared with the last prompt of their conversation. Nothing here delays a decision: a
request is analysed after the first output of its model was sent.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from prompts.tokenizer import ID_TYPE, Tokenizer
from router.decide.core import RouterCore
from router.decide.messages import Decision, RouteRequest
from router.decide.workers import CacheView
from router.edge.proxy import Proxy
from router.edge.request_context import MissAnalysis, RequestContext
from router.index.protocol import HolderId
from router.miss_reasons.analyzer import AnalyzedRequest, MissAnalyzer
from router.miss_reasons.attribution import BLOCK_TOKENS, Placement, RemovedPrefix, find_first_missing_token
from router.miss_reasons.config import MissReasonsConfig
from router.miss_reasons.explanation import GROUPS, MissExplanation
from router.miss_reasons.prompt_history import AnalyzedPrompt
from router.miss_reasons.watched_conversations import WatchedConversations
from router.prompting.parsed_body import ParsedBody
from router.prompting.prompt_reader import PromptReader
from router.prompting.sessions import digest_name, shorten_name

log = logging.getLogger("router")

NOT_COMPARED_HINT = (
    "The last prompt of its conversation was not kept, so that the two were not compared: send the header "
    "x-blockcast-explain: 1 with the requests of a conversation, or name its session to POST /requests/watch."
)


class MissReasonsRecorder:
    """Records why the prompts that this process forwards were not cached at their workers.

    It collects the facts of each request while its answer runs, and gives them to a MissAnalyzer.
    """

    def __init__(self, config: MissReasonsConfig, proxy: Proxy, prompt_reader: PromptReader) -> None:
        """Make the analyzer of cache misses, and have `proxy` report the first output and the end of requests."""
        self._proxy = proxy
        self._core = proxy.core
        self._facts = FactsAdapter(self._core, prompt_reader.tokenizers.get)
        self._chunk_tokens = self._core.cache_state.recent_prompts.chunk_tokens

        self.analyzer = MissAnalyzer(config, self._core.index.count_common_tokens)
        # The metrics page shows the analyzer's own counters.
        proxy.metrics.cache_miss_requests = self.analyzer.requests_by_reason
        proxy.metrics.cache_miss_tokens = self.analyzer.tokens_by_reason
        proxy.metrics.reused_tokens = self.analyzer.reuse_sums

        # The conversations whose prompts are compared.
        self._sampling_threshold = config.share * 2**32
        """Conversations with a smaller key are always compared. A key is a digest of 32 bits."""
        self._header_watches = WatchedConversations(config.ttl_s)
        """Conversations whose clients asked for an explanation by a header."""
        self._operator_watches = WatchedConversations(config.ttl_s)
        """Conversations that the operator named on POST /requests/watch."""
        self._watches = (self._header_watches, self._operator_watches)

        self.is_enabled = config.enabled  # otherwise nothing is recorded
        if self.is_enabled:
            proxy.on_first_output.append(self._on_first_output)
            proxy.on_end.append(self._on_end)

    def watch(self, session: str) -> None:
        """Compare the prompts of this session, and of those that it starts, from the next request on."""
        self._operator_watches.add(digest_name(shorten_name(session)))

    @property
    def watched_session_count(self) -> int:
        """Number of sessions that are watched."""
        return len(self._operator_watches)

    def prepare_comparison(self, context: RequestContext) -> None:
        """Digest a prompt that will be compared with the last one of its conversation, to explain its cache misses.

        Conversations that are sampled or watched are compared. The comparison follows at the first byte of the answer,
        when the messages are no longer in memory.
        """
        body, route, headers = context.body, context.route, context.headers
        if not self.is_enabled or body is None or route is None or body.request.kind == "other":
            return
        try:
            conversation_keys = _get_conversation_keys(route, body)
            if headers is not None and headers.wants_explanation:
                own_key = conversation_keys[-1]
                self._header_watches.add(own_key)
            is_watched = any(key in watches for watches in self._watches if watches for key in conversation_keys)
            if is_watched or self._is_sampled(conversation_keys):
                context.miss_analysis.prompt = self._make_prompt(context, route, body)
                for watches in self._watches:
                    for key in conversation_keys:
                        watches.record_prompt(key, self._proxy.now())
        except Exception as error:  # noqa: BLE001  a boundary: the request goes on without being compared
            self._proxy.metrics.record_crash("reasons", error)

    def describe_request(self, name: str) -> dict[str, Any] | None:
        """Return why a request's prompt was not cached, with the costs of its worker and of the best cached one."""
        request = self.analyzer.get_request(name)
        if request is None:
            return None
        decision = request.placement.decision
        prices: dict[str, Any] = msgspec.to_builtins({"terms": decision.terms, "most_cached": decision.most_cached})
        return render_explanation(request.explanation) | prices

    def explain(self, context: RequestContext) -> dict[str, Any] | None:
        """Explain why the prompt of a request that is not sent would not be cached."""
        body, route, decision = context.body, context.route, context.decision
        if not self.is_enabled or body is None or route is None or route.token_ids is None or decision is None:
            return None
        prompt = self._make_prompt(context, route, body)
        placement = self._make_placement(route, route.token_ids, decision)
        return render_explanation(self.analyzer.explain(prompt, placement, self._facts))

    def note(self, context: RequestContext, decision: Decision) -> None:
        """Record a request that another balancer placed, with the decision that would have placed it there."""
        body, route = context.body, context.route
        if not self.is_enabled or body is None or route is None or route.token_ids is None:
            return
        placement = self._make_placement(route, route.token_ids, decision)
        request = self.analyzer.record_compared(self._make_prompt(context, route, body), placement, self._facts)
        self._record_end(context, request, self._proxy.now())

    def _is_sampled(self, keys: Sequence[int]) -> bool:
        """Return whether a conversation belongs to the sampled share, by the first of its keys."""
        return keys[0] < self._sampling_threshold

    # Requests -----------------------------------------------------------------------------------------------------

    def _on_first_output(self, context: RequestContext) -> None:
        """Record which tokens of a prompt were not cached at its worker, once the answer begins.

        Before that, a failed attempt may still send the request to another worker.
        """
        route, decision, analysis = context.route, context.decision, context.miss_analysis
        if analysis.result is not None:
            return  # recorded already, when another worker began the answer
        if route is None or route.token_ids is None or decision is None:
            return  # the prompt was not read, so nothing is known of its tokens
        query = self._core.get_prompt_query(route.request_id)
        if query is None:
            return  # the core has forgotten the request, and with it what the worker had cached
        try:
            placement = self._make_placement(route, query.prepared_ids, decision)
            if analysis.prompt is None:
                prompt_tokens = len(route.token_ids)
                analysis.result = self.analyzer.record_placed(context.name, route.session, prompt_tokens, placement)
            else:
                analysis.result = self.analyzer.record_compared(analysis.prompt, placement, self._facts)
                analysis.prompt = None
        except Exception as error:  # noqa: BLE001  a boundary: the request goes on without an explanation
            self._proxy.metrics.record_crash("reasons", error)

    def _on_end(self, context: RequestContext) -> None:
        """Record the usage of a complete answer."""
        result, context.miss_analysis = context.miss_analysis.result, MissAnalysis()  # frees a prompt, too
        if result is not None and context.outcome == "status_200":
            self._record_end(context, result, self._proxy.now())

    def _record_end(self, context: RequestContext, request: AnalyzedRequest, ended_at_s: float) -> None:
        """Record the end of an answer, and log its explanation if requests are logged."""
        explanation = self.analyzer.record_end(request, context.usage, context.completion_tokens, ended_at_s)
        if context.is_logged:
            fields = render_explanation(explanation or request.explanation)
            log.info("why %s", msgspec.json.encode(fields).decode(), extra={"fields": {"why": fields}})

    # Inputs of the analyzer ------------------------------------------------------------------------------------------

    def _make_prompt(self, context: RequestContext, route: RouteRequest, body: ParsedBody) -> AnalyzedPrompt:
        """Return a prompt in a small form, in which it can be compared with the next prompt of its conversation.

        It holds digests in place of the messages, and an array of token ids, which takes a tenth of a list's memory.
        """
        token_ids = route.token_ids or ()
        ids = token_ids if isinstance(token_ids, array) else array(ID_TYPE, token_ids)
        conversation_keys, now = _get_conversation_keys(route, body), self._proxy.now()
        is_sampled = self._is_sampled(conversation_keys)
        has_earlier_prompt = is_sampled or any(
            watches.has_recent_prompt(key, now) for watches in self._watches for key in conversation_keys
        )
        # The name of a session finds its earlier prompts. Without a name, they are found by equal beginnings.
        is_named = route.session is not None
        is_unnamed_chat = not is_named and body.request.kind == "chat"
        return AnalyzedPrompt(
            request_id=context.name,
            route=route.replace(similar_prompt=None, token_ids=ids),
            token_ids=ids,
            outline=body.get_outline(),
            chunk_keys=() if is_named else self._get_chunk_keys(route, ids),
            opening_key=body.digest_first_message() if is_unnamed_chat else None,
            is_history_incomplete=not has_earlier_prompt,
            is_sampled=is_sampled,
        )

    def _get_chunk_keys(self, route: RouteRequest, token_ids: array[int]) -> Sequence[int]:
        """Return the digest of the prompt up to the end of each chunk, from the core if that still has them."""
        query = self._core.get_prompt_query(route.request_id)
        if query is not None:
            return query.get_chunk_keys(self._chunk_tokens)
        return self._core.index.chunk_keys(token_ids, route.scope, self._chunk_tokens)

    def _make_placement(self, route: RouteRequest, prompt_ids: Any, decision: Decision) -> Placement:
        """Describe where a request was sent, and which cached blocks of its prompt had been evicted before."""
        worker = self._core.workers.get(decision.worker)
        block_tokens = BLOCK_TOKENS if worker is None else worker.spec.block_size or BLOCK_TOKENS
        first_missing_token = find_first_missing_token(decision)
        eviction = self._core.index.find_lost_blocks(prompt_ids, route.scope, first_missing_token, block_tokens)
        removed_prefix = None
        if eviction is not None:
            end_token, holder, removed_at_s = eviction
            removed_prefix = RemovedPrefix(end_token, self._find_worker_id(holder), removed_at_s)
        return Placement(
            decision=msgspec.structs.replace(decision),  # a copy: the core may still correct its own prediction
            removed_prefix=removed_prefix,
            block_tokens=block_tokens,
            at_s=self._proxy.now(),
            timestamp=time.time(),
        )

    def _find_worker_id(self, holder: HolderId) -> str:
        workers = (worker.worker_id for worker in self._core.workers.values() if holder in worker.holders)
        return next(workers, "one that is known no more")


class FactsAdapter:
    """Gives the analyzer of cache misses those facts about workers and texts that it needs for an explanation."""

    def __init__(self, core: RouterCore, get_tokenizer: Callable[[str], Tokenizer | None]) -> None:
        """`get_tokenizer` returns the tokenizer of a model; None if the router has none for it."""
        self._core = core
        self._get_tokenizer = get_tokenizer

    def last_emptied_s(self, worker_id: str) -> float | None:
        """Return when a worker last lost its cache; None if it did not, as far as is known."""
        return self._core.cache_state.cleared_at_s.get(worker_id)

    def is_thinking(self, model: str, ids: Sequence[int]) -> bool:
        """Guess by its words whether a text holds an assistant's reasoning, which templates drop from later turns."""
        tokenizer = self._get_tokenizer(model)
        if tokenizer is None:
            return False
        text = tokenizer.decode(list(ids), skip_special_tokens=False).lower()
        return "think" in text or "analysis" in text

    def has_approximate_cache(self, worker_id: str) -> bool:
        """Return whether a worker reports no cache events, so that the content of its cache is only estimated."""
        worker = self._core.workers.get(worker_id)
        return worker is not None and worker.spec.cache_view is CacheView.APPROXIMATE


def _get_conversation_keys(route: RouteRequest, body: ParsedBody) -> tuple[int, ...]:
    """Return the keys of a request's conversation: of the session that started it, and its own.

    The key of a conversation without a name is the digest of its first message.
    """
    if not route.parent:
        return (digest_name(route.session) if route.session else body.digest_first_message(),)
    return (digest_name(route.parent), digest_name(route.session)) if route.session else (digest_name(route.parent),)


def render_explanation(explanation: MissExplanation) -> dict[str, Any]:
    """Return an explanation as the fields of a JSON object."""
    fields: dict[str, Any] = msgspec.to_builtins(explanation)
    # The encoder leaves an empty list out.
    for uncached_range, range_fields in zip(explanation.uncached_ranges, fields.get("uncached_ranges", ())):
        range_fields |= {"tokens": uncached_range.tokens, "group": GROUPS.get(uncached_range.reason, "none")}
    if not explanation.is_compared:
        fields["hint"] = NOT_COMPARED_HINT
    return fields
