"""Helpers for the engine's tests: modules beside this file, importable although the test tree has no packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def _load(name: str) -> None:
    """Make `tests/engine/NAME.py` importable as NAME."""
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


_load("drawn_specs")
_load("fake_device")
_load("hand_driver")
_load("naive_memory")
_load("transfer_peers")
