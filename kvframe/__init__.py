"""The small, versioned contract between language models' attention and the machinery that serves it.

The names below are the public ones. Each is imported when it is first asked for, so ``import kvframe`` loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvframe.attention.group import AttentionGroup as AttentionGroup
    from kvframe.attention.layer import AttentionLayers as AttentionLayers
    from kvframe.attention.step import StepBatch as StepBatch
    from kvframe.attention.storage import KVCacheStorage as KVCacheStorage
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
    from kvframe.config.stack import Stack as Stack
    from kvframe.contract.backend import AttentionBackend as AttentionBackend
    from kvframe.contract.backend import AttentionMetadataBuilder as AttentionMetadataBuilder
    from kvframe.contract.backend import Capabilities as Capabilities
    from kvframe.contract.backend import KVCache as KVCache
    from kvframe.contract.backend import Refusal as Refusal
    from kvframe.contract.capture import GraphCapture as GraphCapture
    from kvframe.contract.description import LayerDescription as LayerDescription
    from kvframe.contract.description import ModelDescription as ModelDescription
    from kvframe.contract.errors import KVFrameError as KVFrameError
    from kvframe.contract.eviction import EvictionPolicy as EvictionPolicy
    from kvframe.contract.hookspecs import API_VERSION as API_VERSION
    from kvframe.contract.hookspecs import hookimpl as hookimpl
    from kvframe.contract.metadata import Axis as Axis
    from kvframe.contract.metadata import CommonAttentionMetadata as CommonAttentionMetadata
    from kvframe.contract.metadata import Extension as Extension
    from kvframe.contract.model import LoadedModel as LoadedModel
    from kvframe.contract.model import ModelAdapter as ModelAdapter
    from kvframe.contract.order import BatchOrder as BatchOrder
    from kvframe.contract.order import split_batch as split_batch
    from kvframe.contract.specs import AttentionMask as AttentionMask
    from kvframe.contract.specs import AttentionSpec as AttentionSpec
    from kvframe.contract.specs import KVCacheSpec as KVCacheSpec
    from kvframe.contract.specs import LayerSpec as LayerSpec
    from kvframe.contract.specs import QuerySpec as QuerySpec
    from kvframe.contract.specs import StateTensor as StateTensor
    from kvframe.contract.wrapper import FieldUse as FieldUse
    from kvframe.contract.wrapper import MetadataWrapper as MetadataWrapper
    from kvframe.engine.embedding import Embedder as Embedder
    from kvframe.engine.engine import Engine as Engine
    from kvframe.engine.requests.prompt import Prompt as Prompt
    from kvframe.engine.requests.request import RequestOutput as RequestOutput
    from kvframe.engine.requests.request import SamplingParams as SamplingParams
    from kvframe.engine.running.pooling import EmbeddingOutput as EmbeddingOutput
    from kvframe.engine.running.runner import SkipPolicy as SkipPolicy
    from kvframe.loading.plugins import load_plugins as load_plugins
    from kvframe.loading.registry import Registry as Registry
    from kvframe.planning.groups import KVCacheGroup as KVCacheGroup
    from kvframe.planning.groups import group_layers as group_layers
    from kvframe.planning.groups import make_layer_specs as make_layer_specs
    from kvframe.planning.groups import share_caches as share_caches
    from kvframe.planning.plan import KVCachePlan as KVCachePlan
    from kvframe.planning.plan import plan_cache as plan_cache
    from kvframe.planning.ranks import plan_ranks as plan_ranks

_HOME = {
    "API_VERSION": "contract.hookspecs",
    "AttentionBackend": "contract.backend",
    "AttentionGroup": "attention.group",
    "AttentionLayers": "attention.layer",
    "AttentionMask": "contract.specs",
    "AttentionMetadataBuilder": "contract.backend",
    "AttentionSpec": "contract.specs",
    "Axis": "contract.metadata",
    "BatchOrder": "contract.order",
    "BlockPool": "cache.block_pool",
    "BlockTable": "cache.block_table",
    "BlocksRemoved": "cache.events",
    "BlocksStored": "cache.events",
    "CacheCleared": "cache.events",
    "Capabilities": "contract.backend",
    "CommonAttentionMetadata": "contract.metadata",
    "Embedder": "engine.embedding",
    "EmbeddingOutput": "engine.running.pooling",
    "Engine": "engine.engine",
    "EvictionPolicy": "contract.eviction",
    "Extension": "contract.metadata",
    "FieldUse": "contract.wrapper",
    "FullAttentionSpec": "builtin.full_attention",
    "GraphCapture": "contract.capture",
    "InputSequence": "cache.input_index",
    "KVCache": "contract.backend",
    "KVCacheCoordinator": "cache.coordinator",
    "KVCacheGroup": "planning.groups",
    "KVCacheManager": "cache.manager",
    "KVCachePlan": "planning.plan",
    "KVCacheSpec": "contract.specs",
    "KVCacheStats": "cache.stats",
    "KVCacheStorage": "attention.storage",
    "KVFrameError": "contract.errors",
    "LayerDescription": "contract.description",
    "LayerSpec": "contract.specs",
    "LoadedModel": "contract.model",
    "MetadataWrapper": "contract.wrapper",
    "ModelAdapter": "contract.model",
    "ModelDescription": "contract.description",
    "Pin": "cache.pins",
    "Prompt": "engine.requests.prompt",
    "QuerySpec": "contract.specs",
    "Refusal": "contract.backend",
    "Registry": "loading.registry",
    "RequestOutput": "engine.requests.request",
    "SamplingParams": "engine.requests.request",
    "SkipPolicy": "engine.running.runner",
    "Stack": "config.stack",
    "StateTensor": "contract.specs",
    "StepBatch": "attention.step",
    "content_key": "cache.keys",
    "group_layers": "planning.groups",
    "hookimpl": "contract.hookspecs",
    "load_plugins": "loading.plugins",
    "make_layer_specs": "planning.groups",
    "plan_cache": "planning.plan",
    "plan_ranks": "planning.ranks",
    "prefix_key": "cache.keys",
    "share_caches": "planning.groups",
    "split_batch": "contract.order",
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
