"""Calls of actors name methods that exist: a handle has no type, so neither mypy nor an import finds a wrong name."""

from __future__ import annotations

import ast
from pathlib import Path

FLEET = Path(__file__).resolve().parents[2] / "fleet"


def list_remote_methods(path: Path) -> list[str]:
    """Return the names `x` of `handle.x.remote(...)` and `call_directory(handle.x, ...)` in one file."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        method: ast.expr | None = None
        if isinstance(node.func, ast.Attribute) and node.func.attr == "remote":
            method = node.func.value
        elif isinstance(node.func, ast.Name) and node.func.id == "call_directory":
            method = node.args[0]
        if isinstance(method, ast.Attribute) and not (isinstance(method.value, ast.Name) and method.value.id == "ray"):
            names.append(method.attr)
    return names


def list_actor_methods(path: Path, actor: str) -> set[str]:
    """Return the names of an actor's methods, read from its source: Ray need not be installed."""
    classes = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef) and node.name == actor
    ]
    return {node.name for node in classes[0].body if isinstance(node, ast.FunctionDef)}


def test_remote_methods_exist() -> None:
    names = [name for path in FLEET.glob("*.py") for name in list_remote_methods(path)]
    assert {"status", "report", "stop"} <= set(names)
    methods = list_actor_methods(FLEET / "directory.py", "DirectoryActor")
    methods |= list_actor_methods(FLEET / "member.py", "MemberActor")
    assert not set(names) - methods
