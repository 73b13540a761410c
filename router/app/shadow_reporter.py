"""The report of `router shadow`: the requests that were seen, and what `router run` would have made of them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import multiprocessing
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from router.admin.dashboard import HTML, make_security_headers
from router.decide.config import CoreConfig
from router.edge.proxy import Proxy
from router.http.request import HttpRequest
from router.http.routes import Response, Routes
from router.shadow.config import ShadowConfig
from router.shadow.observed_request import ObservedRequest
from router.shadow.recorder import Recorder
from router.shadow.replay import Comparison, compare_placements
from router.shadow.report import CAUSES, ShadowReport, render_page, sum_lost_tokens_by_cause

log = logging.getLogger("router")

NEW_REQUESTS_MIN: Final = 20
"""New requests that are needed for another comparison."""


class ShadowReporter:
    """Reports what would change if the router placed the recorded requests instead of the present balancer.

    Another process simulates both from time to time, as a comparison takes seconds.
    """

    def __init__(
        self, config: ShadowConfig, router_config: CoreConfig, proxy: Proxy, recorder: Recorder, version: str
    ) -> None:
        """Make a reporter of the requests in `recorder`. `router_config`: settings of the router that is simulated."""
        self._config = config
        self._router_config = router_config
        self._proxy = proxy
        self._recorder = recorder
        self._version = version
        self._started_at = time.time()

        # The last comparison.
        self._comparison: Comparison | None = None
        self._problem: str | None = None
        """Why it failed; None if it did not."""
        self._compared_request_count = 0
        self._compared_at_s = proxy.now()
        self._compare_process: concurrent.futures.ProcessPoolExecutor | None = None
        self._compare_task: asyncio.Task[None] | None = None

    def register(self, routes: Routes) -> None:
        """Serve the report as JSON and as a page."""
        routes.add("GET", "/shadow", self._serve_report, public=False)
        routes.add("GET", "/shadow/report", self._serve_page, public=False)

    def _serve_report(self, request: HttpRequest, _: str) -> Response:
        return Response(msgspec.json.encode(self._make_report()))

    def _serve_page(self, request: HttpRequest, _: str) -> Response:
        page = render_page(self._make_report())
        return Response(page, content_type=HTML, headers=make_security_headers(page))

    def tick(self, now: float) -> None:
        """Begin a comparison if it is due. Call several times a second.

        It is due after `every_s` if enough new requests came, unless the last one still runs.
        """
        placed_request_count = self._recorder.counts["placed"]
        is_due = (
            now - self._compared_at_s >= self._config.every_s
            and placed_request_count - self._compared_request_count >= NEW_REQUESTS_MIN
        )
        if is_due and (self._compare_task is None or self._compare_task.done()):
            self._compared_request_count, self._compared_at_s = placed_request_count, now
            self._compare_task = asyncio.ensure_future(self._compare())

    async def _compare(self) -> None:
        """Compare the placement of all requests with that of `router run`, in another process, and write the report."""
        if self._compare_process is None:
            spawn = multiprocessing.get_context("spawn")
            self._compare_process = concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn)
        requests = list(self._recorder.requests)
        try:
            compare_requests = self._prepare_comparison(requests)
            self._comparison = await asyncio.get_running_loop().run_in_executor(self._compare_process, compare_requests)
        except Exception as error:  # noqa: BLE001  a boundary: the requests are kept, and compared again
            self._problem = f"{type(error).__name__}: {error}"
            self._compare_process = None  # it may be dead: the next comparison starts another
            log.warning("comparing %d requests failed: %s", len(requests), self._problem)
            return
        self._problem = None
        self._adopt_speeds(self._comparison)
        try:
            self._write_file()
        except OSError as error:
            log.warning("--report: not written, and tried again with the next comparison: %s", error)

    def _adopt_speeds(self, comparison: Comparison) -> None:
        """Give the core the workers' speeds that the comparison found, because no answer passes to learn them from."""
        for target in self._proxy.core.tracker.targets.values():
            steps = comparison.step_times_by_worker.get(target.worker_id)
            if steps is not None:
                target.set_step_times(steps)

    def finish(self) -> None:
        """Compare all requests once more, in this process, and write the report."""
        if self._recorder.requests:
            self._comparison = self._prepare_comparison(self._recorder.requests)()
        self._write_file()

    def _prepare_comparison(self, requests: Sequence[ObservedRequest]) -> Callable[[], Comparison]:
        """Return a function that compares the requests. The first of them, `warm_share`, only fill the caches."""
        warmup_count = min(int(len(requests) * self._config.warm_share), len(requests) - 1)
        recorder = self._recorder
        return partial(
            compare_placements, requests, recorder.engines(), recorder.block_tokens, self._router_config, warmup_count
        )

    def _make_report(self) -> ShadowReport:
        """Return the report about all requests until now, with the result of the last comparison."""
        metrics, recorder = self._proxy.metrics, self._recorder
        return ShadowReport(
            version=self._version,
            since=self._started_at,
            until=time.time(),
            requests=dict(recorder.counts),
            comparison=self._comparison,
            problem=self._problem,
            tokens=dict(metrics.cache_miss_tokens),
            turns=dict(metrics.cache_miss_requests),
            workers=recorder.engines(),
            seen=len(recorder.requests),
            # A log does not show why tokens were not cached.
            lost=dict.fromkeys(CAUSES) if self._config.log else sum_lost_tokens_by_cause(metrics.cache_miss_tokens),
        )

    def _write_file(self) -> None:
        """Write the file of `--report`, JSON or a page by its name. Raises OSError."""
        if self._config.report is None:
            return
        path, report = Path(self._config.report), self._make_report()
        path.write_bytes(msgspec.json.encode(report) if path.suffix == ".json" else render_page(report))

    def close(self) -> None:
        """End the process that compares."""
        if self._compare_process is not None:
            self._compare_process.shutdown(wait=False, cancel_futures=True)
