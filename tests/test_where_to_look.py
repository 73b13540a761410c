"""Every row of the table "What to open first" in docs/architecture.md names a file and a symbol that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| (.+) \| `([\w./]+):(\w+)` \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "docs" / "architecture.md").read_text())


def test_the_table_has_at_least_twenty_rows() -> None:
    assert len(ROWS) >= 20
    assert len({behaviour for behaviour, _, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("behaviour", "file", "symbol"), ROWS, ids=[row[0] for row in ROWS])
def test_the_symbol_is_in_its_file(behaviour: str, file: str, symbol: str) -> None:
    text = (ROOT / file).read_text()
    if file.endswith(".py"):
        nodes = ast.parse(text).body
        defined = {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        defined |= {
            target.id
            for node in nodes
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        assert symbol in defined, f"{behaviour}: {file} defines {sorted(defined)}"
    else:
        definition = rf"(?:class|struct)\s+{symbol}\b|\b{symbol}\s*\("
        assert re.search(definition, text), f"{behaviour}: {file} has no {symbol}"
