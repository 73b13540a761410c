"""Under Triton's interpreter a program takes milliseconds: part of the attention contract runs with the slow tests.

On a machine with a GPU `-m gpu` runs the contract there: tensors are then made on the GPU unless a test says otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def on_gpu() -> Iterator[None]:
    """Where tensors are made by default, for this test."""
    if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("needs a CUDA device, and TRITON_INTERPRET not set")
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if params.get("ops") not in ("triton", "triton-gpu") or "window" not in params:
            continue
        usual = (params["window"], params["block_size"], str(params["dtype"])) in {
            (None, 16, "torch.bfloat16"), (9, 16, "torch.float32"), (40, 32, "torch.bfloat16"), (1, 1, "torch.float16"),
            (None, 32, "torch.float32"),
        }  # fmt: skip
        if not usual:
            item.add_marker(pytest.mark.slow)
