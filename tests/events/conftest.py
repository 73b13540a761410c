"""Makes stream_world.py and stream_checker.py importable for the tests here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
