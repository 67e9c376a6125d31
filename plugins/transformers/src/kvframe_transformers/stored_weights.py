"""The weights of a checkpoint as they are stored, for ranks that each hold a part of them in memory."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from kvframe.contract import ModelError
from kvframe_transformers.checkpoint import one_sentence

_FILES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
"""The files that hold weights, or name those that do, in the order in which transformers looks for them."""


def weights_for_all_ranks(
    weights: Mapping[str, torch.Tensor], folder: Path | None, config: Any
) -> dict[str, torch.Tensor]:
    """Return weights that are the same on all ranks: the stored ones instead of those that are divided.

    Args:
        weights: The parameters and buffers of this rank.
        folder: The folder from which the model was loaded; None if it was not.
        config: Its config.

    Raises:
        ModelError: The stored weights cannot be read.
    """
    whole = {name: weight for name, weight in weights.items() if not hasattr(weight, "full_tensor")}
    if len(whole) == len(weights):
        return whole
    assert folder is not None, "transformers divides a model when it loads a folder"
    return whole | stored_weights(folder, config)


def stored_weights(folder: Path, config: Any) -> dict[str, torch.Tensor]:
    """Return all weights of a checkpoint by their names there, mapped into memory: only what is used is read.

    Args:
        folder: The checkpoint's folder.
        config: Its config.

    Returns:
        The weights; from safetensors files, their bytes.

    Raises:
        ModelError: They cannot be read.
    """
    weights: dict[str, torch.Tensor] = {}
    try:
        for file in _files_of(folder, config):
            if file.suffix == ".safetensors":
                weights |= _bytes_of_weights(file)
            else:
                weights |= torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # as when they were loaded
        raise ModelError(
            f"the weights of {folder} cannot be compared between ranks: {one_sentence(error)}; store them as "
            "safetensors"
        ) from error
    return weights


def _bytes_of_weights(file: Path) -> dict[str, torch.Tensor]:
    """Return the bytes of each weight of a safetensors file.

    The library safetensors maps files too, but lets the system read megabytes ahead of each byte that is used.
    """
    with file.open("rb") as stream:
        content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_RANDOM"):
        content.madvise(mmap.MADV_RANDOM)
    first = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:first])
    header.pop("__metadata__", None)
    weights = {}
    for name, weight in header.items():
        start, stop = weight["data_offsets"]
        weights[name] = torch.empty(0, dtype=torch.uint8)
        if start < stop:
            weights[name] = torch.frombuffer(content, dtype=torch.uint8, offset=first + start, count=stop - start)
    return weights


def _files_of(folder: Path, config: Any) -> list[Path]:
    explicit = getattr(config, "transformers_weights", None)
    for name in _FILES if explicit is None else (explicit,):
        file = folder / name
        if file.is_file():
            if file.suffix != ".json":
                return [file]
            parts: Mapping[str, str] = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
            return [folder / part for part in sorted(set(parts.values()))]
    raise FileNotFoundError(f"there is no {SAFE_WEIGHTS_NAME}")
