"""Reads how a sentence-transformers checkpoint makes embeddings, from JSON files in its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvframe.contract import ModelError, Pooling, PoolingMode

_MODES: Mapping[str, PoolingMode] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
"""The poolings that kvframe supports, by their switches in ``config.json`` of the pooling module."""

_NAMES: Mapping[str, PoolingMode] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
"""The same by name, as in the files of later versions."""


def read_pooling(folder: Path) -> Pooling | None:
    """Return how the checkpoint makes embeddings; None if it has no ``modules.json``.

    Args:
        folder: The checkpoint's folder.

    Raises:
        ModelError: Its files cannot be read, or name a step that kvframe does not support.
    """
    file = folder / "modules.json"
    if not file.is_file():
        return None
    modules = read_json(file, list)
    mode: PoolingMode | None = None
    normalize = False
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        if kind == "Pooling":
            mode = _mode_of(folder / str(module.get("path", "")) / "config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise _refusal(file, f"the module {kind or module}")
    if mode is None:
        raise _refusal(file, "no pooling")
    _check_prompt(folder / "config_sentence_transformers.json")
    return Pooling(mode, normalize)


def _check_prompt(file: Path) -> None:
    """Raise for a checkpoint that puts a prompt of its own before each text."""
    config = read_json(file, dict) if file.is_file() else {}
    name, prompts = config.get("default_prompt_name"), config.get("prompts")
    if name is not None and not (isinstance(prompts, dict) and prompts.get(str(name)) == ""):
        raise _refusal(file, f"the prompt {name!r} before each text")


def _mode_of(file: Path) -> PoolingMode:
    config = read_json(file, dict)
    mode_value = config.get("pooling_mode")
    if mode_value is not None:
        keys = mode_value if isinstance(mode_value, list) else [mode_value]
        modes = [_NAMES.get(str(key)) for key in keys]
    else:
        keys = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
        modes = [_MODES.get(key) for key in keys]
    if len(modes) == 1 and modes[0] is not None:
        return modes[0]
    raise _refusal(file, " and ".join(map(str, keys)) or "no pooling mode")


def read_json(file: Path, kind: type[Any]) -> Any:
    """Return the content of a JSON file; raise ``ModelError`` if it cannot be read, or holds no ``kind``."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, kind):
        raise ModelError(f"{file} holds a {type(content).__name__}, not a {kind.__name__}")
    return content


def _refusal(file: Path, reason: str) -> ModelError:
    return ModelError(
        f"{file} asks for {reason}, and kvframe makes embeddings of the mean, the first or the last token, normalized "
        "or not; give both pooling and normalize to ignore the file"
    )
