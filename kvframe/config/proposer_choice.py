"""Makes the proposer of draft tokens that a stack names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvframe.config.options import make_with_options
from kvframe.contract.errors import KVFrameError, PluginError, StackError, shown
from kvframe.contract.proposer import Proposer

if TYPE_CHECKING:
    from kvframe.config.stack import Stack
    from kvframe.loading.registry import Registry

MOST_DRAFTS = 64
"""The most draft tokens of a request in a step."""


def make_proposer(stack: Stack, registry: Registry) -> Proposer | None:
    """Return the proposer of a stack; None if the stack names none.

    Args:
        stack: Its ``[model] drafts``.
        registry: Where proposers are looked up.

    Raises:
        StackError: No plugin in use provides it, it cannot be imported, or its options do not fit it.
    """
    use = stack.model.drafts
    if use is None:
        return None
    where = f"{stack.source}: model.drafts"
    try:
        proposer_class: type[Proposer] = registry.proposers.load(use.name)
    except KVFrameError as error:
        raise StackError(f"{where}: {error}") from error
    try:
        proposer = make_with_options(proposer_class, use.options)
    except (ValueError, PluginError) as error:
        raise StackError(f"{where}: proposer {use.name!r}: {error}") from error
    most = proposer.max_drafts
    if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= MOST_DRAFTS:
        raise StackError(
            f"{where}: proposer {use.name!r}: max_drafts must be a whole number from 1 to {MOST_DRAFTS}, "
            f"not {shown(most)}"
        )
    return proposer
