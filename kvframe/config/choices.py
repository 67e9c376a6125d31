"""Makes what a stack names with options: policies, proposers, formats, wrappers, and the options of backends."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kvframe.config.options import Use, make_with_options
from kvframe.contract.errors import KVFrameError, PluginError, SpecError, StackError, WrapperError, listed
from kvframe.contract.eviction import LRU
from kvframe.contract.formats import PLAIN, KVFormat
from kvframe.contract.page_store import PageStore
from kvframe.contract.wrapper import MetadataWrapper
from kvframe.loading.claims import KINDS, import_class
from kvframe.loading.registry import Registry

if TYPE_CHECKING:
    from kvframe.contract.backend import AttentionBackend

UNREGISTERED: Mapping[tuple[str, str], str] = {
    ("eviction", LRU.name): "kvframe.contract.eviction:LeastRecentlyUsed",
    ("format", PLAIN.name): "kvframe.contract.formats:PlainFormat",
    ("scheduling", "fcfs"): "kvframe_engine.contract.scheduling:FirstComeFirstServed",
}
"""Import strings of classes that a stack may name and no plugin registers, by kind and name."""

_FORMAT_FORM = (
    'a format is given by its name, or as a table of a name and options: { name = "fp8_tensor", k_scale = 0.5 }'
)

T = TypeVar("T")


def load_class(kind: str, name: str, registry: Registry) -> Any:
    """Return the class of a kind that a stack names; raises as ``Catalogue.load`` does."""
    target = UNREGISTERED.get((kind, name))
    return registry.catalogues[kind].load(name) if target is None else import_class(target)


def check_options(kind: str, use: Use, registry: Registry) -> None:
    """Raise ``StackError`` if the class that a stack names does not take its options, with the options that it has.

    A class without options is not imported. Nothing is checked of a class that cannot be imported here, because a plan
    may be for another machine.
    """
    if not use.options:
        return
    try:
        part_class = load_class(kind, use.name, registry)
    except PluginError:
        return
    if kind == "backend":
        make_backend_options(use, part_class)
    else:
        make_with_use(kind, use, part_class)


def make_with_use(kind: str, use: Use, part_class: type[T]) -> T:
    """Return an instance of a class with the options of a stack.

    Raises:
        StackError: The class does not take the options.
        PluginError: The class fails in another way.
    """
    label = f"{KINDS[kind].label} {use.name!r}"
    try:
        return make_with_options(part_class, use.options)
    except ValueError as error:
        raise StackError(f"{use.origin}: {label}: {error}") from error
    except PluginError as error:
        raise PluginError(f"{label}: its options: {error}") from error.__cause__


def make_backend_options(use: Use, backend_class: type[AttentionBackend]) -> Any:
    """Return an instance of a backend's ``options_class``, None if it has none; raises as ``make_with_use`` does."""
    if backend_class.options_class is not None:
        return make_with_use("backend", use, backend_class.options_class)
    if use.options:
        names = listed(sorted(use.options))
        raise StackError(f"{use.origin}: backend {use.name!r} has no options, and is given {names}")
    return None


def make_part(kind: str, use: Use, registry: Registry) -> Any:
    """Return an instance of what a stack names, with its options; raise ``StackError`` if it cannot be made."""
    try:
        return make_with_use(kind, use, load_class(kind, use.name, registry))
    except StackError:
        raise
    except KVFrameError as error:
        raise StackError(f"{use.origin}: {error}") from error


def make_page_stores(uses: Sequence[Use], registry: Registry) -> list[PageStore]:
    """Return the page stores of ``[cache]`` (``Stack.page_stores``), in the order in which they are asked.

    Raises ``StackError`` for one that cannot be made.
    """
    return [make_part("page_store", use, registry) for use in uses]


def default_format(use: Use | None, registry: Registry) -> KVFormat:
    """Return the format of ``[cache] format``, for the layers for which no rule chooses another one."""
    if use is None:
        return PLAIN
    try:
        return make_format(use, registry)
    except KVFrameError as error:
        raise StackError(f"{use.origin}: {error}") from error


def make_format(choice: Any, registry: Registry) -> KVFormat:
    """Return the format that a stack, a rule or a layer file names.

    Args:
        choice: A name, a table of ``name`` and options, a ``Use``, or the format itself.
        registry: Where formats are looked up.

    Raises:
        SpecError: The choice has another form, or the options do not fit the format.
        UnknownNameError: No plugin provides the format.
        ContestedNameError: Several plugins do.
        PluginError: It cannot be imported, or fails.
    """
    if isinstance(choice, KVFormat):
        return choice
    use = _as_use(choice)
    format_class: type[KVFormat] = load_class("format", use.name, registry)
    try:
        return make_with_options(format_class, use.options)
    except ValueError as error:
        raise SpecError(f"KV format {use.name!r}: {error}") from error
    except PluginError as error:
        raise PluginError(f"KV format {use.name!r}: {error}") from error


def _as_use(choice: Any) -> Use:
    if isinstance(choice, Use):
        return choice
    if isinstance(choice, str):
        return Use(choice)
    if isinstance(choice, Mapping) and isinstance(choice.get("name"), str):
        return Use.of_table(choice)
    raise SpecError(f"{_FORMAT_FORM}, not {choice!r}")


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
    for earlier_wrapper, later_wrapper in itertools.combinations(chain, 2):
        for reason in sorted(({earlier_wrapper.name} | earlier_wrapper.effects) & later_wrapper.not_after):
            return f"wrapper {later_wrapper.name!r} cannot come after {_because(earlier_wrapper, reason)}"
    return None


def _because(wrapper: type[MetadataWrapper], reason: str) -> str:
    return repr(wrapper.name) if reason == wrapper.name else f"{wrapper.name!r} ({reason})"
