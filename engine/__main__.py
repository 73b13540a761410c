"""`engine` and `python -m engine`."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from options.entry import run_program
    except ImportError as error:
        sys.exit(f"engine: the package `options` is missing or another's: {error}; install blockcast[engine] by itself")
    except KeyboardInterrupt:
        sys.exit(130)  # as run_program does
    run_program("engine", "engine.cli", ("options", "events", "prompts", "kernels", "simulation"))


if __name__ == "__main__":
    main()
