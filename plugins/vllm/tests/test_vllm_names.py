"""What is used of vLLM, by name: an upgrade that takes a name away shows as a list. No test here needs vLLM."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import kvframe_vllm.names
import pytest
from packaging.requirements import Requirement

from kvframe.contract import KVFrameError

SOURCES = sorted(Path(kvframe_vllm.names.__file__).parent.rglob("*.py"))


CALLERS = {
    "vllm.config:CacheConfig",
    "vllm.config:CompilationConfig",
    "vllm.config:KVTransferConfig",
    "vllm.config:ModelConfig",
    "vllm.config:ParallelConfig",
    "vllm.config:VllmConfig",
    "vllm.model_executor.layers.attention:MLAAttention",
    "vllm.model_executor.layers.attention.chunked_local_attention:ChunkedLocalAttention",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum",
    "vllm.v1.attention.backends.utils:KVSharingFastPrefillMetadata",
    "vllm.v1.attention.backend:CommonAttentionMetadata",
    "vllm.v1.attention.selector:AttentionSelectorConfig",
    "vllm.v1.core.block_pool:BlockPool",
    "vllm.v1.core.sched.output:KVConnectorBlockState",
    "vllm.v1.kv_cache_interface:KVCacheConfig",
    "vllm.v1.outputs:KVConnectorOutput",
    "vllm.v1.request:Request",
}
"""What is not imported, and whose calls or fields this package answers."""


class Base:
    """Stands for a class of vLLM."""

    width: int

    def build(self, batch: object, fast: bool = False) -> None:
        pass

    def free(self, request: str) -> None:
        pass


class Asking(Base, ABC):
    """Likewise, with a method that a subclass has to define."""

    @abstractmethod
    def count(self) -> int: ...


def subclass(base: type, **members: object) -> type:
    """Return a subclass that another package defines."""
    return type("Own", (base,), {"__module__": "own_package.adapter", **members})


def use_of(monkeypatch: pytest.MonkeyPatch, version: str, names: tuple[str, ...] = ("ast:parse",)) -> None:
    """Let vLLM be of a version, and let other names be used of it."""
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__=version))
    monkeypatch.setattr(kvframe_vllm.names, "NAMES", names)
    monkeypatch.setattr(kvframe_vllm.names, "SUBCLASSES", ())


def imported(path: Path) -> Iterator[str]:
    """Yield ``module:name`` for what a file imports of vLLM."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from (f"{node.module}:{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "vllm")


def test_all_that_is_imported_of_vllm_is_in_the_list_of_names() -> None:
    imports = {name for path in SOURCES for name in imported(path)}
    names = (*kvframe_vllm.names.NAMES, *kvframe_vllm.names.CONNECTOR_NAMES)
    paths = (name.partition(":") for name in names)
    roots = {":".join((module, name.split(".")[0])) for module, _, name in paths}
    assert roots - CALLERS == {"vllm:__version__", *imports}


def test_a_name_that_is_not_there_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvframe_vllm.names, "NAMES", ("ast:parse", "ast:no_such", "no_such_module:name"))
    assert ["ast:no_such", "no_such_module:name"] == kvframe_vllm.names.missing_names()


def test_a_field_without_a_default_is_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "made", types.SimpleNamespace(Base=Base, Own=subclass(Base)))
    names = ("made:Base.width", "made:Own.width", "made:Base.height", "made:Other.width")
    monkeypatch.setattr(kvframe_vllm.names, "NAMES", names)
    assert ["made:Base.height", "made:Other.width"] == kvframe_vllm.names.missing_names()


def test_a_method_or_an_argument_that_a_class_of_vllm_asks_for_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = {
        "Defined": subclass(Asking, count=lambda self: 0, free=lambda self, request: None),
        "Undefined": subclass(Asking, build=lambda self, batch, **options: None),
        "Narrow": subclass(Base, build=lambda self, batch: None),
    }
    monkeypatch.setitem(sys.modules, "made", types.SimpleNamespace(**classes))
    monkeypatch.setattr(kvframe_vllm.names, "SUBCLASSES", tuple(f"made:{name}" for name in classes))
    assert ["Asking.count()", "Base.build(fast)"] == kvframe_vllm.names.unmet_demands()


@pytest.mark.parametrize("version", ["0.29.0", "0.31.2rc1", "0.30rc2", f"{kvframe_vllm.names.TESTED[-1]}.9"])
def test_a_tested_version_is_taken_without_a_word(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_of(monkeypatch, version)
    kvframe_vllm.names.check_vllm()
    assert [] == caplog.messages


@pytest.mark.parametrize("version", ["0.99.1", "0.34rc1", "1.0.0", "dev"])
def test_a_newer_version_with_every_name_is_warned_of(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_of(monkeypatch, version)
    kvframe_vllm.names.check_vllm()
    (message,) = caplog.messages
    assert message == (
        f"vLLM {version} is newer than the versions that kvframe-vllm is tested with (0.29 to 0.33): it has every name "
        "that is used, and its first batches are checked"
    )


@pytest.mark.parametrize(
    ("version", "names", "message"),
    [
        ("0.28.1", ("ast:parse",), r"vLLM 0\.28\.1 is older than the versions that kvframe-vllm is tested with"),
        ("0.99.1", ("ast:no_such", "ast:nor"), r"vLLM 0\.99\.1 lacks ast:no_such, ast:nor, which kvframe-vllm uses"),
    ],
)
def test_a_version_that_cannot_be_served_is_refused_with_the_tested_versions(
    version: str, names: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_of(monkeypatch, version, names)
    with pytest.raises(KVFrameError, match=rf"{message}; install a tested version, 0\.29 to 0\.33, or unset"):
        kvframe_vllm.names.check_vllm()


@pytest.mark.parametrize(
    ("names", "classes", "message"),
    [
        (("ast:no_such",), (), r"vLLM 0\.30\.1 lacks ast:no_such, so page stores cannot be used; install vLLM 0\.32"),
        ((), ("made:Own",), r"vLLM 0\.30\.1 asks for Asking\.count\(\), so page stores cannot be used"),
    ],
)
def test_page_stores_are_refused_by_a_version_whose_connectors_differ(
    names: tuple[str, ...], classes: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_of(monkeypatch, "0.30.1")
    monkeypatch.setitem(sys.modules, "made", types.SimpleNamespace(Own=subclass(Asking)))
    monkeypatch.setattr(kvframe_vllm.names, "CONNECTOR_NAMES", names)
    monkeypatch.setattr(kvframe_vllm.names, "CONNECTOR_CLASSES", classes)
    kvframe_vllm.names.check_vllm()
    with pytest.raises(KVFrameError, match=message):
        kvframe_vllm.names.check_connector()


def test_the_readme_and_the_metadata_name_the_tested_versions() -> None:
    folder = Path(kvframe_vllm.names.__file__).parents[2]
    tested = kvframe_vllm.names.TESTED
    assert f"vLLM {kvframe_vllm.names.TESTED_RANGE}" in (folder / "README.md").read_text(encoding="utf-8")
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (requirement,) = project["optional-dependencies"]["vllm"]
    inside = Requirement(requirement).specifier
    assert [*tested] == [f"0.{minor}" for minor in range(100) if f"0.{minor}.1" in inside]


def test_without_a_stack_nothing_is_attached() -> None:
    code = "import sys, kvframe_vllm; kvframe_vllm.register(); print(sorted({'vllm', 'kvframe'} & {*sys.modules}))"
    environment = {key: value for key, value in os.environ.items() if key != "KVFRAME_STACK"}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "[]" == process.stdout.strip()
