"""`engine` and `python -m engine`: make sure that our packages are ours, then run the command line."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

OURS = ("options", "events", "prompts", "kernels")
"""Packages that stand beside `engine`. Other distributions have packages of these names."""


def shadowed() -> str | None:
    """What is wrong with the import path, in one line; None where nothing is."""
    home = Path(__file__).resolve().parent.parent
    for name in OURS:
        expected = home / name / "__init__.py"
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError) as error:
            return f"the package `{name}` cannot be imported: {error}; expected {expected}"
        found = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if found is None:
            return f"the package `{name}` is missing: expected {expected}; reinstall blockcast"
        if found != expected:
            return (
                f"the package `{name}` is shadowed: {found} is imported instead of {expected}; "
                "install blockcast into an environment of its own"
            )
    return None


def main() -> None:
    problem = shadowed()
    if problem is not None:
        print(f"engine: {problem}", file=sys.stderr)
        sys.exit(1)
    try:
        from engine.cli import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in (*OURS, "engine"):
            raise
        print(f"engine: the package `{error.name}` is missing: install blockcast[engine]", file=sys.stderr)
        sys.exit(1)

    run(sys.argv[1:])


if __name__ == "__main__":
    main()
