"""What is used of vLLM, by name: an upgrade that takes a name away shows as a list. No test here needs vLLM."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kvframe_vllm.names
import pytest
from kvframe_vllm import plugin

from kvframe.contract import StackError

SOURCES = sorted(Path(kvframe_vllm.names.__file__).parent.rglob("*.py"))


CALLERS = {
    "vllm.model_executor.layers.attention:MLAAttention",
    "vllm.model_executor.layers.attention.chunked_local_attention:ChunkedLocalAttention",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum",
    "vllm.v1.attention.backends.utils:KVSharingFastPrefillMetadata",
}
"""What is not imported, and whose calls or fields this package answers."""


def imported(path: Path) -> Iterator[str]:
    """Yield ``module:name`` for what a file imports of vLLM."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from (f"{node.module}:{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "vllm")


def test_all_that_is_imported_of_vllm_is_in_the_list_of_names() -> None:
    found = {name for path in SOURCES for name in imported(path)}
    listed = (name.partition(":") for name in kvframe_vllm.names.NAMES)
    roots = {":".join((module, name.split(".")[0])) for module, _, name in listed}
    assert roots - CALLERS == {name if ":" in name else f"{name}:__version__" for name in found}


def test_a_name_that_is_not_there_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvframe_vllm.names, "NAMES", ("ast:parse", "ast:no_such", "no_such_module:name"))
    assert ["ast:no_such", "no_such_module:name"] == kvframe_vllm.names.missing_names()


def test_without_a_stack_nothing_is_attached() -> None:
    code = "import sys, kvframe_vllm; kvframe_vllm.register(); print(sorted({'vllm', 'kvframe'} & {*sys.modules}))"
    environment = {key: value for key, value in os.environ.items() if key != "KVFRAME_STACK"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "[]" == done.stdout.strip()


def test_kinds_of_layers_come_from_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "SETTINGS", {})
    plugin.kvframe_configure({"kinds": {"model.layers.0.*": "sliding_window"}})
    assert {"model.layers.0.*": "sliding_window"} == plugin.SETTINGS["kinds"]


@pytest.mark.parametrize("settings", [{"kind": {}}, {"kinds": "sliding_window"}, {"kinds": {"*": 3}}])
def test_wrong_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(StackError, match=r"\[plugin.vllm\] takes only kinds"):
        plugin.kvframe_configure(settings)
