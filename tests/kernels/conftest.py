"""Under Triton's interpreter a program takes milliseconds: part of the attention contract runs with the slow tests."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if params.get("ops") != "triton" or "window" not in params:
            continue
        usual = (params["window"], params["block_size"], str(params["dtype"])) in {
            (None, 16, "torch.bfloat16"), (9, 16, "torch.float32"), (40, 32, "torch.bfloat16"), (1, 1, "torch.float16"),
            (None, 32, "torch.float32"),
        }  # fmt: skip
        if not usual:
            item.add_marker(pytest.mark.slow)
