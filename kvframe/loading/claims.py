"""A plugin's claim to a name: it is checked when the plugin registers it, and imported when somebody uses it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import types
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

import attrs
from packaging.version import InvalidVersion, Version

from kvframe.contract.errors import PluginError
from kvframe.contract.foreign import call, in_one_line, safe_repr
from kvframe.loading.targets import find_problem

BUILTIN_OWNER = "kvframe"
"""The owner of the built-in names, which no plugin can claim."""

_SNAKE_CASE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_IMPORT_STRING = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


@attrs.frozen
class Kind:
    """One kind of thing that plugins register, such as backends.

    Attributes:
        label: Its name in messages.
        base: Import string of the class that every target must subclass. It is imported when a target is, since only
            the engine has the classes of some kinds.
        name_attribute: The class attribute that must equal the registered name; None if there is none.
        reserved: Names that no plugin can register.
    """

    label: str
    base: str
    name_attribute: str | None = None
    reserved: frozenset[str] = frozenset()


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "spec": Kind("cache spec", "kvframe.contract.specs:KVCacheSpec", "kind"),
        "wrapper": Kind("wrapper", "kvframe.contract.wrapper:MetadataWrapper", "name"),
        "backend": Kind("backend", "kvframe.contract.backend:AttentionBackend", reserved=frozenset({"auto"})),
        "format": Kind("KV format", "kvframe.contract.formats:KVFormat", "name", reserved=frozenset({"plain"})),
        "eviction": Kind(
            "eviction policy", "kvframe.contract.eviction:EvictionPolicy", "name", reserved=frozenset({"lru"})
        ),
        "page_store": Kind("page store", "kvframe.contract.page_store:PageStore", "name"),
        "event_publisher": Kind("event publisher", "kvframe.contract.event_publisher:EventPublisher", "name"),
        "scheduling": Kind(
            "scheduling policy", "kvframe_engine.contract:SchedulingPolicy", "name", reserved=frozenset({"fcfs"})
        ),
        "proposer": Kind("proposer", "kvframe_engine.contract:Proposer", "name"),
        "logits_processor": Kind("logits processor", "kvframe_engine.contract:LogitsProcessor", "name"),
        "model_adapter": Kind("model adapter", "kvframe.contract.model:ModelAdapter"),
    }
)
"""Every kind by its key in the stack file (``[plugins.owners.backend]``)."""


def canonical(distribution: str) -> str:
    """Return a distribution's name in the package index's normal form: ``kvframe-x`` for ``kvframe_X``."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


_LEAST_VERSION = re.compile(r"([A-Za-z0-9][\w.-]*)>=(\d{1,18}(?:\.\d{1,18})*)", re.ASCII)
_MAX_NAME, _MAX_TARGET = 100, 500
_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def _as_names(needs: str | Sequence[str] | None) -> tuple[str, ...]:
    return (needs,) if isinstance(needs, str) else tuple(needs or ())


def _as_hint(install: str | None) -> str:
    return install or ""


def _find_module(name: str) -> bool:
    try:
        return call(f"looking for {name!r}", importlib.util.find_spec, name.partition(".")[0]) is not None
    except PluginError:
        return False


def _find_version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed or its version cannot be read."""
    try:
        version: str | None = call(f"looking for {distribution!r}", importlib.metadata.version, distribution)
    except PluginError:
        return None
    return version


def _is_older(version: str, least: str) -> bool:
    """Return whether a version's release is before another one's; False if it is not a version."""
    try:
        return Version(Version(version).base_version) < Version(least)
    except InvalidVersion:
        return False


def import_class(target: str) -> Any:
    """Return what an import string names; raise ``PluginError`` if that fails."""
    module, _, path = target.partition(":")
    part: Any = call(f"importing {module!r}", importlib.import_module, module)
    for attribute in path.split("."):
        part = call(f"looking for {path!r} in {module!r}", getattr, part, attribute)
    return part


@attrs.frozen
class Claim:
    """One claim to a name.

    Attributes:
        kind: The kind's key (``"backend"``).
        name: The registered name.
        target: Import string of the class, or the class itself.
        owner: The distribution that claims the name; a module's name if the plugin was passed as a module.
        plugin: The plugin's id, ``distribution:name``.
        needs: Modules without which the target cannot be imported; a check looks for their top-level packages.
        install: The command that installs what is missing; empty if unknown.
        needs_versions: The lowest usable versions of distributions, ``"name>=1.2"``.
    """

    kind: str
    name: str
    target: str | type
    owner: str
    plugin: str
    needs: tuple[str, ...] = attrs.field(default=(), converter=_as_names)
    install: str = attrs.field(default="", converter=_as_hint)
    needs_versions: tuple[str, ...] = attrs.field(default=(), converter=_as_names)

    def __attrs_post_init__(self) -> None:
        kind = KINDS[self.kind]
        if not isinstance(self.name, str) or len(self.name) > _MAX_NAME or not _SNAKE_CASE.fullmatch(self.name):
            raise PluginError(
                f"{kind.label} name {safe_repr(self.name)} must be snake_case, like 'sliding_window', of at most "
                f"{_MAX_NAME} characters"
            )
        if self.name in kind.reserved:
            raise PluginError(f"{kind.label} name {self.name!r} is reserved; choose another")
        if not isinstance(self.target, type) and not (
            isinstance(self.target, str) and len(self.target) <= _MAX_TARGET and _IMPORT_STRING.fullmatch(self.target)
        ):
            raise PluginError(
                f"the target of {kind.label} {self.name!r} must be like 'package.module:Class', "
                f"not {safe_repr(self.target)}"
            )
        for module in self.needs:
            if not isinstance(module, str) or not _MODULE.fullmatch(module):
                raise PluginError(
                    f"{kind.label} {self.name!r}: needs must name modules, like 'a.b', not {safe_repr(module)}"
                )
        if not isinstance(self.install, str):
            raise PluginError(f"{kind.label} {self.name!r}: install must be a command, not {safe_repr(self.install)}")
        for need in self.needs_versions:
            if not isinstance(need, str) or not _LEAST_VERSION.fullmatch(need):
                raise PluginError(
                    f"{kind.label} {self.name!r}: needs_versions must be like 'name>=1.2', not {safe_repr(need)}"
                )

    @property
    def id(self) -> str:
        """``owner:name``, which names this claim even if other plugins claim the name."""
        return f"{self.owner}:{self.name}"

    def missing(self) -> tuple[str, ...]:
        """Return the needed modules that are not installed, without importing any."""
        return tuple(name for name in self.needs if not _find_module(name))

    def outdated(self) -> tuple[str, ...]:
        """Return the needed distributions whose installed version is too old, with both versions. Imports nothing.

        A distribution that is not installed under its name is ignored: source and nightly builds have other names.
        """
        versions = {need: _find_version(need.partition(">=")[0]) for need in self.needs_versions}
        return tuple(
            f"{need}, not {version} as installed here"
            for need, version in versions.items()
            if version is not None and _is_older(version, need.partition(">=")[2])
        )

    def load(self) -> Any:
        """Import the target and return the class; raise ``PluginError`` with owner, name and cause if that fails."""
        missing_modules = self.missing()
        if missing_modules:
            raise self._error(f"needs {', '.join(missing_modules)}, not installed here")
        old_versions = self.outdated()
        if old_versions:
            raise self._error(f"needs {'; '.join(old_versions)}")
        try:
            part_class = import_class(self.target) if isinstance(self.target, str) else self.target
            base = import_class(KINDS[self.kind].base)
            unfit = call("reading what it declares", self._why_unfit, part_class, base)
        except PluginError as error:
            raise self._error(str(error)) from error.__cause__
        if unfit:
            raise self._error(f"{safe_repr(self.target)} {unfit}")
        return part_class

    def problem(self, *, imports: bool = False) -> str:
        """Return why the name cannot be used; empty if it can, as far as is known without an import of its class.

        With ``imports``, the class is imported and asked too.
        """
        missing_modules, old_versions = self.missing(), self.outdated()
        if missing_modules or old_versions:
            hint = f"; try: {self.install}" if self.install else ""
            return f"needs {', '.join(missing_modules) or '; '.join(old_versions)}{hint}"
        try:
            problem = (
                "" if isinstance(self.target, type) else call(f"looking for {self.target!r}", find_problem, self.target)
            )
            if problem:
                return problem
            return self.why_unusable(self.load()) if imports else ""
        except PluginError as error:
            return str(error)

    def why_unusable(self, part_class: Any) -> str:
        """Return the reason of a loaded class why it cannot be used in this environment; empty if it gives none.

        Raises ``PluginError`` if its ``unusable_reason`` raises, or returns neither a sentence nor None.
        """
        if self.kind != "backend":
            return ""
        question = f"backend {self.id!r}: unusable_reason()"
        reason: Any = call(question, lambda: part_class.unusable_reason())
        if reason is None:
            return ""
        if not issubclass(type(reason), str) or not in_one_line(reason):
            raise PluginError(f"{question} must return a sentence or None, not {safe_repr(reason)}")
        return in_one_line(reason)

    def _why_unfit(self, part_class: Any, base: type) -> str:
        """Return why the imported object cannot be used for the name; empty if it can. May raise anything."""
        kind = KINDS[self.kind]
        if not (issubclass(type(part_class), type) and issubclass(part_class, base)):
            return f"is not a subclass of {kind.base.replace(':', '.')}"
        if inspect.isabstract(part_class):
            return f"does not implement {', '.join(sorted(part_class.__abstractmethods__))}"
        problem = find_misdeclared(base, part_class)
        if not problem and self.kind == "backend":
            problem = find_undefined(part_class)
        if problem:
            return problem
        own_name = getattr(part_class, kind.name_attribute) if kind.name_attribute else self.name
        return "" if own_name == self.name else f"has {kind.name_attribute} = {own_name!r}, not the registered name"

    def _error(self, reason: str) -> PluginError:
        hint = f"; try: {self.install}" if self.install else ""
        return PluginError(f"{KINDS[self.kind].label} {self.name!r} of {self.owner} cannot be used: {reason}{hint}")


# --- what a class declares --------------------------------------------------------------------------------------------


def find_misdeclared(base: type, value: Any) -> str:
    """Return which attribute of ``value`` does not fit its annotation in the contract's ``base``; empty if all fit.

    Planning and steps read these attributes. If one is missing, has another type or raises, the failure would appear
    far from its plugin. Of a subclass, the ``ClassVar`` annotations are checked, and of an instance all. Reading them
    may raise anything.
    """
    for name, hint in _annotations_of(base, class_only=issubclass(type(value), type)):
        try:
            attribute = getattr(value, name)
        except AttributeError:
            return f"declares no {name}"
        if not _fits(attribute, hint):
            return f"declares {name} = {safe_repr(attribute)}, which is not {_in_words(hint)}"
    return ""


def check_declared(base: type, value: Any) -> None:
    """Raise ``PluginError`` if what a plugin's method returned lacks what ``base`` declares."""
    if misdeclared := find_misdeclared(base, value):
        raise PluginError(f"it returned {safe_repr(value)}, which {misdeclared}")


def find_undefined(backend_class: Any) -> str:
    """Return what a backend's class declares and lacks, or has in a form that no stack can use; empty if nothing."""
    from kvframe.contract.backend import AttentionBackend  # imports torch, as the class did

    options_class = backend_class.options_class
    if options_class is not None and not attrs.has(options_class):
        return f"declares options_class = {safe_repr(options_class)}, which is not an attrs class"
    bases = (vars(base) for base in backend_class.__mro__ if base is not AttentionBackend)
    arguments = {name for base in bases if "attend" in base for name in inspect.signature(base["attend"]).parameters}
    capabilities = backend_class.capabilities
    for capability, value, argument in (
        ("sinks", capabilities.sinks, "sinks"),
        ("returns_lse", capabilities.returns_lse, "lse"),
        ("choices or kinds", capabilities.choices or capabilities.kinds, "more"),
    ):
        if value and argument not in arguments:
            return f"declares {capability}, and its attend() does not take {argument!r}"
    return ""


@cache
def _annotations_of(base: type, *, class_only: bool) -> tuple[tuple[str, Any], ...]:
    """Return the annotated attributes of a base class, with types: those of the class, or those of instances too."""
    return tuple(
        (name, get_args(hint)[0] if get_origin(hint) is ClassVar else hint)
        for name, hint in get_type_hints(base).items()
        if get_origin(hint) is ClassVar or not class_only
    )


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in inner)
    if origin is type:
        return issubclass(type(value), type)
    if origin is tuple:
        return issubclass(type(value), tuple) and all(_fits(item, inner[0]) for item in value)
    if origin is frozenset:
        return issubclass(type(value), frozenset) and all(_fits(item, inner[0]) for item in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            _fits(key, inner[0]) and _fits(item, inner[1]) for key, item in value.items()
        )
    if hint is float:
        return type(value) in (int, float)
    return issubclass(type(value), hint)


def _in_words(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")
