# A package of the distribution blockcast: options/entry.py looks for this line.
"""What a program can be told: from the fields of its configuration classes come files, environment, flags and docs."""

from options.fields import FILE, FOLDER, ROOT, SECRET, Flag, Key, Option, Schema, Seconds, check
from options.load import Loaded, load
from options.values import ConfigError, Size

__all__ = [
    "FILE",
    "FOLDER",
    "ROOT",
    "SECRET",
    "ConfigError",
    "Flag",
    "Key",
    "Loaded",
    "Option",
    "Schema",
    "Seconds",
    "Size",
    "check",
    "load",
]
