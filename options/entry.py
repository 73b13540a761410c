"""Entry points of the programs: check that the imported packages are this distribution's, then run a command line."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import os
import signal
import sys
from pathlib import Path

DISTRIBUTION_LINE = b'DISTRIBUTION = "blockcast"'
"""Line in the `__init__.py` of each of our packages. A package of another distribution has no such line."""


def find_import_problem(names: tuple[str, ...]) -> str | None:
    """Check that these packages of ours are installed and would be imported; return the problem, or None.

    A package with such a general name as `options` may be hidden or overwritten by one of another distribution. Ours
    are in the folder of this package.
    """
    packages_folder = Path(__file__).resolve().parent.parent
    for name in names:
        expected_path = packages_folder / name / "__init__.py"
        try:
            spec = importlib.util.find_spec(name)
        except ValueError as error:  # a module without a spec, as of an old namespace package
            return f"the package `{name}` cannot be imported: {error}; expected {expected_path}"
        if spec is None or not spec.origin:
            return f"the package `{name}` is missing: expected {expected_path}; reinstall blockcast"
        actual_path = Path(spec.origin).resolve()
        advice = "install blockcast into an environment of its own"
        if actual_path != expected_path:
            return f"the package `{name}` is shadowed: {actual_path} is imported instead of {expected_path}; {advice}"
        if DISTRIBUTION_LINE not in expected_path.read_bytes().splitlines():
            return f"the package `{name}` was overwritten: {expected_path} is another distribution's; {advice}"
    return None


def kv_subscriber() -> None:
    """Run the console script `kv_subscriber`, which needs no extra."""
    run_program("kv_subscriber", "events.kv_subscriber", ("options", "events"), "blockcast")


def run_program(program: str, module_name: str, packages: tuple[str, ...], distribution: str | None = None) -> None:
    """Run `main` of a module as a program. Common problems end it without a traceback.

    A missing package and a full disk under stdout get one line, Ctrl-C none. `packages`: packages of ours that the
    program needs. `distribution`: name under which pip installs what it needs; by default `blockcast[program]`.
    """
    if os.getpid() == 1:
        # The first process of a container gets no signal that it does not handle.
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    _open_standard_files()
    try:
        _run_main(program, module_name, packages, distribution)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        sys.exit(f"{program}: {error}")


def _open_standard_files() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that is closed: libuv aborts if a socket has its number."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)


def _run_main(program: str, module_name: str, packages: tuple[str, ...], distribution: str | None) -> None:
    """Import and call `main` of a module, as `run_program` says."""
    problem = find_import_problem(packages)
    if problem is not None:
        sys.exit(f"{program}: {problem}")
    try:
        main_function = importlib.import_module(module_name).main
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in (*packages, program):
            raise  # a package of ours is incomplete, which installing others does not mend
        distribution = distribution or f"blockcast[{program}]"
        sys.exit(f"{program}: the package `{error.name}` is missing: install {distribution}")
    main_function(sys.argv[1:])
