"""Imported by every Python script here, before anything that is not in the standard library.

Runs the script in the clone's .venv (made on first use) with the clone's packages importable.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / ".venv" / "bin" / "python"


def _in_own_environment() -> bool:
    return Path(sys.prefix).resolve() == (ROOT / ".venv").resolve()


if not _in_own_environment() and "BLOCKCAST_NO_VENV" not in os.environ:
    setup = subprocess.run(["bash", "-c", f'source "{ROOT}/scripts/_setup"'])
    if setup.returncode != 0:
        sys.exit(setup.returncode)  # it has said why
    os.execv(PYTHON, [str(PYTHON), *sys.argv])

sys.path.insert(0, str(ROOT))
