"""Makes the parts that a stack names: the eviction policy, and the proposer of draft tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from kvframe.config.options import Use, make_with_options
from kvframe.contract.errors import KVFrameError, PluginError, StackError, shown
from kvframe.contract.eviction import LRU, EvictionPolicy
from kvframe.contract.page_store import PageStore
from kvframe.contract.proposer import Proposer

if TYPE_CHECKING:
    from kvframe.config.stack import Stack
    from kvframe.loading.registry import Registry

MOST_DRAFTS = 64
"""The most draft tokens of a request in a step."""

T = TypeVar("T")


def make_policy(stack: Stack, registry: Registry) -> EvictionPolicy:
    """Return the eviction policy of a stack's ``[cache] eviction``; raise ``StackError`` if it cannot be made."""
    use = stack.cache.eviction

    def load(name: str) -> type[EvictionPolicy]:
        return type(LRU) if name == LRU.name else registry.eviction_policies.load(name)

    return _make(f"{stack.source}: cache.eviction", "eviction policy", use, load)


def make_page_stores(stack: Stack, registry: Registry) -> list[PageStore]:
    """Return the page stores of a stack's ``[cache] disk`` and ``stores``, in the order in which they are asked.

    Raises ``StackError`` for one that cannot be made.
    """
    stores = []
    for use in stack.cache.all_stores:
        stores.append(_make(use.place, "page store", use, registry.page_stores.load))
    return stores


def make_proposer(stack: Stack, registry: Registry) -> Proposer | None:
    """Return the proposer of a stack's ``[model] drafts``, or None; raise ``StackError`` if it cannot be made."""
    use = stack.model.drafts
    if use is None:
        return None
    where = f"{stack.source}: model.drafts"
    proposer: Proposer = _make(where, "proposer", use, registry.proposers.load)
    max_drafts = proposer.max_drafts
    if type(max_drafts) is not int or not 1 <= max_drafts <= MOST_DRAFTS:
        raise StackError(
            f"{where}: proposer {use.name!r}: max_drafts must be a whole number from 1 to {MOST_DRAFTS}, "
            f"not {shown(max_drafts)}"
        )
    return proposer


def _make(where: str, label: str, use: Use, load: Callable[[str], type[T]]) -> T:
    try:
        part_class = load(use.name)
    except KVFrameError as error:
        raise StackError(f"{where}: {error}") from error
    try:
        return make_with_options(part_class, use.options)
    except (ValueError, PluginError) as error:
        raise StackError(f"{where}: {label} {use.name!r}: {error}") from error
