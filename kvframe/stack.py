"""The stack: what an operator chose, read from one TOML file and checked before anything runs."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args, get_origin

import attrs
import cattrs
from cattrs.gen import make_dict_structure_fn, override

from kvframe.errors import ContestedNameError, StackError, UnknownNameError
from kvframe.plugins import PluginPolicy
from kvframe.registry import KINDS, Registry, canonical
from kvframe.specs import ITEM_BYTES

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?")
_UNITS = {"B": 1} | {
    f"{prefix}{infix}B": base**power
    for infix, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}


def parse_bytes(size: str | int) -> int:
    """Return a size in bytes.

    Args:
        size: ``"2GiB"``, ``"512 MB"``, ``"1.5GiB"``, or a number of bytes.

    Raises:
        StackError: ``size`` is no size, or less than one byte.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        num_bytes = size
    else:
        match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
        if match is None:
            raise StackError(f"{size!r} is no size; write a number of bytes, or one with a unit of {', '.join(_UNITS)}")
        num_bytes = int(float(match[1]) * _UNITS[match[2] or "B"])
    if num_bytes < 1:
        raise StackError(f"a size must be at least one byte, not {size!r}")
    return num_bytes


@attrs.frozen
class _Check:
    """What one key accepts; holds for a value from a file and for one given in Python alike."""

    expected: str
    accepts: Callable[[Any], bool]

    def __call__(self, instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        try:
            self.structure(value)
        except ValueError as error:
            raise StackError(f"{type(instance).__name__}.{attribute.name} {error}") from None

    def structure(self, value: Any, _: Any = None) -> Any:
        if not self.accepts(value):
            raise ValueError(f"must be {self.expected}, not {_shown(value)}")
        return value


def _shown(value: Any) -> str:
    names = {bool: "a boolean", int: "a whole number", float: "a number", str: "a string", list: "an array", dict: "a table"}
    return f"{value!r} ({names.get(type(value), type(value).__name__)})"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_size(value: Any) -> bool:
    try:
        return value == "auto" or parse_bytes(value) > 0
    except StackError:
        return False


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _is_owners(value: Any) -> bool:
    return _is_table(value) and all(
        kind in KINDS and _is_table(names) and all(isinstance(owner, str) for owner in names.values())
        for kind, names in value.items()
    )


def _one_of(*names: str) -> _Check:
    expected = f"one of {', '.join(map(repr, names))}" if len(names) > 1 else repr(names[0])
    return _Check(expected, lambda value: isinstance(value, str) and value in names)


_WHOLE = _Check("a whole number of at least 1", _is_whole)
_WHOLE_OR_NONE = _Check(_WHOLE.expected, lambda value: value is None or _is_whole(value))
_SWITCH = _Check("true or false", lambda value: isinstance(value, bool))
_NAME = _Check("a string that is not empty", lambda value: isinstance(value, str) and value != "")
_NAME_OR_NONE = _Check(_NAME.expected, lambda value: value is None or (isinstance(value, str) and value != ""))
_TABLE = _Check("a table", _is_table)
_TABLE_OF_TABLES = _Check("a table of tables", lambda value: _is_table(value) and all(map(_is_table, value.values())))
_NAMES = _Check(
    "an array of strings",
    lambda value: isinstance(value, list | tuple) and all(isinstance(name, str) for name in value),
)
_OWNERS = _Check(f"a table of {', '.join(KINDS)}, each a table of name = \"distribution\"", _is_owners)
_MEMORY = _Check("'auto', a number of bytes, or a size like '2GiB'", _is_size)
_DEVICE = _Check(
    "a device like 'cpu' or 'cuda:0'",
    lambda value: isinstance(value, str) and re.fullmatch(r"[a-z]+(:\d+)?", value) is not None,
)


@attrs.frozen(kw_only=True)
class CacheOptions:
    """The ``[cache]`` table.

    Attributes:
        memory: Bytes for the cache, as a number or like ``"2GiB"``; ``"auto"`` leaves it to the engine.
        block_size: Tokens per block.
        hybrid: Whether each type keeps only what it needs; if not, every layer keeps every token.
        dtype: Element type of stored keys and values; ``"auto"`` is the model's.
        prefix_caching: Whether requests reuse the blocks of a common prefix.
        preemption: What happens to a request that must give up its memory.
    """

    memory: str | int = attrs.field(default="auto", validator=_MEMORY)
    block_size: int = attrs.field(default=16, validator=_WHOLE)
    hybrid: bool = attrs.field(default=True, validator=_SWITCH)
    dtype: str = attrs.field(default="auto", validator=_one_of("auto", *ITEM_BYTES))
    prefix_caching: bool = attrs.field(default=True, validator=_SWITCH)
    preemption: str = attrs.field(default="recompute", validator=_one_of("recompute"))

    @property
    def memory_bytes(self) -> int | None:
        """``memory`` in bytes; None for ``"auto"``."""
        return None if self.memory == "auto" else parse_bytes(self.memory)


@attrs.frozen(kw_only=True)
class EngineOptions:
    """The ``[engine]`` table.

    Attributes:
        max_num_seqs: The most requests that run at once.
        max_num_batched_tokens: The most tokens that one step computes.
        max_model_len: The most tokens of a request, prompt and output; None for the model's own limit.
        device: Where the model runs (``"cpu"``, ``"cuda:0"``).
        dtype: The model's element type.
        self_check: Whether a model's packed run is compared with its plain one before it serves.
    """

    max_num_seqs: int = attrs.field(default=64, validator=_WHOLE)
    max_num_batched_tokens: int = attrs.field(default=2048, validator=_WHOLE)
    max_model_len: int | None = attrs.field(default=None, validator=_WHOLE_OR_NONE)
    device: str = attrs.field(default="cpu", validator=_DEVICE)
    dtype: str = attrs.field(default="float32", validator=_one_of("float64", "float32", "float16", "bfloat16"))
    self_check: bool = attrs.field(default=True, validator=_SWITCH)


@attrs.frozen
class WrapperUse:
    """One link of a wrapper chain: a string, or a table with ``name`` and the wrapper's options.

    Attributes:
        name: The wrapper's registered name.
        options: Its parameters.
    """

    name: str = attrs.field(validator=_NAME)
    options: Mapping[str, Any] = attrs.field(factory=dict, validator=_TABLE)


@attrs.frozen(kw_only=True)
class Rule:
    """One ``[[rules]]`` table: which layers, and what holds for them.

    Attributes:
        kind: Layers whose cache spec has this registered name; None for any.
        layers: Layers whose name matches this pattern (``"model.layers.*"``); None for any.
        spec: Options that override those of the layers' cache specs.
        wrappers: Their wrapper chain; None leaves it to other rules.
        backend: Their backend, ``"auto"`` to choose; None leaves it to other rules.
    """

    kind: str | None = attrs.field(default=None, validator=_NAME_OR_NONE)
    layers: str | None = attrs.field(default=None, validator=_NAME_OR_NONE)
    spec: Mapping[str, Any] = attrs.field(factory=dict, validator=_TABLE)
    wrappers: tuple[WrapperUse, ...] | None = None
    backend: str | None = attrs.field(default=None, validator=_NAME_OR_NONE)

    def __attrs_post_init__(self) -> None:
        """Refuse a rule that names no layers: it would silently hold for all."""
        if self.kind is None and self.layers is None:
            raise StackError("a rule needs kind or layers, to say which layers it is for (layers = \"*\": all)")

    def matches(self, layer_name: str, kind: str) -> bool:
        """Return whether the rule is for this layer."""
        return self.kind in (None, kind) and (self.layers is None or fnmatchcase(layer_name, self.layers))


@attrs.frozen
class ResolvedRule:
    """What all rules together say of one layer.

    Attributes:
        spec: Options that override those of its cache spec.
        wrappers: Its wrapper chain.
        backend: Its backend; ``"auto"`` to choose.
    """

    spec: Mapping[str, Any]
    wrappers: tuple[WrapperUse, ...]
    backend: str


@attrs.frozen(kw_only=True)
class Stack:
    """Everything an operator can choose. The default stack is what runs where nothing is chosen.

    Attributes:
        plugins: The ``[plugins]`` table and each plugin's own ``[plugin.<name>]``.
        cache: The ``[cache]`` table.
        engine: The ``[engine]`` table.
        rules: The ``[[rules]]``, in order.
        source: Where the stack was read, for errors.
    """

    plugins: PluginPolicy = attrs.field(factory=PluginPolicy)
    cache: CacheOptions = attrs.field(factory=CacheOptions)
    engine: EngineOptions = attrs.field(factory=EngineOptions)
    rules: tuple[Rule, ...] = ()
    source: str = "stack"

    @classmethod
    def from_file(cls, path: str | Path) -> Stack:
        """Read a stack file; raises ``StackError`` if it cannot be read or anything in it is wrong."""
        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise StackError(f"{path}: the stack file cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise StackError(f"{path}: not valid TOML: {error}") from error
        return cls.from_mapping(data, str(path))

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], source: str = "stack") -> Stack:
        """Check the content of a stack file.

        Args:
            data: The file's tables.
            source: Where they come from, for errors.

        Raises:
            StackError: One, naming every key that is unknown or has a wrong value, and what is right.
        """
        try:
            file = _converter.structure(data, _StackFile)
        except Exception as error:
            raise _stack_error(source, list(_problems(error, ""))) from error
        policy = PluginPolicy(
            disabled=file.plugins.disabled,
            required=file.plugins.required,
            owners=file.plugins.owners,
            settings=file.plugin,
            source=source,
        )
        return cls(plugins=policy, cache=file.cache, engine=file.engine, rules=file.rules, source=source)

    def rule_for(self, layer_name: str, kind: str) -> ResolvedRule:
        """Return what the rules say of a layer; a later rule wins, key by key and spec option by spec option.

        Args:
            layer_name: The layer's name.
            kind: The registered name of its cache spec.
        """
        spec: dict[str, Any] = {}
        wrappers: tuple[WrapperUse, ...] = ()
        backend = "auto"
        for rule in self.rules:
            if rule.matches(layer_name, kind):
                spec |= rule.spec
                wrappers = wrappers if rule.wrappers is None else rule.wrappers
                backend = backend if rule.backend is None else rule.backend
        return ResolvedRule(spec, wrappers, backend)

    def check_names(self, registry: Registry) -> None:
        """Check every name against what the plugins registered; imports no class but the specs that rules set up.

        Args:
            registry: The registry of ``load_plugins(stack.plugins)``.

        Raises:
            StackError: One, naming every key with an unknown name, what exists and the nearest match.
        """
        problems = [*_owner_problems(self.plugins, registry)]
        for index, rule in enumerate(self.rules):
            named = [("backend", registry.backends, rule.backend)] if rule.backend not in (None, "auto") else []
            named += [("kind", registry.specs, rule.kind)] if rule.kind else []
            named += [
                (f"wrappers[{place}]", registry.wrappers, wrapper.name)
                for place, wrapper in enumerate(rule.wrappers or ())
            ]
            for key, catalogue, name in named:
                try:
                    catalogue.get(str(name))
                except (UnknownNameError, ContestedNameError) as error:
                    problems.append(f"rules[{index}].{key}: {error}")
        if problems:
            raise _stack_error(self.source, problems)


def _owner_problems(policy: PluginPolicy, registry: Registry) -> Iterator[str]:
    for kind, choices in policy.owners.items():
        catalogue = registry.catalogues[kind]
        for name, owner in choices.items():
            claims = catalogue.claims(name)
            if not claims:
                known = {entry.name for entry in catalogue.claims()}
                yield f"plugins.owners.{kind}.{name}: {UnknownNameError(catalogue.label, name, known)}"
            elif canonical(owner) not in {canonical(entry.owner) for entry in claims}:
                wrong = UnknownNameError("owner", owner, {entry.owner for entry in claims})
                yield f"plugins.owners.{kind}.{name}: {wrong}"


# --- from the file's tables to values --------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class _PluginsTable:
    disabled: tuple[str, ...] = attrs.field(default=(), validator=_NAMES)
    required: tuple[str, ...] = attrs.field(default=(), validator=_NAMES)
    owners: Mapping[str, Mapping[str, str]] = attrs.field(factory=dict, validator=_OWNERS)


@attrs.frozen(kw_only=True)
class _StackFile:
    plugins: _PluginsTable = attrs.field(factory=_PluginsTable)
    plugin: Mapping[str, Mapping[str, Any]] = attrs.field(factory=dict, validator=_TABLE_OF_TABLES)
    cache: CacheOptions = attrs.field(factory=CacheOptions)
    engine: EngineOptions = attrs.field(factory=EngineOptions)
    rules: tuple[Rule, ...] = ()


def _make_table_hook(table: type) -> Callable[[Any, Any], Any]:
    checks = {
        field.name: override(struct_hook=field.validator.structure)
        for field in attrs.fields(table)
        if isinstance(field.validator, _Check)
    }
    structure = make_dict_structure_fn(table, _converter, **checks)  # type: ignore[arg-type]
    return lambda value, _: structure(_TABLE.structure(value), _)


def _structure_tuple(value: Any, kind: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"must be an array, not {_shown(value)}")
    return tuple(_converter.structure(value, list[get_args(kind)[0]]))  # type: ignore[misc]


def _structure_wrapper(value: Any, _: Any) -> WrapperUse:
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        return WrapperUse(value["name"], {key: option for key, option in value.items() if key != "name"})
    return WrapperUse(_Check("a wrapper's name, or a table of its name and options", _is_text).structure(value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


_converter = cattrs.Converter(forbid_extra_keys=True)
_converter.register_structure_hook_factory(attrs.has, _make_table_hook)
_converter.register_structure_hook_func(lambda kind: get_origin(kind) is tuple, _structure_tuple)
_converter.register_structure_hook(WrapperUse, _structure_wrapper)


def _problems(error: Exception, path: str) -> Iterator[str]:
    """Walk what cattrs found wrong; yields ``key.path: sentence`` for each."""
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        known = [field.name for field in attrs.fields(error.cl)]
        for key in sorted(error.extra_fields):
            yield f"{path}{'.' if path else ''}{key}: {UnknownNameError('key', key, known)}"
    elif isinstance(error, cattrs.ClassValidationError):
        named, rest = error.group_exceptions()
        for part, note in named:
            yield from _problems(part, f"{path}{'.' if path else ''}{note.name}")
        for part in rest:
            yield from _problems(part, path)
    elif isinstance(error, cattrs.IterableValidationError):
        for part, note in error.group_exceptions()[0]:
            yield from _problems(part, f"{path}[{note.index}]")
    else:
        yield f"{path} {error}" if path else str(error)


def _stack_error(source: str, problems: list[str]) -> StackError:
    if len(problems) == 1:
        return StackError(f"{source}: {problems[0]}")
    return StackError("\n  ".join([f"{source}: {len(problems)} problems", *problems]))
