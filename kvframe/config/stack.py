"""The stack: what an operator chose, read from one TOML file and checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import attrs

from kvframe.config.choices import UNREGISTERED, check_options, check_order
from kvframe.config.options import (
    AUTO,
    DISK,
    CacheOptions,
    EngineOptions,
    LimitOptions,
    ModelOptions,
    ResolvedRule,
    Rule,
    Use,
    uses_in,
)
from kvframe.contract.errors import (
    ContestedNameError,
    FileError,
    StackError,
    UnknownNameError,
    WrapperError,
    listed,
    shorten,
    shown,
)
from kvframe.contract.files import read_toml
from kvframe.contract.sizes import parse_bytes
from kvframe.loading.claims import canonical
from kvframe.loading.plugins import PluginPolicy
from kvframe.loading.registry import Registry

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

    @property
    def page_stores(self) -> tuple[Use, ...]:
        """The page stores, in the order in which they are asked."""
        disk = self.cache.disk
        disk_uses = () if disk is None else (Use(DISK, disk, origin=f"{self.source}: cache.disk"),)
        return (*disk_uses, *self.cache.stores)

    def with_options(self, **tables: Mapping[str, Any]) -> Stack:
        """Return the stack with values of a command line in place of its own; None replaces nothing.

        ``tables`` are the values by key, of the tables ``model``, ``limits`` and ``cache``. Raises ``StackError`` for a
        wrong value; the error names the option of the command line, such as ``--memory``.
        """
        changes: dict[str, Any] = {name: _over(getattr(self, name), values) for name, values in tables.items()}
        return attrs.evolve(self, **changes)

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
        from kvframe.config.stack_file import problems_of, read_tables  # imports cattrs

        try:
            tables = read_tables(data)
        except Exception as error:
            raise _stack_error(source, problems_of(error)) from error
        policy = PluginPolicy(
            disabled=tuple(tables.plugins.disabled),
            required=tuple(tables.plugins.required),
            owners=attrs.asdict(tables.plugins.owners, recurse=False),
            settings=tables.plugin,
            source=source,
        )
        return cls(
            plugins=policy,
            cache=_with_origins(tables.cache, f"{source}: cache"),
            model=_with_origins(tables.model, f"{source}: model"),
            limits=tables.limits,
            engine=_with_origins(tables.engine, f"{source}: engine"),
            rules=tuple(_with_origins(rule, f"{source}: rules[{index}]") for index, rule in enumerate(tables.rules)),
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
        new_kinds = {name: self.rule_for(name, kind).kind or kind for name, kind in kinds.items()}
        problems = [
            f"rules[{index}] ({rule}) is for no layer of {model}{_nearest_layers(rule, kinds)}; if the stack is for "
            "other models too, give the rule optional = true"
            for index, rule in enumerate(self.rules)
            if not rule.optional and not any(rule.matches(*item) for item in (*kinds.items(), *new_kinds.items()))
        ]
        if problems:
            raise _stack_error(self.source, problems)

    def key_of_option(self, option: str, layer: str, kind: str) -> str | None:
        """Return the key that sets an option of a layer's cache spec; None if no key does."""
        for index, rule in reversed([*enumerate(self.rules)]):
            if option in rule.spec and rule.matches(layer, kind):
                return f"{self.source}: rules[{index}].spec.{shorten(option)}"
        return None

    def check(self, registry: Registry) -> None:
        """Check the names in the stack against the registered names, then their options and the order of wrappers.

        The classes that have options are imported, and the wrappers of a chain if it has several. One ``StackError``
        names all wrong keys; ``PluginError`` is raised if one of several wrappers cannot be imported.
        """
        self.check_names(registry)
        problems = []
        for key, kind, use in self._uses():
            try:
                check_options(kind, attrs.evolve(use, origin=key), registry)
            except StackError as error:
                problems.append(str(error))
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
        problems = [
            *_owner_problems(self.plugins, registry),
            *(
                f'rules[{index}].backend: "{AUTO.name}" has no options; name the backend they are for'
                for index, rule in enumerate(self.rules)
                if rule.backend is not None and rule.backend.name == AUTO.name and rule.backend != AUTO
            ),
        ]
        for key, kind, use in self._uses():
            try:
                if (kind, use.name) not in UNREGISTERED:
                    registry.catalogues[kind].get(use.name)
            except (UnknownNameError, ContestedNameError) as error:
                problems.append(f"{key}: {error}")
        if problems:
            raise _stack_error(self.source, problems)

    def _uses(self) -> Iterator[tuple[str, str, Use]]:
        """Yield every name in the stack: its key, its kind, and the name with its options."""
        for index, rule in enumerate(self.rules):
            key = f"rules[{index}]"
            if rule.kind is not None:
                yield f"{key}.kind", "spec", Use(rule.kind)
            if "kind" in rule.spec:
                yield f"{key}.spec.kind", "spec", Use(rule.spec["kind"])
            yield from ((f"{key}.{name}", kind, use) for name, kind, use in uses_in(rule) if use.name != AUTO.name)
        for table in ("cache", "engine", "model"):
            yield from ((f"{table}.{name}", kind, use) for name, kind, use in uses_in(getattr(self, table)))
        if self.cache.disk is not None:
            yield "cache.disk", "page_store", self.page_stores[0]


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
    names = [name for name, kind in kinds.items() if rule.kind in (None, kind)]
    nearest = get_close_matches(shorten(rule.layers or ""), names[:_MAX_NEAREST], n=3, cutoff=0.0)
    return f"; the nearest names are {', '.join(map(repr, nearest))}"


def _owner_problems(policy: PluginPolicy, registry: Registry) -> Iterator[str]:
    for kind, choices in policy.owners.items():
        catalogue = registry.catalogues[kind]
        for name, owner in choices.items():
            claims = catalogue.claims(name)
            if not claims:
                known_names = {claim.name for claim in catalogue.claims()}
                yield f"plugins.owners.{kind}.{name}: {UnknownNameError(catalogue.label, name, known_names)}"
            elif canonical(owner) not in {canonical(claim.owner) for claim in claims}:
                problem = UnknownNameError("owner", owner, {claim.owner for claim in claims})
                yield f"plugins.owners.{kind}.{name}: {problem}"


def _over(options: _Options, arguments: Mapping[str, Any]) -> _Options:
    """Put the values of a command line over a table's options."""
    values = {key: value for key, value in arguments.items() if value is not None}
    checks: Mapping[str, Any] = {field.name: field.validator for field in attrs.fields(type(options))}
    for key, value in values.items():
        if checks[key] is not None and not checks[key].accepts(value):
            raise StackError(f"--{key.replace('_', '-')} must be {checks[key].expected}, not {shown(value)}")
    return attrs.evolve(options, **values)


_Table = TypeVar("_Table", CacheOptions, ModelOptions, EngineOptions, Rule)


def _with_origins(table: _Table, origin: str) -> _Table:
    """Return a table in which every ``Use`` has the key that it was read from."""

    def with_origin(value: Any, key: str) -> Any:
        if isinstance(value, Use):
            return attrs.evolve(value, origin=f"{origin}.{key}")
        if isinstance(value, tuple):
            return tuple(with_origin(item, f"{key}[{index}]") for index, item in enumerate(value))
        return value

    values = {field.name: getattr(table, field.name) for field in attrs.fields(type(table))}
    changes = {key: new for key, value in values.items() if (new := with_origin(value, key)) is not value}
    return attrs.evolve(table, **changes) if changes else table


def _stack_error(source: str, problems: Iterable[str]) -> StackError:
    """Return one error for all problems, or for the first ones: each needs a slow search for the nearest name."""
    first_problems = [*islice(problems, _MAX_PROBLEMS + 1)]
    if len(first_problems) == 1:
        return StackError(f"{source}: {first_problems[0]}")
    is_all = len(first_problems) <= _MAX_PROBLEMS
    count = f"{len(first_problems)} problems" if is_all else f"more than {_MAX_PROBLEMS} problems"
    return StackError("\n  ".join([f"{source}: {count}", *first_problems[:_MAX_PROBLEMS], *([] if is_all else ["…"])]))
