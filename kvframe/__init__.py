"""The small, versioned contract between language models' attention and the machinery that serves it.

The names below are the public ones. Each is imported when it is first asked for, so ``import kvframe`` loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvframe.attention.backend import (
        AttentionBackend,
        AttentionMetadataBuilder,
        Capabilities,
        KVCache,
        Refusal,
    )
    from kvframe.attention.layer import AttentionGroup, AttentionLayers
    from kvframe.attention.metadata import CommonAttentionMetadata
    from kvframe.attention.wrapper import MetadataWrapper
    from kvframe.builtin.full_attention import FullAttentionSpec
    from kvframe.cache.block_table import BlockTable
    from kvframe.cache.coordinator import KVCacheCoordinator
    from kvframe.cache.manager import KVCacheManager
    from kvframe.cache.pool import BlockPool
    from kvframe.cache.storage import KVCacheStorage
    from kvframe.engine.engine import Engine
    from kvframe.engine.request import RequestOutput, SamplingParams
    from kvframe.errors import KVFrameError
    from kvframe.groups import KVCacheGroup, group_layers, make_layer_specs
    from kvframe.hookspecs import API_VERSION, hookimpl
    from kvframe.model.adapter import LayerDescription, LoadedModel, ModelAdapter, ModelDescription
    from kvframe.plan import KVCachePlan, plan_cache
    from kvframe.plugins import load_plugins
    from kvframe.registry import Registry
    from kvframe.specs import AttentionMask, AttentionSpec, KVCacheSpec, LayerSpec, QuerySpec, StateTensor
    from kvframe.stack import Stack

_HOME = {
    "API_VERSION": "hookspecs",
    "AttentionBackend": "attention.backend",
    "AttentionGroup": "attention.layer",
    "AttentionLayers": "attention.layer",
    "AttentionMask": "specs",
    "AttentionMetadataBuilder": "attention.backend",
    "AttentionSpec": "specs",
    "BlockPool": "cache.pool",
    "BlockTable": "cache.block_table",
    "Capabilities": "attention.backend",
    "CommonAttentionMetadata": "attention.metadata",
    "Engine": "engine.engine",
    "FullAttentionSpec": "builtin.full_attention",
    "KVCache": "attention.backend",
    "KVCacheCoordinator": "cache.coordinator",
    "KVCacheGroup": "groups",
    "KVCacheManager": "cache.manager",
    "KVCachePlan": "plan",
    "KVCacheSpec": "specs",
    "KVCacheStorage": "cache.storage",
    "KVFrameError": "errors",
    "LayerDescription": "model.adapter",
    "LayerSpec": "specs",
    "LoadedModel": "model.adapter",
    "MetadataWrapper": "attention.wrapper",
    "ModelAdapter": "model.adapter",
    "ModelDescription": "model.adapter",
    "QuerySpec": "specs",
    "Refusal": "attention.backend",
    "Registry": "registry",
    "RequestOutput": "engine.request",
    "SamplingParams": "engine.request",
    "Stack": "stack",
    "StateTensor": "specs",
    "group_layers": "groups",
    "hookimpl": "hookspecs",
    "load_plugins": "plugins",
    "make_layer_specs": "groups",
    "plan_cache": "plan",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
