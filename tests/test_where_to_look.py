"""Every place that docs/architecture.md ("What to open first") and docs/glossary.md name is in the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| (.+) \| `([\w./]+):(\w+)` \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "docs" / "architecture.md").read_text())
TERM = re.compile(r"^\| ([^|]+) \| [^|]+ \| `([\w./]+):(\w+)` \|$", re.MULTILINE)
TERMS = TERM.findall((ROOT / "docs" / "glossary.md").read_text())


def test_the_table_has_at_least_twenty_rows() -> None:
    assert len(ROWS) >= 20
    assert len({behaviour for behaviour, _, _ in ROWS}) == len(ROWS)


def test_each_line_of_the_glossary_defines_another_term() -> None:
    lines = [line for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line.startswith("| ")]
    assert len(TERMS) == len([line for line in lines if not line.startswith("| Term |")]), "a row has no place"
    assert len({term for term, _, _ in TERMS}) == len(TERMS) >= 30


@pytest.mark.parametrize(("behaviour", "file", "symbol"), ROWS + TERMS, ids=[row[0] for row in ROWS + TERMS])
def test_the_symbol_is_in_its_file(behaviour: str, file: str, symbol: str) -> None:
    text = (ROOT / file).read_text()
    if file.endswith(".py"):
        nodes = ast.parse(text).body
        symbols = {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        symbols |= {
            target.id
            for node in nodes
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        assert symbol in symbols, f"{behaviour}: {file} defines {sorted(symbols)}"
    else:
        definition = rf"(?:class|struct)\s+{symbol}\b|\b{symbol}\s*\("
        assert re.search(definition, text), f"{behaviour}: {file} has no {symbol}"
