"""What is used of transformers, by name, and the versions that are tested: an upgrade shows in one sentence."""

from __future__ import annotations

import ast
import logging
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kvframe_transformers import names, states
from kvframe_transformers.adapter import TransformersAdapter
from kvframe_transformers.checkpoint import load_weights, read_config
from kvframe_transformers.names import NAMES, TESTED, missing_names
from kvframe_transformers.soft_caps import attention_options
from kvframe_transformers.testing import save_tiny, tiny_config
from transformers import PreTrainedModel

from kvframe import load_plugins
from kvframe.contract import ModelError, PluginError

SOURCES = sorted(Path(names.__file__).parent.rglob("*.py"))
PLUGINS = Path(__file__).resolve().parents[2]
IMITATED = {
    "transformers:PreTrainedConfig",
    "transformers.cache_utils:Cache",
    "transformers.masking_utils:create_recurrent_attention_mask",
}
"""What is not imported, and whose attributes this package uses, imitates or looks for in modules."""


def imported(path: Path) -> Iterator[str]:
    """Yield ``module:name`` for what a file imports of transformers."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers":
            yield from (f"{node.module}:{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (f"{alias.name}:__version__" for alias in node.names if alias.name == "transformers")


def load_adapter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load the adapter as an engine does, in a process that has not loaded it yet."""
    monkeypatch.delitem(sys.modules, "kvframe_transformers.entry", raising=False)
    return load_plugins().registry.model_adapters.load("transformers")


def test_all_that_is_imported_of_transformers_is_in_the_list_of_names() -> None:
    paths = (name.partition(":") for name in NAMES)
    roots = {":".join((module, name.split(".")[0])) for module, _, name in paths}
    assert roots - IMITATED == {name for path in SOURCES for name in imported(path)}


def test_the_installed_transformers_has_every_name() -> None:
    assert [] == missing_names()


def test_a_release_without_a_name_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "VERSION", "5.31.0")
    monkeypatch.delattr(PreTrainedModel, "set_attn_implementation")
    with pytest.raises(PluginError) as caught:
        load_adapter(monkeypatch)
    assert str(caught.value).endswith(
        "PluginError: transformers 5.31.0 lacks transformers:PreTrainedModel.set_attn_implementation, which "
        "kvframe-transformers uses; install a version that is tested: 5.20 to 5.24"
    )


def test_a_newer_minor_than_tested_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(names, "VERSION", "5.31.0")
    with caplog.at_level(logging.WARNING):
        assert load_adapter(monkeypatch) is TransformersAdapter
        load_plugins().registry.model_adapters.load("transformers")
    (message,) = caplog.messages
    assert message.startswith(
        "transformers 5.31.0 is newer than the versions that kvframe-transformers is tested with (5.20 to 5.24)"
    )


@pytest.mark.parametrize("version", ["5.20.0", "5.24.0", "5.24.9"])
def test_a_tested_minor_does_not_warn(
    version: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(names, "VERSION", version)
    load_adapter(monkeypatch)
    assert [] == caplog.messages


def test_a_mixer_that_takes_its_cache_under_a_later_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, "mamba2")
    monkeypatch.setattr(states, "CACHE_NAMES", ("other",))
    monkeypatch.setattr(names, "VERSION", "5.31.0")
    message = (
        "Mamba2Mixer keeps a state in transformers' cache, and has no argument for it of the name .*; "
        r"the cause may be transformers 5.31.0, which is newer than the tested versions \(5.20 to 5.24\)$"
    )
    with pytest.raises(ModelError, match=message):
        TransformersAdapter().describe(tmp_path)


@pytest.mark.parametrize("plugin", ["transformers", "serve"])
def test_the_declared_range_begins_with_the_oldest_tested_version(plugin: str) -> None:
    declared = tomllib.loads((PLUGINS / plugin / "pyproject.toml").read_text(encoding="utf-8"))
    assert f"transformers>={TESTED[0]},<6" in declared["project"]["dependencies"]
    claim = load_plugins().registry.model_adapters.get("transformers")
    assert (f"transformers>={TESTED[0]}",) == claim.needs_versions


def test_a_model_with_a_soft_cap_attends_eagerly_in_a_version_whose_sdpa_leaves_it_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, "gemma3_text", attn_logit_softcapping=50.0)
    config = read_config(tmp_path)
    monkeypatch.setattr(names, "VERSION", "5.21.0")
    assert {} == attention_options(tiny_config("gemma2"))
    assert "sdpa" == load_weights(tmp_path, config, "cpu", torch.float32).config._attn_implementation
    monkeypatch.setattr(names, "VERSION", "5.20.2")
    assert "eager" == load_weights(tmp_path, config, "cpu", torch.float32).config._attn_implementation
    assert {"attn_implementation": "eager"} == attention_options(tiny_config("t5gemma"))
    assert {} == attention_options(tiny_config("llama"))
