"""Chat templates that may be rendered where others wait: each is proven to end soon, or to be interrupted soon.

A template is a program out of a checkpoint's folder. `add_limits` accepts one whose every operation takes time in
proportion to its operands, and whose values cannot grow but by concatenation. Such a template is changed so that it
looks at the clock in each turn of a loop and at each call of a macro, and so that what is put together is measured.
Whatever is not on the lists below is a doubt, and a doubt is a no: that template is rendered in a process with a
deadline (router/prompting/prompt_worker_pool.py).
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
"""Of a value. What is rendered like this comes of a body of 64 KiB."""
PROMPT_CHARS_MAX: Final = 1 << 22
ITEMS_MAX: Final = 1024
"""Of a list that a template puts together."""
_OPERANDS_MAX: Final = 32
"""Names in what is put together at once."""
_CONST_MAX: Final = 1_000_000
_REPLACEMENT_CHARS_MAX: Final = 64

_PLAIN = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.ExprStmt, nodes.Continue, nodes.Break,
    nodes.Slice, nodes.CondExpr, nodes.And, nodes.Or, nodes.Not, nodes.Compare, nodes.Operand, nodes.Concat, nodes.Add,
    nodes.Sub, nodes.FloorDiv, nodes.Neg, nodes.Pos, nodes.List, nodes.Tuple, nodes.For, nodes.Assign, nodes.Macro,
    nodes.Keyword, nodes.Dict, nodes.Name,
)  # fmt: skip
_LITERALS = (nodes.List, nodes.Tuple, nodes.Dict)
_TESTS = frozenset((
    "boolean", "defined", "divisibleby", "eq", "equalto", "even", "false", "float", "ge", "gt", "in", "integer",
    "iterable", "le", "lt", "mapping", "ne", "none", "number", "odd", "one_of", "sameas", "sequence", "string", "true",
    "undefined", "==", "!=", "<", "<=", ">", ">=",
))  # fmt: skip
_FILTERS = frozenset((
    "abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "int", "items", "last",
    "length", "list", "lower", "max", "min", "reverse", "sort", "string", "title", "trim", "unique", "upper",
))  # fmt: skip
_CHOOSING = frozenset(("map", "reject", "rejectattr", "select", "selectattr"))
"""Filters that look at every item: by a test or a filter with constants."""
_MAPPED = frozenset(("first", "int", "last", "length", "lower", "string", "tojson", "trim", "upper"))
_METHODS = frozenset((
    "capitalize", "count", "endswith", "find", "get", "index", "isdigit", "isspace", "items", "keys", "lower",
    "lstrip", "removeprefix", "removesuffix", "rfind", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip",
    "title", "upper", "values",
))  # fmt: skip
_MEASURED_METHODS = frozenset(("join", "replace"))
_OTHER_METHODS = frozenset(
    name for kind in (str, list, dict, tuple, int, float, range) for name in dir(kind) if not name.startswith("_")
) - (_METHODS | _MEASURED_METHODS)
_FUNCTIONS = frozenset(("caller", "dict", "namespace", "raise_exception", "range", "strftime_now"))
_SPACES: Final = "namespaces"
_ARGUMENTS: Final = "arguments"


class RenderLimitError(jinja2.TemplateError):
    """A template ran out of its time, or made more than it may."""


class Context(jinja2.runtime.Context):
    """One rendering, which may take some CPU time."""

    seconds_max = math.inf
    deadline_s = math.inf
    """When to look at its CPU time (`time.perf_counter`)."""
    started_cpu_s = 0.0

    def limit(self, seconds_max: float) -> None:
        self.seconds_max = seconds_max
        self.started_cpu_s = time.thread_time()
        self.deadline_s = time.perf_counter() + seconds_max


@jinja2.pass_context
def in_time(context: Context, _: object = None) -> bool:
    """A test that is always true. Raises RenderLimitError where the rendering took its time."""
    now = time.perf_counter()
    if now > context.deadline_s:
        if time.thread_time() - context.started_cpu_s > context.seconds_max:
            raise RenderLimitError("the chat template takes too long")
        context.deadline_s = now + context.seconds_max  # others had the processor
    return True


def measured(value: Any) -> Any:
    """A value that was put together. Raises RenderLimitError where it is too large."""
    kind = type(value)
    if kind is str:
        most = TEXT_CHARS_MAX
    elif kind is list or kind is tuple:
        most = ITEMS_MAX
    else:
        return value
    if len(value) > most:
        raise RenderLimitError("the chat template makes too much of the messages")
    return value


def concat(parts: Iterable[str]) -> str:
    """What a template or a macro writes. Raises RenderLimitError where that is too much."""
    written = list(parts)
    if sum(map(len, written)) > PROMPT_CHARS_MAX:
        raise RenderLimitError("the chat template makes too much of the messages")
    return "".join(written)


def join(value: Iterable[Any], between: str = "") -> str:
    """`join` of texts, numbers and what else is written as it is."""
    return concat(_between(map(str, value), between))


def _between(texts: Iterator[str], between: str) -> Iterator[str]:
    for number, text in enumerate(texts):
        if number and between:
            yield between
        yield text


def equip(env: jinja2.Environment) -> None:
    """Give an environment what bounded templates need."""
    env.context_class = Context
    env.concat = concat  # type: ignore[method-assign]
    env.tests["in_time"] = in_time
    env.filters["measured"] = measured
    env.filters["join"] = join


def add_limits(tree: nodes.Template) -> nodes.Template | None:
    """`tree`, changed so that it ends in time or raises RenderLimitError; None where that cannot be promised."""
    try:
        _TerminationCheck(tree).check(tree)
    except (_UnsupportedTemplate, RecursionError):
        return None
    _insert(tree)
    assert tree.environment is not None
    tree.set_environment(tree.environment)
    return tree


class _UnsupportedTemplate(Exception):
    """The template is not of the kind."""


class _TerminationCheck:
    def __init__(self, tree: nodes.Template) -> None:
        self._macros = {macro.name for macro in tree.find_all(nodes.Macro)}
        self._arguments = {name.name for macro in tree.find_all(nodes.Macro) for name in macro.args}
        stored = [name.name for name in tree.find_all(nodes.Name) if name.ctx in ("store", "param")]
        if (self._macros | _FUNCTIONS) & set(stored):
            raise _UnsupportedTemplate
        self._spaces = _only_namespaces(tree)
        self._levels = self._find_levels(tree)

    def check(self, node: nodes.Node) -> None:
        """Raises _UnsupportedTemplate."""
        kind = type(node)
        if kind is nodes.Const:
            self._const(node)  # type: ignore[arg-type]
        elif isinstance(node, nodes.For):
            if node.recursive:
                raise _UnsupportedTemplate
        elif isinstance(node, nodes.Filter):
            self._filter(node)
        elif isinstance(node, nodes.Call):
            self._call(node)
        elif isinstance(node, nodes.Test):
            if node.name not in _TESTS or node.dyn_args is not None or node.dyn_kwargs is not None:
                raise _UnsupportedTemplate
        elif isinstance(node, nodes.Getattr):
            _known_attribute(node.attr)
        elif isinstance(node, nodes.Getitem):
            if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
                _known_attribute(node.arg.value)
        elif isinstance(node, nodes.NSRef):
            _own_name(node.attr)
        elif isinstance(node, (nodes.Pair, nodes.Keyword)):
            if isinstance(node.key, nodes.Node) and not isinstance(node.key, nodes.Const):
                raise _UnsupportedTemplate
            _own_name(node.key.value if isinstance(node.key, nodes.Const) else node.key)
        elif isinstance(node, nodes.Mod):
            if not _is_number(node.left):
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
        elif kind not in _PLAIN:
            raise _UnsupportedTemplate
        joins = isinstance(node, (nodes.Add, nodes.Concat))
        if joins and sum(1 for _ in node.find_all((nodes.Name, nodes.Filter, nodes.Call))) > _OPERANDS_MAX:
            raise _UnsupportedTemplate
        for child in node.iter_child_nodes():
            self.check(child)

    @staticmethod
    def _const(node: nodes.Const) -> None:
        if isinstance(node.value, (int, float)) and abs(node.value) > _CONST_MAX:
            raise _UnsupportedTemplate

    def _filter(self, node: nodes.Filter) -> None:
        if node.node is None or node.dyn_args is not None or node.dyn_kwargs is not None:
            raise _UnsupportedTemplate
        args = [*node.args, *(pair.value for pair in node.kwargs)]
        name = node.name
        if name in _FILTERS:
            return
        if name in _CHOOSING:
            if not all(_is_constant(arg) for arg in args) or any(pair.key != "attribute" for pair in node.kwargs):
                raise _UnsupportedTemplate
            named = [arg.value for arg in args if isinstance(arg, nodes.Const) and isinstance(arg.value, str)]
            for one in named:
                _known_attribute(one)
            if name == "map" and not node.kwargs and (len(args) != 1 or named[:1] == [] or named[0] not in _MAPPED):
                raise _UnsupportedTemplate
            tests = args[:1] if name in ("select", "reject") else args[1:2] if name != "map" else []
            if any(not isinstance(test, nodes.Const) or test.value not in _TESTS for test in tests):
                raise _UnsupportedTemplate
        elif name == "join":
            if node.kwargs or not all(_is_short(arg) for arg in args):
                raise _UnsupportedTemplate
        elif name == "tojson":
            if any(not isinstance(arg, nodes.Const) for arg in args) or any(_is_more(arg, 16) for arg in args):
                raise _UnsupportedTemplate
        elif name in ("replace", "indent"):
            if not all(_is_short(arg) for arg in args) or any(_is_more(arg, 16) for arg in args):
                raise _UnsupportedTemplate
        else:
            raise _UnsupportedTemplate

    def _call(self, node: nodes.Call) -> None:
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise _UnsupportedTemplate
        called = node.node
        if isinstance(called, nodes.Name):
            if called.name not in self._macros and called.name not in _FUNCTIONS:
                raise _UnsupportedTemplate
            if called.name == "strftime_now" and not all(_is_short(arg) for arg in node.args):
                raise _UnsupportedTemplate
            if called.name in ("dict", "namespace") and node.args:
                raise _UnsupportedTemplate
            return
        if not isinstance(called, nodes.Getattr):
            raise _UnsupportedTemplate
        if called.attr == "join":
            if not _is_short(called.node):
                raise _UnsupportedTemplate
        elif called.attr == "replace":
            if not all(_is_short(arg) for arg in node.args):
                raise _UnsupportedTemplate
        elif called.attr not in _METHODS:
            raise _UnsupportedTemplate

    # Lists in lists ---------------------------------------------------------------------------------------------------

    def _find_levels(self, tree: nodes.Template) -> dict[str, int]:
        """name -> 1 where it may stand for a list that the template made, 0 where it may only stand for what came with
        the request, for a text, or for a list of items of those. Raises _UnsupportedTemplate where lists of such lists
        could be made: a few statements would make one that is written out without end."""
        levels: dict[str, int] = {}
        self._levels = levels
        for _ in range(len(self._arguments) + 64):
            before = dict(levels)
            for node in tree.find_all((nodes.Assign, nodes.For, nodes.Call, nodes.Macro)):
                for name, level in self._told(node):
                    if level > 1:
                        raise _UnsupportedTemplate
                    levels[name] = max(levels.get(name, 0), level)
            if levels == before:
                return levels
        raise _UnsupportedTemplate

    def _told(self, node: nodes.Node) -> Iterator[tuple[str, int]]:
        if isinstance(node, nodes.Assign):
            target, level = node.target, self._level(node.node)
            if isinstance(target, nodes.NSRef):
                yield _SPACES, level
            elif isinstance(target, nodes.Name) and target.name in self._spaces:
                return
            else:
                yield from ((name, level) for name in _names(target))
        elif isinstance(node, nodes.For):
            level = self._level(node.iter)
            yield from ((name, level) for name in ("loop", *_names(node.target)))
        elif isinstance(node, nodes.Macro):
            yield from ((_ARGUMENTS, self._level(value)) for value in node.defaults)
        elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name):
            values = [*node.args, *(pair.value for pair in node.kwargs)]
            if node.node.name in self._macros:
                yield from ((_ARGUMENTS, self._level(value)) for value in values)
            elif node.node.name == "namespace":
                yield from ((_SPACES, self._level(value)) for value in values)

    def _level(self, node: nodes.Node | None) -> int:
        if isinstance(node, nodes.Name):
            if node.name in self._spaces:
                return self._levels.get(_SPACES, 0) + 1
            own = self._levels.get(node.name, 0)
            return max(own, self._levels.get(_ARGUMENTS, 0)) if node.name in self._arguments else own
        if isinstance(node, _LITERALS):
            return 1 + max((self._inside(item) for item in node.iter_child_nodes()), default=0)
        if isinstance(node, nodes.Getattr) and isinstance(node.node, nodes.Name) and node.node.name in self._spaces:
            return self._levels.get(_SPACES, 0)
        if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name):
            if node.node.name not in ("dict", "namespace"):
                return 0
            return 1 + max((self._level(pair.value) for pair in node.kwargs), default=0)
        if node is None or isinstance(node, (nodes.Const, nodes.Concat, nodes.Compare, nodes.Test, nodes.Not)):
            return 0
        if isinstance(node, nodes.Filter) and node.name in ("trim", "tojson", "string", "join", "length", "count"):
            return 0
        return max((self._level(child) for child in node.iter_child_nodes()), default=0)

    def _inside(self, node: nodes.Node) -> int:
        """The level of an item of a literal: literals in literals are as large as they are written, and no larger."""
        if isinstance(node, nodes.Pair):
            return self._inside(node.value)
        level = self._level(node)
        return level - 1 if isinstance(node, _LITERALS) else level


def _only_namespaces(tree: nodes.Template) -> set[str]:
    """Names that stand for namespaces and nothing else."""
    made, other = set[str](), set[str]()
    for assign in tree.find_all(nodes.Assign):
        call = assign.node
        is_space = isinstance(call, nodes.Call) and isinstance(call.node, nodes.Name) and call.node.name == "namespace"
        (made if is_space else other).update(_names(assign.target))
    for loop in tree.find_all(nodes.For):
        other.update(_names(loop.target))
    for macro in tree.find_all(nodes.Macro):
        other.update(name.name for name in macro.args)
    return made - other


def _names(target: nodes.Node) -> list[str]:
    if isinstance(target, nodes.Name):
        return [target.name]
    return [name.name for name in target.find_all(nodes.Name)]


def _known_attribute(name: str) -> None:
    if name in _OTHER_METHODS:
        raise _UnsupportedTemplate


def _own_name(name: object) -> None:
    """What a template may call something of its own: not what methods are called, which it could hide there."""
    if name in _METHODS or name in _MEASURED_METHODS or name in _OTHER_METHODS:
        raise _UnsupportedTemplate


def _is_constant(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) or (
        isinstance(node, (nodes.List, nodes.Tuple)) and all(isinstance(item, nodes.Const) for item in node.items)
    )


def _is_short(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and not (
        isinstance(node.value, str) and len(node.value) > _REPLACEMENT_CHARS_MAX
    )


def _is_more(node: nodes.Node, most: int) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, int) and node.value > most


def _is_number(node: nodes.Node) -> bool:
    """Of the left side of `%`, which would format a text."""
    if isinstance(node, nodes.Getattr):
        return isinstance(node.node, nodes.Name) and node.node.name == "loop"
    if isinstance(node, (nodes.Sub, nodes.FloorDiv, nodes.Neg)):
        return True
    if isinstance(node, nodes.Add):
        return _is_number(node.left) or _is_number(node.right)
    if isinstance(node, nodes.Filter):
        return node.name in ("length", "count", "int")
    return isinstance(node, nodes.Const) and isinstance(node.value, int)


# The change -----------------------------------------------------------------------------------------------------------


def _insert(tree: nodes.Template) -> None:
    for loop in list(tree.find_all(nodes.For)):
        loop.body.insert(0, nodes.ExprStmt(_look(), lineno=loop.lineno))
        if loop.test is not None:
            loop.test = nodes.And(_look(), loop.test, lineno=loop.lineno)
    for macro in list(tree.find_all(nodes.Macro)):
        macro.body.insert(0, nodes.ExprStmt(_look(), lineno=macro.lineno))
    _measure(tree)


def _look() -> nodes.Test:
    return nodes.Test(nodes.Const(None, lineno=1), "in_time", [], [], None, None, lineno=1)


def _measure(node: nodes.Node, *, inside: bool = False) -> None:
    """Have every value measured that is put together, once for all that is put together at once."""
    for name, value in list(node.iter_fields()):
        if isinstance(value, nodes.Node):
            setattr(node, name, _with_measure(value, inside=inside))
        elif isinstance(value, list):
            value[:] = [_with_measure(item, inside=inside) if isinstance(item, nodes.Node) else item for item in value]


def _with_measure(node: nodes.Node, *, inside: bool) -> nodes.Node:
    joins = isinstance(node, (nodes.Add, nodes.Concat))
    _measure(node, inside=joins)
    grows = isinstance(node, nodes.Filter) and node.name in ("join", "replace", "indent", "tojson")
    grows |= (
        isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr in _MEASURED_METHODS
    )
    if (joins and not inside) or grows:
        return nodes.Filter(node, "measured", [], [], None, None, lineno=node.lineno)
    return node
