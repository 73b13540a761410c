"""`router` and `python -m router`."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from options.entry import run_program
    except ImportError as error:
        sys.exit(f"router: the package `options` is missing or another's: {error}; install blockcast[router] by itself")
    except KeyboardInterrupt:
        sys.exit(130)  # as run_program does
    run_program("router", "router.app.cli", ("options", "events", "prompts", "simulation"))


if __name__ == "__main__":
    main()
