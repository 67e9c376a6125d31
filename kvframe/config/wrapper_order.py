"""The order of a wrapper chain: which wrappers can come before and after which others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvframe.contract.errors import WrapperError
from kvframe.contract.wrapper import MetadataWrapper


def check_order(chain: Sequence[type[MetadataWrapper]]) -> None:
    """Raise ``WrapperError`` (``chain_order``) for a wrong order of wrappers, with the legal order if there is one."""
    problem = _misplaced(chain)
    if problem is None:
        return
    legal = next((order for order in itertools.permutations(chain) if _misplaced(order) is None), None)
    advice = (
        "these wrappers cannot be combined in any order"
        if legal is None
        else f"the legal order is [{', '.join(repr(wrapper.name) for wrapper in legal)}]"
    )
    raise WrapperError(f"{problem}; {advice}", code="chain_order")


def _misplaced(chain: Sequence[type[MetadataWrapper]]) -> str | None:
    """Return what is wrong with the order of a chain; None if it is right."""
    for first, second in itertools.combinations(chain, 2):
        for reason in sorted(({first.name} | first.effects) & second.not_after):
            return f"wrapper {second.name!r} cannot come after {_because(first, reason)}"
        for reason in sorted(({second.name} | second.effects) & first.not_before):
            return f"wrapper {first.name!r} cannot come before {_because(second, reason)}"
    return None


def _because(wrapper: type[MetadataWrapper], reason: str) -> str:
    return repr(wrapper.name) if reason == wrapper.name else f"{wrapper.name!r} ({reason})"
