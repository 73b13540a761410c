"""Dictionary of bounded size."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedDict(OrderedDict[Key, Value]):
    """Dictionary of at most `items_max` items: beyond that, the item that was set longest ago is dropped."""

    def __init__(self, items_max: int) -> None:
        super().__init__()
        self._items_max = items_max

    def __setitem__(self, key: Key, value: Value) -> None:
        """Set an item, which is then the newest one."""
        OrderedDict.__setitem__(self, key, value)  # by name, as super() costs a quarter of the whole
        self.move_to_end(key)
        if len(self) > self._items_max:
            self.popitem(last=False)
