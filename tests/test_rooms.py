"""The house: no circle among the program's modules, no room with over twenty files, every room says what it owns."""

from __future__ import annotations

import ast
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("engine", "router", "fleet", "events", "kernels", "options", "prompts", "simulation")
FILES_MAX = 20
SOURCES = {".py", ".pyi", ".cpp", ".hpp"}


def find_import_circle(imports: dict[str, set[str]]) -> list[str]:
    """One circle of `imports` (module -> modules), as a walk along it; empty where there is none."""
    finished_modules: set[str] = set()
    for start in sorted(imports):
        walk: list[str] = []
        pending = [(start, iter(sorted(imports[start])))]
        if start in finished_modules:
            continue
        walk.append(start)
        while pending:
            following = pending[-1][1]
            for other in following:
                if other in walk:
                    return [*walk[walk.index(other) :], other]
                if other not in finished_modules and other in imports:
                    walk.append(other)
                    pending.append((other, iter(sorted(imports[other]))))
                    break
            else:
                pending.pop()
                finished_modules.add(walk.pop())
    return []


def test_a_circle_is_found_where_there_is_one() -> None:
    assert find_import_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_import_circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    imports["engine"].discard("engine.llm")  # the package's door: loaded on first use
    assert find_import_circle(imports) == []


def rooms() -> list[Path]:
    folders = [ROOT / package for package in PACKAGES]
    inner = [path for folder in folders for path in folder.rglob("*") if path.is_dir()]
    return [path for path in [*folders, *inner] if any(file.suffix in SOURCES for file in path.iterdir())]


@pytest.mark.parametrize("room", rooms(), ids=lambda room: str(room.relative_to(ROOT)))
def test_a_room_is_small_and_says_what_it_owns(room: Path) -> None:
    files = [file.name for file in room.iterdir() if file.suffix in SOURCES]
    assert len(files) <= FILES_MAX, sorted(files)
    if (door := room / "__init__.py").exists():
        assert ast.get_docstring(ast.parse(door.read_text())), f"{door} says nothing"
