"""`fleet` and `python -m fleet`."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from options.entry import enter
    except ImportError as error:
        sys.exit(f"fleet: the package `options` is missing or another's: {error}; install blockcast[ray] by itself")
    enter("fleet", "fleet.cli", ("options",))


if __name__ == "__main__":
    main()
