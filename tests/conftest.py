"""What every test folder shares: Hypothesis without a deadline, since the machines that run this are busy; contracts/,
importable; and Triton's interpreter, which must be chosen before anything imports triton, where there is no GPU."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("blockcast", deadline=None)
settings.load_profile("blockcast")

sys.path.append(str(Path(__file__).parent / "contracts"))

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("begins_first") is None)


def pytest_collection_finish() -> None:
    """Exclude the imported modules from garbage collection: they are a million objects, and many tests collect all."""
    gc.collect()
    gc.freeze()
