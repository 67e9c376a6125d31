"""Finds what a plugin uses that the contract deprecates, and warns its author, once for each plugin and use."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Iterator

import pluggy

from kvframe.contract import deprecations

_CONTRACT = "kvframe.contract."

_warned: dict[tuple[str, str], str] = {}
"""The warnings of this process, by plugin and name: plugins are loaded more than once."""


def uses_of_hooks(callers: Collection[pluggy.HookCaller]) -> Iterator[str]:
    """Yield the deprecated hooks that a plugin implements, and the deprecated arguments that it takes.

    Args:
        callers: The callers of the hooks that it implements.
    """
    for caller in callers:
        arguments = {name for implementation in caller.get_hookimpls() for name in implementation.argnames}
        yield from _known(caller.name, arguments)


def uses_of_register(**given: object) -> Iterator[str]:
    """Yield the deprecated arguments of ``register`` that are given."""
    yield from _known("register", {name for name, value in given.items() if value is not None})


def uses_of_class(made: type) -> Iterator[str]:
    """Yield the deprecated members of the contract that a plugin's class defines, and their deprecated arguments."""
    for base in made.__mro__:
        if not base.__module__.startswith(_CONTRACT):
            continue
        for name in {key.partition(".")[2].partition("(")[0] for key in deprecations.DEPRECATED if "." in key}:
            own = inspect.getattr_static(made, name, None)
            is_promised = name in vars(base) or name in inspect.get_annotations(base)
            if is_promised and own is not vars(base).get(name):
                function = getattr(own, "__func__", own)  # of a class method
                taken = inspect.signature(function).parameters if inspect.isfunction(function) else ()
                yield from _known(f"{base.__name__}.{name}", taken)


def _known(name: str, arguments: Collection[str]) -> Iterator[str]:
    """Yield what of a name and its arguments is deprecated."""
    if deprecations.DEPRECATED:
        used = (name, *(f"{name}({argument})" for argument in arguments))
        yield from (each for each in used if each in deprecations.DEPRECATED)


def warn_of(plugin: str, uses: Iterator[str]) -> None:
    """Warn of deprecated names that a plugin uses, of each once in this process.

    Args:
        plugin: The plugin's id, ``distribution:name``.
        uses: The names of what it uses, as in ``DEPRECATED``.
    """
    for name in uses:
        if (plugin, name) in _warned:
            continue
        found = deprecations.DEPRECATED[name]
        sentence = (
            f"plugin {plugin} uses {name}, which version {found.since} of kvframe's contract deprecates: "
            f"{found.instead} instead"
        )
        _warned[plugin, name] = sentence
        warnings.warn(sentence, DeprecationWarning, stacklevel=2)


def warnings_of(plugin: str) -> list[str]:
    """Return what this process warned of about a plugin."""
    return [sentence for (warned, _), sentence in _warned.items() if warned == plugin]
