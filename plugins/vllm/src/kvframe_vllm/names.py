"""List every name of vLLM that this package uses, because an upgrade of vLLM may break each of them."""

from __future__ import annotations

import logging
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator
from inspect import Parameter, signature
from typing import Any

from kvframe.contract import KVFrameError

_log = logging.getLogger("vllm.kvframe")  # vLLM shows the messages of its own loggers only

TESTED = ("0.29", "0.30", "0.31", "0.32", "0.33")
"""The minor versions of vLLM that were compared, oldest first; ``make compat`` compares them."""

NAMES = (
    "vllm:__version__",
    "vllm.config:CacheConfig.block_size",
    "vllm.config:CacheConfig.kv_sharing_fast_prefill",
    "vllm.config:CompilationConfig.static_forward_context",
    "vllm.config:ModelConfig.dtype",
    "vllm.config:ModelConfig.max_model_len",
    "vllm.config:ModelConfig.model",
    "vllm.config:ParallelConfig.pipeline_parallel_size",
    "vllm.config:VllmConfig.max_in_flight_tokens",
    "vllm.model_executor.layers.attention:MLAAttention.forward_impl",
    "vllm.model_executor.layers.attention.chunked_local_attention:ChunkedLocalAttention",
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase",
    "vllm.platforms:current_platform.get_attn_backend_cls",
    "vllm.v1.attention.backend:AttentionBackend.validate_configuration",
    "vllm.v1.attention.backend:AttentionImpl.forward",
    "vllm.v1.attention.backend:AttentionMetadataBuilder.build",
    "vllm.v1.attention.backend:CommonAttentionMetadata.block_table_tensor",
    "vllm.v1.attention.backend:CommonAttentionMetadata.causal",
    "vllm.v1.attention.backend:CommonAttentionMetadata.logits_indices_padded",
    "vllm.v1.attention.backend:CommonAttentionMetadata.max_query_len",
    "vllm.v1.attention.backend:CommonAttentionMetadata.max_seq_len",
    "vllm.v1.attention.backend:CommonAttentionMetadata.num_actual_tokens",
    "vllm.v1.attention.backend:CommonAttentionMetadata.num_logits_indices",
    "vllm.v1.attention.backend:CommonAttentionMetadata.num_reqs",
    "vllm.v1.attention.backend:CommonAttentionMetadata.query_start_loc",
    "vllm.v1.attention.backend:CommonAttentionMetadata.query_start_loc_cpu",
    "vllm.v1.attention.backend:CommonAttentionMetadata.seq_lens",
    "vllm.v1.attention.backend:CommonAttentionMetadata.seq_lens_cpu_upper_bound",
    "vllm.v1.attention.backend:CommonAttentionMetadata.slot_mapping",
    "vllm.v1.attention.backend:MLAAttentionImpl.do_kv_cache_update",
    "vllm.v1.attention.backend:MLAAttentionImpl.forward_mha",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum.CUSTOM",
    "vllm.v1.attention.backends.utils:KVSharingFastPrefillMetadata",
    "vllm.v1.attention.selector:AttentionSelectorConfig.use_mla",
    "vllm.v1.core.block_pool:BlockPool.free_blocks",
    "vllm.v1.core.block_pool:BlockPool.get_cached_block",
    "vllm.v1.core.kv_cache_utils:resolve_block_hashes",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.find_longest_cache_hit",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.get_num_skipped_tokens",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.pop_blocks_for_free",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.remove_skipped_blocks",
    "vllm.v1.kv_cache_interface:AttentionSpec.block_size",
    "vllm.v1.kv_cache_interface:AttentionSpec.copy_with_new_block_size",
    "vllm.v1.kv_cache_interface:AttentionSpec.dtype",
    "vllm.v1.kv_cache_interface:AttentionSpec.head_size",
    "vllm.v1.kv_cache_interface:AttentionSpec.head_size_v",
    "vllm.v1.kv_cache_interface:AttentionSpec.is_uniform_with_collection",
    "vllm.v1.kv_cache_interface:AttentionSpec.max_memory_usage_bytes",
    "vllm.v1.kv_cache_interface:AttentionSpec.num_kv_heads",
    "vllm.v1.kv_cache_interface:AttentionSpec.page_size_bytes",
    "vllm.v1.kv_cache_interface:AttentionSpec.page_size_padded",
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.check_kv_cache_spec_registry",
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register",
    "vllm.v1.worker.gpu_worker:Worker.get_kv_cache_spec",
)
"""``module:attribute`` of classes, functions, methods and fields that are called, read, replaced or imitated."""

CONNECTOR_NAMES = (
    "vllm.config:CacheConfig.enable_prefix_caching",
    "vllm.config:CacheConfig.prefix_caching_hash_algo",
    "vllm.config:KVTransferConfig.is_kv_consumer",
    "vllm.config:KVTransferConfig.is_kv_producer",
    "vllm.config:KVTransferConfig.kv_connector_extra_config",
    "vllm.config:KVTransferConfig.kv_load_failure_policy",
    "vllm.config:ModelConfig.hf_config",
    "vllm.distributed:get_pp_group",
    "vllm.distributed:get_tp_group",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.bind_gpu_block_pool",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.build_connector_meta",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.get_handshake_metadata",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.get_num_new_matched_tokens",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.get_transfer_results",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.on_new_request",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.register_kv_caches",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.requires_kv_delivery",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.reset_cache",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.set_xfer_handshake_metadata_pp_aware",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.shutdown",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.start_load_kv",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.update_connector_output",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.update_state_after_alloc",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1.wait_for_save",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorHandshakeMetadata",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorMetadata",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorRole.SCHEDULER",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorTransferResults.failed_recving",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorTransferResults.finished_recving",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA.request_finished_all_groups",
    "vllm.model_executor.model_loader:base_loader.process_weights_after_loading",
    "vllm.v1.core.sched.output:KVConnectorBlockState.get_block_ids",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.allocate_external_computed_blocks",
    "vllm.v1.kv_cache_interface:KVCacheConfig.kv_cache_groups",
    "vllm.v1.kv_cache_interface:KVCacheConfig.num_blocks",
    "vllm.v1.outputs:KVConnectorOutput.failed_recving",
    "vllm.v1.request:Request.num_tokens",
)
"""Likewise, of what only the connector uses."""

SUBCLASSES = (
    "kvframe_vllm.adapter.backend:HostedBackend",
    "kvframe_vllm.adapter.backend:HostedLatentBackend",
    "kvframe_vllm.adapter.backend:HostedImpl",
    "kvframe_vllm.adapter.backend:HostedLatentImpl",
    "kvframe_vllm.adapter.backend:HostedBuilder",
    "kvframe_vllm.adapter.cache:HostedSpec",
    "kvframe_vllm.adapter.cache:LiveBlockManager",
)
"""The classes of this package that vLLM makes or calls by its own interfaces."""

CONNECTOR_CLASSES = ("kvframe_vllm.connector:KVFrameConnector",)
"""Likewise, of the connector."""

CONNECTOR_TESTED = "0.32"
"""The minor version of vLLM with which the connector was tested."""


def check_vllm() -> None:
    """Check the installed vLLM before the adapter changes it; warn of a version that is untested.

    Raises:
        KVFrameError: It is older than the tested versions, lacks a name, or asks for a method or an argument that this
            package does not have.
    """
    version, otherwise = installed(), f"install a tested version, {TESTED_RANGE}, or unset KVFRAME_STACK"
    if _minor_of(version) < _minor_of(TESTED[0]):
        raise KVFrameError(
            f"vLLM {version} is older than the versions that kvframe-vllm is tested with; {otherwise} to run without "
            "kvframe"
        )
    if missing := missing_names():
        raise KVFrameError(
            f"vLLM {version} lacks {', '.join(missing)}, which kvframe-vllm uses; {otherwise} to run without kvframe"
        )
    if demands := unmet_demands():
        raise KVFrameError(
            f"vLLM {version} asks for {', '.join(demands)}, which kvframe-vllm does not have; {otherwise} to run "
            "without kvframe"
        )
    if is_untested():
        _log.warning(
            "vLLM %s is newer than the versions that kvframe-vllm is tested with (%s): it has every name that is used, "
            "and its first batches are checked",
            version,
            TESTED_RANGE,
        )


def check_connector() -> None:
    """Check the installed vLLM before page stores are used.

    Raises:
        KVFrameError: It lacks a name, or asks for a method or an argument that the connector does not have.
    """
    lacks, asks = missing_names(CONNECTOR_NAMES), unmet_demands(CONNECTOR_CLASSES)
    if lacks or asks:
        found = f"lacks {', '.join(lacks)}" if lacks else f"asks for {', '.join(asks)}"
        raise KVFrameError(
            f"vLLM {installed()} {found}, so page stores cannot be used; install vLLM {CONNECTOR_TESTED}, or start "
            "without --kv-transfer-config"
        )


def missing_names(names: Iterable[str] | None = None) -> list[str]:
    """Return the names that the installed vLLM does not have; of ``NAMES``, if none are given."""
    return [name for name in (NAMES if names is None else names) if not _exists(name)]


def unmet_demands(subclasses: Iterable[str] | None = None) -> list[str]:
    """Return the abstract methods, and the arguments of methods, that vLLM's classes have and subclasses do not.

    The subclasses are ``SUBCLASSES``, if none are given.
    """
    names = SUBCLASSES if subclasses is None else subclasses
    return sorted({demand for name in names for demand in _demands_on(pkgutil.resolve_name(name))})


def is_untested() -> bool:
    """Return whether the installed vLLM is of a newer minor version than those that are tested."""
    return _minor_of(installed()) > _minor_of(TESTED[-1])


def installed() -> str:
    """Return the version of the installed vLLM."""
    found: str = pkgutil.resolve_name("vllm:__version__")
    return found


TESTED_RANGE = f"{TESTED[0]} to {TESTED[-1]}"


def _minor_of(version: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:  # a build of vLLM from a source tree without tags is "dev"
        return sys.maxsize, 0
    return int(numbers[1]), int(numbers[2])


def _exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except ImportError:
        return False
    except AttributeError:
        # A field without a default is no attribute of its class.
        owner, _, field = name.rpartition(".")
        return ":" in owner and _exists(owner) and field in _fields_of(pkgutil.resolve_name(owner))
    return True


def _fields_of(owner: Any) -> set[str]:
    return {field for base in getattr(owner, "__mro__", ()) for field in vars(base).get("__annotations__", {})}


def _demands_on(own: type) -> Iterator[str]:
    package = own.__module__.partition(".")[0]
    bases = [base for base in own.__mro__ if base.__module__.partition(".")[0] != package]
    for method in sorted(getattr(own, "__abstractmethods__", ())):
        yield f"{_declaring(bases, method)}.{method}()"
    methods = {name for base in own.__mro__ if base not in bases for name in vars(base)}
    for method in sorted(name for name in methods if not name.startswith("__")):
        if theirs := next((vars(base)[method] for base in bases if method in vars(base)), None):
            taken, asked = _parameters(getattr(own, method)), _parameters(theirs)
            if not any(each.kind is Parameter.VAR_KEYWORD for each in taken.values()):
                more = [name for name in asked if name not in taken and name not in ("self", "cls")]
                yield from (f"{_declaring(bases, method)}.{method}({name})" for name in more)


def _declaring(bases: list[type], method: str) -> str:
    return next(base.__qualname__ for base in bases if method in vars(base))


def _parameters(method: Any) -> dict[str, Parameter]:
    method = getattr(method, "__func__", method)
    return dict(signature(method).parameters) if callable(method) else {}
