"""Under Triton's interpreter a program takes milliseconds: part of the attention contract runs with the slow tests.

On a machine with a GPU `-m gpu` runs the contract there: tensors are then made on the GPU unless a test says otherwise.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that torch gives out unwritten holds NaN, or a large negative number: who reads it is seen."""

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            if tensor.is_floating_point():
                return tensor.fill_(float("nan"))
            return tensor.fill_(200) if tensor.dtype in (torch.uint8, torch.bool) else tensor.fill_(-(2**30) - 1)

        return made

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)  # shown when the test fails
    torch.manual_seed(seed)
    return random.Random(seed)


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
        if params.get("ops") == "triton" and "shares" in item.name:
            item.add_marker(pytest.mark.slow)
        if params.get("ops") not in ("triton", "triton-gpu") or "window" not in params:
            continue
        case = (params["window"], params["block_size"], str(params["dtype"]))
        if case in {(40, 32, "torch.bfloat16"), (1, 1, "torch.float16"), (None, 32, "torch.float32")}:
            item.add_marker(pytest.mark.long)
        elif case not in {(None, 16, "torch.bfloat16"), (9, 16, "torch.float32")}:
            item.add_marker(pytest.mark.slow)
