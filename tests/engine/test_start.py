"""What the start of an engine says: what serves the model, and what keeps a fast backend from use."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from kvframe_cpu.backend import CpuBackend
from kvframe_transformers.testing import save_tiny

from kvframe import Engine, Stack

FAST = ["cpu", "flex", "numba", "torch", "triton", "flash_attn", "flashinfer"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("start") / "tiny"
    save_tiny(path, "llama")
    return path


def said(folder: Path, caplog: pytest.LogCaptureFixture, **tables: object) -> list[str]:
    model = {"device": "cpu", "dtype": "float32"}
    stack = Stack.from_mapping({"cache": {"memory": "1MiB"}, "model": model, **tables})
    with caplog.at_level(logging.INFO, "kvframe"), Engine.from_pretrained(folder, stack=stack):
        return caplog.messages


def test_a_start_names_device_dtype_backend_and_cache(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    rules = [{"layers": "*", "backend": "torch"}]
    assert ["tiny runs on cpu in float32; attention by kvframe-torch:torch; a cache of 1.0 MiB"] == [
        message for message in said(folder, caplog, rules=rules) if "runs on" in message
    ]


def test_a_slow_backend_is_named_with_what_to_install(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (warning,) = [message for message in said(folder, caplog, plugins={"disabled": FAST}) if "which is slow" in message]
    assert (
        "the attention of model.layers.0.self_attn runs on kvframe:torch_reference, which is slow: it is for comparing "
        "other backends with it; `pip install -e plugins/torch` adds one for serving models"
    ) == warning


def test_a_slow_backend_is_named_with_what_a_fast_one_lacks(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    disabled = [name for name in FAST if name != "cpu"]
    monkeypatch.setattr(CpuBackend, "unusable_reason", classmethod(lambda backend: "there is no C++ compiler"))
    (warning,) = [
        message for message in said(folder, caplog, plugins={"disabled": disabled}) if "which is slow" in message
    ]
    assert warning.endswith("comparing other backends with it; kvframe-cpu:cpu: there is no C++ compiler")


def test_a_backend_that_the_stack_names_is_not_called_slow(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    rules = [{"layers": "*", "backend": "torch_reference"}]
    assert [] == [message for message in said(folder, caplog, rules=rules) if "slow" in message]
