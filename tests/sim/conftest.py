"""Makes the simulation's modules, and the engine's fake device, importable for the tests here."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in (Path(__file__).parent, Path(__file__).parent.parent / "engine"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
