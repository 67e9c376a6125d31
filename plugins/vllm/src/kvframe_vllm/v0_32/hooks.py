"""Where vLLM is changed: the backend that it selects, the specs that its workers report, the manager of these specs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.worker.gpu_worker import Worker

from kvframe import Registry, Stack
from kvframe.contract import BackendError
from kvframe_vllm.v0_32.backend import HostedBuilder
from kvframe_vllm.v0_32.layers import describe_layers
from kvframe_vllm.v0_32.manager import LiveBlockManager
from kvframe_vllm.v0_32.spec import HostedSpec

BACKEND = "kvframe_vllm.v0_32.backend.HostedBackend"
LATENT_BACKEND = "kvframe_vllm.v0_32.backend.HostedLatentBackend"


def install(stack: Stack, registry: Registry) -> None:
    """Let vLLM select kvframe's backend, and manage the cache by kvframe's specs, as an operator chose."""
    HostedBuilder.stack, HostedBuilder.registry = stack, registry
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    # An empty registry fills itself at its first question. A spec that is registered before stops it from that.
    KVCacheSpecRegistry.check_kv_cache_spec_registry({})
    KVCacheSpecRegistry.register(HostedSpec, LiveBlockManager, HostedSpec)
    type(current_platform).get_attn_backend_cls = classmethod(_select)
    Worker.get_kv_cache_spec = _reporting(Worker.get_kv_cache_spec)


def _select(cls: type, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
    """Answer for every attention layer, whatever backend vLLM would take."""
    for option in ("use_sparse", "use_mm_prefix", "use_rswa", "use_non_causal"):
        if getattr(attn_selector_config, option):
            raise BackendError(
                f"the model has attention layers with {option}, which kvframe-vllm does not serve: unset KVFRAME_STACK "
                "to run it on vLLM's own backend"
            )
    return LATENT_BACKEND if attn_selector_config.use_mla else BACKEND


def _reporting(original: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Return a worker's method that reports kvframe's specs for the layers that keep a cache."""

    @functools.wraps(original)
    def get_kv_cache_spec(worker: Any) -> dict[str, Any]:
        config, reported = worker.vllm_config, original(worker)
        layers = describe_layers(config, reported, HostedBuilder.stack, HostedBuilder.registry)
        limits = {
            "max_model_len": config.model_config.max_model_len,
            "max_in_flight_tokens": config.max_in_flight_tokens,
        }
        return {name: HostedSpec.over(spec, inner=layers[name].spec, **limits) for name, spec in reported.items()}

    return get_kv_cache_spec
