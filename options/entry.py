"""Entry points of the programs: check that the imported packages are this distribution's, then run a command line."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

DISTRIBUTION_LINE = b'DISTRIBUTION = "blockcast"'
"""Line in the `__init__.py` of each of our packages. A package of another distribution has no such line."""


def find_import_problem(names: tuple[str, ...]) -> str | None:
    """Return what is wrong with the import path, in one line; None if all packages are those beside this one.

    Other distributions may have packages of these names.
    """
    packages_folder = Path(__file__).resolve().parent.parent
    for name in names:
        expected_path = packages_folder / name / "__init__.py"
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError) as error:
            return f"the package `{name}` cannot be imported: {error}; expected {expected_path}"
        actual_path = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if actual_path is None:
            return f"the package `{name}` is missing: expected {expected_path}; reinstall blockcast"
        if actual_path != expected_path:
            return (
                f"the package `{name}` is shadowed: {actual_path} is imported instead of {expected_path}; "
                "install blockcast into an environment of its own"
            )
        if DISTRIBUTION_LINE not in expected_path.read_bytes().splitlines():
            return (
                f"the package `{name}` was overwritten: {expected_path} is another distribution's; "
                "install blockcast into an environment of its own"
            )
    return None


def kv_subscriber() -> None:
    """Run the console script `kv_subscriber`, which needs no extra."""
    run_program("kv_subscriber", "events.kv_subscriber", ("options", "events"), "blockcast")


def run_program(program: str, module_name: str, packages: tuple[str, ...], distribution: str | None = None) -> None:
    """Run `main` of a module, or exit with one line where a package is missing.

    `packages`: packages of ours that it needs. `distribution`: name to install them; by default the extra `program`.
    """
    problem = find_import_problem(packages)
    if problem is not None:
        sys.exit(f"{program}: {problem}")
    try:
        main_function = importlib.import_module(module_name).main
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in (*packages, program):
            raise
        sys.exit(f"{program}: the package `{error.name}` is missing: install {distribution or f'blockcast[{program}]'}")
    main_function(sys.argv[1:])
