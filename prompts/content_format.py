"""Detects whether a chat template reads the content of messages as a string or as a list of parts (vLLM's `auto`)."""

from __future__ import annotations

from typing import Literal

import jinja2.nodes

ContentFormat = Literal["string", "parts"]


def detect_content_format(tree: jinja2.nodes.Template) -> ContentFormat:
    """Return `parts` if the template loops over a message's content, else `string` (vLLM's rule for `auto`)."""
    names = _ContentNames(tree)
    return "parts" if any(names.is_content(loop.iter) for loop in tree.find_all(jinja2.nodes.For)) else "string"


class _ContentNames:
    """Variables of a template that hold `messages`, one message, or the content of a message.

    Loops and assignments of the template give such values further names, as in `{% for m in messages %}`.
    """

    def __init__(self, tree: jinja2.nodes.Template) -> None:
        self._list_names = {"messages"}
        self._message_names = {"message"}
        self._content_names = set[str]()
        for _ in range(3):  # a block may use names that a later block assigns
            for loop in tree.find_all(jinja2.nodes.For):
                self._add_loop(loop)
            for assign in tree.find_all(jinja2.nodes.Assign):
                self._add_assignment(assign)

    def is_content(self, node: jinja2.nodes.Node | None) -> bool:
        """Return whether an expression is the content of a message, such as `message.content`."""
        node = _strip_filters(node)
        if isinstance(node, jinja2.nodes.Name):
            return node.name in self._content_names
        if _get_key(node) != "content":
            return False
        assert isinstance(node, (jinja2.nodes.Getattr, jinja2.nodes.Getitem))
        owner = node.node
        is_message = isinstance(owner, jinja2.nodes.Name) and owner.name in self._message_names
        return is_message or _is_index_of(owner, self._list_names)

    def _add_loop(self, loop: jinja2.nodes.For) -> None:
        iterated_node = _strip_filters(loop.iter)
        is_over_messages = isinstance(iterated_node, jinja2.nodes.Name) and iterated_node.name in self._list_names
        if is_over_messages and isinstance(loop.target, jinja2.nodes.Name):
            self._message_names.add(loop.target.name)

    def _add_assignment(self, assign: jinja2.nodes.Assign) -> None:
        if not isinstance(assign.target, jinja2.nodes.Name):
            return
        value = _strip_filters(assign.node)
        if isinstance(value, jinja2.nodes.Name) and value.name in self._list_names:
            self._list_names.add(assign.target.name)
        elif self.is_content(assign.node):
            self._content_names.add(assign.target.name)


def _strip_filters(node: jinja2.nodes.Node | None) -> jinja2.nodes.Node | None:
    """Return an expression without filters, indices and slices around it."""
    while isinstance(node, (jinja2.nodes.Filter, jinja2.nodes.Getitem)) and _get_key(node) is None:
        node = node.node
    return node


def _get_key(node: jinja2.nodes.Node | None) -> str | None:
    """Return the key of an expression `x.key` or `x['key']`; None for another expression, such as `x[0]`."""
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr
    if isinstance(node, jinja2.nodes.Getitem) and isinstance(node.arg, jinja2.nodes.Const):
        return node.arg.value if isinstance(node.arg.value, str) else None
    return None


def _is_index_of(node: jinja2.nodes.Node | None, names: set[str]) -> bool:
    """Whether an expression is an item of one of these lists, such as `messages[0]` or `messages[loop.index0]`."""
    return (
        isinstance(node, jinja2.nodes.Getitem)
        and isinstance(node.node, jinja2.nodes.Name)
        and node.node.name in names
        and not isinstance(node.arg, jinja2.nodes.Slice)
    )
