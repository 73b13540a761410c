"""Configuration of the programs: fields of config classes become settings of a file, variables, flags and docs.

`options.entry` is the entry point of each program: it checks that the packages beside it are ours.
"""

from options.fields import FILE, FOLDER, ROOT, SECRET, Flag, Key, Schema, Seconds, Setting, check_config
from options.load import LoadedConfig, load_config
from options.values import ConfigError, Size

DISTRIBUTION = "blockcast"

__all__ = [
    "FILE",
    "FOLDER",
    "ROOT",
    "SECRET",
    "ConfigError",
    "Flag",
    "Key",
    "LoadedConfig",
    "Schema",
    "Seconds",
    "Setting",
    "Size",
    "check_config",
    "load_config",
]
