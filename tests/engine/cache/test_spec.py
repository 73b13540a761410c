"""Units: they hold everything, and no other simple size pads less."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.cache.spec import FULL_ATTENTION, CacheSpec, GroupSpec, StateSpec


@given(
    tokens=st.lists(st.integers(1, 40), min_size=1, max_size=2),
    state=st.one_of(st.none(), st.integers(1, 200_000)),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_a_unit_holds_everything_and_no_simple_size_pads_less(
    tokens: list[int], state: int | None, block_size: int
) -> None:
    groups = tuple(GroupSpec(FULL_ATTENTION, tuple(range(layers)), 1, 64, 2) for layers in tokens)
    spec = CacheSpec(block_size, groups, None if state is None else StateSpec((99,), state))
    blocks = [spec.block_bytes(g) for g in range(len(groups))]
    assert spec.unit_bytes % 256 == 0
    assert spec.unit_bytes >= max([*blocks, state or 0])
    assert all(spec.blocks_per_unit(g) * block <= spec.unit_bytes for g, block in enumerate(blocks))
    smallest = max([*blocks, state or 0])
    plain = -(-smallest // 256) * 256
    unused_bytes = [plain % block for block in blocks] + ([plain - state] if state else [])
    assert spec.compute_padding_share(spec.unit_bytes) <= max(unused_bytes) / plain + 1e-12
