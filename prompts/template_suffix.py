"""The part of a chat template that writes what follows a conversation's known beginning, where there is such a part.

Most templates write something first (from the first message, the tools, the request's fields), then one text for each
message, then an opening for the answer. Where the text of a message hangs on that message alone, on its neighbours, on
the first message and on what is the same in every turn, the text of a conversation that returns is that of its known
beginning and what `make_suffix_template` writes. Templates that look at anything else (the last question, a date)
have no such part: a doubt is a no.

The rest is rendered of FIRST * n, BEFORE, *messages: nothing is written for those two, who are there to be looked at.
BEFORE is the neighbour of the first that is written, and n keeps that one's place even or odd.
"""

from __future__ import annotations

from collections.abc import Iterable

from jinja2 import nodes

UNRENDERED_MESSAGES = "blockcast_unrendered"
"""The template's variable that holds FIRST and BEFORE; its test that finds out by identity is `one_of`."""
_STATEFUL_GLOBALS = frozenset(("cycler", "joiner", "lipsum", "strftime_now"))
_NEIGHBOURS = frozenset(("first", "last", "previtem", "nextitem"))


class _UnsupportedTemplate(Exception):
    """The template is not of the kind."""


def is_any_of(value: object, candidates: Iterable[object]) -> bool:
    return any(value is candidate for candidate in candidates)


def make_suffix_template(tree: nodes.Template) -> nodes.Template | None:
    """`tree`, changed so that it writes the rest only; None where the text cannot be cut like that."""
    try:
        _SuffixTransformer(tree).transform()
    except _UnsupportedTemplate:
        return None
    return tree


class _SuffixTransformer:
    def __init__(self, tree: nodes.Template) -> None:
        self._tree = tree
        self._message_list_names = {"messages"}
        """Names of all messages, or of all but the first."""
        self._slice_index: int | None = None
        """From this node of the template's body on, `messages` may be all but the first."""

    def transform(self) -> None:
        tree = self._tree
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and self._is_message_list(assign.node):
                if assign.target.name == "messages":
                    self._check_slice_assignment(assign)
                self._message_list_names.add(assign.target.name)
        loops = [
            i for i, node in enumerate(tree.body) if isinstance(node, nodes.For) and self._is_message_list(node.iter)
        ]
        if len(loops) != 1:
            raise _UnsupportedTemplate
        loop_index = loops[0]
        loop = tree.body[loop_index]
        assert isinstance(loop, nodes.For)
        if loop.test is not None or loop.else_ or loop.recursive or not isinstance(loop.target, nodes.Name):
            raise _UnsupportedTemplate
        loops_over_all = (
            isinstance(loop.iter, nodes.Name) and loop.iter.name == "messages" and self._slice_index is None
        )
        for node in (*tree.body[:loop_index], *tree.body[loop_index + 1 :]):
            self._check_node(node, in_message_loop=False)
        if self._slice_index is not None:  # from there on, the first is another one
            later_nodes = [*tree.body[self._slice_index + 1 :], *tree.find_all(nodes.Macro)]
            if loop_index <= self._slice_index or any(_reads_first_message(node) for node in later_nodes):
                raise _UnsupportedTemplate
        for node in loop.body:
            self._check_node(node, in_message_loop=True, loops_over_all=loops_over_all)
        tree.body = [*_remove_output(tree.body[:loop_index]), *tree.body[loop_index:]]
        loop_variable = nodes.Name(loop.target.name, "load")
        is_unrendered = nodes.Test(loop_variable, "one_of", [nodes.Name(UNRENDERED_MESSAGES, "load")], [], None, None)
        loop.body = [nodes.If(nodes.Not(is_unrendered), loop.body, [], [])]
        assert tree.environment is not None
        tree.set_environment(tree.environment)
        loop.set_lineno(loop.lineno)

    def _check_slice_assignment(self, assign: nodes.Assign) -> None:
        """`messages` becomes all but its first: once, at the end of a branch, where nothing is left to look at it."""
        for index, node in enumerate(self._tree.body):
            branches = (
                (node.body, node.else_, *(branch_node.body for branch_node in node.elif_))
                if isinstance(node, nodes.If)
                else ()
            )
            if node is assign or any(branch and branch[-1] is assign for branch in branches):
                if self._slice_index is not None or not isinstance(assign.node, nodes.Getitem):
                    break
                self._slice_index = index
                return
        raise _UnsupportedTemplate

    def _is_message_list(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.Name):
            return node.name in self._message_list_names and node.ctx == "load"
        if not isinstance(node, nodes.Getitem) or not isinstance(node.arg, nodes.Slice):
            return False
        list_slice = node.arg
        from_second = isinstance(list_slice.start, nodes.Const) and list_slice.start.value == 1
        return _is_name(node.node, "messages") and from_second and list_slice.stop is None and list_slice.step is None

    def _check_node(self, node: nodes.Node, *, in_message_loop: bool, loops_over_all: bool = False) -> None:
        """Raises _UnsupportedTemplate where it may look at what it must not. `in_message_loop`: stands in the body of
        the loop over messages, which goes over all of them (`loops_over_all`), and in no other loop there."""
        node_type = type(node)
        if node_type in (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block):
            raise _UnsupportedTemplate
        if node_type is nodes.Macro and any(True for _ in node.find_all(nodes.NSRef)):
            raise _UnsupportedTemplate
        if isinstance(node, nodes.Filter) and node.name == "random":
            raise _UnsupportedTemplate
        if in_message_loop and node_type in (nodes.NSRef, nodes.Break):
            raise _UnsupportedTemplate
        if isinstance(node, nodes.Name):
            if (
                node.name in self._message_list_names
                or node.name in _STATEFUL_GLOBALS
                or (in_message_loop and node.name == "loop")
            ):
                raise _UnsupportedTemplate
            return
        if isinstance(node, nodes.Getitem) and self._is_allowed_index(node, in_message_loop and loops_over_all):
            return
        if in_message_loop and self._is_allowed_loop_use(node):
            return
        if isinstance(node, nodes.Assign) and not in_message_loop and self._is_message_list(node.node):
            return
        if isinstance(node, nodes.Test) and node.name == "defined" and self._is_message_list(node.node):
            return
        if isinstance(node, nodes.For):
            children = (node.target, *node.body, *node.else_, *((node.test,) if node.test is not None else ()))
            self._check_node(node.iter, in_message_loop=in_message_loop, loops_over_all=loops_over_all)
            if in_message_loop and any(True for _ in node.find_all(nodes.NSRef)):
                raise _UnsupportedTemplate
            for part in children:
                self._check_node(part, in_message_loop=False)
            return
        is_condition = isinstance(node, (nodes.If, nodes.CondExpr, nodes.And, nodes.Or, nodes.Not))
        for child in node.iter_child_nodes():
            if is_condition and _is_name(child, "messages"):
                continue  # whether there are any: there are
            self._check_node(child, in_message_loop=in_message_loop, loops_over_all=loops_over_all)

    def _is_allowed_index(self, node: nodes.Getitem, loops_over_all: bool) -> bool:
        """`messages[0]`; in the loop over all also the neighbours, by their number."""
        if not _is_name(node.node, "messages"):
            return False
        arg = node.arg
        if isinstance(arg, nodes.Const) and arg.value == 0:
            return True
        return (
            loops_over_all
            and isinstance(arg, (nodes.Add, nodes.Sub))
            and _loop_attribute(arg.left) == "index0"
            and isinstance(arg.right, nodes.Const)
            and arg.right.value == 1
        )

    @staticmethod
    def _is_allowed_loop_use(node: nodes.Node) -> bool:
        """Where the loop stands, as far as that is the same in the rest."""
        if _loop_attribute(node) in _NEIGHBOURS:
            return True
        if isinstance(node, nodes.Mod):
            return _loop_attribute(node.left) in ("index", "index0") and _is_const(node.right, 2)
        if isinstance(node, nodes.Compare) and len(node.ops) == 1:
            first_index = {"index": 1, "index0": 0}.get(_loop_attribute(node.expr) or "")
            return first_index is not None and _is_const(node.ops[0].expr, first_index)
        return False


def _is_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.name == name and node.ctx == "load"


def _reads_first_message(node: nodes.Node) -> bool:
    """Whether it looks at one of `messages` by its number, or at all but the first of them."""
    return any(
        _is_name(item.node, "messages")
        for item in (node, *node.find_all(nodes.Getitem))
        if isinstance(item, nodes.Getitem)
    )


def _is_const(node: nodes.Node, value: int) -> bool:
    return isinstance(node, nodes.Const) and type(node.value) is int and node.value == value


def _loop_attribute(node: nodes.Node) -> str | None:
    """`x` of `loop.x`."""
    return node.attr if isinstance(node, nodes.Getattr) and _is_name(node.node, "loop") else None


def _remove_output(body: list[nodes.Node]) -> list[nodes.Node]:
    """What it sets, without what it writes."""
    silent_nodes: list[nodes.Node] = []
    for node in body:
        if isinstance(node, nodes.If):
            node.body, node.else_ = _remove_output(node.body), _remove_output(node.else_)
            for branch_node in node.elif_:
                branch_node.body = _remove_output(branch_node.body)
        elif isinstance(node, nodes.For):
            node.body, node.else_ = _remove_output(node.body), _remove_output(node.else_)
        elif isinstance(node, (nodes.Output, nodes.CallBlock, nodes.FilterBlock)):
            continue
        elif not isinstance(node, (nodes.Assign, nodes.AssignBlock, nodes.Macro)):
            raise _UnsupportedTemplate
        silent_nodes.append(node)
    return silent_nodes
