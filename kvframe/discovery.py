"""Discovery: which plugins are installed, and whether this kvframe can speak with them. Imports no plugin code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distribution, distributions, version
from types import ModuleType
from typing import Any

import attrs

from kvframe import hookspecs
from kvframe.claims import BUILTIN_OWNER, FAILURES, canonical, in_one_line
from kvframe.errors import PluginError

GROUP = "kvframe.v1"
"""The entry-point group of this generation of the contract; its versions are in ``kvframe.v1.api``."""

_GENERATION = re.compile(r"kvframe\.v(\d+)")
_VERSION = re.compile(r"v(\d+)_(\d+)")


@attrs.frozen(eq=False)
class Candidate:
    """A plugin that was found and not yet imported.

    Attributes:
        name: The entry point's name, or the module's.
        distribution: The distribution that provides it; the module's name if it was passed as a module.
        version: The distribution's version; empty if unknown.
        api_version: The version of the contract it was written for (``"1.0"``); empty if it does not say.
        source: What gives its manifest; None if it cannot be used.
        incompatible: Why this kvframe cannot speak with it; empty if it can.
        broken: Why it cannot even be read; empty if it can.
    """

    name: str
    distribution: str
    version: str = ""
    api_version: str = ""
    source: EntryPoint | ModuleType | None = None
    incompatible: str = ""
    broken: str = ""

    @property
    def id(self) -> str:
        """``distribution:name``, the id that a stack may write."""
        return f"{self.distribution}:{self.name}"

    @property
    def module(self) -> str:
        """The manifest module's name; empty if there is none."""
        if self.source is None:
            return ""
        return self.source.module if isinstance(self.source, EntryPoint) else self.source.__name__

    def load(self) -> Any:
        """Import the manifest; raises whatever its code raises."""
        return self.source.load() if isinstance(self.source, EntryPoint) else self.source


def is_called(candidate_id: str, asked: str) -> bool:
    """Return whether ``asked``, a plugin's name or its ``distribution:name``, means the plugin with that id."""
    owner, _, name = candidate_id.rpartition(":")
    asked_owner, separator, asked_name = asked.rpartition(":")
    return name == asked_name and (not separator or canonical(owner) == canonical(asked_owner))


def find_candidates(passed: Sequence[Any] = ()) -> list[Candidate]:
    """Return the built-in plugin, then every installed one, sorted, then those passed as modules.

    Args:
        passed: Modules given by the caller. One that is installed too is taken once, as the installed plugin.
    """
    installed = [_builtin(), *sorted(_installed(), key=lambda candidate: candidate.id)]
    modules = {candidate.module for candidate in installed}
    given = [_as_candidate(plugin) for plugin in {id(plugin): plugin for plugin in passed}.values()]
    return [*installed, *(candidate for candidate in given if candidate.module not in modules)]


def _builtin() -> Candidate:
    try:
        core = version("kvframe")
    except PackageNotFoundError:
        core = ""
    entry_point = EntryPoint("builtin", "kvframe.builtin.plugin", GROUP)
    return Candidate("builtin", BUILTIN_OWNER, core, hookspecs.API_VERSION, entry_point)


def _as_candidate(plugin: Any) -> Candidate:
    if not isinstance(plugin, ModuleType):
        raise PluginError(f"plugins=[...] takes modules with kvframe hooks, not {plugin!r}")
    name, stated = plugin.__name__, getattr(plugin, "__version__", "")
    return Candidate(name, name, str(stated), hookspecs.API_VERSION, plugin)


def _installed() -> Iterable[Candidate]:
    names, unreadable = set(), []
    for dist in distributions():
        try:
            if "kvframe.v" in (dist.read_text("entry_points.txt") or ""):
                name = dist.metadata["Name"]
                if not name:
                    raise PluginError("its METADATA states no name")
                names.add(canonical(name))
        except FAILURES as error:
            unreadable.append(f"a distribution in {dist.locate_file('')} cannot be read: {in_one_line(error)}")
    for name in sorted(names):
        # Asked again by name: of two copies on the path only the first is the installed one.
        dist = distribution(name)
        try:
            yield from _candidates_of(dist, name)
        except FAILURES as error:
            reason = f"its entry_points.txt cannot be read: {in_one_line(error)}"
            yield Candidate(name, name, dist.version, broken=reason)
    for reason in unreadable:
        yield Candidate("unknown", "unknown", broken=reason)


def _candidates_of(dist: Distribution, name: str) -> list[Candidate]:
    entry_points = [each for each in dist.entry_points if each.group.startswith("kvframe.v")]
    stated = {each.name: each.value for each in entry_points if each.group == f"{GROUP}.api"}
    current = [each for each in entry_points if each.group == GROUP]
    found = []
    for each in current:
        api_version, refusal = _read_version(name, each.name, stated.get(each.name))
        twice = sum(other.name == each.name for other in current) > 1
        broken = f"{name} lists {each.name!r} twice in its entry points" if twice else ""
        found.append(Candidate(each.name, name, dist.version, api_version, each, refusal, broken))
    for each in entry_points:
        generation = _GENERATION.fullmatch(each.group)
        if generation and each.group != GROUP and each.name not in {entry.name for entry in current}:
            major = generation.group(1)
            newer = int(major) > int(hookspecs.API_VERSION.split(".")[0])
            cure = "upgrade kvframe, or install an older" if newer else "install a newer"
            reason = (
                f"{name} offers it in {each.group}, generation {major} of the contract, "
                f"and this kvframe reads {GROUP}; {cure} {name}"
            )
            found.append(Candidate(each.name, name, dist.version, major, incompatible=reason))
    return list({(each.name, each.api_version): each for each in found}.values())


def _read_version(dist: str, name: str, stated: str | None) -> tuple[str, str]:
    """Return the version of the contract that a plugin states, and why it is refused (empty if it is not)."""
    ours = hookspecs.API_VERSION
    our_major, our_minor = (int(part) for part in ours.split("."))
    example = f"v{our_major}_{our_minor}"
    if stated is None:
        return "", (
            f"{dist} does not say which version of the contract {name!r} was written for; "
            f'its entry-point group "{GROUP}.api" must hold {name} = "{example}"'
        )
    match = _VERSION.fullmatch(stated.strip())
    if match is None:
        return "", f"{dist} states {stated!r} as the contract version of {name!r}, which is not of the form {example!r}"
    major, minor = int(match.group(1)), int(match.group(2))
    theirs = f"{major}.{minor}"
    if major != our_major or minor > our_minor:
        newer = (major, minor) > (our_major, our_minor)
        cure = f"upgrade kvframe, or install an older {dist}" if newer else f"install a newer {dist}"
        return theirs, f"{dist} was written for contract version {theirs} and this kvframe speaks {ours}; {cure}"
    return theirs, ""
