"""Every hook and method that kvframe calls at set-up, failing in every way: only its plugin fails, and by name.

The hooks and methods are found by introspection. A new one of the contract must be added here: to those that are called
at set-up, with the call that reaches it, or to those of a step.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import attrs
import pytest
import torch
from kvframe_engine.assembly import find_page_copier

from kvframe import Stack, load_plugins
from kvframe.attention.copies import CopyScratch
from kvframe.attention.group import form_groups
from kvframe.attention.layer import AttentionLayer, GroupStep
from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.builtin.torch_reference import TorchReferenceBackend
from kvframe.config.choices import make_part
from kvframe.contract import hookimpl
from kvframe.contract.backend import AttentionBackend, AttentionMetadataBuilder
from kvframe.contract.description import LayerDescription, ModelDescription
from kvframe.contract.errors import KVFrameError
from kvframe.contract.eviction import EvictionPolicy
from kvframe.contract.formats import KVFormat, PlainFormat
from kvframe.contract.hookspecs import HookSpecs
from kvframe.contract.model import ModelAdapter, ModelInMemory
from kvframe.contract.specs import KVCacheSpec, LayerSpec, QuerySpec
from kvframe.contract.wrapper import FieldUse, MetadataWrapper
from kvframe.loading.registry import Registry
from kvframe.planning.groups import group_layers
from kvframe.planning.layer_specs import make_layer_specs
from kvframe.planning.recognise import adopt_model, find_adapter, find_model
from kvframe.selection.choice import Choice
from kvframe.selection.select import select_backends
from tests.covering import cover_values
from tests.loading.fake_distributions import MANIFEST, FakeSite, registers

HOOKS = [name for name in vars(HookSpecs) if name.startswith("kvframe_")]

FAILURES = {
    "an exception": "ValueError('boom')",
    "an exit": "SystemExit('boom')",
    "a cancellation": "asyncio.CancelledError('boom')",
    "a generator's exit": "GeneratorExit('boom')",
    "an error of its own": "Own('boom')",
    "an error without a text": "Mute('boom')",
    "a recursion": "RecursionError('boom')",
    "no memory": "MemoryError('boom')",
}
ERRORS = """
import asyncio
class Own(BaseException): pass
class Mute(Exception):
    def __str__(self): raise SystemExit(3)
    __repr__ = __str__
"""


def make_error(failure: str) -> BaseException:
    names: dict[str, Any] = {}
    exec(ERRORS, names)
    error = eval(FAILURES[failure], names)
    assert isinstance(error, BaseException)
    return error


# --- hooks ------------------------------------------------------------------------------------------------------------


def statuses(site: FakeSite, body: str) -> dict[str, tuple[str, str]]:
    """Return status and reason of a plugin with this hook, and of a healthy one beside it."""
    site.add("kvframe-bad", "bad", MANIFEST + ERRORS + body)
    site.add("kvframe-good", "good", registers("backends", ("good", "kvframe_good.backend:Good")))
    host = load_plugins()
    assert "good" in host.registry.backends
    return {record.name: (record.status, record.reason) for record in host.records}


def arguments_of(hook: str) -> str:
    return ", ".join(name for name in inspect.signature(getattr(HookSpecs, hook)).parameters if name != "self")


@pytest.mark.parametrize(("hook", "failure"), cover_values(HOOKS, FAILURES))
def test_a_hook_that_raises_sets_its_own_plugin_aside(site: FakeSite, hook: str, failure: str) -> None:
    body = f"@hookimpl\ndef {hook}({arguments_of(hook)}): raise {FAILURES[failure]}\n"
    states = statuses(site, body)
    assert ("loaded", "") == states["good"]
    status, reason = states["bad"]
    assert "broken" == status
    assert reason.startswith(f"{hook} failed: {type(make_error(failure)).__name__}: ")


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_with_other_arguments_sets_its_own_plugin_aside(site: FakeSite, hook: str) -> None:
    states = statuses(site, f"@hookimpl\ndef {hook}(nobody_knows): pass\n")
    assert ("loaded", "") == states["good"]
    status, reason = states["bad"]
    assert "broken" == status
    assert hook in reason


@pytest.mark.parametrize(
    ("hook", "answer"),
    cover_values(
        [name for name in HOOKS if name != "kvframe_configure"], ["5", "object()", "Mute()", "[]", "''", "b'no'"]
    ),
)
def test_a_hook_that_returns_a_wrong_value_sets_only_its_plugin_aside(site: FakeSite, hook: str, answer: str) -> None:
    states = statuses(site, f"@hookimpl\ndef {hook}({arguments_of(hook)}): return {answer}\n")
    assert ("loaded", "") == states["good"]
    status, reason = states["bad"]
    assert ("broken", True) == (status, hook in reason)


def test_an_interrupt_in_a_hook_is_the_users(site: FakeSite) -> None:
    with pytest.raises(KeyboardInterrupt):
        statuses(site, "@hookimpl\ndef kvframe_configure(settings): raise KeyboardInterrupt\n")


@pytest.mark.parametrize("failure", FAILURES)
def test_a_manifest_that_raises_at_import_is_set_aside(site: FakeSite, failure: str) -> None:
    states = statuses(site, f"raise {FAILURES[failure]}\n")
    assert ("loaded", "") == states["good"]
    assert "broken" == states["bad"][0]
    assert states["bad"][1].startswith("importing kvframe_bad.manifest_bad failed: ")


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("method", ["__dir__", "__getattr__", "__eq__", "__hash__"])
def test_a_manifest_object_whose_own_methods_raise_is_set_aside(site: FakeSite, method: str, failure: str) -> None:
    body = f"class Manifest:\n    def {method}(self, *arguments): raise {FAILURES[failure]}\nmanifest = Manifest()\n"
    site.add("kvframe-bad", "bad", MANIFEST + ERRORS + body)
    entry_points = "[kvframe.v1]\nbad = kvframe_bad.manifest_bad:manifest\n[kvframe.v1.api]\nbad = v1_0"
    (site.root / "kvframe_bad-0.1.dist-info/entry_points.txt").write_text(entry_points)
    site.add("kvframe-good", "good")
    host = load_plugins()
    assert ("loaded", "broken") == (host.record("good").status, host.record("bad").status)


@pytest.mark.parametrize("value", ["", "no such module", "a b", "a:", ":b", "1a", "a.b:c d", "a..b", "../a", "a" * 501])
def test_an_entry_point_whose_value_names_nothing_is_set_aside(site: FakeSite, value: str) -> None:
    site.write_metadata("kvframe-bad", f"[kvframe.v1]\nbad = {value}\n[kvframe.v1.api]\nbad = v1_0")
    site.add("kvframe-good", "good")
    host = load_plugins()
    assert ("loaded", "broken") == (host.record("good").status, host.record("bad").status)


@pytest.mark.parametrize(
    "name", ["", "two words", "a/b", "-", "\u00e9t\u00e9", "\x1b[31m", "kvframe-other", "x" * 1000]
)
def test_a_distribution_with_a_bad_name_is_set_aside(site: FakeSite, name: str) -> None:
    site.add("kvframe-bad", "bad")
    site.add("kvframe-good", "good")
    (site.root / "kvframe_bad-0.1.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    records = {record.id: record for record in load_plugins().records}
    assert "loaded" == records.pop("kvframe-good:good").status
    assert "loaded" == records.pop("kvframe:builtin").status
    ((_, record),) = records.items()
    assert "broken" == record.status
    assert record.reason.isprintable()


@pytest.mark.parametrize("metadata", [b"", b"\xff\xfe", b"Name: kvframe-bad\n"])
def test_a_distribution_with_broken_metadata_breaks_no_other(site: FakeSite, metadata: bytes) -> None:
    site.add("kvframe-bad", "bad")
    site.add("kvframe-good", "good")
    (site.root / "kvframe_bad-0.1.dist-info/METADATA").write_bytes(metadata)
    assert "loaded" == load_plugins().record("good").status


@pytest.mark.parametrize("content", [b"\xff\xfe kvframe.v1", b"[kvframe.v1]\nno equals sign", b"[kvframe.v1\na = b"])
def test_entry_points_that_cannot_be_read_break_no_other(site: FakeSite, content: bytes) -> None:
    site.add("kvframe-bad", "bad")
    site.add("kvframe-good", "good")
    (site.root / "kvframe_bad-0.1.dist-info/entry_points.txt").write_bytes(content)
    host = load_plugins()
    assert "loaded" == host.record("good").status
    assert "bad" not in {record.name for record in host.records if record.status == "loaded"}


def test_a_name_cannot_be_registered_after_the_hook_returned(site: FakeSite) -> None:
    keeps = "kept = []\n@hookimpl\ndef kvframe_register_backends(register): kept.append(register)\n"
    site.add("kvframe-late", "late", MANIFEST + keeps)
    host = load_plugins()
    with pytest.raises(KVFrameError, match=r"kvframe-late:late called register.* after its kvframe_register_backends"):
        import_module("kvframe_late.manifest_late").kept[0]("too_late", "a.b:C")
    assert "too_late" not in host.registry.backends


@pytest.mark.parametrize(
    "claim",
    [
        "5, 'a:B'",
        "Mute(), 'a:B'",
        "'x' * 101, 'a:B'",
        "'x', 'a:' + 'B' * 500",
        "'x', Mute()",
        "'x', 'a:B', needs=5",
        "'x', 'a:B', needs=[5]",
        "'x', 'a:B', needs=''",
        "'x', 'a:B', install=[5]",
        "'x', 'a:B', needs_versions='y>=' + '1' * 5000",
        "'x'",
        "'x', 'a:B', other=1",
    ],
)
def test_a_claim_of_another_form_sets_its_own_plugin_aside(site: FakeSite, claim: str) -> None:
    states = statuses(site, f"@hookimpl\ndef kvframe_register_backends(register): register({claim})\n")
    assert ("loaded", "") == states["good"]
    assert ("broken", True) == (states["bad"][0], states["bad"][1].startswith("kvframe_register_backends failed: "))


# --- methods ----------------------------------------------------------------------------------------------------------

MODEL = ModelDescription(
    name="model",
    layers=(
        LayerDescription(
            name="layers.0",
            kind="full_attention",
            options={"num_kv_heads": 1, "head_size": 8},
            query={"num_heads": 1, "head_size": 8, "scale": 1.0},
        ),
    ),
    max_model_len=64,
)


class GoodBackend(TorchReferenceBackend):
    """A backend that ``auto`` prefers."""

    capabilities = attrs.evolve(TorchReferenceBackend.capabilities, preference=1000)


@attrs.frozen(kw_only=True)
class GoodWrapper(MetadataWrapper):
    """A wrapper that changes nothing."""

    name: ClassVar[str] = "bad"
    fields: ClassVar[dict[str, FieldUse]] = {}

    def __call__(self, metadata: Any) -> Any:
        return metadata


@attrs.frozen(kw_only=True)
class GoodFormat(PlainFormat):
    """A format that is plain except for its name."""

    name: ClassVar[str] = "bad"


@attrs.frozen(kw_only=True)
class GoodPolicy(EvictionPolicy):
    """Evicts the longest unused pages first."""

    name: ClassVar[str] = "bad"

    def priorities(self, pages: Any) -> Any:
        return pages.uses * 0 + pages.clock


class GoodAdapter(ModelAdapter):
    """An adapter that recognises everything."""

    def recognises(self, path: Path) -> bool:
        return True

    def describe(self, path: Path) -> ModelDescription:
        return MODEL

    def load(self, path: Path, *, device: str, dtype: str) -> Any:
        raise NotImplementedError

    def adopt(self, model: Any, tokenizer: Any) -> ModelInMemory | None:
        return None


@attrs.frozen(kw_only=True)
class GoodSpec(FullAttentionSpec):
    """Full attention by another name."""

    kind: ClassVar[str] = "bad"


def make_registry(kind: str, bad_class: type) -> Registry:
    """Return a registry with a class of a plugin named ``bad``, beside the built-in ones."""
    module = ModuleType("bad_plugin")

    def register_it(register: Any) -> None:
        register("bad", bad_class)

    hook = {"eviction": "eviction_policies"}.get(kind, f"{kind}s")
    setattr(module, f"kvframe_register_{hook}", hookimpl(register_it, specname=f"kvframe_register_{hook}"))
    return load_plugins(plugins=[module]).registry


def layers_of(stack: Stack, registry: Registry, description: ModelDescription = MODEL) -> tuple[LayerSpec, ...]:
    return make_layer_specs(description, registry, stack, "float32")


def choose(registry: Registry, **rule: Any) -> tuple[tuple[LayerSpec, ...], tuple[Choice, ...]]:
    stack = Stack.from_mapping({"rules": [{"layers": "*", **rule}]})
    layers = layers_of(stack, registry)
    return layers, select_backends(layers, stack, registry, "cpu")


def set_up(registry: Registry) -> Any:
    layers, choices = choose(registry, backend="bad")
    find_page_copier(choices)
    device = torch.device("cpu")
    groups = form_groups(layers, choices, group_layers(layers), device, {}, lambda: CopyScratch(device))
    return groups, layers


def bind(registry: Registry) -> None:
    (group,), layers = set_up(registry)
    AttentionLayer(layers[0], {}, GroupStep(group)).bind({})


def use_format(registry: Registry) -> None:
    layers_of(Stack.from_mapping({"cache": {"format": "bad"}}), registry)


def use_policy(registry: Registry) -> None:
    from kvframe import KVCacheManager, plan_cache

    stack = Stack.from_mapping({"cache": {"eviction": "bad"}})
    plan = plan_cache(
        group_layers(layers_of(stack, registry)), memory_bytes=1 << 20, max_model_len=64, max_num_batched_tokens=64
    )
    KVCacheManager(plan, max_num_seqs=1, eviction=make_part("eviction", stack.cache.eviction, registry))


def use_spec(registry: Registry) -> None:
    (layer,) = MODEL.layers
    layers_of(Stack(), registry, attrs.evolve(MODEL, layers=(attrs.evolve(layer, kind="bad"),)))


def describe(registry: Registry) -> None:
    find_adapter(Path(__file__), registry).describe(Path(__file__))


def dtype_of(registry: Registry) -> None:
    find_adapter(Path(__file__), registry).dtype_of(Path(__file__))


def share_of_rank(registry: Registry) -> None:
    find_adapter(Path(__file__), registry).share_of_rank(Path(__file__), MODEL, dtype="float32", num_ranks=1)


def load(registry: Registry) -> None:
    find_adapter(Path(__file__), registry).load(Path(__file__), device="cpu", dtype="float32")


def load_whole(registry: Registry) -> None:
    find_adapter(Path(__file__), registry).load(Path(__file__), device="cpu", dtype="float32", whole=True)


def find(registry: Registry) -> None:
    find_model("owner/name", weights=True, registry=registry)


def adopt(registry: Registry) -> None:
    adopt_model(object(), None, registry)


@attrs.frozen
class Interface:
    """A kind of class that plugins implement, and when its methods are called.

    Attributes:
        kind: The registered kind; empty for a builder, which a backend makes.
        base: The class of the contract.
        good: An implementation.
        set_up: For each method that is called at set-up, a call that reaches it.
        step: The methods that are called in steps, or only by the contract's own code.
    """

    kind: str
    base: type
    good: type
    set_up: dict[str, Callable[[Registry], object]]
    step: frozenset[str] = frozenset()


INTERFACES = (
    Interface(
        "backend",
        AttentionBackend,
        GoodBackend,
        {"__init__": set_up, "unusable_reason": set_up, "page_copier": set_up, "make_builder": set_up, "bind": bind},
        frozenset({"write_kv", "attend"}),
    ),
    Interface(
        "",
        AttentionMetadataBuilder,
        AttentionMetadataBuilder,
        {"reuse_key": set_up},
        frozenset({"build", "build_together", "finish", "refreshed_fields"}),
    ),
    Interface(
        "wrapper",
        MetadataWrapper,
        GoodWrapper,
        {
            "__init__": lambda registry: choose(registry, wrappers=["bad"]),
            "for_layer": lambda registry: choose(registry, wrappers=["bad"]),
            "wrapped_layer": lambda registry: choose(registry, wrappers=["bad"]),
            "added_extensions": lambda registry: choose(registry, wrappers=["bad"]),
        },
        frozenset({"__call__", "evolve", "pass_extensions"}),
    ),
    Interface(
        "format",
        KVFormat,
        GoodFormat,
        {"__init__": use_format, "state_tensors": use_format},
        frozenset({"write", "read"}),
    ),
    Interface("eviction", EvictionPolicy, GoodPolicy, {"__init__": use_policy, "priorities": use_policy}),
    Interface(
        "model_adapter",
        ModelAdapter,
        GoodAdapter,
        {
            "__init__": describe,
            "recognises": describe,
            "find": find,
            "describe": describe,
            "dtype_of": dtype_of,
            "share_of_rank": share_of_rank,
            "load": load,
            "load_whole": load_whole,
            "adopt": adopt,
        },
    ),
    Interface(
        "spec",
        KVCacheSpec,
        GoodSpec,
        {"__init__": use_spec},
        # A spec's answers are checked where they are used, at set-up and later: tests/engine/test_wrong_specs.py.
        frozenset(name for name in vars(KVCacheSpec) if not name.startswith("_")),
    ),
)
METHODS = [(interface, method) for interface in INTERFACES if interface.kind for method in interface.set_up]
IDS = [f"{interface.base.__name__}.{method}" for interface, method in METHODS]


def is_called(member: object) -> bool:
    return inspect.isfunction(member) or isinstance(member, classmethod | staticmethod | property)


@pytest.mark.parametrize("interface", INTERFACES, ids=lambda interface: interface.base.__name__)
def test_each_method_of_an_interface_is_listed_here(interface: Interface) -> None:
    methods = {name for name, member in vars(interface.base).items() if is_called(member) and not name.startswith("_")}
    if "__call__" in interface.step:
        methods.add("__call__")
    assert methods == (set(interface.set_up) | interface.step if interface.kind != "spec" else methods) - {"__init__"}


def broken(interface: Interface, method: str, fails: Callable[..., Any]) -> type:
    """Return the good class with one method that fails."""
    is_of_class = isinstance(inspect.getattr_static(interface.base, method, None), classmethod)
    return type("Bad", (interface.good,), {method: classmethod(fails) if is_of_class else fails})


def raising(failure: str) -> Callable[..., Any]:
    def fails(*arguments: Any, **options: Any) -> Any:
        raise make_error(failure)

    return fails


@contextlib.contextmanager
def one_sentence(*parts: str) -> Iterator[None]:
    with pytest.raises(KVFrameError) as caught:
        yield
    sentence = str(caught.value)
    assert sentence.isprintable(), sentence
    assert [] == [part for part in parts if part not in sentence], sentence


@pytest.mark.parametrize(("interface", "method", "failure"), cover_values(METHODS, FAILURES))
def test_a_method_that_raises_is_one_sentence_that_names_it(interface: Interface, method: str, failure: str) -> None:
    registry = make_registry(interface.kind, broken(interface, method, raising(failure)))
    # A constructor's error about options is reported as the stack's mistake, without its type.
    parts = ["boom"] if method == "__init__" else [method, type(make_error(failure)).__name__]
    with one_sentence("bad", *(part for part in parts if failure != "an error without a text")):
        interface.set_up[method](registry)


WRONG = {"nothing": None, "a number": 5, "a text": "text", "an object": object()}
RIGHT = {
    ("__init__", "nothing"),
    ("bind", "nothing"),
    ("bind", "a number"),
    ("bind", "a text"),
    ("bind", "an object"),
    ("unusable_reason", "nothing"),
    ("adopt", "nothing"),
    ("dtype_of", "nothing"),
    ("find", "nothing"),
    ("page_copier", "nothing"),
    ("unusable_reason", "a text"),
}
"""Answers that the contract allows, or that are not used."""


@pytest.mark.parametrize(("interface", "method", "answer"), cover_values(METHODS, WRONG, times=2))
def test_a_method_that_returns_a_wrong_value_is_named(interface: Interface, method: str, answer: str) -> None:
    if (method, answer) in RIGHT:
        return
    registry = make_registry(interface.kind, broken(interface, method, lambda *_, **__: WRONG[answer]))
    with one_sentence("bad", "" if method == "__init__" else method):
        interface.set_up[method](registry)


@pytest.mark.parametrize(("interface", "method"), METHODS, ids=IDS)
def test_an_interrupt_in_a_method_is_the_users(interface: Interface, method: str) -> None:
    def interrupted(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    registry = make_registry(interface.kind, broken(interface, method, interrupted))
    with pytest.raises(KeyboardInterrupt):
        interface.set_up[method](registry)


@pytest.mark.parametrize("failure", FAILURES)
def test_a_backend_that_fails_when_asked_is_passed_over_by_auto(failure: str) -> None:
    registry = make_registry("backend", type("Bad", (GoodBackend,), {"unusable_reason": classmethod(raising(failure))}))
    _, (choice,) = choose(registry)
    assert "bad_plugin:bad" != choice.backend
    (reason,) = (choice.why_not(candidate) for candidate in choice.candidates if candidate.name == "bad_plugin:bad")
    assert reason.startswith("backend 'bad_plugin:bad': unusable_reason() failed: ")


class Raises:
    """An attribute that raises when it is read."""

    def __init__(self, failure: str) -> None:
        self.failure = failure

    def __get__(self, instance: object, owner: type) -> Any:
        raise make_error(self.failure)


MISDECLARED = [
    (GoodBackend, "capabilities", None),
    (GoodBackend, "capabilities", {"devices": ["cpu"]}),
    (GoodBackend, "options_class", 5),
    (GoodBackend, "options_class", int),
    (GoodBackend, "options_class", dict),
    (GoodBackend, "conformance_form", 5),
    (GoodWrapper, "fields", None),
    (GoodWrapper, "fields", {"causal": "carry"}),
    (GoodWrapper, "extensions", {"seq_starts"}),
    (GoodWrapper, "effects", "drops_tokens"),
    (GoodWrapper, "not_after", ["pick"]),
    (GoodWrapper, "capture", True),
    (GoodSpec, "layout_fields", ["dtype"]),
    (GoodSpec, "default_wrappers", "pick"),
    (GoodSpec, "sequence", None),
    (GoodSpec, "keeps_past", "no"),
    (GoodFormat, "rounding", "coarse"),
]
BY_CLASS = {interface.good: interface for interface in INTERFACES}


def use(bad_class: type, good: type) -> None:
    interface = BY_CLASS[good]
    next(iter(interface.set_up.values()))(make_registry(interface.kind, bad_class))


@pytest.mark.parametrize(("good", "name", "value"), MISDECLARED)
def test_a_wrong_declaration_of_a_class_is_named(good: type, name: str, value: Any) -> None:
    with one_sentence("'bad'", "bad_plugin", name):
        use(type("Bad", (good,), {name: value}), good)


@pytest.mark.parametrize(
    ("good", "name", "failure"),
    cover_values(sorted({(good, name) for good, name, _ in MISDECLARED}, key=str), FAILURES),
)
def test_an_unreadable_declaration_of_a_class_is_named(good: type, name: str, failure: str) -> None:
    with one_sentence("'bad'", "bad_plugin", type(make_error(failure)).__name__):
        use(type("Bad", (good,), {name: Raises(failure)}), good)


def test_a_backend_without_attend_is_refused() -> None:
    class Lacking(AttentionBackend):
        capabilities = GoodBackend.capabilities

    with one_sentence("backend 'bad' of bad_plugin", "does not implement attend"):
        choose(make_registry("backend", Lacking), backend="bad")


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ({"sinks": True}, "declares sinks, and its attend() does not take 'sinks'"),
        ({"returns_lse": True}, "declares returns_lse, and its attend() does not take 'lse'"),
        ({"choices": {"tokens"}}, "declares choices or kinds, and its attend() does not take 'more'"),
        ({"masks": (), "kinds": {"own"}}, "declares choices or kinds, and its attend() does not take 'more'"),
    ],
)
def test_what_is_declared_and_not_taken_by_attend_is_refused(declared: dict[str, Any], says: str) -> None:
    class Lacking(AttentionBackend):
        capabilities = attrs.evolve(
            GoodBackend.capabilities, **{"sinks": False, "returns_lse": False, "choices": (), **declared}
        )

        def attend(self, *arguments: Any, **_: Any) -> Any:
            raise NotImplementedError

    with one_sentence("backend 'bad' of bad_plugin", says):
        choose(make_registry("backend", Lacking), backend="bad")


@pytest.mark.parametrize("value", [None, 5, {"devices": ["cpu"]}])
def test_a_backend_with_capabilities_of_another_type_is_passed_over_by_auto(value: Any) -> None:
    _, (choice,) = choose(make_registry("backend", type("Bad", (GoodBackend,), {"capabilities": value})))
    assert "bad_plugin:bad" != choice.backend
    (reason,) = (choice.why_not(candidate) for candidate in choice.candidates if candidate.name == "bad_plugin:bad")
    assert "declares capabilities = " in reason


def test_a_backend_without_capabilities_is_passed_over_by_auto() -> None:
    class Bare(AttentionBackend):
        def attend(self, *arguments: Any, **_: Any) -> Any:
            raise NotImplementedError

    _, (choice,) = choose(make_registry("backend", Bare))
    assert "bad_plugin:bad" != choice.backend
    with one_sentence("bad_plugin", "declares no capabilities"):
        choose(make_registry("backend", Bare), backend="bad")


def test_a_backend_whose_options_lack_defaults_is_passed_over_by_auto() -> None:
    @attrs.frozen
    class Options:
        size: int

    bad_class = type("Bad", (GoodBackend,), {"options_class": Options})
    _, (choice,) = choose(make_registry("backend", bad_class))
    assert "bad_plugin:bad" != choice.backend
    with one_sentence("backend 'bad'", "size"):
        choose(make_registry("backend", bad_class), backend="bad")


def test_an_adapter_that_fails_is_passed_over(tmp_path: Path) -> None:
    module = ModuleType("two_adapters")

    def register_both(register: Any) -> None:
        register("raises", type("Bad", (GoodAdapter,), {"recognises": raising("an exit")}))
        register("works", GoodAdapter)

    module.kvframe_register_model_adapters = hookimpl(  # type: ignore[attr-defined]
        register_both, specname="kvframe_register_model_adapters"
    )
    registry = load_plugins(plugins=[module]).registry
    for name in registry.model_adapters.names():
        if name not in {"raises", "works"}:
            registry.model_adapters._claims.pop(name)
    assert MODEL == find_adapter(tmp_path, registry).describe(tmp_path)


class Careless(FullAttentionSpec):
    kind = "bad"

    def check_query(self, query: QuerySpec) -> None:
        raise KeyError("head")


def test_a_type_whose_check_of_queries_fails_is_named() -> None:
    layers = tuple(attrs.evolve(layer, kind="bad") for layer in MODEL.layers)
    with one_sentence(r"spec 'bad': check_query() failed: KeyError: 'head'"):
        layers_of(Stack(), make_registry("spec", Careless), attrs.evolve(MODEL, layers=layers))
