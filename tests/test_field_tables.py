"""Tables of fields in the documentation name every field of the struct that they describe, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from router.decide.messages import RouteRequest, Terms

HOW_TO = Path(__file__).resolve().parents[1] / "docs" / "how-to"
COMPATIBILITY = HOW_TO.parent / "reference" / "compatibility.md"
OWN_FIELDS = {"similar_prompt", "queue_rank"}
"""Fields of a request that the router alone reads. The page names them below its table."""


def list_table_fields(page: str, heading: str) -> list[str]:
    """Return the names in the first column of the table under a heading."""
    section = (HOW_TO / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]+`) \|", section, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


@pytest.mark.parametrize(
    ("struct", "page", "heading", "own_fields"),
    [
        (RouteRequest, "add-a-policy.md", "What the function gets", OWN_FIELDS),
        (Terms, "explain-a-decision.md", "Fields of a candidate", set()),
    ],
)
def test_the_table_has_every_field(struct: type[msgspec.Struct], page: str, heading: str, own_fields: set[str]) -> None:
    fields = list_table_fields(page, heading)
    assert sorted(fields) == sorted(set(struct.__struct_fields__) - own_fields)
    assert all(f"`{name}`" in (HOW_TO / page).read_text() for name in own_fields)


def test_the_page_of_compatibility_lists_every_architecture_that_the_engine_runs() -> None:
    models = pytest.importorskip("engine.models")
    names = re.findall(r"`(\w+For\w+)`", COMPATIBILITY.read_text())
    assert sorted(names) == sorted(models.BUILDER_BY_ARCHITECTURE)
