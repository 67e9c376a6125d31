"""What tests read of an engine's and a cache manager's parts, which have no public name."""

from __future__ import annotations

from typing import Any

import numpy as np
from kvframe_engine.tiers.fetcher import PrefixFetcher
from kvframe_testing.audit import audit_pool

from kvframe import KVCacheManager


def manager_of(engine: Any) -> KVCacheManager:
    """Return the cache manager of an engine or an embedder."""
    manager: KVCacheManager = engine._manager
    return manager


def pool_of(manager: Any) -> Any:
    """Return the pool of a cache manager."""
    return manager._pool


def numbers_of(manager: Any) -> Any:
    """Return the numbers of a cache manager's rows."""
    return manager._numbers


def scheduler_of(engine: Any) -> Any:
    """Return the scheduler of an engine or an embedder."""
    return engine._scheduler


def storage_of(engine: Any) -> Any:
    """Return the memory of an engine's pages."""
    return engine._storage


def requests_of(engine: Any) -> Any:
    """Return the requests of an engine or an embedder, by their identifiers."""
    return engine._requests


def draft_of(engine: Any) -> Any:
    """Return what computes an engine's drafts; None without drafts."""
    return engine._draft


def runner_of(engine: Any) -> Any:
    """Return the runner of an engine's steps."""
    return engine._runner


def fetcher_of(engine: Any) -> PrefixFetcher:
    """Return what fetches pages from an engine's page stores."""
    fetcher: PrefixFetcher = engine._tiers._fetcher
    return fetcher


def held_pages(engine: Any) -> int:
    """Return the pages that requests hold in an engine's cache."""
    return manager_of(engine).num_held_pages


def tiers_of(engine: Any) -> Any:
    """Return the tiers of an engine's cache."""
    return engine._tiers


def host_tier_of(engine: Any) -> Any:
    """Return the host memory of an engine's cache; None if it has none."""
    tiers = tiers_of(engine)
    return None if tiers is None else tiers.host_tier


def audit_host_tier(tier: Any) -> None:
    """Check that host pages are free, held while they are copied, or cached under one key each."""
    held_pages = np.concatenate([np.zeros(0, np.int32), *tier._held_pages])
    audit_pool(tier.pool, tier._manager.plan, held_pages)
    pages = tier.pool.free_list.all_blocks()
    by_key = {page: (group, key) for group, ids in enumerate(tier._host_ids) for key, page in ids.items()}
    assert by_key == tier._key_of, "keys and pages of the host memory disagree"
    cached_pages = set(pages[tier.pool.is_cached(pages)].tolist())
    assert cached_pages == tier._key_of.keys() - set(held_pages.tolist()), "a cached host page has no key"
