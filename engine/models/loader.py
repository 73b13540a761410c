"""Loads an HF checkpoint from disk: a model with its weights on a device.

Reads config.json and safetensors (one file, or shards with an index). A tensor that is missing, of a wrong shape, not
finite, or not needed is an error that names it.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.models import CausalLM, HfConfig, ModelError, Shard, build_model
from engine.models.weights import CheckpointTensor, Weight
from engine.types import RunnerLostError

DTYPE_BY_NAME = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SINGLE_FILE_NAME, INDEX_FILE_NAME = "model.safetensors", "model.safetensors.index.json"
SHOWN_NAME_COUNT = 8
IGNORED_SUFFIX = ".rotary_emb.inv_freq"
"""End of the names of tensors that no model needs. Llama 2 was saved with its rotary frequencies."""

log = logging.getLogger("engine.loader")


Target = tuple[Weight, CheckpointTensor]
"""A weight to which a tensor of the checkpoint is copied, and how."""


def resolve_dtype(dtype_name: str, config: HfConfig) -> torch.dtype:
    """Return the dtype to compute in. `auto`: the checkpoint's own, or fp32 if it names none. Raises ModelError."""
    name = dtype_name
    if dtype_name == "auto":
        name = config.dtype or "float32"
    if name not in DTYPE_BY_NAME:
        source = "--dtype" if dtype_name != "auto" else f"{config.source}: dtype"
        raise ModelError(f"{source}: {name!r} is not supported; expected one of {', '.join(DTYPE_BY_NAME)}")
    return DTYPE_BY_NAME[name]


def load_model(
    folder: Path, *, dtype: str = "auto", device: torch.device | str = "cpu", shard: Shard | None = None
) -> tuple[CausalLM, torch.dtype]:
    """Load the model of a checkpoint's folder, and return it and its dtype. Raises ModelError, naming file and field.

    `shard`: the part of this rank; None: there is one rank.
    """
    config = HfConfig.read(folder)
    model = build_model(config, shard)
    compute_dtype = resolve_dtype(dtype, config)
    load_weights(model, folder, compute_dtype, torch.device(device))
    return model, compute_dtype


def load_weights(model: CausalLM, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Allocate the model's weights, and fill them from the safetensors files of a checkpoint's folder.

    Raises ModelError if a tensor is missing, or if the checkpoint has one that the model neither needs nor ignores.
    """
    targets_by_name: dict[str, list[Target]] = {}  # name of a tensor -> the weights that are made of it
    for weight in model.weights:
        weight.allocate(dtype, device)
        for part in weight.parts:
            targets_by_name.setdefault(part.name, []).append((weight, part))

    missing_names = set(targets_by_name)
    unused_names: list[str] = []
    paths = _list_shard_paths(folder)
    for file_number, path in enumerate(paths, 1):
        log.info("loading %s (%d of %d, %.1f GB)", path.name, file_number, len(paths), path.stat().st_size / 1e9)
        stored_name_by_name = _copy_tensors(path, model, targets_by_name)  # differ if a family has renamed tensors
        missing_names -= stored_name_by_name.keys()
        for name, stored_name in stored_name_by_name.items():
            is_ignored = name.startswith(model.ignored_prefixes) or name.endswith(IGNORED_SUFFIX)
            if name not in targets_by_name and not is_ignored:
                unused_names.append(stored_name)

    if missing_names:
        raise ModelError(f"{folder}: tensors missing from the checkpoint: {_format_names(missing_names)}")
    if unused_names:
        names = _format_names(unused_names)
        raise ModelError(f"{folder}: tensors in the checkpoint that the model does not have: {names}")
    for weight in model.weights:
        weight.pack()  # for fast multiplication, on a CPU


def _copy_tensors(path: Path, model: CausalLM, targets_by_name: dict[str, list[Target]]) -> dict[str, str]:
    """Copy the tensors of one file to the weights that need them. `targets_by_name`: by the tensor's name in the model.

    Returns, for each tensor of the file, its name in the model -> its name in the file.
    """
    stored_name_by_name = {}
    with _open_safetensors(path) as tensors:
        for stored_name in tensors.keys():  # noqa: SIM118 - a safetensors handle is no mapping
            name = _rename_tensor(stored_name, model)
            stored_name_by_name[name] = stored_name
            if name in targets_by_name:
                _copy_tensor(tensors.get_tensor(stored_name), targets_by_name[name], path)
    return stored_name_by_name


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file for a `with` block. Raises ModelError if the file, or a tensor in it, cannot be read."""
    try:
        path.open("rb").close()  # the library says of a file without read permission that there is none
        with safe_open(path, framework="pt") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: not a readable safetensors file: {error}") from error


def reload_weights(model: CausalLM, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Replace the weights of a loaded model by those of another checkpoint of the same architecture and sizes.

    Both are in memory for a moment. Raises ModelError, and replaces nothing, if the checkpoint does not fit. Raises
    RunnerLostError if the device fails meanwhile: the model then has weights of both.
    """
    new_model = build_model(HfConfig.read(folder), None)
    if _list_configs(new_model) != _list_configs(model):
        raise ModelError(
            f"{folder}: expected a checkpoint of the same architecture, shapes and scale factors as the one that is "
            "served"
        )
    load_weights(new_model, folder, dtype, device)
    try:
        for weight, new_weight in zip(model.weights, new_model.weights, strict=True):
            weight.replace_values(new_weight)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise RunnerLostError(f"the weights were replaced in part only: {reason}") from error


def _list_configs(model: CausalLM) -> list[object]:
    """Return the configs of the decoder and of the layers that have one. The loaded model keeps them as they are.

    Scale factors, rotary frequencies and how experts are chosen are settings there, and have no tensor.
    """
    return [model.config, *(getattr(branch.layer, "config", None) for block in model.blocks for branch in block)]


def _list_shard_paths(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: those that its index names, or the only one if it has no index.

    Raises ModelError if a file is missing or the index is malformed.
    """
    paths = [folder / SINGLE_FILE_NAME]
    index_path = folder / INDEX_FILE_NAME
    if index_path.exists():
        try:
            names = json.loads(index_path.read_text())["weight_map"].values()
            paths = [folder / name for name in sorted(set(names))]
        except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
            raise ModelError(f"{index_path}: expected an object with weight_map: {error!r}") from error
    for path in paths:
        if not path.is_file():
            raise ModelError(f"{path}: no such file; expected the checkpoint's weights in safetensors format")
    return paths


def _rename_tensor(name: str, model: CausalLM) -> str:
    """Return the model's name of a checkpoint's tensor. Some families were saved with several prefixes."""
    for prefix, model_prefix in model.config.renamed_prefixes.items():
        if name.startswith(prefix):
            return model_prefix + name[len(prefix) :]
    return name


def _copy_tensor(tensor: Tensor, targets: list[Target], path: Path) -> None:
    """Copy a checkpoint's tensor to the weights that need it.

    Raises ModelError for a wrong shape or dtype, and for values that are not finite as the model computes with them:
    every logit would be NaN, and every answer the token 0 again and again.
    """
    for weight, part in targets:
        if tuple(tensor.shape) != part.shape:
            raise ModelError(f"{path}: {part.name}: shape {list(tensor.shape)}, expected {list(part.shape)}")
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise ModelError(f"{path}: {part.name}: dtype {tensor.dtype} is not supported; expected a float tensor")
        values = weight.tensor[part.target_index].copy_(part.slice_tensor(tensor))
        if values.numel() and not all(map(math.isfinite, torch.stack(values.aminmax()).tolist())):
            raise ModelError(f"{path}: {part.name}: expected finite values, as {values.dtype}")


def _format_names(names: Iterable[str]) -> str:
    sorted_names = sorted(names)
    omitted_count = len(sorted_names) - SHOWN_NAME_COUNT
    return ", ".join(sorted_names[:SHOWN_NAME_COUNT]) + (f" and {omitted_count} more" if omitted_count > 0 else "")
