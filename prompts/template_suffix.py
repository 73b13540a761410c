"""The part of a chat template that writes what follows a conversation's known beginning, where there is such a part.

Most templates write something first (from the first message, the tools, the request's fields), then one text for each
message, then an opening for the answer. Where the text of a message hangs on that message alone, on its neighbours, on
the first message and on what is the same in every turn, the text of a conversation that returns is that of its known
beginning and what `suffix_template` writes. Templates that look at anything else (the last question, a count, a date)
have no such part: a doubt is a no.

The rest is rendered of FIRST * n, BEFORE, *messages: nothing is written for those two, who are there to be looked at.
BEFORE is the neighbour of the first that is written, and n keeps that one's place even or odd.
"""

from __future__ import annotations

from collections.abc import Iterable

from jinja2 import nodes

UNRENDERED_MESSAGES = "blockcast_unrendered"
"""The template's variable that holds FIRST and BEFORE; its test that finds out by identity is `one_of`."""
_STATEFUL = frozenset(("cycler", "joiner", "lipsum", "strftime_now"))
_NEIGHBOURS = frozenset(("first", "last", "previtem", "nextitem"))


class _UnsupportedTemplate(Exception):
    """The template is not of the kind."""


def is_any_of(value: object, known: Iterable[object]) -> bool:
    return any(value is one for one in known)


def suffix_template(tree: nodes.Template) -> nodes.Template | None:
    """`tree`, changed so that it writes the rest only; None where the text cannot be cut like that."""
    try:
        _Analysis(tree).cut()
    except _UnsupportedTemplate:
        return None
    return tree


class _Analysis:
    def __init__(self, tree: nodes.Template) -> None:
        self._tree = tree
        self._lists = {"messages"}
        """Names of all messages, or of all but the first."""
        self._cut_at: int | None = None
        """From this node of the template's body on, `messages` may be all but the first."""

    def cut(self) -> None:
        tree = self._tree
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and self._is_list(assign.node):
                if assign.target.name == "messages":
                    self._cut_from(assign)
                self._lists.add(assign.target.name)
        loops = [i for i, node in enumerate(tree.body) if isinstance(node, nodes.For) and self._is_list(node.iter)]
        if len(loops) != 1:
            raise _UnsupportedTemplate
        at = loops[0]
        loop = tree.body[at]
        assert isinstance(loop, nodes.For)
        if loop.test is not None or loop.else_ or loop.recursive or not isinstance(loop.target, nodes.Name):
            raise _UnsupportedTemplate
        whole = isinstance(loop.iter, nodes.Name) and loop.iter.name == "messages" and self._cut_at is None
        for node in (*tree.body[:at], *tree.body[at + 1 :]):
            self._check(node, of_message=False)
        if self._cut_at is not None:  # from there on, the first is another one
            after = [*tree.body[self._cut_at + 1 :], *tree.find_all(nodes.Macro)]
            if at <= self._cut_at or any(_asks_first(node) for node in after):
                raise _UnsupportedTemplate
        for node in loop.body:
            self._check(node, of_message=True, whole=whole)
        tree.body = [*_silent(tree.body[:at]), *tree.body[at:]]
        name = nodes.Name(loop.target.name, "load")
        known = nodes.Test(name, "one_of", [nodes.Name(UNRENDERED_MESSAGES, "load")], [], None, None)
        loop.body = [nodes.If(nodes.Not(known), loop.body, [], [])]
        assert tree.environment is not None
        tree.set_environment(tree.environment)
        loop.set_lineno(loop.lineno)

    def _cut_from(self, assign: nodes.Assign) -> None:
        """`messages` becomes all but its first: once, at the end of a branch, where nothing is left to look at it."""
        for number, node in enumerate(self._tree.body):
            branches = (
                (node.body, node.else_, *(other.body for other in node.elif_)) if isinstance(node, nodes.If) else ()
            )
            if node is assign or any(branch and branch[-1] is assign for branch in branches):
                if self._cut_at is not None or not isinstance(assign.node, nodes.Getitem):
                    break
                self._cut_at = number
                return
        raise _UnsupportedTemplate

    def _is_list(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.Name):
            return node.name in self._lists and node.ctx == "load"
        if not isinstance(node, nodes.Getitem) or not isinstance(node.arg, nodes.Slice):
            return False
        cut = node.arg
        from_second = isinstance(cut.start, nodes.Const) and cut.start.value == 1
        return _is_name(node.node, "messages") and from_second and cut.stop is None and cut.step is None

    def _check(self, node: nodes.Node, *, of_message: bool, whole: bool = False) -> None:
        """Raises _UnsupportedTemplate where it may look at what it must not. `of_message`: stands in the body of the
        loop over messages, which goes over all of them (`whole`), and in no other loop there."""
        kind = type(node)
        if kind in (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block):
            raise _UnsupportedTemplate
        if kind is nodes.Macro and any(True for _ in node.find_all(nodes.NSRef)):
            raise _UnsupportedTemplate
        if isinstance(node, nodes.Filter) and node.name == "random":
            raise _UnsupportedTemplate
        if of_message and kind in (nodes.NSRef, nodes.Break):
            raise _UnsupportedTemplate
        if isinstance(node, nodes.Name):
            if node.name in self._lists or node.name in _STATEFUL or (of_message and node.name == "loop"):
                raise _UnsupportedTemplate
            return
        if isinstance(node, nodes.Getitem) and self._may_index(node, of_message and whole):
            return
        if of_message and self._may_ask_loop(node):
            return
        if isinstance(node, nodes.Assign) and not of_message and self._is_list(node.node):
            return
        if isinstance(node, nodes.Test) and node.name == "defined" and self._is_list(node.node):
            return
        if isinstance(node, nodes.For):
            inner = (node.target, *node.body, *node.else_, *((node.test,) if node.test is not None else ()))
            self._check(node.iter, of_message=of_message, whole=whole)
            if of_message and any(True for _ in node.find_all(nodes.NSRef)):
                raise _UnsupportedTemplate
            for part in inner:
                self._check(part, of_message=False)
            return
        asks = isinstance(node, (nodes.If, nodes.CondExpr, nodes.And, nodes.Or, nodes.Not))
        for child in node.iter_child_nodes():
            if asks and _is_name(child, "messages"):
                continue  # whether there are any: there are
            self._check(child, of_message=of_message, whole=whole)

    def _may_index(self, node: nodes.Getitem, whole: bool) -> bool:
        """`messages[0]`; in the loop over all also the neighbours, by their number."""
        if not _is_name(node.node, "messages"):
            return False
        arg = node.arg
        if isinstance(arg, nodes.Const) and arg.value == 0:
            return True
        return (
            whole
            and isinstance(arg, (nodes.Add, nodes.Sub))
            and _of_loop(arg.left) == "index0"
            and isinstance(arg.right, nodes.Const)
            and arg.right.value == 1
        )

    @staticmethod
    def _may_ask_loop(node: nodes.Node) -> bool:
        """Where the loop stands, as far as that is the same in the rest."""
        if _of_loop(node) in _NEIGHBOURS:
            return True
        if isinstance(node, nodes.Mod):
            return _of_loop(node.left) in ("index", "index0") and _is_const(node.right, 2)
        if isinstance(node, nodes.Compare) and len(node.ops) == 1:
            first = {"index": 1, "index0": 0}.get(_of_loop(node.expr) or "")
            return first is not None and _is_const(node.ops[0].expr, first)
        return False


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name and node.ctx == "load"


def _asks_first(node: nodes.Node) -> bool:
    """Whether it looks at one of `messages` by its number, or at all but the first of them."""
    return any(
        _is_name(item.node, "messages")
        for item in (node, *node.find_all(nodes.Getitem))
        if isinstance(item, nodes.Getitem)
    )


def _is_const(node: nodes.Node, value: int) -> bool:
    return isinstance(node, nodes.Const) and type(node.value) is int and node.value == value


def _of_loop(node: nodes.Node) -> str | None:
    """`x` of `loop.x`."""
    return node.attr if isinstance(node, nodes.Getattr) and _is_name(node.node, "loop") else None


def _silent(body: list[nodes.Node]) -> list[nodes.Node]:
    """What it sets, without what it writes."""
    kept: list[nodes.Node] = []
    for node in body:
        if isinstance(node, nodes.If):
            node.body, node.else_ = _silent(node.body), _silent(node.else_)
            for other in node.elif_:
                other.body = _silent(other.body)
        elif isinstance(node, nodes.For):
            node.body, node.else_ = _silent(node.body), _silent(node.else_)
        elif isinstance(node, (nodes.Output, nodes.CallBlock, nodes.FilterBlock)):
            continue
        elif not isinstance(node, (nodes.Assign, nodes.AssignBlock, nodes.Macro)):
            raise _UnsupportedTemplate
        kept.append(node)
    return kept
