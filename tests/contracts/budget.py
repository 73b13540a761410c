"""How many examples a property test draws: all of them in `scripts/test --long`, some in `scripts/test`."""

from __future__ import annotations

import os
from typing import Final

IS_LONG: Final = "BLOCKCAST_TESTS_LONG" in os.environ
SHORT_SHARE: Final = 5


def examples(count: int) -> int:
    """Return `count` in a long run, a fifth of `count` (at least 10) in a short one."""
    return count if IS_LONG else max(10, count // SHORT_SHARE)
