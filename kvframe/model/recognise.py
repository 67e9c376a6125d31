"""What lies at a path: which model adapter reads it, and which layers it has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvframe.errors import ModelError, PluginError
from kvframe.model.layer_file import is_layer_file, parse_file, read_layer_file

if TYPE_CHECKING:
    from kvframe.model.adapter import ModelAdapter
    from kvframe.model.description import ModelDescription
    from kvframe.registry import Registry


def find_adapter(path: Path, registry: Registry) -> ModelAdapter:
    """Return the one model adapter that recognises ``path``.

    Args:
        path: A model's folder or config file.
        registry: Where adapters are looked up.

    Raises:
        ModelError: Nothing is there, no adapter recognises it, or more than one does.
    """
    if not path.exists():
        raise ModelError(f"there is no file or folder {path}")
    found: dict[str, ModelAdapter] = {}
    unusable: list[str] = []
    names = registry.model_adapters.names()
    for name in names:
        try:
            adapter: ModelAdapter = registry.model_adapters.load(name)()
        except PluginError as error:
            unusable.append(str(error))
            continue
        if adapter.recognises(path):
            found[name] = adapter
    if len(found) == 1:
        return found.popitem()[1]
    if found:
        raise ModelError(
            f"{path} is recognised by more than one model adapter ({', '.join(found)}); "
            "disable the plugin that is not meant, in the stack's [plugins] disabled"
        )
    if not names:
        raise ModelError(
            f"no plugin that reads models is in use, so {path} cannot be read; `kvframe plugins` shows what is "
            "installed, `pip install kvframe-transformers` adds one for Hugging Face models"
        )
    config = path / "config.json"
    if config.is_file():
        parse_file(config)  # one that is no JSON says so: that is why nobody recognised the folder
    asked = f"no model that a plugin recognises (asked: {', '.join(names)})"
    raise ModelError(
        "; ".join([f"{path} is {asked}", *unusable, "a Hugging Face model is a folder with a config.json"])
    )


def describe_model(path: Path, registry: Registry) -> ModelDescription:
    """Read a model's layers without its weights, from a layer file or by the adapter that recognises ``path``.

    Args:
        path: A model's folder or config file, or a layer file (``kvframe.model.layer_file``), which needs no torch.
        registry: Where adapters are looked up.

    Raises:
        ModelError: Nothing is there, or it is no model, or it is not understood.
    """
    if is_layer_file(path):
        return read_layer_file(path)
    return find_adapter(path, registry).describe(path)
