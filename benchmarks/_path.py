"""Imported first by every benchmark: packages of this checkout come before files of this folder named like them."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:] = [
    str(ROOT), str(ROOT / "scripts"), *(p for p in sys.path if Path(p or ".").resolve() != HERE), str(HERE),
]  # fmt: skip
