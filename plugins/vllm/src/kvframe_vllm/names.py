"""List every name of vLLM that this package uses, because an upgrade of vLLM may break each of them."""

from __future__ import annotations

import pkgutil

NAMES = (
    "vllm:__version__",
    "vllm.platforms:current_platform.get_attn_backend_cls",
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
    "vllm.v1.attention.backend:AttentionBackend.validate_configuration",
    "vllm.model_executor.layers.attention:MLAAttention.forward_impl",
    "vllm.model_executor.layers.attention.chunked_local_attention:ChunkedLocalAttention",
    "vllm.v1.attention.backend:AttentionImpl.forward",
    "vllm.v1.attention.backend:AttentionMetadataBuilder.build",
    "vllm.v1.attention.backend:MLAAttentionImpl",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.CUSTOM",
    "vllm.v1.attention.backends.utils:KVSharingFastPrefillMetadata",
    "vllm.v1.core.kv_cache_utils:resolve_block_hashes",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.find_longest_cache_hit",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.get_num_skipped_tokens",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.pop_blocks_for_free",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.remove_skipped_blocks",
    "vllm.v1.kv_cache_interface:AttentionSpec.is_uniform_with_collection",
    "vllm.v1.kv_cache_interface:AttentionSpec.max_memory_usage_bytes",
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.check_kv_cache_spec_registry",
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register",
    "vllm.v1.worker.gpu_worker:Worker.get_kv_cache_spec",
)
"""``module:attribute`` of classes, functions and methods that are called, replaced, overridden or imitated."""


def missing_names() -> list[str]:
    """Return the names that the installed vLLM does not have."""
    missing = []
    for name in NAMES:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            missing.append(name)
    return missing
