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
from kvframe.planning.recognise import adopt_model, find_adapter, with_dtype


def load_model(
    source: Any,
    stack: Stack | None = None,
    *,
    tokenizer: Any = None,
    plugins: Sequence[ModuleType] = (),
    registry: Registry | None = None,
    whole: bool = False,
) -> tuple[LoadedModel, Setup]:
    """Load a model from disk, or take one that is in memory, and set it up. It is not attached to any layers.

    Args:
        source: The path of a model's folder, of a kind that an installed plugin recognises. Or a model in memory: a
            transformers model, or what an installed plugin knows.
        stack: What to use; the defaults unless given. The device and dtype of a model in memory replace the stack's.
        tokenizer: The tokenizer of a model in memory; None if prompts are token ids.
        plugins: Manifest modules to use beside the installed plugins.
        registry: Where names are looked up; None to load the stack's plugins and those of ``plugins``.
        whole: Whether this process alone runs the model, although several processes serve another one together.

    Raises:
        KVFrameError: The stack, a plugin that it names, or the model is wrong.
    """
    stack = Stack() if stack is None else stack
    if isinstance(source, str | Path):
        path, stack = Path(source), stack.with_device()
        registry = _registry_of(stack, plugins) if registry is None else registry
        stack.check_device()
        adapter = find_adapter(path, registry)
        stack = with_dtype(stack, path, adapter)
        model = adapter.load(path, device=stack.model.device, dtype=stack.model.dtype, whole=whole)
    else:
        registry = _registry_of(stack, plugins) if registry is None else registry
        model_in_memory = adopt_model(source, tokenizer, registry)
        model = model_in_memory.model
        stack = attrs.evolve(
            stack, model=attrs.evolve(stack.model, device=model_in_memory.device, dtype=model_in_memory.dtype)
        )
    return model, Setup.of(model.description, stack, registry)


def _registry_of(stack: Stack, plugins: Sequence[ModuleType]) -> Registry:
    """Return the registry of a stack's plugins, in which every name of the stack is known."""
    registry = load_plugins(stack.plugins, plugins).registry
    stack.check(registry)
    return registry
