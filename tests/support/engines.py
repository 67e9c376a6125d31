"""What tests read of an engine's and a cache manager's parts, which have no public name."""

from __future__ import annotations

from typing import Any

from kvframe_engine.tiers.fetcher import PrefixFetcher

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
