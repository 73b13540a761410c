"""Detects whether a chat template reads the content of messages as a string or as a list of parts (vLLM's `auto`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from jinja2 import nodes

ContentFormat = Literal["string", "parts"]


def detect_content_format(tree: nodes.Template) -> ContentFormat:
    """Return `parts` if a chat template loops over the content of a message, else `string` (vLLM's rule for `auto`).

    A content is `x.content` of a variable `x` that a loop over the messages sets; the parameter of a macro that is
    called with a content; and, outside macros, a variable named `content`.
    """
    message_names = _find_message_names(tree)
    parameters_by_loop: dict[nodes.For, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        parameters = _find_content_parameters(tree, macro, message_names)
        parameters_by_loop.update(dict.fromkeys(macro.find_all(nodes.For), parameters))
    for loop in tree.find_all(nodes.For):
        names = parameters_by_loop.get(loop, {"content"})
        if _is_content(loop.iter, message_names) or (isinstance(loop.iter, nodes.Name) and loop.iter.name in names):
            return "parts"
    return "string"


def _find_message_names(tree: nodes.Template) -> set[str]:
    """Return the names of variables that hold one message, as in `{% for m in messages %}`."""
    list_names = {"messages"}
    assignments = list(_list_assignments(tree))
    for _ in range(3):  # a block may use names that a later block assigns
        list_names |= {name for name, value in assignments if name and _get_name(_strip_filters(value)) in list_names}
    loops = [loop for loop in tree.find_all(nodes.For) if _get_name(_strip_filters(loop.iter)) in list_names]
    return {loop.target.name for loop in loops if isinstance(loop.target, nodes.Name)}


def _list_assignments(tree: nodes.Template) -> Iterator[tuple[str | None, nodes.Node]]:
    """Yield the name and the value of each assignment; an attribute of a namespace has a name such as `ns.turns`."""
    for assignment in tree.find_all(nodes.Assign):
        name, value = _get_name(assignment.target), assignment.node
        yield name, value
        if isinstance(value, nodes.Call) and _get_name(value.node) == "namespace":
            for argument in value.kwargs:
                yield f"{name}.{argument.key}", argument.value


def _find_content_parameters(tree: nodes.Template, macro: nodes.Macro, message_names: set[str]) -> set[str]:
    """Return the names of the macro's parameters for which a call gives the content of a message."""
    parameters = [parameter.name for parameter in macro.args]
    names = set()
    for call in tree.find_all(nodes.Call):
        if _get_name(call.node) == macro.name:
            arguments = [*zip(parameters, call.args), *((argument.key, argument.value) for argument in call.kwargs)]
            names |= {name for name, value in arguments if _is_content(value, message_names)}
    return names.intersection(parameters)


def _is_content(node: nodes.Node | None, message_names: set[str]) -> bool:
    """Return whether an expression is the content of a message, such as `message.content`."""
    node = _strip_filters(node)
    if isinstance(node, nodes.Getattr):
        key: object = node.attr
    elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        key = node.arg.value
    else:
        return False
    return key == "content" and isinstance(node.node, nodes.Name) and node.node.name in message_names


def _get_name(node: nodes.Node | None) -> str | None:
    """Return the name of a variable `x` or of an attribute `x.y`; None for another expression."""
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.NSRef):
        return f"{node.name}.{node.attr}"
    if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name):
        return f"{node.node.name}.{node.attr}"
    return None


def _strip_filters(node: nodes.Node | None) -> nodes.Node | None:
    """Return an expression without filters, tests and slices around it."""
    while isinstance(node, (nodes.Filter, nodes.Test)) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    return node
