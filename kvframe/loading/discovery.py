"""Discovery: which plugins are installed, and whether their contract version fits. Imports no plugin code."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import (
    Distribution,
    EntryPoint,
    MetadataPathFinder,
    PackageNotFoundError,
    distribution,
    distributions,
    version,
)
from types import ModuleType
from typing import Any

import attrs

from kvframe.contract import hookspecs
from kvframe.contract.errors import PluginError
from kvframe.contract.foreign import call, in_one_line, safe_repr
from kvframe.loading.claims import BUILTIN_OWNER, canonical

GROUP = "kvframe.v1"
"""The entry-point group of this generation of the contract; its versions are in ``kvframe.v1.api``."""

_DISTRIBUTION = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")
_NAME = re.compile(r"[\w.-]{1,100}", re.ASCII)
_VALUE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*(\s*:\s*[^\W\d]\w*(\.[^\W\d]\w*)*)?\s*(\[.*\])?")
_MAX_VALUE = 500
_GENERATION = re.compile(r"kvframe\.v(\d{1,9})", re.ASCII)
_VERSION = re.compile(r"v(\d{1,9})_(\d{1,9})", re.ASCII)


@attrs.frozen(eq=False)
class FoundPlugin:
    """A plugin that was found but not yet imported.

    Attributes:
        name: The entry point's name, or the module's.
        distribution: The distribution that provides it; the module's name if it was passed as a module.
        version: The distribution's version; empty if unknown.
        api_version: The version of the contract that it was written for (``"1.0"``); empty if it does not state one.
        source: The source of its manifest module; None if it cannot be used.
        incompatible: Why its contract version does not fit this kvframe; empty if it does.
        broken: Why its metadata cannot be read; empty if they can.
        module: The manifest module's name; empty if there is none.
    """

    name: str
    distribution: str
    version: str = ""
    api_version: str = ""
    source: EntryPoint | ModuleType | None = None
    incompatible: str = ""
    broken: str = ""
    module: str = ""

    @property
    def id(self) -> str:
        """``distribution:name``, the id that a stack may write."""
        return f"{self.distribution}:{self.name}"

    def load(self) -> Any:
        """Import the manifest; raises any exception of its code."""
        return self.source.load() if isinstance(self.source, EntryPoint) else self.source


def is_called(plugin_id: str, name: str) -> bool:
    """Return whether a plugin's name, or its ``distribution:name``, names the plugin with an id."""
    owner, _, own_name = plugin_id.rpartition(":")
    named_owner, separator, last_name = name.rpartition(":")
    return own_name == last_name and (not separator or canonical(owner) == canonical(named_owner))


def find_plugins(modules: Sequence[Any] = ()) -> list[FoundPlugin]:
    """Return the built-in plugin, then the installed plugins, sorted, then those passed as modules.

    A module that is also installed is returned once, as the installed plugin.
    """
    installed_plugins = [_builtin(), *sorted(_installed.plugins(), key=lambda found_plugin: found_plugin.id)]
    installed_modules = {found_plugin.module for found_plugin in installed_plugins}
    passed_plugins = [_as_found_plugin(module) for module in {id(module): module for module in modules}.values()]
    return [
        *installed_plugins,
        *(found_plugin for found_plugin in passed_plugins if found_plugin.module not in installed_modules),
    ]


def _builtin() -> FoundPlugin:
    try:
        core = version("kvframe")
    except PackageNotFoundError:
        core = ""
    entry_point = EntryPoint("builtin", "kvframe.builtin.plugin", GROUP)
    return FoundPlugin(
        "builtin", BUILTIN_OWNER, core or "", hookspecs.API_VERSION, entry_point, module=entry_point.module
    )


def _as_found_plugin(plugin: Any) -> FoundPlugin:
    if not issubclass(type(plugin), ModuleType):
        raise PluginError(f"plugins=[...] takes modules with kvframe hooks, not {safe_repr(plugin)}")
    name = call("the __name__ of a module in plugins=[...]", getattr, plugin, "__name__")
    version_value = call(f"the __version__ of {safe_repr(name)}", getattr, plugin, "__version__", "")
    if type(name) is not str:
        raise PluginError(f"the __name__ of a module in plugins=[...] must be a text, not {safe_repr(name)}")
    version = in_one_line(version_value) if isinstance(version_value, str) else safe_repr(version_value)
    return FoundPlugin(name, name, version, hookspecs.API_VERSION, plugin, module=name)


def distribution_names() -> Iterator[tuple[str, str]]:
    """Yield the name of each installed distribution that can be read, and the text of its entry points."""
    for dist in _distributions([]):
        with suppress(PluginError):
            yield _name_of(dist), _entry_points_of(dist)


def _entry_points_of(dist: Distribution) -> str:
    return call("reading entry_points.txt", dist.read_text, "entry_points.txt") or ""


class _Installed:
    """Remembers the installed plugins, because reading all distributions takes most of the time of loading plugins."""

    def __init__(self) -> None:
        self._finders: list[object] = []
        self._folders: list[tuple[str, int | None]] = []
        self._plugins: list[FoundPlugin] = []

    def plugins(self) -> list[FoundPlugin]:
        """Return the installed plugins."""
        finders = [*sys.meta_path, *(vars(type(finder)).get("find_distributions") for finder in sys.meta_path)]
        finders.append(vars(MetadataPathFinder)["find_distributions"])
        folders = [(path, _when_changed(path)) for path in map(os.path.abspath, sys.path)]
        # Finders are compared by identity: their own comparisons may be wrong.
        if list(map(id, finders)) != list(map(id, self._finders)) or folders != self._folders:
            self._plugins = list(_read_installed())
            self._finders, self._folders = finders, folders
        return self._plugins


_installed = _Installed()


def _when_changed(path: str) -> int | None:
    """Return when entries of a folder were last added or removed; None if there is no such folder."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None


def _read_installed() -> Iterable[FoundPlugin]:
    names: dict[str, Distribution] = {}
    unreadable: list[str] = []
    for dist in _distributions(unreadable):
        try:
            if "kvframe.v" in _entry_points_of(dist):
                names.setdefault(_name_of(dist), dist)
        except PluginError as error:
            unreadable.append(f"a distribution in {_place_of(dist)} cannot be read: {error}")
    for name, first_copy in sorted(names.items()):
        try:
            # Looked up again by name: of two copies on the path, only the first is the installed one.
            dist = call(f"finding the distribution {name!r}", distribution, name)
            found_plugins = call("reading entry_points.txt", _plugins_of, dist, name)
        except PluginError as error:
            found_plugins = [FoundPlugin(name, name, _version_of(first_copy), broken=f"it cannot be read: {error}")]
        yield from found_plugins
    for reason in unreadable:
        yield FoundPlugin("unknown", "unknown", broken=reason)


def _distributions(unreadable: list[str]) -> Iterator[Distribution]:
    """Yield the installed distributions, until a finder of ``sys.meta_path`` fails."""
    try:
        remaining = iter(call("looking for distributions", distributions))
        while (dist := call("looking for distributions", next, remaining, None)) is not None:
            yield dist
    except PluginError as error:
        unreadable.append(str(error))


def _name_of(dist: Distribution) -> str:
    """Return a distribution's canonical name; raise ``PluginError`` if it states none."""
    name = call("reading METADATA", lambda: dist.metadata["Name"])
    if not name:
        raise PluginError("its METADATA states no name")
    if not _DISTRIBUTION.fullmatch(str(name)):
        raise PluginError(f"its METADATA states {safe_repr(name)}, which is not the name of a distribution")
    return canonical(str(name))


def _version_of(dist: Distribution) -> str:
    """Return a distribution's version; empty if none can be read."""
    try:
        version_value = call("reading METADATA", lambda: dist.version)
    except PluginError:
        return ""
    return in_one_line(str(version_value))[:100] if version_value else ""


def _place_of(dist: Distribution) -> str:
    try:
        return in_one_line(str(call("finding it", dist.locate_file, "")))
    except PluginError as error:
        return f"an unknown place ({error})"


def _plugins_of(dist: Distribution, name: str) -> list[FoundPlugin]:
    entry_points = [entry for entry in dist.entry_points if entry.group.startswith("kvframe.v")]
    version_values = {entry.name: entry.value for entry in entry_points if entry.group == f"{GROUP}.api"}
    current_entries = [entry for entry in entry_points if entry.group == GROUP]
    version, plugins = _version_of(dist), []
    for entry in current_entries:
        api_version, refusal = _read_version(name, entry.name, version_values.get(entry.name))
        is_listed_twice = sum(another.name == entry.name for another in current_entries) > 1
        problem = (
            f"{name} lists {safe_repr(entry.name)} twice in its entry points"
            if is_listed_twice
            else _why_malformed(entry)
        )
        module = "" if problem else entry.module
        plugins.append(
            FoundPlugin(in_one_line(entry.name)[:100], name, version, api_version, entry, refusal, problem, module)
        )
    for entry in entry_points:
        generation = _GENERATION.fullmatch(entry.group)
        if generation and entry.group != GROUP and entry.name not in {another.name for another in current_entries}:
            major = generation.group(1)
            newer = int(major) > int(hookspecs.API_VERSION.split(".")[0])
            cure = "upgrade kvframe, or install an older" if newer else "install a newer"
            reason = (
                f"{name} offers it in {entry.group}, generation {major} of the contract, "
                f"and this kvframe reads {GROUP}; {cure} {name}"
            )
            plugins.append(FoundPlugin(in_one_line(entry.name)[:100], name, version, major, incompatible=reason))
    return list({(entry.name, entry.api_version): entry for entry in plugins}.values())


def _why_malformed(entry_point: EntryPoint) -> str:
    """Return why an entry point cannot name a plugin; empty if it can."""
    if not _NAME.fullmatch(entry_point.name):
        return f"the entry point's name {safe_repr(entry_point.name)} is not 1 to 100 letters, digits, '_', '.' and '-'"
    if len(entry_point.value) > _MAX_VALUE or not _VALUE.fullmatch(entry_point.value):
        return f"the entry point's value {safe_repr(entry_point.value)} is not like 'package.module'"
    return ""


def _read_version(dist: str, name: str, version_value: str | None) -> tuple[str, str]:
    """Return the contract version that a plugin states, and why it is refused (empty if it is not)."""
    ours = hookspecs.API_VERSION
    our_major, our_minor = (int(part) for part in ours.split("."))
    example = f"v{our_major}_{our_minor}"
    if version_value is None:
        return "", (
            f"{dist} does not say which version of the contract {name!r} was written for; "
            f'its entry-point group "{GROUP}.api" must hold {name} = "{example}"'
        )
    match = _VERSION.fullmatch(version_value.strip())
    if match is None:
        return (
            "",
            f"{dist} states {safe_repr(version_value)} as the contract version of {safe_repr(name)}, "
            f"which is not of the form {example!r}",
        )
    major, minor = int(match.group(1)), int(match.group(2))
    theirs = f"{major}.{minor}"
    if major != our_major or minor > our_minor:
        newer = (major, minor) > (our_major, our_minor)
        cure = f"upgrade kvframe, or install an older {dist}" if newer else f"install a newer {dist}"
        return theirs, f"{dist} was written for contract version {theirs} and this kvframe speaks {ours}; {cure}"
    return theirs, ""
