"""The parts that a request for workers passes, from its body to the end of its answer, built from the configuration."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from router.app.accounting import RequestAccounting
from router.app.config import ProcessConfig
from router.app.tenant_limits import TenantLimits
from router.decide.core import RouterCore
from router.edge.miss_reasons_recorder import MissReasonsRecorder
from router.edge.proxy import Proxy
from router.edge.request_reader import RequestReader
from router.edge.upstream import UpstreamPool
from router.host_names import HostNames
from router.index.protocol import PrefixIndex
from router.metrics import Metrics
from router.prompting.conversation_reader import ConversationReader
from router.prompting.model_tokenizers import ModelTokenizers
from router.prompting.prompt_reader import PromptReader
from router.prompting.prompt_worker_pool import PromptWorkerPool
from router.prompting.sessions import SessionNames
from router.tenancy.model_names import ModelNames


class RequestPipeline:
    """The parts of a router that a request for workers passes: reading, limits, decision, forwarding and counting."""

    def __init__(
        self,
        config: ProcessConfig,
        index: PrefixIndex,
        worker_tls: ssl.SSLContext | None,
        host_names: HostNames,
        now: Callable[[], float],
    ) -> None:
        """Build the parts, and have the proxy call those that record when an answer begins and when a request ends.

        `worker_tls`: how to connect to workers with https. `now`: the clock, in seconds.
        """
        pool = UpstreamPool(connect_s_max=config.edge.timeouts.connect_s, tls=worker_tls, host_names=host_names)
        self.proxy = _make_proxy(config, index, pool, now)

        # Reading requests.
        tokenize_threads = config.tokenize_threads or min(8, os.cpu_count() or 1)
        self.executor = ThreadPoolExecutor(tokenize_threads, thread_name_prefix="tokenize")
        self.worker_pool = PromptWorkerPool(config.prompt_workers, chat_template=config.chat_template)
        self.prompt_reader = _make_prompt_reader(config, self.executor, self.worker_pool)
        session_names = SessionNames(config.edge.session_headers)
        self.request_reader = RequestReader(
            self.proxy.core, self.prompt_reader, session_names, allowed_fields=self.proxy.passed_fields
        )
        model_names = ModelNames(config.tenancy)
        self.request_reader.model_names = model_names if model_names.has_renames else None

        # Recording requests. The proxy calls these functions in the order in which they are added.
        record_answer = self.request_reader.stored_responses.record_answer
        self.proxy.on_first_output.append(record_answer)
        self.proxy.on_end.append(record_answer)
        self.reasons = MissReasonsRecorder(config.miss_reasons, self.proxy, self.prompt_reader)
        self.tenant_limits = TenantLimits(config.edge, self.proxy.metrics)
        self.proxy.on_end.append(self.tenant_limits.remove_request)
        self.proxy.on_end.append(RequestAccounting(self.proxy, log_share=config.log_requests).record_ended_request)

    def close(self) -> None:
        """Close connections to workers, worker processes and threads."""
        self.proxy.pool.close()
        self.prompt_reader.close()
        self.worker_pool.processes.close()
        self.executor.shutdown(wait=False, cancel_futures=True)


def _make_prompt_reader(
    config: ProcessConfig, executor: ThreadPoolExecutor, worker_pool: PromptWorkerPool
) -> PromptReader:
    """Return the reader of prompts, which reads large bodies in `worker_pool`, and others here or in `executor`."""
    conversations = ConversationReader(config.conversation_cache_mb << 20)
    tokenizers = ModelTokenizers(
        executor, conversations, worker_pool, override=config.tokenizer, chat_template=config.chat_template
    )
    makes_outlines = config.miss_reasons.enabled
    return PromptReader(tokenizers, conversations, executor, worker_pool, makes_outlines=makes_outlines)


def _make_proxy(config: ProcessConfig, index: PrefixIndex, pool: UpstreamPool, now: Callable[[], float]) -> Proxy:
    """Return the proxy, which forwards requests, with the core that chooses workers and the connections to workers."""
    authorization = None if config.worker_api_key is None else f"Bearer {config.worker_api_key}".encode()
    proxy = Proxy(
        core=RouterCore(index, config.core, seed=config.seed),
        pool=pool,
        metrics=Metrics(),
        config=config.edge,
        now=now,
        worker_authorization=authorization,
    )
    proxy.workers.fleet_key = config.read_fleet_key()
    proxy.log_share = config.log_decisions
    return proxy
