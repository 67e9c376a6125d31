"""Change vLLM: the backend that it selects, the specs that its workers report, and the manager of these specs."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.worker.gpu_worker import Worker

from kvframe import Registry, Stack
from kvframe.contract import BackendError, StackError
from kvframe_vllm.adapter.backend import HostedBackend, HostedLatentBackend
from kvframe_vllm.adapter.cache import HostedSpec, LiveBlockManager
from kvframe_vllm.adapter.layers import describe_layers
from kvframe_vllm.adapter.weights import note_weights

FLAG = (
    """--kv-transfer-config '{"kv_connector": "KVFrameConnector", """
    """"kv_connector_module_path": "kvframe_vllm.connector", "kv_role": "kv_both"}'"""
)
"""What starts vLLM with the connector."""


def install(stack: Stack, registry: Registry) -> None:
    """Let vLLM select kvframe's backend and manage its cache by kvframe's specs, as the stack says."""
    report = Worker.get_kv_cache_spec

    def get_kv_cache_spec(worker: Any) -> dict[str, Any]:
        config, reported = worker.vllm_config, report(worker)
        check_stores_are_used(stack, config)
        layers = describe_layers(config, reported, stack, registry).layers
        specs = {name: HostedSpec.over(spec, layers[name].spec, config) for name, spec in reported.items()}
        # vLLM 0.29 ignores the user's block size for windows: it takes the smallest one that a backend supports.
        block_size = config.cache_config.block_size
        return {name: spec.copy_with_new_block_size(block_size) for name, spec in specs.items()}

    Worker.get_kv_cache_spec = get_kv_cache_spec
    type(current_platform).get_attn_backend_cls = classmethod(select_backend)
    # The registry fills itself at its first call, but only if it is empty: so this call comes before the registration.
    KVCacheSpecRegistry.check_kv_cache_spec_registry({})
    KVCacheSpecRegistry.register(HostedSpec, LiveBlockManager)
    if stack.page_stores:
        note_weights()


def select_backend(cls: type, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
    """Select kvframe's backend for every attention layer, after vLLM's own validation of a backend."""
    backend = HostedLatentBackend if attn_selector_config.use_mla else HostedBackend
    reasons = backend.validate_configuration(**attn_selector_config._asdict(), device_capability=None)
    if attn_selector_config.use_dcp and not reasons:  # vLLM 0.29 does not ask the backend
        reasons = ["DCP not supported"]
    if reasons:
        raise BackendError(
            f"the model has attention layers that kvframe-vllm does not serve ({', '.join(reasons)}): unset "
            "KVFRAME_STACK to run it on vLLM's own backend"
        )
    return f"{backend.__module__}.{backend.__qualname__}"


def check_stores_are_used(stack: Stack, vllm_config: Any) -> None:
    """Raise if the stack names page stores and vLLM was started without a connector."""
    if stack.page_stores and vllm_config.kv_transfer_config is None:
        raise StackError(
            f"{stack.source}: [cache] names page stores, which vLLM uses through a connector; start it with {FLAG}, or "
            "remove disk and stores"
        )
