"""What is said where the system gives too few file descriptors."""

from __future__ import annotations

from router.app.system import files_short


def test_too_few_descriptors_are_named_with_what_is_needed() -> None:
    assert files_short(1 << 20, 2000, 20_000) is None
    assert files_short(48_200, 2000, 20_000) is None
    said = files_short(48_199, 2000, 20_000)
    assert said is not None
    assert "48199 file descriptors are too few for 2000 event streams" in said
    assert "48200" in said
