"""The house: no circle among modules, no room over twenty files, no class or function that holds too many things."""

from __future__ import annotations

import ast
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("engine", "router", "fleet", "events", "kernels", "options", "prompts", "simulation")
FILES_MAX = 20
SOURCES = {".py", ".pyi", ".cpp", ".hpp"}
ATTRIBUTES_MAX = 20
PARAMETERS_MAX = 8


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


def find_attributes(node: ast.ClassDef) -> set[str]:
    """Names of a class's fields, and of what its constructor sets."""
    names = {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            names |= {
                target.attr
                for target in ast.walk(item)
                if isinstance(target, ast.Attribute)
                and isinstance(target.ctx, ast.Store)
                and isinstance(target.value, ast.Name)
                and target.value.id == "self"
            }
    return names


def count_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Number of a function's parameters, without self and cls; 0 for a GPU kernel, which takes every stride."""
    if any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list):
        return 0
    parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len(parameters) - bool(parameters and parameters[0].arg in ("self", "cls"))


def find_large_parts(path: str, source: str) -> dict[str, int]:
    """Place -> size, of each class and function above its limit."""
    large_parts: dict[str, int] = {}
    pending: list[tuple[str, ast.AST]] = [("", ast.parse(source))]
    while pending:
        scope, node = pending.pop()
        for child in ast.iter_child_nodes(node):
            name = scope
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                name = f"{scope}.{child.name}".lstrip(".")
                is_class = isinstance(child, ast.ClassDef)
                size = len(find_attributes(child)) if isinstance(child, ast.ClassDef) else count_parameters(child)
                if size > (ATTRIBUTES_MAX if is_class else PARAMETERS_MAX):
                    large_parts[f"{path}:{name}"] = size
            pending.append((name, child))
    return large_parts


RECORDS = {
    "engine/config.py:EngineConfig",
    "engine/config.py:ServerConfig",
    "events/kv_subscriber.py:command",
    "prompts/routing.py:RoutingRequest",
    "prompts/chat_completions.py:CommonRequest",
    "prompts/chat_completions.py:SharedRequest",
    "router/app/config.py:ProcessConfig",
}
"""Settings, flags and bodies: as many fields as users know of."""
LARGE_PARTS: dict[str, int] = {
    "router/decide/messages.py:RouteRequest": 25,
    "router/metrics.py:Metrics": 25,
}
"""Classes and functions above the limits, and their size. The list may only become shorter, and the sizes smaller."""


def test_a_part_that_is_too_large_is_found() -> None:
    fields = "".join(f"    f{i}: int\n" for i in range(ATTRIBUTES_MAX))
    parameters = ", ".join(f"p{i}" for i in range(PARAMETERS_MAX))
    small = f"class A:\n{fields}    def f(self, {parameters}): ...\n"
    assert find_large_parts("a.py", small) == {}
    large = f"class A:\n{fields}    g: int\n    def f(self, x, {parameters}): ...\n"
    assert find_large_parts("a.py", large) == {"a.py:A": ATTRIBUTES_MAX + 1, "a.py:A.f": PARAMETERS_MAX + 1}


def test_no_class_and_no_function_holds_too_many_things() -> None:
    large_parts: dict[str, int] = {}
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            large_parts |= find_large_parts(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8"))
    assert large_parts.keys() >= RECORDS
    grown_parts = {
        place: size for place, size in large_parts.items() if place not in RECORDS and size > LARGE_PARTS.get(place, 0)
    }
    assert not grown_parts
    assert not LARGE_PARTS.keys() - large_parts.keys(), "no longer too large: take it off the list"
