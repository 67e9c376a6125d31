"""Loads a model, or takes one that is in memory, and sets it up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs

from kvframe.config.stack import Stack
from kvframe.contract.model import LoadedModel
from kvframe.hosting.setup import Setup
from kvframe.loading.plugins import load_plugins
from kvframe.loading.registry import Registry
from kvframe.planning.machine import with_dtype
from kvframe.planning.recognise import adopt_model, find_adapter
from kvframe.planning.retyping import EditLayer, edited


def load_model(
    path: str | Path,
    stack: Stack | None = None,
    *,
    plugins: Sequence[ModuleType] = (),
    edit: EditLayer | None = None,
) -> tuple[LoadedModel, Setup]:
    """Load a model from disk, and set it up. The model is not attached to any layers.

    Args:
        path: A model's folder, of a kind that an installed plugin recognises.
        stack: What to use; the defaults unless given.
        plugins: Manifest modules to use beside the installed plugins.
        edit: Changes the types of layers: takes each layer that the model describes, and returns it, or one of the same
            name with another ``kind`` and ``options``. The stack's rules come after. None for the model's own types.

    Raises:
        KVFrameError: The stack, a plugin that it names, or the model is wrong.
    """
    path, stack = Path(path), (Stack() if stack is None else stack).with_device()
    registry = _registry_of(stack, plugins)
    stack.check_device()
    stack = with_dtype(stack, path, registry)
    model = find_adapter(path, registry).load(path, device=stack.model.device, dtype=stack.model.dtype)
    return model, Setup.of(edited(model.description, edit, registry), stack, registry)


def take_model(
    model: Any, tokenizer: Any = None, stack: Stack | None = None, *, plugins: Sequence[ModuleType] = ()
) -> tuple[LoadedModel, Setup]:
    """Take a model that is in memory, and set it up. The model is not attached to any layers.

    Args:
        model: A transformers model, or what an installed plugin knows.
        tokenizer: Its tokenizer; None if prompts are token ids.
        stack: What to use; the defaults unless given. The model's own device and dtype replace the stack's.
        plugins: Manifest modules to use beside the installed plugins.

    Raises:
        KVFrameError: The stack, a plugin that it names, or the model is wrong.
    """
    stack = Stack() if stack is None else stack
    registry = _registry_of(stack, plugins)
    adopted = adopt_model(model, tokenizer, registry)
    stack = attrs.evolve(stack, model=attrs.evolve(stack.model, device=adopted.device, dtype=adopted.dtype))
    return adopted.model, Setup.of(adopted.model.description, stack, registry)


def _registry_of(stack: Stack, plugins: Sequence[ModuleType]) -> Registry:
    """Return the registry of a stack's plugins, in which every name of the stack is known."""
    registry = load_plugins(stack.plugins, plugins).registry
    stack.check(registry)
    return registry
