"""A dictionary that drops what was set longest ago."""

from __future__ import annotations

from options.bounded_dict import BoundedDict


def test_the_item_that_was_set_longest_ago_is_dropped() -> None:
    items: BoundedDict[str, int] = BoundedDict(2)
    items["a"], items["b"], items["a"], items["c"] = 1, 2, 3, 4
    assert list(items.items()) == [("a", 3), ("c", 4)]
    items["c"] = items["a"]
    assert (list(items.items()), items.get("b"), len(items)) == ([("a", 3), ("c", 3)], None, 2)
