"""Shapes of caches for the state machines to draw from."""

from __future__ import annotations

from hypothesis import strategies as st

from engine.cache.spec import FULL_ATTENTION, SLIDING_WINDOW, CacheSpec, GroupSpec, StateSpec


def group(layers: int, window: int | None = None) -> GroupSpec:
    """A group whose block of one token takes `layers` times 256 bytes, the alignment of units."""
    kind = FULL_ATTENTION if window is None else SLIDING_WINDOW
    return GroupSpec(kind, tuple(range(layers)), num_kv_heads=1, head_dim=64, dtype_bytes=2, sliding_window=window)


@st.composite
def specs(draw: st.DrawFn, block_size_max: int, window_max: int) -> CacheSpec:
    """Dense, with windows, with state, with both; units of one block or of several."""
    block_size = draw(st.integers(1, block_size_max))
    groups = [group(draw(st.integers(1, 2)))]
    if draw(st.booleans()):
        groups.append(group(draw(st.integers(1, 3)), window=draw(st.integers(1, window_max))))
    state = None
    if draw(st.booleans()):
        state_bytes = draw(st.integers(1, 6)) * block_size * 256 + draw(st.integers(0, 200))
        state = StateSpec(layer_indices=(9,), state_bytes=state_bytes)
    return CacheSpec(block_size=block_size, groups=tuple(groups), state=state)
