"""The stack: what an operator chose, read from one TOML file and checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_args, get_origin

import attrs
import cattrs
from cattrs.gen import make_dict_structure_fn, override

from kvframe.config.options import (
    AUTO,
    CacheOptions,
    EngineOptions,
    LimitOptions,
    ModelOptions,
    ResolvedRule,
    Rule,
    Use,
)
from kvframe.config.wrapper_order import check_order
from kvframe.contract.errors import (
    ContestedNameError,
    FileError,
    StackError,
    UnknownNameError,
    WrapperError,
    listed,
    nearest_of,
    shorten,
    shown,
)
from kvframe.contract.eviction import LRU
from kvframe.contract.files import read_toml
from kvframe.contract.formats import PLAIN
from kvframe.contract.sizes import parse_bytes
from kvframe.loading.checks import TABLE, TABLE_OF_TEXTS, TABLES, TEXT, TEXTS, Check, describe
from kvframe.loading.claims import KINDS, canonical
from kvframe.loading.plugins import PluginPolicy
from kvframe.loading.registry import Catalogue, Registry

__all__ = [
    "CacheOptions",
    "EngineOptions",
    "LimitOptions",
    "ModelOptions",
    "ResolvedRule",
    "Rule",
    "Stack",
    "Use",
    "parse_bytes",
]


_Options = TypeVar("_Options", CacheOptions, ModelOptions, LimitOptions)
_NOTHING: Mapping[str, Any] = MappingProxyType({})

_MAX_NEAREST = 500
"""The most layers whose names are compared with a rule's pattern."""

_MAX_PROBLEMS = 10
"""The most problems that one error lists."""


@attrs.frozen(kw_only=True)
class Stack:
    """All choices of an operator. The default stack holds for everything that is not chosen.

    Attributes:
        plugins: The ``[plugins]`` table and each plugin's own ``[plugin.<name>]``.
        model: The ``[model]`` table.
        limits: The ``[limits]`` table.
        cache: The ``[cache]`` table.
        engine: The ``[engine]`` table.
        rules: The ``[[rules]]``, in order.
        source: Where the stack was read, for errors.
    """

    plugins: PluginPolicy = attrs.field(factory=PluginPolicy)
    model: ModelOptions = attrs.field(factory=ModelOptions)
    limits: LimitOptions = attrs.field(factory=LimitOptions)
    cache: CacheOptions = attrs.field(factory=CacheOptions)
    engine: EngineOptions = attrs.field(factory=EngineOptions)
    rules: tuple[Rule, ...] = ()
    source: str = "stack"

    def with_options(
        self,
        *,
        model: Mapping[str, Any] = _NOTHING,
        limits: Mapping[str, Any] = _NOTHING,
        cache: Mapping[str, Any] = _NOTHING,
    ) -> Stack:
        """Return the stack with values of a command line in place of its own; None replaces nothing.

        Raises ``StackError`` for a wrong value; the error names the option of the command line, such as ``--memory``.
        """
        return attrs.evolve(
            self, model=_over(self.model, model), limits=_over(self.limits, limits), cache=_over(self.cache, cache)
        )

    def with_device(self) -> Stack:
        """Return a stack that names a device: its own; otherwise the first GPU, or the CPU if there is none."""
        if self.model.device != AUTO.name:
            return self
        return attrs.evolve(self, model=attrs.evolve(self.model, device="cuda" if has_gpu() else "cpu"))

    def check_device(self) -> None:
        """Raise ``StackError`` for a device that cannot be used, before a model is loaded."""
        import torch

        try:
            torch.empty(0, device=self.model.device)
        except (RuntimeError, AssertionError) as error:  # a build of torch without the device asserts
            reason = str(error).strip().splitlines()[0]
            raise StackError(f"{self.source}: model.device {self.model.device!r} cannot be used: {reason}") from error

    @classmethod
    def from_file(cls, path: str | Path) -> Stack:
        """Read a stack file; raise ``StackError`` if it cannot be read or anything in it is wrong."""
        try:
            data = read_toml(Path(path))
        except FileError as error:
            raise StackError(f"{path}: the stack file {error}") from error
        return cls.from_mapping(data, str(path))

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], source: str = "stack") -> Stack:
        """Check the content of a stack file; one ``StackError`` names all unknown keys and wrong values."""
        try:
            file = _converter.structure(data, _StackFile)
        except Exception as error:
            raise _stack_error(source, _problems(error)) from error
        policy = PluginPolicy(
            disabled=tuple(file.plugins.disabled),
            required=tuple(file.plugins.required),
            owners=attrs.asdict(file.plugins.owners, recurse=False),
            settings=file.plugin,
            source=source,
        )
        return cls(
            plugins=policy,
            cache=_with_places(file.cache, f"{source}: cache"),
            model=_with_places(file.model, f"{source}: model"),
            limits=file.limits,
            engine=file.engine,
            rules=tuple(_with_places(rule, f"{source}: rules[{index}]") for index, rule in enumerate(file.rules)),
            source=source,
        )

    def rule_for(self, layer_name: str, kind: str) -> ResolvedRule:
        """Return the rules' choices for a layer; a later rule wins, key by key and spec option by spec option."""
        spec: dict[str, Any] = {}
        wrappers: tuple[Use, ...] | None = None
        backend = AUTO
        for rule in self.rules:
            if rule.matches(layer_name, kind):
                spec |= rule.spec
                wrappers = wrappers if rule.wrappers is None else rule.wrappers
                backend = backend if rule.backend is None else rule.backend
        return ResolvedRule(spec, wrappers, backend, spec.pop("kind", None))

    def check_layers(self, model: str, kinds: Mapping[str, str]) -> None:
        """Raise ``StackError`` if a rule that is not optional is for no layer of a model.

        ``kinds`` are the registered names of the layers' cache specs. A rule may also be for the kind that another rule
        gives a layer.
        """
        given = {name: self.rule_for(name, kind).kind or kind for name, kind in kinds.items()}
        problems = [
            f"rules[{index}] ({rule}) is for no layer of {model}{_nearest_layers(rule, kinds)}; if the stack is for "
            "other models too, give the rule optional = true"
            for index, rule in enumerate(self.rules)
            if not rule.optional and not any(rule.matches(*each) for each in (*kinds.items(), *given.items()))
        ]
        if problems:
            raise _stack_error(self.source, problems)

    def place_of_option(self, option: str, layer: str, kind: str) -> str | None:
        """Return the key that sets an option of a layer's cache spec; None if no key does."""
        for index, rule in reversed([*enumerate(self.rules)]):
            if option in rule.spec and rule.matches(layer, kind):
                return f"{self.source}: rules[{index}].spec.{shorten(option)}"
        return None

    def check(self, registry: Registry) -> None:
        """Check the names in the stack against the registered names, then the order of its wrapper chains.

        The wrappers of a chain are imported if it has several; nothing else is imported. One ``StackError`` names all
        wrong keys; ``PluginError`` is raised if a wrapper cannot be imported.
        """
        self.check_names(registry)
        problems = []
        for index, rule in enumerate(self.rules):
            if rule.wrappers is not None and len(rule.wrappers) > 1:
                try:
                    check_order([registry.wrappers.load(wrapper.name) for wrapper in rule.wrappers])
                except WrapperError as error:
                    problems.append(f"rules[{index}].wrappers: {error}")
        if problems:
            raise _stack_error(self.source, problems)

    def check_names(self, registry: Registry) -> None:
        """Check every name against the registered ones; one ``StackError`` lists all problems. Nothing is imported."""
        problems = list(_owner_problems(self.plugins, registry))
        for index, rule in enumerate(self.rules):
            named: list[tuple[str, Catalogue, str | None]] = [
                ("kind", registry.specs, rule.kind),
                ("spec.kind", registry.specs, rule.spec.get("kind")),
            ]
            if rule.backend is not None and rule.backend.name != AUTO.name:
                named.append(("backend", registry.backends, rule.backend.name))
            elif rule.backend not in (None, AUTO):
                problems.append(f'rules[{index}].backend: "{AUTO.name}" has no options; name the backend they are for')
            for place, wrapper in enumerate(rule.wrappers or ()):
                named.append((f"wrappers[{place}]", registry.wrappers, wrapper.name))
            problems += [f"rules[{index}].{problem}" for problem in _unknown(named)]
        if self.cache.format is not None and self.cache.format.name != PLAIN.name:
            problems += _unknown([("cache.format", registry.formats, self.cache.format.name)])
        if self.cache.eviction.name != LRU.name:
            problems += _unknown([("cache.eviction", registry.eviction_policies, self.cache.eviction.name)])
        stores = [(use.place.partition(": ")[2] or use.place, use.name) for use in self.cache.all_stores]
        problems += _unknown([(key, registry.page_stores, name) for key, name in stores])
        if self.model.prefill_skipping is not None:
            name = self.model.prefill_skipping.name
            problems += _unknown([("model.prefill_skipping", registry.wrappers, name)])
        if self.model.drafts is not None:
            problems += _unknown([("model.drafts", registry.proposers, self.model.drafts.name)])
        if problems:
            raise _stack_error(self.source, problems)


def has_gpu() -> bool:
    """Return whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def _nearest_layers(rule: Rule, kinds: Mapping[str, str]) -> str:
    """Return a text about the layers that a rule may have been meant for."""
    if not kinds:
        return ", which has none"
    if rule.kind is not None and rule.kind not in kinds.values():
        return f", whose layers are of the kind {listed(sorted(set(map(repr, kinds.values()))))}"
    named = [name for name, kind in kinds.items() if rule.kind in (None, kind)]
    names = get_close_matches(shorten(rule.layers or ""), named[:_MAX_NEAREST], n=3, cutoff=0.0)
    return f"; the nearest names are {', '.join(map(repr, names))}"


def _unknown(named: Sequence[tuple[str, Catalogue, str | None]]) -> Iterator[str]:
    for key, catalogue, name in named:
        try:
            if name is not None:
                catalogue.get(name)
        except (UnknownNameError, ContestedNameError) as error:
            yield f"{key}: {error}"


def _owner_problems(policy: PluginPolicy, registry: Registry) -> Iterator[str]:
    for kind, choices in policy.owners.items():
        catalogue = registry.catalogues[kind]
        for name, owner in choices.items():
            claims = catalogue.claims(name)
            if not claims:
                known = {claim.name for claim in catalogue.claims()}
                yield f"plugins.owners.{kind}.{name}: {UnknownNameError(catalogue.label, name, known)}"
            elif canonical(owner) not in {canonical(claim.owner) for claim in claims}:
                wrong = UnknownNameError("owner", owner, {claim.owner for claim in claims})
                yield f"plugins.owners.{kind}.{name}: {wrong}"


# --- from the file's tables to values --------------------------------------------------------------------------------


def _over(options: _Options, given: Mapping[str, Any]) -> _Options:
    """Put values over a table's options."""
    values = {key: value for key, value in given.items() if value is not None}
    checks: Mapping[str, Any] = {field.name: field.validator for field in attrs.fields(type(options))}
    for key, value in values.items():
        if checks[key] is not None and not checks[key].accepts(value):
            raise StackError(f"--{key.replace('_', '-')} must be {checks[key].expected}, not {shown(value)}")
    return attrs.evolve(options, **values)


_texts = partial(attrs.field, factory=dict, validator=TABLE_OF_TEXTS, type=Mapping[str, str])
_OwnersTable: Any = attrs.make_class("_OwnersTable", {kind: _texts() for kind in KINDS}, frozen=True, kw_only=True)


@attrs.frozen(kw_only=True)
class _PluginsTable:
    disabled: tuple[str, ...] = attrs.field(default=(), validator=TEXTS)
    required: tuple[str, ...] = attrs.field(default=(), validator=TEXTS)
    owners: _OwnersTable = attrs.field(factory=_OwnersTable)


@attrs.frozen(kw_only=True)
class _StackFile:
    plugins: _PluginsTable = attrs.field(factory=_PluginsTable)
    plugin: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict, validator=TABLES)
    model: ModelOptions = attrs.field(factory=ModelOptions)
    limits: LimitOptions = attrs.field(factory=LimitOptions)
    cache: CacheOptions = attrs.field(factory=CacheOptions)
    engine: EngineOptions = attrs.field(factory=EngineOptions)
    rules: tuple[Rule, ...] = ()


_Table = TypeVar("_Table", CacheOptions, ModelOptions, Rule)


def _with_places(table: _Table, place: str) -> _Table:
    """Return a table in which every ``Use`` has the key that it was given by."""

    def placed(value: Any, key: str) -> Any:
        if isinstance(value, Use):
            return attrs.evolve(value, place=f"{place}.{key}")
        if isinstance(value, tuple):
            return tuple(placed(each, f"{key}[{index}]") for index, each in enumerate(value))
        return value

    values = {field.name: getattr(table, field.name) for field in attrs.fields(type(table))}
    changed = {key: new for key, value in values.items() if (new := placed(value, key)) is not value}
    return attrs.evolve(table, **changed) if changed else table


def _checked(check: Check, value: Any, _: Any) -> Any:
    return check.checked(value)


def _make_table_hook(table: type[Any]) -> Callable[[Any, Any], Any]:
    checks = {
        field.name: override(struct_hook=partial(_checked, field.validator))
        for field in attrs.fields(table)
        if isinstance(field.validator, Check)
    }
    # attrs' own validators would not know the key's path; these overrides do.
    make: Any = make_dict_structure_fn
    structure = make(table, _converter, _cattrs_forbid_extra_keys=True, **checks)
    return lambda value, kind: structure(TABLE.checked(value), kind)


def _is_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple


def _structure_tuple(value: Any, kind: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        hint = "; each table of an array starts with double brackets: [[rules]]" if isinstance(value, Mapping) else ""
        raise ValueError(f"must be an array, not {describe(value)}{hint}")
    items: Any = list[get_args(kind)[0]]  # type: ignore[misc]
    return tuple(_converter.structure(value, items))


def _structure_use(value: Any, _: Any) -> Use:
    if isinstance(value, Mapping):
        if not isinstance(value.get("name"), str):
            raise ValueError('needs a name beside its options: name = "..."')
        return Use(value["name"], {key: option for key, option in value.items() if key != "name"})
    return Use(_NAME.checked(value))


_TABLE_OF = {
    field.name: table
    for table, options in (
        ("engine", EngineOptions),
        ("cache", CacheOptions),
        ("limits", LimitOptions),
        ("model", ModelOptions),
    )
    for field in attrs.fields(options)
}
"""The table of each key; a key of several tables is the model's."""
_NAME = Check("a name, or a table of a name and options", TEXT.accepts)
_converter = cattrs.Converter()
_converter.register_structure_hook_factory(attrs.has, _make_table_hook)
_converter.register_structure_hook_func(_is_tuple, _structure_tuple)
_converter.register_structure_hook(Use, _structure_use)


def _problems(error: Exception, path: str = "") -> Iterator[str]:
    """Yield one sentence for each key with an error of cattrs; the sentence begins with the key's path."""
    prefix = f"{path}." if path else ""
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        known = [field.name for field in attrs.fields(error.cl)]
        for key in sorted(error.extra_fields):
            yield f"{prefix}{shorten(key)}: {UnknownNameError('key', key, known)}{_of_another_table(key, known)}"
    elif isinstance(error, cattrs.ClassValidationError):
        fields, whole = error.group_exceptions()
        for part, note in fields:
            yield from _problems(part, f"{prefix}{note.name}")
        for part in whole:
            yield from _problems(part, path)
    elif isinstance(error, cattrs.IterableValidationError):
        for part, place in error.group_exceptions()[0]:
            yield from _problems(part, f"{path}[{place.index}]")
    else:
        yield f"{path} {error}" if path else str(error)


def _of_another_table(key: str, known: Sequence[str]) -> str:
    """Return a hint at the table that a key was meant for; empty if its own table has one that is as near."""
    if nearest_of(key, known) is not None:
        return ""
    nearest = key if key in _TABLE_OF else nearest_of(key, list(_TABLE_OF))
    return "" if nearest is None else f"; did you mean {nearest!r} of [{_TABLE_OF[nearest]}]?"


def _stack_error(source: str, problems: Iterable[str]) -> StackError:
    """Return one error for all problems, or for the first ones: each needs a slow search for the nearest name."""
    found = [*islice(problems, _MAX_PROBLEMS + 1)]
    if len(found) == 1:
        return StackError(f"{source}: {found[0]}")
    is_all = len(found) <= _MAX_PROBLEMS
    count = f"{len(found)} problems" if is_all else f"more than {_MAX_PROBLEMS} problems"
    return StackError("\n  ".join([f"{source}: {count}", *found[:_MAX_PROBLEMS], *([] if is_all else ["…"])]))
