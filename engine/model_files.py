"""Finds a model's folder, and reads its small files. Reads no weights, imports no torch."""

from __future__ import annotations

import json
import logging
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.types import SamplingParams
from options import ConfigError

log = logging.getLogger("engine.files")

_HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
NO_HUB = "MODEL {!r}: no such folder; to fetch it from the hub, install huggingface_hub"
_SMALL_FILES = ["*.json", "*.jinja", "tokenizer*", "merges.txt", "vocab.txt"]

_DEFAULT_SAMPLING = {
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": (int,),
    "min_p": (int, float),
    "repetition_penalty": (int, float),
    "max_new_tokens": (int,),
}


class ModelFiles(NamedTuple):
    """Name of a model as the user gave it, and the folder of its files."""

    name: str
    folder: Path


def locate_model(model: str, *, weights: bool = True) -> ModelFiles:
    """Return where a checkpoint is. `model`: a folder, or a hub name such as `org/name`.

    A hub name that is not in the local Hugging Face cache is fetched, unless HF_HUB_OFFLINE is set. `weights`: whether
    the weights are fetched, too. Raises ConfigError.
    """
    folder = find_local_folder(model)
    if folder is None:
        folder = _download(model, [*_SMALL_FILES, "*.safetensors"] if weights else _SMALL_FILES)
    return ModelFiles(model, folder)


def find_local_folder(model: str) -> Path | None:
    """Return the folder of a checkpoint on this machine, or in its Hugging Face cache; None if it must be downloaded.

    `model`: a folder, or a name on the Hugging Face hub. Raises ConfigError if it can be neither.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(
            f"MODEL {model!r}: a file; expected the folder of a Hugging Face checkpoint, with config.json, safetensors "
            "and tokenizer.json"
        )
    hf_home = Path(os.path.expanduser(os.environ.get("HF_HOME") or "~/.cache/huggingface"))
    cache_folder = Path(os.environ.get("HF_HUB_CACHE") or hf_home / "hub") / f"models--{model.replace('/', '--')}"
    main_revision = cache_folder / "refs" / "main"
    if main_revision.is_file():
        snapshot = cache_folder / "snapshots" / main_revision.read_text().strip()
        if snapshot.is_dir():
            return snapshot
    can_download = _HUB_NAME.fullmatch(model) and not os.environ.get("HF_HUB_OFFLINE")
    if not can_download:
        raise ConfigError(
            f"MODEL {model!r}: no such folder, and not in the Hugging Face cache ({cache_folder}); expected a folder "
            "with config.json and safetensors, or the name of a model on the hub"
        )
    return None


def check_model_exists(model: str, *, weights: bool = True) -> None:
    """Raise ConfigError if a checkpoint is certainly missing. This takes no time, and so comes before the core starts.

    `weights`: whether the model itself is needed, or only its tokenizer.
    """
    folder = find_local_folder(model)
    if folder is None:
        if find_spec("huggingface_hub") is None:
            raise ConfigError(NO_HUB.format(model))
    elif weights and not (folder / "config.json").is_file():
        raise ConfigError(f"MODEL {model!r}: {folder} has no config.json, expected the folder of a checkpoint")


def _download(name: str, patterns: list[str]) -> Path:
    """Download the files of a checkpoint that match `patterns` from the Hugging Face hub. Raises ConfigError."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError(NO_HUB.format(name)) from error
    log.info("fetching %s from the Hugging Face hub", name)
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # the hub's errors are OSErrors: no network, no such model, no access
        error_lines = str(error).strip().splitlines()
        reason = error_lines[0] if error_lines else type(error).__name__
        raise ConfigError(
            f"MODEL {name!r}: no such folder, and not fetched from the Hugging Face hub: {reason} Give the folder of a "
            "checkpoint, or check the name, the network and HF_TOKEN"
        ) from error


def read_default_sampling(folder: Path) -> dict[str, float | int]:
    """Return a model's default sampling parameters, from its generation_config.json, under their names in requests.

    Parameters that this engine does not have are ignored. Raises ConfigError.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(values, dict):
        return {}
    sampling: dict[str, float | int] = {}
    for name, types in _DEFAULT_SAMPLING.items():
        value = values.get(name)
        if isinstance(value, types) and not isinstance(value, bool):
            request_name = "max_tokens" if name == "max_new_tokens" else name
            sampling[request_name] = value
    try:
        msgspec.convert(sampling, SamplingParams)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}; --generation-config vllm does without it") from error
    return sampling
