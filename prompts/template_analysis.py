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

ValueKind = str
KindSet = frozenset[ValueKind]
_LIST, _MESSAGE, _PARTS, _PART, _TEXT, _MIXED, _ABSENT, _OTHER, _LOOP = (
    "list", "message", "parts", "part", "text", "mixed", "absent", "other", "loop",
)  # fmt: skip
_NO_KINDS: KindSet = frozenset()
_PLAIN_KINDS = frozenset((_OTHER, _ABSENT))
_WRITABLE_KINDS = frozenset((_OTHER, _ABSENT, _TEXT, _MIXED))
KindsByName = dict[str, KindSet]
_STATEFUL_GLOBALS = frozenset(("cycler", "joiner", "lipsum", "strftime_now"))
_DICT_METHODS = frozenset(dir({}))
_STRIP_METHODS = frozenset(("strip", "lstrip", "rstrip"))
_TEST_RESULTS_BY_KIND: dict[ValueKind, dict[str, bool]] = {
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
    interpreter = _AbstractInterpreter(_PARTS if content_is_parts else _TEXT)
    try:
        interpreter.run_body(tree.body, {"messages": frozenset((_LIST,))})
    except (_UnsupportedTemplate, RecursionError):
        return None
    return CopyConditions(tuple(sorted(interpreter.forbidden_texts)), "".join(sorted(interpreter.forbidden_edges)))


class _AbstractInterpreter:
    def __init__(self, content_kind: ValueKind) -> None:
        self._field_kinds = {
            _MESSAGE: {"role": _OTHER, "content": content_kind}, _PART: {"type": _OTHER, "text": _TEXT},
        }  # fmt: skip
        self.forbidden_texts: set[str] = set()
        self.forbidden_edges: set[str] = set()
        self._written_kinds: KindSet = _NO_KINDS
        self._macros: dict[str, tuple[nodes.Macro, KindsByName]] = {}
        self._call_depth = 0
        self._steps = 0

    # Statements -------------------------------------------------------------------------------------------------------

    def run_body(self, body: Iterable[nodes.Node], kinds_by_name: KindsByName) -> KindsByName:
        """Run them one after the other: what the kinds_by_name are then."""
        for node in body:
            kinds_by_name = self._run_statement(node, kinds_by_name)
        return kinds_by_name

    def _run_statement(self, node: nodes.Node, kinds_by_name: KindsByName) -> KindsByName:
        self._count_step()
        if isinstance(node, nodes.Output):
            for part in node.nodes:
                self._written_kinds |= self._evaluate_as(part, kinds_by_name, _WRITABLE_KINDS)
            return kinds_by_name
        if isinstance(node, nodes.If):
            return self._run_if(node, kinds_by_name)
        if isinstance(node, nodes.For):
            self._run_for(node, kinds_by_name)
            return kinds_by_name
        if isinstance(node, nodes.Assign):
            return self._run_assign(node, kinds_by_name)
        if isinstance(node, nodes.AssignBlock) and isinstance(node.target, nodes.Name) and node.filter is None:
            return {**kinds_by_name, node.target.name: self._evaluate_block(node.body, kinds_by_name)}
        if isinstance(node, nodes.Macro):
            if self._macros.get(node.name, (node,))[0] is not node or node.name in kinds_by_name:
                raise _UnsupportedTemplate
            self._macros[node.name] = (node, kinds_by_name)
            return kinds_by_name
        if isinstance(node, nodes.CallBlock) and isinstance(node.call.node, nodes.ExtensionAttribute):
            self.run_body(node.body, dict(kinds_by_name))  # {% generation %}
            return kinds_by_name
        if isinstance(node, nodes.ExprStmt):
            self.evaluate(node.node, kinds_by_name)
            return kinds_by_name
        if isinstance(node, (nodes.Continue, nodes.Break)):
            return kinds_by_name
        raise _UnsupportedTemplate

    def _count_step(self) -> None:
        self._steps += 1
        if self._steps > _STEPS_MAX:
            raise _UnsupportedTemplate

    def _run_if(self, node: nodes.If, kinds_by_name: KindsByName) -> KindsByName:
        branches: list[KindsByName] = []
        for test, body in [
            (node.test, node.body),
            *((branch_node.test, branch_node.body) for branch_node in node.elif_),
        ]:
            truth = self._evaluate_condition(test, kinds_by_name)
            if truth is not False:
                branches.append(self.run_body(body, dict(kinds_by_name)))
            if truth is True:
                break
        else:
            branches.append(self.run_body(node.else_, dict(kinds_by_name)))
        return _merge_branches(branches)

    def _run_for(self, node: nodes.For, kinds_by_name: KindsByName) -> None:
        iterated_kinds = self.evaluate(node.iter, kinds_by_name)
        if node.recursive or not iterated_kinds <= {_LIST, _PARTS, _OTHER, _ABSENT}:
            raise _UnsupportedTemplate
        self.run_body(node.else_, dict(kinds_by_name))
        if iterated_kinds == {_ABSENT}:
            return
        item_kinds = frozenset({_LIST: _MESSAGE, _PARTS: _PART}.get(kind, _OTHER) for kind in iterated_kinds)
        loop_kinds_by_name = {**kinds_by_name, "loop": frozenset((_LOOP,) if _LIST in iterated_kinds else (_OTHER,))}
        if isinstance(node.target, nodes.Name):
            loop_kinds_by_name[node.target.name] = item_kinds
        elif not iterated_kinds <= _PLAIN_KINDS:
            raise _UnsupportedTemplate
        else:
            loop_kinds_by_name |= dict.fromkeys(_target_names(node.target), item_kinds)
        if node.test is not None:
            self._evaluate_condition(node.test, loop_kinds_by_name)
        while True:  # whether or not a turn of the loop sees what the one before has set
            next_kinds_by_name = _merge_branches(
                [loop_kinds_by_name, self.run_body(node.body, dict(loop_kinds_by_name))]
            )
            if next_kinds_by_name == loop_kinds_by_name:
                return
            loop_kinds_by_name = next_kinds_by_name

    def _run_assign(self, node: nodes.Assign, kinds_by_name: KindsByName) -> KindsByName:
        kinds = self.evaluate(node.node, kinds_by_name)
        if any(name in self._macros for name in _target_names(node.target)):
            raise _UnsupportedTemplate
        if isinstance(node.target, nodes.Name):
            return {**kinds_by_name, node.target.name: kinds}
        if not kinds <= _PLAIN_KINDS:
            raise _UnsupportedTemplate
        if isinstance(node.target, nodes.NSRef):
            return kinds_by_name
        return {**kinds_by_name, **dict.fromkeys(_target_names(node.target), kinds)}

    def _evaluate_block(self, body: Sequence[nodes.Node], kinds_by_name: KindsByName) -> KindSet:
        """Of what it writes, which goes nowhere yet."""
        previous_kinds, self._written_kinds = self._written_kinds, _NO_KINDS
        self.run_body(body, dict(kinds_by_name))
        kinds, self._written_kinds = self._written_kinds, previous_kinds
        return frozenset((_OTHER,) if kinds <= _PLAIN_KINDS else (_MIXED,))

    # Expressions ------------------------------------------------------------------------------------------------------

    def _evaluate_as(self, node: nodes.Node, kinds_by_name: KindsByName, allowed_kinds: KindSet) -> KindSet:
        kinds = self.evaluate(node, kinds_by_name)
        if not kinds <= allowed_kinds:
            raise _UnsupportedTemplate
        return kinds

    def _require_plain(self, expressions: Iterable[nodes.Node | None], kinds_by_name: KindsByName) -> KindSet:
        """Nothing of a message may be in these."""
        for node in expressions:
            if node is not None:
                self._evaluate_as(node, kinds_by_name, _PLAIN_KINDS)
        return frozenset((_OTHER,))

    def evaluate(self, node: nodes.Node, kinds_by_name: KindsByName) -> KindSet:
        """What an expression's value may be."""
        self._count_step()
        if isinstance(node, nodes.Name):
            if node.name in _STATEFUL_GLOBALS or node.name in self._macros:
                raise _UnsupportedTemplate
            return kinds_by_name.get(node.name, frozenset((_OTHER,)))
        if isinstance(node, nodes.Getattr):
            return self._evaluate_field(node.node, node.attr, kinds_by_name)
        if isinstance(node, nodes.Getitem):
            return self._evaluate_getitem(node, kinds_by_name)
        if isinstance(node, (nodes.Add, nodes.Concat)):
            parts = node.nodes if isinstance(node, nodes.Concat) else [node.left, node.right]
            return self._concatenate([self._evaluate_as(part, kinds_by_name, _WRITABLE_KINDS) for part in parts])
        if isinstance(node, nodes.Filter):
            return self._evaluate_filter(node, kinds_by_name)
        if isinstance(node, nodes.Call):
            return self._evaluate_call(node, kinds_by_name)
        if isinstance(node, nodes.CondExpr):
            truth = self._evaluate_condition(node.test, kinds_by_name)
            kinds = self.evaluate(node.expr1, kinds_by_name) if truth is not False else _NO_KINDS
            if truth is True:
                return kinds
            return kinds | (frozenset((_OTHER,)) if node.expr2 is None else self.evaluate(node.expr2, kinds_by_name))
        if isinstance(node, (nodes.And, nodes.Or)):
            left_kinds = self.evaluate(node.left, kinds_by_name)
            short_circuit = self._evaluate_condition(node.left, kinds_by_name)
            if short_circuit is isinstance(node, nodes.Or):
                return left_kinds
            right_kinds = self.evaluate(node.right, kinds_by_name)
            return right_kinds if short_circuit is not None else left_kinds | right_kinds
        if isinstance(node, (nodes.Test, nodes.Compare, nodes.Not)):
            self._evaluate_condition(node, kinds_by_name)
            return frozenset((_OTHER,))
        if isinstance(node, (nodes.Const, nodes.TemplateData)):
            return frozenset((_OTHER,))
        if isinstance(node, (nodes.BinExpr, nodes.UnaryExpr, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair)):
            return self._require_plain(node.iter_child_nodes(), kinds_by_name)
        raise _UnsupportedTemplate

    @staticmethod
    def _concatenate(operand_kinds: Sequence[KindSet]) -> KindSet:
        return frozenset((_OTHER,) if all(kinds <= _PLAIN_KINDS for kinds in operand_kinds) else (_MIXED,))

    def _evaluate_field(self, owner: nodes.Node, name: str, kinds_by_name: KindsByName) -> KindSet:
        kinds = set[ValueKind]()
        for kind in self._evaluate_as(owner, kinds_by_name, frozenset((_OTHER, _ABSENT, _MESSAGE, _PART, _LOOP))):
            if kind in self._field_kinds:
                if name in _DICT_METHODS:
                    raise _UnsupportedTemplate
                kinds.add(self._field_kinds[kind].get(name, _ABSENT))
            elif kind == _LOOP and name in ("previtem", "nextitem"):
                kinds |= {_MESSAGE, _OTHER}
            else:
                kinds.add(_OTHER)
        return frozenset(kinds)

    def _evaluate_getitem(self, node: nodes.Getitem, kinds_by_name: KindsByName) -> KindSet:
        arg, owner_kinds = node.arg, self.evaluate(node.node, kinds_by_name)
        if owner_kinds == {_PARTS} and isinstance(arg, nodes.Const) and arg.value == 0:
            return frozenset((_PART,))
        if _LIST not in owner_kinds:
            if isinstance(arg, nodes.Const) and isinstance(arg.value, str):
                return self._evaluate_field(node.node, arg.value, kinds_by_name)
            self._require_plain((node.node, arg), kinds_by_name)
            return frozenset((_OTHER,))
        if not owner_kinds <= {_LIST, *_PLAIN_KINDS}:
            raise _UnsupportedTemplate
        if isinstance(arg, nodes.Slice):
            self._require_plain((arg.start, arg.stop, arg.step), kinds_by_name)
            return owner_kinds
        self._require_plain((arg,), kinds_by_name)
        is_first_message = owner_kinds == {_LIST} and isinstance(arg, nodes.Const) and arg.value == 0
        return frozenset((_MESSAGE,) if is_first_message else (_MESSAGE, _OTHER))

    def _evaluate_filter(self, node: nodes.Filter, kinds_by_name: KindsByName) -> KindSet:
        if node.node is None or node.name == "random":
            raise _UnsupportedTemplate
        kinds = self.evaluate(node.node, kinds_by_name)
        args = [*node.args, *node.kwargs, node.dyn_args, node.dyn_kwargs]
        has_no_arguments = not any(arg is not None for arg in args)
        if (
            _TEXT in kinds
            and kinds <= {_TEXT, *_PLAIN_KINDS}
            and (has_no_arguments and node.name in ("trim", "string"))
        ):
            return kinds
        if kinds == {_LIST} and has_no_arguments and node.name == "list":
            return kinds
        if _TEXT in kinds and kinds <= {_TEXT, *_PLAIN_KINDS} and node.name in ("default", "d") and not node.dyn_args:
            self._require_plain((*node.args, *(pair.value for pair in node.kwargs), node.dyn_kwargs), kinds_by_name)
            return kinds if kinds == {_TEXT} else kinds | {_OTHER}
        if kinds in ({_LIST}, {_PARTS}) and has_no_arguments and node.name in ("length", "count"):
            return frozenset((_OTHER,))
        if (
            kinds == {_LIST}
            and node.name in ("selectattr", "rejectattr")
            and _is_constant_argument(node.args[:1], "role")
        ):
            self._require_plain(
                (arg.value if isinstance(arg, nodes.Keyword) else arg for arg in args if arg), kinds_by_name
            )
            return kinds
        if not kinds <= _PLAIN_KINDS:
            raise _UnsupportedTemplate
        return self._require_plain(
            (arg.value if isinstance(arg, nodes.Keyword) else arg for arg in args if arg), kinds_by_name
        )

    def _evaluate_call(self, node: nodes.Call, kinds_by_name: KindsByName) -> KindSet:
        args = [*node.args, *(pair.value for pair in node.kwargs)]
        if node.dyn_args is not None or node.dyn_kwargs is not None:
            raise _UnsupportedTemplate
        if isinstance(node.node, nodes.Name) and node.node.name in self._macros:
            return self._evaluate_macro(node, kinds_by_name)
        if isinstance(node.node, nodes.Getattr):
            owner_kinds, name = self.evaluate(node.node.node, kinds_by_name), node.node.attr
            constant_texts = [
                arg.value for arg in node.args if isinstance(arg, nodes.Const) and isinstance(arg.value, str)
            ]
            has_only_texts = not node.kwargs and len(constant_texts) == len(node.args)
            if (
                _TEXT in owner_kinds
                and owner_kinds <= {_TEXT, *_PLAIN_KINDS}
                and has_only_texts
                and len(constant_texts) < 2
                and name in _STRIP_METHODS
            ):
                self.forbidden_edges.update(*constant_texts)
                return owner_kinds
            if _TEXT in owner_kinds and self._assume_no_affix(node, owner_kinds):
                return frozenset((_OTHER,))
            if owner_kinds == {_MESSAGE} and name == "get" and has_only_texts and len(constant_texts) == 1:
                kinds = self._evaluate_field(node.node.node, constant_texts[0], kinds_by_name)
                return frozenset((_OTHER,)) if kinds == {_ABSENT} else kinds
            if _LOOP in owner_kinds:
                return self._require_plain(args, kinds_by_name)
        return self._require_plain((node.node, *args), kinds_by_name)

    def _assume_no_affix(self, node: nodes.Node, owner_kinds: KindSet) -> bool:
        """Whether it asks of a text if it begins or ends with something that it is then taken not to have."""
        if not isinstance(node, nodes.Call) or not isinstance(node.node, nodes.Getattr) or len(node.args) != 1:
            return False
        arg = node.args[0]
        affixes = [item.as_const() for item in (arg.items if isinstance(arg, nodes.Tuple) else [arg])
                   if isinstance(item, nodes.Const)]  # fmt: skip
        is_affix_method = (
            node.node.attr in ("startswith", "endswith") and owner_kinds <= {_TEXT, *_PLAIN_KINDS} and not node.kwargs
        )
        if not is_affix_method or not affixes or not all(isinstance(affix, str) and affix for affix in affixes):
            return False
        if isinstance(arg, nodes.Tuple) and len(affixes) != len(arg.items):
            return False
        self.forbidden_texts.update(affixes)
        return True

    def _evaluate_macro(self, node: nodes.Call, kinds_by_name: KindsByName) -> KindSet:
        assert isinstance(node.node, nodes.Name)
        macro, outer_kinds_by_name = self._macros[node.node.name]
        parameters = [arg.name for arg in macro.args]
        if len(node.args) > len(parameters) or self._call_depth == _CALLS_DEEP_MAX:
            raise _UnsupportedTemplate
        macro_kinds_by_name = _merge_branches([outer_kinds_by_name, kinds_by_name])
        default_kinds = [self.evaluate(default, macro_kinds_by_name) for default in macro.defaults]
        macro_kinds_by_name |= dict.fromkeys(parameters, frozenset((_OTHER,)))
        macro_kinds_by_name |= dict(zip(reversed(parameters), reversed(default_kinds)))
        for name, arg in [*zip(parameters, node.args), *((pair.key, pair.value) for pair in node.kwargs)]:
            macro_kinds_by_name[name] = self.evaluate(arg, kinds_by_name)
        if "caller" in parameters or not {pair.key for pair in node.kwargs} <= set(parameters):
            raise _UnsupportedTemplate
        self._call_depth += 1
        kinds = self._evaluate_block(macro.body, macro_kinds_by_name)
        self._call_depth -= 1
        return kinds

    # Conditions -------------------------------------------------------------------------------------------------------

    def _evaluate_condition(self, node: nodes.Node, kinds_by_name: KindsByName) -> bool | None:
        """Whether a condition truth for all such messages; None where that is not known, but the same for all texts."""
        if isinstance(node, nodes.Const):
            return bool(node.value)
        if isinstance(node, nodes.Not):
            truth = self._evaluate_condition(node.node, kinds_by_name)
            return None if truth is None else not truth
        if isinstance(node, (nodes.And, nodes.Or)):
            short_circuit = isinstance(node, nodes.Or)
            left_truth = self._evaluate_condition(node.left, kinds_by_name)
            if left_truth is short_circuit:
                return short_circuit
            right_truth = self._evaluate_condition(node.right, kinds_by_name)
            return (
                short_circuit
                if right_truth is short_circuit
                else None
                if left_truth is None or right_truth is None
                else not short_circuit
            )
        if isinstance(node, nodes.Test):
            return self._evaluate_test(node, kinds_by_name)
        if isinstance(node, nodes.Compare):
            return self._evaluate_compare(node, kinds_by_name)
        kinds = self.evaluate(node, kinds_by_name)
        if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
            owner_kinds = self.evaluate(node.node.node, kinds_by_name)
            if owner_kinds == {_TEXT} and self._assume_no_affix(node, owner_kinds):
                return False
        if _LOOP in kinds:
            raise _UnsupportedTemplate
        return True if kinds <= {_TEXT, _MESSAGE, _PARTS, _PART} else False if kinds == {_ABSENT} else None

    def _evaluate_test(self, node: nodes.Test, kinds_by_name: KindsByName) -> bool | None:
        kinds = self.evaluate(node.node, kinds_by_name)
        results = {kind: _TEST_RESULTS_BY_KIND[kind].get(node.name) for kind in kinds if kind in _TEST_RESULTS_BY_KIND}
        if not kinds <= _PLAIN_KINDS and (None in results.values() or _LOOP in kinds):
            raise _UnsupportedTemplate
        self._require_plain((*(node.args or ()), *(node.kwargs or ()), node.dyn_args, node.dyn_kwargs), kinds_by_name)
        outcomes = set(results.values()) if _OTHER not in kinds else {None}
        return outcomes.pop() if len(outcomes) == 1 else None

    def _evaluate_compare(self, node: nodes.Compare, kinds_by_name: KindsByName) -> bool | None:
        left_kinds = self.evaluate(node.expr, kinds_by_name)
        operand_kinds = [self.evaluate(operand.expr, kinds_by_name) for operand in node.ops]
        if left_kinds <= _PLAIN_KINDS and all(right_kinds <= _PLAIN_KINDS for right_kinds in operand_kinds):
            return None
        if len(node.ops) != 1:
            raise _UnsupportedTemplate
        operator, right_kinds = node.ops[0].op, operand_kinds[0]
        if operator in ("in", "notin") and isinstance(node.expr, nodes.Const) and isinstance(node.expr.value, str):
            container_kinds, constant_text = right_kinds, node.expr.value
            if len(container_kinds) == 1 and container_kinds <= self._field_kinds.keys():
                return (constant_text in self._field_kinds[next(iter(container_kinds))]) is (operator == "in")
        elif operator in ("eq", "ne") and isinstance(node.ops[0].expr, nodes.Const):
            container_kinds, constant_text = left_kinds, node.ops[0].expr.value
            if not isinstance(constant_text, str) or not constant_text:
                constant_text = None
        else:
            raise _UnsupportedTemplate
        if _TEXT not in container_kinds or not container_kinds <= {_TEXT, *_PLAIN_KINDS} or constant_text == "":
            raise _UnsupportedTemplate
        if constant_text is not None:
            self.forbidden_texts.add(constant_text)
        return operator in ("notin", "ne") if container_kinds == {_TEXT} else None


def _target_names(node: nodes.Node) -> list[str]:
    return [node.name] if isinstance(node, nodes.Name) else [name.name for name in node.find_all(nodes.Name)]


def _merge_branches(branches: Sequence[KindsByName]) -> KindsByName:
    """What a name may be behind several ways."""
    kinds_by_name: KindsByName = {}
    for name in dict.fromkeys(name for branch in branches for name in branch):
        kinds = [branch.get(name, frozenset((_OTHER,))) for branch in branches]
        kinds_by_name[name] = frozenset[ValueKind]().union(*kinds)
    return kinds_by_name


def _is_constant_argument(arguments: Sequence[nodes.Node], value: str) -> bool:
    return len(arguments) == 1 and isinstance(arguments[0], nodes.Const) and arguments[0].value == value
