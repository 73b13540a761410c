"""Detects whether a chat template reads the content of messages as a string or as a list of parts (vLLM's `auto`)."""

from __future__ import annotations

from typing import Literal, NamedTuple

from jinja2 import nodes

ContentFormat = Literal["string", "parts"]


class _Names(NamedTuple):
    """Names of a template's variables that hold the list of messages, one message, or the content of a message."""

    lists: set[str]
    messages: set[str]
    contents: set[str]


def detect_content_format(tree: nodes.Template) -> ContentFormat:
    """Return `parts` if a chat template loops over the content of a message, else `string` (vLLM's rule for `auto`).

    Variables of the template may hold messages and contents too, as in `{% for m in messages %}`.
    """
    names = _Names(lists={"messages"}, messages={"message"}, contents=set())
    loops = list(tree.find_all(nodes.For))
    assignments = list(tree.find_all(nodes.Assign))
    for _ in range(3):  # a block may use names that a later block assigns
        for loop in loops:
            if isinstance(loop.target, nodes.Name) and _is_variable(_strip_filters(loop.iter), names.lists):
                names.messages.add(loop.target.name)
        for assignment in assignments:
            target, value = assignment.target, assignment.node
            if not isinstance(target, nodes.Name):
                continue
            if _is_variable(_strip_filters(value), names.lists):
                names.lists.add(target.name)
            elif _is_content(value, names):
                names.contents.add(target.name)
    return "parts" if any(_is_content(loop.iter, names) for loop in loops) else "string"


def _is_content(node: nodes.Node | None, names: _Names) -> bool:
    """Return whether an expression is the content of a message, such as `message.content`."""
    node = _strip_filters(node)
    if isinstance(node, (nodes.Getattr, nodes.Getitem)) and _get_key(node) == "content":
        return _is_variable(node.node, names.messages) or _is_index_of(node.node, names.lists)
    return _is_variable(node, names.contents)


def _is_variable(node: nodes.Node | None, names: set[str]) -> bool:
    return isinstance(node, nodes.Name) and node.name in names


def _strip_filters(node: nodes.Node | None) -> nodes.Node | None:
    """Return an expression without filters, indices and slices around it."""
    while isinstance(node, (nodes.Filter, nodes.Getitem)) and _get_key(node) is None:
        node = node.node
    return node


def _get_key(node: nodes.Node | None) -> str | None:
    """Return the key of an expression `x.key` or `x['key']`; None for another expression, such as `x[0]`."""
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return node.arg.value if isinstance(node.arg.value, str) else None
    return None


def _is_index_of(node: nodes.Node | None, names: set[str]) -> bool:
    """Whether an expression is an item of one of these lists, such as `messages[0]` or `messages[loop.index0]`."""
    return isinstance(node, nodes.Getitem) and _is_variable(node.node, names) and not isinstance(node.arg, nodes.Slice)
