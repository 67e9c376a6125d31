"""How models are loaded by the adapter that recognises them: this process's share, or the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvframe import load_plugins
from kvframe.contract import LoadedModel, ModelAdapter, ModelDescription, PluginError
from kvframe.planning.recognise import FoundAdapter

DESCRIPTION = ModelDescription(name="noted", layers=(), max_model_len=8)


class Noting(ModelAdapter):
    """Notes what it is asked to load, and whether whole."""

    returned: Any = None

    def __init__(self) -> None:
        self.asked: list[tuple[str, Path, str, str]] = []

    def recognises(self, path: Path) -> bool:
        return True

    def describe(self, path: Path) -> ModelDescription:
        return DESCRIPTION

    def load(self, path: Path, *, device: str, dtype: str) -> LoadedModel:
        self.asked.append(("load", path, device, dtype))
        return self.returned  # type: ignore[no-any-return]


class Dividing(Noting):
    """Divides models over processes, so that it loads a whole one in another way."""

    def load_whole(self, path: Path, *, device: str, dtype: str) -> LoadedModel:
        self.asked.append(("load_whole", path, device, dtype))
        return self.returned  # type: ignore[no-any-return]


class Model:
    description = DESCRIPTION


def found(adapter: Noting, model: Any = None) -> FoundAdapter:
    registry = load_plugins().registry
    adapter.returned = Model() if model is None else model
    return FoundAdapter(registry.model_adapters.get(registry.model_adapters.names()[0]), adapter)


@pytest.mark.parametrize(
    ("adapter", "whole", "method"),
    [(Dividing, True, "load_whole"), (Dividing, False, "load"), (Noting, True, "load"), (Noting, False, "load")],
)
def test_a_whole_model_is_asked_for_only_where_one_process_runs_it(
    adapter: type[Noting], whole: bool, method: str
) -> None:
    noting = adapter()
    model = found(noting).load(Path("here"), device="meta", dtype="bfloat16", whole=whole)
    assert noting.returned is model
    assert [(method, Path("here"), "meta", "bfloat16")] == noting.asked


def test_an_adapter_that_returns_no_model_is_told_by_which_method() -> None:
    with pytest.raises(PluginError, match=r"load_whole\(\) must return a model with a description"):
        found(Dividing(), "nothing").load(Path("here"), device="cpu", dtype="float32", whole=True)
