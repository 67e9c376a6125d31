"""Plugins that are broken at random: what one installs, and how a stack would name it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import attrs

HOOKS = {
    "kvframe_unusable_reason": "",
    "kvframe_configure": "settings",
    "kvframe_register_specs": "register",
    "kvframe_register_wrappers": "register",
    "kvframe_register_backends": "register",
    "kvframe_register_formats": "register",
    "kvframe_register_eviction_policies": "register",
    "kvframe_register_model_adapters": "register",
}
PRELUDE = """
import asyncio, os, subprocess, sys
import attrs
from kvframe.contract.hookspecs import hookimpl
class Own(BaseException): pass
class Mute(Exception):
    def __str__(self): raise SystemExit(3)
    __repr__ = __str__
class Number(Exception):
    def __str__(self): return 5
def deep(): return deep()
def fail(error): raise error
"""
FAILURES = (
    "fail(ValueError('boom'))",
    "fail(ValueError('several\\nlines \\x1b[31mred\\x00'))",
    "fail(ValueError('long ' * 200_000))",
    "fail(SystemExit(3))",
    "sys.exit('boom')",
    "fail(asyncio.CancelledError())",
    "fail(GeneratorExit())",
    "fail(Own('boom'))",
    "fail(Mute())",
    "fail(Number())",
    "fail(MemoryError())",
    "fail(StopIteration())",
    "fail(BaseExceptionGroup('all', [KeyboardInterrupt()]))",
    "deep()",
)
ANSWERS = ("5", "object()", "Mute()", "[]", "{}", "b'bytes'", "type", "lambda: None", "(1, 2)", "float('nan')")
BACKEND = """
from kvframe.builtin.torch_reference import TorchReferenceBackend
class Thing(TorchReferenceBackend):
    capabilities = attrs.evolve(TorchReferenceBackend.capabilities, preference=PREFERENCE)
"""
WRAPPER = """
from typing import ClassVar
from kvframe.contract.wrapper import MetadataWrapper
@attrs.frozen(kw_only=True)
class Thing(MetadataWrapper):
    name: ClassVar[str] = "NAME"
    fields = {}
    def __call__(self, metadata): return metadata
"""
FORMAT = """
from kvframe.contract.formats import PLAIN
class Thing(type(PLAIN)):
    name = "NAME"
"""
POLICY = """
from kvframe.contract.eviction import LRU
class Thing(type(LRU)):
    name = "NAME"
"""
ADAPTER = """
from kvframe.contract.model import ModelAdapter
class Thing(ModelAdapter):
    def recognises(self, path): return False
    def describe(self, path): raise NotImplementedError
    def load(self, path, *, device, dtype): raise NotImplementedError
"""
SPEC = """
from kvframe.builtin.full_attention import FullAttentionSpec
class Thing(FullAttentionSpec):
    kind = "NAME"
"""


@attrs.frozen(kw_only=True)
class Broken:
    """A broken plugin.

    Attributes:
        name: Its name, and the name that it registers, if it registers one.
        what: What is broken, in words that other plugins share.
        kind: The kind of thing that is broken; ``"plugin"`` for what is loaded with the manifest.
        manifest: The source of its manifest, or its bytes.
        thing: The source of the module with its class; empty for none.
        files: Files of its ``.dist-info`` folder that are not as they should be.
    """

    name: str
    what: str
    kind: str = "plugin"
    manifest: str | bytes = ""
    thing: str = ""
    files: Mapping[str, bytes] = attrs.field(factory=dict)

    @property
    def distribution(self) -> str:
        """Its distribution."""
        return f"kvframe-{self.name.replace('_', '-')}"


def make_broken(name: str, random: Random) -> Broken:
    """Return a plugin that is broken in one way.

    Args:
        name: Its name, ``snake_case``.
        random: Draws the way.
    """
    make: Callable[[str, Random], Broken] = random.choice(_MAKERS)
    return make(name, random)


def _at_import(name: str, random: Random) -> Broken:
    return Broken(name=name, what="its manifest raises", manifest=f"{PRELUDE}\n{random.choice(FAILURES)}\n")


def _bytes(name: str, random: Random) -> Broken:
    return Broken(name=name, what="its manifest is noise", manifest=random.randbytes(random.randint(1, 200)))


def _hook(name: str, random: Random) -> Broken:
    hook, arguments = random.choice(sorted(HOOKS.items()))
    what, body = random.choice(
        [
            ("a hook raises", f"({arguments}): {random.choice(FAILURES)}"),
            ("a hook has other arguments", "(nobody, knows): pass"),
            ("a hook returns something else", f"({arguments}): return {random.choice(ANSWERS)}"),
            ("a hook is a coroutine", f"({arguments}): yield {random.choice(ANSWERS)}"),
        ]
    )
    return Broken(name=name, what=what, manifest=f"{PRELUDE}\n@hookimpl\ndef {hook}{body}\n")


def _claim(name: str, random: Random) -> Broken:
    junk = [*ANSWERS, "''", "'Not Snake'", "'auto'", "'torch'", "'x' * 10_000_000", "'\\x1b[31m'"]
    claim = random.choice(
        [
            f"{random.choice(junk)}, 'a.b:C'",
            f"'{name}', {random.choice(junk)}",
            f"'{name}', 'a.b:C', needs={random.choice(junk)}",
            f"'{name}', 'a.b:C', install={random.choice(junk)}",
            f"'{name}', 'a.b:C', needs_versions={random.choice(junk)}",
            f"'{name}'",
            f"'{name}', 'a.b:C', other=1",
        ]
    )
    hook = random.choice([hook for hook in HOOKS if "register" in hook])
    manifest = f"{PRELUDE}\n@hookimpl\ndef {hook}(register): register({claim})\n"
    return Broken(name=name, what="it registers what is no name or class", manifest=manifest)


def _object(name: str, random: Random) -> Broken:
    method = random.choice(
        [f"__{name}__" for name in ["dir", "getattr", "getattribute", "eq", "hash", "class", "repr"]]
    )
    body = f"    def {method}(self, *arguments): return {random.choice(FAILURES)}"
    decorator = "    @property\n" if method == "__class__" else ""
    manifest = f"{PRELUDE}\nclass Manifest:\n{decorator}{body}\nmanifest = Manifest()\n"
    entry_points = f"[kvframe.v1]\n{name} = kvframe_{name}.manifest:manifest\n[kvframe.v1.api]\n{name} = v1_0\n"
    files = {"entry_points.txt": entry_points.encode()}
    return Broken(name=name, what="its manifest is an object that raises", manifest=manifest, files=files)


def _metadata(name: str, random: Random) -> Broken:
    noise = random.randbytes(random.randint(0, 200))
    values = ["", "a b", "a:", ":b", "1a", "a..b", "\u00e9:\u00e9", "x" * 100_000]
    values += ["no_such_module", "os:environ", "os:no"]
    api = ["", "v1", "v9_9", "v1_" + "9" * 5000, "1.0", "v\u0661_\u0660", "x" * 100_000]
    names = ["", "two words", "a/b", "-", "\u00e9", "\x1b[31m", "kvframe-elsewhere", "x" * 100_000]
    here = f"kvframe_{name}.manifest"

    def points(name: str, value: str, version: str = "v1_0") -> str:
        return f"[kvframe.v1]\n{name} = {value}\n[kvframe.v1.api]\n{name} = {version}\n"

    def metadata(distribution: str, version: str) -> str:
        return f"Name: {distribution}\nVersion: {version}\n"

    what, file, content = random.choice(
        [
            ("its METADATA is noise", "METADATA", noise),
            ("its METADATA is empty", "METADATA", b""),
            ("its METADATA states no such name", "METADATA", metadata(random.choice(names), "1")),
            ("its METADATA states no version", "METADATA", metadata(f"kvframe-{name}", random.choice(names))),
            ("its entry points are noise", "entry_points.txt", _noisy_points(random)),
            ("its entry point names nothing", "entry_points.txt", points(name, random.choice(values))),
            ("its contract version is none", "entry_points.txt", points(name, here, random.choice(api))),
            ("its entry point has no such name", "entry_points.txt", points(f"a:{name} \x1b", here)),
        ]
    )
    content = content.encode() if isinstance(content, str) else content
    return Broken(name=name, what=what, manifest=PRELUDE, files={file: content})


def _noisy_points(random: Random) -> str:
    """Return lines that can be parsed: where one cannot, ``import torch`` fails, which reads all entry points."""
    texts = ["".join(chr(random.randint(33, 126)) for _ in range(random.randint(1, 40))) for _ in range(10)]
    lines = [f"x{left} = {right}" for left, right in zip(texts[:5], texts[5:], strict=True)]
    return "\n".join(["[kvframe.v1]", *lines, "[kvframe.v1.api]", *lines, ""])


def _prints(name: str, random: Random) -> Broken:
    prints = ["print('{')", "os.write(1, b'{')", "subprocess.run(['echo', '{'])"]
    noise = random.choice([*prints, "sys.stdout = None", "sys.stdout = open(os.devnull)"])
    hook = f"@hookimpl\ndef kvframe_unusable_reason():\n    {noise}\n    return 'it only prints'\n"
    manifest = f"{PRELUDE}\n{noise}\n{hook}"
    return Broken(name=name, what="it prints, or replaces sys.stdout", manifest=manifest)


def _thing(
    kind: str, hook: str, good: str, methods: Mapping[str, str], attributes: tuple[str, ...]
) -> Callable[[str, Random], Broken]:
    """Return what makes plugins whose class of some kind is broken.

    Args:
        kind: The kind.
        hook: The hook that registers it, without ``kvframe_register_``.
        good: The source of a class ``Thing`` that works.
        methods: The methods that are called at set-up, and how each is declared.
        attributes: The class attributes.
    """

    def make(name: str, random: Random) -> Broken:
        method = random.choice(sorted(methods))
        declared, late = methods[method], method in {"__init__", "make_builder", "page_copier"}
        source, what = good, "raises at import"
        way = random.choice(["import", "missing", "method", "method", "method", "answer", "attribute", "attribute"])
        if way == "import":
            source += random.choice(FAILURES)
        elif way == "missing":
            source, what = random.choice(["", "Thing = 5", "class Thing: pass", "def Thing(: pass"]), "is no such class"
        elif way == "method":
            source += f"    {declared}: return {random.choice(FAILURES)}\n"
            what = f"{method}() raises"
        elif way == "answer":
            source += f"    {declared}: return {random.choice(ANSWERS)}\n"
            what = f"{method}() returns something else"
        elif attributes:
            attribute, late = random.choice(attributes), False
            raises = f"type('Raises', (), {{'__get__': lambda *_: {random.choice(FAILURES)}}})()"
            source += f"    {attribute} = {random.choice([*ANSWERS, raises])}\n"
            what = "declares something else"
        else:
            source += f"{random.choice(FAILURES)}\n"
        # A backend that fails after it was chosen is an error, however it was chosen: this one is not chosen unasked.
        source = source.replace("NAME", name).replace(
            "PREFERENCE", "-1" if late and way in {"method", "answer"} else "1000"
        )
        claim = f"    register('{name}', 'kvframe_{name}.thing:Thing')\n"
        manifest = f"{PRELUDE}\n@hookimpl\ndef kvframe_register_{hook}(register):\n{claim}"
        return Broken(name=name, what=f"its {kind} {what}", kind=kind, manifest=manifest, thing=PRELUDE + source)

    return make


def _methods(*names: str) -> dict[str, str]:
    return {name: f"def {name}(self, *arguments, **options)" for name in names}


_MAKERS = (
    *(_at_import, _bytes, _hook, _hook, _claim, _object, _metadata, _metadata, _prints),
    _thing(
        "backend",
        "backends",
        BACKEND,
        {
            "__init__": "def __init__(self, *arguments, **options)",
            "make_builder": "def make_builder(self, *arguments, **options)",
            "unusable_reason": "@classmethod\n    def unusable_reason(cls)",
            "page_copier": "@classmethod\n    def page_copier(cls)",
        },
        ("capabilities", "options_class", "conformance_form"),
    ),
    _thing(
        "wrapper",
        "wrappers",
        WRAPPER,
        _methods("__init__", "for_layer", "wrapped_layer", "added_extensions"),
        ("name", "fields", "extensions", "effects", "not_after", "not_before", "capture"),
    ),
    _thing("format", "formats", FORMAT, _methods("__init__", "state_tensors"), ("name", "rounding")),
    _thing("policy", "eviction_policies", POLICY, _methods("__init__", "due"), ("name",)),
    _thing("adapter", "model_adapters", ADAPTER, _methods("__init__", "recognises"), ()),
    _thing(
        "spec",
        "specs",
        SPEC,
        _methods("__init__", "live_ranges", "state_tensors"),
        ("kind", "layout_fields", "default_wrappers", "sequence", "keeps_past"),
    ),
)


def stack_that_names(broken: Broken) -> dict[str, Any]:
    """Return a stack that names a plugin, or what it registers; empty where a stack cannot."""
    by_kind: dict[str, dict[str, Any]] = {
        "plugin": {"plugins": {"required": [broken.name]}},
        "backend": {"rules": [{"layers": "*", "backend": broken.name}]},
        "wrapper": {"rules": [{"layers": "*", "wrappers": [broken.name]}]},
        "format": {"cache": {"format": broken.name}},
        "policy": {"cache": {"eviction": broken.name}},
    }
    return by_kind.get(broken.kind, {})
