"""Every place that docs/architecture.md ("What to open first") and docs/glossary.md name is in the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| (.+) \| (`[\w./]+:\w+`(?:, `[\w./]+:\w+`)*) \|$", re.MULTILINE)
PLACE = re.compile(r"`([\w./]+):(\w+)`")
PLACES_BY_BEHAVIOUR = dict(ROW.findall((ROOT / "docs" / "architecture.md").read_text()))
ROWS = [
    (behaviour, file, symbol)
    for behaviour, places in PLACES_BY_BEHAVIOUR.items()
    for file, symbol in PLACE.findall(places)
]
TERM = re.compile(r"^\| ([^|]+) \| [^|]+ \| `([\w./]+):(\w+)` \|$", re.MULTILINE)
TERMS = TERM.findall((ROOT / "docs" / "glossary.md").read_text())


def test_the_table_has_a_row_for_each_of_a_hundred_behaviours() -> None:
    assert len(PLACES_BY_BEHAVIOUR) >= 100
    lines = (ROOT / "docs" / "architecture.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and PLACE.search(line)]
    assert len(rows) == len(PLACES_BY_BEHAVIOUR), "a behaviour stands twice, or a row has another form"


def test_each_line_of_the_glossary_defines_another_term() -> None:
    lines = [line for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line.startswith("| ")]
    assert len(TERMS) == len([line for line in lines if not line.startswith("| Term |")]), "a row has no place"
    assert len({term for term, _, _ in TERMS}) == len(TERMS) >= 30


@pytest.mark.parametrize(("behaviour", "file", "symbol"), ROWS + TERMS, ids=[row[0] for row in ROWS + TERMS])
def test_the_symbol_is_in_its_file(behaviour: str, file: str, symbol: str) -> None:
    text = (ROOT / file).read_text()
    if file.endswith(".py"):
        nodes = ast.parse(text).body
        symbols = {
            node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        }
        symbols |= {
            target.id
            for node in nodes
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        symbols |= {
            node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        assert symbol in symbols, f"{behaviour}: {file} defines {sorted(symbols)}"
    else:
        definition = rf"(?:class|struct)\s+{symbol}\b|\b{symbol}\s*\("
        assert re.search(definition, text), f"{behaviour}: {file} has no {symbol}"
