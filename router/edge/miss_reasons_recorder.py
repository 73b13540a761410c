"""The shell around router/miss_reasons: tells the ledger of first bytes and ends, asks index and feed what it
wants to know.

Nothing here is on a decision's path: a request is looked at after its first byte was passed on. Owns which requests are
compared with the last prompt of their conversation.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from prompts.segments import ID_TYPE
from prompts.tokenizer import Tokenizer
from router.decide.core import RouterCore
from router.decide.messages import Decision, ReportedUsage, RouteRequest
from router.decide.workers import CacheView
from router.edge.prompt_comparison import PromptComparison, Sampling
from router.edge.proxy import Proxy
from router.edge.request_context import RequestContext
from router.index.protocol import HolderId
from router.metrics import Metrics
from router.miss_reasons.analyzer import AnalyzedPrompt, AnalyzedRequest, MissAnalyzer, compute_short_keys
from router.miss_reasons.attribution import BLOCK_TOKENS, RemovedPrefix, find_first_missing_token
from router.miss_reasons.config import MissReasonsConfig
from router.miss_reasons.explanation import GROUPS, MissExplanation
from router.miss_reasons.watched_conversations import WatchedConversations
from router.prompting.conversation_turn import ConversationTurn, digest_name
from router.prompting.prompt_worker_pool import PromptWorkerPool
from router.prompting.reader import PromptReader
from router.prompting.sessions import shorten_name

log = logging.getLogger("router")

NOT_COMPARED_HINT = (
    "The last prompt of its conversation was not kept, so that the two were not compared: send the header "
    "x-blockcast-explain: 1 with the requests of a conversation, or name its session to POST /requests/watch."
)


class MissReasonsRecorder:
    """One a process."""

    def __init__(
        self,
        config: MissReasonsConfig,
        core: RouterCore,
        proxy: Proxy,
        prompts: PromptReader,
        worker_pool: PromptWorkerPool,
        metrics: Metrics,
        *,
        emptied_s: Mapping[str, float],
    ) -> None:
        self.analyzer = MissAnalyzer(
            config, core.index.shared, metrics.cache_miss_requests, metrics.cache_miss_tokens, metrics.reused_tokens
        )
        self._core, self._proxy, self._worker_pool = core, proxy, worker_pool
        self._facts = FactsAdapter(core, emptied_s, prompts.tokenizer_of)
        self._chunk_tokens = core.config.working_set.chunk_tokens
        self._header_watches = WatchedConversations(config.ttl_s)
        self._operator_watches = WatchedConversations(config.ttl_s)
        self._outline_tasks: set[asyncio.Task[None]] = set()
        if config.enabled:
            proxy.on_first_byte.append(self._on_first_byte)
            proxy.on_end.append(self._on_end)
        self.is_enabled = config.enabled
        self._sampling_threshold = config.share * 2**32

    def watch(self, session: str) -> None:
        """Compare the prompts of this session, and of those that it starts, from the next request on."""
        self._operator_watches.add(digest_name(shorten_name(session)))

    @property
    def watched_session_count(self) -> int:
        """Number of sessions that are watched."""
        return len(self._operator_watches)

    def register_request(self, context: RequestContext, turn: ConversationTurn) -> None:
        """A request was placed, or waits for that. Whoever is to be compared is outlined now, while its messages are
        at hand."""
        if not self.is_enabled or turn.body_request.kind == "other":
            return
        try:
            if turn.wants_explanation:
                self._header_watches.add(turn.conversation_keys()[-1])
            sampling = self._choose_sampling(turn)
            if sampling.is_compared:
                context.miss_analysis = PromptComparison(turn, sampling)
                for key in turn.conversation_keys():
                    self._header_watches.record_prompt(key, self._proxy.now())
                    self._operator_watches.record_prompt(key, self._proxy.now())
        except Exception as error:  # noqa: BLE001  a boundary: the request goes on without being compared
            self._record_crash(error)

    def get_explanation(self, name: str) -> MissExplanation | None:
        """What is known of a request."""
        return self.analyzer.get(name)

    async def explain(
        self, turn: ConversationTurn, route: RouteRequest, decision: Decision, now: float
    ) -> dict[str, Any] | None:
        """Why a request would miss that is not sent."""
        if not self.is_enabled or route.token_ids is None:
            return None
        comparison = PromptComparison(turn, self._choose_sampling(turn))
        await self._outline(comparison)
        prompt = self._build_prompt("", comparison, route)
        removed_prefix = self._find_removed_prefix(route.token_ids, route, decision)
        block_size = self._block_size(decision)
        return render_explanation(
            self.analyzer.explain(prompt, decision, block_size, removed_prefix, self._facts, now, time.time())
        )

    def note(self, name: str, turn: ConversationTurn, route: RouteRequest, decision: Decision) -> None:
        """A request that went elsewhere, as it was priced at its arrival."""
        if not self.is_enabled or route.token_ids is None:
            return
        comparison = PromptComparison(turn, Sampling(is_compared=True, is_sampled=True, has_unknown_history=False))
        removed_prefix = self._find_removed_prefix(route.token_ids, route, decision)
        comparison.end = None, 0, self._proxy.now(), False
        self._compare(None, comparison, name, route, decision, removed_prefix)

    def _choose_sampling(self, turn: ConversationTurn) -> Sampling:
        """Decide whether a request is compared. All requests of a conversation are, or none."""
        keys = turn.conversation_keys()
        if keys[0] < self._sampling_threshold:
            return Sampling(is_compared=True, is_sampled=True, has_unknown_history=False)
        if not self._header_watches and not self._operator_watches:
            return _NOT_COMPARED
        matching_watches = [
            watch for watch in (self._header_watches, self._operator_watches) if any(key in watch for key in keys)
        ]
        if not matching_watches:
            return _NOT_COMPARED
        now = self._proxy.now()
        has_prompt = any(watch.has_recent_prompt(key, now) for watch in matching_watches for key in keys)
        return Sampling(is_compared=True, is_sampled=False, has_unknown_history=not has_prompt)

    # Requests -----------------------------------------------------------------------------------------------------

    def _on_first_byte(self, context: RequestContext) -> None:
        route, decision, analysis = context.route, context.decision, context.miss_analysis
        if route is None or decision is None or not self._proxy.is_in_core(context) or route.token_ids is None:
            return  # its prompt was not read, or the core has forgotten it
        try:
            query = self._core.cache_state.get_query(route.request_id)
            removed_prefix = self._find_removed_prefix(
                route.token_ids if query is None else query.prepared_ids, route, decision
            )
            name = context.name
            if analysis is None:
                now, prompt_tokens = self._proxy.now(), len(route.token_ids)
                context.miss_analysis = self.analyzer.record_placed(
                    name, route.session, prompt_tokens, decision, removed_prefix, now, time.time()
                )
            elif isinstance(analysis, PromptComparison) and not analysis.has_started:
                self._compare(context, analysis, name, route, decision, removed_prefix)
        except Exception as error:  # noqa: BLE001  a boundary: it ends this request's reasons, and nothing else
            self._record_crash(error)

    def _on_end(self, context: RequestContext) -> None:
        analysis, context.miss_analysis = context.miss_analysis, None
        if analysis is None or context.outcome != "status_200":
            return
        usage, route, completion_tokens = context.usage, context.route, 0
        if usage is not None and usage.completion_tokens is not None:
            completion_tokens = usage.completion_tokens
        elif route is not None and route.is_streaming:
            completion_tokens = context.progress.read_count
        request_end = usage, completion_tokens, self._proxy.now(), context.is_logged
        if isinstance(analysis, PromptComparison):
            analysis.end = request_end
        else:
            self._record_end(analysis, request_end)

    def _compare(
        self, context: RequestContext | None, comparison: PromptComparison, name: str, route: RouteRequest, decision:
        Decision, removed_prefix: RemovedPrefix | None,
    ) -> None:  # fmt: skip
        """Compare a request that began, at once or as soon as its body was outlined by another process."""
        comparison.has_started = True
        now, wall_time_s = self._proxy.now(), time.time()

        def compare() -> None:
            prompt, block_size = self._build_prompt(name, comparison, route), self._block_size(decision)
            is_sampled = comparison.sampling.is_sampled
            analyzed_request = self.analyzer.record_compared(
                prompt, decision, block_size, removed_prefix, self._facts, now, wall_time_s, is_sampled=is_sampled
            )
            if comparison.end is not None:
                self._record_end(analyzed_request, comparison.end)
            elif context is not None and context.miss_analysis is comparison:
                context.miss_analysis = analyzed_request

        if comparison.pieces is None:
            compare()
        else:
            self._compare_after_outline(comparison, compare)

    def _compare_after_outline(self, comparison: PromptComparison, compare: Callable[[], None]) -> None:
        async def outline_and_compare() -> None:
            try:
                await self._outline(comparison)
                compare()
            except Exception as error:  # noqa: BLE001  a boundary: it ends this request's reasons, and nothing else
                self._record_crash(error)

        task = asyncio.get_running_loop().create_task(outline_and_compare())
        self._outline_tasks.add(task)
        task.add_done_callback(self._outline_tasks.discard)

    async def _outline(self, comparison: PromptComparison) -> None:
        """Have a large body outlined, where that is to be done."""
        if comparison.pieces is not None:
            comparison.outline = await self._worker_pool.outline_body(*comparison.pieces)
            comparison.pieces = None

    def _record_end(
        self, analyzed_request: AnalyzedRequest, request_end: tuple[ReportedUsage | None, int, float, bool]
    ) -> None:
        usage, completion_tokens, now, is_logged = request_end
        self.analyzer.record_end(analyzed_request, usage, completion_tokens, now)
        if is_logged:
            fields = render_explanation(analyzed_request.explanation)
            log.info("why %s", msgspec.json.encode(fields).decode(), extra={"fields": {"why": fields}})

    def _record_crash(self, error: Exception) -> None:
        self._proxy.metrics.record_crash("reasons", error)

    # What the ledger wants to know ----------------------------------------------------------------------------------

    def _build_prompt(self, name: str, comparison: PromptComparison, route: RouteRequest) -> AnalyzedPrompt:
        token_ids, index = route.token_ids or (), self._core.index
        ids = token_ids if isinstance(token_ids, array) else array(ID_TYPE, token_ids)
        keys: Sequence[int] = ()
        short_keys: Sequence[int] = ()
        if route.session is None:
            query = self._core.cache_state.get_query(route.request_id)
            if query is not None:
                keys = query.get_chunk_keys(self._chunk_tokens)
            else:
                keys = index.chunk_keys(ids, route.scope, self._chunk_tokens)
            if self.analyzer.needs_short_keys(keys):
                short_keys = compute_short_keys(index, ids, route.scope, self._chunk_tokens)
        return AnalyzedPrompt(
            name, ids, route.scope, comparison.outline, route.session, route.parent, keys, short_keys,
            comparison.first_message_digest, route.is_final, comparison.sampling.has_unknown_history,
        )  # fmt: skip

    def _find_removed_prefix(self, token_ids: Any, route: RouteRequest, decision: Decision) -> RemovedPrefix | None:
        """What of its prompt was held and removed, behind what some worker has."""
        core = self._core
        removed = core.index.gone(
            token_ids, route.scope, find_first_missing_token(decision), self._block_size(decision)
        )
        return None if removed is None else RemovedPrefix(removed[0], self._find_worker_id(removed[1]), removed[2])

    def _find_worker_id(self, holder: HolderId) -> str:
        workers = (worker.worker_id for worker in self._core.workers.values() if holder in worker.holders)
        return next(workers, "one that is known no more")

    def _block_size(self, decision: Decision) -> int:
        worker = self._core.workers.get(decision.worker)
        return BLOCK_TOKENS if worker is None else worker.spec.block_size or BLOCK_TOKENS


class FactsAdapter:
    """What the ledger wants to know of workers and tokens."""

    def __init__(
        self, core: RouterCore, emptied_s: Mapping[str, float], tokenizer: Callable[[str], Tokenizer | None]
    ) -> None:
        """`tokenizer`: of a model."""
        self._core, self._emptied_s, self._tokenizer = core, emptied_s, tokenizer

    def last_emptied_s(self, worker_id: str) -> float | None:
        return self._emptied_s.get(worker_id)

    def is_thinking(self, model: str, ids: Sequence[int]) -> bool:
        tokenizer = self._tokenizer(model)
        if tokenizer is None:
            return False
        text = tokenizer.decode(list(ids), skip_special_tokens=False).lower()
        return "think" in text or "analysis" in text

    def has_approximate_cache(self, worker_id: str) -> bool:
        worker = self._core.workers.get(worker_id)
        return worker is not None and worker.spec.cache_view is CacheView.APPROXIMATE


_NOT_COMPARED = Sampling(is_compared=False, is_sampled=False, has_unknown_history=True)


def render_explanation(explanation: MissExplanation) -> dict[str, Any]:
    """As JSON has it."""
    fields: dict[str, Any] = msgspec.to_builtins(explanation)
    for uncached_range, range_fields in zip(explanation.uncached_ranges, fields["uncached_ranges"]):
        range_fields |= {"tokens": uncached_range.tokens, "group": GROUPS.get(uncached_range.reason, "none")}
    if not explanation.is_compared:
        fields["hint"] = NOT_COMPARED_HINT
    return fields
