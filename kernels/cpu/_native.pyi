# Addresses of tensors come as integers; what they are is checked where these are called.

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

def instruction_sets() -> list[str]: ...
def use(instruction_set: str, /) -> None: ...

class Layout:
    def __init__(
        self,
        total_rows: int,
        unit_rows: int,
        blocks_per_unit: int,
        block_size: int,
        layers: int,
        kv_heads: int,
        dim: int,
        /,
    ) -> None: ...

class AttentionPlan:
    def __init__(
        self, query_starts: IntArray, context_lens: IntArray, block_table: IntArray, layout: Layout, bf16: bool,
        window: int | None, /,
    ) -> None: ...  # fmt: skip
    def attend(
        self, buffer: int, layer: int, q: int, q_stride: int, heads: int, k: int, k_stride: int, v: int, v_stride: int,
        out: int, scale: float, threads: int, /,
    ) -> None: ...  # fmt: skip

def norm(
    bf16: bool, x: int, weight: int, residual: int, out: int, tokens: int, heads: int, dim: int, x_stride: int,
    weight_stride: int, eps: float, zero_centred: bool, /,
) -> None: ...  # fmt: skip
def rotate(
    bf16: bool, x: int, cos: int, signed_sin: int, out: int, tokens: int, heads: int, dim: int, width: int,
    x_stride: int, /,
) -> None: ...  # fmt: skip
def silu_and_mul(bf16: bool, x: int, out: int, tokens: int, size: int, /) -> None: ...
def has_products() -> bool: ...
def product(
    x: int, rows: int, x_stride: int, packed: int, outputs: int, inputs: int, bias: int, out: int, threads: int, /
) -> None: ...
