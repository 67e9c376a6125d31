"""From vLLM's attention layers to kvframe's layer specs."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

import attrs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from kvframe import Registry, Stack, make_layer_specs
from kvframe.contract import BackendError, KVCacheSpec, LayerDescription, LayerSpec, ModelDescription
from kvframe_vllm.plugin import KINDS
from kvframe_vllm.v0_32.backend import HostedBackend, HostedImpl


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
    _check_settings(config)
    if not modules:
        return {}
    if config.parallel_config.pipeline_parallel_size > 1:  # another stage may have the layers of a rule
        stack = attrs.evolve(stack, rules=tuple(attrs.evolve(rule, optional=True) for rule in stack.rules))
    for name, module in modules.items():
        _check(name, module)
    owners = {name: module.kv_sharing_target_layer_name or name for name, module in modules.items()}
    description = ModelDescription(
        name=config.model_config.model,
        layers=tuple(
            _describe(name, module, reported[owners[name]].block_size, registry) for name, module in modules.items()
        ),
        max_model_len=config.model_config.max_model_len,
    )
    dtypes = {str(spec.dtype).removeprefix("torch.") for spec in reported.values()}
    if len(dtypes) > 1:
        raise BackendError(f"the layers keep keys and values as {', '.join(sorted(dtypes))}; kvframe-vllm serves one")
    layers = make_layer_specs(description, registry, stack, *dtypes)
    for layer in layers:
        spec_of(layer)
        modules[layer.name].impl.layer = layer
    return {layer.name: layer for layer in layers}


def _check_settings(config: Any) -> None:
    """Raise if vLLM is set to something under which it would not hand kvframe what it computes."""
    parallel = config.parallel_config
    found = {
        "kv_sharing_fast_prefill": config.cache_config.kv_sharing_fast_prefill,
        "decode_context_parallel_size": parallel.decode_context_parallel_size > 1,
        "prefill_context_parallel_size": parallel.prefill_context_parallel_size > 1,
    }
    if chosen := ", ".join(name for name, is_set in found.items() if is_set):
        raise BackendError(f"kvframe-vllm does not serve {chosen}: unset it, or unset KVFRAME_STACK")


def _check(name: str, module: Any) -> None:
    """Raise if a layer is not kvframe's, or does what kvframe does not."""
    backend = module.get_attn_backend()
    if backend is not HostedBackend or not isinstance(module.impl, HostedImpl):
        raise BackendError(
            f"layer {name!r} would run on vLLM's own {backend.__name__}, and with KVFRAME_STACK kvframe serves every "
            "layer; unset it to run this model without kvframe",
            "foreign_backend",
        )
    if refusal := module.impl.refusal:
        raise BackendError(f"layer {name!r} has {refusal}, which kvframe-vllm does not serve")


def _describe(name: str, module: Any, block_size: int, registry: Registry) -> LayerDescription:
    impl = module.impl
    windows = {} if impl.sliding_window is None else {"window": impl.sliding_window}
    kind = "sliding_window" if windows else "full_attention"
    chosen = next((KINDS[pattern] for pattern in KINDS if fnmatch.fnmatchcase(name, pattern)), kind)
    if chosen != kind:
        fields = {field.name for field in attrs.fields(registry.specs.load(chosen))}
        windows = {key: value for key, value in windows.items() if key in fields}
    sizes = {"num_kv_heads": module.num_kv_heads, "head_size": module.head_size, "head_size_v": module.head_size_v}
    query = {
        "num_heads": module.num_heads,
        "head_size": module.head_size,
        "scale": impl.scale,
        "soft_cap": impl.logits_soft_cap,
        "has_sinks": impl.sinks is not None,
    }
    options = {"block_size": block_size, **sizes, **windows}
    return LayerDescription(
        name=name, kind=chosen, options=options, query=query, shares_with=module.kv_sharing_target_layer_name
    )


def spec_of(layer: LayerSpec) -> KVCacheSpec:
    """Return a layer's cache spec; raise ``BackendError`` if vLLM's pages do not hold what it stores."""
    tensors = {} if layer.spec is None else layer.spec.state_tensors()
    if layer.spec is None or set(tensors) != {"k", "v"} or layer.spec.kv_format.name != "plain":
        raise BackendError(
            f"layer {layer.name!r} stores {', '.join(tensors) or 'nothing'}, and vLLM's pages hold plain keys and "
            "values; choose a cache spec and a format that store these"
        )
    return layer.spec
