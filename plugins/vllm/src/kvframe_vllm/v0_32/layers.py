"""From vLLM's attention layers to kvframe's layer specs."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Mapping
from typing import Any

import attrs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from kvframe import Registry, Stack, make_layer_specs
from kvframe.contract import BackendError, LayerDescription, LayerSpec, ModelDescription
from kvframe_vllm.plugin import KINDS
from kvframe_vllm.v0_32.backend import HostedBackend, HostedImpl, HostedLatentBackend, HostedLatentImpl


def describe_layers(config: Any, reported: Mapping[str, Any], stack: Stack, registry: Registry) -> dict[str, LayerSpec]:
    """Return a loaded model's layers as the contract sees them, and give each layer its own.

    Args:
        config: vLLM's configuration, with the layers of the model in it.
        reported: vLLM's spec of each layer that keeps a cache.
        stack: The rules.
        registry: Where kinds are looked up.

    Returns:
        By name, in the order of the model's layers, those that read another layer's cache included.

    Raises:
        BackendError: A layer would run on another backend than kvframe's (``foreign_backend``), or has something that
            is not served.
        StackError: A rule matches no layer, or gives a spec an unknown option.
        SpecError: A layer's kind is not registered, or its options do not fit.
    """
    context = config.compilation_config.static_forward_context
    modules = {name: layer for name, layer in context.items() if isinstance(layer, AttentionLayerBase)}
    parallel = config.parallel_config
    if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
        raise BackendError("kvframe-vllm does not serve context parallelism: unset it, or unset KVFRAME_STACK")
    if not modules:
        return {}
    if parallel.pipeline_parallel_size > 1:  # another stage may have the layers of a rule
        stack = attrs.evolve(stack, rules=tuple(attrs.evolve(rule, optional=True) for rule in stack.rules))
    for name, module in modules.items():
        _check(name, module)
    owners = {name: module.impl.target for name, module in modules.items()}
    description = ModelDescription(
        name=config.model_config.model,
        layers=tuple(
            _describe(name, module, reported[owners[name] or name].block_size, registry)
            for name, module in modules.items()
        ),
        max_model_len=config.model_config.max_model_len,
    )
    dtypes = {str(spec.dtype).removeprefix("torch.") for spec in reported.values()}
    if len(dtypes) > 1:
        raise BackendError(f"the layers keep keys and values as {', '.join(sorted(dtypes))}; kvframe-vllm serves one")
    layers = make_layer_specs(description, registry, stack, *dtypes)
    skippable = [*itertools.takewhile(owners.__getitem__, reversed(modules))]
    skips = config.cache_config.kv_sharing_fast_prefill
    if skippable and skips != (stack.engine.prefill_skipping is not None):
        raise BackendError(
            f"layers such as {skippable[-1]!r} can leave out the tokens that do not generate; for that, give vLLM "
            '--kv-sharing-fast-prefill, and the stack prefill_skipping = "decode_only" in [engine]: both or neither'
        )
    for layer in layers:
        impl = modules[layer.name].impl
        impl.layer, impl.is_skipped = layer, skips and layer.name in skippable
        _check_stored(layer, impl)
    return {layer.name: layer for layer in layers}


def _check(name: str, module: Any) -> None:
    """Raise if a layer is not kvframe's, or does what kvframe does not."""
    backend, chunk = module.get_attn_backend(), getattr(module, "attention_chunk_size", None)
    # vLLM derives backends for layers that differ from others. Of these, kvframe knows those for chunks.
    is_ours = issubclass(backend, HostedBackend) if chunk else backend in (HostedBackend, HostedLatentBackend)
    if not is_ours or not isinstance(module.impl, HostedImpl):
        raise BackendError(
            f"layer {name!r} would run on vLLM's own {backend.__name__}, and with KVFRAME_STACK kvframe serves every "
            "layer; unset it to run this model without kvframe",
            "foreign_backend",
        )
    if refusal := module.impl.refusal:
        raise BackendError(f"layer {name!r} has {refusal}, which kvframe-vllm does not serve")


def _describe(name: str, module: Any, block_size: int, registry: Registry) -> LayerDescription:
    impl, is_latent = module.impl, isinstance(module.impl, HostedLatentImpl)
    options = {
        "block_size": block_size,
        "num_kv_heads": module.num_kv_heads,
        "head_size": module.head_size,
        "head_size_v": module.v_head_dim if is_latent else module.head_size_v,
        "window": impl.sliding_window,
        "chunk": getattr(module, "attention_chunk_size", None),
        "latent_size": module.kv_lora_rank if is_latent else None,
        "rope_size": module.qk_rope_head_dim if is_latent else None,
    }
    own = {"latent_size": "mla", "window": "sliding_window", "chunk": "chunked_local", "block_size": "full_attention"}
    kind = next(own[option] for option in own if options[option] is not None)
    kind = next((KINDS[pattern] for pattern in KINDS if fnmatch.fnmatchcase(name, pattern)), kind)
    fields = {field.name for field in attrs.fields(registry.specs.load(kind))}
    query = {
        "num_heads": module.num_heads,
        "head_size": module.qk_head_dim if is_latent else module.head_size,
        "scale": impl.scale,
        "soft_cap": impl.logits_soft_cap,
        "has_sinks": impl.sinks is not None,
    }
    known = {option: value for option, value in options.items() if option in fields and value is not None}
    return LayerDescription(name=name, kind=kind, options=known, query=query, shares_with=impl.target)


def _check_stored(layer: LayerSpec, impl: HostedImpl) -> None:
    """Raise if vLLM's pages do not hold what a layer stores."""
    tensors = {} if layer.spec is None else layer.spec.state_tensors()
    if layer.spec is None or set(tensors) != impl.stored or layer.spec.kv_format.name != "plain":
        raise BackendError(
            f"layer {layer.name!r} stores {', '.join(tensors) or 'nothing'}, and its pages in vLLM hold plain "
            f"{', '.join(sorted(impl.stored))}; choose a cache spec and a format that store these"
        )
