"""Make the page stores of the stack, if vLLM can use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from kvframe_stores import choose_secret

from kvframe import make_page_stores
from kvframe.contract import BackendError, PageStore, StackError
from kvframe_vllm.adapter.cache import HostedSpec
from kvframe_vllm.attach import attached
from kvframe_vllm.names import check_connector

_SAFE_HASHES = ("sha256", "sha256_cbor")


@attrs.frozen(eq=False)
class Transfer:
    """What both parts of the connector need.

    Attributes:
        stores: The page stores, in the order in which they are asked.
        secret: 32 bytes, for keys and seals.
        groups: The spec of each group of vLLM's cache.
        layers: The names of each group's layers.
    """

    stores: Sequence[PageStore]
    secret: bytes
    groups: Sequence[HostedSpec]
    layers: Sequence[Sequence[str]]


def make_transfer(vllm_config: Any, kv_cache_config: Any) -> Transfer:
    """Return the stores of the attached stack and the groups of vLLM's cache.

    Raises:
        KVFrameError: vLLM lacks a name, no stack is attached, or it has no store. Or vLLM finds no prefixes, or by
            hashes that can be forged, or divides layers among ranks. Or a group of layers is not kvframe's.
    """
    check_connector()
    stack, registry = attached()
    given = vllm_config.kv_transfer_config.kv_connector_extra_config
    if given:
        raise StackError(
            f"KVFrameConnector takes no kv_connector_extra_config, and has {', '.join(sorted(given))}; its page stores "
            f"are those of [cache] in {stack.source}"
        )
    stores = make_page_stores(stack.page_stores, registry)
    if not stores:
        raise StackError(f"{stack.source}: KVFrameConnector needs a page store; set disk or stores in [cache]")
    cache = vllm_config.cache_config
    if not cache.enable_prefix_caching:
        raise BackendError(
            "KVFrameConnector finds prefixes, and prefix caching is off in vLLM for this model: switch it on, or start "
            "without --kv-transfer-config"
        )
    if cache.prefix_caching_hash_algo not in _SAFE_HASHES:
        raise BackendError(
            f"KVFrameConnector needs hashes of tokens that cannot be forged, and {cache.prefix_caching_hash_algo!r} "
            f"can: start vLLM with --prefix-caching-hash-algo {_SAFE_HASHES[0]}"
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise BackendError(
            "KVFrameConnector does not move pages of layers that pipeline parallelism divides: start vLLM with tensor "
            "parallelism instead, or without --kv-transfer-config"
        )
    groups = [_spec_of(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    layers = [list(group.layer_names) for group in kv_cache_config.kv_cache_groups]
    return Transfer(stores, choose_secret(stack, stores), groups, layers)


def _spec_of(spec: Any) -> HostedSpec:
    """Return a group's spec; vLLM keeps specs of other sizes and one type in one group."""
    first = next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec
    if not isinstance(first, HostedSpec):
        raise BackendError(
            f"KVFrameConnector keeps pages of kvframe's layers only, and a group has {type(first).__name__}"
        )
    return first
