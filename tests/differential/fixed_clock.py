"""The date that templates write into prompts, in the program and in its worker processes: the same on every day.

Small, because each worker process imports it."""

from __future__ import annotations

from datetime import datetime

import prompts.template_environment
from router.prompting.prompt_worker_pool import WorkerState

DATE = datetime(2026, 11, 26, 12)


class _FixedClock(datetime):
    @classmethod
    def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
        return DATE


def fix_date() -> None:
    prompts.template_environment.datetime = _FixedClock  # type: ignore[misc]


def begin_worker(chat_template: str | None) -> WorkerState:
    """Stand where the program has `WorkerState`: what a worker process calls first."""
    fix_date()
    return WorkerState(chat_template)
