#!/usr/bin/env python3
"""Writes tests/golden/kernel_signatures.json: how what `kernels.flash_attention` borrows can be called.

    pip download --no-deps --no-binary :all: flash-attn==VERSION      # FlashAttention-3 is in its folder `hopper`
    tests/kernels/record_signatures.py FOLDER                         # unpacked

Read from the sources: nothing is imported, so no GPU is needed.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "golden" / "kernel_signatures.json"
FUNCTIONS = {
    "flash_attn_with_kvcache": "hopper/flash_attn_interface.py",
    "flash_attn_varlen_func": "flash_attn/flash_attn_interface.py",
}


def signature(source: str, name: str) -> list[list[Any]]:
    """[name, whether it must be given, whether it can be given without its name] of each parameter."""
    body: list[Any] = ast.parse(source).body
    *owners, function_name = name.split(".")
    for owner in owners:
        body = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == owner).body
    arguments = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == function_name][-1].args
    positional = [*arguments.posonlyargs, *arguments.args]
    required_count = len(positional) - len(arguments.defaults)
    rows: list[list[Any]] = [
        [arg.arg, i < required_count, True] for i, arg in enumerate(positional) if arg.arg != "self"
    ]
    return rows + [
        [arg.arg, default is None, False] for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults)
    ]


def main() -> None:
    signatures = {}
    for name, path in FUNCTIONS.items():
        folder = next(Path(folder) for folder in sys.argv[1:] if (Path(folder) / path).is_file())
        source = (folder / path).read_text()
        signatures[name] = {"from": f"{folder.name}: {path}", "parameters": signature(source, name)}
    lines = [f'"{name}": {json.dumps(entry)}' for name, entry in signatures.items()]
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
