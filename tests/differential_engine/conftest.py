"""The modules of this folder and the engine's fake device, importable although the test tree has no packages."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent

sys.path += [str(FOLDER), str(FOLDER.parent / "engine")]
