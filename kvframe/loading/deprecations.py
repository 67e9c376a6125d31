"""What plugins should no longer use; finds such uses, and warns the plugin's author once for each.

A deprecated use works until the next major version. A minor version adds a line to ``DEPRECATED``;
``docs/contract_version.md`` says how long it stays there.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

import attrs
import pluggy


@attrs.frozen(kw_only=True)
class Deprecation:
    """One thing that is on its way out.

    Attributes:
        since: The version of the contract that deprecated it (``"1.1"``).
        instead: What to write instead: a verb and what follows (``"implement kvframe_register_kernels"``).
    """

    since: str
    instead: str


DEPRECATED: Mapping[str, Deprecation] = MappingProxyType({})
"""By name: a hook (``"kvframe_configure"``), a method or class attribute (``"AttentionBackend.bind"``), or one argument
of a hook, of a method or of ``register`` (``"AttentionBackend.forward(sinks)"``, ``"register(needs)"``)."""

_CONTRACT = "kvframe.contract."

_warned: dict[tuple[str, str], str] = {}
"""The warnings of this process, by plugin and name: plugins are loaded more than once."""


def uses_of_hooks(callers: Collection[pluggy.HookCaller]) -> Iterator[str]:
    """Yield the deprecated hooks that a plugin implements, and the deprecated arguments that it takes."""
    for caller in callers:
        arguments = {name for implementation in caller.get_hookimpls() for name in implementation.argnames}
        yield from _known(caller.name, arguments)


def uses_of_register(**arguments: object) -> Iterator[str]:
    """Yield the deprecated arguments of ``register`` that are not None."""
    yield from _known("register", {name for name, value in arguments.items() if value is not None})


def uses_of_class(plugin_class: type) -> Iterator[str]:
    """Yield the deprecated members of the contract that a plugin's class defines, and their deprecated arguments."""
    for base in plugin_class.__mro__:
        if not base.__module__.startswith(_CONTRACT):
            continue
        for name in {key.partition(".")[2].partition("(")[0] for key in DEPRECATED if "." in key}:
            own = inspect.getattr_static(plugin_class, name, None)
            is_promised = name in vars(base) or name in inspect.get_annotations(base)
            if is_promised and own is not vars(base).get(name):
                function = getattr(own, "__func__", own)  # of a class method
                taken = inspect.signature(function).parameters if inspect.isfunction(function) else ()
                yield from _known(f"{base.__name__}.{name}", taken)


def _known(name: str, arguments: Collection[str]) -> Iterator[str]:
    """Yield what of a name and its arguments is deprecated."""
    if DEPRECATED:
        used = (name, *(f"{name}({argument})" for argument in arguments))
        yield from (name for name in used if name in DEPRECATED)


def warn_of(plugin: str, uses: Iterator[str]) -> None:
    """Warn of the names in ``DEPRECATED`` that a plugin, by its id, uses; of each once in this process."""
    for name in uses:
        if (plugin, name) in _warned:
            continue
        deprecation = DEPRECATED[name]
        sentence = (
            f"plugin {plugin} uses {name}, which version {deprecation.since} of kvframe's contract deprecates: "
            f"{deprecation.instead} instead"
        )
        _warned[plugin, name] = sentence
        warnings.warn(sentence, DeprecationWarning, stacklevel=2)


def warnings_of(plugin: str) -> list[str]:
    """Return what this process warned of about a plugin."""
    return [sentence for (warned, _), sentence in _warned.items() if warned == plugin]
