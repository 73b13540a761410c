"""A client's grammar in Lark, of the texts that JSON strings hold: a line's end is there the two characters `\\n`.

Models write the free text of a custom tool as a JSON string. So each text of the grammar is escaped, each regular
expression becomes rules over classes of characters, and terminals become rules: a lexer that looks one character ahead
cannot tell `\\n` from `\\"` inside of one terminal. Runs of characters stay one terminal where what follows differs.
Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

ESCAPED = '"\\\n\r\t\b\f'
"""Characters that JSON escapes, and a model may write. Other control characters are left out of classes."""
_PLAIN = r'[^"\\\x00-\x1f]'
_SAMPLES = (*map(chr, range(0x20, 0x250)), *"\u0416\u05d0\u3042\u4e00\U0001f600", *ESCAPED)
"""Characters by which classes are compared, with those that a class names itself."""
_COMPARED = frozenset(_SAMPLES)
_FOLLOWING_MAX = 8
"""Parts behind a run that are looked at."""
DEFINITION_CHARS_MAX = 64 << 10
_TOKEN = re.compile(
    r'(?P<comment>(?:\#|//)[^\n]*)|(?P<range>"(?:\\.|[^"\\\n])*"\s*\.\.\s*"(?:\\.|[^"\\\n])*")'
    r'|(?P<string>"(?:\\.|[^"\\\n])*")(?P<fold>i?)|/(?P<regex>(?:\\.|[^/\\])+)/(?P<flags>[imslux]*)'
    r"|%import\s+common\s*(?:\.\s*(?P<one>\w+)(?:\s*->\s*(?P<alias>\w+))?|\((?P<many>[\w\s,]+)\))"
    r"|(?P<statement>%\w+)|(?P<terminal>_?[A-Z][_A-Z0-9]*)|(?P<rule>_?[a-z][_a-z0-9]*)|(?P<other>.)",
    re.DOTALL,
)
_COMMON = {
    "LF": r"\n", "CR": r"\r", "NEWLINE": r"(?:\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+",
    "DIGIT": r"[0-9]", "HEXDIGIT": r"[0-9a-fA-F]", "INT": r"[0-9]+",
    "SIGNED_INT": r"[+-]?[0-9]+", "LETTER": r"[a-zA-Z]",
    "LCASE_LETTER": r"[a-z]", "UCASE_LETTER": r"[A-Z]", "WORD": r"[a-zA-Z]+", "CNAME": r"[a-zA-Z_][a-zA-Z0-9_]*",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+", "NUMBER": r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?", "ESCAPED_STRING": r'"(?:\\.|[^"\\\n])*"',
}  # fmt: skip
"""Lark's terminals that grammars import."""


class UnsupportedGrammar(ValueError):
    """Something that is no grammar, or that cannot be said of escaped texts."""


def escape_grammar(definition: str) -> str:
    """Return the grammar of the escaped texts. Raises UnsupportedGrammar."""
    if len(definition) > DEFINITION_CHARS_MAX:
        raise UnsupportedGrammar(f"it has {len(definition)} characters, expected at most {DEFINITION_CHARS_MAX}")
    made: list[str] = []
    imported: dict[str, str] = {}
    for found in _TOKEN.finditer(definition):
        kind = found.lastgroup
        if kind == "statement":
            raise UnsupportedGrammar(f"{found['statement']} is not supported")
        if found["regex"] is not None:
            made.append(_escape_regex(found["regex"], found["flags"]))
        elif found["string"] is not None:
            made.append(_string(_text(found["string"])) + found["fold"])
        elif found["range"] is not None:
            first, last = (_text(part) for part in re.split(r"(?<=\")\s*\.\.\s*(?=\")", found["range"]))
            made.append(_escape_regex(f"[{re.escape(first)}-{re.escape(last)}]", ""))
        elif found["one"] is not None:
            imported[found["alias"] or found["one"]] = found["one"]
        elif found["many"] is not None:
            imported |= {name: name for name in re.findall(r"\w+", found["many"])}
        elif found["terminal"] is not None:
            made.append(_rule(found["terminal"]))
        elif kind != "comment":
            made.append(found[0])
    for name, common in imported.items():
        if common not in _COMMON:
            raise UnsupportedGrammar(f"common.{common} is not known")
        made.append(f"\n{_rule(name)}: {_escape_regex(_COMMON[common], '')}")
    return "".join(made)


def _rule(terminal: str) -> str:
    return f"terminal_{terminal.lower()}"


def _text(quoted: str) -> str:
    try:
        return str(json.loads(quoted, strict=False))
    except ValueError:
        raise UnsupportedGrammar(f"{quoted[:80]} is no text of a grammar") from None


def _string(text: str) -> str:
    """A text of a grammar that matches the escaped text."""
    return json.dumps(json.dumps(text, ensure_ascii=False)[1:-1], ensure_ascii=False)


# Regular expressions --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _CharSet:
    """One character of a class."""

    sources: tuple[str, ...]
    """Of the class, as regular expressions of one character each."""

    @property
    def chars(self) -> frozenset[str]:
        """Those that are known to match: of the samples, and of what the sources name."""
        return frozenset().union(*map(_matched, self.sources))

    def has(self, char: str) -> bool:
        return any(char in _matched(source) or re.fullmatch(source, char) for source in self.sources)


@lru_cache(maxsize=4096)
def _matched(source: str) -> frozenset[str]:
    pattern = re.compile(source)
    named = [chr(int(code, 16)) for code in re.findall(r"\\u([0-9a-fA-F]{4})", source)]
    return frozenset(char for char in (*_SAMPLES, *source, *named) if pattern.fullmatch(char))


@dataclass(frozen=True)
class _Sequence:
    parts: tuple[_RegexNode, ...]


@dataclass(frozen=True)
class _Choice:
    branches: tuple[_RegexNode, ...]


@dataclass(frozen=True)
class _Repeat:
    inner: _RegexNode
    least: int
    most: int | None


_RegexNode = _CharSet | _Sequence | _Choice | _Repeat


def _escape_regex(pattern: str, flags: str) -> str:
    if set(flags) - set("si"):
        raise UnsupportedGrammar(f"/{pattern[:80]}/{flags}: flags other than s and i are not supported")
    reader = _RegexParser(pattern, flags)
    try:
        return f"({_write(reader.read(), ())})"
    except (re.error, RecursionError) as error:
        raise UnsupportedGrammar(f"/{pattern[:80]}/: {error}") from None


_ATOM = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[dDwWsSnrtfv]|[^a-zA-Z0-9])|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\\[\]()|*+?{}^$]"
)
_COUNT = re.compile(r"(?:([*+?])|\{(\d{1,4})(?:(,)(\d{1,4})?)?\})\??")
_GROUP = re.compile(r"\((?:\?(?:P?<[A-Za-z_]\w*>|([is]*):))?(?!\?)")


class _RegexParser:
    """Reads a regular expression. Refuses what looks around or back."""

    def __init__(self, pattern: str, flags: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._flags = flags

    def read(self) -> _RegexNode:
        node = self._choice()
        if self._at < len(self._pattern):
            raise self._refuse()
        return node

    def _refuse(self) -> UnsupportedGrammar:
        return UnsupportedGrammar(f"/{self._pattern[:80]}/: {self._pattern[self._at :][:20]!r} is not supported")

    def _choice(self) -> _RegexNode:
        branches = [self._sequence()]
        while self._pattern.startswith("|", self._at):
            self._at += 1
            branches.append(self._sequence())
        if all(isinstance(branch, _CharSet) for branch in branches):
            return _CharSet(tuple(source for branch in branches for source in branch.sources))  # type: ignore[union-attr]
        return _Choice(tuple(branches))

    def _sequence(self) -> _RegexNode:
        parts: list[_RegexNode] = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            parts.append(self._counted(self._atom()))
        return parts[0] if len(parts) == 1 else _Sequence(tuple(parts))

    def _counted(self, node: _RegexNode) -> _RegexNode:
        while (found := _COUNT.match(self._pattern, self._at)) is not None:
            self._at = found.end()
            sign, low, comma, high = found.groups()
            least = int(low) if sign is None else int(sign == "+")
            most = (None if sign != "?" else 1) if sign else int(high) if high else None if comma else least
            node = _Repeat(node, least, most)
        return node

    def _atom(self) -> _RegexNode:
        group = _GROUP.match(self._pattern, self._at)
        if group is not None:
            self._at, outer = group.end(), self._flags
            self._flags += group[1] or ""
            node = self._choice()
            self._flags = outer
            if not self._pattern.startswith(")", self._at):
                raise self._refuse()
            self._at += 1
            return node
        found = _ATOM.match(self._pattern, self._at)
        if found is None:
            raise self._refuse()
        self._at = found.end()
        source = found[0]
        if source == ".":
            source = r"[\s\S]" if "s" in self._flags else r"[^\n]"
        re.compile(source)
        return _CharSet((f"(?i:{source})" if "i" in self._flags else source,))


def _write(node: _RegexNode, following: Sequence[_RegexNode]) -> str:
    """An expression of Lark."""
    if isinstance(node, _CharSet):
        return _write_set(node, "")
    if isinstance(node, _Choice):
        return "(" + " | ".join(_write(branch, following) for branch in node.branches) + ")"
    if isinstance(node, _Sequence):
        parts = node.parts
        return " ".join(_write(part, (*parts[i + 1 :], *following)) for i, part in enumerate(parts)) or '""'
    least, most = node.least, node.most
    count = "*" if (least, most) == (0, None) else "+" if (least, most) == (1, None) else "?"
    if count == "?" and (least, most) != (0, 1):
        count = f"{{{least},{'' if most is None else most}}}"
    if isinstance(node.inner, _CharSet) and most is None and least <= 1 and _ends_before(node.inner, following):
        return _write_set(node.inner, "+") + count
    return f"({_write(node.inner, (node.inner, *following))}){count}"


def _write_set(node: _CharSet, run: str) -> str:
    chars = node.chars
    found = [_string(char) for char in ESCAPED if char in chars]
    if not found or chars - set(ESCAPED):
        found.append(_plain(node.sources, run))
    return f"({' | '.join(found)})"


def _plain(sources: tuple[str, ...], run: str) -> str:
    """A terminal of the characters that JSON does not escape."""
    classes = []
    for source in sources:
        folds = source.startswith("(?i:")
        bare = source[4:-1] if folds else source
        bare = re.sub(r"(?<!\\)/", r"\\/", bare)
        joined = f"[{bare}&&{_PLAIN}]"
        if re.fullmatch(r'\\["\\nrtf]|"', bare) is None:
            classes.append(f"(?i:{joined})" if folds else joined)
    return f"/({'|'.join(classes)}){run}/"


def _ends_before(run: _CharSet, following: Sequence[_RegexNode]) -> bool:
    """Whether no character of the run can be the first of what follows: the lexer takes all that it can."""
    for node in following[:_FOLLOWING_MAX]:
        first, may_be_empty = _first(node)
        ours, theirs = run.chars, first.chars
        if ours & theirs or any(map(first.has, ours - _COMPARED)) or any(map(run.has, theirs - _COMPARED)):
            return False
        if not may_be_empty:
            return True
    return len(following) <= _FOLLOWING_MAX


def _first(node: _RegexNode) -> tuple[_CharSet, bool]:
    """(the characters that a text may begin with, whether it may be empty)."""
    if isinstance(node, _CharSet):
        return node, False
    if isinstance(node, _Repeat):
        first, may_be_empty = _first(node.inner)
        return first, may_be_empty or node.least == 0
    sources: list[str] = []
    if isinstance(node, _Choice):
        firsts = [_first(branch) for branch in node.branches]
        sources = [source for first, _ in firsts for source in first.sources]
        return _CharSet(tuple(sources)), any(may_be_empty for _, may_be_empty in firsts)
    for part in node.parts:
        first, may_be_empty = _first(part)
        sources += first.sources
        if not may_be_empty:
            return _CharSet(tuple(sources)), False
    return _CharSet(tuple(sources)), True
