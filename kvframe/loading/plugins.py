"""Loads plugins: each gets one status, and a failing plugin does not keep others from loading.

pluggy calls the hooks. This module adds what pluggy lacks: a plugin that fails to import, to validate or to configure
is set aside alone; a misspelt hook is reported; if two plugins have one name, both are named and neither is used. For
this, each plugin has its own pluggy manager.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType, ModuleType
from typing import Any, Literal

import attrs
import pluggy

from kvframe.contract.errors import ContestedNameError, PluginError, StackError, UnknownNameError
from kvframe.contract.foreign import call, safe_repr
from kvframe.contract.hookspecs import HookSpecs
from kvframe.loading.checks import OWNERS, TABLES, TEXTS
from kvframe.loading.claims import Claim
from kvframe.loading.discovery import FoundPlugin, find_plugins, is_called
from kvframe.loading.misnamed import hint_for
from kvframe.loading.packages import provider_of, to_install
from kvframe.loading.registry import Registry

Status = Literal["loaded", "disabled", "incompatible", "conflict", "broken"]
"""The status of a plugin; every status but ``loaded`` has a reason."""

_HOOKS = tuple(name for name in vars(HookSpecs) if name.startswith("kvframe_"))
_REGISTERING = {
    "kvframe_register_specs": "spec",
    "kvframe_register_wrappers": "wrapper",
    "kvframe_register_backends": "backend",
    "kvframe_register_formats": "format",
    "kvframe_register_eviction_policies": "eviction",
    "kvframe_register_page_stores": "page_store",
    "kvframe_register_event_publishers": "event_publisher",
    "kvframe_register_scheduling_policies": "scheduling",
    "kvframe_register_proposers": "proposer",
    "kvframe_register_logits_processors": "logits_processor",
    "kvframe_register_model_adapters": "model_adapter",
}


@attrs.frozen(kw_only=True)
class PluginPolicy:
    """A stack's policy for plugins. A plugin is named by its name or by its id, ``distribution:name``.

    Attributes:
        disabled: Plugins that are not imported.
        required: Plugins without which the stack cannot run.
        owners: The owner of each contested name: kind (``"backend"``), name, distribution.
        settings: Each plugin's own table, by plugin.
        source: Where the policy was read, for errors.
    """

    disabled: tuple[str, ...] = attrs.field(default=(), validator=TEXTS)
    required: tuple[str, ...] = attrs.field(default=(), validator=TEXTS)
    owners: Mapping[str, Mapping[str, str]] = attrs.field(factory=dict, validator=OWNERS)
    settings: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict, validator=TABLES)
    source: str = "stack"


@attrs.frozen(kw_only=True)
class PluginRecord:
    """The outcome of loading one plugin.

    Attributes:
        name: Its entry point's name, or the module's.
        distribution: The distribution that provides it; the module's name if it was passed as a module.
        version: The distribution's version; empty if unknown.
        api_version: The version of the contract that it was written for; empty if it does not state one.
        status: One of ``Status``.
        reason: Why it is not loaded, in one sentence; empty if it is loaded.
        cause: The exception that gave the reason, if there is one.
    """

    name: str
    distribution: str
    version: str
    api_version: str
    status: Status
    reason: str = ""
    cause: BaseException | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def id(self) -> str:
        """``distribution:name``."""
        return f"{self.distribution}:{self.name}"


@attrs.frozen(eq=False)
class PluginHost:
    """The plugins that were found, and what the loaded ones registered.

    Attributes:
        records: One per plugin: the built-in one, the installed ones by id, those passed as modules.
        registry: The names that the loaded plugins registered.
    """

    records: tuple[PluginRecord, ...]
    registry: Registry

    def record(self, name: str) -> PluginRecord:
        """Return the record of a plugin by its name or id; raise ``UnknownNameError`` if there is none."""
        for record in self.records:
            if is_called(record.id, name):
                return record
        raise UnknownNameError("plugin", name, (record.id for record in self.records), hint_for(name))


class _SetAside(Exception):
    """Ends the loading of one plugin."""

    def __init__(self, status: Status, reason: str, cause: BaseException | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.cause = status, reason, cause


def load_plugins(policy: PluginPolicy = PluginPolicy(), plugins: Sequence[ModuleType] = ()) -> PluginHost:
    """Find, check, import and configure the built-in and installed plugins, and let them register their names.

    Args:
        policy: The stack's policy for plugins.
        plugins: Modules with kvframe hooks that need not be installed; a module that cannot be used is an error.

    Raises:
        StackError: The policy names a plugin that was not found, or has settings for one that takes none.
        PluginError: A plugin that the stack requires, or that was passed, cannot be used.
    """
    found_plugins = find_plugins(plugins)
    _check_policy(policy, found_plugins)
    registry = Registry(policy.owners)
    clashes = _find_clashes(policy, found_plugins)
    outcomes = [(found_plugin, _outcome(found_plugin, clashes, policy, registry)) for found_plugin in found_plugins]
    _check_needed(policy, outcomes, plugins)
    return PluginHost(tuple(record for _, record in outcomes), registry)


def _outcome(
    found_plugin: FoundPlugin, clashes: Mapping[str, str], policy: PluginPolicy, registry: Registry
) -> PluginRecord:
    try:
        if found_plugin.id in clashes:
            raise _SetAside("conflict", clashes[found_plugin.id])
        _load(found_plugin, policy, registry)
        registry.versions[found_plugin.distribution] = found_plugin.version
        outcome = _SetAside("loaded", "")
    except _SetAside as set_aside:
        outcome = set_aside
        registry.note_set_aside(f"{found_plugin.id} ({outcome.status}: {outcome.reason})")
    return PluginRecord(
        name=found_plugin.name,
        distribution=found_plugin.distribution,
        version=found_plugin.version,
        api_version=found_plugin.api_version,
        status=outcome.status,
        reason=outcome.reason,
        cause=outcome.cause,
    )


def _check_policy(policy: PluginPolicy, found_plugins: Sequence[FoundPlugin]) -> None:
    """Raise if a policy names plugins that were not found: a misspelt ``disabled`` must not pass unnoticed."""
    problems = []
    known_names = {found_plugin.name for found_plugin in found_plugins}
    named_by_key = [("plugins.disabled", name) for name in policy.disabled]
    named_by_key += [(f"plugin.{name}", name) for name in policy.settings]
    for key, name in named_by_key:
        if not any(is_called(found_plugin.id, name) for found_plugin in found_plugins):
            problems.append(f"{key}: {UnknownNameError('installed plugin', name, known_names, hint_for(name))}")
        elif key == "plugins.disabled" and is_called(found_plugins[0].id, name):
            problems.append(f"{key}: {name!r} is built in and cannot be disabled")
    if problems:
        raise StackError(f"{policy.source}: {'; '.join(problems)}")


def _check_needed(
    policy: PluginPolicy, outcomes: Sequence[tuple[FoundPlugin, PluginRecord]], modules: Sequence[ModuleType]
) -> None:
    """Raise if a plugin that the stack or the caller names, or the built-in one, cannot be used."""
    module_names = {module.__name__ for module in modules}
    problems: list[str] = []
    cause = None
    for name in policy.required:
        if not any(is_called(record.id, name) for _, record in outcomes):
            known_names = {record.name for _, record in outcomes}
            provider = provider_of("plugin", name)
            hint = hint_for(name) if provider is None else f"`{to_install(provider)}` provides it"
            wrong = UnknownNameError("installed plugin", name, known_names, hint)
            problems.append(f"{policy.source}: plugins.required: {wrong}")
    for found_plugin, record in outcomes:
        if any(is_called(record.id, name) for name in policy.required):
            why = f"{policy.source} requires it"
        elif found_plugin.module in module_names and record.status != "disabled":
            why = "it was passed as a module"
        elif found_plugin is outcomes[0][0]:
            why = "kvframe needs it"
        else:
            continue
        if record.status != "loaded":
            problems.append(f"plugin {record.id} cannot be used, and {why}: {record.status}: {record.reason}")
            cause = cause or record.cause
    if problems:
        raise PluginError("; ".join(problems)) from cause


def _is_disabled(policy: PluginPolicy, found_plugin: FoundPlugin) -> bool:
    return any(is_called(found_plugin.id, name) for name in policy.disabled)


def _find_clashes(policy: PluginPolicy, found_plugins: Sequence[FoundPlugin]) -> Mapping[str, str]:
    """Return why each found plugin that shares its name with another cannot be used, by id."""
    running: dict[str, list[FoundPlugin]] = {}
    for found_plugin in found_plugins:
        if not (found_plugin.incompatible or found_plugin.broken or _is_disabled(policy, found_plugin)):
            running.setdefault(found_plugin.name, []).append(found_plugin)
    clashes: dict[str, str] = {}
    for name, rivals in running.items():
        if rivals[0] is found_plugins[0]:
            reason = f"{name!r} is the built-in plugin's name; rename the entry point"
            clashes |= {rival.id: reason for rival in rivals[1:]}
        elif len(rivals) > 1:
            owners = " and ".join(rival.distribution for rival in rivals)
            spare = ", ".join(f'"{rival.id}"' for rival in rivals[1:])
            reason = (
                f"a plugin named {name!r} is provided by {owners}, so none of them is used; "
                f"disable all but one, for example: [plugins] disabled = [{spare}]"
            )
            clashes |= {rival.id: reason for rival in rivals}
    return clashes


def _load(found_plugin: FoundPlugin, policy: PluginPolicy, registry: Registry) -> None:
    """Load one plugin and record its names; raise ``_SetAside`` if it cannot be used."""
    if _is_disabled(policy, found_plugin):
        raise _SetAside("disabled", f"{policy.source} disables it")
    if found_plugin.broken:
        raise _SetAside("broken", found_plugin.broken)
    if found_plugin.incompatible:
        raise _SetAside("incompatible", found_plugin.incompatible)
    manager = _attach(found_plugin, _contain(f"importing {found_plugin.module}", found_plugin.load))
    _configure(manager, found_plugin, policy)
    claims: list[Claim] = []
    for hook, kind in _REGISTERING.items():
        register = _Registering(hook, kind, found_plugin, claims)
        answer = _call(manager, hook, register=register)
        register.is_over = True
        if answer is not None:
            raise _SetAside("broken", f"{hook} must call register(...) and return nothing, not {safe_repr(answer)}")
    try:
        registry.add(claims)
    except ContestedNameError as error:
        raise _SetAside("conflict", str(error), error) from error
    except PluginError as error:
        raise _SetAside("broken", str(error), error) from error


def _attach(found_plugin: FoundPlugin, manifest: Any) -> pluggy.PluginManager:
    """Return a hook manager that holds this plugin alone; raise ``_SetAside`` if a hook of it is not as specified."""
    manager = pluggy.PluginManager("kvframe")
    manager.add_hookspecs(HookSpecs)
    _contain(f"reading the hooks of {found_plugin.module}", manager.register, manifest, name=found_plugin.id)
    callers, unmarked_names = _contain(f"reading the hooks of {found_plugin.module}", _read_hooks, manager, manifest)
    marked_names = {caller.name for caller in callers if not all(hook.optionalhook for hook in caller.get_hookimpls())}
    unknown = sorted((marked_names | unmarked_names) - set(_HOOKS))
    if unknown:
        raise _SetAside("broken", "; ".join(_explain_unknown_hook(name) for name in unknown))
    if unmarked_names:
        raise _SetAside("broken", f"{', '.join(sorted(unmarked_names))} lacks @hookimpl and would never be called")
    if not callers:
        raise _SetAside("broken", f"{found_plugin.module} implements no hook; hooks: {', '.join(_HOOKS)}")
    return manager


def _read_hooks(manager: pluggy.PluginManager, manifest: Any) -> tuple[list[pluggy.HookCaller], set[str]]:
    """Return the callers of a manifest's hooks, and the names of functions that look like hooks and are not marked."""
    unmarked_names = {
        name
        for name in dir(manifest)
        if name.startswith("kvframe_")
        and inspect.isroutine(getattr(manifest, name, None))
        and manager.parse_hookimpl_opts(manifest, name) is None
    }
    return manager.get_hookcallers(manifest) or [], unmarked_names


def _explain_unknown_hook(name: str) -> str:
    nearest = get_close_matches(name, _HOOKS, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"hooks: {', '.join(_HOOKS)}"
    return f"there is no hook named {name!r}; {hint}"


def _call(manager: pluggy.PluginManager, hook: str, **arguments: Any) -> Any:
    """Call one plugin's hook and return its answer, None if it has none."""
    answers = _contain(hook, getattr(manager.hook, hook), **arguments)
    return answers[0] if answers else None


def _contain(subject: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a plugin's code; raise ``_SetAside`` if it fails."""
    try:
        return call(subject, function, *args, **kwargs)
    except PluginError as error:
        raise _SetAside("broken", str(error), error.__cause__) from error


def _configure(manager: pluggy.PluginManager, found_plugin: FoundPlugin, policy: PluginPolicy) -> None:
    tables = [table for name, table in policy.settings.items() if is_called(found_plugin.id, name)]
    if tables and not manager.hook.kvframe_configure.get_hookimpls():
        raise StackError(f"{policy.source}: plugin.{found_plugin.name}: plugin {found_plugin.id} takes no settings")
    settings = {key: value for table in tables for key, value in table.items()}
    _call(manager, "kvframe_configure", settings=MappingProxyType(settings))


@attrs.define(eq=False)
class _Registering:
    """The ``register`` callback that one hook of one plugin gets."""

    hook: str
    kind: str
    plugin: FoundPlugin
    claims: list[Claim]
    is_over: bool = False

    def __call__(
        self,
        name: str,
        target: str | type,
        *,
        needs: str | Sequence[str] | None = None,
        install: str | None = None,
        needs_versions: str | Sequence[str] | None = None,
    ) -> None:
        """Record a claim; see ``kvframe.contract.hookspecs.Register``."""
        owner = self.plugin.distribution, self.plugin.id
        if self.is_over:
            raise PluginError(
                f"plugin {self.plugin.id} called register({safe_repr(name)}, ...) after its {self.hook} had "
                "returned; nothing was registered"
            )
        self.claims.append(Claim(self.kind, name, target, *owner, needs, install, needs_versions))
