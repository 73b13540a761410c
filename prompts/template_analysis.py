"""Whether a chat template only copies what messages say: what it writes is then the same for all chats of the same
roles, but for the texts that it writes out (prompts/rendered_text_cache.py).

The template's tree is run in the abstract, for messages of a role and a text and nothing else. A value is all messages,
one of them, a text as a message has it, a text with such a text in it, something that is not there, or something in
which no text stands. A text may be written, put together, stripped, and asked for a constant that it is then taken not
to have; whatever else would be done with one is a doubt, and a doubt is a no. What cannot come of such messages is not
looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jinja2 import nodes

Kind = str
Kinds = frozenset[Kind]
_LIST, _MESSAGE, _PARTS, _PART, _TEXT, _MIXED, _ABSENT, _OTHER, _LOOP = (
    "list", "message", "parts", "part", "text", "mixed", "absent", "other", "loop",
)  # fmt: skip
_NOTHING: Kinds = frozenset()
_BARE = frozenset((_OTHER, _ABSENT))
_WRITTEN = frozenset((_OTHER, _ABSENT, _TEXT, _MIXED))
Names = dict[str, Kinds]
_STATEFUL = frozenset(("cycler", "joiner", "lipsum", "strftime_now"))
_OF_DICT = frozenset(dir({}))
_STRIPS = frozenset(("strip", "lstrip", "rstrip"))
_IS: dict[Kind, dict[str, bool]] = {
    kind: {"string": kind in (_TEXT, _MIXED), "mapping": kind in (_MESSAGE, _PART), "undefined": kind == _ABSENT,
           "defined": kind != _ABSENT, "none": False, "number": False, "boolean": False, "true": False, "false": False,
           **({} if kind == _ABSENT else {"iterable": True, "sequence": True})}
    for kind in (_LIST, _MESSAGE, _PARTS, _PART, _TEXT, _MIXED, _ABSENT)
}  # fmt: skip
"""Tests, and what they say of every value of a kind."""
_CALLS_DEEP_MAX = 8
_STEPS_MAX = 50_000
"""Statements and expressions looked at, each as often as its loop or its macro is: templates take some hundreds."""


class CopyConditions(NamedTuple):
    """What a text must be like where a template copies it."""

    forbidden_texts: tuple[str, ...]
    """Texts that it must not have."""
    forbidden_edges: str
    """Characters with which it must neither begin nor end."""


class _UnsupportedTemplate(Exception):
    """The template is not of the kind."""


def find_copy_conditions(tree: nodes.Template, *, content_is_parts: bool = False) -> CopyConditions | None:
    """The texts that the template copies, if there is no blank one among them; None where it may not copy.
    `content_is_parts`: it is given contents as lists, each of one part."""
    run = _AbstractInterpreter(_PARTS if content_is_parts else _TEXT)
    try:
        run.all(tree.body, {"messages": frozenset((_LIST,))})
    except (_UnsupportedTemplate, RecursionError):
        return None
    return CopyConditions(tuple(sorted(run.lacks)), "".join(sorted(run.edges)))


class _AbstractInterpreter:
    def __init__(self, content: Kind) -> None:
        self._items = {
            _MESSAGE: {"role": _OTHER, "content": content}, _PART: {"type": _OTHER, "text": _TEXT},
        }  # fmt: skip
        self.lacks: set[str] = set()
        self.edges: set[str] = set()
        self._written: Kinds = _NOTHING
        self._macros: dict[str, tuple[nodes.Macro, Names]] = {}
        self._deep = 0
        self._steps = 0

    # Statements -------------------------------------------------------------------------------------------------------

    def all(self, body: Iterable[nodes.Node], names: Names) -> Names:
        """Run them one after the other: what the names are then."""
        for node in body:
            names = self._one(node, names)
        return names

    def _one(self, node: nodes.Node, names: Names) -> Names:
        self._step()
        if isinstance(node, nodes.Output):
            for part in node.nodes:
                self._written |= self._of(part, names, _WRITTEN)
            return names
        if isinstance(node, nodes.If):
            return self._if(node, names)
        if isinstance(node, nodes.For):
            self._for(node, names)
            return names
        if isinstance(node, nodes.Assign):
            return self._assign(node, names)
        if isinstance(node, nodes.AssignBlock) and isinstance(node.target, nodes.Name) and node.filter is None:
            return {**names, node.target.name: self._block(node.body, names)}
        if isinstance(node, nodes.Macro):
            if self._macros.get(node.name, (node,))[0] is not node or node.name in names:
                raise _UnsupportedTemplate
            self._macros[node.name] = (node, names)
            return names
        if isinstance(node, nodes.CallBlock) and isinstance(node.call.node, nodes.ExtensionAttribute):
            self.all(node.body, dict(names))  # {% generation %}
            return names
        if isinstance(node, nodes.ExprStmt):
            self.of(node.node, names)
            return names
        if isinstance(node, (nodes.Continue, nodes.Break)):
            return names
        raise _UnsupportedTemplate

    def _step(self) -> None:
        self._steps += 1
        if self._steps > _STEPS_MAX:
            raise _UnsupportedTemplate

    def _if(self, node: nodes.If, names: Names) -> Names:
        ends: list[Names] = []
        for test, body in [(node.test, node.body), *((other.test, other.body) for other in node.elif_)]:
            holds = self._holds(test, names)
            if holds is not False:
                ends.append(self.all(body, dict(names)))
            if holds is True:
                break
        else:
            ends.append(self.all(node.else_, dict(names)))
        return _either(ends)

    def _for(self, node: nodes.For, names: Names) -> None:
        over = self.of(node.iter, names)
        if node.recursive or not over <= {_LIST, _PARTS, _OTHER, _ABSENT}:
            raise _UnsupportedTemplate
        self.all(node.else_, dict(names))
        if over == {_ABSENT}:
            return
        items = frozenset({_LIST: _MESSAGE, _PARTS: _PART}.get(kind, _OTHER) for kind in over)
        inside = {**names, "loop": frozenset((_LOOP,) if _LIST in over else (_OTHER,))}
        if isinstance(node.target, nodes.Name):
            inside[node.target.name] = items
        elif not over <= _BARE:
            raise _UnsupportedTemplate
        else:
            inside |= dict.fromkeys(_targets(node.target), items)
        if node.test is not None:
            self._holds(node.test, inside)
        while True:  # whether or not a turn of the loop sees what the one before has set
            again = _either([inside, self.all(node.body, dict(inside))])
            if again == inside:
                return
            inside = again

    def _assign(self, node: nodes.Assign, names: Names) -> Names:
        found = self.of(node.node, names)
        if any(name in self._macros for name in _targets(node.target)):
            raise _UnsupportedTemplate
        if isinstance(node.target, nodes.Name):
            return {**names, node.target.name: found}
        if not found <= _BARE:
            raise _UnsupportedTemplate
        if isinstance(node.target, nodes.NSRef):
            return names
        return {**names, **dict.fromkeys(_targets(node.target), found)}

    def _block(self, body: Sequence[nodes.Node], names: Names) -> Kinds:
        """Of what it writes, which goes nowhere yet."""
        written, self._written = self._written, _NOTHING
        self.all(body, dict(names))
        found, self._written = self._written, written
        return frozenset((_OTHER,) if found <= _BARE else (_MIXED,))

    # Expressions ------------------------------------------------------------------------------------------------------

    def _of(self, node: nodes.Node, names: Names, allowed: Kinds) -> Kinds:
        found = self.of(node, names)
        if not found <= allowed:
            raise _UnsupportedTemplate
        return found

    def _bare(self, found: Iterable[nodes.Node | None], names: Names) -> Kinds:
        """Nothing of a message may be in these."""
        for node in found:
            if node is not None:
                self._of(node, names, _BARE)
        return frozenset((_OTHER,))

    def of(self, node: nodes.Node, names: Names) -> Kinds:
        """What an expression's value may be."""
        self._step()
        if isinstance(node, nodes.Name):
            if node.name in _STATEFUL or node.name in self._macros:
                raise _UnsupportedTemplate
            return names.get(node.name, frozenset((_OTHER,)))
        if isinstance(node, nodes.Getattr):
            return self._item(node.node, node.attr, names)
        if isinstance(node, nodes.Getitem):
            return self._getitem(node, names)
        if isinstance(node, (nodes.Add, nodes.Concat)):
            parts = node.nodes if isinstance(node, nodes.Concat) else [node.left, node.right]
            return self._joined([self._of(part, names, _WRITTEN) for part in parts])
        if isinstance(node, nodes.Filter):
            return self._filter(node, names)
        if isinstance(node, nodes.Call):
            return self._call(node, names)
        if isinstance(node, nodes.CondExpr):
            holds = self._holds(node.test, names)
            found = self.of(node.expr1, names) if holds is not False else _NOTHING
            if holds is True:
                return found
            return found | (frozenset((_OTHER,)) if node.expr2 is None else self.of(node.expr2, names))
        if isinstance(node, (nodes.And, nodes.Or)):
            left, ends = self.of(node.left, names), self._holds(node.left, names)
            if ends is isinstance(node, nodes.Or):
                return left
            right = self.of(node.right, names)
            return right if ends is not None else left | right
        if isinstance(node, (nodes.Test, nodes.Compare, nodes.Not)):
            self._holds(node, names)
            return frozenset((_OTHER,))
        if isinstance(node, (nodes.Const, nodes.TemplateData)):
            return frozenset((_OTHER,))
        if isinstance(node, (nodes.BinExpr, nodes.UnaryExpr, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair)):
            return self._bare(node.iter_child_nodes(), names)
        raise _UnsupportedTemplate

    @staticmethod
    def _joined(parts: Sequence[Kinds]) -> Kinds:
        return frozenset((_OTHER,) if all(part <= _BARE for part in parts) else (_MIXED,))

    def _item(self, of: nodes.Node, name: str, names: Names) -> Kinds:
        found = set[Kind]()
        for kind in self._of(of, names, frozenset((_OTHER, _ABSENT, _MESSAGE, _PART, _LOOP))):
            if kind in self._items:
                if name in _OF_DICT:
                    raise _UnsupportedTemplate
                found.add(self._items[kind].get(name, _ABSENT))
            elif kind == _LOOP and name in ("previtem", "nextitem"):
                found |= {_MESSAGE, _OTHER}
            else:
                found.add(_OTHER)
        return frozenset(found)

    def _getitem(self, node: nodes.Getitem, names: Names) -> Kinds:
        arg, of = node.arg, self.of(node.node, names)
        if of == {_PARTS} and isinstance(arg, nodes.Const) and arg.value == 0:
            return frozenset((_PART,))
        if _LIST not in of:
            if isinstance(arg, nodes.Const) and isinstance(arg.value, str):
                return self._item(node.node, arg.value, names)
            self._bare((node.node, arg), names)
            return frozenset((_OTHER,))
        if not of <= {_LIST, *_BARE}:
            raise _UnsupportedTemplate
        if isinstance(arg, nodes.Slice):
            self._bare((arg.start, arg.stop, arg.step), names)
            return of
        self._bare((arg,), names)
        always = of == {_LIST} and isinstance(arg, nodes.Const) and arg.value == 0
        return frozenset((_MESSAGE,) if always else (_MESSAGE, _OTHER))

    def _filter(self, node: nodes.Filter, names: Names) -> Kinds:
        if node.node is None or node.name == "random":
            raise _UnsupportedTemplate
        of, args = self.of(node.node, names), [*node.args, *node.kwargs, node.dyn_args, node.dyn_kwargs]
        plain = not any(arg is not None for arg in args)
        if _TEXT in of and of <= {_TEXT, *_BARE} and (plain and node.name in ("trim", "string")):
            return of
        if of == {_LIST} and plain and node.name == "list":
            return of
        if _TEXT in of and of <= {_TEXT, *_BARE} and node.name in ("default", "d") and not node.dyn_args:
            self._bare((*node.args, *(pair.value for pair in node.kwargs), node.dyn_kwargs), names)
            return of if of == {_TEXT} else of | {_OTHER}
        if of in ({_LIST}, {_PARTS}) and plain and node.name in ("length", "count"):
            return frozenset((_OTHER,))
        if of == {_LIST} and node.name in ("selectattr", "rejectattr") and _is_const(node.args[:1], "role"):
            self._bare((arg.value if isinstance(arg, nodes.Keyword) else arg for arg in args if arg), names)
            return of
        if not of <= _BARE:
            raise _UnsupportedTemplate
        return self._bare((arg.value if isinstance(arg, nodes.Keyword) else arg for arg in args if arg), names)

    def _call(self, node: nodes.Call, names: Names) -> Kinds:
        args = [*node.args, *(pair.value for pair in node.kwargs)]
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise _UnsupportedTemplate
        if isinstance(node.node, nodes.Name) and node.node.name in self._macros:
            return self._macro(node, names)
        if isinstance(node.node, nodes.Getattr):
            of, name = self.of(node.node.node, names), node.node.attr
            consts = [arg.value for arg in node.args if isinstance(arg, nodes.Const) and isinstance(arg.value, str)]
            known = not node.kwargs and len(consts) == len(node.args)
            if _TEXT in of and of <= {_TEXT, *_BARE} and known and len(consts) < 2 and name in _STRIPS:
                self.edges.update(*consts)
                return of
            if _TEXT in of and self._asks(node, of):
                return frozenset((_OTHER,))
            if of == {_MESSAGE} and name == "get" and known and len(consts) == 1:
                found = self._item(node.node.node, consts[0], names)
                return frozenset((_OTHER,)) if found == {_ABSENT} else found
            if _LOOP in of:
                return self._bare(args, names)
        return self._bare((node.node, *args), names)

    def _asks(self, node: nodes.Node, of: Kinds) -> bool:
        """Whether it asks of a text if it begins or ends with something that it is then taken not to have."""
        if not isinstance(node, nodes.Call) or not isinstance(node.node, nodes.Getattr) or len(node.args) != 1:
            return False
        arg = node.args[0]
        options = [item.as_const() for item in (arg.items if isinstance(arg, nodes.Tuple) else [arg])
                   if isinstance(item, nodes.Const)]  # fmt: skip
        right = node.node.attr in ("startswith", "endswith") and of <= {_TEXT, *_BARE} and not node.kwargs
        if not right or not options or not all(isinstance(option, str) and option for option in options):
            return False
        if isinstance(arg, nodes.Tuple) and len(options) != len(arg.items):
            return False
        self.lacks.update(options)
        return True

    def _macro(self, node: nodes.Call, names: Names) -> Kinds:
        assert isinstance(node.node, nodes.Name)
        macro, known = self._macros[node.node.name]
        places = [arg.name for arg in macro.args]
        if len(node.args) > len(places) or self._deep == _CALLS_DEEP_MAX:
            raise _UnsupportedTemplate
        inside = _either([known, names])
        given = [self.of(default, inside) for default in macro.defaults]
        inside |= dict.fromkeys(places, frozenset((_OTHER,)))
        inside |= dict(zip(reversed(places), reversed(given)))
        for name, arg in [*zip(places, node.args), *((pair.key, pair.value) for pair in node.kwargs)]:
            inside[name] = self.of(arg, names)
        if "caller" in places or not {pair.key for pair in node.kwargs} <= set(places):
            raise _UnsupportedTemplate
        self._deep += 1
        found = self._block(macro.body, inside)
        self._deep -= 1
        return found

    # Conditions -------------------------------------------------------------------------------------------------------

    def _holds(self, node: nodes.Node, names: Names) -> bool | None:
        """Whether a condition holds for all such messages; None where that is not known, but the same for all texts."""
        if isinstance(node, nodes.Const):
            return bool(node.value)
        if isinstance(node, nodes.Not):
            holds = self._holds(node.node, names)
            return None if holds is None else not holds
        if isinstance(node, (nodes.And, nodes.Or)):
            ends = isinstance(node, nodes.Or)
            left = self._holds(node.left, names)
            if left is ends:
                return ends
            right = self._holds(node.right, names)
            return ends if right is ends else None if left is None or right is None else not ends
        if isinstance(node, nodes.Test):
            return self._test(node, names)
        if isinstance(node, nodes.Compare):
            return self._compare(node, names)
        found = self.of(node, names)
        if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
            of = self.of(node.node.node, names)
            if of == {_TEXT} and self._asks(node, of):
                return False
        if _LOOP in found:
            raise _UnsupportedTemplate
        return True if found <= {_TEXT, _MESSAGE, _PARTS, _PART} else False if found == {_ABSENT} else None

    def _test(self, node: nodes.Test, names: Names) -> bool | None:
        of = self.of(node.node, names)
        says = {kind: _IS[kind].get(node.name) for kind in of if kind in _IS}
        if not of <= _BARE and (None in says.values() or _LOOP in of):
            raise _UnsupportedTemplate
        self._bare((*(node.args or ()), *(node.kwargs or ()), node.dyn_args, node.dyn_kwargs), names)
        known = set(says.values()) if _OTHER not in of else {None}
        return known.pop() if len(known) == 1 else None

    def _compare(self, node: nodes.Compare, names: Names) -> bool | None:
        left, rights = self.of(node.expr, names), [self.of(other.expr, names) for other in node.ops]
        if left <= _BARE and all(right <= _BARE for right in rights):
            return None
        if len(node.ops) != 1:
            raise _UnsupportedTemplate
        how, right = node.ops[0].op, rights[0]
        if how in ("in", "notin") and isinstance(node.expr, nodes.Const) and isinstance(node.expr.value, str):
            within, text = right, node.expr.value
            if len(within) == 1 and within <= self._items.keys():
                return (text in self._items[next(iter(within))]) is (how == "in")
        elif how in ("eq", "ne") and isinstance(node.ops[0].expr, nodes.Const):
            within, text = left, node.ops[0].expr.value
            if not isinstance(text, str) or not text:
                text = None
        else:
            raise _UnsupportedTemplate
        if _TEXT not in within or not within <= {_TEXT, *_BARE} or text == "":
            raise _UnsupportedTemplate
        if text is not None:
            self.lacks.add(text)
        return how in ("notin", "ne") if within == {_TEXT} else None


def _targets(node: nodes.Node) -> list[str]:
    return [node.name] if isinstance(node, nodes.Name) else [name.name for name in node.find_all(nodes.Name)]


def _either(ends: Sequence[Names]) -> Names:
    """What a name may be behind several ways."""
    found: Names = {}
    for name in dict.fromkeys(name for end in ends for name in end):
        kinds = [end.get(name, frozenset((_OTHER,))) for end in ends]
        found[name] = frozenset[Kind]().union(*kinds)
    return found


def _is_const(found: Sequence[nodes.Node], value: str) -> bool:
    return len(found) == 1 and isinstance(found[0], nodes.Const) and found[0].value == value
