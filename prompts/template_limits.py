"""Limits on the time and memory of a chat template, so that it can be rendered while other requests wait.

A template is a program from a checkpoint's folder. `add_limits` accepts a template if each of its operations takes time
in proportion to its operands, and if its values grow by concatenation only. It then adds a check of the clock to each
iteration of a loop and each call of a macro, and a check of the size to each concatenation. A template with anything
that is not on the lists below is refused, and rendered by a process with a deadline
(router/prompting/prompt_worker_pool.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

import jinja2
import jinja2.filters
import jinja2.runtime
from jinja2 import nodes

TEXT_CHARS_MAX: Final = 1 << 18
"""Most characters of a value; bodies that are rendered with limits have at most 64 KiB."""
PROMPT_CHARS_MAX: Final = 1 << 22
LIST_ITEMS_MAX: Final = 1024
"""Most items of a list that a template makes."""
CONCATENATED_NAMES_MAX: Final = 32
"""Most names in one concatenation."""
_NUMBER_MAX: Final = 1_000_000
_REPLACEMENT_CHARS_MAX: Final = 64

_SAFE_NODES = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.ExprStmt, nodes.Continue, nodes.Break,
    nodes.Slice, nodes.CondExpr, nodes.And, nodes.Or, nodes.Not, nodes.Compare, nodes.Operand, nodes.Concat, nodes.Add,
    nodes.Sub, nodes.FloorDiv, nodes.Neg, nodes.Pos, nodes.List, nodes.Tuple, nodes.For, nodes.Assign, nodes.Macro,
    nodes.Keyword, nodes.Dict, nodes.Name,
)  # fmt: skip
_LITERAL_NODES = (nodes.List, nodes.Tuple, nodes.Dict)
_SAFE_TESTS = frozenset((
    "boolean", "defined", "divisibleby", "eq", "equalto", "even", "false", "float", "ge", "gt", "in", "integer",
    "iterable", "le", "lt", "mapping", "ne", "none", "number", "odd", "sameas", "sequence", "string", "true",
    "undefined", "==", "!=", "<", "<=", ">", ">=",
))  # fmt: skip
_SAFE_FILTERS = frozenset((
    "abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "int", "items", "last",
    "length", "list", "lower", "max", "min", "reverse", "sort", "string", "title", "trim", "unique", "upper",
))  # fmt: skip
_SELECTING_FILTERS = frozenset(("map", "reject", "rejectattr", "select", "selectattr"))
"""Filters that apply a test, or a filter with constants, to every item."""
_MAP_FILTERS = frozenset(("first", "int", "last", "length", "lower", "string", "tojson", "trim", "upper"))
_SAFE_METHODS = frozenset((
    "capitalize", "count", "endswith", "find", "get", "index", "isdigit", "isspace", "items", "keys", "lower",
    "lstrip", "removeprefix", "removesuffix", "rfind", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip",
    "title", "upper", "values",
))  # fmt: skip
_MEASURED_METHODS = frozenset(("join", "replace"))
_UNSAFE_METHODS = frozenset(
    name for kind in (str, list, dict, tuple, int, float, range) for name in dir(kind) if not name.startswith("_")
) - (_SAFE_METHODS | _MEASURED_METHODS)
_SAFE_FUNCTIONS = frozenset(("caller", "dict", "namespace", "raise_exception", "range", "strftime_now"))
_NAMESPACES_KEY: Final = "namespaces"
_ARGUMENTS_KEY: Final = "arguments"


class RenderLimitError(jinja2.TemplateError):
    """A template took too much time, or made too large a value."""


class RenderContext(jinja2.runtime.Context):
    """Context of one rendering with a limit on its CPU time."""

    seconds_max = math.inf
    deadline_s = math.inf
    """Time (`time.perf_counter`) at which the CPU time is to be read, which is slower."""
    started_cpu_s = 0.0

    def set_time_limit(self, seconds_max: float) -> None:
        self.seconds_max = seconds_max
        self.started_cpu_s = time.thread_time()
        self.deadline_s = time.perf_counter() + seconds_max


@jinja2.pass_context
def is_in_time(context: RenderContext, _: object = None) -> bool:
    """Return true, as a Jinja test. Raises RenderLimitError if the rendering took too much CPU time."""
    now = time.perf_counter()
    if now > context.deadline_s:
        if time.thread_time() - context.started_cpu_s > context.seconds_max:
            raise RenderLimitError("the chat template takes too long")
        context.deadline_s = now + context.seconds_max  # other threads had the processor
    return True


def check_size(value: Any) -> Any:
    """Return a value that the template made. Raises RenderLimitError if it is too large."""
    value_type = type(value)
    if value_type is str:
        size_max = TEXT_CHARS_MAX
    elif value_type is list or value_type is tuple:
        size_max = LIST_ITEMS_MAX
    else:
        return value
    if len(value) > size_max:
        raise RenderLimitError("the chat template makes too much of the messages")
    return value


def concat(parts: Iterable[str]) -> str:
    """Join the output of a template or a macro. Raises RenderLimitError if it is too large."""
    texts = list(parts)
    if sum(map(len, texts)) > PROMPT_CHARS_MAX:
        raise RenderLimitError("the chat template makes too much of the messages")
    return "".join(texts)


def join(value: Iterable[Any], separator: str = "") -> str:
    """Join values as texts, like Jinja's filter `join`. Raises RenderLimitError if the result is too large."""
    return concat(_interleave(map(str, value), separator))


def _interleave(texts: Iterator[str], separator: str) -> Iterator[str]:
    for number, text in enumerate(texts):
        if number and separator:
            yield separator
        yield text


def install_limits(env: jinja2.Environment) -> None:
    """Add to an environment the test and the filters that templates with limits use."""
    env.context_class = RenderContext
    env.concat = concat  # type: ignore[method-assign]
    env.tests["in_time"] = is_in_time
    env.filters["check_size"] = check_size
    env.filters["join"] = join


def add_limits(tree: nodes.Template) -> nodes.Template | None:
    """Add checks to a template, so that it ends in time or raises RenderLimitError; None if that is not certain."""
    try:
        _TerminationCheck(tree).check(tree)
    except (_UnsupportedTemplate, RecursionError):
        return None
    _insert_checks(tree)
    assert tree.environment is not None
    tree.set_environment(tree.environment)
    return tree


class _UnsupportedTemplate(Exception):
    """The template is not certain to keep its limits."""


class _TerminationCheck:
    """Checks that a template consists of operations on the lists above."""

    def __init__(self, tree: nodes.Template) -> None:
        self._macro_names = {macro.name for macro in tree.find_all(nodes.Macro)}
        self._called_methods = {
            call.node.attr for call in tree.find_all(nodes.Call) if isinstance(call.node, nodes.Getattr)
        }
        self._argument_names = {name.name for macro in tree.find_all(nodes.Macro) for name in macro.args}
        assigned_names = [name.name for name in tree.find_all(nodes.Name) if name.ctx in ("store", "param")]
        if (self._macro_names | _SAFE_FUNCTIONS) & set(assigned_names):
            raise _UnsupportedTemplate
        self._namespace_names = _find_namespaces(tree)
        self._counters = _find_counters(tree)
        self._nesting_levels = self._find_nesting_levels(tree)

    def check(self, node: nodes.Node) -> None:
        """Raise _UnsupportedTemplate for an operation that is not on the lists."""
        node_type = type(node)
        if node_type is nodes.Const:
            self._check_const(node)  # type: ignore[arg-type]
        elif isinstance(node, nodes.For):
            if node.recursive:
                raise _UnsupportedTemplate
        elif isinstance(node, nodes.Filter):
            self._check_filter(node)
        elif isinstance(node, nodes.Call):
            self._check_call(node)
        elif isinstance(node, nodes.Test):
            if node.name not in _SAFE_TESTS or node.dyn_args is not None or node.dyn_kwargs is not None:
                raise _UnsupportedTemplate
        elif isinstance(node, nodes.Getattr):
            _check_attribute(node.attr)
        elif isinstance(node, nodes.Getitem):
            if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
                _check_attribute(node.arg.value)
        elif isinstance(node, nodes.NSRef):
            self._check_name(node.attr)
        elif isinstance(node, (nodes.Pair, nodes.Keyword)):
            if isinstance(node.key, nodes.Node) and not isinstance(node.key, nodes.Const):
                raise _UnsupportedTemplate
            self._check_name(node.key.value if isinstance(node.key, nodes.Const) else node.key)
        elif isinstance(node, nodes.Mod):
            if not _is_number(node.left) and not self._is_counter(node.left):
                raise _UnsupportedTemplate
        elif isinstance(node, nodes.AssignBlock):
            if node.filter is not None:
                raise _UnsupportedTemplate
        elif isinstance(node, nodes.CallBlock):
            if not isinstance(node.call.node, nodes.ExtensionAttribute):
                raise _UnsupportedTemplate
            for part in node.body:
                self.check(part)
            return
        elif node_type not in _SAFE_NODES:
            raise _UnsupportedTemplate
        if isinstance(node, (nodes.Add, nodes.Concat)):
            name_count = sum(1 for _ in node.find_all((nodes.Name, nodes.Filter, nodes.Call)))
            if name_count > CONCATENATED_NAMES_MAX:
                raise _UnsupportedTemplate
        for child in node.iter_child_nodes():
            self.check(child)

    def _check_name(self, name: object) -> None:
        """Raise _UnsupportedTemplate for a name that hides a method which the template calls."""
        is_method = name in _SAFE_METHODS or name in _MEASURED_METHODS
        if (is_method and name in self._called_methods) or name in _UNSAFE_METHODS:
            raise _UnsupportedTemplate

    def _is_counter(self, node: nodes.Node) -> bool:
        """Whether an expression is an attribute of a namespace which is always a number."""
        return (
            isinstance(node, nodes.Getattr)
            and isinstance(node.node, nodes.Name)
            and node.node.name in self._namespace_names
            and node.attr in self._counters
        )

    @staticmethod
    def _check_const(node: nodes.Const) -> None:
        if isinstance(node.value, (int, float)) and abs(node.value) > _NUMBER_MAX:
            raise _UnsupportedTemplate

    def _check_filter(self, node: nodes.Filter) -> None:
        if node.node is None or node.dyn_args is not None or node.dyn_kwargs is not None:
            raise _UnsupportedTemplate
        args = [*node.args, *(pair.value for pair in node.kwargs)]
        name = node.name
        if name in _SAFE_FILTERS:
            return
        if name in _SELECTING_FILTERS:
            _check_selecting_filter(node, args)
        elif name == "join":
            if node.kwargs or not all(_is_short_constant(arg) for arg in args):
                raise _UnsupportedTemplate
        elif name == "tojson":
            if any(not isinstance(arg, nodes.Const) for arg in args) or any(_is_integer_above(arg, 16) for arg in args):
                raise _UnsupportedTemplate
        elif name in ("replace", "indent"):
            if not all(_is_short_constant(arg) for arg in args) or any(_is_integer_above(arg, 16) for arg in args):
                raise _UnsupportedTemplate
        else:
            raise _UnsupportedTemplate

    def _check_call(self, node: nodes.Call) -> None:
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise _UnsupportedTemplate
        function = node.node
        if isinstance(function, nodes.Name):
            if function.name not in self._macro_names and function.name not in _SAFE_FUNCTIONS:
                raise _UnsupportedTemplate
            if function.name == "strftime_now" and not all(_is_short_constant(arg) for arg in node.args):
                raise _UnsupportedTemplate
            if function.name in ("dict", "namespace") and node.args:
                raise _UnsupportedTemplate
            return
        if not isinstance(function, nodes.Getattr):
            raise _UnsupportedTemplate
        if function.attr == "join":
            if not _is_short_constant(function.node):
                raise _UnsupportedTemplate
        elif function.attr == "replace":
            if not all(_is_short_constant(arg) for arg in node.args):
                raise _UnsupportedTemplate
        elif function.attr not in _SAFE_METHODS:
            raise _UnsupportedTemplate

    # Lists in lists ---------------------------------------------------------------------------------------------------

    def _find_nesting_levels(self, tree: nodes.Template) -> dict[str, int]:
        """Return the level of each name: 1 if it may be a list that the template made, else 0.

        Raises _UnsupportedTemplate if the template could make lists of such lists: a few statements can nest them so
        deep that writing one out takes for ever.
        """
        levels: dict[str, int] = {}
        self._nesting_levels = levels
        for _ in range(len(self._argument_names) + 64):
            previous_levels = dict(levels)
            for node in tree.find_all((nodes.Assign, nodes.For, nodes.Call, nodes.Macro)):
                for name, level in self._iter_assigned_levels(node):
                    if level > 1:
                        raise _UnsupportedTemplate
                    levels[name] = max(levels.get(name, 0), level)
            if levels == previous_levels:
                return levels
        raise _UnsupportedTemplate

    def _iter_assigned_levels(self, node: nodes.Node) -> Iterator[tuple[str, int]]:
        if isinstance(node, nodes.Assign):
            target, level = node.target, self._get_nesting_level(node.node)
            if isinstance(target, nodes.NSRef):
                yield _NAMESPACES_KEY, level
            elif isinstance(target, nodes.Name) and target.name in self._namespace_names:
                return
            else:
                yield from ((name, level) for name in _list_target_names(target))
        elif isinstance(node, nodes.For):
            level = self._get_nesting_level(node.iter)
            yield from ((name, level) for name in ("loop", *_list_target_names(node.target)))
        elif isinstance(node, nodes.Macro):
            yield from ((_ARGUMENTS_KEY, self._get_nesting_level(value)) for value in node.defaults)
        elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name):
            values = [*node.args, *(pair.value for pair in node.kwargs)]
            if node.node.name in self._macro_names:
                yield from ((_ARGUMENTS_KEY, self._get_nesting_level(value)) for value in values)
            elif node.node.name == "namespace":
                yield from ((_NAMESPACES_KEY, self._get_nesting_level(value)) for value in values)

    def _get_nesting_level(self, node: nodes.Node | None) -> int:
        """Return how many containers of the template may lie inside each other in an expression's value.

        Strings and numbers have level 0. A list, tuple or dict has one level more than its deepest item.
        """
        if isinstance(node, nodes.Name):
            if node.name in self._namespace_names:
                return self._nesting_levels.get(_NAMESPACES_KEY, 0) + 1
            level = self._nesting_levels.get(node.name, 0)
            return (
                max(level, self._nesting_levels.get(_ARGUMENTS_KEY, 0)) if node.name in self._argument_names else level
            )
        if isinstance(node, _LITERAL_NODES):
            return 1 + max((self._get_item_level(item) for item in node.iter_child_nodes()), default=0)
        if (
            isinstance(node, nodes.Getattr)
            and isinstance(node.node, nodes.Name)
            and node.node.name in self._namespace_names
        ):
            return self._nesting_levels.get(_NAMESPACES_KEY, 0)
        if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name):
            if node.node.name not in ("dict", "namespace"):
                return 0
            return 1 + max((self._get_nesting_level(pair.value) for pair in node.kwargs), default=0)
        if node is None or isinstance(node, (nodes.Const, nodes.Concat, nodes.Compare, nodes.Test, nodes.Not)):
            return 0
        if isinstance(node, nodes.Filter) and node.name in ("trim", "tojson", "string", "join", "length", "count"):
            return 0
        return max((self._get_nesting_level(child) for child in node.iter_child_nodes()), default=0)

    def _get_item_level(self, node: nodes.Node) -> int:
        """Return the level of an item of a literal; a literal in a literal adds none, as its size is fixed."""
        if isinstance(node, nodes.Pair):
            return self._get_item_level(node.value)
        level = self._get_nesting_level(node)
        return level - 1 if isinstance(node, _LITERAL_NODES) else level


def _check_selecting_filter(node: nodes.Filter, args: list[nodes.Expr]) -> None:
    """Raise _UnsupportedTemplate unless a filter applies a safe test or filter with constants to every item."""
    if not all(_is_constant(arg) for arg in args) or any(pair.key != "attribute" for pair in node.kwargs):
        raise _UnsupportedTemplate
    texts = [arg.value for arg in args if isinstance(arg, nodes.Const) and isinstance(arg.value, str)]
    for text in texts:
        _check_attribute(text)
    if node.name == "map":
        applies_filter = not node.kwargs
        if applies_filter and (len(args) != 1 or not texts or texts[0] not in _MAP_FILTERS):
            raise _UnsupportedTemplate
        return
    tests = args[:1] if node.name in ("select", "reject") else args[1:2]
    if any(not isinstance(test, nodes.Const) or test.value not in _SAFE_TESTS for test in tests):
        raise _UnsupportedTemplate


def _find_namespaces(tree: nodes.Template) -> set[str]:
    """Return the names that are always namespaces."""
    namespaces, other_names = set[str](), set[str]()
    for assign in tree.find_all(nodes.Assign):
        call = assign.node
        is_space = isinstance(call, nodes.Call) and isinstance(call.node, nodes.Name) and call.node.name == "namespace"
        (namespaces if is_space else other_names).update(_list_target_names(assign.target))
    for loop in tree.find_all(nodes.For):
        other_names.update(_list_target_names(loop.target))
    for macro in tree.find_all(nodes.Macro):
        other_names.update(name.name for name in macro.args)
    return namespaces - other_names


def _find_counters(tree: nodes.Template) -> set[str]:
    """Return the names of attributes that are numbers in every namespace that has them."""
    numbers, others = set[str](), set[str]()
    for assign in tree.find_all(nodes.Assign):
        for target in (assign.target, *assign.target.find_all(nodes.NSRef)):
            if isinstance(target, nodes.NSRef):
                (numbers if target is assign.target and _is_number(assign.node) else others).add(target.attr)
    for block in tree.find_all(nodes.AssignBlock):
        others.update(target.attr for target in (block.target, *block.target.find_all(nodes.NSRef))
                      if isinstance(target, nodes.NSRef))  # fmt: skip
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == "namespace":
            for pair in call.kwargs:
                (numbers if _is_number(pair.value) else others).add(pair.key)
    return numbers - others


def _list_target_names(target: nodes.Node) -> list[str]:
    if isinstance(target, nodes.Name):
        return [target.name]
    return [name.name for name in target.find_all(nodes.Name)]


def _check_attribute(name: str) -> None:
    if name in _UNSAFE_METHODS:
        raise _UnsupportedTemplate


def _is_constant(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) or (
        isinstance(node, (nodes.List, nodes.Tuple)) and all(isinstance(item, nodes.Const) for item in node.items)
    )


def _is_short_constant(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and not (
        isinstance(node.value, str) and len(node.value) > _REPLACEMENT_CHARS_MAX
    )


def _is_integer_above(node: nodes.Node, limit: int) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, int) and node.value > limit


def _is_number(node: nodes.Node) -> bool:
    """Whether the left side of `%` is a number; `%` would format a text."""
    if isinstance(node, nodes.Getattr):
        return isinstance(node.node, nodes.Name) and node.node.name == "loop"
    if isinstance(node, (nodes.Sub, nodes.FloorDiv, nodes.Neg)):
        return True
    if isinstance(node, nodes.Add):
        return _is_number(node.left) or _is_number(node.right)
    if isinstance(node, nodes.Filter):
        return node.name in ("length", "count", "int")
    return isinstance(node, nodes.Const) and isinstance(node.value, int)


# Adding checks --------------------------------------------------------------------------------------------------------


def _insert_checks(tree: nodes.Template) -> None:
    for loop in list(tree.find_all(nodes.For)):
        loop.body.insert(0, nodes.ExprStmt(_make_deadline_check(), lineno=loop.lineno))
        if loop.test is not None:
            loop.test = nodes.And(_make_deadline_check(), loop.test, lineno=loop.lineno)
    for macro in list(tree.find_all(nodes.Macro)):
        macro.body.insert(0, nodes.ExprStmt(_make_deadline_check(), lineno=macro.lineno))
    _insert_size_checks(tree)


def _make_deadline_check() -> nodes.Test:
    return nodes.Test(nodes.Const(None, lineno=1), "in_time", [], [], None, None, lineno=1)


def _insert_size_checks(node: nodes.Node, *, inside_concatenation: bool = False) -> None:
    """Add a check of the size around each operation that makes a larger value, once for nested concatenations."""
    for name, value in list(node.iter_fields()):
        if isinstance(value, nodes.Node):
            setattr(node, name, _add_size_check(value, inside_concatenation=inside_concatenation))
        elif isinstance(value, list):
            value[:] = [
                _add_size_check(item, inside_concatenation=inside_concatenation)
                if isinstance(item, nodes.Node)
                else item
                for item in value
            ]


def _add_size_check(node: nodes.Node, *, inside_concatenation: bool) -> nodes.Node:
    is_concatenation = isinstance(node, (nodes.Add, nodes.Concat))
    _insert_size_checks(node, inside_concatenation=is_concatenation)
    can_grow = isinstance(node, nodes.Filter) and node.name in ("join", "replace", "indent", "tojson")
    can_grow |= (
        isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr in _MEASURED_METHODS
    )
    if (is_concatenation and not inside_concatenation) or can_grow:
        return nodes.Filter(node, "check_size", [], [], None, None, lineno=node.lineno)
    return node
