"""Checks that a cached launch runs the code that Triton's own launch would run, with the same arguments.

    python tests/kernels/check_launches.py SEED

A program of its own, since the interpreter must be off before triton is imported. Kernels are compiled for a Hopper GPU
but launched on a driver that only writes down what it is given. Prints how many variants there were.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from kernels.triton.attention import store_kv
from kernels.triton.rows import activate_rows, norm_rows

launches: list[tuple[int, ...]] = []
"""Each launch: its grid, the handle of the compiled kernel, and tensors (by id) and numbers."""


class NotingLauncher:
    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        arguments = rest[4:]  # after the packed metadata, the launch's metadata and two hooks
        ids = [id(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        launches.append((x, y, z, function, *ids))


class NotingUtils:
    handles = 0

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        self.handles += 1
        return self.handles, self.handles, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}


class NotingDriver:
    """Stands for the driver of a Hopper GPU."""

    launcher_cls = NotingLauncher
    utils = NotingUtils()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def make_tensor(rng: random.Random) -> torch.Tensor:
    """A tensor that begins at a multiple of 16 bytes, or not."""
    dtype = rng.choice((*[torch.bfloat16] * 9, torch.float32))
    return torch.empty(64, dtype=dtype)[rng.choice((*[0] * 9, 1)) :]


def make_number(rng: random.Random) -> int:
    return rng.choice((1, 3, 16, 4096, 4097, 2**31 + 16))


def main(seed: int) -> None:
    driver.set_active(NotingDriver())  # type: ignore[no-untyped-call, arg-type]
    rng = random.Random(seed)
    cases = (
        (norm_rows, 4, 7, {"DIM": 64, "MODE": "add", "ZERO_CENTRED": False, "ROWS": 1, "BLOCK": 64, "num_warps": 4}),
        (norm_rows, 4, 7, {"DIM": 64, "MODE": "plain", "ZERO_CENTRED": True, "ROWS": 1, "BLOCK": 64, "num_warps": 8}),
        (store_kv, 3, 5, {"DIM": 64, "ROW": 128, "BLOCK_SIZE": 16, "BLOCK": 128}),
        (activate_rows, 2, 1, {"SIZE": 64, "GELU": False, "BLOCK": 64}),
    )
    for _ in range(40):
        kernel, tensor_count, number_count, constants = rng.choice(cases)
        arguments: list[Any] = [make_tensor(rng) for _ in range(tensor_count)]
        if kernel is store_kv:
            arguments.append(torch.empty(4, dtype=torch.int32))
        numbers = [make_number(rng) if rng.random() < 0.1 else 64 for _ in range(number_count)]
        arguments += numbers
        if kernel is norm_rows:
            arguments.append(1e-6)
        grid = tuple(rng.randrange(1, 9) for _ in range(rng.randrange(1, 4)))
        for _ in range(2):  # the first compiles
            kernel[grid](*arguments, **constants)
        kernel._kernel[grid](*arguments, **constants)
        first, cached, expected = launches[-3:]
        assert first == cached == expected, f"seed {seed}: {first} {cached} {expected}"
    print(NotingDriver.utils.handles)


if __name__ == "__main__":
    main(int(sys.argv[1]))
