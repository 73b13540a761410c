"""Tests of tasks that run beside the work of their owner."""

from __future__ import annotations

import asyncio

import pytest

from options.background_tasks import BackgroundTasks


def test_an_error_of_a_task_is_logged_once_and_ends_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ValueError("planted")

    async def run() -> None:
        tasks = BackgroundTasks()
        waiting = tasks.start(asyncio.Event().wait())  # type: ignore[arg-type]
        tasks.start(fail())
        assert len(tasks) == 2
        await asyncio.sleep(0.01)
        assert len(tasks) == 1
        await tasks.close()
        assert waiting.cancelled()
        assert not len(tasks)

    asyncio.run(run())
    (record,) = caplog.records
    assert record.exc_info is not None
    assert "planted" in str(record.exc_info[1])


def test_a_task_that_is_cancelled_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        tasks = BackgroundTasks()
        tasks.start(asyncio.sleep(60))
        tasks.cancel()
        await asyncio.sleep(0.01)
        assert not len(tasks)

    asyncio.run(run())
    assert not caplog.records
