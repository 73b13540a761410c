"""What a process that reads bodies may be asked by a test: functions that it can import."""

from __future__ import annotations

import os
import time
from typing import Any


def length(data: bytes, tokenizer: Any, limits: Any) -> tuple[int, int]:
    return len(data), os.getpid()


def sleeps(data: bytes, tokenizer: Any, limits: Any) -> None:
    time.sleep(600)


def takes_memory(data: bytes, tokenizer: Any, limits: Any) -> int:
    return len(bytearray(16 << 30))


def dies(data: bytes, tokenizer: Any, limits: Any) -> None:
    os._exit(3)
