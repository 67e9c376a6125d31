"""Makes the eviction policy that a stack names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvframe.config.options import make_with_options
from kvframe.contract.errors import KVFrameError, PluginError, StackError
from kvframe.contract.eviction import LRU, EvictionPolicy

if TYPE_CHECKING:
    from kvframe.config.stack import Stack
    from kvframe.loading.registry import Registry


def make_policy(stack: Stack, registry: Registry) -> EvictionPolicy:
    """Return the eviction policy of a stack.

    Args:
        stack: Its ``[cache] eviction``.
        registry: Where policies are looked up.

    Raises:
        StackError: No plugin in use provides it, it cannot be imported, or its options do not fit it.
    """
    use = stack.cache.eviction
    where = f"{stack.source}: cache.eviction"
    try:
        policy_class: type[EvictionPolicy] = (
            type(LRU) if use.name == LRU.name else registry.eviction_policies.load(use.name)
        )
    except KVFrameError as error:
        raise StackError(f"{where}: {error}") from error
    try:
        return make_with_options(policy_class, use.options)
    except (ValueError, PluginError) as error:
        raise StackError(f"{where}: eviction policy {use.name!r}: {error}") from error
