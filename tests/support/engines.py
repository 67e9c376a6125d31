"""What tests read of an engine's parts, which have no public name: its cache manager and the runner of its steps."""

from __future__ import annotations

from typing import Any

from kvframe import KVCacheManager


def manager_of(engine: Any) -> KVCacheManager:
    """Return the cache manager of an engine or an embedder."""
    manager: KVCacheManager = engine._manager
    return manager


def runner_of(engine: Any) -> Any:
    """Return the runner of an engine's steps."""
    return engine._runner


def held_pages(engine: Any) -> int:
    """Return the pages that requests hold in an engine's cache."""
    return manager_of(engine).num_held_pages
