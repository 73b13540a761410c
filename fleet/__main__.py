"""`fleet` and `python -m fleet`."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from options.entry import run_program
    except ImportError as error:
        sys.exit(f"fleet: the package `options` is missing or another's: {error}; install blockcast[ray] by itself")
    except KeyboardInterrupt:
        sys.exit(130)  # as run_program does
    run_program("fleet", "fleet.cli", ("options",))


if __name__ == "__main__":
    main()
