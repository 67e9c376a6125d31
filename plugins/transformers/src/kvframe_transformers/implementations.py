"""The configs that name a model's attention implementation."""

from __future__ import annotations

from typing import Any

from torch import nn

IMPLEMENTATION = "_attn_implementation_internal"
"""The attribute of a config for the name of the attention implementation."""


def configs_of(model: nn.Module) -> list[Any]:
    """Return every config that a module of ``model`` reads its attention implementation from, each once."""
    configs: dict[int, Any] = {}
    pending: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    while pending:
        config = pending.pop()
        if id(config) not in configs and IMPLEMENTATION in getattr(config, "__dict__", ()):
            configs[id(config)] = config
            pending += [getattr(config, key) for key in config.sub_configs]
    return list(configs.values())
