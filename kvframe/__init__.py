"""The small, versioned contract between language models' attention and the machinery that serves it.

The names below are the public ones. Each is imported when it is first asked for, so ``import kvframe`` loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvframe.attention.backend import AttentionBackend as AttentionBackend
    from kvframe.attention.backend import AttentionMetadataBuilder as AttentionMetadataBuilder
    from kvframe.attention.backend import Capabilities as Capabilities
    from kvframe.attention.backend import KVCache as KVCache
    from kvframe.attention.backend import Refusal as Refusal
    from kvframe.attention.capture import GraphCapture as GraphCapture
    from kvframe.attention.group import AttentionGroup as AttentionGroup
    from kvframe.attention.layer import AttentionLayers as AttentionLayers
    from kvframe.attention.metadata import Axis as Axis
    from kvframe.attention.metadata import CommonAttentionMetadata as CommonAttentionMetadata
    from kvframe.attention.metadata import Extension as Extension
    from kvframe.attention.order import BatchOrder as BatchOrder
    from kvframe.attention.order import split_batch as split_batch
    from kvframe.attention.step import StepBatch as StepBatch
    from kvframe.attention.storage import KVCacheStorage as KVCacheStorage
    from kvframe.attention.wrapper import FieldUse as FieldUse
    from kvframe.attention.wrapper import MetadataWrapper as MetadataWrapper
    from kvframe.builtin.full_attention import FullAttentionSpec as FullAttentionSpec
    from kvframe.cache.block_pool import BlockPool as BlockPool
    from kvframe.cache.block_table import BlockTable as BlockTable
    from kvframe.cache.coordinator import KVCacheCoordinator as KVCacheCoordinator
    from kvframe.cache.events import BlocksRemoved as BlocksRemoved
    from kvframe.cache.events import BlocksStored as BlocksStored
    from kvframe.cache.events import CacheCleared as CacheCleared
    from kvframe.cache.input_index import InputSequence as InputSequence
    from kvframe.cache.keys import content_key as content_key
    from kvframe.cache.keys import prefix_key as prefix_key
    from kvframe.cache.manager import KVCacheManager as KVCacheManager
    from kvframe.cache.pins import Pin as Pin
    from kvframe.cache.stats import KVCacheStats as KVCacheStats
    from kvframe.engine.embedding import Embedder as Embedder
    from kvframe.engine.engine import Engine as Engine
    from kvframe.engine.pooling import EmbeddingOutput as EmbeddingOutput
    from kvframe.engine.prompt import Prompt as Prompt
    from kvframe.engine.request import RequestOutput as RequestOutput
    from kvframe.engine.request import SamplingParams as SamplingParams
    from kvframe.engine.runner import SkipPolicy as SkipPolicy
    from kvframe.errors import KVFrameError as KVFrameError
    from kvframe.eviction import EvictionPolicy as EvictionPolicy
    from kvframe.groups import KVCacheGroup as KVCacheGroup
    from kvframe.groups import group_layers as group_layers
    from kvframe.groups import make_layer_specs as make_layer_specs
    from kvframe.groups import share_caches as share_caches
    from kvframe.hookspecs import API_VERSION as API_VERSION
    from kvframe.hookspecs import hookimpl as hookimpl
    from kvframe.model.adapter import LoadedModel as LoadedModel
    from kvframe.model.adapter import ModelAdapter as ModelAdapter
    from kvframe.model.description import LayerDescription as LayerDescription
    from kvframe.model.description import ModelDescription as ModelDescription
    from kvframe.plan import KVCachePlan as KVCachePlan
    from kvframe.plan import plan_cache as plan_cache
    from kvframe.plugins import load_plugins as load_plugins
    from kvframe.ranks import plan_ranks as plan_ranks
    from kvframe.registry import Registry as Registry
    from kvframe.specs import AttentionMask as AttentionMask
    from kvframe.specs import AttentionSpec as AttentionSpec
    from kvframe.specs import KVCacheSpec as KVCacheSpec
    from kvframe.specs import LayerSpec as LayerSpec
    from kvframe.specs import QuerySpec as QuerySpec
    from kvframe.specs import StateTensor as StateTensor
    from kvframe.stack import Stack as Stack

_HOME = {
    "API_VERSION": "hookspecs",
    "AttentionBackend": "attention.backend",
    "AttentionGroup": "attention.group",
    "AttentionLayers": "attention.layer",
    "AttentionMask": "specs",
    "AttentionMetadataBuilder": "attention.backend",
    "AttentionSpec": "specs",
    "Axis": "attention.metadata",
    "BatchOrder": "attention.order",
    "BlockPool": "cache.block_pool",
    "BlockTable": "cache.block_table",
    "BlocksRemoved": "cache.events",
    "BlocksStored": "cache.events",
    "CacheCleared": "cache.events",
    "Capabilities": "attention.backend",
    "CommonAttentionMetadata": "attention.metadata",
    "Embedder": "engine.embedding",
    "EmbeddingOutput": "engine.pooling",
    "Engine": "engine.engine",
    "EvictionPolicy": "eviction",
    "Extension": "attention.metadata",
    "FieldUse": "attention.wrapper",
    "FullAttentionSpec": "builtin.full_attention",
    "GraphCapture": "attention.capture",
    "InputSequence": "cache.input_index",
    "KVCache": "attention.backend",
    "KVCacheCoordinator": "cache.coordinator",
    "KVCacheGroup": "groups",
    "KVCacheManager": "cache.manager",
    "KVCachePlan": "plan",
    "KVCacheSpec": "specs",
    "KVCacheStats": "cache.stats",
    "KVCacheStorage": "attention.storage",
    "KVFrameError": "errors",
    "LayerDescription": "model.description",
    "LayerSpec": "specs",
    "LoadedModel": "model.adapter",
    "MetadataWrapper": "attention.wrapper",
    "ModelAdapter": "model.adapter",
    "ModelDescription": "model.description",
    "Pin": "cache.pins",
    "Prompt": "engine.prompt",
    "QuerySpec": "specs",
    "Refusal": "attention.backend",
    "Registry": "registry",
    "RequestOutput": "engine.request",
    "SamplingParams": "engine.request",
    "SkipPolicy": "engine.runner",
    "Stack": "stack",
    "StateTensor": "specs",
    "StepBatch": "attention.step",
    "content_key": "cache.keys",
    "group_layers": "groups",
    "hookimpl": "hookspecs",
    "load_plugins": "plugins",
    "make_layer_specs": "groups",
    "plan_cache": "plan",
    "plan_ranks": "ranks",
    "prefix_key": "cache.keys",
    "share_caches": "groups",
    "split_batch": "attention.order",
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
