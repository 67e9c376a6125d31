"""Layer files: a model's layers written down by hand, so that planning needs neither the model nor torch.

docs/planning.md describes their keys. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kvframe.config.options import MODEL_DTYPES
from kvframe.contract.description import LayerDescription, ModelDescription, ModelShare
from kvframe.contract.errors import FileError, ModelError, StackError, UnknownNameError, shown
from kvframe.contract.files import read_json, read_toml
from kvframe.contract.sizes import parse_bytes
from kvframe.contract.specs import ENCODER
from kvframe.loading.checks import MAX_WHOLE

_MAX_LAYERS = 10_000
_FILE_KEYS = ("name", "max_model_len", "dtype", "weights", "max_encoder_len", "repeat", "layers")
_ENTRY_KEYS = ("name", "names", "count", "kind", "shares_with", "query")
_QUERY_KEYS = ("num_heads", "head_size", "scale", "soft_cap", "has_sinks", "relative_bias", "alibi_slopes")


def is_layer_file(path: Path) -> bool:
    """Return whether ``path`` is a layer file: any TOML file, or a JSON object with a list of ``layers``."""
    if path.suffix == ".toml":
        return path.is_file()
    if path.suffix != ".json" or not path.is_file():
        return False
    data = parse_file(path)
    return isinstance(data, dict) and isinstance(data.get("layers"), list)


def read_layer_file(path: Path) -> ModelDescription:
    """Read the layers of a layer file, TOML or JSON by its suffix; raise ``ModelError`` that says where it is wrong."""
    data = parse_file(path)
    if not isinstance(data, dict):
        raise ModelError(f"{path} holds a {type(data).__name__}, not a table with max_model_len and layers")
    _check_keys(path, "", data, _FILE_KEYS)
    max_model_len = _count(path, "max_model_len", data)
    entries = data.get("layers")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ModelError(f"{path}: layers must be a list of tables, one for each kind of layer")
    layers: list[LayerDescription] = []
    for _ in range(_count(path, "repeat", data, default=1)):
        for index, entry in enumerate(entries):
            _add_layers(path, f"layers[{index}]", entry, layers)
            if len(layers) > _MAX_LAYERS:
                raise ModelError(f"{path}: a model has at most {_MAX_LAYERS} layers")
    return ModelDescription(
        name=str(data.get("name", path.stem)),
        layers=tuple(layers),
        max_model_len=max_model_len,
        max_input_lens={ENCODER: _count(path, "max_encoder_len", data)} if "max_encoder_len" in data else {},
    )


class LayerFiles:
    """Reads layer files, as a model adapter reads models."""

    def describe(self, path: Path) -> ModelDescription:
        """Return the layers that the file lists; raises as ``read_layer_file`` does."""
        return read_layer_file(path)

    def dtype_of(self, path: Path) -> str | None:
        """Return the dtype that a layer file names, or None; raise ``ModelError`` if it is no dtype of a model."""
        data = parse_file(path)
        dtype = data.get("dtype") if isinstance(data, dict) else None
        if dtype is None or dtype in MODEL_DTYPES:
            return dtype
        raise ModelError(f"{path}: dtype must be one of {', '.join(MODEL_DTYPES)}, not {shown(dtype)}")

    def share_of_rank(self, path: Path, description: ModelDescription, *, dtype: str, num_ranks: int) -> ModelShare:
        """Return the layers with the heads of one rank, and an equal part of the weights that the file names."""
        weights, layers = (
            parse_file(path).get("weights"),
            [layer.share_of_heads(num_ranks) for layer in description.layers],
        )
        if weights is None:
            return ModelShare(layers=tuple(layers))
        try:
            num_bytes = parse_bytes(weights)
        except StackError as error:
            raise ModelError(f"{path}: weights: {error}") from error
        words = "as the file says" + (f", divided by {num_ranks}" if num_ranks > 1 else "")
        return ModelShare(layers=tuple(layers), weight_bytes=-(-num_bytes // num_ranks), weights=words)


def parse_file(path: Path) -> Any:
    """Return the content of a TOML file (by its suffix) or a JSON file; raise ``ModelError`` if it cannot be read."""
    try:
        return read_toml(path) if path.suffix == ".toml" else read_json(path)
    except FileError as error:
        raise ModelError(f"{path} {error}") from error


def _add_layers(path: Path, where: str, entry: Mapping[str, Any], layers: list[LayerDescription]) -> None:
    """Append the layers of one entry to ``layers``; the length of the list is the number of the next layer."""
    kind = entry.get("kind")
    if not isinstance(kind, str):
        raise ModelError(f'{path}: {where}.kind must name a cache spec, such as "full_attention", not {shown(kind)}')
    options = {key: value for key, value in entry.items() if key not in _ENTRY_KEYS}
    attends = "query" in entry or "num_kv_heads" in options
    query = _query(path, f"{where}.query", entry.get("query", {}), options) if attends else {}
    for name in _names(path, where, entry):
        layers.append(
            LayerDescription(
                name=name.replace("{}", str(len(layers))),
                kind=kind,
                options=options,
                query=query,
                shares_with=_shares_with(path, f"{where}.shares_with", entry.get("shares_with"), layers),
            )
        )


def _names(path: Path, where: str, entry: Mapping[str, Any]) -> list[str]:
    name, names = entry.get("name"), entry.get("names")
    count = _count(path, "count", entry, where=where, default=1)
    if isinstance(name, str) and names is None:
        if count > 1 and "{}" not in name:
            raise ModelError(f"{path}: {where} has a count, so its name must hold {{}}: {shown(name)} + {{}}")
        return [name] * count
    if name is None and isinstance(names, list) and all(isinstance(text, str) for text in names):
        if "count" in entry:
            raise ModelError(f"{path}: {where} has both names and count; count goes with a name that holds {{}}")
        return names
    raise ModelError(f'{path}: {where} needs a name ("layers.{{}}"), or names (a list of them)')


def _query(path: Path, where: str, query: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(query, dict):
        raise ModelError(f"{path}: {where} must be a table of {', '.join(_QUERY_KEYS)}, not {shown(query)}")
    _check_keys(path, f"{where}.", query, _QUERY_KEYS)
    fields = {
        **{key: options[option] for key, option in _QUERY_FROM_OPTIONS.items() if option in options},
        **query,
    }
    head_size = fields.get("head_size")
    if isinstance(head_size, int) and head_size > 0:
        fields.setdefault("scale", head_size**-0.5)
    return fields


_QUERY_FROM_OPTIONS = {"num_heads": "num_kv_heads", "head_size": "head_size"}


def _shares_with(path: Path, where: str, target: Any, layers: list[LayerDescription]) -> str | None:
    if target is None or isinstance(target, str):
        return target
    if isinstance(target, int) and -len(layers) <= target < 0:
        return layers[target].name
    raise ModelError(
        f"{path}: {where} must be a layer's name, or how far before this one it is "
        f"(-1 to -{len(layers)} for layer {len(layers)}), not {shown(target)}"
    )


def _count(path: Path, key: str, data: Mapping[str, Any], *, where: str = "", default: int | None = None) -> int:
    value = data.get(key, default)
    limit = _MAX_LAYERS if key in ("repeat", "count") else MAX_WHOLE
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        path_in_file = f"{where}.{key}" if where else key
        raise ModelError(
            f"{path}: {path_in_file} must be a whole number of at least 1 and at most {limit}, not {shown(value)}"
        )
    return value


def _check_keys(path: Path, where: str, data: Mapping[str, Any], known_keys: Collection[str]) -> None:
    for key in data:
        if key not in known_keys:
            raise ModelError(f"{path}: {UnknownNameError('key', f'{where}{key}', [f'{where}{k}' for k in known_keys])}")
