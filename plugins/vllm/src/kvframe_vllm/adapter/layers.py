"""Describe vLLM's attention layers as the model that ``kvframe.HostedModel`` serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from kvframe import HostedModel, Registry, Stack
from kvframe.contract import BackendError, LayerDescription, ModelDescription
from kvframe_vllm.adapter.backend import HostedBackend, HostedImpl, HostedLatentBackend

OWN = {"latent_size": "mla", "window": "sliding_window", "chunk": "chunked_local", "head_size": "full_attention"}
"""The kind of a layer, by the first of these options that it has."""

SIZES = ("num_kv_heads", "head_size", "head_size_v")
OPTIONS = {
    "mla": ("latent_size", "rope_size", "head_size_v"),
    "sliding_window": (*SIZES, "window"),
    "chunked_local": (*SIZES, "chunk"),
    "full_attention": SIZES,
}
"""The options of each kind."""


def describe_layers(config: Any, reported: Mapping[str, Any], stack: Stack, registry: Registry) -> HostedModel:
    """Return a loaded model's layers as the contract describes them, and set them on each layer.

    vLLM's ``config`` contains the layers. ``reported`` is vLLM's spec of each layer that keeps a cache.

    Raises:
        KVFrameError: A layer would run on another backend than kvframe's (``foreign_backend``), or is not served.
    """
    context = config.compilation_config.static_forward_context
    modules = {name: layer for name, layer in context.items() if isinstance(layer, AttentionLayerBase)}
    described, stored = [], {}
    for name, module in modules.items():
        _check(name, module)
        owner = getattr(module, "kv_sharing_target_layer_name", None)
        described.append(_describe(name, module, owner))
        stored[name] = dict.fromkeys(module.impl.stored, reported[owner or name].dtype)
    model_config = config.model_config
    model = HostedModel(
        ModelDescription(name=model_config.model, layers=tuple(described), max_model_len=model_config.max_model_len),
        stack,
        registry,
        model_config.dtype,
        stored=stored,
        skips=config.cache_config.kv_sharing_fast_prefill,
        is_part=config.parallel_config.pipeline_parallel_size > 1,
    )
    for name, module in modules.items():
        module.impl.name, module.impl.model = name, model
    return model


def _check(name: str, module: Any) -> None:
    """Raise if a layer runs on another backend, or has a property that kvframe does not serve."""
    backend, impl = module.get_attn_backend(), getattr(module, "impl", None)
    # vLLM derives backends for some layers. kvframe serves only the derived backend for chunks.
    has_chunks = hasattr(module, "attention_chunk_size")
    is_ours = issubclass(backend, HostedBackend) if has_chunks else backend in (HostedBackend, HostedLatentBackend)
    if not is_ours or not isinstance(impl, HostedImpl):
        raise BackendError(
            f"layer {name!r} would run on vLLM's own {backend.__name__}, but with KVFRAME_STACK kvframe serves every "
            "layer; unset it to run this model without kvframe",
            "foreign_backend",
        )
    if impl.unknown:
        raise BackendError(f"layer {name!r} has {', '.join(impl.unknown)}, which kvframe-vllm does not serve")


def _describe(name: str, module: Any, owner: str | None) -> LayerDescription:
    impl, is_latent = module.impl, "latent" in module.impl.stored
    facts = {
        "num_kv_heads": module.num_kv_heads,
        "head_size": module.head_size,
        "head_size_v": module.v_head_dim if is_latent else module.head_size_v,
        "window": module.sliding_window,
        "chunk": getattr(module, "attention_chunk_size", None),
        "latent_size": module.kv_lora_rank if is_latent else None,
        "rope_size": module.qk_rope_head_dim if is_latent else None,
    }
    facts = {option: fact for option, fact in facts.items() if fact is not None}
    query = {
        "num_heads": module.num_heads,
        "head_size": module.qk_head_dim if is_latent else module.head_size,
        "scale": impl.scale,
        "soft_cap": impl.logits_soft_cap,
        "has_sinks": impl.sinks is not None,
        "alibi_slopes": impl.alibi_slopes,
    }
    kind = next(OWN[option] for option in OWN if option in facts)
    options = {option: facts[option] for option in OPTIONS[kind] if option in facts}
    return LayerDescription(name=name, kind=kind, options=options, query=query, shares_with=owner)
