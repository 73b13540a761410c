"""Limits on the time and memory of a chat template, so that it can be rendered while other requests wait.

A template is a program from a checkpoint's folder. With limits, each of its operations takes time in proportion to its
operands, and no value becomes large: `add_limits` adds a check of the clock to loops and macros and a check of the size
to concatenations, and `LimitedEnvironment` checks operators, calls and filters. Whatever could take long in another way
raises RenderLimitError. Such a template is rendered by a process with a deadline
(router/prompting/prompt_worker_pool.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from types import BuiltinMethodType, GeneratorType, MethodType
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
from jinja2 import nodes

TEXT_CHARS_MAX: Final = 1 << 18
"""Most characters of a value; bodies that are rendered with limits have at most 64 KiB."""
PROMPT_CHARS_MAX: Final = 1 << 22
"""Most characters of a prompt, of a macro's text, and of what a filter makes of a list."""
ITEM_CHARS: Final = 4
"""An item of a list counts as so many characters, besides its own."""
CONCATENATED_NAMES_MAX: Final = 32
"""Most names in one concatenation."""
NUMBER_MAX: Final = 1 << 40
ARGUMENT_LENGTH_MAX: Final = 64
"""Longest text or list as an argument of a function that repeats it."""
INDENT_MAX: Final = 16

_SAFE_STATEMENTS = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Assign, nodes.AssignBlock, nodes.Macro,
    nodes.CallBlock, nodes.FilterBlock, nodes.ExprStmt, nodes.Continue, nodes.Break,
)  # fmt: skip
_SAFE_TESTS = frozenset((
    "boolean", "defined", "divisibleby", "eq", "equalto", "even", "false", "float", "ge", "gt", "in", "integer",
    "iterable", "le", "lt", "mapping", "ne", "none", "number", "odd", "sameas", "sequence", "string", "true",
    "undefined", "==", "!=", "<", "<=", ">", ">=",
))  # fmt: skip
_FILTERS = frozenset((
    "abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "indent", "int", "items", "join",
    "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "select",
    "selectattr", "sort", "string", "title", "tojson", "trim", "unique", "upper",
))  # fmt: skip
"""Filters that templates may use. Their arguments and results are checked."""
_MAPPED_FILTERS = frozenset(("first", "int", "last", "length", "lower", "string", "tojson", "trim", "upper"))
"""Filters that `map` may apply to each item."""
_SAFE_METHODS = frozenset((
    "capitalize", "count", "cycle", "endswith", "find", "get", "index", "isdigit", "isspace", "items", "keys", "lower",
    "lstrip", "removeprefix", "removesuffix", "rfind", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip",
    "title", "upper", "values",
))  # fmt: skip
_MEASURED_METHODS = frozenset(("join", "replace"))
_METHODS = _SAFE_METHODS | _MEASURED_METHODS
_FUNCTIONS: Final = ("dict", "namespace", "raise_exception", "range", "strftime_now")
"""Global functions of templates."""


class RenderLimitError(jinja2.TemplateError):
    """A template takes too much time or makes too large a value, or could do so."""


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


# Sizes ----------------------------------------------------------------------------------------------------------------


def check_size(value: Any) -> Any:
    """Return a value that the template made. Raises RenderLimitError if the value is too large."""
    if isinstance(value, str):
        if len(value) > TEXT_CHARS_MAX:
            raise _make_size_error()
    elif isinstance(value, (list, tuple, dict, jinja2.utils.Namespace)):
        _subtract_chars(value, TEXT_CHARS_MAX)
    return value


def _subtract_chars(value: Any, chars_left: int) -> int:
    """Return what is left of `chars_left` after the characters of a value and of all items in it.

    Each value costs ITEM_CHARS besides. An item that occurs several times counts each time. Raises RenderLimitError if
    the result is negative, and for a namespace, because a template can let it grow afterwards.
    """
    if isinstance(value, jinja2.utils.Namespace):
        raise RenderLimitError("the chat template puts a namespace into another value, which may become too large")
    if isinstance(value, str):
        chars_left -= len(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            chars_left = _subtract_chars(key, chars_left)
            chars_left = _subtract_chars(item, chars_left)
    elif isinstance(value, (list, tuple)):
        for item in value:
            chars_left = _subtract_chars(item, chars_left)
    chars_left -= ITEM_CHARS
    if chars_left < 0:
        raise _make_size_error()
    return chars_left


def _make_size_error() -> RenderLimitError:
    return RenderLimitError("the chat template makes too much of the messages")


def _check_arguments(arguments: Iterable[Any]) -> None:
    """Raise RenderLimitError for a long text or list among the arguments of a function that repeats them."""
    for argument in arguments:
        if isinstance(argument, (str, list, tuple)) and len(argument) > ARGUMENT_LENGTH_MAX:
            raise RenderLimitError("the chat template may take too long: it repeats a long text")
        if isinstance(argument, (list, tuple)):
            _check_arguments(argument)


def _limit_items(context: Any, items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items that a filter makes. Raises RenderLimitError if they are too large together."""
    chars_left = PROMPT_CHARS_MAX
    for item in items:
        if isinstance(context, RenderContext):
            is_in_time(context)
        chars_left -= ITEM_CHARS + (len(item) if isinstance(item, str) else 0)
        if chars_left < 0:
            raise _make_size_error()
        yield item


def concat(parts: Iterable[str]) -> str:
    """Join the output of a template or a macro. Raises RenderLimitError if the output is too large."""
    texts = []
    chars_left = PROMPT_CHARS_MAX
    for text in parts:
        chars_left -= len(text)
        if chars_left < 0:
            raise _make_size_error()
        texts.append(text)
    return "".join(texts)


def _limit_filter(name: str, apply_filter: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that checks its arguments and what it makes."""
    value_index = int(hasattr(apply_filter, "jinja_pass_arg"))  # the context or the environment comes before the value

    @wraps(apply_filter)
    def limited_filter(*arguments: Any, **options: Any) -> Any:
        filter_arguments = arguments[value_index + 1 :]
        _check_arguments((*filter_arguments, *options.values()))
        _check_filter(name, filter_arguments, options)
        check_size(arguments[value_index])  # a macro's text may be larger than a value
        result = apply_filter(*arguments, **options)
        return _limit_items(arguments[0], result) if isinstance(result, GeneratorType) else check_size(result)

    return limited_filter


def _check_filter(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raise RenderLimitError for a large indent, and for `map` with a filter that is not known to be fast."""
    indents = (*arguments, *options.values()) if name in ("indent", "tojson") else ()
    maps_slow_filter = name == "map" and arguments and (len(arguments) > 1 or arguments[0] not in _MAPPED_FILTERS)
    if maps_slow_filter or any(
        len(indent) > INDENT_MAX if isinstance(indent, str) else isinstance(indent, int) and indent > INDENT_MAX
        for indent in indents
    ):
        raise RenderLimitError(f"the chat template may take too long: it uses the filter {name} in an unusual way")


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Sandbox that bounds the time and the values of templates. Call `restrict` after its filters are set."""

    context_class = RenderContext
    concat = staticmethod(concat)
    intercepted_binops = frozenset(("*", "**", "%"))

    def restrict(self) -> None:
        """Remove all tests, filters and functions that may take long."""
        self.tests = {name: test for name, test in self.tests.items() if name in _SAFE_TESTS}
        self.tests["in_time"] = is_in_time
        self.filters = {name: _limit_filter(name, self.filters[name]) for name in _FILTERS}
        self.filters["check_size"] = check_size
        self.globals = {name: self.globals[name] for name in _FUNCTIONS if name in self.globals}

    def is_safe_callable(self, obj: Any) -> bool:
        """Return whether the sandbox allows a call. Raises RenderLimitError unless the call is known to be fast."""
        if isinstance(obj, (BuiltinMethodType, MethodType)):
            is_fast = obj.__name__ in _METHODS or isinstance(obj.__self__, jinja2.ext.Extension)
        else:
            is_macro_or_undefined = isinstance(obj, (jinja2.runtime.Macro, jinja2.Undefined))
            is_global_function = any(obj is function for function in self.globals.values())
            is_fast = is_macro_or_undefined or not callable(obj) or is_global_function
        if not is_fast:
            raise RenderLimitError(f"the chat template may take too long: it calls {obj!r:.80}")
        return super().is_safe_callable(obj)

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function, a method or a macro, and check the size of the result.

        The parameters are named as in Jinja, so that a template can pass a keyword such as `self`.
        """
        self, function = __self, __obj
        options = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
        if type(function) is BuiltinMethodType:
            if isinstance(function.__self__, str):
                check_size(function.__self__)
            if function.__name__ in _SAFE_METHODS:  # fast path of nearly all calls
                return check_size(function(*args, **options))
        self._check_call(function, args, options)
        result = super().call(__context, function, *args, **kwargs)
        if isinstance(function, jinja2.runtime.Macro) or function is self.globals["namespace"]:
            return result  # `concat` has checked a macro's text, and `_check_call` the content of a namespace
        return check_size(result)

    def _check_call(self, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Raise RenderLimitError if the arguments could make a call slow."""
        if isinstance(function, BuiltinMethodType) and function.__name__ in _MEASURED_METHODS:
            _check_arguments([function.__self__] if function.__name__ == "join" else args)
        elif function is self.globals.get("strftime_now"):
            args = (*args, *options.values())
            _check_arguments(args)
            if any(char.isdigit() for argument in args for char in str(argument)):
                raise RenderLimitError("the chat template may take too long: it writes the time with a width")
        elif function is self.globals["namespace"]:
            check_size([*args, options])

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `*` or `%` of numbers. Raises RenderLimitError for `**`, for other values, and for large results."""
        if operator == "%" and isinstance(left, int):
            return left % right
        if operator == "**" or not (isinstance(left, (int, float)) and isinstance(right, (int, float))):
            raise RenderLimitError(f"the chat template may take too long: it uses {operator} for more than numbers")
        result = super().call_binop(context, operator, left, right)
        if abs(result) > NUMBER_MAX:
            raise _make_size_error()
        return result


# Adding checks --------------------------------------------------------------------------------------------------------


def add_limits(tree: nodes.Template) -> nodes.Template | None:
    """Add checks of time and size to the syntax tree of a template; None if the template may still take long.

    With them, rendering ends in time or raises RenderLimitError.
    """
    try:
        if not all(map(_is_supported, tree.find_all(nodes.Node))):
            return None
        for loop in list(tree.find_all(nodes.For)):
            loop.body.insert(0, nodes.ExprStmt(_make_deadline_check(), lineno=loop.lineno))
            if loop.test is not None:
                loop.test = nodes.And(_make_deadline_check(), loop.test, lineno=loop.lineno)
        for macro in list(tree.find_all(nodes.Macro)):
            macro.body.insert(0, nodes.ExprStmt(_make_deadline_check(), lineno=macro.lineno))
        _insert_size_checks(tree)
    except RecursionError:
        return None
    assert tree.environment is not None
    tree.set_environment(tree.environment)
    return tree


def _is_supported(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Stmt) and not isinstance(node, _SAFE_STATEMENTS):
        return False
    if isinstance(node, nodes.For):
        return not node.recursive
    if isinstance(node, (nodes.Filter, nodes.Test)):
        environment = node.environment
        assert environment is not None
        return node.name in (environment.filters if isinstance(node, nodes.Filter) else environment.tests)
    if isinstance(node, nodes.Name):
        return node.name not in ("varargs", "kwargs")  # lists of arguments, which nothing measures
    if isinstance(node, (nodes.Add, nodes.Concat)):
        return sum(1 for _ in node.find_all((nodes.Name, nodes.Filter, nodes.Call))) <= CONCATENATED_NAMES_MAX
    return True


def _make_deadline_check() -> nodes.Test:
    return nodes.Test(nodes.Const(None, lineno=1), "in_time", [], [], None, None, lineno=1)


def _insert_size_checks(node: nodes.Node, *, inside_concatenation: bool = False) -> None:
    """Wrap each expression in a tree that makes a larger value in a check of its size.

    Nested concatenations get one check, around the outermost.
    """
    for name, value in list(node.iter_fields()):
        if isinstance(value, nodes.Expr):
            setattr(node, name, _add_size_check(value, inside_concatenation=inside_concatenation))
        elif isinstance(value, nodes.Node):
            _insert_size_checks(value)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, nodes.Expr):
                    value[index] = _add_size_check(item, inside_concatenation=inside_concatenation)
                elif isinstance(item, nodes.Node):
                    _insert_size_checks(item)
    if isinstance(node, nodes.Assign) and (isinstance(node.target, nodes.NSRef) or node.target.find(nodes.NSRef)):
        node.node = nodes.Filter(node.node, "check_size", [], [], None, None, lineno=node.lineno)


def _add_size_check(node: nodes.Expr, *, inside_concatenation: bool) -> nodes.Expr:
    is_concatenation = isinstance(node, (nodes.Add, nodes.Concat))
    _insert_size_checks(node, inside_concatenation=is_concatenation)
    is_list = isinstance(node, (nodes.List, nodes.Dict)) or (isinstance(node, nodes.Tuple) and node.ctx == "load")
    makes_larger_value = (is_concatenation and not inside_concatenation) or (is_list and not _is_constant(node))
    return nodes.Filter(node, "check_size", [], [], None, None, lineno=node.lineno) if makes_larger_value else node


def _is_constant(node: nodes.Node) -> bool:
    return not any(True for _ in node.find_all((nodes.Name, nodes.Call, nodes.Filter)))
