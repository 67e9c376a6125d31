"""Whether the page stores and the event publisher that a stack names can be opened here and now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from kvframe.cli.guard import joined_lines
from kvframe.cli.render import format_bytes
from kvframe.contract.errors import KVFrameError
from kvframe.contract.foreign import safe_text

if TYPE_CHECKING:
    from kvframe.config.stack import Stack
    from kvframe.contract.page_store import PageStore
    from kvframe.loading.registry import Registry

_ORIGIN = "0" * 32
"""The origin of no engine."""


@attrs.frozen
class CheckResult:
    """What was found out about the model, the page stores or the event publisher of an operator.

    Attributes:
        facts: What works, by name.
        problems: What does not, in sentences.
        install: The command that installs all that is missing; empty if nothing is, or if no package is known.
    """

    facts: Mapping[str, str] = attrs.field(factory=dict)
    problems: Sequence[str] = ()
    install: str = ""


def check_stores(stack: Stack, registry: Registry) -> CheckResult:
    """Open each page store of a stack, look up a record that is not there, and close the store."""
    from kvframe.config.choices import make_page_stores

    facts: dict[str, str] = {}
    problems: list[str] = []
    stores: list[PageStore] = []
    for use in stack.page_stores if stack.cache.prefix_caching else ():
        try:
            (store,) = make_page_stores([use], registry)
        except KVFrameError as error:
            problems.append(str(error))
            continue
        stores.append(store)
        try:
            opened = store.open(_ORIGIN)
            try:
                opened.find([bytes(32)])
            finally:
                opened.close()
        except (Exception, SystemExit) as error:  # a store raises anything
            problems.append(f"page store {store.name!r} cannot be opened now: {joined_lines(safe_text(error))}")
            continue
        capacity = store.capacity
        facts[store.name] = "opens" if capacity is None else f"opens, holds {format_bytes(capacity)}"
    if stores and stack.cache.key is None:
        problems += _secret_problems(stack, stores)
    return CheckResult(facts, problems)


def check_publisher(stack: Stack, registry: Registry) -> CheckResult:
    """Open the event publisher of a stack, if it has one, and close it."""
    from kvframe.config.choices import make_part

    use = stack.cache.events if stack.cache.prefix_caching else None
    try:
        publisher = None if use is None else make_part("event_publisher", use, registry)
    except KVFrameError as error:
        return CheckResult({}, [str(error)])
    if publisher is None:
        return CheckResult({}, [])
    try:
        publisher.open().close()
    except (Exception, SystemExit) as error:  # a publisher raises anything
        why = joined_lines(safe_text(error))
        hint = "if an engine of this stack runs here, it has the address"
        return CheckResult({}, [f"event publisher {publisher.name!r} cannot be opened now: {why}; {hint}"])
    without_key = "" if stack.cache.key is not None else ", but no router has the secret: set key in [cache]"
    return CheckResult({publisher.name: f"opens{without_key}"}, [])


def _secret_problems(stack: Stack, stores: Sequence[PageStore]) -> list[str]:
    """Return why a stack without a key has no secret that engines share."""
    for store in stores:
        try:
            if store.local_secret() is not None:
                return []
        except (Exception, SystemExit) as error:
            return [f"page store {store.name!r} has no usable secret: {joined_lines(safe_text(error))}"]
    return [
        f"{stack.source}: page store {stores[0].name!r} keeps no secret: set key in [cache] to 64 hexadecimal digits, "
        "or to a file of them, the same for all engines"
    ]
